"""Splits of a chain into stages against trying every split and every choice."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from milpplan.errors import InfeasibleError, InvalidInputError
from milpplan.graph import StrategyGraph, split_chain


def best_split(graph: StrategyGraph, stages: int, micro_batches: int, crossing: np.ndarray) -> float:
    """The least cost over all cuts and choices."""
    n, best = graph.num_nodes, math.inf
    costs = [np.asarray(c) for c in graph.node_costs]
    for choice in itertools.product(*(range(graph.num_strategies(i)) for i in range(n))):
        for cuts in itertools.combinations(range(1, n), stages - 1):
            parts = list(itertools.pairwise((0, *cuts, n)))
            times = [crossing[a - 1] if a else 0.0 for a, _ in parts]
            for s, (a, b) in enumerate(parts):
                times[s] += sum(costs[i][choice[i]] for i in range(a, b))
                times[s] += sum(
                    np.asarray(graph.edge_costs[i, i + 1])[choice[i], choice[i + 1]] for i in range(a, b - 1)
                )
            loads = [sum(graph.memory_vector(i)[choice[i], 0] for i in range(a, b)) for a, b in parts]
            if max(loads) <= graph.limits()[0]:
                best = min(best, sum(times) + (micro_batches - 1) * max(times))
    return best


def test_split_is_that_of_all_splits() -> None:
    """Cuts, strategies and bottleneck together, with a memory limit per stage."""
    rng = np.random.default_rng(3)
    for turn in range(6):
        n, k = 5, 2
        crossing = rng.random(n - 1)
        graph = StrategyGraph(
            [rng.random(k) * 5 for _ in range(n)],
            {(i, i + 1): rng.random((k, k)) * 2 for i in range(n - 1)},
            [rng.random(k) * 3 for _ in range(n)],
            4.5,
        )
        for stages in (2, 3):
            best = best_split(graph, stages, 1 + 3 * turn, crossing)
            if best == math.inf:
                with pytest.raises(InfeasibleError):
                    split_chain(graph, stages, 1 + 3 * turn, crossing)
                continue
            split = split_chain(graph, stages, 1 + 3 * turn, crossing)
            assert split.objective == pytest.approx(best, rel=1e-12)
            assert split.lower_bound <= best * (1 + 1e-12)
            assert len(split.stages) == stages


def test_only_chains_are_split() -> None:
    """An edge over two nodes, and more stages than nodes, are refused."""
    with pytest.raises(InvalidInputError, match="chain"):
        split_chain(StrategyGraph([[0.0]] * 3, {(0, 2): [[1.0]]}), 2, 4)
    with pytest.raises(InvalidInputError, match="num_stages"):
        split_chain(StrategyGraph([[0.0]] * 3), 4, 4)
