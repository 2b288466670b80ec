"""Interleaved schedules with uneven splits: ``layer_branching``, ``rank_relaxation``, ``event_time_lp``,
``layer_local_search``."""
