"""AutoParallel's sharding problem (github.com/meta-pytorch/autoparallel, optimize_sharding.py at a54c252).

Its variables are x[i, a, o, j]: operation i, argument a, placement o of the output, placement j of the argument;
each with a cost, infinite where impossible. One per operation and argument is chosen; all arguments agree on o; j
of an argument is o of the operation that produces it. So a node is an operation, its strategies are output
placements, and an argument is an edge with the costs as its matrix. An operation without arguments has one column
of cost. Linked operations (its clusters of repeated layers) follow; the memory of parameters is a limit (its upper
side) on their nodes.

    python examples/adapters/autoparallel.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from milpplan.graph import GraphSolution, StrategyGraph

Key = tuple[int, int, int, int]


def graph_of(
    decision_costs: Mapping[Key, float],
    producers: Mapping[tuple[int, int], int],
    parameter_memory: Mapping[int, Any] | None = None,
    memory_limit: float | None = None,
    links: Mapping[int, int] | None = None,
) -> StrategyGraph:
    """The strategy graph of costs by (operation, argument, output, input placement); ``producers`` names the
    operation that an argument comes from. Several arguments from one producer add up."""
    outputs: dict[int, int] = defaultdict(int)
    inputs: dict[tuple[int, int], int] = defaultdict(int)
    for i, a, o, j in decision_costs:
        outputs[i] = max(outputs[i], o + 1)
        inputs[i, a] = max(inputs[i, a], j + 1)
    costs = [np.zeros(outputs[i]) for i in range(len(outputs))]
    edges: dict[tuple[int, int], Any] = {}
    for (i, a), width in sorted(inputs.items()):
        producer = producers.get((i, a))
        width = width if producer is None else outputs[producer]
        matrix = np.full((width, outputs[i]), np.inf)
        for o in range(outputs[i]):
            for j in range(width):
                matrix[j, o] = decision_costs.get((i, a, o, j), np.inf)
        if producer is None:
            costs[i] = costs[i] + matrix.min(axis=0)
        else:
            edges[producer, i] = edges[producer, i] + matrix if (producer, i) in edges else matrix
    limited: dict[str, Any] = {}
    if parameter_memory is not None and memory_limit is not None:
        memory = [np.asarray(parameter_memory.get(i, np.zeros(outputs[i])), float) for i in range(len(outputs))]
        limited = {"node_memory": memory, "memory_limit": memory_limit}
    return StrategyGraph(costs, edges, follow=links or {}, **limited)


def decisions(solution: GraphSolution, producers: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], Any]:
    """(output, input placement) of every operation and argument that a producer feeds."""
    assert solution.choice is not None
    return {(i, a): (int(solution.choice[i]), int(solution.choice[p])) for (i, a), p in producers.items()}


def example() -> tuple[dict[Key, float], dict[tuple[int, int], int]]:
    """A small product of input and weight, its activation, and a sum of both; placements: sharded, replicated."""
    costs: dict[Key, float] = {}
    producers = {(2, 0): 0, (2, 1): 1, (3, 0): 2, (4, 0): 3, (4, 1): 2}
    for i in (0, 1):
        costs.update({(i, 0, 0, 0): 0.0, (i, 0, 1, 0): 1.0})
    move = np.array([[0.0, 5.0], [2.0, 0.0]])
    for i, a in producers:
        for o in range(2):
            for j in range(2):
                costs[i, a, o, j] = float(move[j, o]) + (3.0 if o else 1.5)
    costs[2, 1, 0, 0] = float("inf")
    return costs, producers


def main() -> None:
    """Solve the example and print decisions with the bound."""
    costs, producers = example()
    solution = graph_of(costs, producers).solve()
    print(f"cost {solution.objective}, bound {solution.lower_bound}, {decisions(solution, producers)}")


if __name__ == "__main__":
    main()
