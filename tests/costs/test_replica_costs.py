"""Replicas of different make: a step is one graph of all pipelines, what is shared is as slow as the slowest."""

from __future__ import annotations

import numpy as np
import pytest

from milpplan import Layout, Plan, Recompute, VirtualStage, load_hardware, load_model, simulate
from milpplan.costs.memory_timeline import memory_timelines
from milpplan.costs.pipeline import StepGraph, Term, Timeline, simulate_times
from milpplan.costs.replica_costs import ReplicaView, costs_of_replicas, view_plans
from milpplan.costs.stages import durations, plan_stages
from milpplan.errors import IllegalPlanError
from milpplan.specs.plan import shares_code, shares_of
from milpplan.specs.problem import Job, NodeGroup, Problem

A100, H100 = load_hardware("dgx-a100-80"), load_hardware("dgx-h100")
MODEL = load_model("llama3-8b")


Two = tuple[object, object]
SOME, NONE = Recompute(selective=1), Recompute()


def problem(batch: int = 40, gpus: tuple[int, int] = (16, 8), types: Two = (A100, H100)) -> Problem:
    """Llama-3 8B on nodes of two types."""
    first, second = types
    job = Job(num_gpus=sum(gpus), global_batch_size=batch, sequence_length=2048)
    groups = ({"hardware": second, "num_gpus": gpus[1]},)
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
    other = (second,) * of.num_virtual_stages if of.replica_micro_batches else ()
    return Plan(layout=of, virtual_stages=tuple(stages), other_recompute=other)


def test_shares_have_codes() -> None:
    """Shares and their code stand for each other; that of replicas alike is 0. Other numbers are refused."""
    for shares in ((), (1, 1), (3, 1_000_000), (1_048_576, 2)):
        assert shares_of(shares_code(shares)) == shares
    for wrong in ({"replica_micro_batches": (1,)}, {"replica_micro_batches": (1, 2), "node_order": (0, 1)}):
        with pytest.raises(ValueError, match="replica_micro_batches"):
            layout(**wrong)


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


def test_one_type_and_three_are_refused() -> None:
    """Replicas of different make need two node types, and a plan says what both of them recompute."""
    third = (*problem().other_hardware, NodeGroup(hardware=A100, num_gpus=8))
    for wrong in (
        problem().model_copy(update={"other_hardware": third}),
        problem().model_copy(update={"other_hardware": ()}),
    ):
        job = wrong.job.model_copy(update={"num_gpus": 24})
        with pytest.raises(IllegalPlanError, match="two node types"):
            simulate(wrong.model_copy(update={"job": job}), plan(layout()))
    with pytest.raises(ValueError, match="other_recompute"):
        Plan(layout=layout(), virtual_stages=plan(layout()).virtual_stages)
    with pytest.raises(ValueError, match="other_recompute"):
        plan(layout(), Recompute(full=9))


def test_time_lines_are_of_replicas_alike() -> None:
    """A time line of memory is of one pipeline: refused, with what to do."""
    with pytest.raises(IllegalPlanError, match="replicas of different make"):
        memory_timelines(problem(), plan(layout()))
