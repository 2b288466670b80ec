"""The groups of a step of any kind, as records."""

from __future__ import annotations

from milpplan.lengths.heterogeneous.replicas import HeterogeneousStep, heterogeneous_groups
from milpplan.lengths.records import LengthGroup
from milpplan.lengths.side_by_side.team_steps import team_groups
from milpplan.lengths.side_by_side.teams import TeamStep
from milpplan.lengths.steps import AnyStep, Step
from milpplan.lengths.strategy_tables import StrategyTables
from milpplan.units import NS_PER_S


def home_of(step: AnyStep) -> int:
    """Return the member of the pool that holds the optimizer's states."""
    return step.order[-1] if isinstance(step, TeamStep) else step.home


def groups_of(pool: StrategyTables, step: AnyStep) -> tuple[LengthGroup, ...]:
    """Return the groups of a step in the order in which they run."""
    if isinstance(step, TeamStep):
        return team_groups(step)
    if isinstance(step, HeterogeneousStep):
        return heterogeneous_groups(step)
    return tuple(_group(pool, step, member) for member in step.order)


def _group(pool: StrategyTables, step: Step, member: int) -> LengthGroup:
    """"""
    strategy = pool.members[member]
    quanta = strategy.own_memory_quanta if len(step.order) == 1 else strategy.shared_memory_quanta
    return pool.group(member, step.packed[member], quanta, pool.reduce_ns(member) / NS_PER_S)
