"""The best step of teams over all families, with its proof, and as records."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milpplan.lengths.pool import Pool
from milpplan.lengths.records import LengthGroup, SideBySide, TeamTurn
from milpplan.lengths.team_bound import shared_work
from milpplan.lengths.team_packing import shortest
from milpplan.lengths.teams import TeamStep, Turn, families
from milpplan.units import NS_PER_S


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


def best_teams(pool: Pool, below_ns: float, gap: float, deadline: float) -> BestTeams:
    """The best step of all families shorter than ``below_ns``; families that could not save the ``gap`` are not
    searched, nor any after the ``deadline`` (of ``perf_counter``)."""
    found = sorted(((shared_work(one), one) for one in families(pool)), key=lambda pair: pair[0].bound_ns)
    least = min((shared.bound_ns for shared, _ in found), default=float("inf"))
    best: TeamStep | None = None
    for shared, family in found:
        if shared.bound_ns >= below_ns * (1.0 - gap):
            break
        step = shortest(family, shared, shared.bound_ns / (1.0 - gap / 2), deadline)
        if step.time_ns < below_ns:
            best, below_ns = step, step.time_ns
    return BestTeams(best, least, len(found))


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
