"""The best order of strategies that take turns, and its cost beyond the times of their groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from milpplan.groups.problem import GroupedProblem
from milpplan.groups.strategies import SwitchTimes
from milpplan.groups.tours import best_tour, least_overhead_ns
from milpplan.lengths.steps import Step
from milpplan.lengths.strategy_tables import Packed, StrategyTables
from milpplan.lengths.switches import Switches
from milpplan.simulation.layout_columns import IntArray


@dataclass(frozen=True, eq=False)
class Orders:
    """Orders of strategies of a pool, under the ``switches`` that were priced."""

    pool: StrategyTables
    switches: Switches

    def problem(self, members: list[int], times: SwitchTimes) -> GroupedProblem:
        """Return the problem of ``groups`` for some strategies, all of which may take turns, with their true
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
        self, members: list[int], counts: Mapping[int, IntArray], deadline: float = float("inf")
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
