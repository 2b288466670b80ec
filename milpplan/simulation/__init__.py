"""Simulation of a plan: step time, time breakdown and memory, exact in the cost model.

``simulator.simulate`` is the entry. ``layout_costs`` computes the integer constants of a layout from the times of
layers (``layers``) and of the network (``network``); ``stages`` sums them up for a virtual stage; ``pipeline``
finds the longest path through the step. ``bulk`` simulates many uniform plans at a time.
"""
