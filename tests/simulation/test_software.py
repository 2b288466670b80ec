"""What a framework adds to the hardware: launches, a step's overhead, collectives beside the backward or not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milpplan import HardwareSpec, Job, Plan, Problem, Space, load_model, simulate
from milpplan.optimize.bounds import uniform_plan
from milpplan.problem import Layout, Software
from milpplan.simulation import LayoutColumns, stage_options
from milpplan.simulation.layers import EXPOSED, Part, Phase, layer_parameters, layer_seconds, padded_vocab_size
from milpplan.simulation.layout_costs import layout_costs
from milpplan.simulation.pipeline.step_graph import Term
from tests.amounts import few_or_many
from tests.simulation.cases import shipped_hardware, shipped_model

LAYOUT = Layout(
    tp=4,
    cp=1,
    ep=1,
    etp=1,
    pp=2,
    dp=2,
    vpp=1,
    micro_batch_size=1,
    global_batch_size=32,
    sequence_parallel=True,
    zero_stage=1,
    schedule="1f1b",
    overlap_grad_reduce=True,
    overlap_param_gather=True,
)


def problem(**software: float | bool) -> Problem:
    """Llama-3 8B on 16 GPUs of a DGX H100 with a framework's constants."""
    plain = shipped_hardware("dgx-h100")
    hardware = HardwareSpec.model_validate(plain.model_dump() | {"software": Software(**software)})
    job = Job(num_gpus=16, global_batch_size=32, sequence_length=8192)
    return Problem(model=shipped_model("llama3-8b"), hardware=hardware, job=job, space=Space())


def plan(mode: str = "none") -> Plan:
    """Equal stages."""
    return uniform_plan(problem(), LAYOUT, mode)


def test_defaults_add_nothing() -> None:
    """Without a framework's constants nothing is launched late and a step has no overhead."""
    report = simulate(problem(), plan())
    assert report.breakdown_s["launch"] == report.breakdown_s["step_overhead"] == 0.0


def test_overhead_is_added_once_a_step() -> None:
    """A second of overhead makes the step a second longer."""
    plain, slow = simulate(problem(), plan()), simulate(problem(step_overhead_s=1.0), plan())
    assert slow.step_time_ns - plain.step_time_ns == 1_000_000_000
    assert slow.breakdown_s["step_overhead"] == 1.0


@few_or_many(15, 40, st.floats(0.0, 0.1))
def test_launches_are_a_floor(launch_s: float) -> None:
    """A layer takes what its kernels take, or their launches if those take longer: twice in the backward."""
    columns = LayoutColumns.of([LAYOUT])
    kind = problem().model.kinds[0]
    plain = layer_seconds(problem(), kind, columns)[EXPOSED].sum(axis=0)
    slow = layer_seconds(problem(layer_launch_s=launch_s), kind, columns)
    took = slow[EXPOSED].sum(axis=0)
    for phase, launches in ((Phase.FORWARD, 1), (Phase.BACKWARD, 2)):
        assert took[phase, 0] == pytest.approx(max(plain[phase, 0], launches * launch_s))
    assert (slow[Part.LAUNCH] >= 0).all()


@few_or_many(15, 40, st.floats(0.0, 1e-2), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_calls_of_collectives_are_launches(rank_s: float, tp: int, sequence_parallel: bool) -> None:
    """A layer has two pairs of linears. With sequence parallelism a pair calls 2 collectives forward and 3
    backward, without it 1 and 1, each of them tp - 1 times the host time of a rank, so none on one rank."""
    layout = LAYOUT.model_copy(update={"tp": tp, "dp": 8 // tp, "sequence_parallel": sequence_parallel and tp > 1})
    columns = LayoutColumns.of([layout])
    kind = problem().model.kinds[0]
    plain = layer_seconds(problem(), kind, columns)[EXPOSED].sum(axis=0)
    slow = layer_seconds(problem(collective_rank_s=rank_s), kind, columns)[EXPOSED].sum(axis=0)
    calls = (4, 6) if layout.sequence_parallel else (2, 2)
    for phase, number in zip((Phase.FORWARD, Phase.BACKWARD), calls, strict=True):
        host = rank_s * number * (tp - 1)
        assert slow[phase, 0] == pytest.approx(max(plain[phase, 0], host))


def test_experts_call_their_groups() -> None:
    """Dispatch and combination are a call each among the ep ranks, 7 others, forward and backward."""
    model = load_model("mixtral-8x7b")
    asked = [
        problem(**software).model_copy(update={"model": model})
        for software in ({"layer_launch_s": 1.0}, {"layer_launch_s": 1.0, "collective_rank_s": 1.0})
    ]
    layout = LAYOUT.model_copy(update={"tp": 1, "dp": 8, "ep": 8, "sequence_parallel": False})
    columns = LayoutColumns.of([layout])
    plain, slow = (layer_seconds(one, model.kinds[0], columns)[EXPOSED].sum(axis=0) for one in asked)
    assert slow[Phase.FORWARD, 0] - plain[Phase.FORWARD, 0] == pytest.approx(14.0)
    assert slow[Phase.BACKWARD, 0] - plain[Phase.BACKWARD, 0] == pytest.approx(14.0)


@given(st.floats(0.0, 1e-3), st.floats(0.0, 1e-3), st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_stages_stay_sums_over_layers(launch_s: float, rank_s: float, micro_batch: int) -> None:
    """Whatever the launches, a stage of 2 n layers takes twice what its n layers take: the integer program's
    durations are affine in the layers."""
    asked = problem(layer_launch_s=launch_s, collective_rank_s=rank_s)
    layout = LAYOUT.model_copy(update={"micro_batch_size": micro_batch})
    costs = layout_costs(asked, LayoutColumns.of([layout])).at(0)

    def forward_ns(layers: int) -> int:
        none = np.zeros(1, dtype=np.int64)
        options = stage_options(costs, [0] * layers, none, none, is_first=False, is_last=False)
        return int(options.terms[Term.FORWARD, 0])

    assert forward_ns(8) == 2 * forward_ns(4) == 8 * forward_ns(1)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_breakdown_adds_up_where_launches_bind(mode: str) -> None:
    """Launches of 20 ms a layer: the parts still sum to the step time."""
    report = simulate(problem(layer_launch_s=0.02, step_overhead_s=0.3), plan(mode))
    assert report.breakdown_s["launch"] > 0
    assert sum(report.breakdown_s.values()) == pytest.approx(report.step_time_s, abs=1e-9)


def test_collectives_beside_nothing_take_longer() -> None:
    """A framework that does not overlap the backward's collectives exposes what others hide."""
    beside, alone = simulate(problem(), plan()), simulate(problem(overlap_tensor_parallel=False), plan())
    assert alone.breakdown_s["tp_exposed"] > beside.breakdown_s["tp_exposed"]
    assert alone.step_time_s > beside.step_time_s


@pytest.mark.parametrize("name", ["llama3-8b", "deepseek-v3"])
def test_dummy_weight_gradients_are_one_layer_in_bf16(name: str) -> None:
    """The buffers hold the weights of one layer and of one expert in two bytes; sharded weights need none."""
    model = load_model(name)
    asked = problem().model_copy(update={"model": model})
    without = problem(dummy_weight_gradients=False).model_copy(update={"model": model})
    counts = [(layer_parameters(model, kind), getattr(kind.mlp, "num_experts", 1)) for kind in model.kinds]
    layer = max(count.total - count.experts + count.experts // experts for count, experts in counts)
    for zero_stage, expected in ((1, 2 * layer), (3, 0)):
        columns = LayoutColumns.of([LAYOUT.model_copy(update={"tp": 1, "dp": 8, "zero_stage": zero_stage})])
        with_them = layout_costs(asked, columns).at(0).buffer_bytes
        added = int(with_them - layout_costs(without, columns).at(0).buffer_bytes)
        assert added == pytest.approx(expected, rel=1e-3)


def test_logits_of_the_whole_vocabulary() -> None:
    """A rank that gathers the logits keeps tp times as many; a loss that copies keeps more bytes of each."""
    columns = LayoutColumns.of([LAYOUT])
    plain, gathered, copied = (
        int(layout_costs(problem(**software), columns).at(0).head_kept_bytes)
        for software in ({}, {"gathered_logits": True}, {"logit_kept_bytes": 20.0})
    )
    logits = 8192 * padded_vocab_size(problem().model.vocab_size, LAYOUT.tp) // LAYOUT.tp
    assert gathered - plain == 4 * (LAYOUT.tp - 1) * logits
    assert copied - plain == 16 * logits


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_pipeline_waits_for_messages(stages: int) -> None:
    """A message takes both hosts their time. With p micro-batches in flight that pass 2 (p - 1) transfers each, m
    micro-batches wait m / p times for these where messages take much longer than work, and no more than a few of
    them are not hidden behind others; without a pipeline nobody waits."""
    layout = LAYOUT.model_copy(update={"pp": stages, "dp": 4 // stages})
    step_s = {}
    for message_s in (0.0, 10.0):
        asked = problem(message_s=message_s)
        step_s[message_s] = simulate(asked, uniform_plan(asked, layout, "none")).step_time_s
    waits = layout.num_micro_batches / stages * 2 * (stages - 1)
    assert waits - 0.1 <= (step_s[10.0] - step_s[0.0]) / (2 * 10.0) <= waits + stages * (stages > 1)
