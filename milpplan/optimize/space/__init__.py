"""Enumeration of the legal layouts: ``enumerate_layouts`` applies the ``rules`` by ``RuleFilter``;
``layout_space`` and ``lazy_product`` hold the result; ``plan_space`` says which plans of a layout are in the
space.
"""
