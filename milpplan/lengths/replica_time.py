"""The exact time of a strategy's replicas: every micro-batch with its own lengths, every stage with its layers.

Stage p of P runs min(P - p - 1, v) forwards first, then a forward and a backward in turn (the order of
``groups.pipeline``, whose stages are equal):

    F[p, m] = f[p, m] + max(F[p-1, m] + l_m, previous item of p)
    B[p, m] = b[p, m] + max(B[p+1, m] + l_m, previous item of p)

with f, b and l_m the times of the packed micro-batch (``costs.packed``); the time is B[0, v-1].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.lengths.candidates import Candidate
from milpplan.problem.problem import Problem
from milpplan.simulation.layers.kernels import Mask
from milpplan.simulation.layers.terms import Phase
from milpplan.simulation.layout_columns import IntArray
from milpplan.simulation.packed_sequences import PackedTimes, packed_times_of, sequence_cores


def pipeline_ns(forward: IntArray, backward: IntArray, transfer: IntArray) -> int:
    """Time of a 1F1B pipeline, ``forward`` and ``backward`` [P, v], ``transfer`` [v] in ns."""
    num_stages, number = forward.shape
    if num_stages == 1:
        return int(forward.sum() + backward.sum())
    ahead, back = forward.T.tolist(), backward.T.tolist()
    lag = transfer.tolist()
    ends, done = [0] * num_stages, [0] * (num_stages + 1)
    for turn in range(number + num_stages):
        arrival = 0
        for stage in range(num_stages):
            old = turn - num_stages + stage
            if 0 <= old < number:
                # Its backward on the next stage ended in the turn before.
                ready = done[stage + 1] + lag[old] if stage + 1 < num_stages else 0
                ends[stage] = done[stage] = max(ends[stage], ready) + back[old][stage]
            if turn < number:
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
    """Layers of each kind on every stage, [P, K]."""
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
    """What every stage takes for the micro-batches of ``times``, recomputation in the backward."""
    phases = times.phases(launches=launches)
    layers = stage_layers(problem, candidate)
    backward = phases[:, Phase.BACKWARD]
    if candidate.recompute != "none":
        backward = backward + phases[:, Phase.FULL if candidate.recompute == "full" else Phase.SELECTIVE]
    each = np.stack([layers @ phases[:, Phase.FORWARD], layers @ backward])
    each[:, 0] += times.ends[0]
    each[:, -1] += times.ends[1]
    return StageTimes(each[0], each[1], times.transfer)


def micro_batch_times(
    problem: Problem, candidate: Candidate, lengths: IntArray, packed: IntArray, mask: Mask = "causal"
) -> StageTimes:
    """Exact times of micro-batches: ``packed`` [m, n] sequences of the ascending ``lengths`` [n], none empty."""
    return times_of_several(problem, [(candidate, packed)], lengths, mask)[0]


def times_of_several(
    problem: Problem, parts: Sequence[tuple[Candidate, IntArray]], lengths: IntArray, mask: Mask = "causal"
) -> list[StageTimes]:
    """``micro_batch_times`` of several strategies, each with its micro-batches; all in one go, as what is little
    for one strategy is little for all of them."""
    packed = np.concatenate([rows for _, rows in parts])
    ends = np.cumsum([len(rows) for _, rows in parts]).tolist()
    slices = [slice(end - len(rows), end) for end, (_, rows) in zip(ends, parts, strict=True)]
    grains = packed @ lengths // problem.job.sequence_length
    # The longest sequence of each decides the last tiles.
    longest = packed.shape[1] - 1 - np.argmax(packed[:, ::-1] > 0, axis=1)
    cores = np.empty((len(problem.model.kinds), 2, len(packed)))
    for place, kind in enumerate(problem.model.kinds):
        for (candidate, rows), part in zip(parts, slices, strict=True):
            each = sequence_cores(problem, kind, candidate.layout, lengths, mask)
            cores[place, :, part] = each.sequence_s @ rows.T + each.once_s[:, longest[part]]
    owners = np.repeat(np.arange(len(parts)), [len(rows) for _, rows in parts])
    layouts = [candidate.layout for candidate, _ in parts]
    times = packed_times_of(problem, layouts, owners, grains, cores)
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
    """Exact time of every replica of a strategy, each given as micro-batches [v, n] of counts of ``lengths``."""
    return replicas_of_several(problem, [(candidate, replicas)], lengths, mask)[0]


def replicas_of_several(
    problem: Problem,
    parts: Sequence[tuple[Candidate, tuple[IntArray, ...]]],
    lengths: IntArray,
    mask: Mask = "causal",
) -> list[IntArray]:
    """``replicas_ns`` of several strategies, each with its replicas; all in one go."""
    held = [(one, np.concatenate(replicas)) for one, replicas in parts if sum(map(len, replicas))]
    timed = iter(times_of_several(problem, held, lengths, mask) if held else [])
    found = []
    for _, replicas in parts:
        times, start = next(timed) if sum(map(len, replicas)) else None, 0
        each = np.zeros(len(replicas), dtype=np.int64)
        for place, one in enumerate(replicas):
            part = slice(start, start + len(one))
            start = part.stop
            if times is not None and len(one):
                each[place] = pipeline_ns(times.forward[:, part], times.backward[:, part], times.transfer[part])
        found.append(each)
    return found
