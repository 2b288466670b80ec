"""The best step of teams over all families, with its proof, and as records."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from milpplan.lengths.records import LengthGroup, SideBySide, TeamTurn
from milpplan.lengths.side_by_side.sequence_duals import priced
from milpplan.lengths.side_by_side.team_bound import shared_work
from milpplan.lengths.side_by_side.team_packing import Packer
from milpplan.lengths.side_by_side.team_search import Effort, dealt, reworked, shortest
from milpplan.lengths.side_by_side.teams import Family, TeamStep, families
from milpplan.lengths.strategy_tables import StrategyTables
from milpplan.units import NS_PER_S

VISITS = 10
"""How often a family is packed or proved."""

# The effort at first and later.
_FIRST, _LATER = Effort(24, 500, 10), Effort(0, 1000, 60)
# Of one family: how often it is proved where the step is farther than this from the bound, as a share.
_TURNS, _FAR = 2, 0.04
# Parts of the gap that are left open at first, and later.
_CLOSE, _ENOUGH = 0.4, 0.8


@dataclass(frozen=True, slots=True, eq=False)
class BestTeams:
    """The shortest ``step`` of teams below what was asked, None if none was found; no step of any of
    ``num_families`` takes less than ``bound_ns`` (infinite without a family)."""

    step: TeamStep | None
    bound_ns: float
    num_families: int

    def record(self) -> SideBySide:
        """In seconds, with the turns of the step."""
        step = self.step
        return SideBySide(
            None if step is None else step.time_ns / NS_PER_S,
            self.bound_ns / NS_PER_S if np.isfinite(self.bound_ns) else None,
            self.num_families,
            () if step is None else team_turns(step),
        )


@dataclass(slots=True, eq=False)
class _Open:
    """A family on which there is something to do, how often something was done, ``bound_ns`` of its steps, and the
    shortest one known."""

    packer: Packer
    bound_ns: float
    visits: int = 0
    step: TeamStep | None = None

    @staticmethod
    def of(family: Family) -> _Open:
        """With the linear bound."""
        shared = shared_work(family)
        return _Open(Packer(family, shared), shared.bound_ns)

    def is_open(self, below_ns: float, gap: float, visits: int) -> bool:
        """Whether there is something to do about steps below the best one, after fewer than so many visits."""
        left = gap * (_CLOSE if self.visits < 2 else _ENOUGH)
        return self.visits < visits and self.bound_ns < below_ns * (1.0 - left)


class TeamSearch:
    """All families of a pool, and how more comes to be known of them; ``best``: the shortest step below what was
    asked."""

    def __init__(self, pool: StrategyTables, gap: float) -> None:
        self.gap = gap
        self.best: TeamStep | None = None
        self.families = [_Open.of(family) for family in families(pool)]

    @property
    def num_visits(self) -> int:
        """How often something was done."""
        return sum(one.visits for one in self.families)

    def run(self, below_ns: float, deadline: float, visits: int = VISITS) -> BestTeams:
        """The best step of all families shorter than ``below_ns``.

        The family with the least bound is packed first, then proved, packed from that, packed again, proved below
        the step that is there now, and so on, until no bound leaves most of the gap (at first less of it),
        every family was visited so often, or until the ``deadline`` (of ``perf_counter``).
        """
        found = self.families
        while True:
            open_ = [one for one in found if one.is_open(below_ns, self.gap, visits)]
            if not open_ or (any(one.visits for one in found) and time.perf_counter() > deadline):
                break
            one = min(open_, key=lambda one: one.bound_ns)
            _visit(one, below_ns, self.gap, deadline)
            if one.step is not None and one.step.time_ns < below_ns:
                self.best, below_ns = one.step, one.step.time_ns
        return BestTeams(self.best, min((one.bound_ns for one in found), default=float("inf")), len(found))


def planned(family: Family, first: Effort, later: Effort, gap: float) -> tuple[TeamStep, float]:
    """A step of one family and the bound of all its steps, ns; efforts are counted, not timed. Once, or as long as
    the step is far from the bound a few times, it is improved until it is within the ``gap``."""
    never, one = float("inf"), _Open.of(family)
    step = shortest(one.packer, first, one.bound_ns / (1.0 - gap), never)
    for turn in range(_TURNS):
        limit_ns = (step.time_ns + one.bound_ns) / 2 if turn else step.time_ns
        found = priced(family, one.packer.shared, limit_ns, never)
        one.bound_ns = max(one.bound_ns, found.bound_ns)
        if len(found.rows) and one.bound_ns < step.time_ns * (1.0 - gap):
            turns = dealt(one.packer, found, limit_ns)
            other = reworked(one.packer, turns, later, one.bound_ns / (1.0 - gap), never)
            step = min(step, other, key=_time_ns)
        if one.bound_ns >= step.time_ns * (1.0 - _FAR):
            break
    return step, min(one.bound_ns, step.time_ns)


def _visit(one: _Open, below_ns: float, gap: float, deadline: float) -> None:
    """Look for a shorter step of the family, or prove a higher bound and make a step from what that leaves."""
    one.visits += 1
    if one.visits == 1:
        one.step = shortest(one.packer, _FIRST, one.bound_ns / (1.0 - gap * _CLOSE), deadline)
        return
    if one.visits % 2 == 0:
        # First all steps below the best one, then the shorter half of what is open.
        limit_ns = below_ns if one.visits == 2 else (below_ns + one.bound_ns) / 2
        found = priced(one.packer.family, one.packer.shared, limit_ns, deadline)
        one.bound_ns = max(one.bound_ns, found.bound_ns)
        if one.bound_ns >= limit_ns or not len(found.rows):
            return
        turns = dealt(one.packer, found, limit_ns)
    else:
        assert one.step is not None
        turns = list(one.step.turns)
    step = reworked(one.packer, turns, _LATER, one.bound_ns / (1.0 - gap * _CLOSE), deadline, one.visits)
    one.step = step if one.step is None else min(one.step, step, key=_time_ns)


def _time_ns(step: TeamStep) -> int:
    return step.time_ns


def team_turns(step: TeamStep) -> tuple[TeamTurn, ...]:
    """Every turn with its GPUs, in the order in which they start."""
    family = step.family
    found = []
    for turn, start_ns, end_ns in zip(step.turns, step.starts_ns, step.ends_ns, strict=True):
        part = family.slots(turn)
        found.append(
            TeamTurn(
                strategy=family.pool.members[turn.member].candidate.name,
                first_gpu=part.start * family.gpus_per_slot,
                num_gpus=(part.stop - part.start) * family.gpus_per_slot,
                start_s=start_ns / NS_PER_S,
                end_s=end_ns / NS_PER_S,
                micro_batches=family.pool.micro_batches([turn.packed])[0],
            )
        )
    return tuple(sorted(found, key=lambda one: (one.start_s, one.first_gpu)))


def team_groups(step: TeamStep) -> tuple[LengthGroup, ...]:
    """What runs under every strategy; its replicas are the teams of its degree. Groups overlap: ``time_s`` is
    from the first start to the last end of a group's turns. The reduction is the last one's."""
    return tuple(_group(step, member) for member in step.order)


def _group(step: TeamStep, member: int) -> LengthGroup:
    pool = step.family.pool
    candidate = pool.members[member].candidate
    mine = [place for place, turn in enumerate(step.turns) if turn.member == member]
    held = sum((step.turns[place].packed.sum(axis=0) for place in mine), np.zeros_like(pool.load.counts))
    teams: list[tuple[tuple[int, ...], ...]] = [()] * candidate.layout.dp
    for place in mine:
        turn = step.turns[place]
        teams[turn.team] += pool.micro_batches([turn.packed])[0]
    span_ns = max(step.ends_ns[place] for place in mine) - min(step.starts_ns[place] for place in mine)
    return LengthGroup(
        strategy=candidate.name,
        plan=candidate.plan,
        buckets=tuple(
            (int(length), int(count)) for length, count in zip(pool.load.lengths, held, strict=True) if count
        ),
        micro_batches=tuple(teams),
        micro_batch_tokens=step.family.max_quanta(member) * pool.load.token_quantum,
        time_s=span_ns / NS_PER_S,
        reduce_s=step.family.reduce_ns / NS_PER_S if member == step.order[-1] else 0.0,
    )
