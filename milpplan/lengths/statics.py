"""The best step of one strategy for all sequences, and what no such step undercuts.

Every strategy has its own memory to itself. Those of one stage are packed at once; pipelines have more proved of
them, are packed, and have more proved of them still, always the one with the least bound next: that one is the
bound of all. The shortest are packed again with more care.

What other steps take may make most of this needless: nothing is proved of strategies that cannot be shorter than
``below_ns``. Later there may be time for the rest, so work is taken up where it was left.
"""

from __future__ import annotations

import time

import numpy as np

from milpplan.errors import InfeasibleError
from milpplan.groups.longest import Box
from milpplan.groups.problem import GroupedProblem
from milpplan.groups.search import solve_groups
from milpplan.groups.strategies import SwitchTimes
from milpplan.lengths.baselines import bucketed_step
from milpplan.lengths.filled import Filled, around_larger, with_larger
from milpplan.lengths.leaders import Leaders
from milpplan.lengths.pool import Packed, Pool, recomputes_less
from milpplan.lengths.shaping import shaped
from milpplan.lengths.steps import GAP_SHARE, Step
from milpplan.lengths.switches import NEVER_NS
from milpplan.lengths.work import DEEP, Loads

# The least time of integer programs.
_LEAST_S = 2.0
# Strategies whose packings are improved for longer, where it may matter; not those that are longer than the best
# by this part, which is more than that gains: of a pipeline, of others.
_MOST_POLISHED, _HOPELESS, _HOPELESS_PIPELINE = 3, 0.01, 0.025
# How many times as long most care takes as more care, at most.
_MOST_TIMES = 3.0
# By how much configuration programs are to raise what is known, at a time.
_RISE = 0.001
# Ways to know more of a pipeline, how many are packed early, and for how long configuration programs of one are
# looked at together.
_WAYS, _FIRST_PACKED, _SLICE_S = 7, 3, 0.5


class Statics:
    """Steps of one strategy: the ``best`` one, and the least time of each strategy in ns, ``least``."""

    def __init__(self, pool: Pool, gap: float, backend: str, deadline: float) -> None:
        """Strategies of one stage and plain buckets are packed: milliseconds each, and what all have to beat.

        ``gap`` of the answer; the ``deadline`` is one of ``perf_counter``.
        """
        self.pool, self.gap, self.backend = pool, gap, backend
        self.best: Step | None = None
        self.packed: dict[int, Packed] = {}
        members = range(len(pool.members))
        self.least: dict[int, float] = {member: pool.least_ns(member, beside=False) for member in members}
        self.left = {member: 0 for member in members if pool.num_stages(member) > 1}
        self.filled: dict[int, Filled] = {}
        self.led: dict[int, Leaders] = {}
        # What replicas take with larger micro-batches than a strategy holds under one that recomputes more.
        self.larger: dict[tuple[int, int], tuple[Box, ...]] = {}
        self.in_integers: set[int] = set()
        # Packed or tried to, while another process proves.
        self.tried: set[int] = set()
        self.polished: dict[int, int] = {}
        self.eager = False
        # Whether pipelines are packed.
        self.packs = True
        # Seconds of the last packing with more care.
        self.took_s = 0.0
        for member in sorted(members, key=lambda one: self.least[one]):
            if pool.num_stages(member) == 1:
                self._pack(member)
        self._bucket(deadline)

    @property
    def bound_ns(self) -> int:
        """No step of one strategy takes less."""
        least = int(min(self.least.values()))
        return least if self.best is None else min(least, self.best.time_ns)

    @property
    def open_pipelines(self) -> bool:
        """Whether steps of a pipeline may be shorter than the best one by more than the gap."""
        enough_ns = self._enough_ns(float("inf"))
        return any(self.least[member] < enough_ns for member in self.least if self.pool.num_stages(member) > 1)

    def learn(self, best: Step | None, least: dict[int, float], loads: dict[int, Loads]) -> None:
        """What was found and proved elsewhere."""
        for member, one in loads.items():
            self.pool.tell(member, one)
        if best is not None and (self.best is None or best.time_ns < self.best.time_ns):
            self.take(best, self.took_s)
        self.least = {member: max(self.least[member], known) for member, known in least.items()}

    def take(self, step: Step, took_s: float) -> None:
        """A step of one strategy that was found elsewhere, packed with more care in so many seconds."""
        home, packed = step.home, step.packed[step.home]
        self.best = step if self.best is None else min(self.best, step, key=lambda one: one.time_ns)
        if home not in self.packed or packed.time_ns <= self.packed[home].time_ns:
            self.packed[home] = packed
            self.polished.setdefault(home, 0)
        self.took_s = max(self.took_s, took_s)

    def run(self, below_ns: float, deadline: float, pause: float = np.inf, *, eager: bool = False) -> Step:
        """Shorten and prove all that may be shorter than ``below_ns``, until the ``deadline``; after a ``pause``
        nothing is begun. ``eager``: what is proved may be packed with more care, too.

        Raises:
            InfeasibleError: no strategy was packed.
        """
        pause, self.eager = min(pause, deadline), eager
        self._pipelines(below_ns, pause)
        best, number = self.best, len(self.least)
        if best is None:
            raise InfeasibleError(
                f"No packing of {self.pool.load.counts.sum()} sequences was found under {number} strategies.",
                "Expected one at least.",
                "Use more GPUs, or cut sequences.",
            )
        self._prove_in_integers(min(best.time_ns, below_ns), deadline)
        # Bounds first, but for what most care takes.
        self._fill(below_ns, min(pause, deadline - _MOST_TIMES * self.took_s))
        if best.time_ns <= below_ns * (1.0 + _HOPELESS) and time.perf_counter() < pause:
            best = self._polish(best, deadline)
        self._fill(below_ns, pause)
        return best

    def polish(self, deadline: float) -> bool:
        """Pack one strategy better while another process proves: the one with the least bound if it is not packed,
        the shortest ones with more care, the best one with most; whether that was tried."""
        best, member = self.best, min(self.least, key=lambda one: self.least[one])
        if best is None or self.pool.load.rules.padded or self._late(deadline - self.took_s):
            return False
        if member not in self.packed and member not in self.tried:
            self.tried.add(member)
            self._pack(member)
            return True
        rough = [step.home for step in self._shortest() if step.home not in self.polished and self._near(step)]
        if rough:
            self._shortened(rough[0], deadline, most=False)
            return True
        done = best.home not in self.packed or self.polished.get(best.home) == best.time_ns
        if done or self._late(deadline - _MOST_TIMES * self.took_s):
            return False
        self._shortened(best.home, deadline, most=True)
        return True

    def _enough_ns(self, below_ns: float) -> float:
        """A pipeline with a bound of at least this needs nothing more."""
        time_ns = below_ns if self.best is None else min(below_ns, self.best.time_ns)
        return time_ns * (1.0 - self.gap)

    def _pipelines(self, below_ns: float, deadline: float) -> None:
        """The least bound first: proved better, packed, proved better still."""
        pool, left = self.pool, self.left
        while left:
            member = min(left, key=lambda one: self.least[one])
            late = self.best is not None and time.perf_counter() > deadline
            if late or self.least[member] >= self._enough_ns(below_ns):
                break
            if not np.isfinite(self.least[member]) or left[member] == _WAYS:
                del left[member]
                continue
            if left[member] in (5, 6) and not self.packs:
                break
            self._next_way(member, left[member], deadline)
            self.least[member] = pool.least_ns(member, beside=False)
            left[member] += 1

    def _next_way(self, member: int, way: int, deadline: float) -> None:
        """More of a pipeline: a few are packed as soon as they have the least bound, the others when all that is
        proved of them leaves room."""
        pool = self.pool
        if way in (1, 2) and not self.packs:
            return
        if way in (1, 5) and member not in self.packed:
            if way == 5 or sum(pool.num_stages(one) > 1 for one in self.packed) < _FIRST_PACKED:
                self._pack(member)
        elif way in (2, 6) and member in self.packed:
            self._shorten(member, deadline)
        elif way == 4 and self.best is not None:
            once_ns = pool.reduce_ns(member) + pool.finish_ns(member)
            pool.lengthened(member, self.best.time_ns - once_ns)
        elif way == 0 or (way == 3 and not self._closed_by_longest(member)):
            pool.loads(member, beside=False, exact=way == 3)

    def _closed_by_longest(self, member: int) -> bool:
        """Whether what the longest sequence adds makes programs of all micro-batches needless, which are dear of
        many stages."""
        pool, best = self.pool, self.best
        if pool.num_stages(member) < DEEP or best is None:
            return False
        pool.lengthened(member, best.time_ns - pool.reduce_ns(member) - pool.finish_ns(member))
        return pool.least_ns(member, beside=False) >= self._enough_ns(best.time_ns)

    def _fill(self, below_ns: float, deadline: float) -> None:
        """Configuration programs for pipelines, a slice of time always for the one with the least bound."""
        pool, enough_ns = self.pool, self._enough_ns(below_ns)
        while time.perf_counter() < deadline:
            member = min(self.least, key=lambda one: self.least[one])
            if self.least[member] >= enough_ns or pool.num_stages(member) == 1:
                return
            if member not in self.filled:
                self.filled[member] = Filled(pool.lengthened(member, np.inf), pool.contents(member))
            once_ns = pool.reduce_ns(member) + pool.finish_ns(member)
            # What leaves most for a time not much longer than what is proved is what the bound rests on.
            known_ns = max(pool.alone(member).highest, self.least[member] - once_ns)
            enough = min(enough_ns - once_ns, known_ns * (1.0 + _RISE))
            one = self.filled[member]
            if one.done:
                if not self._lead(member, enough, deadline):
                    return
                continue
            one.run(enough, min(deadline, time.perf_counter() + _SLICE_S))
            pool.know(member, one.loads)
            self.least[member] = max(self.least[member], pool.least_ns(member, beside=False))
            self._share(member, enough_ns - once_ns)

    def _lead(self, member: int, time_ns: float, deadline: float) -> bool:
        """A slice of time for a pipeline's bound by the leaders of its replicas; False where there is nothing
        more."""
        filled = self.filled[member]
        if filled.others == 0:
            return False
        if member not in self.led:
            self.led[member] = Leaders(filled, time_ns)
        led = self.led[member]
        if led.done:
            return False
        led.run(time_ns, min(deadline, time.perf_counter() + _SLICE_S))
        once_ns = self.pool.reduce_ns(member) + self.pool.finish_ns(member)
        self.least[member] = max(self.least[member], led.highest + once_ns)
        return True

    def _dearer(self, member: int) -> list[int]:
        """Open strategies that recompute more in the same layout."""
        members = self.pool.members
        return [
            other
            for other, one in enumerate(members)
            if recomputes_less(members[member], one) and self.least[other] < self._enough_ns(np.inf)
        ]

    def _share(self, member: int, time_ns: float) -> None:
        """What is proved of a pipeline holds for those that recompute more, but where a micro-batch is larger than
        it holds: stages wait around such a one."""
        pool, loads, grains = self.pool, self.pool.alone(member), self.pool.grains(member, beside=False)
        for other in self._dearer(member):
            lines, items = pool.loads(other, beside=False), pool.contents(other).items
            if (member, other) not in self.larger:
                around = around_larger(lines, items, grains, lines.full, time_ns)
                self.larger[member, other] = around.boxes
            pool.tell(other, with_larger(loads, lines, self.larger[member, other]))
            once_ns = pool.reduce_ns(other) + pool.finish_ns(other)
            self.least[other] = max(self.least[other], pool.alone(other).highest + once_ns)

    def _pack(self, member: int) -> None:
        """The step of one strategy, if its least time leaves room."""
        least_ns = self.pool.least_ns(member, beside=False)
        if not np.isfinite(least_ns) or (self.best is not None and least_ns >= self.best.time_ns):
            return
        packed = self.pool.packed(member, self.pool.load.counts, self.pool.grains(member, beside=False))
        if packed is not None:
            self.packed[member] = packed
            self._take(member, packed)
            self._shape(member)

    def _bucket(self, deadline: float) -> None:
        """The step of plain buckets under one strategy, if it is shorter: pipelines, too, for little."""
        if not self.pool.load.rules.padded:
            found = bucketed_step(self.pool, float("inf") if self.best is None else self.best.time_ns, deadline)
            if found is not None:
                self._take(*found)

    def _take(self, member: int, packed: Packed) -> None:
        """The step of one strategy, if it is the shortest."""
        step = self._alone(member, packed)
        if self.best is None or step.time_ns < self.best.time_ns:
            self.best = step

    def _alone(self, member: int, packed: Packed) -> Step:
        total = packed.time_ns + self.pool.reduce_ns(member) + self.pool.finish_ns(member)
        return Step(member, (member,), {member: packed}, total)

    def _polish(self, best: Step, deadline: float) -> Step:
        """The strategy of the best step and the next best packed with more care, and the best of these with most
        as long as that gains, until it is short enough."""
        for step in self._shortest():
            best = self._shorten(step.home, deadline)
        return self._most(best, deadline)

    def _most(self, best: Step, deadline: float) -> Step:
        """The best step's strategy packed with most care, as long as that gains."""
        while best.home in self.packed and self.polished.get(best.home) != best.time_ns:
            before = best.time_ns
            best = self._shortened(best.home, deadline - _MOST_TIMES * self.took_s, most=True)
            if best.time_ns == before:
                break
        return best

    def _shorten(self, home: int, deadline: float) -> Step:
        """The best step after one strategy is packed with more care, once, if it may become the best."""
        near = self._near(self._alone(home, self.packed[home])) and home not in self.polished
        return self._shortened(home, deadline, most=False) if near else self._best()

    def _near(self, step: Step) -> bool:
        """Whether more care may make it the best step."""
        gains = _HOPELESS if self.pool.num_stages(step.home) == 1 else _HOPELESS_PIPELINE
        return step.time_ns <= self._best().time_ns * (1.0 + gains)

    def _shortest(self) -> list[Step]:
        """A few of the packed ones."""
        steps = (self._alone(*one) for one in self.packed.items())
        return sorted(steps, key=lambda one: one.time_ns)[:_MOST_POLISHED]

    def _shortened(self, home: int, deadline: float, *, most: bool) -> Step:
        """The best step after one strategy is packed with more care, where there is reason and time."""
        if self._late(deadline):
            return self._best()
        begin, grains = time.perf_counter(), self.pool.grains(home, beside=False)
        packed = self.pool.polished(home, self.packed[home], grains, most=most)
        self.packed[home] = packed
        self._take(home, packed)
        self.took_s = (time.perf_counter() - begin) / (_MOST_TIMES if most else 1.0)
        # One that most care leaves as it was stays so.
        self.polished[home] = self._alone(home, packed).time_ns if most else 0
        return self._best()

    def _late(self, deadline: float) -> bool:
        """Whether the best step is short enough by what is proved here, or the time is over."""
        short = self.bound_ns >= self._best().time_ns * (1.0 - self.gap) and not self.eager
        return short or time.perf_counter() > deadline

    def _best(self) -> Step:
        assert self.best is not None
        return self.best

    def _shape(self, home: int) -> None:
        """Where improving a pipeline's packing begins: by the shape of its best real loads, if that is not much
        longer than the packing there is."""
        pool, packed = self.pool, self.packed[home]
        if pool.num_stages(home) == 1 or pool.load.rules.padded:
            return
        grains = pool.grains(home, beside=False)
        ways = shaped(pool.loads(home, beside=False), pool.load, grains)
        found = min((pool.timed(home, replicas, grains) for replicas in ways), key=_time_ns, default=packed)
        if found.time_ns <= packed.time_ns * (1.0 + _HOPELESS):
            self.packed[home] = found

    def _prove_in_integers(self, below_ns: float, deadline: float) -> None:
        """Bounds of strategies of one stage, raised by the programs of ``groups``."""
        pool = self.pool
        enough_ns = self._enough_ns(below_ns)
        open_ = {member for member, least in self.least.items() if least < enough_ns} - self.in_integers
        members = sorted(member for member in open_ if pool.num_stages(member) == 1)
        if not members:
            return
        self.in_integers.update(members)
        number = len(members)
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
        found = solve_groups(problem, self.backend, self.gap * GAP_SHARE, left_s)
        for record in found.sets:
            member = members[record.used[0]]
            self.least[member] = max(self.least[member], record.bound_ns)


def _time_ns(packed: Packed) -> int:
    return packed.time_ns
