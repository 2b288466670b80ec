"""Break-even values of doubts: against the compared plans, simulated on both sides of the value."""

from __future__ import annotations

import pytest

from milpplan import Plan, Problem, simulate, solve
from milpplan.explain import break_evens
from milpplan.problem import Scenario, in_scenario, scenario_of
from milpplan.reports.words.result_words import break_even_text
from tests.amounts import first
from tests.small import small_problem

TOLERANCE = 1e-4


def advantage(problem: Problem, end: Scenario, plan: Plan, rivals: list[Plan], values: dict[str, float]) -> float:
    """Relative advantage of the best rival over the plan at some values of a doubt's constants."""
    there = in_scenario(problem, scenario_of(end.name, end.reason, **values))
    reports = [simulate(there, one) for one in (plan, *rivals)]
    steps = [report.step_time_s if report.fits else float("inf") for report in reports]
    return 1.0 - min(steps) / steps[0]


@pytest.mark.parametrize(("num_gpus", "batch"), first(1, ((16, 8), (32, 16))))
def test_the_plan_is_the_best_up_to_the_break_even_and_not_beyond(num_gpus: int, batch: int) -> None:
    """No compared plan is better at the value. Where a rival is named, it is better a hundredth of the way to the
    end further on."""
    overtaken = 0
    problem = small_problem(num_gpus=num_gpus, global_batch_size=batch)
    result = solve(problem, gap=TOLERANCE)
    assert result.plan is not None
    rivals = [one for one in result.runners_up if one != result.plan]
    assert len(rivals) > 3
    found = break_evens(problem, result.plan, rivals, TOLERANCE, uniform=False)
    assert found.num_plans == len(rivals)
    assert found.doubts
    for doubt in found.doubts:
        compare = (problem, doubt.scenario, result.plan, rivals)
        assert advantage(*compare, doubt.values) <= TOLERANCE
        if doubt.rival is not None:
            overtaken += 1
            ends = {name: entry.value for name, entry in doubt.scenario.constants if entry is not None}
            beyond = {name: value + 0.01 * (ends[name] - value) for name, value in doubt.values.items()}
            assert doubt.rival in rivals
            assert advantage(*compare, beyond) > TOLERANCE
    limited = any(doubt.rival is not None for doubt in found.doubts)
    start = f"the best of {len(rivals) + 1} plans {'while' if limited else 'at the ends of all'} "
    assert start in break_even_text(found)
    assert overtaken
