"""The step of a pipeline: order of work, step graph, critical paths, and lanes over time."""
