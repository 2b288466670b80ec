"""Mixtures of paths through a 1F1B pipeline: the graph of its work, flows along its arcs, and what one proves.

The time of a pipeline is at least the length of every path, so it is at least that of any mixture of them: of a
unit of flow (``unequal``). What micro-batches weigh on it by part of the work (on the last stage, forward and
backward on the others, on links, and what the first stage has more) is all that a bound needs to know of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from milpplan.groups.bounds.linear_bounds import PathBound
from milpplan.groups.bounds.micro_batch_ranges import Window
from milpplan.groups.strategies import FloatArray
from milpplan.groups.strategies import Int64Array as IntArray


@dataclass(frozen=True, slots=True)
class StageLoads:
    """A pipeline's least times under one line: ``last`` [n] ns of a sequence on the last stage, ``last_ns`` of a
    micro-batch beyond; the other stages take ``shares`` (forward, backward) of the former and ``others_ns`` of the
    latter; ``transfer_ns`` between stages. Any j micro-batches hold no more than the first j of ``most`` (falling)
    together; more than these, any load. Where there are ``mixes`` [c, 2], every sequence has at least the shares
    of some mixture of these pairs; ``shares`` are the least of all. ``tolls``: shares of the load that transfers
    take beyond ``transfer_ns``, and the first stage more than the others, forward and backward."""

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
        """What one or another kind of sequences takes for a unit of load, on the last stage, forward and backward
        on the others, and as tolls, [c, 6]."""
        found = np.insert(self.mixes if len(self.mixes) else np.array([self.shares]), 0, 1.0, axis=1)
        return np.concatenate([found, np.tile(self.tolls, (len(found), 1))], axis=1)

    @property
    def constants(self) -> FloatArray:
        """The same of a micro-batch beyond its load, [6] ns."""
        return np.array([self.last_ns, *self.others_ns, self.transfer_ns, 0.0, 0.0])

    def with_kinds(self, number: int) -> StageLoads:
        """With at most so many kinds, from end to end, or just ``shares``: programs grow with them."""
        chosen = np.linspace(0, len(self.mixes) - 1, min(number, len(self.mixes))).round().astype(int)
        return replace(self, mixes=self.mixes[chosen if number > 1 else []])

    def full(self, load: float) -> float:
        """Micro-batches that a load fills, at least; 0 where there is no telling."""
        sums = np.cumsum(self.most)
        if not len(sums) or load > sums[-1]:
            return 0.0
        number = int(np.searchsorted(sums, load)) + 1
        return load * number / float(sums[number - 1])


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in the order of time, the last one ends the step, with their micro-batch and kind (0: the last
    stage's, 1: forward, 2: backward elsewhere), ``first`` those of the first of several stages; arcs from -1, the
    beginning, ``links`` those between stages."""

    kinds: IntArray
    micro_batch: IntArray
    first: IntArray
    tails: IntArray
    heads: IntArray
    links: FloatArray

    @staticmethod
    @lru_cache(maxsize=512)
    def of(num_stages: int, window: Window) -> Graph:
        """1F1B as in ``lengths.replicas``, the last stage's forward and backward of a micro-batch in one.

        The forwards of those that may not be there at the end need nothing of the stage before, the backwards of
        those that may not be there at the beginning nothing of the stage behind.
        """
        number, (begin, end) = window.number, window.there
        place: dict[tuple[int, int, int], int] = {}
        arcs: list[tuple[int, int, int]] = []
        nodes: list[tuple[int, int, int]] = []
        before = [-1] * num_stages

        def work(kind: int, stage: int, micro_batch: int, needed: int | None) -> None:
            node = len(nodes)
            place[kind, stage, micro_batch] = node
            nodes.append((0 if stage == last else 1 + kind, micro_batch, int(stage == 0 < last)))
            arcs.append((before[stage], node, 0))
            if needed is not None:
                arcs.append((needed, node, 1))
            before[stage] = node

        last, inner = num_stages - 1, range(int(window.open[0]), number - int(window.open[1]))
        if window.open[0]:
            work(0, last, 0, None)
        for turn in range(inner.start, number + num_stages):
            for stage in range(num_stages):
                done = turn - num_stages + stage
                if done in inner and stage < last:
                    above = 0 if stage + 1 == last else 1
                    work(1, stage, done, place[above, stage + 1, done] if done >= begin else None)
                if turn in inner:
                    work(0, stage, turn, place.get((0, stage - 1, turn)) if turn < end else None)
        if window.open[1]:
            work(0, last, number - 1, None)
        columns = [*zip(*nodes, strict=True), *zip(*arcs, strict=True)]
        kinds, micro_batch, first, tails, heads, links = (np.array(one, dtype=np.int64) for one in columns)
        return Graph(kinds, micro_batch, first, tails, heads, links.astype(np.float64))

    @property
    def parts(self) -> FloatArray:
        """What the node at the head of every arc passes of ``Mixture.weights``, with the arc's link, [arcs, 6]."""
        found, arcs, kinds = np.zeros((len(self.heads), 6)), np.arange(len(self.heads)), self.kinds[self.heads]
        found[arcs, kinds] = 1.0
        found[:, 3] = self.links
        first = np.flatnonzero(self.first[self.heads])
        found[first, 3 + kinds[first]] = 1.0
        return found

    def mixture(self, duals: FloatArray, window: Window) -> Mixture:
        """The flow that divides like ``duals`` [arcs], one unit from the last node backwards."""
        into: list[list[int]] = [[] for _ in self.kinds]
        for arc, head in enumerate(self.heads.tolist()):
            into[head].append(arc)
        through, over = np.zeros(len(self.kinds)), np.zeros(len(self.heads))
        through[-1] = 1.0
        for node in range(len(through) - 1, -1, -1):
            if through[node] == 0.0:
                continue
            shares = duals[into[node]]
            shares = shares / shares.sum() if shares.sum() > 0 else np.eye(1, len(shares))[0]
            for arc, share in zip(into[node], shares.tolist(), strict=True):
                over[arc] = through[node] * share
                if self.tails[arc] >= 0:
                    through[self.tails[arc]] += over[arc]
        passed = np.zeros((6, window.number))
        np.add.at(passed.T, self.micro_batch[self.heads], over[:, None] * self.parts)
        return Mixture(passed[:3], passed[3:], window)


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """A unit of flow along paths: how much of it passes every micro-batch on the last stage, forward and backward
    on the others, [3, v]; and of that, how much over its links between stages, and forward and backward on the
    first one, ``tolls`` [3, v]."""

    flows: FloatArray
    tolls: FloatArray
    window: Window

    @property
    def weights(self) -> FloatArray:
        """``flows`` and ``tolls``, [6, v]; links of micro-batches that are there."""
        begin, end = self.window.there
        found = np.append(self.flows, self.tolls, axis=0)
        found[3, :begin] = found[3, end:] = 0.0
        return found

    def towards(self, other: Mixture, part: float) -> Mixture:
        """So much of the way to another of the same window."""
        flows, tolls = (
            (1.0 - part) * one + part * another
            for one, another in ((self.flows, other.flows), (self.tolls, other.tolls))
        )
        return Mixture(flows, tolls, self.window)

    def bound(self, stages: StageLoads, load: float, least: float = 0.0) -> PathBound:
        """What it proves of a pipeline, highest for a ``load``; constants and links only of micro-batches that are
        there. The one that the window is around has a load of at least ``least``."""
        # Whatever sequences a micro-batch holds, the least of their kinds.
        weights = (stages.kinds @ self.weights).min(axis=0)
        constant = float((stages.constants @ self.weights)[slice(*self.window.there)].sum())
        # Nothing limits what any number holds, so the slope is at most theirs.
        merged = self.window.merged
        highest = weights[merged].min(initial=np.inf)
        slopes = np.minimum(np.sort(np.delete(weights, merged)), highest)
        slopes = np.append(slopes, highest) if merged else slopes
        most = stages.most[: len(slopes) - 1]
        slopes = slopes[: len(most) + 1]
        # The first j weights are below slope j.
        beyond = np.append(0.0, np.cumsum(most)) * slopes - np.append(0.0, np.cumsum(most * slopes[: len(most)]))
        more = np.maximum(0.0, weights[self.window.ahead[1]] - slopes) * least
        values = constant - beyond + more
        best = int((values + slopes * load).argmax())
        return PathBound(float(values[best]), float(slopes[best]))
