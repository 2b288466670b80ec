"""Column generation for the configuration LP: mixtures, slopes and prices from the contents in the program.

``improved`` seeks the mixture and the slope that prove the tightest limit on the work within a time.
``optimise_prices`` seeks a mixture and a price for the sequences of every length that prove the longest time for
given sequences.

**Restricted master problem** for the dual values of sequences under one assignment of classes to replicas.

For every class c with k_c replicas some windows w are known. With shares y_w of the replicas and contents z as
above, scaled by these, the part theta of a workload n that is done within Z is at most

    max theta    subject to    sum_w (contents of w) >= theta n,    sum over w of c of y_w = k_c,
                               every path of w takes at most Z y_w.

Its dual is a value lambda for every length, lambda . n = 1, and a mixture of paths for every window. For any
values and mixtures a replica of window w does no more than V_w, as work by these values
(``ConfigurationLP.prove_price_bound``), so the assignment does no more than sum_c k_c max over w of c of V_w.
Windows that are not in the program may do more: these join.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from milpplan.lengths.bounds import Window, glop
from milpplan.lengths.bounds.micro_batch_pricing import FREE, HOLDS, WITHOUT, MicroBatchPricing, PinnedItem
from milpplan.lengths.bounds.pipeline_bounds import Graph, Mixture, PathBound
from milpplan.simulation import BoolArray, FloatArray, IntArray

Decisions = tuple[tuple[int, bool], ...]
"""Branching decisions: distance of a micro-batch behind the one with the pinned item, and whether it holds such an
item, too."""


@dataclass(frozen=True, slots=True)
class PriceBound:
    """Bound ``time >= constant + prices @ counts`` in ns, for all counts [n] up to the workload's."""

    constant: float
    prices: FloatArray

    def at(self, counts: FloatArray) -> float:
        """Return the bound of ``counts`` [n] sequences in ns."""
        return self.constant + float(self.prices @ counts)


@dataclass(frozen=True, eq=False)
class ConfigurationLP:
    """Configuration LP of a window of numbers of micro-batches.

    The maximum work of a replica within a time, with whole sequences in every micro-batch. For a pipeline with
    some number of micro-batches (``bounds.long_sequence``) let every micro-batch m be a mixture of contents
    x with shares z_mx, and its times the mixtures of theirs. The maximum work within a time Z is a linear program:

        max sum z_mx y(x)    subject to    sum_x z_mx = 1,    every path of mean times takes at most Z.

    Its dual is a mixture of paths and a slope s, the time of a unit of work. Any such pair proves

        time >= sum_m min_x (weights of m on the mixture . times of x - s y(x)) + s load

    for any contents of the micro-batches (``micro_batch_pricing`` solves the minimum over x), so nothing rests on
    the solver. The best contents for the program's duals join it as columns, until it gains nothing. The duals are
    drawn half way to the best known ones (smoothing), which saves rounds. Optional micro-batches may hold nothing.

    It is stronger than the programs over divisible loads (``bounds.long_sequence``): no line replaces the
    times of products, no ring is both hidden and exposed, and last tiles count in full.
    """

    pricing: MicroBatchPricing
    """Pricing problem of the micro-batches."""
    sequence_loads: FloatArray
    """Work that a sequence adds, [n] ns."""
    last_stage_ns: FloatArray
    """Minimum time that a sequence adds to the last stage, [n]."""
    num_stages: int
    window: Window
    pinned_item: PinnedItem | None
    """Item that the micro-batch in the middle of the window holds, if any."""
    decisions: Decisions = ()
    """Branching decisions on other micro-batches."""

    @property
    def pin_states(self) -> IntArray:
        """State of each micro-batch, [v]: it must hold, may hold or must not hold the pinned item."""
        states = np.full(self.window.number, FREE)
        if self.pinned_item is not None:
            index = self.window.ahead[1]
            states[:index] = WITHOUT if self.pinned_item.foremost else FREE
            states[index] = HOLDS
            for behind, is_held in self.decisions:
                states[index + behind] = HOLDS if is_held else WITHOUT
        return states

    @property
    def holds_pinned(self) -> BoolArray:
        """Mask of the micro-batches that must hold the pinned item, [v]."""
        return np.asarray(self.pin_states == HOLDS)

    def allows(self, places: IntArray, rows: IntArray) -> BoolArray:
        """Return which contents [c, n] the micro-batches with index ``places`` [c] may have."""
        pricing, states = self.pricing, self.pin_states[places]
        has_item = (self.pinned_item or PinnedItem()).is_held(rows, pricing.items.sizes)
        fits = rows @ pricing.items.sizes <= pricing.base.shape[-1]
        return np.asarray(fits & np.where(has_item, states != WITHOUT, states != HOLDS))

    def best_contents(self, weights: FloatArray, prices: FloatArray) -> tuple[FloatArray, IntArray]:
        """Return ``MicroBatchPricing.best_contents`` of the window's micro-batches."""
        return self.pricing.best_contents(weights, prices, self.pin_states, self.pinned_item or PinnedItem())

    @property
    def fullest_contents(self) -> IntArray:
        """Contents of the maximum work, as far as each micro-batch may hold them, [v, n]."""
        states, state_index = np.unique(self.pin_states, return_inverse=True)
        contents = self.pricing.best_contents(
            np.zeros((6, len(states))), self.sequence_loads, states, self.pinned_item or PinnedItem()
        )[1]
        return contents[state_index]

    def prove_load_bound(self, mixture: Mixture, slope: float) -> tuple[PathBound, IntArray]:
        """Return the bound that a mixture proves at a slope, and the best contents [v, n]."""
        # Merged micro-batches stand for any number: their work takes at least as long on the last stage.
        fits = self.pricing.items.fits
        min_ratio = float((self.last_stage_ns[fits] / self.sequence_loads[fits]).min())
        slope = min(slope, float(mixture.flows[0, self.window.merged].min(initial=np.inf)) * min_ratio)
        bound, rows = self.prove_price_bound(mixture, slope * self.sequence_loads)
        return PathBound(bound.constant, slope), rows

    def prove_price_bound(self, mixture: Mixture, prices: FloatArray) -> tuple[PriceBound, IntArray]:
        """Return the bound that a mixture proves at ``prices`` [n] of the sequences, and the best contents [v,
        n]."""
        begin, end = self.window.there
        flows, merged = mixture.flows, self.window.merged
        values, rows = self.best_contents(mixture.weights, prices)
        # The micro-batches outside of the range are optional.
        values[:begin] = np.minimum(0.0, values[:begin])
        values[end:] = np.minimum(0.0, values[end:])
        # Merged micro-batches hold every sequence with a positive value, at most all of them.
        excess = np.maximum(0.0, prices - flows[0, merged, None] * self.last_stage_ns)[:, self.pricing.items.fits]
        values[merged] = -excess @ self.pricing.items.counts[self.pricing.items.fits]
        return PriceBound(float(values.sum()), prices), rows


# Maximum number of rounds, relative gap at which they end, number of idle rounds, and the share of that gap that a
# round must gain.
_ROUNDS, NEAR, _IDLE, _LITTLE = 14, 3e-4, 2, 0.2
# Factor on the time if the smallest contents take too long, and its maximum.
_LONGER, _MOST_TIMES = 1.03, 2.0
# Weight of the best known point in the smoothing of duals.
BACK = 0.5
# Maximum number of rounds with prices of all lengths, and relative width of the box around the best prices: first,
# maximum, and near good prices.
_WHOLE_ROUNDS, _WIDTH, WIDEST, NARROW = 45, 0.1, 0.8, 0.02
# Share of a pinned item in a micro-batch that counts as integral.
_DIVIDED = 0.05
# Factor within which a price is at the end of its box.
_INSIDE = 1.0 - 1e-6


@dataclass(frozen=True, eq=False)
class Start:
    """Start of a search of prices [n]: a mixture and contents ``rows`` [v, n]."""

    mixture: Mixture
    prices: FloatArray
    rows: IntArray

    def mixed_with(self, other: Start) -> Start:
        """Return the point between this one and another."""
        prices = BACK * self.prices + (1.0 - BACK) * other.prices
        return Start(self.mixture.towards(other.mixture, 1.0 - BACK), prices, self.rows)


@dataclass(frozen=True, eq=False)
class Columns:
    """Columns of a solved program: contents ``rows`` [c, n] of the micro-batches ``places`` [c], with their
    ``shares`` [c]."""

    configuration: ConfigurationLP
    places: IntArray
    rows: IntArray
    shares: FloatArray

    @property
    def branch_candidate(self) -> int | None:
        """Distance behind the pinned micro-batch of the one whose share of pinned items is nearest to a half; None
        if all are integral."""
        configuration, pinned, window = (
            self.configuration,
            self.configuration.pinned_item,
            self.configuration.window,
        )
        if pinned is None or window.fewest < window.number or any(window.open):
            return None
        has_item = pinned.is_held(self.rows, configuration.pricing.items.sizes)
        item_shares = np.bincount(self.places[has_item], self.shares[has_item], window.number)
        fractionality = np.minimum(item_shares, 1.0 - item_shares)[window.ahead[1] + 1 :]
        index = int(fractionality.argmax()) if len(fractionality) else 0
        return index + 1 if len(fractionality) and fractionality[index] > _DIVIDED else None

    def shifted_to(self, other: ConfigurationLP) -> tuple[IntArray, IntArray]:
        """Return the columns at equal distances from the ends of another window, or from its pinned
        micro-batch."""
        ends = [0, other.window.number - self.configuration.window.number]
        if other.pinned_item is not None:
            ends.append(other.window.ahead[1] - self.configuration.window.ahead[1])
        places = np.concatenate([self.places + end for end in ends])
        holds_pinned = np.tile(self.configuration.holds_pinned[self.places], len(ends))
        rows = np.tile(self.rows, (len(ends), 1))
        is_valid = (places >= 0) & (places < other.window.number)
        is_valid[is_valid] = other.holds_pinned[places[is_valid]] == holds_pinned[is_valid]
        return places[is_valid], rows[is_valid]


def improved(
    configuration: ConfigurationLP,
    mixture: Mixture,
    slope: float,
    rows: IntArray,
    other_columns: Columns | None,
    time_ns: float,
    cutoff_load: float,
) -> tuple[PathBound, Mixture, Columns]:
    """Improve a mixture by column generation, until the work within the time is below ``cutoff_load`` or it
    stalls.

    Args:
        configuration: the configuration LP.
        mixture: first mixture.
        slope: first slope.
        rows: first contents.
        other_columns: columns of another window.
        time_ns: time of the replica.
        cutoff_load: work at which to stop.

    Returns:
        The bound, its mixture and the columns of the last program.
    """
    best_mixture = mixture
    best, new_rows = configuration.prove_load_bound(mixture, slope)
    program = Program.started(configuration, np.concatenate([rows, new_rows]), other_columns, time_ns)
    num_idle = 0
    for _ in range(_ROUNDS):
        solution = program.solve()
        while solution is None and program.time_factor < _MOST_TIMES:
            # The smallest contents take too long: a longer time still gives useful duals.
            program.time_factor *= _LONGER
            solution = program.solve()
        if solution is None:
            break
        mixture, slope, lp_load = solution
        max_load = best.within(time_ns)
        if (
            max_load <= max(cutoff_load, lp_load * (1.0 + NEAR) if program.time_factor == 1.0 else 0.0)
            or num_idle == _IDLE
        ):
            break
        smoothed = best_mixture.towards(mixture, 1.0 - BACK)
        bound, rows = configuration.prove_load_bound(smoothed, BACK * best.slope + (1.0 - BACK) * slope)
        num_idle = 0 if bound.within(time_ns) < max_load * (1.0 - _LITTLE * NEAR) else num_idle + 1
        if bound.within(time_ns) < max_load:
            best, best_mixture = bound, smoothed
        program.add_columns(np.arange(len(rows)), rows)
    return best, best_mixture, program.columns


def worths(
    configuration: ConfigurationLP, start: Start, other_columns: Columns | None, time_ns: float, deadline: float
) -> FloatArray:
    """Return values of the sequences as work, [n], by which the window does the whole workload as slowly as
    possible, as far as rounds get until the ``deadline``."""
    needed = configuration.pricing.items.counts.astype(np.float64)
    max_prices = np.full(len(needed), np.inf)

    def value(bound: PriceBound) -> float:
        return bound.at(needed)

    solution = optimise_prices(
        configuration, needed, max_prices, start, other_columns, time_ns, value, deadline=deadline, near=True
    )
    return configuration.sequence_loads if solution is None else solution[0].prices


def optimise_prices(
    configuration: ConfigurationLP,
    needed: FloatArray,
    max_prices: FloatArray,
    start: Start,
    other_columns: Columns | None,
    time_ns: float,
    value: Callable[[PriceBound], float],
    cutoff: float = float("inf"),
    deadline: float = float("inf"),
    *,
    near: bool = False,
) -> tuple[PriceBound, Start, Columns] | None:
    """Seek prices of the sequences that prove the longest time, by column generation with a row for every length.

    Prices are sought near the best known ones first, nearer if these are good (``near``), which saves most rounds,
    and further away if there are no better ones.

    Args:
        configuration: the configuration LP.
        needed: sequences for which the bound is tight, [n].
        max_prices: maximum prices, [n].
        start: first mixture, prices and contents.
        other_columns: columns of another window.
        time_ns: unit of time of the program.
        value: value of a bound.
        cutoff: value at which to stop.
        deadline: of ``perf_counter``.
        near: whether the first prices are good.

    Returns:
        The bound of the highest value, its mixture and prices, and the columns of the last program; None without a
            solution.
    """
    width = NARROW if near else _WIDTH
    program = Program.started(configuration, start.rows, other_columns, time_ns)
    best, rows = configuration.prove_price_bound(start.mixture, start.prices)
    program.add_columns(np.arange(len(rows)), rows)
    smoothed, is_solved = start, False
    for _ in range(_WHOLE_ROUNDS):
        low, high = (1.0 - width) * smoothed.prices, np.minimum((1.0 + width) * smoothed.prices, max_prices)
        solution = program.solve_prices(needed, low, high)
        if solution is None:
            break
        is_solved = True
        candidate, lp_ns = smoothed.mixed_with(solution[0]), solution[1]
        bound, rows = configuration.prove_price_bound(candidate.mixture, candidate.prices)
        is_better = value(bound) > value(best)
        if is_better:
            best, smoothed = bound, candidate
        if lp_ns <= best.at(needed) * (1.0 + NEAR):
            if inside(solution[0].prices, low, high, max_prices):
                break
            width *= 1.0 if is_better else 2.0
        if value(best) >= cutoff or time.perf_counter() > deadline or width > WIDEST:
            break
        program.add_columns(np.arange(len(rows)), rows)
    return (best, smoothed, program.columns) if is_solved else None


def inside(prices: FloatArray, low: FloatArray, high: FloatArray, max_prices: FloatArray | float = np.inf) -> bool:
    """Return whether all prices [n] are inside of their box, or at their absolute maximum, so that a wider box
    gains nothing."""
    return bool(((prices * _INSIDE > low) & ((prices < high * _INSIDE) | (high >= max_prices))).all())


class Program:
    """The restricted program over some contents, in units of the time."""

    def __init__(self, configuration: ConfigurationLP, graph: Graph, time_ns: float) -> None:
        self.configuration, self.graph, self.time_ns = configuration, graph, time_ns
        # Factor on the time.
        self.time_factor = 1.0
        number, pricing = configuration.window.number, configuration.pricing
        begin, end = configuration.window.there
        # The smallest contents of every micro-batch, except pinned ones.
        self.places = np.flatnonzero(~configuration.holds_pinned)
        rows = np.zeros((number, len(pricing.items.sizes)), dtype=np.int64)
        rows[begin:end, np.flatnonzero(pricing.items.fits)[0]] = 1
        self.rows = rows[self.places]
        # Merged micro-batches hold any number of single sequences.
        self.merged = np.zeros(number, dtype=bool)
        self.merged[configuration.window.merged] = True
        self.num_whole = int((~self.merged).sum())
        singles = np.diag(pricing.items.fits.astype(np.int64))[pricing.items.fits]
        is_kept, merged = ~self.merged[self.places], np.flatnonzero(self.merged)
        self.places = np.concatenate([self.places[is_kept], np.repeat(merged, len(singles))])
        self.rows = np.concatenate([self.rows[is_kept], np.tile(singles, (len(merged), 1))])
        micro_batch = graph.micro_batch[graph.heads]
        # Weights of an arc and its head on the times of contents; optional micro-batches have no transfers.
        self.parts = graph.parts
        self.parts[(micro_batch < begin) | (micro_batch >= end), 3] = 0.0
        self.used, self.shares = np.zeros(0, dtype=np.int64), np.zeros(0)
        self.arcs = [np.flatnonzero(micro_batch == index) for index in range(number)]

    @staticmethod
    def started(
        configuration: ConfigurationLP, rows: IntArray, other_columns: Columns | None, time_ns: float
    ) -> Program:
        """Build the program with contents [v, n] (or several of each), those of another window, and the fullest
        ones, so that time limits the work."""
        program = Program(configuration, Graph.of(configuration.num_stages, configuration.window), time_ns)
        program.add_columns(np.arange(len(rows)) % configuration.window.number, rows)
        program.add_columns(np.arange(configuration.window.number), configuration.fullest_contents)
        if other_columns is not None:
            program.add_columns(*other_columns.shifted_to(configuration))
        return program

    def add_columns(self, places: IntArray, rows: IntArray) -> None:
        """Add contents [c, n] of the micro-batches ``places`` [c] and of their neighbours, as far as they may have
        them."""
        configuration, pin_states = self.configuration, self.configuration.pin_states
        is_allowed = configuration.allows(places, rows)
        places, rows = places[is_allowed], rows[is_allowed]
        for step in (-1, 0, 1):
            neighbours = places + step
            is_valid = (neighbours >= 0) & (neighbours < len(pin_states))
            is_valid[is_valid] = (pin_states[neighbours[is_valid]] == pin_states[places[is_valid]]) & ~self.merged[
                neighbours[is_valid]
            ]
            self.places = np.append(self.places, neighbours[is_valid])
            self.rows = np.concatenate([self.rows, rows[is_valid]])

    @property
    def columns(self) -> Columns:
        """Columns of the last solution."""
        return Columns(self.configuration, self.places[self.used], self.rows[self.used], self.shares)

    def solve(self) -> tuple[Mixture, float, float] | None:
        """Return the mixture, the slope, and the maximum work of these contents; None if they take too long."""
        nodes, columns = len(self.graph.kinds), len(self.places)
        loads = self.rows @ self.configuration.sequence_loads / self.time_ns
        high = np.concatenate([np.full(nodes - 1, np.inf), [self.time_factor], np.full(columns, np.inf)])
        answer = glop.least(
            np.concatenate([np.zeros(nodes), -loads]),
            (glop.Entries.of(*self.path_rows()), np.zeros(len(self.parts))),
            (self.convexity_rows(), np.ones(self.num_whole)),
            high=high,
        )
        if answer is None:
            return None
        self._use(answer.values[nodes:])
        per_time = -float(answer.reduced[nodes - 1])
        if per_time <= 0.0:
            return None
        return self.mixture(answer.at_most), 1.0 / per_time, -answer.value * self.time_ns

    def solve_prices(self, needed: FloatArray, low: FloatArray, high: FloatArray) -> tuple[Start, float] | None:
        """Return the mixture and the prices [n] between ``low`` and ``high`` by which these contents take longest
        for ``needed`` [n] sequences, and that time in ns.

        A shortage costs the high price, and a surplus is worth the low one.
        """
        nodes, columns = len(self.graph.kinds), len(self.places)
        arcs, lengths = len(self.parts), np.arange(len(needed))
        cost = np.concatenate([np.zeros(nodes), -self.rows @ low, high - low]) / self.time_ns
        cost[nodes - 1] = 1.0
        # Merged micro-batches hold at most all sequences.
        upper, merged = np.full(len(cost), np.inf), self.merged[self.places]
        upper[nodes : nodes + columns][merged] = self.rows[merged] @ self.configuration.pricing.items.counts
        content, length = np.nonzero(self.rows)
        held_entries = arcs + length, nodes + content, -self.rows[content, length].astype(np.float64)
        shortage_entries = arcs + lengths, nodes + columns + lengths, -np.ones(len(lengths))
        rows = glop.Entries.of(*self.path_rows(), held_entries, shortage_entries)
        sides = -np.concatenate([np.zeros(arcs), needed])
        answer = glop.least(cost, (rows, sides), (self.convexity_rows(), np.ones(self.num_whole)), high=upper)
        if answer is None:
            return None
        self._use(answer.values[nodes : nodes + columns])
        prices = low + np.maximum(0.0, -answer.at_most[arcs:]) * self.time_ns
        time_ns = answer.value * self.time_ns + float(low @ needed)
        return Start(self.mixture(answer.at_most), prices, self.rows), time_ns

    def _use(self, shares: FloatArray) -> None:
        """Record the contents of a solution."""
        self.used = np.flatnonzero(shares > 0.0)
        self.shares = shares[self.used]

    def mixture(self, prices: FloatArray) -> Mixture:
        """Return the mixture of the rows' dual values, of which those of the paths come first."""
        return self.graph.mixture(np.maximum(0.0, -prices[: len(self.parts)]), self.configuration.window)

    def convexity_rows(self) -> glop.Entries:
        """Return the rows by which the shares of every micro-batch add up to one, except for merged ones."""
        columns, row = np.flatnonzero(~self.merged[self.places]), np.cumsum(~self.merged) - 1
        return glop.Entries(row[self.places[columns]], len(self.graph.kinds) + columns, np.ones(len(columns)))

    def path_rows(self) -> list[tuple[IntArray, IntArray, FloatArray]]:
        """Return the rows by which the head of an arc ends no earlier than its tail plus the work between."""
        graph, nodes = self.graph, len(self.graph.kinds)
        arcs, inner = np.arange(len(graph.tails)), np.flatnonzero(graph.tails >= 0)
        times = self.configuration.pricing.times(self.rows) / self.time_ns
        merged = self.merged[self.places]
        times[merged, 0] = self.rows[merged] @ self.configuration.last_stage_ns / self.time_ns
        entries = [(arcs, graph.heads, -np.ones(len(arcs))), (inner, graph.tails[inner], np.ones(len(inner)))]
        for index, own_arcs in enumerate(self.arcs):
            columns = np.flatnonzero(self.places == index)
            weighted = self.parts[own_arcs] @ times[columns].T
            entries.append(
                (np.repeat(own_arcs, len(columns)), np.tile(nodes + columns, len(own_arcs)), weighted.ravel())
            )
        return entries


# Maximum number of rounds, and the minimum ratio of a window's flow to the one before.
_MASTER_ROUNDS, _LEAST_FLOW = 60, 0.1


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
    for _ in range(_MASTER_ROUNDS):
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
