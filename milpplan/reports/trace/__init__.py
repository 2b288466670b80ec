"""Timelines of simulated steps for trace viewers."""
