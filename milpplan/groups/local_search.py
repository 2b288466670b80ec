"""Moves and swaps of sequences that shorten the slowest replica of a packing, each simulated exactly."""

from __future__ import annotations

import numpy as np

from milpplan.groups.packing import Packing, in_flight_fits
from milpplan.groups.pipeline import pipeline_times_ns
from milpplan.groups.problem import Kind
from milpplan.groups.strategies import Int64Array

# Candidates simulated at once, and most of one round.
_BATCH = 3_000


def improve(packing: Packing, rounds: int) -> Packing:
    """At most ``rounds`` improvements of the slowest replica, the best of a round each; local optimum or limit."""
    kind = packing.kind
    replicas = [replica.copy() for replica in packing.replicas]
    times = packing.times_ns()
    for _ in range(rounds):
        slow = int(times.argmax())
        best: tuple[int, int, Int64Array, Int64Array] | None = None
        others = [r for r in np.argsort(times, kind="stable").tolist() if r != slow]
        for other in (slow, *others[:3]):
            found = _best_exchange(kind, replicas, slow, other, int(times[slow]))
            if found is not None and (best is None or found[0] < best[0]):
                best = (found[0], other, *found[1:])
        if best is None:
            break
        _, other, here, there = best
        replicas[slow] = here
        if other != slow:
            replicas[other] = there
        for replica in (slow, other):
            loads = replicas[replica] @ kind.units + kind.pipeline.micro_batch_units
            times[replica] = pipeline_times_ns(kind.pipeline, loads)
    return Packing(kind, tuple(replicas))


def _best_exchange(
    kind: Kind, replicas: list[Int64Array], slow: int, other: int, worst_ns: int
) -> tuple[int, Int64Array, Int64Array] | None:
    """The exchange between two replicas (or inside one) with the least maximum, if below ``worst_ns``."""
    here, there = replicas[slow], replicas[other]
    if not len(there):
        there = np.zeros((1, here.shape[1]), np.int64)
    candidates = _candidates(kind, here, there, slow == other)
    if not len(candidates):
        return None
    micro, k, target, back = candidates.T
    # Index K stands for nothing given back.
    units = np.append(kind.units, 0)
    change = units[back] - units[k]
    own = kind.pipeline.micro_batch_units
    rows = np.arange(len(candidates))
    loads_here = np.tile(here @ kind.units + own, (len(candidates), 1))
    loads_here[rows, micro] += change
    if slow == other:
        loads_here[rows, target] -= change
        times = pipeline_times_ns(kind.pipeline, loads_here)
    else:
        loads_there = np.tile(there @ kind.units + own, (len(candidates), 1))
        loads_there[rows, target] -= change
        times = np.maximum(
            pipeline_times_ns(kind.pipeline, loads_here), pipeline_times_ns(kind.pipeline, loads_there)
        )
    for at in np.argsort(times, kind="stable")[:20].tolist():
        if times[at] >= worst_ns:
            return None
        changed = _applied(here, there, slow == other, candidates[at])
        if all(in_flight_fits(kind, one) for one in changed):
            return int(times[at]), *changed
    return None


def _candidates(kind: Kind, here: Int64Array, there: Int64Array, same: bool) -> Int64Array:
    """Rows (micro-batch, k, micro-batch of the other, k given back or K) that keep tokens within capacity."""
    capacity = kind.pipeline.micro_batch_tokens
    num_lengths = here.shape[1]
    lengths = np.append(kind.lengths, 0)
    room_here, room_there = capacity - here @ kind.lengths, capacity - there @ kind.lengths
    give = np.argwhere(here > 0)
    take = np.argwhere(there > 0)
    take = np.concatenate([take, np.column_stack([np.arange(len(there)), np.full(len(there), num_lengths)])])
    left = np.repeat(np.arange(len(give)), len(take))
    right = np.tile(np.arange(len(take)), len(give))
    rows = np.column_stack([give[left], take[right]])
    extra = lengths[rows[:, 1]] - lengths[rows[:, 3]]
    units = np.append(kind.units, 0)
    change = units[rows[:, 3]] - units[rows[:, 1]]
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
