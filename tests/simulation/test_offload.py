"""Offloading to the host: its transfers, what they hide behind, and what stays on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.problem import (
    SPLIT_SCHEDULES,
    HardwareSpec,
    HostMemory,
    Layout,
    Plan,
    Problem,
    Recompute,
    SizeCurve,
    VirtualStage,
)
from milpplan.simulation import LayoutColumns, LayoutCosts, plan_stages, simulate
from milpplan.simulation.layers import Phase
from milpplan.simulation.layout_costs import beside, host_transfer_s, layout_costs
from tests.amounts import long_but
from tests.simulation.cases import even_plan, problem_of, random_cases, shipped_hardware

SWITCHES = ("offload_weights", "offload_activations", "offload_optimizer")
ALL: dict[str, Any] = dict.fromkeys(SWITCHES, True)


def with_host(hardware: str, bandwidth: float, capacity: int = 10**13) -> HardwareSpec:
    """A cluster whose hosts reach their bandwidth with every transfer."""
    host = HostMemory(
        capacity_bytes=capacity, bandwidth_bytes_per_s=bandwidth, efficiency=SizeCurve(size=(1.0,), value=(1.0,))
    )
    return shipped_hardware(hardware).model_copy(update={"host_memory": host})


def costs_of(problem: Problem, **fields: Any) -> LayoutCosts:
    """Constants of one layout."""
    layout = Layout(**({"global_batch_size": 64} | fields))
    return layout_costs(problem, LayoutColumns.of([layout])).at(0)


def test_transfer_by_hand() -> None:
    """A GB at half of 20 GB/s takes 0.1 s; nothing takes no time; between two sizes the share is interpolated in
    the logarithm."""
    curve = SizeCurve(size=(1e6, 1e8), value=(0.1, 0.5))
    host = HostMemory(capacity_bytes=1, bandwidth_bytes_per_s=20e9, efficiency=curve)
    hardware = shipped_hardware("dgx-h100").model_copy(update={"host_memory": host})
    assert float(host_transfer_s(hardware, 1e9)) == pytest.approx(0.1)
    assert host_transfer_s(hardware, np.array([0.0, 1e7])) == pytest.approx([0.0, 1e7 / (20e9 * 0.3)])


def test_no_host_no_transfer() -> None:
    """Hardware without a second tier refuses a plan that needs one, and says what is missing."""
    hardware = shipped_hardware("dgx-h100").model_copy(update={"host_memory": None})
    problem = problem_of("llama3-8b", hardware)
    with pytest.raises(InvalidInputError, match=r"host_memory"):
        host_transfer_s(hardware, 1.0)
    plan = even_plan(problem, Layout(global_batch_size=1, offload_weights=True))
    with pytest.raises(IllegalPlanError, match=r"no \[host_memory\]"):
        simulate(problem, plan)


def test_beside_by_hand() -> None:
    """7 ns beside 5 expose 2, beside 9 none; both parts are the whole."""
    assert beside(np.array([7, 7]), np.array([5, 9])).tolist() == [[2, 0], [5, 7]]


def test_layer_by_hand() -> None:
    """Llama-3 8B on a slow link (1 GB/s): the forward takes the longer of weights in and activations out, the
    backward both in, under every recompute mode; nothing else changes."""
    problem = problem_of("llama3-8b", with_host("dgx-h100", 1e9))
    plain, moved = costs_of(problem), costs_of(problem, **ALL)
    weights = int(plain.state_bytes[0, 0])
    kept = [int(plain.kept_bytes[0]) - dropped for dropped in (0, *_dropped(plain))]
    assert moved.host_kept_bytes[:, 0].tolist() == kept
    assert moved.duration_ns[0, Phase.FORWARD] == max(weights, kept[0])
    assert moved.duration_ns[0, Phase.BACKWARD] == weights + kept[0]
    for place, phase in ((1, Phase.SELECTIVE), (2, Phase.FULL)):
        work = plain.duration_ns[0, Phase.BACKWARD] + plain.duration_ns[0, phase]
        found = moved.duration_ns[0, Phase.BACKWARD] + moved.duration_ns[0, phase]
        assert found == max(work, weights + kept[place])
        forward = moved.duration_ns[0, Phase.FORWARD] + moved.replayed_forward_ns[place - 1, 0]
        assert forward == max(plain.duration_ns[0, Phase.FORWARD], weights, kept[place])
    states = int(plain.state_bytes[2, 0])
    assert moved.optimizer_ns[0] == states + weights
    assert moved.optimizer_ns[-1] == plain.state_bytes[2, -1]
    assert np.array_equal(moved.edge_ns, plain.edge_ns)
    assert np.array_equal(moved.embedding_ns, plain.embedding_ns)
    assert np.array_equal(moved.parts.layer, plain.parts.layer)


def _dropped(costs: LayoutCosts) -> tuple[int, int]:
    return int(costs.dropped_selective_bytes[0]), int(costs.dropped_full_bytes[0])


def test_fast_link_hides_everything() -> None:
    """A link without limit costs nothing: the same step, and less memory."""
    problem = problem_of("llama3-8b", with_host("dgx-h100", 1e18))
    layouts = [Layout(dp=2, pp=2, global_batch_size=16, **switches) for switches in ({}, ALL)]
    before, after = (simulate(problem, even_plan(problem, layout, full=1)) for layout in layouts)
    assert after.step_time_ns == before.step_time_ns
    assert after.breakdown_s == before.breakdown_s
    assert after.peak_memory_bytes < 0.5 * before.peak_memory_bytes


def test_bytes_move_from_device_to_host() -> None:
    """What leaves the device is on the host: states once, activations of the live micro-batches; the device keeps
    those of two layers (one, where a stage has one), gradients and the ends."""
    problem = problem_of("llama3-8b", "dgx-h100")
    base = {"pp": 4, "global_batch_size": 8}
    plan = even_plan(problem, Layout(**base))
    before = simulate(problem, plan).stages[0].memory
    plain = costs_of(problem, **base)
    weights, optimizer = int(plain.state_bytes[0, 0]), int(plain.state_bytes[2, 0])
    moved = _moved(problem, plan, "offload_weights").stages[0].memory
    assert moved.host_bytes == 8 * weights
    assert moved.weights_bytes == before.weights_bytes - 8 * weights
    assert moved.transient_bytes == before.transient_bytes + 2 * weights
    moved = _moved(problem, plan, "offload_optimizer").stages[0].memory
    assert moved.host_bytes == before.optimizer_bytes == 8 * optimizer + plain.state_bytes[2, -2]
    assert moved.optimizer_bytes == 0
    assert moved.transient_bytes == max(before.transient_bytes, optimizer + plain.state_bytes[2, -2])
    moved = _moved(problem, plan, "offload_activations").stages[0].memory
    kept = int(plain.kept_bytes[0])
    assert moved.host_bytes == 4 * 8 * kept
    assert moved.activations_bytes == before.activations_bytes - 4 * 8 * kept
    assert moved.transient_bytes == before.transient_bytes + 2 * kept


def _moved(problem: Problem, plan: Plan, *names: str) -> Any:
    layout = plan.layout.model_copy(update=dict.fromkeys(names, True))
    return simulate(problem, plan.model_copy(update={"layout": layout}))


@pytest.mark.parametrize("count", long_but((4,), (4, 8)))
def test_random_plans_keep_what_must_hold(count: int) -> None:
    """Offloading never raises a rank's memory and never shortens a step; host and device together hold no less
    than before; parts of the step add up, and something is moved where something is on the host."""
    for problem, plan in random_cases(5, count):
        if plan.layout.schedule in SPLIT_SCHEDULES:
            with pytest.raises(IllegalPlanError, match="do not split the backward"):
                _moved(problem, plan, SWITCHES[0])
            continue
        before = simulate(problem, plan)
        for names in (SWITCHES, *((name,) for name in SWITCHES)):
            after = _moved(problem, plan, *names)
            assert after.step_time_ns >= before.step_time_ns
            for old, new in zip(before.stages, after.stages, strict=True):
                assert new.memory.peak_bytes <= old.memory.peak_bytes
                assert new.memory.peak_bytes + new.memory.host_bytes >= old.memory.peak_bytes
                total = sum(round(seconds * 1e9) for seconds in new.breakdown_s.values())
                assert total == pytest.approx(after.step_time_ns, abs=len(new.breakdown_s))
                assert min(new.breakdown_s.values()) >= 0
                moved = new.breakdown_s["offload_exposed"] + new.hidden_s["offload_hidden"]
                assert (moved > 0) == (new.memory.host_bytes > 0)


def test_costs_are_affine_in_recompute_counts() -> None:
    """A stage's forward and backward are sums over its layers, each by its own mode, also where transfers bind."""
    problem = problem_of("llama3-8b", with_host("dgx-h100", 5e9))
    layout = Layout(global_batch_size=1, **ALL)
    costs = costs_of(problem, **ALL)
    stages = [
        VirtualStage(layers=(0, 32), recompute=Recompute(full=full, selective=selective))
        for full, selective in ((0, 0), (1, 0), (0, 1), (3, 5))
    ]
    plans = [Plan(layout=layout, virtual_stages=(stage,)) for stage in stages]
    terms = [plan_stages(costs, problem.model.layer_kinds, plan)[0].terms[:2, 0] for plan in plans]
    full, selective = terms[1] - terms[0], terms[2] - terms[0]
    assert (terms[3] - terms[0]).tolist() == (3 * full + 5 * selective).tolist()
    assert full[0] < 0


def test_host_memory_binds() -> None:
    """A plan that fits the device but not the host does not fit, and the report says which."""
    problem = problem_of("llama3-8b", with_host("dgx-h100", 1e10, capacity=10**9))
    plan = even_plan(problem, Layout(dp=8, global_batch_size=8, zero_stage=1), full=32)
    assert simulate(problem, plan).fits
    moved = _moved(problem, plan, "offload_weights")
    assert moved.peak_memory_bytes < moved.usable_memory_bytes
    assert moved.host_memory_bytes == 32 * costs_of(problem).state_bytes[0, 0] > moved.host_capacity_bytes == 10**9
    assert not moved.fits
    assert moved.memory_verdict == "does_not_fit"
