"""Steps of a single strategy: first packings of pipelines, and the search for steps and their lower bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.lengths.single.load_shapes import packings_by_shape
    from milpplan.lengths.single.single_strategy_search import Incumbents, SingleStrategySearch
else:
    __getattr__ = lazy_exports(__name__, __file__)
