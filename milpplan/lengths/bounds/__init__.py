"""Lower bounds of one strategy's group: linear and work bounds, configuration LPs, and branching on long
sequences."""
