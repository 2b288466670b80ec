"""Moves and swaps of sequences that shorten the slowest replica of a group, each simulated exactly."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.groups.bounds.pipeline_time import pipeline_times_ns
from milpplan.groups.packing.pack import Packing, in_flight_fits
from milpplan.groups.problem import Kind
from milpplan.groups.strategies import Int64Array

# Candidates simulated at once, and the fastest other replicas tried in one round.
_BATCH = 3_000
_OTHERS = 4


@dataclass(slots=True)
class _Replica:
    """Sequences of every micro-batch [micro-batches, K] of one replica, and their time."""

    kind: Kind
    packed: Int64Array
    time_ns: int = 0

    def loads(self) -> Int64Array:
        """Units of every micro-batch, its own included."""
        return np.asarray(self.packed @ self.kind.units + self.kind.pipeline.micro_batch_units)

    def put(self, packed: Int64Array) -> None:
        """Hold these micro-batches, without empty ones."""
        self.packed = packed[packed.any(axis=1)]
        self.time_ns = int(pipeline_times_ns(self.kind.pipeline, self.loads()))


def improve(packings: Sequence[Packing], rounds: int, deadline: float = float("inf")) -> list[Packing]:
    """At most ``rounds`` improvements of the slowest replica of all kinds of a group, the best of a round each,
    until the ``deadline`` (of ``perf_counter``)."""
    replicas = [_Replica(one.kind, packed) for one in packings for packed in one.replicas]
    for replica in replicas:
        replica.put(replica.packed)
    for _ in range(rounds):
        if time.perf_counter() > deadline:
            break
        slow = max(replicas, key=lambda one: one.time_ns)
        others = sorted((one for one in replicas if one is not slow), key=lambda one: one.time_ns)
        best: tuple[int, _Replica, Int64Array, Int64Array] | None = None
        for other in (slow, *others[:_OTHERS]):
            found = _best_exchange(slow, other)
            if found is not None and (best is None or found[0] < best[0]):
                best = (found[0], other, *found[1:])
        if best is None:
            break
        _, other, here, there = best
        slow.put(here)
        if other is not slow:
            other.put(there)
    kinds = [packing.kind for packing in packings]
    return [Packing(kind, tuple(one.packed for one in replicas if one.kind is kind)) for kind in kinds]


def _best_exchange(slow: _Replica, other: _Replica) -> tuple[int, Int64Array, Int64Array] | None:
    """The exchange between two replicas (or inside one) with the least maximum, if below the slow one's time."""
    here, there = slow.packed, other.packed
    if not len(there):
        there = np.zeros((1, here.shape[1]), np.int64)
    candidates = _candidates(slow, other.kind, here, there, slow is other)
    if not len(candidates):
        return None
    micro, k, target, back = candidates.T
    rows = np.arange(len(candidates))
    loads_here = np.tile(slow.loads(), (len(candidates), 1))
    loads_here[rows, micro] += _change(slow.kind, k, back)
    if slow is other:
        loads_here[rows, target] -= _change(slow.kind, k, back)
        times = pipeline_times_ns(slow.kind.pipeline, loads_here)
    else:
        start = there @ other.kind.units + other.kind.pipeline.micro_batch_units
        loads_there = np.tile(start, (len(candidates), 1))
        loads_there[rows, target] -= _change(other.kind, k, back)
        times = np.maximum(
            pipeline_times_ns(slow.kind.pipeline, loads_here), pipeline_times_ns(other.kind.pipeline, loads_there)
        )
    for at in np.argsort(times, kind="stable")[:20].tolist():
        if times[at] >= slow.time_ns:
            return None
        first, second = _applied(here, there, slow is other, candidates[at])
        if in_flight_fits(slow.kind, first) and in_flight_fits(other.kind, second):
            return int(times[at]), first, second
    return None


def _change(kind: Kind, k: Int64Array, back: Int64Array) -> Int64Array:
    """Units that a micro-batch of the kind gains by giving k and taking back (index K: nothing)."""
    units = np.append(kind.units, 0)
    return np.asarray(units[back] - units[k])


def _candidates(slow: _Replica, other: Kind, here: Int64Array, there: Int64Array, same: bool) -> Int64Array:
    """Rows (micro-batch, k, micro-batch of the other, k given back or K) that keep tokens within capacity."""
    kind, num_lengths = slow.kind, here.shape[1]
    lengths = np.append(kind.lengths, 0)
    room_here = kind.pipeline.micro_batch_tokens - here @ kind.lengths
    room_there = other.pipeline.micro_batch_tokens - there @ kind.lengths
    give = np.argwhere(here > 0)
    take = np.argwhere(there > 0)
    take = np.concatenate([take, np.column_stack([np.arange(len(there)), np.full(len(there), num_lengths)])])
    left = np.repeat(np.arange(len(give)), len(take))
    right = np.tile(np.arange(len(take)), len(give))
    rows = np.column_stack([give[left], take[right]])
    extra = lengths[rows[:, 1]] - lengths[rows[:, 3]]
    change = _change(kind, rows[:, 1], rows[:, 3])
    fits = (room_here[rows[:, 0]] + extra >= 0) & (room_there[rows[:, 2]] >= extra)
    # Another replica must take work off the slow one; inside one, work must move at all.
    useful = (change != 0) & (rows[:, 0] != rows[:, 2]) if same else change < 0
    kept = np.flatnonzero(fits & useful)
    return np.asarray(rows[kept[:: max(1, -(-len(kept) // _BATCH))]])


def _applied(
    here: Int64Array, there: Int64Array, same: bool, candidate: Int64Array
) -> tuple[Int64Array, Int64Array]:
    micro, k, target, back = candidate.tolist()
    first = here.copy()
    second = first if same else there.copy()
    first[micro, k] -= 1
    second[target, k] += 1
    if back < first.shape[1]:
        second[target, back] -= 1
        first[micro, back] += 1
    return first[first.any(axis=1)], second[second.any(axis=1)]
