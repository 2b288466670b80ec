"""Best-first search over layouts: ``best_first``, ``closed_layouts``; its second phase ``branch_phase``."""
