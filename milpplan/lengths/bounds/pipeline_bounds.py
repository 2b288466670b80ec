"""Lower bounds of 1F1B pipelines by mixtures of paths.

**Mixtures of paths** through a 1F1B pipeline: the graph of its work, flows along its arcs, and their lower bounds.
The time of a pipeline is at least the length of every path, so it is at least that of any mixture of paths: of a
unit of flow (``long_sequence``). A bound only needs the mixture's weight on every micro-batch by part of the work:
on the last stage, forward and backward on the others, on links, and the first stage's extra work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from milpplan.lengths.deadline import spend
from milpplan.lengths.search_parameters import SAFETY
from milpplan.lengths.tabled import FloatArray
from milpplan.lengths.tabled import Int64Array as IntArray


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


@dataclass(frozen=True, slots=True)
class PathBound:
    """``time >= constant + slope * load`` for all loads."""

    constant: float
    slope: float

    def at(self, load: float) -> float:
        """Return the bound at a load, ns."""
        return (self.constant + self.slope * load) * SAFETY

    def within(self, time_ns: float) -> float:
        """Return the largest load that the bound allows within a time."""
        slack_ns = time_ns / SAFETY - self.constant
        return 0.0 if slack_ns <= 0.0 else slack_ns / self.slope if self.slope > 0.0 else float("inf")


def loads_within(bounds: Sequence[PathBound]) -> Callable[[FloatArray], FloatArray]:
    """Return a function: the largest loads within times [n] ns if one of the bounds holds; 0 if none."""
    constants, slopes = (np.array([getattr(bound, name) for bound in bounds]) for name in ("constant", "slope"))

    def within(times: FloatArray) -> FloatArray:
        slack_ns = (times[:, None] / SAFETY - constants).clip(0.0)
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

    def with_kinds(self, number: int = 2) -> StageLoads:
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
        spend(8e-5 + 2.3e-6 * len(self.heads))
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
