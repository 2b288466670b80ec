"""Interleaved schedules with uneven splits: ``layer_branching``, ``branching_rules``, ``rank_relaxation``,
``event_time_lp``, ``layer_local_search``, ``relaxed_space_bound``."""
