"""What a chapter found and where it came from: results, figures, long computations, provenance, dependencies."""
