"""What structure leaves open, as a program for any backend.

Variables: y[i, s] = 1 if node i takes strategy s (a count where equal nodes are folded); e[i, j, s, t] for pairs;
z[g] for the largest alternative of a peak. Minimise

    sum c[i, s] y[i, s] + sum E[i, j][s, t] e[i, j, s, t] + sum z[g]

    one_choice      sum_s y[i, s] = number of nodes folded into i
    pairs_agree     sum_t e[i, j, s, t] = y[i, s],  sum_s e[i, j, s, t] = y[j, t]
    fits            sum load[r, i, s] y[i, s] <= limit[r]
    peak            z[g] >= constant + sum term[i, s] y[i, s]

The equations of pairs are the local polytope: at least as tight as inequalities between a pair and its ends. Costs
and loads are floored to coarser units where a backend would not hold them exactly: still a relaxation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from milpplan.graph.instance import HALF, Instance
from milpplan.optimize.program import BoolArray, IntArray, Program, ProgramBuilder
from milpplan.optimize.solution import Solution

# Floating-point solvers get objectives below this, so that a unit is far above their tolerances.
FLOAT_OBJECTIVE: Final = 2**38
EXACT_OBJECTIVE: Final = 2**55
FLOAT_ROW: Final = 2**30
# CP-SAT is trusted below 1e7, summed over all entries of a row.
EXACT_ROW: Final = 2**23


@dataclass(frozen=True, slots=True, eq=False)
class Stating:
    """The program, and how to read its values: ``columns`` of every group of equal nodes, the members of each.
    One unit of the objective is ``factor`` of the instance's, ``error`` the most that this took from a cost."""

    program: Program
    groups: tuple[tuple[int, ...], ...]
    columns: tuple[range, ...]
    factor: int
    constant: int
    error: int

    def positions(self, solution: Solution) -> dict[int, int]:
        """The choice (positions) of an answer; members of a group take its strategies in order."""
        assert solution.values is not None
        found: dict[int, int] = {}
        for group, columns in zip(self.groups, self.columns, strict=True):
            counts = np.asarray(solution.values)[list(columns)].astype(np.int64)
            found.update(zip(group, np.repeat(np.arange(counts.size), counts).tolist(), strict=True))
        return found

    def bound(self, value: int) -> int:
        """A bound of the program in the instance's units."""
        return value * self.factor + self.constant


def size_of(instance: Instance) -> int:
    """Number of variables that the program would have."""
    return sum(c.size for c in instance.costs.values()) + sum(m.size for m in instance.edges.values())


def state_program(
    instance: Instance, exact: bool, cuts: list[dict[int, int]], exact_loads: bool = False
) -> Stating:
    """The program; ``exact`` for a backend in integers. ``cuts`` are choices (positions) that broke a limit in the
    caller's numbers: neither they nor what loads as much everywhere may come back (``exact_loads``: loads were
    not floored)."""
    groups = tuple((i,) for i in instance.costs) if cuts else _equal_nodes(instance)
    builder = ProgramBuilder("strategy graph")
    constant, least = instance.offset, {g[0]: int(instance.costs[g[0]].min()) for g in groups}
    constant += sum(least[g[0]] * len(g) for g in groups)
    spread = sum(int((instance.costs[g[0]] - least[g[0]]).max()) * len(g) for g in groups)
    spread += sum(int(_finite(m).max(initial=0)) for m in instance.edges.values())
    spread += sum(max(map(_largest, group)) for group in instance.peaks)
    common = _common_unit(instance, least)
    factor = common * (1 + spread // common // (EXACT_OBJECTIVE if exact else FLOAT_OBJECTIVE))
    if exact and instance.peaks:
        factor = 1 + 4 * max(map(_entries, (one for group in instance.peaks for one in group))) // EXACT_ROW
    columns: dict[int, range] = {}
    terms: list[tuple[int, int]] = []
    for group in groups:
        node = group[0]
        names = [f"y[{node},{s}]" for s in instance.kept[node]]
        columns[node] = builder.add_variables(names, 0, len(group))
        builder.add_row(f"one_choice[{node}]", columns[node], 1, len(group), len(group))
        costs = (instance.costs[node] - least[node]) // factor
        terms += zip(columns[node], costs.tolist(), strict=True)
    for (i, j), matrix in instance.edges.items():
        terms += _pair(builder, instance, (i, j), columns, matrix // factor)
    _limits(builder, instance, groups, columns, EXACT_ROW if exact else FLOAT_ROW)
    _peaks(builder, instance, groups, columns, factor, terms)
    for index, cut in enumerate(cuts):
        _cut(builder, instance, columns, index, cut, exact_loads)
    builder.minimize([c for c, _ in terms], [v for _, v in terms])
    made = tuple(columns[g[0]] for g in groups)
    parts = len(instance.costs) + len(instance.edges) + sum(len(instance.costs) + 1 for _ in instance.peaks)
    error = parts * (factor - 1) if factor > common else 0
    return Stating(builder.build(), groups, made, factor, constant, error)


def _common_unit(instance: Instance, least: dict[int, int]) -> int:
    """The largest unit that all differences of costs are whole numbers of; 1 with peaks."""
    if instance.peaks:
        return 1
    parts = [instance.costs[i] - base for i, base in least.items()]
    parts += [_finite(matrix) for matrix in instance.edges.values()]
    return max(1, int(np.gcd.reduce(np.concatenate([part.ravel() for part in parts]))))


def _finite(matrix: IntArray) -> IntArray:
    return matrix[matrix < HALF]


def _largest(alternative: tuple[int, dict[int, IntArray]]) -> int:
    return abs(alternative[0]) + sum(int(np.abs(t).max()) for t in alternative[1].values())


def _entries(alternative: tuple[int, dict[int, IntArray]]) -> int:
    return abs(alternative[0]) + sum(int(np.abs(t).sum()) for t in alternative[1].values())


def _equal_nodes(instance: Instance) -> tuple[tuple[int, ...], ...]:
    """Nodes without edges that are equal in costs, loads and peaks, folded: repeated layers."""
    tied = {i for pair in instance.edges for i in pair}
    found: dict[tuple[object, ...], list[int]] = {}
    for i, costs in instance.costs.items():
        terms = tuple(one[1][i].tobytes() if i in one[1] else b"" for group in instance.peaks for one in group)
        loads = (instance.rows[i].tobytes(), instance.loads[i].tobytes()) if i in instance.loads else ()
        key = (i,) if i in tied else (costs.tobytes(), instance.kept[i].tobytes(), loads, terms)
        found.setdefault(key, []).append(i)
    return tuple(tuple(group) for group in found.values())


def _pair(
    builder: ProgramBuilder, instance: Instance, pair: tuple[int, int], columns: dict[int, range], matrix: IntArray
) -> list[tuple[int, int]]:
    """Variables and rows of an edge; its terms of the objective."""
    i, j = pair
    rows, others = np.nonzero(instance.edges[pair] < HALF)
    names = [f"e[{i},{j},{s},{t}]" for s, t in zip(rows.tolist(), others.tolist(), strict=True)]
    made = np.array(builder.add_variables(names, 0, 1), np.int64)
    for node, side, label in ((i, rows, "first"), (j, others, "second")):
        for s, column in enumerate(columns[node]):
            here = made[side == s]
            signs = [1] * here.size + [-1]
            builder.add_row(f"pairs_agree[{i},{j},{label},{s}]", [*here.tolist(), column], signs, 0, 0)
    return list(zip(made.tolist(), matrix[rows, others].tolist(), strict=True))


def _limits(
    builder: ProgramBuilder,
    instance: Instance,
    groups: tuple[tuple[int, ...], ...],
    columns: dict[int, range],
    largest: int,
) -> None:
    inside: dict[int, list[tuple[IntArray, int, range]]] = {}
    below: dict[int, int] = {}
    for group in groups:
        node = group[0]
        for row, load in zip(instance.rows.get(node, ()), instance.loads.get(node, ()), strict=True):
            base = int(load.min())
            below[int(row)] = below.get(int(row), 0) + base * len(group)
            inside.setdefault(int(row), []).append((load - base, len(group), columns[node]))
    for row, parts in sorted(inside.items()):
        limit = int(instance.limits[row]) - below[row]
        common = int(np.gcd.reduce(np.concatenate([load for load, _, _ in parts])))
        top = max(abs(limit), sum(int(load.sum()) * n for load, n, _ in parts)) // max(common, 1)
        step = max(common, 1) * (1 + top // largest)
        entries = [(c, v) for load, _, cols in parts for c, v in zip(cols, (load // step).tolist(), strict=True)]
        builder.add_row(f"fits[{row}]", [c for c, _ in entries], [v for _, v in entries], upper=limit // step)


def _peaks(
    builder: ProgramBuilder,
    instance: Instance,
    groups: tuple[tuple[int, ...], ...],
    columns: dict[int, range],
    factor: int,
    terms: list[tuple[int, int]],
) -> None:
    for g, group in enumerate(instance.peaks):
        top = max(map(_largest, group)) // factor + len(instance.costs) + 1
        z = builder.add_variable(f"z[{g}]", -top, top)
        terms.append((z, 1))
        for h, (base, parts) in enumerate(group):
            entries = [(z, 1)]
            for members in groups:
                node = members[0]
                if node in parts:
                    values = parts[node][instance.kept[node]] // factor
                    entries += zip(columns[node], (-values).tolist(), strict=True)
            builder.add_row(f"peak[{g},{h}]", [c for c, _ in entries], [v for _, v in entries], base // factor)


def _cut(
    builder: ProgramBuilder,
    instance: Instance,
    columns: dict[int, range],
    index: int,
    cut: dict[int, int],
    exact_loads: bool,
) -> None:
    """At least one node must take what loads less somewhere than it did; where loads were floored, anything
    else (what looks as heavy may be lighter in the caller's numbers)."""
    chosen: list[int] = []
    for node, s in cut.items():
        loads = instance.loads.get(node)
        if loads is None:
            continue
        as_heavy: BoolArray = np.arange(loads.shape[1]) == s
        if exact_loads:
            as_heavy = as_heavy | np.all(loads >= loads[:, s : s + 1], axis=0)
        chosen += [columns[node][k] for k in np.flatnonzero(as_heavy).tolist()]
    count = sum(1 for node in cut if node in instance.loads)
    builder.add_row(f"lighter[{index}]", chosen, 1, upper=count - 1)
