"""A chain cut into pipeline stages, each node with a strategy, for a number of micro-batches.

Minimise ``sum_s t_s + (num_micro_batches - 1) * max_s t_s``, where a stage's time t_s is the sum of its nodes'
costs, of the edges inside it, and of ``crossing_costs`` of the edge into it, and each stage meets the memory limit
alone.

Dynamic programming gives the table of cheapest stages (with Pareto fronts of cost against memory where there is a
limit); then for every possible bottleneck, the cheapest partition with no slower stage. All in integers.
Source of the objective and of the scan over bottlenecks: Alpa (Zheng et al., OSDI 2022, equation 2). Such
planners minimise it; the exact time of a 1F1B pipeline is the objective of ``milpplan.solve``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from milpplan.errors import InfeasibleError, InvalidInputError, SolverError
from milpplan.graph.checked_arrays import MAX_SUM, cost_array
from milpplan.graph.instance import FORBIDDEN, HALF, Instance, clipped, floored, rounded_down, state
from milpplan.graph.strategy_graph import StrategyGraph
from milpplan.optimize.milp.program import FloatArray, IntArray

MAX_FRONT: Final = 20_000
MAX_MICRO_BATCHES: Final = 10**6


@dataclass(frozen=True, slots=True, eq=False)
class PipelineSplit:
    """Stages as (first node, end), the choice, its exact cost ``objective``, and the lower bound."""

    stages: tuple[tuple[int, int], ...]
    choice: npt.NDArray[np.int64]
    stage_costs: tuple[float, ...]
    objective: float
    lower_bound: float


@dataclass(frozen=True, slots=True)
class _Label:
    """A partial stage: cost, memory, the last node's strategy, and the label that it extends."""

    cost: int
    load: int
    strategy: int
    before: _Label | None


def split_chain(
    graph: StrategyGraph,
    num_stages: int,
    num_micro_batches: int,
    crossing_costs: npt.ArrayLike | None = None,
) -> PipelineSplit:
    """Split a chain (edges between neighbours only) into exactly ``num_stages`` stages at minimum cost.

    Args:
        graph: the chain, with at most one memory limit.
        num_stages: number of stages.
        num_micro_batches: the slowest stage counts once for each.
        crossing_costs: [nodes - 1] replace the cost of the edge where the chain is cut (0 by default; infinite:
            the chain is not cut there).

    Raises:
        InfeasibleError: no split meets the memory limit, the forbidden strategies and pairs.
        InvalidInputError: the graph is no chain, or an argument is out of range.
        SolverError: a Pareto front is too large.
    """
    crossing = _checked(graph, num_stages, num_micro_batches, crossing_costs)
    stated = state(graph, crossing)
    cross, crossing_exact = floored(crossing, stated.unit)
    loads, limit = _exact_loads(graph)
    table = _stage_table(stated.instance, cross, loads, limit)
    lower, stages = _best_partition(table, graph.num_nodes, num_stages, num_micro_batches)
    _check_cover(stages, num_stages, graph.num_nodes)
    choice = _choice(table, stages, graph.num_nodes)
    parts = [_part(graph, stage) for stage in stages]
    if not all(part.fits(choice[slice(*stage)]) for part, stage in zip(parts, stages, strict=True)):
        raise SolverError("A stage of the split that was found breaks the memory limit.", do="Report this graph.")
    terms = [_stage_terms(part, stage, choice, crossing) for part, stage in zip(parts, stages, strict=True)]
    times = [sum(map(Fraction, costs), Fraction(0)) for costs in terms]
    objective = float(sum(times) + (num_micro_batches - 1) * max(times))
    bound = rounded_down(lower, stated.unit, exact=not stated.error_units and crossing_exact)
    if bound > objective:
        raise SolverError(f"The bound {bound!r} is above the cost {objective!r}.", do="Report this graph.")
    return PipelineSplit(tuple(stages), choice, tuple(map(float, times)), objective, bound)


def _checked(
    graph: StrategyGraph, num_stages: int, num_micro_batches: int, crossing_costs: npt.ArrayLike | None
) -> FloatArray:
    """Check the arguments. Returns the crossing costs, [nodes - 1]."""
    num_nodes = graph.num_nodes
    unsuitable = [p for p in [*graph.edge_costs, *graph.allowed] if abs(p[0] - p[1]) != 1]
    if unsuitable or graph.follow or graph.peaks or graph.num_devices > 1 or graph.alive is not None:
        what = f"an edge {unsuitable[0]}" if unsuitable else "followers, peaks, alive sets or several devices"
        raise InvalidInputError(
            f"The graph has {what}.", "A chain expected: edges (i, i + 1), at most one memory limit.", "Use solve."
        )
    for name, value, largest, why in (
        ("num_stages", num_stages, num_nodes, "a stage has a node"),
        ("num_micro_batches", num_micro_batches, MAX_MICRO_BATCHES, "the slowest stage counts once for each"),
    ):
        if not isinstance(value, (int, np.integer)) or not 1 <= value <= largest:
            raise InvalidInputError(f"{name} is {value!r}.", f"A whole number of 1 to {largest} expected: {why}.")
    if crossing_costs is None or num_nodes == 1:
        return np.zeros(num_nodes - 1)
    crossing = cost_array(crossing_costs, (num_nodes - 1,), "crossing_costs")
    if sum(np.abs(crossing[np.isfinite(crossing)]).tolist()) > MAX_SUM:
        raise InvalidInputError(f"crossing_costs add up to more than {MAX_SUM:.0e}.", do="Use a larger unit.")
    return crossing


def _exact_loads(graph: StrategyGraph) -> tuple[list[npt.NDArray[Any]], int]:
    """State the memory of all strategies and the limit of a stage as whole numbers, without rounding loads."""
    limits = graph.limits().tolist()
    if not limits or limits[0] == math.inf:
        return [np.zeros(graph.num_strategies(i), np.int64) for i in range(graph.num_nodes)], 0
    vectors = [list(map(Fraction, graph.memory_vector(i)[:, 0].tolist())) for i in range(graph.num_nodes)]
    scale = max(value.denominator for vector in vectors for value in vector)
    total = scale * sum(map(max, vectors), Fraction(0))
    # Python integers where 64 bits are too few.
    number_type = np.int64 if total < HALF else object
    loads = [np.array([int(value * scale) for value in vector], number_type) for vector in vectors]
    return loads, math.floor(min(Fraction(limits[0]) * scale, total))


def _stage_table(
    instance: Instance, crossing: IntArray, loads: list[npt.NDArray[Any]], limit: int
) -> dict[tuple[int, int], _Label]:
    """Find the cheapest stage from every first node to every end; infeasible stages are left out."""
    table = {}
    num_nodes = len(instance.costs)
    for first in range(num_nodes):
        into = int(crossing[first - 1]) if first else 0
        labels = [
            _Label(int(c) + into, load, s, None)
            for s, (c, load) in enumerate(zip(instance.costs[first], loads[first].tolist(), strict=True))
            if c < HALF and into < HALF and load <= limit
        ]
        for end in range(first + 1, num_nodes + 1):
            if not labels:
                break
            table[first, end] = min(labels, key=lambda label: label.cost)
            if end < num_nodes:
                labels = _extended(instance, labels, end, loads[end], limit)
    return table


def _extended(
    instance: Instance, labels: list[_Label], node: int, loads: npt.NDArray[Any], limit: int
) -> list[_Label]:
    """Extend partial stages by a node: per strategy the Pareto front of cost against memory."""
    costs = instance.costs[node]
    matrix = instance.edges.get((node - 1, node))
    cost = np.array([label.cost for label in labels], np.int64)
    load = np.array([label.load for label in labels], loads.dtype)
    last = np.array([label.strategy for label in labels], np.int64)
    extended: list[_Label] = []
    for s in range(costs.size):
        total = cost + costs[s] + (0 if matrix is None else matrix[last, s])
        taken = load + loads[s]
        # Sort by cost, then by memory.
        order = np.argsort(taken, kind="stable")
        order = order[np.argsort(total[order], kind="stable")]
        order = order[((total[order] < HALF) & (taken[order] <= limit)).astype(np.bool_)]
        if not order.size:
            continue
        smallest_load = np.minimum.accumulate(taken[order])
        front = order[np.concatenate(([True], (taken[order][1:] < smallest_load[:-1]).astype(np.bool_)))]
        extended += [_Label(int(total[k]), int(taken[k]), s, labels[k]) for k in front.tolist()]
    if len(extended) > MAX_FRONT:
        raise SolverError(
            f"A stage has more than {MAX_FRONT} choices of cost against memory.",
            "Fewer expected: costs and memory that repeat, or a coarser unit of memory.",
            "Round memory up to whole MiB.",
        )
    return extended


def _best_partition(
    table: dict[tuple[int, int], _Label], num_nodes: int, num_stages: int, num_micro_batches: int
) -> tuple[int, list[tuple[int, int]]]:
    """Find the split of minimum cost over all bottlenecks.

    Returns:
        The cost and the stages.
    """
    costs = np.full((num_nodes + 1, num_nodes + 1), FORBIDDEN, np.int64)
    for (a, b), label in table.items():
        costs[a, b] = label.cost
    best: tuple[int, list[tuple[int, int]]] | None = None
    unbounded = _partition(costs, HALF - 1, num_stages)
    for bottleneck in np.unique(costs[costs < HALF]).tolist() if unbounded is not None else []:
        assert unbounded is not None
        if best is not None and unbounded[0] + (num_micro_batches - 1) * bottleneck >= best[0]:
            break
        partition = _partition(costs, bottleneck, num_stages)
        if partition is None:
            continue
        value = partition[0] + (num_micro_batches - 1) * max(int(costs[a, b]) for a, b in partition[1])
        if best is None or value < best[0]:
            best = (value, partition[1])
    if best is None:
        raise InfeasibleError(
            f"No split into {num_stages} stages meets the memory limit and the forbidden pairs.",
            "A stage of every part of the chain that fits expected.",
            "Use more stages, or raise memory_limit.",
        )
    return best


def _partition(costs: IntArray, top: int, num_stages: int) -> tuple[int, list[tuple[int, int]]] | None:
    """Return the cheapest partition without a stage above ``top``; None if there is none."""
    n = costs.shape[0] - 1
    allowed = np.where(costs <= top, costs, FORBIDDEN)
    reach = np.full(n + 1, FORBIDDEN, np.int64)
    reach[0] = 0
    origins = []
    for _ in range(num_stages):
        # A negative cost must not make a forbidden stage allowed.
        total = clipped(reach[:, None] + allowed)
        origins.append(total.argmin(axis=0))
        reach = total.min(axis=0)
    if reach[n] >= HALF:
        return None
    stages, end = [], n
    for origin in reversed(origins):
        stages.append((int(origin[end]), end))
        end = int(origin[end])
    return int(reach[n]), stages[::-1]


def _choice(table: dict[tuple[int, int], _Label], stages: list[tuple[int, int]], n: int) -> npt.NDArray[np.int64]:
    """Trace the labels of the stages back to a choice."""
    choice = np.zeros(n, np.int64)
    for a, b in stages:
        label: _Label | None = table[a, b]
        for node in range(b - 1, a - 1, -1):
            assert label is not None
            choice[node], label = label.strategy, label.before
    return choice


def _part(graph: StrategyGraph, stage: tuple[int, int]) -> StrategyGraph:
    """Make a graph of the stage's nodes."""
    a, b = stage

    def inside(pairs: dict[tuple[int, int], npt.ArrayLike]) -> dict[tuple[int, int], npt.ArrayLike]:
        return {(i - a, j - a): m for (i, j), m in pairs.items() if a <= min(i, j) and max(i, j) < b}

    memory = None if graph.node_memory is None else graph.node_memory[a:b]
    return StrategyGraph(
        graph.node_costs[a:b],
        inside(dict(graph.edge_costs)),
        memory,
        graph.memory_limit,
        allowed=inside(dict(graph.allowed)),
    )


def _check_cover(stages: list[tuple[int, int]], num_stages: int, num_nodes: int) -> None:
    """Raise ``SolverError`` unless the stages cover every node once, in order."""
    ends = [0, *(end for _, end in stages)]
    covered = ends[-1] == num_nodes and all(
        start == previous_end < end for (start, end), previous_end in zip(stages, ends, strict=False)
    )
    if not covered or len(stages) != num_stages:
        raise SolverError(
            f"A split into the stages {stages} was found.",
            f"{num_stages} stages of all {num_nodes} nodes in order expected.",
            "Report this graph.",
        )


def _stage_terms(
    part: StrategyGraph, stage: tuple[int, int], choice: npt.NDArray[np.int64], crossing: FloatArray
) -> list[float]:
    """List all costs of a stage."""
    return [*([float(crossing[stage[0] - 1])] if stage[0] else []), *part.terms_of(choice[slice(*stage)])]
