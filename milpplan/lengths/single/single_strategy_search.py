"""The best step of one strategy for all sequences, with a proved lower bound.

Every strategy has the memory to itself. Strategies of one stage are packed at once, and bounded by the master of
their micro-batches. Of the pipelines always the one with the lowest bound, which is the bound of all single
strategies, takes its next step:

 1. *Work*: bounds by its work, first rough, then exact, then with the term of the longest sequence.
 2. *Packing*, and its improvement if the step may become the best. A few pipelines are packed as soon as they get
    here, the others when no bound rises any more.
 3. *Whole sequences*: the configuration bound, for a slice at a time.

In between the best step is improved from all its starts. A strategy is left alone once its bound exceeds
``below_ns``, the time of the best step of any kind. Later calls resume where the last one stopped.

**Incumbents** are packed steps of single strategies. A pipeline has several starts (``load_shapes``):
whether two of the longest sequences share a replica matters, and the best start shows only after a little
improvement. So every start gets some effort, and the best ones get more.
"""

from __future__ import annotations

import numpy as np

from milpplan.errors import InfeasibleError
from milpplan.lengths import Packed, Step, StrategyTables, cutoff_ns
from milpplan.lengths.bounds.configuration_bound import ConfigurationBound
from milpplan.lengths.bounds.master import single_strategy_bound_ns
from milpplan.lengths.bounds.work_bounds import MOST_STAGES
from milpplan.lengths.deadline import NEVER, Deadline
from milpplan.lengths.search_parameters import PARAMETERS
from milpplan.lengths.single.load_shapes import packings_by_shape
from milpplan.lengths.strategy_tables import Effort


class Incumbents:
    """Packings by strategy and the ``best`` step of one."""

    def __init__(self, pool: StrategyTables) -> None:
        self.pool = pool
        self.best: Step | None = None
        self.packed: dict[int, Packed] = {}
        # Improved with more effort (0), or with maximum effort: the step's time after that.
        self.polished: dict[int, int] = {}
        # Other starts of pipelines; strategies whose starts were improved.
        self.starts: dict[int, list[Packed]] = {}
        self.starts_improved: set[int] = set()

    def pack(self, member: int, deadline: Deadline = NEVER) -> None:
        """Pack a strategy if its bound is below the incumbent."""
        bound_ns = self.pool.step_bound_ns(member)
        if not np.isfinite(bound_ns) or (self.best is not None and bound_ns >= self.best.time_ns):
            return
        first = deadline.within(PARAMETERS.packing_s)
        packed = self.pool.pack(member, self.pool.load.counts, self._quanta(member), first)
        if packed is not None:
            self.starts[member] = self._shaped(member, deadline)
            self.packed[member] = min([packed, *self.starts[member][:1]], key=_time_ns)
            self._keep(member)

    def step(self, member: int) -> Step:
        """Return the step of a packed strategy."""
        packed = self.packed[member]
        time_ns = packed.time_ns + self.pool.reduce_ns(member) + self.pool.finish_ns(member)
        return Step(member, (member,), {member: packed}, time_ns)

    def shortest(self) -> list[int]:
        """Return the packed strategies with the shortest steps."""
        return sorted(self.packed, key=lambda member: self.step(member).time_ns)[: PARAMETERS.max_improved_singles]

    def is_rough(self, member: int) -> bool:
        """Return whether more effort on a strategy was not spent yet and may make it the best one."""
        if member in self.polished or member not in self.packed or self.best is None:
            return False
        return self.step(member).time_ns <= self.best.time_ns * (1.0 + PARAMETERS.local_gain)

    def is_finished(self, member: int) -> bool:
        """Return whether maximum effort no longer improves a strategy."""
        return member not in self.packed or self.polished.get(member) == self.step(member).time_ns

    def improve(self, member: int, deadline: Deadline = NEVER, *, maximum: bool) -> None:
        """Improve a strategy with more effort, or with maximum effort; a pipeline from its best start."""
        if not maximum:
            self._choose(member, deadline)
        effort = Effort.MOST if maximum else Effort.MORE
        self.packed[member] = self.pool.polish(member, self.packed[member], self._quanta(member), effort, deadline)
        self._keep(member)
        self.polished[member] = self.step(member).time_ns if maximum else 0

    def restart(self, member: int, deadline: Deadline = NEVER) -> bool:
        """Improve all starts of a pipeline a little, or the next one with more effort; return whether there was
        one."""
        if self._choose(member, deadline):
            return True
        starts = self.starts[member]
        if not starts or starts[0].time_ns > self.packed[member].time_ns * (1.0 + PARAMETERS.far_improved_start):
            return False
        self._begin(member, self.pool.polish(member, starts.pop(0), self._quanta(member), Effort.MORE, deadline))
        return True

    def _choose(self, member: int, deadline: Deadline) -> bool:
        """Improve all starts of a pipeline a little, once; return whether there were any."""
        if member in self.starts_improved:
            return False
        self.starts_improved.add(member)
        starts = self.starts.setdefault(member, [])
        shortest = min([self.packed[member], *starts], key=_time_ns).time_ns
        promising = [start for start in starts if start.time_ns <= shortest * (1.0 + PARAMETERS.far_start)]
        quanta = self._quanta(member)
        starts = sorted(
            (self.pool.polish(member, start, quanta, Effort.LITTLE, deadline) for start in promising),
            key=_time_ns,
        )
        if starts:
            self._begin(member, starts.pop(0))
        self.starts[member] = starts
        return bool(promising)

    def _begin(self, member: int, packed: Packed) -> None:
        """Keep another packing of a strategy if it is shorter."""
        self.packed[member] = min(self.packed[member], packed, key=_time_ns)
        self._keep(member)

    def _keep(self, member: int) -> None:
        """Keep the step of a packed strategy if it is shorter than the incumbent."""
        step = self.step(member)
        if self.best is None or step.time_ns < self.best.time_ns:
            self.best = step

    def _shaped(self, member: int, deadline: Deadline) -> list[Packed]:
        """Return packings of a pipeline from the load shapes of its best bounds, the shortest first."""
        pool, quanta = self.pool, self._quanta(member)
        if pool.num_stages(member) == 1 or pool.load.rules.padded:
            return []
        bound = pool.work_bound(member, shared_memory=False)
        packings = packings_by_shape(bound, pool.load, quanta, deadline.within(PARAMETERS.packing_s))
        return sorted((pool.time_packing(member, replicas, quanta) for replicas in packings), key=_time_ns)

    def _quanta(self, member: int) -> int:
        return self.pool.max_quanta(member, shared_memory=False)


def _time_ns(packed: Packed) -> int:
    return packed.time_ns


class SingleStrategySearch:
    """Search for the ``best`` step of one strategy; ``bounds_ns`` holds the lower bound of each strategy."""

    def __init__(self, pool: StrategyTables, gap: float, end: Deadline = NEVER) -> None:
        """Pack the strategies of one stage at once: that takes milliseconds and gives a first incumbent.

        Args:
            pool: the strategies.
            gap: relative gap of the answer.
            end: end of the whole solve.
        """
        self.pool, self.gap, self.end = pool, gap, end
        self.incumbents = Incumbents(pool)
        members = range(len(pool.members))
        self.bounds_ns: dict[int, float] = {member: pool.step_bound_ns(member) for member in members}
        # Pipelines: number of the bounds by their work that were tried; strategies of one stage with a master.
        self.num_work_bounds = {member: 0 for member in members if pool.num_stages(member) > 1}
        self.priced: set[int] = set()
        self.configuration_bounds: dict[int, ConfigurationBound] = {}
        # Pipelines whose packing was tried; strategies of which nothing more is to be gained.
        self.tried: set[int] = set()
        self.exhausted: set[int] = set()
        for member in sorted(members, key=lambda key: self.bounds_ns[key]):
            if pool.num_stages(member) == 1:
                self.incumbents.pack(member)

    @property
    def best(self) -> Step | None:
        """The shortest step found."""
        return self.incumbents.best

    @property
    def bound_ns(self) -> int:
        """Lower bound of all steps of one strategy."""
        bound_ns = int(min(self.bounds_ns.values()))
        return bound_ns if self.best is None else min(bound_ns, self.best.time_ns)

    def run(self, below_ns: float, deadline: Deadline) -> Step:
        """Shorten and prove all strategies that may beat ``below_ns``, the time of the best step of any kind.

        Raises:
            InfeasibleError: no strategy was packed.
        """
        self._prove(below_ns, deadline.share(PARAMETERS.main_share))
        if self.best is None:
            raise InfeasibleError(
                f"No packing of {self.pool.load.counts.sum()} sequences was found under {len(self.bounds_ns)} "
                "strategies.",
                "Expected one at least.",
                "Use more GPUs, or cut sequences.",
            )
        if self.best.time_ns <= below_ns * (1.0 + PARAMETERS.local_gain):
            self._polish(deadline)
        self._prove(below_ns, deadline)
        return self.best

    def _prove(self, below_ns: float, deadline: Deadline) -> None:
        """Let the strategy with the lowest bound take its next step until none is open; one of which nothing more
        is to be gained is passed over."""
        while not (self.best is not None and deadline.passed):
            cutoff_ns = self._cutoff_ns(below_ns)
            members = [key for key, bound_ns in self.bounds_ns.items() if bound_ns < cutoff_ns]
            member = min(set(members) - self.exhausted, key=lambda key: (self.bounds_ns[key], key), default=None)
            if member is None:
                break
            if not self._advance(member, cutoff_ns, deadline):
                self.exhausted.add(member)

    def _advance(self, member: int, cutoff_ns: float, deadline: Deadline) -> bool:
        """Take the next step of a strategy; return False if nothing more can be gained."""
        pool = self.pool
        if pool.num_stages(member) == 1:
            return self._price(member, cutoff_ns, deadline)
        number = self.num_work_bounds[member]
        # A pipeline has three bounds by its work.
        if number == 0 or (self.best and number < 3):
            self._bound_by_work(member, number)
            self.num_work_bounds[member] += 1
        elif member not in self.tried and (self.exhausted or len(self.tried) < PARAMETERS.num_packed_first):
            self._pack(member, deadline)
        elif not self._configure(member, cutoff_ns, deadline):
            if member in self.tried:
                return False
            self._pack(member, deadline)
        return True

    def _price(self, member: int, cutoff_ns: float, deadline: Deadline) -> bool:
        """Raise the bound of a strategy of one stage by the master of its micro-batches, once."""
        if member in self.priced:
            return False
        self.priced.add(member)
        self._raise(member, single_strategy_bound_ns(self.pool, member, cutoff_ns, deadline))
        return True

    def _bound_by_work(self, member: int, number: int) -> None:
        """Bound a pipeline by its work: roughly, exactly, with the term of the longest sequence."""
        pool = self.pool
        if number == 0:
            pool.work_bound(member, shared_memory=False)
        elif number == 1 and not self._closed_by_longest(member):
            pool.work_bound(member, shared_memory=False, exact=True)
        elif number == 2:
            self._bound_with_longest(member)
        self._raise(member, pool.step_bound_ns(member))

    def _closed_by_longest(self, member: int) -> bool:
        """Return whether the term of the longest sequence closes a deep pipeline without the expensive programs of
        all micro-batches."""
        if self.pool.num_stages(member) < MOST_STAGES:
            return False
        self._bound_with_longest(member)
        return self.pool.step_bound_ns(member) >= self._cutoff_ns(np.inf)

    def _bound_with_longest(self, member: int) -> None:
        """Add the term of the longest sequence to a pipeline's bound by its work."""
        assert self.best is not None
        self.pool.work_bound_with_longest(member, self.best.time_ns - self._fixed_cost_ns(member))

    def _pack(self, member: int, deadline: Deadline) -> None:
        """Pack a pipeline, with more effort if it may become the best."""
        self.tried.add(member)
        self.incumbents.pack(member, deadline)
        if self.incumbents.is_rough(member) and not deadline.passed:
            self.incumbents.improve(member, deadline, maximum=False)

    def _configure(self, member: int, cutoff_ns: float, deadline: Deadline) -> bool:
        """Run the configuration bound of a pipeline for a slice; return False if nothing more can be gained."""
        pool, fixed_cost_ns = self.pool, self._fixed_cost_ns(member)
        if member not in self.configuration_bounds:
            self.configuration_bounds[member] = ConfigurationBound(
                pool.work_bound_with_longest(member, np.inf), pool.micro_batch_pricing(member)
            )
        configuration = self.configuration_bounds[member]
        # The loosest windows at a time slightly above the bound determine it.
        known_ns = max(
            pool.best_own_memory_bound(member).workload_bound_ns, self.bounds_ns[member] - fixed_cost_ns
        )
        target_ns = min(cutoff_ns - fixed_cost_ns, known_ns * (1.0 + PARAMETERS.configuration_rise))
        if configuration.done:
            return False
        configuration.run(target_ns, deadline.within(PARAMETERS.configuration_s))
        pool.store_bound(member, configuration.loads)
        self._raise(member, pool.step_bound_ns(member))
        return True

    def _polish(self, deadline: Deadline) -> None:
        """Improve the best strategies, then the best one from all starts and with maximum effort, until it stalls
        or the gap is closed.

        No improvement begins after the ``deadline``; the end of the solve interrupts one.
        """
        incumbents = self.incumbents
        for member in incumbents.shortest():
            if incumbents.is_rough(member) and not self._is_finished(deadline):
                incumbents.improve(member, self.end, maximum=False)
        while not self._is_finished(deadline) and incumbents.restart(self._home, self.end):
            pass
        while not self._is_finished(deadline) and not incumbents.is_finished(self._home):
            incumbents.improve(self._home, self.end, maximum=True)

    @property
    def _home(self) -> int:
        """The strategy of the best step."""
        assert self.best is not None
        return self.best.home

    def _is_finished(self, deadline: Deadline) -> bool:
        """Return whether the gap is closed or the deadline has passed."""
        return self.bound_ns >= self._cutoff_ns(np.inf) or deadline.passed

    def _cutoff_ns(self, below_ns: float) -> float:
        """Return the cutoff: a strategy whose bound reaches it needs nothing more."""
        time_ns = below_ns if self.best is None else min(below_ns, self.best.time_ns)
        return cutoff_ns(time_ns, self.gap)

    def _fixed_cost_ns(self, member: int) -> int:
        return self.pool.reduce_ns(member) + self.pool.finish_ns(member)

    def _raise(self, member: int, bound_ns: float) -> None:
        """Raise the bound of a strategy to ``bound_ns`` if that is higher."""
        self.bounds_ns[member] = max(self.bounds_ns[member], bound_ns)
