"""Lower bound of a replica's time if one of its micro-batches holds the longest sequence.

However the sequences are packed, some micro-batch has at least the load of the longest sequence on every stage.
The other micro-batches cannot all be as long, so stages wait around it, and more so the shorter they are.
``pipeline_bounds.Window`` bounds that for ranges of micro-batches ahead of it and behind it. Boxes cover all
pairs of numbers: from a to a' ahead, from c to c' behind. A box has the bound of its window, or the
``LoadBound`` of its total number; boxes with the smallest bound get programs for their windows, then
are halved. Of many micro-batches on one side only the nearest ones are in the window: the others count for their
work on the last stage, where paths begin or end. Their load is not limited, so a mixture's slope is at most their
weight.

Programs distinguish two kinds of sequences: around a long one, with the smallest forward share on the other
stages, are many short ones with a larger share.

The time of a replica is at least the minimum over the boxes, each linear in the load: a concave function again
(``LongSequenceBound``).

**A group.** With f this function of the replica with the long sequence and h that of the others, D replicas do at
most C(Z) = f^-1(Z) + (D - 1) h^-1(Z) within Z, however they share the work. So a group with the mean load Y takes
at least the Z of C(Z) = D Y (``group_ns``). Inverses of concave rising functions are convex, so C is, and this Z
is
concave in Y: between two loads it is above its chord.

**Last stage**: lower bound of a pipeline's time for a workload, whatever its micro-batches, where the last stage
has more work (``LoadBound``).

A replica with v micro-batches of loads y_m (time on the last stage, forward and backward together, without the
constant of a micro-batch) is a longest path: the last stage runs forward and backward of a micro-batch at once,
the others take at least the shares phi and beta of y_m. The best real loads of a given sum Y are a linear program,
and its dual a mixture of paths, one unit of flow along the arcs. With w_m the weight of micro-batch m on
that mixture,

    time >= lags and constants on the mixture + sum_m w_m y_m >= constant_v + slope_v Y,    slope_v = min_m w_m,

for every packing into v micro-batches: the time is at least the length of every path. Any flow of one
unit gives a bound, so nothing rests on the solver. (The form of ``pipeline_bounds``, for stages that differ.)

**Any number.** A replica with v micro-batches, u <= v <= w, runs the work of a replica with w micro-batches but
for the last w - v, in the same order. Take the graph of w without the arcs between stages of the forwards after u,
and a path in it: its part on the v micro-batches lies on a path of theirs. (On a stage it leaves some work out;
from stage to stage it goes forward with one of the first u, or backward; and after the backward of a missing
micro-batch no work of the replica follows.) So a mixture of these paths is a bound for all of u to w: constants
and links count for the first u only, and the slope is the minimum weight of all w. ``MicroBatchCountRange`` holds
such a bound. A range from a larger u to the same w has all these paths, so the mixture holds for it, with more
constants: a range that ends where a wider one ends needs no program of its own. For all larger numbers, the last
stage's work and constants, after the shortest ramp, are the bound.

With time reversed, this holds at the other end: for v of w micro-batches without the first w - v, backwards of
micro-batches that may be missing do not depend on the stage behind. (All work before the forward of a missing
micro-batch is missing, too.) So a ``Window`` around one micro-batch has from a to a' micro-batches ahead of it and
from c to c' behind it; and if that micro-batch has a load of at least l, and weight w on the mixture, the bound is
higher by (w - slope) l.

**Kinds.** Short sequences give the stages before the last more forward work for each second of the last stage,
long ones more backward work. With phi_k and beta_k of sequence k a mixture weighs w_mk on it in micro-batch m,
linear in these, so w_m = min over k is the minimum over the corners of all pairs: higher than with both minima.

**Capacity.** The tokens of a micro-batch are bounded, so j micro-batches hold at most the load K_j of the
workload's densest sequences that fit there, the last one cut. K is concave in j, and with the weights ascending

    sum_m w_m y_m >= s Y - sum_j max(0, s - w_j) (K_j - K_{j-1})        for every s:

the micro-batches of smallest weight cannot take more than their K_j. s is chosen for a load, and the bound holds
for all loads. The programs themselves only bound each micro-batch by an even share of the K_j that the load needs.

**Any pipeline.** A mixture is a bound whatever the shares, constants and links are; only its tightness depends on
them. So programs are solved for pipelines without constants, of rounded shares, once for all strategies; the
ranges with the smallest bound are halved, and get programs of their own with ``exact``.

**Any load.** The slowest of D replicas takes at least the time of the one with the largest load, which is at least
the mean, and every bound grows with the load. So Z >= h(Y / D) with h the minimum of the ranges' bounds, a concave
function: between two loads it is above its chord (``chord``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np

from milpplan.lengths.bounds import glop as linear
from milpplan.lengths.bounds.pipeline_bounds import (
    Graph,
    Mixture,
    PathBound,
    StageLoads,
    Window,
    loads_within,
)
from milpplan.lengths.deadline import counted_cache
from milpplan.lengths.search_parameters import PARAMETERS, SOLVER_TOLERANCE
from milpplan.lengths.tabled import FloatArray

# Numbers of micro-batches from here on have no program; and the numbers at which ranges begin.
MAX_MICRO_BATCHES = 129
_FIRSTS = (1, 2, 3, 5, 9, 17, 33, 65, MAX_MICRO_BATCHES)
# Numbers of full micro-batches to which shared programs are rounded.
_FULL = (0, 1, 2, 3, 4, 6, 8, 11, 16, 22, 32, 45, 64, 90, 128)


def best_mixture(stages: StageLoads, num_stages: int, window: Window, load: float, least: float = 0.0) -> Mixture:
    """Find the mixture with the highest bound for a ``load`` in a window.

    ``least`` is the part of the load in the micro-batch that the window is around.
    """
    graph = Graph.of(num_stages, window)
    answer = _program(stages, graph, window, load, least)
    arcs = len(graph.tails)
    duals = np.ones(arcs) if answer is None else -answer.at_most[:arcs]
    return graph.mixture(np.maximum(duals, 0.0), window)


def solved_window(
    stages: StageLoads, num_stages: int, window: Window, load: float, least: float = 0.0
) -> tuple[float, FloatArray, Mixture] | None:
    """Find the minimum time of a ``load`` in real parts.

    ``least`` is the minimum load of the micro-batch that the window is around.

    Returns:
        The time, the parts, [v] ns, and the mixture that proves them; None if the load does not fit.
    """
    graph = Graph.of(num_stages, window)
    answer = _program(stages, graph, window, load, least)
    if answer is None:
        return None
    parts = answer.values[-window.number * len(stages.kinds) :].reshape(-1, window.number).sum(axis=0)
    mixture = graph.mixture(np.maximum(0.0, -answer.at_most[: len(graph.tails)]), window)
    return answer.value * load, parts * load, mixture


def _program(
    stages: StageLoads, graph: Graph, window: Window, load: float, least: float
) -> linear.LinearSolution | None:
    """Solve the linear program of the module; its first rows are the graph's arcs."""
    number, begin = window.number, len(graph.kinds)
    present = np.zeros(number)
    present[slice(*window.there)] = 1.0
    kinds, parts, in_window = stages.kinds, graph.parts, present[graph.micro_batch[graph.heads]]
    parts[:, 3] *= in_window
    constants = parts @ stages.constants * in_window
    arcs, load_indices = np.arange(len(graph.tails)), np.arange(number * len(kinds))
    times, inner = kinds @ parts.T, graph.tails >= 0
    around, share = window.ahead[1], min(1.0, least / load)
    full = stages.full(load)
    cap = max(1.0 / full, 1.0 / number, share) * (1.0 + SOLVER_TOLERANCE) if full > 0 else 1.0
    caps = np.full(number, cap)
    caps[window.merged] = 1.0
    # end(tail) + constants + sum over kinds of weight * y <= end(head), in units of the load.
    columns = begin + number * np.arange(len(kinds))[:, None] + graph.micro_batch[graph.heads]
    rows = [
        (arcs, graph.heads, -np.ones(len(arcs))),
        (arcs[inner], graph.tails[inner], np.ones(int(inner.sum()))),
        (np.tile(arcs, len(kinds)), columns.ravel(), times.ravel()),
    ]
    right_sides, low, high = (
        -constants / load,
        np.zeros(begin + len(load_indices)),
        np.full(begin + len(load_indices), np.inf),
    )
    if len(kinds) == 1:
        low[begin + around], high[begin:] = share, caps
    else:
        # A micro-batch may hold sequences of every kind.
        micro_batch_of = load_indices % number
        rows.append((len(arcs) + micro_batch_of, begin + load_indices, np.ones(len(load_indices))))
        around_columns = begin + load_indices[micro_batch_of == around]
        rows.append(
            (np.full(len(around_columns), len(arcs) + number), around_columns, -np.ones(len(around_columns)))
        )
        right_sides = np.concatenate([right_sides, caps, [-share]])
    cost = np.zeros(len(low))
    cost[begin - 1] = 1.0
    total = linear.Entries(0 * load_indices, begin + load_indices, np.ones(len(load_indices)))
    return linear.least(cost, (linear.Entries.of(*rows), right_sides), (total, np.ones(1)), low, high)


@dataclass(frozen=True, slots=True)
class MicroBatchCountRange:
    """Bound of a replica with ``first`` to ``last`` micro-batches (None: any larger number)."""

    first: int
    last: int | None
    bound: PathBound
    solved: bool = False


@dataclass(frozen=True, slots=True)
class LoadBound:
    """Lower bound of a replica's time by the load on its last stage: the minimum of the ranges' bounds."""

    ranges: tuple[MicroBatchCountRange, ...]

    def at(self, load: float) -> float:
        """Return h of the module, ns."""
        return min(micro_batch_range.bound.at(load) for micro_batch_range in self.ranges)


@counted_cache
def _plain_mixture(num_stages: int, last: int, forward: float, backward: float, full: int) -> Mixture:
    """Return the mixture for stages of such shares without constants, for the widest range that ends at ``last``.

    ``full`` is the number of micro-batches that the load fills. Any mixture is a bound for any stages.
    """
    first, end = next((first, end - 1) for first, end in pairwise(_FIRSTS) if last < end)
    while last < end:
        middle = (first + end) // 2
        first, end = (first, middle) if last <= middle else (middle + 1, end)
    caps = np.full(full, (1.0 + SOLVER_TOLERANCE) / full) if full else np.zeros(0)
    plain = StageLoads(np.ones(1), 0.0, (forward, backward), (0.0, 0.0), 0, caps)
    return best_mixture(plain, num_stages, Window.of(first, last), 1.0)


def load_bound(
    stages: StageLoads,
    num_stages: int,
    ramp_ns: float,
    load: float,
    effort: int = 16,
    *,
    step: float = 0.01,
    exact: bool = False,
    known: LoadBound | None = None,
) -> LoadBound:
    """Bound the time of any packing by the load on the last stage.

    A range starts with the last stage's work and constants, or the bound of the wider range; the range with the
    smallest bound gets a program, then is halved.

    Args:
        stages: the pipeline's minimum times.
        num_stages: number of its stages.
        ramp_ns: minimum time before the first work of the last stage and after the last.
        load: the load at which the bound is to be high.
        effort: maximum number of ranges with programs.
        step: programs are shared by all pipelines whose shares are equal in multiples of it, and that fill about
            as many micro-batches.
        exact: programs include constants, links and kinds: slower, and slightly tighter.
        known: the bound whose ranges the search starts from.
    """
    forward, backward = (round(round(share / step) * step, 6) for share in stages.shares)
    full = max(number for number in _FULL if number <= stages.full(load))
    programmed = stages.with_kinds(3)

    mixture_of_last: dict[int, Mixture] = {}

    def with_program(micro_batch_range: MicroBatchCountRange) -> MicroBatchCountRange:
        assert micro_batch_range.last is not None
        window = Window.of(micro_batch_range.first, micro_batch_range.last)
        if not exact:
            mixture = _plain_mixture(num_stages, micro_batch_range.last, forward, backward, full)
        elif micro_batch_range.last in mixture_of_last and micro_batch_range.first < micro_batch_range.last:
            mixture = mixture_of_last[micro_batch_range.last]
        else:
            mixture = mixture_of_last[micro_batch_range.last] = best_mixture(programmed, num_stages, window, load)
        bound_of_mixture = replace(mixture, window=window).bound(stages, load)
        return MicroBatchCountRange(
            micro_batch_range.first,
            micro_batch_range.last,
            max(bound_of_mixture, micro_batch_range.bound, key=lambda bound: bound.at(load)),
            True,
        )

    def work(first: int) -> PathBound:
        return PathBound(stages.last_ns * first + ramp_ns, 1.0)

    ranges = [MicroBatchCountRange(first, end - 1, work(first)) for first, end in pairwise(_FIRSTS)]
    ranges.append(MicroBatchCountRange(_FIRSTS[-1], None, work(_FIRSTS[-1])))
    if known is not None:
        ranges = [replace(micro_batch_range, solved=False) for micro_batch_range in known.ranges]
    solved = 0
    while solved < effort:
        worst = min(ranges, key=lambda micro_batch_range: micro_batch_range.bound.at(load))
        if worst.last is None or (worst.solved and worst.first == worst.last):
            break
        ranges.remove(worst)
        if not worst.solved:
            ranges.append(with_program(worst))
            solved += 1
            continue
        middle = (worst.first + worst.last) // 2
        for first, last in ((worst.first, middle), (middle + 1, worst.last)):
            bound = max(worst.bound, work(first), key=lambda bound: bound.at(load))
            ranges.append(MicroBatchCountRange(first, last, bound))
    return LoadBound(tuple(sorted(ranges, key=lambda micro_batch_range: micro_batch_range.first)))


@dataclass(frozen=True, slots=True)
class WindowBound:
    """A window with its bounds, of which at least one holds; ``solved``: they come from a program."""

    window: Window
    bounds: tuple[PathBound, ...]
    solved: bool = False

    def at(self, load: float) -> float:
        """Return the bound, ns."""
        return min(bound.at(load) for bound in self.bounds)


@dataclass(frozen=True, slots=True)
class LongSequenceBound:
    """Lower bound of a replica with the longest sequence, for a load on its last stage.

    ``alone`` is the load of that sequence; ``boxes`` are the windows where each of the bounds holds.
    """

    alone: float
    bounds: tuple[PathBound, ...]
    boxes: tuple[WindowBound, ...] = ()

    @staticmethod
    def of(alone: float, boxes: Sequence[WindowBound]) -> LongSequenceBound:
        """Combine boxes that cover all numbers of micro-batches."""
        return LongSequenceBound(alone, tuple(bound for box in boxes for bound in box.bounds), tuple(boxes))

    def at(self, load: float) -> float:
        """Return the bound, ns."""
        return min(bound.at(load) for bound in self.bounds)


def group_ns(long: LongSequenceBound, plain: LoadBound, num_replicas: int, loads: FloatArray) -> FloatArray:
    """Return the lower bound of a group's time for every mean load [n] of its replicas, ns.

    One replica holds the sequence of ``long``, the others have the bound ``plain``.
    """
    totals = num_replicas * loads
    low, high = np.zeros(len(loads)), np.array([long.at(total) for total in totals.tolist()])
    if num_replicas == 1:
        return high
    own_capacity, other_capacity = (
        loads_within(long.bounds),
        loads_within([micro_batch_range.bound for micro_batch_range in plain.ranges]),
    )
    # Bisection to the precision of floats.
    for _ in range(60):
        middle = (low + high) / 2
        capacity = own_capacity(middle) + (num_replicas - 1) * other_capacity(middle)
        reaches_total = capacity >= totals
        low, high = np.where(reaches_total, low, middle), np.where(reaches_total, middle, high)
    return low


def long_bound(
    stages: StageLoads,
    num_stages: int,
    plain: LoadBound,
    least: float,
    load: float,
    enough_ns: float,
    effort: int,
) -> LongSequenceBound:
    """Bound the time of a replica with a micro-batch of at least the load ``least``.

    Args:
        stages: the pipeline's minimum times.
        num_stages: number of its stages.
        plain: bound without the long sequence, by number of micro-batches.
        least: load of the long sequence on the last stage.
        load: the load at which the bound is to be high.
        enough_ns: cutoff of the bound at ``load``.
        effort: maximum number of programs.
    """

    def box(window: Window) -> WindowBound:
        ranges = [window_range for window_range in plain.ranges if (window_range.last or np.inf) >= window.fewest]
        if not any(window.open):
            ranges = [window_range for window_range in ranges if window_range.first <= window.number]
        return WindowBound(window, tuple(window_range.bound for window_range in ranges))

    programmed = stages.with_kinds()
    boxes = [box(window) for window in _windows()]
    solved = 0
    while solved < effort:
        worst = min(boxes, key=lambda candidate: candidate.at(load))
        window = worst.window
        if worst.at(load) >= enough_ns:
            break
        boxes.remove(worst)
        if worst.solved:
            halves = halved(window)
            if not halves:
                boxes.append(worst)
                break
            # A window's bounds hold for its parts.
            boxes += [
                max(box(half), WindowBound(half, worst.bounds), key=lambda part: part.at(load)) for half in halves
            ]
            continue
        program_bound = best_mixture(programmed, num_stages, window, load, least).bound(stages, load, least)
        solved += 1
        bounds = (program_bound,) if program_bound.at(load) > worst.at(load) else worst.bounds
        boxes.append(WindowBound(window, bounds, True))
    return LongSequenceBound.of(least, boxes)


def _windows() -> list[Window]:
    """List windows that cover all numbers; the last ones are open."""
    spans = [*((first, last - 1, False) for first, last in pairwise((0, 1, 2, 4, 8, 16))), (16, 16, True)]
    return [Window(ahead[:2], behind[:2], (ahead[2], behind[2])) for ahead, behind in product(spans, spans)]


def halved(window: Window) -> tuple[Window, ...]:
    """Cut the window across an open side, or else across its wider side.

    Returns:
        The parts; empty for a single pair of numbers, or where programs would be too large.
    """
    sides = (window.ahead, window.behind)
    widths = [last if opened else last - first for (first, last), opened in zip(sides, window.open, strict=True)]
    for side in sorted((0, 1), key=lambda number: -widths[number]):
        first, last = sides[side]
        if window.open[side]:
            halves = ((last, 2 * last - 1), False), ((2 * last, 2 * last), True)
        else:
            middle = (first + last) // 2
            halves = ((first, middle), False), ((middle + 1, last), False)
        cut = tuple(_with_side(window, side, *half) for half in halves)
        if widths[side] and max(part.number for part in cut) <= PARAMETERS.max_program_size:
            return cut
    return ()


def _with_side(window: Window, side: int, numbers: tuple[int, int], opened: bool) -> Window:
    """Replace the numbers ahead (0) or behind (1)."""
    if side:
        return Window(window.ahead, numbers, (window.open[0], opened))
    return Window(numbers, window.behind, (opened, window.open[1]))
