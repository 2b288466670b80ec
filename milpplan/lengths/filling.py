"""What the micro-batches of a window do at most within a time, whole sequences in each: the configuration program.

Of a pipeline with some number of micro-batches (``windows``) let every micro-batch m be a mixture of contents x
with shares z_mx, and its times the mixtures of theirs. The largest load within a time Z is a linear program:

    max sum z_mx y(x)    subject to    sum_x z_mx = 1,    every path of mean times takes at most Z.

Its dual is a mixture of paths and a slope s, the time of a unit of load. Any such pair proves

    time >= links + sum_m min_x (weights of m on the mixture . times of x - s y(x)) + s load

for whatever the micro-batches hold (``stage_contents`` says what the least of each is), so nothing rests on the
solver. Contents that are least for what the program proposes join it, until it gains nothing; mixtures are drawn
half way to the best known one, which spares rounds. Micro-batches that may not be there may hold nothing.

What makes this higher than the programs over real loads (``unequal``): no line stands for the times of products,
none of the ring is both hidden and exposed, and last tiles count in full.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milpplan.costs.columns import BoolArray, FloatArray, IntArray
from milpplan.groups.unequal import Graph, Mixture, PathBound
from milpplan.groups.windows import Window
from milpplan.lengths.stage_contents import StageContents

# Rounds of a program, how near what it finds and what is proved come, and rounds that may gain less than a share
# of that one after another.
_ROUNDS, _NEAR, _IDLE, _LITTLE = 14, 3e-4, 2, 0.2
# How far mixtures go back to the best known one.
_BACK = 0.5


@dataclass(frozen=True, eq=False)
class Filling:
    """A window of pipelines with ``contents``; ``each`` [n] is what a sequence adds to the load, ns.

    Where there is a ``first``, the micro-batch that the window is around holds a sequence of that length number or
    a longer one."""

    contents: StageContents
    each: FloatArray
    num_stages: int
    window: Window
    first: int | None

    @property
    def longest(self) -> BoolArray:
        """Which micro-batches hold a long sequence for sure, [v]."""
        places = np.arange(self.window.number)
        return np.zeros(len(places), dtype=bool) if self.first is None else places == self.window.ahead[1]

    def proved(self, mixture: Mixture, slope: float) -> tuple[PathBound, IntArray]:
        """What a mixture proves at this slope, and the contents [v, n] of which that is the least."""
        begin, end = self.window.there
        flows, merged = mixture.flows, self.window.merged
        # Of those that stand for any number every unit of load takes as much on the last stage, and no less.
        slope = min(slope, float(flows[0, merged].min(initial=np.inf)))
        prices = slope * self.each
        values, rows = self.contents.least(flows, prices, self.longest, self.first or 0)
        # The others may not be there.
        values[:begin] = np.minimum(0.0, values[:begin])
        values[end:] = np.minimum(0.0, values[end:])
        values[merged] = 0.0
        links = self.contents.transfer_ns * float(mixture.links[begin:end].sum())
        return PathBound(links + float(values.sum()), slope), rows

    def improved(
        self,
        mixture: Mixture,
        bound: PathBound,
        rows: IntArray,
        known: Columns | None,
        time_ns: float,
        enough: float,
    ) -> tuple[PathBound, Columns]:
        """The bound by which least can be done within the time, beginning with what ``mixture`` proved and with
        what is ``known`` of another window, no better than that less than ``enough`` is done; and the contents
        that do most."""
        best, flows = bound, (mixture.flows, mixture.links)
        program = _Program(self, Graph.of(self.num_stages, self.window), time_ns)
        program.join(np.arange(len(rows)), rows)
        # The fullest ones, so that time is what limits the load.
        full = self.contents.least(np.zeros((3, 2)), self.each, np.array([False, True]), self.first or 0)[1]
        program.join(np.arange(len(rows)), full[self.longest.astype(np.int64)])
        if known is not None:
            program.join(*known.moved(self))
        idle = 0
        for _ in range(_ROUNDS):
            found = program.solve()
            if found is None:
                break
            mixture, slope, most = found
            left = within(best, time_ns)
            if left <= max(enough, most * (1.0 + _NEAR)) or idle == _IDLE:
                break
            before, ahead = _BACK, 1.0 - _BACK
            drawn = Mixture(
                before * flows[0] + ahead * mixture.flows, before * flows[1] + ahead * mixture.links, self.window
            )
            bound, rows = self.proved(drawn, before * best.slope + ahead * slope)
            idle = 0 if within(bound, time_ns) < left * (1.0 - _LITTLE * _NEAR) else idle + 1
            if within(bound, time_ns) < left:
                best, flows = bound, (drawn.flows, drawn.links)
            program.join(np.arange(len(rows)), rows)
        return best, program.columns


@dataclass(frozen=True, eq=False)
class Columns:
    """Contents ``rows`` [c, n] of micro-batches at ``places`` [c] of a window."""

    filling: Filling
    places: IntArray
    rows: IntArray

    def moved(self, to: Filling) -> tuple[IntArray, IntArray]:
        """The same as far from the ends of another window, or from what it is around."""
        ends = [0, to.window.number - self.filling.window.number]
        if to.first is not None:
            ends.append(to.window.ahead[1] - self.filling.window.ahead[1])
        places = np.concatenate([self.places + end for end in ends])
        longest = np.tile(self.filling.longest[self.places], len(ends))
        rows = np.tile(self.rows, (len(ends), 1))
        there = (places >= 0) & (places < to.window.number)
        there[there] = to.longest[places[there]] == longest[there]
        return places[there], rows[there]


def within(bound: PathBound, time_ns: float) -> float:
    """The largest load that a bound leaves for a time."""
    return max(0.0, (time_ns - bound.constant) / bound.slope)


class _Program:
    """The program of the module over some contents, in units of the time."""

    def __init__(self, filling: Filling, graph: Graph, time_ns: float) -> None:
        self.filling, self.graph, self.time_ns = filling, graph, time_ns
        number, contents = filling.window.number, filling.contents
        begin, end = filling.window.there
        # The least that every micro-batch may hold.
        self.places = np.arange(number)
        self.rows = np.zeros((number, len(contents.items.sizes)), dtype=np.int64)
        self.rows[begin:end, np.flatnonzero(contents.items.fits)[0]] = 1
        if filling.first is not None:
            self.rows[filling.longest] = np.arange(self.rows.shape[1]) == filling.first
        micro_batch = graph.micro_batch[graph.heads]
        there = (micro_batch >= begin) & (micro_batch < end)
        self.lags = contents.transfer_ns * graph.links * there / time_ns
        self.used = np.zeros(0, dtype=np.int64)
        self.arcs = [np.flatnonzero(micro_batch == place) for place in range(number)]

    def join(self, places: IntArray, rows: IntArray) -> None:
        """Contents [c, n] of micro-batches at ``places`` [c], which their neighbours may have, too."""
        longest = self.filling.longest
        for step in (-1, 0, 1):
            others = places + step
            there = (others >= 0) & (others < len(longest))
            there[there] = longest[others[there]] == longest[places[there]]
            self.places = np.append(self.places, others[there])
            self.rows = np.concatenate([self.rows, rows[there]])

    @property
    def columns(self) -> Columns:
        """Those of the last answer."""
        return Columns(self.filling, self.places[self.used], self.rows[self.used])

    def solve(self) -> tuple[Mixture, float, float] | None:
        """The mixture, the slope, and the load that these contents do at most; none where they take too long."""
        import scipy.sparse as sparse
        from scipy.optimize import linprog

        graph, number, columns = self.graph, len(self.arcs), len(self.places)
        nodes, arcs = len(graph.kinds), len(graph.tails)
        times = self.filling.contents.times(self.rows) / self.time_ns
        inner = np.flatnonzero(graph.tails >= 0)
        kinds = graph.kinds[graph.heads]
        at, to, values = (
            [np.arange(arcs), inner],
            [graph.heads, graph.tails[inner]],
            [-np.ones(arcs), np.ones(len(inner))],
        )
        for place, own in enumerate(self.arcs):
            held = np.flatnonzero(self.places == place)
            at.append(np.repeat(own, len(held)))
            to.append(np.tile(nodes + held, len(own)))
            values.append(times[held][:, kinds[own]].T.ravel())
        shape = (arcs, nodes + columns)
        paths = sparse.csr_matrix((np.concatenate(values), (np.concatenate(at), np.concatenate(to))), shape=shape)
        each = self.rows @ self.filling.each / self.time_ns
        shape = (number, nodes + columns)
        whole = sparse.csr_matrix((np.ones(columns), (self.places, nodes + np.arange(columns))), shape=shape)
        ends = np.concatenate([np.full(nodes - 1, np.inf), [1.0], np.full(columns, np.inf)])
        answer = linprog(
            np.concatenate([np.zeros(nodes), -each]),
            A_ub=paths,
            b_ub=-self.lags,
            A_eq=whole,
            b_eq=np.ones(number),
            bounds=np.stack([np.zeros(nodes + columns), ends], axis=1),
            method="highs",
        )
        if answer.status != 0:
            return None
        self.used = np.flatnonzero(answer.x[nodes:] > 0.0)
        per_time = -float(answer.upper.marginals[nodes - 1])
        if per_time <= 0.0:
            return None
        duals = np.maximum(0.0, -np.asarray(answer.ineqlin.marginals))
        mixture = graph.mixture(duals, self.filling.window)
        return mixture, 1.0 / per_time, -float(answer.fun) * self.time_ns
