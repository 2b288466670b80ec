"""Peak memory: what sources mean by it, of which ranks, and bytes that they published."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from milpplan.simulation import simulate
from milpplan.units import GIB, MIB
from milpplan.validation import (
    Comparison,
    MemoryMeasure,
    Validation,
    compare_run,
    held_ahead_bytes,
    memory_measures,
    predicted_memory,
    summarise,
)
from milpplan.validation.runs import framework_of, state
from tests.validation.cases import run

RANK_0 = "torch.cuda peak on world rank 0 = first pipeline stage"
SIZES = {"1.34B": (16, 2048, 8192, 32), "3.57B": (28, 3072, 8192, 24), "8.86B": (32, 4096, 14336, 32)}


def nanotron(allocated: float, reserved: float, flags: tuple[str, ...] = (), **changes: Any) -> Comparison:
    """A record as nanotron's runs are."""
    reported = {"max_allocated": allocated, "max_reserved": reserved, "unit": "GiB (torch)", "how": RANK_0}
    measured = {"status": "ok", "step_time_s": 1.0, "peak_mem_GiB": allocated, "peak_mem_reported": reported}
    return compare_run(run(group="nanotron-bench", measured=measured, flags=list(flags), **changes))


def published(
    size: str, layout: tuple[int, int, int, int, int], allocated: float, flags: tuple[str, ...] = ()
) -> Comparison:
    """One of its runs: model, (tp, pp, dp, micro-batch, ZeRO stage), printed allocated GiB."""
    layers, hidden, width, heads = SIZES[size]
    tp, pp, dp, micro_batch, zero = layout
    names = ("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab", "seq_len", "tied_embeddings")
    values = (layers, hidden, width, heads, heads, 131072, 4096, width < 10_000)
    degrees = {"tp": tp, "pp": pp, "dp": dp, "micro_batch": micro_batch, "zero": zero, "global_batch": 256}
    changes = {f"model__{name}": value for name, value in zip(names, values, strict=True)}
    changes |= {f"parallel__{name}": value for name, value in degrees.items()}
    changes |= {"parallel__grad_accum": None, "hardware__gpus_total": tp * pp * dp}
    return nanotron(allocated, 2 * allocated, flags, **changes)


def test_memory_keeps_its_kind() -> None:
    """Allocated bytes compare with the peak, the driver's with what it adds."""
    reported = {"value": 40960, "unit": "MiB", "how": "nvidia-smi"}
    one = compare_run(run(measured={"status": "ok", "step_time_s": 1.0, "peak_mem_reported": reported}))
    assert one.memories == (MemoryMeasure(40 * GIB, "device", None),)
    hardware = one.statement.problem.hardware
    expected = one.report.peak_memory_bytes / (1 - hardware.fragmentation_fraction) + hardware.reserved_bytes
    assert one.predicted_memory_bytes == pytest.approx(expected)


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("torch.cuda.max_memory_reserved", "reserved"),
        ("torch.cuda.max_memory_allocated on rank 0", "allocated"),
        ("NVIDIA-SMI", "device"),
        ("rocm-smi", "device"),
        ("log", "allocated"),
    ],
)
def test_the_words_of_a_source_tell_its_kind(how: str, kind: str) -> None:
    """Before the habit of its framework, here that of Megatron-LM."""
    reported = {"value": 40.0, "unit": "GiB", "how": how}
    one = run(measured={"status": "ok", "step_time_s": 1.0, "peak_mem_reported": reported})
    assert [measure.kind for measure in memory_measures(one, state(one))] == [kind]


TORCHTITAN = (
    # GPUs, cp, tokens of a sequence, micro-batch, recomputation, mode, precision, GiB
    (8, 1, 8192, 2, "selective", "eager", "bf16", 82.4),
    (8, 1, 8192, 2, "selective", "compile", "bf16", 77.0),
    (8, 1, 8192, 2, "selective", "compile+float8", "float8", 76.8),
    (8, 1, 32768, 1, "full", "compile+float8", "float8", 83.9),
    (8, 2, 65536, 1, "full", "compile+float8", "float8", 84.2),
    (8, 4, 131072, 1, "full", "compile+float8", "float8", 84.0),
    (8, 8, 262144, 1, "full", "compile+float8", "float8", 84.5),
)
"""Llama 3.1 8B on 8 H100, tables 1 and 2 of pytorch/torchtitan@31a17bfd
benchmarks/llama3_h100_202412_torchtitan.md."""


@pytest.mark.parametrize("case", TORCHTITAN, ids=str)
def test_torchtitan_reserves_what_its_checkpoints_and_its_loss_keep(case: tuple[Any, ...]) -> None:
    """Seven published peaks that are not among the shipped runs, within 1 %: nothing was fitted to them."""
    gpus, cp, length, micro_batch, recompute, mode, precision, peak = case
    dims = {"layers": 32, "hidden": 4096, "ffn_hidden": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256}
    changes = {f"model__{name}": size for name, size in dims.items()}
    dp = gpus // cp
    degrees = {"tp": 1, "pp": 1, "cp": cp, "dp": dp, "zero": 3, "micro_batch": micro_batch, "grad_accum": 1}
    degrees |= {"fsdp": True, "sp": False, "recompute": recompute, "precision": precision, "extra": {"mode": mode}}
    changes |= {f"parallel__{name}": value for name, value in degrees.items()}
    changes |= {"model__seq_len": length, "parallel__global_batch": dp * micro_batch, "hardware__gpus_total": gpus}
    measured = {"status": "ok", "step_time_s": 1.0, "peak_mem_GiB": peak}
    one = compare_run(run(group="torchtitan", hardware__gpu_mem_GB=96, measured=measured, **changes))
    assert one.memory is not None
    assert one.memory.kind == "reserved"
    assert one.memory_error_fraction == pytest.approx(0, abs=0.01)


def test_nanotron_prints_what_is_allocated_at_the_update_and_what_was_reserved() -> None:
    """Both of rank 0; the first has no activations, the second what the allocator took and holds."""
    one = nanotron(5.0, 8.0)
    assert one.memories == (MemoryMeasure(5 * GIB, "update", 0), MemoryMeasure(8 * GIB, "reserved", 0))
    hardware, memory = one.statement.problem.hardware, one.report.stages[0].memory
    states = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
    # dp=4 replicas gather: a whole copy of the weights and a share. tp=2: two buffers of 2,048 x 1,024 in 16 bits.
    expected = states + 1.25 * memory.weights_bytes + 2 * 2 * 2048 * 1024 + 64 * MIB
    assert one.predicted_peak(one.memories[0]) == pytest.approx(expected)
    held = 1 / (1 - hardware.fragmentation_fraction) + hardware.software.allocator_share
    assert hardware.software.allocator_share > 0
    assert one.predicted_peak(one.memories[1]) == pytest.approx(memory.peak_bytes * held)


@pytest.mark.parametrize(
    ("tp", "pp", "micro_batches", "forwards"),
    [(2, 8, 16, 6), (2, 4, 16, 2), (2, 4, 1, 0), (2, 2, 16, 0), (1, 8, 16, 0)],
)
def test_forwards_sent_ahead_hold_what_their_streams_have_used(
    tp: int, pp: int, micro_batches: int, forwards: int
) -> None:
    """Two whole hidden states a layer of the first stage for every forward of the warm-up but the first, with
    tensor parallelism; the last stage has no such forward, and the tensors of the update are as before."""
    one = nanotron(
        5.0,
        8.0,
        parallel__tp=tp,
        parallel__pp=pp,
        parallel__dp=1,
        parallel__grad_accum=None,
        parallel__global_batch=micro_batches,
        parallel__micro_batch=1,
        hardware__gpus_total=tp * pp,
    )
    plan, model = one.statement.plan, one.statement.problem.model
    assert plan.layout.num_micro_batches == micro_batches
    layers, width = plan.virtual_stages[0].layers[1], 2 * 2048 * model.hidden_size
    framework = framework_of(one.run)
    assert held_ahead_bytes(one.statement, 0, framework) == 2 * layers * width * forwards
    assert held_ahead_bytes(one.statement, pp - 1, framework) == 0
    plain = replace(framework, held_ahead=0)
    reserved, update = (
        predicted_memory(one.report, one.statement, measure, framework)
        - predicted_memory(one.report, one.statement, measure, plain)
        for measure in (one.memories[1], one.memories[0])
    )
    assert (reserved, update) == (pytest.approx(2 * layers * width * forwards), 0)


@pytest.mark.parametrize(
    ("size", "layout", "allocated"),
    [
        ("8.86B", (4, 1, 32, 1, 1), 21.71),
        ("8.86B", (2, 2, 2, 1, 1), 39.06),
        ("8.86B", (32, 4, 1, 32, 0), 3.50),
        ("3.57B", (4, 1, 64, 4, 0), 16.92),
        ("3.57B", (1, 16, 4, 2, 1), 7.97),
        ("1.34B", (1, 8, 1, 1, 0), 7.94),
        ("1.34B", (16, 2, 4, 32, 1), 1.81),
    ],
)
def test_published_allocations_at_the_update(
    size: str, layout: tuple[int, int, int, int, int], allocated: float
) -> None:
    """Runs of the Ultra-Scale Playbook, within 2 %; nothing is fitted to them but how a tie is dealt."""
    one = published(size, layout, allocated)
    assert one.memory_error_fraction == pytest.approx(0.0, abs=0.02)


@pytest.mark.parametrize(
    ("micro_batch", "num_micro_batches", "vpp", "gigabytes"),
    [(6, 24, 1, 30), (12, 24, 1, 57), (6, 24, 3, 40), (6, 4, 1, 18), (6, 2, 1, 11)],
)
def test_published_peaks_of_zero_bubble(
    micro_batch: int, num_micro_batches: int, vpp: int, gigabytes: int
) -> None:
    """GPT-1.5B on 8 A100 with 1F1B, plain and interleaved, within 4 %: scores and dropout, no flash kernel."""
    model = {"name": "GPT-1.5B", "layers": 22, "hidden": 2304, "ffn_hidden": 9216, "heads": 24, "kv_heads": 24}
    changes: dict[str, Any] = {
        "model": {
            **model,
            "vocab": None,
            "seq_len": 1024,
            "gated_mlp": False,
            "tied_embeddings": None,
            "moe": None,
        },
        "hardware__gpu": "A100",
        "hardware__gpus_total": 8,
        "parallel": {
            "tp": 1,
            "pp": 8,
            "vpp": vpp,
            "dp": 1,
            "cp": 1,
            "sp": False,
            "zero": 0,
            "micro_batch": micro_batch,
            "global_batch": micro_batch * num_micro_batches,
        },
    }
    printed = {"value": gigabytes, "unit": "GB as printed", "how": "peak over stages"}
    measured = {"status": "ok", "step_time_s": 1.0, "peak_mem_reported": printed}
    one = compare_run(run(group="zero-bubble", measured=measured, **changes))
    assert one.memory_error_fraction == pytest.approx(0.0, abs=0.04)


def test_the_earlier_engine_dealt_ties_in_another_way() -> None:
    """1.34B with tp=1, pp=2: 17.57 GiB on the first stage are those of 10 of its 16 layers, not of 11, which the
    earlier engine placed there."""
    mended = published("1.34B", (1, 2, 64, 1, 0), 17.57)
    earlier = published("1.34B", (1, 2, 64, 1, 0), 17.57, flags=("old_pp_engine",))
    assert [stage.layers for stage in mended.statement.plan.virtual_stages] == [(0, 10), (10, 16)]
    assert [stage.layers for stage in earlier.statement.plan.virtual_stages] == [(0, 11), (11, 16)]
    assert mended.memory_error_fraction == pytest.approx(0.0, abs=0.01)
    assert earlier.memory_error_fraction == pytest.approx(0.07, abs=0.01)


def test_ranks_are_compared_by_stage() -> None:
    """16 ranks of two stages in MiB, or two stages in GiB: the fullest first, each beside its own stage."""
    ranks = {str(rank): 1000.0 + rank for rank in range(16)}
    by_rank: dict[str, Any] = {"per_rank_MiB": ranks, "unit": "GiB", "how": "torch peak"}
    by_stage = {"per_stage": [20.0, 30.0], "unit": "GB as printed", "how": "nvidia-smi style, per card"}
    for reported, expected, kind in (
        (by_rank, (1015 * MIB, 1007 * MIB), "allocated"),
        (by_stage, (30 * GIB, 20 * GIB), "device"),
    ):
        one = compare_run(run(measured={"status": "ok", "step_time_s": 1.0, "peak_mem_reported": reported}))
        assert one.memories == (MemoryMeasure(expected[0], kind, 1), MemoryMeasure(expected[1], kind, 0))
    del ranks["3"]
    incomplete = run(measured={"status": "ok", "peak_mem_reported": by_rank})
    assert memory_measures(incomplete, state(incomplete)) == ()


def test_some_ranks_are_compared_with_their_stages() -> None:
    """Aceso's runs print the ranks of one node with their stages: each stage has the most of its ranks."""
    ranks = [
        {"stage": stage, "rank": rank, "max_allocated_MiB": size}
        for stage, rank, size in ((0, 0, 5000.0), (0, 1, 6000.0), (1, 8, 7000.0))
    ]
    for some, expected in ((ranks, {1: 7000 * MIB, 0: 6000 * MIB}), (ranks[:2], {0: 6000 * MIB})):
        printed = {"per_rank_node0": some, "unit": "MiB", "how": "only ranks of node 0 were logged"}
        one = run(measured={"status": "ok", "peak_mem_reported": printed})
        found = memory_measures(one, state(one))
        assert {measure.stage: measure.peak_bytes for measure in found} == expected
        assert {measure.kind for measure in found} == {"allocated"}


def test_memory_that_is_compared_with_nothing_is_told() -> None:
    """A size without a unit that means bytes is among the assumptions, not dropped silently."""
    printed = {"value": 40, "unit": "as logged", "how": "log"}
    one = compare_run(run(measured={"status": "ok", "step_time_s": 1.0, "peak_mem_reported": printed}))
    assert one.memories == ()
    assert one.assumptions[-1].startswith("peak memory not compared")
    told = compare_run(run())
    assert told.assumptions == told.statement.assumptions


def test_every_rank_group_counts() -> None:
    """Two stages are two measurements of one run, and kinds have rows of their own."""
    by_stage = {"per_stage": [20.0, 30.0], "unit": "GB", "how": "nvidia-smi style, per card"}
    one = compare_run(run(measured={"status": "ok", "step_time_s": 1.0, "peak_mem_reported": by_stage}))
    summary = summarise(Validation((one, nanotron(5.0, 8.0)), (), ()))
    device, update, reserved = (summary.memory[kind] for kind in ("device", "update", "reserved"))
    assert device is not None
    assert device.num_runs == 2
    assert update is not None
    assert reserved is not None
    assert set(summary.memory_by_source) == {"simumax-b200", "nanotron-bench, update", "nanotron-bench, reserved"}


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
        predicted = predicted_memory(report, one.statement, measure, framework_of(one.run))
        assert predicted == pytest.approx(expected)


def test_memory_in_unclear_units_is_left_out() -> None:
    """GB of nobody knows which kind say nothing to a few per cent; sizes that are none are no sizes."""
    for reported in (
        {"value": 40, "unit": "GB as printed", "how": "log"},
        {"value": True, "unit": "MiB"},
        {"per_stage": [20.0, "?"]},
        {"per_stage": [20.0]},
        {"per_rank_node0": [{"stage": 5, "max_allocated_MiB": 1.0}, "?"]},
        {},
    ):
        one = run(measured={"status": "ok", "step_time_s": 1.0, "peak_mem_reported": reported})
        assert memory_measures(one, state(one)) == ()


def test_paddle_keeps_a_copy_of_the_input_of_every_tensor_parallel_product() -> None:
    """Five products and two inputs: three copies more a layer and micro-batch; none without tensor parallelism."""
    reported = {"value": 40960, "unit": "MiB", "how": "nvidia-smi"}
    for tp, copies in ((2, 3), (1, 0)):
        changes: dict[str, Any] = {
            "parallel__tp": tp,
            "parallel__pp": 1,
            "parallel__dp": 16 // tp,
            "parallel__grad_accum": None,
            "parallel__sp": False,
            "measured": {"status": "ok", "step_time_s": 1.0, "peak_mem_reported": reported},
        }
        one = compare_run(run(group="flagperf", **changes))
        hardware = one.statement.problem.hardware
        plain = hardware.model_copy(
            update={"software": hardware.software.model_copy(update={"copied_inputs": False})}
        )
        problem = one.statement.problem.model_copy(update={"hardware": plain})
        shared = simulate(problem, one.statement.plan)
        difference = one.report.stages[0].memory.activations_bytes - shared.stages[0].memory.activations_bytes
        assert difference == 8 * copies * 2 * 2048 * 1024
