"""Integer programs of a reduced strategy graph, in numbers that every backend can be trusted with.

Variables: y[i, s] = 1 if node i takes strategy s (a count where equal nodes are folded); e[i, j, s, t] for pairs.
A total T[k] belongs to every combination k of alternatives of the peaks; without peaks there is one total.
Minimise

    Z >= T[k] = constant[k] + sum c[k, i, s] y[i, s] + sum E[i, j][s, t] e[i, j, s, t]

    one_choice      sum_s y[i, s] = number of nodes folded into i
    pairs_agree     sum_t e[i, j, s, t] = y[i, s],  sum_s e[i, j, s, t] = y[j, t]
    fits            sum load[r, i, s] y[i, s] <= limit[r]

The equations of pairs are the local polytope: at least as tight as inequalities between a pair and its ends.

Costs and loads have up to 50 bits, and no backend is trusted with such numbers: floating-point solvers have
absolute tolerances, CP-SAT has proved wrong optima. So numbers are stated in digits of at most ``DIGIT_BITS``
bits.

Costs. With units u[0] > u[1] > ..., each dividing the one before, let w = d[0] u[0] + d[1] u[1] + ... be the
digits of a cost. The first program minimises H[0] = sum d[0] y, which is T in units of u[0], rounded down: its
optimum v[0] is a lower bound. Every choice that is no dearer than the incumbent has v[0] <= H[0] and
H[0] <= upper / u[0], a few units more since only rounding lies between. So the next program has the row
H[0] - v[0] <= h[0] with h[0] in that range, and minimises H[1] = h[0] u[0] / u[1] + sum d[1] y; and so on, until u
is the unit of all costs.

Loads. The first row, in the coarsest digit, is a relaxation. If an answer breaks the limit itself, the row gets
all its digits, with carries c[j] >= 0:

    sum d[0] y + c[0] <= limit[0],    sum d[1] y + c[1] <= limit[1] + (u[0] / u[1]) c[0],    ...

**Relaxation.** The local polytope with rows of memory gives multipliers of limits and messages of edges. Only the
duals are taken: whatever they are, ``message_passing`` sums a bound from them in integers.

    minimise sum c y + sum E e    dual of  sum_t e[i, j, s, t] - y[i, s] = 0:      message to i, strategy s
                                  dual of  sum load y <= limit, sign turned:     multiplier of the row
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
from scipy import optimize, sparse

from milpplan.graph.instance import HALF, Instance, Pair
from milpplan.optimize.milp.program import BoolArray, FloatArray, IntArray, Program, ProgramBuilder
from milpplan.optimize.milp.solution import Solution, run_interruptibly

DIGIT_BITS: Final = 16
MIN_DIGIT_BITS: Final = 8
ROW_BITS: Final = 23
"""CP-SAT is trusted with rows whose terms, all taken together, stay below 1e7."""
TOLERANCE_BITS: Final = 18
"""Floating-point solvers let an integer be off by 1e-6: sums of so many bits are then off by a quarter."""
TOLERANCE: Final = 1e-6
SLACK_UNITS: Final = 32
"""Units above the incumbent: CBC has called programs infeasible whose only answer was at a bound."""
MAX_TOTALS: Final = 32
"""Combinations of alternatives in the first program; others are added when an answer needs them."""

Alternative = tuple[int, dict[int, IntArray]]
Terms = list[tuple[int, int]]


@dataclass(slots=True)
class Level:
    """One digit of the objective: its unit, the bound that it is counted from, and the value proved above it."""

    unit: int
    base: int
    value: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Total:
    """One T[k]: non-negative weights of the strategies of every group of nodes, and a constant."""

    weights: tuple[IntArray, ...]
    constant: int


@dataclass(slots=True, eq=False)
class GraphProgram:
    """Programs of one instance: coarse at first, refined by proved bounds and refused answers."""

    instance: Instance
    loads_exact: bool = True
    cuts: list[dict[int, int]] = field(default_factory=list)
    groups: tuple[tuple[int, ...], ...] = ()
    levels: list[Level] = field(default_factory=list)
    _alternatives: list[tuple[int, ...]] = field(default_factory=list)
    _edges: dict[tuple[int, int], IntArray] = field(default_factory=dict)
    _precise: set[int] = field(default_factory=set)
    _common: int = 1
    _largest: int = 1
    _bits: int = DIGIT_BITS

    def __post_init__(self) -> None:
        """State the first digit of all costs."""
        instance = self.instance
        self.groups = _equal_nodes(instance)
        self._edges = {pair: matrix - int(matrix.min()) for pair, matrix in instance.edges.items()}
        self._alternatives = list(itertools.islice(_combinations(instance.peaks), MAX_TOTALS))
        self._common = _common_unit(instance, self._edges)
        self._bits = _digit_bits(size_of(instance) + self.num_parts, self.num_parts)
        totals = self._totals()
        largest = max(int(w.max()) for total in totals for w in total.weights)
        largest = max([largest, *(int(_finite(m).max(initial=0)) for m in self._edges.values())])
        unit = _unit(largest, self._common, self._bits)
        self._largest = largest // unit
        self.levels = [Level(unit, max(total.constant for total in totals))]

    @property
    def num_parts(self) -> int:
        """Number of open terms of a total; rounding loses less than one unit of each."""
        nodes = sum(costs.size > 1 for costs in self.instance.costs.values())
        return nodes + sum(matrix.size > 1 for matrix in self.instance.edges.values()) + 1

    @property
    def bound(self) -> int:
        """Lower bound of every cost, in the instance's units."""
        last = self.levels[-1]
        return last.base + last.value * last.unit

    def claim(self, solution: Solution) -> int | None:
        """Return the bound that an answer proves for its program; None if it proves none.

        For floating-point solvers it is reduced by the maximum error that their tolerances allow for digits of
        this size.
        """
        slack = 0 if solution.backend == "cpsat" else int(self.num_parts * self._largest * TOLERANCE)
        if solution.status == "optimal" and solution.objective is not None:
            return solution.objective - slack
        if solution.bound is None or not math.isfinite(solution.bound):
            return None
        return math.floor(solution.bound - 1e-6 * max(1.0, abs(solution.bound))) - slack

    def highest_objective(self, upper: int) -> int:
        """Return the objective, in the present unit, that a choice of cost ``upper`` cannot exceed."""
        last = self.levels[-1]
        return (upper - last.base) // last.unit

    def tolerance(self, units: int) -> int:
        """Return the loss of a bound through backends' tolerances, in the instance's units, once all digits are
        stated.

        Before the last digit it is 0, because a finer unit closes the difference.
        """
        last = self.levels[-1]
        return units * last.unit if last.unit == self._common else 0

    def prove(self, value: int) -> None:
        """Adopt a bound on the present program."""
        self.levels[-1].value = max(self.levels[-1].value, value)

    def refine(self) -> bool:
        """Add the next digit of the costs. Returns False if there is none, or it would not narrow the gap."""
        last = self.levels[-1]
        if last.unit == self._common or 2 * self.num_parts >= 1 << self._bits:
            return False
        self.levels.append(Level(max(self._common, last.unit >> self._bits), self.bound))
        self._largest = last.unit // self.levels[-1].unit
        return True

    def refuse(self, positions: dict[int, int]) -> None:
        """Exclude a choice that breaks a limit: state the limit in all digits, or cut the choice off."""
        load = np.zeros(self.instance.limits.size, np.int64)
        for i, loads in self.instance.loads.items():
            load[self.instance.rows[i]] += loads[:, positions[i]]
        broken = set(np.flatnonzero(load > self.instance.limits).tolist()) - self._precise
        if broken:
            self._precise |= broken
            return
        # Only the caller's own numbers distinguish this choice from one that fits.
        self.cuts.append(positions)
        self.groups = tuple((i,) for i in self.instance.costs)

    def add_total(self, positions: dict[int, int]) -> bool:
        """Add the combination of alternatives that is largest at a choice; False if it is already stated."""
        strategies = {i: int(self.instance.kept[i][s]) for i, s in positions.items()}
        combination = []
        for group in self.instance.peaks:
            costs = [base + sum(int(t[strategies[i]]) for i, t in terms.items()) for base, terms in group]
            combination.append(costs.index(max(costs)))
        if tuple(combination) in self._alternatives:
            return False
        self._alternatives.append(tuple(combination))
        return True

    def positions(self, solution: Solution) -> dict[int, int]:
        """Return the choice (positions) of an answer; nodes of a group take the group's strategies in order."""
        assert solution.values is not None
        positions: dict[int, int] = {}
        first = 0
        for group in self.groups:
            size = self.instance.costs[group[0]].size
            counts = np.asarray(solution.values)[first : first + size].astype(np.int64)
            positions.update(zip(group, np.repeat(np.arange(size), counts).tolist(), strict=True))
            first += size
        return positions

    def state(self, upper: int | None) -> Program:
        """Build the program of the last digit, of all choices that cost at most ``upper`` (None: no limit)."""
        instance, builder = self.instance, ProgramBuilder("strategy graph")
        columns: dict[int, range] = {}
        for group in self.groups:
            node = group[0]
            names = [f"y[{node},{s}]" for s in instance.kept[node]]
            columns[node] = builder.add_variables(names, len(group))
            builder.add_row(f"one_choice[{node}]", columns[node], 1, len(group), len(group))
        pairs = {pair: _pair(builder, instance, pair, columns) for pair in instance.edges}
        _limits(builder, instance, self.groups, columns, self._precise)
        for index, cut in enumerate(self.cuts):
            _cut(builder, instance, columns, index, cut, self.loads_exact)
        self._objective(builder, columns, pairs, upper)
        return builder.build()

    def _objective(
        self,
        builder: ProgramBuilder,
        columns: dict[int, range],
        pairs: dict[tuple[int, int], IntArray],
        upper: int | None,
    ) -> None:
        """Set the objective: the last digit of the largest total."""
        last = self.levels[-1]
        totals = [t for t in self._totals() if _upper_bound(t, self._edges, self.groups) >= last.base]
        stated = [self._digits(builder, k, total, columns, pairs, upper) for k, total in enumerate(totals)]
        if len(self._alternatives) == 1:
            terms, constant = stated[0]
            builder.minimize([c for c, _ in terms], [v for _, v in terms], constant)
            return
        top = (
            self.highest_objective(upper)
            if upper is not None
            else _highest(totals, self._edges, self.groups, last)
        )
        z = builder.add_variable("z", 0, max(top, 0) + SLACK_UNITS)
        for k, (terms, constant) in enumerate(stated):
            entries = [*terms, (z, -1)]
            builder.add_row(f"total[{k}]", [c for c, _ in entries], [v for _, v in entries], upper=-constant)
        builder.minimize([z], [1])

    def _digits(
        self,
        builder: ProgramBuilder,
        index: int,
        total: _Total,
        columns: dict[int, range],
        pairs: dict[tuple[int, int], IntArray],
        upper: int | None,
    ) -> tuple[Terms, int]:
        """State the rows of all digits of a total but the last, which is returned as terms and a constant."""
        above = total.constant - self.levels[0].base
        unit_above: int | None = None
        carried: Terms = []
        constant = 0
        for level, next_level in itertools.zip_longest(self.levels, self.levels[1:]):
            terms = list(carried)
            for group, weights in zip(self.groups, total.weights, strict=True):
                terms += zip(columns[group[0]], _digit(weights, unit_above, level.unit).tolist(), strict=True)
            for pair, pair_columns in pairs.items():
                costs = self._edges[pair][self.instance.edges[pair] < HALF]
                terms += zip(pair_columns.tolist(), _digit(costs, unit_above, level.unit).tolist(), strict=True)
            constant += (above if unit_above is None else above % unit_above) // level.unit
            terms = [(c, v) for c, v in terms if v]
            if next_level is None:
                return terms, constant
            value, ratio, unit_above = (
                (next_level.base - level.base) // level.unit,
                level.unit // next_level.unit,
                level.unit,
            )
            # Counted from the proved value; a total that is not the largest may lie below it.
            low = -self.num_parts if len(self._alternatives) > 1 else 0
            assert upper is not None
            high = max((upper - level.base) // level.unit - value, low) + 1
            h = builder.add_variable(f"h[{index},{level.unit}]", low, high)
            entries, side = [*terms, (h, -1)], value - constant
            name = f"digit[{index},{level.unit}]"
            builder.add_row(name, [c for c, _ in entries], [v for _, v in entries], upper=side)
            carried, constant = [(h, ratio)], 0
        raise AssertionError("There is a last level.")

    def _totals(self) -> list[_Total]:
        """Build the distinct totals of the stated combinations."""
        instance = self.instance
        shared = instance.offset + sum(int(m.min()) for m in instance.edges.values())
        totals = []
        for chosen in self._alternatives:
            picked = [group[h] for group, h in zip(instance.peaks, chosen, strict=True)]
            constant, weights = shared + sum(base for base, _ in picked), []
            for group in self.groups:
                node = group[0]
                costs = instance.costs[node].copy()
                for _, terms in picked:
                    if node in terms:
                        costs += terms[node][instance.kept[node]]
                smallest = int(costs.min())
                constant += smallest * len(group)
                weights.append(costs - smallest)
            totals.append(_Total(tuple(weights), constant))
        # Alternatives are often equal on the remaining strategies.
        return list({(total.constant, *(w.tobytes() for w in total.weights)): total for total in totals}.values())


def size_of(instance: Instance) -> int:
    """Return the number of variables that the program would have."""
    return sum(c.size for c in instance.costs.values()) + sum(m.size for m in instance.edges.values())


def _combinations(peaks: Sequence[Sequence[Alternative]]) -> Iterator[tuple[int, ...]]:
    """Yield all combinations of alternatives; every alternative occurs among the first."""
    sizes = [len(group) for group in peaks]
    seen: set[tuple[int, ...]] = set()
    for turn in range(max(sizes, default=1)):
        combination = tuple(min(turn, size - 1) for size in sizes)
        seen.add(combination)
        yield combination
    for combination in itertools.product(*map(range, sizes)):
        if combination not in seen:
            yield combination


def _digit(values: IntArray, whole: int | None, unit: int) -> IntArray:
    """Return the digit of ``values`` in ``unit``, below the unit ``whole``."""
    return (values if whole is None else values % whole) // unit


def _digit_bits(entries: int, parts: int) -> int:
    """Return the bits of a digit in rows of ``entries`` terms, of which a choice takes ``parts``.

    Few enough for every backend where a digit then exceeds the rounding loss; else the digits need a tolerance,
    and CP-SAT refuses them.
    """
    rounding = parts.bit_length()
    bits = min(ROW_BITS - entries.bit_length(), TOLERANCE_BITS - rounding)
    return min(bits, DIGIT_BITS) if bits >= max(MIN_DIGIT_BITS, rounding + 3) else DIGIT_BITS


def _unit(largest: int, common: int, bits: int) -> int:
    """Return the common unit times the smallest power of two for which ``largest`` has at most ``bits`` bits."""
    return common << max(0, (largest // common).bit_length() - bits)


def _highest(
    totals: list[_Total], edges: dict[tuple[int, int], IntArray], groups: tuple[tuple[int, ...], ...], level: Level
) -> int:
    """Return a value that no total exceeds, in the level's unit."""
    highest = max((_upper_bound(total, edges, groups) for total in totals), default=level.base)
    return (highest - level.base) // level.unit + 1


def _upper_bound(
    total: _Total, edges: dict[tuple[int, int], IntArray], groups: tuple[tuple[int, ...], ...]
) -> int:
    """Return a value that the total does not exceed."""
    dearest = sum(int(_finite(m).max(initial=0)) for m in edges.values())
    return (
        total.constant
        + dearest
        + sum(int(w.max()) * len(group) for w, group in zip(total.weights, groups, strict=True))
    )


def _common_unit(instance: Instance, edges: dict[tuple[int, int], IntArray]) -> int:
    """Return the largest unit that divides all differences of costs."""
    parts = [costs - int(costs.min()) for costs in instance.costs.values()]
    parts += [_finite(matrix) for matrix in edges.values()]
    for group in instance.peaks:
        bases = []
        for base, terms in group:
            kept_terms = {i: t[instance.kept[i]] for i, t in terms.items()}
            parts += [t - int(t.min()) for t in kept_terms.values()]
            bases.append(base + sum(int(t.min()) for t in kept_terms.values()))
        parts.append(np.array(bases, np.int64) - bases[0])
    return max(1, int(np.gcd.reduce(np.concatenate([part.ravel() for part in parts]))))


def _finite(matrix: IntArray) -> IntArray:
    """Return the entries that are not forbidden."""
    return matrix[matrix < HALF]


def _equal_nodes(instance: Instance) -> tuple[tuple[int, ...], ...]:
    """Group nodes without edges that are equal in costs, loads and peaks (repeated layers)."""
    tied = {i for pair in instance.edges for i in pair}
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, costs in instance.costs.items():
        terms = tuple(
            alternative[1][i].tobytes() if i in alternative[1] else b""
            for group in instance.peaks
            for alternative in group
        )
        loads = (instance.rows[i].tobytes(), instance.loads[i].tobytes()) if i in instance.loads else ()
        key = (i,) if i in tied else (costs.tobytes(), instance.kept[i].tobytes(), loads, terms)
        groups.setdefault(key, []).append(i)
    return tuple(tuple(nodes) for nodes in groups.values())


def _pair(
    builder: ProgramBuilder, instance: Instance, pair: tuple[int, int], columns: dict[int, range]
) -> IntArray:
    """Add the variables and rows of an edge. Returns the columns in the order of its allowed pairs."""
    i, j = pair
    rows, others = np.nonzero(instance.edges[pair] < HALF)
    names = [f"e[{i},{j},{s},{t}]" for s, t in zip(rows.tolist(), others.tolist(), strict=True)]
    columns_of_pairs = np.array(builder.add_variables(names, 1), np.int64)
    for node, side, label in ((i, rows, "first"), (j, others, "second")):
        for s, column in enumerate(columns[node]):
            strategy_pairs = columns_of_pairs[side == s]
            signs = [1] * strategy_pairs.size + [-1]
            builder.add_row(f"pairs_agree[{i},{j},{label},{s}]", [*strategy_pairs.tolist(), column], signs, 0, 0)
    return columns_of_pairs


def _limits(
    builder: ProgramBuilder,
    instance: Instance,
    groups: tuple[tuple[int, ...], ...],
    columns: dict[int, range],
    precise: set[int],
) -> None:
    """Add the rows of the memory limits that can be broken."""
    inside: dict[int, list[tuple[IntArray, int, range]]] = {}
    capacity = dict(enumerate(instance.limits.tolist()))
    for group in groups:
        node = group[0]
        for row, load in zip(instance.rows.get(node, ()), instance.loads.get(node, ()), strict=True):
            base = int(load.min())
            capacity[int(row)] -= base * len(group)
            inside.setdefault(int(row), []).append((load - base, len(group), columns[node]))
    for row, parts in sorted(inside.items()):
        loads = np.concatenate([load for load, _, _ in parts])
        dearest = sum(int(load.max()) * count for load, count, _ in parts)
        if capacity[row] < dearest:
            taken = [column for _, _, inner in parts for column in inner]
            count = sum(count for _, count, _ in parts)
            _limit(builder, f"fits[{row}]", taken, loads, capacity[row], count, row in precise)


def _limit(
    builder: ProgramBuilder, name: str, columns: list[int], loads: IntArray, limit: int, count: int, precise: bool
) -> None:
    """Add one limit on the loads of ``count`` nodes, counted above their minimum; all digits if ``precise``."""
    common = max(1, int(np.gcd.reduce(loads)))
    loads, limit = loads // common, max(limit // common, -1)
    bits = _digit_bits(loads.size + count, count)
    unit, whole = _unit(int(loads.max()), 1, bits), None
    carried: Terms = []
    while True:
        terms = list(zip(columns, _digit(loads, whole, unit).tolist(), strict=True)) + carried
        side = (limit if whole is None else limit % whole) // unit
        last = unit == 1 or not precise
        if not last:
            carry = builder.add_variable(f"carry[{name},{unit}]", 0, count)
            terms.append((carry, 1))
        builder.add_row(f"{name}[{unit}]", [c for c, _ in terms], [v for _, v in terms], upper=side)
        if last:
            return
        whole, unit = unit, max(1, unit >> bits)
        carried = [(carry, -(whole // unit))]


def _cut(
    builder: ProgramBuilder,
    instance: Instance,
    columns: dict[int, range],
    index: int,
    cut: dict[int, int],
    exact_loads: bool,
) -> None:
    """Add the row that excludes a choice.

    At least one node takes a strategy with a smaller load in some row; where loads were floored, any other
    strategy, because it may be lighter in the caller's numbers.
    """
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


# Variables of the largest relaxation that is solved.
MAX_RELAXED: Final = 100_000
_BIG: Final = 1e9
# The largest message, in cost: the sum of all finite costs is smaller.
_MESSAGE: Final = 2.0**52


@dataclass(frozen=True, slots=True, eq=False)
class Duals:
    """Duals of the relaxation.

    ``prices`` [rows] are the limits' multipliers in cost per unit of load; ``messages`` belong to every edge's two
    ends, in cost; ``picked`` (positions) is the strategy of every node with the largest value.
    """

    prices: FloatArray
    messages: dict[Pair, tuple[IntArray, IntArray]]
    picked: dict[int, int]


def relaxed_duals(
    instance: Instance, deadline: float, cancelled: Callable[[], bool] | None = None
) -> Duals | None:
    """Solve the relaxation for its duals; None if there is no answer in time."""
    starts, width = _columns_of(instance)
    agree, pairs, costs = _agreement(instance, starts, width)
    total = width + costs.size
    nodes = sparse.csr_matrix(
        (np.ones(width), (np.repeat(np.arange(len(starts)), _sizes(instance)), np.arange(width))),
        shape=(len(starts), total),
    )
    loads, sides, scale = _load_rows(instance, starts, total)
    raw = np.concatenate([*(instance.costs[i] for i in starts), costs]).astype(np.float64)
    unit = float(np.abs(raw[raw < HALF]).max(initial=1.0))
    equations = sparse.vstack([nodes, agree]).tocsr()
    options: dict[str, Any] = {}
    left_s = deadline - time.perf_counter()
    if left_s < _BIG / 2:
        options["time_limit"] = max(left_s, 0.0)
    solving = partial(
        optimize.linprog,
        np.where(raw < HALF, raw / unit, 0.0),
        A_ub=loads,
        b_ub=sides,
        A_eq=equations,
        b_eq=np.concatenate([np.ones(len(starts)), np.zeros(agree.shape[0])]),
        bounds=np.stack([np.zeros(total), np.where(raw < HALF, 1.0, 0.0)], axis=1),
        method="highs",
        options=options,
    )
    # In a thread of its own: SciPy cannot stop a solve, so an interrupted one is abandoned.
    answer = run_interruptibly(solving, lambda: None, grace_s=0.0, cancelled=cancelled)
    if answer.status != 0:
        return None
    prices = np.nan_to_num(np.maximum(0.0, -np.asarray(answer.ineqlin.marginals)) * unit / scale, posinf=0.0)
    # Any messages give a bound as long as their sums do not overflow.
    useful = np.clip(np.nan_to_num(np.asarray(answer.eqlin.marginals)[len(starts) :] * unit), -_MESSAGE, _MESSAGE)
    messages = np.floor(useful).astype(np.int64)
    picked = {i: int(np.argmax(answer.x[at : at + instance.costs[i].size])) for i, at in starts.items()}
    return Duals(prices, {pair: (messages[a], messages[b]) for pair, (a, b) in pairs.items()}, picked)


def _sizes(instance: Instance) -> list[int]:
    """Return the number of strategies of every node, in the order of nodes."""
    return [instance.costs[i].size for i in sorted(instance.costs)]


def _columns_of(instance: Instance) -> tuple[dict[int, int], int]:
    """Return the first column of every node, and the number of columns of all nodes."""
    sizes = _sizes(instance)
    firsts = (np.cumsum(sizes) - sizes).tolist()
    return dict(zip(sorted(instance.costs), firsts, strict=True)), sum(sizes)


def _agreement(
    instance: Instance, starts: dict[int, int], width: int
) -> tuple[sparse.csr_matrix, dict[Pair, tuple[slice, slice]], IntArray]:
    """Build the rows that tie pairs to their ends.

    Returns them, the rows of every edge's ends, and the pairs' costs.
    """
    rows, columns, values = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0)]
    costs = [np.zeros(0, np.int64)]
    pairs: dict[Pair, tuple[slice, slice]] = {}
    row, column = 0, width
    for (i, j), matrix in instance.edges.items():
        s, t = np.nonzero(matrix < HALF)
        pair_columns = column + np.arange(s.size)
        costs.append(matrix[s, t])
        column += s.size
        slices = []
        for node, side, size in ((i, s, matrix.shape[0]), (j, t, matrix.shape[1])):
            rows += [row + side, row + np.arange(size)]
            columns += [pair_columns, starts[node] + np.arange(size)]
            values += [np.ones(s.size), -np.ones(size)]
            slices.append(slice(row, row + size))
            row += size
        pairs[i, j] = (slices[0], slices[1])
    entries = np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))
    return sparse.csr_matrix(entries, shape=(row, column)), pairs, np.concatenate(costs)


def _load_rows(
    instance: Instance, starts: dict[int, int], total: int
) -> tuple[sparse.csr_matrix, FloatArray, FloatArray]:
    """Build the rows of the limits. Returns them scaled, their right-hand sides, and the scale of each."""
    rows, columns, values = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for i, loads in instance.loads.items():
        rows.append(np.repeat(instance.rows[i], loads.shape[1]))
        columns.append(np.tile(starts[i] + np.arange(loads.shape[1]), loads.shape[0]))
        values.append(loads.ravel())
    index = np.concatenate(rows)
    largest = np.zeros(instance.limits.size)
    np.maximum.at(largest, index, np.concatenate(values).astype(np.float64))
    scale = np.where(largest > 0, largest, 1.0)
    matrix = sparse.csr_matrix(
        (np.concatenate(values) / scale[index], (index, np.concatenate(columns))), shape=(scale.size, total)
    )
    return matrix, instance.limits / scale, scale
