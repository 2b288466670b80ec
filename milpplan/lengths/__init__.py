"""Training steps for sequences of many lengths, planned on this project's cost model."""
