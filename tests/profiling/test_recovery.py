"""A machine whose constants are known: the profile finds them under noise, through the file of measurements."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from milpplan import load_hardware
from milpplan.calibration import write_overlay
from milpplan.errors import InvalidInputError
from milpplan.problem import HardwareSpec
from milpplan.profiling.measurement_order import GPU, measure, sweep
from milpplan.profiling.overlay import Profile, checked, document_text, profiled
from milpplan.profiling.records import Attention, Exchange, Layers, Measurements, Product, Traffic
from tests.profiling.cases import (
    BASE,
    COPY_BYTES_PER_S,
    GEMM,
    LATENCY_S,
    LAUNCH_S,
    MEMORY,
    SCALE_UP,
    few_tasks,
    out_of_memory,
    synthetic,
    truth,
)


@dataclass(frozen=True)
class Case:
    """What was measured, the profile of it, and what is true."""

    measurements: Measurements
    profile: Profile
    truth: HardwareSpec


@pytest.fixture(scope="module")
def case() -> Case:
    """The coarse sweep on a machine with noise of 2 %."""
    base = load_hardware(BASE)
    measurements = measure(synthetic(), sweep(base, GPU, 8, quick=True), 1e9)
    return Case(measurements, profiled(measurements, BASE), truth(base))


def test_constants_are_found(case: Case) -> None:
    """Memory bandwidth, latency of a kernel and launches of a layer within a few per cent, all identified."""
    constants = case.profile.overlay.constants
    assert constants.memory_efficiency is not None
    assert constants.memory_efficiency.value == pytest.approx(MEMORY, rel=0.03)
    assert constants.kernel_latency_s is not None
    assert constants.kernel_latency_s.value == pytest.approx(LATENCY_S, rel=0.05)
    assert constants.layer_launch_s is not None
    assert constants.layer_launch_s.value == pytest.approx(LAUNCH_S, rel=0.03)
    for one in (constants.memory_efficiency, constants.kernel_latency_s, constants.layer_launch_s):
        assert one.identified
        assert 0 < one.one_sigma < 0.1 * one.value


def test_the_table_of_products_is_found(case: Case) -> None:
    """Where layers are (all sizes from 1024 on) it is the truth within a few per cent, the factor on it near 1."""
    found = np.array(case.profile.profiled.accelerator.bf16.gemm.efficiency)[3:, 3:, 3:]
    true = np.array(case.truth.accelerator.bf16.gemm.efficiency)[3:, 3:, 3:]
    assert np.median(found / true) == pytest.approx(1.0, abs=0.02)
    assert np.max(np.abs(found / true - 1.0)) < 0.15
    base = np.array(load_hardware(BASE).accelerator.bf16.gemm.efficiency)[3:, 3:, 3:]
    assert np.median(found / base) == pytest.approx(GEMM, rel=0.02)


@pytest.mark.parametrize("name", ["attention_forward", "attention_backward"])
def test_curves_of_attention_are_found(case: Case, name: str) -> None:
    """Their tilt, which a common factor could not have, within noise; lengths that were not measured follow."""
    found, true = (getattr(one.accelerator, name) for one in (case.profile.profiled, case.truth))
    assert np.array(found.value) == pytest.approx(np.array(true.value), rel=0.2)
    measured = [found.size.index(one.shape.sequence_length) for one in case.measurements.attentions]
    assert [found.value[i] for i in measured] == pytest.approx([true.value[i] for i in measured], rel=0.06)


def test_collectives_become_tables(case: Case) -> None:
    """Bus bandwidths of what was measured, within noise."""
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        table = getattr(case.profile.profiled.scale_up, name)
        assert set(GPU.messages[::3]) == set(table.message_bytes)
        true = getattr(case.truth.scale_up, name)
        base = getattr(load_hardware(BASE).scale_up, name)
        place = base.message_bytes.index(float(table.message_bytes[-1]))
        assert true.bus_bandwidth_bytes_per_s[-1][place] == SCALE_UP * base.bus_bandwidth_bytes_per_s[-1][place]
        found = table.bus_bandwidth_bytes_per_s[-1][-1]
        assert found == pytest.approx(true.bus_bandwidth_bytes_per_s[-1][place], rel=0.08)


def test_the_check_says_how_far_layers_are_off(case: Case) -> None:
    """Times within noise, memory 2 % below what the machine says."""
    rows = list(checked(case.profile))
    assert {one.shape.recompute for one in rows} == {"none", "selective", "full"}
    assert np.mean([abs(one.forward_error) for one in rows]) < 0.03
    assert np.mean([abs(one.backward_error) for one in rows]) < 0.03
    assert [one.memory_error for one in rows] == pytest.approx([1 / 1.02 - 1] * len(rows), abs=1e-3)


def test_the_overlay_says_where_it_comes_from(case: Case, tmp_path: Path) -> None:
    """Date, driver and versions, errors and uncertainty; the file gives the same hardware."""
    origin = case.profile.overlay.provenance
    assert origin.date == "2026-01-31"
    assert "driver 1.2.3" in origin.data
    assert "torch 9.9" in origin.data
    assert origin.num_measurements == case.measurements.num_rows
    assert origin.error_before is not None
    assert origin.error_after is not None
    assert origin.error_after < 0.03 < origin.error_before
    write_overlay(tmp_path / "mine.toml", case.profile.overlay)
    hardware = load_hardware(tmp_path / "mine.toml")
    assert hardware == case.profile.profiled
    assert hardware.uncertainty is not None
    assert 0 < hardware.uncertainty.memory_efficiency < 0.1
    assert 0 < hardware.uncertainty.residual_fraction < 0.05
    copies = [text for text in case.profile.told if "copy host to device" in text]
    assert len(copies) == 1
    rates = {one.shape.num_bytes / one.time.median_s for one in case.measurements.copies}
    assert all(rate == pytest.approx(COPY_BYTES_PER_S, rel=0.1) for rate in rates)


def test_the_document_is_json(case: Case) -> None:
    """One object, with every layer predicted and measured."""
    document = json.loads(document_text(case.profile))
    assert document["kind"] == "profile"
    assert len(document["layers"]) == len(case.measurements.layers)
    assert document["fit"]["num_folds"] > 1


@pytest.mark.parametrize("kept", ["products", "attentions", "traffic", "layers", "collectives"])
def test_any_part_makes_an_overlay(case: Case, kept: str) -> None:
    """What was not measured stays as the description has it."""
    names = ("products", "attentions", "traffic", "layers", "collectives")
    empty = {name: () for name in names if name != kept}
    some = case.measurements.model_copy(update={"layers": case.measurements.layers[:3], **empty})
    profile = profiled(some, BASE)
    base, hardware = load_hardware(BASE), profile.profiled
    if kept != "products":
        assert profile.overlay.tables.gemm_bf16 is None
    if kept != "collectives":
        assert hardware.scale_up.all_reduce == base.scale_up.all_reduce
    if kept != "attentions":
        assert profile.overlay.tables.attention_forward is None


def test_nothing_measured_is_told() -> None:
    """Faults everywhere: no overlay, and the first reasons."""
    machine = synthetic()
    machine.before = out_of_memory(object)
    tasks = [one for one in sweep(load_hardware(BASE), GPU, 0, quick=True) if not isinstance(one, Exchange)]
    measurements = measure(machine, tasks, 1e9)
    assert len(measurements.failures) == len(tasks)
    with pytest.raises(InvalidInputError, match="out of memory"):
        profiled(measurements, BASE)


LONG_KINDS = [pytest.param(kind, marks=pytest.mark.long) for kind in (Attention, Traffic)]


@pytest.mark.parametrize("kind", [Product, Layers, *LONG_KINDS])
def test_faults_are_noted(kind: type) -> None:
    """A kind that does not fit leaves the others, and is told."""
    machine = synthetic(num_ranks=0)
    machine.before = out_of_memory(kind)
    measurements = measure(machine, few_tasks(0, num_layers=3), 1e9)
    assert measurements.failures
    told = profiled(measurements, BASE).told
    assert any("out of memory" in text for text in told)


def test_a_stack_does_not_change_the_layers() -> None:
    """The layers are PyTorch's, whatever framework's habits the description has; its kernels' rate stays."""
    stack = load_hardware("dgx-h100+nanotron")
    (shape, *_) = [one for one in few_tasks() if isinstance(one, Layers)]
    own = shape.problem(stack).hardware.software
    assert own.layer_launch_s == stack.software.layer_launch_s
    assert own.attention_efficiency == stack.software.attention_efficiency
    assert own.norm_traffic == 1.0
    assert own.norm_kept_bytes == 0.0
