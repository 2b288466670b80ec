"""Packing of sequences into replicas and micro-batches: constructions and local searches."""
