"""The best step of one strategy for all sequences, and what no such step undercuts.

Every strategy has its own memory to itself. Those of one stage are packed at once; pipelines have more proved of
them, are packed, and have more proved of them still, always the one with the least bound next: that one is the
bound of all. The shortest are packed again with more care.

What other steps take may make most of this needless: nothing is proved of strategies that cannot be shorter than
``below_ns``. Later there may be time for the rest, so work is taken up where it was left.
"""

from __future__ import annotations

import time
from contextlib import suppress

import numpy as np

from milpplan.errors import InfeasibleError, SolverError
from milpplan.groups.bounds.long_sequence import WindowBound
from milpplan.groups.problem import GroupedProblem
from milpplan.groups.search import solve_groups
from milpplan.groups.strategies import SwitchTimes
from milpplan.lengths.bounds.configuration_bound import ConfigurationBound, around_larger, with_larger
from milpplan.lengths.bounds.longest_sequence_branching import LongestSequenceBranching
from milpplan.lengths.bounds.work_bounds import DEEP, PipelineWorkBound
from milpplan.lengths.side_by_side.sequence_duals import alone_ns
from milpplan.lengths.single.incumbents import HOPELESS, MOST_TIMES, Incumbents
from milpplan.lengths.single.replica_feasibility import ReplicaFeasibility
from milpplan.lengths.steps import GAP_SHARE, Step, enough_ns
from milpplan.lengths.strategy_tables import StrategyTables, recomputes_less
from milpplan.lengths.switches import NEVER_NS

# The least time of integer programs.
_LEAST_S = 2.0
# By how much configuration programs are to raise what is known, at a time.
_RISE = 0.02
# Ways to know more of a pipeline, how many are packed early, and for how long configuration programs of one are
# looked at together.
_WAYS, _FIRST_PACKED, _SLICE_S = 7, 3, 0.5
# For a replica as an integer program at a time.
_CLOSE_S = 4.0
# And beside another process.
_BESIDE_S = 1.0


class SingleStrategySearch:
    """Steps of one strategy: the ``best`` one, and the least time of each strategy in ns, ``least``."""

    def __init__(self, pool: StrategyTables, gap: float, backend: str, deadline: float) -> None:
        """Strategies of one stage and plain buckets are packed: milliseconds each, and what all have to beat.

        ``gap`` of the answer; the ``deadline`` is one of ``perf_counter``.
        """
        self.pool, self.gap, self.backend, self.deadline = pool, gap, backend, deadline
        self.incumbents = Incumbents(pool)
        members = range(len(pool.members))
        self.bounds_ns: dict[int, float] = {member: pool.step_bound_ns(member, beside=False) for member in members}
        self.next_step = {member: 0 for member in members if pool.num_stages(member) > 1}
        self.configuration_bounds: dict[int, ConfigurationBound] = {}
        self.replica_feasibility: dict[int, ReplicaFeasibility | None] = {}
        self.branchings: dict[int, LongestSequenceBranching] = {}
        # What replicas take with larger micro-batches than a strategy holds under one that recomputes more.
        self.larger_windows: dict[tuple[int, int], tuple[WindowBound, ...]] = {}
        self.in_integers: set[int] = set()
        # Packed or tried to, while another process proves.
        self.pack_attempts: set[int] = set()
        # What is proved here while another process proves the others, of which nothing more is to be had here, and
        # what the other one proves.
        self.proved_here: set[int] = set()
        self.exhausted: set[int] = set()
        self.proved_elsewhere: frozenset[int] = frozenset()
        # And what that one packs.
        self.packed_elsewhere: frozenset[int] = frozenset()
        self.eager = False
        # Whether pipelines are packed.
        self.packs = True
        for member in sorted(members, key=lambda one: self.bounds_ns[one]):
            if pool.num_stages(member) == 1:
                self.incumbents.pack(member)
        self.incumbents.bucket(deadline)

    @property
    def best(self) -> Step | None:
        """The shortest one."""
        return self.incumbents.best

    @property
    def bound_ns(self) -> int:
        """No step of one strategy takes less."""
        least = int(min(self.bounds_ns.values()))
        return least if self.best is None else min(least, self.best.time_ns)

    @property
    def open_pipelines(self) -> bool:
        """Whether steps of a pipeline may be shorter than the best one by more than the gap."""
        enough_ns = self._enough_ns(float("inf"))
        return any(self.bounds_ns[member] < enough_ns for member in self.bounds_ns if self.pool.num_stages(member) > 1)

    def learn(
        self,
        best: Step | None,
        least: dict[int, float],
        loads: dict[int, PipelineWorkBound],
        *,
        rough: bool = False,
    ) -> None:
        """What was found and proved elsewhere; whether the step is ``rough`` (``Incumbents.take``)."""
        for member, one in loads.items():
            self.pool.adopt_bound(member, one)
        if best is not None and (self.best is None or best.time_ns < self.best.time_ns):
            self.incumbents.take(best, self.incumbents.pack_time_s, rough=rough)
        self.raise_bounds(least)

    def raise_bounds(self, least: dict[int, float]) -> None:
        """The least time of some strategies in ns that was proved elsewhere."""
        self.bounds_ns |= {member: max(self.bounds_ns[member], known) for member, known in least.items()}

    def pack(self, deadline: float, below_ns: float = np.inf) -> bool:
        """Pack one strategy while another process proves: the best one with more care, as that leaves less to
        pack; those that may be shortest, and shorter than ``below_ns``, and are not packed, the least bound first;
        the shortest ones, and all that may be it, with more care; whether there was any."""
        known = self.incumbents
        if self.best is None or self.pool.load.rules.padded or self._late(deadline - known.pack_time_s):
            return False
        if self.best.home in known.packed and known.is_rough(self.best.home, below_ns):
            known.improve(self.best.home, most=False)
            return True
        open_ = self._open_below(below_ns)
        new = [member for member in open_ if member not in known.packed and member not in self.pack_attempts]
        if new:
            self.pack_attempts.add(new[0])
            known.pack(new[0])
            return True
        packed = sorted((one for one in open_ if one in known.packed), key=lambda one: known.step(one).time_ns)
        rough = [member for member in (*known.shortest(), *packed) if known.is_rough(member, below_ns)]
        if rough:
            known.improve(rough[0], most=False)
        return bool(rough)

    def polish(self, deadline: float) -> bool:
        """Pack the best strategy from another start, or with most care, while another process proves; whether that
        was tried."""
        known, best = self.incumbents, self.best
        if best is None or self.pool.load.rules.padded or self._late(deadline - known.pack_time_s):
            return False
        if known.restart(best.home):
            return True
        if known.is_finished(best.home) or self._late(deadline - MOST_TIMES * known.pack_time_s):
            return False
        known.improve(best.home, most=True)
        return True

    def prove(self, deadline: float) -> bool:
        """A slice of time for a pipeline that is proved here, while another process proves the others: the one
        with the next to least bound is taken where there is none; whether there is any."""
        self.deadline, pool, end = deadline, self.pool, min(deadline, time.perf_counter() + _BESIDE_S)
        open_ = [one for one in self._open if pool.num_stages(one) > 1 and one not in self.exhausted]
        if self.proved_here.isdisjoint(open_):
            self.proved_here.update(open_[1:2])
        mine = [one for one in open_ if one in self.proved_here]
        while mine and time.perf_counter() < end and self.bounds_ns[mine[0]] < self._enough_ns(np.inf):
            if not self._fill_one(mine[0], self._enough_ns(np.inf), end):
                self.exhausted.add(mine[0])
                break
        return bool(mine)

    def run(self, below_ns: float, deadline: float, pause: float = np.inf, *, eager: bool = False) -> Step:
        """Shorten and prove all that may be shorter than ``below_ns``, until the ``deadline``; after a ``pause``
        nothing is begun. ``eager``: what is proved may be packed with more care, too.

        Raises:
            InfeasibleError: no strategy was packed.
        """
        pause, self.eager, self.deadline = min(pause, deadline), eager, deadline
        self._pipelines(below_ns, pause)
        best, number = self.best, len(self.bounds_ns)
        if best is None:
            raise InfeasibleError(
                f"No packing of {self.pool.load.counts.sum()} sequences was found under {number} strategies.",
                "Expected one at least.",
                "Use more GPUs, or cut sequences.",
            )
        self._prove_in_integers(min(best.time_ns, below_ns), deadline)
        # Bounds first, but for what most care takes; of two processes the other one packs.
        kept_s = 0.0 if eager else MOST_TIMES * self.incumbents.pack_time_s
        self._fill(below_ns, min(pause, deadline - kept_s))
        if best.time_ns <= below_ns * (1.0 + HOPELESS) and time.perf_counter() < pause:
            best = self._polish(deadline)
        self._fill(below_ns, pause)
        return best

    @property
    def _open(self) -> list[int]:
        """Strategies that may be shorter than the best step by more than the gap, the least bound first."""
        return self._open_below(np.inf)

    def _open_below(self, below_ns: float) -> list[int]:
        """The same, that may be shorter than ``below_ns`` by as much."""
        enough_ns = self._enough_ns(below_ns)
        return sorted((one for one, least in self.bounds_ns.items() if least < enough_ns), key=self.bounds_ns.__getitem__)

    def _enough_ns(self, below_ns: float) -> float:
        """A pipeline with a bound of at least this needs nothing more."""
        time_ns = below_ns if self.best is None else min(below_ns, self.best.time_ns)
        return enough_ns(time_ns, self.gap)

    def _pipelines(self, below_ns: float, deadline: float) -> None:
        """The least bound first: proved better, packed, proved better still."""
        pool, left = self.pool, self.next_step
        while left:
            member = min(left, key=lambda one: self.bounds_ns[one])
            late = self.best is not None and time.perf_counter() > deadline
            if late or self.bounds_ns[member] >= self._enough_ns(below_ns):
                break
            if not np.isfinite(self.bounds_ns[member]) or left[member] == _WAYS:
                del left[member]
                continue
            if left[member] > 1 and self._close(member, self._enough_ns(below_ns)):
                continue
            if left[member] in (5, 6) and not self.packs:
                break
            self._next_way(member, left[member], deadline)
            # More may be proved of it elsewhere.
            self.bounds_ns[member] = max(self.bounds_ns[member], pool.step_bound_ns(member, beside=False))
            left[member] += 1

    def _next_way(self, member: int, way: int, deadline: float) -> None:
        """More of a pipeline: a few are packed as soon as they have the least bound, the others when all that is
        proved of them leaves room."""
        pool = self.pool
        if way in (1, 2) and not self.packs:
            return
        if way in (1, 5) and member not in self.incumbents.packed and member not in self.packed_elsewhere:
            if way == 5 or sum(pool.num_stages(one) > 1 for one in self.incumbents.packed) < _FIRST_PACKED:
                self.incumbents.pack(member)
        elif way in (2, 6) and member in self.incumbents.packed and member not in self.packed_elsewhere:
            self._improve(member, deadline)
        elif way == 4 and self.best is not None:
            once_ns = pool.reduce_ns(member) + pool.finish_ns(member)
            pool.work_bound_with_longest(member, self.best.time_ns - once_ns)
        elif way == 0 or (way == 3 and not self._closed_by_longest(member)):
            pool.work_bound(member, beside=False, exact=way == 3)

    def _closed_by_longest(self, member: int) -> bool:
        """Whether what the longest sequence adds makes programs of all micro-batches needless, which are dear of
        many stages."""
        pool, best = self.pool, self.best
        if pool.num_stages(member) < DEEP or best is None:
            return False
        pool.work_bound_with_longest(member, best.time_ns - pool.reduce_ns(member) - pool.finish_ns(member))
        return pool.step_bound_ns(member, beside=False) >= self._enough_ns(best.time_ns)

    def _fill(self, below_ns: float, deadline: float) -> None:
        """Configuration programs for pipelines, a slice of time always for the one with the least bound; last for
        those that are proved elsewhere."""
        enough_ns = self._enough_ns(below_ns)
        while time.perf_counter() < deadline:
            member = min(self.bounds_ns, key=lambda one: self.bounds_ns[one])
            if self.bounds_ns[member] >= enough_ns or self.pool.num_stages(member) == 1:
                return
            others = {one: of for one, of in self.bounds_ns.items() if of < enough_ns and one not in self.proved_elsewhere}
            member = min(others, key=lambda one: others[one], default=member)
            if self.pool.num_stages(member) == 1 or not self._fill_one(member, enough_ns, deadline):
                return

    def _fill_one(self, member: int, enough_ns: float, deadline: float) -> bool:
        """A slice of time for one; False where there is nothing more."""
        pool = self.pool
        once_ns = pool.reduce_ns(member) + pool.finish_ns(member)
        if self._close(member, enough_ns):
            return True
        if member not in self.configuration_bounds:
            self.configuration_bounds[member] = ConfigurationBound(pool.work_bound_with_longest(member, np.inf), pool.micro_batch_pricing(member))
        # What leaves most for a time not much longer than what is proved is what the bound rests on.
        known_ns = max(pool.best_own_memory_bound(member).workload_bound_ns, self.bounds_ns[member] - once_ns)
        enough = min(enough_ns - once_ns, known_ns * (1.0 + _RISE))
        one = self.configuration_bounds[member]
        if one.done:
            return self._lead(member, enough, deadline)
        one.run(enough, min(deadline, time.perf_counter() + _SLICE_S))
        pool.store_bound(member, one.loads)
        self.bounds_ns[member] = max(self.bounds_ns[member], pool.step_bound_ns(member, beside=False))
        self._share(member, enough_ns - once_ns)
        return True

    def _close(self, member: int, enough_ns: float) -> bool:
        """A slice of time for a pipeline whose micro-batches can be few things: no replica is done in time for a
        step that is short enough, or one is found; False where there is nothing more."""
        once_ns = self.pool.reduce_ns(member) + self.pool.finish_ns(member)
        if member not in self.replica_feasibility:
            self.replica_feasibility[member] = ReplicaFeasibility.of(self.pool, member)
        one = self.replica_feasibility[member]
        if one is None or not np.isfinite(enough_ns) or time.perf_counter() >= self.deadline:
            return False
        time_ns = one.asked(enough_ns - once_ns)
        if time_ns + once_ns <= self.bounds_ns[member] or one.done(time_ns):
            return False
        found = one.run(time_ns, self.backend, time.perf_counter() + _CLOSE_S, self.deadline)
        if found is not None:
            self.incumbents.offer(member, found)
        if not one.within(time_ns):
            self.bounds_ns[member] = max(self.bounds_ns[member], time_ns + once_ns)
        return True

    def _lead(self, member: int, time_ns: float, deadline: float) -> bool:
        """A slice of time for a pipeline's bound by the leaders of its replicas; False where there is nothing
        more."""
        filled = self.configuration_bounds[member]
        if filled.num_other_replicas == 0:
            return False
        if member not in self.branchings:
            self.branchings[member] = LongestSequenceBranching(filled, time_ns)
        led = self.branchings[member]
        if led.done:
            return False
        led.run(time_ns, min(deadline, time.perf_counter() + _SLICE_S))
        once_ns = self.pool.reduce_ns(member) + self.pool.finish_ns(member)
        self.bounds_ns[member] = max(self.bounds_ns[member], led.bound_ns + once_ns)
        return True

    def _dearer(self, member: int) -> list[int]:
        """Open strategies that recompute more in the same layout."""
        members = self.pool.members
        return [
            other
            for other, one in enumerate(members)
            if recomputes_less(members[member], one) and self.bounds_ns[other] < self._enough_ns(np.inf)
        ]

    def _share(self, member: int, time_ns: float) -> None:
        """What is proved of a pipeline holds for those that recompute more, but where a micro-batch is larger than
        it holds: stages wait around such a one."""
        pool, loads, grains = self.pool, self.pool.best_own_memory_bound(member), self.pool.max_quanta(member, beside=False)
        for other in self._dearer(member):
            lines, items = pool.work_bound(other, beside=False), pool.micro_batch_pricing(other).items
            if (member, other) not in self.larger_windows:
                around = around_larger(lines, items, grains, lines.total_load, time_ns)
                self.larger_windows[member, other] = around.boxes
            pool.adopt_bound(other, with_larger(loads, lines, self.larger_windows[member, other]))
            once_ns = pool.reduce_ns(other) + pool.finish_ns(other)
            self.bounds_ns[other] = max(self.bounds_ns[other], pool.best_own_memory_bound(other).workload_bound_ns + once_ns)

    def _polish(self, deadline: float) -> Step:
        """The strategy of the best step and the next best packed with more care, and the best of these from all
        starts, then with most care as long as that gains, until it is short enough."""
        known = self.incumbents
        for member in known.shortest():
            self._improve(member, deadline)
        while not self._late(deadline - known.pack_time_s) and known.restart(self._best().home):
            pass
        while True:
            before = self._best()
            if known.is_finished(before.home) or self._late(deadline - MOST_TIMES * known.pack_time_s):
                return before
            known.improve(before.home, most=True)
            if self._best().time_ns == before.time_ns:
                return before

    def _improve(self, member: int, deadline: float) -> None:
        """Pack a strategy with more care, once, if it may become the best, and there is time."""
        if self.incumbents.is_rough(member) and not self._late(deadline):
            self.incumbents.improve(member, most=False)

    def _best(self) -> Step:
        assert self.best is not None
        return self.best

    def _late(self, deadline: float) -> bool:
        """Whether the best step is short enough by what is proved here, or the time is over."""
        short = self.bound_ns >= self._enough_ns(np.inf) and not self.eager
        return short or time.perf_counter() > deadline

    def _open_singles(self, below_ns: float) -> list[int]:
        """Strategies of one stage that may be shorter than the best step by more than the gap."""
        enough_ns = self._enough_ns(below_ns)
        return [m for m in sorted(self.bounds_ns) if self.bounds_ns[m] < enough_ns and self.pool.num_stages(m) == 1]

    def _prove_in_integers(self, below_ns: float, deadline: float) -> None:
        """Bounds of strategies of one stage, raised by prices of what micro-batches hold, and where that is not
        enough by the programs of ``groups``."""
        pool = self.pool
        members = [member for member in self._open_singles(below_ns) if member not in self.in_integers]
        self.in_integers.update(members)
        for member in [] if pool.load.rules.padded else members:
            self.bounds_ns[member] = max(self.bounds_ns[member], alone_ns(pool, member, below_ns, deadline))
        members = [member for member in self._open_singles(below_ns) if member in members]
        number = len(members)
        if not number:
            return
        # Nothing is switched: the home is the strategy itself.
        switches = np.full((number, number), NEVER_NS, np.int64)
        np.fill_diagonal(switches, 0)
        problem = GroupedProblem(
            pool.load.lengths,
            pool.load.counts,
            tuple(pool.strategy(member, beside=False) for member in members),
            SwitchTimes(switches, switches),
            max_strategies=1,
            finish_ns=tuple(pool.finish_ns(member) for member in members),
        )
        left_s = max(_LEAST_S, deadline - time.perf_counter())
        with suppress(InfeasibleError, SolverError):
            for record in solve_groups(problem, self.backend, self.gap * GAP_SHARE, left_s).sets:
                member = members[record.used[0]]
                self.bounds_ns[member] = max(self.bounds_ns[member], record.bound_ns)
