"""Best-first search over sets of strategies that take turns: the bound of all sets, and the best step found.

Every set passes through a sequence of bounding steps, each more expensive than the last. The set with the lowest
bound is always next, as it determines the bound of the step.

 1. *Screening* (``screening``): all sets at once with free switches, then with their pipelines' work in intervals.
 2. *Own memory*: bounds of its strategies as if each had the memory to itself, with the term of the longest
    sequence for a strategy that holds nearly everything. Repeated whenever such a bound rises. Then the strategies
    that are in many sets get the bounds of 4 and 5, once for all sets.
 3. *Pricing of switches*: the cheapest order with a lower bound of its switches; after 4, with the switches
    themselves.
 4. *Narrow intervals* of the pipelines' work, with the capacity of their micro-batches. The first set that gets
    here is packed as its linear programs divide the sequences.
 5. *Longest sequence*: pipelines branch on whether they hold the longest sequence of all, and on what that adds to
    their time.
 6. *Exclusive sequences*: programs of pipelines of one replica with all sequences that only they hold
    (``ExclusiveProgram``).
 7. *Packing* as the linear programs of its bounds divide the sequences, timed exactly. Some sets without pipelines
    are packed first, to find a short step early.

All steps use the sequences that only one strategy of the set can hold (``exclusive_sequences``). When the time is
over, a set keeps its bound.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.lengths import Packed, Step, StrategyTables, Switches, cutoff_ns
from milpplan.lengths.deadline import NEVER, Deadline
from milpplan.lengths.heterogeneous.count_program import HeterogeneousStep
from milpplan.lengths.search_parameters import PARAMETERS
from milpplan.lengths.side_by_side.teams import TeamStep
from milpplan.lengths.tabled import (
    GroupedProblem,
    SwitchTimes,
)
from milpplan.lengths.tabled.step_plan import best_tour, least_overhead_ns
from milpplan.lengths.turns.lagrangian_mixtures import Kind, best_shares
from milpplan.lengths.turns.screening import Node, ScreeningResult, StrategySet
from milpplan.lengths.turns.set_bounds import SetBounds
from milpplan.simulation import IntArray

AnyStep = Step | TeamStep | HeterogeneousStep
"""Step of any kind; steps are compared by their times."""


@dataclass(frozen=True, eq=False)
class Orders:
    """Orders of strategies of a pool, under the ``switches`` that were priced."""

    pool: StrategyTables
    switches: Switches

    def problem(self, members: list[int], times: SwitchTimes) -> GroupedProblem:
        """Return the problem of ``tabled`` for some strategies, all of which may take turns, with their true
        reductions."""
        return GroupedProblem(
            self.pool.load.lengths,
            self.pool.load.counts,
            tuple(self.pool.strategy_with_true_reduction(member, shared_memory=True) for member in members),
            times,
            max_strategies=len(members),
            finish_ns=tuple(self.pool.finish_ns(member) for member in members),
        )

    def least_ns(self, members: list[int], times: SwitchTimes) -> int:
        """Return the cost of the cheapest order of all members beyond their reductions and the minimum finish,
        ns."""
        whole_ns = least_overhead_ns(self.problem(members, times), tuple(range(len(members))))
        return whole_ns - self.pool.fixed_cost_ns(members)

    def best(self, members: list[int], packed: Mapping[int, Packed]) -> Step:
        """Return the step of packed groups in their best order.

        The home is one of the ``members`` that runs something, as sets are bounded with all of their members at
        work.
        """
        running = [member for member in members if member in packed]
        times = {index: packed[member].time_ns for index, member in enumerate(running)}
        tour = best_tour(self.problem(running, self.switches.times(running)), tuple(times), times)
        return Step(running[tour.home], tuple(running[index] for index in tour.order), dict(packed), tour.time_ns)

    def arranged(
        self, members: list[int], counts: Mapping[int, IntArray], deadline: Deadline = NEVER
    ) -> Step | None:
        """Pack and time the groups exactly, in the best order; None if one was not packed.

        After the ``deadline`` packings get little effort.
        """
        packed = {}
        for member, sequences in counts.items():
            packing = self.pool.pack(member, sequences, self.pool.members[member].shared_memory_quanta, deadline)
            if packing is None:
                return None
            packed[member] = packing
        return self.best(members, packed)


class TurnSearch:
    """Search for steps of several strategies: the open sets, the switches between strategies, the incumbent."""

    def __init__(self, pool: StrategyTables, best: AnyStep, gap: float) -> None:
        self.pool = pool
        self.best = best
        self.gap = gap
        self.is_bounded = False
        # Sets that screening kept, closed sets included, and the lowest bound of all others.
        self.nodes: list[Node] = []
        self.dropped_ns = float("inf")
        self.num_sets = 0
        self.switches = Switches(pool)
        self.orders = Orders(pool, self.switches)
        self.members = [member for member, strategy in enumerate(pool.members) if strategy.shared_memory_quanta]
        self.bounds = SetBounds(pool, self.members)
        # Steps of several strategies, and whether the best were packed with more effort.
        self.steps: list[Step] = []
        self.polished = False
        # A set with pipelines was packed.
        self.packed_first = False
        self.deadline = NEVER

    @property
    def bound_ns(self) -> float:
        """Lower bound of all steps of several strategies, valid once this ``is_bounded``."""
        return min([self.dropped_ns, *(node.bound_ns for node in self.nodes)])

    @property
    def target_ns(self) -> float:
        """Cutoff: a set whose bound reaches it is closed."""
        return cutoff_ns(self.best.time_ns, self.gap)

    def take(self, step: AnyStep) -> None:
        """Keep a step from another search if it is shorter than the incumbent."""
        if step.time_ns < self.best.time_ns:
            self.best = step

    def run(self, max_strategies: int, deadline: Deadline) -> None:
        """Screen all sets, then tighten the bounds of those that stay open (``tighten``)."""
        if len(self.members) > 1 and max_strategies > 1:
            self.deadline = deadline
            screening = self.screen(max_strategies)
            self.dropped_ns, self.num_sets = screening.dropped_ns, len(screening.sets)
            # Sets beyond the limit are not tightened.
            limit = PARAMETERS.max_kept_sets
            self.dropped_ns = min(
                [self.dropped_ns, *(screened.bound_ns for screened in screening.sets[limit : limit + 1])]
            )
            self.nodes = [self.node(screened, number) for number, screened in enumerate(screening.sets[:limit])]
        self.is_bounded = True
        self._first(self.nodes)
        self.tighten(deadline)

    def tighten(self, deadline: Deadline) -> None:
        """Tighten the set with the lowest bound by its next bounding step, until no set is open or the
        ``deadline``.

        A set whose strategies got stronger own-memory bounds applies those first.
        """
        self.deadline = deadline
        open_sets = list(self.nodes)
        heapq.heapify(open_sets)
        # Sets without further bounding steps for now.
        exhausted: list[Node] = []
        while True:
            for node in [node for node in exhausted if self._has_stronger_bounds(node)]:
                heapq.heappush(open_sets, node)
                exhausted.remove(node)
            if self.deadline.passed or not open_sets or open_sets[0].bound_ns >= self.target_ns:
                break
            lowest = open_sets[0]
            if self._has_stronger_bounds(lowest):
                self._own_memory(lowest)
                heapq.heapreplace(open_sets, lowest)
            elif not self.polished and self._narrow not in lowest.bounding_steps[1:]:
                self._polish(lowest.bound_ns)
                self.polished = True
            elif lowest.bounding_steps:
                lowest.bounding_steps.pop(0)(lowest)
                heapq.heapreplace(open_sets, lowest)
            else:
                exhausted.append(heapq.heappop(open_sets))

    def node(self, screened: StrategySet, number: int) -> Node:
        """Return the search node of a screened set, with all bounding steps ahead."""
        bounding_steps: list[Callable[[Node], None]] = [
            self._own_memory,
            self._own_memory_with_longest,
            self._common,
            self._price_roughly,
            self._narrow,
            self._price,
            self._pack_first,
            self._longest,
            self._own_memory,
            self._exclusive,
            self._pack,
        ]
        return Node(screened.bound_ns, number, screened, bounding_steps=bounding_steps)

    def _first(self, nodes: list[Node]) -> None:
        """Pack the first sets without pipelines: their bounds are tight, and a short step prunes other sets."""
        end = self.deadline.share(PARAMETERS.packed_first_share)
        for node in [node for node in nodes if not self._pipelines_of(node)][: PARAMETERS.num_packed_first]:
            if end.passed or node.bound_ns >= self.target_ns:
                break
            self._price(node)
            self._coarse(node)
            if node.bound_ns < self.best.time_ns:
                self._arrange(node, self._linear_splits(node), end)
            node.bounding_steps = []

    def _polish(self, bound_ns: float) -> None:
        """Pack the groups of the shortest steps with more effort if their loss may close the gap."""
        for step in sorted(self.steps, key=lambda step: step.time_ns)[: PARAMETERS.max_improved_turns]:
            if bound_ns >= self.target_ns or self.deadline.passed:
                break
            packed = dict(step.packed)
            loss_ns = {
                member: packing.time_ns - self.pool.group_bound_ns(member, packing.counts)
                for member, packing in step.packed.items()
            }
            if step.time_ns - sum(loss_ns.values()) >= self.best.time_ns:
                continue
            for member, packing in step.packed.items():
                if loss_ns[member] > PARAMETERS.improved_loss * step.time_ns:
                    packed[member] = self.pool.polish(
                        member, packing, self.pool.max_quanta(member, shared_memory=True)
                    )
            self._keep(self.orders.best(sorted(packed), packed))

    def _keep(self, step: Step) -> None:
        """Record a step, and make it the incumbent if it is shorter."""
        self.steps.append(step)
        if step.time_ns < self.best.time_ns:
            self.best = step

    def _pipelines_of(self, node: Node) -> list[int]:
        """Return the indices of the set's pipelines."""
        return [index for index in node.screened.strategies if self.pool.num_stages(self.members[index]) > 1]

    def screen(self, max_strategies: int) -> ScreeningResult:
        """Return the sets that may beat the incumbent by more than the gap."""
        self.bounds = SetBounds(self.pool, self.members)
        return self.bounds.screen(max_strategies, self.target_ns, self.deadline)

    def _members_of(self, node: Node) -> list[int]:
        """Return the set's members of the pool."""
        return [self.members[index] for index in node.screened.strategies]

    def _price_roughly(self, node: Node) -> None:
        """Add the cheapest order under lower bounds of the switches: every receiver takes in its data."""
        self._raise_by_order(node, self.switches.least_times(self._members_of(node)))

    def _price(self, node: Node) -> None:
        """Add the cheapest order under the switches of the set."""
        members = self._members_of(node)
        self.switches.price(members)
        self._raise_by_order(node, self.switches.times(members))

    def _raise_by_order(self, node: Node, times: SwitchTimes) -> None:
        """Raise the set's bound by its cheapest order under these times of switches."""
        previous_ns = node.order_ns
        node.order_ns = max(previous_ns, self.orders.least_ns(self._members_of(node), times))
        # The bound contains the previous order.
        node.raise_to(node.bound_ns - previous_ns + node.order_ns)

    def _coarse(self, node: Node) -> None:
        """Bound the set by the intervals of screening, with weights from linear programs."""
        self._branch(node, ["coarse" for _ in node.screened.strategies])

    def _own_memory(self, node: Node) -> None:
        """Bound the set by its strategies' own-memory bounds, computing those of strategies that may hold nearly
        everything."""
        worst_intervals, interval_bounds, pipelines = (
            node.worst_intervals,
            self.bounds.interval_bounds,
            self._pipelines_of(node),
        )
        has_new_bounds = True
        while has_new_bounds:
            node.own_memory_ns = {index: interval_bounds.own_memory_bound_ns(index) for index in pipelines}
            self._branch(node, ["alone" for _ in node.screened.strategies])
            node.nearly_all = interval_bounds.nearly_all(node.worst_intervals)
            has_new_bounds = node.bound_ns < self.target_ns and interval_bounds.add_own_memory_bounds(
                node.nearly_all
            )
        node.worst_intervals = worst_intervals

    def _own_memory_with_longest(self, node: Node) -> None:
        """Bound the set by own-memory bounds with the longest sequence's term for strategies that may hold nearly
        everything."""
        if any(self.bounds.interval_bounds.add_longest(index) for index in node.nearly_all):
            self._own_memory(node)
            node.bounding_steps.insert(0, self._own_memory_with_longest)

    def _has_stronger_bounds(self, node: Node) -> bool:
        """Return whether own-memory bounds of the set's strategies have risen since they were applied."""
        bound_of = self.bounds.interval_bounds.own_memory_bound_ns
        return any(
            bound_of(index) > previous_ns * (1.0 + PARAMETERS.noticed_rise)
            for index, previous_ns in node.own_memory_ns.items()
        )

    def _common(self, node: Node) -> None:
        """Bound the set by the longest sequence for strategies that are in many sets, so that few pipelines need
        programs of their own."""
        strategies = node.screened.strategies
        if not self.bounds.common_strategies.isdisjoint(strategies):
            self._branch(
                node, ["longest" if index in self.bounds.common_strategies else "coarse" for index in strategies]
            )

    def _narrow(self, node: Node) -> None:
        """Bound the set by narrow intervals of its pipelines' work, with the capacity of their micro-batches."""
        self._branch(node, ["none" for _ in node.screened.strategies])

    def _pack_first(self, node: Node) -> None:
        """Pack the step that the linear programs suggest, for the first set that gets here."""
        if not self.packed_first:
            self.packed_first = True
            self._arrange(node, self._linear_splits(node), self.deadline.within(PARAMETERS.first_set_packing_s))

    def _exclusive(self, node: Node) -> None:
        """Bound the set by programs of its pipelines' exclusive sequences."""
        if self.bounds.prove_exclusive(node, self.target_ns, self.deadline.within(PARAMETERS.exclusive_s)):
            self._longest(node)

    def _longest(self, node: Node) -> None:
        """Bound the set by narrow intervals and whether its pipelines hold the longest sequence, except for deep
        pipelines, whose programs are expensive."""
        self._branch(node, ["longest" for _ in node.screened.strategies])

    def _branch(self, node: Node, levels: Sequence[Kind]) -> None:
        """Bound the set by bounds of these levels of its pipelines."""
        self.bounds.branch(node, levels, self.target_ns)

    def _pack(self, node: Node) -> None:
        """Pack the steps that the linear programs of the set's bounds suggest."""
        self._arrange(node, self._linear_splits(node))

    def _arrange(self, node: Node, splits: Sequence[IntArray], deadline: Deadline = NEVER) -> None:
        """Pack the steps of a set that divide its sequences like ``splits`` ([q, n] each), until the
        ``deadline``."""
        members = self._members_of(node)
        for split in splits:
            if deadline.passed:
                break
            counts = {
                member: held_counts
                for member, held_counts in zip(members, split, strict=True)
                if held_counts.any()
            }
            if (step := self.orders.arranged(members, counts, deadline)) is not None:
                self._keep(step)

    def _linear_splits(self, node: Node) -> list[IntArray]:
        """Return how the linear programs of the set's bounds divide the sequences, [q, n] each."""
        strategies = node.screened.strategies
        return best_shares(self.bounds.linear_problem(strategies), np.arange(len(strategies)))
