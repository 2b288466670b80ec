"""The exact simulator: closed forms, sums that add up, memory counted item by item, refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from milpplan.errors import IllegalPlanError
from milpplan.problem import Layout, Plan, Problem, Range, Recompute, VirtualStage
from milpplan.simulation import (
    BREAKDOWN,
    HIDDEN,
    CostTable,
    LayoutColumns,
    LayoutCosts,
    StepReport,
    durations,
    mixed_costs,
    plan_stages,
    usable_memory_bytes,
)
from milpplan.simulation import simulator as sut
from milpplan.simulation.layout_costs import layout_costs
from milpplan.simulation.pipeline.lanes import pipeline_runs
from milpplan.simulation.pipeline.step_graph import Term
from milpplan.units import NS_PER_S
from tests.amounts import first, long_but
from tests.simulation import event_simulation as events
from tests.simulation.cases import even_plan, problem_of, random_cases

CASES = random_cases(seed=41, count=30)


@cache
def costs_of(problem: Problem, layout: Layout) -> LayoutCosts:
    """Constants of one layout."""
    return layout_costs(problem, LayoutColumns.of([layout])).at(0)


def plan_of(layers: list[int], layout: Layout) -> Plan:
    """A plan with the given number of layers in each virtual stage."""
    ends = np.cumsum(layers).tolist()
    return Plan(
        layout=layout,
        virtual_stages=tuple(
            VirtualStage(layers=(end - count, end)) for count, end in zip(layers, ends, strict=True)
        ),
    )


@cache
def report_of(problem: Problem, plan: Plan) -> StepReport:
    """The simulation that several tests look at, done once. Not for ``textbook``."""
    return sut.simulate(problem, plan)


@pytest.fixture
def textbook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs as in the textbooks: no embedding, no head, no transfers between stages."""

    def bare(problem: Problem, columns: LayoutColumns) -> CostTable:
        table = layout_costs(problem, columns)
        nothing = {name: 0 * getattr(table.distinct, name) for name in ("embedding_ns", "head_ns", "transfer_ns")}
        return replace(table, distinct=replace(table.distinct, **nothing))

    monkeypatch.setattr(mixed_costs, "layout_costs", bare)


@pytest.mark.usefixtures("textbook")
@pytest.mark.parametrize(("schedule", "vpp"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)])
@pytest.mark.parametrize("pp", long_but((2, 4), (2, 4, 8)))
@pytest.mark.parametrize("recompute", [{}, {"full": 1}])
def test_equal_stages_give_the_closed_form(schedule: Any, vpp: int, pp: int, recompute: dict[str, int]) -> None:
    """Equal stages: (m v + P - 1) (f + b) for a virtual stage's f and b, then the barrier and the update
    (Narayanan et al. 2021, section 2.2)."""
    problem = problem_of("llama3-405b", "dgx-h100")
    problem = problem.model_copy(
        update={
            "model": problem.model.model_copy(
                update={"layers": (problem.model.layers[0].model_copy(update={"count": 64}),)}
            )
        }
    )
    layout = Layout(pp=pp, vpp=vpp, schedule=schedule, global_batch_size=2 * pp)
    plan = even_plan(problem, layout, **recompute)
    costs = costs_of(problem, layout)
    matrix = durations(plan_stages(costs, problem.model.layer_kinds, plan))
    forward = int(costs.duration_ns[0, 0]) * 64 // (pp * vpp)
    backward = int(costs.duration_ns[0, 1]) * 64 // (pp * vpp) + recompute.get("full", 0) * int(
        costs.duration_ns[0, 3]
    )
    update = matrix[Term.OPTIMIZER].reshape(vpp, pp).sum(axis=0).max()
    closed = (2 * pp * vpp + pp - 1) * (forward + backward) + int(costs.barrier_ns) + int(update)
    assert sut.simulate(problem, plan).step_time_ns == closed


@pytest.mark.usefixtures("textbook")
def test_uneven_stages_beat_the_closed_form() -> None:
    """Uneven stages: sum (f + b) + (m - 1) max (f + b) is not the time of 1F1B; with the widest stage last
    and few micro-batches it is more than 5 % too high."""
    problem = problem_of("megatron-22b")
    layout = Layout(pp=4, global_batch_size=4)
    plan = plan_of([8, 20, 8, 12], layout)
    stages = list(plan.virtual_stages)
    stages[3] = stages[3].model_copy(update={"recompute": Recompute(full=12)})
    plan = plan.model_copy(update={"virtual_stages": tuple(stages)})
    costs = costs_of(problem, layout)
    bare = replace(costs, embedding_ns=0 * costs.embedding_ns, head_ns=0 * costs.head_ns)
    matrix = durations(plan_stages(bare, problem.model.layer_kinds, plan))
    work = matrix[Term.FORWARD] + matrix[Term.BACKWARD]
    closed = work.sum() + 3 * work.max() + matrix[Term.OPTIMIZER].max() + int(costs.barrier_ns)
    step = sut.simulate(problem, plan).step_time_ns
    assert step < 0.95 * closed


def test_transfers_break_the_closed_form() -> None:
    """With transfers even equal stages take longer than (m + P - 1) (f + b) + 2 (P - 1) transfers: in 1F1B a
    rank waits for its neighbour again and again."""
    problem = problem_of("megatron-22b", "dgx-a100-80")
    layout = Layout(pp=4, dp=8, global_batch_size=128)
    plan = even_plan(problem, layout)
    costs = costs_of(problem, layout)
    slow = replace(
        costs,
        embedding_ns=0 * costs.embedding_ns,
        head_ns=0 * costs.head_ns,
        transfer_ns=costs.duration_ns[0, 0] * 6,
    )
    stages = plan_stages(slow, problem.model.layer_kinds, plan)
    matrix = durations(stages)
    work = int(matrix[Term.FORWARD, 0] + matrix[Term.BACKWARD, 0])
    closed = (16 + 3) * work + 6 * int(slow.transfer_ns)
    tail = int(matrix[Term.REDUCE].max() + matrix[Term.OPTIMIZER].max() + slow.barrier_ns)
    assert int(sut.step_times_ns(layout, slow, matrix)) > 1.05 * (closed + tail)


@pytest.mark.parametrize(("problem", "plan"), first(4, CASES))
def test_breakdown_adds_up(problem: Problem, plan: Plan) -> None:
    """For every stage and for their mean the parts add up to the step time, and no part is negative, the
    bubble and what is hidden included."""
    report = report_of(problem, plan)
    rows = [(stage.breakdown_s, stage.hidden_s) for stage in report.stages]
    for breakdown, hidden in [*rows, (report.breakdown_s, report.hidden_s)]:
        assert tuple(breakdown) == BREAKDOWN
        assert tuple(hidden) == HIDDEN
        assert sum(breakdown.values()) == pytest.approx(report.step_time_s, rel=1e-9)
        assert min(breakdown.values()) >= 0
        assert min(hidden.values()) >= 0


@pytest.mark.parametrize(("problem", "plan"), first(8, CASES))
def test_numbers_make_sense(problem: Problem, plan: Plan) -> None:
    """Any plan that can run has a finite positive time, rate and memory, and uses less than the peak."""
    report = report_of(problem, plan)
    numbers = (report.step_time_s, report.tokens_per_s, report.mfu, report.peak_memory_bytes)
    assert np.all(np.isfinite(numbers))
    assert min(numbers) > 0
    assert report.mfu < 1
    tokens = plan.layout.global_batch_size * problem.job.sequence_length
    assert report.tokens_per_s * report.step_time_s == pytest.approx(tokens)
    assert report.step_time_ns == round(report.step_time_s * NS_PER_S)
    assert report.usable_memory_bytes == problem.hardware.usable_bytes
    assert {stage.capacity_bytes for stage in report.stages} == {usable_memory_bytes(problem)}
    assert report.fits == (report.peak_memory_bytes <= report.usable_memory_bytes)
    derived = {"memory_margin_bytes", "memory_verdict"}
    assert set(report.to_dict()) == set(type(report).__dataclass_fields__) | derived


@pytest.mark.parametrize(("problem", "plan"), CASES[:4])
def test_reserves_and_usable_memory_are_what_is_installed(problem: Problem, plan: Plan) -> None:
    """Usable memory, context and fragmentation add up to what the driver shows."""
    report = report_of(problem, plan)
    total = report.usable_memory_bytes + report.context_bytes + report.fragmentation_bytes
    assert total == problem.hardware.accelerator.memory_bytes
    assert report.context_bytes == problem.hardware.reserved_bytes


@pytest.mark.parametrize(
    ("usable", "margin", "verdict", "leaves"),
    [
        (999, 0.0, "does_not_fit", False),
        (1000, 0.0, "tight", True),
        (1000, 0.01, "tight", False),
        (1049, 0.04, "tight", True),
        (1050, 0.05, "safe", True),
        (1050, 0.06, "safe", False),
    ],
)
def test_verdict_of_memory(usable: int, margin: float, verdict: str, leaves: bool) -> None:
    """A plan that leaves the hardware's margin is safe, whatever the space asks for; a plan that leaves less is
    tight, and below zero it does not fit."""
    problem, plan = CASES[0]
    peak = report_of(problem, plan).peak_memory_bytes
    unit = peak / 1000
    size = int(usable * unit) + (usable > 1000)
    accelerator = problem.hardware.accelerator.model_copy(update={"memory_bytes": size})
    changes = {"accelerator": accelerator, "reserved_bytes": 0, "fragmentation_fraction": 0.0}
    changes["memory_margin_fraction"] = 50 * unit / size - 1e-9
    hardware = problem.hardware.model_copy(update=changes)
    space = problem.space.model_copy(update={"memory_margin_fraction": margin * 1000 * unit / size})
    report = sut.simulate(problem.model_copy(update={"hardware": hardware, "space": space}), plan)
    assert (report.memory_verdict, report.fits_with_margin) == (verdict, leaves)
    assert report.memory_margin_bytes == size - peak
    assert report.fits == (usable >= 1000)


@pytest.mark.parametrize(("problem", "plan"), first(8, CASES))
def test_time_of_a_batch_of_plans(problem: Problem, plan: Plan) -> None:
    """The search's batched step times are the simulator's."""
    costs = costs_of(problem, plan.layout)
    matrix = durations(plan_stages(costs, problem.model.layer_kinds, plan))
    found = sut.step_times_ns(plan.layout, costs, np.stack([matrix, 2 * matrix]))
    assert found[0] == report_of(problem, plan).step_time_ns


@pytest.mark.parametrize(("problem", "plan"), first(8, CASES))
def test_memory_counted_item_by_item(problem: Problem, plan: Plan) -> None:
    """Peak memory is what a walk over the rank's work items finds, and its parts add up to it."""
    layout = plan.layout
    costs = costs_of(problem, layout)
    stages = plan_stages(costs, problem.model.layer_kinds, plan)
    report = report_of(problem, plan)
    for rank, found in enumerate(report.stages):
        order = events.rank_order(layout.schedule, layout.pp, layout.num_micro_batches, layout.vpp, rank)
        static = int(costs.buffer_bytes) + sum(int(stages[j].state_bytes.sum()) for j in layout.rank_stages[rank])
        held, peak = 0, 0
        for kind, j, _ in order:
            kept, transient = int(stages[j].kept_bytes[0]), int(stages[j].transient_bytes[0])
            left = stages[j].deferred_bytes if layout.schedule in events.SPLIT else 0
            if kind == "F":
                held += kept
                peak = max(peak, held)
            elif kind == "W":
                held -= left
            else:
                peak = max(peak, held + transient)
                held += left - kept
                peak = max(peak, held + (transient if left else 0))
        memory = found.memory
        assert memory.peak_bytes == static + peak
        parts = [getattr(memory, name) for name in memory.__dataclass_fields__ if name != "peak_bytes"]
        assert sum(parts) == memory.peak_bytes
        assert min(parts) >= 0
    assert report.peak_memory_bytes == max(stage.memory.peak_bytes for stage in report.stages)


def test_live_micro_batches_by_hand() -> None:
    """1F1B holds P - s micro-batches on rank s, GPipe all m, interleaving more than 1F1B on the first rank:
    (v - 1) P + 2 (P - 1) + 1 virtual ones."""
    problem = problem_of("megatron-22b")

    def live(schedule: Any, vpp: int = 1) -> list[float]:
        layout = Layout(pp=4, vpp=vpp, schedule=schedule, global_batch_size=16)
        plan = even_plan(problem, layout)
        kept = int(costs_of(problem, layout).kept_bytes[0]) * 48 // (4 * vpp)
        report = sut.simulate(problem, plan)
        return [round(stage.memory.activations_bytes / kept, 1) for stage in report.stages]

    assert live("1f1b")[1:3] == [3, 2]
    assert live("gpipe")[1:3] == [16, 16]
    virtual = 4 + 2 * 3 + 1
    assert live("interleaved", 2)[0] == pytest.approx(virtual, rel=0.03)
    assert live("interleaved", 2)[1:3] == [virtual - 2, virtual - 4]


@pytest.mark.parametrize(
    ("model", "hardware", "job", "fields"),
    [
        ("gpt3-175b", "dgx-a100-80", {"attention_kernel": "unfused"}, {"tp": 8, "pp": 4}),
        ("gemma-7b", "dgx-h100", {}, {"pp": 2, "dp": 4}),
        ("mixtral-8x7b", "dgx-h100", {}, {"dp": 8, "ep": 8, "zero_stage": 1}),
        ("deepseek-v3", "dgx-h100", {"precision": "fp8"}, {"pp": 4, "dp": 8, "ep": 8, "zero_stage": 1}),
        ("gpt-oss-120b", "mi300x", {}, {"dp": 8, "ep": 8}),
        (
            "qwen3-30b-a3b",
            "gb200-nvl72",
            {"precision": "fp8"},
            {"dp": 8, "ep": 4, "zero_stage": 3, "overlap_grad_reduce": True, "overlap_param_gather": True},
        ),
    ],
)
def test_families_run(model: str, hardware: str, job: dict[str, Any], fields: dict[str, Any]) -> None:
    """Tied and untied, dense, MoE and latent attention, bf16 and fp8, with and without replicas: 1 % to 75 %
    of the peak."""
    problem = problem_of(model, hardware, **job)
    layout = Layout(**({"global_batch_size": 64} | fields))
    layers, stages = problem.model.num_layers, layout.num_virtual_stages
    counts = [layers // stages + (j < layers % stages) for j in range(stages)]
    report = sut.simulate(problem, plan_of(counts, layout))
    assert 0.01 < report.mfu < 0.75
    alone = fields.get("dp", 1) == 1
    sent = ("param_gather_exposed", "grad_reduce_exposed", "zero_exposed")
    if alone and not problem.model.tie_word_embeddings:
        assert all(report.breakdown_s[name] == 0 for name in sent)


def test_recomputation_trades_time_for_memory() -> None:
    """Recomputing every layer makes the step slower and its memory smaller, and selectively lies between."""
    problem = problem_of("gpt3-175b", attention_kernel="unfused")
    layout = Layout(tp=8, pp=8, global_batch_size=64, sequence_parallel=True)
    found = [
        sut.simulate(problem, even_plan(problem, layout, **how)) for how in ({}, {"selective": 12}, {"full": 12})
    ]
    times = [report.step_time_ns for report in found]
    memory = [report.peak_memory_bytes for report in found]
    assert times == sorted(times)
    assert memory == sorted(memory, reverse=True)
    assert [report.breakdown_s["recompute"] > 0 for report in found] == [False, True, True]
    assert found[2].breakdown_s["recompute"] > 5 * found[1].breakdown_s["recompute"]


def test_overlap_never_hurts() -> None:
    """With the same degrees, overlapping reduction and gather never makes a step longer."""
    problem = problem_of("llama3-8b", "dgx-h100")
    for pp, vpp in ((1, 1), (2, 1), (2, 2)):
        fields = {"dp": 8, "pp": pp, "vpp": vpp, "zero_stage": 1, "global_batch_size": 32}
        fields["schedule"] = "interleaved" if vpp > 1 else "1f1b"
        times = [
            sut.simulate(
                problem,
                even_plan(problem, Layout(**fields, overlap_grad_reduce=grad, overlap_param_gather=param)),
            ).step_time_ns
            for grad, param in ((False, False), (True, False), (True, True))
        ]
        assert times == sorted(times, reverse=True)


def test_longer_batches_take_longer() -> None:
    """More micro-batches never take less time, and never lower utilisation of equal stages."""
    problem = problem_of("megatron-22b")
    found = [
        sut.simulate(problem, even_plan(problem, Layout(pp=4, global_batch_size=batch)))
        for batch in (4, 8, 32, 128)
    ]
    assert [r.step_time_ns for r in found] == sorted(r.step_time_ns for r in found)
    assert [r.mfu for r in found] == sorted(r.mfu for r in found)


def refused(problem: Problem, plan: Plan) -> str:
    """The message of the refusal, of both public entries."""
    with pytest.raises(IllegalPlanError) as caught:
        sut.simulate(problem, plan)
    with pytest.raises(IllegalPlanError):
        pipeline_runs(problem, plan)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"global_batch_size": 65, "dp": 2}, "multiple of dp=2"),
        ({"global_batch_size": 64, "micro_batch_size": 3}, "micro_batch_size=3"),
        ({"global_batch_size": 64, "pp": 2, "vpp": 2, "schedule": "1f1b"}, "schedule"),
        ({"global_batch_size": 63, "pp": 2, "vpp": 2, "schedule": "interleaved"}, "divisible"),
        ({"global_batch_size": 64, "vpp": 2, "schedule": "interleaved"}, "pipeline ranks"),
        ({"global_batch_size": 64, "dp": 4, "ep": 8}, "ep=8"),
        ({"global_batch_size": 64, "dp": 6, "ep": 3}, "ep=3"),
        ({"global_batch_size": 64, "tp": 3}, "tp=3"),
        ({"global_batch_size": 64, "cp": 3}, "cp=3"),
    ],
)
def test_impossible_plans_are_refused(fields: dict[str, Any], says: str) -> None:
    """A plan that cannot run is refused with the offending number."""
    problem = problem_of("mixtral-8x7b", "dgx-h100")
    layout = Layout(**fields)
    layers, stages = problem.model.num_layers, layout.num_virtual_stages
    counts = [layers // stages + (j < layers % stages) for j in range(stages)]
    if fields.get("dp") == 6:
        layout = layout.model_copy(update={"global_batch_size": 66})
    assert says in refused(problem, plan_of(counts, layout))


@pytest.mark.parametrize(
    ("job", "seen", "asked"),
    [
        ({"num_gpus": 8}, "4 GPUs", "8 (job.num_gpus)"),
        ({"num_gpus": Range(minimum=6, maximum=10, step=2)}, "4 GPUs", "6 to 10 in steps of 2 (job.num_gpus)"),
        ({"num_gpus": Range(minimum=1, maximum=9, step=2)}, "4 GPUs", "1 to 9 in steps of 2 (job.num_gpus)"),
        ({"global_batch_size": 2048}, "64 sequences", "2,048 (job.global_batch_size)"),
        ({"global_batch_size": Range(minimum=65, maximum=99)}, "64 sequences", "65 to 99 (job.global_batch_size)"),
    ],
)
def test_a_plan_for_another_job_is_refused(job: dict[str, Any], seen: str, asked: str) -> None:
    """The number of GPUs and the batch are the job's, or in its range; the message has both numbers."""
    layout = Layout(pp=4, global_batch_size=64)
    message = refused(problem_of("megatron-22b", **job), plan_of([12] * 4, layout))
    assert seen in message
    assert asked in message
    fitting = problem_of("megatron-22b", num_gpus=4, global_batch_size=Range(minimum=32, maximum=96, step=32))
    assert sut.simulate(fitting, plan_of([12] * 4, layout)).step_time_ns > 0


def test_layers_must_be_covered() -> None:
    """A plan with another number of layers than the model is refused, and says both numbers."""
    problem = problem_of("llama3-8b", "dgx-h100")
    message = refused(problem, plan_of([10, 10], Layout(pp=2, global_batch_size=8)))
    assert "20" in message
    assert "32" in message


def test_dense_models_have_no_experts_to_spread() -> None:
    """ep or etp above 1 means nothing for a dense model, so it is refused rather than ignored."""
    problem = problem_of("llama3-8b", "dgx-h100")
    for fields in ({"ep": 2}, {"etp": 2, "tp": 2}):
        layout = Layout(dp=8, global_batch_size=64, **fields)
        assert "experts" in refused(problem, plan_of([32], layout))
