"""Lower bounds of a pipeline's time for sequences of different lengths, and upper bounds of its work."""
