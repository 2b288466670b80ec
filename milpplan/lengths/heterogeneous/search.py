"""The best step of unlike replicas, with its proof.

The program of ``unlike_bound`` says what steps a gap shorter than the best one leave. Where that is less than all
sequences, no such step is shorter, and all is done. Else its replicas are packed, and more is proved of them near
what they hold: prices of micro-batches under strategies of one stage (``team_prices``), and of pipelines loads
first, then classes of replicas and whole contents (``unlike_pipelines``). Programs without whole numbers say which
strategies count before the dearer ones do.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from milpplan.lengths.heterogeneous.capacity_rows import ReplicaClass
from milpplan.lengths.heterogeneous.count_program import Shared
from milpplan.lengths.heterogeneous.pack_replicas import HeterogeneousPacker
from milpplan.lengths.heterogeneous.pipeline_capacity import LongestSequenceClass, longest_sequence_classes
from milpplan.lengths.heterogeneous.replicas import HeterogeneousStep, heterogeneous_turns
from milpplan.lengths.heterogeneous.step_bound import HeterogeneousBound
from milpplan.lengths.records import HeterogeneousReplicas
from milpplan.lengths.side_by_side.sequence_duals import replica_prices
from milpplan.lengths.steps import cutoff_ns
from milpplan.lengths.strategy_tables import StrategyTables
from milpplan.simulation.layout_columns import FloatArray
from milpplan.units import NS_PER_S

# Seconds of whole contents of one kind's micro-batches.
_FILL_S = 0.3
# Fewer replicas than this share of what all GPUs hold do not count.
_FEW = 0.02
# How much longer steps are that do so much more, at least.
_SLOPE = 0.1
# How near programs come to the shortest steps that are left, without whole numbers and with.
_CLOSE, _CLOSER = 0.02, 2e-3
# Prices are sought for what a strategy holds and for this share of all sequences.
_ALL, _PRICES = 0.02, 4
# Steps that are longer than others by this part do not become shorter by more care.
_HOPELESS = 0.02
# Packings take this part of the time of proofs, as long as these say more.
_PACKED = 0.5
# Seconds of a program at most.
_PROGRAM_S = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class BestHeterogeneousStep:
    """The shortest ``step`` found below what was asked, None if none was; none of ``num_strategies`` takes less
    than ``bound_ns``, infinite without a strategy."""

    step: HeterogeneousStep | None
    bound_ns: float
    num_strategies: int

    def record(self) -> HeterogeneousReplicas:
        """In seconds, with what replicas run."""
        step = self.step
        return HeterogeneousReplicas(
            None if step is None else step.time_ns / NS_PER_S,
            self.bound_ns / NS_PER_S if np.isfinite(self.bound_ns) else None,
            self.num_strategies,
            () if step is None else heterogeneous_turns(step),
        )


class HeterogeneousSearch:
    """What is known of steps of unlike replicas."""

    def __init__(self, pool: StrategyTables, gap: float, backend: str) -> None:
        self.pool, self.gap = pool, gap
        self.bound = HeterogeneousBound.of(pool, backend)
        self.num_strategies = len(self.bound.classes)
        self.packer = HeterogeneousPacker(pool)
        self.step: HeterogeneousStep | None = None
        # Some replica holds the longest sequence.
        longest = [float(kind.latency_ns[-1]) + kind.fixed_cost_ns for kind in self.bound.classes]
        self.bound_ns = min(longest, default=np.inf)
        # By member and where they begin.
        self.classes: dict[tuple[int, int], LongestSequenceClass] = {}
        # Prices, and what is left out, hold for steps shorter than the first; steps of about as long as the second
        # were the shortest that were left.
        self.limit_ns = self.level_ns = np.inf
        # Whether programs have no whole numbers yet; seconds of proofs with them, and of packings.
        self.linear, self.proved_s, self.packed_s = True, 0.0, 0.0
        # Numbers of replicas that were packed.
        self.packed_counts: set[tuple[tuple[int, int], ...]] = set()
        self.done = not np.isfinite(self.bound_ns)

    def run(self, below_ns: float, deadline: float, favourite: int | None = None) -> BestHeterogeneousStep:
        """Find and prove, until no step can be shorter than ``below_ns`` by more than the gap, nothing more is to
        be had, or the ``deadline`` (of ``perf_counter``); what was looked at before is below what it was asked for
        then. Some steps are tried with replicas of a ``favourite``, of which it is known how well it is packed."""
        below_ns = self.limit_ns = min(self.limit_ns, below_ns)
        while not self.done and (now := time.perf_counter()) < deadline:
            known_ns = below_ns if self.step is None else min(below_ns, self.step.time_ns)
            target_ns = cutoff_ns(known_ns, self.gap)
            if self.bound_ns >= target_ns:
                break
            shared = self._shortest(target_ns, deadline, whole=not self.linear)
            if shared is None:
                break
            if self.linear:
                self.linear = self._know(shared)
                continue
            news = self._raise(shared, target_ns, deadline)
            self.linear = self._know(shared)
            proved = time.perf_counter()
            self.proved_s += proved - now
            if not news or self.packed_s < _PACKED * self.proved_s:
                news = self._pack(shared, deadline) or news
                if favourite is not None:
                    news = self._try(favourite, target_ns, deadline) or news
                self.packed_s += time.perf_counter() - proved
            more = news or self.linear
            self.done = not (more or self._polish(below_ns, deadline) or self._each(target_ns, deadline))
        return BestHeterogeneousStep(self.step, self.bound_ns, self.num_strategies)

    def _shortest(self, target_ns: float, deadline: float, *, whole: bool) -> Shared | None:
        """What about the shortest steps leave that are not excluded; None where all shorter than the target are.
        Raises the bound."""
        high = min(target_ns, self.level_ns)
        shared, further = self._within(high, deadline, whole=whole), _CLOSER
        while shared.excludes:
            self.bound_ns = max(self.bound_ns, high)
            if high >= target_ns:
                return None
            if time.perf_counter() > deadline:
                return shared
            # The more is missing, the further.
            further = max(further, (1.0 - shared.share) * _SLOPE)
            high, further = min(target_ns, high * (1.0 + further)), 2.0 * further
            shared = self._within(high, deadline, whole=whole)
        near = _CLOSER if whole else _CLOSE
        while high - self.bound_ns > near * high and time.perf_counter() < deadline:
            # A step shorter by what is done too much leaves about all, unless whole replicas decide.
            low, least = self.bound_ns, high / max(1.0, shared.share)
            if not low < least < high * (1.0 - _CLOSER / 4):
                least = (low + high) / 2
            found = self._within(least, deadline, whole=whole)
            if found.excludes:
                self.bound_ns = least
            else:
                shared, high = found, least
        self.level_ns = high
        return shared

    def _within(self, step_ns: float, deadline: float, *, whole: bool) -> Shared:
        seconds = min(_PROGRAM_S, max(0.5, deadline - time.perf_counter()))
        return self.bound.relax(step_ns, seconds, whole=whole)

    def _important(self, shared: Shared) -> list[tuple[ReplicaClass, float, FloatArray]]:
        """Kinds that do something in a program's answer, and of which nothing more is known since, their number,
        and what each holds on the mean, [n]."""
        least = _FEW * self.pool.members[0].candidate.layout.num_gpus
        there = set(map(id, self.bound.classes))
        return [
            (kind, number, held / number)
            for kind, number, held in shared.assignment
            if number * kind.num_gpus > least and id(kind) in there
        ]

    def _know(self, shared: Shared) -> bool:
        """Loads of pipelines and prices under strategies of one stage where only linear bounds are known; whether
        there are any."""
        new = False
        for kind, _, _ in self._important(shared):
            if self.pool.num_stages(kind.member) > 1:
                new = new or not self.pool.has_own_memory_bound(kind.member)
                self.pool.best_own_memory_bound(kind.member)
            elif not kind.prices:
                self._price(kind, self.pool.load.counts.astype(np.float64))
                new = True
        return new

    def _price(self, kind: ReplicaClass, wanted: FloatArray) -> None:
        """Prices under a strategy of one stage that are highest for so many sequences [n]."""
        time_ns = self.limit_ns - kind.fixed_cost_ns
        there = np.where(kind.can_hold(time_ns), wanted, 0.0)
        prices = replica_prices(self.pool, kind.member, there, time_ns, np.inf)
        self._replace(kind, [replace(kind, prices=(*kind.prices, prices))])

    def _replace(self, kind: ReplicaClass, others: list[ReplicaClass]) -> None:
        place = self.bound.classes.index(kind)
        self.bound.classes[place : place + 1] = others

    def _pack(self, shared: Shared, deadline: float) -> bool:
        """A step of an answer's replicas; whether it is a new one."""
        numbers: Counter[int] = Counter()
        loads: dict[int, FloatArray] = {}
        for kind, number, held in shared.assignment:
            numbers[kind.member] += round(number)
            loads[kind.member] = loads.get(kind.member, 0.0) + held
        key = tuple(sorted(numbers.items()))
        if not key or key in self.packed_counts:
            return False
        self.packed_counts.add(key)
        step = self.packer.pack(numbers, loads, deadline)
        if step is not None and (self.step is None or step.time_ns < self.step.time_ns):
            self.step = step
        return True

    def _try(self, member: int, step_ns: float, deadline: float) -> bool:
        """A step of so long with some replicas of a strategy, packed; whether that is new. Where there is none,
        the strategy is in no step that counts, and is left out from then on."""
        if all(kind.member != member for kind in self.bound.classes):
            return False
        seconds = min(_PROGRAM_S, max(0.1, deadline - time.perf_counter()))
        shared = self.bound.relax(step_ns, seconds, some=member)
        if shared.excludes:
            self.bound.classes = [kind for kind in self.bound.classes if kind.member != member]
            return True
        return self._pack(shared, deadline)

    def _each(self, step_ns: float, deadline: float) -> bool:
        """The same with every strategy in turn, until one is new; whether one was."""
        members = list(dict.fromkeys(kind.member for kind in self.bound.classes))
        return any(time.perf_counter() > deadline or self._try(one, step_ns, deadline) for one in members)

    def _polish(self, below_ns: float, deadline: float) -> bool:
        """The best step packed with more care, if it may be shorter than ``below_ns``; whether that made it so."""
        step = self.step
        if step is None or step.time_ns > below_ns * (1.0 + _HOPELESS) or time.perf_counter() > deadline:
            return False
        self.step = self.packer.polish(step)
        return self.step is not step

    def _raise(self, shared: Shared, step_ns: float, deadline: float) -> bool:
        """More of the kinds of an answer, near what each of them holds; whether there was anything."""
        found = False
        for kind, number, held in self._important(shared):
            if time.perf_counter() > deadline:
                break
            if self.pool.num_stages(kind.member) > 1:
                end = min(deadline, time.perf_counter() + _FILL_S)
                found = self._fill(kind, held, step_ns - kind.fixed_cost_ns, end) or found
            elif len(kind.prices) < _PRICES:
                self._price(kind, number * held + _ALL * self.pool.load.counts)
                found = True
        return found

    def _fill(self, kind: ReplicaClass, held: FloatArray, time_ns: float, deadline: float) -> bool:
        """More of a pipeline whose replicas hold so much within a time: classes by their longest sequence, then
        what these do at most."""
        if kind.longest_range is None:
            classes = longest_sequence_classes(self.pool, kind.member, time_ns, held)
            kinds = [replace(kind, longest_range=(one.first, one.end), capacity_rows=one.capacity_rows) for one in classes]
            self.classes |= {(kind.member, one.first): one for one in classes}
            self._replace(kind, kinds)
            return True
        led = self.classes[kind.member, kind.longest_range[0]]
        found = led.sharpen(time_ns, held, deadline)
        if found:
            self._replace(kind, [replace(kind, capacity_rows=led.capacity_rows)])
        return found
