"""Micro-batches without attention, and with so much of it that it hides the ring of context parallelism.

Between the two lies whatever a micro-batch takes (``tables``). Of many layouts they are looked at together: a call
of the cost model is dearer than some thousand micro-batches in it.
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
# Micro-batches that are looked at together.
_ROWS = 4_000


def layout_times(problem: Problem, most: Mapping[Layout, int]) -> dict[Layout, list[PackedTimes]]:
    """Micro-batches of every number of grains up to the most of each layout, without attention and with so much
    that it hides the ring."""
    parts: list[list[Layout]] = [[]]
    for layout in most:
        if sum(most[one] for one in parts[-1]) + most[layout] > _ROWS and parts[-1]:
            parts.append([])
        parts[-1].append(layout)
    found: dict[Layout, list[PackedTimes]] = {}
    for part in parts:
        sizes = [most[layout] for layout in part]
        rows, ends = np.repeat(np.arange(len(part)), sizes), np.cumsum(sizes).tolist()
        grains = np.concatenate([np.arange(1, size + 1) for size in sizes])
        cores = np.zeros((len(problem.model.kinds), 2, 2, len(grains)))
        cores[:, :, 1] = _LONG_S
        flat = cores.reshape(*cores.shape[:2], -1)
        times = packed_times_of(problem, part, np.tile(rows, 2), np.tile(grains, 2), flat)
        for layout, size, end in zip(part, sizes, ends, strict=True):
            starts = (end - size, end - size + len(grains))
            found[layout] = [times.part(slice(start, start + size)) for start in starts]
    return found


def ring_times(
    problem: Problem, candidate: Candidate, grains: IntArray, *, launches: bool
) -> tuple[StageTimes, StageTimes]:
    """Micro-batches of ``grains`` [G] without attention; and with so much that it hides the ring, less it."""
    kinds = problem.model.kinds
    times = [
        packed_times(problem, candidate.layout, grains, np.full((len(kinds), 2, len(grains)), core_s))
        for core_s in (0.0, _LONG_S)
    ]
    return staged(problem, candidate, times, launches=launches)


def staged(
    problem: Problem, candidate: Candidate, times: Sequence[PackedTimes], *, launches: bool
) -> tuple[StageTimes, StageTimes]:
    """``ring_times`` of a candidate by those of a layer of its layout."""
    bare, hidden = (stage_times(problem, candidate, one, launches=launches) for one in times)
    long_ns = stage_layers(problem, candidate).sum(axis=1)[:, None] * round(_LONG_S * NS_PER_S)
    replays = 2 if candidate.recompute == "full" else 1
    return bare, StageTimes(hidden.forward - long_ns, hidden.backward - replays * long_ns, hidden.transfer)
