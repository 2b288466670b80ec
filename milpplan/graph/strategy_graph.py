"""A strategy graph as the caller states it, checked once, and the exact cost and memory of a choice.

Minimise, over one strategy x_i of every node i,

    sum_i node_costs[i][x_i] + sum_(i, j) edge_costs[i, j][x_i, x_j] + sum_g max_h (constant + sum_i term[x_i])

subject to, for every set of nodes alive together and every device d,

    sum_(i in set) node_memory[i][x_i, d] <= memory_limit[d],

to nodes that follow another (the same index), and to tables of allowed pairs. An infinite cost forbids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from milpplan.errors import InvalidInputError
from milpplan.graph.checked_arrays import (
    MAX_SUM,
    cost_array,
    doubles,
    finite,
    listed,
    mapping,
    require_number,
)
from milpplan.graph.result import GraphProgress, GraphSolution
from milpplan.optimize.milp.program import FloatArray

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Peak:
    """One alternative of a maximum: ``constant + sum over nodes of terms[node][choice]``."""

    constant: float
    terms: Mapping[int, npt.ArrayLike]


@dataclass(frozen=True, slots=True, eq=False)
class StrategyGraph:
    """Nodes with strategies, costs and memory limits, in the mathematics of the module.

    Args:
        node_costs: per node an array [strategies]; ``inf`` forbids a strategy.
        edge_costs: matrices [strategies of i, strategies of j]; ``(i, j)`` and ``(j, i)`` add up.
        node_memory: per node an array [strategies] or [strategies, devices], none negative.
        memory_limit: one number, or one per device.
        alive: sets of nodes that are in memory together; by default one set of all.
        follow: ``{i: j}``: node i takes the index that node j takes.
        allowed: tables of booleans like ``edge_costs``: the pairs of choices that are allowed.
        peaks: groups of alternatives; the largest alternative of every group is added to the cost.
    """

    node_costs: Sequence[npt.ArrayLike]
    edge_costs: Mapping[Pair, npt.ArrayLike] = field(default_factory=dict)
    node_memory: Sequence[npt.ArrayLike] | None = None
    memory_limit: npt.ArrayLike | None = None
    alive: Sequence[Sequence[int]] | None = None
    follow: Mapping[int, int] = field(default_factory=dict)
    allowed: Mapping[Pair, npt.ArrayLike] = field(default_factory=dict)
    peaks: Sequence[Sequence[Peak]] = ()

    def __post_init__(self) -> None:
        put = object.__setattr__
        costs = listed(self.node_costs, "node_costs")
        put(self, "node_costs", tuple(cost_array(c, (-1,), f"node_costs[{i}]") for i, c in enumerate(costs)))
        if not self.node_costs:
            raise InvalidInputError("node_costs is empty.", "At least one node expected.")
        put(self, "edge_costs", self._matrices(self.edge_costs, "edge_costs"))
        allowed = self._matrices(self.allowed, "allowed")
        put(self, "allowed", {pair: table.astype(np.bool_) for pair, table in allowed.items()})
        follow = mapping(self.follow, "follow").items()
        put(self, "follow", {self._node(i, "follow"): self._node(j, "follow") for i, j in follow})
        put(self, "peaks", tuple(self._group(group, g) for g, group in enumerate(listed(self.peaks, "peaks"))))
        self._check_followers()
        self._take_memory()
        self._check_sums()

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.node_costs)

    def num_strategies(self, node: int) -> int:
        """Number of strategies of a node."""
        return int(self._vector(node).size)

    @property
    def num_devices(self) -> int:
        """Number of devices with a limit of their own; 0 without limits."""
        return 0 if self.memory_limit is None else int(np.size(np.asarray(self.memory_limit)))

    def solve(
        self,
        backend: str = "auto",
        time_limit_s: float | None = None,
        hint: npt.ArrayLike | None = None,
        relative_gap: float = 0.0,
        seed: int = 1,
        callback: Callable[[GraphProgress], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> GraphSolution:
        """Find the cheapest choice, with a proved bound.

        Args:
            backend: solver of the reduced graph: ``cpsat``, ``cbc``, ``highs`` or ``auto``.
            time_limit_s: stop about then with the best choice and bound so far.
            hint: a choice to start from; it may break limits. It changes the search, not the answer.
            relative_gap: stop when the gap is at most this.
            seed: seed of the backend.
            callback: called with every cheaper choice and better bound; ``KeyboardInterrupt`` raised in it (or by
                Ctrl-C) stops the solve, which then returns the incumbent and the bound.
            cancelled: called from time to time, also while a backend runs; the solve stops when it returns True.
                The ``is_set`` of a ``threading.Event`` lets another thread stop it.
        """
        from milpplan.graph.solve_graph import solve_graph

        if time_limit_s is not None:
            require_number(time_limit_s, "time_limit_s", math.inf)
        require_number(relative_gap, "relative_gap", MAX_SUM)
        require_number(seed, "seed", 2**31 - 1, (int, np.integer))
        if not isinstance(backend, str):
            raise InvalidInputError(f"backend is {backend!r}.", "A name expected.")
        return solve_graph(self, backend, time_limit_s, self._hint(hint), relative_gap, seed, callback, cancelled)

    def objective_of(self, choice: npt.ArrayLike) -> float:
        """Return the cost of a choice [nodes], summed exactly and rounded once; ``inf`` if it is forbidden."""
        terms = self.terms_of(choice)
        return math.inf if math.inf in terms else math.fsum(terms)

    def terms_of(self, choice: npt.ArrayLike) -> list[float]:
        """List the terms of the cost of a choice; ``[inf]`` if it is forbidden."""
        picked = self._checked_choice(choice)
        terms = [float(self._vector(i)[s]) for i, s in enumerate(picked)]
        terms += [float(np.asarray(m)[picked[i], picked[j]]) for (i, j), m in self.edge_costs.items()]
        banned = [1 for (i, j), table in self.allowed.items() if not np.asarray(table)[picked[i], picked[j]]]
        banned += [1 for i, j in self.follow.items() if picked[i] != picked[j]]
        if banned:
            return [math.inf]
        for group in self.peaks:
            # Compared without rounding: the largest alternative, not its rounded value, is added.
            terms += max(
                (_alternative(peak, picked) for peak in group), key=lambda terms: sum(map(Fraction, terms))
            )
        return terms

    def memory_of(self, choice: npt.ArrayLike) -> FloatArray:
        """Return the memory of a choice, [alive sets, devices], each sum rounded once."""
        picked = self._checked_choice(choice)
        if not self.num_devices:
            return np.zeros((0, 0))
        return self.summed_memory(np.stack([self.memory_vector(i)[s] for i, s in enumerate(picked)]))

    def summed_memory(self, memory: FloatArray) -> FloatArray:
        """Sum the memory of the nodes [nodes, devices] over every alive set: [sets, devices]."""
        sets, devices = self.alive_sets(), range(self.num_devices)
        used = [[math.fsum(memory[list(nodes), d].tolist()) for d in devices] for nodes in sets]
        return np.array(used, np.float64).reshape(len(sets), len(devices))

    def fits(self, choice: npt.ArrayLike) -> bool:
        """Tell whether a choice meets every memory limit, without rounding any sum."""
        picked = self._checked_choice(choice)
        limits = self.limits().tolist()
        taken = [self.memory_vector(i)[s].tolist() for i, s in enumerate(picked)] if limits else []
        return all(
            limit == math.inf or math.fsum([-limit, *(taken[i][d] for i in nodes)]) <= 0.0
            for nodes in self.alive_sets()
            for d, limit in enumerate(limits)
        )

    def alive_sets(self) -> tuple[tuple[int, ...], ...]:
        """Return the sets of nodes that are in memory together."""
        if self.memory_limit is None:
            return ()
        return tuple(map(tuple, self.alive)) if self.alive is not None else (tuple(range(self.num_nodes)),)

    def limits(self) -> FloatArray:
        """Return the limit of every device."""
        return np.zeros(0) if self.memory_limit is None else np.asarray(self.memory_limit, np.float64)

    def memory_vector(self, node: int) -> FloatArray:
        """Return the memory of a node's strategies, [strategies, devices]."""
        assert self.node_memory is not None
        return np.asarray(self.node_memory[node])

    def _vector(self, node: int) -> FloatArray:
        """Return the costs of a node."""
        return np.asarray(self.node_costs[node])

    def _node(self, node: Any, what: str) -> int:
        """Check the number of a node."""
        if not isinstance(node, (int, np.integer)) or not 0 <= node < self.num_nodes:
            raise InvalidInputError(
                f"{what} names node {node!r}.",
                f"Nodes are 0 to {self.num_nodes - 1}.",
                "Give every node an entry in node_costs.",
            )
        return int(node)

    def _matrices(self, matrices: Mapping[Pair, npt.ArrayLike], what: str) -> dict[Pair, FloatArray]:
        """Check the matrices of pairs."""
        checked = {}
        for pair, matrix in mapping(matrices, what).items():
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise InvalidInputError(f"{what} has the key {pair!r}.", "A pair of nodes expected.")
            i, j = self._node(pair[0], what), self._node(pair[1], what)
            if i == j:
                raise InvalidInputError(
                    f"{what} has the pair {(i, j)}.", "Two different nodes expected.", "Add it to node_costs."
                )
            checked[i, j] = cost_array(
                matrix, (self.num_strategies(i), self.num_strategies(j)), f"{what}[{i}, {j}]"
            )
        return checked

    def _group(self, group: Sequence[Peak], index: int) -> tuple[Peak, ...]:
        """Check a group of alternatives."""
        group = listed(group, f"peaks[{index}]")
        if not group:
            raise InvalidInputError(f"peaks[{index}] is empty.", "At least one alternative expected.")
        checked_peaks = []
        # Repeated layers share their arrays. Each is checked once, and kept here so that its id is not reused.
        checked_terms: dict[tuple[int, int], tuple[object, FloatArray]] = {}
        for peak in group:
            if not isinstance(peak, Peak):
                raise InvalidInputError(f"peaks[{index}] holds {peak!r}.", "Alternatives of type Peak expected.")
            terms = {}
            for i, costs in mapping(peak.terms, f"peaks[{index}]").items():
                size = self.num_strategies(self._node(i, f"peaks[{index}]"))
                if (id(costs), size) not in checked_terms:
                    checked = cost_array(costs, (size,), f"peaks[{index}] of node {i}")
                    checked_terms[id(costs), size] = costs, finite(checked, f"peaks[{index}]")
                terms[int(i)] = checked_terms[id(costs), size][1]
            constant = finite(cost_array([peak.constant], (1,), f"peaks[{index}]"), f"peaks[{index}]")
            checked_peaks.append(Peak(float(constant[0]), terms))
        return tuple(checked_peaks)

    def _check_followers(self) -> None:
        """Check that followers have as many strategies as their leaders."""
        for i, j in self.follow.items():
            if self.num_strategies(i) != self.num_strategies(j):
                raise InvalidInputError(
                    f"Node {i} has {self.num_strategies(i)} strategies and follows node {j} with "
                    f"{self.num_strategies(j)}.",
                    "As many strategies expected.",
                    "State the pairs that belong together as a table in `allowed`.",
                )

    def _check_sums(self) -> None:
        """Refuse numbers whose sums do not fit into a double."""
        arrays = [*self.node_costs, *self.edge_costs.values()]
        arrays += [term for group in self.peaks for peak in group for term in peak.terms.values()]
        largest = [float(np.abs(a[np.isfinite(a)]).max(initial=0.0)) for a in map(np.asarray, arrays)]
        largest += [abs(peak.constant) for group in self.peaks for peak in group]
        memory = [np.asarray(node_memory).max(axis=0) for node_memory in self.node_memory or ()]
        for what, sums in (("Costs", [largest]), ("Memory", np.stack(memory).T.tolist() if memory else [])):
            if any(sum(values) > MAX_SUM for values in sums):
                raise InvalidInputError(
                    f"{what} add up to more than {MAX_SUM:.0e}.",
                    "Sums that a double holds expected.",
                    "Use a larger unit.",
                )

    def _take_memory(self) -> None:
        """Check and store memory, limits and alive sets."""
        put = object.__setattr__
        if (self.node_memory is None) != (self.memory_limit is None):
            given = "memory_limit" if self.node_memory is None else "node_memory"
            raise InvalidInputError(f"Only {given} is given.", "Both node_memory and memory_limit expected.")
        if self.alive is not None:
            sets = [listed(nodes, "alive") for nodes in listed(self.alive, "alive")]
            put(self, "alive", tuple(tuple(sorted({self._node(i, "alive") for i in nodes})) for nodes in sets))
        if self.node_memory is None or self.memory_limit is None:
            return
        limits = np.atleast_1d(doubles(self.memory_limit, "memory_limit"))
        if limits.ndim != 1 or not limits.size or np.isnan(limits).any() or (limits < 0).any():
            raise InvalidInputError(
                f"memory_limit is {self.memory_limit!r}.", "Numbers of at least 0 expected, one per device."
            )
        put(self, "memory_limit", limits)
        memory = listed(self.node_memory, "node_memory")
        if len(memory) != self.num_nodes:
            raise InvalidInputError(
                f"node_memory has {len(memory)} entries for {self.num_nodes} nodes.",
                "One each expected.",
            )
        put(
            self,
            "node_memory",
            tuple(self._memory(i, values, limits.size) for i, values in enumerate(memory)),
        )

    def _memory(self, node: int, memory: npt.ArrayLike, devices: int) -> FloatArray:
        """Check the memory of a node."""
        what, size = f"node_memory[{node}]", self.num_strategies(node)
        array = doubles(memory, what)
        array = array[:, None] if array.ndim == 1 else array
        checked = cost_array(array, (size, devices), what)
        if (checked < 0).any():
            raise InvalidInputError(f"{what} holds {checked.min()}.", "Memory of at least 0 expected.")
        return finite(checked, what)

    def _checked_choice(self, choice: npt.ArrayLike) -> list[int]:
        """Check a choice. Returns the strategies by node."""
        try:
            array = np.asarray(choice)
        except (TypeError, ValueError):
            raise InvalidInputError(f"A choice is {choice!r}.", "One integer per node expected.") from None
        if array.shape != (self.num_nodes,) or array.dtype.kind not in "iu":
            raise InvalidInputError(
                f"A choice has shape {array.shape} and type {array.dtype}.",
                f"{self.num_nodes} integers expected, one per node.",
            )
        sizes = np.array([self.num_strategies(i) for i in range(self.num_nodes)])
        wrong = np.flatnonzero((array < 0) | (array >= sizes))
        if wrong.size:
            node = int(wrong[0])
            raise InvalidInputError(
                f"A choice takes strategy {int(array[node])} of node {node}.",
                f"Its strategies are 0 to {int(sizes[node]) - 1}.",
            )
        return [int(s) for s in array]

    def _hint(self, hint: npt.ArrayLike | None) -> list[int] | None:
        """Check a hint."""
        return None if hint is None else self._checked_choice(hint)


def _alternative(peak: Peak, picked: Sequence[int]) -> list[float]:
    """List the terms of one alternative at a choice."""
    return [peak.constant, *(float(np.asarray(c)[picked[i]]) for i, c in peak.terms.items())]
