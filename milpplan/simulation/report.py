"""What the simulator says about a plan: records only."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

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
"""Names whose seconds add up to the step time, for each stage and for their mean."""

HIDDEN = (
    *("tp_hidden", "cp_hidden", "ep_hidden", "zero_hidden"),
    *("offload_hidden", "param_gather_hidden", "grad_reduce_hidden"),
)
"""Communication, also with the host, that compute covers; not part of the sum."""


MemoryVerdict = Literal["safe", "tight", "does_not_fit"]
TIGHT_FRACTION: Final = 0.05
"""A plan is tight whose memory would not suffice if its peak were this share larger: the largest error of the
validated peaks of allocated memory, rounded up (4.9 % of 43 peaks; docs/accuracy.md, Memory)."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes at the moment of the stage's peak; the parts add up to ``peak_bytes``. ``host_bytes`` is the peak of
    what it has in the memory of the host, and no part of them."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    transient_bytes: int
    buffers_bytes: int
    peak_bytes: int
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StageReport:
    """One pipeline rank: where its step goes (seconds), its memory, what its nodes are and what they can hold."""

    breakdown_s: dict[str, float]
    hidden_s: dict[str, float]
    memory: StageMemory
    node_type: str
    usable_memory_bytes: int


@dataclass(frozen=True, slots=True)
class StepReport:
    """One training step of a plan. Times in seconds, memory in bytes, rates per second.

    ``breakdown_s`` is the mean over the stages and adds up to ``step_time_s``. Memory is that of the stage with
    the least left, which is the fullest one where all stages have the same. Installed memory is
    ``usable_memory_bytes`` and two reserves: ``context_bytes`` of context, libraries and communicators, and
    ``fragmentation_bytes`` that the caching allocator loses. ``host_memory_bytes`` is the most that an accelerator
    has on the host, of ``host_capacity_bytes``; a plan ``fits`` if both do.
    """

    step_time_s: float
    step_time_ns: int
    tokens_per_s: float
    mfu: float
    peak_memory_bytes: int
    usable_memory_bytes: int
    context_bytes: int
    fragmentation_bytes: int
    fits: bool
    breakdown_s: dict[str, float]
    hidden_s: dict[str, float]
    stages: tuple[StageReport, ...]
    host_memory_bytes: int = 0
    host_capacity_bytes: int = 0

    @property
    def tightest_stage(self) -> int:
        """The stage with the least memory left."""
        over = [stage.memory.peak_bytes - stage.usable_memory_bytes for stage in self.stages]
        return over.index(max(over))

    @property
    def memory_margin_bytes(self) -> int:
        """Usable memory less the peak of the fullest stage; negative where the plan does not fit."""
        return self.usable_memory_bytes - self.peak_memory_bytes

    @property
    def memory_verdict(self) -> MemoryVerdict:
        """Whether the plan fits, and if so, whether it still would if the peak were ``TIGHT_FRACTION`` larger."""
        if not self.fits:
            return "does_not_fit"
        return "tight" if self.memory_margin_bytes < TIGHT_FRACTION * self.peak_memory_bytes else "safe"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self) | {
            "memory_margin_bytes": self.memory_margin_bytes,
            "memory_verdict": self.memory_verdict,
        }
