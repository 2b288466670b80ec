"""Questions asked after a plan: the fewest GPUs, the cheapest hardware, what the whole run takes."""

from __future__ import annotations

import random

import pytest

from milpplan import Job, Problem, Range, Space, load_hardware, load_model, solve
from milpplan.errors import InvalidInputError
from milpplan.explain import Candidate, choose, fewest_gpus, run_totals
from milpplan.optimize import SolveOptions
from tests.amounts import first, long_but
from tests.optimize.brute_force import brute_force
from tests.optimize.problems import random_problem


def with_job(problem: Problem, **changes: object) -> Problem:
    """The problem with another job."""
    return problem.model_copy(update={"job": problem.job.model_copy(update=changes)})


@pytest.mark.parametrize("seed", long_but((0, 2), range(6)))
def test_fewest_gpus_are_those_of_brute_force(seed: int) -> None:
    """No smaller number has a plan that fits, the answer has one, and no deadline is needed to ask."""
    problem = with_job(random_problem(seed), num_gpus=Range(minimum=1, maximum=6, step=1), objective="num_gpus")
    counts = [
        count
        for count in range(1, 7)
        if brute_force(with_job(problem, num_gpus=count, objective="step_time_per_token")) is not None
    ]
    found = fewest_gpus(problem, widen=False)
    assert found.num_gpus == (counts[0] if counts else None)
    assert found.refused == tuple(range(1, counts[0] if counts else 7))
    assert (found.why is None) == (not found.refused)
    assert not found.whole_nodes


def test_fewest_gpus_are_found_by_whole_nodes() -> None:
    """Without numbers to try: one node, then several; what fewer lack is said."""
    job = Job(num_gpus=1, global_batch_size=64, sequence_length=4096)
    problem = Problem(
        model=load_model("llama2-70b"), hardware=load_hardware("dgx-a100-80"), job=job, space=UNIFORM
    )
    found = fewest_gpus(problem)
    assert found.num_gpus is not None
    assert found.num_gpus % 8 == 0
    assert found.refused == (*range(1, 9), *range(16, found.num_gpus, 8))
    assert found.whole_nodes
    assert found.why is not None
    assert "GiB" in found.why
    assert solve(with_job(problem, num_gpus=found.refused[-1])).status == "infeasible"


UNIFORM = Space(kind="uniform")


def priced(seed: int, names: tuple[str, ...], prices: list[float]) -> list[Candidate]:
    """A small job on several kinds of hardware."""
    model = random_problem(seed, family="dense").model
    asked = Job(
        num_gpus=Range(minimum=2, maximum=3, step=1), global_batch_size=6, sequence_length=512,
        objective="gpu_hours", training_tokens=1e9,
    )  # fmt: skip
    return [
        Candidate(name, Problem(model=model, hardware=load_hardware(name), job=asked, space=UNIFORM), price)
        for name, price in zip(names, prices, strict=True)
    ]


@pytest.mark.parametrize("seed", first(1, range(4)))
def test_the_cheapest_hardware_is_that_of_brute_force(seed: int) -> None:
    """Price times the least GPU-hours over batches and numbers of GPUs decides, with proof."""
    rng = random.Random(seed)
    names = ("dgx-a100-80", "dgx-h100", "l40s")
    candidates = priced(seed, names, [rng.uniform(0.5, 6.0) for _ in names])
    expected = {}
    for one in candidates:
        best = brute_force(one.problem)
        assert best is not None
        assert one.price_per_gpu_hour is not None
        expected[one.name] = best.value * one.price_per_gpu_hour
    choice = choose(candidates, SolveOptions(gap=0.0))
    assert choice.measure == "cost"
    assert choice.proved
    assert [one.candidate.name for one in choice.outcomes] == sorted(expected, key=expected.__getitem__)
    for one in choice.outcomes:
        assert one.value == pytest.approx(expected[one.candidate.name], rel=1e-12)
        assert one.totals is not None
        assert one.totals.cost == pytest.approx(one.value, rel=1e-9)
        assert one.bound <= expected[one.candidate.name] * (1 + 1e-12)


def test_a_candidate_without_a_plan_loses() -> None:
    """It is proved to have none; where none has one, that is the answer."""
    job = Job(num_gpus=2, global_batch_size=8, sequence_length=2048)

    def on(model: str, *names: str) -> list[Candidate]:
        return [
            Candidate(name, Problem(model=load_model(model), hardware=load_hardware(name), job=job, space=UNIFORM))
            for name in names
        ]

    small, large = on("llama2-7b", "dgx-h200", "rtx4090"), on("gpt3-175b", "dgx-h100", "l40s")
    choice = choose(small)
    assert choice.best is not None
    assert choice.best.candidate.name == "dgx-h200"
    assert choice.proved
    assert choice.rivals_bound == float("inf")
    nothing = choose(large)
    assert nothing.best is None
    assert nothing.proved


def test_candidates_must_be_comparable() -> None:
    """One alone, or two objectives, are refused."""
    both = priced(1, ("dgx-a100-80", "dgx-h100"), [1.0, 2.0])
    with pytest.raises(InvalidInputError, match="at least two"):
        choose(both[:1])
    mixed = [both[0], Candidate("b", with_job(both[1].problem, objective="step_time_per_token"))]
    with pytest.raises(InvalidInputError, match="objectives"):
        choose(mixed)


def test_totals_are_those_of_the_plan() -> None:
    """GPU-hours, days and money of a plan of known speed; the bound is the step's, or the objective's."""
    job = Job(num_gpus=16, global_batch_size=64, sequence_length=4096, training_tokens=1e12)
    problem = Problem(
        model=load_model("llama2-7b"), hardware=load_hardware("dgx-a100-80"), job=job, space=Space(kind="uniform")
    )
    result = solve(problem)
    totals = run_totals(result, 2.5)
    assert totals is not None
    assert result.step_time_s is not None
    steps = 1e12 / (64 * 4096)
    assert totals.days == pytest.approx(steps * result.step_time_s / 86400)
    assert totals.gpu_hours == pytest.approx(16 * 24 * totals.days)
    assert totals.cost == pytest.approx(2.5 * totals.gpu_hours)
    hours = solve(with_job(problem, objective="gpu_hours"))
    assert hours.lower_bound_s == pytest.approx(result.lower_bound_s)
    assert hours.objective == pytest.approx(totals.gpu_hours)
    assert totals.least_gpu_hours == pytest.approx(hours.objective_bound)
    assert run_totals(solve(with_job(problem, training_tokens=None))) is None
