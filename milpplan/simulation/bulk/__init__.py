"""Simulation of many uniform plans at a time, with results equal to those of ``simulator.simulate``."""
