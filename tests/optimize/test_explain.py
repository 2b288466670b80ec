"""Explanations of infeasibility: what they claim is checked against every plan, what they advise works."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from milpplan import Job, Problem, Range, fixed, load_hardware, load_model, solve
from milpplan.optimize import Effort, explain, infeasibility
from milpplan.optimize.bounds import uniform_plan
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.simulation.layout_costs import layout_costs
from tests.optimize.brute_force import time_and_peak
from tests.refusals import in_three_parts
from tests.small import GIB, small_problem


def least_peak(problem: Problem) -> float:
    """Least simulated peak over every plan of the uniform space, in bytes."""
    columns = layout_space(problem).columns
    num_layers, costs = problem.model.num_layers, layout_costs(problem, columns)
    peaks = [
        time_and_peak(problem, costs.at(row), uniform_plan(problem, columns.at(row), mode))[1]
        for row in range(len(columns))
        for mode in problem.space.recompute
        if columns.at(row).num_virtual_stages <= num_layers
    ]
    return min(peaks, default=np.inf)


def number(pattern: str, text: str) -> float:
    """The number in a message."""
    found = re.search(pattern, text)
    assert found, text
    return float(found[1].replace(",", ""))


def test_too_little_memory_says_how_much_and_how_many() -> None:
    """No plan simulates below the peak named; counts called too small have no plan, the one advised has."""
    problem = small_problem(num_gpus=2, memory_gib=9)
    assert solve(problem).status == "infeasible"
    error = explain(problem)
    in_three_parts(error)
    named = number(r"at least ([\d.]+) GiB", error.seen) * GIB
    assert named <= least_peak(problem) + 0.05 * GIB
    enough = int(number(r"at least ([\d,]+) GPUs", error.do))
    low, high = 4, enough - 2
    for count in range(low, high + 1, 2):
        usable = infeasibility.usable_memory_bytes(problem)
        assert least_peak(infeasibility.with_job(problem, num_gpus=count)) > usable
    works = int(number(r"with ([\d,]+) a plan exists", error.do))
    assert solve(infeasibility.with_job(problem, num_gpus=works)).status == "optimal"


def test_what_helps_helps() -> None:
    """Shorter sequences and smaller gradients are named only where the bound then admits a layout."""
    problem = small_problem(num_gpus=2, memory_gib=9)
    for words, option in infeasibility.relaxations(problem):
        named = words in explain(problem).do
        assert named == Effort().admits(option, ())


def test_a_fixed_degree_that_costs_the_memory_is_named() -> None:
    """With pp=1 and no sharding two GPUs hold everything twice; freeing either makes room."""
    problem = fixed(small_problem(num_gpus=2, memory_gib=24), {"pp": 1, "tp": 1, "zero_stage": 0, "cp": 1})
    assert solve(problem).status == "infeasible"
    error = explain(problem)
    assert "a free zero_stage (instead of zero_stage=0)" in error.do
    assert solve(infeasibility.with_space(problem, zero_stage=(0, 1, 2, 3))).plan is not None


def test_an_impossible_number_of_gpus_names_the_rules_and_the_nearest_that_work() -> None:
    """Eleven GPUs and batch 30 break rules by name; the batch advised is the nearest with a legal layout."""
    problem = small_problem(num_gpus=11, global_batch_size=30)
    error = explain(problem)
    in_three_parts(error)
    assert "batch_divisible_by_dp" in error.seen
    assert "heads_divisible_by_tp" in error.seen
    batch = int(number(r"global batch of ([\d,]+)", error.do))
    assert batch == 33
    for nearer in range(28, 33):
        assert not len(layout_space(infeasibility.with_job(problem, global_batch_size=nearer)).columns)
    gpus = int(number(r"([\d,]+) GPUs", error.do))
    assert len(layout_space(infeasibility.with_job(problem, num_gpus=gpus)).columns)


def test_degrees_that_do_not_multiply_to_the_number_of_gpus() -> None:
    """No rule is to blame, the product is; the field to free is named."""
    error = explain(fixed(small_problem(), {"dp": 3}))
    assert "no product" in error.seen
    assert "dp=3" in error.do


def test_forbidding_everything_is_named() -> None:
    """If only the caller's own prohibitions empty the space, it says so."""
    problem = fixed(small_problem(), {"tp": 1})
    error = explain(problem, ({"tp": 1},))
    assert "forbidden_by_caller" in error.seen
    assert "forbidding less" in error.do


@pytest.mark.parametrize("times", [1.0, 3.3, 77.0, 450.0])
def test_a_deadline_too_soon_says_what_is_possible(times: float) -> None:
    """The bound is below the fastest run found, and the deadline that is offered, as it is printed, has a plan."""
    problem = small_problem(training_tokens=times * 1e9, deadline_s=times * 1000.0)
    assert solve(problem).status == "infeasible"
    error = explain(problem)
    in_three_parts(error)
    bound = number(r"at least ([\d.,]+) h", error.seen)
    found = number(r"found takes ([\d.,]+) h", error.seen)
    assert times * 1000 / 3600 < bound <= found
    allowed = number(r"Allow ([\d.,]+) h", error.do)
    later = problem.job.model_copy(update={"deadline_s": allowed * 3600})
    assert solve(problem.model_copy(update={"job": later})).status == "optimal"


def test_ranges_are_explained_too() -> None:
    """A range of GPUs none of which has the memory is explained as one problem."""
    problem = small_problem(num_gpus=2, memory_gib=9)
    job = problem.job.model_copy(update={"num_gpus": Range(minimum=1, maximum=2)})
    error = explain(problem.model_copy(update={"job": job}))
    assert "No plan fits" in error.seen


@pytest.mark.parametrize("kind", ["uniform", "free"])
def test_the_floor_is_below_the_search(kind: str) -> None:
    """The step bound without searching is not above the best uniform plan."""
    problem = small_problem(space={"kind": kind})
    bounds = infeasibility.floor(problem, layout_space(problem))
    best = solve(infeasibility.with_space(problem, kind="uniform"))
    assert bounds is not None
    assert best.step_time_s is not None
    assert bounds.seconds_per_sequence * 8 <= best.step_time_s


def test_counts_of_gpus_that_cannot_be_found_are_not_invented() -> None:
    """With every degree fixed more GPUs have no layout, so none is advised."""
    problem = fixed(small_problem(num_gpus=1, memory_gib=9), {"tp": 1, "pp": 1, "dp": 1, "cp": 1})
    more = infeasibility.more_gpus(problem, (), Effort())
    assert more.count is None
    assert replace(more, excluded=None).step == 2


def test_switches_that_contradict_each_other_are_named() -> None:
    """Sharded gradients without overlap break the rule of that name, and freeing a switch is advised."""
    problem = small_problem(space={"zero_stage": (3,), "overlap_grad_reduce": (False,)})
    error = explain(problem)
    assert "sharded_gradients_are_overlapped" in error.seen
    assert "a free zero_stage" in error.do or "a free overlap_grad_reduce" in error.do


def test_a_remedy_that_only_the_bound_admits_says_so() -> None:
    """No ranks divide a million and three tokens: more GPUs and offloading are not excluded, and no plan with them
    is known, so shorter sequences are offered as well."""
    job = Job(num_gpus=16, global_batch_size=64, sequence_length=1_000_003)
    error = explain(Problem(model=load_model("llama3-8b"), hardware=load_hardware("dgx-h100"), job=job))
    assert error.do.count("no plan is known") == 2
    assert "sequences of 250,000 tokens" in error.do
    assert "no plan is known" not in explain(small_problem(num_gpus=2, memory_gib=9)).do
