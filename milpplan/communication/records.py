"""What ``milpplan.traffic`` says about a plan: records only. Bytes of one step, seconds, arrays of NumPy."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from milpplan.simulation.layout_columns import FloatArray, IntArray

Tier = Literal["inside", "between"]
TIERS: tuple[Tier, ...] = ("inside", "between")
"""Inside a scale-up domain, and between domains."""
ALL_TYPES = "all node types"


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of GPUs that exchange bytes, each once, by sender and receiver: arrays [pairs]."""

    sender: IntArray
    receiver: IntArray
    num_bytes: FloatArray

    @property
    def total_bytes(self) -> float:
        """Sum over all pairs."""
        return float(self.num_bytes.sum())

    def matrix(self, num_places: int, place_of: IntArray | None = None) -> FloatArray:
        """Bytes [sender, receiver] of places: GPUs, or those that ``place_of`` [GPUs] gives each GPU."""
        sender, receiver = (
            (self.sender, self.receiver) if place_of is None else (place_of[self.sender], place_of[self.receiver])
        )
        key = sender * num_places + receiver
        counted = np.bincount(key, self.num_bytes, minlength=num_places * num_places)
        return np.asarray(counted.reshape(num_places, num_places), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Links:
    """Bytes that leave and enter each place: the links inside the domain and the network, [GPUs] or [nodes]."""

    out_inside: FloatArray
    in_inside: FloatArray
    out_between: FloatArray
    in_between: FloatArray


@dataclass(frozen=True, slots=True)
class NodeBlock:
    """Consecutive GPUs on nodes of one type, with that type's domains and nodes."""

    node_type: int
    name: str
    first_gpu: int
    num_gpus: int
    gpus_per_domain: int
    gpus_per_node: int


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """One collective alone on nodes of the type ``nodes`` (``ALL_TYPES``: with ranks on all of them), as the cost
    model has it: ``message_bytes`` among ``num_gpus`` ranks ``stride`` apart; the bus bandwidth is that of
    nccl-tests, per rank."""

    operation: str
    num_gpus: int
    stride: int
    tier: Tier
    message_bytes: float
    seconds: float
    bus_bandwidth_bytes_per_s: float
    nodes: str
    where: str
    """In words: the tier, or that every domain (every pod) has one of the ranks."""


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Shares of the step that a pipeline rank's GPUs work (with replicas of different make those of the first node
    type, then those of the next): ``busy`` in forwards and backwards, communication and
    waits inside them included, ``compute`` without (recomputation included)."""

    busy_fraction: float
    compute_fraction: float


@dataclass(frozen=True, slots=True)
class TrafficTimeline:
    """Bytes in each of the bins between ``edges_s`` [bins + 1], by tier [bins]."""

    edges_s: FloatArray
    inside_bytes: FloatArray
    between_bytes: FloatArray


@dataclass(frozen=True, slots=True)
class TrafficReport:
    """Traffic of one step of a plan.

    By parallelism: ``pairs``, ``wire_bytes`` (the collectives' own, in closed form; equal to the sum over pairs)
    and ``tier_bytes``. ``rail_change_bytes``: of those between domains, between different places in them;
    ``pod_change_bytes``: between different pods, where the hardware has some.
    ``blocks``: which GPUs are on which node type; ``type_bytes`` [from, to]: bytes between the types, by their
    numbers. ``gpus_per_domain`` and ``gpus_per_node``: the most of any type.
    ``exposed_s`` and ``hidden_s`` are the mean over the pipeline's ranks of communication that adds to the step,
    and that compute covers.
    """

    algorithm: str
    num_gpus: int
    gpus_per_domain: int
    gpus_per_node: int
    blocks: tuple[NodeBlock, ...]
    step_time_s: float
    pairs: dict[str, Pairs]
    wire_bytes: dict[str, float]
    tier_bytes: dict[str, dict[Tier, float]]
    rail_change_bytes: float
    pod_change_bytes: float
    type_bytes: FloatArray
    gpu_links: Links
    node_links: Links
    timeline: TrafficTimeline
    utilisation: tuple[Utilisation, ...]
    exposed_s: dict[str, float]
    hidden_s: dict[str, float]
    bandwidths: tuple[Bandwidth, ...]

    @property
    def all_pairs(self) -> Pairs:
        """All parallelisms together."""
        parts = list(self.pairs.values())
        key = np.concatenate(
            [np.zeros(0, np.int64), *(part.sender * self.num_gpus + part.receiver for part in parts)]
        )
        return pairs_of(key, np.concatenate([np.zeros(0), *(part.num_bytes for part in parts)]), self.num_gpus)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; pairs as columns."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def pairs_of(key: IntArray, num_bytes: FloatArray, num_gpus: int) -> Pairs:
    """Pairs of keys sender * num_gpus + receiver, those that occur several times added up."""
    distinct, inverse = np.unique(key, return_inverse=True)
    total = np.bincount(inverse, num_bytes, minlength=len(distinct))
    return Pairs(distinct // num_gpus, distinct % num_gpus, np.asarray(total, dtype=np.float64))


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
