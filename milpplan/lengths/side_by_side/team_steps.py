"""The best step of teams over all families, with its proof, and its records."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from milpplan.lengths.records import LengthGroup, SideBySide, TeamTurn
from milpplan.lengths.side_by_side.sequence_duals import priced
from milpplan.lengths.side_by_side.team_bound import shared_work
from milpplan.lengths.side_by_side.team_quick import Packer
from milpplan.lengths.side_by_side.team_search import Effort, dealt, improve_turns, shortest
from milpplan.lengths.side_by_side.teams import Family, TeamStep, families
from milpplan.lengths.strategy_tables import StrategyTables
from milpplan.units import NS_PER_S

VISITS = 10
"""Maximum number of times that a family is packed or proved."""

# Effort of the first and of later searches.
_FIRST, _LATER = Effort(24, 500, 10), Effort(0, 1000, 60)
# Maximum number of proofs of one family, and the relative gap that triggers another one.
_TURNS, _FAR = 2, 0.04
# Shares of the gap that are left open at first, and later.
_CLOSE, _ENOUGH = 0.4, 0.8


@dataclass(frozen=True, slots=True, eq=False)
class BestTeams:
    """Result of a search: the shortest ``step`` of teams below the given time, None if none was found."""

    step: TeamStep | None
    bound_ns: float
    """Lower bound of all steps of the ``num_families`` families; infinite without a family."""
    num_families: int

    def record(self) -> SideBySide:
        """Return the record, in seconds, with the turns of the step."""
        step = self.step
        return SideBySide(
            None if step is None else step.time_ns / NS_PER_S,
            self.bound_ns / NS_PER_S if np.isfinite(self.bound_ns) else None,
            self.num_families,
            () if step is None else team_turns(step),
        )


@dataclass(slots=True, eq=False)
class _Open:
    """State of a family in the search."""

    packer: Packer
    bound_ns: float
    """Lower bound of its steps."""
    visits: int = 0
    """Number of packings and proofs."""
    step: TeamStep | None = None
    """Shortest step found."""

    @staticmethod
    def of(family: Family) -> _Open:
        """Start with the linear bound."""
        shared = shared_work(family)
        return _Open(Packer(family, shared), shared.bound_ns)

    def is_open(self, below_ns: float, gap: float, max_visits: int) -> bool:
        """Return whether the family may improve on ``below_ns`` within a number of visits."""
        open_gap = gap * (_CLOSE if self.visits < 2 else _ENOUGH)
        return self.visits < max_visits and self.bound_ns < below_ns * (1.0 - open_gap)


class TeamSearch:
    """Search over all families of a pool; ``best`` is the shortest step below the given time."""

    def __init__(self, pool: StrategyTables, gap: float) -> None:
        self.gap = gap
        self.best: TeamStep | None = None
        self.families = [_Open.of(family) for family in families(pool)]

    @property
    def num_visits(self) -> int:
        """Total number of packings and proofs."""
        return sum(family.visits for family in self.families)

    def run(self, below_ns: float, deadline: float, visits: int = VISITS) -> BestTeams:
        """Find the best step of all families below ``below_ns``.

        The family with the lowest bound is packed first, then proved, packed from that proof, packed again, proved
        below its step, and so on, until no bound leaves most of the gap, every family had its visits, or the
        ``deadline`` (of ``perf_counter``).
        """
        families = self.families
        while True:
            open_families = [family for family in families if family.is_open(below_ns, self.gap, visits)]
            if not open_families or (any(family.visits for family in families) and time.perf_counter() > deadline):
                break
            family = min(open_families, key=lambda family: family.bound_ns)
            _visit(family, below_ns, self.gap, deadline)
            if family.step is not None and family.step.time_ns < below_ns:
                self.best, below_ns = family.step, family.step.time_ns
        return BestTeams(
            self.best, min((family.bound_ns for family in families), default=float("inf")), len(families)
        )


def plan_family(family: Family, first: Effort, later: Effort, gap: float) -> tuple[TeamStep, float]:
    """Return a step of one family and the bound of all its steps in ns, by counted effort.

    The step is improved until it is within the ``gap``, once, or a few times while it is far from the bound.
    """
    never, state = float("inf"), _Open.of(family)
    step = shortest(state.packer, first, state.bound_ns / (1.0 - gap), never)
    for attempt in range(_TURNS):
        limit_ns = (step.time_ns + state.bound_ns) / 2 if attempt else step.time_ns
        proof = priced(family, state.packer.shared, limit_ns, never)
        state.bound_ns = max(state.bound_ns, proof.bound_ns)
        if len(proof.rows) and state.bound_ns < step.time_ns * (1.0 - gap):
            turns = dealt(state.packer, proof, limit_ns)
            reworked_step = improve_turns(state.packer, turns, later, state.bound_ns / (1.0 - gap), never)
            step = min(step, reworked_step, key=_time_ns)
        if state.bound_ns >= step.time_ns * (1.0 - _FAR):
            break
    return step, min(state.bound_ns, step.time_ns)


def _visit(state: _Open, below_ns: float, gap: float, deadline: float) -> None:
    """Search a shorter step of the family, or prove a higher bound and build a step from its solution."""
    state.visits += 1
    if state.visits == 1:
        state.step = shortest(state.packer, _FIRST, state.bound_ns / (1.0 - gap * _CLOSE), deadline)
        return
    if state.visits % 2 == 0:
        # First all steps below the best one, then the shorter half of the open range.
        limit_ns = below_ns if state.visits == 2 else (below_ns + state.bound_ns) / 2
        proof = priced(state.packer.family, state.packer.shared, limit_ns, deadline)
        state.bound_ns = max(state.bound_ns, proof.bound_ns)
        if state.bound_ns >= limit_ns or not len(proof.rows):
            return
        turns = dealt(state.packer, proof, limit_ns)
    else:
        assert state.step is not None
        turns = list(state.step.turns)
    step = improve_turns(
        state.packer, turns, _LATER, state.bound_ns / (1.0 - gap * _CLOSE), deadline, state.visits
    )
    state.step = step if state.step is None else min(state.step, step, key=_time_ns)


def _time_ns(step: TeamStep) -> int:
    return step.time_ns


def team_turns(step: TeamStep) -> tuple[TeamTurn, ...]:
    """Return every turn with its GPUs, in the order in which they start."""
    family = step.family
    records = []
    for turn, start_ns, end_ns in zip(step.turns, step.starts_ns, step.ends_ns, strict=True):
        slots = family.slots(turn)
        records.append(
            TeamTurn(
                strategy=family.pool.members[turn.member].candidate.name,
                first_gpu=slots.start * family.gpus_per_slot,
                num_gpus=(slots.stop - slots.start) * family.gpus_per_slot,
                start_s=start_ns / NS_PER_S,
                end_s=end_ns / NS_PER_S,
                micro_batches=family.pool.micro_batches([turn.packed])[0],
            )
        )
    return tuple(sorted(records, key=lambda record: (record.start_s, record.first_gpu)))


def team_groups(step: TeamStep) -> tuple[LengthGroup, ...]:
    """Return the groups of the strategies; the replicas of a group are the teams of its degree.

    Groups overlap: ``time_s`` is from the first start to the last end of a group's turns. The reduction belongs to
    the last group.
    """
    return tuple(_group(step, member) for member in step.order)


def _group(step: TeamStep, member: int) -> LengthGroup:
    pool = step.family.pool
    candidate = pool.members[member].candidate
    indices = [index for index, turn in enumerate(step.turns) if turn.member == member]
    counts = sum((step.turns[index].packed.sum(axis=0) for index in indices), np.zeros_like(pool.load.counts))
    teams: list[tuple[tuple[int, ...], ...]] = [()] * candidate.layout.dp
    for index in indices:
        turn = step.turns[index]
        teams[turn.team] += pool.micro_batches([turn.packed])[0]
    span_ns = max(step.ends_ns[index] for index in indices) - min(step.starts_ns[index] for index in indices)
    return LengthGroup(
        strategy=candidate.name,
        plan=candidate.plan,
        buckets=tuple(
            (int(length), int(count)) for length, count in zip(pool.load.lengths, counts, strict=True) if count
        ),
        micro_batches=tuple(teams),
        micro_batch_tokens=step.family.max_quanta(member) * pool.load.token_quantum,
        time_s=span_ns / NS_PER_S,
        reduce_s=step.family.reduce_ns / NS_PER_S if member == step.order[-1] else 0.0,
    )
