"""Steps of several strategies in turn: screening of sets, branch and bound on sets, dispatch of batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.lengths.turns.screening import StrategySet, branched, screened, split
    from milpplan.lengths.turns.turn_search import Orders, TurnSearch
else:
    __getattr__ = lazy_exports(__name__, __file__)
