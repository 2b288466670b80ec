"""Times of micro-batches without attention, and with enough of it to hide the ring of context parallelism.

The time of any micro-batch lies between the two (``cost_tables``). Many layouts are evaluated together, because a
call of the cost model has a high fixed cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from milpplan.lengths.candidates import Candidate
from milpplan.lengths.replica_time import StageTimes, stage_layers, stage_times
from milpplan.problem.plan import Layout
from milpplan.problem.problem import Problem
from milpplan.simulation.layout_columns import IntArray
from milpplan.simulation.packed_sequences import PackedTimes, packed_times, packed_times_of
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


def ring_times(
    problem: Problem, candidate: Candidate, quanta: IntArray, *, launches: bool
) -> tuple[StageTimes, StageTimes]:
    """Return the times of micro-batches of ``quanta`` [G] quanta without attention, and with the ring hidden, less
    the attention."""
    kinds = problem.model.kinds
    times = [
        packed_times(problem, candidate.layout, quanta, np.full((len(kinds), 2, len(quanta)), core_s))
        for core_s in (0.0, _LONG_S)
    ]
    return staged(problem, candidate, times, launches=launches)


def staged(
    problem: Problem, candidate: Candidate, times: Sequence[PackedTimes], *, launches: bool
) -> tuple[StageTimes, StageTimes]:
    """Return ``ring_times`` of a candidate from the times of a layer of its layout."""
    bare, hidden = (stage_times(problem, candidate, phase_times, launches=launches) for phase_times in times)
    long_ns = stage_layers(problem, candidate).sum(axis=1)[:, None] * round(_LONG_S * NS_PER_S)
    replays = 2 if candidate.recompute == "full" else 1
    return bare, StageTimes(hidden.forward - long_ns, hidden.backward - replays * long_ns, hidden.transfer)
