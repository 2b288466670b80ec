"""Local search on packings, at the exact times of their micro-batches.

The neighbourhoods: sequences of the slowest replica move or are exchanged, within it or with another replica, or
open a micro-batch of their own; its micro-batches change places. Every round makes the best of some random
changes, even if it is longer by less than a threshold that falls to zero (threshold accepting: Dueck and Scheuer
1990), because few packings have a single improving change and many are far from the best. Equal packings get equal
answers.

Times come from anywhere (``ReplicaTimes``): from tables of units (``KindTimes``), or from the cost model, whose
stages differ (``cost_tables.Timer``). Replicas of one search may have times of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from milpplan.lengths.deadline import NEVER, Deadline, spend
from milpplan.lengths.search_parameters import PARAMETERS
from milpplan.lengths.tabled.problem import FloatArray, Int64Array, Kind
from milpplan.lengths.tabled.step_plan import Packing, in_flight_fits

IntArray = Int64Array


class ReplicaTimes(Protocol):
    """Times of the micro-batches [v, n] of one kind of replicas, and what these may hold."""

    @property
    def quanta(self) -> IntArray:
        """Size of a sequence of every length, [n]."""

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""

    @property
    def max_quanta(self) -> int:
        """Capacity of a micro-batch."""

    @property
    def full_quanta(self) -> int:
        """Size of micro-batches that may follow each other in any number."""

    @property
    def max_micro_batches(self) -> int | None:
        """Maximum number of micro-batches of a replica; None: any."""

    def phases(self, packed: IntArray) -> FloatArray:
        """Return forward and backward times [2, P, v] of micro-batches [v, n] in ns: 0 if empty."""

    def lags(self, quanta: IntArray) -> FloatArray:
        """Return the transfer times of micro-batches with ``quanta`` [...], ns."""

    @property
    def lines(self) -> tuple[FloatArray, FloatArray]:
        """Typical times on a stage, forward and backward: of a micro-batch [2], and of a sequence [2, n], ns."""

    def allows(self, packed: IntArray) -> bool:
        """Return whether a replica may hold these micro-batches, each within its capacity."""


@dataclass(frozen=True, slots=True)
class KindTimes:
    """Times of a kind of tabled pipelines."""

    kind: Kind

    @property
    def quanta(self) -> IntArray:
        """Tokens of a sequence of every length, [n]."""
        return self.kind.lengths

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return self.kind.pipeline.num_stages

    @property
    def max_quanta(self) -> int:
        """Capacity of a micro-batch in tokens."""
        pipeline = self.kind.pipeline
        return min(pipeline.micro_batch_tokens, pipeline.in_flight_tokens or pipeline.micro_batch_tokens)

    @property
    def full_quanta(self) -> int:
        """``ReplicaTimes.full_quanta``: an even share of the tokens in flight."""
        pipeline = self.kind.pipeline
        return min(self.max_quanta, (pipeline.in_flight_tokens or 1 << 62) // pipeline.num_stages) or 1

    @property
    def max_micro_batches(self) -> int | None:
        """Maximum number of micro-batches of a replica."""
        return self.kind.pipeline.max_micro_batches

    def phases(self, packed: IntArray) -> FloatArray:
        """Return ``ReplicaTimes.phases``: all stages are equal."""
        pipeline = self.kind.pipeline
        units = np.where(packed.any(axis=1), packed @ self.kind.units + pipeline.micro_batch_units, 0)
        parts = np.array([pipeline.forward_parts, pipeline.backward_parts], np.float64)
        return np.repeat((parts[:, None] * units)[:, None], pipeline.num_stages, axis=1)

    def lags(self, quanta: IntArray) -> FloatArray:
        """Return ``ReplicaTimes.lags``: every transfer takes as long."""
        return np.full(np.shape(quanta), float(self.kind.pipeline.transfer_ns))

    @property
    def lines(self) -> tuple[FloatArray, FloatArray]:
        """``ReplicaTimes.lines``, exactly."""
        pipeline = self.kind.pipeline
        parts = np.array([pipeline.forward_parts, pipeline.backward_parts], np.float64)
        return parts * pipeline.micro_batch_units, parts[:, None] * self.kind.units

    def allows(self, packed: IntArray) -> bool:
        """Return ``ReplicaTimes.allows``: the number of micro-batches and the tokens in flight are limited."""
        limit = self.kind.pipeline.max_micro_batches
        return (limit is None or len(packed) <= limit) and in_flight_fits(self.kind, packed)


def replica_times(phases: FloatArray, lags: FloatArray) -> FloatArray:
    """Return the times of replicas [...] with phases [2, P, ..., v] and lags [..., v], by the recursion of
    ``problem.pipeline_times_ns``."""
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


@dataclass(slots=True, eq=False)
class Replica:
    """One replica: micro-batches ``packed`` [v, n] in order, with their quanta and times."""

    timer: ReplicaTimes
    packed: IntArray
    quanta: IntArray
    phases: FloatArray
    time_ns: float

    @staticmethod
    def of(timer: ReplicaTimes, packed: IntArray) -> Replica:
        """Build the replica without empty micro-batches."""
        packed = packed[packed.any(axis=1)]
        quanta, phases = packed @ timer.quanta, timer.phases(packed)
        return Replica(timer, packed, quanta, phases, float(replica_times(phases, timer.lags(quanta))))

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
        return replica_times(phases, lags)

    def times_ordered(self, orders: IntArray) -> FloatArray:
        """Return times [rows] with the micro-batches in ``orders`` [rows, v]."""
        return replica_times(self.phases[:, :, orders], self.timer.lags(self.quanta)[orders])


def improved(
    timer: ReplicaTimes,
    replicas: list[IntArray],
    effort: int,
    changes: int = 128,
    deadline: Deadline = NEVER,
) -> list[IntArray]:
    """Return the best packing met in as many rounds as ``effort`` allows, each with some changes of the slowest
    replica, or until the ``deadline``."""
    best = improved_replicas([Replica.of(timer, replica) for replica in replicas], effort, changes, deadline)
    return [replica.packed for replica in best]


def improved_replicas(
    replicas: Sequence[Replica], effort: int, changes: int = 128, deadline: Deadline = NEVER
) -> list[Replica]:
    """Return the best replicas met, as ``improved`` does; each replica may have its own timer."""
    random = np.random.default_rng(1)
    current = list(replicas)
    if not any(len(replica.packed) for replica in current):
        return current
    # A round costs as much as sixty units of work besides.
    rounds = effort // (60 + max(map(_work, current)))
    first, last = PARAMETERS.local_threshold
    best, best_ns = list(current), max(replica.time_ns for replica in current)
    for round_index in range(rounds):
        if round_index % 64 == 0 and deadline.passed:
            break
        threshold = first * (last / first) ** (round_index / rounds)
        times = [replica.time_ns for replica in current]
        slowest = int(np.argmax(times))
        limit = times[slowest] * (1.0 + threshold)
        spend(8e-5 + 6e-6 * _work(current[slowest]) + 4.2e-6 * current[slowest].packed.shape[1])
        # Of the draws the first quarter reorders micro-batches, the last parts exchange one sequence for many and
        # open a micro-batch.
        draw = random.random()
        if draw < 0.25 and current[slowest].timer.num_stages > 1:
            reordered = _moved(current[slowest], limit, random, changes)
            if reordered is not None:
                current[slowest] = reordered
        else:
            # A replica of one micro-batch has nothing to exchange within.
            is_within = len(current[slowest].packed) > 1 and random.random() < 0.5
            others = [index for index in range(len(current)) if index != slowest]
            other = slowest if is_within or not others else others[int(random.integers(len(others)))]
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
    if draw > 0.95 or not len(there.packed):
        draw = 1.0
        there = there.with_empty(int(random.integers(len(there.packed) + 1)))
        here = there if is_same else here
    propose = _for_many if 0.75 < draw <= 0.95 else _for_one
    source, target, moved = propose(here, there, random, changes)
    quanta = moved @ here.timer.quanta
    fits = here.quanta[source] - quanta <= here.timer.max_quanta
    fits &= there.quanta[target] + quanta <= there.timer.max_quanta
    fits &= moved.any(axis=1)
    fits &= (here.packed[source] >= moved).all(axis=1) & (there.packed[target] >= -moved).all(axis=1)
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
    other = changed if is_same else Replica.of(there.timer, second)
    is_allowed = all(replica.timer.allows(replica.packed) for replica in (changed, other))
    return (changed, other) if is_allowed else None


_Change = tuple[IntArray, IntArray, IntArray]


def _for_one(here: Replica, there: Replica, random: np.random.Generator, changes: int) -> _Change:
    """Propose random moves and exchanges of one sequence or two: (from [rows], to [rows], moved [rows, n])."""
    rows = np.arange(changes)
    give = here.random_sequences(random, changes)
    empty = np.flatnonzero(~there.packed.any(axis=1))
    if len(empty):
        take, is_exchange = np.full((changes, 2), empty[0]), np.zeros(changes, dtype=bool)
    else:
        take, is_exchange = there.random_sequences(random, changes), random.random(changes) >= 0.4
    moved = np.zeros((changes, here.packed.shape[1]), dtype=np.int64)
    moved[rows, give[:, 1]] = 1
    moved[rows[is_exchange], take[is_exchange, 1]] -= 1
    for replica, first, sign in ((here, give, 1), (there, take, -1)):
        # A second sequence of the same micro-batch.
        second = replica.random_sequences(random, changes) if replica is here or not len(empty) else first
        is_pair = (second[:, 0] == first[:, 0]) & (random.random(changes) < 0.5)
        is_pair &= is_exchange | (replica is here)
        moved[rows[is_pair], second[is_pair, 1]] += sign
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
    if times[best] >= limit or not replica.timer.allows(replica.packed[orders[best]]):
        return None
    return Replica.of(replica.timer, replica.packed[orders[best]])


def improved_packings(packings: Sequence[Packing], effort: int) -> list[Packing]:
    """Shorten the slowest replica of a group's kinds by the local search; ``packings`` are those of the kinds."""
    replicas = [Replica.of(KindTimes(packing.kind), packed) for packing in packings for packed in packing.replicas]
    best = iter(improved_replicas(replicas, effort))
    return [Packing(packing.kind, tuple(next(best).packed for _ in packing.replicas)) for packing in packings]


def first_packings(kinds: Sequence[Kind]) -> list[Packing] | None:
    """Put each sequence, longest first, on the replica with capacity that finishes it first, one micro-batch each.

    Returns:
        The kinds' packings; None if a sequence fits on no replica.
    """
    replicas = [(j, r) for j, kind in enumerate(kinds) for r in range(kind.num_replicas)]
    cost = np.array(
        [np.where(kinds[j].fits, kinds[j].units * kinds[j].pipeline.parts, np.inf) for j, _ in replicas]
    )
    times = np.array([kinds[j].pipeline.micro_batch_units * kinds[j].pipeline.parts for j, _ in replicas], float)
    free_tokens = np.array([KindTimes(kinds[j]).max_quanta for j, _ in replicas])
    counts = [np.zeros((kind.num_replicas, kind.units.size), np.int64) for kind in kinds]
    lengths, numbers = kinds[0].lengths, kinds[0].counts
    for k in np.repeat(np.arange(lengths.size), numbers)[::-1].tolist():
        end_times = np.where(free_tokens >= lengths[k], times + cost[:, k], np.inf)
        replica = int(end_times.argmin())
        if not np.isfinite(end_times[replica]):
            return None
        times[replica] = end_times[replica]
        free_tokens[replica] -= lengths[k]
        j, r = replicas[replica]
        counts[j][r, k] += 1
    return [
        Packing(kind, tuple(row[None, :][: int(row.any())] for row in kind_counts))
        for kind, kind_counts in zip(kinds, counts, strict=True)
    ]
