"""Local search on the packing of a strategy, at the strategy's own times.

A heuristic; the answers are timed exactly by ``cost_tables``. ``tabled.local_search`` packs for equal stages and
one table of work. Here every stage has its own layers and ends, and a micro-batch takes the time of its tokens and
its attention, with the last tiles of its longest sequence: per phase the larger of *ring exposed* and *ring
hidden*, which is the exact time.

The neighbourhoods: sequences of the slowest replica move or are exchanged, within it or with another replica, or
open a micro-batch of their own; its micro-batches change places. Every round makes the best of some random
changes, even if it is longer by less than a threshold that falls to zero (threshold accepting: Dueck and Scheuer
1990), because few packings have a single improving change and many are far from the best. Equal packings get equal
answers.

**Construction** for pipelines follows the best load shapes. The first micro-batches of a pipeline should be short
and grow, and the last ones shrink; the program of ``bounds.long_sequence`` says how for divisible loads.
Around a long sequence, which cannot be divided, the shape differs. So every replica gets its longest sequence, the
best position for it and the best number of micro-batches. Then the other sequences follow, the longest first, each
where most load is missing. Alternatively only some replicas get one of the longest sequences and also the other
long ones; the rest have more and shorter micro-batches, with shorter ramps. The results are timed exactly and
improved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from milpplan.lengths import Load
from milpplan.lengths.bounds import StageLoads, Window
from milpplan.lengths.bounds.long_sequence import best_loads
from milpplan.lengths.bounds.work_bounds import PipelineWorkBound
from milpplan.lengths.cost_tables import Tables, ring_times
from milpplan.lengths.deadline import NEVER, Deadline
from milpplan.simulation import FloatArray, IntArray

# Numbers of micro-batches that are tried first; then those next to the best.
_NUMBERS = (2, 4, 7, 11, 16, 22, 30, 42)
# Relative position of the longest sequence while the number is sought.
_PLACE = 0.35
# Number of ways to give the longest sequences to some of the replicas.
_HELD = 8
# Growth of a replica's time with its load.
_SLOPE = 1.03


@dataclass(frozen=True, slots=True)
class _Shape:
    """Approximate time of a replica in ns, with micro-batches of ``loads`` [v] and its longest sequence at index
    ``place``."""

    time_ns: float
    loads: FloatArray
    longest_index: int


@dataclass(frozen=True, slots=True)
class _Shapes:
    """Shapes of a pipeline's replicas with typical sequences."""

    stages: StageLoads
    num_stages: int
    deadline: Deadline

    @property
    def late(self) -> bool:
        """True if the deadline has passed, so that only missing shapes are computed."""
        return self.deadline.passed

    def of(self, number: int, place: int, load: float, least: float) -> _Shape | None:
        """Return the shape of ``number`` micro-batches with at least ``least`` at index ``place``; None if they do
        not hold the load."""
        if not 0 <= place < number:
            return None
        window = Window((place, place), (number - 1 - place, number - 1 - place))
        solution = best_loads(self.stages, self.num_stages, window, load, least)
        return None if solution is None else _Shape(*solution, place)

    def best(self, load: float, least: float) -> _Shape | None:
        """Return the shape with the best number of micro-batches, then with the best position."""
        numbers = [number for number in _NUMBERS if number * self.stages.most[:1].sum() >= load]
        shape = self._least(lambda number: self.of(number, int(_PLACE * number), load, least), numbers)
        if shape is None or least == 0.0:
            return shape
        number = len(shape.loads)
        return self._least(lambda place: self.of(number, place, load, least), [shape.longest_index])

    def _least(self, shape_at: Callable[[int], _Shape | None], tried: list[int]) -> _Shape | None:
        """Return the shortest shape by descent over integers, from the ones in ``tried``, until the deadline."""
        shapes: dict[int, _Shape | None] = {}

        def time_ns(number: int) -> float:
            shape = shapes[number]
            return np.inf if shape is None else shape.time_ns

        for number in tried:
            if not (self.late and any(shapes.values())):
                shapes[number] = shape_at(number)
        step = 2
        while step and shapes and not self.late:
            best_number = min(shapes, key=time_ns)
            for number in (best_number - step, best_number + step):
                if number not in shapes:
                    shapes[number] = shape_at(number) if number >= 0 else None
            step = step if min(shapes, key=time_ns) != best_number else step // 2
        return shapes[min(shapes, key=time_ns)] if shapes else None


def packings_by_shape(
    work_bound: PipelineWorkBound, load: Load, max_quanta: int, deadline: Deadline = NEVER
) -> list[tuple[IntArray, ...]]:
    """Return replicas [v, n] of all sequences, with the longest ones on one, two ... or all of them.

    Empty if the shapes do not hold the sequences. Shapes are computed until the
    ``deadline``.
    """
    shapes = _Shapes(_typical(work_bound.stages), work_bound.num_stages, deadline)
    items = np.repeat(np.arange(len(load.lengths)), load.counts)[::-1]
    num_replicas = work_bound.num_replicas
    free = shapes.best(work_bound.total_load, 0.0)
    if free is None:
        return []
    # Sequences shorter than the largest load leave the shape as it is.
    longest = [float(shapes.stages.last[item]) for item in items[:num_replicas]]
    longest = [min_load if min_load > free.loads.max() else 0.0 for min_load in longest]
    longest += [0.0] * (num_replicas - len(longest))
    shape_of = {min_load: shapes.best(work_bound.total_load, min_load) for min_load in {0.0, *longest}}
    divisions = {tuple(longest[:num_long] + [0.0] * (num_replicas - num_long)) for num_long in _held(num_replicas)}
    packings = []
    for division in sorted(divisions):
        first = [shape for shape in (shape_of[min_load] for min_load in division) if shape is not None]
        if len(first) == num_replicas:
            packings.append(
                _filled(
                    _balanced(shapes, first, division, work_bound.total_load),
                    shapes.stages.last,
                    load,
                    items,
                    max_quanta,
                )
            )
    return [packing for packing in packings if packing is not None]


def _held(num_replicas: int) -> list[int]:
    """Return how many replicas get one of the longest sequences: one, up to all in a few equal steps."""
    steps = min(num_replicas, _HELD)
    return [1, *(-(-num_replicas * (step + 1) // steps) for step in range(steps))]


def _balanced(
    shapes: _Shapes, first: list[_Shape], longest: tuple[float, ...], total_load: float
) -> list[FloatArray]:
    """Return loads of shapes with about equal times: a replica with a longer sequence gets less load."""
    times = np.array([shape.time_ns for shape in first])
    target_loads = (total_load - (times - times.mean()) / _SLOPE).clip(longest)
    loads_by_key: dict[tuple[float, float], FloatArray] = {}
    for shape, target_load, min_load in zip(first, target_loads.tolist(), longest, strict=True):
        if (target_load, min_load) not in loads_by_key:
            # A program of this size may take half a second.
            solved = (
                None if shapes.late else shapes.of(len(shape.loads), shape.longest_index, target_load, min_load)
            )
            loads_by_key[target_load, min_load] = (
                shape.loads * (target_load / total_load) if solved is None else solved.loads
            )
    return [loads_by_key[key] for key in zip(target_loads.tolist(), longest, strict=True)]


def _typical(stages: StageLoads) -> StageLoads:
    """Return the stages with the shares of a typical sequence for all."""
    if not len(stages.mixes):
        return stages
    forward, backward = stages.mixes.mean(axis=0).tolist()
    return replace(stages, shares=(forward, backward), mixes=np.zeros((0, 2)))


def _filled(
    shapes: list[FloatArray], sequence_loads: FloatArray, load: Load, items: IntArray, max_quanta: int
) -> tuple[IntArray, ...] | None:
    """Assign sequences, the longest first, where most load is missing and the tokens fit; None if one does not
    fit."""
    quanta = load.lengths // load.token_quantum
    missing = np.concatenate(shapes)
    capacity_left = np.full(len(missing), max_quanta)
    packed = np.zeros((len(missing), len(quanta)), dtype=np.int64)
    for k in items.tolist():
        fits = np.flatnonzero(capacity_left >= quanta[k])
        if not len(fits):
            return None
        index = int(fits[missing[fits].argmax()])
        packed[index, k] += 1
        missing[index] -= sequence_loads[k]
        capacity_left[index] -= quanta[k]
    return tuple(
        part[part.any(axis=1)] for part in np.split(packed, np.cumsum([len(shape) for shape in shapes])[:-1])
    )


@dataclass(frozen=True, eq=False)
class Timer:
    """Times of a strategy's micro-batches on every stage, in ns."""

    base: FloatArray
    """Times without attention by quanta, [2 (ring exposed, hidden), 2 phases, P, G]."""
    attention: FloatArray
    """Time that each sequence adds, [2, 2, P, n]."""
    once: FloatArray
    """Time of the last tiles if a length is the longest, [2, 2, P, n]."""
    transfer: FloatArray
    """Transfers between stages by quanta, [G]."""
    quanta: IntArray

    @staticmethod
    def of(tables: Tables, max_quanta: int) -> Timer:
        """Build the times for micro-batches of up to ``max_quanta`` quanta."""
        stages = range(tables.candidate.layout.pp)
        times = ring_times(tables.problem, tables.candidate, np.arange(1, max_quanta + 1))
        base = [[stage_times.forward, stage_times.backward] for stage_times in times]
        kernels = np.stack([[tables.kernels([stage], phase) for stage in stages] for phase in (0, 1)])
        slopes = np.array(tables.slopes)[:, None, None, None]
        return Timer(
            np.array(base, dtype=np.float64),
            slopes * kernels[:, :, 0],
            slopes * kernels[:, :, 1],
            tables.bare.transfer[:max_quanta].astype(np.float64),
            tables.load.lengths // tables.load.token_quantum,
        )

    def for_lengths(self, lengths: IntArray) -> Timer:
        """Return the timer restricted to some lengths."""
        attention, once = self.attention[..., lengths], self.once[..., lengths]
        return replace(self, attention=attention, once=once, quanta=self.quanta[lengths])

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return int(self.base.shape[2])

    @property
    def max_quanta(self) -> int:
        """Capacity of a micro-batch in quanta."""
        return int(self.base.shape[-1])

    def phases(self, packed: IntArray) -> FloatArray:
        """Return forward and backward times [2, P, v] of micro-batches [v, n]: 0 if empty; tokens beyond the
        capacity are not counted."""
        quanta, longest = packed @ self.quanta, packed.shape[1] - 1 - (packed[:, ::-1] > 0).argmax(axis=1)
        options = (
            self.base[..., np.minimum(np.maximum(quanta, 1), self.max_quanta) - 1]
            + self.attention @ packed.T
            + self.once[..., longest]
        )
        return np.where(quanta > 0, options.max(axis=0), 0.0)

    def lags(self, quanta: IntArray) -> FloatArray:
        """Return the transfer times of micro-batches with ``quanta`` [...]."""
        return np.asarray(self.transfer[np.maximum(quanta, 1) - 1])

    def times(self, phases: FloatArray, lags: FloatArray) -> FloatArray:
        """Return the times of replicas [...] with phases [2, P, ..., v] and lags [..., v], by the recursion of
        ``cost_tables``."""
        forward, backward = phases
        num_stages, num_micro_batches = forward.shape[0], forward.shape[-1]
        if num_stages == 1:
            return np.asarray((forward[0] + backward[0]).sum(axis=-1))
        shape = forward.shape[1:-1]
        forward, backward, lags = (np.moveaxis(array, -1, 0).copy() for array in (forward, backward, lags))
        ends = [np.zeros(shape) for _ in range(num_stages)]
        finished = [np.zeros(shape) for _ in range(num_stages + 1)]
        for turn in range(num_micro_batches + num_stages):
            arrival = np.zeros(shape)
            for stage in range(num_stages):
                backward_index = turn - num_stages + stage
                if 0 <= backward_index < num_micro_batches:
                    if stage + 1 < num_stages:
                        ends[stage] = np.maximum(ends[stage], finished[stage + 1] + lags[backward_index])
                    ends[stage] = finished[stage] = ends[stage] + backward[backward_index, stage]
                if turn < num_micro_batches:
                    if stage:
                        ends[stage] = np.maximum(ends[stage], arrival + lags[turn])
                    ends[stage] = arrival = ends[stage] + forward[turn, stage]
        return ends[0]

    def longest_ns(self, counts: IntArray) -> float:
        """Return the time of the slowest of replicas [D, v, n] whose empty micro-batches come last."""
        numbers, longest = counts.any(axis=2).sum(axis=1), 0.0
        for num_micro_batches in np.unique(numbers[numbers > 0]).tolist():
            rows = counts[numbers == num_micro_batches, :num_micro_batches]
            flat = rows.reshape(-1, rows.shape[-1])
            phases = self.phases(flat).reshape(2, self.num_stages, len(rows), num_micro_batches)
            lags = self.lags(flat @ self.quanta).reshape(len(rows), num_micro_batches)
            longest = max(longest, float(self.times(phases, lags).max()))
        return longest


@dataclass(slots=True, eq=False)
class Replica:
    """One replica: micro-batches ``packed`` [v, n] in order, with their quanta and times."""

    timer: Timer
    packed: IntArray
    quanta: IntArray
    phases: FloatArray
    time_ns: float

    @staticmethod
    def of(timer: Timer, packed: IntArray) -> Replica:
        """Build the replica without empty micro-batches."""
        packed = packed[packed.any(axis=1)]
        quanta, phases = packed @ timer.quanta, timer.phases(packed)
        return Replica(timer, packed, quanta, phases, float(timer.times(phases, timer.lags(quanta))))

    def with_empty(self, index: int) -> Replica:
        """Return the replica with an empty micro-batch at an index."""
        packed, quanta = np.insert(self.packed, index, 0, axis=0), np.insert(self.quanta, index, 0)
        return Replica(self.timer, packed, quanta, np.insert(self.phases, index, 0.0, axis=-1), self.time_ns)

    def random_sequences(self, random: np.random.Generator, number: int) -> IntArray:
        """Return random pairs (micro-batch, length) of sequences that the replica holds, [number, 2]."""
        positions = np.argwhere(self.packed > 0)
        return positions[random.integers(0, len(positions), number)]

    def times_after(self, parts: list[tuple[IntArray, IntArray]]) -> FloatArray:
        """Return times [rows] after changes, given as pairs of micro-batches [rows] and added sequences [rows,
        n]."""
        timer, rows = self.timer, np.arange(len(parts[0][0]))
        phases = np.repeat(self.phases[..., None, :], len(rows), axis=-2)
        lags = np.tile(timer.lags(self.quanta), (len(rows), 1))
        for micro_batch, added in parts:
            phases[..., rows, micro_batch] = timer.phases(self.packed[micro_batch] + added)
            lags[rows, micro_batch] = timer.lags(self.quanta[micro_batch] + added @ timer.quanta)
        return timer.times(phases, lags)

    def times_ordered(self, orders: IntArray) -> FloatArray:
        """Return times [rows] with the micro-batches in ``orders`` [rows, v]."""
        return self.timer.times(self.phases[:, :, orders], self.timer.lags(self.quanta)[orders])


CHANGES = 128
"""Number of changes evaluated in a round, in one vectorised call."""

# Shares of the rounds that reorder micro-batches, open one, exchange one sequence for many, and stay within the
# slowest replica; share of single exchanges that are moves.
_PLACES, _OPENS, _MANY, _WITHIN, _NOTHING = 0.25, 0.05, 0.2, 0.5, 0.4
# Fixed work of a round, in units of one stage and micro-batch.
_ROUND = 60
# Threshold at first and in the end, as a share of the time.
_FIRST, _LAST = 3e-3, 1e-5


# Number of rounds between two looks at the deadline.
_LOOK = 64


def improved(
    timer: Timer,
    replicas: list[IntArray],
    effort: int,
    changes: int = CHANGES,
    deadline: Deadline = NEVER,
) -> list[IntArray]:
    """Return the best packing met in as many rounds as ``effort`` allows, each with some changes of the slowest
    replica, or until the ``deadline``."""
    best = improved_replicas([Replica.of(timer, replica) for replica in replicas], effort, changes, deadline)
    return [replica.packed for replica in best]


def improved_replicas(
    replicas: Sequence[Replica], effort: int, changes: int = CHANGES, deadline: Deadline = NEVER
) -> list[Replica]:
    """Return the best replicas met, as ``improved`` does; each replica may have its own timer."""
    random = np.random.default_rng(1)
    current = list(replicas)
    if not any(len(replica.packed) for replica in current):
        return current
    rounds = effort // (_ROUND + max(map(_work, current)))
    best, best_ns = list(current), max(replica.time_ns for replica in current)
    for round_index in range(rounds):
        if round_index % _LOOK == 0 and deadline.passed:
            break
        threshold = _FIRST * (_LAST / _FIRST) ** (round_index / rounds)
        times = [replica.time_ns for replica in current]
        slowest = int(np.argmax(times))
        limit = times[slowest] * (1.0 + threshold)
        draw = random.random()
        if draw < _PLACES and current[slowest].timer.num_stages > 1:
            reordered = _moved(current[slowest], limit, random, changes)
            if reordered is not None:
                current[slowest] = reordered
        else:
            other = (
                slowest if random.random() < _WITHIN or len(current) == 1 else int(random.integers(len(current)))
            )
            pair = _exchanged(current[slowest], current[other], draw, limit, random, changes)
            if pair is not None:
                current[slowest], current[other] = pair
        longest_ns = max(replica.time_ns for replica in current)
        if longest_ns < best_ns:
            best, best_ns = list(current), longest_ns
    return best


def _work(replica: Replica) -> int:
    """Return the work of timing a replica once: stages times micro-batches and stages, for a pipeline."""
    num_stages = replica.timer.num_stages
    return num_stages * (num_stages + len(replica.packed)) if num_stages > 1 else 0


def _exchanged(
    here: Replica, there: Replica, draw: float, limit: float, random: np.random.Generator, changes: int
) -> tuple[Replica, Replica] | None:
    """Return the best of some random exchanges between ``here`` and ``there``, which may be the same replica; None
    if none is below the limit."""
    is_same = here is there
    if draw > 1.0 - _OPENS or not len(there.packed):
        draw = 1.0
        there = there.with_empty(int(random.integers(len(there.packed) + 1)))
        here = there if is_same else here
    propose = _for_many if 1.0 - _OPENS - _MANY < draw <= 1.0 - _OPENS else _for_one
    source, target, moved = propose(here, there, random, changes)
    quanta = moved @ here.timer.quanta
    fits = here.quanta[source] - quanta <= here.timer.max_quanta
    fits &= there.quanta[target] + quanta <= there.timer.max_quanta
    fits &= moved.any(axis=1)
    if is_same:
        fits &= source != target
    source, target, moved = source[fits], target[fits], moved[fits]
    if not len(source):
        return None
    if is_same:
        times = here.times_after([(source, -moved), (target, moved)])
    else:
        times = np.maximum(here.times_after([(source, -moved)]), there.times_after([(target, moved)]))
    best = int(times.argmin())
    if times[best] >= limit:
        return None
    first = here.packed.copy()
    second = first if is_same else there.packed.copy()
    first[source[best]] -= moved[best]
    second[target[best]] += moved[best]
    changed = Replica.of(here.timer, first)
    return changed, changed if is_same else Replica.of(there.timer, second)


_Change = tuple[IntArray, IntArray, IntArray]


def _for_one(here: Replica, there: Replica, random: np.random.Generator, changes: int) -> _Change:
    """Propose random moves and exchanges of single sequences: (from [rows], to [rows], moved [rows, n])."""
    rows = np.arange(changes)
    give = here.random_sequences(random, changes)
    empty = np.flatnonzero(~there.packed.any(axis=1))
    if len(empty):
        take, is_exchange = np.full((changes, 2), empty[0]), np.zeros(changes, dtype=bool)
    else:
        take, is_exchange = there.random_sequences(random, changes), random.random(changes) >= _NOTHING
    moved = np.zeros((changes, here.packed.shape[1]), dtype=np.int64)
    moved[rows, give[:, 1]] = 1
    moved[rows[is_exchange], take[is_exchange, 1]] -= 1
    return give[:, 0], take[:, 0], moved


def _for_many(here: Replica, there: Replica, random: np.random.Generator, changes: int) -> _Change:
    """Propose exchanges of one sequence of either replica for random others that make room for it, as in
    ``_for_one``."""
    is_reversed = random.random() < 0.5
    giver, taker = (there, here) if is_reversed else (here, there)
    source, length = giver.random_sequences(random, 1)[0].tolist()
    target = int(random.integers(len(taker.packed)))
    excess = taker.quanta[target] + giver.timer.quanta[length] - taker.timer.max_quanta
    moved = np.zeros((changes, giver.packed.shape[1]), dtype=np.int64)
    moved[:, length] = 1
    shorter = np.repeat(np.arange(len(giver.timer.quanta)), taker.packed[target])
    shorter = shorter[shorter < length]
    if len(shorter):
        mixed = shorter[random.random((changes, len(shorter))).argsort(axis=1)]
        freed = np.cumsum(giver.timer.quanta[mixed], axis=1) - giver.timer.quanta[mixed]
        rows, columns = np.nonzero(freed < excess)
        np.subtract.at(moved, (rows, mixed[rows, columns]), 1)
    places = np.full(changes, source), np.full(changes, target)
    return (places[1], places[0], -moved) if is_reversed else (*places, moved)


def _moved(replica: Replica, limit: float, random: np.random.Generator, changes: int) -> Replica | None:
    """Return the best of some random reorderings, two micro-batches exchanged or one moved; None if none is below
    the limit."""
    num_micro_batches = len(replica.packed)
    places, (first, second) = np.arange(num_micro_batches), random.integers(0, num_micro_batches, (2, changes, 1))
    exchanged = np.where(places == first, second, np.where(places == second, first, places))
    # The order without the first micro-batch, which moves to the second index.
    others = places - (places > second)
    elsewhere = np.where(places == second, first, others + (others >= first))
    orders = np.where(random.random((changes, 1)) < 0.5, exchanged, elsewhere)
    times = replica.times_ordered(orders)
    best = int(times.argmin())
    return Replica.of(replica.timer, replica.packed[orders[best]]) if times[best] < limit else None
