"""Best-first search over sets of strategies that take turns: the bound of all sets, and the best step found.

Every set passes through a sequence of bounding steps, each more expensive than the last. The set with the lowest
bound is always next, as it determines the bound of the step.

 1. *Screening* (``screening``): all sets at once with free switches, then with their pipelines' work in intervals.
 2. *Pricing of switches*, roughly: the cheapest order with a lower bound of its switches.
 3. *Linear programs* for every choice of intervals of the pipelines' work.
 4. *Exclusive sequences*: programs of pipelines of one replica with all sequences that only they hold
    (``ExclusiveProgram``).
 5. *Pricing of switches* themselves.
 6. *Packing* as the linear programs divide the sequences, timed exactly. Some sets without pipelines are packed
    first, to find a short step early.

When the time is over, a set keeps its bound.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
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
from milpplan.lengths.turns.lagrangian_mixtures import divisions
from milpplan.lengths.turns.screening import Node, StrategySet
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
        self.pool, self.best, self.gap = pool, best, gap
        self.is_bounded = False
        # Sets that screening kept, closed sets included, and the lowest bound of all others.
        self.nodes: list[Node] = []
        self.dropped_ns = float("inf")
        self.num_sets = 0
        self.switches = Switches(pool)
        self.orders = Orders(pool, self.switches)
        self.members = [member for member, strategy in enumerate(pool.members) if strategy.shared_memory_quanta]
        self.bounds = SetBounds(pool, self.members)
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
        """Make a step the incumbent if it is shorter."""
        if step.time_ns < self.best.time_ns:
            self.best = step

    def run(self, max_strategies: int, deadline: Deadline, enough_ns: float = np.inf) -> None:
        """Screen all sets, then tighten the bounds of those that stay open, as far as ``tighten`` does."""
        if len(self.members) > 1 and max_strategies > 1:
            self.deadline = deadline
            screening = self.bounds.screen(max_strategies, self.target_ns, deadline)
            self.dropped_ns, self.num_sets = screening.dropped_ns, len(screening.sets)
            # Sets beyond the limit are not tightened.
            limit = PARAMETERS.max_kept_sets
            self.dropped_ns = min(
                [self.dropped_ns, *(screened.bound_ns for screened in screening.sets[limit : limit + 1])]
            )
            self.nodes = [self.node(screened, number) for number, screened in enumerate(screening.sets[:limit])]
        self.is_bounded = True
        self._first(self.nodes)
        self.tighten(deadline, enough_ns)

    def tighten(self, deadline: Deadline, enough_ns: float = np.inf) -> None:
        """Tighten the set with the lowest bound by its next bounding step, until no set is open, none is bounded
        by less than ``enough_ns``, or the ``deadline``."""
        self.deadline = deadline
        open_sets = list(self.nodes)
        heapq.heapify(open_sets)
        while open_sets and not deadline.passed and open_sets[0].bound_ns < min(enough_ns, self.target_ns):
            lowest = open_sets[0]
            if lowest.bounding_steps:
                lowest.bounding_steps.pop(0)(lowest)
            elif self.bounds.own_memory_ns(lowest.screened.strategies) > lowest.own_memory_ns:
                # The search for single strategies has raised a bound since.
                self._branch(lowest)
            else:
                heapq.heappop(open_sets)
                continue
            heapq.heapreplace(open_sets, lowest)

    def node(self, screened: StrategySet, number: int) -> Node:
        """Return the search node of a screened set, with all bounding steps ahead."""
        bounding_steps: list[Callable[[Node], None]] = [
            self._price_roughly,
            self._branch,
            self._refine,
            self._exclusive,
            self._price,
            self._pack,
        ]
        return Node(screened.bound_ns, number, screened, bounding_steps=bounding_steps)

    def _first(self, nodes: list[Node]) -> None:
        """Pack the first sets without pipelines: their bounds are tight, and a short step prunes other sets."""
        end = self.deadline.share(PARAMETERS.packed_first_share)
        for node in [node for node in nodes if not self._has_pipelines(node)][: PARAMETERS.num_packed_first]:
            if end.passed or node.bound_ns >= self.target_ns:
                break
            self._price(node)
            self._branch(node)
            if node.bound_ns < self.best.time_ns:
                self._pack(node, end)
            node.bounding_steps = []

    def _has_pipelines(self, node: Node) -> bool:
        return any(self.pool.num_stages(member) > 1 for member in self._members_of(node))

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

    def _branch(self, node: Node) -> None:
        """Bound the set by linear programs for every choice of intervals of its pipelines' work."""
        bound_ns = self.bounds.branch(node.screened.strategies, self.target_ns - node.order_ns)
        node.raise_to(bound_ns + node.order_ns)
        node.own_memory_ns = self.bounds.own_memory_ns(node.screened.strategies)

    def _refine(self, node: Node) -> None:
        """Bound the set by refined bounds of its pipelines, by which of them holds the longest sequence."""
        self.bounds.refine(node.screened.strategies)
        self._branch(node)

    def _exclusive(self, node: Node) -> None:
        """Bound the set by programs of its pipelines' exclusive sequences, again as long as more can be gained."""
        # Programs of other sets may be enough.
        self._branch(node)
        if node.bound_ns >= self.target_ns:
            return
        end = self.deadline.within(PARAMETERS.exclusive_s)
        is_open = self.bounds.prove_exclusive(node.screened.strategies, node.order_ns, self.target_ns, end)
        self._branch(node)
        if is_open:
            node.bounding_steps.insert(0, self._exclusive)

    def _pack(self, node: Node, deadline: Deadline = NEVER) -> None:
        """Pack the steps that divide the set's sequences as its linear programs do, until the ``deadline``."""
        members, strategies = self._members_of(node), node.screened.strategies
        for _, split in divisions(self.bounds.linear_problem(strategies), np.arange(len(strategies))):
            if deadline.passed:
                break
            counts = {
                member: held_counts
                for member, held_counts in zip(members, split, strict=True)
                if held_counts.any()
            }
            if (step := self.orders.arranged(members, counts, deadline)) is not None:
                self.take(step)
