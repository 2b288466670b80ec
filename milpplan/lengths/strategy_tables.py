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
    known: dict[tuple[int, int], Strategy] = field(default_factory=dict)
    bounded: dict[tuple[int, int], LinearBounds] = field(default_factory=dict)
    loaded: dict[LoadsKey, PipelineWorkBound] = field(default_factory=dict)
    fine: dict[int, PipelineWorkBound] = field(default_factory=dict)
    told: dict[int, PipelineWorkBound] = field(default_factory=dict)
    serial: dict[tuple[int, int], float] = field(default_factory=dict)
    whole: dict[tuple[int, int], LinearBounds] = field(default_factory=dict)
    held_for_sure: dict[tuple[int, int], int] = field(default_factory=dict)

    @staticmethod
    def of(problem: Problem, load: Load, most_grains: int | None = None) -> StrategyTables:
        """The candidates of the problem without those that others dominate, with micro-batches of up to
        ``most_grains`` (None: no more than there are of the load)."""
        most_grains = min(load.grains, MAX_GRAINS) if most_grains is None else most_grains
        found = sized(problem, candidates(problem), most_grains)
        alike: dict[Layout, list[SizedCandidate]] = {}
        for one in found:
            alike.setdefault(one.candidate.layout, []).append(one)
        kept = [one for one in found if not any(_dominates(other, one) for other in alike[one.candidate.layout])]
        if not any(one.alone_grains * load.grain >= load.lengths[-1] for one in kept):
            most = max(kept, key=lambda one: one.alone_grains)
            longest, held = int(load.lengths[-1]), most.alone_grains * load.grain
            if most.alone_grains == MAX_GRAINS:
                raise InvalidInputError(
                    f"A sequence of {longest:,} tokens is {longest // load.grain:,} times the {load.grain} tokens "
                    "that every sequence is padded to.",
                    f"At most {MAX_GRAINS:,} times expected: micro-batches are tabled up to there.",
                    f"Pad to more (--align {load.grain * -(-longest // held)}), or cut sequences (--seq-len).",
                )
            raise InfeasibleError(
                f"A sequence of {longest:,} tokens fits under no strategy.",
                f"The most that one holds is {held:,} tokens ({most.candidate.name}).",
                "Cut sequences at that length (--seq-len), or use more GPUs.",
            )
        sizes = [one.alone_grains for one in kept]
        tables = tables_of(problem, [one.candidate for one in kept], load, sizes)
        return StrategyTables(problem, load, tuple(kept), tuple(tables))

    def grains(self, member: int, *, beside: bool) -> int:
        """Grains that a micro-batch may hold, beside other strategies or alone."""
        one = self.members[member]
        return one.beside_grains if beside else one.alone_grains

    def strategy(self, member: int, *, beside: bool) -> Strategy:
        """The strategy as one of several, or as the only one of its step."""
        key = (member, self.grains(member, beside=beside))
        if key not in self.known:
            self.known[key] = strategy_of(self.tables[member], self.members[member], key[1])
        return self.known[key]

    def rampless(self, member: int, *, beside: bool) -> Strategy:
        """The same with its true reduction: tables of pipelines may count the passage of the first and the last
        micro-batch with it, as other bounds of the group do, too, and as no order of the step hides it."""
        one = self.strategy(member, beside=beside)
        return replace(one, reduce_ns=self.reduce_ns(member))

    def bounds(self, member: int, *, beside: bool) -> LinearBounds:
        """Linear bounds of the time of whatever the strategy holds."""
        key = (member, self.grains(member, beside=beside))
        if key not in self.bounded:
            self.bounded[key] = work_bounds(self.tables[member], self.members[member], key[1])
        return self.bounded[key]

    def forced(self, member: int, others: Sequence[int]) -> int:
        """How many sequences run under the strategy for sure beside ``others``, none of which holds them, and are
        whole in ``holding``."""
        key = (member, max(self.members[one].beside_grains for one in others))
        if key not in self.held_for_sure:
            number = int(self.load.counts[self.first_forced(member, others) :].sum())
            self.held_for_sure[key] = min(number, most_whole(self.members[member]))
        return self.held_for_sure[key]

    def first_forced(self, member: int, others: Sequence[int]) -> int:
        """From which length number on none of ``others`` holds a sequence, but the strategy holds the longest; the
        number of lengths where it does not."""
        if not np.isfinite(self.serial_ns(member, beside=True)):
            return len(self.load.lengths)
        most = max(self.grains(one, beside=True) for one in others) * self.load.grain
        return int((self.load.lengths <= most).sum())

    def holding(self, member: int, number: int) -> LinearBounds:
        """Bounds of groups beside other strategies that hold the ``number`` longest sequences."""
        key = (member, number)
        if key not in self.whole:
            grains = self.grains(member, beside=True)
            make = forced_bounds if self.num_stages(member) == 1 else forced_pipeline_bounds
            self.whole[key] = make(self.tables[member], self.members[member], grains, number)
        return self.whole[key]

    def held_ns(self, member: int, counts: IntArray) -> float:
        """What so many sequences of every length [n] take at least beside other strategies, but for what is known
        of the loads of pipelines."""
        held = counts.astype(np.float64)
        found = self.bounds(member, beside=True).at(held)
        # The longest of all that are held, every one.
        missing = np.flatnonzero(counts < self.load.counts)
        number = int(counts[missing[-1] + 1 :].sum()) if len(missing) else int(counts.sum())
        number = min(number, most_whole(self.members[member]))
        return max(found, self.holding(member, number).at(held)) if number else found

    def loads(self, member: int, *, beside: bool, exact: bool = False) -> PipelineWorkBound:
        """The bound of a pipeline by its load; dear where it is ``exact``."""
        # With as much memory alone these are not the same, either: lines and classes differ.
        key = (member, beside, exact)
        if key not in self.loaded:
            share, grains = BESIDE_SHARE if beside else 1.0, self.grains(member, beside=beside)
            self.loaded[key] = PipelineWorkBound.of(
                self.tables[member], self.members[member], grains, share, exact=exact
            )
        return self.loaded[key]

    def lengthened(self, member: int, enough_ns: float) -> PipelineWorkBound:
        """``loads`` alone, the dearest known, with what the longest sequence adds, up to ``enough_ns``."""
        exact = (member, False, True) in self.loaded
        found = self.loads(member, beside=False, exact=exact)
        if not found.classes:
            found = found.lengthened(enough_ns)
            self.loaded[member, False, exact] = found
        return found

    def alone(self, member: int) -> PipelineWorkBound:
        """The most that is known of a pipeline alone."""
        known = self.told.get(member, self.loaded.get((member, False, True)))
        return self.loads(member, beside=False) if known is None else known

    def knows_alone(self, member: int) -> bool:
        """Whether more than linear bounds is known of a pipeline alone."""
        return member in self.told or any((member, False, exact) in self.loaded for exact in (False, True))

    def tell(self, member: int, loads: PipelineWorkBound) -> None:
        """Bounds of a pipeline alone from elsewhere, if they are more than what is known: with lines of other
        stages, so nothing is raised further from there."""
        if loads.highest > self.alone(member).highest:
            self.told[member] = loads

    def join(self, loaded: Mapping[LoadsKey, PipelineWorkBound]) -> None:
        """What ``loads`` and ``lengthened`` gave elsewhere."""
        for key, one in loaded.items():
            if key not in self.loaded or (one.classes and not self.loaded[key].classes):
                self.loaded[key] = one

    def contents(self, member: int, *, beside: bool = False) -> MicroBatchPricing:
        """What micro-batches of a pipeline may hold."""
        return MicroBatchPricing.of(
            self.tables[member], self.num_stages(member), self.grains(member, beside=beside)
        )

    def know(self, member: int, loads: PipelineWorkBound) -> None:
        """More of a pipeline alone."""
        self.loaded[member, False, True] = loads
        if member in self.told and self.told[member].highest <= loads.highest:
            del self.told[member]

    def classified(self, member: int, *, only_longest: bool = False) -> PipelineWorkBound:
        """``finer`` with groups told apart by their longest sequence."""
        grains = self.grains(member, beside=True)
        fitting = int((self.load.lengths <= grains * self.load.grain).sum())
        return self.finer(member).classified(fitting, only_longest=only_longest)

    def finer(self, member: int) -> PipelineWorkBound:
        """``loads`` beside other strategies, with a bound that is high for parts of the load, too."""
        if member not in self.fine:
            self.fine[member] = self.loads(member, beside=True).finer()
        return self.fine[member]

    def serial_ns(self, member: int, *, beside: bool) -> float:
        """Least time of a group with the longest sequence; infinite where that does not fit."""
        key = (member, self.grains(member, beside=beside))
        if key not in self.serial:
            self.serial[key] = float(serial_times(self.tables[member], self.members[member], key[1])[-1])
        return self.serial[key]

    def least_ns(self, member: int, *, beside: bool) -> float:
        """What all sequences take under the strategy at least, with its reduction and finish.

        By ``bounds``, by the passage of the longest through all stages, and by what is known of ``loads``;
        infinite where one does not fit.
        """
        grains = self.grains(member, beside=beside)
        if grains * self.load.grain < self.load.lengths[-1]:
            return float("inf")
        found = [self.bounds(member, beside=beside).at(self.load.counts.astype(np.float64))]
        found.append(self.serial_ns(member, beside=beside))
        known = [self.loaded.get((member, beside, exact)) for exact in (False, True)]
        found += [one.highest for one in known if one is not None]
        return max(found) + self.reduce_ns(member) + self.finish_ns(member)

    def num_stages(self, member: int) -> int:
        """Stages of its pipelines."""
        return self.members[member].candidate.layout.pp

    def finish_ns(self, member: int) -> int:
        """What ends a step at this home."""
        return finish_ns(self.members[member])

    def once_ns(self, members: Sequence[int]) -> int:
        """What a step of several strategies takes once at least, switches apart: their reductions, and the least
        finish."""
        return sum(map(self.reduce_ns, members)) + min(map(self.finish_ns, members))

    def reduce_ns(self, member: int) -> int:
        """The reduction of its gradients."""
        return once_ns(self.members[member], Term.REDUCE)

    def packed(
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
            return min((self.timed(member, self._whole(chosen, one), most_grains) for one in ways), key=_time_ns)
        found = pack(kind, _RoughCuts(kind), counts[chosen], _ROUNDS, deadline)
        if found is None:
            return None
        return self._improved(member, self._whole(chosen, found.replicas), most_grains, Effort.LITTLE)

    def polished(self, member: int, packed: Packed, most_grains: int, care: Effort = Effort.MORE) -> Packed:
        """A packing improved with so much care: a quarter of a second, one, three."""
        if self.load.rules.padded:
            return packed
        found = self._improved(member, packed.replicas, most_grains, care)
        return min(packed, found, key=_time_ns)

    def _improved(self, member: int, replicas: tuple[IntArray, ...], most_grains: int, care: Effort) -> Packed:
        timer = Timer.of(self.tables[member], most_grains)
        return self.timed(member, tuple(improved(timer, list(replicas), care)), most_grains)

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
            micro_batch_tokens=most_grains * self.load.grain,
            time_s=packed.time_ns / NS_PER_S,
            reduce_s=reduce_s,
        )

    def micro_batches(self, replicas: Sequence[IntArray]) -> MicroBatches:
        """Lengths of the sequences of every micro-batch of replicas [v, n]."""
        lengths = self.load.lengths
        return tuple(tuple(tuple(np.repeat(lengths, row).tolist()) for row in one) for one in replicas)

    def timed(self, member: int, replicas: tuple[IntArray, ...], most_grains: int) -> Packed:
        """Replicas with their exact time; refuses micro-batches beyond memory."""
        return self.all_timed([(member, replicas, most_grains)])[0]

    def all_timed(self, parts: Sequence[tuple[int, tuple[IntArray, ...], int]]) -> list[Packed]:
        """``timed`` of several members, in one pass of the cost model."""
        given = [(self.members[member].candidate, replicas) for member, replicas, _ in parts]
        for (one, replicas), (*_, most_grains) in zip(given, parts, strict=True):
            for replica in replicas:
                tokens = replica @ self.load.lengths
                if len(tokens) and (tokens.max() > most_grains * self.load.grain or tokens.min() <= 0):
                    raise IllegalPlanError(
                        f"A micro-batch of {one.name} holds {int(tokens.max())} tokens.",
                        f"At most {most_grains * self.load.grain} expected.",
                    )
        times = replicas_of_several(self.problem, given, self.load.lengths, self.load.rules.mask)
        return [Packed(replicas, int(each.max())) for (_, replicas), each in zip(given, times, strict=True)]


def _time_ns(packed: Packed) -> int:
    return packed.time_ns


def _dominates(other: SizedCandidate, one: SizedCandidate) -> bool:
    """Whether ``other`` recomputes less than ``one`` in the same layout and holds as many tokens: every packing of
    ``one`` is one of ``other``, no slower, with the same states, reduction and switches."""
    more = other.alone_grains >= one.alone_grains and other.beside_grains >= one.beside_grains
    return recomputes_less(other, one) and more


def recomputes_less(other: SizedCandidate, one: SizedCandidate) -> bool:
    """Whether ``other`` recomputes less than ``one`` in the same layout: none of its micro-batches is slower."""
    order = ("none", "selective", "full")
    a, b = other.candidate, one.candidate
    return a.layout == b.layout and order.index(a.recompute) < order.index(b.recompute)
