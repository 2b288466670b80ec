"""Costs of a layer on one GPU: kernel times, layer times, activations, parameters, embedding and head."""
