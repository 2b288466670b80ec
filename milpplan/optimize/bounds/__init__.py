"""Lower bounds without a solver: ``closed_form``, ``lagrangian_memory``, ``uniform_plans``, ``split_bounds``,
``cluster_bounds``.
"""
