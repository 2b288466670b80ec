"""Switches between the strategies of a step, priced on demand by the planner of switches.

A pair that has not been priced counts as free, or with the time in which its receivers take in their data
(``least_times``), which is a lower bound: what is proved with it holds. Strategies of one layout hold equal
states, whatever they recompute, so nothing moves between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

import numpy as np

from milpplan.lengths.candidates import LayoutKey
from milpplan.lengths.records import LengthSwitch
from milpplan.lengths.strategy_tables import StrategyTables
from milpplan.lengths.tabled import SwitchTimes
from milpplan.simulation import usable_memory_bytes
from milpplan.simulation.states import grad_bytes
from milpplan.switching.planning import least_switch_s, switch_costs
from milpplan.switching.routes import Links
from milpplan.units import NS_PER_S

NEVER_NS = 10**15
"""Nanoseconds of a forbidden switch."""


@dataclass(frozen=True, slots=True)
class Arc:
    """A switch from one layout to another: (parameters, gradients) each."""

    seconds: tuple[float, float]
    num_bytes: tuple[int, int]
    peak_bytes: int


class Switches:
    """Switches between layouts of a pool, with relays; each is priced once."""

    def __init__(self, pool: StrategyTables) -> None:
        self.pool = pool
        self.arcs: dict[tuple[LayoutKey, LayoutKey], Arc] = {}
        # Lower bounds in seconds, (parameters, gradients).
        self.min_seconds: dict[tuple[LayoutKey, LayoutKey], tuple[float, float]] = {}
        states = max(int(stage.state_bytes[2]) for member in pool.members for stage in member.stages)
        # Memory beside moving parameters: optimizer states, and the gradients summed so far.
        each = pool.problem.hardware.software.optimizer_state_bytes
        self.beside_bytes = states + int(-(-states * grad_bytes(pool.problem) // each))

    def _layout_key(self, member: int) -> LayoutKey:
        return self.pool.members[member].candidate.layout_key

    def price(self, members: Sequence[int]) -> bool:
        """Price all pairs of the members' layouts; return whether some were new."""
        layouts = {self._layout_key(member): self.pool.members[member].candidate.plan for member in members}
        if all(pair in self.arcs for pair in permutations(layouts, 2)):
            return False
        problem, plans = self.pool.problem, list(layouts.values())
        links = Links.of(problem.hardware, plans[0].layout.num_gpus)
        costs = switch_costs(problem.model, plans, links, "relay", grad_bytes(problem))
        for (a, source), (b, target) in permutations(enumerate(layouts), 2):
            self.arcs[source, target] = Arc(
                (float(costs.parameters_s[a, b]), float(costs.gradients_s[a, b])),
                (int(costs.parameters_bytes[a, b]), int(costs.gradients_bytes[a, b])),
                int(costs.peak_bytes[a, b]),
            )
        return True

    def least_times(self, members: Sequence[int]) -> SwitchTimes:
        """Return lower bounds of the times between members, [from, to], rounded down to whole ns; much faster than
        pricing."""
        layouts = {self._layout_key(member): self.pool.members[member].candidate.plan for member in members}
        if any(pair not in self.min_seconds for pair in permutations(layouts, 2)):
            problem, plans = self.pool.problem, list(layouts.values())
            links = Links.of(problem.hardware, plans[0].layout.num_gpus)
            seconds_of = least_switch_s(problem.model, plans, links, grad_bytes(problem))
            for (row, source), (column, target) in permutations(enumerate(layouts), 2):
                self.min_seconds[source, target] = (
                    float(seconds_of[0][row, column]),
                    float(seconds_of[1][row, column]),
                )
        table = np.zeros((2, len(members), len(members)), dtype=np.int64)
        for a, source_member in enumerate(members):
            for b, target_member in enumerate(members):
                arc = self.min_seconds.get(
                    (self._layout_key(source_member), self._layout_key(target_member)), (0.0, 0.0)
                )
                table[:, a, b] = [int(seconds * NS_PER_S) for seconds in arc]
        return SwitchTimes(table[0], table[1])

    def times(self, members: Sequence[int]) -> SwitchTimes:
        """Return the times between members, [from, to], rounded up to whole ns; forbidden if parameters do not fit
        while they move."""
        usable = usable_memory_bytes(self.pool.problem)
        table = np.zeros((2, len(members), len(members)), dtype=np.int64)
        for a, source in enumerate(members):
            for b, target in enumerate(members):
                arc = self.arcs.get((self._layout_key(source), self._layout_key(target)))
                if arc is not None:
                    table[:, a, b] = [int(np.ceil(seconds * NS_PER_S)) for seconds in arc.seconds]
                    if arc.peak_bytes + self.beside_bytes > usable:
                        table[0, a, b] = NEVER_NS
        return SwitchTimes(table[0], table[1])

    def of_step(self, home: int, order: Sequence[int]) -> list[LengthSwitch]:
        """Return the transfers of a step, in order: parameters before every group, gradients beside it and back
        home."""
        transfers = []
        for position, (a, b) in enumerate(pairwise([home, *order, home])):
            arc = self.arcs.get((self._layout_key(a), self._layout_key(b)))
            if arc is None:
                continue
            names = (self.pool.members[a].candidate.name, self.pool.members[b].candidate.name)
            if position < len(order):
                transfers.append(LengthSwitch(*names, "parameters", arc.num_bytes[0], arc.seconds[0]))
            if position:
                transfers.append(LengthSwitch(*names, "gradients", arc.num_bytes[1], arc.seconds[1]))
        return transfers
