"""Activation bytes against Korthikanti et al. 2022 (arXiv 2205.05198), table 2, and counts made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from milpplan.problem import MixtureOfExperts, Software
from milpplan.simulation.layers import layer_activations
from tests.simulation.cases import MODEL_HARDWARE, columns_of, problem_of

GPT_FAMILY = ("megatron-22b", "gpt3-175b", "turing-530b", "megatron-1t")


def layer(model: str, kind: int = -1, *, job: dict[str, object] | None = None, **fields: object) -> Any:
    """Activations of one layer of a model under one layout."""
    problem = problem_of(model, "dgx-h100", **(job or {}))
    return layer_activations(problem, problem.model.kinds[kind], columns_of(**fields))


def sizes(model: str, micro_batch: int) -> tuple[float, float, int]:
    """(sbh, 5as/h, s) of a model."""
    spec = problem_of(model).model
    s, h = spec.default_sequence_length, spec.hidden_size
    return s * micro_batch * h, 5 * spec.layers[0].attention.num_attention_heads * s / h, s


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("model", GPT_FAMILY)
def test_table_2_without_sequence_parallelism(model: str, tp: int) -> None:
    """Tensor parallelism alone keeps sbh (10 + 24/t + 5as/(ht)) bytes."""
    sbh, scores, _ = sizes(model, 4)
    kept = layer(model, job={"attention_kernel": "unfused"}, tp=tp, micro_batch_size=4).kept
    assert kept == pytest.approx(sbh * (10 + 24 / tp + scores / tp), rel=1e-12)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("model", GPT_FAMILY)
def test_table_2_with_sequence_parallelism(model: str, tp: int) -> None:
    """Sequence parallelism divides everything: sbh/t (34 + 5as/h) bytes."""
    sbh, scores, _ = sizes(model, 4)
    kept = layer(
        model, job={"attention_kernel": "unfused"}, tp=tp, micro_batch_size=4, sequence_parallel=tp > 1
    ).kept
    assert kept == pytest.approx(sbh / tp * (34 + scores), rel=1e-12)


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("model", GPT_FAMILY)
def test_selective_recomputation_drops_the_scores(model: str, tp: int) -> None:
    """With unfused attention selective recomputation drops 5as^2b/t, and so keeps sbh/t * 34 (table 2)."""
    sbh, scores, _ = sizes(model, 2)
    found = layer(model, job={"attention_kernel": "unfused"}, tp=tp, micro_batch_size=2, sequence_parallel=tp > 1)
    assert found.dropped_selective == pytest.approx(sbh * scores / tp, rel=1e-12)
    assert found.kept - found.dropped_selective == pytest.approx(34 * sbh / tp, rel=1e-12)


@pytest.mark.parametrize(("model", "saved"), [("gpt3-175b", 0.70), ("turing-530b", 0.65)])
def test_published_savings_of_selective_recomputation(model: str, saved: float) -> None:
    """Section 5 of the paper: 5as/h is 80 for GPT-3 and 64 for MT-NLG, which saves 70 % and 65 %."""
    found = layer(model, job={"attention_kernel": "unfused"}, tp=8, sequence_parallel=True)
    assert (found.dropped_selective / found.kept).item() == pytest.approx(saved, abs=0.005)


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("model", GPT_FAMILY)
def test_full_recomputation_keeps_the_input(model: str, tp: int) -> None:
    """Full recomputation keeps the layer's input, 2sbh bytes, split among ranks under sequence
    parallelism."""
    sbh, _, _ = sizes(model, 1)
    plain = layer(model, job={"attention_kernel": "unfused"}, tp=tp)
    split = layer(model, job={"attention_kernel": "unfused"}, tp=tp, sequence_parallel=tp > 1)
    assert plain.kept - plain.dropped_full == pytest.approx(2 * sbh)
    assert split.kept - split.dropped_full == pytest.approx(2 * sbh / tp)


def test_llama_layer_counted_by_hand() -> None:
    """Llama-3 8B with flash attention: two norm inputs, their outputs, q, k, v, attention out and its
    statistics, gate and up, and their product."""
    h, q, kv, heads, f = 4096, 4096, 1024, 32, 14336
    a_token = 2 * 2 * h + 2 * h + 2 * (q + 2 * kv) + 2 * q + 4 * heads + 2 * h + 2 * 2 * f + 2 * f
    found = layer("llama3-8b", job={"sequence_length": 8192})
    assert found.kept == pytest.approx(8192 * a_token)
    norms_and_activation = 2 * 2 * h + 2 * f
    assert found.dropped_selective == pytest.approx(8192 * norms_and_activation)


def test_flash_attention_is_linear_in_the_sequence() -> None:
    """Without a score matrix, twice the tokens keep exactly twice the bytes."""
    short = layer("llama3-8b", job={"sequence_length": 4096})
    long = layer("llama3-8b", job={"sequence_length": 8192})
    assert long.kept == pytest.approx(2 * short.kept)


def test_context_parallelism_divides_everything() -> None:
    """A context-parallel rank keeps its share of the tokens and nothing else."""
    whole = layer("llama3-8b")
    shared = layer("llama3-8b", cp=4)
    assert shared.kept == pytest.approx(whole.kept / 4)
    assert shared.workspace == pytest.approx(whole.workspace / 4)


def test_key_value_heads_are_copied_beyond_their_number() -> None:
    """Eight key/value heads on 16 ranks: each holds a whole one, so k and v stop shrinking."""
    spec = problem_of("llama3-8b").model
    tokens = spec.default_sequence_length
    eight = layer("llama3-8b", tp=8, sequence_parallel=True).kept
    sixteen = layer("llama3-8b", tp=16, sequence_parallel=True).kept
    kv_bytes = 2 * tokens * 2 * 128
    assert sixteen == pytest.approx((eight - kv_bytes) / 2 + kv_bytes)


@pytest.mark.parametrize("model", ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"])
def test_routed_activations_are_not_divided_by_ep(model: str) -> None:
    """Expert parallelism moves tokens, it does not thin them out: bytes do not depend on ep."""
    alone = layer(model, dp=8, cp=1)
    spread = layer(model, dp=8, cp=1, ep=8)
    assert spread.kept == alone.kept
    assert spread.workspace == alone.workspace


def test_routed_activations_of_mixtral_by_hand() -> None:
    """Mixtral with bf16 keeps, for each of two copies of a token: input, gate and up, their product, and the
    expert's output; besides, the norm output once and the router's fp32 probabilities and indices."""
    problem = problem_of("mixtral-8x7b", "dgx-h100")
    moe = problem.model.kinds[0].mlp
    assert isinstance(moe, MixtureOfExperts)
    h, f, tokens = 4096, 14336, 4096
    attention = 2 * (4096 + 2 * 1024) + 2 * 4096 + 4 * 32
    copies = 2 * (2 * h + 2 * 2 * f + 2 * f + 2 * h)
    a_token = 2 * 2 * h + 2 * h + attention + 2 * h + copies + 8 * 8
    assert layer("mixtral-8x7b").kept == pytest.approx(tokens * a_token)


def test_shared_expert_reads_the_router_input() -> None:
    """In bf16 router, dispatch and shared expert read one tensor, so it is kept once; the shared expert adds
    its gate, up and product only."""
    problem = problem_of("deepseek-v3", "dgx-h100")
    kind = problem.model.kinds[1]
    lonely = kind.model_copy(update={"mlp": kind.mlp.model_copy(update={"shared_intermediate_size": 0})})
    with_shared = layer_activations(problem, kind, columns_of()).kept
    without = layer_activations(problem, lonely, columns_of()).kept
    assert with_shared - without == pytest.approx(4096 * (2 * 2 + 2) * 2048)


def test_expert_tensor_parallelism_gathers_inputs() -> None:
    """etp ranks gather one another's tokens and split the width: inputs grow etp-fold, inner tensors do
    not."""
    one = layer("mixtral-8x7b", tp=4, sequence_parallel=True).kept
    four = layer("mixtral-8x7b", tp=4, etp=4, sequence_parallel=True).kept
    copies_of_input = 2 * 4096 / 4 * 2 * 4096
    assert four - one == pytest.approx(3 * copies_of_input)


def test_fp8_saves_matrix_inputs_in_one_byte() -> None:
    """fp8 halves the two norm outputs and the input of the down projection, nothing else."""
    bf16, fp8 = layer("llama3-8b"), layer("llama3-8b", job={"precision": "fp8"})
    assert bf16.kept - fp8.kept == pytest.approx(8192 * (2 * 4096 + 14336))


def test_latent_attention_by_hand() -> None:
    """DeepSeek-V3's first layer in bf16: latents before and after their norms, expanded q, k, v, the
    output."""
    h, heads, f, tokens = 7168, 128, 18432, 4096
    latents = 2 * 2 * (1536 + 512 + 64)
    expanded = 2 * heads * (2 * 192 + 128)
    attention = latents + expanded + 2 * heads * 128 + 4 * heads
    a_token = 2 * 2 * h + 2 * h + attention + 2 * h + 3 * 2 * f
    found = layer("deepseek-v3", 0)
    assert found.kept == pytest.approx(tokens * a_token)
    assert found.dropped_selective == pytest.approx(tokens * (2 * 2 * h + expanded + 2 * f))


def test_sparse_attention_by_hand() -> None:
    """DeepSeek-V3.2's attention keeps, beside its latents, two forms of the queries, latent and real outputs, the
    gathered keys, 2,048 positions of four bytes, and the tensors of its indexer's gradients."""
    heads, tokens, cp = 128, 32768, 4
    queries = 2 * heads * (192 + 576)
    outputs = 2 * heads * (512 + 128) + 4 * heads
    indexer = 2 * (64 * 129 + 128) + 2 * cp * 128 + 4 * 2048
    sparse = queries + outputs + 2 * cp * 576 + indexer
    expanded = 2 * heads * (2 * 192 + 2 * 128) + 4 * heads

    def found(model: str, **fields: Any) -> Any:
        problem = problem_of(model, "dgx-h100", sequence_length=131072)
        return layer_activations(problem, problem.model.kinds[0], columns_of(**fields))

    whole, dense = found("deepseek-v3.2", cp=cp), found("deepseek-v3", cp=cp)
    assert whole.kept - dense.kept == pytest.approx(tokens * (sparse - expanded))
    replayed = queries - 2 * heads * (2 * 192 + 128)
    assert whole.dropped_selective - dense.dropped_selective == pytest.approx(tokens * replayed)
    assert whole.workspace - 2 * 7168 * tokens == pytest.approx(3 * 2**30)
    split = {"tp": 2, "sequence_parallel": True}
    gathered = found("deepseek-v3.2", **split).kept - found("deepseek-v3", **split).kept
    alike = found("deepseek-v3.2", tp=2).kept - found("deepseek-v3", tp=2).kept
    assert gathered - alike == pytest.approx(2 * (7168 + 1536) * 131072)


@pytest.mark.parametrize("case", MODEL_HARDWARE, ids=lambda case: case[0])
def test_order_of_recompute_modes(case: tuple[str, str, str, str]) -> None:
    """No recomputation keeps most, full least, selective lies between; nothing is negative."""
    model, hardware, kernel, precision = case
    problem = problem_of(model, hardware, attention_kernel=kernel, precision=precision)
    for kind in problem.model.kinds:
        for fields in ({}, {"tp": 4, "sequence_parallel": True}, {"tp": 2, "cp": 2}):
            found = layer_activations(problem, kind, columns_of(**fields))
            assert np.all(found.dropped_selective > 0)
            assert np.all(found.dropped_full > found.dropped_selective)
            assert np.all(found.kept > found.dropped_full)
            assert np.all(found.workspace > 0)


def with_software(model: str, layout: dict[str, object], **software: object) -> Any:
    """Activations of a layer under a framework's habits."""
    problem = problem_of(model, "dgx-h100")
    spec = problem.hardware.model_copy(update={"software": Software.model_validate(software)})
    return layer_activations(
        problem.model_copy(update={"hardware": spec}), problem.model.kinds[-1], columns_of(**layout)
    )


@pytest.mark.parametrize(
    ("software", "bytes_a_token"),
    [
        ({"norm_kept_bytes": 6.0}, 2 * 6 * 4096 / 4),
        ({"fused_activation": False}, 2 * 14336 / 4),
        ({"gathered_inputs": True}, 2 * 2 * 4096 * 3 / 4),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_single_operators_keep_more(software: dict[str, object], bytes_a_token: float) -> None:
    """On four ranks with sequence parallelism: copies of a quarter of both norms' inputs, a quarter of the gate's
    activation, the other three quarters of both gathered inputs. Recomputation drops them."""
    split = {"tp": 4, "sequence_parallel": True}
    plain, more = with_software("llama3-8b", split), with_software("llama3-8b", split, **software)
    extra = 8192 * bytes_a_token
    assert more.kept - plain.kept == pytest.approx(extra)
    assert more.dropped_full - plain.dropped_full == pytest.approx(extra)
    assert more.dropped_selective - plain.dropped_selective == pytest.approx(extra)


@pytest.mark.parametrize(("tp", "sums"), [(1, 0), (4, 2 * 4096)])
@pytest.mark.parametrize("unread", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_operator_checkpoints_keep_every_second_product(tp: int, sums: int, unread: bool, fused: bool) -> None:
    """Of a layer of Llama 3 8B: its input, queries, values, keys of the same product, the result of attention with
    4 bytes a head, gate, and the last product's result unless the layer is compiled; with tensor parallelism the
    two sums over it."""
    software = {"operator_checkpoints": True, "keeps_unread_results": unread, "fused_qkv": fused}
    found = with_software("llama3-8b", {"tp": tp}, **software)
    products = (4096 + 1024 + 1024 * fused + 4096 + 14336) / tp + (4096 if unread else 0)
    expected = 8192 * (2 * (4096 + products + sums) + 4 * 32 / tp)
    assert found.kept - found.dropped_selective == pytest.approx(expected)
    assert found.dropped_full == with_software("llama3-8b", {"tp": tp}).dropped_full


@pytest.mark.parametrize(("ep", "exchanged"), [(1, 0), (8, 2 * 8 * 2048)])
def test_operator_checkpoints_keep_choices_and_exchanges_of_experts(ep: int, exchanged: int) -> None:
    """Of a layer of Qwen3 30B-A3B its input, the product of queries, keys and values, the result of attention with
    4 bytes a head, 12 bytes for each of eight chosen experts, and the rows of both exchanges."""
    found = with_software("qwen3-30b-a3b", {"dp": 8, "ep": ep}, operator_checkpoints=True)
    products = 2048 + 4096 + 2 * 512 + 4096
    tokens = problem_of("qwen3-30b-a3b", "dgx-h100").job.sequence_length
    expected = tokens * (2 * (products + exchanged) + 4 * 32 + 12 * 8)
    assert found.kept - found.dropped_selective == pytest.approx(expected)


def test_nothing_is_gathered_without_sequence_parallelism() -> None:
    """Inputs that no rank shares are kept whole anyway."""
    plain = with_software("llama3-8b", {"tp": 4})
    assert with_software("llama3-8b", {"tp": 4}, gathered_inputs=True).kept == plain.kept


def test_scores_of_single_operators() -> None:
    """Six bytes a score instead of two: four more for each of s^2 a."""
    problem = problem_of("llama3-8b", "dgx-h100", attention_kernel="unfused")
    spec = problem.hardware.model_copy(update={"software": Software(score_kept_bytes=6.0)})
    kind = problem.model.kinds[0]
    plain = layer_activations(problem, kind, columns_of())
    more = layer_activations(problem.model_copy(update={"hardware": spec}), kind, columns_of())
    assert more.kept - plain.kept == pytest.approx(4 * 8192 * 8192 * 32)


def test_selective_recomputation_replays_both_norms_of_a_layer_with_experts() -> None:
    """Mixtral drops the input of q, k and v, that of the router, and the product of gate and up."""
    tokens, h, f = 4096, 4096, 14336
    expected = tokens * (2 * h + 2 * h + 2 * 2 * f)
    assert layer("mixtral-8x7b").dropped_selective == pytest.approx(expected)
