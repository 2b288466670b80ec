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
from typing import Any

import numpy as np

from milpplan.costs.columns import BoolArray, FloatArray, IntArray
from milpplan.groups.path_bounds import PathBound
from milpplan.groups.unequal import Graph, Mixture
from milpplan.groups.windows import Window
from milpplan.lengths.stage_contents import Core, StageContents

# Rounds of a program, how near what it finds and what is proved come, and rounds that may gain less than a share
# of that one after another.
_ROUNDS, _NEAR, _IDLE, _LITTLE = 14, 3e-4, 2, 0.2
# How far mixtures go back to the best known one.
_BACK = 0.5
# Rounds of a program with all lengths, and what it pays for what it does not hold.
_WHOLE_ROUNDS, _DEAR = 45, 20.0


@dataclass(frozen=True, eq=False)
class Filling:
    """A window of pipelines with ``contents``; ``each`` [n] is what a sequence adds to the load, ns, and ``last``
    [n] to the last stage, at least. ``core``: what the micro-batch that the window is around holds, if known."""

    contents: StageContents
    each: FloatArray
    last: FloatArray
    num_stages: int
    window: Window
    core: Core | None

    @property
    def cores(self) -> BoolArray:
        """Which micro-batches hold a ``core`` for sure, [v]."""
        places = np.arange(self.window.number)
        return np.zeros(len(places), dtype=bool) if self.core is None else places == self.window.ahead[1]

    def least(self, weights: FloatArray, prices: FloatArray) -> tuple[FloatArray, IntArray]:
        """``StageContents.least`` of the window's micro-batches."""
        return self.contents.least(weights, prices, self.cores, self.core or Core())

    @property
    def fullest(self) -> IntArray:
        """The contents of the largest load, with the core and without, [v, n]."""
        with_core = np.array([False, True])
        found = self.contents.least(np.zeros((3, 2)), self.each, with_core, self.core or Core())[1]
        return found[self.cores.astype(np.int64)]

    def proved(self, mixture: Mixture, slope: float) -> tuple[PathBound, IntArray]:
        """What a mixture proves at this slope, and the contents [v, n] of which that is the least."""
        begin, end = self.window.there
        flows, merged = mixture.flows, self.window.merged
        # Of those that stand for any number every unit of load takes as much on the last stage, and no less.
        fits = self.contents.items.fits
        least = float((self.last[fits] / self.each[fits]).min())
        slope = min(slope, float(flows[0, merged].min(initial=np.inf)) * least)
        prices = slope * self.each
        values, rows = self.least(flows, prices)
        # The others may not be there.
        values[:begin] = np.minimum(0.0, values[:begin])
        values[end:] = np.minimum(0.0, values[end:])
        values[merged] = 0.0
        links = self.contents.transfer_ns * float(mixture.links[begin:end].sum())
        return PathBound(links + float(values.sum()), slope), rows

    def improved(
        self,
        mixture: Mixture,
        slope: float,
        rows: IntArray,
        known: Columns | None,
        time_ns: float,
        enough: float,
    ) -> tuple[PathBound, Mixture, Columns]:
        """The bound by which least can be done within the time, beginning with what ``mixture`` proves and with
        what is ``known`` of another window, no better than that less than ``enough`` is done; its mixture, and the
        contents that do most."""
        flows = mixture.flows, mixture.links
        best, found_rows = self.proved(mixture, slope)
        program = self._program(np.concatenate([rows, found_rows]), known, time_ns)
        idle = 0
        for _ in range(_ROUNDS):
            found = program.solve()
            if found is None:
                break
            mixture, slope, most = found
            left = best.within(time_ns)
            if left <= max(enough, most * (1.0 + _NEAR)) or idle == _IDLE:
                break
            before, ahead = _BACK, 1.0 - _BACK
            drawn = Mixture(
                before * flows[0] + ahead * mixture.flows, before * flows[1] + ahead * mixture.links, self.window
            )
            bound, rows = self.proved(drawn, before * best.slope + ahead * slope)
            idle = 0 if bound.within(time_ns) < left * (1.0 - _LITTLE * _NEAR) else idle + 1
            if bound.within(time_ns) < left:
                best, flows = bound, (drawn.flows, drawn.links)
            program.join(np.arange(len(rows)), rows)
        return best, Mixture(*flows, self.window), program.columns

    def _program(self, rows: IntArray, known: Columns | None, time_ns: float) -> _Program:
        """Of some contents [v, n] (or several times so many), of what is ``known`` of another window, and of the
        fullest ones, so that time is what limits the load."""
        program = _Program(self, Graph.of(self.num_stages, self.window), time_ns)
        program.join(np.arange(len(rows)) % self.window.number, rows)
        program.join(np.arange(self.window.number), self.fullest)
        if known is not None:
            program.join(*known.moved(self))
        return program

    def worths(self, rows: IntArray, known: Columns | None, time_ns: float) -> FloatArray:
        """What a sequence of every length [n] is worth, as a load, where the window does all of the workload in
        the least time: prices of a program with a row for every length. As far as rounds get: any will do."""
        program = self._program(rows, known, time_ns)
        counts = self.contents.items.counts
        best, worths = -np.inf, self.each
        drawn: tuple[FloatArray, FloatArray, FloatArray] | None = None
        for _ in range(_WHOLE_ROUNDS):
            found = program.share_out()
            if found is None:
                break
            mixture, prices, least_ns = found
            new = mixture.flows, mixture.links, prices
            if drawn is not None:
                flows, links, prices = (
                    _BACK * one + (1.0 - _BACK) * other for one, other in zip(drawn, new, strict=True)
                )
                new = flows, links, prices
            values, rows = self.least(new[0], new[2])
            proved = float(values.sum() + self.contents.transfer_ns * new[1].sum() + new[2] @ counts)
            if proved > best:
                best, drawn, worths = proved, new, new[2]
            if least_ns <= best * (1.0 + _NEAR):
                break
            program.join(np.arange(len(rows)), rows)
        return worths


@dataclass(frozen=True, eq=False)
class Columns:
    """Contents ``rows`` [c, n] of micro-batches at ``places`` [c] of a window."""

    filling: Filling
    places: IntArray
    rows: IntArray

    def moved(self, to: Filling) -> tuple[IntArray, IntArray]:
        """The same as far from the ends of another window, or from what it is around."""
        ends = [0, to.window.number - self.filling.window.number]
        if to.core is not None:
            ends.append(to.window.ahead[1] - self.filling.window.ahead[1])
        places = np.concatenate([self.places + end for end in ends])
        cores = np.tile(self.filling.cores[self.places], len(ends))
        rows = np.tile(self.rows, (len(ends), 1))
        there = (places >= 0) & (places < to.window.number)
        there[there] = to.cores[places[there]] == cores[there]
        return places[there], rows[there]


class _Program:
    """The program of the module over some contents, in units of the time."""

    def __init__(self, filling: Filling, graph: Graph, time_ns: float) -> None:
        self.filling, self.graph, self.time_ns = filling, graph, time_ns
        number, contents = filling.window.number, filling.contents
        begin, end = filling.window.there
        # The least that every micro-batch may hold, but for a core.
        self.places = np.flatnonzero(~filling.cores)
        rows = np.zeros((number, len(contents.items.sizes)), dtype=np.int64)
        rows[begin:end, np.flatnonzero(contents.items.fits)[0]] = 1
        self.rows = rows[self.places]
        micro_batch = graph.micro_batch[graph.heads]
        there = (micro_batch >= begin) & (micro_batch < end)
        self.lags = contents.transfer_ns * graph.links * there / time_ns
        self.used = np.zeros(0, dtype=np.int64)
        self.arcs = [np.flatnonzero(micro_batch == place) for place in range(number)]

    def join(self, places: IntArray, rows: IntArray) -> None:
        """Contents [c, n] of micro-batches at ``places`` [c], which their neighbours may have, too; those that are
        too large are left out."""
        cores, contents = self.filling.cores, self.filling.contents
        small = rows @ contents.items.sizes <= contents.base.shape[-1]
        places, rows = places[small], rows[small]
        for step in (-1, 0, 1):
            others = places + step
            there = (others >= 0) & (others < len(cores))
            there[there] = cores[others[there]] == cores[places[there]]
            self.places = np.append(self.places, others[there])
            self.rows = np.concatenate([self.rows, rows[there]])

    @property
    def columns(self) -> Columns:
        """Those of the last answer."""
        return Columns(self.filling, self.places[self.used], self.rows[self.used])

    def solve(self) -> tuple[Mixture, float, float] | None:
        """The mixture, the slope, and the load that these contents do at most; none where they take too long."""
        from scipy.optimize import linprog

        nodes, columns = len(self.graph.kinds), len(self.places)
        each = self.rows @ self.filling.each / self.time_ns
        ends = np.concatenate([np.full(nodes - 1, np.inf), [1.0], np.full(columns, np.inf)])
        answer = linprog(
            np.concatenate([np.zeros(nodes), -each]),
            A_ub=self._paths(),
            b_ub=-self.lags,
            A_eq=self._whole(),
            b_eq=np.ones(len(self.arcs)),
            bounds=np.stack([np.zeros(nodes + columns), ends], axis=1),
            method="highs",
        )
        if answer.status != 0:
            return None
        self.used = np.flatnonzero(answer.x[nodes:] > 0.0)
        per_time = -float(answer.upper.marginals[nodes - 1])
        if per_time <= 0.0:
            return None
        return self._mixture(answer), 1.0 / per_time, -float(answer.fun) * self.time_ns

    def share_out(self) -> tuple[Mixture, FloatArray, float] | None:
        """The mixture, the price of a sequence of every length [n] ns, and the least time in which these contents
        do all of the workload; what they do not hold has a price."""
        import scipy.sparse as sparse
        from scipy.optimize import linprog

        nodes, columns, counts = len(self.graph.kinds), len(self.places), self.filling.contents.items.counts
        arcs, lengths = len(self.lags), len(counts)
        cost = np.concatenate([np.zeros(nodes + columns), _DEAR * self.filling.each / self.time_ns])
        cost[nodes - 1] = 1.0
        held = sparse.hstack([sparse.csr_matrix((lengths, nodes)), sparse.csr_matrix(self.rows.T.astype(float))])
        answer = linprog(
            cost,
            A_ub=sparse.bmat([[self._paths(), None], [-held, -sparse.eye(lengths)]], format="csr"),
            b_ub=-np.concatenate([self.lags, counts]),
            A_eq=sparse.hstack([self._whole(), sparse.csr_matrix((len(self.arcs), lengths))], format="csr"),
            b_eq=np.ones(len(self.arcs)),
            bounds=(0.0, None),
            method="highs",
        )
        if answer.status != 0:
            return None
        prices = np.maximum(0.0, -np.asarray(answer.ineqlin.marginals)[arcs:]) * self.time_ns
        return self._mixture(answer), prices, float(answer.fun) * self.time_ns

    def _mixture(self, answer: Any) -> Mixture:
        """That of the rows of the paths, the first ones of a program."""
        duals = -np.asarray(answer.ineqlin.marginals)[: len(self.lags)]
        return self.graph.mixture(np.maximum(0.0, duals), self.filling.window)

    def _whole(self) -> Any:
        """Rows by which every micro-batch is one."""
        import scipy.sparse as sparse

        nodes, columns = len(self.graph.kinds), len(self.places)
        where = (self.places, nodes + np.arange(columns))
        return sparse.csr_matrix((np.ones(columns), where), shape=(len(self.arcs), nodes + columns))

    def _paths(self) -> Any:
        """Rows by which what is behind an arc ends no earlier than it may."""
        import scipy.sparse as sparse

        graph, columns = self.graph, len(self.places)
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
        where = np.concatenate(at), np.concatenate(to)
        return sparse.csr_matrix((np.concatenate(values), where), shape=(arcs, nodes + columns))
