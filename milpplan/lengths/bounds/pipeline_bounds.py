"""Lower bounds of the time of one kind of pipeline, by number of micro-batches, that hold for every load.

For a replica with v micro-batches of loads t_m = c + y_m that hold W = sum y_m units, ``time >= cut(W)`` for each
cut of the slot v (f and b the parts of a unit's forward and backward, l the transfer):

 - *last stage*: (f + b) (W + c v) + (P - 1) ((f + b) c + 2 l).
   Proof. The last stage does all the work; before it the first micro-batch, no shorter than c, runs forward
   through P - 1 stages, and after it the last one runs backward through them.
 - *drain*: (f + b) (W + c v) + (P - 1) (f c + max(0, b - f) (c + W / v) + 2 l).
   Proof. Follow the first micro-batch forward to the last stage, all work there up to the backward of the longest
   micro-batch M, that backward to the first stage, and all work there after it. Under 1F1B these are the backwards
   of all m > M and the forwards of all m >= M + P, so the path lacks the forwards of at most P - 1 micro-batches,
   none longer than M: it takes at least (f + b) sum t + (P - 1) f c + (P - 1) (b - f) t_M + 2 (P - 1) l, and t_M
   is at least the mean c + W / v. (With b < f the *last stage* cut takes its place.)
 - *profile*: ``Cut``, the best real loads, at the load of all sequences that fit, at a half and at a
   quarter of it, for the numbers of micro-batches that the other cuts leave open there.

The last slot also stands for all larger numbers (unless there are fewer sequences): its only cut, *last stage*,
grows with v.

A slot of v micro-batches holds at most the densest sequences that fit into v times the tokens of one (the last
slot, if open: any load). For pipelines of one stage there are no other cuts: they take their load and v c.

**From one replica to D.** The largest load of D equal replicas is at least W / D, and every cut grows with the
load, so the time of the slowest is at least the minimum over v of the greatest cut of v at W / D.

**Best loads** of the micro-batches of one pipeline, and the bound of every packing that their duals prove.

For v micro-batches with loads t_m = c + y_m (c the empty micro-batch, sum of y_m = W, 0 <= y_m <= cap) the time
of a 1F1B pipeline is a longest path (``tabled.problem``), so the minimum over all real y is a linear program:

    minimise z   with   z >= e(last),  e(i) >= e(j) + lag(j, i) + parts(i) * t_m(i)   for all arcs j -> i.

Its dual is a flow q of one unit along the arcs, a mixture of paths. With w_m the parts of micro-batch m on that
mixture, every packing with v micro-batches satisfies, for any alpha,

    time >= lags + c * sum_m w_m + alpha * W - sum_m max(0, alpha - w_m) * cap                             (cut)

Proof. The time is at least the length of every path, so at least the mean of the paths' lengths with weights q,
which is lags + sum_m w_m (c + y_m). And sum_m w_m y_m = alpha W + sum_m (w_m - alpha) y_m
>= alpha W - sum_m max(0, alpha - w_m) cap, because 0 <= y_m <= cap. Any flow of one unit gives a bound, so the
solver's dual is rounded to a flow in whole 2^-40ths and the bound does not rest on its accuracy. The cut is linear
in W and is kept as integers over 2^40.

A pipeline that packs whole sequences satisfies the cut with W the sum of its sequences' units.

**Mixtures of paths** through a 1F1B pipeline: the graph of its work, flows along its arcs, and their lower bounds.
The time of a pipeline is at least the length of every path, so it is at least that of any mixture of paths: of a
unit of flow (``long_sequence``). A bound only needs the mixture's weight on every micro-batch by part of the work:
on the last stage, forward and backward on the others, on links, and the first stage's extra work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np

from milpplan.lengths.bounds import glop as linear
from milpplan.lengths.tabled import (
    FloatArray,
    Int64Array,
    Kind,
    Pipeline,
)
from milpplan.lengths.tabled import Int64Array as IntArray

SCALE_BITS: Final = 40


@dataclass(frozen=True, slots=True)
class Cut:
    """``2**SCALE_BITS * time_ns >= slope * W + constant`` for every packing of W units into v micro-batches."""

    num_micro_batches: int
    slope: int
    constant: int

    def at(self, units: float) -> float:
        """Return the bound in ns at a load of ``units``."""
        return float(self.slope * units + self.constant) / 2.0**SCALE_BITS


@dataclass(frozen=True, slots=True)
class PathMixture:
    """A mixture of paths through a pipeline: its transfers in ns, and its parts of each micro-batch [v]."""

    lags: int
    weights: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class BestLoads:
    """Best real loads [v] in units, without the empty micro-batch, their time, and the cut that proves it.

    ``paths`` is the mixture of paths behind the cut: a pipeline's time is at least
    ``lags + sum_m weights_m (c + y_m)`` for all its loads y, both over ``2**SCALE_BITS``.
    """

    units: FloatArray
    time_ns: float
    cut: Cut
    paths: PathMixture


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    """Nodes 0 .. 2 P v - 1 in the order of the sweep, and arcs with their lags; tail -1 is the beginning."""

    parts: Int64Array
    micro_batch: Int64Array
    tails: Int64Array
    heads: Int64Array
    lags: Int64Array
    matrix: Any


@lru_cache(maxsize=512)
def _graph(num_stages: int, num_micro_batches: int, forward: int, backward: int, transfer_ns: int) -> _Graph:
    """Build the graph of ``pipeline_times_ns`` as arcs, and the matrix of the linear program."""
    import scipy.sparse as sparse

    nodes: dict[tuple[int, int, int], int] = {}
    arcs: list[tuple[int, int, int]] = []
    last = [-1] * num_stages

    def work(is_backward: int, stage: int, micro_batch: int, needed_node: int | None) -> None:
        node = len(nodes)
        nodes[is_backward, stage, micro_batch] = node
        arcs.append((last[stage], node, 0))
        if needed_node is not None:
            arcs.append((needed_node, node, transfer_ns))
        last[stage] = node

    for turn in range(num_micro_batches + num_stages):
        for stage in range(num_stages):
            backward_of = turn - num_stages + stage
            if 0 <= backward_of < num_micro_batches:
                work(1, stage, backward_of, nodes.get((1, stage + 1, backward_of)))
            if turn < num_micro_batches:
                work(0, stage, turn, nodes.get((0, stage - 1, turn)))
    keys = list(nodes)
    parts = np.array([backward if key[0] else forward for key in keys], np.int64)
    micro_batch = np.array([key[2] for key in keys], np.int64)
    tails, heads, lags = (np.array(column, np.int64) for column in zip(*arcs, strict=True))
    rows = np.arange(len(arcs))
    inner = tails >= 0
    # Columns: ends of nodes, then loads; the last node's end is the objective.
    matrix = sparse.csr_matrix(
        (
            np.concatenate([-np.ones(len(arcs)), np.ones(int(inner.sum())), parts[heads].astype(float)]),
            (
                np.concatenate([rows, rows[inner], rows]),
                np.concatenate([heads, tails[inner], len(keys) + micro_batch[heads]]),
            ),
        ),
        shape=(len(arcs), len(keys) + num_micro_batches),
    )
    return _Graph(parts, micro_batch, tails, heads, lags, matrix)


@lru_cache(maxsize=4096)
def best_profile(
    pipeline: Pipeline,
    num_micro_batches: int,
    units: int,
    cap_units: int,
    floors: tuple[tuple[int, int], ...] = (),
) -> BestLoads | None:
    """Find the best real loads of ``num_micro_batches`` micro-batches that hold ``units`` together.

    Args:
        pipeline: the pipeline.
        num_micro_batches: number of micro-batches of the replica.
        units: the sum of their loads.
        cap_units: upper bound of each load.
        floors: pairs (micro-batch, minimum load), for long sequences placed already: they shape the loads and
            leave the cut valid.

    Returns:
        The loads and their cut; None if the loads do not fit.
    """
    empty = pipeline.micro_batch_units
    graph = _graph(
        pipeline.num_stages,
        num_micro_batches,
        pipeline.forward_parts,
        pipeline.backward_parts,
        pipeline.transfer_ns,
    )
    num_nodes = graph.parts.size
    cost = np.zeros(num_nodes + num_micro_batches)
    cost[num_nodes - 1] = 1.0
    total = np.zeros((1, cost.size))
    total[0, num_nodes:] = 1.0
    lower, upper = np.zeros(cost.size), np.full(cost.size, np.inf)
    upper[num_nodes:] = cap_units
    for micro_batch, floor in floors:
        lower[num_nodes + micro_batch] = floor
        upper[num_nodes + micro_batch] = max(floor, cap_units)
    right_sides = -graph.lags - (graph.parts[graph.heads] * empty).astype(float)
    scale = max(1.0, float(units + empty * num_micro_batches))
    answer = linear.least(
        cost, (graph.matrix, right_sides / scale), (total, np.array([units / scale])), lower / scale, upper / scale
    )
    if answer is None:
        return None
    paths = _paths(graph, -answer.at_most, num_micro_batches)
    cut = _cut(pipeline, paths, units, cap_units)
    return BestLoads(answer.values[num_nodes:] * scale, answer.value * scale, cut, paths)


def _paths(graph: _Graph, duals: FloatArray, num_micro_batches: int) -> PathMixture:
    """Round the flow of ``duals`` [arcs] to whole 2^-40ths, from the last node backwards."""
    unit = 2**SCALE_BITS
    into: list[list[int]] = [[] for _ in range(graph.parts.size)]
    for arc, head in enumerate(graph.heads.tolist()):
        into[head].append(arc)
    through = [0] * graph.parts.size
    through[-1] = unit
    weights = [0] * num_micro_batches
    lags = 0
    tails, lag_of = graph.tails.tolist(), graph.lags.tolist()
    for node in range(graph.parts.size - 1, -1, -1):
        amount = through[node]
        if not amount:
            continue
        weights[int(graph.micro_batch[node])] += amount * int(graph.parts[node])
        arcs = into[node]
        shares = np.maximum(duals[arcs], 0.0)
        share = float(shares[0] / shares.sum()) if shares.sum() > 0 else 1.0
        first = amount if len(arcs) == 1 else min(amount, round(amount * share))
        for arc, flow in zip(arcs, (first, amount - first), strict=False):
            lags += flow * lag_of[arc]
            if tails[arc] >= 0:
                through[tails[arc]] += flow
    return PathMixture(lags, tuple(weights))


def _cut(pipeline: Pipeline, paths: PathMixture, units: int, cap_units: int) -> Cut:
    """Return the cut of a mixture of paths that is highest at a load of ``units``."""
    weights = paths.weights
    # The best alpha is the weight at which the cheapest micro-batches hold all units.
    slope, remaining = max(weights), units
    for weight in sorted(weights):
        remaining -= cap_units
        if remaining <= 0:
            slope = weight
            break
    spare = sum(max(0, slope - weight) for weight in weights) * cap_units
    constant = paths.lags + pipeline.micro_batch_units * sum(weights) - spare
    return Cut(len(weights), slope, constant)


@dataclass(frozen=True, slots=True)
class Window:
    """Minimum and maximum number of micro-batches ahead of one micro-batch, and behind it.

    On an ``open`` side the outermost micro-batch stands for any number, at least one, of which only the work on
    the last stage counts.
    """

    ahead: tuple[int, int]
    behind: tuple[int, int]
    open: tuple[bool, bool] = (False, False)

    @staticmethod
    def of(first: int, last: int) -> Window:
        """Return the window of ``first`` to ``last`` micro-batches, around the first."""
        return Window((0, 0), (first - 1, last - 1))

    @property
    def number(self) -> int:
        """Maximum number of micro-batches, those of an open side as one."""
        return self.ahead[1] + self.behind[1] + 1

    @property
    def merged(self) -> list[int]:
        """Indices of micro-batches that stand for any number of micro-batches."""
        return [index for index, is_open in zip((0, self.number - 1), self.open, strict=True) if is_open]

    @property
    def fewest(self) -> int:
        """Minimum number of micro-batches."""
        return self.ahead[0] + self.behind[0] + 1

    @property
    def there(self) -> tuple[int, int]:
        """Indices of the first micro-batch that is present for sure, and of the first after the last such."""
        return self.ahead[1] - self.ahead[0], self.ahead[1] + self.behind[0] + 1


# Relative slack for rounding errors in sums of flows.
_SAFETY = 1.0 - 1e-9


@dataclass(frozen=True, slots=True)
class PathBound:
    """``time >= constant + slope * load`` for all loads."""

    constant: float
    slope: float

    def at(self, load: float) -> float:
        """Return the bound at a load, ns."""
        return (self.constant + self.slope * load) * _SAFETY

    def within(self, time_ns: float) -> float:
        """Return the largest load that the bound allows within a time."""
        slack_ns = time_ns / _SAFETY - self.constant
        return 0.0 if slack_ns <= 0.0 else slack_ns / self.slope if self.slope > 0.0 else float("inf")


def loads_within(bounds: Sequence[PathBound]) -> Callable[[FloatArray], FloatArray]:
    """Return a function: the largest loads within times [n] ns if one of the bounds holds; 0 if none."""
    constants, slopes = (np.array([getattr(bound, name) for bound in bounds]) for name in ("constant", "slope"))

    def within(times: FloatArray) -> FloatArray:
        slack_ns = (times[:, None] / _SAFETY - constants).clip(0.0)
        # A bound without a slope allows any load, or none.
        limits = np.divide(slack_ns, slopes, out=np.where(slack_ns > 0.0, np.inf, 0.0), where=slopes > 0.0)
        return np.asarray(limits.max(axis=1))

    return within


def chord(ends: tuple[float, float], values: Sequence[float]) -> tuple[float, float]:
    """Return (slope, constant) of the line through a function's values at two loads.

    For a concave function the line is below it between the loads.
    """
    slope = (values[1] - values[0]) / (ends[1] - ends[0])
    return slope, values[0] - slope * ends[0]


# Numbers of micro-batches are not listed if their last-stage cut exceeds the best drain cut by this factor.
_BEYOND = 1.04
_MAX_SLOTS = 400
# Loads, as shares of the total that fits, at which profiles are computed.
_SHARES = (1.0, 0.5, 0.25)


def last_stage_cut(kind: Kind, num_micro_batches: int) -> Cut:
    """Return the *last stage* cut of the module."""
    pipeline = kind.pipeline
    empty = pipeline.parts * pipeline.micro_batch_units
    ramp = (pipeline.num_stages - 1) * (empty + 2 * pipeline.transfer_ns)
    return Cut(num_micro_batches, pipeline.parts << SCALE_BITS, (empty * num_micro_batches + ramp) << SCALE_BITS)


def drain_cut(kind: Kind, num_micro_batches: int) -> Cut:
    """Return the *drain* cut of the module; its slope is rounded down."""
    pipeline, others = kind.pipeline, kind.pipeline.num_stages - 1
    backward_excess = max(0, pipeline.backward_parts - pipeline.forward_parts)
    slope = (pipeline.parts << SCALE_BITS) + (others * backward_excess << SCALE_BITS) // num_micro_batches
    empty = pipeline.micro_batch_units
    drain = pipeline.forward_parts * empty + backward_excess * empty + 2 * pipeline.transfer_ns
    return Cut(
        num_micro_batches, slope, (pipeline.parts * empty * num_micro_batches + others * drain) << SCALE_BITS
    )


@dataclass(frozen=True, slots=True)
class CountCuts:
    """Cuts of one number of micro-batches; an ``open_ended`` slot also stands for larger numbers."""

    num_micro_batches: int
    cuts: tuple[Cut, ...]
    open_ended: bool = False

    def at(self, units: float) -> float:
        """Return the lower bound of the time of a replica with this load, ns."""
        return max(cut.at(units) for cut in self.cuts)


class PipelineCuts:
    """Cuts of one kind by number of micro-batches, cached: ``rough`` without profiles, ``slots`` with them."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    @cached_property
    def rough(self) -> tuple[CountCuts, ...]:
        """A slot for every number of micro-batches that could be best, and one for all larger numbers."""
        kind = self.kind
        sequences = int(kind.counts[kind.fits].sum())
        limit = min(kind.pipeline.max_micro_batches or _MAX_SLOTS, max(1, sequences), _MAX_SLOTS)
        load = kind.total_units / kind.num_replicas
        slots: list[CountCuts] = []
        best = float("inf")
        for number in range(1, limit + 1):
            last = last_stage_cut(kind, number)
            if last.at(load) > best * _BEYOND or number == _MAX_SLOTS:
                return (*slots, CountCuts(number, (last,), True))
            slots.append(CountCuts(number, (last, drain_cut(kind, number))))
            if kind.most_units(number) >= load:
                best = min(best, slots[-1].at(load))
        return tuple(slots)

    @cached_property
    def slots(self) -> tuple[CountCuts, ...]:
        """``rough`` with profiles where they can raise the bound."""
        if self.kind.pipeline.num_stages == 1:
            return self.rough
        whole = self.kind.total_units / self.kind.num_replicas
        return self._with_profiles((share * whole for share in _SHARES), self.rough)

    def near(self, load: float) -> tuple[CountCuts, ...]:
        """Return ``slots`` with profiles at one more ``load`` of a replica."""
        return self._with_profiles((load,), self.slots)

    def _with_profiles(self, loads: Iterable[float], slots: tuple[CountCuts, ...]) -> tuple[CountCuts, ...]:
        """Add the cuts of profiles at several loads to slots."""
        extra: dict[int, list[Cut]] = {}
        for load in loads:
            self._add_profiles(load, extra)
        return tuple(replace(slot, cuts=(*slot.cuts, *extra.get(slot.num_micro_batches, ()))) for slot in slots)

    def _add_profiles(self, load: float, extra: dict[int, list[Cut]]) -> None:
        """Add profiles at ``load``, best rough cut first, until the other numbers' rough cuts are above."""
        kind = self.kind
        best = float("inf")
        # A profile holds for one number of micro-batches only.
        closed = [slot for slot in self.rough if not slot.open_ended]
        for slot in sorted(closed, key=lambda slot: slot.at(load)):
            number = slot.num_micro_batches
            profile_cuts = extra.setdefault(number, [])
            bound = max([slot.at(load), *(cut.at(load) for cut in profile_cuts)])
            if slot.at(load) >= best:
                return
            if bound >= best:
                continue
            full = min(int(load), int(0.97 * number * kind.cap_units))
            profile = best_profile(kind.pipeline, number, full, kind.cap_units)
            if profile is None:
                continue
            profile_cuts.append(profile.cut)
            if number * kind.cap_units >= load:
                best = min(best, max(bound, profile.cut.at(load)))

    def most_units(self, slot: CountCuts) -> float:
        """Return the maximum load of a replica in the slot."""
        return float("inf") if slot.open_ended else self.kind.most_units(slot.num_micro_batches)

    def at(self, units: float) -> float:
        """Return the lower bound of the slowest replica when all hold ``units`` together, ns."""
        load = units / self.kind.num_replicas
        return min(slot.at(load) for slot in self.slots if self.most_units(slot) >= load)

    @cached_property
    def inflation(self) -> float:
        """The largest r such that the rough cuts give ``time >= r * parts * W / D`` for every load W that fits.

        A rough cut's ratio to W falls with W, so in each slot it is smallest at the slot's maximum load.
        """
        highest_load = self.kind.total_units / self.kind.num_replicas
        if not highest_load:
            return 1.0
        loads = [min(highest_load, self.most_units(slot)) for slot in self.rough]
        ratios = [slot.at(load) / load for slot, load in zip(self.rough, loads, strict=True)]
        return min(ratios) / self.kind.pipeline.parts


@dataclass(frozen=True, slots=True)
class StageLoads:
    """A pipeline's minimum times as linear functions.

    ``last`` [n] is the time in ns of a sequence on the last stage, ``last_ns`` that of a micro-batch beyond its
    sequences; the other stages take ``shares`` (forward, backward) of the former and ``others_ns`` of the latter;
    ``transfer_ns`` is the time between stages. Any j micro-batches hold together at most the sum of the first j
    entries of ``most`` (falling); more than its length, any load. With ``mixes`` [c, 2], every sequence has at
    least the shares of some mixture of these pairs; ``shares`` are their minimum. ``tolls`` are shares of the
    load: extra time of transfers beyond ``transfer_ns``, and of the first stage over the others, forward and
    backward.
    """

    last: FloatArray
    last_ns: float
    shares: tuple[float, float]
    others_ns: tuple[float, float]
    transfer_ns: float
    most: FloatArray = field(default_factory=lambda: np.zeros(0))
    mixes: FloatArray = field(default_factory=lambda: np.zeros((0, 2)))
    tolls: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def kinds(self) -> FloatArray:
        """Time of every kind of sequences per unit of load, [c, 6].

        Columns: on the last stage, forward and backward on the others, and the three tolls.
        """
        shares = np.insert(self.mixes if len(self.mixes) else np.array([self.shares]), 0, 1.0, axis=1)
        return np.concatenate([shares, np.tile(self.tolls, (len(shares), 1))], axis=1)

    @property
    def constants(self) -> FloatArray:
        """Time of a micro-batch beyond its load, columns as of ``kinds``, [6] ns."""
        return np.array([self.last_ns, *self.others_ns, self.transfer_ns, 0.0, 0.0])

    def with_kinds(self, number: int) -> StageLoads:
        """Keep at most ``number`` kinds, from end to end, or just ``shares``: programs grow with them."""
        chosen = np.linspace(0, len(self.mixes) - 1, min(number, len(self.mixes))).round().astype(int)
        return replace(self, mixes=self.mixes[chosen if number > 1 else []])

    def full(self, load: float) -> float:
        """Return the minimum number of micro-batches that a load fills; 0 if it is not bounded."""
        sums = np.cumsum(self.most)
        if not len(sums) or load > sums[-1]:
            return 0.0
        number = int(np.searchsorted(sums, load)) + 1
        return load * number / float(sums[number - 1])


@dataclass(frozen=True, slots=True)
class Graph:
    """Work of a pipeline as nodes in the order of time; the last node ends the step.

    Each node has its micro-batch and kind (0: on the last stage, 1: forward, 2: backward elsewhere); ``first``
    marks nodes of the first of several stages. Arcs start at -1, the beginning, or a node; ``links`` marks arcs
    between stages.
    """

    kinds: IntArray
    micro_batch: IntArray
    first: IntArray
    tails: IntArray
    heads: IntArray
    links: FloatArray

    @staticmethod
    @lru_cache(maxsize=512)
    def of(num_stages: int, window: Window) -> Graph:
        """Build the graph of 1F1B, with the last stage's forward and backward of a micro-batch in one node.

        Forwards of micro-batches that may be missing at the end do not depend on the stage before; backwards of
        micro-batches that may be missing at the beginning do not depend on the stage behind.
        """
        number, (begin, end) = window.number, window.there
        node_of: dict[tuple[int, int, int], int] = {}
        arcs: list[tuple[int, int, int]] = []
        nodes: list[tuple[int, int, int]] = []
        last_node = [-1] * num_stages

        def work(kind: int, stage: int, micro_batch: int, needed_node: int | None) -> None:
            node = len(nodes)
            node_of[kind, stage, micro_batch] = node
            nodes.append((0 if stage == last else 1 + kind, micro_batch, int(stage == 0 < last)))
            arcs.append((last_node[stage], node, 0))
            if needed_node is not None:
                arcs.append((needed_node, node, 1))
            last_node[stage] = node

        last, inner = num_stages - 1, range(int(window.open[0]), number - int(window.open[1]))
        if window.open[0]:
            work(0, last, 0, None)
        for turn in range(inner.start, number + num_stages):
            for stage in range(num_stages):
                backward_of = turn - num_stages + stage
                if backward_of in inner and stage < last:
                    above = 0 if stage + 1 == last else 1
                    work(
                        1,
                        stage,
                        backward_of,
                        node_of[above, stage + 1, backward_of] if backward_of >= begin else None,
                    )
                if turn in inner:
                    work(0, stage, turn, node_of.get((0, stage - 1, turn)) if turn < end else None)
        if window.open[1]:
            work(0, last, number - 1, None)
        columns = [*zip(*nodes, strict=True), *zip(*arcs, strict=True)]
        kinds, micro_batch, first, tails, heads, links = (np.array(column, dtype=np.int64) for column in columns)
        return Graph(kinds, micro_batch, first, tails, heads, links.astype(np.float64))

    @property
    def parts(self) -> FloatArray:
        """Parts of ``Mixture.weights`` that every arc's head passes, with the arc's link, [arcs, 6]."""
        parts, arcs, kinds = np.zeros((len(self.heads), 6)), np.arange(len(self.heads)), self.kinds[self.heads]
        parts[arcs, kinds] = 1.0
        parts[:, 3] = self.links
        first = np.flatnonzero(self.first[self.heads])
        parts[first, 3 + kinds[first]] = 1.0
        return parts

    def mixture(self, duals: FloatArray, window: Window) -> Mixture:
        """Build the flow that divides like ``duals`` [arcs], one unit from the last node backwards."""
        into: list[list[int]] = [[] for _ in self.kinds]
        for arc, head in enumerate(self.heads.tolist()):
            into[head].append(arc)
        flow_through, flow_on_arc = np.zeros(len(self.kinds)), np.zeros(len(self.heads))
        flow_through[-1] = 1.0
        for node in range(len(flow_through) - 1, -1, -1):
            if flow_through[node] == 0.0:
                continue
            shares = duals[into[node]]
            shares = shares / shares.sum() if shares.sum() > 0 else np.eye(1, len(shares))[0]
            for arc, share in zip(into[node], shares.tolist(), strict=True):
                flow_on_arc[arc] = flow_through[node] * share
                if self.tails[arc] >= 0:
                    flow_through[self.tails[arc]] += flow_on_arc[arc]
        passed = np.zeros((6, window.number))
        np.add.at(passed.T, self.micro_batch[self.heads], flow_on_arc[:, None] * self.parts)
        return Mixture(passed[:3], passed[3:], window)


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """A unit of flow along paths.

    ``flows`` [3, v] is the flow through every micro-batch on the last stage, forward and backward on the others;
    ``tolls`` [3, v] the part of it over links between stages, and forward and backward on the first stage.
    """

    flows: FloatArray
    tolls: FloatArray
    window: Window

    @property
    def weights(self) -> FloatArray:
        """``flows`` and ``tolls``, [6, v]; links only of micro-batches that are present for sure."""
        begin, end = self.window.there
        weights = np.append(self.flows, self.tolls, axis=0)
        weights[3, :begin] = weights[3, end:] = 0.0
        return weights

    def towards(self, other: Mixture, part: float) -> Mixture:
        """Return the mixture at the share ``part`` of the way to another mixture of the same window."""
        flows, tolls = (
            (1.0 - part) * own + part * others
            for own, others in ((self.flows, other.flows), (self.tolls, other.tolls))
        )
        return Mixture(flows, tolls, self.window)

    def bound(self, stages: StageLoads, load: float, least: float = 0.0) -> PathBound:
        """Return the lower bound of a pipeline that is highest for a ``load``.

        Constants and links count only for micro-batches that are present for sure. The micro-batch that the window
        is around has a load of at least ``least``.
        """
        # Whatever sequences a micro-batch holds, the minimum over the kinds.
        weights = (stages.kinds @ self.weights).min(axis=0)
        constant = float((stages.constants @ self.weights)[slice(*self.window.there)].sum())
        # Merged micro-batches hold any load, so the slope is at most their weight.
        merged = self.window.merged
        highest = weights[merged].min(initial=np.inf)
        slopes = np.minimum(np.sort(np.delete(weights, merged)), highest)
        slopes = np.append(slopes, highest) if merged else slopes
        increments = stages.most[: len(slopes) - 1]
        slopes = slopes[: len(increments) + 1]
        # The first j weights are below slope j.
        beyond = np.append(0.0, np.cumsum(increments)) * slopes - np.append(
            0.0, np.cumsum(increments * slopes[: len(increments)])
        )
        long_terms = np.maximum(0.0, weights[self.window.ahead[1]] - slopes) * least
        values = constant - beyond + long_terms
        best = int((values + slopes * load).argmax())
        return PathBound(float(values[best]), float(slopes[best]))
