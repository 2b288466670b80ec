"""What sequences are worth where the replicas of a chain do a workload: programs with a row for every length.

Of every class c that leads k_c replicas some windows w are known. With shares y_w of the replicas and contents z
as in ``filling_programs``, scaled by these, the part theta of a workload n that is done within Z is at most

    max theta    subject to    sum_w (what w holds) >= theta n,    sum over w of c of y_w = k_c,
                               every path of w takes at most Z y_w.

Its dual is a price lambda for every length, lambda . n = 1, and a mixture of paths for every window. By any
prices and mixtures a replica of window w does no more than V_w, as a load at these prices
(``ConfigurationLP.priced``), so a chain does no more than sum_c k_c max over w of c of V_w. Windows that are not
known may leave more: these join.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from milpplan.groups.bounds import glop
from milpplan.groups.bounds.path_mixtures import Mixture
from milpplan.lengths.bounds.configuration_columns import BACK, NARROW, NEAR, WIDEST, Columns, Program, inside
from milpplan.lengths.bounds.configuration_lp import ConfigurationLP
from milpplan.simulation.layout_columns import FloatArray, IntArray

# Rounds of a program, and of what it was a window's flow is at least.
_ROUNDS, _LEAST_FLOW = 60, 0.1


@dataclass(frozen=True, eq=False)
class ClassWindow:
    """A window of a class, by ``place``: its mixture and the load that it does for a unit of time, and contents
    ``rows`` [v, n] of it and ``columns`` of another one."""

    length_class: int
    configuration: ConfigurationLP
    mixture: Mixture
    flow: float
    rows: IntArray
    columns: Columns | None

    def towards(self, mixture: Mixture, flow: float) -> ClassWindow:
        """Part of the way to another mixture and its flow."""
        both = max(BACK * self.flow + (1.0 - BACK) * flow, _LEAST_FLOW * self.flow)
        return replace(self, mixture=self.mixture.towards(mixture, (1.0 - BACK) * flow / both), flow=both)


def restricted_master_duals(
    windows: Sequence[ClassWindow],
    numbers: IntArray | FloatArray,
    needed: FloatArray,
    prices: FloatArray,
    time_ns: float,
    deadline: float,
) -> tuple[FloatArray, tuple[ClassWindow, ...]] | None:
    """Prices [n] by which a chain of so many replicas of each class, ``numbers`` [C], does least of all that is
    ``needed`` [n] within a time, all of it worth as much as by the ``prices`` to begin with, and mixtures of the
    windows; none where there are no better ones. Until the ``deadline``."""
    program = _Program(windows, numbers, needed, time_ns)
    total, width, gained = float(prices @ needed), NARROW, False
    known = tuple(windows)
    done, rows = program.priced(known, prices)
    for _ in range(_ROUNDS):
        program.join(rows)
        low, high = (1.0 - width) * prices, (1.0 + width) * prices
        found = program.solve(total, low, high)
        if found is None:
            break
        new, new_prices, most = found
        drawn = tuple(one.towards(*other) for one, other in zip(known, new, strict=True))
        drawn_prices = BACK * prices + (1.0 - BACK) * new_prices
        least, rows = program.priced(drawn, drawn_prices)
        better = least < done
        if better:
            done, known, prices, gained = least, drawn, drawn_prices, True
        if done <= most + NEAR * total:
            if inside(new_prices, low, high):
                break
            width *= 1.0 if better else 2.0
        if width > WIDEST or time.perf_counter() > deadline:
            break
    return (prices, known) if gained else None


class _Program:
    """The program of the module over some contents, in units of the time."""

    def __init__(
        self, windows: Sequence[ClassWindow], numbers: IntArray | FloatArray, needed: FloatArray, time_ns: float
    ) -> None:
        self.numbers, self.needed, self.time_ns = numbers, needed, time_ns
        self.programs = [Program.started(one.configuration, one.rows, one.columns, time_ns) for one in windows]
        self.places = np.array([one.length_class for one in windows])

    def priced(self, windows: Sequence[ClassWindow], prices: FloatArray) -> tuple[float, list[IntArray]]:
        """What the chain does at most by mixtures at ``prices`` [n], and the contents of every window that do."""
        most, found = np.zeros(len(self.numbers)), []
        for one in windows:
            bound, rows = one.configuration.prove_price_bound(one.mixture, prices / one.flow)
            most[one.length_class] = max(most[one.length_class], one.flow * (self.time_ns - bound.constant))
            found.append(rows)
        return float(self.numbers @ most), found

    def join(self, rows: Sequence[IntArray]) -> None:
        """More contents of all micro-batches of every window."""
        for program, more in zip(self.programs, rows, strict=True):
            program.add_columns(np.arange(len(more)), more)

    def solve(
        self, total: float, low: FloatArray, high: FloatArray
    ) -> tuple[list[tuple[Mixture, float]], FloatArray, float] | None:
        """The mixtures and flows, the prices of every length [n] between ``low`` and ``high`` by which all that is
        needed is worth the ``total`` and these contents do least, and that."""
        # The part that is done, shares of replicas, what is missing of every length and what is beyond; then what
        # programs of windows have.
        shares = 1 + np.arange(len(self.programs))
        missing = 1 + len(shares) + np.arange(len(low))
        beyond = missing + len(low)
        classes = np.unique(self.places)
        lengths, leading = np.arange(len(low)), len(low) + np.searchsorted(classes, self.places)
        worth = [
            (lengths, np.zeros_like(lengths), -self.needed),
            (lengths, missing, np.ones(len(low))),
            (lengths, beyond, -np.ones(len(low))),
            (leading, shares, np.ones(len(shares))),
        ]
        sides = [np.zeros(len(low)), self.numbers[classes].astype(np.float64)]
        paths, ends, number, arcs = [], [], int(beyond[-1]) + 1, 0
        for share, one in zip(shares.tolist(), self.programs, strict=True):
            nodes, count = len(one.graph.kinds), sum(map(len, sides))
            contents = number + nodes + np.arange(len(one.places))
            paths += [(row + arcs, column + number, value) for row, column, value in one.path_rows()]
            arcs += len(one.parts)
            # The last end is within the time, and every micro-batch is one, times the share.
            ends.append(arcs)
            paths.append((np.full(2, arcs), np.array([number + nodes - 1, share]), np.array([1.0, -1.0])))
            whole, every = one.convexity_rows(), count + np.arange(one.num_whole)
            worth.append((whole.rows + count, whole.columns + number, whole.values))
            worth.append((every, np.full(len(every), share), -np.ones(len(every))))
            sides.append(np.zeros(len(every)))
            content, length = np.nonzero(one.rows)
            worth.append((length, contents[content], one.rows[content, length].astype(np.float64)))
            arcs, number = arcs + 1, number + nodes + len(contents)
        cost = np.zeros(number)
        cost[0], cost[missing], cost[beyond] = -total, high, -low
        given = (glop.Entries.of(*paths), np.zeros(arcs)), (glop.Entries.of(*worth), np.concatenate(sides))
        answer = glop.least(cost / self.time_ns, *given)
        if answer is None:
            return None
        begins = [0, *(end + 1 for end in ends)]
        found = [
            (one.mixture(answer.at_most[begin:]), -float(answer.at_most[end]))
            for one, begin, end in zip(self.programs, begins, ends, strict=False)
        ]
        return found, answer.equal[: len(low)] * self.time_ns, -answer.value * self.time_ns
