"""Improving the packing of a pipelined strategy at its own times.

Heuristics only; answers are timed exactly by ``replicas``. ``groups.packing`` makes packings for equal stages and
one table of work; here every stage has its own layers and ends, and a micro-batch takes what ``tables`` says of
its tokens and its attention: per phase the larger of *ring exposed* and *ring hidden*, which is the exact time but
for waits of the host and last tiles.

Sequences of the slowest replica move or are exchanged, inside it or with the fastest one; its micro-batches change
places. Of some random changes the best is made in every round. The same packing gives the same answer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from milpplan.costs.columns import FloatArray, IntArray
from milpplan.lengths.tables import Tables, ring_times


@dataclass(frozen=True, eq=False)
class Timer:
    """Times of micro-batches of one strategy on every stage: ``base`` [2 ways, 2 phases, P, G] by grains, and
    ``attention`` [2 ways, 2 phases, P, n] what each sequence adds, ns; ``transfer`` [G]."""

    base: FloatArray
    attention: FloatArray
    transfer: FloatArray
    grains: IntArray

    @staticmethod
    def of(tables: Tables, most_grains: int) -> Timer:
        """All numbers of grains up to the most of a micro-batch."""
        stages = range(tables.candidate.layout.pp)
        times = ring_times(tables.problem, tables.candidate, np.arange(1, most_grains + 1), launches=True)
        base = [[one.forward, one.backward] for one in times]
        each = np.stack([[tables.attention([stage], phase, most_grains) for stage in stages] for phase in (0, 1)])
        slopes = np.array(tables.slopes)[:, None, None, None]
        return Timer(
            np.array(base, dtype=np.float64),
            slopes * each,
            tables.bare.transfer[:most_grains].astype(np.float64),
            tables.load.lengths // tables.load.grain,
        )

    @property
    def most_grains(self) -> int:
        """Grains of a full micro-batch."""
        return int(self.base.shape[-1])

    def phases(self, grains: IntArray, attention: FloatArray) -> FloatArray:
        """Forward and backward [2, P, ...] of micro-batches with ``grains`` [...] and summed ``attention``
        [2, 2, P, ...]; nothing takes no time."""
        place = np.maximum(grains, 1) - 1
        return np.where(grains > 0, (self.base[..., place] + attention).max(axis=0), 0.0)

    def held(self, packed: IntArray) -> tuple[IntArray, FloatArray]:
        """Grains [v] and attention [2, 2, P, v] of micro-batches [v, n]."""
        return packed @ self.grains, self.attention @ packed.T

    def time(self, packed: IntArray) -> float:
        """Time of one replica, ns."""
        grains, attention = self.held(packed)
        return float(self.times(self.phases(grains, attention), self.transfer[np.maximum(grains, 1) - 1]))

    def times(self, phases: FloatArray, lags: FloatArray) -> FloatArray:
        """Times of replicas [...] with phases [2, P, ..., v] and lags [..., v]: the recursion of ``replicas``, all
        of them together."""
        forward, backward = phases
        num_stages, number = forward.shape[0], forward.shape[-1]
        shape = forward.shape[1:-1]
        ends = [np.zeros(shape) for _ in range(num_stages)]
        done = [np.zeros(shape) for _ in range(num_stages + 1)]
        for turn in range(number + num_stages):
            arrival = np.zeros(shape)
            for stage in range(num_stages):
                old = turn - num_stages + stage
                if 0 <= old < number:
                    if stage + 1 < num_stages:
                        ends[stage] = np.maximum(ends[stage], done[stage + 1] + lags[..., old])
                    ends[stage] = done[stage] = ends[stage] + backward[stage, ..., old]
                if turn < number:
                    if stage:
                        ends[stage] = np.maximum(ends[stage], arrival + lags[..., turn])
                    ends[stage] = arrival = ends[stage] + forward[stage, ..., turn]
        return ends[0]


# Rounds of changes, and changes looked at in each.
_ROUNDS, _CHANGES = 80, 240


def improved(timer: Timer, replicas: list[IntArray], deadline: float = float("inf")) -> list[IntArray]:
    """Moves and swaps of sequences of the slowest replica, inside it or with the fastest, and of its
    micro-batches' places; the best of some of them in every round."""
    random = np.random.default_rng(1)
    held = list(replicas)
    times = [timer.time(one) for one in held]
    idle = 0
    for turn in range(_ROUNDS):
        slow = int(np.argmax(times))
        other = (slow, int(np.argmin(times)))[turn % 2] if len(held) > 1 else slow
        found = _best_change(timer, held[slow], held[other] if other != slow else None, times[slow], random)
        idle = 0 if found is not None else idle + 1
        if found is not None:
            held[slow] = found[0]
            times[slow] = timer.time(held[slow])
            if other != slow:
                held[other] = found[1]
                times[other] = timer.time(held[other])
        if idle > 5 or time.perf_counter() > deadline:
            break
    return held


def _best_change(
    timer: Timer, here: IntArray, there: IntArray | None, time_ns: float, random: np.random.Generator
) -> tuple[IntArray, IntArray] | None:
    """The change that leaves the slower of the two least time, if that is less than ``time_ns``."""
    same = there is None
    second = here if there is None else there
    give, take = _chosen(here, random), _chosen(second, random)
    nothing = random.random(_CHANGES) < 0.4
    taken = np.where(nothing, -1, take[:, 1])
    extra = timer.grains[give[:, 1]] - np.where(nothing, 0, timer.grains[take[:, 1]])
    fits = (here @ timer.grains)[give[:, 0]] - extra <= timer.most_grains
    fits &= (second @ timer.grains)[take[:, 0]] + extra <= timer.most_grains
    if same:
        fits &= give[:, 0] != take[:, 0]
    rows = np.flatnonzero(fits)
    if not len(rows):
        return None
    give, target, taken = give[rows], take[rows, 0], taken[rows]
    if same:
        times = _changed(timer, here, [(give[:, 0], give[:, 1], taken, -1), (target, give[:, 1], taken, 1)])
    else:
        times = np.maximum(
            _changed(timer, here, [(give[:, 0], give[:, 1], taken, -1)]),
            _changed(timer, second, [(target, give[:, 1], taken, 1)]),
        )
    best = int(times.argmin())
    if times[best] >= time_ns * (1.0 - 1e-9):
        return _turned(timer, here, time_ns, random) if same else None
    first, last = here.copy(), here.copy() if same else second.copy()
    last = first if same else last
    first[give[best, 0], give[best, 1]] -= 1
    last[target[best], give[best, 1]] += 1
    if taken[best] >= 0:
        last[target[best], taken[best]] -= 1
        first[give[best, 0], taken[best]] += 1
    return first[first.any(axis=1)], last[last.any(axis=1)]


def _chosen(packed: IntArray, random: np.random.Generator) -> IntArray:
    """Random pairs (micro-batch, length) of sequences that are there, [changes, 2]."""
    places = np.argwhere(packed > 0)
    return places[random.integers(0, len(places), _CHANGES)]


_Part = tuple[IntArray, IntArray, IntArray, int]


def _changed(timer: Timer, packed: IntArray, parts: list[_Part]) -> FloatArray:
    """Times of a replica [rows] after changes: (micro-batch, length that comes, one that goes or -1, sign)."""
    grains, attention = timer.held(packed)
    number = len(parts[0][0])
    rows = np.arange(number)
    grains = np.tile(grains, (number, 1))
    attention = np.repeat(attention[..., None, :], number, axis=-2)
    lengths = np.append(timer.grains, 0)
    cores = np.concatenate([timer.attention, np.zeros((*timer.attention.shape[:-1], 1))], axis=-1)
    for place, comes, goes, sign in parts:
        grains[rows, place] += sign * (lengths[comes] - lengths[goes])
        attention[..., rows, place] += sign * (cores[..., comes] - cores[..., goes])
    lags = timer.transfer[np.maximum(grains, 1) - 1]
    return timer.times(timer.phases(grains, attention), lags)


def _turned(
    timer: Timer, packed: IntArray, time_ns: float, random: np.random.Generator
) -> tuple[IntArray, IntArray] | None:
    """The micro-batches of a replica with two of them in each other's place, if that is shorter."""
    number = len(packed)
    orders = np.tile(np.arange(number), (_CHANGES, 1))
    rows, pair = np.arange(_CHANGES), random.integers(0, number, (2, _CHANGES))
    orders[rows, pair[0]], orders[rows, pair[1]] = pair[1], pair[0]
    grains, attention = timer.held(packed)
    phases = timer.phases(grains, attention)[:, :, orders]
    times = timer.times(phases, timer.transfer[grains - 1][orders])
    best = int(times.argmin())
    return (packed[orders[best]],) * 2 if times[best] < time_ns * (1.0 - 1e-9) else None
