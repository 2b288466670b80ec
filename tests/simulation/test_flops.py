"""Model FLOPs and utilisation against published counts."""

from __future__ import annotations

import pytest

from milpplan.problem import load_model
from milpplan.simulation.layers import mfu, model_flops_per_token, total_parameters
from tests.simulation.cases import problem_of


def test_gpt3_is_6n_and_half_of_12lhs() -> None:
    """GPT-3: 6 FLOPs a parameter that multiplies (positions do not) and half of PaLM's 12 L h s for
    attention."""
    model = load_model("gpt3-175b")
    layers, h, s = 96, 12288, 2048
    multiplying = total_parameters(model) - model.max_position_embeddings * h
    assert model_flops_per_token(model, s) == pytest.approx(6 * multiplying + 12 * layers * h * s / 2)


def test_llama3_8b_published() -> None:
    """Megatron-Bridge counts 51.5 GFLOP a token of Llama-3 8B at 8,192 tokens with half the attention matrix,
    and 57.9 with all of it."""
    model = load_model("llama3-8b")
    half = model_flops_per_token(model, 8192)
    attention = 6 * 32 * 4096 * 8192
    assert half == pytest.approx(51.5e9, rel=0.01)
    assert half + attention == pytest.approx(57.9e9, rel=0.01)


def test_only_active_experts_count() -> None:
    """Mixtral 8x7B: 6 FLOPs for each of 12.9 billion active parameters less the embedding."""
    model = load_model("mixtral-8x7b")
    attention = 6 * (4096 / 2) * 2 * 4096 * 32
    found = model_flops_per_token(model, 4096)
    assert found == pytest.approx(6 * (12.88e9 - 32000 * 4096) + attention, rel=0.002)


def test_window_bounds_the_attention() -> None:
    """Beyond a sliding window attention FLOPs a token stop growing; without one they are linear."""
    windowed, plain = load_model("gpt-oss-120b"), load_model("llama3-8b")
    growth = [model_flops_per_token(plain, s) - model_flops_per_token(plain, s // 2) for s in (8192, 16384)]
    assert growth[1] == pytest.approx(2 * growth[0])
    short, long = (model_flops_per_token(windowed, s) for s in (8192, 16384))
    full_half = 18 * 6 * 4096 * 2 * 64 * 64
    window_part = 18 * 6 * (128 * 128 / (2 * 8192) - 128 * 128 / (2 * 16384)) * 2 * 64 * 64
    assert long - short == pytest.approx(full_half + window_part, rel=1e-9)


def test_latent_attention_width() -> None:
    """DeepSeek-V3: queries are 192 wide and values 128, so attention costs 6 s/2 * 128 * 320 FLOPs a
    layer."""
    model = load_model("deepseek-v3")
    difference = model_flops_per_token(model, 8192) - model_flops_per_token(model, 4096)
    assert difference == pytest.approx(61 * 6 * (4096 / 2) * 128 * 320)


def test_sparse_attention_is_linear_but_for_the_index_scores() -> None:
    """Beyond 2,048 tokens DeepSeek-V3.2 adds a token's index scores with the sequence, 2 s/2 * 64 * 128 FLOPs a
    layer, and what its selection lacks at the start of the sequence."""
    model = load_model("deepseek-v3.2")
    difference = model_flops_per_token(model, 131072) - model_flops_per_token(model, 65536)
    selected = 2048**2 / 2 * (1 / 65536 - 1 / 131072)
    a_key = 6 * 128 * (576 + 512) + 4 * 64 * 128
    assert difference == pytest.approx(61 * (2 * 32768 * 64 * 128 + selected * a_key))


def test_utilisation_by_hand() -> None:
    """Tokens a second times FLOPs a token over the peak of all accelerators, of the job's precision."""
    bf16 = problem_of("llama3-8b", "dgx-h100", sequence_length=8192)
    fp8 = problem_of("llama3-8b", "dgx-h100", sequence_length=8192, precision="fp8")
    flops = model_flops_per_token(bf16.model, 8192)
    assert mfu(bf16, 10_000.0 * 8, 8) == pytest.approx(flops * 10_000 / 989e12)
    assert fp8.hardware.accelerator.fp8 is not None
    peak = fp8.hardware.accelerator.fp8.peak_flops_per_s
    assert mfu(fp8, 10_000.0 * 8, 8) == pytest.approx(flops * 10_000 / peak)
