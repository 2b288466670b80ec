"""Other planners' problems, as strategy graphs."""
