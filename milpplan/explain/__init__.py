"""Explanations of a plan: its limits, alternatives, the value of changes, and the cheapest way to better plans."""
