"""Random strategy graphs, small enough to try every choice."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from milpplan.graph import StrategyGraph

KINDS = ("chain", "tree", "dense")


def random_graph(rng: np.random.Generator, kind: str, memory: bool, whole: bool, nodes: int = 5) -> StrategyGraph:
    """Up to four strategies a node; some pairs forbidden; sometimes followers, tables, devices and alive sets."""
    sizes = rng.integers(1, 5, nodes)

    def draw(*shape: int) -> Any:
        return rng.integers(0, 30, shape).astype(float) if whole else rng.random(shape) * 10

    pairs = {
        "chain": [(i, i + 1) for i in range(nodes - 1)],
        "tree": [(int(rng.integers(0, i)), i) for i in range(1, nodes)],
        "dense": [(i, j) for i in range(nodes) for j in range(i) if rng.random() < 0.8],
    }[kind]
    edges = {pair: draw(sizes[pair[0]], sizes[pair[1]]) for pair in pairs}
    for matrix in edges.values():
        matrix[rng.random(matrix.shape) < 0.08] = np.inf
    more: dict[str, Any] = {}
    if memory:
        devices = int(rng.integers(1, 3))
        vectors = [draw(s, devices) for s in sizes]
        low, high = sum(v.min(axis=0) for v in vectors), sum(v.max(axis=0) for v in vectors)
        more = {"node_memory": vectors, "memory_limit": low + (high - low) * (0.15 + 0.5 * rng.random())}
        if rng.random() < 0.4:
            more["alive"] = [sorted(set(rng.integers(0, nodes, 3).tolist())) for _ in range(3)]
            more["memory_limit"] = more["memory_limit"] * 0.55
    equal = [(i, j) for i in range(nodes) for j in range(i) if sizes[i] == sizes[j]]
    if equal and rng.random() < 0.3:
        more["follow"] = dict([equal[0]])
    if rng.random() < 0.3:
        more["allowed"] = {(0, nodes - 1): rng.random((sizes[0], sizes[-1])) < 0.7}
    return StrategyGraph([draw(s) for s in sizes], edges, **more)


def best_of_all(graph: StrategyGraph) -> float:
    """The least cost of all choices that meet the limits; inf if none does."""
    best = math.inf
    for choice in itertools.product(*(range(graph.num_strategies(i)) for i in range(graph.num_nodes))):
        cost = graph.objective_of(np.array(choice))
        if cost < best and (not graph.num_devices or graph.fits(np.array(choice))):
            best = cost
    return best
