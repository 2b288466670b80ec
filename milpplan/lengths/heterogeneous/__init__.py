"""Steps of heterogeneous replicas, whose pipelines have different parallelism at the same time."""
