"""The simulator against published, measured training runs."""
