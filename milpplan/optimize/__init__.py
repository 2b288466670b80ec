"""Optimiser: read ``solve``, ``result`` and ``context``, then the folders ``search``, ``layout``, ``bounds``."""
