"""What every switch of Calculon's executions does to time and bytes, worked out from its files.

A layer of tests/data/calculon has h = 4096, f = 4 h, 32 heads and 2048 tokens a sequence; two sequences a
micro-batch, t = 8, and network 0 gathers at 250 GB/s * 0.8 / 1.25.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from milpplan import simulate
from milpplan.problem.calculon import translation
from milpplan.problem.calculon.translation import calculon_run
from milpplan.simulation import LayoutColumns, LayoutCosts, StepReport
from milpplan.simulation.layers import Part, Phase, total_parameters
from milpplan.simulation.layout_costs import host_transfer_s, layout_costs
from milpplan.simulation.network import collectives
from tests.problem.test_calculon import files, tree

TOKENS, H, T = 2 * 2048, 4096, 8
STREAM = 2 * TOKENS * H
"""Bytes of a micro-batch's activations between layers."""
OFFLOADS = ("weight_offload", "activations_offload", "optimizer_offload")
PLAIN = {"pipeline_interleaving": 1, "data_par_overlap": False, "seq_par_ag_redo": False}


def costs(system: dict[str, Any] | None = None, **execution: Any) -> LayoutCosts:
    """Constants of an execution."""
    problem, plan = calculon_run(files(system, **PLAIN | execution))
    return layout_costs(problem, LayoutColumns.of([plan.layout])).at(0)


def step(system: dict[str, Any] | None = None, **execution: Any) -> StepReport:
    """The step of an execution."""
    return simulate(*calculon_run(files(system, **PLAIN | execution)))


def part(found: LayoutCosts, which: Part, phase: Phase) -> int:
    """Nanoseconds of a part of one layer."""
    return int(found.parts.layer[0, which, phase])


def networks(*changes: dict[str, Any]) -> dict[str, Any]:
    """The system's networks with changes, from the first on."""
    given = tree("system")["networks"]
    return {"networks": [one | change for one, change in itertools.zip_longest(given, changes, fillvalue={})]}


def gather_ns(num_bytes: float) -> float:
    """An all-gather among 8 processors of network 0."""
    return 1e9 * (10e-6 + 1.25 * num_bytes * (1 - 1 / T) / 200e9)


def scatter_ns(num_bytes: float) -> float:
    """A reduce-scatter there, whose factor is 1.5."""
    return 1e9 * (10e-6 + 1.5 * num_bytes * (1 - 1 / T) / 200e9)


def test_redo_adds_one_gather_to_every_product_that_shares_its_input() -> None:
    """Backwards gather the inputs of attention and MLP again: 2 all-gathers of 2 s b h bytes; forwards nothing."""
    kept, again = costs(), costs(seq_par_ag_redo=True)
    added = part(again, Part.TP, Phase.BACKWARD) - part(kept, Part.TP, Phase.BACKWARD)
    assert added == pytest.approx(2 * gather_ns(STREAM), rel=0.01)
    assert part(again, Part.TP, Phase.FORWARD) == part(kept, Part.TP, Phase.FORWARD)
    assert kept.kept_bytes[0] - again.kept_bytes[0] == 2 * STREAM * (1 - 1 / T)


def test_communication_of_the_three_types() -> None:
    """A forward has two all-reduces, or as many gathers and scatters; p2p_rs_ag has the all-reduces, an eighth in
    every transfer between stages, and a gather after it."""
    ar, rs_ag, p2p = (costs(tensor_par_comm_type=kind) for kind in ("ar", "rs_ag", "p2p_rs_ag"))
    all_reduce = 1e9 * (10e-6 + 2 * STREAM * (1 - 1 / T) / 200e9)
    assert part(ar, Part.TP, Phase.FORWARD) == pytest.approx(2 * all_reduce, rel=0.01)
    both = 2 * (gather_ns(STREAM) + scatter_ns(STREAM))
    assert part(rs_ag, Part.TP, Phase.FORWARD) == pytest.approx(both, rel=0.01)
    assert part(p2p, Part.TP, Phase.FORWARD) == part(ar, Part.TP, Phase.FORWARD)

    def transfer(num_bytes: float) -> float:
        return 1e9 * (num_bytes / 22.5e9 + 20e-6)

    assert int(ar.transfer_ns) == pytest.approx(transfer(STREAM), abs=1)
    assert int(rs_ag.transfer_ns) == pytest.approx(transfer(STREAM / T), abs=1)
    assert int(p2p.transfer_ns) == pytest.approx(transfer(STREAM / T) + gather_ns(STREAM), rel=0.01)
    assert rs_ag.kept_bytes[0] < p2p.kept_bytes[0] == ar.kept_bytes[0]


def test_tiles_hide_at_most_their_product() -> None:
    """none exposes all. A ring hides no more than the collective, and no more of it than 7 of 8 tiles of the
    product; a pipelined collective exposes an eighth at least. The hidden and the exposed part are the whole."""
    free = networks({"processor_usage": 0.0}, {"processor_usage": 0.0})
    none, ring, pipe = (costs(free, tensor_par_overlap=kind) for kind in ("none", "ring", "pipe"))
    whole = part(none, Part.TP, Phase.FORWARD)
    assert part(none, Part.TP_HIDDEN, Phase.FORWARD) == 0
    for found in (ring, pipe):
        hidden, exposed = (part(found, which, Phase.FORWARD) for which in (Part.TP_HIDDEN, Part.TP))
        assert hidden + exposed == pytest.approx(whole, abs=4)
        assert 0 < hidden <= 7 / 8 * part(found, Part.COMPUTE, Phase.FORWARD)
    assert part(pipe, Part.TP, Phase.FORWARD) >= whole / 8 - 4
    assert part(ring, Part.TP, Phase.FORWARD) < part(pipe, Part.TP, Phase.FORWARD) < whole


@pytest.mark.parametrize("usage", [0.15, 0.5])
def test_the_processors_share_slows_what_it_runs_beside(usage: float) -> None:
    """While a tile is on network 0 it takes a share of the processor from the product beside it: exposed time
    grows by that share of what is hidden. Without tiles nothing is beside, and nothing slows."""
    free, busy = ({"processor_usage": share} for share in (0.0, usage))
    idle, taken = (costs(networks(one), tensor_par_overlap="ring") for one in (free, busy))
    hidden = part(idle, Part.TP_HIDDEN, Phase.FORWARD)
    added = part(taken, Part.TP, Phase.FORWARD) - part(idle, Part.TP, Phase.FORWARD)
    assert added == pytest.approx(usage * hidden, abs=4)
    assert step(networks(busy)).step_time_ns == step(networks(free)).step_time_ns


def test_reduction_in_the_network_sends_a_message_once() -> None:
    """Between four replicas in as many domains a ring sends 2 * 3/4 of the gradients, switches that add up (a
    factor of 1 for all ranks) send them once; nothing else changes. On network 0 the factor is taken as it is."""
    four = {"num_procs": 64, "data_par": 4, "optimizer_sharding": False}
    ring = networks({}, {"ops": tree("system")["networks"][1]["ops"] | {"all_reduce": [2.0, -1]}})
    once, twice = costs(**four), costs(ring, **four)
    assert int(twice.reduce_ns[0]) / int(once.reduce_ns[0]) == pytest.approx(1.5, rel=0.01)
    assert np.array_equal(once.parts.layer, twice.parts.layer)
    assert once.transfer_ns == twice.transfer_ns
    assert step(ring, **four).step_time_ns > step(**four).step_time_ns
    inside = networks({"ops": tree("system")["networks"][0]["ops"] | {"all_reduce": [1.0, 0]}})
    less = part(costs(inside, tensor_par_comm_type="ar"), Part.TP, Phase.FORWARD)
    assert less == pytest.approx(2e9 * (10e-6 + STREAM / 200e9), rel=0.01)


@pytest.mark.parametrize("chosen", [s for n in (1, 2, 3) for s in itertools.combinations(OFFLOADS, n)])
def test_offloads_alone_and_together(chosen: tuple[str, ...]) -> None:
    """The host holds exactly what each says, of 12 layers on stage 0: 2 bytes a weight, 12 / 2 of the optimizer
    (both with the embedding's states where it moves them), and what two micro-batches in flight keep. The device
    holds that much less but for two layers at work, and no step is shorter."""
    plain, moved = step(), step(**dict.fromkeys(chosen, True))
    constants = costs()
    weights, states = (int(constants.state_bytes[row, 0]) for row in (0, 2))
    kept = int(constants.kept_bytes[0] - constants.dropped_selective_bytes[0])
    held = {
        "weight_offload": 12 * weights,
        "activations_offload": 2 * 12 * kept,
        "optimizer_offload": 12 * states + int(constants.state_bytes[2, -2]),
    }
    expected = sum(held[name] for name in chosen)
    before, after = plain.stages[0].memory, moved.stages[0].memory
    assert after.host_bytes == expected
    staged = 2 * weights + 2 * kept + states + int(constants.state_bytes[2, -2])
    assert before.peak_bytes - expected <= after.peak_bytes <= before.peak_bytes - expected + staged
    assert moved.step_time_ns >= plain.step_time_ns


def test_the_second_tiers_efficiency_is_its_steps() -> None:
    """32 GB/s at 0.3 below 1 MB, at 0.7 up to 100 MB, at 0.95 from there on."""
    hardware = calculon_run(files())[0].hardware
    for size, efficiency in ((0.5e6, 0.3), (50e6, 0.7), (200e6, 0.95)):
        assert float(host_transfer_s(hardware, size)) == pytest.approx(size / (32e9 * efficiency))


def test_the_second_tiers_bandwidth_binds() -> None:
    """At a hundredth of the rate transfers are the step, and at a thousandth it is ten times that."""
    mem2 = tree("system")["mem2"]
    slow, slower = (step({"mem2": mem2 | {"GBps": rate}}, activations_offload=True) for rate in (0.32, 0.032))
    fast = step({"mem2": mem2 | {"GBps": 1e9}}, activations_offload=True)
    assert fast.step_time_ns == step().step_time_ns
    assert slower.step_time_s / slow.step_time_s == pytest.approx(10, rel=0.05)


def test_the_second_tiers_capacity_binds() -> None:
    """Weights of 12 layers take 0.56 GiB: a host of 0.5 GiB does not hold them, one of 0.6 does."""
    mem2 = tree("system")["mem2"]
    for capacity, fits in ((0.5, False), (0.6, True)):
        assert step({"mem2": mem2 | {"GiB": capacity}}, weight_offload=True).fits is fits


def test_recomputation() -> None:
    """full replays the forward, attn_only less than a forward, none nothing; what is kept goes the other way, and
    a layer that is recomputed wholly keeps its input alone, an eighth of 2 s b h bytes."""
    none, attention, full = (step(activation_recompute=kind) for kind in ("none", "attn_only", "full"))
    replays = [found.breakdown_s["recompute"] for found in (none, attention, full)]
    assert replays[0] == 0 < replays[1] < replays[2]
    held = [found.stages[0].memory.activations_bytes for found in (none, attention, full)]
    assert held[0] > held[1] > held[2]
    constants = costs()
    assert constants.kept_bytes[0] - constants.dropped_full_bytes[0] == STREAM / T


def test_sharding_and_the_overlap_of_data_parallelism() -> None:
    """Half of the optimizer's bytes on two replicas; with overlap the same seconds, more of them hidden."""
    whole, half = (costs(optimizer_sharding=on).state_bytes[2, 0] for on in (False, True))
    assert half == whole / 2
    exposed, beside = (step(data_par_overlap=on) for on in (False, True))
    for name in ("grad_reduce", "param_gather"):
        assert beside.breakdown_s[f"{name}_exposed"] < exposed.breakdown_s[f"{name}_exposed"]
    assert beside.step_time_ns < exposed.step_time_ns


def test_interleaving_divides_the_bubble() -> None:
    """A warm-up and a drain of one chunk of three instead of a stage: a third of the bubble, without the ends."""
    one, three = (step(pipeline_interleaving=chunks).breakdown_s["bubble"] for chunks in (1, 3))
    assert three < 0.6 * one


def test_multiquery_has_one_head_of_keys() -> None:
    """31 of 32 heads of keys and values go, 128 h weights and 128 biases each, in 24 layers."""
    many, one = (translation.model_of(files(attention_type=kind)) for kind in ("multihead", "multiquery"))
    assert total_parameters(many) - total_parameters(one) == 24 * 2 * 31 * 128 * (H + 1)


def test_forwards_alone() -> None:
    """Inference takes no backward and no update: less than half of the step, and 2 bytes a parameter."""
    plain = {"activation_recompute": "none", "optimizer_sharding": False}
    training, forwards = step(**plain), step(training=False, **plain)
    assert forwards.step_time_s < 0.4 * training.step_time_s
    memory = forwards.stages[0].memory
    assert memory.gradients_bytes == memory.optimizer_bytes == memory.activations_bytes == 0
    assert memory.weights_bytes == training.stages[0].memory.weights_bytes


def test_a_fused_activation_keeps_one_tensor_less() -> None:
    """2 s b f / t bytes, f = 4 h, of every layer; the backward makes them again for the layer at work. Nothing
    that takes time changes, and a layer that is recomputed wholly keeps its input in any case."""
    apart, fused = (costs(fused_activation=on) for on in (False, True))
    one = 4 * STREAM / T
    assert apart.kept_bytes[0] - fused.kept_bytes[0] == one
    assert apart.dropped_full_bytes[0] - fused.dropped_full_bytes[0] == one
    assert apart.dropped_selective_bytes[0] == fused.dropped_selective_bytes[0]
    assert fused.workspace_bytes[0] - apart.workspace_bytes[0] == one
    assert np.array_equal(apart.parts.layer, fused.parts.layer)
    held = [step(fused_activation=on).stages[0].memory.activations_bytes for on in (False, True)]
    assert held[0] - held[1] == 2 * 12 * one


def test_float8_is_faster_where_the_matrix_engine_is() -> None:
    """Twice the rate for products, and one byte an element that is gathered; half of neither, for the rest of a
    layer stays as it is."""
    engine = tree("system")["matrix"]["float16"]
    both = {"matrix": {"float16": engine, "float8": engine | {"tflops": 600}}}
    slow, fast = costs(both), costs(both, datatype="float8")
    for which in (Part.COMPUTE, Part.TP):
        assert 0.5 < part(fast, which, Phase.FORWARD) / part(slow, which, Phase.FORWARD) < 0.95


def test_a_gather_is_what_the_file_says() -> None:
    """The seconds that the others here are worked out with."""
    hardware = calculon_run(files())[0].hardware
    for operation, expected in (("all_gather", gather_ns(STREAM)), ("reduce_scatter", scatter_ns(STREAM))):
        seconds = getattr(collectives, f"{operation}_s")(hardware, STREAM, T, 1)
        assert float(seconds) == pytest.approx(expected / 1e9, rel=0.01)
