"""Enumeration of the legal layouts: ``enumerate_layouts`` applies the ``*_rules`` by ``rule_filter``;
``layout_space``, ``lazy_product`` and ``compute_groups`` hold the result."""
