"""Counters of a solve's work, and an estimate of its duration from counts only."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from milpplan.optimize.milp.program import Program
    from milpplan.simulation.pipeline.step_graph import StepGraph

RELAXATION_S: Final = 4e-3
"""Seconds of solving a relaxation again. The constants here are fitted to 848 calls that branched layouts of
GPT-3, Llama-3 405B and Mixtral by four nodes each: R^2 0.97, mean absolute error 14 % of the total time."""
ROW_S: Final = 1.4e-8
"""Seconds of a simplex iteration, per row."""
ENTRY_S: Final = 7e-10
"""Seconds of a simplex iteration, per coefficient."""
ITEM_S: Final = 2e-7
"""Seconds of a simulation, per work item."""
PROGRAM_S: Final = 0.5
"""Seconds of an integer program: a guess."""


@dataclass(slots=True)
class Counters:
    """Counts of relaxations, integer programs, confirmations, paths and simulations."""

    relaxations: int = 0
    integer_programs: int = 0
    witnessed: int = 0
    paths: int = 0
    simulations: int = 0
    unwitnessed: int = 0
    work_s: float = 0.0
    """Estimated seconds of all this work, from counts only: the same on every machine."""

    def simulated(self, plans: int, graph: StepGraph) -> None:
        """Count simulations on a graph."""
        self.simulations += plans
        self.work_s += ITEM_S * plans * graph.structure.num_nodes

    def relaxed(self, program: Program, iterations: int) -> None:
        """Count a solved relaxation."""
        self.relaxations += 1
        each = ROW_S * program.num_rows + ENTRY_S * len(program.rows.columns)
        self.work_s += RELAXATION_S + iterations * each

    def solved(self) -> None:
        """Count a solved integer program."""
        self.integer_programs += 1
        self.work_s += PROGRAM_S

    def add(self, now: Counters, before: Counters) -> None:
        """Add what another process has counted between ``before`` and ``now``."""
        for part in fields(self):
            gained = getattr(now, part.name) - getattr(before, part.name)
            setattr(self, part.name, getattr(self, part.name) + gained)
