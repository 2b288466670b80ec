"""What a pipeline takes at least for a workload, whatever its micro-batches: a last stage with more to do.

A replica with v micro-batches of loads y_m (time on the last stage, forward and backward together, without the
constant of a micro-batch) is a longest path: the last stage runs forward and backward of a micro-batch at once,
the others take at least the shares phi and beta of y_m. The best real loads of a given sum Y are a linear program,
and its dual a mixture of paths, one unit of flow along the arcs. With w_m what micro-batch m weighs on that
mixture,

    time >= lags and constants on the mixture + sum_m w_m y_m >= constant_v + slope_v Y,    slope_v = min_m w_m,

for every packing into v micro-batches: the time is at least the length of every path. Any flow of one unit will
do, so nothing rests on the solver. (The form of ``profile``, for stages that differ.)

**Any number.** A replica with v micro-batches, u <= v <= w, runs what one with w runs but for the last w - v, in
the same order. Take the graph of w without the arcs between stages of the forwards after u, and a path in it: what
it has of the v micro-batches lies on a path of theirs. (On a stage it leaves some work out; from stage to stage it
goes forward with one of the first u, or backward; and after the backward of one that is not there, nothing there
comes any more.) So a mixture of these paths is a bound for all of u to w: constants and links count for the first
u only, and the slope is the least weight of all w. Such is a ``MicroBatchCountRange``. One from a
larger u to the same w has all these paths, so the mixture holds for it, with more constants: a range that ends
where a wider one does needs no program of its own. For all numbers beyond, the last stage's work and constants,
after the shortest ramp, are the bound.

The same holds at the other end, with time reversed: for v of w micro-batches without the first w - v, backwards
of those that may not be there need nothing of the stage behind. (What comes before the forward of one that is not
there is not there either.) So a ``Window`` around one micro-batch has from a to a' of them ahead of it and from c
to c' behind it; and if that one has a load of at least l, and weighs w on the mixture, the bound is higher by
(w - slope) l.

**Kinds.** Short sequences leave the stages before the last more to do forward for each second of the last one,
long ones more to do backward. With phi_k and beta_k of sequence k a mixture weighs w_mk on it in micro-batch m,
linear in these, so w_m = min over k is the least over the corners of all pairs: more than with the least of both.

**Capacity.** A micro-batch holds so many tokens, so j of them hold no more load than the workload's heaviest
sequences that fit there, K_j, cut where they do not fit whole. K is concave in j, and with the weights ascending

    sum_m w_m y_m >= s Y - sum_j max(0, s - w_j) (K_j - K_{j-1})        for every s:

of a load that is above all K_j - K_{j-1} the least weights cannot take all. s is chosen for a load, and holds for
all. The programs themselves know just that no micro-batch has more than an even share of the K_j that the load
needs.

**Any pipeline.** A mixture is a bound whatever the shares, constants and links are; only how tight it is depends
on them. So programs are solved for pipelines without constants, of rounded shares, once for all strategies; the
ranges that give least are halved, and where it is worth it have programs of their own.

**Any load.** The slowest of D replicas takes no less than the one with the largest load, which is at least the
mean, and every bound grows with the load. So Z >= h(Y / D) with h the least of the ranges' bounds, a concave
function: between two loads it is above its chord (``chord``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from milpplan.groups.bounds import glop as linear
from milpplan.groups.bounds.linear_bounds import PathBound
from milpplan.groups.bounds.micro_batch_ranges import Window
from milpplan.groups.bounds.path_mixtures import Graph, Mixture, StageLoads
from milpplan.groups.strategies import FloatArray

# Numbers of micro-batches from here on have no program, and where ranges begin.
MAX_MICRO_BATCHES = 129
_FIRSTS = (1, 2, 3, 5, 9, 17, 33, 65, MAX_MICRO_BATCHES)
# Numbers of full micro-batches that programs are shared for.
_FULL = (0, 1, 2, 3, 4, 6, 8, 11, 16, 22, 32, 45, 64, 90, 128)
# Programs leave a little more room than there is.
_ROOM = 1.0 + 1e-6
# Kinds of sequences in exact programs.
_KINDS = 3


def best_mixture(stages: StageLoads, num_stages: int, window: Window, load: float, least: float = 0.0) -> Mixture:
    """The mixture that proves most of a ``load`` in a window, ``least`` of it in the one that this is around."""
    graph = Graph.of(num_stages, window)
    answer = _program(stages, graph, window, load, least)
    arcs = len(graph.tails)
    duals = np.ones(arcs) if answer is None else -answer.at_most[:arcs]
    return graph.mixture(np.maximum(duals, 0.0), window)


def best_loads(
    stages: StageLoads, num_stages: int, window: Window, load: float, least: float = 0.0
) -> tuple[float, FloatArray] | None:
    """The least time of a ``load`` in real parts, ``least`` of it in the micro-batch that the window is around,
    and these parts, [v] ns; none where they do not fit. For packing: it is no bound."""
    answer = _program(stages, Graph.of(num_stages, window), window, load, least)
    if answer is None:
        return None
    parts = answer.values[-window.number * len(stages.kinds) :]
    return answer.value * load, parts.reshape(-1, window.number).sum(axis=0) * load


def _program(
    stages: StageLoads, graph: Graph, window: Window, load: float, least: float
) -> linear.LinearSolution | None:
    """The linear program of the module, solved; its first rows are the graph's arcs."""
    number, begin = window.number, len(graph.kinds)
    there = np.zeros(number)
    there[slice(*window.there)] = 1.0
    kinds, parts, in_window = stages.kinds, graph.parts, there[graph.micro_batch[graph.heads]]
    parts[:, 3] *= in_window
    constants = parts @ stages.constants * in_window
    arcs, every = np.arange(len(graph.tails)), np.arange(number * len(kinds))
    times, inner = kinds @ parts.T, graph.tails >= 0
    place, share = window.ahead[1], min(1.0, least / load)
    full = stages.full(load)
    most = max(1.0 / full, 1.0 / number, share) * _ROOM if full > 0 else 1.0
    caps = np.full(number, most)
    caps[window.merged] = 1.0
    # end(tail) + constants + sum over kinds of weight * y <= end(head), in units of the load.
    columns = begin + number * np.arange(len(kinds))[:, None] + graph.micro_batch[graph.heads]
    rows = [
        (arcs, graph.heads, -np.ones(len(arcs))),
        (arcs[inner], graph.tails[inner], np.ones(int(inner.sum()))),
        (np.tile(arcs, len(kinds)), columns.ravel(), times.ravel()),
    ]
    sides, low, high = -constants / load, np.zeros(begin + len(every)), np.full(begin + len(every), np.inf)
    if len(kinds) == 1:
        low[begin + place], high[begin:] = share, caps
    else:
        # A micro-batch holds some of every kind.
        own = every % number
        rows.append((len(arcs) + own, begin + every, np.ones(len(every))))
        mine = begin + every[own == place]
        rows.append((np.full(len(mine), len(arcs) + number), mine, -np.ones(len(mine))))
        sides = np.concatenate([sides, caps, [-share]])
    cost = np.zeros(len(low))
    cost[begin - 1] = 1.0
    total = linear.Entries(0 * every, begin + every, np.ones(len(every)))
    return linear.least(cost, (linear.Entries.of(*rows), sides), (total, np.ones(1)), low, high)


def path_bound(
    stages: StageLoads, num_stages: int, number: int, load: float, first: int | None = None
) -> PathBound:
    """The bound of ``number`` micro-batches (or of ``first`` and more up to that) that is highest for loads that
    add up to ``load``."""
    window = Window.of(number if first is None else first, number)
    return best_mixture(stages, num_stages, window, load).bound(stages, load)


@dataclass(frozen=True, slots=True)
class MicroBatchCountRange:
    """From ``first`` to ``last`` micro-batches (None: any more) a replica takes at least ``bound``."""

    first: int
    last: int | None
    bound: PathBound
    solved: bool = False


@dataclass(frozen=True, slots=True)
class LoadBound:
    """What a replica takes at least for a load on its last stage: one of the ranges' bounds."""

    ranges: tuple[MicroBatchCountRange, ...]

    def at(self, load: float) -> float:
        """h of the module, ns."""
        return min(one.bound.at(load) for one in self.ranges)


@lru_cache(maxsize=4096)
def _plain_mixture(num_stages: int, last: int, forward: float, backward: float, full: int) -> Mixture:
    """The mixture for stages of such shares without constants, of a load that fills ``full`` micro-batches, for
    the widest range that ends at ``last``; any mixture is a bound for any stages."""
    first, end = next((first, end - 1) for first, end in pairwise(_FIRSTS) if last < end)
    while last < end:
        middle = (first + end) // 2
        first, end = (first, middle) if last <= middle else (middle + 1, end)
    most = np.full(full, _ROOM / full) if full else np.zeros(0)
    plain = StageLoads(np.ones(1), 0.0, (forward, backward), (0.0, 0.0), 0, most)
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
    """The bound of any packing; highest near ``load``, for which at most ``effort`` ranges get programs; those of
    ``known`` are where it begins.

    A range has the last stage's work and constants, or what the wider one had, until it is the one that gives
    least. Programs are solved once for all pipelines whose shares are the same in multiples of ``step``, and that
    fill about as many micro-batches. Where ``exact``, programs have everything in them: dearer, and a little
    higher.
    """
    forward, backward = (round(round(share / step) * step, 6) for share in stages.shares)
    full = max(one for one in _FULL if one <= stages.full(load))
    programmed = stages.with_kinds(_KINDS)

    ended: dict[int, Mixture] = {}

    def proved(one: MicroBatchCountRange) -> MicroBatchCountRange:
        assert one.last is not None
        window = Window.of(one.first, one.last)
        if not exact:
            mixture = _plain_mixture(num_stages, one.last, forward, backward, full)
        elif one.last in ended and one.first < one.last:
            mixture = ended[one.last]
        else:
            mixture = ended[one.last] = best_mixture(programmed, num_stages, window, load)
        found = replace(mixture, window=window).bound(stages, load)
        return MicroBatchCountRange(
            one.first, one.last, max(found, one.bound, key=lambda bound: bound.at(load)), True
        )

    def work(first: int) -> PathBound:
        return PathBound(stages.last_ns * first + ramp_ns, 1.0)

    ranges = [MicroBatchCountRange(first, end - 1, work(first)) for first, end in pairwise(_FIRSTS)]
    ranges.append(MicroBatchCountRange(_FIRSTS[-1], None, work(_FIRSTS[-1])))
    if known is not None:
        ranges = [replace(one, solved=False) for one in known.ranges]
    solved = 0
    while solved < effort:
        worst = min(ranges, key=lambda one: one.bound.at(load))
        if worst.last is None or (worst.solved and worst.first == worst.last):
            break
        ranges.remove(worst)
        if not worst.solved:
            ranges.append(proved(worst))
            solved += 1
            continue
        middle = (worst.first + worst.last) // 2
        for first, last in ((worst.first, middle), (middle + 1, worst.last)):
            bound = max(worst.bound, work(first), key=lambda bound: bound.at(load))
            ranges.append(MicroBatchCountRange(first, last, bound))
    return LoadBound(tuple(sorted(ranges, key=lambda one: one.first)))
