"""How much work a solve was: what was counted, and about how long it takes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from milpplan.optimize.milp.program import Program
    from milpplan.simulation.pipeline.step_graph import StepGraph

RELAXATION_S: Final = 4e-3
"""Of one relaxation that is solved again, with what is around it. These constants are fitted to 848 times that
layouts of GPT-3, Llama-3 405B and Mixtral were branched, four nodes each: R^2 0.97, off by 14 % of all time."""
ROW_S: Final = 1.4e-8
"""Of an iteration, for each row."""
ENTRY_S: Final = 7e-10
"""Of an iteration, for each coefficient."""
ITEM_S: Final = 2e-7
"""Of a simulation, for each work item."""
PROGRAM_S: Final = 0.5
"""Of an integer program: a guess."""


@dataclass(slots=True)
class Counters:
    """How much work was done."""

    relaxations: int = 0
    integer_programs: int = 0
    witnessed: int = 0
    paths: int = 0
    simulations: int = 0
    unwitnessed: int = 0
    work_s: float = 0.0
    """About how many seconds all of this takes, from counts alone: the same on every machine."""

    def simulated(self, plans: int, graph: StepGraph) -> None:
        """Count simulations on a graph."""
        self.simulations += plans
        self.work_s += ITEM_S * plans * graph.structure.num_nodes

    def relaxed(self, program: Program, iterations: int) -> None:
        """Count a solution of a relaxation."""
        self.relaxations += 1
        each = ROW_S * program.num_rows + ENTRY_S * len(program.rows.columns)
        self.work_s += RELAXATION_S + iterations * each

    def solved(self) -> None:
        """Count an integer program."""
        self.integer_programs += 1
        self.work_s += PROGRAM_S

    def add(self, now: Counters, before: Counters) -> None:
        """Count what another process has done since it counted ``before``."""
        for part in fields(self):
            gained = getattr(now, part.name) - getattr(before, part.name)
            setattr(self, part.name, getattr(self, part.name) + gained)
