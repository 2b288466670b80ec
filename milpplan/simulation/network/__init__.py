"""Position of process groups in the network, and times of collectives and transfers."""
