"""Best-first search over layouts: ``best_first``, ``candidate_layouts``, ``explored_layouts``, ``prune_reasons``;
its second phase ``branch_phase`` with ``layout_queue``, ``layout_workers``."""
