"""Steps with several degrees of context parallelism side by side, on teams of GPUs."""
