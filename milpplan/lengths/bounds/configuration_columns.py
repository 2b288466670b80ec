"""The programs of ``filling``: contents that join, and the mixtures, slopes and prices of those that are there.

``improved`` seeks the mixture and the slope by which least can be done within a time; ``shared_out`` those and a
price for the sequences of every length, by which some that are given take most.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from milpplan.groups.bounds import glop
from milpplan.groups.bounds.linear_bounds import PathBound
from milpplan.groups.bounds.path_mixtures import Graph, Mixture
from milpplan.lengths.bounds.configuration_lp import ConfigurationLP, PriceBound
from milpplan.simulation.layout_columns import FloatArray, IntArray

# Rounds of a program, how near what it finds and what is proved come, and rounds that may gain less than a share
# of that one after another.
_ROUNDS, NEAR, _IDLE, _LITTLE = 14, 3e-4, 2, 0.2
# How much longer a time is looked at where the least contents take too long, at a time and at most.
_LONGER, _MOST_TIMES = 1.03, 2.0
# How far mixtures go back to the best known one.
BACK = 0.5
# Rounds of a program with prices of all lengths, and how far from the best known ones these are sought: so far
# first, and at most; and where prices are known well.
_WHOLE_ROUNDS, _WIDTH, WIDEST, NARROW = 45, 0.1, 0.8, 0.02
# A micro-batch that holds less of a core, or of anything else, holds it or does not.
_DIVIDED = 0.05
# What is at the end of an interval of prices.
_INSIDE = 1.0 - 1e-6


@dataclass(frozen=True, eq=False)
class Start:
    """Where a search of prices [n] begins: with a mixture, and contents ``rows`` [v, n]."""

    mixture: Mixture
    prices: FloatArray
    rows: IntArray

    def mixed_with(self, other: Start) -> Start:
        """Part of the way to another."""
        prices = BACK * self.prices + (1.0 - BACK) * other.prices
        return Start(self.mixture.towards(other.mixture, 1.0 - BACK), prices, self.rows)


@dataclass(frozen=True, eq=False)
class Columns:
    """Contents ``rows`` [c, n] of micro-batches at ``places`` [c] of a window, and how much of each these are,
    ``parts`` [c]."""

    configuration: ConfigurationLP
    places: IntArray
    rows: IntArray
    shares: FloatArray

    @property
    def branch_candidate(self) -> int | None:
        """How far behind the window's core the micro-batch is that holds a core by half most nearly; none where
        each holds one or does not."""
        filling, core, window = self.configuration, self.configuration.pinned_item, self.configuration.window
        if core is None or window.fewest < window.number or any(window.open):
            return None
        held = core.is_held(self.rows, filling.pricing.items.sizes)
        parts = np.bincount(self.places[held], self.shares[held], window.number)
        behind = np.minimum(parts, 1.0 - parts)[window.ahead[1] + 1 :]
        place = int(behind.argmax()) if len(behind) else 0
        return place + 1 if len(behind) and behind[place] > _DIVIDED else None

    def shifted_to(self, to: ConfigurationLP) -> tuple[IntArray, IntArray]:
        """The same as far from the ends of another window, or from what it is around."""
        ends = [0, to.window.number - self.configuration.window.number]
        if to.pinned_item is not None:
            ends.append(to.window.ahead[1] - self.configuration.window.ahead[1])
        places = np.concatenate([self.places + end for end in ends])
        cores = np.tile(self.configuration.holds_pinned[self.places], len(ends))
        rows = np.tile(self.rows, (len(ends), 1))
        there = (places >= 0) & (places < to.window.number)
        there[there] = to.holds_pinned[places[there]] == cores[there]
        return places[there], rows[there]


def improved(
    filling: ConfigurationLP,
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
    kept = mixture
    best, found_rows = filling.prove_load_bound(mixture, slope)
    program = Program.started(filling, np.concatenate([rows, found_rows]), known, time_ns)
    idle = 0
    for _ in range(_ROUNDS):
        found = program.solve()
        while found is None and program.time_factor < _MOST_TIMES:
            # Not even what must be there is done in the time: what proves that is best for longer.
            program.time_factor *= _LONGER
            found = program.solve()
        if found is None:
            break
        mixture, slope, most = found
        left = best.within(time_ns)
        if left <= max(enough, most * (1.0 + NEAR) if program.time_factor == 1.0 else 0.0) or idle == _IDLE:
            break
        drawn = kept.towards(mixture, 1.0 - BACK)
        bound, rows = filling.prove_load_bound(drawn, BACK * best.slope + (1.0 - BACK) * slope)
        idle = 0 if bound.within(time_ns) < left * (1.0 - _LITTLE * NEAR) else idle + 1
        if bound.within(time_ns) < left:
            best, kept = bound, drawn
        program.add_columns(np.arange(len(rows)), rows)
    return best, kept, program.columns


def worths(
    filling: ConfigurationLP, start: Start, known: Columns | None, time_ns: float, deadline: float
) -> FloatArray:
    """What a sequence of every length [n] is worth, as a load, where the window does all of them in the least
    time. As far as rounds get until the ``deadline``: any will do."""
    needed = filling.pricing.items.counts.astype(np.float64)
    dearest = np.full(len(needed), np.inf)

    def value(bound: PriceBound) -> float:
        return bound.at(needed)

    found = optimise_prices(filling, needed, dearest, start, known, time_ns, value, deadline=deadline, near=True)
    return filling.sequence_loads if found is None else found[0].prices


def optimise_prices(
    filling: ConfigurationLP,
    needed: FloatArray,
    dearest: FloatArray,
    start: Start,
    known: Columns | None,
    time_ns: float,
    value: Callable[[PriceBound], float],
    enough: float = float("inf"),
    deadline: float = float("inf"),
    *,
    near: bool = False,
) -> tuple[PriceBound, Start, Columns] | None:
    """The bound of the most ``value``, up to ``enough`` of it, that is high for ``needed`` [n] sequences at
    prices of at most ``dearest`` [n], with its mixture, and the contents of the last program, which has a row for
    every length; none where that has no answer. Beginning with what is ``known`` of another window, until the
    ``deadline``.

    Prices are sought near the best known ones first, nearer where these are good ones (``near``), which spares
    most rounds, and further away where there are no better ones.
    """
    width = NARROW if near else _WIDTH
    program = Program.started(filling, start.rows, known, time_ns)
    best, rows = filling.prove_price_bound(start.mixture, start.prices)
    program.add_columns(np.arange(len(rows)), rows)
    drawn, solved = start, False
    for _ in range(_WHOLE_ROUNDS):
        low, high = (1.0 - width) * drawn.prices, np.minimum((1.0 + width) * drawn.prices, dearest)
        found = program.solve_prices(needed, low, high)
        if found is None:
            break
        solved = True
        new, most_ns = drawn.mixed_with(found[0]), found[1]
        bound, rows = filling.prove_price_bound(new.mixture, new.prices)
        better = value(bound) > value(best)
        if better:
            best, drawn = bound, new
        if most_ns <= best.at(needed) * (1.0 + NEAR):
            if inside(found[0].prices, low, high, dearest):
                break
            width *= 1.0 if better else 2.0
        if value(best) >= enough or time.perf_counter() > deadline or width > WIDEST:
            break
        program.add_columns(np.arange(len(rows)), rows)
    return (best, drawn, program.columns) if solved else None


def inside(prices: FloatArray, low: FloatArray, high: FloatArray, dearest: FloatArray | float = np.inf) -> bool:
    """Whether none of the prices [n] is at the end of its interval, but at the ``dearest``: others would be no
    better."""
    return bool(((prices * _INSIDE > low) & ((prices < high * _INSIDE) | (high >= dearest))).all())


class Program:
    """The program of the module over some contents, in units of the time."""

    def __init__(self, filling: ConfigurationLP, graph: Graph, time_ns: float) -> None:
        self.configuration, self.graph, self.time_ns = filling, graph, time_ns
        # How many times the time may be taken.
        self.time_factor = 1.0
        number, contents = filling.window.number, filling.pricing
        begin, end = filling.window.there
        # The least that every micro-batch may hold, but for a core.
        self.places = np.flatnonzero(~filling.holds_pinned)
        rows = np.zeros((number, len(contents.items.sizes)), dtype=np.int64)
        rows[begin:end, np.flatnonzero(contents.items.fits)[0]] = 1
        self.rows = rows[self.places]
        # Those that stand for any number hold any number of single sequences.
        self.merged = np.zeros(number, dtype=bool)
        self.merged[filling.window.merged] = True
        self.num_whole = int((~self.merged).sum())
        singles = np.diag(contents.items.fits.astype(np.int64))[contents.items.fits]
        kept, merged = ~self.merged[self.places], np.flatnonzero(self.merged)
        self.places = np.concatenate([self.places[kept], np.repeat(merged, len(singles))])
        self.rows = np.concatenate([self.rows[kept], np.tile(singles, (len(merged), 1))])
        micro_batch = graph.micro_batch[graph.heads]
        # What an arc and its head take of the times of contents; transfers of those that are there.
        self.parts = graph.parts
        self.parts[(micro_batch < begin) | (micro_batch >= end), 3] = 0.0
        self.used, self.shares = np.zeros(0, dtype=np.int64), np.zeros(0)
        self.arcs = [np.flatnonzero(micro_batch == place) for place in range(number)]

    @staticmethod
    def started(filling: ConfigurationLP, rows: IntArray, known: Columns | None, time_ns: float) -> Program:
        """Of some contents [v, n] (or several times so many), of what is ``known`` of another window, and of the
        fullest ones, so that time is what limits the load."""
        program = Program(filling, Graph.of(filling.num_stages, filling.window), time_ns)
        program.add_columns(np.arange(len(rows)) % filling.window.number, rows)
        program.add_columns(np.arange(filling.window.number), filling.fullest_contents)
        if known is not None:
            program.add_columns(*known.shifted_to(filling))
        return program

    def add_columns(self, places: IntArray, rows: IntArray) -> None:
        """Contents [c, n] of micro-batches at ``places`` [c], which their neighbours may have, too, but for those
        that these may not have."""
        filling, kinds = self.configuration, self.configuration.pin_states
        able = filling.allows(places, rows)
        places, rows = places[able], rows[able]
        for step in (-1, 0, 1):
            others = places + step
            there = (others >= 0) & (others < len(kinds))
            there[there] = (kinds[others[there]] == kinds[places[there]]) & ~self.merged[others[there]]
            self.places = np.append(self.places, others[there])
            self.rows = np.concatenate([self.rows, rows[there]])

    @property
    def columns(self) -> Columns:
        """Those of the last answer."""
        return Columns(self.configuration, self.places[self.used], self.rows[self.used], self.shares)

    def solve(self) -> tuple[Mixture, float, float] | None:
        """The mixture, the slope, and the load that these contents do at most; none where they take too long."""
        nodes, columns = len(self.graph.kinds), len(self.places)
        each = self.rows @ self.configuration.sequence_loads / self.time_ns
        ends = np.concatenate([np.full(nodes - 1, np.inf), [self.time_factor], np.full(columns, np.inf)])
        answer = glop.least(
            np.concatenate([np.zeros(nodes), -each]),
            (glop.Entries.of(*self.path_rows()), np.zeros(len(self.parts))),
            (self.convexity_rows(), np.ones(self.num_whole)),
            high=ends,
        )
        if answer is None:
            return None
        self._use(answer.values[nodes:])
        per_time = -float(answer.reduced[nodes - 1])
        if per_time <= 0.0:
            return None
        return self.mixture(answer.at_most), 1.0 / per_time, -answer.value * self.time_ns

    def solve_prices(self, needed: FloatArray, low: FloatArray, high: FloatArray) -> tuple[Start, float] | None:
        """The mixture and the prices of every length [n] ns, between ``low`` and ``high``, at which these contents
        take most for the ``needed`` [n] sequences, and that, ns: what they do not hold costs the high price, and
        what they hold beyond it is worth the low one."""
        nodes, columns = len(self.graph.kinds), len(self.places)
        arcs, lengths = len(self.parts), np.arange(len(needed))
        cost = np.concatenate([np.zeros(nodes), -self.rows @ low, high - low]) / self.time_ns
        cost[nodes - 1] = 1.0
        # Of what stands for any number of micro-batches at most all there is.
        ends, merged = np.full(len(cost), np.inf), self.merged[self.places]
        ends[nodes : nodes + columns][merged] = self.rows[merged] @ self.configuration.pricing.items.counts
        content, length = np.nonzero(self.rows)
        held = arcs + length, nodes + content, -self.rows[content, length].astype(np.float64)
        missing = arcs + lengths, nodes + columns + lengths, -np.ones(len(lengths))
        rows = glop.Entries.of(*self.path_rows(), held, missing)
        sides = -np.concatenate([np.zeros(arcs), needed])
        answer = glop.least(cost, (rows, sides), (self.convexity_rows(), np.ones(self.num_whole)), high=ends)
        if answer is None:
            return None
        self._use(answer.values[nodes : nodes + columns])
        prices = low + np.maximum(0.0, -answer.at_most[arcs:]) * self.time_ns
        most_ns = answer.value * self.time_ns + float(low @ needed)
        return Start(self.mixture(answer.at_most), prices, self.rows), most_ns

    def _use(self, shares: FloatArray) -> None:
        """The contents of an answer."""
        self.used = np.flatnonzero(shares > 0.0)
        self.shares = shares[self.used]

    def mixture(self, prices: FloatArray) -> Mixture:
        """That of the ``prices`` of rows, of which those of the paths are the first."""
        return self.graph.mixture(np.maximum(0.0, -prices[: len(self.parts)]), self.configuration.window)

    def convexity_rows(self) -> glop.Entries:
        """Rows by which every micro-batch is one, but for those that stand for any number."""
        kept, row = np.flatnonzero(~self.merged[self.places]), np.cumsum(~self.merged) - 1
        return glop.Entries(row[self.places[kept]], len(self.graph.kinds) + kept, np.ones(len(kept)))

    def path_rows(self) -> list[tuple[IntArray, IntArray, FloatArray]]:
        """Rows by which what is behind an arc ends no earlier than it may."""
        graph, nodes = self.graph, len(self.graph.kinds)
        arcs, inner = np.arange(len(graph.tails)), np.flatnonzero(graph.tails >= 0)
        times = self.configuration.pricing.times(self.rows) / self.time_ns
        merged = self.merged[self.places]
        times[merged, 0] = self.rows[merged] @ self.configuration.last_stage_ns / self.time_ns
        found = [(arcs, graph.heads, -np.ones(len(arcs))), (inner, graph.tails[inner], np.ones(len(inner)))]
        for place, own in enumerate(self.arcs):
            held = np.flatnonzero(self.places == place)
            taken = self.parts[own] @ times[held].T
            found.append((np.repeat(own, len(held)), np.tile(nodes + held, len(own)), taken.ravel()))
        return found
