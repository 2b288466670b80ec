"""Lower bounds of a pipeline's time for sequences of different lengths, and of the work it can do within a
time."""
