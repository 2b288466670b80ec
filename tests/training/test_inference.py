"""Forwards alone: what they cost, what they hold, and plans that are proved best."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import numpy as np
import pytest
from typer.testing import CliRunner

from milpplan import Layout, Plan, Problem, load_hardware, load_model, simulate, solve
from milpplan.cli.app import app
from milpplan.errors import IllegalPlanError
from milpplan.optimize.bounds import compute_bounds, layout_bounds
from milpplan.optimize.space.enumerate_layouts import broken_rules, layout_space
from milpplan.problem import Job
from milpplan.simulation import LayoutColumns, LayoutCosts, plan_stages
from milpplan.simulation.layers import Phase, model_flops_per_token
from milpplan.simulation.layout_costs import layout_costs
from milpplan.simulation.pipeline.lanes import memory_timelines
from tests.amounts import long_but
from tests.optimize.brute_force import brute_force, costed_plans
from tests.optimize.problems import random_problem
from tests.optimize.test_optimality import assert_optimal
from tests.simulation.cases import even_plan, problem_of, random_cases


def costs_of(problem: Problem, layout: Layout) -> LayoutCosts:
    """Constants of one layout."""
    return layout_costs(problem, LayoutColumns.of([layout])).at(0)


def forward_only(problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    """The same model and degrees, forwards alone: fill and drain, no recomputation, no sharding."""
    update = {"schedule": "gpipe", "vpp": 1, "zero_stage": 0}
    off = {"overlap_grad_reduce": False, "overlap_param_gather": False}
    layout = plan.layout.model_copy(update=update | off)
    layers, P = problem.model.num_layers, layout.pp
    edges = [layers * rank // P for rank in range(P + 1)]
    stages = [{"layers": pair} for pair in pairwise(edges)]
    job = problem.job.model_copy(update={"kind": "inference"})
    return problem.model_copy(update={"job": job}), Plan.model_validate(
        {"layout": layout, "virtual_stages": stages}
    )


def naive_step_ns(problem: Problem, plan: Plan) -> int:
    """Fill and drain, forward by forward, without a graph."""
    costs = costs_of(problem, plan.layout)
    stages = plan_stages(costs, problem.model.layer_kinds, plan)
    forward = [int(stage.terms[0, 0]) for stage in stages]
    done = [0] * len(forward)
    for _ in range(plan.layout.num_micro_batches):
        arrival = 0
        for rank, duration in enumerate(forward):
            done[rank] = max(done[rank], arrival) + duration
            arrival = done[rank] + int(costs.transfer_ns)
    return max(done)


@pytest.mark.parametrize("count", long_but((5,), (5, 10)))
def test_step_is_that_of_filling_and_draining(count: int) -> None:
    """The step of random plans is that of running their forwards one by one; nothing else takes time, the parts
    add up, and memory over time never passes the peak or the end."""
    for drawn in random_cases(21, count):
        problem, plan = forward_only(*drawn)
        report = simulate(problem, plan)
        assert report.step_time_ns == naive_step_ns(problem, plan)
        for stage in report.stages:
            total = sum(round(seconds * 1e9) for seconds in stage.breakdown_s.values())
            assert total == pytest.approx(report.step_time_ns, abs=len(stage.breakdown_s))
            assert min(stage.breakdown_s.values()) >= 0
            for name in ("recompute", "grad_norm", "optimizer", "grad_reduce_exposed", "param_gather_exposed"):
                assert stage.breakdown_s[name] == 0
            memory = stage.memory
            assert memory.gradients_bytes == memory.optimizer_bytes == memory.activations_bytes == 0
        for stage, timeline in zip(report.stages, memory_timelines(problem, plan), strict=True):
            assert timeline.total_bytes.max() == stage.memory.peak_bytes
            assert (np.diff(timeline.time_s) >= 0).all()
            assert timeline.time_s[-1] == report.step_time_s


def test_forward_is_that_of_training() -> None:
    """A layer's forward takes what it takes in training; its backward nothing; weights are 2 bytes a parameter."""
    layout = Layout(tp=4, dp=2, sequence_parallel=True, global_batch_size=8)
    train = problem_of("llama3-8b", "dgx-h100")
    infer = problem_of("llama3-8b", "dgx-h100", kind="inference")
    one, other = costs_of(train, layout), costs_of(infer, layout)
    assert np.array_equal(one.duration_ns[:, Phase.FORWARD], other.duration_ns[:, Phase.FORWARD])
    assert not other.duration_ns[:, Phase.BACKWARD :].any()
    assert np.array_equal(one.state_bytes[0], other.state_bytes[0])
    assert not other.state_bytes[1:].any()
    assert other.workspace_bytes[0] == one.kept_bytes[0]
    assert other.barrier_ns == 0


def test_offloaded_weights_are_streamed_once() -> None:
    """On the host, weights come in for the forward and never go out: nothing else is moved."""
    problem = problem_of("llama3-8b", "dgx-h100", kind="inference")
    plain, moved = (costs_of(problem, Layout(global_batch_size=1, offload_weights=on)) for on in (False, True))
    assert moved.host_state_bytes[0] == plain.state_bytes[0, 0]
    assert moved.parts.offload[:, 0, 0, 0].sum() > 0
    assert not moved.parts.offload[:, :, :, 1].any()
    assert not moved.optimizer_ns.any()


def test_named_rejections() -> None:
    """Sharding of what forwards have not, and offloading of it, is refused by name; training may do both."""
    train, infer = (problem_of("llama3-8b", "dgx-h100", kind=kind) for kind in ("training", "inference"))
    for name, layout in (
        ("inference_shards_weights_or_nothing", Layout(dp=2, global_batch_size=2, zero_stage=1)),
        ("inference_offloads_weights_alone", Layout(dp=2, global_batch_size=2, offload_activations=True)),
    ):
        assert name in broken_rules(infer, layout)
        assert not broken_rules(train, layout)


def test_utilisation_by_hand() -> None:
    """Forward FLOPs of a token are a third of those of training, with logits of one token a sequence."""
    problem = problem_of("llama3-8b", "dgx-h100", kind="inference")
    report = simulate(problem, even_plan(problem, Layout(global_batch_size=1)))
    head = 2 * 128256 * 4096
    flops = 8192 * (model_flops_per_token(problem.model, 8192) / 3 - head) + head
    assert report.mfu == pytest.approx(flops / report.step_time_s / 989.4e12, rel=2e-3)
    assert 0.4 < report.mfu < 0.9


def test_what_inference_has_not_is_refused() -> None:
    """Recomputation, and a schedule of backwards, make no plan of forwards."""
    problem = problem_of("llama3-8b", "dgx-h100", kind="inference")
    for plan in (
        even_plan(problem, Layout(global_batch_size=1), full=1),
        even_plan(problem, Layout(pp=2, global_batch_size=2)),
    ):
        with pytest.raises(IllegalPlanError, match="inference"):
            simulate(problem, plan)


def small(seed: int) -> Problem:
    """A random small problem, forwards alone, with less memory."""
    rng = random.Random(seed)
    problem = random_problem(seed)
    job = problem.job.model_copy(update={"kind": "inference"})
    offload = rng.choice(((False,), (False, True)))
    space = problem.space.model_copy(update={"zero_stage": (0, 3), "vpp": None, "offload_weights": offload})
    device = problem.hardware.accelerator
    memory = int(device.memory_bytes * rng.choice((0.02, 0.1, 0.5, 1.0)))
    hardware = problem.hardware.model_copy(
        update={"accelerator": device.model_copy(update={"memory_bytes": memory})}
    )
    return problem.model_copy(update={"job": job, "space": space, "hardware": hardware})


def test_optimum_is_that_of_brute_force() -> None:
    """``solve`` finds the best plan of forwards or proves that nothing fits, and no bound is above a plan."""
    found = 0
    for seed in range(5):
        problem = small(seed)
        columns = layout_space(problem).columns
        if not 1 <= len(columns) <= 40:
            continue
        costs, compute_ns = layout_costs(problem, columns), compute_bounds(problem, columns)
        bounds = layout_bounds(problem, columns, costs)
        for row in range(len(columns)):
            plans = costed_plans(problem, columns.at(row), costs.at(row))
            assert compute_ns[row] <= plans.step_time_ns.min()
            assert bounds.step_time_ns[row] <= plans.step_time_ns.min()
            assert bounds.memory_bytes[row] <= plans.peak_bytes.min()
        best = brute_force(problem)
        assert_optimal(problem, solve(problem, gap=0.0), best)
        found += best is not None
    assert found >= 3


def test_large_model_needs_less_to_infer() -> None:
    """Llama-3 70B runs forwards on 8 H100, which cannot train it, and every layout of it fills and drains."""
    job = Job(num_gpus=8, global_batch_size=16, sequence_length=4096, kind="inference")
    problem = Problem(model=load_model("llama3-70b"), hardware=load_hardware("dgx-h100"), job=job)
    result = solve(problem)
    assert result.status == "optimal"
    assert result.plan is not None
    assert result.plan.layout.schedule == "gpipe"
    assert result.report is not None
    # 70.6e9 parameters of 2 bytes on 8 accelerators, none of which has much less than its share.
    assert max(stage.memory.weights_bytes for stage in result.report.stages) > 0.9 * 141e9 / 8


def test_command_line() -> None:
    """``--inference`` on the command line is the job's kind, and its plan has no gradients."""
    words = [
        "solve",
        "llama2-7b",
        "dgx-a100-80",
        "--gpus",
        "2",
        "--global-batch",
        "4",
        "--space",
        "uniform",
        "--inference",
        "--json",
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["problem"]["job"]["kind"] == "inference"
    assert found["plan"]["stages"][0]["memory"]["gradients_bytes"] == 0
    assert found["breakdown"]["optimizer"] == 0
