"""Traffic in clusters of several node types: stages on different nodes, and replicas of different make."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import pytest

from milpplan import Layout, Plan, Problem, VirtualStage, simulate, traffic
from milpplan.communication.wires import ALGORITHMS
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem import Job, NodeGroup
from milpplan.simulation import joined_plan, view_plans
from milpplan.simulation.pipeline.lanes import pipeline_runs
from tests.communication.test_traffic import assert_sums
from tests.optimize.mixed_problems import mixed_problem
from tests.optimize.problems import random_plan
from tests.optimize.replica_problems import replica_problem
from tests.simulation.cases import even_plan, problem_of, shipped_hardware, shipped_model

TYPES = ("dgx-a100-80", "dgx-h100", "l40s", "gb200-nvl72")


def cluster(model: str, gpus: tuple[int, ...], batch: int, types: tuple[str, ...] = TYPES) -> Problem:
    """A model on so many GPUs of each type."""
    groups = tuple(
        NodeGroup(hardware=shipped_hardware(name), num_gpus=count)
        for name, count in zip(types[1:], gpus[1:], strict=False)
    )
    job = Job(num_gpus=sum(gpus), global_batch_size=batch, sequence_length=2048)
    hardware = shipped_hardware(types[0])
    return Problem(model=shipped_model(model), hardware=hardware, job=job, other_hardware=groups)


def replicas_plan(problem: Problem, layout: Layout, *full: int) -> Plan:
    """The same layers in the stages of all replicas; those of each type recompute so many of a stage wholly."""
    alike = layout.model_copy(update={"replica_micro_batches": ()})
    return joined_plan(layout, tuple(even_plan(problem, alike, full=count) for count in full))


@cache
def staged(order: tuple[int, ...] = (1, 3, 0, 2)) -> tuple[Problem, Plan]:
    """Qwen3 30B-A3B on 16 GPUs of each of four types, one stage of 16 GPUs each."""
    problem = cluster("qwen3-30b-a3b", (16, 16, 16, 16), 64)
    layout = Layout(
        tp=2, cp=2, pp=4, dp=4, ep=4, etp=2, global_batch_size=64, zero_stage=1, sequence_parallel=True,
        node_order=order,
    )  # fmt: skip
    return problem, even_plan(problem, layout, full=1)


@cache
def replicated() -> tuple[Problem, Plan]:
    """Llama-3 8B, replicas of eight GPUs: two on A100 with 8 micro-batches, one on H100 with 24."""
    problem = cluster("llama3-8b", (16, 8), 40)
    layout = Layout(
        tp=2, cp=2, pp=2, dp=3, global_batch_size=40, rank_order="tp-cp-pp-dp", replica_micro_batches=(8, 24),
        zero_stage=1, sequence_parallel=True, overlap_grad_reduce=True,
    )  # fmt: skip
    return problem, replicas_plan(problem, layout, 0, 1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_matrix_is_the_collectives_wire_bytes(algorithm: Any) -> None:
    """All parallelisms at once on four node types, and on replicas of different make: the matrix, tiers, links and
    the time line hold what the collectives send."""
    assert_sums(*staged(), algorithm)
    assert_sums(*replicated(), algorithm)


@pytest.mark.parametrize(
    "algorithm", ["tree", *(pytest.param(name, marks=pytest.mark.long) for name in ("ring", "hierarchical"))]
)
def test_random_clusters_add_up(algorithm: Any) -> None:
    """The same on random clusters whose types differ in everything, domains and shares of experts included, with
    random splits and recomputation."""
    random_clusters(random.Random(ALGORITHMS.index(algorithm)), algorithm, 1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_random_clusters_add_up_often(seed: int) -> None:
    """The same on 40 more."""
    random_clusters(random.Random(100 + seed), ALGORITHMS[seed % 3], 4)


def random_clusters(rng: random.Random, algorithm: Any, count: int) -> None:
    """``count`` random plans whose stages differ, and as many whose replicas do."""
    for seed in rng.sample(range(40), count):
        problem = mixed_problem(seed)
        space = layout_space(problem)
        layout = space.at(rng.randrange(len(space)))
        assert_sums(problem, random_plan(rng, problem, layout), algorithm)
    for seed in rng.sample(range(40), count):
        problem = replica_problem(seed, types=rng.choice((2, 3, 4)))
        space = layout_space(problem)
        layout = space.at(rng.randrange(len(space)))
        first = random_plan(rng, problem, layout.model_copy(update={"replica_micro_batches": ()}))
        others = [first] * (len(problem.node_types) - 1)
        assert_sums(problem, joined_plan(layout, (first, *others)), algorithm)


@pytest.mark.parametrize("switch", ["sequence_parallel", "pp_scatter_gather"])
def test_equal_types_send_what_one_type_sends(switch: str) -> None:
    """Two groups of the same nodes, as stages and as replicas with equal shares, send what one group of all does:
    every pair, tier and link, and the time line; also where transfers go in parts."""
    alone = problem_of("llama3-8b", "dgx-h100", num_gpus=32, global_batch_size=32, sequence_length=2048)
    halves = cluster("llama3-8b", (16, 16), 32, ("dgx-h100", "dgx-h100"))
    shape = {"tp": 2, "pp": 4, "dp": 4, "global_batch_size": 32, "zero_stage": 1, switch: True}
    shape["overlap_grad_reduce"] = True
    orders: tuple[dict[str, Any], ...] = (
        {"node_order": (0, 1)},
        {"rank_order": "tp-cp-pp-dp", "replica_micro_batches": (8, 8)},
    )
    for order in orders:
        usual = {"rank_order": order.get("rank_order", "tp-cp-dp-pp")}
        one = traffic(alone, even_plan(alone, Layout.model_validate(shape | usual)))
        layout = Layout.model_validate(shape | order)
        plan = even_plan(halves, layout) if "node_order" in order else replicas_plan(halves, layout, 0, 0)
        both = traffic(halves, plan)
        for name, pairs in one.pairs.items():
            assert np.array_equal(both.pairs[name].sender, pairs.sender)
            assert np.array_equal(both.pairs[name].receiver, pairs.receiver)
            assert both.pairs[name].num_bytes == pytest.approx(pairs.num_bytes, rel=1e-12)
        assert both.tier_bytes == {name: pytest.approx(tiers) for name, tiers in one.tier_bytes.items()}
        assert both.node_links.out_between == pytest.approx(one.node_links.out_between)
        assert both.exposed_s == pytest.approx(one.exposed_s)
        for tier in ("inside_bytes", "between_bytes"):
            mine, theirs = (getattr(report.timeline, tier) for report in (both, one))
            assert np.abs(mine - theirs).max() <= 1e-9 * theirs.sum()


def test_between_types_passes_what_crosses_the_border_by_hand() -> None:
    """Stages: of four types in the order 1, 3, 0, 2 only neighbours exchange activations, 2 * 2,048 / 2 * 2,048
    bytes of a sequence for each of 2 context ranks and halves for each of 2 tensor ranks, 16 micro-batches from
    16 GPUs; and the norm's ring passes each border. 4 bytes are too few to see."""
    problem, plan = staged()
    report = traffic(problem, plan)
    hidden, each_gpu = 2048, 2 * 2048 / 2 * 2048 / 2
    assert problem.model.hidden_size == hidden
    activations = 16 * 16 * each_gpu
    expected = np.zeros((4, 4))
    for one, other in ((1, 3), (3, 0), (0, 2)):
        expected[one, other] = expected[other, one] = activations
    own = report.type_bytes[~np.eye(4, dtype=bool)]
    assert own == pytest.approx(expected[~np.eye(4, dtype=bool)], abs=64)
    assert [block.node_type for block in report.blocks] == [1, 3, 0, 2]
    assert report.gpu_links.out_between[0] > 0


def test_replicas_send_as_many_micro_batches_as_they_run() -> None:
    """A pair inside a replica on H100 exchanges 24 / 8 times what a pair of an A100 replica does, where both
    recompute nothing; gradients meet over all 3 * 2 replicas and context ranks, whatever their shares."""
    problem, plan = replicated()
    report = traffic(problem, replicas_plan(problem, plan.layout, 0, 0))
    for name in ("sp", "cp", "pp"):
        matrix = report.pairs[name].matrix(24)
        slow, slow_too, fast = (
            matrix[8 * number : 8 * number + 8, 8 * number : 8 * number + 8] for number in range(3)
        )
        assert slow.sum() > 0
        assert np.array_equal(slow, slow_too)
        assert fast == pytest.approx(3 * slow)
        assert matrix.sum() == pytest.approx(slow.sum() * 5)
    alike = plan.layout.model_copy(update={"replica_micro_batches": (), "global_batch_size": 24})
    alone = problem.model_copy(update={"other_hardware": ()})
    job = alone.job.model_copy(update={"global_batch_size": 24})
    alone = alone.model_copy(update={"job": job})
    same = traffic(alone, Plan(layout=alike, virtual_stages=plan.virtual_stages))
    for name in ("gradient_reduce", "parameter_gather", "gradient_norm"):
        assert report.wire_bytes[name] == pytest.approx(same.wire_bytes[name])
        assert np.array_equal(report.pairs[name].num_bytes, same.pairs[name].num_bytes)


def test_no_domain_holds_two_types() -> None:
    """Twelve GPUs of a type in nodes of eight leave half a node: the next type's first GPU is in a domain of its
    own, and what passes to it is between domains."""
    problem = cluster("llama3-8b", (12, 12), 8)
    layout = Layout(tp=4, pp=2, dp=3, global_batch_size=9, node_order=(0, 1))
    problem = problem.model_copy(update={"job": problem.job.model_copy(update={"global_batch_size": 9})})
    report = traffic(problem, even_plan(problem, layout))
    pairs = report.pairs["pp"]
    assert report.tier_bytes["pp"] == {"inside": 0.0, "between": pytest.approx(pairs.total_bytes)}
    assert len(report.node_links.out_between) == 4
    assert report.node_links.out_between[1:3].min() > 0


def test_overheads_and_bandwidth_are_of_each_type() -> None:
    """Exposed and hidden seconds are the simulator's, utilisation names the stages of every type, and effective
    bandwidth is that of each type's links, with replicas also among all of them, no faster than any."""
    for problem, plan in (staged(), replicated()):
        report, step = traffic(problem, plan), simulate(problem, plan)
        assert report.exposed_s["tp_exposed"] == step.breakdown_s["tp_exposed"]
        assert report.hidden_s == step.hidden_s
        assert len(report.utilisation) == len(step.stages)
        rates: dict[str, float] = {}
        for row in report.bandwidths:
            if (row.operation, row.num_gpus, row.stride, row.message_bytes) == ("all_gather", 8, 1, 2.0**32):
                rates[row.nodes] = row.bus_bandwidth_bytes_per_s
        names = [hardware.name for hardware in problem.node_types]
        wanted = {*names, "all node types"} if plan.layout.replica_micro_batches else set(names)
        assert set(rates) == wanted
        assert len({rates[name] for name in names}) == len(names)
        assert rates.get("all node types", 0.0) <= min(rates[name] for name in names)


def test_moments_of_all_pipelines_are_the_simulators() -> None:
    """The runs of replicas of different make end with the step, reductions of all types end together, and none
    starts before the backward that it waits for has begun on every type."""
    problem, plan = replicated()
    runs = pipeline_runs(problem, plan)
    report = simulate(problem, plan)
    assert [run.timeline.step_time_ns for run in runs] == [report.step_time_ns] * 2
    assert [run.plan for run in runs] == [own for _, own in view_plans(problem, plan)]
    assert len({tuple(run.timeline.reduce_end_ns.tolist()) for run in runs}) == 1
    assert {int(run.timeline.finish_ns.max()) for run in runs} == {report.step_time_ns}
    for run in runs:
        latest = run.timeline.backward_start_ns.max(axis=1)
        assert (run.timeline.reduce_end_ns > latest).all()


def test_uncovered_stage_plan_is_complete() -> None:
    """A stage without layers sends nothing but what passes through it."""
    problem = cluster("llama3-8b", (8, 8, 8), 8)
    layout = Layout(tp=8, pp=3, global_batch_size=8, node_order=(2, 0, 1))
    stages = tuple(VirtualStage(layers=layers) for layers in ((0, 0), (0, 16), (16, 32)))
    report = traffic(problem, Plan(layout=layout, virtual_stages=stages))
    matrix = report.pairs["tp"].matrix(3, np.repeat(np.arange(3), 8))
    assert 0 < matrix[0, 0] < 0.1 * matrix[1, 1]
    assert (np.diag(np.diag(matrix)) == matrix).all()
