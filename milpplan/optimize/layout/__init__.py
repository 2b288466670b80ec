"""Solution of one layout: ``layout_solver``, ``stage_options``, ``compact_relaxation``, ``cutting_planes``,
``ceiling_cuts``, ``rounding``, ``warm_start``, ``layout_program``; ``replica_solver`` for heterogeneous
replicas.
"""
