"""Placement of the GPUs of a layout: domain, position in the domain, node and node type of each GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milpplan.communication.rank_lists import gpus_per_domain
from milpplan.communication.records import NodeBlock
from milpplan.problem.plan import Layout
from milpplan.problem.problem import Problem
from milpplan.simulation.layout_columns import IntArray


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
