"""The version, which also names the cost model that a proof speaks about."""

__version__ = "0.1.0"
