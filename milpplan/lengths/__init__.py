"""Steps of sequences of many lengths, planned on this project's cost model: one strategy, or several in turn."""
