"""Local search for a choice that meets the limits: repair the limits first, then take single changes that gain.

**Large neighbourhood search.** A connected part of the graph is solved exactly while all other nodes stay. Parts
overlap by half and cover the graph; passes over all parts are repeated while one gains. Source: P. Shaw, CP 1998.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
from scipy import sparse

from milpplan.errors import SolverError
from milpplan.graph.instance import HALF, Instance, clipped, prune
from milpplan.graph.integer_program import GraphProgram, size_of
from milpplan.optimize.milp.program import FloatArray, IntArray
from milpplan.optimize.milp.solution import Backend, Limits

# Changes tried in one round where limits must be checked.
_TRIALS: Final = 2000
# Rounds of changes, rounds without a smaller excess, and the number of rows up to which loads are kept dense.
_ROUNDS: Final = 100
_IDLE_ROUNDS: Final = 4
_FEW_ROWS: Final = 16


class LocalSearch:
    """Costs of all single changes of one choice, updated after every change."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.nodes = sorted(instance.costs)
        sizes = np.array([instance.costs[i].size for i in self.nodes])
        self._start = dict(zip(self.nodes, (np.cumsum(sizes) - sizes).tolist(), strict=True))
        self._owner = np.repeat(np.arange(sizes.size), sizes)
        self._first = np.cumsum(sizes) - sizes
        self._index = {i: k for k, i in enumerate(self.nodes)}
        self._around: dict[int, list[tuple[int, IntArray]]] = {i: [] for i in self.nodes}
        for (i, j), matrix in instance.edges.items():
            self._around[i].append((j, np.ascontiguousarray(matrix.T)))
            self._around[j].append((i, matrix))
        self._table = self._load_table(int(sizes.sum()))
        few = self._table.shape[0] <= _FEW_ROWS
        self._dense: IntArray | None = np.ascontiguousarray(self._table.toarray().T) if few else None
        self._columns = self._table.tocsc()

    def _load_table(self, width: int) -> sparse.csr_matrix:
        """Build the table of the loads of all strategies, [rows, strategies]."""
        row, column, value = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for i, loads in self.instance.loads.items():
            node_columns = np.arange(loads.shape[1]) + self._start[i]
            row.append(np.repeat(self.instance.rows[i], loads.shape[1]))
            column.append(np.tile(node_columns, loads.shape[0]))
            value.append(loads.ravel())
        parts = np.concatenate(value), (np.concatenate(row), np.concatenate(column))
        return sparse.csr_matrix(parts, shape=(self.instance.limits.size, width), dtype=np.int64)

    def improve(self, positions: dict[int, int], deadline: float) -> dict[int, int] | None:
        """Improve a choice (positions) until no single change within the limits does.

        Returns None if repair fails.
        """
        chosen_columns = np.array([positions[i] for i in self.nodes], np.int64) + self._first
        change = np.concatenate([self.instance.costs[i] for i in self.nodes]).copy()
        for i, others in self._around.items():
            node_columns = slice(self._start[i], self._start[i] + self.instance.costs[i].size)
            for j, matrix in others:
                change[node_columns] += matrix[positions[j]]
                np.minimum(change[node_columns], HALF, out=change[node_columns])
        load = (
            np.asarray(self._table[:, chosen_columns].sum(axis=1), np.int64).ravel()
            if self._table.shape[0]
            else None
        )
        smallest_excess, idle = np.inf, 0
        for _ in range(_ROUNDS):
            excess = self._excess(load)
            # Repairs of one limit that break another can cycle for ever.
            idle = idle + 1 if excess >= smallest_excess else 0
            smallest_excess = min(smallest_excess, excess) if excess else np.inf
            if time.perf_counter() >= deadline or idle >= _IDLE_ROUNDS:
                break
            moves = (
                self._repair(chosen_columns, change, load) if excess else self._gain(chosen_columns, change, load)
            )
            if not moves:
                break
            for move in moves:
                self._move(move, chosen_columns, change, load)
        if self._excess(load) or (change[chosen_columns] >= HALF).any():
            return None
        return dict(zip(self.nodes, (chosen_columns - self._first).tolist(), strict=True))

    def _excess(self, load: IntArray | None) -> float:
        """Return the sum of the relative excesses over the limits."""
        if load is None:
            return 0.0
        limits = self.instance.limits
        return float((np.maximum(load - limits, 0) / np.maximum(limits, 1)).sum())

    def _repair(self, chosen_columns: IntArray, change: IntArray, load: IntArray | None) -> list[int]:
        """Pick changes with the best excess removed per cost, together at most half of the excess."""
        assert load is not None
        limits = self.instance.limits
        weight = np.where(load > limits, 1.0 / np.maximum(limits, 1), 0.0)
        score = self._table.T @ weight
        relief = score[chosen_columns][self._owner] - score
        price = (change - change[chosen_columns][self._owner]).astype(np.float64)
        useful = (relief > 0) & (change < HALF)
        excess = float((weight * (load - limits)).sum())
        # Changes that lower the cost come first, cheapest first; then those of the smallest cost per relief.
        gain = np.where(useful, np.minimum(relief, excess), 1.0)
        ratio = np.where(useful, np.where(price <= 0, price - 1.0, price / gain), np.inf)
        chosen: list[int] = []
        taken = 0.0
        for move in self._apart(ratio):
            if chosen and taken + relief[move] > excess / 2:
                break
            chosen.append(move)
            taken += float(relief[move])
        return chosen

    def _gain(self, chosen_columns: IntArray, change: IntArray, load: IntArray | None) -> list[int]:
        """Pick the changes that lower the cost most and stay within the limits."""
        difference = change - change[chosen_columns][self._owner]
        ratio = np.where((difference < 0) & (change < HALF), difference.astype(np.float64), np.inf)
        moves = self._apart(ratio)
        if load is None:
            return moves
        chosen, total = [], load.copy()
        for move in moves[:_TRIALS]:
            new_total = total + self._step(chosen_columns, move)
            if (new_total <= self.instance.limits).all():
                chosen.append(move)
                total = new_total
        return chosen

    def _apart(self, ratio: FloatArray) -> list[int]:
        """Return the best change of every node that has any, best first, without neighbours of earlier ones."""
        best_ratio = np.minimum.reduceat(ratio, self._first)
        chosen: list[int] = []
        blocked: set[int] = set()
        for owner in np.argsort(best_ratio, kind="stable").tolist():
            if best_ratio[owner] == np.inf:
                break
            node = self.nodes[owner]
            if node in blocked:
                continue
            blocked.update(j for j, _ in self._around[node])
            first = int(self._first[owner])
            size = self.instance.costs[node].size
            chosen.append(first + int(ratio[first : first + size].argmin()))
        return chosen

    def _step(self, chosen_columns: IntArray, move: int) -> IntArray:
        """Return the change of every row's load."""
        old = chosen_columns[self._owner[move]]
        if self._dense is not None:
            step: IntArray = self._dense[move] - self._dense[old]
            return step
        return np.asarray((self._columns[:, move] - self._columns[:, old]).toarray(), np.int64).ravel()

    def _move(self, move: int, chosen_columns: IntArray, change: IntArray, load: IntArray | None) -> None:
        """Apply a change and update the costs of the changes of its neighbours."""
        owner = int(self._owner[move])
        node, old = self.nodes[owner], int(chosen_columns[owner] - self._first[owner])
        new = int(move - self._first[owner])
        if load is not None:
            load += self._step(chosen_columns, move)
        chosen_columns[owner] = move
        for j, matrix in self._around[node]:
            node_columns = slice(self._start[j], self._start[j] + self.instance.costs[j].size)
            new_costs, old_costs = matrix[:, new], matrix[:, old]
            if (new_costs >= HALF).any() or (old_costs >= HALF).any():
                change[node_columns] = self._afresh(j, chosen_columns)
            else:
                change[node_columns] += new_costs - old_costs

    def _afresh(self, node: int, chosen_columns: IntArray) -> IntArray:
        """Recompute the costs of a node's strategies against its neighbours' present choice."""
        total = self.instance.costs[node]
        for j, matrix in self._around[node]:
            k = self._index[j]
            total = np.minimum(total + matrix[int(chosen_columns[k] - self._first[k])], HALF)
        return total


# Nodes of a part, and variables of its program.
PART: Final = 20
MAX_PART_VARIABLES: Final = 4000
MAX_PASSES: Final = 2
# Relative gap of a part's program: enough to gain, without time spent on proofs.
PART_GAP: Final = 1e-3


def improved_parts(
    instance: Instance,
    positions: dict[int, int],
    backend: Backend,
    limits: Limits,
    deadline: float,
    offer: Callable[[dict[int, int]], bool],
) -> dict[int, int]:
    """Improve a choice part by part.

    Args:
        instance: the instance.
        positions: the choice to start from.
        backend: solver of the parts.
        limits: limits of the backend; its time and gap are set here.
        deadline: end of the search, on the clock of ``perf_counter``.
        offer: receives every cheaper choice, and tells whether it is kept.

    Returns:
        Positions that no part improves by more than ``PART_GAP``, or the best at the deadline.
    """
    current = dict(positions)
    parts = _parts(instance)
    for _ in range(MAX_PASSES):
        gained = False
        for part in parts:
            left_s = deadline - time.perf_counter()
            if left_s <= 0:
                return current
            limits = replace(limits, time_limit_s=left_s if left_s < 1e8 else None, relative_gap=PART_GAP)
            better = _solved(instance, current, part, backend, limits)
            if better is not None and offer(current | better):
                current |= better
                gained = True
        if not gained:
            return current
    return current


def _parts(instance: Instance) -> list[list[int]]:
    """Cut a breadth-first order, which keeps neighbours together, into runs that overlap by half."""
    order = _breadth_first(instance)
    half = max(1, PART // 2)
    return [order[first : first + PART] for first in range(0, max(1, len(order) - half), half)]


def _breadth_first(instance: Instance) -> list[int]:
    """Order the nodes breadth first, component by component."""
    around = instance.neighbours()
    seen: dict[int, None] = {}
    for start in sorted(around):
        queue = [start] if start not in seen else []
        seen.setdefault(start)
        for node in queue:
            new = [other for other in sorted(around[node]) if other not in seen]
            seen.update(dict.fromkeys(new))
            queue += new
    return list(seen)


def _solved(
    instance: Instance, positions: dict[int, int], part: list[int], backend: Backend, limits: Limits
) -> dict[int, int] | None:
    """Solve a part. Returns cheaper positions, None if there are none or the backend gives no answer."""
    small = part_of(instance, positions, part)
    current_cost = _cost(small, {i: positions[i] for i in part})
    kept = small.copy()
    if not prune(kept) or size_of(kept) > MAX_PART_VARIABLES:
        return None
    program = GraphProgram(kept)
    try:
        solution = backend.solve(program.state(None), limits)
    except (SolverError, ImportError, OSError):
        return None
    if solution.values is None:
        return None
    better = {i: int(kept.kept[i][s]) for i, s in program.positions(solution).items()}
    return better if _cost(small, better) < current_cost else None


def part_of(instance: Instance, positions: dict[int, int], part: list[int]) -> Instance:
    """Restrict the instance to some nodes, all others fixed at their positions. Strategies are positions."""
    free = set(part)
    costs = {i: instance.costs[i] for i in part}
    edges = {}
    for (i, j), matrix in instance.edges.items():
        if i in free and j in free:
            edges[i, j] = matrix
        elif i in free:
            costs[i] = clipped(costs[i] + matrix[:, positions[j]])
        elif j in free:
            costs[j] = clipped(costs[j] + matrix[positions[i]])
    limits = instance.limits.copy()
    touched: set[int] = set()
    for i, loads in instance.loads.items():
        if i in free:
            touched.update(instance.rows[i].tolist())
        else:
            limits[instance.rows[i]] -= loads[:, positions[i]]
    new_row = {row: k for k, row in enumerate(sorted(touched))}
    rows = {i: _numbered(instance.rows[i], new_row) for i in part if i in instance.rows}
    return replace(
        instance,
        kept={i: np.arange(costs[i].size, dtype=np.int64) for i in part},
        costs=costs,
        edges=edges,
        rows=rows,
        loads={i: instance.loads[i] for i in rows},
        limits=limits[sorted(touched)],
        ranks={i: instance.ranks[i] for i in rows if i in instance.ranks},
        offset=0,
    )


def _numbered(rows: IntArray, new_row: dict[int, int]) -> IntArray:
    """Return the new numbers of rows."""
    return np.array([new_row[row] for row in rows.tolist()], np.int64)


def _cost(instance: Instance, positions: dict[int, int]) -> int:
    """Return the cost of positions of a part that has all its strategies; at least ``HALF`` if forbidden."""
    total = sum(int(instance.costs[i][s]) for i, s in positions.items())
    return min(total + sum(int(m[positions[i], positions[j]]) for (i, j), m in instance.edges.items()), 2 * HALF)
