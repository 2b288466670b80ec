"""Minimum number of replicas of a pipeline for its long sequences, however short everything else is.

A replica with several of them takes their time on the last stage, plus the first one's forward on the others
before that, and the last one's backward after it: that is a path of its schedule (if both are in one micro-batch,
it takes no less). So a set S of sequences that take y_s on the last stage, and shares f and b of that forward and
backward on the others, takes together at least

    sum of S + min over a, b in S, a not b, of (f y_a + b y_b),

and no less than any subset: short sequences at both ends do not save the path from one long one to another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milpplan.simulation.layout_columns import BoolArray, FloatArray

# Number of sequences whose divisions are all enumerated, and number of lengths for bin packing bounds.
_EVERY, _THRESHOLDS = 9, 8


@dataclass(frozen=True, eq=False)
class MinReplicas:
    """Long sequences of a pipeline."""

    sizes: FloatArray
    """Times on the last stage in ns, ascending, [m]."""
    shares: tuple[float, float]
    """Shares of the other stages together (forward, backward)."""
    times: FloatArray
    """Minimum time in ns of the k longest on r replicas, [k, r]."""

    @staticmethod
    def of(sizes: FloatArray, shares: tuple[float, float]) -> MinReplicas:
        """Enumerate all divisions of the longest sequences."""
        longest = sizes[::-1][:_EVERY]
        return MinReplicas(sizes, shares, _least_times(longest, shares))

    def min_replicas(self, number: int, time_ns: float) -> int:
        """Return the minimum number of replicas for the ``number`` longest sequences within a time."""
        if number == 0:
            return 0
        longest = min(number, len(self.times) - 1)
        minimum = int(np.searchsorted(-self.times[longest], -time_ns)) + 1
        sizes = self.sizes[len(self.sizes) - number :]
        for threshold in np.unique(sizes)[-_THRESHOLDS:].tolist():
            large, shares = sizes[sizes >= threshold], sum(self.shares)
            is_alone = large + threshold * (1.0 + shares) + (large - threshold) * min(self.shares) > time_ns
            rest = large[~is_alone]
            minimum = max(minimum, int(is_alone.sum()) + fewest_bins(rest, time_ns - threshold * shares))
        return minimum


def _least_times(sizes: FloatArray, shares: tuple[float, float]) -> FloatArray:
    """Return the minimum time of the first k of ``sizes`` [m], descending, on r replicas, [m + 1, m]; descending
    in r."""
    num_sequences = len(sizes)
    sets = np.arange(1 << num_sequences)
    members = (sets[:, None] >> np.arange(num_sequences)) & 1 > 0
    single = _alone(sizes, members, shares)
    # By number of replicas: the minimum over the sets on the replica that holds the first of a set.
    min_times = single
    by_replicas = [min_times]
    for _ in range(num_sequences - 1):
        min_times = _split(single, min_times)
        by_replicas.append(min_times)
    prefixes = [(1 << k) - 1 for k in range(num_sequences + 1)]
    return np.stack(by_replicas, axis=1)[prefixes]


def _alone(sizes: FloatArray, members: BoolArray, shares: tuple[float, float]) -> FloatArray:
    """Return the minimum time of each set of ``members`` [s, m] on one replica, [s]; 0 for one sequence."""
    times = np.zeros(len(members))
    for index, mask in enumerate(members):
        own = sizes[mask]
        # Prefixes of the longest two, three, ...
        around = own[1:] * sum(shares) + (own[:-1] - own[1:]) * min(shares)
        times[index] = (np.cumsum(own)[1:] + around).max(initial=0.0)
    return times


def _split(single: FloatArray, others: FloatArray) -> FloatArray:
    """Return the minimum time of sets on one replica more than ``others`` [s]."""
    min_times = others.copy()
    for whole in range(1, len(single)):
        first = whole & -whole
        rest = part = whole ^ first
        while True:
            subset = first | part
            min_times[whole] = min(min_times[whole], max(single[subset], others[rest ^ part]))
            if part == 0:
                break
            part = (part - 1) & rest
    return min_times


def fewest_bins(sizes: FloatArray, capacity: float) -> int:
    """Return a lower bound of the number of bins of capacity ``capacity`` for ``sizes`` [m].

    For any threshold: sizes above the capacity less the threshold are alone; of those above half of the capacity
    no two are together; the excess of the smaller ones over the capacity that these leave has bins of its own.

    Source: Martello and Toth, Lower bounds and reduction procedures for the bin packing problem (1990).
    """
    if not len(sizes) or np.isinf(capacity):
        return min(1, len(sizes))
    max_bound = 1
    for threshold in [0.0, *np.unique(sizes[sizes <= capacity / 2]).tolist()]:
        is_alone = sizes > capacity - threshold
        large, small = (sizes > capacity / 2) & ~is_alone, (sizes >= threshold) & (sizes <= capacity / 2)
        excess = float(sizes[small].sum()) - (large.sum() * capacity - float(sizes[large].sum()))
        number = int(is_alone.sum() + large.sum())
        max_bound = max(max_bound, number + (int(np.ceil(excess / capacity - 1e-9)) if excess > 0.0 else 0))
    return max_bound
