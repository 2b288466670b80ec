"""Conversions between what sources print: each goes both ways."""

from __future__ import annotations

from dataclasses import replace

import pytest

from milpplan.costs.flops import model_flops_per_token
from milpplan.units import GIB
from milpplan.validation.comparison import compare_run
from milpplan.validation.measures import (
    SOURCE_PEAK,
    MemoryMeasure,
    flops_per_token,
    memory_measure,
    predicted_memory,
    rates,
    step_measure,
)
from milpplan.validation.statement import state
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


def test_nothing_measured_is_none() -> None:
    """A run out of memory, or one that prints nothing of use, has no step time."""
    for measured in ({"status": "oom"}, {"status": "ok"}, {"status": "ok", "mfu": 0.0}):
        one = run(measured=measured)
        assert step_measure(one, state(one)) is None


def test_memory_keeps_its_kind_and_its_stage() -> None:
    """Allocated bytes compare with the peak, the driver's with what it adds, a stage with that stage."""
    reported = {"value": 40960, "unit": "MiB", "how": "nvidia-smi"}
    device = run(measured={"status": "ok", "step_time_s": 1.0, "peak_mem_reported": reported})
    one = compare_run(device)
    assert one.memory is not None
    assert one.memory.peak_bytes == 40 * GIB
    assert one.memory.kind == "device"
    hardware = one.statement.problem.hardware
    expected = one.report.peak_memory_bytes / (1 - hardware.fragmentation_fraction) + hardware.reserved_bytes
    assert one.predicted_memory_bytes == pytest.approx(expected)


def test_memory_of_the_first_stage_is_compared_with_the_first_stage() -> None:
    """nanotron logs rank 0, and what the allocator took there."""
    reported = {
        "max_allocated": 5.0,
        "max_reserved": 8.0,
        "unit": "GiB (torch)",
        "how": "torch.cuda peak on world rank 0 = first pipeline stage",
    }
    one = compare_run(
        run(
            group="nanotron-bench",
            measured={"status": "ok", "step_time_s": 1.0, "peak_mem_GiB": 5.0, "peak_mem_reported": reported},
        )
    )
    assert one.memory is not None
    assert (one.memory.kind, one.memory.stage, one.memory.peak_bytes) == ("reserved", 0, 8 * GIB)
    hardware = one.statement.problem.hardware
    held = 1 / (1 - hardware.fragmentation_fraction) + hardware.software.allocator_share
    assert hardware.software.allocator_share > 0
    stage = one.report.stages[0].memory.peak_bytes
    assert predicted_memory(one.report, one.statement.problem, one.memory) == pytest.approx(stage * held)


def test_the_allocator_holds_no_more_than_there_is() -> None:
    """What the allocator need not hold ends at the memory installed; what the plan needs does not."""
    one = compare_run(run(group="nanotron-bench"))
    hardware = one.statement.problem.hardware
    installed = hardware.accelerator.memory_bytes
    measure = MemoryMeasure(1.0, "reserved", None)
    for peak, expected in (
        (0.95 * installed, installed),
        (2 * installed, 2 * installed / (1 - hardware.fragmentation_fraction)),
    ):
        report = replace(one.report, peak_memory_bytes=int(peak))
        assert predicted_memory(report, one.statement.problem, measure) == pytest.approx(expected)


def test_memory_in_unclear_units_is_left_out() -> None:
    """GB of nobody knows which kind say nothing to a few per cent."""
    for reported in ({"value": 40, "unit": "GB as printed", "how": "log"}, {"value": True, "unit": "MiB"}, {}):
        one = run(measured={"status": "ok", "step_time_s": 1.0, "peak_mem_reported": reported})
        assert memory_measure(one, state(one)) is None
