"""Improving the packing of a strategy at its own times.

Heuristics only; answers are timed exactly by ``replicas``. ``groups.packing`` makes packings for equal stages and
one table of work; here every stage has its own layers and ends, and a micro-batch takes what ``tables`` says of
its tokens and its attention, last tiles of its longest sequence included: per phase the larger of *ring exposed*
and *ring hidden*, which is the exact time.

Sequences of the slowest replica move or are exchanged, inside it or with another one, or open a micro-batch of
their own; its micro-batches change places. Of some random changes the best is made in every round, also where it
is longer by no more than a threshold, which falls to nothing (threshold accepting: Dueck and Scheuer 1990): few
packings have a single change that makes them shorter, and many are far from the best. The same packing gives the
same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from milpplan.lengths.cost_tables import Tables
from milpplan.lengths.ring_attention import ring_times
from milpplan.simulation.layout_columns import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class Timer:
    """Times of micro-batches of one strategy on every stage: ``base`` [2 ways, 2 phases, P, G] by grains,
    ``attention`` [2 ways, 2 phases, P, n] what each sequence adds, and ``once`` what its length adds if it is the
    longest, ns; ``transfer`` [G]."""

    base: FloatArray
    attention: FloatArray
    once: FloatArray
    transfer: FloatArray
    grains: IntArray

    @staticmethod
    def of(tables: Tables, most_grains: int) -> Timer:
        """All numbers of grains up to the most of a micro-batch."""
        stages = range(tables.candidate.layout.pp)
        times = ring_times(tables.problem, tables.candidate, np.arange(1, most_grains + 1), launches=True)
        base = [[one.forward, one.backward] for one in times]
        each = np.stack([[tables.kernels([stage], phase) for stage in stages] for phase in (0, 1)])
        slopes = np.array(tables.slopes)[:, None, None, None]
        return Timer(
            np.array(base, dtype=np.float64),
            slopes * each[:, :, 0],
            slopes * each[:, :, 1],
            tables.bare.transfer[:most_grains].astype(np.float64),
            tables.load.lengths // tables.load.token_quantum,
        )

    def among(self, held: IntArray) -> Timer:
        """That of some lengths."""
        attention, once = self.attention[..., held], self.once[..., held]
        return replace(self, attention=attention, once=once, grains=self.grains[held])

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return int(self.base.shape[2])

    @property
    def most_grains(self) -> int:
        """Grains of a full micro-batch."""
        return int(self.base.shape[-1])

    def phases(self, packed: IntArray) -> FloatArray:
        """Forward and backward [2, P, v] of micro-batches [v, n]; nothing takes no time, and what does not fit no
        more tokens than the most."""
        grains, longest = packed @ self.grains, packed.shape[1] - 1 - (packed[:, ::-1] > 0).argmax(axis=1)
        ways = (
            self.base[..., np.minimum(np.maximum(grains, 1), self.most_grains) - 1]
            + self.attention @ packed.T
            + self.once[..., longest]
        )
        return np.where(grains > 0, ways.max(axis=0), 0.0)

    def lags(self, grains: IntArray) -> FloatArray:
        """Transfers of micro-batches with ``grains`` [...]."""
        return np.asarray(self.transfer[np.maximum(grains, 1) - 1])

    def times(self, phases: FloatArray, lags: FloatArray) -> FloatArray:
        """Times of replicas [...] with phases [2, P, ..., v] and lags [..., v]: the recursion of ``replicas``, all
        of them together."""
        forward, backward = phases
        num_stages, number = forward.shape[0], forward.shape[-1]
        if num_stages == 1:
            return np.asarray((forward[0] + backward[0]).sum(axis=-1))
        shape = forward.shape[1:-1]
        forward, backward, lags = (np.moveaxis(one, -1, 0).copy() for one in (forward, backward, lags))
        ends = [np.zeros(shape) for _ in range(num_stages)]
        done = [np.zeros(shape) for _ in range(num_stages + 1)]
        for turn in range(number + num_stages):
            arrival = np.zeros(shape)
            for stage in range(num_stages):
                old = turn - num_stages + stage
                if 0 <= old < number:
                    if stage + 1 < num_stages:
                        ends[stage] = np.maximum(ends[stage], done[stage + 1] + lags[old])
                    ends[stage] = done[stage] = ends[stage] + backward[old, stage]
                if turn < number:
                    if stage:
                        ends[stage] = np.maximum(ends[stage], arrival + lags[turn])
                    ends[stage] = arrival = ends[stage] + forward[turn, stage]
        return ends[0]

    def longest_ns(self, counts: IntArray) -> float:
        """Time of the slowest of replicas [D, v, n] whose empty micro-batches, which do not run, come last."""
        numbers, longest = counts.any(axis=2).sum(axis=1), 0.0
        for number in np.unique(numbers[numbers > 0]).tolist():
            rows = counts[numbers == number, :number]
            flat = rows.reshape(-1, rows.shape[-1])
            phases = self.phases(flat).reshape(2, self.num_stages, len(rows), number)
            lags = self.lags(flat @ self.grains).reshape(len(rows), number)
            longest = max(longest, float(self.times(phases, lags).max()))
        return longest


@dataclass(slots=True, eq=False)
class Replica:
    """One replica: micro-batches ``packed`` [v, n] in order, and what follows from them."""

    timer: Timer
    packed: IntArray
    grains: IntArray
    phases: FloatArray
    time_ns: float

    @staticmethod
    def of(timer: Timer, packed: IntArray) -> Replica:
        """With its time, ns."""
        packed = packed[packed.any(axis=1)]
        grains, phases = packed @ timer.grains, timer.phases(packed)
        return Replica(timer, packed, grains, phases, float(timer.times(phases, timer.lags(grains))))

    def opened(self, place: int) -> Replica:
        """With one more micro-batch, with nothing in it."""
        packed, grains = np.insert(self.packed, place, 0, axis=0), np.insert(self.grains, place, 0)
        return Replica(self.timer, packed, grains, np.insert(self.phases, place, 0.0, axis=-1), self.time_ns)

    def chosen(self, random: np.random.Generator, number: int) -> IntArray:
        """Random pairs (micro-batch, length) of sequences that are there, [number, 2]."""
        places = np.argwhere(self.packed > 0)
        return places[random.integers(0, len(places), number)]

    def changed(self, parts: list[tuple[IntArray, IntArray]]) -> FloatArray:
        """Times [rows] after changes: (micro-batches [rows], sequences that come [rows, n])."""
        timer, rows = self.timer, np.arange(len(parts[0][0]))
        phases = np.repeat(self.phases[..., None, :], len(rows), axis=-2)
        lags = np.tile(timer.lags(self.grains), (len(rows), 1))
        for place, comes in parts:
            phases[..., rows, place] = timer.phases(self.packed[place] + comes)
            lags[rows, place] = timer.lags(self.grains[place] + comes @ timer.grains)
        return timer.times(phases, lags)

    def ordered(self, orders: IntArray) -> FloatArray:
        """Times [rows] with its micro-batches in ``orders`` [rows, v]."""
        return self.timer.times(self.phases[:, :, orders], self.timer.lags(self.grains)[orders])


CHANGES = 128
"""Changes looked at in a round: many together take little longer than few."""

# What share of the rounds changes places, opens a micro-batch, has one sequence exchanged for many, and stays
# inside the slowest replica; of those for one how many are for none.
_PLACES, _OPENS, _MANY, _WITHIN, _NOTHING = 0.25, 0.05, 0.2, 0.5, 0.4
# What a round takes by itself, in work of one stage for one micro-batch.
_ROUND = 60
# The threshold at first and in the end, as parts of the time.
_FIRST, _LAST = 3e-3, 1e-5


def improved(timer: Timer, replicas: list[IntArray], effort: int, changes: int = CHANGES) -> list[IntArray]:
    """The best packing met in rounds of so many changes of the slowest replica, as many as ``effort`` allows."""
    found = improved_replicas([Replica.of(timer, one) for one in replicas], effort, changes)
    return [one.packed for one in found]


def improved_replicas(replicas: Sequence[Replica], effort: int, changes: int = CHANGES) -> list[Replica]:
    """The same of replicas, each of which may have a timer of its own."""
    random = np.random.default_rng(1)
    held = list(replicas)
    if not any(len(one.packed) for one in held):
        return held
    rounds = effort // (_ROUND + max(map(_work, held)))
    best, least = list(held), max(one.time_ns for one in held)
    for turn in range(rounds):
        threshold = _FIRST * (_LAST / _FIRST) ** (turn / rounds)
        times = [one.time_ns for one in held]
        slow = int(np.argmax(times))
        limit = times[slow] * (1.0 + threshold)
        kind = random.random()
        if kind < _PLACES and held[slow].timer.num_stages > 1:
            found = _moved(held[slow], limit, random, changes)
            if found is not None:
                held[slow] = found
        else:
            other = slow if random.random() < _WITHIN or len(held) == 1 else int(random.integers(len(held)))
            pair = _exchanged(held[slow], held[other], kind, limit, random, changes)
            if pair is not None:
                held[slow], held[other] = pair
        now = max(one.time_ns for one in held)
        if now < least:
            best, least = list(held), now
    return best


def _work(one: Replica) -> int:
    """Stages times micro-batches and stages, of a pipeline."""
    num_stages = one.timer.num_stages
    return num_stages * (num_stages + len(one.packed)) if num_stages > 1 else 0


def _exchanged(
    here: Replica, there: Replica, kind: float, limit: float, random: np.random.Generator, changes: int
) -> tuple[Replica, Replica] | None:
    """Sequences of ``here`` in the place of some of ``there``, which may be the same replica; the best of some
    changes, if it is below the limit."""
    same = here is there
    if kind > 1.0 - _OPENS or not len(there.packed):
        kind = 1.0
        there = there.opened(int(random.integers(len(there.packed) + 1)))
        here = there if same else here
    make = _for_many if 1.0 - _OPENS - _MANY < kind <= 1.0 - _OPENS else _for_one
    source, target, goes = make(here, there, random, changes)
    grains = goes @ here.timer.grains
    fits = here.grains[source] - grains <= here.timer.most_grains
    fits &= there.grains[target] + grains <= there.timer.most_grains
    fits &= goes.any(axis=1)
    if same:
        fits &= source != target
    source, target, goes = source[fits], target[fits], goes[fits]
    if not len(source):
        return None
    if same:
        times = here.changed([(source, -goes), (target, goes)])
    else:
        times = np.maximum(here.changed([(source, -goes)]), there.changed([(target, goes)]))
    best = int(times.argmin())
    if times[best] >= limit:
        return None
    first = here.packed.copy()
    second = first if same else there.packed.copy()
    first[source[best]] -= goes[best]
    second[target[best]] += goes[best]
    one = Replica.of(here.timer, first)
    return one, one if same else Replica.of(there.timer, second)


_Change = tuple[IntArray, IntArray, IntArray]


def _for_one(here: Replica, there: Replica, random: np.random.Generator, changes: int) -> _Change:
    """Random sequences of ``here``, each for one of ``there`` or for none: (from [rows], to [rows], goes [rows,
    n])."""
    rows = np.arange(changes)
    give = here.chosen(random, changes)
    empty = np.flatnonzero(~there.packed.any(axis=1))
    if len(empty):
        take, some = np.full((changes, 2), empty[0]), np.zeros(changes, dtype=bool)
    else:
        take, some = there.chosen(random, changes), random.random(changes) >= _NOTHING
    goes = np.zeros((changes, here.packed.shape[1]), dtype=np.int64)
    goes[rows, give[:, 1]] = 1
    goes[rows[some], take[some, 1]] -= 1
    return give[:, 0], take[:, 0], goes


def _for_many(here: Replica, there: Replica, random: np.random.Generator, changes: int) -> _Change:
    """One sequence of ``here`` or of ``there`` for random others that make room for it: as in ``_for_one``."""
    back = random.random() < 0.5
    one, other = (there, here) if back else (here, there)
    source, length = one.chosen(random, 1)[0].tolist()
    target = int(random.integers(len(other.packed)))
    missing = other.grains[target] + one.timer.grains[length] - other.timer.most_grains
    goes = np.zeros((changes, one.packed.shape[1]), dtype=np.int64)
    goes[:, length] = 1
    held = np.repeat(np.arange(len(one.timer.grains)), other.packed[target])
    held = held[held < length]
    if len(held):
        mixed = held[random.random((changes, len(held))).argsort(axis=1)]
        before = np.cumsum(one.timer.grains[mixed], axis=1) - one.timer.grains[mixed]
        rows, columns = np.nonzero(before < missing)
        np.subtract.at(goes, (rows, mixed[rows, columns]), 1)
    places = np.full(changes, source), np.full(changes, target)
    return (places[1], places[0], -goes) if back else (*places, goes)


def _moved(one: Replica, limit: float, random: np.random.Generator, changes: int) -> Replica | None:
    """Micro-batches in another order: two exchanged, or one elsewhere; the best of some below the limit."""
    number = len(one.packed)
    places, (first, second) = np.arange(number), random.integers(0, number, (2, changes, 1))
    exchanged = np.where(places == first, second, np.where(places == second, first, places))
    # Without the first one, which comes to stand at the second place.
    others = places - (places > second)
    elsewhere = np.where(places == second, first, others + (others >= first))
    orders = np.where(random.random((changes, 1)) < 0.5, exchanged, elsewhere)
    times = one.ordered(orders)
    best = int(times.argmin())
    return Replica.of(one.timer, one.packed[orders[best]]) if times[best] < limit else None
