"""Restricted master problem for the dual values of sequences under one assignment of classes to replicas.

For every class c with k_c replicas some windows w are known. With shares y_w of the replicas and contents z as in
``configuration_columns``, scaled by these, the part theta of a workload n that is done within Z is at most

    max theta    subject to    sum_w (contents of w) >= theta n,    sum over w of c of y_w = k_c,
                               every path of w takes at most Z y_w.

Its dual is a value lambda for every length, lambda . n = 1, and a mixture of paths for every window. For any
values and mixtures a replica of window w does no more than V_w, as work by these values
(``ConfigurationLP.prove_price_bound``), so the assignment does no more than sum_c k_c max over w of c of V_w.
Windows that are not in the program may do more: these join.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from milpplan.groups.bounds import glop
from milpplan.groups.bounds.path_mixtures import Mixture
from milpplan.lengths.bounds.configuration_columns import (
    BACK,
    NARROW,
    NEAR,
    WIDEST,
    Columns,
    ConfigurationLP,
    Program,
    inside,
)
from milpplan.simulation.layout_columns import FloatArray, IntArray

# Maximum number of rounds, and the minimum ratio of a window's flow to the one before.
_ROUNDS, _LEAST_FLOW = 60, 0.1


@dataclass(frozen=True, eq=False)
class ClassWindow:
    """A window of a class in the restricted master."""

    length_class: int
    """Index of the class."""
    configuration: ConfigurationLP
    mixture: Mixture
    """Mixture of its paths."""
    flow: float
    """Work per unit of time."""
    rows: IntArray
    """Contents [v, n]."""
    columns: Columns | None
    """Contents from another window."""

    def towards(self, mixture: Mixture, flow: float) -> ClassWindow:
        """Return the window with its mixture and flow moved towards others."""
        new_flow = max(BACK * self.flow + (1.0 - BACK) * flow, _LEAST_FLOW * self.flow)
        return replace(self, mixture=self.mixture.towards(mixture, (1.0 - BACK) * flow / new_flow), flow=new_flow)


def restricted_master_duals(
    windows: Sequence[ClassWindow],
    numbers: IntArray | FloatArray,
    needed: FloatArray,
    prices: FloatArray,
    time_ns: float,
    deadline: float,
) -> tuple[FloatArray, tuple[ClassWindow, ...]] | None:
    """Seek dual values by which an assignment does the smallest part of a workload within a time.

    Args:
        windows: windows of its classes.
        numbers: replicas by class, [C].
        needed: sequences of the workload, [n].
        prices: first values, [n]; the total value of the workload is kept.
        time_ns: time of a replica.
        deadline: of ``perf_counter``.

    Returns:
        Values [n] and the windows with their mixtures; None if no better values were found.
    """
    program = _Program(windows, numbers, needed, time_ns)
    total, width, has_gained = float(prices @ needed), NARROW, False
    current = tuple(windows)
    max_done, rows = program.priced(current, prices)
    for _ in range(_ROUNDS):
        program.join(rows)
        low, high = (1.0 - width) * prices, (1.0 + width) * prices
        solution = program.solve(total, low, high)
        if solution is None:
            break
        new_mixtures, new_prices, lp_done = solution
        smoothed = tuple(window.towards(*target) for window, target in zip(current, new_mixtures, strict=True))
        smoothed_prices = BACK * prices + (1.0 - BACK) * new_prices
        smoothed_done, rows = program.priced(smoothed, smoothed_prices)
        is_better = smoothed_done < max_done
        if is_better:
            max_done, current, prices, has_gained = smoothed_done, smoothed, smoothed_prices, True
        if max_done <= lp_done + NEAR * total:
            if inside(new_prices, low, high):
                break
            width *= 1.0 if is_better else 2.0
        if width > WIDEST or time.perf_counter() > deadline:
            break
    return (prices, current) if has_gained else None


class _Program:
    """The program of the module over some contents, in units of the time."""

    def __init__(
        self, windows: Sequence[ClassWindow], numbers: IntArray | FloatArray, needed: FloatArray, time_ns: float
    ) -> None:
        self.numbers, self.needed, self.time_ns = numbers, needed, time_ns
        self.programs = [
            Program.started(window.configuration, window.rows, window.columns, time_ns) for window in windows
        ]
        self.places = np.array([window.length_class for window in windows])

    def priced(self, windows: Sequence[ClassWindow], prices: FloatArray) -> tuple[float, list[IntArray]]:
        """Return the maximum work of the assignment by mixtures and ``prices`` [n], and the best contents of every
        window."""
        max_by_class, contents = np.zeros(len(self.numbers)), []
        for window in windows:
            bound, rows = window.configuration.prove_price_bound(window.mixture, prices / window.flow)
            max_by_class[window.length_class] = max(
                max_by_class[window.length_class], window.flow * (self.time_ns - bound.constant)
            )
            contents.append(rows)
        return float(self.numbers @ max_by_class), contents

    def join(self, rows: Sequence[IntArray]) -> None:
        """Add contents of all micro-batches of every window."""
        for program, new_rows in zip(self.programs, rows, strict=True):
            program.add_columns(np.arange(len(new_rows)), new_rows)

    def solve(
        self, total: float, low: FloatArray, high: FloatArray
    ) -> tuple[list[tuple[Mixture, float]], FloatArray, float] | None:
        """Solve the program with values between ``low`` and ``high`` [n].

        Args:
            total: total value of the workload.
            low: minimum values.
            high: maximum values.

        Returns:
            Mixtures and flows of the windows, values [n], and the work that the contents do; None without a
                solution.
        """
        # Columns: the part that is done, shares of replicas, shortage and surplus of every length; then those of
        # the windows' programs.
        shares = 1 + np.arange(len(self.programs))
        missing = 1 + len(shares) + np.arange(len(low))
        beyond = missing + len(low)
        classes = np.unique(self.places)
        lengths, leading = np.arange(len(low)), len(low) + np.searchsorted(classes, self.places)
        share_rows = [
            (lengths, np.zeros_like(lengths), -self.needed),
            (lengths, missing, np.ones(len(low))),
            (lengths, beyond, -np.ones(len(low))),
            (leading, shares, np.ones(len(shares))),
        ]
        sides = [np.zeros(len(low)), self.numbers[classes].astype(np.float64)]
        paths, ends, number, arcs = [], [], int(beyond[-1]) + 1, 0
        for share, program in zip(shares.tolist(), self.programs, strict=True):
            nodes, count = len(program.graph.kinds), sum(map(len, sides))
            contents = number + nodes + np.arange(len(program.places))
            paths += [(row + arcs, column + number, value) for row, column, value in program.path_rows()]
            arcs += len(program.parts)
            # The last end is within the time, and the shares of every micro-batch add up to one, times the share
            # of replicas.
            ends.append(arcs)
            paths.append((np.full(2, arcs), np.array([number + nodes - 1, share]), np.array([1.0, -1.0])))
            whole, every = program.convexity_rows(), count + np.arange(program.num_whole)
            share_rows.append((whole.rows + count, whole.columns + number, whole.values))
            share_rows.append((every, np.full(len(every), share), -np.ones(len(every))))
            sides.append(np.zeros(len(every)))
            content, length = np.nonzero(program.rows)
            share_rows.append((length, contents[content], program.rows[content, length].astype(np.float64)))
            arcs, number = arcs + 1, number + nodes + len(contents)
        cost = np.zeros(number)
        cost[0], cost[missing], cost[beyond] = -total, high, -low
        constraints = (
            (glop.Entries.of(*paths), np.zeros(arcs)),
            (glop.Entries.of(*share_rows), np.concatenate(sides)),
        )
        answer = glop.least(cost / self.time_ns, *constraints)
        if answer is None:
            return None
        begins = [0, *(end + 1 for end in ends)]
        mixtures = [
            (program.mixture(answer.at_most[begin:]), -float(answer.at_most[end]))
            for program, begin, end in zip(self.programs, begins, ends, strict=False)
        ]
        return mixtures, answer.equal[: len(low)] * self.time_ns, -answer.value * self.time_ns
