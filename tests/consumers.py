"""Agreement of everything that prices a plan: simulator, bulk simulation, bounds and traffic."""

from __future__ import annotations

import numpy as np

from milpplan.problem import Layout, Plan, Problem
from milpplan.simulation import LayoutColumns
from tests.communication.test_traffic import assert_sums
from tests.optimize.test_bounds import Costed, assert_bounds_hold
from tests.simulation.cases import random_plan
from tests.simulation.test_bulk import disagreements


def assert_consumers_agree(problem: Problem, layouts: list[Layout], random: np.random.Generator) -> None:
    """Check that bulk simulation gives the simulator's numbers, bounds hold for random plans, and traffic adds up.

    Args:
        problem: The problem.
        layouts: Legal layouts; bounds and traffic are checked for the first four without offloading and tiles.
        random: Source of the plans.
    """
    assert disagreements(problem, layouts, 3, random) == []
    plain = [layout for layout in layouts if not layout.offloads and layout.tp_overlap == "none"]
    costed = Costed.of(problem, LayoutColumns.of(plain))
    for row, layout in enumerate(plain[:4]):
        plan = Plan.model_validate(random_plan(random, problem, layout).model_dump())
        assert_bounds_hold(problem, costed, row, plan)
        assert_sums(problem, plan, "ring")
