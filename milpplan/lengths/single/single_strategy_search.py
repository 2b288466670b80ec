"""The best step of one strategy for all sequences, with a proved lower bound.

Every strategy has the memory to itself. Strategies of one stage are packed at once. Pipelines are bounded, packed
and bounded further, always the one with the lowest bound next, which is the bound of all single strategies. The
shortest steps are packed again with more effort.

A strategy is left alone once its bound exceeds ``below_ns``, the time of the best step of any kind. Later calls
resume where the last one stopped.

**Incumbents** are packed steps of single strategies, which are improved. The first packing of a strategy is
improved with more effort if the strategy may become the best. A pipeline has several starts
(``packing_local_search``): whether two of the longest sequences share a replica matters, and the best start shows
only after a little improvement. So every start gets some effort, and the best ones get more.
"""

from __future__ import annotations

import time

import numpy as np

from milpplan.errors import InfeasibleError
from milpplan.lengths import Packed, Step, StrategyTables, cutoff_ns, recomputes_less
from milpplan.lengths.baselines import bucketed_step
from milpplan.lengths.bounds.configuration_bound import ConfigurationBound, around_larger, with_larger
from milpplan.lengths.bounds.long_sequence import WindowBound
from milpplan.lengths.bounds.longest_sequence_branching import LongestSequenceBranching
from milpplan.lengths.bounds.master import single_strategy_bound_ns
from milpplan.lengths.bounds.work_bounds import DEEP, PipelineWorkBound
from milpplan.lengths.parameters import PARAMETERS
from milpplan.lengths.single.packing_local_search import packings_by_shape
from milpplan.lengths.single.replica_feasibility import ReplicaFeasibility
from milpplan.lengths.strategy_tables import Effort
from milpplan.simulation import IntArray


class Incumbents:
    """Packings by strategy and the ``best`` step of one; ``pack_time_s``: seconds of the last packing with more
    effort."""

    def __init__(self, pool: StrategyTables) -> None:
        self.pool = pool
        self.best: Step | None = None
        self.packed: dict[int, Packed] = {}
        # Improved with more effort (0), or with maximum effort: the step's time after that.
        self.polished: dict[int, int] = {}
        # Other starts of pipelines.
        self.starts: dict[int, list[Packed]] = {}
        # Strategies whose starts were improved.
        self.starts_improved: set[int] = set()
        self.pack_time_s = 0.0

    def take(self, step: Step, pack_time_s: float, *, rough: bool = False) -> None:
        """Take over a step from elsewhere; its packing was improved with more effort in ``pack_time_s`` seconds
        unless it is ``rough``."""
        home, packed = step.home, step.packed[step.home]
        self.best = (
            step if self.best is None else min(self.best, step, key=lambda candidate_step: candidate_step.time_ns)
        )
        if home not in self.packed or packed.time_ns <= self.packed[home].time_ns:
            self.packed[home] = packed
            if not rough:
                self.polished.setdefault(home, 0)
        self.pack_time_s = max(self.pack_time_s, pack_time_s)

    def pack(self, member: int) -> None:
        """Pack a strategy if its bound is below the incumbent."""
        bound_ns = self.pool.step_bound_ns(member, shared_memory=False)
        if not np.isfinite(bound_ns) or (self.best is not None and bound_ns >= self.best.time_ns):
            return
        begin = time.perf_counter()
        packed = self.pool.pack(
            member, self.pool.load.counts, self._grains(member), begin + PARAMETERS.first_packing_s
        )
        if packed is not None:
            self.starts[member] = self._shaped(member)
            self.packed[member] = min([packed, *self.starts[member][:1]], key=_time_ns)
            self._take(member)

    def bucket(self, deadline: float) -> None:
        """Try plain buckets under one strategy, pipelines included."""
        if not self.pool.load.rules.padded:
            bucketed = bucketed_step(self.pool, float("inf") if self.best is None else self.best.time_ns, deadline)
            if bucketed is not None:
                self._keep(self.single_step(*bucketed))

    def step(self, member: int) -> Step:
        """Return the step of a packed strategy."""
        return self.single_step(member, self.packed[member])

    def single_step(self, member: int, packed: Packed) -> Step:
        """Return the step of one strategy with a packing."""
        total = packed.time_ns + self.pool.reduce_ns(member) + self.pool.finish_ns(member)
        return Step(member, (member,), {member: packed}, total)

    def shortest(self) -> list[int]:
        """Return the packed strategies with the shortest steps."""
        return sorted(self.packed, key=lambda member: self.step(member).time_ns)[: PARAMETERS.max_improved_singles]

    def is_rough(self, member: int, below_ns: float = np.inf) -> bool:
        """Return whether more effort on a strategy was not spent yet and may make it the best one below
        ``below_ns``."""
        if member in self.polished or self.best is None:
            return False
        max_excess = (
            PARAMETERS.hopeless_excess
            if self.pool.num_stages(member) == 1
            else PARAMETERS.hopeless_pipeline_excess
        )
        return self.step(member).time_ns <= min(below_ns, self.best.time_ns) * (1.0 + max_excess)

    def is_finished(self, member: int) -> bool:
        """Return whether maximum effort no longer improves a strategy."""
        return member not in self.packed or self.polished.get(member) == self.step(member).time_ns

    def improve(self, member: int, *, maximum: bool) -> None:
        """Improve a strategy with more effort, or with maximum effort; a pipeline from its best start."""
        if not maximum:
            self._choose(member)
        begin = time.perf_counter()
        effort = Effort.MOST if maximum else Effort.MORE
        self.packed[member] = self.pool.polish(member, self.packed[member], self._grains(member), effort)
        self._take(member)
        self.pack_time_s = (time.perf_counter() - begin) / (PARAMETERS.max_effort_ratio if maximum else 1.0)
        self.polished[member] = self.step(member).time_ns if maximum else 0

    def restart(self, member: int) -> bool:
        """Improve all starts of a pipeline a little, or the next one with more effort; return whether there was
        one."""
        if member not in self.packed:
            # The step has plain buckets.
            self.pack(member)
            return member in self.packed
        if self._choose(member):
            return True
        starts = self.starts[member]
        if not starts or starts[0].time_ns > self.packed[member].time_ns * (1.0 + PARAMETERS.far_improved_start):
            return False
        begin = time.perf_counter()
        self._begin(member, self.pool.polish(member, starts.pop(0), self._grains(member)))
        self.pack_time_s = time.perf_counter() - begin
        return True

    def _choose(self, member: int) -> bool:
        """Improve all starts of a pipeline a little, once; return whether there were any."""
        if member not in self.starts:
            # The worker process packed it.
            self.starts[member] = self._shaped(member)
        if member in self.starts_improved:
            return False
        self.starts_improved.add(member)
        starts = self.starts[member]
        shortest = min([self.packed[member], *starts], key=_time_ns).time_ns
        promising = [start for start in starts if start.time_ns <= shortest * (1.0 + PARAMETERS.far_start)]
        capacity = self._grains(member)
        starts = sorted(
            (self.pool.polish(member, start, capacity, Effort.LITTLE) for start in promising), key=_time_ns
        )
        if starts:
            self._begin(member, starts.pop(0))
        self.starts[member] = starts
        return bool(promising)

    def offer(self, member: int, replicas: tuple[IntArray, ...]) -> None:
        """Offer a packing from elsewhere; it is kept if it is shorter."""
        packed = self.pool.time_packing(member, replicas, self._grains(member))
        if member not in self.packed:
            self.packed[member] = packed
            self._take(member)
        self._begin(member, packed)

    def _begin(self, member: int, packed: Packed) -> None:
        """Keep another packing of a strategy if it is shorter."""
        if packed.time_ns < self.packed[member].time_ns:
            self.packed[member] = packed
            self._take(member)

    def _take(self, member: int) -> None:
        """Update the incumbent by the step of a packed strategy."""
        self._keep(self.step(member))

    def _keep(self, step: Step) -> None:
        """Keep a step if it is shorter than the incumbent."""
        if self.best is None or step.time_ns < self.best.time_ns:
            self.best = step

    def _shaped(self, home: int) -> list[Packed]:
        """Return packings of a pipeline from the load shapes of its best bounds, the shortest first."""
        pool, capacity = self.pool, self._grains(home)
        if pool.num_stages(home) == 1 or pool.load.rules.padded:
            return []
        end = time.perf_counter() + PARAMETERS.shapes_s
        packings = packings_by_shape(pool.work_bound(home, shared_memory=False), pool.load, capacity, end)
        return sorted((pool.time_packing(home, replicas, capacity) for replicas in packings), key=_time_ns)

    def _grains(self, member: int) -> int:
        return self.pool.max_quanta(member, shared_memory=False)


def _time_ns(packed: Packed) -> int:
    return packed.time_ns


class SingleStrategySearch:
    """Search for the ``best`` step of one strategy; ``bounds_ns`` holds the lower bound of each strategy."""

    def __init__(self, pool: StrategyTables, gap: float, backend: str, deadline: float) -> None:
        """Pack strategies of one stage and plain buckets at once: that takes milliseconds and gives a first
        incumbent.

        Args:
            pool: the strategies.
            gap: relative gap of the answer.
            backend: solver of the integer programs.
            deadline: of ``perf_counter``.
        """
        self.pool, self.gap, self.backend, self.deadline = pool, gap, backend, deadline
        self.incumbents = Incumbents(pool)
        members = range(len(pool.members))
        self.bounds_ns: dict[int, float] = {
            member: pool.step_bound_ns(member, shared_memory=False) for member in members
        }
        self.next_step = {member: 0 for member in members if pool.num_stages(member) > 1}
        self.configuration_bounds: dict[int, ConfigurationBound] = {}
        self.replica_feasibility: dict[int, ReplicaFeasibility | None] = {}
        self.branchings: dict[int, LongestSequenceBranching] = {}
        # Bounds of windows with a micro-batch that only the strategy with more recomputation holds.
        self.larger_windows: dict[tuple[int, int], tuple[WindowBound, ...]] = {}
        self.priced: set[int] = set()
        # Strategies that were packed while the worker process proves.
        self.pack_attempts: set[int] = set()
        # Strategies proved here while the worker process proves the others; strategies with nothing more to gain
        # here; strategies that the other process proves.
        self.proved_here: set[int] = set()
        self.exhausted: set[int] = set()
        self.proved_elsewhere: frozenset[int] = frozenset()
        # Strategies that the other process packs.
        self.packed_elsewhere: frozenset[int] = frozenset()
        self.eager = False
        # Whether this process packs pipelines.
        self.packs = True
        for member in sorted(members, key=lambda key: self.bounds_ns[key]):
            if pool.num_stages(member) == 1:
                self.incumbents.pack(member)
        self.incumbents.bucket(deadline)

    @property
    def best(self) -> Step | None:
        """The shortest step found."""
        return self.incumbents.best

    @property
    def bound_ns(self) -> int:
        """Lower bound of all steps of one strategy."""
        bound_ns = int(min(self.bounds_ns.values()))
        return bound_ns if self.best is None else min(bound_ns, self.best.time_ns)

    @property
    def open_pipelines(self) -> bool:
        """True if a pipeline's step may beat the incumbent by more than the gap."""
        cutoff_ns = self._cutoff_ns(float("inf"))
        return any(
            self.bounds_ns[member] < cutoff_ns for member in self.bounds_ns if self.pool.num_stages(member) > 1
        )

    def learn(
        self,
        best: Step | None,
        bounds_ns: dict[int, float],
        raised_bounds: dict[int, PipelineWorkBound],
        *,
        rough: bool = False,
    ) -> None:
        """Take over the best step and the bounds of another process.

        Args:
            best: its best step.
            bounds_ns: its bounds, by strategy.
            raised_bounds: work bounds that it raised.
            rough: whether the step was packed with little effort (``Incumbents.take``).
        """
        for member, bound in raised_bounds.items():
            self.pool.adopt_bound(member, bound)
        if best is not None and (self.best is None or best.time_ns < self.best.time_ns):
            self.incumbents.take(best, self.incumbents.pack_time_s, rough=rough)
        self.raise_bounds(bounds_ns)

    def raise_bounds(self, bounds_ns: dict[int, float]) -> None:
        """Take over bounds in ns that were proved elsewhere."""
        self.bounds_ns |= {member: max(self.bounds_ns[member], bound_ns) for member, bound_ns in bounds_ns.items()}

    def pack(self, deadline: float, below_ns: float = np.inf) -> bool:
        """Pack one strategy while the worker process proves; return whether there was one.

        First the best strategy is improved, as a shorter incumbent prunes others; then unpacked strategies that
        may beat ``below_ns`` are packed, the lowest bound first; then the shortest and all that may be shortest
        are improved.
        """
        incumbents = self.incumbents
        if (
            self.best is None
            or self.pool.load.rules.padded
            or self._is_finished(deadline - incumbents.pack_time_s)
        ):
            return False
        if self.best.home in incumbents.packed and incumbents.is_rough(self.best.home, below_ns):
            incumbents.improve(self.best.home, maximum=False)
            return True
        open_members = self._open_below(below_ns)
        unpacked = [
            member
            for member in open_members
            if member not in incumbents.packed and member not in self.pack_attempts
        ]
        if unpacked:
            self.pack_attempts.add(unpacked[0])
            incumbents.pack(unpacked[0])
            return True
        packed = sorted(
            (key for key in open_members if key in incumbents.packed), key=lambda key: incumbents.step(key).time_ns
        )
        improvable = [
            member for member in (*incumbents.shortest(), *packed) if incumbents.is_rough(member, below_ns)
        ]
        if improvable:
            incumbents.improve(improvable[0], maximum=False)
        return bool(improvable)

    def polish(self, deadline: float) -> bool:
        """Pack the best strategy from another start or with maximum effort while the worker process proves; return
        whether it was tried."""
        incumbents, best = self.incumbents, self.best
        if best is None or self.pool.load.rules.padded or self._is_finished(deadline - incumbents.pack_time_s):
            return False
        if incumbents.restart(best.home):
            return True
        if incumbents.is_finished(best.home) or self._is_finished(
            deadline - PARAMETERS.max_effort_ratio * incumbents.pack_time_s
        ):
            return False
        incumbents.improve(best.home, maximum=True)
        return True

    def prove(self, deadline: float) -> bool:
        """Spend a slice on a pipeline that is proved here while the worker process proves the others; return
        whether there was one.

        Without any the pipeline with the second-lowest bound is taken.
        """
        self.deadline, pool, end = (
            deadline,
            self.pool,
            min(deadline, time.perf_counter() + PARAMETERS.parallel_slice_s),
        )
        open_pipelines = [key for key in self._open if pool.num_stages(key) > 1 and key not in self.exhausted]
        if self.proved_here.isdisjoint(open_pipelines):
            self.proved_here.update(open_pipelines[1:2])
        own = [key for key in open_pipelines if key in self.proved_here]
        while own and time.perf_counter() < end and self.bounds_ns[own[0]] < self._cutoff_ns(np.inf):
            if not self._run_configuration(own[0], self._cutoff_ns(np.inf), end):
                self.exhausted.add(own[0])
                break
        return bool(own)

    def run(self, below_ns: float, deadline: float, pause: float = np.inf, *, eager: bool = False) -> Step:
        """Shorten and prove all strategies that may beat ``below_ns``, until the ``deadline``.

        Args:
            below_ns: time of the best step of any kind.
            deadline: of ``perf_counter``.
            pause: time after which no further work is begun.
            eager: whether strategies that are proved are still improved.

        Raises:
            InfeasibleError: no strategy was packed.
        """
        pause, self.eager, self.deadline = min(pause, deadline), eager, deadline
        self._pipelines(below_ns, pause)
        best, num_strategies = self.best, len(self.bounds_ns)
        if best is None:
            raise InfeasibleError(
                f"No packing of {self.pool.load.counts.sum()} sequences was found under {num_strategies} "
                "strategies.",
                "Expected one at least.",
                "Use more GPUs, or cut sequences.",
            )
        self._prove_singles(min(best.time_ns, below_ns), deadline)
        # Bounds come first, except for the time of maximum effort; with a worker the other process packs.
        reserved_s = 0.0 if eager else PARAMETERS.max_effort_ratio * self.incumbents.pack_time_s
        self._run_configurations(below_ns, min(pause, deadline - reserved_s))
        if best.time_ns <= below_ns * (1.0 + PARAMETERS.hopeless_excess) and time.perf_counter() < pause:
            best = self._polish(deadline)
        self._run_configurations(below_ns, pause)
        return best

    @property
    def _open(self) -> list[int]:
        """Strategies that may beat the incumbent by more than the gap, the lowest bound first."""
        return self._open_below(np.inf)

    def _open_below(self, below_ns: float) -> list[int]:
        """Return the strategies that may beat the incumbent and ``below_ns`` by more than the gap, the lowest
        bound first."""
        cutoff_ns = self._cutoff_ns(below_ns)
        return sorted(
            (member for member, bound_ns in self.bounds_ns.items() if bound_ns < cutoff_ns),
            key=self.bounds_ns.__getitem__,
        )

    def _cutoff_ns(self, below_ns: float) -> float:
        """Return the cutoff: a pipeline whose bound reaches it needs nothing more."""
        time_ns = below_ns if self.best is None else min(below_ns, self.best.time_ns)
        return cutoff_ns(time_ns, self.gap)

    def _pipelines(self, below_ns: float, deadline: float) -> None:
        """Bound, pack and bound further the pipelines, the lowest bound first."""
        pool, next_step = self.pool, self.next_step
        while next_step:
            member = min(next_step, key=lambda key: self.bounds_ns[key])
            is_late = self.best is not None and time.perf_counter() > deadline
            if is_late or self.bounds_ns[member] >= self._cutoff_ns(below_ns):
                break
            if not np.isfinite(self.bounds_ns[member]) or next_step[member] == PARAMETERS.num_pipeline_steps:
                del next_step[member]
                continue
            if next_step[member] > 1 and self._check_feasibility(member, self._cutoff_ns(below_ns)):
                continue
            if next_step[member] in (5, 6) and not self.packs:
                break
            self._run_step(member, next_step[member], deadline)
            # The worker process may have raised its bound.
            self.bounds_ns[member] = max(self.bounds_ns[member], pool.step_bound_ns(member, shared_memory=False))
            next_step[member] += 1

    def _run_step(self, member: int, step: int, deadline: float) -> None:
        """Run one step of a pipeline: bounds alternate with packings.

        A few pipelines are packed as soon as they have the lowest bound, the others when the cheap bounds leave
        them open.
        """
        pool = self.pool
        if step in (1, 2) and not self.packs:
            return
        if step in (1, 5) and member not in self.incumbents.packed and member not in self.packed_elsewhere:
            if (
                step == 5
                or sum(pool.num_stages(packed_member) > 1 for packed_member in self.incumbents.packed)
                < PARAMETERS.num_packed_early
            ):
                self.incumbents.pack(member)
        elif step in (2, 6) and member in self.incumbents.packed and member not in self.packed_elsewhere:
            self._improve(member, deadline)
        elif step == 4 and self.best is not None:
            fixed_cost_ns = pool.reduce_ns(member) + pool.finish_ns(member)
            pool.work_bound_with_longest(member, self.best.time_ns - fixed_cost_ns)
        elif step == 0 or (step == 3 and not self._closed_by_longest(member)):
            pool.work_bound(member, shared_memory=False, exact=step == 3)

    def _closed_by_longest(self, member: int) -> bool:
        """Return whether the term of the longest sequence closes a deep pipeline without the expensive programs of
        all micro-batches."""
        pool, best = self.pool, self.best
        if pool.num_stages(member) < DEEP or best is None:
            return False
        pool.work_bound_with_longest(member, best.time_ns - pool.reduce_ns(member) - pool.finish_ns(member))
        return pool.step_bound_ns(member, shared_memory=False) >= self._cutoff_ns(best.time_ns)

    def _run_configurations(self, below_ns: float, deadline: float) -> None:
        """Run configuration bounds, always for the pipeline with the lowest bound; pipelines that the other
        process proves come last."""
        cutoff_ns = self._cutoff_ns(below_ns)
        while time.perf_counter() < deadline:
            member = min(self.bounds_ns, key=lambda key: self.bounds_ns[key])
            if self.bounds_ns[member] >= cutoff_ns or self.pool.num_stages(member) == 1:
                return
            open_here = {
                key: bound_ns
                for key, bound_ns in self.bounds_ns.items()
                if bound_ns < cutoff_ns and key not in self.proved_elsewhere
            }
            member = min(open_here, key=lambda key: open_here[key], default=member)
            if self.pool.num_stages(member) == 1 or not self._run_configuration(member, cutoff_ns, deadline):
                return

    def _run_configuration(self, member: int, cutoff_ns: float, deadline: float) -> bool:
        """Run the configuration bound of one pipeline for a slice; return False if nothing more can be gained."""
        pool = self.pool
        fixed_cost_ns = pool.reduce_ns(member) + pool.finish_ns(member)
        if self._check_feasibility(member, cutoff_ns):
            return True
        if member not in self.configuration_bounds:
            self.configuration_bounds[member] = ConfigurationBound(
                pool.work_bound_with_longest(member, np.inf), pool.micro_batch_pricing(member)
            )
        # The loosest windows at a time slightly above the bound determine it.
        known_ns = max(
            pool.best_own_memory_bound(member).workload_bound_ns, self.bounds_ns[member] - fixed_cost_ns
        )
        target_ns = min(cutoff_ns - fixed_cost_ns, known_ns * (1.0 + PARAMETERS.configuration_rise))
        configuration = self.configuration_bounds[member]
        if configuration.done:
            return self._branch_on_longest(member, target_ns, deadline)
        configuration.run(target_ns, min(deadline, time.perf_counter() + PARAMETERS.configuration_s))
        pool.store_bound(member, configuration.loads)
        self.bounds_ns[member] = max(self.bounds_ns[member], pool.step_bound_ns(member, shared_memory=False))
        self._transfer_bound(member, cutoff_ns - fixed_cost_ns)
        return True

    def _check_feasibility(self, member: int, cutoff_ns: float) -> bool:
        """Ask an integer program whether a replica can meet the cutoff; return False if nothing more can be
        gained.

        This suits pipelines whose micro-batches have few possible contents. Either the bound rises or a packing is
        found.
        """
        fixed_cost_ns = self.pool.reduce_ns(member) + self.pool.finish_ns(member)
        if member not in self.replica_feasibility:
            self.replica_feasibility[member] = ReplicaFeasibility.of(self.pool, member)
        feasibility = self.replica_feasibility[member]
        if feasibility is None or not np.isfinite(cutoff_ns) or time.perf_counter() >= self.deadline:
            return False
        time_ns = feasibility.provable_ns(cutoff_ns - fixed_cost_ns)
        if time_ns + fixed_cost_ns <= self.bounds_ns[member] or feasibility.done(time_ns):
            return False
        replicas = feasibility.run(
            time_ns, self.backend, time.perf_counter() + PARAMETERS.feasibility_s, self.deadline
        )
        if replicas is not None:
            self.incumbents.offer(member, replicas)
        if not feasibility.open_numbers(time_ns):
            self.bounds_ns[member] = max(self.bounds_ns[member], time_ns + fixed_cost_ns)
        return True

    def _branch_on_longest(self, member: int, time_ns: float, deadline: float) -> bool:
        """Branch on the longest sequence of each replica for a slice; return False if nothing more can be
        gained."""
        configuration = self.configuration_bounds[member]
        if configuration.num_other_replicas == 0:
            return False
        if member not in self.branchings:
            self.branchings[member] = LongestSequenceBranching(configuration, time_ns)
        branching = self.branchings[member]
        if branching.done:
            return False
        branching.run(time_ns, min(deadline, time.perf_counter() + PARAMETERS.configuration_s))
        fixed_cost_ns = self.pool.reduce_ns(member) + self.pool.finish_ns(member)
        self.bounds_ns[member] = max(self.bounds_ns[member], branching.bound_ns + fixed_cost_ns)
        return True

    def _recompute_more(self, member: int) -> list[int]:
        """Return the open strategies that recompute more in the same layout."""
        members = self.pool.members
        return [
            rival
            for rival, rival_candidate in enumerate(members)
            if recomputes_less(members[member], rival_candidate)
            and self.bounds_ns[rival] < self._cutoff_ns(np.inf)
        ]

    def _transfer_bound(self, member: int, time_ns: float) -> None:
        """Transfer a pipeline's bound to strategies that recompute more.

        It holds for them except around micro-batches that only they can hold; those get windows of their own, as
        stages wait around them.
        """
        pool, work_bound, capacity = (
            self.pool,
            self.pool.best_own_memory_bound(member),
            self.pool.max_quanta(member, shared_memory=False),
        )
        for rival in self._recompute_more(member):
            rival_bound, items = pool.work_bound(rival, shared_memory=False), pool.micro_batch_pricing(rival).items
            if (member, rival) not in self.larger_windows:
                larger = around_larger(rival_bound, items, capacity, rival_bound.total_load, time_ns)
                self.larger_windows[member, rival] = larger.boxes
            pool.adopt_bound(rival, with_larger(work_bound, rival_bound, self.larger_windows[member, rival]))
            fixed_cost_ns = pool.reduce_ns(rival) + pool.finish_ns(rival)
            self.bounds_ns[rival] = max(
                self.bounds_ns[rival], pool.best_own_memory_bound(rival).workload_bound_ns + fixed_cost_ns
            )

    def _polish(self, deadline: float) -> Step:
        """Improve the best strategies, then the best one from all starts and with maximum effort, until it stalls
        or the gap is closed."""
        incumbents = self.incumbents
        for member in incumbents.shortest():
            self._improve(member, deadline)
        while not self._is_finished(deadline - incumbents.pack_time_s) and incumbents.restart(self._best().home):
            pass
        while True:
            previous = self._best()
            if incumbents.is_finished(previous.home) or self._is_finished(
                deadline - PARAMETERS.max_effort_ratio * incumbents.pack_time_s
            ):
                return previous
            incumbents.improve(previous.home, maximum=True)
            if self._best().time_ns == previous.time_ns:
                return previous

    def _improve(self, member: int, deadline: float) -> None:
        """Pack a strategy with more effort, once, if it may become the best."""
        if self.incumbents.is_rough(member) and not self._is_finished(deadline):
            self.incumbents.improve(member, maximum=False)

    def _best(self) -> Step:
        assert self.best is not None
        return self.best

    def _is_finished(self, deadline: float) -> bool:
        """Return whether the gap is closed by the bounds of this process or the deadline has passed."""
        is_proved = self.bound_ns >= self._cutoff_ns(np.inf) and not self.eager
        return is_proved or time.perf_counter() > deadline

    def _prove_singles(self, below_ns: float, deadline: float) -> None:
        """Raise bounds of open strategies of one stage by the master of their micro-batches, once for each."""
        cutoff_ns = self._cutoff_ns(below_ns)
        for member in sorted(self.bounds_ns):
            is_open = self.bounds_ns[member] < cutoff_ns and self.pool.num_stages(member) == 1
            if is_open and member not in self.priced:
                self.priced.add(member)
                bound_ns = single_strategy_bound_ns(self.pool, member, below_ns, deadline)
                self.bounds_ns[member] = max(self.bounds_ns[member], bound_ns)
