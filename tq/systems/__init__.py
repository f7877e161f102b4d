"""Models of systems: pure, no torch at import."""
