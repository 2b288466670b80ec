"""All steps of teams of a few sequences, and random ones of many."""

from __future__ import annotations

import itertools
import math

import numpy as np

from milpplan.lengths import Workload, micro_batch_times, workload_of
from milpplan.lengths.side_by_side import Family, Turn
from tests.lengths.cases import GRAIN

FLAT = {"pp": (1,), "tp": (1,)}
"""A space without stages and tensor parallelism."""


def random_turns(found: Family, random: np.random.Generator) -> list[Turn]:
    """Every sequence in some micro-batch of some turn on some team, in any order of degrees."""
    load, rows = found.pool.load, []
    for k in random.permutation(np.repeat(np.arange(len(load.counts)), load.counts)).tolist():
        size = int(load.lengths[k]) // load.token_quantum
        open_ = [
            row for row in rows
            if found.max_quanta(row[0]) >= size + int(row[2] @ load.lengths) // load.token_quantum
            and random.random() < 0.3
        ]  # fmt: skip
        if not open_:
            members = [one for one in found.members if found.max_quanta(one) >= size]
            member = int(random.choice(members))
            teams = found.pool.members[member].candidate.layout.dp
            rows.append((member, int(random.integers(teams)), np.zeros_like(load.counts)))
            open_ = rows[-1:]
        open_[0][2][k] += 1
    return [Turn(member, team, packed[None]) for member, team, packed in rows]


def partitions(items: tuple[int, ...]) -> list[list[tuple[int, ...]]]:
    """All ways to put different items into micro-batches."""
    if not items:
        return [[]]
    found = []
    for parts in partitions(items[1:]):
        found.append([(items[0],), *parts])
        joined = [(items[0], *part) for part in parts]
        found += [[*parts[:at], one, *parts[at + 1 :]] for at, one in enumerate(joined)]
    return found


class AllSteps:
    """Least time of all steps of a family for a few sequences of different lengths, by plain enumeration: where
    every sequence runs, in which micro-batches, under which strategy. On nested teams no order of turns is shorter
    than the largest degree first, and then a seat is done after the sum of what runs on it."""

    def __init__(self, found: Family) -> None:
        self.family = found
        self.number = len(found.pool.load.lengths)
        assert (found.pool.load.counts == 1).all()
        self.degrees = sorted(set(found.degrees))
        self.team_ns = {degree: self._team_times(degree) for degree in self.degrees}

    def _team_times(self, degree: int) -> dict[tuple[int, ...], float]:
        load = self.family.pool.load
        subsets = [
            s for size in range(1, self.number + 1) for s in itertools.combinations(range(self.number), size)
        ]
        rows = np.array([[int(k in subset) for k in range(self.number)] for subset in subsets])
        best = np.full(len(subsets), np.inf)
        for member, own in zip(self.family.members, self.family.degrees, strict=True):
            fits = rows @ load.lengths <= self.family.max_quanta(member) * load.token_quantum
            if own != degree or not fits.any():
                continue
            candidate = self.family.pool.members[member].candidate
            times = micro_batch_times(self.family.pool.problem, candidate, load.lengths, rows[fits])
            best[fits] = np.minimum(best[fits], times.forward[0] + times.backward[0])
        single = dict(zip(subsets, best.tolist(), strict=True))
        whole = {s: min(sum(single[tuple(sorted(p))] for p in ways) for ways in partitions(s)) for s in subsets}
        return {(): 0.0, **whole}

    def least_ns(self) -> float:
        """The step, its reduction and finish included."""
        seats = self.family.num_slots
        teams = [(degree, team) for degree in self.degrees for team in range(seats // degree)]
        least = math.inf
        for chosen in itertools.product(range(len(teams)), repeat=self.number):
            ends = [0.0] * seats
            for place in set(chosen):
                degree, team = teams[place]
                taken = self.team_ns[degree][tuple(k for k in range(self.number) if chosen[k] == place)]
                for seat in range(degree * team, degree * (team + 1)):
                    ends[seat] += taken
            least = min(least, max(ends))
        return least + self.family.fixed_cost_ns


def few(random: np.random.Generator) -> Workload:
    """Two to four sequences of different lengths, one of them long."""
    lengths = np.concatenate(
        [random.integers(100, 9_000, random.integers(1, 4)), random.integers(9_000, 40_000, 1)]
    )
    return workload_of(np.unique(lengths // GRAIN + 1) * GRAIN, GRAIN)
