"""Best loads of the micro-batches of one pipeline, and the bound of every packing that their duals prove.

For v micro-batches with loads t_m = c + y_m (c the empty micro-batch, sum of y_m = W, 0 <= y_m <= cap) the time
of a 1F1B pipeline is a longest path (``strategies``), so the minimum over all real y is a linear program:

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
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np

from milpplan.groups.bounds import glop as linear
from milpplan.groups.strategies import FloatArray, Int64Array, Pipeline

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
