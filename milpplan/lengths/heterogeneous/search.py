"""The best step of heterogeneous replicas, with a proved lower bound.

The program of ``step_bound`` gives the maximum work that steps a gap below the best one can do. If that is less
than all sequences, no such step exists, and the search is done. Else its replicas are packed, and their bounds are
sharpened near what they hold: for strategies of one stage by prices of micro-batches (``sequence_duals``), for
pipelines by work bounds first, then by classes of replicas and whole contents (``pipeline_capacity``). Linear
relaxations show which strategies matter before the more expensive integer programs run.
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

# Seconds per call for whole contents of a class's micro-batches.
_FILL_S = 0.3
# Share of all GPUs below which replicas of a class are ignored.
_FEW = 0.02
# Assumed relative growth of the step's time per missing share of the work.
_SLOPE = 0.1
# Relative precision of the shortest step that is left, for linear and integer programs.
_CLOSE, _CLOSER = 0.02, 2e-3
# Share of all sequences that is added to what a strategy holds before prices are sought, and the maximum number of
# price vectors.
_ALL, _PRICES = 0.02, 4
# Relative excess over the best step from which more effort is hopeless.
_HOPELESS = 0.02
# Ratio of the time of packings to that of proofs, while proofs make progress.
_PACKED = 0.5
# Maximum seconds of a program.
_PROGRAM_S = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class BestHeterogeneousStep:
    """Result of a search: the shortest ``step`` below the given time, None if none was found."""

    step: HeterogeneousStep | None
    bound_ns: float
    """Lower bound of all steps of the ``num_strategies`` strategies; infinite without a strategy."""
    num_strategies: int

    def record(self) -> HeterogeneousReplicas:
        """Return the record, in seconds, with what the replicas run."""
        step = self.step
        return HeterogeneousReplicas(
            None if step is None else step.time_ns / NS_PER_S,
            self.bound_ns / NS_PER_S if np.isfinite(self.bound_ns) else None,
            self.num_strategies,
            () if step is None else heterogeneous_turns(step),
        )


class HeterogeneousSearch:
    """Search for steps of heterogeneous replicas."""

    def __init__(self, pool: StrategyTables, gap: float, backend: str) -> None:
        self.pool, self.gap = pool, gap
        self.bound = HeterogeneousBound.of(pool, backend)
        self.num_strategies = len(self.bound.classes)
        self.packer = HeterogeneousPacker(pool)
        self.step: HeterogeneousStep | None = None
        # Some replica holds the longest sequence.
        longest_ns = [
            float(replica_class.latency_ns[-1]) + replica_class.fixed_cost_ns
            for replica_class in self.bound.classes
        ]
        self.bound_ns = min(longest_ns, default=np.inf)
        # By member and first length index.
        self.classes: dict[tuple[int, int], LongestSequenceClass] = {}
        # Prices and exclusions hold for steps below the first time; the second one is the time of the shortest
        # steps that were left.
        self.limit_ns = self.level_ns = np.inf
        # Whether programs are still linear; seconds of proofs since then, and of packings.
        self.linear, self.proved_s, self.packed_s = True, 0.0, 0.0
        # Numbers of replicas that were packed.
        self.packed_counts: set[tuple[tuple[int, int], ...]] = set()
        self.done = not np.isfinite(self.bound_ns)

    def run(self, below_ns: float, deadline: float, favourite: int | None = None) -> BestHeterogeneousStep:
        """Find and prove steps, until no step can beat ``below_ns`` by more than the gap.

        Args:
            below_ns: time to beat; it never rises from call to call.
            deadline: of ``perf_counter``.
            favourite: strategy whose replicas are tried first, as its packing is known to be good.
        """
        below_ns = self.limit_ns = min(self.limit_ns, below_ns)
        while not self.done and (now := time.perf_counter()) < deadline:
            incumbent_ns = below_ns if self.step is None else min(below_ns, self.step.time_ns)
            target_ns = cutoff_ns(incumbent_ns, self.gap)
            if self.bound_ns >= target_ns:
                break
            shared = self._shortest(target_ns, deadline, whole=not self.linear)
            if shared is None:
                break
            if self.linear:
                self.linear = self._know(shared)
                continue
            has_news = self._raise(shared, target_ns, deadline)
            self.linear = self._know(shared)
            proved = time.perf_counter()
            self.proved_s += proved - now
            if not has_news or self.packed_s < _PACKED * self.proved_s:
                has_news = self._pack(shared, deadline) or has_news
                if favourite is not None:
                    has_news = self._try(favourite, target_ns, deadline) or has_news
                self.packed_s += time.perf_counter() - proved
            is_open = has_news or self.linear
            self.done = not (is_open or self._polish(below_ns, deadline) or self._each(target_ns, deadline))
        return BestHeterogeneousStep(self.step, self.bound_ns, self.num_strategies)

    def _shortest(self, target_ns: float, deadline: float, *, whole: bool) -> Shared | None:
        """Raise the bound to the shortest steps that are not excluded; return what they can do, None if all below
        the target are excluded."""
        high = min(target_ns, self.level_ns)
        shared, growth = self._within(high, deadline, whole=whole), _CLOSER
        while shared.excludes:
            self.bound_ns = max(self.bound_ns, high)
            if high >= target_ns:
                return None
            if time.perf_counter() > deadline:
                return shared
            # The more work is missing, the longer the next trial.
            growth = max(growth, (1.0 - shared.share) * _SLOPE)
            high, growth = min(target_ns, high * (1.0 + growth)), 2.0 * growth
            shared = self._within(high, deadline, whole=whole)
        precision = _CLOSER if whole else _CLOSE
        while high - self.bound_ns > precision * high and time.perf_counter() < deadline:
            # A step shorter by the surplus of work does about all of it, unless integrality decides.
            low, trial = self.bound_ns, high / max(1.0, shared.share)
            if not low < trial < high * (1.0 - _CLOSER / 4):
                trial = (low + high) / 2
            relaxed = self._within(trial, deadline, whole=whole)
            if relaxed.excludes:
                self.bound_ns = trial
            else:
                shared, high = relaxed, trial
        self.level_ns = high
        return shared

    def _within(self, step_ns: float, deadline: float, *, whole: bool) -> Shared:
        seconds = min(_PROGRAM_S, max(0.5, deadline - time.perf_counter()))
        return self.bound.relax(step_ns, seconds, whole=whole)

    def _important(self, shared: Shared) -> list[tuple[ReplicaClass, float, FloatArray]]:
        """Return the classes that matter in a program's solution and were not refined since, with their number and
        the mean contents of each, [n]."""
        min_gpus = _FEW * self.pool.members[0].candidate.layout.num_gpus
        current = set(map(id, self.bound.classes))
        return [
            (replica_class, number, total / number)
            for replica_class, number, total in shared.assignment
            if number * replica_class.num_gpus > min_gpus and id(replica_class) in current
        ]

    def _know(self, shared: Shared) -> bool:
        """Add work bounds of pipelines and prices of strategies of one stage that have only linear bounds; return
        whether there were any."""
        is_new = False
        for replica_class, _, _ in self._important(shared):
            if self.pool.num_stages(replica_class.member) > 1:
                is_new = is_new or not self.pool.has_own_memory_bound(replica_class.member)
                self.pool.best_own_memory_bound(replica_class.member)
            elif not replica_class.prices:
                self._price(replica_class, self.pool.load.counts.astype(np.float64))
                is_new = True
        return is_new

    def _price(self, replica_class: ReplicaClass, wanted: FloatArray) -> None:
        """Add prices of a strategy of one stage that are highest for ``wanted`` [n] sequences."""
        time_ns = self.limit_ns - replica_class.fixed_cost_ns
        fitting = np.where(replica_class.can_hold(time_ns), wanted, 0.0)
        prices = replica_prices(self.pool, replica_class.member, fitting, time_ns, np.inf)
        self._replace(replica_class, [replace(replica_class, prices=(*replica_class.prices, prices))])

    def _replace(self, replica_class: ReplicaClass, others: list[ReplicaClass]) -> None:
        index = self.bound.classes.index(replica_class)
        self.bound.classes[index : index + 1] = others

    def _pack(self, shared: Shared, deadline: float) -> bool:
        """Pack the replicas of a solution; return whether their numbers are new."""
        numbers: Counter[int] = Counter()
        loads: dict[int, FloatArray] = {}
        for replica_class, number, held in shared.assignment:
            numbers[replica_class.member] += round(number)
            loads[replica_class.member] = loads.get(replica_class.member, 0.0) + held
        key = tuple(sorted(numbers.items()))
        if not key or key in self.packed_counts:
            return False
        self.packed_counts.add(key)
        step = self.packer.pack(numbers, loads, deadline)
        if step is not None and (self.step is None or step.time_ns < self.step.time_ns):
            self.step = step
        return True

    def _try(self, member: int, step_ns: float, deadline: float) -> bool:
        """Pack a step of ``step_ns`` with some replicas of a strategy; return whether it is new.

        If there is none, the strategy is in no step that counts, and is left out from then on.
        """
        if all(replica_class.member != member for replica_class in self.bound.classes):
            return False
        seconds = min(_PROGRAM_S, max(0.1, deadline - time.perf_counter()))
        shared = self.bound.relax(step_ns, seconds, some=member)
        if shared.excludes:
            self.bound.classes = [
                replica_class for replica_class in self.bound.classes if replica_class.member != member
            ]
            return True
        return self._pack(shared, deadline)

    def _each(self, step_ns: float, deadline: float) -> bool:
        """Try every strategy in turn until one gives something new; return whether one did."""
        members = list(dict.fromkeys(replica_class.member for replica_class in self.bound.classes))
        return any(time.perf_counter() > deadline or self._try(member, step_ns, deadline) for member in members)

    def _polish(self, below_ns: float, deadline: float) -> bool:
        """Improve the packing of the best step if it may beat ``below_ns``; return whether it became shorter."""
        step = self.step
        if step is None or step.time_ns > below_ns * (1.0 + _HOPELESS) or time.perf_counter() > deadline:
            return False
        self.step = self.packer.polish(step)
        return self.step is not step

    def _raise(self, shared: Shared, step_ns: float, deadline: float) -> bool:
        """Sharpen the bounds of a solution's classes near what each of them holds; return whether there was
        anything."""
        has_news = False
        for replica_class, number, held in self._important(shared):
            if time.perf_counter() > deadline:
                break
            if self.pool.num_stages(replica_class.member) > 1:
                end = min(deadline, time.perf_counter() + _FILL_S)
                has_news = self._fill(replica_class, held, step_ns - replica_class.fixed_cost_ns, end) or has_news
            elif len(replica_class.prices) < _PRICES:
                self._price(replica_class, number * held + _ALL * self.pool.load.counts)
                has_news = True
        return has_news

    def _fill(self, replica_class: ReplicaClass, held: FloatArray, time_ns: float, deadline: float) -> bool:
        """Sharpen the bound of a pipeline whose replicas hold so much within a time: divide them into classes,
        then refine these."""
        if replica_class.longest_range is None:
            classes = longest_sequence_classes(self.pool, replica_class.member, time_ns, held)
            replica_classes = [
                replace(
                    replica_class,
                    longest_range=(longest_class.first, longest_class.end),
                    capacity_rows=longest_class.capacity_rows,
                )
                for longest_class in classes
            ]
            self.classes |= {
                (replica_class.member, longest_class.first): longest_class for longest_class in classes
            }
            self._replace(replica_class, replica_classes)
            return True
        longest_class = self.classes[replica_class.member, replica_class.longest_range[0]]
        is_sharper = longest_class.sharpen(time_ns, held, deadline)
        if is_sharper:
            self._replace(replica_class, [replace(replica_class, capacity_rows=longest_class.capacity_rows)])
        return is_sharper
