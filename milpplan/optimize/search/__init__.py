"""Best-first search over layouts: ``best_first``, ``candidate_layouts``; its second phase ``branch_phase``."""
