"""Packing one batch fast: sequences to replicas and micro-batches, one at a time, the longest first.

The same two ways as ``packing`` with heaps in place of searches, and best loads taken from ``curves.KindTable``:
a few milliseconds for thousands of sequences, where ``packing`` seeks the last thousandth.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.groups.bounds.load_shapes import around
from milpplan.groups.bounds.pipeline_time import pipeline_times_ns
from milpplan.groups.bounds.work_envelope import BatchKind
from milpplan.groups.dispatch.batch_sharing import by_least_time, capacity, exchange
from milpplan.groups.strategies import FloatArray, Int64Array

# Numbers of micro-batches tried, the most promising ones; of more sequences than this, one.
_TRIES = 2
_MANY = 1024
# Numbers of micro-batches simulated with real loads: so many of the best known, and from the least on.
_SIMULATED = 5
# Real loads fill micro-batches with tokens up to this share, and numbers below that much room are tried last.
_FULL = 0.96
# Replicas of one stage with at most so many sequences each, on average, exchange sequences.
_FEW = 48
_LOOSE = 1.02


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Where the sequences of one kind are: replica and micro-batch of each [n], and the replicas' times [D]."""

    replica: Int64Array
    micro_batch: Int64Array
    times_ns: Int64Array

    @property
    def time_ns(self) -> int:
        """The slowest replica."""
        return int(self.times_ns.max(initial=0))


# Indices of the sequences of a kind, and where they are.
Together = tuple[Int64Array, Placed]


def place(kind: BatchKind, at: Int64Array, lengths: Int64Array) -> Placed | None:
    """Places for sequences with the distinct lengths ``lengths[at]`` [n]; None if no packing was found."""
    if not at.size:
        return Placed(at, at, np.zeros(kind.num_replicas, np.int64))
    units, tokens = kind.units[at], lengths[at]
    order = np.lexsort((np.arange(at.size), -tokens))
    if kind.table.pipeline.num_stages == 1:
        found = by_least_time(kind, units[order], tokens[order])
        if found is None:
            return None
        if at.size <= _FEW * kind.num_replicas:
            exchange(kind, units[order], tokens[order], *found)
        return _timed(kind, units, order, *found)
    packed = place_around(kind, at, lengths, slice(1))
    tries = _TRIES if at.size <= _MANY else 1
    for shares in _promising(kind, units, tokens):
        filled = _by_shares(kind, units[order], tokens[order], shares)
        one = None if filled is None else _timed(kind, units, order, *filled)
        if one is not None and _in_flight_fits(kind, tokens, one):
            packed.append(one)
            tries -= 1
        if not tries:
            break
    return min(packed, key=lambda one: one.time_ns, default=None)


def place_into(kind: BatchKind, at: Int64Array, lengths: Int64Array, number: int) -> Placed | None:
    """Places in at most ``number`` micro-batches a replica of a pipeline; None if the sequences do not fit so."""
    load = float(kind.units[at].sum()) / kind.num_replicas
    return _place_by(kind, at, lengths, kind.table.shape(number, load))


def place_around(kind: BatchKind, at: Int64Array, lengths: Int64Array, ways: slice) -> list[Placed]:
    """Places around the longest sequence, where best loads without it are all below it: some of two ways, the
    likeliest first."""
    units = kind.units[at]
    # Sequences may be of no work at all.
    share = float(units.max()) * kind.num_replicas / max(1.0, float(units.sum()))
    most = min(units.size, kind.table.pipeline.max_micro_batches or units.size)
    shapes = [one for one in around(kind.table.peaks, share) if one.size <= most]
    found = (_place_by(kind, at, lengths, one) for one in shapes[ways])
    return [one for one in found if one is not None]


def _place_by(kind: BatchKind, at: Int64Array, lengths: Int64Array, shares: FloatArray) -> Placed | None:
    """Places in micro-batches of such shares of a replica's load, as far as tokens allow."""
    units, tokens = kind.units[at], lengths[at]
    order = np.lexsort((np.arange(at.size), -tokens))
    room = float(tokens.sum()) / kind.num_replicas
    cap = max(_FULL * kind.table.pipeline.micro_batch_tokens / room, 1.0 / shares.size)
    filled = _by_shares(kind, units[order], tokens[order], _capped(shares, min(1.0, cap)))
    found = None if filled is None else _timed(kind, units, order, *filled)
    return found if found is not None and _in_flight_fits(kind, tokens, found) else None


def place_together(kinds: Sequence[BatchKind], at: Int64Array, lengths: Int64Array) -> list[Together] | None:
    """Places on replicas of one stage of several kinds at once, for when each kind alone has no packing.

    Longest first, each to the replica that is done first with it among those with room; None if one finds none.
    """
    replicas = [(j, r) for j, kind in enumerate(kinds) for r in range(kind.num_replicas)]
    units = np.array([kinds[j].units for j, _ in replicas])
    empty = np.array([kinds[j].table.pipeline.micro_batch_units for j, _ in replicas])
    parts = np.array([kinds[j].table.pipeline.parts for j, _ in replicas])
    most_tokens = np.array([capacity(kinds[j]) for j, _ in replicas])
    most = np.array([kinds[j].table.pipeline.max_micro_batches or at.size for j, _ in replicas])
    loads, rooms, numbers = (np.zeros(len(replicas), np.int64) for _ in range(3))
    order = np.lexsort((np.arange(at.size), -lengths[at]))
    chosen, places = np.empty_like(order), np.empty_like(order)
    for index in order.tolist():
        k, length = int(at[index]), int(lengths[at[index]])
        fits = rooms >= length
        opens = (numbers < most) & (most_tokens >= length)
        after = np.where(fits | opens, (loads + units[:, k] + np.where(fits, 0, empty)) * parts, np.inf)
        here = int(after.argmin())
        if not np.isfinite(after[here]):
            return None
        if not fits[here]:
            # The last micro-batch is closed: all that follow are shorter or as long.
            loads[here] += empty[here]
            rooms[here] = most_tokens[here]
            numbers[here] += 1
        loads[here] += units[here, k]
        rooms[here] -= length
        chosen[index], places[index] = here, numbers[here] - 1
    owner = np.array([j for j, _ in replicas])[chosen]
    inside = np.array([r for _, r in replicas])[chosen]
    found: list[Together] = []
    for j, kind in enumerate(kinds):
        mine = np.flatnonzero(owner == j)
        if mine.size:
            held = (kind.units[at[mine]], np.arange(mine.size), inside[mine].tolist(), places[mine].tolist())
            found.append((mine, _timed(kind, *held)))
        else:
            found.append((mine, Placed(mine, mine, np.zeros(kind.num_replicas, np.int64))))
    return found


def _timed(
    kind: BatchKind, units: Int64Array, order: Int64Array, replicas: list[int], places: list[int]
) -> Placed:
    """Places in the order of the sequences, without empty micro-batches, with the exact times."""
    replica, micro_batch = np.empty_like(order), np.empty_like(order)
    replica[order], micro_batch[order] = replicas, places
    shape = (kind.num_replicas, int(micro_batch.max()) + 1)
    flat = replica * shape[1] + micro_batch
    used = np.bincount(flat, minlength=shape[0] * shape[1]).reshape(shape) > 0
    # Micro-batches that hold nothing do not run.
    micro_batch = (np.cumsum(used, axis=1) - 1)[replica, micro_batch]
    loads = np.zeros(shape, np.int64)
    np.add.at(loads, (replica, micro_batch), units)
    numbers = used.sum(axis=1)
    pipeline = kind.table.pipeline
    times = np.zeros(shape[0], np.int64)
    for number in np.unique(numbers[numbers > 0]).tolist():
        rows = numbers == number
        times[rows] = pipeline_times_ns(pipeline, loads[rows, :number] + pipeline.micro_batch_units)
    return Placed(replica, micro_batch, times)


def _promising(kind: BatchKind, units: Int64Array, tokens: Int64Array) -> list[FloatArray]:
    """Best loads of a replica [v] as shares of the whole, the most promising number of micro-batches first.

    Where tokens and not units fill micro-batches, more of them leave room for uneven loads: which number is best
    is seen by simulating real loads within the tokens. After the best ones come larger numbers, for batches that
    are hard to pack.
    """
    pipeline = kind.table.pipeline
    load = float(units.sum()) / kind.num_replicas
    tokens_each = float(tokens.sum()) / kind.num_replicas
    least = max(1, math.ceil(tokens_each / pipeline.micro_batch_tokens))
    most = min(units.size, pipeline.max_micro_batches or units.size)
    if least > most:
        return []
    times = {number: kind.time_with(number, load) for number in kind.table.slots if least <= number <= most}
    near = sorted(times, key=lambda number: (times[number], number))[:_SIMULATED]
    near += [number for number in range(least, least + _SIMULATED) if number <= most]
    numbers = sorted(set(near))
    # Real loads within the tokens, a little less than full.
    caps = pipeline.micro_batch_tokens / tokens_each
    shapes = [kind.table.shape(number, load) for number in numbers]
    found = [_capped(shape, min(1.0, max(_FULL * caps, 1.0 / shape.size))) for shape in shapes]
    loads = np.zeros((len(found), numbers[-1]))
    for row, shares in zip(loads, found, strict=True):
        # Empty places in front change nothing but transfers.
        row[-shares.size :] = shares * load + pipeline.micro_batch_units
    simulated = pipeline_times_ns(pipeline, np.rint(loads).astype(np.int64))
    # A number that tokens fill to the brim is hard to pack.
    tight = [caps * number < _LOOSE for number in numbers]
    ranked = [found[i] for i in sorted(range(len(found)), key=lambda i: (tight[i], int(simulated[i])))]
    larger = [min(most, number) for number in (numbers[-1] + 1, 2 * numbers[-1], most)]
    return [*ranked, *(np.full(number, 1.0 / number) for number in larger)]


def _capped(shares: FloatArray, cap: float) -> FloatArray:
    """Shares [v] of which none is above the cap, what they lose going to the others in proportion."""
    for _ in range(shares.size):
        over = shares > cap * (1 + 1e-9)
        if not over.any():
            break
        shares = np.minimum(shares, cap)
        free = shares < cap
        shares[free] *= max(0.0, 1.0 - cap * int((~free).sum())) / max(1e-12, float(shares[free].sum()))
    return shares


def _by_shares(
    kind: BatchKind, units: Int64Array, tokens: Int64Array, shares: FloatArray
) -> tuple[list[int], list[int]] | None:
    """Each into the micro-batch that lacks most of its best load and has room for the tokens."""
    total = int(units.sum())
    longest = shares.max() * total / kind.num_replicas
    num_long = int((units > longest).sum())
    # Units fall with the tokens, so the long ones come first.
    held = _long_ones(kind, units[:num_long], shares)
    targets, rooms = _targets(kind, shares, held, units, tokens)
    if targets is None:
        return None
    replicas = [replica for replica, _ in held]
    places = [micro_batch for _, micro_batch in held]
    # A micro-batch is numbered by replica, then place.
    queue = [(-target, number) for number, target in enumerate(targets.ravel().tolist())]
    heapq.heapify(queue)
    left = rooms.ravel().tolist()
    # Micro-batches without room for a sequence of this length wait for shorter ones.
    parked: list[tuple[int, float, int]] = []
    numbers: list[int] = []
    for unit, length in zip(units[num_long:].tolist(), tokens[num_long:].tolist(), strict=True):
        while parked and -parked[0][0] >= length:
            heapq.heappush(queue, heapq.heappop(parked)[1:])
        while queue and left[queue[0][1]] < length:
            lack, number = heapq.heappop(queue)
            heapq.heappush(parked, (-left[number], lack, number))
        if not queue:
            return None
        lack, number = queue[0]
        left[number] -= length
        heapq.heapreplace(queue, (lack + unit, number))
        numbers.append(number)
    replicas += [number // shares.size for number in numbers]
    places += [number % shares.size for number in numbers]
    return replicas, places


def _long_ones(kind: BatchKind, units: Int64Array, shares: FloatArray) -> list[tuple[int, int]]:
    """(replica, micro-batch) of the sequences that are longer than any micro-batch's best load.

    They go to the replica that holds least, and there where the best loads are highest.
    """
    order = np.argsort(-shares, kind="stable").tolist()
    queue = [(0, replica) for replica in range(kind.num_replicas)]
    counts = [0] * kind.num_replicas
    held = []
    for unit in units.tolist():
        load, replica = queue[0]
        heapq.heapreplace(queue, (load + unit, replica))
        held.append((replica, order[counts[replica] % shares.size]))
        counts[replica] += 1
    return held


def _targets(
    kind: BatchKind, shares: FloatArray, held: list[tuple[int, int]], units: Int64Array, tokens: Int64Array
) -> tuple[FloatArray | None, Int64Array]:
    """What every micro-batch lacks in units, and its room in tokens, [D, v]; None: the long ones do not fit."""
    shape = (kind.num_replicas, shares.size)
    pipeline = kind.table.pipeline
    long_units, long_tokens = np.zeros(shape), np.zeros(shape, np.int64)
    for (replica, place), unit, length in zip(held, units.tolist(), tokens.tolist(), strict=False):
        long_units[replica, place] += unit
        long_tokens[replica, place] += length
    rooms = pipeline.micro_batch_tokens - long_tokens
    if pipeline.in_flight_tokens is not None:
        rooms = np.minimum(rooms, _in_flight_rooms(pipeline.in_flight_tokens, pipeline.num_stages, long_tokens))
    if (rooms < 0).any():
        return None, rooms
    loads = _levelled(long_units.sum(axis=1), float(units[len(held) :].sum()))
    free = np.where(long_units > 0, 0.0, shares[None, :])
    total = free.sum(axis=1, keepdims=True)
    wanted = (loads - long_units.sum(axis=1))[:, None]
    targets = np.divide(free * wanted, total, out=np.zeros(shape), where=total > 0)
    return targets, rooms


def _levelled(held: FloatArray, more: float) -> FloatArray:
    """Loads [D] after ``more`` is poured where least is ``held``."""
    ascending = np.sort(held)
    numbers = np.arange(1, held.size + 1)
    levels = (np.cumsum(ascending) + more) / numbers
    # The first so many replicas rise to the level that is below the next one's load.
    count = int(np.flatnonzero(np.append(levels[:-1] <= ascending[1:], True))[0])
    return np.asarray(np.maximum(held, levels[count]))


def _in_flight_rooms(limit: int, num_stages: int, long_tokens: Int64Array) -> Int64Array:
    """Tokens [D, v] that fit with the long ones in every window: an even part of what each window leaves."""
    number = long_tokens.shape[1]
    width = min(num_stages, number)
    starts = np.arange(number - width + 1)
    rooms = np.full(long_tokens.shape, limit, np.int64)
    for start in starts.tolist():
        window = slice(start, start + width)
        open_places = (long_tokens[:, window] == 0).sum(axis=1)
        left = limit - long_tokens[:, window].sum(axis=1)
        even = np.where(left < 0, left, left // np.maximum(1, open_places))
        rooms[:, window] = np.minimum(rooms[:, window], even[:, None])
    # A micro-batch of a long one takes no more.
    return np.where(long_tokens > 0, np.minimum(rooms, 0), rooms)


def _in_flight_fits(kind: BatchKind, tokens: Int64Array, placed: Placed) -> bool:
    """Whether every window of ``num_stages`` consecutive micro-batches fits in the tokens in flight."""
    limit = kind.table.pipeline.in_flight_tokens
    if limit is None:
        return True
    shape = (kind.num_replicas, int(placed.micro_batch.max()) + 1)
    held = np.zeros(shape, np.int64)
    np.add.at(held, (placed.replica, placed.micro_batch), tokens)
    sums = np.concatenate([np.zeros((shape[0], 1), np.int64), np.cumsum(held, axis=1)], axis=1)
    width = min(kind.table.pipeline.num_stages, shape[1])
    return bool((sums[:, width:] - sums[:, :-width] <= limit).all())
