"""The exact time of a strategy's replicas: every micro-batch with its own lengths, every stage with its layers.

Stage p of P runs min(P - p - 1, v) forwards first, then a forward and a backward in turn (the order of
``groups.pipeline``, whose stages are equal):

    F[p, m] = f[p, m] + max(F[p-1, m] + l_m, previous item of p)
    B[p, m] = b[p, m] + max(B[p+1, m] + l_m, previous item of p)

with f, b and l_m the times of the packed micro-batch (``simulation.packed_sequences``); the time is B[0, v-1].

``ring_times`` has micro-batches without attention, and with enough of it to hide the ring of context parallelism.
The time of any micro-batch lies between the two (``cost_tables``). Many layouts are evaluated together, because a
call of the cost model has a high fixed cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.lengths.candidates import Candidate
from milpplan.problem import Layout, Problem
from milpplan.simulation import IntArray, packed_times, sequence_cores
from milpplan.simulation.layers import Phase
from milpplan.simulation.layers.kernels import Mask
from milpplan.simulation.packed_sequences import PackedTimes, packed_times_of
from milpplan.units import NS_PER_S

# Seconds of attention that hide any ring.
_LONG_S = 100.0
# Micro-batches evaluated in one call.
_ROWS = 4_000


def layout_times(problem: Problem, max_quanta: Mapping[Layout, int]) -> dict[Layout, list[PackedTimes]]:
    """Return the times of micro-batches of every number of quanta up to ``max_quanta`` of each layout, without
    attention and with the ring hidden."""
    parts: list[list[Layout]] = [[]]
    for layout in max_quanta:
        if sum(max_quanta[other] for other in parts[-1]) + max_quanta[layout] > _ROWS and parts[-1]:
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
        times = packed_times_of(problem, part, np.tile(rows, 2), np.tile(quanta, 2), flat)
        for layout, size, end in zip(part, sizes, ends, strict=True):
            starts = (end - size, end - size + len(quanta))
            times_of[layout] = [times.part(slice(start, start + size)) for start in starts]
    return times_of


def ring_times(problem: Problem, candidate: Candidate, quanta: IntArray) -> tuple[StageTimes, StageTimes]:
    """Return the times of micro-batches of ``quanta`` [G] quanta without attention, and with the ring hidden, less
    the attention."""
    kinds = problem.model.kinds
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
