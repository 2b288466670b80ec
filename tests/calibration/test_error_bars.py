"""Error bars: first order, in quadrature, and what is said of the choice between plans."""

from __future__ import annotations

from math import exp, hypot

import pytest

import milpplan
from milpplan import Plan, Problem, Range, simulate
from milpplan.calibration import (
    Coverage,
    at,
    error_bar,
    joint_end,
    mean_share,
    robustness,
    side_s,
    within_one_sigma,
)
from milpplan.problem import PRIOR_SIGMA, PRIORS, UNCERTAIN, Uncertainty, uncertainty_of, with_constants
from milpplan.reports.words.result_words import error_bar_text, robustness_text
from milpplan.simulation import step_times_s, step_weight
from tests.small import small_problem


def uncertain(**sigmas: float) -> Problem:
    """The small problem with an uncertainty."""
    problem = small_problem()
    known = Uncertainty(overlay="mine", **sigmas)
    return problem.model_copy(update={"hardware": problem.hardware.model_copy(update={"uncertainty": known})})


@pytest.fixture(scope="module")
def plan() -> Plan:
    """The best plan of the small problem."""
    found = milpplan.solve(small_problem()).plan
    assert found is not None
    return found


def test_parts_add_in_quadrature(plan: Plan) -> None:
    """Each constant moves alone; the residual is relative to the step."""
    problem = uncertain(gemm_efficiency=0.1, step_overhead_s=0.02, residual_fraction=0.05)
    step = simulate(problem, plan).step_time_s
    bar = error_bar(problem, plan, step)
    assert bar is not None
    slow = simulate(at(problem, {"gemm_efficiency": 1.0}), plan).step_time_s
    assert bar.parts_s["gemm_efficiency"][1] == pytest.approx(slow - step)
    assert bar.parts_s["step_overhead_s"] == pytest.approx((0.0, 0.02))
    assert bar.above_s == pytest.approx(hypot(slow - step, 0.02, 0.05 * step))
    assert set(bar.parts_s) == {"gemm_efficiency", "step_overhead_s", "residual"}
    assert "one sigma" in error_bar_text(bar)


def test_only_what_is_exact_is_not_varied(plan: Plan) -> None:
    """Where every constant counts as exact the bar has no width, and no end is compared; the scatter alone moves
    no plan past another."""
    bar = error_bar(uncertain(), plan, 1.0)
    assert (bar.below_s, bar.above_s, bar.parts_s) == (0.0, 0.0, {})
    assert robustness(uncertain(), plan, ()) is None
    assert robustness(uncertain(residual_fraction=0.1), plan, ()) is None


def test_a_description_without_a_fit_has_the_priors(plan: Plan) -> None:
    """Each constant moves by its prior's sigma: products by exp(0.25) in rate, a step's overhead by its seconds,
    the residual with the step."""
    problem = small_problem()
    step = simulate(problem, plan).step_time_s
    bar = error_bar(problem, plan, step)
    slower = with_constants(problem.hardware, {"gemm_efficiency": exp(-PRIOR_SIGMA["gemm_efficiency"])}, {})
    slow = simulate(problem.model_copy(update={"hardware": slower}), plan).step_time_s
    assert bar.parts_s["gemm_efficiency"][1] == pytest.approx(slow - step)
    assert bar.parts_s["step_overhead_s"] == pytest.approx((0.0, PRIOR_SIGMA["step_overhead_s"]))
    assert bar.parts_s["residual"][0] == pytest.approx(PRIORS.residual_fraction * step)
    assert bar.above_s == pytest.approx(hypot(*(up for _, up in bar.parts_s.values())))
    assert "no constant is fitted" in error_bar_text(bar)
    assert robustness(problem, plan, (plan,)) is not None


def test_every_constant_has_a_prior() -> None:
    """None is exact unless a description says so."""
    assert PRIOR_SIGMA.keys() == set(UNCERTAIN)
    assert min(PRIOR_SIGMA.values()) > 0
    assert uncertainty_of(small_problem().hardware) is PRIORS


def test_the_spread_between_clusters_adds_in_quadrature(plan: Plan) -> None:
    """A residual of 3 % and a spread of 4 % are 5 % of the step, up and down."""
    problem = uncertain(residual_fraction=0.03, sources_fraction=0.04)
    bar = error_bar(problem, plan, 2.0)
    assert (bar.below_s, bar.above_s) == pytest.approx((0.1, 0.1))
    assert side_s(problem, plan, 2.0, 1.0) == side_s(problem, plan, 2.0, -1.0) == pytest.approx(0.1)


def test_coverage_counts_runs_within_a_sigma(plan: Plan) -> None:
    """With 5 % to each side, a measured step 4 % longer or shorter is covered, 6 % is not."""
    problem = uncertain(residual_fraction=0.05)
    covered = [within_one_sigma(problem, plan, 1.0, measured) for measured in (0.94, 0.96, 1.0, 1.04, 1.06)]
    assert covered == [False, True, True, True, False]
    assert mean_share((Coverage("a", 4, 1), Coverage("b", 8, 6))) == 0.5
    assert mean_share(()) is None


def test_the_ends_compare_with_the_runners_up(plan: Plan) -> None:
    """The rival is the fastest of the others at each end, simulated there."""
    problem = uncertain(gemm_efficiency=0.1, scale_up_efficiency=0.3)
    result = milpplan.solve(problem, gap=0.0)
    assert result.plan is not None
    assert all(other.layout != result.plan.layout for other in result.runners_up)
    others = [other for other in (*result.runners_up, plan) if other != result.plan]
    robust = robustness(problem, result.plan, others)
    assert robust is not None
    for end in robust.ends:
        there = joint_end(problem, end.end)
        times = [simulate(there, other).step_time_s for other in others]
        assert end.rival_s == min(times, default=None)
        assert end.still_best == (end.best_s <= min(times, default=end.best_s))
        assert end.lower_bound_s is None


@pytest.mark.parametrize(
    ("objective", "factors"), [("step_time_per_token", (1.0, 0.5)), ("gpu_hours", (2.0, 1.0))]
)
def test_plans_are_compared_by_what_is_minimised(plan: Plan, objective: str, factors: tuple[float, float]) -> None:
    """Twice the GPUs are better for less than half the step where GPU-hours count, and for less than the whole one
    where they do not; a step of twice the sequences counts half."""
    problem = uncertain(gemm_efficiency=0.1)
    more = plan.layout.model_copy(update={"dp": 2 * plan.layout.dp, "micro_batch_size": 1})
    double = more.model_copy(update={"global_batch_size": 2 * plan.layout.global_batch_size})
    wide, wide_batch = (plan.model_copy(update={"layout": layout}) for layout in (more, double))
    gpus = Range(minimum=plan.layout.num_gpus, maximum=more.num_gpus)
    changes = {"objective": objective, "training_tokens": 1e12, "num_gpus": gpus}
    asked = problem.model_copy(update={"job": problem.job.model_copy(update=changes)})
    assert tuple(step_weight(asked, other, plan) for other in (wide, wide_batch)) == factors
    robust = robustness(asked, plan, (wide,))
    assert robust is not None
    assert ("by GPUs and sequences" in robustness_text(robust)) == (factors[0] != 1)
    for end in robust.ends:
        (step_s,) = step_times_s(joint_end(asked, end.end), [wide])
        assert end.rival_s == step_s * factors[0]
        assert end.still_best == (end.best_s <= step_s * factors[0])


def test_a_faster_plan_at_an_end_is_told(plan: Plan) -> None:
    """Where solving again finds a faster plan, the choice is not robust, and the text says so."""
    problem = uncertain(gemm_efficiency=0.1)
    worse = plan.model_copy(
        update={
            "layout": plan.layout.model_copy(
                update={"overlap_grad_reduce": False, "overlap_param_gather": False, "zero_stage": 0}
            )
        }
    )
    assert simulate(problem, worse).step_time_s > simulate(problem, plan).step_time_s
    robust = robustness(problem, worse, (), lambda there: (plan, 0.001))
    assert robust is not None
    assert not robust.still_best
    text = robustness_text(robust)
    assert text.startswith("not the best at both ends among all plans of the space")
    assert "bound" in text
    alone = robustness(problem, plan, ())
    assert alone is not None
    assert "not checked" in robustness_text(alone)
