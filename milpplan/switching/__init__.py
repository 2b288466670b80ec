"""Switches between two layouts: which tensor blocks move between which ranks, and the minimum time."""
