"""A second proof agrees with honest results, and finds out every kind of lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from milpplan import PlanResult, Problem, SolveOptions, solve
from milpplan.errors import InvalidInputError
from milpplan.optimize import Certification, ClaimedResult, other_backend
from milpplan.optimize.certify import certify
from milpplan.optimize.milp import CpSatBackend, Limits, Program, Solution
from milpplan.optimize.milp.backends import AUTO, BACKENDS
from tests.amounts import long_but
from tests.optimize.problems import random_problem

OPTIONS = SolveOptions()


@pytest.fixture(scope="module")
def solved() -> tuple[Problem, PlanResult, ClaimedResult]:
    """A problem with several layouts, its result, and what that claims."""
    problem, result = next(one for one in results(OPTIONS) if one[1].plan and len(one[1].runners_up) > 1)
    return problem, result, ClaimedResult.of(result, OPTIONS)


def results(options: SolveOptions) -> Iterator[tuple[Problem, PlanResult]]:
    """Random problems and their results."""
    for seed in range(300):
        problem = random_problem(seed)
        yield problem, solve(problem, options)


def failed(done: Certification) -> list[str]:
    """Names of the checks that failed."""
    return [check.name for check in done.checks if not check.passed]


@pytest.mark.parametrize("backend", long_but((AUTO,), (AUTO, *sorted(BACKENDS))))
@pytest.mark.parametrize("most", long_but((1,), (1, 3)))
def test_honest_results_are_certified(backend: str, most: int) -> None:
    """Results of every backend, infeasible ones too, are proved again by another one."""
    options, seen = SolveOptions(backend=backend), set()
    for number, (problem, result) in enumerate(results(options)):
        if number > most and "infeasible" in seen:
            break
        if number <= most or result.status == "infeasible":
            done = certify(problem, ClaimedResult.of(result, options))
            assert (done.verdict, failed(done)) == ("certified", [])
            assert done.backend == other_backend(backend) != backend
            seen.add(result.status)
    assert seen == {"optimal", "infeasible"}


@pytest.mark.long
def test_a_bound_above_a_plan_is_refuted(solved: tuple[Problem, PlanResult, ClaimedResult]) -> None:
    """A slower plan with a bound that only it keeps: the faster one is found."""
    problem, result, _ = solved
    for plan in result.runners_up:
        slower = solve(problem, warm_start=plan, gap=0.9, simplest=False)
        if slower.objective is not None and slower.objective > (result.objective or 0.0) * 1.001:
            lie = replace(ClaimedResult.of(slower, OPTIONS), bound=slower.objective, status="optimal")
            done = certify(problem, lie)
            assert (done.verdict, failed(done)) == ("refuted", ["bound proved again"])
            return
    pytest.fail("no slower plan to lie about")


def test_a_bound_that_is_too_high_is_refuted(solved: tuple[Problem, PlanResult, ClaimedResult]) -> None:
    """A bound above the plan itself."""
    problem, _, claim = solved
    assert claim.value is not None
    done = certify(problem, replace(claim, bound=claim.value * 1.01))
    assert (done.verdict, failed(done)) == ("refuted", ["status, bound and plan agree"])


def test_a_bound_raised_within_the_tolerance_is_found_out() -> None:
    """A plan that is optimal within the tolerance, and called the best of all: the second proof goes on beyond the
    tolerance and finds the one that is a little faster. A bound that is true is certified, however high."""
    verdicts = set()
    for seed in (22, 25):
        problem = random_problem(seed)
        result = solve(problem, OPTIONS)
        exact = solve(problem, gap=0.0)
        assert result.objective is not None
        assert exact.objective is not None
        claim = ClaimedResult.of(result, OPTIONS)
        assert certify(problem, claim).verdict == "certified"
        done = certify(problem, replace(claim, bound=claim.value))
        true = exact.objective >= result.objective
        assert done.verdict == ("certified" if true else "refuted")
        assert failed(done) == ([] if true else ["bound proved again"])
        verdicts.add(done.verdict)
        # The optimum is a bound, and a little more is none.
        assert certify(problem, replace(claim, bound=exact.objective)).verdict == "certified"
        if not true:
            done = certify(problem, replace(claim, bound=exact.objective * (1 + 1e-7)))
            assert (done.verdict, failed(done)) == ("refuted", ["bound proved again"])
    assert verdicts == {"certified", "refuted"}


def test_other_layouts_are_refuted(solved: tuple[Problem, PlanResult, ClaimedResult]) -> None:
    """One layout fewer, or others in the same number."""
    problem, _, claim = solved
    for lie in (replace(claim, legal=claim.legal - 1), replace(claim, layouts_sha256="0" * 64)):
        done = certify(problem, lie)
        assert (done.verdict, failed(done), done.again) == ("refuted", ["layouts listed again"], None)


def test_other_costs_are_refuted(solved: tuple[Problem, PlanResult, ClaimedResult]) -> None:
    """A step time that is not the plan's, because it or a constant of the hardware was changed."""
    problem, _, claim = solved
    assert claim.step_time_s is not None
    assert failed(certify(problem, replace(claim, step_time_s=claim.step_time_s * 0.999))) == [
        "plan simulated again"
    ]
    up = problem.hardware.scale_up.model_copy(update={"p2p_latency_s": 1e-2})
    engine = problem.hardware.accelerator.bf16
    slower = engine.model_copy(update={"peak_flops_per_s": engine.peak_flops_per_s / 2})
    accelerator = problem.hardware.accelerator.model_copy(update={"bf16": slower})
    hardware = problem.hardware.model_copy(update={"scale_up": up, "accelerator": accelerator})
    done = certify(problem.model_copy(update={"hardware": hardware}), claim)
    assert done.verdict == "refuted"
    assert "plan simulated again" in failed(done)


def test_a_plan_that_does_not_fit_is_refuted(solved: tuple[Problem, PlanResult, ClaimedResult]) -> None:
    """The same plan with too little memory."""
    problem, result, claim = solved
    assert result.report is not None
    small = result.report.peak_memory_bytes // 2 + problem.hardware.reserved_bytes
    accelerator = problem.hardware.accelerator.model_copy(update={"memory_bytes": small})
    less = problem.model_copy(
        update={"hardware": problem.hardware.model_copy(update={"accelerator": accelerator})}
    )
    done = certify(less, claim)
    assert done.verdict == "refuted"
    assert any("does not fit" in check.seen for check in done.checks)


def test_infeasible_lies_are_refuted(solved: tuple[Problem, PlanResult, ClaimedResult]) -> None:
    """A problem with a plan is not infeasible, and one without has none."""
    problem, _, claim = solved
    none = replace(claim, status="infeasible", plan=None, step_time_s=None, value=None, bound=None)
    assert certify(problem, none).verdict == "refuted"


@pytest.mark.long
def test_a_solver_that_lied_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that calls every program infeasible makes the first plan found optimal; the next one finds the
    better plan."""

    def lying(self: CpSatBackend, program: Program, limits: Limits) -> Solution:
        return Solution("infeasible", None, None, None, "INFEASIBLE", self.name, 0.0)

    options = SolveOptions(backend="cpsat", gap=0.0, witness=False)
    for seed in range(90, 300):
        problem = random_problem(seed)
        with monkeypatch.context() as lies:
            lies.setattr(CpSatBackend, "solve", lying)
            result = solve(problem, options)
        honest = solve(problem, backend="cbc")
        if result.objective and honest.objective and result.objective > honest.objective * (1 + 1e-3):
            assert result.gap == 0.0
            done = certify(problem, ClaimedResult.of(result, options))
            assert (done.verdict, failed(done)) == ("refuted", ["bound proved again"])
            return
    pytest.fail("the lie never mattered")


def test_too_little_time_is_not_a_certificate(solved: tuple[Problem, PlanResult, ClaimedResult]) -> None:
    """A second proof that is stopped says so; it neither certifies nor refutes."""
    problem, _, claim = solved
    done = certify(problem, claim, SolveOptions(backend="cbc", time_limit_s=1e-6))
    assert (done.verdict, failed(done)) == ("unproved", ["bound proved again"])


def test_nothing_claimed() -> None:
    """A search that was stopped before it had anything claims nothing."""
    problem = random_problem(0)
    result = solve(problem, time_limit_s=1e-9)
    if result.status == "no_solution_found":
        with pytest.raises(InvalidInputError, match="claims nothing"):
            ClaimedResult.of(result, OPTIONS)
    whole = solve(problem)
    for empty in (
        replace(whole, status="no_solution_found"),
        replace(whole, status="feasible", objective_bound=None),
        replace(whole, layouts=None),
    ):
        with pytest.raises(InvalidInputError, match="claims nothing"):
            ClaimedResult.of(empty, OPTIONS)
