"""Conversions between what sources print: each goes both ways."""

from __future__ import annotations

import pytest

from milpplan.simulation.layers import model_flops_per_token
from milpplan.validation.runs import SOURCE_PEAK, flops_per_token, rates, state, step_measure
from tests.validation.cases import run

GPT = {
    "name": "GPT-175B",
    "layers": 96,
    "hidden": 12288,
    "ffn_hidden": 49152,
    "heads": 96,
    "kv_heads": 96,
    "vocab": 51200,
    "seq_len": 2048,
    "gated_mlp": False,
    "tied_embeddings": True,
}


def test_hardware_flops_are_those_of_narayanan() -> None:
    """96 B s l h^2 (1 + s / 6h + V / 16 l h), with full recomputation (equation 3), within 0.1 %."""
    problem = state(run(model=GPT, group="megatron-2021")).problem
    s, layers, h, vocab = 2048, 96, 12288, 51200
    expected = 96 * layers * h * h * (1 + s / (6 * h) + vocab / (16 * layers * h))
    assert flops_per_token(problem, "full", "full") == pytest.approx(expected, rel=1e-3)


def test_selective_adds_the_forward_of_the_attention_core() -> None:
    """4 s h a layer and token over the full matrix (Korthikanti et al. 2022, appendix A)."""
    problem = state(run(model=GPT)).problem
    added = flops_per_token(problem, "full", "selective") - flops_per_token(problem, "full")
    assert added == pytest.approx(96 * 4 * 2048 * 12288)


def test_full_attention_counts_twice_the_causal_half() -> None:
    """The difference is 6 s h a layer and token."""
    problem = state(run(model=GPT)).problem
    assert flops_per_token(problem, "causal") == model_flops_per_token(problem.model, 2048)
    added = flops_per_token(problem, "full") - flops_per_token(problem, "causal")
    assert added == pytest.approx(96 * 6 * 2048 * 12288)


@pytest.mark.parametrize("group", ["nemo-megatron-bridge", "megatron-2021"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("field", ["tokens_per_s_per_gpu", "model", "hardware", "mfu", "hfu"])
def test_a_step_time_survives_every_way_of_printing_it(group: str, recompute: str, field: str) -> None:
    """Step time -> the printed rate -> step time is the identity."""
    plain = run(group=group, parallel__recompute=recompute)
    statement, seconds = state(plain), 0.875
    count = "causal" if group == "nemo-megatron-bridge" else "full"
    printed = rates(statement, seconds, count)  # type: ignore[arg-type]
    peak = SOURCE_PEAK["dgx-h100", "bf16"]
    measured = {
        "tokens_per_s_per_gpu": {"tokens_per_s_per_gpu": printed["tokens_per_s_per_gpu"]},
        "model": {"tflops_per_gpu": printed["model_flops_per_s_per_gpu"] / 1e12, "tflops_kind": "model"},
        "hardware": {"tflops_per_gpu": printed["hardware_flops_per_s_per_gpu"] / 1e12, "tflops_kind": "hardware"},
        "mfu": {"mfu": printed["model_flops_per_s_per_gpu"] / peak},
        "hfu": {"hfu": printed["hardware_flops_per_s_per_gpu"] / peak},
    }[field]
    again = run(group=group, parallel__recompute=recompute, measured={"status": "ok", **measured})
    found = step_measure(again, state(again))
    assert found is not None
    assert found.step_time_s == pytest.approx(seconds)


def test_hardware_flops_are_told_by_several_words() -> None:
    """The kind of the FLOP/s decides the step time, in whatever words."""
    seconds = []
    for kind in ("hardware", "HFU", "Hardware FLOPs", "model"):
        measured = {"status": "ok", "tflops_per_gpu": 400.0, "tflops_kind": kind}
        one = run(parallel__recompute="full", measured=measured)
        step = step_measure(one, state(one))
        assert step is not None
        seconds.append(step.step_time_s)
    assert seconds[0] == seconds[1] == seconds[2] > seconds[3]


def test_nothing_measured_is_none() -> None:
    """A run out of memory, or one that prints nothing of use, has no step time."""
    for measured in ({"status": "oom"}, {"status": "ok"}, {"status": "ok", "mfu": 0.0}):
        one = run(measured=measured)
        assert step_measure(one, state(one)) is None
