"""Lengths of the sequences of a step: read from files, drawn from distributions, put into buckets."""
