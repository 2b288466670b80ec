"""Steps with several degrees of context parallelism side by side, on teams of GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.lengths.side_by_side.teams import (
        Family,
        Priced,
        SharedTables,
        SharedWork,
        Turn,
        families,
        priced,
        shared_work,
        simulate_turns,
        turn_times_ns,
    )
else:
    __getattr__ = lazy_exports(__name__, __file__)
