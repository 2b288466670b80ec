"""How many replicas of a pipeline long sequences need at least, however short everything else is.

A replica with several of them takes their time on the last stage, what the first one takes forward on the others
before that, and the last one backward after it: that is a path of its schedule (if both are in one micro-batch, it
takes no less). So a set S of sequences that take y_s on the last stage, and shares f and b of that forward and
backward on the others, takes together at least

    sum of S + min over a, b in S, a not b, of (f y_a + b y_b),

and no less than any part of it: short sequences at both ends do not spare the path from one long one to another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milpplan.simulation.layout_columns import BoolArray, FloatArray

# Sequences of which every way to share them out is looked at, and lengths of which volumes are.
_EVERY, _THRESHOLDS = 9, 8


@dataclass(frozen=True, eq=False)
class MinReplicas:
    """Sequences of ``sizes`` [m] on the last stage, ascending, ns, and the ``shares`` of the other stages together
    (forward, backward); ``times`` [k, r]: no r replicas hold the k longest earlier, ns."""

    sizes: FloatArray
    shares: tuple[float, float]
    times: FloatArray

    @staticmethod
    def of(sizes: FloatArray, shares: tuple[float, float]) -> MinReplicas:
        """With all ways to share out the longest ones."""
        longest = sizes[::-1][:_EVERY]
        return MinReplicas(sizes, shares, _least_times(longest, shares))

    def min_replicas(self, number: int, time_ns: float) -> int:
        """How many replicas the ``number`` longest need at least within a time."""
        if number == 0:
            return 0
        longest = min(number, len(self.times) - 1)
        found = int(np.searchsorted(-self.times[longest], -time_ns)) + 1
        sizes = self.sizes[len(self.sizes) - number :]
        for least in np.unique(sizes)[-_THRESHOLDS:].tolist():
            held, shares = sizes[sizes >= least], sum(self.shares)
            alone = held + least * (1.0 + shares) + (held - least) * min(self.shares) > time_ns
            rest = held[~alone]
            found = max(found, int(alone.sum()) + fewest_bins(rest, time_ns - least * shares))
        return found


def _least_times(sizes: FloatArray, shares: tuple[float, float]) -> FloatArray:
    """When the first k of ``sizes`` [m], falling, are on r replicas at the earliest, [m + 1, m]; falling in r."""
    number = len(sizes)
    sets = np.arange(1 << number)
    members = (sets[:, None] >> np.arange(number)) & 1 > 0
    alone = _alone(sizes, members, shares)
    # By replicas: the least over ways to split off the replica that holds the first of a set.
    least = alone
    found = [least]
    for _ in range(number - 1):
        least = _split(alone, least)
        found.append(least)
    prefixes = [(1 << k) - 1 for k in range(number + 1)]
    return np.stack(found, axis=1)[prefixes]


def _alone(sizes: FloatArray, members: BoolArray, shares: tuple[float, float]) -> FloatArray:
    """When each set of ``members`` [s, m] is on one replica at the earliest, [s]; one sequence at any time."""
    found = np.zeros(len(members))
    for place, held in enumerate(members):
        mine = sizes[held]
        # The longest two, three ...
        around = mine[1:] * sum(shares) + (mine[:-1] - mine[1:]) * min(shares)
        found[place] = (np.cumsum(mine)[1:] + around).max(initial=0.0)
    return found


def _split(alone: FloatArray, others: FloatArray) -> FloatArray:
    """When sets are on one replica more than ``others`` [s] at the earliest."""
    found = others.copy()
    for whole in range(1, len(alone)):
        first = whole & -whole
        rest = part = whole ^ first
        while True:
            held = first | part
            found[whole] = min(found[whole], max(alone[held], others[rest ^ part]))
            if part == 0:
                break
            part = (part - 1) & rest
    return found


def fewest_bins(sizes: FloatArray, room: float) -> int:
    """How many bins of some ``room`` ``sizes`` [m] need at least: for any least size, those of more than the room
    without it are alone, of those beyond half of the room no two are together, and what the smaller ones have
    beyond the room of these has bins of its own (Martello and Toth, Lower bounds and reduction procedures for the
    bin packing problem, 1990)."""
    if not len(sizes) or np.isinf(room):
        return min(1, len(sizes))
    most = 1
    for least in [0.0, *np.unique(sizes[sizes <= room / 2]).tolist()]:
        alone = sizes > room - least
        large, small = (sizes > room / 2) & ~alone, (sizes >= least) & (sizes <= room / 2)
        beyond = float(sizes[small].sum()) - (large.sum() * room - float(sizes[large].sum()))
        number = int(alone.sum() + large.sum())
        most = max(most, number + (int(np.ceil(beyond / room - 1e-9)) if beyond > 0.0 else 0))
    return most
