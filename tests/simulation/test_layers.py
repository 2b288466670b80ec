"""Layer times: operation counts on an ideal accelerator, communication by hand, and invariants."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.families import configurations
from milpplan.problem import (
    GroupedQueryAttention,
    Indexer,
    LatentAttention,
    LayerRun,
    MixtureOfExperts,
    ModelSpec,
    Problem,
    load_hardware,
)
from milpplan.problem.huggingface import model_from_config
from milpplan.simulation.layers import (
    EXPOSED,
    Part,
    Phase,
    Shard,
    average_keys,
    flash_core_s,
    kv_heads_per_rank,
    layer_activations,
    layer_parameters,
    layer_seconds,
    memory_bound_s,
    model_flops_per_token,
)
from milpplan.simulation.layers.kernels import gemm_s
from milpplan.simulation.network import collectives, placement
from milpplan.simulation.network.collectives import overlap_s
from tests.simulation.cases import (
    MODEL_HARDWARE,
    columns_of,
    ideal_hardware,
    problem_of,
    shipped_hardware,
    shipped_model,
)

FloatArray = npt.NDArray[np.float64]
PEAK_FLOPS_PER_S = 312e12
"""Of the ideal accelerator (an A100)."""


def seconds(problem: Problem, kind: int = 0, **fields: object) -> FloatArray:
    """[Part, Phase] of one layer under one layout."""
    return layer_seconds(problem, problem.model.kinds[kind], columns_of(**fields))[..., 0]


def cases() -> list[tuple[Problem, int]]:
    """Every kind of layer of a varied set of models."""
    problems = [
        problem_of(model, hardware, attention_kernel=kernel, precision=precision)
        for model, hardware, kernel, precision in MODEL_HARDWARE
    ]
    return [(problem, kind) for problem in problems for kind in range(len(problem.model.kinds))]


def matrix_parameters(model: ModelSpec, kind: LayerRun) -> float:
    """Weights that multiply one token in one layer: all but norms and biases, top-k of the experts."""
    bare = kind.model_copy(update={"num_norms": 0})
    counts = layer_parameters(model, bare)
    total = float(counts.tensor_parallel + counts.replicated)
    attention = kind.attention
    if isinstance(attention, LatentAttention):
        total -= (attention.q_lora_rank or 0) + attention.kv_lora_rank
    elif attention.qk_norm == "per_head":
        total -= 2 * attention.head_dim
    if isinstance(kind.mlp, MixtureOfExperts):
        total += counts.experts * kind.mlp.num_experts_per_tok / kind.mlp.num_experts
    return total


def score_width(kind: LayerRun) -> int:
    """Width of queries plus width of values, over all heads."""
    attention = kind.attention
    if isinstance(attention, LatentAttention):
        width = attention.qk_nope_head_dim + attention.qk_rope_head_dim + attention.v_head_dim
        return attention.num_attention_heads * width
    return 2 * attention.num_attention_heads * attention.head_dim


def overlapped_sum(problem: Problem, found: FloatArray, part: Part, phase: Phase) -> float:
    """Seconds of communication inside one domain, hidden or not: exposed - (what it takes from compute) +
    hidden."""
    hidden = {Part.TP: Part.TP_HIDDEN, Part.CP: Part.CP_HIDDEN}[part]
    share = problem.hardware.scale_up.processor_fraction
    return float(found[part, phase] + (1 - share) * found[hidden, phase])


@pytest.mark.parametrize("tp", [1, 8])
def test_published_flops_of_a_gpt_layer(tp: int) -> None:
    """Unfused attention: 24 b s h^2 + 4 b s^2 h FLOPs forward and twice that backward, divided by t
    (Narayanan et al. 2021, appendix; Korthikanti et al. 2022, appendix A)."""
    problem = problem_of("gpt3-175b", ideal_hardware(), attention_kernel="unfused")
    b, s, h = 4, 2048, 12288
    forward = 24 * b * s * h**2 + 4 * b * s**2 * h
    found = seconds(problem, tp=tp, micro_batch_size=b)[Part.COMPUTE] * PEAK_FLOPS_PER_S * tp
    assert found[Phase.FORWARD] == pytest.approx(forward)
    assert found[Phase.BACKWARD] == pytest.approx(2 * forward)
    assert found[Phase.SELECTIVE] == pytest.approx(4 * b * s**2 * h)


@pytest.mark.parametrize(("fused", "keys"), [(True, 0), (False, 1024)])
def test_operator_checkpoints_replay_every_second_product(fused: bool, keys: int) -> None:
    """Of a layer of Llama 3 8B output and up, and the keys where they are a product of their own: 2 FLOPs a weight
    and token; attention is not replayed."""
    plain = ideal_hardware()
    software = plain.software.model_copy(update={"operator_checkpoints": True, "fused_qkv": fused})
    problem = problem_of("llama3-8b", plain.model_copy(update={"software": software}))
    found = seconds(problem)[Part.COMPUTE, Phase.SELECTIVE] * PEAK_FLOPS_PER_S
    assert found == pytest.approx(2 * 8192 * 4096 * (keys + 4096 + 14336))
    assert seconds(problem_of("llama3-8b", plain))[Part.COMPUTE, Phase.SELECTIVE] * PEAK_FLOPS_PER_S < 1


@pytest.mark.parametrize(("ep", "unread", "down"), [(1, False, 1), (8, False, 0), (8, True, 1)])
def test_operator_checkpoints_replay_routed_experts(ep: int, unread: bool, down: int) -> None:
    """Of a layer of Qwen3 30B-A3B output, router and eight experts a token; the experts' last product only where
    its result, which no exchange has kept, is read again, or where nothing tells that it is not. No exchange."""
    plain = ideal_hardware()
    kept = {"operator_checkpoints": True, "keeps_unread_results": unread}
    problem = problem_of(
        "qwen3-30b-a3b", plain.model_copy(update={"software": plain.software.model_copy(update=kept)})
    )
    found = seconds(problem, dp=8, ep=ep)
    tokens = problem.job.sequence_length
    experts = 8 * 768 * (2 + down)
    expected = 2 * tokens * 2048 * (4096 + 128 + experts)
    assert found[Part.COMPUTE, Phase.SELECTIVE] * PEAK_FLOPS_PER_S == pytest.approx(expected)
    assert found[Part.EP, Phase.SELECTIVE] == 0


def test_norms_of_queries_and_keys_cost_as_much_with_any_positions() -> None:
    """Rotary positions are a pass over queries and keys, their norms another one; learned positions spare the
    first only."""
    passes: dict[tuple[bool, str], float] = {}
    for learned in (False, True):
        for norm in ("none", "per_head"):
            model = shipped_model("llama3-8b")
            attention = model.layers[0].attention.model_copy(update={"qk_norm": norm})
            layers = (model.layers[0].model_copy(update={"attention": attention}),)
            changed = model.model_copy(update={"layers": layers, "learned_positions": learned})
            found = seconds(problem_of(changed, "dgx-h100"))
            passes[learned, norm] = float(found[Part.COMPUTE, Phase.FORWARD])
    one = passes[False, "none"] - passes[True, "none"]
    assert one > 0
    for learned in (False, True):
        assert passes[learned, "per_head"] - passes[learned, "none"] == pytest.approx(one)


def test_flash_attention_counts_the_causal_half() -> None:
    """Flash attention computes half of the square forward and 2.5 times that backward (Dao 2023, section
    4.1)."""
    problem = problem_of("gpt3-175b", ideal_hardware())
    b, s, h = 1, 2048, 12288
    found = seconds(problem)[Part.COMPUTE] * PEAK_FLOPS_PER_S
    assert found[Phase.FORWARD] == pytest.approx(24 * b * s * h**2 + 2 * b * s**2 * h)
    assert found[Phase.BACKWARD] == pytest.approx(48 * b * s * h**2 + 5 * b * s**2 * h)


@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3", "gemma-7b"])
def test_forward_is_two_flops_a_parameter(model: str) -> None:
    """On an ideal accelerator a forward costs 2 FLOPs for every weight a token meets, and its attention."""
    problem = problem_of(model, ideal_hardware())
    s = problem.job.sequence_length
    for number, kind in enumerate(problem.model.kinds):
        flops = 2 * s * (matrix_parameters(problem.model, kind) + s / 2 * score_width(kind))
        found = seconds(problem, number)[Part.COMPUTE, Phase.FORWARD] * PEAK_FLOPS_PER_S
        assert found == pytest.approx(flops, rel=1e-9)


@pytest.mark.parametrize("ep", [1, 2, 8])
def test_routed_work_does_not_depend_on_ep(ep: int) -> None:
    """Balanced experts: each rank does the work of its own tokens, wherever the experts live."""
    problem = problem_of("mixtral-8x7b", ideal_hardware())
    assert seconds(problem, dp=8, ep=ep)[Part.COMPUTE] == pytest.approx(seconds(problem, dp=8)[Part.COMPUTE])


def test_average_keys() -> None:
    """Over s queries the mean of min(position, window), as an integral."""
    assert average_keys(4096, None) == 2048
    assert average_keys(4096, 8192) == 2048
    s, w = 100_000, 1_000
    assert average_keys(s, w) == pytest.approx(np.minimum(np.arange(s) + 0.5, w).mean(), rel=1e-9)


@pytest.mark.parametrize(("s", "w"), [(100_000, 1_000), (100_500, 1_000), (700, 1_000), (1_000, 1_000)])
def test_average_keys_of_chunks(s: int, w: int) -> None:
    """A query sees the keys of its own chunk up to itself; at most those of a sliding window."""
    chunked = average_keys(s, w, chunked=True)
    assert chunked == pytest.approx((np.arange(s) % w + 0.5).mean(), rel=1e-9)
    assert chunked <= average_keys(s, w)


def test_chunks_cost_what_their_keys_cost() -> None:
    """Attention in chunks of the sequence's length is full attention; shorter chunks are faster."""

    def compute_s(**more: Any) -> float:
        problem = problem_of("llama3-8b", ideal_hardware())
        (run,) = problem.model.layers
        attention = run.attention.model_copy(update=more)
        model = problem.model.model_copy(update={"layers": (run.model_copy(update={"attention": attention}),)})
        return float(seconds(problem.model_copy(update={"model": model}), dp=8)[Part.COMPUTE].sum())

    length = problem_of("llama3-8b", ideal_hardware()).job.sequence_length
    assert compute_s(sliding_window=length, chunked=True) == compute_s()
    half = compute_s(sliding_window=length // 2, chunked=True)
    assert half < compute_s(sliding_window=length // 2) < compute_s()
    assert compute_s(qk_norm="unweighted") == compute_s(qk_norm="per_head")


def test_values_of_another_width_by_hand() -> None:
    """Values of half the width take half the columns, half the products of scores, half of the output's rows."""
    problem = problem_of("llama3-8b", ideal_hardware())
    (run,) = problem.model.layers

    def forward_flops(value_dim: int) -> float:
        attention = run.attention.model_copy(update={"v_head_dim": value_dim})
        layers = (run.model_copy(update={"attention": attention}),)
        model = problem.model.model_copy(update={"layers": layers})
        return float(seconds(problem.model_copy(update={"model": model}), dp=8)[Part.COMPUTE, Phase.FORWARD])

    length = problem.job.sequence_length
    weights, scores = (8 + 32) * 64 * 4096, 32 * 64 * length / 2
    less = (forward_flops(128) - forward_flops(64)) * PEAK_FLOPS_PER_S
    assert less == pytest.approx(2 * length * (weights + scores), rel=1e-3)
    assert seconds(problem, dp=8)[Part.COMPUTE, Phase.FORWARD] == forward_flops(128)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("gate", "width"), [("head_gate", 1), ("output_gate", 128)])
def test_gates_of_attention_by_hand(gate: str, width: int, tp: int) -> None:
    """A gate of heads has a column for each head, one of outputs a column for each of their numbers: 2 FLOPs a
    weight and token forward, and kept with the gated output; tensor parallelism divides all."""
    problem = problem_of("llama3-8b", ideal_hardware())
    (run,) = problem.model.layers
    attention = run.attention.model_copy(update={gate: True})
    gated = run.model_copy(update={"attention": attention})
    model = problem.model.model_copy(update={"layers": (gated,)})
    other, columns, tokens = problem.model_copy(update={"model": model}), columns_of(tp=tp, dp=8), 8192
    assert layer_parameters(model, gated).total - layer_parameters(problem.model, run).total == 4096 * 32 * width
    more = layer_seconds(other, gated, columns) - layer_seconds(problem, run, columns)
    flops = more[Part.COMPUTE, [Phase.FORWARD, Phase.BACKWARD], 0] * PEAK_FLOPS_PER_S
    assert flops == pytest.approx(
        [2 * tokens * 4096 * 32 * width / tp, 4 * tokens * 4096 * 32 * width / tp], rel=0.02
    )
    kept = layer_activations(other, gated, columns).kept - layer_activations(problem, run, columns).kept
    assert kept == pytest.approx(2 * tokens * 32 * (width + 128) / tp)


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_sparse_attention_flops_by_hand(tp: int) -> None:
    """On an ideal accelerator: index scores of all earlier keys by every rank, and attention of latent width to at
    most 2,048 keys by the heads of a rank, padded to 64; backward its loss and the gradients of selected keys."""
    problem = problem_of("deepseek-v3.2", ideal_hardware(), sequence_length=16384)
    attention = problem.model.kinds[0].attention
    shard = Shard.of(problem, columns_of(tp=tp, sequence_parallel=tp > 1, dp=8))
    forward, backward = flash_core_s(shard, attention, 16384, shard.tokens, 1)
    selected, heads = np.minimum(np.arange(16384) + 0.5, 2048).sum(), max(128 // tp, 64)
    scores = 16384 * 16384 / 2 * 2 * 64 * 128
    core = 2 * selected * heads * (576 + 512)
    loss = 2 * selected * heads * 576 + 3 * 2 * selected * 64 * 128
    assert forward[0] * PEAK_FLOPS_PER_S == pytest.approx(scores + core, rel=1e-4)
    assert backward[0] * PEAK_FLOPS_PER_S == pytest.approx(2.5 * core + loss, rel=1e-4)


def test_indexers_are_not_divided_by_tensor_parallelism() -> None:
    """Every rank of tp=8 runs the whole indexer: its time is that without tensor parallelism."""
    problem = problem_of("deepseek-v3.2", ideal_hardware(), sequence_length=8192)
    small = problem.model.kinds[0].attention.model_copy(
        update={"indexer": Indexer(index_n_heads=1, index_head_dim=1, index_topk=2048)}
    )
    kind = problem.model.kinds[0].model_copy(update={"attention": small})
    added = [
        (layer_seconds(problem, problem.model.kinds[0], columns) - layer_seconds(problem, kind, columns))[
            Part.COMPUTE, [Phase.FORWARD, Phase.BACKWARD], 0
        ]
        for columns in (columns_of(tp=tp, dp=8, sequence_parallel=tp > 1) for tp in (1, 8))
    ]
    assert added[0] == pytest.approx(added[1], rel=1e-9)


def test_block_sparse_attention_as_published() -> None:
    """At 2^20 tokens MiniMax-M3's attention has 28.4 times fewer FLOPs than attention to all keys (arXiv
    2606.13392): scores of 4 heads, and 64 heads over 2,048 keys; backward 2.5 times the latter. Every rank of tp
    has the whole branch, no gradient reaches it, and positions of blocks are kept."""
    length = 2**20
    sizes = {"index_n_heads": 4, "index_head_dim": 128, "index_block_size": 128, "index_topk_blocks": 16}
    whole = GroupedQueryAttention(num_attention_heads=64, num_key_value_heads=4, head_dim=128)
    sparse = GroupedQueryAttention(**whole.model_dump() | {"blocks": sizes})
    problem = problem_of("llama3-8b", ideal_hardware(), sequence_length=length)
    (run,) = problem.model.layers
    kinds = [run.model_copy(update={"attention": attention}) for attention in (whole, sparse)]
    for tp in (1, 2):
        shard = Shard.of(problem, columns_of(tp=tp, dp=8))
        (dense, _), (forward, backward) = (
            flash_core_s(shard, attention, length, shard.tokens, 1) for attention in (whole, sparse)
        )
        scores, core = (
            length * length / 2 * 2 * 4 * 128,
            4 * np.minimum(np.arange(length) + 0.5, 2048).sum() * 64 * 128,
        )
        assert forward[0] * PEAK_FLOPS_PER_S == pytest.approx(scores + core / tp, rel=1e-3)
        assert backward[0] * PEAK_FLOPS_PER_S == pytest.approx(2.5 * core / tp, rel=1e-3)
        if tp == 1:
            assert dense[0] / forward[0] == pytest.approx(28.4, abs=0.1)
    columns = columns_of(dp=8)
    counts = [layer_parameters(problem.model, kind).total for kind in kinds]
    assert counts[1] - counts[0] == 4096 * 5 * 128 + 2 * 128
    times = [layer_seconds(problem, kind, columns)[Part.COMPUTE, :, 0] * PEAK_FLOPS_PER_S for kind in kinds]
    assert times[1][Phase.WEIGHT] == times[0][Phase.WEIGHT]
    all_keys = 4 * length * length / 2 * 64 * 128
    forwards = times[1][Phase.FORWARD] - times[0][Phase.FORWARD]
    assert forwards == pytest.approx(2 * length * 4096 * 640 + scores + core - all_keys, rel=1e-3)
    assert times[1][Phase.BACKWARD] - times[0][Phase.BACKWARD] == pytest.approx(2.5 * (core - all_keys), rel=1e-3)
    kept = [layer_activations(problem, kind, columns) for kind in kinds]
    assert kept[1].kept - kept[0].kept == pytest.approx(4 * length * 4 * 16)
    # Context-parallel ranks gather keys, values and the branch's keys, and sum gradients of keys and values.
    parts, hardware = columns_of(cp=4, dp=2), shipped_hardware("dgx-b200")
    again = layer_activations(problem, kinds[1], parts)
    assert again.kept == pytest.approx(kept[1].kept / 4 + length / 4 * 3 * 2 * 2 * 4 * 128)
    assert again.workspace >= 2 * length * 2 * 4 * 128
    assert layer_seconds(problem, kinds[1], parts)[Part.COMPUTE] * 4 == pytest.approx(
        layer_seconds(problem, kinds[1], columns)[Part.COMPUTE], rel=1e-3
    )
    found = layer_seconds(problem.model_copy(update={"hardware": hardware}), kinds[1], parts)[Part.CP, :, 0]
    sizes = (2.0 * length * (2 * 4 * 128 + 128), 2.0 * length * 2 * 4 * 128)
    gather, back = (np.array([size]) for size in sizes)
    group = placement.context(parts)
    assert found[Phase.FORWARD] == pytest.approx(collectives.all_gather_s(hardware, gather, *group)[0])
    assert found[Phase.BACKWARD] == pytest.approx(collectives.all_reduce_s(hardware, back, *group)[0])


def test_layers_that_take_selected_keys_have_the_attention_alone() -> None:
    """GLM-5.2's shared layers have neither the matrices of an indexer nor scores, loss and gathers of its inputs:
    the attention to 2,048 keys is left, and the layer that gives its keys keeps their positions for the replay."""
    problem = problem_of("glm-5", ideal_hardware(), sequence_length=16384)
    own = problem.model.kinds[0]
    takes, gives = (
        own.model_copy(update={"attention": own.attention.model_copy(update={"indexer": indexer})})
        for indexer in (own.attention.indexer.model_copy(update={"sharing": word}) for word in ("takes", "gives"))
    )
    less = layer_parameters(problem.model, own).total - layer_parameters(problem.model, takes).total
    assert less == 2048 * 32 * 128 + 6144 * (128 + 32) + 2 * 128
    columns = columns_of(tp=2, sequence_parallel=True, dp=8)
    shard, length = Shard.of(problem, columns), 16384
    forward, backward = flash_core_s(shard, takes.attention, length, shard.tokens, 1)
    core = 2 * np.minimum(np.arange(length) + 0.5, 2048).sum() * 64 * (576 + 512)
    assert forward[0] * PEAK_FLOPS_PER_S == pytest.approx(core, rel=1e-4)
    assert backward[0] * PEAK_FLOPS_PER_S == pytest.approx(2.5 * core, rel=1e-4)
    times = [layer_seconds(problem, kind, columns)[..., 0] for kind in (own, takes, gives)]
    assert (times[0] == times[2]).all()
    assert times[1][Part.TP].sum() < times[0][Part.TP].sum()
    positions = 4 * 2048 * length
    kept = [layer_activations(problem, kind, columns) for kind in (own, takes, gives)]
    indexer = 2 * (32 * 129 + 128) + 2 * 128 + 2 * (6144 + 2048)
    assert kept[0].kept - kept[1].kept == pytest.approx(length * indexer + positions)
    assert kept[0].dropped_full - kept[2].dropped_full == pytest.approx(positions)
    assert kept[2].kept == kept[0].kept


@pytest.mark.parametrize(
    ("length", "num_gpus", "batch", "step_s", "tflops_per_s"),
    [
        (2048, 352, 1024, 31.20492, 54.595),
        (4096, 192, 1024, 64.78654, 102.52),
        (2**17, 192, 56, 143.24882, 88.848),
    ],
)
def test_published_flops_of_shared_selections_are_met(
    length: int, num_gpus: int, batch: int, step_s: float, tflops_per_s: float
) -> None:
    """Megatron-Bridge's runs of GLM-5.2 with a layer of further tokens count within 1 % as many FLOPs a token from
    2K to 128K (067f987d, examples/model_verification_cards/glm5-2). They verify support, untuned: their steps take
    3.4 times as long as simulated on 352 H100, and 4.0 times on 192 GB200."""
    model = model_from_config(configurations()["zai-org--GLM-5.2"], "glm-5.2")
    published = tflops_per_s * 1e12 * num_gpus * step_s / (batch * length)
    assert model_flops_per_token(model, length, mtp_layers=1) == pytest.approx(published, rel=0.01)


def test_key_value_heads_are_never_split() -> None:
    """A rank holds kv / tp heads, at least one."""
    attention = GroupedQueryAttention(num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    found = kv_heads_per_rank(attention, np.array([1.0, 4.0, 8.0, 16.0]))
    assert found.tolist() == [8, 2, 1, 1]


def test_overlap_by_hand() -> None:
    """Of 5 s beside 3 s of compute 3 are hidden; the exposed 2 grow by the fifth of 3 s that compute
    loses."""
    exposed, hidden = overlap_s(np.array([5.0, 2.0]), np.array([3.0, 3.0]), np.array([0.2, 0.2]))
    assert hidden.tolist() == [3, 2]
    assert exposed == pytest.approx([2.6, 0.4])


def test_overlap_never_costs_more_than_none() -> None:
    """Communication beside compute is exposed for no longer than it lasts."""
    random = np.random.default_rng(3)
    seconds, cover, share = random.random((3, 1000))
    exposed, hidden = overlap_s(seconds, cover, share)
    assert np.all(exposed <= seconds * (1 + 1e-12))
    assert np.all((hidden <= cover) & (hidden <= seconds))


@pytest.mark.parametrize(("problem", "kind"), cases())
def test_no_degree_no_communication(problem: Problem, kind: int) -> None:
    """tp = 1 sends nothing among tensor ranks, cp = 1 turns no ring, ep = etp = 1 has no all-to-all."""
    found = seconds(problem, kind, dp=8)
    for part in (Part.TP, Part.TP_HIDDEN, Part.CP, Part.CP_HIDDEN, Part.EP, Part.ZERO, Part.ZERO_HIDDEN):
        assert np.all(found[part] == 0), part.name


@pytest.mark.parametrize(("problem", "kind"), cases())
def test_recompute_phases(problem: Problem, kind: int) -> None:
    """A full replay is the forward, part by part; a selective one is something, and less."""
    found = seconds(problem, kind, tp=4, cp=2, dp=2, sequence_parallel=True)
    assert found[:, Phase.FULL] == pytest.approx(found[:, Phase.FORWARD])
    assert 0 < found[EXPOSED, Phase.SELECTIVE].sum() < found[EXPOSED, Phase.FULL].sum()
    assert np.all(found >= 0)


@pytest.mark.parametrize(("problem", "kind"), cases())
def test_more_tokens_never_cheaper(problem: Problem, kind: int) -> None:
    """Forward and backward of a longer micro-batch never take less time."""
    times = [
        seconds(problem, kind, tp=2, sequence_parallel=True, micro_batch_size=b)[EXPOSED].sum(axis=0)
        for b in (1, 2, 3, 4, 6, 8, 16)
    ]
    assert np.all(np.diff(np.array(times), axis=0) >= 0)


@pytest.mark.parametrize(("problem", "kind"), cases())
def test_columns_cost_as_one_by_one(problem: Problem, kind: int) -> None:
    """Evaluating many layouts at once gives each what it gets alone."""
    fields = [
        {"tp": tp, "cp": cp, "dp": 4, "micro_batch_size": b, "sequence_parallel": tp > 1}
        for tp in (1, 2, 8)
        for cp in (1, 4)
        for b in (1, 3)
    ]
    layer = problem.model.kinds[kind]
    together = layer_seconds(problem, layer, type(columns_of()).concatenate([columns_of(**f) for f in fields]))
    for row, one in enumerate(fields):
        assert np.array_equal(together[..., row], seconds(problem, kind, **one))


def test_sequence_parallel_communication() -> None:
    """Attention and MLP each gather and scatter once forward; backward they gather the output gradient and
    the input and scatter the input gradient, of which the first is exposed (Korthikanti et al. 2022, figure
    5)."""
    problem = problem_of("llama3-8b", "dgx-h100")
    message = 2 * 8192 * 4096
    gather = collectives.all_gather_s(problem.hardware, message, 8, 1)
    scatter = collectives.reduce_scatter_s(problem.hardware, message, 8, 1)
    found = seconds(problem, tp=8, sequence_parallel=True)
    assert found[Part.TP, Phase.FORWARD] == pytest.approx(2 * (gather + scatter))
    assert found[Part.TP_HIDDEN, Phase.FORWARD] == 0
    assert overlapped_sum(problem, found, Part.TP, Phase.BACKWARD) == pytest.approx(2 * (2 * gather + scatter))
    assert found[Part.TP, Phase.BACKWARD] >= 2 * gather * (1 - 1e-12)


def test_what_8_bit_products_read_is_gathered_in_8_bits() -> None:
    """In fp8 an input is cast before it is gathered: half of the bytes; what is scattered stays in bf16."""
    problem = problem_of("llama3-8b", "dgx-h100", precision="fp8")
    message = 8192 * 4096
    gather = collectives.all_gather_s(problem.hardware, message, 8, 1)
    scatter = collectives.reduce_scatter_s(problem.hardware, 2 * message, 8, 1)
    found = seconds(problem, tp=8, sequence_parallel=True)
    assert found[Part.TP, Phase.FORWARD] == pytest.approx(2 * (gather + scatter))
    assert overlapped_sum(problem, found, Part.TP, Phase.BACKWARD) == pytest.approx(2 * (2 * gather + scatter))


def test_tensor_parallel_communication() -> None:
    """Without sequence parallelism: two all-reduces forward, two beside the weight gradients backward
    (Shoeybi et al. 2019, section 3)."""
    problem = problem_of("llama3-8b", "dgx-h100")
    reduce = collectives.all_reduce_s(problem.hardware, 2 * 8192 * 4096, 8, 1)
    found = seconds(problem, tp=8)
    assert found[Part.TP, Phase.FORWARD] == pytest.approx(2 * reduce)
    assert overlapped_sum(problem, found, Part.TP, Phase.BACKWARD) == pytest.approx(2 * reduce)


@pytest.mark.parametrize("cp", [2, 8])
def test_ring_communication(cp: int) -> None:
    """cp - 1 sends of the local keys and values forward, of keys, values and their gradients backward."""
    problem = problem_of("llama3-8b", "dgx-h100")
    block = 2 * (8192 / cp) * 2 * 8 * 128
    found = seconds(problem, cp=cp)
    forward = (cp - 1) * collectives.p2p_s(problem.hardware, block, 1)
    backward = (cp - 1) * collectives.p2p_s(problem.hardware, 2 * block, 1)
    assert overlapped_sum(problem, found, Part.CP, Phase.FORWARD) == pytest.approx(forward)
    assert overlapped_sum(problem, found, Part.CP, Phase.BACKWARD) == pytest.approx(backward)


def test_expert_communication() -> None:
    """Dispatch and combine, each of top-k copies of the rank's tokens, forward and again backward."""
    problem = problem_of("mixtral-8x7b", "dgx-h100")
    sent = 2 * (4096 / 2) * 2 * 4096
    one = collectives.all_to_all_s(problem.hardware, sent, 4, 1)
    found = seconds(problem, tp=2, dp=4, ep=4, sequence_parallel=True)
    assert found[Part.EP, Phase.FORWARD] == pytest.approx(2 * one)
    assert found[Part.EP, Phase.BACKWARD] == pytest.approx(2 * one)


def test_a_token_is_sent_once_to_each_node() -> None:
    """Across nodes the default dispatcher sends fewer copies than an all-to-all of all; inside one, as many."""
    once = problem_of("qwen3-30b-a3b", "dgx-h100")
    software = once.hardware.software.model_copy(update={"deduplicated_dispatch": False})
    hardware = once.hardware.model_copy(update={"software": software})
    every = once.model_copy(update={"hardware": hardware})
    across, inside = {"dp": 16, "ep": 16}, {"dp": 16, "ep": 8}
    part = (Part.EP, Phase.FORWARD)
    assert seconds(once, **across)[part] < 0.5 * seconds(every, **across)[part]
    assert seconds(once, **inside)[part] == seconds(every, **inside)[part]


def test_several_experts_of_a_rank_sort_their_rows_again() -> None:
    """With expert parallelism and two experts a rank, 8 bytes a row and hidden element forward; with one, none."""
    problem = problem_of("mixtral-8x7b", "dgx-h100")
    rows, hidden = 4096 * 2, 4096
    two, one = (seconds(problem, dp=8, ep=ep)[Part.COMPUTE, Phase.FORWARD] for ep in (4, 8))
    gpu = problem.hardware.accelerator
    products = [float(_expert_products(problem, rows, ep)) for ep in (4, 8)]
    sort = float(memory_bound_s(gpu, 8 * rows * hidden))
    assert two - one == pytest.approx(sort + products[0] - products[1])


def _expert_products(problem: Problem, rows: int, ep: int) -> float:
    """Seconds of the forward products of the experts of one rank of Mixtral 8x7B."""
    gpu, experts = problem.hardware.accelerator, 8 // ep
    up = gemm_s(gpu, "bf16", rows / experts, 2 * 14336, 4096, experts)
    return float(up + gemm_s(gpu, "bf16", rows / experts, 4096, 14336, experts))


def test_expert_tensor_communication() -> None:
    """etp ranks gather the dispatched copies of all of them, and scatter the sums."""
    problem = problem_of("mixtral-8x7b", "dgx-h100")
    whole = 2 * (2 * (4096 / 2) * 2 * 4096)
    gather = collectives.all_gather_s(problem.hardware, whole, 2, 1)
    scatter = collectives.reduce_scatter_s(problem.hardware, whole, 2, 1)
    found = seconds(problem, tp=2, dp=4, etp=2, sequence_parallel=True)
    assert found[Part.EP, Phase.FORWARD] == pytest.approx(gather + scatter)


def test_fp8_pays_off_on_wide_layers() -> None:
    """fp8 makes the wide products of Llama-3 405B faster, and no message larger."""
    bf16 = seconds(problem_of("llama3-405b", "dgx-h100"), tp=8, sequence_parallel=True)
    fp8 = seconds(problem_of("llama3-405b", "dgx-h100", precision="fp8"), tp=8, sequence_parallel=True)
    assert fp8[Part.COMPUTE, Phase.FORWARD] < 0.8 * bf16[Part.COMPUTE, Phase.FORWARD]
    assert fp8[Part.TP, Phase.FORWARD] < bf16[Part.TP, Phase.FORWARD]


def test_unfused_attention_uses_the_heads_of_its_own_layer() -> None:
    """In a model whose layers have different numbers of heads, each layer pays for its own."""
    base = problem_of("llama3-8b", ideal_hardware(), attention_kernel="unfused", sequence_length=1024)
    kind = base.model.kinds[0]
    attention = kind.attention.model_copy(update={"num_attention_heads": 8, "head_dim": 512})
    few = kind.model_copy(update={"attention": attention})
    mixed = base.model.model_copy(update={"layers": (few, kind)})
    problem = base.model_copy(update={"model": mixed, "hardware": load_hardware("dgx-h100")})
    alone = problem.model_copy(update={"model": base.model})
    assert np.array_equal(seconds(problem, 1), seconds(alone, 0))


def test_shard_of_a_layout() -> None:
    """Tokens of a rank are b s / cp; outside the tensor-parallel region sequence parallelism divides by
    tp."""
    problem = problem_of("llama3-8b", "dgx-h100")
    shard = Shard.of(problem, columns_of(tp=4, cp=2, micro_batch_size=3, sequence_parallel=True))
    assert (shard.tokens.item(), shard.sequence_tp.item()) == (3 * 8192 / 2, 4)
    assert Shard.of(problem, columns_of(tp=4)).sequence_tp.item() == 1
