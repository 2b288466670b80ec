"""Alpa's intra-operator pass: its serialized integer program, solved here.

Alpa (github.com/alpa-projects/alpa, alpa/shard_parallel/auto_sharding.py, also XLA's auto sharding) hands its
solver flat arrays: N nodes, the memory limit M (none if not positive), ``s_len`` [N] strategies of each node,
``s_follow`` [N] (the node to follow, or negative), edges ``E`` and aliases ``A`` as pairs, liveness ``L`` (N
lengths, then the nodes alive at each step), computation ``c``, communication ``d`` and memory ``m`` by node and
strategy, resharding ``r`` by edge and pair, ``v`` by alias and pair (above 0.5: not together), ``s_init`` as
triples (node, strategy, fixed). ``call_solver_serialized_args`` takes the same and answers the same: strategies,
the pair of every edge, the objective; and the answer with the bound that Alpa does not ask for.

    python examples/adapters/alpa.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from milpplan.graph import GraphSolution, StrategyGraph

Ints = npt.NDArray[np.int64]


def graph_of(
    num_nodes: int,
    memory_limit: float,
    s_len: npt.ArrayLike,
    s_follow: npt.ArrayLike,
    edges: npt.ArrayLike,
    aliases: npt.ArrayLike,
    liveness: npt.ArrayLike,
    compute: npt.ArrayLike,
    communication: npt.ArrayLike,
    memory: npt.ArrayLike,
    resharding: npt.ArrayLike,
    alias_values: npt.ArrayLike,
    s_init: npt.ArrayLike | None = None,
) -> tuple[StrategyGraph, Ints]:
    """The strategy graph, and the pairs of its edges."""
    sizes = np.asarray(s_len, np.int64)
    cuts = np.cumsum(sizes)[:-1]
    follow = {i: int(j) for i, j in enumerate(np.asarray(s_follow).tolist()) if j >= 0}
    costs = np.split(np.asarray(compute, float) + np.asarray(communication, float), cuts)
    pairs = np.asarray(edges, np.int64).reshape(-1, 2)
    # Alpa's follower takes the leader's variables: an edge to a follower is an edge to its leader's choice.
    matrices = _matrices(pairs, sizes, np.asarray(resharding, float))
    banned = _matrices(np.asarray(aliases, np.int64).reshape(-1, 2), sizes, np.asarray(alias_values, float))
    fixed = [] if s_init is None else [t for t in np.asarray(s_init, np.int64).reshape(-1, 3).tolist() if t[2]]
    for node, strategy, _ in fixed:
        costs[node] = np.where(np.arange(sizes[node]) == strategy, costs[node], np.inf)
    limited: dict[str, Any] = {}
    if memory_limit > 0:
        limited = {
            "node_memory": np.split(np.asarray(memory, float), cuts),
            "memory_limit": memory_limit,
            "alive": _alive(num_nodes, np.asarray(liveness, np.int64)),
        }
    allowed = {pair: table <= 0.5 for pair, table in banned.items()}
    return StrategyGraph(costs, matrices, follow=follow, allowed=allowed, **limited), pairs


def _matrices(pairs: Ints, sizes: Ints, values: npt.NDArray[np.float64]) -> dict[tuple[int, int], Any]:
    found, at = {}, 0
    for i, j in pairs.tolist():
        count = int(sizes[i] * sizes[j])
        if (i, j) in found:
            raise ValueError(f"Edge {(i, j)} appears twice.")
        found[i, j] = values[at : at + count].reshape(sizes[i], sizes[j])
        at += count
    if at != values.size:
        raise ValueError(f"The edges need {at} numbers; {values.size} are given.")
    return found


def _alive(num_nodes: int, liveness: Ints) -> list[list[int]]:
    ends = np.cumsum(liveness[:num_nodes])[:-1]
    return [part.tolist() for part in np.split(liveness[num_nodes:], ends)]


def call_solver_serialized_args(
    *args: Any, backend: str = "auto", time_limit_s: float | None = 600.0
) -> tuple[Ints, Ints, float, GraphSolution]:
    """Strategy of every node, pair of every edge (row * columns + column), objective, and the proved answer."""
    graph, pairs = graph_of(*args)
    solution = graph.solve(backend, time_limit_s, _hint(graph, args[12] if len(args) > 12 else None))
    if solution.choice is None:
        raise RuntimeError(solution.explanation or "No choice was found in time.")
    chosen = solution.choice
    picks = [int(chosen[i] * graph.num_strategies(j) + chosen[j]) for i, j in pairs.tolist()]
    assert solution.objective is not None
    return chosen, np.array(picks, np.int64), solution.objective, solution


def _hint(graph: StrategyGraph, s_init: Sequence[int] | None) -> list[int] | None:
    if s_init is None:
        return None
    start = [0] * graph.num_nodes
    for node, strategy, _ in np.asarray(s_init, np.int64).reshape(-1, 3).tolist():
        start[node] = strategy
    return start


def example() -> tuple[Any, ...]:
    """Two layers of a perceptron on two devices (weights whole, by row or by column), in Alpa's arrays."""
    s_len, s_follow = [2, 3, 3, 3, 3], [-1, -1, -1, -1, 2]
    edges, aliases = [0, 2, 1, 2, 2, 3], [1, 3]
    liveness = [2, 3, 3, 2, 1, 0, 1, 0, 1, 2, 1, 2, 3, 3, 4, 4]
    compute = [0, 0, 0, 0, 0, 8, 4, 4, 8, 4, 4, 0, 0, 0]
    communication = [0, 0, 0, 0, 0, 0, 3, 0, 0, 3, 0, 0, 0, 0]
    memory = [4, 2, 8, 4, 4, 4, 4, 2, 4, 4, 2, 1, 1, 1]
    resharding = [0, 2, 0, 2, 2, 0, *([0, 1, 1, 2, 0, 2, 2, 2, 0] * 2)]
    apart = [0, 0, 0, 0, 0, 1, 0, 1, 0]
    arrays = (s_len, s_follow, edges, aliases, liveness, compute, communication, memory, resharding, apart)
    return (5, 12.0, *(np.array(a) for a in arrays))


def main() -> None:
    """Solve the example and print the choice with its bound."""
    strategies, pairs, objective, solution = call_solver_serialized_args(*example())
    print(f"strategies {strategies.tolist()}, pairs {pairs.tolist()}")
    print(f"cost {objective}, bound {solution.lower_bound}")


if __name__ == "__main__":
    main()
