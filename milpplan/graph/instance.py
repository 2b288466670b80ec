"""A strategy graph in integers: followers merged, parallel edges added, floats floored to a power of two.

Costs are ``floor(cost * 2^p)`` and loads ``floor(memory * 2^q)`` against ``ceil(limit * 2^q)``: a relaxation, so
bounds proved here hold for the caller's numbers too, up to one unit a term in the cost. Where flooring changes no
load, the limit is ``floor(limit * 2^q)``: then the rows are exactly the caller's limits.

**Reductions** keep the optimum of an instance. A strategy goes if it is forbidden, if an edge allows no partner,
or if another of the same node is never worse: with costs c, edge matrices E, loads m, strategy b replaces a where
(dead-end elimination)

    c[b] + sum_e max_t (E_e[b, t] - E_e[a, t]) <= c[a]  and  m[b] <= m[a] in every row.

Source: R. F. Goldstein, Biophysical Journal 66 (1994), the criterion for side chains of proteins; the condition
on loads is ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from milpplan.optimize.milp.program import BoolArray, FloatArray, IntArray

if TYPE_CHECKING:
    from milpplan.graph.strategy_graph import StrategyGraph

# Sums of finite costs stay below 2^52; forbidden costs are far above, and still add without overflow.
COST_BITS: Final = 50
FORBIDDEN: Final = 2**60
HALF: Final = 2**57
LOAD_BITS: Final = 44
# Every double is a whole multiple of 2^-1074.
LAST_DIGIT: Final = 1074

Pair = tuple[int, int]


@dataclass(slots=True, eq=False)
class Instance:
    """Nodes by number, each with its remaining strategies.

    Shapes: kept [strategies], costs [strategies], rows [rows of the node], loads [rows of the node,
    strategies]; edges (i, j), i < j, [strategies of i, strategies of j]; limits [rows]. ``offset`` is added to
    every cost. ``ranks``, of the shape of loads, order a node's strategies by the caller's loads where flooring
    could have made different loads equal; empty where flooring changed nothing.
    """

    kept: dict[int, IntArray]
    costs: dict[int, IntArray]
    edges: dict[Pair, IntArray]
    rows: dict[int, IntArray]
    loads: dict[int, IntArray]
    limits: IntArray
    ranks: dict[int, IntArray] = field(default_factory=dict)
    peaks: list[list[tuple[int, dict[int, IntArray]]]] = field(default_factory=list)
    offset: int = 0

    def copy(self) -> Instance:
        """Copy the instance so that it can be changed alone; arrays are never changed in place."""
        return replace(
            self,
            kept=dict(self.kept),
            costs=dict(self.costs),
            edges=dict(self.edges),
            rows=dict(self.rows),
            loads=dict(self.loads),
            ranks=dict(self.ranks),
        )

    def neighbours(self) -> dict[int, set[int]]:
        """Return the nodes that share an edge with each node."""
        adjacent: dict[int, set[int]] = {i: set() for i in self.costs}
        for i, j in self.edges:
            adjacent[i].add(j)
            adjacent[j].add(i)
        return adjacent

    def keep(self, node: int, mask: BoolArray) -> None:
        """Keep only the strategies of a node that the mask marks."""
        self.kept[node] = self.kept[node][mask]
        self.costs[node] = self.costs[node][mask]
        if node in self.loads:
            self.loads[node] = self.loads[node][:, mask]
        if node in self.ranks:
            self.ranks[node] = self.ranks[node][:, mask]

    def keep_in_edges(self, masks: dict[int, BoolArray]) -> None:
        """Keep only the rows and columns of edge matrices that the masks mark."""
        for (i, j), matrix in self.edges.items():
            if i in masks or j in masks:
                rows = masks.get(i, np.ones(matrix.shape[0], np.bool_))
                columns = masks.get(j, np.ones(matrix.shape[1], np.bool_))
                self.edges[i, j] = np.ascontiguousarray(matrix[rows][:, columns])

    def positions(self, choice: dict[int, int]) -> dict[int, int] | None:
        """Return the positions of original strategies among the remaining ones; None if one was removed."""
        positions = {}
        for i, kept in self.kept.items():
            position = int(np.searchsorted(kept, choice[i]))
            if position >= kept.size or kept[position] != choice[i]:
                return None
            positions[i] = position
        return positions

    def cost(self, choice: dict[int, int]) -> int:
        """Return the cost of original strategies (peaks included); at least ``HALF`` if forbidden."""
        positions = self.positions(choice)
        if positions is None:
            return FORBIDDEN
        total = self.offset + sum(int(self.costs[i][s]) for i, s in positions.items())
        total += sum(int(matrix[positions[i], positions[j]]) for (i, j), matrix in self.edges.items())
        for group in self.peaks:
            total += max(c + sum(int(t[choice[i]]) for i, t in terms.items()) for c, terms in group)
        return total


@dataclass(frozen=True, slots=True, eq=False)
class Stated:
    """An instance with its relation to the caller's graph.

    ``leader`` [nodes] is the node that an original node was merged into. A cost unit is ``unit`` in the caller's
    numbers, a load unit on each device ``load_units`` [devices]. ``error_units`` is the maximum loss of a cost
    through flooring.
    """

    instance: Instance
    leader: tuple[int, ...]
    unit: float
    error_units: int
    loads_exact: bool
    row_of: tuple[tuple[int, int], ...]
    load_units: tuple[float, ...]

    def choice(self, merged: dict[int, int]) -> IntArray:
        """Return the choice for the caller's nodes."""
        return np.array([merged[j] for j in self.leader], np.int64)


def state(graph: StrategyGraph, further: FloatArray | None = None) -> Stated:
    """State the graph in integers.

    Args:
        graph: the caller's graph.
        further: costs that may be added to a choice's cost; the unit leaves room for their sum.
    """
    leader = _leaders(graph)
    arrays = [np.asarray(c) for c in graph.node_costs]
    matrices = [np.asarray(m) for m in graph.edge_costs.values()]
    tops = [term for group in graph.peaks for peak in group for term in map(np.asarray, peak.terms.values())]
    tops += [np.array([peak.constant]) for group in graph.peaks for peak in group]
    exponent = _cost_exponent([*arrays, *matrices, *tops], further)
    inexact = 0
    # Repeated layers share their arrays, which the graph holds.
    floored_arrays: dict[int, tuple[IntArray, bool]] = {}

    def scaled(values: FloatArray) -> IntArray:
        nonlocal inexact
        if id(values) not in floored_arrays:
            floored_arrays[id(values)] = _floored(values, exponent)
        whole, exact = floored_arrays[id(values)]
        inexact += not exact
        return whole

    costs = {i: np.zeros(graph.num_strategies(i), np.int64) for i in sorted(set(leader))}
    for i, array in enumerate(arrays):
        costs[leader[i]] = clipped(costs[leader[i]] + scaled(array))
    edges: dict[Pair, IntArray] = {}
    tables = [(pair, scaled(matrix)) for pair, matrix in zip(graph.edge_costs, matrices, strict=True)]
    tables += [(p, np.where(np.asarray(t, np.bool_), 0, FORBIDDEN)) for p, t in graph.allowed.items()]
    for (i, j), matrix in tables:
        _add_edge(costs, edges, (leader[i], leader[j]), matrix)
    peaks = []
    for group in graph.peaks:
        alternatives = []
        for peak in group:
            terms: dict[int, IntArray] = {}
            for i, values in peak.terms.items():
                costs_of_node = scaled(np.asarray(values))
                terms[leader[i]] = terms[leader[i]] + costs_of_node if leader[i] in terms else costs_of_node
            constant, exact_constant = _floored(np.array([peak.constant]), exponent)
            inexact += not exact_constant
            alternatives.append((int(constant[0]), terms))
        peaks.append(alternatives)
    kept = {i: np.arange(c.size, dtype=np.int64) for i, c in costs.items()}
    load_exponents = _load_exponents(graph)
    rows, loads, limits, exact, row_of = _memory_rows(graph, leader, load_exponents)
    ranks = {} if exact else _ranks(graph, leader, rows, row_of)
    instance = Instance(kept, costs, edges, rows, loads, limits, ranks, peaks)
    load_units = tuple(math.ldexp(1.0, -load_exponent) for load_exponent in load_exponents)
    return Stated(instance, leader, math.ldexp(1.0, -exponent), inexact, exact, row_of, load_units)


def clipped(values: IntArray) -> IntArray:
    """Set sums that contain a forbidden cost back to ``FORBIDDEN``."""
    return np.where(values >= HALF, FORBIDDEN, values)


def _add_edge(costs: dict[int, IntArray], edges: dict[Pair, IntArray], pair: Pair, matrix: IntArray) -> None:
    """Add a matrix to an edge, or its diagonal to a node where both ends were merged."""
    i, j = pair
    if i == j:
        costs[i] = clipped(costs[i] + np.diagonal(matrix))
        return
    if i > j:
        i, j, matrix = j, i, np.ascontiguousarray(matrix.T)
    edges[i, j] = clipped(edges[i, j] + matrix) if (i, j) in edges else matrix


def _leaders(graph: StrategyGraph) -> tuple[int, ...]:
    """Return the smallest node of every set of nodes that follow each other, per node."""
    parent = list(range(graph.num_nodes))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for i, j in graph.follow.items():
        a, b = root(i), root(j)
        parent[max(a, b)] = min(a, b)
    return tuple(root(i) for i in range(graph.num_nodes))


def _cost_exponent(arrays: Sequence[FloatArray], further: FloatArray | None) -> int:
    """Return the exponent of the cost unit, such that no sum of the largest costs reaches 2^COST_BITS."""
    total = 0.0 if further is None else float(np.abs(further[np.isfinite(further)]).sum())
    for array in arrays:
        finite = array[np.isfinite(array)]
        total += float(np.abs(finite).max(initial=0.0))
    return _exponent(total, COST_BITS)


def _exponent(total: float, bits: int) -> int:
    """Return the exponent that gives ``total`` the given bits, at most that of the last digit of a double."""
    return min(bits - math.frexp(total)[1], LAST_DIGIT) if total else 0


def floored(values: FloatArray, unit: float) -> tuple[IntArray, bool]:
    """Floor further costs to whole units (a power of two). Returns them, and whether flooring was exact."""
    return _floored(values, 1 - math.frexp(unit)[1])


def rounded_down(units: int, unit: float, exact: bool) -> float:
    """Return a bound in the caller's unit, rounded down; ``exact``: flooring changed nothing before."""
    value = units * unit
    return value if exact and abs(units) < 2**53 else math.nextafter(value, -math.inf)


def _floored(values: npt.NDArray[Any], exponent: int) -> tuple[IntArray, bool]:
    """Return ``floor(values * 2^exponent)`` with ``FORBIDDEN`` for inf, and whether flooring was exact."""
    finite = np.isfinite(values)
    scaled = np.ldexp(np.where(finite, values, 0.0), exponent)
    # A value that underflows when scaled is not 0: it is just above 0, or just below.
    lost = finite & (scaled == 0.0) & (values != 0.0)
    floor = np.where(lost & (values < 0.0), -1.0, np.floor(scaled))
    return np.where(finite, floor.astype(np.int64), FORBIDDEN), bool((floor == scaled).all() and not lost.any())


def _memory_rows(
    graph: StrategyGraph, leader: tuple[int, ...], exponents: list[int]
) -> tuple[dict[int, IntArray], dict[int, IntArray], IntArray, bool, tuple[tuple[int, int], ...]]:
    """Build the memory rows: rows and loads by node, limits, exactness, and (alive set, device) of every row."""
    limits = graph.limits()
    if not limits.size:
        return {}, {}, np.zeros(0, np.int64), True, ()
    vectors = [graph.memory_vector(i) for i in range(graph.num_nodes)]
    highest = np.array([v.max(axis=0) for v in vectors])
    floors = [[_floored(v[:, d], exponents[d]) for d in range(limits.size)] for v in vectors]
    whole_loads = [np.stack([values for values, _ in per_device]) for per_device in floors]
    exact = [all(per_device[d][1] for per_device in floors) for d in range(limits.size)]
    node_loads: dict[int, dict[int, IntArray]] = {}
    right_sides: list[int] = []
    row_of: list[tuple[int, int]] = []
    for index, nodes in enumerate(graph.alive_sets()):
        for d in range(limits.size):
            if highest[list(nodes), d].sum() * (1 + 1e-9) < limits[d]:
                continue
            row = len(right_sides)
            # Exact loads are whole numbers, so their limit may be floored.
            right_side = math.floor(math.ldexp(limits[d], exponents[d]))
            right_sides.append(
                right_side if exact[d] or math.ldexp(right_side, -exponents[d]) == limits[d] else right_side + 1
            )
            row_of.append((index, d))
            for i in nodes:
                own_loads = node_loads.setdefault(leader[i], {})
                own_loads[row] = own_loads[row] + whole_loads[i][d] if row in own_loads else whole_loads[i][d]
    rows = {i: np.array(list(by_row), np.int64) for i, by_row in node_loads.items()}
    loads = {i: np.stack(list(by_row.values())) for i, by_row in node_loads.items()}
    return rows, loads, np.array(right_sides, np.int64), all(exact), tuple(row_of)


def _ranks(
    graph: StrategyGraph, leader: tuple[int, ...], rows: dict[int, IntArray], row_of: tuple[tuple[int, int], ...]
) -> dict[int, IntArray]:
    """Rank every node's strategies in every row by the caller's loads, with followers' loads added exactly."""
    members: dict[int, list[int]] = {}
    for i, j in enumerate(leader):
        members.setdefault(j, []).append(i)
    alive = [set(nodes) for nodes in graph.alive_sets()]
    ranks = {}
    for node, own_rows in rows.items():
        row_loads = []
        for index, d in (row_of[row] for row in own_rows.tolist()):
            inside = [graph.memory_vector(i)[:, d] for i in members[node] if i in alive[index]]
            row_loads.append(inside[0] if len(inside) == 1 else _exact_sums(inside))
        ranks[node] = np.stack([np.unique(loads, return_inverse=True)[1] for loads in row_loads]).astype(np.int64)
    return ranks


def _exact_sums(vectors: Sequence[FloatArray]) -> npt.NDArray[Any]:
    """Return sums without rounding, as fractions."""
    columns = np.stack(vectors).T.tolist()
    return np.array([sum(map(Fraction, column), Fraction(0)) for column in columns], dtype=object)


def _load_exponents(graph: StrategyGraph) -> list[int]:
    """Return the exponent of the load unit of every device."""
    limits = graph.limits()
    if not limits.size:
        return []
    totals = np.array([graph.memory_vector(i).max(axis=0) for i in range(graph.num_nodes)]).sum(axis=0)
    # A limit above the largest possible use has no row, so it does not set the unit.
    return [
        _exponent(float(max(total, min(limit, 2 * total))), LOAD_BITS)
        for total, limit in zip(totals, limits, strict=True)
    ]


def prune(instance: Instance, dominance: bool = True) -> bool:
    """Remove strategies that can never be better, until nothing changes. Returns False if a node loses all."""
    changed: set[int] | None = None
    while True:
        masks = _forbidden(instance, changed)
        if not masks and dominance and not instance.peaks:
            masks = _dominated(instance, changed)
        if not masks:
            return True
        for node, mask in masks.items():
            instance.keep(node, mask)
        if any(instance.costs[node].size == 0 for node in masks):
            return False
        instance.keep_in_edges(masks)
        around = instance.neighbours()
        changed = set(masks).union(*(around[node] for node in masks))


def _forbidden(instance: Instance, among: Iterable[int] | None) -> dict[int, BoolArray]:
    """Mark strategies that are forbidden, without a partner, or too large for a limit whatever the others take.

    Returns:
        Masks of the strategies that stay, for nodes that lose some.
    """
    nodes = set(instance.costs) if among is None else set(among)
    alive = {i: instance.costs[i] < HALF for i in nodes}
    capacity = instance.limits.copy()
    for i, loads in instance.loads.items():
        capacity[instance.rows[i]] -= loads.min(axis=1)
    for i in nodes & instance.loads.keys():
        above = instance.loads[i] - instance.loads[i].min(axis=1, keepdims=True)
        alive[i] = alive[i] & (above <= capacity[instance.rows[i]][:, None]).all(axis=0)
    for (i, j), matrix in instance.edges.items():
        if i not in nodes and j not in nodes:
            continue
        free = matrix < HALF
        if free.all():
            continue
        if i in nodes:
            alive[i] = alive[i] & free.any(axis=1)
        if j in nodes:
            alive[j] = alive[j] & free.any(axis=0)
    return {i: mask for i, mask in alive.items() if not mask.all()}


def _dominated(instance: Instance, among: Iterable[int] | None) -> dict[int, BoolArray]:
    """Mark strategies that another strategy of the node replaces; masks as in ``_forbidden``."""
    nodes = sorted(instance.costs) if among is None else sorted(among)
    worst = {i: _differences(instance, i) for i in nodes if instance.costs[i].size > 1}
    for (i, j), matrix in instance.edges.items():
        # Clipped, because sums of forbidden costs would overflow at a node with many neighbours.
        if i in worst:
            worst[i] = clipped(worst[i] + _worst(matrix))
        if j in worst:
            worst[j] = clipped(worst[j] + _worst(matrix.T))
    # A dominator that is itself left out in the same round is dominated by one that stays: the order is total.
    masks = {i: _undominated(table <= 0) for i, table in worst.items()}
    # Neighbours may lose strategies in one round: each criterion holds for any partner, whichever stays.
    return {i: mask for i, mask in masks.items() if not mask.all()}


def _differences(instance: Instance, node: int) -> IntArray:
    """Return ``c[b] - c[a]`` for pairs [b, a]; forbidden where b loads more in some row."""
    costs = instance.costs[node]
    table = costs[:, None] - costs[None, :]
    if node in instance.loads:
        loads = instance.ranks.get(node, instance.loads[node])
        heavier = (loads[:, :, None] > loads[:, None, :]).any(axis=0)
        table = np.where(heavier, FORBIDDEN, table)
    return table


def _worst(matrix: IntArray) -> IntArray:
    """Return ``max over partners of E[b] - E[a]`` for pairs [b, a]; partners forbidden to a do not count."""
    difference = matrix[:, None, :] - matrix[None, :, :]
    difference = np.where(matrix[None, :, :] >= HALF, -FORBIDDEN, difference)
    worst: IntArray = difference.max(axis=2)
    # Gains come from finite costs, so they never pay for a forbidden pair.
    return np.clip(worst, -(2**52), FORBIDDEN)


def _undominated(beats: BoolArray) -> BoolArray:
    """Mark the strategies that stay, where [b, a] says that b replaces a; among equals the first stays."""
    np.fill_diagonal(beats, False)
    size = beats.shape[0]
    earlier = np.arange(size)[:, None] < np.arange(size)[None, :]
    strictly = beats & (~beats.T | earlier)
    stays: BoolArray = np.logical_not(strictly.any(axis=0))
    return stays
