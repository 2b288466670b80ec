"""Measured peak memory by rank group and kind, and the corresponding prediction.

Sources mean different things by peak memory. ``allocated``: peak of the framework's tensors; ``update``: that peak
from the optimizer's update on, where the framework resets its counter before it; ``reserved``: memory that the
caching allocator took; ``device``: memory that the driver reports, including the context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeGuard

from milpplan.simulation import StepReport
from milpplan.simulation.step_report import StageMemory
from milpplan.units import GIB, MIB
from milpplan.validation.runs import Run, Statement, framework_of
from milpplan.validation.runs.frameworks import Framework

MemoryKind = Literal["allocated", "update", "reserved", "device"]
MEMORY_KINDS: Final[tuple[MemoryKind, ...]] = ("allocated", "update", "reserved", "device")
LARGEST: Final = 1e12
_KIND_WORDS: Final[tuple[tuple[MemoryKind, tuple[str, ...]], ...]] = (
    ("device", ("nvidia-smi", "nvidia smi", "nvml", "rocm-smi", "dcgm", "mlperf log key")),
    ("reserved", ("memory_reserved", "max_reserved", "memory reserved")),
    ("allocated", ("memory_allocated", "max_allocated", "memory allocated")),
)
"""Words of a source that indicate the kind of memory, in lower case."""
_BF16_BYTES: Final = 2


@dataclass(frozen=True, slots=True)
class MemoryMeasure:
    """Measured peak bytes of a group of ranks. ``stage``: their pipeline rank, None for the fullest."""

    peak_bytes: float
    kind: MemoryKind
    stage: int | None


def memory_measures(run: Run, statement: Statement) -> tuple[MemoryMeasure, ...]:
    """List every printed peak of a run, the fullest stage first; empty where none is printed or the unit is
    unknown."""
    reported: Mapping[str, Any] = run.measured.peak_mem_reported or {}
    how, framework = str(reported.get("how") or ""), framework_of(run)
    kind = _kind(how, framework)
    stages = _by_stage(reported, statement)
    if stages:
        measures = [MemoryMeasure(size, kind, stage) for stage, size in stages.items()]
        return tuple(sorted(measures, key=lambda measure: -measure.peak_bytes))
    if "node 0" in how and statement.plan.layout.num_gpus > (run.hardware.gpus_per_node or 8):
        return ()
    stage = _stage(how, statement)
    found = []
    if framework.resets_peak and _is_size(run.measured.peak_mem_GiB):
        found.append(MemoryMeasure(run.measured.peak_mem_GiB * GIB, "update", stage))
    size = _bytes(run, reported, kind, framework)
    if size is not None:
        found.append(MemoryMeasure(size, kind, stage))
    return tuple(found)


def not_compared(run: Run, measures: tuple[MemoryMeasure, ...]) -> tuple[str, ...]:
    """Note that a printed peak memory is not compared."""
    reported = run.measured.peak_mem_reported
    if measures or not reported or run.measured.status != "ok":
        return ()
    return (f"peak memory not compared: size, unit or ranks of {str(dict(reported))[:100]} cannot be told",)


def _kind(how: str, framework: Framework) -> MemoryKind:
    """Determine the kind of memory from a source's words, or else, or if it prints two kinds, from its framework's
    default."""
    if framework.resets_peak:
        return framework.memory
    kinds = (kind for kind, words in _KIND_WORDS if any(word in how.lower() for word in words))
    return next(kinds, framework.memory)


def _by_stage(reported: Mapping[str, Any], statement: Statement) -> dict[int, float]:
    """Return the bytes of pipeline ranks that the source prints, by rank or as the maximum over a rank's
    members."""
    stages, ranks, some = (reported.get(key) for key in ("per_stage", "per_rank_MiB", "per_rank_node0"))
    layout = statement.plan.layout
    if isinstance(stages, list) and len(stages) == layout.pp and all(_is_size(size) for size in stages):
        return {stage: size * GIB for stage, size in enumerate(stages)}
    sizes = list(ranks.values()) if isinstance(ranks, dict) else []
    if len(sizes) == layout.num_gpus and all(_is_size(size) for size in sizes):
        each = layout.num_gpus // layout.pp
        return {stage: max(sizes[stage * each : (stage + 1) * each]) * MIB for stage in range(layout.pp)}
    peaks: dict[int, float] = {}
    for rank in some if isinstance(some, list) else []:
        stage, size = (rank.get(key) if isinstance(rank, dict) else None for key in ("stage", "max_allocated_MiB"))
        if not isinstance(stage, int) or not 0 <= stage < layout.pp or not _is_size(size):
            return {}
        peaks[stage] = max(peaks.get(stage, 0.0), size * MIB)
    return peaks


def _stage(how: str, statement: Statement) -> int | None:
    """Return the measured pipeline rank."""
    if "first pipeline stage" in how:
        return 0
    return statement.plan.layout.pp - 1 if "last rank" in how else None


def _bytes(run: Run, reported: Mapping[str, Any], kind: MemoryKind, framework: Framework) -> float | None:
    """Return the printed size, if there is only one."""
    unit, how = str(reported.get("unit") or ""), str(reported.get("how") or "")
    reserved, value = reported.get("max_reserved"), reported.get("value")
    if kind == "reserved" and _is_size(reserved) and "GiB" in unit:
        return reserved * GIB
    if run.measured.peak_mem_GiB is not None:
        return run.measured.peak_mem_GiB * GIB
    if not _is_size(value):
        return None
    # nvidia-smi counts MiB, so GB from it means GiB. Other values in GB are used only if their unit is known.
    gigabyte = framework.gigabyte if "GB" in unit else 0.0
    scale = MIB if "MiB" in unit else GIB if "GiB" in unit or "nvidia-smi" in how else gigabyte
    return value * scale or None


def predicted_memory(
    report: StepReport, statement: Statement, measure: MemoryMeasure, framework: Framework
) -> float:
    """Predict the peak bytes for the measured ranks and kind.

    ``reserved`` adds the allocator's loss and its further reserve while there is memory; ``device`` also adds the
    context.
    """
    stage = None if measure.stage is None else report.stages[min(measure.stage, len(report.stages) - 1)].memory
    if measure.kind == "update":
        return update_bytes(report.stages[0].memory if stage is None else stage, statement, framework)
    peak = report.peak_memory_bytes if stage is None else stage.peak_bytes
    if measure.kind == "allocated":
        return float(peak)
    hardware = statement.problem.hardware
    context = hardware.reserved_bytes + framework.more_context_bytes if measure.kind == "device" else 0
    needed = peak / (1 - hardware.fragmentation_fraction) + context
    beyond = hardware.software.allocator_share * peak + held_ahead_bytes(statement, measure.stage, framework)
    return max(needed, min(needed + beyond, hardware.accelerator.memory_bytes))


def held_ahead_bytes(statement: Statement, stage: int | None, framework: Framework) -> float:
    """Predict bytes of a stage (None: the first) that wait for communication streams while the warm-up is sent
    ahead.

    a L (2 u h) (w - 1) [t > 1] for a ``held_ahead`` buffers per layer, L layers of the stage, u tokens of a
    micro-batch, width h and w = min(P - 1 - stage, m) > 0 forwards of the warm-up; no buffers wait at the first
    forward.

    Source: PyTorch's CUDA caching allocator (``record_stream``: a block is free again when the host has seen that
    the stream has passed it); the number by stages is that of nanotron's runs (docs/accuracy.md).
    """
    plan, rank = statement.plan, stage or 0
    layout = plan.layout
    warm_up = min(layout.pp - 1 - rank, layout.num_micro_batches)
    if layout.tp == 1 or warm_up < 2:
        return 0.0
    held = [plan.virtual_stages[j].layers for j in layout.rank_stages[rank]]
    layers = sum(last - first for first, last in held)
    return float(framework.held_ahead * layers * _gathered_bytes(statement) * (warm_up - 1))


def _gathered_bytes(statement: Statement) -> int:
    """Return the bytes of a micro-batch's whole hidden states in 16 bits."""
    tokens = statement.plan.layout.micro_batch_size * statement.problem.job.sequence_length
    return _BF16_BYTES * tokens * statement.problem.model.hidden_size


def update_bytes(memory: StageMemory, statement: Statement, framework: Framework) -> float:
    """Predict the allocated bytes of a stage at its optimizer's update, when no activation is left.

    S + 2 N (1 + 1/d) [ZeRO 1 or 2, d > 1] + b (2 u h) [t > 1] + c for states of S bytes, N parameters on a rank in
    16 bits, d replicas, u tokens of a micro-batch, width h, t tensor-parallel ranks, b ``kept_gathers`` and c
    ``workspace_bytes`` of the framework: the gather of the updated weights needs a whole copy and a copy of the
    rank's share, buffers of the tensor-parallel gathers stay, and so do the workspaces of the matrix library.

    Source: huggingface/nanotron@0e0a27ea src/nanotron/optim/zero.py (_all_gather_params), distributed.py
    (all_gather_coalesced), parallel/utils.py (MemoryBuffer: one of the gathered inputs, one of the gathered
    gradients).
    """
    layout = statement.plan.layout
    states = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
    copies = memory.weights_bytes * (1 + 1 / layout.dp) if layout.zero_stage in (1, 2) and layout.dp > 1 else 0.0
    kept = framework.kept_gathers * _gathered_bytes(statement) if layout.tp > 1 else 0.0
    return states + copies + kept + framework.workspace_bytes


def _is_size(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < LARGEST
