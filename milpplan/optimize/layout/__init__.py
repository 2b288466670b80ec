"""Solution of one layout: ``layout_solver``, ``stage_options``, ``compact_relaxation``, ``layer_rows``,
``cutting_planes``, ``ceiling_cuts``, ``rounding``, ``warm_start``, ``layout_program``; ``replica_solver`` and
``part_solving`` serve special spaces.
"""
