"""The question and its answer as records: model, hardware, job, space of plans, and plan; and their readers.

``problem.Problem`` is what a user asks, ``plan.Plan`` is what the planner decides. ``reading`` and ``catalog``
load descriptions from files and by name; ``overlay`` holds fitted changes of a hardware description.
"""
