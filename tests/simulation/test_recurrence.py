"""Linear recurrences: sizes by hand, times of measured kernels, and layers of one block."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from milpplan.communication.wires import layer_messages
from milpplan.errors import IllegalPlanError
from milpplan.problem import (
    DenseMlp,
    LayerRun,
    LinearRecurrence,
    Lora,
    MixtureOfExperts,
    ModelSpec,
    NoBlock,
    Problem,
    load_hardware,
)
from milpplan.simulation import sequence_cores, simulate
from milpplan.simulation.layers import (
    Part,
    Phase,
    layer_activations,
    layer_parameters,
    layer_seconds,
    scan_bytes,
    scan_s,
    widths,
)
from milpplan.simulation.layers.parameter_counts import scan_flops
from milpplan.simulation.network import collectives
from milpplan.simulation.states import local_layer_parameters
from milpplan.switching.ownership import model_tensors
from tests.simulation.cases import columns_of, even_plan, problem_of, shipped_model

DELTA = LinearRecurrence(
    update="delta", num_key_heads=16, num_value_heads=32, key_head_dim=128, value_head_dim=128
)
"""Of Qwen3-Next."""
MAMBA = LinearRecurrence(
    update="ssm", num_key_heads=8, num_value_heads=64, key_head_dim=128, value_head_dim=64, conv_bias=True,
    chunk_size=128,
)  # fmt: skip
"""Of Nemotron-3 Nano."""
LIGHTNING = LinearRecurrence(
    update="lightning", num_key_heads=64, num_value_heads=64, key_head_dim=128, value_head_dim=128, conv_kernel=0,
    chunk_size=256,
)  # fmt: skip
"""Of MiniMax-Text-01."""
KDA = LinearRecurrence(
    update="kda", num_key_heads=32, num_value_heads=32, key_head_dim=128, value_head_dim=128, gate_rank=128
)
"""Of Kimi-Linear."""
MLP = DenseMlp(intermediate_size=1024)


def with_layers(*runs: LayerRun, **job: Any) -> Problem:
    problem = problem_of("llama3-8b", "dgx-h100", **job)
    model = ModelSpec(name="m", hidden_size=2688, vocab_size=1000, max_position_embeddings=8192, layers=runs)
    return problem.model_copy(update={"model": model})


def test_sizes_by_hand() -> None:
    """FLOPs and bytes of a token and the widths of Qwen3-Next's and Nemotron-3 Nano's mixers."""
    assert scan_flops(DELTA) == 32 * (6 * 64 * 128 + 4 * 64 * 128 + 6 * 128 * 128)
    assert scan_bytes(DELTA)[0] == 2 * 32 * (7 * 128 + 6 * 128 + 2 * 64 + 2 * 128 * 128 / 64)
    assert scan_flops(MAMBA) == 8 * 2 * 128 * 128 + 64 * (2 * 128 * 64 + 4 * 128 * 64)
    assert scan_bytes(MAMBA)[0] == 2 * (8 * (4 * 128 + 4 * 128) + 64 * (5 * 64 + 6 * 128 * 64 / 128))
    assert scan_flops(LIGHTNING) == 64 * (2 * 256 * 128 + 2 * 256 * 128 + 4 * 128 * 128)
    assert scan_bytes(LIGHTNING) == (2 * 64 * 4 * 128, 2 * 64 * 20 * 128)
    assert widths(LIGHTNING).projected == 4 * 64 * 128
    assert scan_flops(KDA) == scan_flops(DELTA)
    assert scan_bytes(KDA)[0] == 2 * 32 * (21 * 128 + 6 * 128 + 4 * 64 + 2 * 128 * 128 / 64)
    assert widths(KDA).projected == 4 * 4096 + 32 * 129
    assert (widths(DELTA).projected, widths(DELTA).convolved) == (2 * 2048 + 2 * 4096 + 64, 2 * 2048 + 4096)
    assert (widths(MAMBA).projected, widths(MAMBA).convolved) == (2 * 4096 + 2 * 1024 + 64, 4096 + 2 * 1024)


@pytest.mark.parametrize(
    ("hardware", "batch", "length", "heads", "measured_us"),
    [
        ("dgx-h100", 4, 4096, 32, 1814),
        ("dgx-h100", 2, 4096, 16, 468),
        ("dgx-b200", 4, 4096, 64, 1750),
        ("dgx-b200", 1, 32768, 16, 1683),
        ("gb200-nvl72", 2, 4096, 64, 1316),
    ],
)
def test_measured_forwards(hardware: str, batch: int, length: int, heads: int, measured_us: float) -> None:
    """Forwards of SGLang 0.5.14 (ai-dynamo/aiconfigurator@095f58a51, gdn_perf) within 40 %."""
    gpu = load_hardware(hardware).accelerator
    mixer = DELTA.model_copy(update={"num_value_heads": heads})
    forward, backward = scan_s(gpu, mixer, batch * length, 1, length)
    assert 1e6 * float(forward) == pytest.approx(measured_us, rel=0.4)
    assert 2 < backward / forward < 3


@pytest.mark.parametrize(
    ("hardware", "batch", "length", "heads", "measured_us"),
    [
        ("dgx-h100", 2, 4096, 96, 3583),
        ("dgx-h100", 16, 1024, 24, 1850),
        ("dgx-h200", 8, 4096, 48, 6042),
        ("dgx-b200", 16, 1024, 12, 655),
        ("gb200-nvl72", 8, 4096, 48, 5555),
    ],
)
def test_measured_forwards_of_kimi_delta_attention(
    hardware: str, batch: int, length: int, heads: int, measured_us: float
) -> None:
    """Forwards of ``chunk_kda`` in SGLang 0.5.16 (ai-dynamo/aiconfigurator@095f58a51, kda_perf) within 45 %, by
    bytes counted in the kernels and constants fitted to gated delta nets alone."""
    gpu = load_hardware(hardware).accelerator
    mixer = KDA.model_copy(update={"num_key_heads": heads, "num_value_heads": heads})
    forward, backward = scan_s(gpu, mixer, batch * length, 1, length)
    assert 1e6 * float(forward) == pytest.approx(measured_us, rel=0.45)
    assert 2 < backward / forward < 3


def test_gates_of_low_rank() -> None:
    """First matrices are copied, second ones divided; ranks gather and reduce 128 numbers a token for each of
    decay and gate, and the direct form has weights for every channel instead."""
    run = LayerRun(count=1, attention=KDA, mlp=NoBlock(), num_norms=1)
    direct = run.model_copy(update={"attention": KDA.model_copy(update={"gate_rank": None})})
    problem, direct_problem = with_layers(run), with_layers(direct)
    counts = [layer_parameters(one.model, kind) for one, kind in ((problem, run), (direct_problem, direct))]
    assert counts[0].replicated - counts[1].replicated == 2 * 128 * 2688
    assert counts[1].tensor_parallel - counts[0].tensor_parallel == 2 * 4096 * (2688 - 128)
    columns = columns_of(tp=4, sequence_parallel=True)
    size = 2 * problem.job.sequence_length * 128
    narrow = [message for message in layer_messages(problem, run, columns) if message.num_bytes[0] == size]
    assert {(m.operation, float(m.forward[0]), float(m.backward[0])) for m in narrow} == {
        ("all_gather", 2.0, 2.0),
        ("reduce_scatter", 0.0, 2.0),
        ("all_reduce", 0.0, 0.0),
    }
    group = problem.hardware, size, 4, 1
    added = 2 * (collectives.all_gather_s(*group) + collectives.reduce_scatter_s(*group))
    times = [
        layer_seconds(one, kind, columns)[Part.TP] for one, kind in ((problem, run), (direct_problem, direct))
    ]
    gathered = 2 * collectives.all_gather_s(*group)
    assert times[0][Phase.FORWARD, 0] - times[1][Phase.FORWARD, 0] == pytest.approx(float(gathered))
    assert times[0][Phase.BACKWARD, 0] > float(added)
    kept = [
        layer_activations(one, kind, columns).kept[0] for one, kind in ((problem, run), (direct_problem, direct))
    ]
    assert kept[0] - kept[1] == pytest.approx(2 * size / 4)


@pytest.mark.parametrize("mixer", [DELTA, KDA, MAMBA, LIGHTNING])
def test_one_block_layers_add_up(mixer: LinearRecurrence) -> None:
    """A mixer alone and a feed-forward block alone have the parameters, compute and kept bytes of both in a layer,
    whose tensors are those of the parameter count."""
    both = LayerRun(count=1, attention=mixer, mlp=MLP)
    parts = [
        LayerRun(count=1, attention=mixer, mlp=NoBlock(), num_norms=1),
        LayerRun(count=1, attention=NoBlock(), mlp=MLP, num_norms=1),
    ]
    problem, columns = with_layers(both, *parts), columns_of(tp=2, sequence_parallel=True)
    counts = [layer_parameters(problem.model, run).total for run in (both, *parts)]
    assert counts[0] == counts[1] + counts[2]
    compute = [layer_seconds(problem, run, columns)[Part.COMPUTE, :, 0] for run in (both, *parts)]
    np.testing.assert_allclose(compute[0], compute[1] + compute[2], rtol=1e-12)
    kept = [layer_activations(problem, run, columns) for run in (both, *parts)]
    for name in ("kept", "dropped_selective"):
        values = [float(getattr(activations, name)[0]) for activations in kept]
        assert values[0] == pytest.approx(values[1] + values[2])
    tensors = [tensor for tensor in model_tensors(problem.model) if tensor.place == 0]
    assert sum(tensor.shape.size for tensor in tensors) == counts[0]
    local = local_layer_parameters(problem, both, columns).dense[0]
    split = layer_parameters(problem.model, both)
    assert local == split.tensor_parallel / 2 + split.replicated


def test_lightning_attention_by_hand() -> None:
    """A layer of MiniMax-Text-01: four projections and a norm, 14 of its widths kept, and time that grows with the
    length where that of softmax attention grows with its square."""
    run = LayerRun(count=1, attention=LIGHTNING, mlp=NoBlock(), num_norms=1)
    problem = with_layers(run)
    assert layer_parameters(problem.model, run).total == 5 * 2688 * 8192 + 8192 + 2688
    kept = layer_activations(problem, run, columns_of()).kept[0]
    assert kept == 2 * 8192 * (2 * 2688 + (4 + 3 + 1 + 1) * 8192)
    gpu = load_hardware("dgx-h100").accelerator
    times = [scan_s(gpu, LIGHTNING, length, 1, length)[0] - gpu.kernel_latency_s for length in (8192, 65536)]
    assert times[1] == pytest.approx(8 * times[0])


def test_context_parallel_ranks_exchange_heads() -> None:
    """The projection's output goes there and the scan's output back, in the forward and in the backward."""
    run = LayerRun(count=1, attention=DELTA, mlp=NoBlock(), num_norms=1)
    problem, columns = with_layers(run), columns_of(tp=2, cp=4)
    tokens = problem.job.sequence_length / 4
    expected = sum(
        float(collectives.all_to_all_s(problem.hardware, 2 * tokens * width / 2, 4, 2))
        for width in (widths(DELTA).projected, widths(DELTA).values)
    )
    found = layer_seconds(problem, run, columns)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert found[Part.CP, phase, 0] == pytest.approx(expected)


def test_packed_sequences_are_scanned_by_length() -> None:
    """Sequences of one length cost what the micro-batch costs, whose kernel latency counts once."""
    run = LayerRun(count=1, attention=DELTA, mlp=MLP)
    problem = with_layers(run, sequence_length=4096)
    columns = columns_of(micro_batch_size=3)
    cores = sequence_cores(problem, run, columns.at(0), np.array([4096]))
    core = 3 * cores.sequence_s[:, 0] + cores.once_s[:, 0]
    found = layer_seconds(problem, run, columns, (core[:1], core[1:]))
    np.testing.assert_allclose(found, layer_seconds(problem, run, columns), rtol=1e-12)


def test_a_plan_that_splits_a_head_is_refused() -> None:
    """tp x cp divides the heads of a recurrence, though tp alone does."""
    problem = with_layers(LayerRun(count=1, attention=MAMBA, mlp=MLP))
    with pytest.raises(IllegalPlanError, match="linear recurrence"):
        simulate(problem, even_plan(problem, columns_of(tp=4, cp=4).at(0)))


def test_context_parallelism_beside_gates_of_low_rank_is_refused() -> None:
    """No launcher exchanges heads whose gates pass through a low rank: every plan with cp is refused."""
    problem = with_layers(LayerRun(count=1, attention=KDA, mlp=MLP))
    simulate(problem, even_plan(problem, columns_of(tp=4).at(0)))
    with pytest.raises(IllegalPlanError, match="cp is 1 with gates of low rank"):
        simulate(problem, even_plan(problem, columns_of(cp=2).at(0)))


def test_tokens_are_dispatched_in_the_latent_width() -> None:
    """Projections to and from the latent width are copies on every rank, and what is sent has that width."""
    experts = MixtureOfExperts(num_experts=8, num_experts_per_tok=2, intermediate_size=512, gated=False)
    plain, latent = (
        LayerRun(count=1, attention=NoBlock(), mlp=experts.model_copy(update={"latent_size": size}), num_norms=1)
        for size in (None, 672)
    )
    problem = with_layers(plain, latent)
    columns = columns_of(dp=4, ep=4)
    counts = [layer_parameters(problem.model, run) for run in (plain, latent)]
    assert counts[1].replicated - counts[0].replicated == 2 * 672 * 2688
    assert counts[0].experts == 4 * counts[1].experts
    sent = [
        [
            message.num_bytes[0]
            for message in layer_messages(problem, run, columns)
            if message.operation == "all_to_all"
        ]
        for run in (plain, latent)
    ]
    assert sent[0] == [4 * size for size in sent[1]] != []
    tensors = [tensor for tensor in model_tensors(problem.model) if tensor.place == 1]
    assert sum(tensor.shape.size for tensor in tensors) == counts[1].total


def test_adapters_beside_a_recurrence_are_refused() -> None:
    """LoRA is priced where the names of all matrices are known."""
    job = problem_of("qwen3-next-80b").job.model_copy(update={"lora": Lora(rank=8)})
    with pytest.raises(ValueError, match="lora beside linear recurrences"):
        Problem(model=shipped_model("qwen3-next-80b"), hardware=load_hardware("dgx-h100"), job=job)
