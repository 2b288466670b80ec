"""Where the GPUs of a layout are: the fast domain, the place in it, the node and the node type of each."""

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
    """Of every GPU, in the plan's order of ranks, [GPUs]: number of its domain and its place there, number of its
    node, and its node type. The GPUs of a type are neighbours: ``blocks``."""

    blocks: tuple[NodeBlock, ...]
    domain: IntArray
    place: IntArray
    node: IntArray
    node_type: IntArray

    @property
    def num_gpus(self) -> int:
        """GPUs of the plan."""
        return len(self.domain)

    def between(self, sender: IntArray, receiver: IntArray) -> IntArray:
        """1 where a pair of GPUs is in different domains, else 0."""
        return np.asarray(self.domain[sender] != self.domain[receiver], dtype=np.int64)


def places_of(problem: Problem, layout: Layout) -> Places:
    """Places of the GPUs of a layout: node types one after another, in the order of the pipeline or, with replicas
    of different make, in that of the replicas. The first GPU of each type opens a domain and a node."""
    blocks, parts = [], []
    first = domains = nodes = 0
    for node_type in layout.node_order or range(len(problem.node_types)):
        hardware = problem.node_types[node_type]
        gpus = problem.node_gpus[node_type] if problem.other_hardware else layout.num_gpus
        domain = gpus_per_domain(hardware, gpus)
        blocks.append(NodeBlock(node_type, hardware.name, first, gpus, domain, hardware.gpus_per_node))
        own = np.arange(gpus)
        own_domain, own_node = own // domain + domains, own // hardware.gpus_per_node + nodes
        parts.append((own_domain, own % domain, own_node, np.full(gpus, node_type)))
        first, domains, nodes = first + gpus, int(own_domain[-1]) + 1, int(own_node[-1]) + 1
    return Places(tuple(blocks), *(np.concatenate(column) for column in zip(*parts, strict=True)))
