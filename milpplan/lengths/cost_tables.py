"""From the cost model to the tables of ``groups``: a micro-batch takes at least c + u(l) + u(l') + ...

The exact time of a packed micro-batch is a function of its tokens T and of the attention of its sequences
(``costs.packed``); products are not quite linear in T, a ring of context-parallel blocks hides behind attention,
and the last tiles are those of the longest sequence. ``groups`` adds up sequences, so it gets a table that is
never above the exact time, and what it proves holds for the exact times, too.

**Attention.** A layer's time is convex in the seconds S of its attention kernels: S + max(0, ring(T) - k S) and
more that does not depend on S (waits of the host, which only add, are left out). So it is at least D(T) + sigma S
with the slope sigma = 1 and D its value where attention hides the whole ring, less S; or with the slope 1 - k and
D its value at S = 0. One pair is chosen for forwards, one for backwards, whichever is higher at the whole
workload.

**Tokens.** D is evaluated at every number of grains that a micro-batch may hold, and replaced by a line c + a T
that is nowhere above it and highest at the load of an even micro-batch.

**Last tiles.** They grow with the length, so those of the longest are at least those of the workload's shortest,
once a micro-batch, and the sum over the sequences of (l / T_max) times what their own are more.

**Unequal stages.** The stages of a pipeline are equal but for its ends, and ``groups`` knows equal ones. Two
tables are made, and the one that proves more for the whole workload is taken: *equal*, every stage without its
ends; and *last*, one stage that does the work of the last one, after the shortest sequence has passed the others
forward and before it passes them backward (it is there whichever micro-batch is first or last).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from milpplan.groups.bounds.pipeline_bounds import PipelineCuts
from milpplan.groups.problem import Kind
from milpplan.groups.strategies import Strategy, TabledPipeline
from milpplan.lengths.candidates import Candidate, SizedCandidate
from milpplan.lengths.records import PACKED, SequenceRules
from milpplan.lengths.replica_time import StageTimes, stage_layers
from milpplan.lengths.ring_attention import layout_times, ring_times, staged
from milpplan.problem.plan import Layout
from milpplan.problem.problem import Problem
from milpplan.simulation.layers.terms import Term
from milpplan.simulation.layout_columns import FloatArray, IntArray, LayoutColumns
from milpplan.simulation.network import collectives, placement
from milpplan.simulation.packed_sequences import sequence_cores
from milpplan.units import NS_PER_S

# Forwards and backwards of equal stages keep a ratio of whole parts of this.
_PARTS = 48
# Micro-batches that are looked at together.
_ROWS = 60000
# Passes over a table before its hull is taken point by point.
_PASSES = 40
# Rounded parts of a layer's phases, of the ends and of attention: half a nanosecond each.
_ROUNDED_PARTS = 16


@dataclass(frozen=True, slots=True)
class Affine:
    """``constant`` ns a micro-batch and ``sequence`` [n] ns for each sequence of each length, at least."""

    constant: float
    sequence: FloatArray

    def __add__(self, other: Affine) -> Affine:
        return Affine(self.constant + other.constant, self.sequence + other.sequence)


@dataclass(frozen=True, slots=True)
class Load:
    """The workload: ascending ``lengths`` [n] with ``counts`` [n]; ``grain`` tokens; how they are attended to and
    put together."""

    lengths: IntArray
    counts: IntArray
    token_quantum: int
    rules: SequenceRules = PACKED

    @property
    def num_quanta(self) -> int:
        """Grains of all sequences."""
        return int(self.counts @ self.lengths) // self.token_quantum


def line_below(values: FloatArray, at: float) -> tuple[float, float]:
    """(c, a) with c, a >= 0 and c + a g <= ``values[g - 1]`` for g = 1, 2, ..., highest at g = ``at``.

    A side of the lower convex hull of the points, or where its sides have c < 0 the steepest line through zero.
    """
    return line_of(hull_below(values), at)


def hull_below(values: FloatArray) -> list[tuple[float, float]]:
    """The lower convex hull of the points (g, ``values[g - 1]``), g = 1, 2, ..."""
    hull: list[tuple[float, float]] = []
    places, heights = np.arange(1.0, len(values) + 1.0), np.asarray(values, dtype=np.float64)
    for _ in range(_PASSES):
        # A point on or above the line between its neighbours is no corner, whatever becomes of these.
        rise = np.diff(heights) / np.diff(places)
        corner = np.ones(len(places), dtype=bool)
        corner[1:-1] = rise[1:] > rise[:-1]
        if corner.all():
            break
        places, heights = places[corner], heights[corner]
    for point in zip(places.tolist(), heights.tolist(), strict=True):
        while len(hull) > 1 and turns_down(hull[-2], hull[-1], point):
            hull.pop()
        hull.append((float(point[0]), float(point[1])))
    return hull


def line_of(hull: list[tuple[float, float]], at: float) -> tuple[float, float]:
    """The line of ``line_below`` of points with this hull."""
    best = (0.0, min(y / x for x, y in hull))
    for (x0, y0), (x1, y1) in pairwise(hull):
        slope = (y1 - y0) / (x1 - x0)
        constant = y0 - slope * x0
        if min(constant, slope) >= 0 and constant + slope * at > best[0] + best[1] * at:
            best = (constant, slope)
    return best


def turns_down(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Whether b is no corner of the hull below a and c."""
    return (b[0] - a[0]) * (c[1] - a[1]) <= (b[1] - a[1]) * (c[0] - a[0])


@dataclass(frozen=True)
class Tables:
    """What all capacities of one candidate share: times at every number of grains, attention of every length."""

    problem: Problem
    candidate: Candidate
    load: Load
    bare: StageTimes
    """Every number of grains without attention, [P, G]."""
    hidden: StageTimes
    """The same with so much attention that it hides the ring; the attention taken out."""
    slopes: tuple[float, float]
    """What a second of attention adds to each of the two."""
    cores: FloatArray
    """[2 (sequence, once), 2 (forward, backward), K, n] seconds of one layer's attention, at least (beside sliding
    windows; else exactly)."""

    @staticmethod
    def of(problem: Problem, candidate: Candidate, load: Load, most_grains: int) -> Tables:
        """All of it, for micro-batches of up to ``most_grains``."""
        return tables_of(problem, [candidate], load, [most_grains])[0]

    def values(self, stages: list[int], phase: int, most_grains: int) -> tuple[FloatArray, FloatArray]:
        """``bare`` and ``hidden`` of any of ``stages`` at least, forward (0) or backward (1), less what rounding
        adds; each [most_grains] ns."""
        name = ("forward", "backward")[phase]
        found = [getattr(times, name)[stages, :most_grains].min(axis=0) for times in (self.bare, self.hidden)]
        return tuple(np.maximum(1.0, one - self.rounding_ns) for one in found)

    def attention(self, stages: list[int], phase: int, most_grains: int) -> FloatArray:
        """Nanoseconds of attention that a sequence of every length adds to any of ``stages``, at least, [n]."""
        sequence, once = self.kernels(stages, phase)
        return np.asarray(sequence + once * self.load.lengths / (most_grains * self.load.token_quantum))

    def kernels(self, stages: list[int], phase: int) -> FloatArray:
        """Nanoseconds of attention on any of ``stages``, at least, that a sequence of every length adds, and that
        a micro-batch takes once if that is its longest, [2, n]; the latter grows with the length."""
        layers = stage_layers(self.problem, self.candidate)[stages].min(axis=0)
        # Where the whole layer is replayed, its backward has the forward's attention, too.
        replayed = self.candidate.recompute == "full" and phase == 1
        cores = self.cores[:, phase] + (self.cores[:, 0] if replayed else 0.0)
        return np.asarray(layers @ cores * NS_PER_S)

    @property
    def rounding_ns(self) -> float:
        """What rounded parts of a micro-batch's time add up to at most."""
        return 0.5 * _ROUNDED_PARTS * (self.problem.model.num_layers + 2)

    def stage(self, stages: list[int], most_grains: int, at: float) -> tuple[Affine, Affine]:
        """Forward and backward of any of ``stages``, at least, in micro-batches of up to ``most_grains``; highest
        where one holds ``at`` grains."""
        layers = stage_layers(self.problem, self.candidate)[stages].min(axis=0)
        found = []
        for phase, name in enumerate(("forward", "backward")):
            options = []
            for slope, times in zip(self.slopes, (self.bare, self.hidden), strict=True):
                base = getattr(times, name)[stages, :most_grains].min(axis=0).astype(np.float64)
                tokens = line_below(np.maximum(base, 1.0), at)
                options.append(self._with_attention(tokens, slope * layers, phase, most_grains))
            found.append(max(options, key=lambda line: float(self.load.counts @ line.sequence)))
        return found[0], found[1]

    def _with_attention(
        self, tokens: tuple[float, float], weights: FloatArray, phase: int, most_grains: int
    ) -> Affine:
        """A line in the grains, and ``weights`` [K] times the attention of every sequence."""
        lengths, grain = self.load.lengths, self.load.token_quantum
        # Where the whole layer is replayed, its backward has the forward's attention, too.
        replayed = self.candidate.recompute == "full" and phase == 1
        sequence, once = (one[phase] + (one[0] if replayed else 0.0) for one in self.cores)
        least = np.minimum.accumulate(once[:, ::-1], axis=1)[:, ::-1]
        more = least - least[:, :1]
        attention = weights @ (sequence + more * lengths / (most_grains * grain)) * NS_PER_S
        constant, slope = tokens[0] + float(weights @ least[:, 0]) * NS_PER_S, tokens[1]
        return Affine(max(0.0, constant - self.rounding_ns), slope * lengths / grain + attention)


def tables_of(
    problem: Problem, candidates: Sequence[Candidate], load: Load, most_grains: Sequence[int]
) -> list[Tables]:
    """Tables of several candidates, each for micro-batches of up to its number of ``most_grains``. Those of one
    layout share their kernels, and many layouts are looked at together: a call is dearer than what it works on."""
    kinds = problem.model.kinds
    most: dict[Layout, int] = {}
    for one, number in zip(candidates, most_grains, strict=True):
        most[one.layout] = max(number, most.get(one.layout, 0))
    cores: dict[Layout, FloatArray] = {}
    for layout in most:
        by_kind = [sequence_cores(problem, kind, layout, load.lengths, load.rules.mask) for kind in kinds]
        # Nowhere above the exact ones, and growing with the length.
        once = [np.minimum.accumulate(one.once_s[:, ::-1], axis=1)[:, ::-1] for one in by_kind]
        found = np.stack([[one.sequence_s for one in by_kind], once])
        cores[layout] = np.moveaxis(found, 1, 2)
    ways = layout_times(problem, most)
    tables = []
    for one, number in zip(candidates, most_grains, strict=True):
        times = [found.part(slice(number)) for found in ways[one.layout]]
        bare, hidden = staged(problem, one, times, launches=False)
        tables.append(Tables(problem, one, load, bare, hidden, _slopes(problem, one), cores[one.layout]))
    return tables


def _slopes(problem: Problem, candidate: Candidate) -> tuple[float, float]:
    """What a second of a layer's attention adds while some of the ring is exposed, and afterwards.

    1 - (1 - x) (n - 1) / n for n context-parallel ranks of which communication takes the share x, the slope of
    ``collectives.overlap_s`` beside (n - 1) / n of the attention; and 1.
    """
    columns = LayoutColumns.of([candidate.layout])
    ring = placement.context(columns)
    share = float(collectives.processor_fraction(problem.hardware, *ring)[0])
    size = candidate.layout.cp
    return 1.0 - (1.0 - share) * (size - 1) / size, 1.0


def strategy_of(tables: Tables, one: SizedCandidate, most_grains: int) -> Strategy:
    """The strategy with micro-batches of up to ``most_grains`` grains, never slower than it is."""
    layout, load = one.candidate.layout, tables.load
    reduce_ns = once_ns(one, Term.REDUCE)
    if layout.pp == 1:
        at = load.num_quanta / layout.dp / max(1, -(-load.num_quanta // (layout.dp * most_grains)))
        forward, backward = tables.stage([0], most_grains, at)
        pipeline = _tabled(one, load, most_grains, [(1, forward + backward)])
        return Strategy.of(pipeline, layout.dp, reduce_ns, one.candidate.name)
    equal, last, ramp_ns = _pipelines(tables, one, most_grains)
    kinds = [Kind(0, pipeline, layout.dp, load.lengths, load.counts) for pipeline in (equal, last)]
    proved = [PipelineCuts(kind).inflation * kind.total_units * kind.pipeline.parts / layout.dp for kind in kinds]
    if proved[0] >= proved[1] + ramp_ns:
        return Strategy.of(equal, layout.dp, reduce_ns, one.candidate.name)
    return Strategy.of(last, layout.dp, reduce_ns + ramp_ns, one.candidate.name)


def typical_pipeline(tables: Tables, one: SizedCandidate, most_grains: int) -> TabledPipeline:
    """A pipeline of equal stages that packings begin with: no bound, but what full micro-batches and those of an
    eighth of that take on the last stage, with a line between them."""
    stages, layout = one.candidate.layout.pp, one.candidate.layout
    grains = np.array([max(1, most_grains // 8), most_grains])
    times = ring_times(tables.problem, one.candidate, grains, launches=True)
    phases = []
    for phase, name in enumerate(("forward", "backward")):
        attention = tables.attention([stages - 1], phase, most_grains)
        ways = []
        for slope, base in zip(tables.slopes, times, strict=True):
            low, high = getattr(base, name)[-1].astype(np.float64)
            rise = (high - low) / max(1, grains[1] - grains[0])
            each = rise * tables.load.lengths / tables.load.token_quantum + slope * attention
            ways.append(Affine(max(0.0, float(high - rise * grains[1])), each))
        phases.append(max(ways, key=lambda line: float(tables.load.counts @ line.sequence)))
    totals = [float(tables.load.counts @ line.sequence) for line in phases]
    parts = min(_PARTS - 1, max(1, round(_PARTS * totals[0] / sum(totals))))
    lines = [(parts, phases[0]), (_PARTS - parts, phases[1])]
    pipeline = _tabled(one, tables.load, most_grains, lines, stages, int(tables.bare.transfer[most_grains - 1]))
    return replace(pipeline, num_gpus=layout.num_gpus // layout.dp)


def _pipelines(
    tables: Tables, one: SizedCandidate, most_grains: int
) -> tuple[TabledPipeline, TabledPipeline, int]:
    """*equal*, *last* and its ramp in ns."""
    stages, load = list(range(one.candidate.layout.pp)), tables.load
    at = min(float(most_grains), load.num_quanta / (one.candidate.layout.dp * 4 * len(stages)))
    forward, backward = tables.stage(stages, most_grains, max(1.0, at))
    totals = [float(load.counts @ line.sequence) for line in (forward, backward)]
    parts = min(_PARTS - 1, max(1, round(_PARTS * totals[0] / sum(totals))))
    transfer_ns = int(tables.bare.transfer[:most_grains].min())
    equal = _tabled(
        one, load, most_grains, [(parts, forward), (_PARTS - parts, backward)], len(stages), transfer_ns
    )
    ahead, back = tables.stage(stages[-1:], most_grains, float(most_grains))
    last = _tabled(one, load, most_grains, [(1, ahead + back)])
    shortest = sum(line.constant + float(line.sequence.min()) for line in (forward, backward))
    return equal, last, int((len(stages) - 1) * (shortest + 2 * transfer_ns))


def _tabled(
    one: SizedCandidate,
    load: Load,
    most_grains: int,
    lines: list[tuple[int, Affine]],
    num_stages: int = 1,
    transfer_ns: int = 0,
) -> TabledPipeline:
    """Units so that every phase takes at least its parts of them."""
    layout = one.candidate.layout
    parts = sum(part for part, _ in lines)
    units = np.floor(np.min([line.sequence / part for part, line in lines], axis=0)).astype(np.int64)
    constant = int(min(line.constant / part for part, line in lines))
    return TabledPipeline(
        one.candidate.name,
        num_stages,
        0.0,
        0.0,
        float(constant * parts),
        most_grains * load.token_quantum,
        transfer_ns=transfer_ns,
        forward_parts=lines[0][0],
        backward_parts=parts - lines[0][0],
        num_gpus=layout.num_gpus // layout.dp,
        table_lengths=tuple(load.lengths.tolist()),
        table=tuple(units.tolist()),
    )


def once_ns(one: SizedCandidate, term: Term) -> int:
    """What the slowest stage takes once a step: a reduction, a gather, an update."""
    return max(int(stage.terms[term, 0]) for stage in one.stages)


def finish_ns(one: SizedCandidate) -> int:
    """What ends a step at home: the norm of the gradients, the update, and the gather of the parameters."""
    return int(one.costs.barrier_ns) + once_ns(one, Term.OPTIMIZER) + once_ns(one, Term.GATHER)
