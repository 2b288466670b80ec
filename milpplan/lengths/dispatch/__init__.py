"""Dispatch of one batch under the strategies of a plan, in milliseconds, with a proved gap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.lengths.dispatch.batch_planning import PlannedBatch
    from milpplan.lengths.dispatch.dispatcher import Dispatch, Dispatcher, PackedSampler
    from milpplan.lengths.dispatch.grouped_batches import GroupedBatches
    from milpplan.lengths.dispatch.megatron_schedule import HybridSchedule, check_runtime
    from milpplan.lengths.dispatch.team_batches import TeamBatches
    from milpplan.lengths.dispatch.turn_batches import TurnBatches
else:
    __getattr__ = lazy_exports(__name__, __file__)
