"""What the simulator says about a plan: records only."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

BREAKDOWN = (
    "compute",
    "recompute",
    "tp_exposed",
    "cp_exposed",
    "ep_exposed",
    "zero_exposed",
    "launch",
    "param_gather_exposed",
    "grad_reduce_exposed",
    "bubble",
    "grad_norm",
    "step_overhead",
    "optimizer",
)
"""Names whose seconds add up to the step time, for each stage and for their mean."""

HIDDEN = ("tp_hidden", "cp_hidden", "zero_hidden", "param_gather_hidden", "grad_reduce_hidden")
"""Communication that compute covers; not part of the sum."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes at the moment of the stage's peak; the parts add up to ``peak_bytes``."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    transient_bytes: int
    buffers_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class StageReport:
    """One pipeline rank: where its step goes (seconds) and its memory."""

    breakdown_s: dict[str, float]
    hidden_s: dict[str, float]
    memory: StageMemory


@dataclass(frozen=True, slots=True)
class StepReport:
    """One training step of a plan. Times in seconds, memory in bytes, rates per second.

    ``breakdown_s`` is the mean over the stages and adds up to ``step_time_s``.
    """

    step_time_s: float
    step_time_ns: int
    tokens_per_s: float
    mfu: float
    peak_memory_bytes: int
    usable_memory_bytes: int
    fits: bool
    breakdown_s: dict[str, float]
    hidden_s: dict[str, float]
    stages: tuple[StageReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)
