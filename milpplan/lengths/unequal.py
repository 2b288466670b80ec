"""What a pipeline takes at least for a workload, whatever its micro-batches: a last stage with more to do.

A replica with v micro-batches of loads y_m (time on the last stage, forward and backward together, without the
constant of a micro-batch) is a longest path: the last stage runs forward and backward of a micro-batch at once,
the others take at least the shares phi and beta of y_m. The best real loads of a given sum Y are a linear program,
and its dual a mixture of paths, one unit of flow along the arcs. With w_m what micro-batch m weighs on that
mixture,

    time >= lags and constants on the mixture + sum_m w_m y_m >= constant_v + slope_v Y,    slope_v = min_m w_m,

for every packing into v micro-batches: the time is at least the length of every path. Any flow of one unit will
do, so nothing rests on the solver. (The form of ``groups.profile``, for stages that differ.)

**Any number.** A replica with v micro-batches, u <= v <= w, runs what one with w runs but for the last w - v, in
the same order. Take the graph of w without the arcs between stages of the forwards after u, and a path in it: what
it has of the v micro-batches lies on a path of theirs. (On a stage it leaves some work out; from stage to stage it
goes forward with one of the first u, or backward; and after the backward of one that is not there, nothing there
comes any more.) So a mixture of these paths is a bound for all of u to w, if those that are not there take no
time: with the constant c of a micro-batch in its load (the other stages take their shares of that, too), of which
u are counted. Such is a ``Range``; those that give least are halved. For all numbers beyond, the last stage's work
and constants, after the shortest ramp, are the bound.

**Any load.** The slowest of D replicas takes no less than the one with the largest load, which is at least the
mean, and every bound grows with the load. So Z >= h(Y / D) with h the least of the ranges' bounds, a concave
function: between two loads it is above its chord (``LoadBound.chord``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from milpplan.costs.columns import FloatArray

# Numbers of micro-batches from here on have no program, and where ranges begin.
MAX_MICRO_BATCHES = 65
_FIRSTS = (1, 2, 3, 5, 9, 17, 33, MAX_MICRO_BATCHES)
# Ranges halved.
_EFFORT, _EXACT_EFFORT = 8, 20
# What floats may add to sums of flows.
_SAFETY = 1.0 - 1e-9


@dataclass(frozen=True, slots=True)
class StageLoads:
    """A pipeline's least times under one line: ``last`` [n] ns of a sequence on the last stage, ``last_ns`` of a
    micro-batch beyond; the other stages take ``shares`` (forward, backward) of the former and ``others_ns`` of the
    latter; ``transfer_ns`` between stages."""

    last: FloatArray
    last_ns: float
    shares: tuple[float, float]
    others_ns: tuple[float, float]
    transfer_ns: int


@dataclass(frozen=True, slots=True)
class PathBound:
    """``time >= constant + slope * load`` for all loads."""

    constant: float
    slope: float

    def at(self, load: float) -> float:
        """The bound of a load, ns."""
        return (self.constant + self.slope * load) * _SAFETY


def path_bound(
    stages: StageLoads, num_stages: int, number: int, load: float, first: int | None = None
) -> PathBound:
    """The bound of ``number`` micro-batches (or of ``first`` and more up to that, where only these have a time)
    that is highest for loads that add up to ``load``."""
    import scipy.sparse as sparse
    from scipy.optimize import linprog

    graph = _Graph.of(stages, num_stages, number, number if first is None else first)
    nodes, arcs = len(graph.weights), len(graph.tails)
    rows = np.arange(arcs)
    inner = graph.tails >= 0
    # end(tail) + lag + constant + weight * y <= end(head).
    matrix = sparse.csr_matrix(
        (
            np.concatenate([-np.ones(arcs), np.ones(int(inner.sum())), graph.weights[graph.heads]]),
            (
                np.concatenate([rows, rows[inner], rows]),
                np.concatenate([graph.heads, graph.tails[inner], nodes + graph.micro_batch[graph.heads]]),
            ),
        ),
        shape=(arcs, nodes + number),
    )
    cost = np.zeros(nodes + number)
    cost[nodes - 1] = 1.0
    total = np.concatenate([np.zeros(nodes), np.ones(number)])[None]
    sides = -(graph.lags + graph.constants[graph.heads]) / load
    answer = linprog(cost, A_ub=matrix, b_ub=sides, A_eq=total, b_eq=[1.0], method="highs")
    duals = -np.asarray(answer.ineqlin.marginals) if answer.status == 0 else np.ones(arcs)
    return graph.bound(np.maximum(duals, 0.0), number)


@dataclass(frozen=True, slots=True)
class _Graph:
    """Nodes in the order of time, the last one ends the step; ``weights`` of the load and ``constants`` of each;
    arcs with lags, -1 for the beginning."""

    weights: FloatArray
    constants: FloatArray
    micro_batch: np.ndarray[tuple[int], np.dtype[np.int64]]
    tails: np.ndarray[tuple[int], np.dtype[np.int64]]
    heads: np.ndarray[tuple[int], np.dtype[np.int64]]
    lags: FloatArray

    @staticmethod
    def of(stages: StageLoads, num_stages: int, number: int, first: int) -> _Graph:
        """1F1B as in ``replicas.pipeline_ns``, the last stage's forward and backward of a micro-batch in one; the
        forwards of those after ``first`` need nothing of the stage before."""
        place: dict[tuple[int, int, int], int] = {}
        arcs: list[tuple[int, int, int]] = []
        nodes: list[tuple[float, float, int]] = []
        before = [-1] * num_stages

        def work(kind: int, stage: int, micro_batch: int, needed: int | None) -> None:
            node = len(nodes)
            place[kind, stage, micro_batch] = node
            is_last = stage == num_stages - 1
            weight = 1.0 if is_last else stages.shares[kind]
            nodes.append((weight, stages.last_ns if is_last else stages.others_ns[kind], micro_batch))
            arcs.append((before[stage], node, 0))
            if needed is not None:
                arcs.append((needed, node, stages.transfer_ns))
            before[stage] = node

        last = num_stages - 1
        for turn in range(number + num_stages):
            for stage in range(num_stages):
                done = turn - num_stages + stage
                if 0 <= done < number and stage < last:
                    above = 0 if stage + 1 == last else 1
                    work(1, stage, done, place[above, stage + 1, done])
                if turn < number:
                    work(0, stage, turn, place.get((0, stage - 1, turn)) if turn < first else None)
        weight, constant, micro_batch = zip(*nodes, strict=True)
        tails, heads, lags = zip(*arcs, strict=True)
        return _Graph(
            np.array(weight),
            np.array(constant),
            np.array(micro_batch, dtype=np.int64),
            np.array(tails, dtype=np.int64),
            np.array(heads, dtype=np.int64),
            np.array(lags, dtype=np.float64),
        )

    def bound(self, duals: FloatArray, number: int) -> PathBound:
        """The bound of the flow that divides like ``duals`` [arcs], one unit from the last node backwards."""
        into: list[list[int]] = [[] for _ in self.weights]
        for arc, head in enumerate(self.heads.tolist()):
            into[head].append(arc)
        through = np.zeros(len(self.weights))
        through[-1] = 1.0
        constant = 0.0
        for node in range(len(through) - 1, -1, -1):
            if through[node] == 0.0:
                continue
            shares = duals[into[node]]
            shares = shares / shares.sum() if shares.sum() > 0 else np.eye(1, len(shares))[0]
            for arc, share in zip(into[node], shares.tolist(), strict=True):
                constant += through[node] * share * self.lags[arc]
                if self.tails[arc] >= 0:
                    through[self.tails[arc]] += through[node] * share
        weights = np.bincount(self.micro_batch, through * self.weights, minlength=number)
        return PathBound(constant + float(through @ self.constants), float(weights.min()))


@dataclass(frozen=True, slots=True)
class Range:
    """From ``first`` to ``last`` micro-batches (None: any more) a replica takes at least ``bound``."""

    first: int
    last: int | None
    bound: PathBound


@dataclass(frozen=True, slots=True)
class LoadBound:
    """What a replica takes at least for a load on its last stage: one of the ranges' bounds."""

    ranges: tuple[Range, ...]

    def at(self, load: float) -> float:
        """h of the module, ns."""
        return min(one.bound.at(load) for one in self.ranges)

    def chord(self, low: float, high: float) -> tuple[float, float]:
        """(constant, slope) of the chord between two loads: a bound for all loads between them."""
        ends = self.at(low), self.at(high)
        slope = (ends[1] - ends[0]) / (high - low)
        return ends[0] - slope * low, slope


# Shares of stages that programs are solved for: whole multiples of this, from below.
_STEP = 0.01


@lru_cache(maxsize=4096)
def _unit_slope(num_stages: int, first: int, last: int, forward: int, backward: int) -> float:
    """The bound of a load of one in ``first`` to ``last`` micro-batches without constants, where the other stages
    take ``forward`` and ``backward`` steps of it. More of anything takes no less."""
    unit = StageLoads(np.ones(1), 0.0, (forward * _STEP, backward * _STEP), (0.0, 0.0), 0)
    return path_bound(unit, num_stages, last, 1.0, first).slope


def load_bound(
    stages: StageLoads, num_stages: int, ramp_ns: float, load: float, *, exact: bool = False
) -> LoadBound:
    """The bound of any packing; highest near ``load``.

    Where ``exact``, single numbers of micro-batches have programs of their own with everything in them: dearer,
    and a little higher.
    """
    # What of a constant can be a part of the load on every stage.
    pairs = zip(stages.others_ns, stages.shares, strict=True)
    each = min(stages.last_ns, *(one / share if share > 0 else stages.last_ns for one, share in pairs))
    forward, backward = (int(share / _STEP) for share in stages.shares)

    def ranged(first: int, last: int) -> Range:
        slope = _unit_slope(num_stages, first, last, forward, backward)
        found = PathBound(slope * each * first, slope)
        if exact and first == last:
            found = max(found, path_bound(stages, num_stages, last, load), key=lambda one: one.at(load))
        return Range(first, last, found)

    ends = [one - 1 for one in _FIRSTS[1:]]
    ranges = [ranged(first, last) for first, last in zip(_FIRSTS[:-1], ends, strict=True)]
    last = MAX_MICRO_BATCHES
    ranges.append(Range(last, None, PathBound(stages.last_ns * last + ramp_ns, 1.0)))
    for _ in range(_EXACT_EFFORT if exact else _EFFORT):
        worst = min(ranges, key=lambda one: one.bound.at(load))
        if worst.last is None or worst.first == worst.last:
            break
        ranges.remove(worst)
        middle = (worst.first + worst.last) // 2
        ranges += [ranged(worst.first, middle), ranged(middle + 1, worst.last)]
    return LoadBound(tuple(sorted(ranges, key=lambda one: one.first)))
