"""Lower bound of a pipeline's time for a workload, whatever its micro-batches, where the last stage has more work.

A replica with v micro-batches of loads y_m (time on the last stage, forward and backward together, without the
constant of a micro-batch) is a longest path: the last stage runs forward and backward of a micro-batch at once,
the others take at least the shares phi and beta of y_m. The best real loads of a given sum Y are a linear program,
and its dual a mixture of paths, one unit of flow along the arcs. With w_m the weight of micro-batch m on
that mixture,

    time >= lags and constants on the mixture + sum_m w_m y_m >= constant_v + slope_v Y,    slope_v = min_m w_m,

for every packing into v micro-batches: the time is at least the length of every path. Any flow of one
unit gives a bound, so nothing rests on the solver. (The form of ``path_duals``, for stages that differ.)

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

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from milpplan.groups.bounds import glop as linear
from milpplan.groups.bounds.path_mixtures import Graph, Mixture, StageLoads
from milpplan.groups.bounds.pipeline_bounds import PathBound, Window
from milpplan.groups.strategies import FloatArray

# Numbers of micro-batches from here on have no program; and the numbers at which ranges begin.
MAX_MICRO_BATCHES = 129
_FIRSTS = (1, 2, 3, 5, 9, 17, 33, 65, MAX_MICRO_BATCHES)
# Numbers of full micro-batches to which shared programs are rounded.
_FULL = (0, 1, 2, 3, 4, 6, 8, 11, 16, 22, 32, 45, 64, 90, 128)
# Factor on the capacities in programs, against infeasibility by rounding.
_CAPACITY_FACTOR = 1.0 + 1e-6
# Maximum number of kinds of sequences in exact programs.
_KINDS = 3


def best_mixture(stages: StageLoads, num_stages: int, window: Window, load: float, least: float = 0.0) -> Mixture:
    """Find the mixture with the highest bound for a ``load`` in a window.

    ``least`` is the part of the load in the micro-batch that the window is around.
    """
    graph = Graph.of(num_stages, window)
    answer = _program(stages, graph, window, load, least)
    arcs = len(graph.tails)
    duals = np.ones(arcs) if answer is None else -answer.at_most[:arcs]
    return graph.mixture(np.maximum(duals, 0.0), window)


def best_loads(
    stages: StageLoads, num_stages: int, window: Window, load: float, least: float = 0.0
) -> tuple[float, FloatArray] | None:
    """Find the minimum time of a ``load`` in real parts, for packing; it is no bound.

    ``least`` is the minimum load of the micro-batch that the window is around.

    Returns:
        The time and the parts, [v] ns; None if the load does not fit.
    """
    answer = _program(stages, Graph.of(num_stages, window), window, load, least)
    if answer is None:
        return None
    parts = answer.values[-window.number * len(stages.kinds) :]
    return answer.value * load, parts.reshape(-1, window.number).sum(axis=0) * load


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
    cap = max(1.0 / full, 1.0 / number, share) * _CAPACITY_FACTOR if full > 0 else 1.0
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


def path_bound(
    stages: StageLoads, num_stages: int, number: int, load: float, first: int | None = None
) -> PathBound:
    """Return the bound of ``number`` (or ``first`` to ``number``) micro-batches, highest at ``load``."""
    window = Window.of(number if first is None else first, number)
    return best_mixture(stages, num_stages, window, load).bound(stages, load)


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


@lru_cache(maxsize=4096)
def _plain_mixture(num_stages: int, last: int, forward: float, backward: float, full: int) -> Mixture:
    """Return the mixture for stages of such shares without constants, for the widest range that ends at ``last``.

    ``full`` is the number of micro-batches that the load fills. Any mixture is a bound for any stages.
    """
    first, end = next((first, end - 1) for first, end in pairwise(_FIRSTS) if last < end)
    while last < end:
        middle = (first + end) // 2
        first, end = (first, middle) if last <= middle else (middle + 1, end)
    caps = np.full(full, _CAPACITY_FACTOR / full) if full else np.zeros(0)
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
    programmed = stages.with_kinds(_KINDS)

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
