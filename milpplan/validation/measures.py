"""What a source measured, in seconds a step and bytes: each conversion is told, and goes both ways.

Sources count FLOPs in different ways. Here N is the model's FLOPs a token without attention:
- ``model, causal``: N + attention over the causal half (``milpplan.costs.flops.model_flops_per_token``);
- ``model, full``: N + attention over the whole matrix;
- ``hardware``: the same and what recomputation adds: the whole forward of the layers (full), or the forward
  of the attention core (selective).
Source: Narayanan et al. 2021, equation 3 and its appendix; Korthikanti et al. 2022, appendix A.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeGuard

from milpplan.costs.flops import model_flops_per_token
from milpplan.costs.report import StepReport
from milpplan.specs.problem import Problem
from milpplan.units import GIB, MIB
from milpplan.validation.frameworks import FlopCount, framework_of
from milpplan.validation.records import Measured, Run
from milpplan.validation.statement import Statement

MemoryKind = Literal["allocated", "reserved", "device"]
TERA: Final = 1e12
SOURCE_PEAK: Final = {
    ("dgx-a100-40", "bf16"): 312e12,
    ("dgx-a100-80", "bf16"): 312e12,
    ("dgx-h100", "bf16"): 989e12,
    ("dgx-h100", "fp8"): 1979e12,
    ("gb200-nvl72", "bf16"): 2450e12,
    ("gb200-nvl72", "fp8"): 4900e12,
}
"""FLOP/s that sources divide by, where it is known; else the peak of the hardware description."""
_DEVICE_WORDS: Final = ("nvidia-smi", "MLPerf log key")


@dataclass(frozen=True, slots=True)
class StepMeasure:
    """A measured step and the quantity of the source it comes from."""

    step_time_s: float
    how: str


@dataclass(frozen=True, slots=True)
class MemoryMeasure:
    """Measured peak bytes. ``stage``: the pipeline rank it belongs to, None for the fullest.

    ``allocated``: tensors of the framework; ``reserved``: all that its caching allocator took; ``device``: all
    that the driver reports (the context too).
    """

    peak_bytes: float
    kind: MemoryKind
    stage: int | None


def flops_per_token(problem: Problem, count: FlopCount, recompute: str = "none") -> float:
    """FLOPs a token as a source counts them; ``recompute`` other than ``none`` gives hardware FLOPs.

    Full attention counts twice the keys of the causal half; a sliding window is not left out then.
    """
    model, length = problem.model, problem.job.sequence_length
    causal = model_flops_per_token(model, length)
    full = model_flops_per_token(model, 2 * length)
    counted = causal if count == "causal" else full
    if recompute == "full":
        head = 6.0 * model.hidden_size * model.vocab_size
        return counted + (counted - head) / 3
    if recompute == "selective":
        attention = 2 * (full - causal) if count == "full" else full - causal
        return counted + attention / 3
    return counted


def recompute_of(statement: Statement) -> str:
    """The plan's one recompute mode."""
    stages = statement.plan.virtual_stages
    if any(stage.recompute.full for stage in stages):
        return "full"
    return "selective" if any(stage.recompute.selective for stage in stages) else "none"


def step_measure(run: Run, statement: Statement) -> StepMeasure | None:
    """The step time of a run: as printed, else from tokens/s, else from FLOP/s, else from a utilisation."""
    measured, problem = run.measured, statement.problem
    if measured.status != "ok":
        return None
    if measured.step_time_s is not None:
        return StepMeasure(measured.step_time_s, "step time")
    tokens = statement.plan.layout.global_batch_size * problem.job.sequence_length
    share = tokens / statement.plan.layout.num_gpus
    if measured.tokens_per_s_per_gpu:
        return StepMeasure(share / measured.tokens_per_s_per_gpu, "tokens/s")
    flops_per_s, how = _rate(run, measured, statement)
    if not flops_per_s:
        return None
    count = framework_of(run).flops
    hardware = how.startswith("hardware")
    per_token = flops_per_token(problem, count, recompute_of(statement) if hardware else "none")
    return StepMeasure(per_token * share / flops_per_s, f"{how}, {count} attention")


def _rate(run: Run, measured: Measured, statement: Statement) -> tuple[float, str]:
    """FLOP/s a GPU and whose FLOPs they are; (0, "") where none is printed."""
    if measured.tflops_per_gpu:
        kind = "hardware" if (measured.tflops_kind or "").startswith("hardware") else "model"
        return measured.tflops_per_gpu * TERA, f"{kind} FLOP/s"
    hardware, precision = statement.problem.hardware, statement.problem.job.precision
    engine = hardware.accelerator.fp8 if precision == "fp8" else hardware.accelerator.bf16
    assert engine is not None
    peak = SOURCE_PEAK.get((hardware.name, precision), engine.peak_flops_per_s)
    if measured.mfu:
        return measured.mfu * peak, "model FLOPs utilisation"
    if measured.hfu:
        return measured.hfu * peak, "hardware FLOPs utilisation"
    return 0.0, ""


def rates(statement: Statement, step_time_s: float, count: FlopCount) -> dict[str, float]:
    """tokens/s a GPU, model FLOP/s a GPU and hardware FLOP/s a GPU of a step time: the way back."""
    layout, problem = statement.plan.layout, statement.problem
    tokens = layout.global_batch_size * problem.job.sequence_length / layout.num_gpus / step_time_s
    recompute = recompute_of(statement)
    return {
        "tokens_per_s_per_gpu": tokens,
        "model_flops_per_s_per_gpu": tokens * flops_per_token(problem, count),
        "hardware_flops_per_s_per_gpu": tokens * flops_per_token(problem, count, recompute),
    }


def memory_measure(run: Run, statement: Statement) -> MemoryMeasure | None:
    """The peak memory of a run; None where it is not printed or its unit cannot be told."""
    measured = run.measured
    reported: Mapping[str, Any] = measured.peak_mem_reported or {}
    how, unit = str(reported.get("how") or ""), str(reported.get("unit") or "")
    kind: MemoryKind = framework_of(run).memory
    if any(word in how for word in _DEVICE_WORDS):
        kind = "device"
    stage = None
    if "first pipeline stage" in how:
        stage = 0
    elif "last rank" in how:
        stage = statement.plan.layout.pp - 1
    elif "node 0" in how and statement.plan.layout.num_gpus > (run.hardware.gpus_per_node or 8):
        return None
    reserved = reported.get("max_reserved")
    if kind == "reserved" and _is_size(reserved) and "GiB" in unit:
        return MemoryMeasure(reserved * GIB, kind, stage)
    if measured.peak_mem_GiB is not None:
        return MemoryMeasure(measured.peak_mem_GiB * GIB, kind, stage)
    value = reported.get("value")
    if not _is_size(value):
        return None
    # nvidia-smi counts MiB; what people call GB of it is GiB. Anything else in GB stays out.
    scale = MIB if "MiB" in unit else GIB if "GiB" in unit or "nvidia-smi" in how else None
    return MemoryMeasure(value * scale, kind, stage) if scale else None


def predicted_memory(report: StepReport, problem: Problem, measure: MemoryMeasure) -> float:
    """Predicted peak bytes of the same rank and kind: ``reserved`` adds the allocator's loss and what it holds
    beyond that while there is memory, ``device`` also the context."""
    peak = report.peak_memory_bytes if measure.stage is None else _stage_peak(report, measure.stage)
    if measure.kind == "allocated":
        return float(peak)
    hardware = problem.hardware
    context = hardware.reserved_bytes if measure.kind == "device" else 0
    needed = peak / (1 - hardware.fragmentation_fraction) + context
    held = needed + hardware.software.allocator_share * peak
    return max(needed, min(held, hardware.accelerator.memory_bytes))


def _is_size(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < TERA


def _stage_peak(report: StepReport, stage: int) -> int:
    return report.stages[min(stage, len(report.stages) - 1)].memory.peak_bytes
