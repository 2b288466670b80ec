"""The best step of teams over all families, with its proof, and as records."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from milpplan.lengths.pool import Pool
from milpplan.lengths.records import LengthGroup, SideBySide, TeamTurn
from milpplan.lengths.team_bound import SharedWork, shared_work
from milpplan.lengths.team_packing import from_shares, shortest
from milpplan.lengths.team_prices import priced
from milpplan.lengths.teams import Family, TeamStep, Turn, families
from milpplan.units import NS_PER_S

# How often a family is packed or proved, and the exchanges of each time.
_VISITS, _ROUNDS = 10, 4000


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
    """A family on which there is something to do, and how often something was done; ``bound_ns`` of its steps."""

    family: Family
    shared: SharedWork
    bound_ns: float
    visits: int = 0


def best_teams(pool: Pool, below_ns: float, gap: float, deadline: float) -> BestTeams:
    """The best step of all families shorter than ``below_ns``.

    The family with the least bound is packed first, then proved, packed from that, proved again below the step
    that is there now, and so on, until no bound leaves half the ``gap``, or until the ``deadline`` (of
    ``perf_counter``).
    """
    found = [_Open(one, shared, shared.bound_ns) for one in families(pool) for shared in [shared_work(one)]]
    best: TeamStep | None = None
    while True:
        enough_ns = below_ns * (1.0 - gap / 2)
        open_ = [one for one in found if one.visits < _VISITS and one.bound_ns < enough_ns]
        if not open_ or min(one.bound_ns for one in found) >= enough_ns:
            break
        one = min(open_, key=lambda one: one.bound_ns)
        if any(other.visits for other in found) and time.perf_counter() > deadline:
            break
        step = _visited(one, below_ns, deadline)
        if step is not None and step.time_ns < below_ns:
            best, below_ns = step, step.time_ns
    return BestTeams(best, min((one.bound_ns for one in found), default=float("inf")), len(found))


def planned(family: Family, attempts: int, rounds: int) -> tuple[TeamStep, float]:
    """A step of one family and the bound of all its steps, ns; attempts and rounds are counted, not timed."""
    never, shared = float("inf"), shared_work(family)
    step = shortest(family, shared, 0.0, never, attempts, rounds)
    found = priced(family, shared, step.time_ns, never)
    if len(found.rows) and found.bound_ns < step.time_ns:
        step = min(step, from_shares(family, found, step.time_ns, rounds, never), key=lambda one: one.time_ns)
    return step, min(found.bound_ns, step.time_ns)


def _visited(one: _Open, below_ns: float, deadline: float) -> TeamStep | None:
    """A step of the family, or a higher bound of it, or both."""
    one.visits += 1
    if one.visits == 1:
        return shortest(one.family, one.shared, one.bound_ns, deadline)
    # First all steps below the best one, then half as many by their time.
    limit_ns = below_ns if one.visits == 2 else (below_ns + one.bound_ns) / 2
    found = priced(one.family, one.shared, limit_ns, deadline)
    one.bound_ns = max(one.bound_ns, found.bound_ns)
    if one.bound_ns >= limit_ns or not len(found.rows):
        return None
    return from_shares(one.family, found, limit_ns, _ROUNDS, deadline, one.visits)


def team_turns(step: TeamStep) -> tuple[TeamTurn, ...]:
    """Every turn with its GPUs, in the order in which they start."""
    family = step.family
    found = []
    for turn, start_ns, end_ns in zip(step.turns, step.starts_ns, step.ends_ns, strict=True):
        part = family.seats(turn)
        found.append(
            TeamTurn(
                strategy=family.pool.members[turn.member].candidate.name,
                first_gpu=part.start * family.seat_gpus,
                num_gpus=(part.stop - part.start) * family.seat_gpus,
                start_s=start_ns / NS_PER_S,
                end_s=end_ns / NS_PER_S,
                micro_batches=_lengths(family.pool, turn),
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
        teams[turn.team] += _lengths(pool, turn)
    span_ns = max(step.ends_ns[place] for place in mine) - min(step.starts_ns[place] for place in mine)
    return LengthGroup(
        strategy=candidate.name,
        plan=candidate.plan,
        buckets=tuple(
            (int(length), int(count)) for length, count in zip(pool.load.lengths, held, strict=True) if count
        ),
        micro_batches=tuple(teams),
        micro_batch_tokens=step.family.grains(member) * pool.load.grain,
        time_s=span_ns / NS_PER_S,
        reduce_s=step.family.reduce_ns / NS_PER_S if member == step.order[-1] else 0.0,
    )


def _lengths(pool: Pool, turn: Turn) -> tuple[tuple[int, ...], ...]:
    """Lengths of the sequences of every micro-batch of a turn."""
    return tuple(tuple(np.repeat(pool.load.lengths, row).tolist()) for row in turn.packed)
