"""Integer programs: ``program``, ``solution``, ``backends`` and the solvers ``highs``, ``cbc``, ``cpsat``;
``linear_relaxation``; ``whole_program`` states a small problem as one program, ``block_program`` any problem after
its search; ``degrees`` are their rows about the layout."""
