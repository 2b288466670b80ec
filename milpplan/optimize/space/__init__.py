"""Enumeration of the legal layouts: ``enumerate_layouts`` applies the ``rules`` by ``RuleFilter``;
``layout_space`` and ``lazy_product`` hold the result; ``plan_space`` says which plans of a layout are in the
space.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.optimize.space.lazy_product import Blocks, apply_rules, boxes
    from milpplan.optimize.space.plan_space import (
        even_splits,
        in_parts,
        in_space,
        layers_up_to,
        recomputes_as_declared,
        run_counts,
    )
else:
    __getattr__ = lazy_exports(__name__, __file__)
