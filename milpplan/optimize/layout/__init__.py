"""Solution of one layout: ``layout_solver``, ``stage_options``, ``compact_relaxation``, ``cutting_planes``,
``rounding``, ``layout_program``; ``view_solver`` for heterogeneous replicas and scenarios; ``layer_branching`` and
``rank_relaxation`` for interleaved schedules with uneven splits.
"""
