"""The best step of heterogeneous replicas, with a proved lower bound.

A program over the numbers of replicas (``HeterogeneousBound``) gives the maximum work that steps a gap below the
best one can do. If that is less than all sequences, no such step exists, and the search is done. Else its replicas
are packed, and their bounds are sharpened near what they hold: for strategies of one stage by prices of
micro-batches (``master``), for pipelines by work bounds. Linear relaxations show which strategies matter
before the more expensive integer programs run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from milpplan.lengths import Packed, StrategyTables, cutoff_ns
from milpplan.lengths.bounds.master import replica_duals
from milpplan.lengths.cost_tables import Timer
from milpplan.lengths.deadline import Deadline
from milpplan.lengths.heterogeneous.count_program import (
    HeterogeneousStep,
    ReplicaClass,
    Shared,
    UsedKind,
    have_places,
    heterogeneous_members,
    heterogeneous_turns,
    replica_gpus,
    solved,
)
from milpplan.lengths.records import HeterogeneousReplicas
from milpplan.lengths.search_parameters import PARAMETERS, SOLVER_TOLERANCE
from milpplan.lengths.single.load_shapes import packings_by_shape
from milpplan.lengths.tabled.local_search import Replica, improved_replicas
from milpplan.optimize.milp.backends import AUTO
from milpplan.simulation import FloatArray, IntArray
from milpplan.units import NS_PER_S


@dataclass(frozen=True, eq=False)
class HeterogeneousPacker:
    """Packer of a pool's strategies side by side.

    A heuristic, whose results are timed exactly: the assignment of the program is rounded, packed on each
    strategy's replicas, and then improved by local search over all replicas together: sequences move between them
    whatever their strategies.
    """

    pool: StrategyTables
    timers: dict[int, Timer] = field(default_factory=dict)

    def pack(
        self, numbers: Mapping[int, int], loads: Mapping[int, FloatArray], deadline: Deadline
    ) -> HeterogeneousStep | None:
        """Pack a step of some replicas.

        Args:
            numbers: number of replicas by member.
            loads: approximate sequences [n] by member.
            deadline: after it with little effort.

        Returns:
            The step; None if not all GPUs can be filled, or a strategy was not packed.
        """
        pool, counts_of = self.pool, self._filled(numbers)
        if counts_of is None:
            return None
        replicas: list[Replica] = []
        owners: list[int] = []
        rounded = self._whole(loads)
        if rounded is None:
            return None
        for member, counts in rounded.items():
            packed = self._alone(member, counts, counts_of[member], deadline)
            if packed is None:
                return None
            replicas += [Replica.of(self._timer(member), replica) for replica in packed.replicas]
            owners += [member] * counts_of[member]
        for member in sorted(set(counts_of) - set(owners)):
            empty = np.zeros((0, len(pool.load.counts)), dtype=np.int64)
            replicas += [Replica.of(self._timer(member), empty)] * counts_of[member]
            owners += [member] * counts_of[member]
        return self._step(owners, improved_replicas(replicas, PARAMETERS.first_local_effort))

    def _alone(self, member: int, counts: IntArray, number: int, deadline: Deadline) -> Packed | None:
        """Pack ``counts`` [n] sequences on ``number`` replicas of a strategy; pipelines prefer load shapes unless
        these are much longer."""
        pool, quanta = self.pool, self._grains(member)
        first_packing = pool.pack(member, counts, quanta, deadline, number)
        if first_packing is None or pool.num_stages(member) == 1:
            return first_packing
        work_bound, load = pool.best_own_memory_bound(member), replace(pool.load, counts=counts)
        sequence_loads = work_bound.sequence_loads * work_bound.num_replicas / number
        scaled = replace(
            work_bound,
            sequence_loads=sequence_loads,
            num_replicas=number,
            total_load=float(sequence_loads @ counts),
        )
        end = deadline.within(PARAMETERS.heterogeneous_shapes_s)
        packings = [
            pool.time_packing(member, replicas, quanta)
            for replicas in packings_by_shape(scaled, load, quanta, end)
        ]
        best = min(packings, key=lambda packing: packing.time_ns, default=first_packing)
        return best if best.time_ns <= first_packing.time_ns * (1.0 + PARAMETERS.local_gain) else first_packing

    def polish(self, step: HeterogeneousStep) -> HeterogeneousStep:
        """Improve a step by a longer local search; return the shorter one."""
        pairs = [(member, replica) for member, packed in step.packed.items() for replica in packed.replicas]
        replicas = [Replica.of(self._timer(member), replica) for member, replica in pairs]
        improved_step = self._step(
            [member for member, _ in pairs], improved_replicas(replicas, PARAMETERS.longer_local_effort)
        )
        return min(step, improved_step, key=lambda replica: replica.time_ns)

    def _filled(self, numbers: Mapping[int, int]) -> dict[int, int] | None:
        """Add empty replicas so that all GPUs are filled; None if that is impossible."""
        pool, counts_of = self.pool, dict(numbers)
        free_gpus = pool.members[0].candidate.layout.num_gpus
        free_gpus -= sum(number * replica_gpus(pool, member) for member, number in counts_of.items())
        for member in sorted(
            [*counts_of, *heterogeneous_members(pool)], key=lambda candidate: -replica_gpus(pool, candidate)
        ):
            size = replica_gpus(pool, member)
            extended = {**counts_of, member: counts_of.get(member, 0) + free_gpus // size}
            if free_gpus and free_gpus % size == 0 and have_places(pool, extended):
                return extended
        return counts_of if have_places(pool, counts_of) else None

    def _whole(self, loads: Mapping[int, FloatArray]) -> dict[int, IntArray] | None:
        """Round ``loads`` to whole sequences, the longest first; None if a sequence fits nowhere.

        A remaining sequence goes to the strategy that is furthest behind its share of the time.
        """
        pool, members = self.pool, list(loads)
        shares = np.array([pool.linear_bounds(member, shared_memory=False).shares[0] for member in members])
        wanted = np.array([loads[member] for member in members])
        counts, fits = pool.load.counts, np.isfinite(shares)
        if not fits.any(axis=0).all():
            return None
        # A stopped program may have left sequences out.
        wanted = np.where(fits & (wanted.sum(axis=0) < 1e-6), 1.0, wanted)
        wanted *= counts / np.maximum(wanted.sum(axis=0), 1e-9)
        rounded = np.zeros(wanted.shape, dtype=np.int64)
        behind = np.zeros(len(members))
        for length in range(len(counts) - 1, -1, -1):
            takers = np.flatnonzero(wanted[:, length] > 0.0)
            floors = np.floor(wanted[:, length] + 1e-6).astype(np.int64)
            remainders = wanted[:, length] - floors
            for _ in range(int(counts[length] - floors.sum())):
                behind_ns = behind[takers] + remainders[takers] * shares[takers, length]
                chosen = takers[int(behind_ns.argmax())]
                floors[chosen] += 1
                remainders[chosen] -= 1.0
            behind[takers] += remainders[takers] * shares[takers, length]
            rounded[:, length] = floors
        return {member: row for member, row in zip(members, rounded, strict=True) if row.any()}

    def _step(self, owners: list[int], replicas: list[Replica]) -> HeterogeneousStep:
        """Return the exact step."""
        packings = {}
        for member in dict.fromkeys(owners):
            own = [replica.packed for owner, replica in zip(owners, replicas, strict=True) if owner == member]
            packings[member] = self.pool.time_packing(member, tuple(own), self._grains(member))
        return HeterogeneousStep.of(self.pool, packings)

    def _timer(self, member: int) -> Timer:
        if member not in self.timers:
            self.timers[member] = Timer.of(self.pool.tables[member], self._grains(member))
        return self.timers[member]

    def _grains(self, member: int) -> int:
        return self.pool.max_quanta(member, shared_memory=False)


@dataclass(eq=False)
class HeterogeneousBound:
    """All classes of replicas of a pool, and the excluded steps.

    A step of time S leaves its replicas S less their fixed cost, reduction and finish, which is that of the
    slowest strategy in use. So strategies are divided into *levels* of the fixed cost: in a step of a level some
    replica has one of its strategies and none a higher one, so every replica has S less the minimum of the level,
    or less its own fixed cost. If the program (``count_program``) leaves less than the workload for every level,
    there is no such step. What was excluded for a level stays excluded for shorter steps.
    """

    pool: StrategyTables
    backend: str
    classes: list[ReplicaClass]
    excluded: dict[float, float] = field(default_factory=dict)
    """By level, given by its minimum fixed cost: the longest step that is excluded."""
    levels: list[float] = field(default_factory=list)
    """Minimum fixed cost of every level."""

    @staticmethod
    def of(pool: StrategyTables, backend: str) -> HeterogeneousBound:
        """Start with one class for every member."""
        return HeterogeneousBound(
            pool, backend, [ReplicaClass.of(pool, member) for member in heterogeneous_members(pool)]
        )

    def relax(self, step_ns: float, seconds: float, *, whole: bool = True, some: int | None = None) -> Shared:
        """Return what steps of ``step_ns`` can do at most.

        Args:
            step_ns: time of the step.
            seconds: time limit of all programs together.
            whole: whether numbers of replicas and of long sequences are integers.
            some: a member of which some replica is used; None: any.
        """
        loosest, end = Shared(0.0), Deadline.after(seconds)
        for level_min, level_end in self._levels(step_ns):
            if step_ns <= self.excluded.get(level_min, 0.0):
                continue
            relaxed = self._level(step_ns, (level_min, level_end), end.left_s, whole, some)
            if relaxed.excludes and some is None:
                self.excluded[level_min] = step_ns
            loosest = max(loosest, relaxed, key=lambda candidate: candidate.share)
        return loosest

    def _levels(self, step_ns: float) -> list[tuple[float, float]]:
        """Return the minimum fixed cost and the end of every level, computed once."""
        if not self.levels:
            for fixed_cost in sorted({float(replica_class.fixed_cost_ns) for replica_class in self.classes}):
                if not self.levels or fixed_cost > self.levels[-1] + PARAMETERS.fixed_cost_level * step_ns:
                    self.levels.append(fixed_cost)
        ends = [*self.levels[1:], float("inf")]
        return list(zip(self.levels, ends, strict=True))

    def _level(
        self, step_ns: float, level: tuple[float, float], seconds: float, whole: bool, some: int | None
    ) -> Shared:
        """Solve the program of one level, whose fixed costs are at least the first value and below the second."""
        used = []
        for replica_class in self.classes:
            time_ns = step_ns / (1.0 - SOLVER_TOLERANCE) - max(level[0], replica_class.fixed_cost_ns)
            holds = replica_class.can_hold(time_ns)
            if replica_class.fixed_cost_ns < level[1] and holds.any() and len(rows := replica_class.rows(time_ns)):
                used.append(UsedKind(replica_class, holds, rows).strengthened)
        needed = [lambda replica_class: replica_class.fixed_cost_ns >= level[0]]
        if some is not None:
            needed.append(lambda replica_class: replica_class.member == some)
        # CP-SAT cannot solve linear relaxations.
        backend = AUTO if self.backend == "cpsat" and not whole else self.backend
        return solved(self.pool, used, (backend, seconds), whole, needed)


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
        # Prices and exclusions hold for steps below the first time; the second one is the time of the shortest
        # steps that were left.
        self.limit_ns = self.level_ns = np.inf
        # Whether programs are still linear; number of proofs since then, and of packings.
        self.linear, self.num_proofs, self.num_packings = True, 0, 0
        # Numbers of replicas that were packed.
        self.packed_counts: set[tuple[tuple[int, int], ...]] = set()
        self.done = not np.isfinite(self.bound_ns)

    def run(self, below_ns: float, deadline: Deadline, favourite: int | None = None) -> BestHeterogeneousStep:
        """Find and prove steps, until no step can beat ``below_ns`` by more than the gap.

        Args:
            below_ns: time to beat; it never rises from call to call.
            deadline: end of the search.
            favourite: strategy whose replicas are tried first, as its packing is known to be good.
        """
        below_ns = self.limit_ns = min(self.limit_ns, below_ns)
        while not self.done and not deadline.passed:
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
            has_news = self._raise(shared, deadline)
            self.linear = self._know(shared)
            self.num_proofs += 1
            # A packing for two proofs, while proofs make progress.
            if not has_news or 2 * self.num_packings < self.num_proofs:
                self.num_packings += 1
                has_news = self._pack(shared, deadline) or has_news
                if favourite is not None:
                    has_news = self._try(favourite, target_ns, deadline) or has_news
            is_open = has_news or self.linear
            self.done = not (is_open or self._polish(below_ns, deadline) or self._each(target_ns, deadline))
        return BestHeterogeneousStep(self.step, self.bound_ns, self.num_strategies)

    def _shortest(self, target_ns: float, deadline: Deadline, *, whole: bool) -> Shared | None:
        """Raise the bound to the shortest steps that are not excluded; return what they can do, None if all below
        the target are excluded."""
        high = min(target_ns, self.level_ns)
        shared, growth = self._within(high, deadline, whole=whole), PARAMETERS.integer_precision
        while shared.excludes:
            self.bound_ns = max(self.bound_ns, high)
            if high >= target_ns:
                return None
            if deadline.passed:
                return shared
            # The more work is missing, the longer the next trial.
            growth = max(growth, (1.0 - shared.share) * PARAMETERS.growth_of_missing)
            high, growth = min(target_ns, high * (1.0 + growth)), 2.0 * growth
            shared = self._within(high, deadline, whole=whole)
        precision = PARAMETERS.integer_precision if whole else PARAMETERS.linear_precision
        while high - self.bound_ns > precision * high and not deadline.passed:
            # A step shorter by the surplus of work does about all of it, unless integrality decides.
            low, trial = self.bound_ns, high / max(1.0, shared.share)
            if not low < trial < high * (1.0 - PARAMETERS.integer_precision / 4):
                trial = (low + high) / 2
            relaxed = self._within(trial, deadline, whole=whole)
            if relaxed.excludes:
                self.bound_ns = trial
            else:
                shared, high = relaxed, trial
        self.level_ns = high
        return shared

    def _within(self, step_ns: float, deadline: Deadline, *, whole: bool) -> Shared:
        seconds = min(PARAMETERS.max_program_s, max(0.5, deadline.left_s))
        return self.bound.relax(step_ns, seconds, whole=whole)

    def _important(self, shared: Shared) -> list[tuple[ReplicaClass, float, FloatArray]]:
        """Return the classes that matter in a program's solution and were not refined since, with their number and
        the mean contents of each, [n]."""
        min_gpus = PARAMETERS.ignored_gpus * self.pool.members[0].candidate.layout.num_gpus
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
        prices = replica_duals(self.pool, replica_class.member, fitting, time_ns)
        self._replace(replica_class, [replace(replica_class, prices=(*replica_class.prices, prices))])

    def _replace(self, replica_class: ReplicaClass, others: list[ReplicaClass]) -> None:
        index = self.bound.classes.index(replica_class)
        self.bound.classes[index : index + 1] = others

    def _pack(self, shared: Shared, deadline: Deadline) -> bool:
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

    def _try(self, member: int, step_ns: float, deadline: Deadline) -> bool:
        """Pack a step of ``step_ns`` with some replicas of a strategy; return whether it is new.

        If there is none, the strategy is in no step that counts, and is left out from then on.
        """
        if all(replica_class.member != member for replica_class in self.bound.classes):
            return False
        seconds = min(PARAMETERS.max_program_s, max(0.1, deadline.left_s))
        shared = self.bound.relax(step_ns, seconds, some=member)
        if shared.excludes:
            self.bound.classes = [
                replica_class for replica_class in self.bound.classes if replica_class.member != member
            ]
            return True
        return self._pack(shared, deadline)

    def _each(self, step_ns: float, deadline: Deadline) -> bool:
        """Try every strategy in turn until one gives something new; return whether one did."""
        members = list(dict.fromkeys(replica_class.member for replica_class in self.bound.classes))
        return any(deadline.passed or self._try(member, step_ns, deadline) for member in members)

    def _polish(self, below_ns: float, deadline: Deadline) -> bool:
        """Improve the packing of the best step if it may beat ``below_ns``; return whether it became shorter."""
        step = self.step
        if step is None or step.time_ns > below_ns * (1.0 + PARAMETERS.local_gain) or deadline.passed:
            return False
        self.step = self.packer.polish(step)
        return self.step is not step

    def _raise(self, shared: Shared, deadline: Deadline) -> bool:
        """Add prices of a solution's strategies of one stage near what each holds; return whether there were
        any."""
        has_news = False
        for replica_class, number, held in self._important(shared):
            if deadline.passed:
                break
            if (
                self.pool.num_stages(replica_class.member) == 1
                and len(replica_class.prices) < PARAMETERS.max_prices
            ):
                self._price(replica_class, number * held + PARAMETERS.wanted_share * self.pool.load.counts)
                has_news = True
        return has_news
