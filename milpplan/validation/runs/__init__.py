"""Measured training runs as problems and plans: reader, records, and assumptions about missing values."""
