"""Random strategy graphs, small enough to try every choice."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np

from milpplan.graph import GraphSolution, Peak, StrategyGraph

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


BYTES = (0.0, 128.0, 1024.0, 4096.0, 2.0**22, 2.0**22 + 128, 3 * 2.0**30, 3 * 2.0**30 + 1, 5e10)
COSTS = ("whole", "equal", "decimal", "wide", "tiny", "huge", "nanoseconds", "negative")


def drawn_costs(rng: np.random.Generator, kind: str, *shape: int) -> Any:
    """Costs of one kind, for instance whole numbers, one decimal, or from 1e-9 to 1e9 in one graph."""
    if kind == "equal":
        return rng.integers(0, 2, shape).astype(float)
    if kind == "decimal":
        return rng.integers(0, 30, shape) * 0.1
    if kind == "wide":
        return 10.0 ** rng.integers(-9, 10, shape) * rng.integers(1, 10, shape)
    scale = {"tiny": 1e-300, "huge": 1e280, "nanoseconds": 1e9}.get(kind, 1.0)
    drawn = rng.random(shape) if kind in ("nanoseconds", "tiny", "huge") else rng.integers(0, 100, shape)
    return (drawn - (50.0 if kind == "negative" else 0.0)) * scale


def bytes_graph(rng: np.random.Generator, kind: str, peaks: bool) -> StrategyGraph:
    """Two to five nodes with memory in bytes of any size, several limits, peaks, forbidden strategies and pairs,
    followers and edges given twice; limits often just at what some choice takes."""
    nodes = int(rng.integers(2, 6))
    sizes = rng.integers(1, 5, nodes)
    if rng.random() < 0.2:
        sizes[:] = sizes[0]
    costs = [drawn_costs(rng, kind, s) for s in sizes]
    density = rng.choice([0.0, 0.5, 1.0])
    pairs = [
        (i, j) for i in range(nodes) for j in range(nodes) if i != j and rng.random() < density / (1 + (i > j))
    ]
    edges = {(i, j): drawn_costs(rng, kind, sizes[i], sizes[j]) for i, j in pairs}
    for array in [*costs, *edges.values()]:
        array[rng.random(array.shape) < 0.05] = math.inf
    more: dict[str, Any] = {}
    if rng.random() < 0.85:
        devices = int(rng.integers(1, 3))
        memory = [rng.choice(BYTES, (s, devices)) + rng.integers(0, 3, (s, devices)) for s in sizes]
        if rng.random() < 0.2:
            memory = [m * 0.1 for m in memory]
        alive = [tuple(range(nodes))]
        if rng.random() < 0.3:
            alive = [tuple(sorted(set(rng.integers(0, nodes, 3).tolist()))) for _ in range(3)]
            more["alive"] = alive
        at = [int(rng.integers(0, s)) for s in sizes]
        taken = [[sum(memory[i][at[i], d] for i in one) for d in range(devices)] for one in alive]
        more |= {"node_memory": memory, "memory_limit": np.max(taken, axis=0)}
    if peaks:
        groups = []
        for _ in range(int(rng.integers(1, 3))):
            inside = [sorted(set(rng.integers(0, nodes, 2).tolist())) for _ in range(int(rng.integers(1, 4)))]
            groups.append(
                [
                    Peak(float(drawn_costs(rng, kind, 1)[0]), {i: drawn_costs(rng, kind, sizes[i]) for i in one})
                    for one in inside
                ]
            )
        more["peaks"] = groups
    equal = [(i, j) for i in range(nodes) for j in range(i) if sizes[i] == sizes[j]]
    if equal and rng.random() < 0.2:
        more["follow"] = dict([equal[0]])
    if rng.random() < 0.2:
        more["allowed"] = {(0, nodes - 1): rng.random((sizes[0], sizes[-1])) < 0.8}
    return StrategyGraph(costs, edges, **more)


def exact_cost(graph: StrategyGraph, choice: tuple[int, ...]) -> Fraction | None:
    """The cost of a choice without rounding, stated once more; None if it is forbidden or breaks a limit."""
    if any(choice[i] != choice[j] for i, j in graph.follow.items()):
        return None
    if not all(np.asarray(table)[choice[i], choice[j]] for (i, j), table in graph.allowed.items()):
        return None
    terms = [float(np.asarray(c)[s]) for c, s in zip(graph.node_costs, choice, strict=True)]
    terms += [float(np.asarray(m)[choice[i], choice[j]]) for (i, j), m in graph.edge_costs.items()]
    if math.inf in terms:
        return None
    for one in graph.alive_sets():
        for d, limit in enumerate(graph.limits().tolist()):
            if sum(Fraction(float(graph.memory_vector(i)[choice[i], d])) for i in one) > limit:
                return None
    total = sum(map(Fraction, terms), Fraction(0))
    for group in graph.peaks:
        values = (
            [one.constant, *(float(np.asarray(t)[choice[i]]) for i, t in one.terms.items())] for one in group
        )
        total += max(sum(map(Fraction, value), Fraction(0)) for value in values)
    return total


def exact_costs(graph: StrategyGraph) -> dict[tuple[int, ...], Fraction]:
    """Every legal choice and its cost."""
    choices = itertools.product(*(range(graph.num_strategies(i)) for i in range(graph.num_nodes)))
    costs = ((choice, exact_cost(graph, choice)) for choice in choices)
    return {choice: cost for choice, cost in costs if cost is not None}


def check_against_all(
    graph: StrategyGraph, solution: GraphSolution, legal: dict[tuple[int, ...], Fraction]
) -> None:
    """Hold an answer to all legal choices: it is one, its cost is exact, its bound below all, its gap closed."""
    if not legal:
        assert solution.status == "infeasible"
        return
    assert solution.status == "optimal"
    assert solution.choice is not None
    assert solution.lower_bound is not None
    best, cost = min(legal.values()), legal[tuple(solution.choice.tolist())]
    assert solution.objective == float(cost)
    assert solution.lower_bound <= best
    assert solution.objective - solution.lower_bound <= solution.rounding_error
    assert cost - best <= Fraction(solution.rounding_error) <= Fraction(sum_of_largest(graph)) * Fraction(1, 2**40)


def sum_of_largest(graph: StrategyGraph) -> float:
    """The largest costs of all arrays, added."""
    arrays = [*graph.node_costs, *graph.edge_costs.values()]
    arrays += [costs for group in graph.peaks for one in group for costs in one.terms.values()]
    largest = [float(np.abs(a[np.isfinite(a)]).max(initial=0.0)) for a in map(np.asarray, arrays)]
    return math.fsum([*largest, *(abs(one.constant) for group in graph.peaks for one in group)])


def random_chain(rng: np.random.Generator, kind: str) -> tuple[StrategyGraph, int, int, Any]:
    """A chain of one to six nodes with forbidden strategies, pairs and cuts and sometimes a limit on a stage; the
    number of stages and of micro-batches, and the costs of cuts."""
    nodes = int(rng.integers(1, 7))
    sizes = rng.integers(1, 4, nodes)
    costs = [drawn_costs(rng, kind, s) for s in sizes]
    edges = {}
    for i in range(nodes - 1):
        pair = (i, i + 1) if rng.random() < 0.8 else (i + 1, i)
        if rng.random() < 0.8:
            edges[pair] = drawn_costs(rng, kind, sizes[pair[0]], sizes[pair[1]])
    crossing = drawn_costs(rng, kind, nodes - 1)
    share = rng.choice([0.0, 0.1, 0.4])
    for array in [*costs, *edges.values(), crossing]:
        array[rng.random(array.shape) < share] = math.inf
    more: dict[str, Any] = {}
    if rng.random() < 0.6:
        memory = [rng.choice(BYTES, s) + rng.integers(0, 3, s) for s in sizes]
        if rng.random() < 0.3:
            memory = [m * 0.1 for m in memory]
        ends = np.sort(rng.integers(0, nodes + 1, 2))
        taken = sum((float(rng.choice(m)) for m in memory[slice(*ends)]), 0.0)
        more = {"node_memory": memory, "memory_limit": taken}
    if rng.random() < 0.2 and nodes > 1:
        more["allowed"] = {(0, 1): rng.random((sizes[0], sizes[1])) < 0.7}
    stages = int(rng.integers(1, nodes + 1))
    return StrategyGraph(costs, edges, **more), stages, int(rng.choice([1, 2, 7, 1000])), crossing


def best_split(graph: StrategyGraph, stages: int, micro_batches: int, crossing: Any) -> Fraction | None:
    """The least cost over all cuts and choices, without rounding; None if there is none."""
    nodes, best = graph.num_nodes, None
    limit = graph.limits().tolist()
    for choice in itertools.product(*(range(graph.num_strategies(i)) for i in range(nodes))):
        alone = [float(np.asarray(c)[s]) for c, s in zip(graph.node_costs, choice, strict=True)]
        between = [0.0] * (nodes - 1)
        for (i, j), matrix in graph.edge_costs.items():
            between[min(i, j)] += float(np.asarray(matrix)[choice[i], choice[j]])
        for (i, j), table in graph.allowed.items():
            between[min(i, j)] += 0.0 if np.asarray(table)[choice[i], choice[j]] else math.inf
        for cuts in itertools.combinations(range(1, nodes), stages - 1):
            times = []
            for a, b in itertools.pairwise((0, *cuts, nodes)):
                terms = [*alone[a:b], *between[a : b - 1], *([float(crossing[a - 1])] if a else [])]
                if (
                    limit
                    and sum(Fraction(float(graph.memory_vector(i)[choice[i], 0])) for i in range(a, b)) > limit[0]
                ):
                    break
                if math.inf in terms:
                    break
                times.append(sum(map(Fraction, terms), Fraction(0)))
            if len(times) == stages:
                cost = sum(times) + (micro_batches - 1) * max(times)
                best = cost if best is None or cost < best else best
    return best
