"""Records of a step as lanes: the work of every pipeline rank over time, on each of its streams."""

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
"""``backward`` stands for the input gradients alone where the schedule splits the backward. ``norm`` is the
barrier of all ranks before the update: the global gradient norm and the overhead of a step."""


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """Slices of one stream in the order in which they start: arrays [n]."""

    name: LaneName
    start_ns: IntArray
    end_ns: IntArray
    kind: IntArray
    """Index in ``SLICE_KINDS``."""
    stage: IntArray
    """Virtual stage, -1 for slices without a stage."""
    micro_batch: IntArray
    """Micro-batch, -1 for slices without a micro-batch."""

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, slots=True, eq=False)
class RankLanes:
    """One pipeline rank: its lanes, and its memory over time."""

    rank: int
    """Index of the rank among the stages of a report."""
    name: str
    label: str
    """Number of the stage. Heterogeneous replicas put the number of the node type in front: ``1:0``."""
    num_gpus: int
    """GPUs that run this rank in all replicas, or in the replicas on one node type."""
    virtual_stages: tuple[int, ...]
    num_layers: tuple[int, ...]
    """Layers of every virtual stage of the rank."""
    lanes: tuple[Lane, ...]
    """Lanes that have slices."""
    memory: MemoryTimeline
    usable_memory_bytes: int

    def lane(self, name: LaneName) -> Lane | None:
        """Return the lane of a name; None if it has no slices."""
        return next((lane for lane in self.lanes if lane.name == name), None)


@dataclass(frozen=True, slots=True, eq=False)
class StepLanes:
    """One step of a plan: all ranks of one pipeline, or of one pipeline on each node type.

    The other replicas do the same work at the same time.
    """

    step_time_ns: int
    ranks: tuple[RankLanes, ...]

    @property
    def num_slices(self) -> int:
        """Number of slices on all lanes."""
        return sum(len(lane) for rank in self.ranks for lane in rank.lanes)
