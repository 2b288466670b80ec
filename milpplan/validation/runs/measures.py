"""Measured values of a source in seconds per step; each conversion is reported, and has an inverse.

Sources count FLOPs in different ways. Here N is the model's FLOPs per token without attention:
- ``model, causal``: N + attention over the causal half (``simulation.layers.parameters.model_flops_per_token``);
- ``model, full``: N + attention over the whole matrix;
- ``hardware``: the model's FLOPs plus recomputation: the whole forward of the layers (full), or the forward of the
  attention core (selective).
Source: Narayanan et al. 2021, equation 3 and its appendix; Korthikanti et al. 2022, appendix A.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from milpplan.problem import Problem
from milpplan.simulation.layers import model_flops_per_token
from milpplan.validation.runs.frameworks import FlopCount, framework_of
from milpplan.validation.runs.records import Measured, Run
from milpplan.validation.runs.statement import Statement

TERA: Final = 1e12
SOURCE_PEAK: Final = {
    ("dgx-a100-40", "bf16"): 312e12,
    ("dgx-a100-80", "bf16"): 312e12,
    ("dgx-h100", "bf16"): 989e12,
    ("dgx-h100", "fp8"): 1979e12,
    ("gb200-nvl72", "bf16"): 2450e12,
    ("gb200-nvl72", "fp8"): 4900e12,
}
"""FLOP/s that sources divide by, where they are known; else the peak of the hardware description."""


@dataclass(frozen=True, slots=True)
class StepMeasure:
    """Measured step, and the source's quantity that it comes from."""

    step_time_s: float
    how: str


def flops_per_token(problem: Problem, count: FlopCount, recompute: str = "none") -> float:
    """Count FLOPs per token as a source does; ``recompute`` other than ``none`` gives hardware FLOPs.

    Full attention counts twice the keys of the causal half, including those outside a sliding window.
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
    """Return the plan's only recompute mode."""
    stages = statement.plan.virtual_stages
    if any(stage.recompute.full for stage in stages):
        return "full"
    return "selective" if any(stage.recompute.selective for stage in stages) else "none"


def step_measure(run: Run, statement: Statement) -> StepMeasure | None:
    """Return the step time of a run: as printed, else from tokens/s, else from FLOP/s, else from a utilisation."""
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
    """Return FLOP/s per GPU and the kind of FLOPs; (0, "") where none is printed."""
    if measured.tflops_per_gpu:
        words = (measured.tflops_kind or "").lower()
        kind = "hardware" if any(word in words for word in ("hardware", "hfu", "hw ")) else "model"
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
    """Compute tokens/s, model FLOP/s and hardware FLOP/s per GPU from a step time."""
    layout, problem = statement.plan.layout, statement.problem
    tokens = layout.global_batch_size * problem.job.sequence_length / layout.num_gpus / step_time_s
    recompute = recompute_of(statement)
    return {
        "tokens_per_s_per_gpu": tokens,
        "model_flops_per_s_per_gpu": tokens * flops_per_token(problem, count),
        "hardware_flops_per_s_per_gpu": tokens * flops_per_token(problem, count, recompute),
    }
