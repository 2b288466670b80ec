"""Costs in a cluster of two node types: every rank has its own type's, what passes between has the slower."""

from __future__ import annotations

import numpy as np
import pytest

from milpplan import Layout, Plan, VirtualStage, load_hardware, load_model, simulate
from milpplan.errors import IllegalPlanError
from milpplan.problem import HardwareSpec, HostMemory, Job, NodeGroup, Problem, SizeCurve, order_code, order_of
from milpplan.simulation import LayoutColumns, costs_of, plan_stages, rank_capacities, rank_types, step_overhead_ns
from milpplan.simulation.layout_costs import layout_costs
from milpplan.simulation.network.collectives import all_gather_s
from milpplan.simulation.pipeline.step_graph import Term

A100, H100 = load_hardware("dgx-a100-80"), load_hardware("dgx-h100")
MODEL = load_model("llama3-8b")
JOB = Job(num_gpus=32, global_batch_size=16, sequence_length=4096)
PROBLEM = Problem(model=MODEL, hardware=A100, job=JOB, other_hardware=(NodeGroup(hardware=H100, num_gpus=8),))


def layout(**changes: object) -> Layout:
    """Four ranks of eight GPUs: three of A100 and one of H100, which comes first."""
    values = {"tp": 8, "pp": 4, "global_batch_size": 16, "node_order": (1, 0)} | changes
    return Layout.model_validate(values)


def plan(of: Layout) -> Plan:
    """32 layers, as many in every virtual stage."""
    each = 32 // of.num_virtual_stages
    stages = [VirtualStage(layers=(j * each, j * each + each)) for j in range(of.num_virtual_stages)]
    return Plan(layout=of, virtual_stages=tuple(stages))


def test_orders_have_codes() -> None:
    """An order and its code stand for each other; the code of no order is 0."""
    for order in ((), (0, 1), (1, 0), (2, 0, 1), (3, 2, 1, 0)):
        assert order_of(order_code(order)) == order
    assert order_code(()) == 0
    with pytest.raises(ValueError, match="every node type once"):
        Layout(global_batch_size=1, node_order=(1, 1))


def test_ranks_have_their_types_constants() -> None:
    """The layers of a rank take what they take in a cluster of its type alone."""
    assert rank_types(PROBLEM, layout()) == (1, 0, 0, 0)
    assert rank_types(PROBLEM, layout(node_order=(0, 1))) == (0, 0, 0, 1)
    costs = costs_of(PROBLEM, layout())
    for rank, hardware in enumerate((H100, A100, A100, A100)):
        alone = Problem(model=MODEL, hardware=hardware, job=JOB)
        expected = layout_costs(alone, LayoutColumns.of([layout(node_order=())])).at(0)
        found = costs.of_rank(rank)
        for name in ("duration_ns", "reduce_ns", "gather_ns", "optimizer_ns", "state_bytes", "kept_bytes"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        assert rank_capacities(PROBLEM, layout())[rank] == hardware.capacity_bytes()


def test_what_passes_between_types_takes_the_slower() -> None:
    """Eight GPUs a rank: every transfer leaves the node, 2 * 4096 * 4096 bytes at the slower network of the two
    ends; the norm of the gradients takes what it takes where all GPUs are of the slower type."""
    costs = costs_of(PROBLEM, layout())
    each = {}
    for name, hardware in (("a100", A100), ("h100", H100)):
        out = hardware.scale_out
        seconds = 2 * 4096 * 4096 / (out.bandwidth_bytes_per_s * out.efficiency) + out.p2p_latency_s
        each[name] = round(seconds * 1e9)
    borders = [int(costs.transfer_ns) + costs.crossing_ns(stage) for stage in range(3)]
    assert borders == [max(each.values()), each["a100"], each["a100"]]
    alone = [
        int(
            layout_costs(Problem(model=MODEL, hardware=hw, job=JOB), LayoutColumns.of([layout()])).at(0).barrier_ns
        )
        for hw in (A100, H100)
    ]
    assert int(costs.barrier_ns) == max(alone)


def test_types_share_no_domain() -> None:
    """Two GPUs of one node are near; two of different types are not, however few GPUs a rank has."""
    problem = PROBLEM.model_copy(update={"job": JOB.model_copy(update={"num_gpus": 4})})
    small = problem.model_copy(update={"other_hardware": (NodeGroup(hardware=H100, num_gpus=2),)})
    costs = costs_of(small, layout(tp=1))
    outside = H100.scale_out
    least_ns = 2 * 4096 * 4096 / (outside.bandwidth_bytes_per_s * outside.efficiency) * 1e9
    inside = [int(costs.transfer_ns) + costs.crossing_ns(stage) for stage in (0, 2)]
    assert int(costs.transfer_ns) + costs.crossing_ns(1) >= least_ns > 3 * max(inside)


def test_a_step_on_two_types() -> None:
    """The same split takes longer than on H100 alone and no longer than on A100 alone, each stage says where it
    is, and utilisation counts the peak of both."""
    mixed = simulate(PROBLEM, plan(layout()))
    times = [
        simulate(Problem(model=MODEL, hardware=hardware, job=JOB), plan(layout(node_order=())))
        for hardware in (A100, H100)
    ]
    assert times[1].step_time_ns < mixed.step_time_ns <= times[0].step_time_ns
    assert [stage.node_type for stage in mixed.stages] == [H100.name, A100.name, A100.name, A100.name]
    peak = 24 * A100.accelerator.bf16.peak_flops_per_s + 8 * H100.accelerator.bf16.peak_flops_per_s
    flops = times[0].mfu * 32 * A100.accelerator.bf16.peak_flops_per_s / times[0].tokens_per_s
    assert mixed.mfu == pytest.approx(flops * mixed.tokens_per_s / peak)
    for stage in mixed.stages:
        assert sum(stage.breakdown_s.values()) == pytest.approx(mixed.step_time_s)
        assert stage.breakdown_s["bubble"] >= 0


def test_forwards_alone_fill_and_drain_across_the_border() -> None:
    """The step of inference is that of running the forwards one by one, each transfer as long as its border's."""
    problem = PROBLEM.model_copy(update={"job": JOB.model_copy(update={"kind": "inference"})})
    for order in ((0, 1), (1, 0)):
        drawn = plan(layout(schedule="gpipe", node_order=order))
        costs = costs_of(problem, drawn.layout)
        done = [0] * 4
        for _ in range(drawn.layout.num_micro_batches):
            arrival = 0
            for rank, stage in enumerate(plan_stages(costs, MODEL.layer_kinds, drawn)):
                done[rank] = max(done[rank], arrival) + int(stage.terms[Term.FORWARD, 0])
                arrival = done[rank] + int(costs.transfer_ns) + costs.crossing_ns(rank)
        report = simulate(problem, drawn)
        assert report.step_time_ns == done[-1] + step_overhead_ns(problem)
        assert all(stage.breakdown_s["grad_norm"] == 0 for stage in report.stages)


def test_parts_of_activations_are_gathered_on_the_slower_type() -> None:
    """Across the border each of eight ranks sends an eighth, and the eight are gathered in a domain."""
    whole, parts = (costs_of(PROBLEM, layout(pp_scatter_gather=on)) for on in (False, True))
    message, expected = 2 * 4096 * 4096, []
    for hardware in (A100, H100):
        out = hardware.scale_out
        sent = message / 8 / (out.bandwidth_bytes_per_s * out.efficiency) + out.p2p_latency_s
        expected.append(sent + float(all_gather_s(hardware, message, 8, 1)))
    assert int(parts.transfer_ns) + parts.crossing_ns(0) == round(max(expected) * 1e9)
    assert int(parts.transfer_ns) < int(whole.transfer_ns)


def test_what_a_host_holds_is_its_types() -> None:
    """A plan that offloads fits where the host of every rank holds enough, each its own type's."""

    def hosted(hardware: HardwareSpec, size: int) -> HardwareSpec:
        curve = SizeCurve(size=(1e4, 1e6), value=(0.3, 0.9))
        host = HostMemory(capacity_bytes=size, bandwidth_bytes_per_s=2e10, efficiency=curve)
        return hardware.model_copy(update={"host_memory": host})

    drawn = plan(layout(offload_optimizer=True))
    for sizes, fits in (((2**40, 2**40), True), ((2**40, 2**20), False), ((2**20, 2**40), False)):
        others = (NodeGroup(hardware=hosted(H100, sizes[1]), num_gpus=8),)
        problem = PROBLEM.model_copy(update={"hardware": hosted(A100, sizes[0]), "other_hardware": others})
        report = simulate(problem, drawn)
        assert report.fits == fits
        assert report.host_capacity_bytes == min(sizes)
        assert (report.host_memory_bytes <= report.host_capacity_bytes) == fits
    without = PROBLEM.model_copy(update={"hardware": A100.model_copy(update={"host_memory": None})})
    with pytest.raises(IllegalPlanError, match=f"{A100.name} has no"):
        simulate(without, drawn)


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"rank_order": "pp-tp-cp-dp"}, "rank_order=pp-tp-cp-dp"),
        ({"node_order": ()}, "node_order="),
        ({"node_order": (0,)}, "node_order="),
        ({"tp": 8, "pp": 2, "dp": 2}, "pp=2 ranks of 16 GPUs"),
    ],
)
def test_plans_that_do_not_fit_the_cluster_are_refused(changes: dict[str, object], seen: str) -> None:
    """An order of other types, or ranks on two types, is no plan for the cluster."""
    with pytest.raises(IllegalPlanError, match=seen):
        simulate(PROBLEM, plan(layout(**changes)))


@pytest.mark.parametrize(
    ("gpus", "match"), [(32, "one number above that"), (33, "one number above that"), (40, "node type")]
)
def test_problems_that_make_no_sense_are_refused(gpus: int, match: str) -> None:
    """More GPUs of the other types than there are, and orders of other types."""
    space = {"node_order": ((0, 1, 2),)} if gpus == 40 else {}
    values = PROBLEM.model_dump() | {"space": space}
    values["other_hardware"] = [{"hardware": H100.model_dump(), "num_gpus": gpus - 7 if gpus == 40 else gpus}]
    with pytest.raises(ValueError, match=match):
        Problem.model_validate(values | {"job": JOB.model_copy(update={"num_gpus": max(32, gpus)}).model_dump()})
