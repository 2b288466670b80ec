"""Sets of strategies that take turns: the bound of all of them, and the best step found.

Every set goes through the same few ways to know more of it, each dearer than the last, and always the set with
the least bound is next: that is the one that the bound of the step is.

 1. *Screened* (``screening``): all sets at once, switches free; then with their pipelines in intervals of the
    load.
 2. *Alone*: with what is known of its strategies alone, and of the longest sequence where one of them holds nearly
    everything; again whenever that is more. Then the strategies that are in many sets as in 6 and 7, once for all
    of these.
 3. *Priced*: the cheapest order with what its switches take at least; after 6, with these themselves.
 4. *Opened* as in 10, where its bound rests on pipelines that hold next to nothing.
 5. *Led* (``led_sets``): by what replicas hold at most, as long as that soon tells much; after 9 to the end.
 6. *Finer*: narrow intervals of the loads of its pipelines, with what their micro-batches hold at most. The first
    set that gets here is packed as its linear programs, and those of 5, have it.
 7. *By the longest*: each by the longest sequence that the pipeline holds, and what that adds to its time, where
    this may be the longest of all; then for all its pipelines.
 8. *Forced*: programs of pipelines of one replica with all that only they hold (``forced_programs``).
 9. *Filled*: with whole sequences near the loads that its bound rests on; before the classes of 7.
10. *Opened*: ``groups.search.solve_set`` on the tables of the set, with bounds that are high where its linear
    programs divide the sequences; its answer is packed and timed exactly. Some sets without pipelines are opened
    before all others: what they give is what these have to beat.

All of them know which sequences only one strategy of the set holds (``forced``). Where the time is over, a set
keeps the bound it has. Another process may look at some of the sets (``set_process``).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from milpplan.groups.search import solve_set
from milpplan.groups.strategies import SwitchTimes
from milpplan.lengths.steps import AnyStep, Step, enough_ns
from milpplan.lengths.strategy_tables import StrategyTables
from milpplan.lengths.switches import Switches
from milpplan.lengths.turn_order import Orders
from milpplan.lengths.turns.interval_bounds import Kind
from milpplan.lengths.turns.lagrangian_mixtures import best_shares
from milpplan.lengths.turns.screening import Helper, Node, ScreeningResult, StrategySet
from milpplan.lengths.turns.set_bounds import SetBounds
from milpplan.simulation.layout_columns import IntArray

# More is known of a strategy alone if its bound is higher by this part.
_NEWS = 5e-4
# A set's tables are searched for this part of the time left or so long.
_SEARCH_SHARE, _LEAST_S = 0.5, 2.0
# Sets are looked at one by one, as many at least, and more where there is time, each for so many seconds at least.
_MOST_SETS, _LEAST_SET_S = 10_000, 2e-3
# Sets without pipelines that are opened before all others, in this part of the time.
_FIRST_OPENED, _FIRST_SHARE = 6, 0.15
# Steps whose groups are packed with more care, if they are above their bounds by this part of the step.
_MOST_POLISHED, _LOSS = 2, 0.002
# Seconds for whole sequences of one pipeline of a set.
_FILL_S = 0.7
# Seconds for programs of what pipelines of a set hold for sure.
_FORCE_S = 2.5
# Seconds for replicas of strategies of a set at once, and where only what is known of them is tried.
_LEAD_S, _TRY_S = 0.5, 0.15
# What tells much raises a bound by this part at once.
_MUCH = 2e-3
# Seconds for packing the first set with pipelines, as programs of either sort have it.
_PLACE_S = 1.0
# What is waited at once where only another process has something to do.
_WAIT_S = 0.02


def _alone() -> None:
    """Nobody helps."""


class TurnSearch:
    """Steps of several strategies: the sets left, the switches between their strategies, the best step."""

    def __init__(self, pool: StrategyTables, best: AnyStep, gap: float, backend: str) -> None:
        self.pool = pool
        self.best = best
        self.gap = gap
        self.backend = backend
        self.is_bounded = False
        # Sets that screening left, closed ones included, and what it proved of all others.
        self.nodes: list[Node] = []
        self.dropped_ns = float("inf")
        self.num_sets = 0
        self.switches = Switches(pool)
        self.orders = Orders(pool, self.switches)
        self.members = [m for m, one in enumerate(pool.members) if one.shared_memory_quanta]
        self.bounds = SetBounds(pool, self.members)
        # Steps of several found, and whether the best were packed with more care.
        self.steps: list[Step] = []
        self.polished = False
        # Whether a set with pipelines was packed.
        self.packed_first = False
        self.deadline = float("inf")
        # A step found by another process is no longer.
        self.below_ns = float("inf")

    @property
    def bound_ns(self) -> float:
        """No step of several strategies takes less, once this ``is_bounded``."""
        return min([self.dropped_ns, *(one.bound_ns for one in self.nodes)])

    @property
    def target_ns(self) -> float:
        """A set with a bound of at least this is closed."""
        return enough_ns(min(self.best.time_ns, self.below_ns), self.gap)

    def take(self, step: AnyStep) -> None:
        """A step found elsewhere, if it is shorter."""
        if step.time_ns < self.best.time_ns:
            self.best = step

    def run(
        self,
        max_strategies: int,
        deadline: float,
        heard: Callable[[], object] = bool,
        enough_ns: Callable[[], float] = lambda: np.inf,
        helped: Callable[[], Helper | None] = _alone,
    ) -> None:
        """Screen all sets, and learn more of what is left (``narrow``)."""
        if len(self.members) > 1 and max_strategies > 1:
            self.deadline = deadline
            kept = self.screen(max_strategies)
            self.dropped_ns, self.num_sets = kept.dropped_ns, len(kept.sets)
            # None of those beyond will ever be the least.
            most = max(_MOST_SETS, int((deadline - time.perf_counter()) / _LEAST_SET_S))
            self.dropped_ns = min([self.dropped_ns, *(one.bound_ns for one in kept.sets[most : most + 1])])
            self.nodes = [self.node(one, number) for number, one in enumerate(kept.sets[:most])]
        self.is_bounded = True
        self._first(self.nodes)
        self.tighten(heard, enough_ns, helped)

    def tighten(
        self,
        heard: Callable[[], object] = bool,
        enough_ns: Callable[[], float] = lambda: np.inf,
        helped: Callable[[], Helper | None] = _alone,
        sets: Sequence[Node] | None = None,
    ) -> None:
        """Learn more of the set with the least bound, until none of ``sets`` is open (None: of all): its ways in
        turn, and what is known of its strategies alone whenever that is more. ``heard`` is called between two
        steps, and may ``take`` one; a bound of ``enough_ns`` is enough for now. Who has ``helped`` looks at some
        of them meanwhile."""
        left = list(self.nodes if sets is None else sets)
        heapq.heapify(left)
        # Those of which nothing more is known for now.
        ended: list[Node] = []
        while True:
            heard()
            helper = helped()
            if helper is not None:
                helper.share(left)
            for one in [one for one in ended if self._renewed(one)]:
                heapq.heappush(left, one)
                ended.remove(one)
            enough = min(self.target_ns, enough_ns())
            if time.perf_counter() > self.deadline:
                break
            if not left or left[0].bound_ns >= enough:
                if helper is None or not helper.busy:
                    break
                time.sleep(_WAIT_S)
                continue
            least = left[0]
            if self._renewed(least):
                self._alone(least)
                heapq.heapreplace(left, least)
            elif not self.polished and self._finer not in least.bounding_steps[1:]:
                self._polish(least.bound_ns)
                self.polished = True
            elif least.bounding_steps:
                least.bounding_steps.pop(0)(least)
                heapq.heapreplace(left, least)
            else:
                ended.append(heapq.heappop(left))
        if helper is not None:
            helper.recall()

    def node(self, one: StrategySet, number: int) -> Node:
        """A screened set with everything left to do."""
        ways: list[Callable[[Node], None]] = [
            self._alone,
            self._lengthened,
            self._common,
            self._price_least,
            self._open_small,
            self._lead_first,
            self._finer,
            self._price,
            self._place,
            self._longest,
            self._alone,
            self._force,
            self._fill,
            self._lead,
            self._classify,
            self._open,
        ]
        return Node(one.bound_ns, number, one, bounding_steps=ways)

    def _first(self, left: list[Node]) -> None:
        """Open the first sets without pipelines: their tables are tight, and what they give all have to beat."""
        end = self._soon(_FIRST_SHARE * (self.deadline - time.perf_counter()))
        for one in [one for one in left if not self._pipelined(one)][:_FIRST_OPENED]:
            if time.perf_counter() > end or one.bound_ns >= self.target_ns:
                break
            self._price(one)
            self._coarse(one)
            if one.bound_ns < self.best.time_ns:
                self._arrange(one, self._linear_splits(one), end)
            if one.bound_ns < self.target_ns:
                self._open(one)
            one.bounding_steps = []

    def _polish(self, least_ns: float) -> None:
        """Pack the groups of the shortest steps found with more care, where what is cheap leaves the gap open."""
        for step in sorted(self.steps, key=lambda one: one.time_ns)[:_MOST_POLISHED]:
            if least_ns >= self.target_ns or time.perf_counter() > self.deadline:
                break
            packed = dict(step.packed)
            lost = {m: one.time_ns - self.pool.group_bound_ns(m, one.counts) for m, one in step.packed.items()}
            if step.time_ns - sum(lost.values()) >= self.best.time_ns:
                continue
            for member, one in step.packed.items():
                if lost[member] > _LOSS * step.time_ns:
                    packed[member] = self.pool.polish(member, one, self.pool.max_quanta(member, beside=True))
            self._keep(self.orders.best(sorted(packed), packed))

    def _keep(self, step: Step) -> None:
        """A step found; the best one if it is shorter than that."""
        self.steps.append(step)
        if step.time_ns < self.best.time_ns:
            self.best = step

    def _pipelined(self, one: Node) -> list[int]:
        """Places of the pipelines of the set."""
        return [place for place in one.screened.strategies if self.pool.num_stages(self.members[place]) > 1]

    def screen(self, max_strategies: int) -> ScreeningResult:
        """Sets that may be shorter than the best step by more than the gap."""
        self.bounds = SetBounds(self.pool, self.members)
        return self.bounds.screen(max_strategies, self.target_ns, self.deadline)

    def _held(self, one: Node) -> list[int]:
        """Members of the pool."""
        return [self.members[place] for place in one.screened.strategies]

    def _price_least(self, one: Node) -> None:
        """The cheapest order of the set if every switch took what its receivers take in at least, in the place of
        what screening counts: reductions and the least finish."""
        self._ordered(one, self.switches.least_times(self._held(one)))

    def _price(self, one: Node) -> None:
        """The cheapest order with the switches of the set."""
        held = self._held(one)
        self.switches.price(held)
        self._ordered(one, self.switches.times(held))

    def _ordered(self, one: Node, times: SwitchTimes) -> None:
        """The cheapest order under these times of switches."""
        before_ns = one.order_ns
        one.order_ns = max(before_ns, self.orders.least_ns(self._held(one), times))
        # What was proved of it so far has the switches from before.
        one.raise_to(one.bound_ns - before_ns + one.order_ns)

    def _coarse(self, one: Node) -> None:
        """The intervals that it was screened with, the weights those of linear programs."""
        self._branch(one, ["coarse" for _ in one.screened.strategies])

    def _alone(self, one: Node) -> None:
        """What is known of its strategies alone, of those that may hold nearly everything at least."""
        worst, parts, places = one.worst_intervals, self.bounds.interval_bounds, self._pipelined(one)
        asked = True
        while asked:
            one.own_memory_ns = {place: parts.own_memory_bound_ns(place) for place in places}
            self._branch(one, ["alone" for _ in one.screened.strategies])
            one.nearly_all = parts.nearly_all(one.worst_intervals)
            asked = one.bound_ns < self.target_ns and parts.add_own_memory_bounds(one.nearly_all)
        one.worst_intervals = worst

    def _lengthened(self, one: Node) -> None:
        """The same, with what the longest sequence adds to those that may hold nearly everything."""
        if any(self.bounds.interval_bounds.add_longest(place) for place in one.nearly_all):
            self._alone(one)
            one.bounding_steps.insert(0, self._lengthened)

    def _renewed(self, one: Node) -> bool:
        """Whether by now more is known of its strategies alone."""
        known = self.bounds.interval_bounds.own_memory_bound_ns
        return any(known(place) > before * (1.0 + _NEWS) for place, before in one.own_memory_ns.items())

    def _common(self, one: Node) -> None:
        """What is known of the longest sequence for those strategies that are in many sets, so that few pipelines
        need programs of their own."""
        used = one.screened.strategies
        if not self.bounds.common_strategies.isdisjoint(used):
            self._branch(one, ["longest" if place in self.bounds.common_strategies else "coarse" for place in used])

    def _finer(self, one: Node) -> None:
        """Narrow intervals of the loads of its pipelines, with what their micro-batches hold at most."""
        self._branch(one, ["none" for _ in one.screened.strategies])

    def _place(self, one: Node) -> None:
        """The step that its linear programs give, if it is the first one that gets here."""
        if not self.packed_first:
            self.packed_first = True
            self._arrange(one, self._linear_splits(one), time.perf_counter() + _PLACE_S)
            led = self.bounds.set_searches.get(one.number)
            if led is not None and led.bound_ns >= one.bound_ns:
                self._arrange(one, led.splits(), time.perf_counter() + _PLACE_S)

    def _lead_first(self, one: Node) -> None:
        """What replicas of its strategies hold at most, as long as that soon tells much: at first by what is known
        of them."""
        before_ns, learns = one.bound_ns, bool(one.nearly_all) or one.number in self.bounds.set_searches
        seconds = _LEAD_S if learns else _TRY_S
        more = self.bounds.bound_by_replicas(one, self.target_ns, self._soon(seconds), learns=learns)
        if more and one.bound_ns > before_ns * (1.0 + _MUCH):
            one.bounding_steps.insert(0, self._lead_first)

    def _lead(self, one: Node, *, anew: bool = True) -> None:
        """The same, as long as more is to be had, with what is open of their loads when it is begun ``anew``."""
        if self.bounds.bound_by_replicas(one, self.target_ns, self._soon(_LEAD_S), anew=anew):
            one.bounding_steps.insert(0, partial(self._lead, anew=False))

    def _soon(self, seconds: float) -> float:
        """So long from now, or the deadline."""
        return min(self.deadline, time.perf_counter() + seconds)

    def _force(self, one: Node) -> None:
        """Programs of its pipelines with what they hold for sure."""
        if self.bounds.prove_exclusive(one, self.target_ns, self._soon(_FORCE_S)):
            self._longest(one)

    def _longest(self, one: Node) -> None:
        """The same; those that may run the longest sequence by whether they do, but for deep ones, whose programs
        are dear."""
        self._branch(one, ["longest" for _ in one.screened.strategies])

    def _classify(self, one: Node) -> None:
        """The same, and all groups told apart by their longest sequence."""
        self._branch(one, ["all" for _ in one.screened.strategies])

    def _branch(self, one: Node, kinds: Sequence[Kind]) -> None:
        """What is proved of the set with so much known of its pipelines."""
        self.bounds.branch(one, kinds, self.target_ns)

    def _fill(self, one: Node) -> None:
        """Whole sequences of its pipelines near the loads that its bound rests on, as long as that raises it."""
        before_ns, filled = one.bound_ns, False
        for place, interval in one.worst_intervals.items():
            filled = self.bounds.interval_bounds.sharpen_interval(place, interval, self._soon(_FILL_S)) or filled
        if filled:
            self._longest(one)
            if one.bound_ns > before_ns and one.bound_ns < self.target_ns:
                one.bounding_steps.insert(0, self._fill)

    def _open(self, one: Node) -> None:
        """Search the tables of the set, and time what they give exactly."""
        held = self._held(one)
        problem = self.orders.problem(held, self.switches.times(held))
        left = max(_LEAST_S, _SEARCH_SHARE * (self.deadline - time.perf_counter()))
        used, below_ns = tuple(range(len(held))), min(self.best.time_ns, self.below_ns)
        floors = self.bounds.floors(one, self._linear_splits(one))
        plan, bound_ns = solve_set(problem, used, below_ns, self.backend, self.gap, left, floors)
        # Loads that are not open are no part of the program.
        one.raise_to(min(float(bound_ns), self.target_ns))
        if plan is not None:
            counts = {held[group.strategy]: group.counts for group in plan.groups}
            self._arrange(one, [np.array([counts.get(member, 0 * self.pool.load.counts) for member in held])])

    def _open_small(self, one: Node) -> None:
        """The same, where its bound rests on pipelines that hold next to nothing: what is still to be known of
        these would not tell much."""
        if one.worst_intervals and not any(one.worst_intervals.values()):
            self._price(one)
            self._open(one)
            one.bounding_steps = [self._longest]

    def _arrange(self, one: Node, splits: Sequence[IntArray], deadline: float = np.inf) -> None:
        """Keep the steps of a set that divide its sequences so, [q, n] each; after the ``deadline`` no more of
        them."""
        held = self._held(one)
        for one_split in splits:
            if time.perf_counter() > deadline:
                break
            counts = {member: mine for member, mine in zip(held, one_split, strict=True) if mine.any()}
            if (step := self.orders.arranged(held, counts, deadline)) is not None:
                self._keep(step)

    def _linear_splits(self, one: Node) -> list[IntArray]:
        """Where the linear programs of what is known of the set put the sequences, [q, n] each."""
        used = one.screened.strategies
        return best_shares(self.bounds.linear_problem(used), np.arange(len(used)))
