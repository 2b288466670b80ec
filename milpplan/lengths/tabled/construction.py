"""First packings of one kind of replicas, in milliseconds: replica and micro-batch of every sequence.

**One stage.** Only a replica's sum counts. The longest sequence comes first, each goes to the replica that is
done first, there into the fullest micro-batch with room, or a new one.

**Pipelines.** Equal micro-batches leave the last stage waiting for the first forwards, and the first stage for the
last backwards. Under 1F1B on P stages whose backwards take r times their forwards, the first forwards run back to
back. If each micro-batch takes at most 1 + r / P times the one before it, the last stage hardly waits while loads
rise: it has done the micro-batches before when the forwards of the next one arrive. In reversed time backwards are
forwards, so loads may fall by 1 + 1 / (r P). The loads tried are

    y_m in proportion to min(1, s (1 + r / P)^m, t (1 + 1 / (r P))^(v - 1 - m))

for several numbers v and shares s and t at the ends, as small ends pay against the constant of a micro-batch. A
sequence longer than all of them stands where the loads are highest, and its replica runs a part of the work with
which it ends when the others do. These real loads are timed, and the shortest ones are filled with sequences: the
longest first, each on the replica and there in the micro-batch that is furthest below its load and has room. The
shortest exact time wins. Loads only guide the filling; nothing is proved with them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import product

import numpy as np

from milpplan.lengths.tabled.local_search import ReplicaTimes, replica_times
from milpplan.lengths.tabled.problem import FloatArray
from milpplan.lengths.tabled.problem import Int64Array as IntArray

# Shares of the highest load at both ends of a pipeline's micro-batches that are tried; numbers of micro-batches
# beyond the least, in halves of the number of stages.
_ENDS = (1.0, 0.4, 0.15)
_MORE = (0, 1, 2, 4, 6, 8, 12, 18, 28)
# Parts of the mean load of replicas around a long sequence, maximum number of lengths that get loads around them,
# and halvings of the interval of times at which all replicas end together.
_PARTS_OF_LONG, _FLOORS, _HALVINGS = (0.3, 0.5, 0.7, 0.85, 1.0, 1.2), 3, 20
# Real loads of pipelines that are filled with sequences; fewer of more sequences.
_FILLED, _ENOUGH = 3, 3_000
# Work of a quantum at least, ns.
_LITTLE_NS = 1e-6


def constructed(timer: ReplicaTimes, num_replicas: int, counts: IntArray) -> list[IntArray] | None:
    """Pack sequences on replicas of one kind.

    Args:
        timer: times of the kind's micro-batches.
        num_replicas: number of replicas.
        counts: sequences of every length, [n].

    Returns:
        Micro-batches of every replica in order, [v, n] each; None if no packing within its limits was found.
    """
    if not counts.any():
        return [np.zeros((0, len(counts)), dtype=np.int64) for _ in range(num_replicas)]
    if (timer.quanta[counts > 0] > timer.max_quanta).any():
        return None
    once, sequence = timer.lines
    # Tables may have sequences without work.
    sequence = sequence + _LITTLE_NS * timer.quanta
    work = sequence.sum(axis=0)
    items = np.repeat(np.arange(len(counts)), counts)
    items = items[np.argsort(-work[items], kind="stable")]
    packings: list[list[IntArray] | None]
    if timer.num_stages == 1:
        packings = [_by_least_time(timer, num_replicas, items, float(once.sum()), work)]
    else:
        plans = _target_loads(timer, num_replicas, counts, once, sequence)
        packings = [_filled(timer, items, loads, work) for loads in plans]
        if not any(packings):
            # Memory is nearly full: with as many micro-batches as sequences every one has room.
            number = min(-(-len(items) // num_replicas), timer.max_micro_batches or len(items))
            packings = [_filled(timer, items, [np.ones(number) for _ in range(num_replicas)], work)]
    allowed = [packing for packing in packings if packing is not None and all(map(timer.allows, packing))]
    return min(allowed, key=lambda packing: longest_ns(timer, packing), default=None)


def longest_ns(timer: ReplicaTimes, replicas: Sequence[IntArray]) -> float:
    """Return the time of the slowest of replicas [v, n], ns; 0 if none runs anything."""
    used = [replica for replica in replicas if len(replica)]
    if not used:
        return 0.0
    phases = timer.phases(np.concatenate(used))
    lags = timer.lags(np.concatenate(used) @ timer.quanta)
    # Micro-batches without work, in front, leave the time of a pipeline as it is.
    width = max(map(len, used))
    places = np.concatenate([row * width + np.arange(width - len(held), width) for row, held in enumerate(used)])
    all_phases, all_lags = np.zeros((*phases.shape[:2], len(used) * width)), np.zeros(len(used) * width)
    all_phases[..., places], all_lags[places] = phases, lags
    shape = len(used), width
    return float(replica_times(all_phases.reshape(*phases.shape[:2], *shape), all_lags.reshape(shape)).max())


def _by_least_time(
    timer: ReplicaTimes, num_replicas: int, items: IntArray, once_ns: float, work: FloatArray
) -> list[IntArray] | None:
    """Put every sequence on the replica of one stage that is done first and has room; None if none has room."""
    queue = [(0.0, replica) for replica in range(num_replicas)]
    # Room and index of each replica's micro-batches.
    room: list[list[tuple[int, int]]] = [[] for _ in range(num_replicas)]
    held: list[list[list[int]]] = [[] for _ in range(num_replicas)]
    work_of, quanta_of, max_quanta = work.tolist(), timer.quanta.tolist(), timer.max_quanta
    most = timer.max_micro_batches or len(items)
    for item in items.tolist():
        full: list[tuple[float, int]] = []
        while queue:
            time_ns, replica = heapq.heappop(queue)
            fitting = [entry for entry in room[replica] if entry[0] >= quanta_of[item]]
            if fitting or len(held[replica]) < most:
                break
            full.append((time_ns, replica))
        else:
            return None
        if fitting:
            free, place = min(fitting)
            room[replica].remove((free, place))
        else:
            free, place = max_quanta, len(held[replica])
            held[replica].append([])
            time_ns += once_ns
        held[replica][place].append(item)
        room[replica].append((free - quanta_of[item], place))
        for entry in (*full, (time_ns + work_of[item], replica)):
            heapq.heappush(queue, entry)
    return [_rows(micro_batches, len(work)) for micro_batches in held]


def _rows(micro_batches: Sequence[Sequence[int]], num_lengths: int) -> IntArray:
    """Return micro-batches of indices of lengths as counts [v, n], without empty ones."""
    rows = [np.bincount(items, minlength=num_lengths) for items in micro_batches if len(items)]
    return np.array(rows, dtype=np.int64).reshape(-1, num_lengths)


def shapes(number: int, num_stages: int, backward_ratio: float) -> FloatArray:
    """Return the loads of ``number`` micro-batches as shares of a replica's, for all shares at the ends, [s, v].

    Args:
        number: number of micro-batches.
        num_stages: number of pipeline stages.
        backward_ratio: time of a backward as a multiple of its forward's.
    """
    rise = (1.0 + backward_ratio / num_stages) ** np.arange(number)
    fall = (1.0 + 1.0 / (backward_ratio * num_stages)) ** np.arange(number)[::-1]
    loads = [np.minimum(1.0, np.minimum(first * rise, last * fall)) for first, last in product(_ENDS, _ENDS)]
    return np.array([load / load.sum() for load in loads])


def _target_loads(
    timer: ReplicaTimes, num_replicas: int, counts: IntArray, once: FloatArray, sequence: FloatArray
) -> list[list[FloatArray]]:
    """Return real loads of every replica's micro-batches, [v] each, most promising first; replicas around a long
    sequence come first."""
    work = sequence.sum(axis=0)
    load = float(work @ counts) / num_replicas
    forward_share = float(sequence[0] @ counts) / float(work @ counts)
    quanta = float(timer.quanta @ counts) / num_replicas
    fewest = max(1, int(np.ceil(quanta / timer.full_quanta)))
    most = min(max(fewest, -(-int(counts.sum()) // num_replicas)), timer.max_micro_batches or 1 << 62)
    numbers = sorted({min(most, fewest + more * timer.num_stages // 2) for more in _MORE})
    shares = [shapes(number, timer.num_stages, 1.0 / forward_share - 1.0) for number in numbers]
    # Micro-batches without work, in front, leave the time of a pipeline as it is.
    table = np.concatenate([np.pad(part, ((0, 0), (numbers[-1] - part.shape[1], 0))) for part in shares])
    cap = load * timer.full_quanta / quanta
    lag = float(timer.lags(np.array([timer.max_quanta]))[0])

    def timed(loads: FloatArray) -> FloatArray:
        runs = loads > 0
        part = np.array([forward_share, 1.0 - forward_share])[:, None, None]
        phases = part * loads + once[:, None, None] * runs
        return replica_times(np.repeat(phases[:, None], timer.num_stages, axis=1), np.where(runs, lag, 0.0))

    free = _capped(table * load, cap)
    free_ns = timed(free)
    best = np.argsort(free_ns, kind="stable")[: max(1, min(_FILLED, _ENOUGH // int(counts.sum())))].tolist()
    items = np.sort(np.repeat(work[counts > 0], counts[counts > 0]))[::-1][:num_replicas]
    longest = items[items > free[best[0]].max()]
    if not len(longest):
        return [[free[row][free[row] > 0]] * num_replicas for row in best]
    # Replicas around a long sequence take another part of the work than those without. The last of a few lengths
    # stands for all shorter ones.
    floors = longest[:_FLOORS]
    tables = [
        [_around(_capped(table * load * part, cap), floor, load * part) for part in _PARTS_OF_LONG]
        for floor in floors
    ]
    times = timed(np.concatenate([part for parts in tables for part in parts]))
    times = times.reshape(len(floors), len(_PARTS_OF_LONG), -1)
    shortest = np.maximum.accumulate(times.min(axis=2), axis=1)
    floor_of = np.minimum(np.arange(len(longest)), len(floors) - 1)
    num_free = num_replicas - len(longest)

    def parts_within(time_ns: float) -> FloatArray:
        """The largest part of the mean load that every replica around a long sequence runs in a time."""
        return np.array([np.interp(time_ns, row, _PARTS_OF_LONG) for row in shortest])[floor_of]

    low, high = 0.0, float(max(shortest.max(), free_ns[best[0]] * num_replicas))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if parts_within(middle).sum() + num_free * middle / free_ns[best[0]] >= num_replicas:
            high = middle
        else:
            low = middle
    parts = parts_within(high)
    around = []
    for part, floor in zip(parts.tolist(), floor_of.tolist(), strict=True):
        nearest = int(np.abs(np.array(_PARTS_OF_LONG) - part).argmin())
        loads = tables[floor][nearest][int(times[floor, nearest].argmin())]
        around.append(loads[loads > 0] * (part / _PARTS_OF_LONG[nearest]))
    factor = (num_replicas - float(parts.sum())) / max(1, num_free)
    return [
        [*around, *[free[row][free[row] > 0] * factor] * num_free] for row in best[: 1 if not num_free else None]
    ]


def _around(loads: FloatArray, longest: float, load: float) -> FloatArray:
    """Return loads [s, v] whose largest is at least ``longest``, of the same sum where that is possible."""
    rows, top = np.arange(len(loads)), loads.argmax(axis=1)
    peak = loads[rows, top]
    is_below = peak < longest
    rest = max(0.0, load - longest) / np.maximum(1e-9, load - peak)
    loads = np.where(is_below[:, None], loads * rest[:, None], loads)
    loads[rows[is_below], top[is_below]] = longest
    return loads


def _capped(loads: FloatArray, cap: float) -> FloatArray:
    """Return loads [s, v] of at most ``cap`` each, where the others take what is above it."""
    for _ in range(3):
        over = np.maximum(0.0, loads - cap)
        room = np.where(loads > 0, np.maximum(0.0, cap - loads), 0.0)
        taken = np.minimum(1.0, over.sum(axis=1) / np.maximum(1e-9, room.sum(axis=1)))
        loads = loads - over + room * taken[:, None]
    return loads


def _filled(
    timer: ReplicaTimes, items: IntArray, loads: Sequence[FloatArray], work: FloatArray
) -> list[IntArray] | None:
    """Put each sequence on the replica that is furthest below its load and has room, there into the micro-batch
    that is furthest below its own; None if none has room.

    The longest sequences go to the first replicas, one each, as these have the loads around them.
    """
    queue = [(-float(targets.sum()), replica) for replica, targets in enumerate(loads)]
    missing = [[(-load, place) for place, load in enumerate(targets.tolist())] for targets in loads]
    room = [[timer.max_quanta] * len(targets) for targets in loads]
    held: list[list[list[int]]] = [[[] for _ in targets] for targets in loads]
    work_of, quanta_of = work.tolist(), timer.quanta.tolist()
    for micro_batches in missing:
        heapq.heapify(micro_batches)

    def put(item: int, replica: int) -> bool:
        full = []
        while missing[replica] and room[replica][missing[replica][0][1]] < quanta_of[item]:
            full.append(heapq.heappop(missing[replica]))
        fits = bool(missing[replica])
        if fits:
            below, place = heapq.heappop(missing[replica])
            full.append((below + work_of[item], place))
            room[replica][place] -= quanta_of[item]
            held[replica][place].append(item)
        for entry in full:
            heapq.heappush(missing[replica], entry)
        return fits

    first = items[: len(loads)].tolist()
    for replica, item in enumerate(first):
        put(item, replica)
        queue[replica] = (queue[replica][0] + work_of[item], replica)
    heapq.heapify(queue)
    for item in items[len(first) :].tolist():
        tried, fits = [], False
        while queue and not fits:
            below, replica = heapq.heappop(queue)
            fits = put(item, replica)
            tried.append((below + work_of[item] if fits else below, replica))
        if not fits:
            return None
        for replica_entry in tried:
            heapq.heappush(queue, replica_entry)
    return [_rows(micro_batches, len(work)) for micro_batches in held]
