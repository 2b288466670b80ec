"""The strategies of one workload: their tables for ``groups``, and plans of ``groups`` at their exact times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np

from milpplan.errors import IllegalPlanError, InfeasibleError, InvalidInputError
from milpplan.groups.bounds.pipeline_bounds import CountCuts, PipelineCuts
from milpplan.groups.packing.pack import pack
from milpplan.groups.problem import Kind
from milpplan.groups.strategies import Strategy
from milpplan.lengths.bounds.exclusive_pipelines import forced_pipeline_bounds
from milpplan.lengths.bounds.exclusive_sequences import forced_bounds, most_whole
from milpplan.lengths.bounds.micro_batch_pricing import MicroBatchPricing
from milpplan.lengths.bounds.work_bounds import (
    BESIDE_SHARE,
    LinearBounds,
    PipelineWorkBound,
    serial_times,
    work_bounds,
)
from milpplan.lengths.candidates import SizedCandidate, candidates, sized
from milpplan.lengths.cost_tables import (
    Load,
    Tables,
    finish_ns,
    once_ns,
    strategy_of,
    tables_of,
    typical_pipeline,
)
from milpplan.lengths.records import LengthGroup, MicroBatches
from milpplan.lengths.replica_time import replicas_of_several
from milpplan.lengths.single.packing_local_search import Timer, improved
from milpplan.lengths.single.padded_packing import rectangles
from milpplan.problem.plan import Layout
from milpplan.problem.problem import Problem
from milpplan.simulation.layers.terms import Term
from milpplan.simulation.layout_columns import IntArray
from milpplan.units import NS_PER_S

# No capacity differs from this many grains more: tables are made up to here.
MAX_GRAINS = 4096


# Moves of sequences that a packing begins with.
_ROUNDS = 30


class Effort(IntEnum):
    """Work of improving a packing at its own times: in the search, of the packings that count more, and of the one
    that counts most."""

    LITTLE = 60_000
    MORE = 250_000
    MOST = 750_000


LoadsKey = tuple[int, bool, bool]
"""A member, whether it is beside others, and whether its programs are exact."""


class _RoughCuts(PipelineCuts):
    """Cuts for packing only: which numbers of micro-batches look best, without the programs that prove it."""

    @property
    def slots(self) -> tuple[CountCuts, ...]:
        """Slots without profiles."""
        return self.rough


@dataclass(frozen=True, eq=False)
class Packed:
    """The sequences of one strategy on its replicas [v, n] and their exact time in ns, without the reduction."""

    replicas: tuple[IntArray, ...]
    time_ns: int

    @property
    def counts(self) -> IntArray:
        """Sequences of every length, [n]."""
        return np.asarray(sum(replica.sum(axis=0) for replica in self.replicas))


@dataclass(frozen=True, eq=False)
class StrategyTables:
    """All strategies that hold something, with tables; ``problem`` is that of one grain."""

    problem: Problem
    load: Load
    members: tuple[SizedCandidate, ...]
    tables: tuple[Tables, ...]
    strategy_cache: dict[tuple[int, int], Strategy] = field(default_factory=dict)
    linear_bounds_cache: dict[tuple[int, int], LinearBounds] = field(default_factory=dict)
    work_bound_cache: dict[LoadsKey, PipelineWorkBound] = field(default_factory=dict)
    fine_work_bounds: dict[int, PipelineWorkBound] = field(default_factory=dict)
    adopted_work_bounds: dict[int, PipelineWorkBound] = field(default_factory=dict)
    latency_cache: dict[tuple[int, int], float] = field(default_factory=dict)
    longest_bounds_cache: dict[tuple[int, int], LinearBounds] = field(default_factory=dict)
    num_exclusive_cache: dict[tuple[int, int], int] = field(default_factory=dict)

    @staticmethod
    def of(problem: Problem, load: Load, most_grains: int | None = None) -> StrategyTables:
        """The candidates of the problem without those that others dominate, with micro-batches of up to
        ``most_grains`` (None: no more than there are of the load)."""
        most_grains = min(load.num_quanta, MAX_GRAINS) if most_grains is None else most_grains
        found = sized(problem, candidates(problem), most_grains)
        alike: dict[Layout, list[SizedCandidate]] = {}
        for one in found:
            alike.setdefault(one.candidate.layout, []).append(one)
        kept = [one for one in found if not any(_dominates(other, one) for other in alike[one.candidate.layout])]
        if not any(one.own_memory_quanta * load.token_quantum >= load.lengths[-1] for one in kept):
            most = max(kept, key=lambda one: one.own_memory_quanta)
            longest, held = int(load.lengths[-1]), most.own_memory_quanta * load.token_quantum
            if most.own_memory_quanta == MAX_GRAINS:
                raise InvalidInputError(
                    f"A sequence of {longest:,} tokens is {longest // load.token_quantum:,} times the {load.token_quantum} tokens "
                    "that every sequence is padded to.",
                    f"At most {MAX_GRAINS:,} times expected: micro-batches are tabled up to there.",
                    f"Pad to more (--align {load.token_quantum * -(-longest // held)}), or cut sequences (--seq-len).",
                )
            raise InfeasibleError(
                f"A sequence of {longest:,} tokens fits under no strategy.",
                f"The most that one holds is {held:,} tokens ({most.candidate.name}).",
                "Cut sequences at that length (--seq-len), or use more GPUs.",
            )
        sizes = [one.own_memory_quanta for one in kept]
        tables = tables_of(problem, [one.candidate for one in kept], load, sizes)
        return StrategyTables(problem, load, tuple(kept), tuple(tables))

    def max_quanta(self, member: int, *, beside: bool) -> int:
        """Grains that a micro-batch may hold, beside other strategies or alone."""
        one = self.members[member]
        return one.shared_memory_quanta if beside else one.own_memory_quanta

    def strategy(self, member: int, *, beside: bool) -> Strategy:
        """The strategy as one of several, or as the only one of its step."""
        key = (member, self.max_quanta(member, beside=beside))
        if key not in self.strategy_cache:
            self.strategy_cache[key] = strategy_of(self.tables[member], self.members[member], key[1])
        return self.strategy_cache[key]

    def strategy_with_true_reduction(self, member: int, *, beside: bool) -> Strategy:
        """The same with its true reduction: tables of pipelines may count the passage of the first and the last
        micro-batch with it, as other bounds of the group do, too, and as no order of the step hides it."""
        one = self.strategy(member, beside=beside)
        return replace(one, reduce_ns=self.reduce_ns(member))

    def linear_bounds(self, member: int, *, beside: bool) -> LinearBounds:
        """Linear bounds of the time of whatever the strategy holds."""
        key = (member, self.max_quanta(member, beside=beside))
        if key not in self.linear_bounds_cache:
            self.linear_bounds_cache[key] = work_bounds(self.tables[member], self.members[member], key[1])
        return self.linear_bounds_cache[key]

    def num_exclusive(self, member: int, others: Sequence[int]) -> int:
        """How many sequences run under the strategy for sure beside ``others``, none of which holds them, and are
        whole in ``holding``."""
        key = (member, max(self.members[one].shared_memory_quanta for one in others))
        if key not in self.num_exclusive_cache:
            number = int(self.load.counts[self.first_exclusive(member, others) :].sum())
            self.num_exclusive_cache[key] = min(number, most_whole(self.members[member]))
        return self.num_exclusive_cache[key]

    def first_exclusive(self, member: int, others: Sequence[int]) -> int:
        """From which length number on none of ``others`` holds a sequence, but the strategy holds the longest; the
        number of lengths where it does not."""
        if not np.isfinite(self.latency_bound_ns(member, beside=True)):
            return len(self.load.lengths)
        most = max(self.max_quanta(one, beside=True) for one in others) * self.load.token_quantum
        return int((self.load.lengths <= most).sum())

    def bounds_with_longest(self, member: int, number: int) -> LinearBounds:
        """Bounds of groups beside other strategies that hold the ``number`` longest sequences."""
        key = (member, number)
        if key not in self.longest_bounds_cache:
            grains = self.max_quanta(member, beside=True)
            make = forced_bounds if self.num_stages(member) == 1 else forced_pipeline_bounds
            self.longest_bounds_cache[key] = make(self.tables[member], self.members[member], grains, number)
        return self.longest_bounds_cache[key]

    def group_bound_ns(self, member: int, counts: IntArray) -> float:
        """What so many sequences of every length [n] take at least beside other strategies, but for what is known
        of the loads of pipelines."""
        held = counts.astype(np.float64)
        found = self.linear_bounds(member, beside=True).at(held)
        # The longest of all that are held, every one.
        missing = np.flatnonzero(counts < self.load.counts)
        number = int(counts[missing[-1] + 1 :].sum()) if len(missing) else int(counts.sum())
        number = min(number, most_whole(self.members[member]))
        return max(found, self.bounds_with_longest(member, number).at(held)) if number else found

    def work_bound(self, member: int, *, beside: bool, exact: bool = False) -> PipelineWorkBound:
        """The bound of a pipeline by its load; dear where it is ``exact``."""
        # With as much memory alone these are not the same, either: lines and classes differ.
        key = (member, beside, exact)
        if key not in self.work_bound_cache:
            share, grains = BESIDE_SHARE if beside else 1.0, self.max_quanta(member, beside=beside)
            self.work_bound_cache[key] = PipelineWorkBound.of(
                self.tables[member], self.members[member], grains, share, exact=exact
            )
        return self.work_bound_cache[key]

    def work_bound_with_longest(self, member: int, enough_ns: float) -> PipelineWorkBound:
        """``loads`` alone, the dearest known, with what the longest sequence adds, up to ``enough_ns``."""
        exact = (member, False, True) in self.work_bound_cache
        found = self.work_bound(member, beside=False, exact=exact)
        if not found.classes:
            found = found.with_longest(enough_ns)
            self.work_bound_cache[member, False, exact] = found
        return found

    def best_own_memory_bound(self, member: int) -> PipelineWorkBound:
        """The most that is known of a pipeline alone."""
        known = self.adopted_work_bounds.get(member, self.work_bound_cache.get((member, False, True)))
        return self.work_bound(member, beside=False) if known is None else known

    def has_own_memory_bound(self, member: int) -> bool:
        """Whether more than linear bounds is known of a pipeline alone."""
        return member in self.adopted_work_bounds or any((member, False, exact) in self.work_bound_cache for exact in (False, True))

    def adopt_bound(self, member: int, loads: PipelineWorkBound) -> None:
        """Bounds of a pipeline alone from elsewhere, if they are more than what is known: with lines of other
        stages, so nothing is raised further from there."""
        if loads.workload_bound_ns > self.best_own_memory_bound(member).workload_bound_ns:
            self.adopted_work_bounds[member] = loads

    def merge_bounds(self, loaded: Mapping[LoadsKey, PipelineWorkBound]) -> None:
        """What ``loads`` and ``lengthened`` gave elsewhere."""
        for key, one in loaded.items():
            if key not in self.work_bound_cache or (one.classes and not self.work_bound_cache[key].classes):
                self.work_bound_cache[key] = one

    def micro_batch_pricing(self, member: int, *, beside: bool = False) -> MicroBatchPricing:
        """What micro-batches of a pipeline may hold."""
        return MicroBatchPricing.of(
            self.tables[member], self.num_stages(member), self.max_quanta(member, beside=beside)
        )

    def store_bound(self, member: int, loads: PipelineWorkBound) -> None:
        """More of a pipeline alone."""
        self.work_bound_cache[member, False, True] = loads
        if member in self.adopted_work_bounds and self.adopted_work_bounds[member].workload_bound_ns <= loads.workload_bound_ns:
            del self.adopted_work_bounds[member]

    def work_bound_by_class(self, member: int, *, only_longest: bool = False) -> PipelineWorkBound:
        """``finer`` with groups told apart by their longest sequence."""
        grains = self.max_quanta(member, beside=True)
        fitting = int((self.load.lengths <= grains * self.load.token_quantum).sum())
        return self.fine_work_bound(member).with_classes(fitting, only_longest=only_longest)

    def fine_work_bound(self, member: int) -> PipelineWorkBound:
        """``loads`` beside other strategies, with a bound that is high for parts of the load, too."""
        if member not in self.fine_work_bounds:
            self.fine_work_bounds[member] = self.work_bound(member, beside=True).refined()
        return self.fine_work_bounds[member]

    def latency_bound_ns(self, member: int, *, beside: bool) -> float:
        """Least time of a group with the longest sequence; infinite where that does not fit."""
        key = (member, self.max_quanta(member, beside=beside))
        if key not in self.latency_cache:
            self.latency_cache[key] = float(serial_times(self.tables[member], self.members[member], key[1])[-1])
        return self.latency_cache[key]

    def step_bound_ns(self, member: int, *, beside: bool) -> float:
        """What all sequences take under the strategy at least, with its reduction and finish.

        By ``bounds``, by the passage of the longest through all stages, and by what is known of ``loads``;
        infinite where one does not fit.
        """
        grains = self.max_quanta(member, beside=beside)
        if grains * self.load.token_quantum < self.load.lengths[-1]:
            return float("inf")
        found = [self.linear_bounds(member, beside=beside).at(self.load.counts.astype(np.float64))]
        found.append(self.latency_bound_ns(member, beside=beside))
        known = [self.work_bound_cache.get((member, beside, exact)) for exact in (False, True)]
        found += [one.workload_bound_ns for one in known if one is not None]
        return max(found) + self.reduce_ns(member) + self.finish_ns(member)

    def num_stages(self, member: int) -> int:
        """Stages of its pipelines."""
        return self.members[member].candidate.layout.pp

    def finish_ns(self, member: int) -> int:
        """What ends a step at this home."""
        return finish_ns(self.members[member])

    def fixed_cost_ns(self, members: Sequence[int]) -> int:
        """What a step of several strategies takes once at least, switches apart: their reductions, and the least
        finish."""
        return sum(map(self.reduce_ns, members)) + min(map(self.finish_ns, members))

    def reduce_ns(self, member: int) -> int:
        """The reduction of its gradients."""
        return once_ns(self.members[member], Term.REDUCE)

    def pack(
        self,
        member: int,
        counts: IntArray,
        most_grains: int,
        deadline: float = float("inf"),
        num_replicas: int | None = None,
    ) -> Packed | None:
        """``counts`` [n] sequences on the strategy's replicas, or on so many of them, None if no packing was
        found; exact time. After the ``deadline`` (of ``perf_counter``) the first packing that was found, a little
        improved."""
        one, layout = self.members[member], self.members[member].candidate.layout
        make = (lambda *given: strategy_of(*given).pipelines[0][0]) if layout.pp == 1 else typical_pipeline
        pipeline = make(self.tables[member], one, most_grains)
        chosen = np.flatnonzero(counts)
        lengths = self.load.lengths[chosen]
        kind = Kind(0, pipeline, num_replicas or layout.dp, lengths, counts[chosen])
        if not kind.fits.all():
            return None
        if self.load.rules.padded:
            ways = rectangles(kind, counts[chosen])
            return min((self.time_packing(member, self._whole(chosen, one), most_grains) for one in ways), key=_time_ns)
        found = pack(kind, _RoughCuts(kind), counts[chosen], _ROUNDS, deadline)
        if found is None:
            return None
        return self._improved(member, self._whole(chosen, found.replicas), most_grains, Effort.LITTLE)

    def polish(self, member: int, packed: Packed, most_grains: int, care: Effort = Effort.MORE) -> Packed:
        """A packing improved with so much care: a quarter of a second, one, three."""
        if self.load.rules.padded:
            return packed
        found = self._improved(member, packed.replicas, most_grains, care)
        return min(packed, found, key=_time_ns)

    def _improved(self, member: int, replicas: tuple[IntArray, ...], most_grains: int, care: Effort) -> Packed:
        timer = Timer.of(self.tables[member], most_grains)
        return self.time_packing(member, tuple(improved(timer, list(replicas), care)), most_grains)

    def _whole(self, chosen: IntArray, replicas: tuple[IntArray, ...]) -> tuple[IntArray, ...]:
        """Replicas over the lengths ``chosen`` as replicas over all."""
        whole = []
        for replica in replicas:
            row = np.zeros((len(replica), len(self.load.counts)), dtype=np.int64)
            row[:, chosen] = replica
            whole.append(row)
        return tuple(whole)

    def group(self, member: int, packed: Packed, most_grains: int, reduce_s: float) -> LengthGroup:
        """What runs under a strategy, as a record."""
        pairs = zip(self.load.lengths.tolist(), packed.counts.tolist(), strict=True)
        return LengthGroup(
            strategy=self.members[member].candidate.name,
            plan=self.members[member].candidate.plan,
            buckets=tuple((length, count) for length, count in pairs if count),
            micro_batches=self.micro_batches(packed.replicas),
            micro_batch_tokens=most_grains * self.load.token_quantum,
            time_s=packed.time_ns / NS_PER_S,
            reduce_s=reduce_s,
        )

    def micro_batches(self, replicas: Sequence[IntArray]) -> MicroBatches:
        """Lengths of the sequences of every micro-batch of replicas [v, n]."""
        lengths = self.load.lengths
        return tuple(tuple(tuple(np.repeat(lengths, row).tolist()) for row in one) for one in replicas)

    def time_packing(self, member: int, replicas: tuple[IntArray, ...], most_grains: int) -> Packed:
        """Replicas with their exact time; refuses micro-batches beyond memory."""
        return self.time_packings([(member, replicas, most_grains)])[0]

    def time_packings(self, parts: Sequence[tuple[int, tuple[IntArray, ...], int]]) -> list[Packed]:
        """``timed`` of several members, in one pass of the cost model."""
        given = [(self.members[member].candidate, replicas) for member, replicas, _ in parts]
        for (one, replicas), (*_, most_grains) in zip(given, parts, strict=True):
            for replica in replicas:
                tokens = replica @ self.load.lengths
                if len(tokens) and (tokens.max() > most_grains * self.load.token_quantum or tokens.min() <= 0):
                    raise IllegalPlanError(
                        f"A micro-batch of {one.name} holds {int(tokens.max())} tokens.",
                        f"At most {most_grains * self.load.token_quantum} expected.",
                    )
        times = replicas_of_several(self.problem, given, self.load.lengths, self.load.rules.mask)
        return [Packed(replicas, int(each.max())) for (_, replicas), each in zip(given, times, strict=True)]


def _time_ns(packed: Packed) -> int:
    return packed.time_ns


def _dominates(other: SizedCandidate, one: SizedCandidate) -> bool:
    """Whether ``other`` recomputes less than ``one`` in the same layout and holds as many tokens: every packing of
    ``one`` is one of ``other``, no slower, with the same states, reduction and switches."""
    more = other.own_memory_quanta >= one.own_memory_quanta and other.shared_memory_quanta >= one.shared_memory_quanta
    return recomputes_less(other, one) and more


def recomputes_less(other: SizedCandidate, one: SizedCandidate) -> bool:
    """Whether ``other`` recomputes less than ``one`` in the same layout: none of its micro-batches is slower."""
    order = ("none", "selective", "full")
    a, b = other.candidate, one.candidate
    return a.layout == b.layout and order.index(a.recompute) < order.index(b.recompute)
