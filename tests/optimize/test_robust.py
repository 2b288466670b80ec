"""The plan with the least worst-case regret, against brute force over all plans of small problems."""

from __future__ import annotations

import random

import numpy as np
import pytest

from milpplan.optimize.robust import solve_robust
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem.overlay import Constants
from milpplan.problem.problem import Problem
from milpplan.problem.scenarios import Scenario, in_scenario
from milpplan.simulation.layout_costs import usable_memory_bytes
from tests.optimize.brute_force import costed_layouts, weight
from tests.optimize.problems import random_problem

GAP = 1e-5


def random_scenarios(seed: int) -> list[Scenario]:
    """One to three scenarios that slow or speed up other parts of a step."""
    rng = random.Random(seed)
    drawn = {
        "scale_out_efficiency": lambda: rng.choice((0.1, 0.3, 0.6, 1.5)),
        "scale_up_efficiency": lambda: rng.choice((0.1, 0.5, 2.0)),
        "memory_efficiency": lambda: rng.choice((0.3, 0.7)),
        "gemm_efficiency": lambda: rng.choice((0.3, 0.6)),
        "layer_launch_s": lambda: rng.choice((1e-5, 1e-4)),
        "message_s": lambda: rng.choice((1e-5, 3e-4)),
    }
    scenarios = []
    for number in range(rng.randint(1, 3)):
        names = rng.sample(list(drawn), rng.randint(1, 2))
        constants = Constants.model_validate({name: {"value": drawn[name]()} for name in names})
        scenarios.append(Scenario(name=f"scenario {number}", constants=constants))
    return scenarios


def least_regret(problem: Problem, scenarios: list[Scenario]) -> tuple[float, list[float]] | None:
    """The least worst-case regret of all plans, and the least objective in every scenario; None without a plan."""
    problems = [problem, *(in_scenario(problem, scenario) for scenario in scenarios)]
    columns = layout_space(problem).columns
    layouts = [columns.at(row) for row in range(len(columns))]
    values = []
    for there in problems:
        steps = []
        for costed in costed_layouts(there, layouts):
            fits = costed.peak_bytes <= usable_memory_bytes(there)
            steps.append(np.where(fits, costed.step_time_ns * weight(there, costed.layout), np.inf))
        values.append(np.concatenate(steps))
    best = [float(value.min()) for value in values]
    if not np.isfinite(best[0]):
        return None
    ratios = np.max([value / least for value, least in zip(values, best, strict=True)], axis=0)
    return float(ratios.min()) - 1.0, best


def check(seed: int, kind: str, backend: str) -> bool:
    """The answer equals brute force, and both bounds are bounds. Returns False where no plan fits."""
    problem, scenarios = random_problem(seed, kind), random_scenarios(seed)
    answer = least_regret(problem, scenarios)
    result = solve_robust(problem, scenarios, gap=GAP, backend=backend, simplest=False)
    if answer is None:
        assert result.status == "infeasible"
        return False
    least, _ = answer
    assert result.status == "optimal"
    regret = result.regret
    assert regret is not None
    assert regret.at_least is not None
    assert regret.at_most is not None
    assert regret.at_least <= least + 1e-9
    assert least <= regret.at_most + 1e-9
    # Each scenario's best step and the search over all of them are proved within the gap.
    assert regret.at_most - regret.at_least <= 3 * GAP * (1.0 + regret.at_most)
    assert max(scenario.lost_fraction for scenario in regret.scenarios) <= regret.at_most
    return True


@pytest.mark.parametrize(("kind", "backend"), [("uniform", "auto"), ("free", "cpsat"), ("free", "cbc")])
@pytest.mark.parametrize("seed", range(10))
def test_least_regret_equals_brute_force(seed: int, kind: str, backend: str) -> None:
    """On small problems the plan and both bounds are those of all plans."""
    check(seed, kind, backend)
