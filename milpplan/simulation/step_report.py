"""Records of the simulator's report of a plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

BREAKDOWN = (
    "compute",
    "recompute",
    "tp_exposed",
    "cp_exposed",
    "ep_exposed",
    "zero_exposed",
    "offload_exposed",
    "launch",
    "param_gather_exposed",
    "grad_reduce_exposed",
    "bubble",
    "grad_norm",
    "step_overhead",
    "optimizer",
)
"""Parts of the step time; their seconds add up to it, for each stage and for the mean over the stages."""

HIDDEN = (
    *("tp_hidden", "cp_hidden", "ep_hidden", "zero_hidden"),
    *("offload_hidden", "param_gather_hidden", "grad_reduce_hidden"),
)
"""Communication (also with the host) that runs beside compute; not part of the sum."""


MemoryVerdict = Literal["safe", "tight", "does_not_fit"]


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of a pipeline rank at its peak, in bytes; the parts add up to ``peak_bytes``."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    transient_bytes: int
    buffers_bytes: int
    peak_bytes: int
    host_bytes: int = 0
    """Peak of the host memory; not part of ``peak_bytes``."""


@dataclass(frozen=True, slots=True)
class StageReport:
    """Report of a pipeline rank."""

    breakdown_s: dict[str, float]
    """Seconds of a step by the names of ``BREAKDOWN``."""
    hidden_s: dict[str, float]
    """Seconds of hidden communication by the names of ``HIDDEN``."""
    memory: StageMemory
    node_type: str
    """Name of the rank's hardware."""
    usable_memory_bytes: int
    capacity_bytes: int
    """Usable memory less the margin of the problem's space."""
    safe_bytes: int
    """Usable memory less the margin of a safe plan (``HardwareSpec.memory_margin_fraction``)."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """Report of a step of a plan. Times in seconds, memory in bytes, rates per second.

    Memory is that of the tightest stage, the stage with the minimum of free memory. Installed memory is the sum of
    ``usable_memory_bytes`` and two reserves, ``context_bytes`` and ``fragmentation_bytes``.
    """

    step_time_s: float
    step_time_ns: int
    tokens_per_s: float
    mfu: float
    peak_memory_bytes: int
    usable_memory_bytes: int
    context_bytes: int
    """Memory of context, libraries and communicators."""
    fragmentation_bytes: int
    """Memory that the caching allocator loses to fragmentation."""
    fits: bool
    """True if every rank fits its device memory and its host memory."""
    breakdown_s: dict[str, float]
    """Mean over the stages; adds up to ``step_time_s``."""
    hidden_s: dict[str, float]
    """Mean over the stages."""
    stages: tuple[StageReport, ...]
    host_memory_bytes: int = 0
    """Host memory of an accelerator, on the rank with the minimum of free host memory."""
    host_capacity_bytes: int = 0
    """Host memory that an accelerator of that rank may fill."""

    @property
    def tightest_stage(self) -> int:
        """Index of the stage with the minimum of free memory."""
        excess = [stage.memory.peak_bytes - stage.usable_memory_bytes for stage in self.stages]
        return excess.index(max(excess))

    @property
    def memory_margin_bytes(self) -> int:
        """Usable memory less the peak of the tightest stage; negative if the plan does not fit."""
        return self.usable_memory_bytes - self.peak_memory_bytes

    @property
    def fits_with_margin(self) -> bool:
        """True if the plan fits, and every rank leaves the margin of the problem's space."""
        return self.fits and all(stage.memory.peak_bytes <= stage.capacity_bytes for stage in self.stages)

    @property
    def memory_verdict(self) -> MemoryVerdict:
        """``safe`` if every rank leaves the margin of a safe plan on its node type, else ``tight`` if all fit."""
        if not self.fits:
            return "does_not_fit"
        safe = all(stage.memory.peak_bytes <= stage.safe_bytes for stage in self.stages)
        return "safe" if safe else "tight"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self) | {
            "memory_margin_bytes": self.memory_margin_bytes,
            "memory_verdict": self.memory_verdict,
        }
