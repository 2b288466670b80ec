"""Steps of a single strategy: packings, their local search, and their lower bounds."""
