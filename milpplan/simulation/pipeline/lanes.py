"""One step of a plan as lanes: what every pipeline rank does when, on each of its streams. Records only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from milpplan.simulation.layout_columns import IntArray
from milpplan.simulation.memory_timeline import MemoryTimeline

LaneName = Literal["compute", "parameter gather", "gradient reduction", "to next stage", "to previous stage"]
LANES: tuple[LaneName, ...] = get_args(LaneName)
SliceKind = Literal[
    "forward", "backward", "weight gradients", "gather", "reduction", "activations", "gradients", "norm",
    "optimizer",
]  # fmt: skip
SLICE_KINDS: tuple[SliceKind, ...] = get_args(SliceKind)
"""``backward`` is the input gradients alone where the schedule splits it; ``norm`` is what all ranks do together
before the update (the norm of the gradients, and what every step costs)."""


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """Slices of one stream in the order in which they start: arrays [n]. ``kind`` indexes ``SLICE_KINDS``,
    ``stage`` is the virtual stage and ``micro_batch`` its micro-batch, -1 where a slice belongs to none."""

    name: LaneName
    start_ns: IntArray
    end_ns: IntArray
    kind: IntArray
    stage: IntArray
    micro_batch: IntArray

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, slots=True, eq=False)
class RankLanes:
    """One pipeline rank: its lanes with slices, and its memory over time. ``rank`` numbers the stages of a report,
    ``label`` is the stage, with replicas of different make after the number of the node type: ``1:0``."""

    rank: int
    name: str
    label: str
    num_gpus: int
    """That do the same: of all replicas, or of those on one node type."""
    virtual_stages: tuple[int, ...]
    num_layers: tuple[int, ...]
    """Of every virtual stage of the rank."""
    lanes: tuple[Lane, ...]
    memory: MemoryTimeline
    usable_memory_bytes: int

    def lane(self, name: LaneName) -> Lane | None:
        """The lane of a name, None where nothing runs on it."""
        return next((lane for lane in self.lanes if lane.name == name), None)


@dataclass(frozen=True, slots=True, eq=False)
class StepLanes:
    """One step of a plan, all ranks of one pipeline, or with replicas of different make of one on each node type;
    the other replicas do the same at the same time."""

    step_time_ns: int
    ranks: tuple[RankLanes, ...]

    @property
    def num_slices(self) -> int:
        """Of all lanes."""
        return sum(len(lane) for rank in self.ranks for lane in rank.lanes)
