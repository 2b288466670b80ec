"""A chain cut into pipeline stages, each node with a strategy, for a number of micro-batches.

Minimise ``sum_s t_s + (num_micro_batches - 1) * max_s t_s``, where a stage's time t_s is the sum of its nodes'
costs, of the edges inside it, and of ``crossing_costs`` of the edge into it, and each stage meets the memory limit
alone.

The table of cheapest stages comes from dynamic programming (with fronts of cost against memory where there is a
limit); then for every bottleneck that a stage can have, cheapest partitions with no slower stage. All in integers.
Source of the objective and of the scan over bottlenecks: Alpa (Zheng et al., OSDI 2022, equation 2). It is what
such planners minimise, not the exact time of a 1F1B pipeline: ``milpplan.solve`` has that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from milpplan.errors import InfeasibleError, InvalidInputError, SolverError
from milpplan.graph.instance import HALF, Instance, state
from milpplan.graph.statement import StrategyGraph
from milpplan.optimize.program import IntArray

MAX_FRONT = 20_000


@dataclass(frozen=True, slots=True, eq=False)
class PipelineSplit:
    """Stages as (first node, node after the last), the choice, and the bound; ``objective`` is the exact cost."""

    stages: tuple[tuple[int, int], ...]
    choice: npt.NDArray[np.int64]
    stage_costs: tuple[float, ...]
    objective: float
    lower_bound: float


@dataclass(frozen=True, slots=True)
class _Label:
    """A partial stage: cost, memory, the last node's strategy, and the label it grew from."""

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
    """The cheapest split of a chain (edges between neighbours only) into exactly ``num_stages`` stages.

    ``crossing_costs`` [nodes - 1] replace the cost of the edge where the chain is cut (0 by default).

    Raises:
        InfeasibleError: no split meets the memory limit.
    """
    crossing = _checked(graph, num_stages, num_micro_batches, crossing_costs)
    stated = state(graph)
    unit = stated.unit
    if float(np.abs(crossing).sum()) >= float(HALF) / 4 * unit:
        raise InvalidInputError(
            f"crossing_costs sum to {float(np.abs(crossing).sum()):.3g}, far above all other costs.",
            "Costs of about one size expected.",
            "Forbid a cut by more stages elsewhere, or give smaller numbers.",
        )
    cross = np.floor(crossing / unit).astype(np.int64)
    table = _stage_table(stated.instance, cross, 0)
    lower, stages = _best_partition(table, num_stages, num_micro_batches)
    choice = _choice(table, stages, graph.num_nodes)
    if not _fits(graph, stages, choice):
        table = _stage_table(stated.instance, cross, 1)
        _, stages = _best_partition(table, num_stages, num_micro_batches)
        choice = _choice(table, stages, graph.num_nodes)
    costs = [_stage_cost(graph, stage, choice, crossing) for stage in stages]
    objective = sum(costs) + (num_micro_batches - 1) * max(costs)
    return PipelineSplit(tuple(stages), choice, tuple(costs), objective, min(lower * unit, objective))


def _checked(
    graph: StrategyGraph, num_stages: int, num_micro_batches: int, crossing_costs: npt.ArrayLike | None
) -> npt.NDArray[np.float64]:
    n = graph.num_nodes
    odd = [p for p in [*graph.edge_costs, *graph.allowed] if abs(p[0] - p[1]) != 1]
    if odd or graph.follow or graph.peaks or graph.num_devices > 1 or graph.alive is not None:
        what = f"an edge {odd[0]}" if odd else "followers, peaks, alive sets or several devices"
        raise InvalidInputError(
            f"The graph has {what}.", "A chain expected: edges (i, i + 1), at most one memory limit.", "Use solve."
        )
    if not 1 <= num_stages <= n:
        raise InvalidInputError(f"num_stages is {num_stages}.", f"1 to {n} expected: a stage has a node.")
    if num_micro_batches < 1:
        raise InvalidInputError(f"num_micro_batches is {num_micro_batches}.", "At least 1 expected.")
    crossing = np.zeros(n - 1) if crossing_costs is None else np.array(crossing_costs, np.float64)
    if crossing.shape != (n - 1,) or not np.isfinite(crossing).all():
        raise InvalidInputError(
            f"crossing_costs has shape {crossing.shape}.", f"{n - 1} finite numbers expected, one per edge."
        )
    return crossing


def _stage_table(instance: Instance, crossing: IntArray, spare: int) -> dict[tuple[int, int], _Label]:
    """The cheapest stage from node a to before node b; with ``spare`` 1 loads
    round up and the limit down."""
    table = {}
    n = len(instance.costs)
    limit = int(instance.limits[0]) - spare if instance.limits.size else HALF
    for first in range(n):
        into = int(crossing[first - 1]) if first else 0
        labels = [
            _Label(int(c) + into, load, s, None)
            for s, (c, load) in enumerate(zip(instance.costs[first], _loads(instance, first, spare), strict=True))
            if c < HALF and load <= limit
        ]
        for after in range(first + 1, n + 1):
            if not labels:
                break
            table[first, after] = min(labels, key=lambda one: one.cost)
            if after < n:
                labels = _extended(instance, labels, after, limit, spare)
    return table


def _loads(instance: Instance, node: int, spare: int) -> list[int]:
    if node not in instance.loads:
        return [0] * instance.costs[node].size
    loads: list[int] = (instance.loads[node][0] + spare).tolist()
    return loads


def _extended(instance: Instance, labels: list[_Label], node: int, limit: int, spare: int) -> list[_Label]:
    """Partial stages with one more node: per strategy the front of cost against memory."""
    costs, loads = instance.costs[node], _loads(instance, node, spare)
    matrix = instance.edges.get((node - 1, node))
    cost = np.array([one.cost for one in labels], np.int64)
    load = np.array([one.load for one in labels], np.int64)
    last = np.array([one.strategy for one in labels], np.int64)
    made: list[_Label] = []
    for s in range(costs.size):
        total = cost + costs[s] + (0 if matrix is None else matrix[last, s])
        taken = load + loads[s]
        order = np.lexsort((taken, total))
        order = order[(total[order] < HALF) & (taken[order] <= limit)]
        if not order.size:
            continue
        least = np.minimum.accumulate(taken[order])
        front = order[np.concatenate(([True], taken[order][1:] < least[:-1]))]
        made += [_Label(int(total[k]), int(taken[k]), s, labels[k]) for k in front.tolist()]
    if len(made) > MAX_FRONT:
        raise SolverError(
            f"A stage has more than {MAX_FRONT} choices of cost against memory.",
            "Fewer expected: costs and memory that repeat, or a coarser unit of memory.",
            "Round memory up to whole MiB.",
        )
    return made


def _best_partition(
    table: dict[tuple[int, int], _Label], num_stages: int, num_micro_batches: int
) -> tuple[int, list[tuple[int, int]]]:
    n = max((b for _, b in table), default=0)
    costs = np.full((n + 1, n + 1), HALF, np.int64)
    for (a, b), label in table.items():
        costs[a, b] = label.cost
    best: tuple[int, list[tuple[int, int]]] | None = None
    free = _partition(costs, HALF - 1, num_stages)
    for top in np.unique(costs[costs < HALF]).tolist() if free is not None else []:
        assert free is not None
        if best is not None and free[0] + (num_micro_batches - 1) * top >= best[0]:
            break
        found = _partition(costs, top, num_stages)
        if found is None:
            continue
        value = found[0] + (num_micro_batches - 1) * max(int(costs[a, b]) for a, b in found[1])
        if best is None or value < best[0]:
            best = (value, found[1])
    if best is None:
        raise InfeasibleError(
            f"No split into {num_stages} stages meets the memory limit and the forbidden pairs.",
            "A stage of every part of the chain that fits expected.",
            "Use more stages, or raise memory_limit.",
        )
    return best


def _partition(costs: IntArray, top: int, num_stages: int) -> tuple[int, list[tuple[int, int]]] | None:
    """Least total of a partition without a stage above ``top``; None if there is none."""
    n = costs.shape[0] - 1
    allowed = np.where(costs <= top, costs, HALF)
    reach = np.full(n + 1, HALF, np.int64)
    reach[0] = 0
    origins = []
    for _ in range(num_stages):
        total = reach[:, None] + allowed
        origins.append(total.argmin(axis=0))
        reach = np.minimum(total.min(axis=0), HALF)
    if reach[n] >= HALF:
        return None
    stages, end = [], n
    for origin in reversed(origins):
        stages.append((int(origin[end]), end))
        end = int(origin[end])
    return int(reach[n]), stages[::-1]


def _choice(table: dict[tuple[int, int], _Label], stages: list[tuple[int, int]], n: int) -> npt.NDArray[np.int64]:
    choice = np.zeros(n, np.int64)
    for a, b in stages:
        label: _Label | None = table[a, b]
        for node in range(b - 1, a - 1, -1):
            assert label is not None
            choice[node], label = label.strategy, label.before
    return choice


def _part(graph: StrategyGraph, stage: tuple[int, int]) -> StrategyGraph:
    """The stage's nodes as a graph of their own."""
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


def _fits(graph: StrategyGraph, stages: list[tuple[int, int]], choice: npt.NDArray[np.int64]) -> bool:
    return all(_part(graph, stage).fits(choice[slice(*stage)]) for stage in stages)


def _stage_cost(
    graph: StrategyGraph,
    stage: tuple[int, int],
    choice: npt.NDArray[np.int64],
    crossing: npt.NDArray[np.float64],
) -> float:
    into = float(crossing[stage[0] - 1]) if stage[0] else 0.0
    return into + _part(graph, stage).objective_of(choice[slice(*stage)])
