"""Steps by other planners' published rules for the same sequences, strategies and exact times, for comparison.

 - *bucketing*: one strategy for all. Sequences of one bucket share micro-batches, filled to the strategy's
   capacity; the strategy is the one with the shortest step.
 - *HotSPa*: a strategy for every bucket. Buckets end at the longest sequence and at published lengths; a bucket's
   sequences, longest first, are packed greedily up to the bucket's end, one pack a micro-batch; pack i goes to
   replica i mod dp; the shortest bucket runs first, the longest last, and its strategy is the home. HotSPa is
   given its strategies by hand: here every bucket has the strategy under which it takes least time by itself,
   reduction included. Packs beyond a multiple of dp, which its runtime drops, run here.
 - *FlexSP*: ``flexsp_rule``.

Every figure is the exact time of a plan that fits (``strategy_tables``, ``switches``): strategies of several
buckets have the memory of a step of several strategies. Sequences of one strategy form one group.

Source: HotSPa (SOSP 2024), artefact ccchengff/HotSPa-AE 941a18d: hotspa/scripts/llama_hot_switch.sh (ends of
buckets c1 and c2), hotspa/llama_hot_switch.py (packing, order); as in ``hotspa_export``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from milpplan.errors import InfeasibleError
from milpplan.groups.problem import GroupedProblem
from milpplan.groups.strategies import Strategy
from milpplan.groups.tours import tour_time_ns
from milpplan.lengths.flexsp_rule import flexsp_step
from milpplan.lengths.records import BaselineStep
from milpplan.lengths.strategy_tables import Packed, StrategyTables
from milpplan.lengths.switches import NEVER_NS, Switches
from milpplan.simulation.layout_columns import IntArray
from milpplan.units import NS_PER_S

BOUNDARIES = ((16_384, 4_096), (16_384, 8_192, 4_096))
"""Ends of HotSPa's buckets below the longest sequence: its c1 and c2."""

Degrees = tuple[int, int, int]
"""(dp, tp, pp)."""


def baseline_steps(
    pool: StrategyTables, switches: Switches, time_limit_s: float, backend: str, given: Sequence[Degrees] = ()
) -> tuple[BaselineStep, ...]:
    """Return the steps of the three rules, whose programs stop after ``time_limit_s``.

    Args:
        pool: the strategies.
        switches: their switches.
        time_limit_s: limit of FlexSP's programs.
        backend: solver.
        given: degrees of HotSPa's strategies, longest bucket first: adds a step with these on its first buckets.
    """
    steps = [bucketing_step(pool), hotspa_step(pool, switches)]
    if given:
        steps.append(hotspa_step(pool, switches, given))
    return (*steps, flexsp_step(pool, time_limit_s, backend))


@dataclass(frozen=True, slots=True)
class Bucket:
    """Lengths above the end of the next shorter bucket, up to its own ``end``, as a slice of indices."""

    places: slice
    end: int


def buckets(lengths: IntArray, boundaries: Sequence[int]) -> list[Bucket]:
    """Return the nonempty buckets of the ascending ``lengths`` [n], the longest first."""
    ends = [*(end for end in sorted(boundaries) if end < lengths[-1]), int(lengths[-1])]
    edges = [0, *np.searchsorted(lengths, ends, side="right").tolist()]
    filled = [Bucket(slice(a, b), end) for (a, b), end in zip(pairwise(edges), ends, strict=True) if b > a]
    return filled[::-1]


def packs(lengths: IntArray, counts: IntArray, max_tokens: int) -> IntArray:
    """Pack sequences by first fit, longest first; return the packs, [m, n]."""
    rows: list[IntArray] = []
    tokens_left = np.zeros(int(counts.sum()), dtype=np.int64)
    for index in np.repeat(np.arange(len(lengths)), counts)[::-1].tolist():
        length = int(lengths[index])
        fitting = np.flatnonzero(tokens_left[: len(rows)] >= length)
        pack = int(fitting[0]) if len(fitting) else len(rows)
        if pack == len(rows):
            rows.append(np.zeros(len(lengths), dtype=np.int64))
            tokens_left[pack] = max_tokens
        rows[pack][index] += 1
        tokens_left[pack] -= length
    return np.array(rows).reshape(-1, len(lengths))


def dealt(rows: IntArray, num_replicas: int) -> tuple[IntArray, ...]:
    """Return the packs of every replica: pack i on replica i mod dp."""
    return tuple(rows[first::num_replicas] for first in range(num_replicas))


def bucketing_step(pool: StrategyTables) -> BaselineStep:
    """Return the shortest step of one strategy whose micro-batches hold sequences of one bucket."""
    bucketed = bucketed_step(pool)
    # Pools in which the longest sequence does not fit are refused.
    assert bucketed is not None
    member, packed = bucketed
    total = packed.time_ns + pool.reduce_ns(member) + pool.finish_ns(member)
    return BaselineStep("bucketing", (pool.members[member].candidate.name,), total / NS_PER_S, "")


def bucketed_step(
    pool: StrategyTables, below_ns: float = float("inf"), deadline: float = float("inf")
) -> tuple[int, Packed] | None:
    """Return the member with the shortest step of *bucketing* below ``below_ns``, and its packing; None if none
    was found before the ``deadline`` (of ``perf_counter``)."""
    best: tuple[int, Packed] | None = None
    for member in sorted(range(len(pool.members)), key=lambda key: pool.step_bound_ns(key, shared_memory=False)):
        if pool.step_bound_ns(member, shared_memory=False) >= below_ns or time.perf_counter() > deadline:
            break
        quanta = pool.max_quanta(member, shared_memory=False)
        if quanta * pool.load.token_quantum < pool.load.lengths[-1]:
            continue
        packed = _bucketed(pool, member, quanta)
        total = packed.time_ns + pool.reduce_ns(member) + pool.finish_ns(member)
        if total < below_ns:
            best, below_ns = (member, packed), total
    return best


def _bucketed(pool: StrategyTables, member: int, quanta: int) -> Packed:
    tokens = quanta * pool.load.token_quantum
    rows = [_of_bucket(pool, bucket, tokens) for bucket in buckets(pool.load.lengths, BOUNDARIES[0])]
    return pool.time_packing(member, dealt(np.concatenate(rows), _replicas(pool, member)), quanta)


def _of_bucket(pool: StrategyTables, bucket: Bucket, max_tokens: int) -> IntArray:
    """Return the packs of a bucket over all lengths of the workload, [m, n]."""
    counts = np.zeros_like(pool.load.counts)
    counts[bucket.places] = pool.load.counts[bucket.places]
    return packs(pool.load.lengths, counts, max_tokens)


def _replicas(pool: StrategyTables, member: int) -> int:
    return pool.members[member].candidate.layout.dp


def hotspa_step(pool: StrategyTables, switches: Switches, given: Sequence[Degrees] = ()) -> BaselineStep:
    """Return HotSPa's step, the shorter one of its two sets of buckets; ``given``: see ``baseline_steps``."""
    name = "HotSPa, its strategies" if given else "HotSPa"
    steps = [_Buckets(pool, switches, name, ends, given).step() for ends in BOUNDARIES[: 1 if given else None]]
    return min(steps, key=lambda step: float("inf") if step.step_time_s is None else step.step_time_s)


class _Buckets:
    """Buckets of one set of ends, under HotSPa's rules."""

    def __init__(
        self, pool: StrategyTables, switches: Switches, name: str, ends: Sequence[int], given: Sequence[Degrees]
    ) -> None:
        self.pool, self.switches, self.name, self.given = pool, switches, name, given
        self.buckets = buckets(pool.load.lengths, ends)

    def step(self) -> BaselineStep:
        """Return the step, or the reason why there is none."""
        try:
            return self._made()
        except InfeasibleError as error:
            return BaselineStep(self.name, (), None, str(error))

    def _made(self) -> BaselineStep:
        chosen = [self._chosen(index, bucket) for index, bucket in enumerate(self.buckets)]
        # Longest bucket first; the group of a strategy runs where its longest bucket is.
        order = tuple(dict.fromkeys(chosen))[::-1]
        groups = {member: self._group(member, chosen) for member in order}
        self.switches.price(order)
        times = self.switches.times(order)
        index = range(len(order))
        total = tour_time_ns(
            GroupedProblem(
                self.pool.load.lengths,
                self.pool.load.counts,
                tuple(self._strategy(member) for member in order),
                times,
                len(order),
                finish_ns=tuple(self.pool.finish_ns(member) for member in order),
            ),
            len(order) - 1,
            tuple(index),
            {position: groups[member].time_ns for position, member in enumerate(order)},
        )
        names = tuple(self.pool.members[member].candidate.name for member in order)
        if total >= NEVER_NS:
            raise InfeasibleError(f"The switches between {', '.join(names)} do not fit in memory.")
        return BaselineStep(self.name, names, total / NS_PER_S, "")

    def _strategy(self, member: int) -> Strategy:
        return self.pool.strategy_with_true_reduction(member, shared_memory=True)

    def _group(self, member: int, chosen: Sequence[int]) -> Packed:
        """Return the group of a strategy: its buckets, the longest first."""
        own = [bucket for bucket, owner in zip(self.buckets, chosen, strict=True) if owner == member]
        return self._timed(member, np.concatenate([self._packs(bucket) for bucket in own]))

    def _packs(self, bucket: Bucket) -> IntArray:
        return _of_bucket(self.pool, bucket, bucket.end)

    def _timed(self, member: int, rows: IntArray) -> Packed:
        quanta = self.pool.max_quanta(member, shared_memory=True)
        return self.pool.time_packing(member, dealt(rows, _replicas(self.pool, member)), quanta)

    def _chosen(self, index: int, bucket: Bucket) -> int:
        """Return the strategy with the shortest time for a bucket, of those that hold a full pack."""
        rows, best = self._packs(bucket), None
        for bound_ns, member in sorted(self._candidates(index, bucket)):
            if best is not None and bound_ns >= best[0]:
                break
            total = self._timed(member, rows).time_ns + self.pool.reduce_ns(member)
            best = (total, member) if best is None or total < best[0] else best
        if best is None:
            raise InfeasibleError(f"No strategy of the rule holds packs of {bucket.end:,} tokens beside others.")
        return best[1]

    def _candidates(self, index: int, bucket: Bucket) -> Iterator[tuple[float, int]]:
        """Yield strategies that hold the bucket's packs, each after its lower bound in ns."""
        load, part = self.pool.load, bucket.places
        for member, candidate in enumerate(self.pool.members):
            layout = candidate.candidate.layout
            required = self.given[min(index, len(self.given) - 1)] if self.given else None
            is_required = (layout.dp, layout.tp, layout.pp) == required and layout.cp == layout.ep == 1
            if candidate.shared_memory_quanta * load.token_quantum < bucket.end or not (
                required is None or is_required
            ):
                continue
            pipeline, replicas = self.pool.strategy(member, shared_memory=True).pipelines[0]
            work = float(load.counts[part] @ pipeline.units(load.lengths[part])) * pipeline.parts
            yield work / replicas + self.pool.reduce_ns(member), member
