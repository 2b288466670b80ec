"""Records of the traffic report of a plan (``milpplan.traffic``): bytes of a step, seconds, NumPy arrays.

``rank_lists`` lists the ranks of every group of a layout, with the domain, node and node type of each GPU.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from milpplan.problem import HardwareSpec, Layout, Problem
from milpplan.simulation import FloatArray, IntArray

Tier = Literal["inside", "between"]
ALL_TYPES = "all node types"
"""Name of the nodes of a collective among GPUs of all node types."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Distinct pairs of GPUs that exchange bytes, by sender and receiver: arrays [pairs]."""

    sender: IntArray
    receiver: IntArray
    num_bytes: FloatArray

    @property
    def total_bytes(self) -> float:
        """Sum over all pairs."""
        return float(self.num_bytes.sum())

    def matrix(self, num_places: int, place_of: IntArray | None = None) -> FloatArray:
        """Sum the bytes [sender, receiver] between GPUs, or between places given by ``place_of`` [GPUs]."""
        sender, receiver = (
            (self.sender, self.receiver) if place_of is None else (place_of[self.sender], place_of[self.receiver])
        )
        key = sender * num_places + receiver
        counted = np.bincount(key, self.num_bytes, minlength=num_places * num_places)
        return np.asarray(counted.reshape(num_places, num_places), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Links:
    """Bytes that leave and enter each GPU or node, over links inside the domain and over the network."""

    out_inside: FloatArray
    in_inside: FloatArray
    out_between: FloatArray
    in_between: FloatArray


@dataclass(frozen=True, slots=True)
class NodeBlock:
    """Consecutive GPUs on nodes of one type."""

    node_type: int
    name: str
    first_gpu: int
    num_gpus: int
    gpus_per_domain: int
    gpus_per_node: int


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bandwidth of a collective in the cost model, without other traffic."""

    operation: str
    num_gpus: int
    stride: int
    """Distance of the ranks."""
    tier: Tier
    message_bytes: float
    seconds: float
    bus_bandwidth_bytes_per_s: float
    """Bus bandwidth per rank as nccl-tests defines it."""
    nodes: str
    """Node type; ``ALL_TYPES`` for ranks on all types."""
    where: str
    """Placement in words: the tier, or a rank in every domain (every pod)."""


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Shares of the step in which the GPUs of a pipeline rank work."""

    busy_fraction: float
    """Share of forwards and backwards, with communication and waits inside them."""
    compute_fraction: float
    """Share of compute, recomputation included."""


@dataclass(frozen=True, slots=True)
class TrafficTimeline:
    """Bytes over time in bins, by tier [bins]."""

    edges_s: FloatArray
    """Edges of the bins, [bins + 1]."""
    inside_bytes: FloatArray
    between_bytes: FloatArray


@dataclass(frozen=True, slots=True)
class TrafficReport:
    """Traffic of one step of a plan. Dictionaries are by parallelism."""

    algorithm: str
    num_gpus: int
    gpus_per_domain: int
    """Maximum over the node types."""
    gpus_per_node: int
    """Maximum over the node types."""
    blocks: tuple[NodeBlock, ...]
    """GPUs of each node type."""
    step_time_s: float
    pairs: dict[str, Pairs]
    wire_bytes: dict[str, float]
    """Bytes of the collectives in closed form; equal to the sums over ``pairs``."""
    tier_bytes: dict[str, dict[Tier, float]]
    rail_change_bytes: float
    """Bytes between domains whose GPUs have different positions in their domains."""
    pod_change_bytes: float
    """Bytes between pods; 0 without pods."""
    type_bytes: FloatArray
    """Bytes between node types, [from, to]."""
    gpu_links: Links
    node_links: Links
    timeline: TrafficTimeline
    utilisation: tuple[Utilisation, ...]
    """By pipeline rank; of heterogeneous replicas, the ranks on the first node type come first."""
    exposed_s: dict[str, float]
    """Communication that adds to the step, a mean over the pipeline's ranks."""
    hidden_s: dict[str, float]
    """Communication that runs beside compute, a mean over the pipeline's ranks."""
    bandwidths: tuple[Bandwidth, ...]

    @property
    def all_pairs(self) -> Pairs:
        """Pairs of all parallelisms together."""
        parts = list(self.pairs.values())
        key = np.concatenate(
            [np.zeros(0, np.int64), *(part.sender * self.num_gpus + part.receiver for part in parts)]
        )
        return pairs_of(key, np.concatenate([np.zeros(0), *(part.num_bytes for part in parts)]), self.num_gpus)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, with pairs as columns."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def pairs_of(key: IntArray, num_bytes: FloatArray, num_gpus: int) -> Pairs:
    """Sum the bytes of equal pairs; a key is sender * num_gpus + receiver."""
    distinct, inverse = np.unique(key, return_inverse=True)
    total = np.bincount(inverse, num_bytes, minlength=len(distinct))
    return Pairs(distinct // num_gpus, distinct % num_gpus, np.asarray(total, dtype=np.float64))


def _plain(value: Any) -> Any:
    """Convert arrays inside a value to lists."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _grid(sizes: dict[str, int], order: list[str], wanted: tuple[str, ...]) -> IntArray:
    """Number the ranks on a grid with axes ``wanted``; the first name of ``order`` changes fastest."""
    names = order[::-1]
    numbers = np.arange(int(np.prod([sizes[name] for name in names]))).reshape([sizes[name] for name in names])
    return numbers.transpose([names.index(name) for name in wanted])


def rank_lists(layout: Layout, shards: int, expert_shards: int) -> dict[str, IntArray]:
    """List the groups of a layout. Source: see ``placement``.

    Args:
        layout: layout.
        shards, expert_shards: number of neighbouring replicas that shard the states of dense weights and of
        experts.

    Returns:
        Groups [pp, groups of a stage, ranks] by their names in ``wires.Groups``, ranks in ascending order.
    """
    order = layout.rank_order.split("-")
    expert_axes = {"tp": ["etp"], "cp": [], "dp": ["ep", "edp"], "pp": ["pp"]}
    sizes = {name: getattr(layout, name) for name in ("tp", "cp", "dp", "pp", "ep", "etp")}
    sizes["edp"] = layout.expert_dp
    dense = _grid(sizes, order, ("pp", "dp", "cp", "tp"))
    experts = _grid(sizes, [name for axis in order for name in expert_axes[axis]], ("pp", "edp", "ep", "etp"))
    context = dense.transpose(0, 1, 3, 2).reshape(layout.pp, -1, layout.cp // layout.ulysses, layout.ulysses)
    lists = {
        "tensor": dense.reshape(layout.pp, -1, layout.tp),
        "context": context.reshape(layout.pp, -1, layout.cp),
        "head_exchange": context.reshape(layout.pp, -1, layout.ulysses),
        "context_ring": context.swapaxes(-1, -2).reshape(layout.pp, -1, layout.cp // layout.ulysses),
        "replicas": dense.transpose(0, 3, 1, 2).reshape(layout.pp, layout.tp, -1),
        "expert_tensor": experts.reshape(layout.pp, -1, layout.etp),
        "expert": experts.transpose(0, 1, 3, 2).reshape(layout.pp, -1, layout.ep),
        "expert_replicas": experts.transpose(0, 2, 3, 1).reshape(layout.pp, -1, layout.expert_dp),
    }
    lists = {name: np.sort(groups, axis=-1) for name, groups in lists.items()}
    for name, shared, count in (("replica", "replicas", shards), ("expert", "expert_replicas", expert_shards)):
        rows = lists[shared].reshape(layout.pp, lists[shared].shape[1], -1, count)
        lists[f"{name}_shards"] = rows.reshape(layout.pp, -1, count)
        lists[f"{name}_copies"] = rows.swapaxes(-1, -2).reshape(layout.pp, -1, rows.shape[2])
    lists["stage"] = np.sort(dense.reshape(layout.pp, 1, -1), axis=-1)
    return lists


def gpus_per_domain(hardware: HardwareSpec, num_gpus: int) -> int:
    """Return the number of consecutive ranks in a domain.

    If a scheduler places segments, it is the largest segment that divides the job, else the largest segment.
    """
    segments = hardware.scale_up.segments or (hardware.scale_up.num_gpus,)
    return max((size for size in segments if num_gpus % size == 0), default=max(segments))


@dataclass(frozen=True, slots=True)
class Places:
    """Placement of every GPU, arrays [GPUs] in the plan's order of ranks."""

    blocks: tuple[NodeBlock, ...]
    """Blocks of consecutive GPUs of the same node type."""
    domain: IntArray
    """Number of the domain."""
    place: IntArray
    """Position in the domain."""
    node: IntArray
    """Number of the node."""
    node_type: IntArray
    """Index in ``Problem.node_types``."""

    @property
    def num_gpus(self) -> int:
        """GPUs of the plan."""
        return len(self.domain)

    def between(self, sender: IntArray, receiver: IntArray) -> IntArray:
        """Return 1 where a pair of GPUs is in different domains, else 0."""
        return np.asarray(self.domain[sender] != self.domain[receiver], dtype=np.int64)


def places_of(problem: Problem, layout: Layout) -> Places:
    """Place the GPUs of a layout.

    Each node type has a block of GPUs, in the order of the pipeline or of heterogeneous replicas. The first GPU of
    a type starts a domain and a node.
    """
    blocks, parts = [], []
    first = domains = nodes = 0
    for node_type in layout.node_order or range(len(problem.node_types)):
        hardware = problem.node_types[node_type]
        gpus = problem.node_gpus[node_type] if problem.other_hardware else layout.num_gpus
        domain = gpus_per_domain(hardware, gpus)
        blocks.append(NodeBlock(node_type, hardware.name, first, gpus, domain, hardware.gpus_per_node))
        gpu = np.arange(gpus)
        domain_of, node_of = gpu // domain + domains, gpu // hardware.gpus_per_node + nodes
        parts.append((domain_of, gpu % domain, node_of, np.full(gpus, node_type)))
        first, domains, nodes = first + gpus, int(domain_of[-1]) + 1, int(node_of[-1]) + 1
    return Places(tuple(blocks), *(np.concatenate(column) for column in zip(*parts, strict=True)))
