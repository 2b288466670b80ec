"""Tables for ``tabled`` from the cost model: a micro-batch takes at least c + u(l) + u(l') + ...

The exact time of a packed micro-batch is a function of its tokens T and of the attention of its sequences
(below). Matrix products are not quite linear in T, a ring of context-parallel blocks hides behind
attention, and the last tiles are those of the longest sequence. ``tabled`` adds up sequences, so it gets a table
that never exceeds the exact time. What it proves holds for the exact times, too.

**Attention.** A layer's time is convex in the seconds S of its attention kernels: S + max(0, ring(T) - k S), plus
terms that do not depend on S (waits of the host only add time and are left out). So it is at least D(T) + sigma S
with the slope sigma = 1 and D its value where attention hides the whole ring, less S; or with the slope 1 - k and
D its value at S = 0. One pair is chosen for forwards and one for backwards, whichever is higher for the whole
workload.

**Tokens.** D is evaluated at every number of token quanta that a micro-batch may hold, and replaced by a line c +
a T that nowhere exceeds it and is highest at the load of an even micro-batch.

**Last tiles.** They grow with the length. So the longest sequence's last tiles are at least those of the
workload's shortest sequence, once a micro-batch, plus the sum over the sequences of l / T_max times the rest of
their own.

**Unequal stages.** The stages of a pipeline are equal but for its ends, and ``tabled`` knows equal stages only. So
two tables are made, and the one that proves more for the whole workload is used. *Equal* has every stage without
its ends. *Last* is one stage with the work of the last stage; the shortest sequence passes the other stages
forward before it and backward after it, whichever micro-batch is first or last.

**Exact times** of a strategy's replicas: every micro-batch with its own lengths, every stage with its layers.
Stage p of P runs min(P - p - 1, v) forwards first, then a forward and a backward in turn (the order of
``tabled.problem``, whose stages are equal):

    F[p, m] = f[p, m] + max(F[p-1, m] + l_m, previous item of p)
    B[p, m] = b[p, m] + max(B[p+1, m] + l_m, previous item of p)

with f, b and l_m the times of the packed micro-batch (``simulation.packed_sequences``); the time is B[0, v-1].

``ring_times`` has micro-batches without attention, and with enough of it to hide the ring of context parallelism.
The time of any micro-batch lies between the two (``cost_tables``). Many layouts are evaluated together, because a
call of the cost model has a high fixed cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from milpplan.lengths.bounds import PipelineCuts
from milpplan.lengths.candidates import Candidate, SizedCandidate
from milpplan.lengths.deadline import spend
from milpplan.lengths.records import PACKED, SequenceRules
from milpplan.lengths.tabled import (
    Kind,
    Strategy,
    TabledPipeline,
)
from milpplan.problem import Layout, Problem
from milpplan.simulation import FloatArray, IntArray, LayoutColumns, packed_times, sequence_cores
from milpplan.simulation.layers import Phase, Term
from milpplan.simulation.layers.kernels import Mask
from milpplan.simulation.network import collectives, placement
from milpplan.simulation.packed_sequences import PackedTimes, packed_times_of
from milpplan.units import NS_PER_S

# Seconds of attention that hide any ring.
_LONG_S = 100.0


def _spend_call(layouts: int, micro_batches: int, calls: int = 1) -> None:
    """Count calls of the cost model."""
    spend(calls * (1.8e-3 + 1.2e-3 * layouts + 3.4e-6 * micro_batches))


def layout_times(problem: Problem, max_quanta: Mapping[Layout, int]) -> dict[Layout, list[PackedTimes]]:
    """Return the times of micro-batches of every number of quanta up to ``max_quanta`` of each layout, without
    attention and with the ring hidden."""
    parts: list[list[Layout]] = [[]]
    for layout in max_quanta:
        # One call evaluates at most so many micro-batches, which limits its memory.
        if sum(max_quanta[other] for other in parts[-1]) + max_quanta[layout] > 4_000 and parts[-1]:
            parts.append([])
        parts[-1].append(layout)
    times_of: dict[Layout, list[PackedTimes]] = {}
    for part in parts:
        sizes = [max_quanta[layout] for layout in part]
        rows, ends = np.repeat(np.arange(len(part)), sizes), np.cumsum(sizes).tolist()
        quanta = np.concatenate([np.arange(1, size + 1) for size in sizes])
        cores = np.zeros((len(problem.model.kinds), 2, 2, len(quanta)))
        cores[:, :, 1] = _LONG_S
        flat = cores.reshape(*cores.shape[:2], -1)
        _spend_call(len(part), 2 * len(rows))
        times = packed_times_of(problem, part, np.tile(rows, 2), np.tile(quanta, 2), flat)
        for layout, size, end in zip(part, sizes, ends, strict=True):
            starts = (end - size, end - size + len(quanta))
            times_of[layout] = [times.part(slice(start, start + size)) for start in starts]
    return times_of


def ring_times(problem: Problem, candidate: Candidate, quanta: IntArray) -> tuple[StageTimes, StageTimes]:
    """Return the times of micro-batches of ``quanta`` [G] quanta without attention, and with the ring hidden, less
    the attention."""
    kinds = problem.model.kinds
    _spend_call(1, len(quanta), calls=2)
    times = [
        packed_times(problem, candidate.layout, quanta, np.full((len(kinds), 2, len(quanta)), core_s))
        for core_s in (0.0, _LONG_S)
    ]
    return staged(problem, candidate, times, launches=True)


def staged(
    problem: Problem, candidate: Candidate, times: Sequence[PackedTimes], *, launches: bool
) -> tuple[StageTimes, StageTimes]:
    """Return ``ring_times`` of a candidate from the times of a layer of its layout."""
    bare, hidden = (stage_times(problem, candidate, phase_times, launches=launches) for phase_times in times)
    long_ns = stage_layers(problem, candidate).sum(axis=1)[:, None] * round(_LONG_S * NS_PER_S)
    replays = 2 if candidate.recompute == "full" else 1
    return bare, StageTimes(hidden.forward - long_ns, hidden.backward - replays * long_ns, hidden.transfer)


def pipeline_ns(forward: IntArray, backward: IntArray, transfer: IntArray) -> int:
    """Return the time of a 1F1B pipeline in ns, with ``forward`` and ``backward`` [P, v] and ``transfer`` [v] in
    ns."""
    num_stages, num_micro_batches = forward.shape
    if num_stages == 1:
        return int(forward.sum() + backward.sum())
    ahead, back = forward.T.tolist(), backward.T.tolist()
    lag = transfer.tolist()
    ends, finished = [0] * num_stages, [0] * (num_stages + 1)
    for turn in range(num_micro_batches + num_stages):
        arrival = 0
        for stage in range(num_stages):
            backward_index = turn - num_stages + stage
            if 0 <= backward_index < num_micro_batches:
                # Its backward on the next stage ended in the previous turn.
                ready = finished[stage + 1] + lag[backward_index] if stage + 1 < num_stages else 0
                ends[stage] = finished[stage] = max(ends[stage], ready) + back[backward_index][stage]
            if turn < num_micro_batches:
                ready = arrival + lag[turn] if stage else 0
                ends[stage] = arrival = max(ends[stage], ready) + ahead[turn][stage]
    return int(ends[0])


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Nanoseconds of m micro-batches on every stage: ``forward``, ``backward`` [P, m] and ``transfer`` [m]."""

    forward: IntArray
    backward: IntArray
    transfer: IntArray


def stage_layers(problem: Problem, candidate: Candidate) -> IntArray:
    """Return the number of layers of each kind on every stage, [P, K]."""
    kinds = np.array(problem.model.layer_kinds)
    return np.array(
        [
            np.bincount(kinds[stage.layers[0] : stage.layers[1]], minlength=len(problem.model.kinds))
            for stage in candidate.plan.virtual_stages
        ]
    )


def stage_times(
    problem: Problem, candidate: Candidate, times: PackedTimes, *, launches: bool = True
) -> StageTimes:
    """Return the times of ``times``' micro-batches on every stage, with recomputation in the backward."""
    phases = times.phases(launches=launches)
    layers = stage_layers(problem, candidate)
    backward = phases[:, Phase.BACKWARD]
    if candidate.recompute != "none":
        backward = backward + phases[:, Phase.FULL if candidate.recompute == "full" else Phase.SELECTIVE]
    by_phase = np.stack([layers @ phases[:, Phase.FORWARD], layers @ backward])
    by_phase[:, 0] += times.ends[0]
    by_phase[:, -1] += times.ends[1]
    return StageTimes(by_phase[0], by_phase[1], times.transfer)


def micro_batch_times(
    problem: Problem, candidate: Candidate, lengths: IntArray, packed: IntArray, mask: Mask = "causal"
) -> StageTimes:
    """Return the exact times of micro-batches: ``packed`` [m, n] sequences of the ascending ``lengths`` [n], none
    empty."""
    return times_of_several(problem, [(candidate, packed)], lengths, mask)[0]


def times_of_several(
    problem: Problem, parts: Sequence[tuple[Candidate, IntArray]], lengths: IntArray, mask: Mask = "causal"
) -> list[StageTimes]:
    """Return ``micro_batch_times`` of several strategies in one call of the cost model, which has a high fixed
    cost."""
    packed = np.concatenate([rows for _, rows in parts])
    ends = np.cumsum([len(rows) for _, rows in parts]).tolist()
    slices = [slice(end - len(rows), end) for end, (_, rows) in zip(ends, parts, strict=True)]
    quanta = packed @ lengths // problem.job.sequence_length
    # The longest sequence of each micro-batch decides its last tiles.
    longest = packed.shape[1] - 1 - np.argmax(packed[:, ::-1] > 0, axis=1)
    cores = np.empty((len(problem.model.kinds), 2, len(packed)))
    for index, kind in enumerate(problem.model.kinds):
        for (candidate, rows), part in zip(parts, slices, strict=True):
            kernels = sequence_cores(problem, kind, candidate.layout, lengths, mask)
            cores[index, :, part] = kernels.sequence_s @ rows.T + kernels.once_s[:, longest[part]]
    owners = np.repeat(np.arange(len(parts)), [len(rows) for _, rows in parts])
    layouts = [candidate.layout for candidate, _ in parts]
    _spend_call(len(layouts), len(owners))
    times = packed_times_of(problem, layouts, owners, quanta, cores)
    return [
        stage_times(problem, candidate, times.part(part))
        for (candidate, _), part in zip(parts, slices, strict=True)
    ]


def replicas_ns(
    problem: Problem,
    candidate: Candidate,
    lengths: IntArray,
    replicas: tuple[IntArray, ...],
    mask: Mask = "causal",
) -> IntArray:
    """Return the exact time of every replica of a strategy, each given as micro-batches [v, n] of counts of
    ``lengths``."""
    return replicas_of_several(problem, [(candidate, replicas)], lengths, mask)[0]


def replicas_of_several(
    problem: Problem,
    parts: Sequence[tuple[Candidate, tuple[IntArray, ...]]],
    lengths: IntArray,
    mask: Mask = "causal",
) -> list[IntArray]:
    """Return ``replicas_ns`` of several strategies in one call of the cost model."""
    nonempty = [(replica, np.concatenate(replicas)) for replica, replicas in parts if sum(map(len, replicas))]
    timed = iter(times_of_several(problem, nonempty, lengths, mask) if nonempty else [])
    times_ns = []
    for _, replicas in parts:
        times, start = next(timed) if sum(map(len, replicas)) else None, 0
        replica_ns = np.zeros(len(replicas), dtype=np.int64)
        for index, replica in enumerate(replicas):
            part = slice(start, start + len(replica))
            start = part.stop
            if times is not None and len(replica):
                replica_ns[index] = pipeline_ns(
                    times.forward[:, part], times.backward[:, part], times.transfer[part]
                )
        times_ns.append(replica_ns)
    return times_ns


# Full micro-batches have so many times the quanta of the smaller ones that typical times go through.
_SMALL = 8
# The ratio of forward to backward of equal stages is a ratio of whole parts of this number.
_PARTS = 48


@dataclass(frozen=True, slots=True)
class Affine:
    """Lower bound of a phase's time: ``constant`` ns per micro-batch plus ``sequence`` [n] ns per sequence of each
    length."""

    constant: float
    sequence: FloatArray

    def __add__(self, other: Affine) -> Affine:
        return Affine(self.constant + other.constant, self.sequence + other.sequence)


@dataclass(frozen=True, slots=True)
class Load:
    """The workload: ascending ``lengths`` [n] with ``counts`` [n], in multiples of ``token_quantum`` tokens, and
    the rules of its sequences."""

    lengths: IntArray
    counts: IntArray
    token_quantum: int
    rules: SequenceRules = PACKED

    @property
    def num_quanta(self) -> int:
        """Token quanta of all sequences."""
        return int(self.counts @ self.lengths) // self.token_quantum


def line_below(values: FloatArray, at: float) -> tuple[float, float]:
    """Return (c, a) with c, a >= 0 and c + a g <= ``values[g - 1]`` for g = 1, 2, ..., highest at g = ``at``.

    The line is a side of the lower convex hull of the points, or the steepest line through zero if the sides have
    c < 0.
    """
    return line_of(hull_below(values), at)


def hull_below(values: FloatArray) -> list[tuple[float, float]]:
    """Return the lower convex hull of the points (g, ``values[g - 1]``), g = 1, 2, ..."""
    hull: list[tuple[float, float]] = []
    abscissas, heights = np.arange(1.0, len(values) + 1.0), np.asarray(values, dtype=np.float64)
    # After so many vectorised passes the rest is done point by point.
    for _ in range(40):
        # A point on or above the line between its neighbours is no corner, even if they are removed.
        rise = np.diff(heights) / np.diff(abscissas)
        corner = np.ones(len(abscissas), dtype=bool)
        corner[1:-1] = rise[1:] > rise[:-1]
        if corner.all():
            break
        abscissas, heights = abscissas[corner], heights[corner]
    for point in zip(abscissas.tolist(), heights.tolist(), strict=True):
        while len(hull) > 1 and turns_down(hull[-2], hull[-1], point):
            hull.pop()
        hull.append((float(point[0]), float(point[1])))
    return hull


def line_of(hull: list[tuple[float, float]], at: float) -> tuple[float, float]:
    """Return the line of ``line_below`` for points with this hull."""
    best = (0.0, min(y / x for x, y in hull))
    for (x0, y0), (x1, y1) in pairwise(hull):
        slope = (y1 - y0) / (x1 - x0)
        constant = y0 - slope * x0
        if min(constant, slope) >= 0 and constant + slope * at > best[0] + best[1] * at:
            best = (constant, slope)
    return best


def turns_down(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Return whether b is no corner of the hull below a and c."""
    return (b[0] - a[0]) * (c[1] - a[1]) <= (b[1] - a[1]) * (c[0] - a[0])


@dataclass(frozen=True)
class Tables:
    """Cost tables of one candidate for all capacities: times by number of quanta, attention by length."""

    problem: Problem
    candidate: Candidate
    load: Load
    bare: StageTimes
    """Times without attention at every number of quanta, [P, G]."""
    hidden: StageTimes
    """Times with enough attention to hide the ring, less that attention, [P, G]."""
    slopes: tuple[float, float]
    """Time that a second of attention adds to ``bare`` and to ``hidden``."""
    cores: FloatArray
    """Lower bound of the seconds of one layer's attention, [2 (per sequence, once), 2 (forward, backward), K, n];
    exact without sliding windows."""

    @staticmethod
    def of(problem: Problem, candidate: Candidate, load: Load, max_quanta: int) -> Tables:
        """Build the tables of one candidate for micro-batches of up to ``max_quanta`` quanta."""
        return tables_of(problem, [candidate], load, [max_quanta])[0]

    def values(self, stages: list[int], phase: int, max_quanta: int) -> tuple[FloatArray, FloatArray]:
        """Return the minimum of ``bare`` and of ``hidden`` over ``stages``, forward (0) or backward (1), less the
        maximum rounding error; each [most_grains] ns."""
        name = ("forward", "backward")[phase]
        minima = [getattr(times, name)[stages, :max_quanta].min(axis=0) for times in (self.bare, self.hidden)]
        return tuple(np.maximum(1.0, values - self.rounding_ns) for values in minima)

    def attention(self, stages: list[int], phase: int, max_quanta: int) -> FloatArray:
        """Return the minimum ns of attention that a sequence of every length adds to any of ``stages``, [n]."""
        sequence, once = self.kernels(stages, phase)
        return np.asarray(sequence + once * self.load.lengths / (max_quanta * self.load.token_quantum))

    def kernels(self, stages: list[int], phase: int) -> FloatArray:
        """Return the minimum ns of attention on any of ``stages``, [2, n]: per sequence, and once a micro-batch by
        its longest sequence, which grows with the length."""
        layers = stage_layers(self.problem, self.candidate)[stages].min(axis=0)
        # Full recomputation repeats the forward's attention in the backward.
        replayed = self.candidate.recompute == "full" and phase == 1
        cores = self.cores[:, phase] + (self.cores[:, 0] if replayed else 0.0)
        return np.asarray(layers @ cores * NS_PER_S)

    @property
    def rounding_ns(self) -> float:
        """Maximum rounding error of a micro-batch's time."""
        # Sixteen terms of a layer's phases, the ends and attention are rounded, each by at most half a nanosecond.
        return 0.5 * 16 * (self.problem.model.num_layers + 2)

    def stage(self, stages: list[int], max_quanta: int, at: float) -> tuple[Affine, Affine]:
        """Return lower bounds of the forward and backward time of any of ``stages``.

        They hold for micro-batches of up to ``max_quanta`` quanta and are highest at ``at`` quanta.
        """
        layers = stage_layers(self.problem, self.candidate)[stages].min(axis=0)
        lines = []
        for phase, name in enumerate(("forward", "backward")):
            options = []
            for slope, times in zip(self.slopes, (self.bare, self.hidden), strict=True):
                base = getattr(times, name)[stages, :max_quanta].min(axis=0).astype(np.float64)
                tokens = line_below(np.maximum(base, 1.0), at)
                options.append(self._with_attention(tokens, slope * layers, phase, max_quanta))
            lines.append(max(options, key=lambda line: float(self.load.counts @ line.sequence)))
        return lines[0], lines[1]

    def _with_attention(
        self, tokens: tuple[float, float], weights: FloatArray, phase: int, max_quanta: int
    ) -> Affine:
        """Return a line in the quanta plus ``weights`` [K] times the attention of every sequence."""
        lengths, quantum = self.load.lengths, self.load.token_quantum
        # Full recomputation repeats the forward's attention in the backward.
        replayed = self.candidate.recompute == "full" and phase == 1
        sequence, once = (core[phase] + (core[0] if replayed else 0.0) for core in self.cores)
        suffix_minimum = np.minimum.accumulate(once[:, ::-1], axis=1)[:, ::-1]
        increase = suffix_minimum - suffix_minimum[:, :1]
        attention = weights @ (sequence + increase * lengths / (max_quanta * quantum)) * NS_PER_S
        constant, slope = tokens[0] + float(weights @ suffix_minimum[:, 0]) * NS_PER_S, tokens[1]
        return Affine(max(0.0, constant - self.rounding_ns), slope * lengths / quantum + attention)


def tables_of(
    problem: Problem, candidates: Sequence[Candidate], load: Load, max_quanta: Sequence[int]
) -> list[Tables]:
    """Build the tables of several candidates, each for micro-batches of up to its number of quanta.

    Candidates of one layout share their kernels, and many layouts are evaluated together, because a call of the
    cost model has a high fixed cost.
    """
    kinds = problem.model.kinds
    max_by_layout: dict[Layout, int] = {}
    for candidate, number in zip(candidates, max_quanta, strict=True):
        max_by_layout[candidate.layout] = max(number, max_by_layout.get(candidate.layout, 0))
    cores: dict[Layout, FloatArray] = {}
    for layout in max_by_layout:
        by_kind = [sequence_cores(problem, kind, layout, load.lengths, load.rules.mask) for kind in kinds]
        # A running minimum from the right never exceeds the exact values and grows with the length.
        once = [np.minimum.accumulate(kernels.once_s[:, ::-1], axis=1)[:, ::-1] for kernels in by_kind]
        stacked = np.stack([[kernels.sequence_s for kernels in by_kind], once])
        cores[layout] = np.moveaxis(stacked, 1, 2)
    layout_parts = layout_times(problem, max_by_layout)
    tables = []
    for candidate, number in zip(candidates, max_quanta, strict=True):
        times = [stacked.part(slice(number)) for stacked in layout_parts[candidate.layout]]
        bare, hidden = staged(problem, candidate, times, launches=False)
        tables.append(
            Tables(problem, candidate, load, bare, hidden, _slopes(problem, candidate), cores[candidate.layout])
        )
    return tables


def _slopes(problem: Problem, candidate: Candidate) -> tuple[float, float]:
    """Return the slope of a layer's time in its attention while the ring is exposed, and once it is hidden.

    The first is 1 - (1 - x) (n - 1) / n for n context-parallel ranks of which communication takes the share x: the
    slope of ``collectives.overlap_s`` beside (n - 1) / n of the attention. The second is 1.
    """
    columns = LayoutColumns.of([candidate.layout])
    ring = placement.context(columns)
    share = float(collectives.processor_fraction(problem.hardware, *ring)[0])
    size = candidate.layout.cp
    return 1.0 - (1.0 - share) * (size - 1) / size, 1.0


def strategy_of(tables: Tables, candidate: SizedCandidate, max_quanta: int) -> Strategy:
    """Return the strategy for ``tabled`` with micro-batches of up to ``max_quanta`` quanta, never slower than in
    reality."""
    layout, load = candidate.candidate.layout, tables.load
    reduce_ns = once_ns(candidate, Term.REDUCE)
    if layout.pp == 1:
        at = load.num_quanta / layout.dp / max(1, -(-load.num_quanta // (layout.dp * max_quanta)))
        forward, backward = tables.stage([0], max_quanta, at)
        pipeline = _tabled(candidate, load, max_quanta, [(1, forward + backward)])
        return Strategy.of(pipeline, layout.dp, reduce_ns, candidate.candidate.name)
    equal, last, ramp_ns = _pipelines(tables, candidate, max_quanta)
    kinds = [Kind(0, pipeline, layout.dp, load.lengths, load.counts) for pipeline in (equal, last)]
    proved_ns = [
        PipelineCuts(kind).inflation * kind.total_units * kind.pipeline.parts / layout.dp for kind in kinds
    ]
    if proved_ns[0] >= proved_ns[1] + ramp_ns:
        return Strategy.of(equal, layout.dp, reduce_ns, candidate.candidate.name)
    return Strategy.of(last, layout.dp, reduce_ns + ramp_ns, candidate.candidate.name)


def typical_pipeline(tables: Tables, candidate: SizedCandidate, max_quanta: int) -> TabledPipeline:
    """Return a pipeline of equal stages that represents typical times, for first packings; it is no bound.

    Its times interpolate between full micro-batches and micro-batches of an eighth of that on the last stage.
    """
    stages, layout = candidate.candidate.layout.pp, candidate.candidate.layout
    quanta = np.array([max(1, max_quanta // 8), max_quanta])
    times = ring_times(tables.problem, candidate.candidate, quanta)
    phases = []
    for phase, name in enumerate(("forward", "backward")):
        attention = tables.attention([stages - 1], phase, max_quanta)
        lines_of_phase = []
        for slope, base in zip(tables.slopes, times, strict=True):
            low, high = getattr(base, name)[-1].astype(np.float64)
            rise = (high - low) / max(1, quanta[1] - quanta[0])
            per_sequence = rise * tables.load.lengths / tables.load.token_quantum + slope * attention
            lines_of_phase.append(Affine(max(0.0, float(high - rise * quanta[1])), per_sequence))
        phases.append(max(lines_of_phase, key=lambda line: float(tables.load.counts @ line.sequence)))
    totals = [float(tables.load.counts @ line.sequence) for line in phases]
    parts = min(_PARTS - 1, max(1, round(_PARTS * totals[0] / sum(totals))))
    lines = [(parts, phases[0]), (_PARTS - parts, phases[1])]
    pipeline = _tabled(
        candidate, tables.load, max_quanta, lines, stages, int(tables.bare.transfer[max_quanta - 1])
    )
    return replace(pipeline, num_gpus=layout.num_gpus // layout.dp)


def _pipelines(
    tables: Tables, candidate: SizedCandidate, max_quanta: int
) -> tuple[TabledPipeline, TabledPipeline, int]:
    """Return the tables *equal* and *last*, and the ramp of *last* in ns."""
    stages, load = list(range(candidate.candidate.layout.pp)), tables.load
    at = min(float(max_quanta), load.num_quanta / (candidate.candidate.layout.dp * 4 * len(stages)))
    forward, backward = tables.stage(stages, max_quanta, max(1.0, at))
    totals = [float(load.counts @ line.sequence) for line in (forward, backward)]
    parts = min(_PARTS - 1, max(1, round(_PARTS * totals[0] / sum(totals))))
    transfer_ns = int(tables.bare.transfer[:max_quanta].min())
    equal = _tabled(
        candidate, load, max_quanta, [(parts, forward), (_PARTS - parts, backward)], len(stages), transfer_ns
    )
    ahead, back = tables.stage(stages[-1:], max_quanta, float(max_quanta))
    last = _tabled(candidate, load, max_quanta, [(1, ahead + back)])
    shortest = sum(line.constant + float(line.sequence.min()) for line in (forward, backward))
    return equal, last, int((len(stages) - 1) * (shortest + 2 * transfer_ns))


def _tabled(
    candidate: SizedCandidate,
    load: Load,
    max_quanta: int,
    lines: list[tuple[int, Affine]],
    num_stages: int = 1,
    transfer_ns: int = 0,
) -> TabledPipeline:
    """Return a pipeline whose phases take at least their parts of whole units of time."""
    layout = candidate.candidate.layout
    parts = sum(part for part, _ in lines)
    units = np.floor(np.min([line.sequence / part for part, line in lines], axis=0)).astype(np.int64)
    constant = int(min(line.constant / part for part, line in lines))
    return TabledPipeline(
        candidate.candidate.name,
        num_stages,
        0.0,
        0.0,
        float(constant * parts),
        max_quanta * load.token_quantum,
        transfer_ns=transfer_ns,
        forward_parts=lines[0][0],
        backward_parts=parts - lines[0][0],
        num_gpus=layout.num_gpus // layout.dp,
        table_lengths=tuple(load.lengths.tolist()),
        table=tuple(units.tolist()),
    )


def once_ns(candidate: SizedCandidate, term: Term) -> int:
    """Return the slowest stage's time of a term that is paid once a step: a reduction, a gather, an update."""
    return max(int(stage.terms[term, 0]) for stage in candidate.stages)


def finish_ns(candidate: SizedCandidate) -> int:
    """Return the time that ends a step at home: gradient norm, update and gather of the parameters."""
    return int(candidate.costs.barrier_ns) + once_ns(candidate, Term.OPTIMIZER) + once_ns(candidate, Term.GATHER)


@dataclass(frozen=True, eq=False)
class Timer:
    """Times of a strategy's micro-batches on every stage, in ns."""

    base: FloatArray
    """Times without attention by quanta, [2 (ring exposed, hidden), 2 phases, P, G]."""
    attention: FloatArray
    """Time that each sequence adds, [2, 2, P, n]."""
    once: FloatArray
    """Time of the last tiles if a length is the longest, [2, 2, P, n]."""
    transfer: FloatArray
    """Transfers between stages by quanta, [G]."""
    quanta: IntArray

    @staticmethod
    def of(tables: Tables, max_quanta: int) -> Timer:
        """Build the times for micro-batches of up to ``max_quanta`` quanta."""
        stages = range(tables.candidate.layout.pp)
        times = ring_times(tables.problem, tables.candidate, np.arange(1, max_quanta + 1))
        base = [[stage_times.forward, stage_times.backward] for stage_times in times]
        kernels = np.stack([[tables.kernels([stage], phase) for stage in stages] for phase in (0, 1)])
        slopes = np.array(tables.slopes)[:, None, None, None]
        return Timer(
            np.array(base, dtype=np.float64),
            slopes * kernels[:, :, 0],
            slopes * kernels[:, :, 1],
            tables.bare.transfer[:max_quanta].astype(np.float64),
            tables.load.lengths // tables.load.token_quantum,
        )

    def for_lengths(self, lengths: IntArray) -> Timer:
        """Return the timer restricted to some lengths."""
        attention, once = self.attention[..., lengths], self.once[..., lengths]
        return replace(self, attention=attention, once=once, quanta=self.quanta[lengths])

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return int(self.base.shape[2])

    @property
    def max_quanta(self) -> int:
        """Capacity of a micro-batch in quanta."""
        return int(self.base.shape[-1])

    @property
    def full_quanta(self) -> int:
        """Capacity: micro-batches within it may follow each other in any number."""
        return self.max_quanta

    @property
    def max_micro_batches(self) -> int | None:
        """Maximum number of micro-batches of a replica: any."""
        return None

    def phases(self, packed: IntArray) -> FloatArray:
        """Return forward and backward times [2, P, v] of micro-batches [v, n]: 0 if empty; tokens beyond the
        capacity are not counted."""
        quanta, longest = packed @ self.quanta, packed.shape[1] - 1 - (packed[:, ::-1] > 0).argmax(axis=1)
        options = (
            self.base[..., np.minimum(np.maximum(quanta, 1), self.max_quanta) - 1]
            + self.attention @ packed.T
            + self.once[..., longest]
        )
        return np.where(quanta > 0, options.max(axis=0), 0.0)

    def lags(self, quanta: IntArray) -> FloatArray:
        """Return the transfer times of micro-batches with ``quanta`` [...]."""
        return np.asarray(self.transfer[np.maximum(quanta, 1) - 1])

    @property
    def lines(self) -> tuple[FloatArray, FloatArray]:
        """Means of all stages between full micro-batches and an eighth of them, with the ring hidden."""
        high, low = self.max_quanta, max(1, self.max_quanta // _SMALL)
        base = self.base[1, :, -1]
        slopes = (base[:, -1] - base[:, low - 1]) / max(1, high - low)
        sequence = self.attention[1, :, -1] + slopes[:, None] * self.quanta
        return np.maximum(0.0, base[:, -1] - slopes * high), sequence

    def allows(self, packed: IntArray) -> bool:
        """Return True: micro-batches within the capacity may follow each other in any number."""
        return True
