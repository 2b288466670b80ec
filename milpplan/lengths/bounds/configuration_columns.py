"""Column generation for the configuration LP: mixtures, slopes and prices from the contents in the program.

``improved`` seeks the mixture and the slope that prove the tightest limit on the work within a time.
``optimise_prices`` seeks a mixture and a price for the sequences of every length that prove the longest time for
given sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from milpplan.lengths.bounds import Window, glop
from milpplan.lengths.bounds.micro_batch_pricing import MicroBatchPricing, PinnedItem
from milpplan.lengths.bounds.pipeline_bounds import Graph, Mixture, PathBound
from milpplan.lengths.deadline import NEVER, Deadline
from milpplan.lengths.search_parameters import PARAMETERS, SOLVER_TOLERANCE
from milpplan.simulation import BoolArray, FloatArray, IntArray


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

    @property
    def holds_pinned(self) -> BoolArray:
        """Mask of the micro-batches that must hold the pinned item, [v]."""
        place = self.window.ahead[1] if self.pinned_item is not None else -1
        return np.asarray(np.arange(self.window.number) == place)

    def allows(self, places: IntArray, rows: IntArray) -> BoolArray:
        """Return which contents [c, n] the micro-batches with index ``places`` [c] may have."""
        pricing = self.pricing
        has_item = (self.pinned_item or PinnedItem()).is_held(rows, pricing.items.sizes)
        fits = rows @ pricing.items.sizes <= pricing.base.shape[-1]
        return np.asarray(fits & (has_item | ~self.holds_pinned[places]))

    def best_contents(self, weights: FloatArray, prices: FloatArray) -> tuple[FloatArray, IntArray]:
        """Return ``MicroBatchPricing.best_contents`` of the window's micro-batches."""
        return self.pricing.best_contents(weights, prices, self.holds_pinned, self.pinned_item or PinnedItem())

    @property
    def fullest_contents(self) -> IntArray:
        """Contents of the maximum work, as far as each micro-batch may hold them, [v, n]."""
        states, state_index = np.unique(self.holds_pinned, return_inverse=True)
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


@dataclass(frozen=True, eq=False)
class Start:
    """Start of a search of prices [n]: a mixture and contents ``rows`` [v, n]."""

    mixture: Mixture
    prices: FloatArray
    rows: IntArray

    def mixed_with(self, other: Start) -> Start:
        """Return the point between this one and another."""
        back = PARAMETERS.smoothing
        prices = back * self.prices + (1.0 - back) * other.prices
        return Start(self.mixture.towards(other.mixture, 1.0 - back), prices, self.rows)


@dataclass(frozen=True, eq=False)
class Columns:
    """Columns of a solved program: contents ``rows`` [c, n] of the micro-batches ``places`` [c], with their
    ``shares`` [c]."""

    configuration: ConfigurationLP
    places: IntArray
    rows: IntArray
    shares: FloatArray

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
    num_idle, near, back = 0, PARAMETERS.configuration_gap, PARAMETERS.smoothing
    for _ in range(PARAMETERS.configuration_rounds):
        solution = program.solve()
        while solution is None and program.time_factor < 2.0:
            # The smallest contents take too long: a longer time still gives useful duals.
            program.time_factor *= 1.03
            solution = program.solve()
        if solution is None:
            break
        mixture, slope, lp_load = solution
        max_load = best.within(time_ns)
        if (
            max_load <= max(cutoff_load, lp_load * (1.0 + near) if program.time_factor == 1.0 else 0.0)
            or num_idle == 2
        ):
            break
        smoothed = best_mixture.towards(mixture, 1.0 - back)
        bound, rows = configuration.prove_load_bound(smoothed, back * best.slope + (1.0 - back) * slope)
        # A round that gains less than a fifth of the gap is idle.
        num_idle = 0 if bound.within(time_ns) < max_load * (1.0 - 0.2 * near) else num_idle + 1
        if bound.within(time_ns) < max_load:
            best, best_mixture = bound, smoothed
        program.add_columns(np.arange(len(rows)), rows)
    return best, best_mixture, program.columns


def optimise_prices(
    configuration: ConfigurationLP,
    needed: FloatArray,
    max_prices: FloatArray,
    start: Start,
    other_columns: Columns | None,
    time_ns: float,
    value: Callable[[PriceBound], float],
    cutoff: float = float("inf"),
    deadline: Deadline = NEVER,
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
        deadline: end of the search.
        near: whether the first prices are good.

    Returns:
        The bound of the highest value, its mixture and prices, and the columns of the last program; None without a
            solution.
    """
    # Relative width of the box around the best prices; one that gains nothing doubles, up to 0.8.
    width = PARAMETERS.price_width / 5 if near else PARAMETERS.price_width
    program = Program.started(configuration, start.rows, other_columns, time_ns)
    best, rows = configuration.prove_price_bound(start.mixture, start.prices)
    program.add_columns(np.arange(len(rows)), rows)
    smoothed, is_solved = start, False
    for _ in range(PARAMETERS.price_rounds):
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
        if lp_ns <= best.at(needed) * (1.0 + PARAMETERS.configuration_gap):
            if _inside(solution[0].prices, low, high, max_prices):
                break
            width *= 1.0 if is_better else 2.0
        if value(best) >= cutoff or deadline.passed or width > 0.8:
            break
        program.add_columns(np.arange(len(rows)), rows)
    return (best, smoothed, program.columns) if is_solved else None


def _inside(
    prices: FloatArray, low: FloatArray, high: FloatArray, max_prices: FloatArray | float = np.inf
) -> bool:
    """Return whether all prices [n] are inside of their box, or at their absolute maximum, so that a wider box
    gains nothing."""
    inside = 1.0 - SOLVER_TOLERANCE
    return bool(((prices * inside > low) & ((prices < high * inside) | (high >= max_prices))).all())


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
        configuration, holds_pinned = self.configuration, self.configuration.holds_pinned
        is_allowed = configuration.allows(places, rows)
        places, rows = places[is_allowed], rows[is_allowed]
        for step in (-1, 0, 1):
            neighbours = places + step
            is_valid = (neighbours >= 0) & (neighbours < len(holds_pinned))
            is_valid[is_valid] = holds_pinned[neighbours[is_valid]] == holds_pinned[places[is_valid]]
            is_valid[is_valid] &= ~self.merged[neighbours[is_valid]]
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
