"""Replicas of different make: a step is one graph of all pipelines, what is shared is as slow as the slowest."""

from __future__ import annotations

import numpy as np
import pytest

from milpplan import Layout, Plan, Recompute, VirtualStage, load_hardware, load_model, simulate
from milpplan.errors import IllegalPlanError
from milpplan.problem import Job, NodeGroup, Problem, shares_code, shares_of
from milpplan.simulation import (
    ReplicaView,
    costs_of_replicas,
    durations,
    plan_stages,
    step_times_s,
    view_plans,
)
from milpplan.simulation.pipeline.lanes import SLICE_KINDS, memory_timelines, step_lanes
from milpplan.simulation.pipeline.step_graph import StepGraph, Term, Timeline, simulate_times

A100, H100 = load_hardware("dgx-a100-80"), load_hardware("dgx-h100")
MODEL = load_model("llama3-8b")


Hardware = tuple[object, ...]
SOME, NONE = Recompute(selective=1), Recompute()


def problem(batch: int = 40, gpus: tuple[int, ...] = (16, 8), types: Hardware = (A100, H100)) -> Problem:
    """Llama-3 8B on nodes of several types."""
    first, *others = types
    job = Job(num_gpus=sum(gpus), global_batch_size=batch, sequence_length=2048)
    groups = [{"hardware": own, "num_gpus": count} for own, count in zip(others, gpus[1:], strict=True)]
    return Problem.model_validate({"model": MODEL, "hardware": first, "job": job, "other_hardware": groups})


def layout(**changes: object) -> Layout:
    """Replicas of eight GPUs: two on the first type with 8 micro-batches, one on the second with 24."""
    values: dict[str, object] = {"tp": 2, "pp": 4, "dp": 3, "global_batch_size": 40, "rank_order": "tp-cp-pp-dp"}
    values |= {"replica_micro_batches": (8, 24), "zero_stage": 1, "overlap_grad_reduce": True}
    return Layout.model_validate(values | {"sequence_parallel": True} | changes)


def plan(of: Layout, second: Recompute = SOME) -> Plan:
    """32 layers, as many in every virtual stage; the second type recomputes something."""
    each = 32 // of.num_virtual_stages
    stages = [
        VirtualStage(layers=(j * each, j * each + each), recompute=Recompute(full=j % 2))
        for j in range(of.num_virtual_stages)
    ]
    other = (second,) * of.num_virtual_stages * (max(1, len(of.replica_micro_batches)) - 1)
    return Plan(layout=of, virtual_stages=tuple(stages), other_recompute=other)


def test_shares_have_codes() -> None:
    """Shares and their code stand for each other; that of replicas alike is 0. Other numbers are refused."""
    three, four = (1_048_575, 1, 1_048_575), (32_767, 1, 2, 32_767)
    for shares in ((), (1, 1), (3, 1_000_000), (1_048_576, 2), (1, 1, 1), three, (4, 3, 2, 1), four):
        assert shares_of(shares_code(shares)) == shares
        assert 0 <= shares_code(shares) < 2**63
    for wrong in ((1,), (1, 2, 3, 4, 5), (40_000, 1, 1, 1)):
        with pytest.raises(ValueError, match="replica_micro_batches"):
            layout(replica_micro_batches=wrong)
    with pytest.raises(ValueError, match="no node_order"):
        layout(node_order=(0, 1))


def run_of(view: ReplicaView, own: Plan) -> tuple[Timeline, np.ndarray]:
    """When everything of a view happens, and its durations [Term, J]."""
    matrix = durations(plan_stages(view.costs, MODEL.layer_kinds, own))
    return simulate_times(StepGraph.of(own.layout, view.costs.transfer_ns, view.costs.barrier_ns), matrix), matrix


def one_graph_ns(whole: Problem, of: Plan) -> int:
    """The step of all pipelines together, written from its definition: a reduction starts when the last replica is
    there and what the rank reduced before is done; then the norm, and the slowest update."""
    views = costs_of_replicas(whole, of.layout).views
    runs = [run_of(view, own) for view, (_, own) in zip(views, view_plans(whole, of), strict=True)]
    ready, updates = [], []
    for stages in of.layout.rank_stages:
        done = latest = 0
        for j in reversed(stages):
            reduce_ns = max(int(matrix[Term.REDUCE, j]) for _, matrix in runs)
            if of.layout.overlap_grad_reduce:
                start = max(int(run.backward_start_ns[j].max() + matrix[Term.LEAD, j]) for run, matrix in runs)
                trail = max(int(run.backward_end_ns[j].max() + matrix[Term.TRAIL, j]) for run, matrix in runs)
                latest = max(latest, trail)
            else:
                start = max(int(run.backward_end_ns[list(stages)].max()) for run, _ in runs)
            done = max(done, start) + reduce_ns
        ready.append(max(done, latest))
        updates.append(sum(max(int(matrix[Term.OPTIMIZER, j]) for _, matrix in runs) for j in stages))
    return max(ready) + int(views[0].costs.barrier_ns) + max(updates)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize("shares", [(8, 24), (16, 8), (12, 16)])
def test_step_is_that_of_one_graph(overlap: bool, vpp: int, shares: tuple[int, int]) -> None:
    """The longest of the views is the longest path through the graph of all replicas, whichever type is slower."""
    schedule = "interleaved" if vpp > 1 else "1f1b"
    own = layout(
        overlap_grad_reduce=overlap,
        vpp=vpp,
        schedule=schedule,
        replica_micro_batches=shares,
        global_batch_size=2 * shares[0] + shares[1],
    )
    whole = problem(own.global_batch_size)
    report = simulate(whole, plan(own))
    assert report.step_time_ns == one_graph_ns(whole, plan(own))
    assert sum(report.breakdown_s.values()) == pytest.approx(report.step_time_s, rel=1e-9)
    assert all(sum(s.breakdown_s.values()) == pytest.approx(report.step_time_s, rel=1e-9) for s in report.stages)
    assert [stage.node_type for stage in report.stages] == [A100.name] * 4 + [H100.name] * 4


@pytest.mark.parametrize("shares", [(8, 24, 4, 30), (2, 3, 24, 4)])
def test_step_of_four_types_is_that_of_one_graph(shares: tuple[int, ...]) -> None:
    """The same on four types, whichever is the slowest; the report has the stages of each."""
    types = (A100, H100, load_hardware("l40s"), load_hardware("dgx-b200"))
    own = layout(dp=5, replica_micro_batches=shares, global_batch_size=2 * shares[0] + sum(shares[1:]))
    whole = problem(own.global_batch_size, (16, 8, 8, 8), types)
    report = simulate(whole, plan(own))
    assert report.step_time_ns == one_graph_ns(whole, plan(own))
    assert [stage.node_type for stage in report.stages] == [one.name for one in types for _ in range(4)]
    assert all(sum(s.breakdown_s.values()) == pytest.approx(report.step_time_s, rel=1e-9) for s in report.stages)


def test_step_times_of_several_plans_are_those_of_their_reports() -> None:
    """Step times without reports are those of ``simulate``, for replicas of different make and for alike ones."""
    unlike = [plan(layout(replica_micro_batches=shares)) for shares in ((8, 24), (10, 20))]
    alike = problem(36).model_copy(update={"other_hardware": ()})
    degrees = ((2, 4, 3), (2, 2, 6), (1, 8, 3), (8, 1, 3))
    own = [layout(tp=tp, pp=pp, dp=dp, replica_micro_batches=(), global_batch_size=36) for tp, pp, dp in degrees]
    for whole, plans in ((problem(), unlike), (alike, [plan(each) for each in own])):
        times = step_times_s(whole, plans)
        assert times == [simulate(whole, each).step_time_s for each in plans]
        assert len(set(times)) == len(plans)
    with pytest.raises(IllegalPlanError, match="sequences a step"):
        step_times_s(problem(), [unlike[0], plan(own[0])])


def test_replicas_on_equal_nodes_are_alike() -> None:
    """Two groups of the same nodes with equal shares cost what one group of all does, to the nanosecond and the
    byte."""
    shared = layout(replica_micro_batches=(10, 10), global_batch_size=30)
    both = plan(shared)
    both = both.model_copy(update={"other_recompute": tuple(stage.recompute for stage in both.virtual_stages)})
    alone = problem(30).model_copy(update={"other_hardware": ()})
    same = simulate(alone, plan(shared.model_copy(update={"replica_micro_batches": ()})))
    report = simulate(problem(30, types=(A100, A100)), both)
    assert report.step_time_ns == same.step_time_ns
    assert report.stages == same.stages * 2
    assert report.tokens_per_s == pytest.approx(same.tokens_per_s)


def test_slower_type_waits_for_nobody() -> None:
    """More micro-batches make a replica slower; the type that is done first has the difference in its bubble."""
    steps = []
    for first in (4, 8, 12, 16):
        own = layout(replica_micro_batches=(first, 40 - 2 * first))
        report = simulate(problem(), plan(own))
        bubbles = [stage.breakdown_s["bubble"] for stage in report.stages]
        steps.append((report.step_time_ns, bubbles[0] < bubbles[4]))
    times = [step for step, _ in steps]
    assert min(times) < times[0] or min(times) < times[-1]
    assert {slower for _, slower in steps} == {False, True}


def test_groups_of_two_types_leave_their_nodes() -> None:
    """Four GPUs of each type are not one domain of eight: the reduction takes longer than inside a node."""
    whole = problem(8, gpus=(4, 4), types=(A100, A100))
    own = layout(tp=1, pp=1, dp=8, replica_micro_batches=(1, 1), global_batch_size=8, sequence_parallel=False)
    view = costs_of_replicas(whole, own).views[0]
    inside = whole.model_copy(update={"other_hardware": ()})
    alike = own.model_copy(update={"replica_micro_batches": (), "rank_order": "tp-cp-dp-pp"})
    reports = [simulate(whole, plan(own, NONE)), simulate(inside, plan(alike))]
    assert reports[0].step_time_ns > reports[1].step_time_ns
    assert int(view.costs.reduce_ns.sum()) > 0


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"replica_micro_batches": (8, 23)}, "39 sequences"),
        ({"rank_order": "tp-cp-dp-pp"}, "dp comes last"),
        ({"zero_stage": 2}, "meet once a step"),
        ({"tp": 4, "pp": 1, "dp": 6, "cp": 1, "replica_micro_batches": (5, 10)}, ""),
        ({"tp": 1, "pp": 3, "dp": 8, "replica_micro_batches": (2, 4)}, "whole replicas"),
        ({"offload_optimizer": True}, "offload"),
    ],
)
def test_impossible_layouts_are_refused(changes: dict[str, object], seen: str) -> None:
    """What replicas of different make cannot have is refused with what was seen and expected; the rest runs."""
    own = layout(**changes)
    stages = tuple(
        VirtualStage(layers=(32 * j // own.pp, 32 * (j + 1) // own.pp)) for j in range(own.num_virtual_stages)
    )
    given = Plan(layout=own, virtual_stages=stages, other_recompute=(Recompute(),) * len(stages))
    if not seen:
        assert simulate(problem(), given).step_time_ns > 0
        return
    with pytest.raises(IllegalPlanError, match=seen):
        simulate(problem(), given)


def test_a_share_for_each_type_is_needed() -> None:
    """Replicas of different make need two node types or more and a share for each, and a plan says what each of
    them recomputes."""
    third = (*problem().other_hardware, NodeGroup(hardware=A100, num_gpus=8))
    for wrong in (
        problem().model_copy(update={"other_hardware": third}),
        problem().model_copy(update={"other_hardware": ()}),
    ):
        job = wrong.job.model_copy(update={"num_gpus": 24})
        with pytest.raises(IllegalPlanError, match="at least two node types"):
            simulate(wrong.model_copy(update={"job": job}), plan(layout()))
    with pytest.raises(ValueError, match="other_recompute"):
        Plan(layout=layout(), virtual_stages=plan(layout()).virtual_stages)
    with pytest.raises(ValueError, match="other_recompute"):
        plan(layout(), Recompute(full=9))


def test_lanes_have_a_row_group_for_each_make() -> None:
    """The ranks of a replica on the first type, then of one on the second: each runs its own share, what all
    replicas reduce ends together, nothing ends after the step, and memory peaks where the report says."""
    drawn = plan(layout())
    report, lanes = simulate(problem(), drawn), step_lanes(problem(), drawn)
    assert lanes.step_time_ns == report.step_time_ns
    assert [rank.rank for rank in lanes.ranks] == list(range(8))
    assert [rank.label for rank in lanes.ranks] == [f"{make}:{stage}" for make in range(2) for stage in range(4)]
    assert [rank.num_gpus for rank in lanes.ranks] == [4] * 4 + [2] * 4
    for rank, stage in zip(lanes.ranks, report.stages, strict=True):
        assert rank.name.endswith(stage.node_type)
        work = rank.lane("compute")
        assert work is not None
        assert int((work.kind == SLICE_KINDS.index("forward")).sum()) == (8, 24)[rank.rank // 4]
        assert max(int(lane.end_ns.max()) for lane in rank.lanes) <= lanes.step_time_ns
        assert int(rank.memory.total_bytes.max()) == stage.memory.peak_bytes
        assert rank.usable_memory_bytes == stage.usable_memory_bytes
    for stage in range(4):
        one, other = (lanes.ranks[stage + 4 * make].lane("gradient reduction") for make in range(2))
        assert one is not None
        assert other is not None
        assert np.array_equal(one.end_ns, other.end_ns)
    assert len(memory_timelines(problem(), drawn)) == 8
