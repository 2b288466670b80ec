"""Bounds of uniform plans: no plan is below its own, and where nothing is left out they are the plan's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from milpplan import Layout, load_hardware, load_model, simulate_many
from milpplan.optimize.bounds import uniform_bounds, uniform_compute_bounds
from milpplan.optimize.bounds.cluster_bounds import cluster_uniform_bounds
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem import Job, Problem, Space
from milpplan.simulation import (
    BoolArray,
    FloatArray,
    LayoutColumns,
    cluster_costs,
    layer_durations_ns,
    usable_memory_bytes,
)
from milpplan.simulation.layout_costs import layout_costs
from tests.amounts import few_or_many, long_but
from tests.optimize.mixed_problems import mixed_problem
from tests.optimize.problems import problems, with_memory
from tests.optimize.test_execution import with_execution

SWITCHES: dict[str, Any] = {
    "zero_stage": (0, 1, 2, 3),
    "overlap_grad_reduce": (False, True),
    "overlap_param_gather": (False, True),
    "offload_weights": (False, True),
    "offload_activations": (False, True),
    "offload_optimizer": (False, True),
    "gather_again": (False, True),
    "sequence_parallel": (False, True),
}
"""All that surrounds the work, and what lies on the host."""


def opened(model: str, gpus: int, memory_bytes: int | None, **space: Any) -> Problem:
    """A shipped model on nodes of A100, with these switches open."""
    spec = load_model(model)
    problem = Problem(
        model=spec,
        hardware=load_hardware("dgx-a100-80"),
        job=Job(num_gpus=gpus, global_batch_size=gpus, sequence_length=2048),
        space=Space(kind="uniform", **SWITCHES | space),
    )
    return problem if memory_bytes is None else with_memory(problem, memory_bytes)


def sampled(problem: Problem, count: int, chosen: BoolArray | None = None) -> LayoutColumns:
    """Layouts drawn from the space."""
    columns = layout_space(problem).columns
    rows = np.arange(len(columns)) if chosen is None else np.flatnonzero(chosen)
    return columns.take(np.random.default_rng(3).permutation(rows)[:count])


def bounds_and_plans(problem: Problem, columns: LayoutColumns) -> tuple[FloatArray, ...]:
    """Bounds of time and memory, then those of the plans, [n, modes] each."""
    bounds = uniform_bounds(problem, columns, layout_costs(problem, columns))
    plans = simulate_many(problem, columns)
    times = bounds.step_time_ns, plans.step_time_ns.astype(np.float64)
    return *times, bounds.memory_bytes, plans.peak_memory_bytes.astype(np.float64)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        pytest.param("gpt3-175b", 1500, marks=pytest.mark.long),
        ("deepseek-v3", 300),
        *(pytest.param(name, 4000, marks=pytest.mark.long) for name in ("gpt3-175b", "gpt-oss-120b", "gemma-7b")),
    ],
)
def test_no_uniform_plan_is_below_its_bounds(model: str, count: int) -> None:
    """In time and in memory, with every schedule, on devices that hold all; the bounds are near the plans."""
    schedules = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
    problem = opened(model, 64, 2**50, schedule=schedules, vpp_values="all", cp=(1, 2))
    columns = sampled(problem, count)
    modest = columns.pp * columns.vpp * columns.num_micro_batches <= 2048
    least_ns, step_ns, least_bytes, peak = bounds_and_plans(problem, columns.take(np.flatnonzero(modest)))
    assert (least_ns <= step_ns).all()
    assert (least_bytes <= peak).all()
    assert np.median(least_ns / step_ns) > 0.9
    assert np.median(least_bytes / peak) > 0.95


def test_bounds_without_a_pipeline_are_the_plans() -> None:
    """A single rank has one path, all of which is in the bound: gathers before it, reductions after it, the norm
    and the update; likewise its memory, but for layers of which the host holds a part."""
    problem = opened("llama2-7b", 16, 2**50, pp=(1,))
    columns = sampled(problem, 3000)
    least_ns, step_ns, least_bytes, peak = bounds_and_plans(problem, columns)
    # Steps are rounded up to nanoseconds, a few times where communication hides in part.
    assert (least_ns <= step_ns * (1 + 1e-11)).all()
    assert least_ns == pytest.approx(step_ns, abs=4, rel=0)
    on_device = ~columns.offload_optimizer.astype(bool)
    assert least_bytes[on_device] == pytest.approx(peak[on_device], rel=1e-11)


def test_interleaved_memory_is_near_that_of_the_plan() -> None:
    """Where all chunks hold as much, the fullest rank's bytes at the end of the warm-up are those of its peak."""
    problem = opened("gpt3-175b", 64, None, schedule=("interleaved",), offload_optimizer=(False,))
    columns = layout_space(problem).columns
    columns = sampled(problem, 800, (columns.vpp > 1) & (96 % (columns.pp * columns.vpp) == 0))
    _, _, least_bytes, peak = bounds_and_plans(problem, columns)
    assert (least_bytes <= peak).all()
    assert np.quantile(least_bytes / peak, 0.1) > 0.97


@few_or_many(6, 60, problems(kind="uniform", schedules=("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")))
def test_bounds_hold_on_devices_that_the_plans_fill(problem: Problem) -> None:
    """Unequal layers, tied ends, few layers for many stages."""
    problem = with_memory(problem, 2**50)
    columns = layout_space(problem).columns
    least_ns, step_ns, least_bytes, peak = bounds_and_plans(problem, columns)
    assert (least_ns <= step_ns).all()
    assert (least_bytes <= peak).all()


@pytest.mark.parametrize("count", long_but((8,), (8, 40)))
@pytest.mark.parametrize("make", [with_execution, mixed_problem])
def test_bounds_hold_with_switches_and_node_types(make: Any, count: int) -> None:
    """With switches of the execution at random, and in clusters of several node types, where the peak is that of
    the rank with the least room, and the bound is to be below the roomiest device if a plan fits."""
    for seed in range(count):
        problem = make(seed)
        problem = problem.model_copy(update={"space": problem.space.model_copy(update={"kind": "uniform"})})
        columns = layout_space(problem).columns
        bounds = cluster_uniform_bounds(problem, columns, cluster_costs(problem, columns))
        plans = simulate_many(problem, columns)
        assert (bounds.step_time_ns <= plans.step_time_ns).all()
        assert (bounds.memory_bytes[plans.fits] <= usable_memory_bytes(problem)).all()
        if not problem.other_hardware:
            assert (bounds.memory_bytes <= plans.peak_memory_bytes).all()


def longest_path_ns(problem: Problem, layout: Layout, forward: float, backward: float) -> float:
    """The longest path of a uniform plan of equal layers, without anything but these, by the sums of ``bounds``
    written out for every rank."""
    layers, ranks, m = problem.model.num_layers, layout.pp, layout.num_micro_batches
    held = [0.0] * (ranks * layout.vpp)
    for layer in range(layers):
        held[layer // -(-layers // len(held))] += 1.0
    own = [sum(held[rank::ranks]) for rank in range(ranks)]
    paths = []
    for rank in range(ranks):
        both = forward + backward
        paths.append(sum(held[:rank]) * both + m * own[rank] * both)
        if layout.vpp == 1 and (m >= ranks - rank or layout.schedule == "gpipe"):
            again = m - 1 if layout.schedule == "gpipe" else m - ranks + rank
            paths.append(layers * both + again * own[rank] * forward + (m - 1) * own[rank] * backward)
    return max(paths)


@pytest.mark.parametrize("model", ["gpt3-175b", "llama2-7b"])
def test_bounds_by_compute_are_the_longest_path_of_layers(model: str) -> None:
    """With equal virtual stages (in closed form) and with a last one that holds less."""
    problem = opened(model, 64, None, schedule=("gpipe", "1f1b", "interleaved"))
    columns, seen = layout_space(problem).columns, 0
    held = problem.model.num_layers % columns.num_virtual_stages == 0
    for chosen in (held, ~held):
        part = sampled(problem, 60, chosen)
        layers = layer_durations_ns(problem, part)[0]
        bounds = uniform_compute_bounds(problem, part)
        for row in range(len(part)):
            longest = longest_path_ns(problem, part.at(row), *layers[:2, row].astype(float))
            assert bounds[row] == pytest.approx(longest, rel=1e-11)
        seen += len(part)
    assert seen == 120
