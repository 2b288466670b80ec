"""Ranks of every group of a layout, and the domain, node and node type of each GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milpplan.communication.records import NodeBlock
from milpplan.problem.hardware import HardwareSpec
from milpplan.problem.plan import Layout
from milpplan.problem.problem import Problem
from milpplan.simulation.layout_columns import IntArray


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
        Groups [pp, groups of a stage, ranks] by their names in ``messages.Groups``, ranks in ascending order.
    """
    order = layout.rank_order.split("-")
    expert_axes = {"tp": ["etp"], "cp": [], "dp": ["ep", "edp"], "pp": ["pp"]}
    sizes = {name: getattr(layout, name) for name in ("tp", "cp", "dp", "pp", "ep", "etp")}
    sizes["edp"] = layout.expert_dp
    dense = _grid(sizes, order, ("pp", "dp", "cp", "tp"))
    experts = _grid(sizes, [name for axis in order for name in expert_axes[axis]], ("pp", "edp", "ep", "etp"))
    lists = {
        "tensor": dense.reshape(layout.pp, -1, layout.tp),
        "context": dense.transpose(0, 1, 3, 2).reshape(layout.pp, -1, layout.cp),
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
