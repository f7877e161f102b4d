"""The pages: the build, the lint of their numbers, the README table, calculators and comparisons."""
