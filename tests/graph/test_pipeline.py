"""Splits of a chain into stages against trying every split and every choice."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from milpplan.errors import InfeasibleError, InvalidInputError, SolverError
from milpplan.graph import PipelineSplit, StrategyGraph, pipeline, split_chain
from tests.amounts import long_but
from tests.graph.cases import COSTS, best_split, random_chain, sum_of_largest


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
            if best is None:
                with pytest.raises(InfeasibleError):
                    split_chain(graph, stages, 1 + 3 * turn, crossing)
                continue
            split = split_chain(graph, stages, 1 + 3 * turn, crossing)
            assert split.objective == pytest.approx(float(best), rel=1e-12)
            assert split.lower_bound <= best
            assert len(split.stages) == stages


def test_only_chains_are_split() -> None:
    """An edge over two nodes, and more stages than nodes, are refused."""
    with pytest.raises(InvalidInputError, match="chain"):
        split_chain(StrategyGraph([[0.0]] * 3, {(0, 2): [[1.0]]}), 2, 4)
    with pytest.raises(InvalidInputError, match="num_stages"):
        split_chain(StrategyGraph([[0.0]] * 3), 4, 4)


def exact_cost(graph: StrategyGraph, split: PipelineSplit, micro_batches: int, crossing: Any) -> Fraction:
    """The cost of a split from its stages and choice, each node once, without rounding."""
    times = []
    for a, b in split.stages:
        terms = [float(np.asarray(graph.node_costs[i])[split.choice[i]]) for i in range(a, b)]
        for (i, j), matrix in graph.edge_costs.items():
            if a <= min(i, j) and max(i, j) < b:
                terms.append(float(np.asarray(matrix)[split.choice[i], split.choice[j]]))
        times.append(sum(map(Fraction, [*terms, *([float(crossing[a - 1])] if a else [])]), Fraction(0)))
    return sum(times) + (micro_batches - 1) * max(times)


@pytest.mark.parametrize("count", long_but((200,), (200, 3000)))
def test_random_chains_against_all_splits(count: int) -> None:
    """Chains with infinite, negative, tiny and huge costs and limits in bytes: the best split of all, with every
    node in one stage, in order; or that there is none."""
    infeasible = 0
    for turn in range(count):
        kind = COSTS[turn % len(COSTS)]
        graph, stages, micro_batches, crossing = random_chain(np.random.default_rng([39, turn]), kind)
        best = best_split(graph, stages, micro_batches, crossing)
        if best is None:
            infeasible += 1
            with pytest.raises(InfeasibleError):
                split_chain(graph, stages, micro_batches, crossing)
            continue
        split = split_chain(graph, stages, micro_batches, crossing)
        assert [i for a, b in split.stages for i in range(a, b)] == list(range(graph.num_nodes))
        assert len(split.stages) == stages
        cost = exact_cost(graph, split, micro_batches, crossing)
        assert split.objective == float(cost)
        assert split.lower_bound <= best <= cost
        largest = sum_of_largest(graph) + float(np.abs(crossing[np.isfinite(crossing)]).sum())
        assert cost - Fraction(split.lower_bound) <= Fraction(micro_batches * largest) * Fraction(1, 2**40)
    assert count // 4 < infeasible < count


def test_a_split_that_drops_nodes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that are not every node once in order are never returned."""
    graph = StrategyGraph([[1.0]] * 4)
    for wrong in ([(0, 2), (3, 4)], [(0, 3), (2, 4)], [(0, 2)], [(0, 4), (4, 4)], [(2, 4), (0, 2)], [(0, 4)]):
        monkeypatch.setattr(pipeline, "_best_partition", lambda *_, wrong=wrong: (0, wrong))
        with pytest.raises(SolverError, match="in order"):
            split_chain(graph, 2, 4)


NAN = float("nan")
WRONG_SPLITS: dict[str, tuple[Any, Any, Any]] = {
    "num_stages is 1.5": (1.5, 4, None),
    "num_stages is 0": (0, 4, None),
    "num_micro_batches is -1": (1, -1, None),
    "num_micro_batches is 'x'": (1, "x", None),
    "crossing_costs holds NaN": (1, 1, [0.0, NAN]),
    "crossing_costs holds -inf": (1, 1, [0.0, -math.inf]),
    "crossing_costs has shape (3,)": (1, 1, [0.0] * 3),
    "crossing_costs holds what is no number": (1, 1, ["a", "b"]),
    "crossing_costs add up": (1, 1, [1e300, 1e300]),
}


@pytest.mark.parametrize("words", WRONG_SPLITS)
def test_wrong_numbers_of_a_split_are_refused(words: str) -> None:
    """The message says what was seen."""
    stages, micro_batches, crossing = WRONG_SPLITS[words]
    with pytest.raises(InvalidInputError) as caught:
        split_chain(StrategyGraph([[1.0]] * 3), stages, micro_batches, crossing)
    assert words in str(caught.value)


def test_limits_of_stages_hold_without_rounding() -> None:
    """Two loads of 1e16 and 1 do not fit into 1e16, though their rounded sum does."""
    graph = StrategyGraph([[1.0], [1.0]], {}, [[1e16], [1.0]], 1e16)
    with pytest.raises(InfeasibleError):
        split_chain(graph, 1, 1)
    assert split_chain(graph, 2, 1).objective == 2.0
