"""Calculon's files: what they become, what is refused, and that the numbers are those of its formulas.

The three files in tests/data/calculon are written by hand in Calculon's format (calculon-ai/calculon at caa4b11).
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from milpplan import Layout, simulate
from milpplan.errors import InvalidInputError
from milpplan.optimize.space.enumerate_layouts import broken_rules
from milpplan.problem import GemmTable, Job, SizeCurve, Space, validated
from milpplan.problem.calculon import system as calculon_system
from milpplan.problem.calculon import translation
from milpplan.problem.calculon.system import CalculonExecution, CalculonModel, CalculonSystem
from milpplan.problem.calculon.translation import CalculonFiles, calculon_problem, calculon_run, placed
from milpplan.simulation import LayoutColumns
from milpplan.simulation.layers import interpolate_curve, interpolate_table, total_parameters
from milpplan.simulation.layers.kernels import gemm_s
from milpplan.simulation.layout_costs import layout_costs
from milpplan.simulation.network import collectives, placement

DATA = Path(__file__).parents[1] / "data" / "calculon"
STEPS = ((100.0, 0.9), (10.0, 0.8), (1.0, 0.5), (0.0, 0.1))


def tree(name: str) -> dict[str, Any]:
    """One of the files as plain data."""
    data: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return data


def files(
    system: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **execution: Any
) -> CalculonFiles:
    """The three files with changes at their top level."""
    return CalculonFiles(
        validated(CalculonModel, tree("model") | (model or {}), "model"),
        validated(CalculonExecution, tree("execution") | execution, "execution"),
        validated(CalculonSystem, tree("system") | (system or {}), "system"),
    )


def test_the_execution_becomes_a_legal_plan() -> None:
    """Every degree and switch lands in its field, no rule is broken, and the step can be simulated."""
    problem, plan = calculon_run(files())
    layout = plan.layout
    assert (layout.tp, layout.pp, layout.dp, layout.vpp) == (8, 2, 2, 3)
    assert (layout.micro_batch_size, layout.global_batch_size, layout.num_micro_batches) == (2, 64, 16)
    assert (layout.sequence_parallel, layout.zero_stage, layout.schedule) == (True, 1, "interleaved")
    assert (layout.overlap_grad_reduce, layout.overlap_param_gather) == (True, True)
    assert [stage.num_layers for stage in plan.virtual_stages] == [4] * 6
    assert all(stage.recompute.selective == 4 for stage in plan.virtual_stages)
    assert (problem.job.attention_kernel, problem.job.grad_dtype) == ("unfused", "bf16")
    assert broken_rules(problem, layout) == []
    assert simulate(problem, plan).fits


def test_multiquery_and_recompute_and_uneven_blocks() -> None:
    """One head of keys; all layers recomputed; 24 blocks on 5 stages are 5, 5, 5, 5, 4."""
    uneven = {"num_procs": 80, "pipeline_par": 5, "pipeline_interleaving": 1, "seq_par_ag_redo": False}
    problem, plan = calculon_run(files(attention_type="multiquery", activation_recompute="full", **uneven))
    assert problem.model.layers[0].attention.num_key_value_heads == 1  # type: ignore[union-attr]
    assert [stage.num_layers for stage in plan.virtual_stages] == [5, 5, 5, 5, 4]
    assert all(stage.recompute.full == stage.num_layers for stage in plan.virtual_stages)


def test_parameters_are_calculons_own_count() -> None:
    """calculon/llm/llm.py, num_parameters: 24 blocks of 8 h^2 + 4 h^2 weights with their biases and norms, and
    (51,200 + 2,048) h of embeddings; ours has the last norm (2 h) besides."""
    h, f = 4096, 16384
    block = 2 * h * f + 4 * h * h + (h + f) + (3 * h + h) + 4 * h
    assert total_parameters(translation.model_of(files())) == 24 * block + (51200 + 2048) * h + 2 * h


@pytest.mark.parametrize(
    ("size", "expected"), [(0, 0.1), (0.999, 0.1), (1, 0.5), (99, 0.8), (100, 0.9), (1e9, 0.9)]
)
def test_step(size: float, expected: float) -> None:
    """The first efficiency, from the largest size, whose size is reached."""
    assert calculon_system.step(STEPS, size) == expected


def test_gemm_table_adds_the_times_of_flops_and_bytes() -> None:
    """(2048, 4096, 2048) has 34.4 GFLOP, 0.8 of 300 TFLOP/s, and moves 41.9 MB at 0.8 of 2000 GB/s: 169.4 us, of
    which 114.5 us at the peak rate. With roofline the memory's 26.2 us hide behind the 143.2 us of the product."""
    flops_s, bytes_s = 2 * 2**11 * 2**12 * 2**11 / 240e12, 2 * (2**22 + 2**23 + 2**23) / 1.6e12
    assert (flops_s, bytes_s) == pytest.approx((143.2e-6, 26.2e-6), rel=1e-3)
    for mode, seconds in (("no_overlap", flops_s + bytes_s), ("roofline", flops_s)):
        hardware = calculon_run(files(system={"processing_mode": mode}))[0].hardware
        assert float(gemm_s(hardware.accelerator, "bf16", 2048, 4096, 2048)) == pytest.approx(seconds)


def test_gemm_table_lies_between_its_corners() -> None:
    """Shapes off the grid have an efficiency between those of the corners of their cell."""
    system = validated(CalculonSystem, tree("system") | {"processing_mode": "roofline"}, "system")
    table = GemmTable.model_validate(calculon_system.gemm_table(system, "float16"))
    rng = np.random.default_rng(1)
    for shape in np.exp(rng.uniform(np.log(128), np.log(65536), size=(200, 3))):
        corners = [(2.0 ** np.floor(np.log2(x)), 2.0 ** np.ceil(np.log2(x))) for x in shape]
        values = [
            2 * m * n * k / 300e12 / calculon_system.product_s(system, "float16", int(m), int(n), int(k))
            for m, n, k in itertools.product(*corners)
        ]
        assert min(values) - 1e-9 <= float(interpolate_table(table, *shape)) <= max(values) + 1e-9


def test_size_curve_keeps_its_steps() -> None:
    """Level between the thresholds, and right on both sides of each."""
    curve = SizeCurve.model_validate(calculon_system.size_curve(((100.0, 0.95), (1.0, 0.7), (0.0, 0.3)), 1e6))
    for size, expected in ((1.0, 0.3), (0.99e6, 0.3), (1e6, 0.7), (99e6, 0.7), (1e8, 0.95), (1e12, 0.95)):
        assert float(interpolate_curve(curve, size)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("size", "operation"), [(n, op) for n in (2, 4, 8) for op in ("all_gather", "reduce_scatter")]
)
def test_collectives_inside_cost_what_calculon_says(size: int, operation: str) -> None:
    """latency + bytes * scalar * (1 + offset / n) / (rate * efficiency), worked out: 250 GB/s * 0.8, 10 us."""
    problem = calculon_problem(files(), Space())
    num_bytes = 50e6
    scalar = {"all_gather": 1.25, "reduce_scatter": 1.5}[operation]
    expected = 10e-6 + num_bytes * scalar * (1 - 1 / size) / 200e9
    time = getattr(collectives, f"{operation}_s")(problem.hardware, num_bytes, size, 1)
    assert float(time) == pytest.approx(expected, rel=0.01)


def test_each_parallelism_uses_the_network_that_the_execution_says() -> None:
    """The same two data-parallel ranks beside four tensor-parallel ones: on network 0 they have 200 GB/s, on
    network 1 they have 22.5, although they would fit into one domain."""
    four = {"num_procs": 8, "tensor_par": 4, "pipeline_par": 1, "pipeline_interleaving": 1, "pipeline_par_net": 0}
    times = []
    for network in (0, 1):
        hardware = calculon_run(files(**four, data_par_net=network))[0].hardware
        times.append(float(collectives.reduce_scatter_s(hardware, 1e9, 2, 4)))
        assert float(collectives.all_gather_s(hardware, 1e9, 4, 1)) == pytest.approx(
            10e-6 + 1e9 * 1.25 * 0.75 / 200e9, rel=0.01
        )
    assert times == pytest.approx([10e-6 + 1e9 * 1.5 * 0.5 / 200e9, 20e-6 + 1e9 * 0.5 / 22.5e9], rel=0.01)


def test_everything_on_the_outer_network_leaves_no_domain() -> None:
    """Tensor parallelism on network 1 gathers at 22.5 GB/s."""
    hardware = calculon_run(files(tensor_par_net=1))[0].hardware
    assert float(collectives.all_gather_s(hardware, 1e9, 8, 1)) == pytest.approx(
        20e-6 + 1e9 * 0.875 / 22.5e9, rel=0.01
    )


def test_states_take_calculons_bytes() -> None:
    """2 bytes of weights, 2 of gradients and 12 of optimizer a parameter of a block, the last over data_par = 2.
    Matrices of a block: 12 h^2 / 8 parameters a rank; norms and biases are less than a thousandth."""
    problem, plan = calculon_run(files())
    costs = layout_costs(problem, LayoutColumns.of([plan.layout])).at(0)
    matrices = 12 * 4096**2 / 8
    assert costs.state_bytes[:, 0] / matrices == pytest.approx([2, 2, 12 / 2], rel=2e-3)


def test_attention_alone_is_dropped_and_replayed() -> None:
    """attn_only keeps 34 s b h / t of a layer with sequence parallelism whose inputs are gathered again:
    Korthikanti et al. 2022, table 2, without 5 a s / h. Else two inputs of 2 s b h stay whole."""
    tokens, h, t = 2 * 2048, 4096, 8
    for redo, expected in ((True, 34 / t), (False, 34 / t + 4 * (1 - 1 / t))):
        problem, plan = calculon_run(files(seq_par_ag_redo=redo))
        costs = layout_costs(problem, LayoutColumns.of([plan.layout])).at(0)
        kept = costs.kept_bytes[0] - costs.dropped_selective_bytes[0]
        assert kept / (tokens * h) == pytest.approx(expected, rel=1e-6)
        assert costs.dropped_selective_bytes[0] == 5 * 32 / t * 2048 * tokens


SWITCHED = {
    "tensor_par_overlap": ("ring", "tp_overlap", "ring"),
    "tensor_par_comm_type": ("p2p_rs_ag", "pp_scatter_gather", True),
    "weight_offload": (True, "offload_weights", True),
    "activations_offload": (True, "offload_activations", True),
    "optimizer_offload": (True, "offload_optimizer", True),
}


@pytest.mark.parametrize("theirs", SWITCHED)
def test_a_switch_lands_in_its_field(theirs: str) -> None:
    """The layout says what the execution says."""
    value, ours, expected = SWITCHED[theirs]
    changed = files(**{theirs: value, "seq_par_ag_redo": False})
    assert translation.switch_values(changed, Layout)[ours] == expected
    assert getattr(calculon_run(changed)[1].layout, ours) == expected


def inference(**execution: Any) -> CalculonFiles:
    """The files as forwards alone."""
    plain = {"activation_recompute": "none", "data_par_overlap": False, "seq_par_ag_redo": False}
    return files(training=False, **plain, **execution)


def test_inference_is_a_kind_of_job() -> None:
    """training false becomes Job.kind, and its step is that of the forwards."""
    assert translation.switch_values(inference(), Job) == {"kind": "inference"}
    problem, plan = calculon_run(inference())
    assert (plan.layout.schedule, plan.layout.zero_stage, plan.layout.gather_again) == ("gpipe", 0, True)
    assert simulate(problem, plan).breakdown_s["optimizer"] == 0


@pytest.mark.parametrize(
    "execution",
    [
        {"weight_offload": True},
        {"activations_offload": True},
        {"optimizer_sharding": True},
        {"pipeline_interleaving": 1},
        {"tensor_par_comm_type": "ar"},
        {"tensor_par_comm_type": "p2p_rs_ag"},
        {"tensor_par_overlap": "ring"},
        {"tensor_par_overlap": "pipe"},
        {"seq_par_ag_redo": True},
    ],
)
def test_inference_runs_with_every_switch(execution: dict[str, Any]) -> None:
    """Whatever else Calculon lets forwards alone have: a plan without a broken rule, shorter than the training."""
    found = replace(inference(), execution=inference().execution.model_copy(update=execution))
    problem, plan = calculon_run(found)
    assert broken_rules(problem, plan.layout) == []
    assert 0 < simulate(problem, plan).step_time_s < 0.5 * simulate(*calculon_run(files())).step_time_s


def test_what_forwards_leave_out_is_told() -> None:
    """Interleaving, and what there is not to offload or to shard; of sharded gradients nothing is said."""
    said = " ".join(translation.notes(inference()))
    assert "without interleaving" in said
    assert "nothing to offload or shard" in said
    assert "ZeRO" not in said
    assert "interleaving" not in " ".join(translation.notes(files()))


def test_plain_values_are_the_layouts_own() -> None:
    """An execution that switches nothing on changes nothing but sequence parallelism."""
    changed = translation.switch_values(files(), Layout)
    assert {name for name, value in changed.items() if value != Layout.model_fields[name].default} == {
        "sequence_parallel"
    }
    assert translation.switch_values(files(), Job) == {"kind": "training"}


@pytest.mark.parametrize(
    ("execution", "expected"),
    [
        ({"num_procs": 31}, "num_procs=31 is not tensor_par"),
        ({"batch_size": 63}, "batch_size=63 is not a multiple"),
        ({"datatype": "bfloat16"}, "matrix has float16"),
        ({"datatype": "float8"}, "add float8"),
        ({"datatype": "float32"}, "datatype is float32"),
        ({"tensor_par_net": 2}, "there is no such network"),
        ({"pipeline_par_net": 0}, "16 processors on it are more than its size"),
        ({"tensor_par": 3, "num_procs": 12}, "must_be_filled"),
        ({"pipeline_interleaving": 5}, "10 virtual stages"),
        ({"pipeline_interleaving": 13}, "26 virtual stages"),
        ({"activation_recompute": "some"}, "activation_recompute"),
        ({"training": "yes"}, "training"),
        ({"more": 1}, "more"),
    ],
)
def test_executions_that_make_no_sense(execution: dict[str, Any], expected: str) -> None:
    """The message names the field, or the numbers that contradict each other."""
    with pytest.raises(InvalidInputError, match=expected):
        calculon_run(files(**execution))


def test_networks_order_the_ranks() -> None:
    """Data parallelism on the inner network and tensor parallelism on the outer one become an order of ranks."""
    changed = files(tensor_par_net=1, data_par_net=0)
    assert calculon_run(changed)[1].layout.rank_order == "dp-tp-cp-pp"
    assert placed(changed) == ((2,), "dp-tp-cp-pp")
    assert placed(files()) == ((8,), None)


def test_systems_that_make_no_sense() -> None:
    """Steps that do not end at 0, sizes that do not fit together."""
    good = tree("system")
    engine = good["matrix"]["float16"]
    with pytest.raises(InvalidInputError, match="gflops_efficiency must end with the size 0"):
        files(system={"matrix": {"float16": engine | {"gflops_efficiency": [[1, 0.5]]}}})
    with pytest.raises(InvalidInputError, match="from the largest"):
        files(system={"matrix": {"float16": engine | {"gflops_efficiency": [[1, 0.5], [2, 0.6], [0, 0.1]]}}})
    with pytest.raises(InvalidInputError, match="sizes"):
        calculon_problem(files(system={"networks": good["networks"][::-1]}), Space())


def three_networks(**execution: Any) -> translation.CalculonFiles:
    """The files with a network between the two of the system, of 16 processors and a rate of its own."""
    inner, outer = tree("system")["networks"]
    middle = outer | {"size": 16, "bandwidth": 77, "must_be_filled": False}
    return files(system={"networks": [inner, middle, outer]}, **execution)


@pytest.mark.parametrize(
    ("nets", "used"),
    [((0, 2, 2), (0, 2)), ((0, 1, 0), (0, 1)), ((1, 2, 2), (1, 2)), ((2, 2, 2), (0, 2)), ((2, 2, 0), (0, 2))],
)
def test_an_execution_uses_two_of_many_networks(nets: tuple[int, int, int], used: tuple[int, int]) -> None:
    """Of three networks an execution that uses two is the same as on a system that has these two alone, and one
    that uses the last alone has no domain."""
    names = ("tensor_par_net", "pipeline_par_net", "data_par_net")
    execution = {"tensor_par": 2, "pipeline_par": 2, "data_par": 4, "num_procs": 16, "pipeline_interleaving": 1}
    found = three_networks(**execution, **dict(zip(names, nets, strict=True)))
    networks = [found.system.networks[number].model_dump() for number in used]
    own = {name: used.index(number) for name, number in zip(names, nets, strict=True)}
    expected = files(system={"networks": networks}, **execution, **own)
    assert calculon_run(found) == calculon_run(expected)
    assert translation.notes(found) == translation.notes(expected)


APART = {"num_procs": 32, "tensor_par": 8, "data_par": 2, "pipeline_par": 2, "pipeline_interleaving": 1}


def test_three_networks_at_once() -> None:
    """Tensor, data and pipeline parallelism on a network each: 8 ranks at 200 GB/s, pairs of domains at 0.9 * 77,
    and the transfer between pods at 0.9 * 25, with the 20 us of a message there."""
    apart = three_networks(**APART, tensor_par_net=0, data_par_net=1, pipeline_par_net=2)
    problem, plan = calculon_run(apart)
    hardware = problem.hardware
    assert (hardware.scale_up.num_gpus, hardware.pods and hardware.pods.num_gpus) == (8, 16)
    assert float(collectives.all_gather_s(hardware, 1e9, 8, 1)) == pytest.approx(
        10e-6 + 1e9 * 1.25 * 0.875 / 200e9, rel=0.01
    )
    assert float(collectives.all_gather_s(hardware, 1e9, 2, 8)) == pytest.approx(20e-6 + 1e9 * 0.5 / 69.3e9)
    costs = layout_costs(problem, LayoutColumns.of([plan.layout])).at(0)
    share = 2 * 2 * 2048 * 4096 / 8
    assert int(costs.transfer_ns) == round((share / 22.5e9 + 20e-6) * 1e9)
    assert simulate(problem, plan).step_time_s > 0


@pytest.mark.parametrize("nets", list(itertools.permutations(range(3))))
def test_every_parallelism_gets_the_network_it_names(nets: tuple[int, int, int]) -> None:
    """All six ways to give three networks to three parallelisms: a group's gather runs at its network's rate."""
    degrees = {"num_procs": 8, "tensor_par": 2, "data_par": 2, "pipeline_par": 2, "pipeline_interleaving": 1}
    names = ("tensor_par_net", "data_par_net", "pipeline_par_net")
    problem, plan = calculon_run(three_networks(**degrees, **dict(zip(names, nets, strict=True))))
    columns = LayoutColumns.of([plan.layout])
    for group, net in zip((placement.tensor, placement.replicas, placement.pipeline), nets, strict=True):
        seconds = float(collectives.all_gather_s(problem.hardware, 1e9, *group(columns))[0])
        rate = (200e9 / 1.25, 69.3e9, 22.5e9)[net]
        assert seconds == pytest.approx(0.5e9 / rate + (10e-6, 20e-6, 20e-6)[net], rel=0.01)


def test_a_free_layout_chooses_among_three_networks() -> None:
    """Domains of 8 and pods of 8 * 16, as many as Calculon's sizes let parallelisms share; a fourth is refused."""
    found = calculon_problem(three_networks(), Space()).hardware
    assert (found.scale_up.num_gpus, found.pods and found.pods.num_gpus) == (8, 128)
    networks = tree("system")["networks"]
    with pytest.raises(InvalidInputError, match="networks has 4 entries, and the layout is free"):
        calculon_problem(files(system={"networks": [networks[0], *[networks[1]] * 3]}), Space())


def test_a_free_layout_ignores_the_executions_networks() -> None:
    """An execution whose networks the system does not have can be solved for, and says nothing of what is free."""
    network = tree("system")["networks"][0] | {"size": 64}
    alone = files(system={"networks": [network]})
    assert calculon_problem(alone, Space()).hardware.scale_up.num_gpus == 64
    assert "ZeRO" not in " ".join(translation.notes(alone, free=True))


def test_one_network_joins_all() -> None:
    """A system of one network is a domain of all processors."""
    network = tree("system")["networks"][0] | {"size": 64}
    changed = files(system={"networks": [network]}, data_par_net=0, pipeline_par_net=0)
    assert calculon_run(changed)[0].hardware.scale_up.num_gpus == 32
    assert calculon_problem(changed, Space()).hardware.scale_up.num_gpus == 64


def test_notes_say_what_differs() -> None:
    """Every approximation that the files touch is told, and no other."""
    said = " ".join(translation.notes(files()))
    for word in ("their FLOPs", "ZeRO stage 1", "51,200", "ring all-reduce"):
        assert word in said
    assert "float8" not in said
    assert "ZeRO" not in " ".join(translation.notes(files(optimizer_sharding=False)))
