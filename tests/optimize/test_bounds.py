"""Lower bounds on time and memory: random plans try to get below them.

A plan is given exactly the memory that it needs: the tightest case for a bound that prices memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pytest

from milpplan import Layout, Plan, load_hardware, load_model
from milpplan.optimize.bounds import (
    SAFETY,
    compute_bounds,
    lagrangian_memory,
    layout_bounds,
    uniform_bounds,
    uniform_plan,
)
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem import Job, Problem, Space
from milpplan.simulation import CostTable, FloatArray, LayoutColumns, least_held_bytes, usable_memory_bytes
from milpplan.simulation.layout_costs import layout_costs
from tests.amounts import few_or_many, long_but
from tests.optimize.bounded import bounded_layouts
from tests.optimize.brute_force import time_and_peak
from tests.optimize.problems import problems, random_plan, random_problem, with_memory

REAL = {
    "llama2-7b": ("dgx-a100-80", 64, 128),
    "gpt3-175b": ("dgx-a100-80", 512, 256),
    "llama3-70b": ("dgx-h100", 256, 512),
    "mixtral-8x7b": ("dgx-h100", 128, 256),
    "gpt-oss-120b": ("gb200-nvl72", 144, 144),
    "deepseek-v3": ("dgx-h100", 1024, 2048),
    "gemma-7b": ("l40s", 48, 96),
}


OFTEN = ("gpt3-175b", "deepseek-v3")
SOME_REAL = [*OFTEN, *(pytest.param(name, marks=pytest.mark.long) for name in REAL if name not in OFTEN)]
"""Two without the long tests."""


def real_problem(name: str) -> Problem:
    """A shipped model on a shipped cluster."""
    hardware, gpus, batch = REAL[name]
    model = load_model(name)
    job = Job(num_gpus=gpus, global_batch_size=batch, sequence_length=model.default_sequence_length)
    schedules = ("1f1b", "interleaved", "gpipe")
    space = Space(schedule=schedules, interleaved_layers="any", vpp_values="all")
    return Problem(model=model, hardware=load_hardware(hardware), job=job, space=space)


def even(problem: Problem) -> Problem:
    """The same problem with nearly equal virtual stages where they are interleaved."""
    space = problem.space.model_copy(update={"interleaved_layers": "even"})
    return problem.model_copy(update={"space": space})


def modest(layout: Layout) -> bool:
    """Simulated quickly."""
    return layout.num_virtual_stages * layout.num_micro_batches <= 4096


@dataclass(frozen=True)
class Costed:
    """Layouts with their constants and compute bounds, neither of which depends on the memory."""

    columns: LayoutColumns
    costs: CostTable
    compute_ns: FloatArray

    @staticmethod
    def of(problem: Problem, columns: LayoutColumns) -> Costed:
        """All of them computed together."""
        return Costed(columns, layout_costs(problem, columns), compute_bounds(problem, columns))


def assert_bounds_hold(problem: Problem, costed: Costed, row: int, plan: Plan) -> None:
    """All bounds of a layout, on devices that the plan fills to the last byte, are not above the plan."""
    step_ns, peak = time_and_peak(problem, costed.costs.at(row), plan)
    tight, one = with_memory(problem, peak), np.array([row])
    bounds = layout_bounds(tight, costed.columns.take(one), costed.costs.take(one))
    assert bounds.memory_bytes[0] <= peak
    assert bounds.step_time_ns[0] <= step_ns
    assert costed.compute_ns[row] <= step_ns
    assert least_held_bytes(problem, costed.columns.take(one))[0] * SAFETY <= peak


@few_or_many(5, 60, problems())
def test_layout_bounds_hold_for_every_plan(problem: Problem) -> None:
    """No plan of a small problem that fits is faster, and none is smaller, than its layout's bounds."""
    assert list(bounded_layouts(problem))


@few_or_many(8, 60, problems())
def test_layout_bounds_hold_at_the_memory_of_each_plan(problem: Problem) -> None:
    """A plan that fills the device to the last byte is not faster than the bound for that memory."""
    costed = Costed.of(problem, layout_space(problem).columns)
    rng = random.Random(len(costed.columns))
    for row in rng.sample(range(len(costed.columns)), min(3, len(costed.columns))):
        for _ in range(4):
            assert_bounds_hold(problem, costed, row, random_plan(rng, problem, costed.columns.at(row)))


@pytest.mark.parametrize("count", long_but((10,), (10, 30)))
@pytest.mark.parametrize("name", SOME_REAL)
def test_layout_bounds_hold_for_real_models(count: int, name: str) -> None:
    """Balanced, lopsided and extreme plans of real models keep both bounds of their layout."""
    problem, rng = real_problem(name), random.Random(5)
    columns = layout_space(problem).columns
    rows: list[int] = []
    while len(rows) < count:
        row = rng.randrange(len(columns))
        if modest(columns.at(row)):
            rows.append(row)
    costed = Costed.of(problem, columns.take(np.array(rows)))
    for place in range(len(rows)):
        for chosen in (problem, even(problem)):
            assert_bounds_hold(chosen, costed, place, random_plan(rng, chosen, costed.columns.at(place)))


def assert_uniform_bounds_hold(problem: Problem, columns: LayoutColumns, rows: Iterable[int]) -> None:
    """The bounds of all layouts, looked at for the uniform plans of some."""
    costs = layout_costs(problem, columns)
    bounds, held = uniform_bounds(problem, columns, costs), least_held_bytes(problem, columns) * SAFETY
    for row in rows:
        for index, mode in enumerate(problem.space.recompute):
            step_ns, peak = time_and_peak(problem, costs.at(row), uniform_plan(problem, columns.at(row), mode))
            assert bounds.step_time_ns[row, index] <= step_ns
            assert held[row] <= bounds.memory_bytes[row, index] <= peak


@few_or_many(8, 60, problems(kind="uniform"))
def test_uniform_bounds_hold_for_the_uniform_plans(problem: Problem) -> None:
    """Every uniform plan takes at least its bound in time and in memory."""
    columns = layout_space(problem).columns
    assert_uniform_bounds_hold(problem, columns, range(len(columns)))


@pytest.mark.parametrize("count", long_but((15,), (15, 40)))
@pytest.mark.parametrize("name", SOME_REAL)
def test_uniform_bounds_hold_for_real_models(count: int, name: str) -> None:
    """Uniform plans of real models keep their bounds, and where memory is concerned come near them."""
    problem, rng = real_problem(name), random.Random(6)
    problem = problem.model_copy(update={"space": problem.space.model_copy(update={"kind": "uniform"})})
    columns = layout_space(problem).columns
    rows = np.array(rng.sample(range(len(columns)), min(400, len(columns))))
    part = columns.take(rows)
    tried = [row for row in range(len(part)) if modest(part.at(row))][:count]
    assert tried
    assert_uniform_bounds_hold(problem, part, tried)


@few_or_many(8, 60, problems())
def test_free_bounds_are_below_uniform_plans(problem: Problem) -> None:
    """Whatever a uniform plan costs, its layout's bound for the free space is not above it."""
    columns = layout_space(problem).columns
    costs = layout_costs(problem, columns)
    bounds = layout_bounds(problem, columns, costs)
    layers, capacity = problem.model.num_layers, usable_memory_bytes(problem)
    for row in range(len(columns)):
        layout = columns.at(row)
        stages = layout.num_virtual_stages
        if layers - -(-layers // stages) * (stages - 1) < 1:
            continue
        for mode in problem.space.recompute:
            step_ns, peak = time_and_peak(problem, costs.at(row), uniform_plan(problem, layout, mode))
            assert bounds.memory_bytes[row] <= peak
            assert peak > capacity or bounds.step_time_ns[row] <= step_ns


@pytest.mark.parametrize("name", SOME_REAL)
def test_compute_bounds_are_near_what_compute_takes(name: str) -> None:
    """The bound without memory is no formality: given any memory, a uniform plan comes within a quarter."""
    problem = with_memory(real_problem(name), 2**50)
    problem = problem.model_copy(update={"space": problem.space.model_copy(update={"kind": "uniform"})})
    columns = layout_space(problem).columns
    bounds = compute_bounds(problem, columns)
    least = np.argsort(bounds, kind="stable")[:2000]
    part = columns.take(least)
    uniform = uniform_bounds(problem, part, layout_costs(problem, part)).step_time_ns
    assert (uniform.min(axis=1) / bounds[least]).min() < 1.25


@pytest.mark.parametrize("count", long_but((8,), (8, 20)))
def test_bounds_do_not_depend_on_company(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout's bounds are the same alone and among others (they are computed in groups)."""
    monkeypatch.setattr(lagrangian_memory, "GROUP_NUMBERS", 1)
    for seed in range(count):
        problem = random_problem(seed)
        columns = layout_space(problem).columns
        costs = layout_costs(problem, columns)
        together = layout_bounds(problem, columns, costs)
        for row in range(len(columns)):
            one = np.array([row])
            alone = layout_bounds(problem, columns.take(one), costs.take(one))
            assert alone.step_time_ns[0] == pytest.approx(together.step_time_ns[row], rel=1e-9)
            assert alone.memory_bytes[0] == pytest.approx(together.memory_bytes[row], rel=1e-9)
