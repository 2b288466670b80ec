"""What pairs of a forward and a backward save a rank in a step, and what of its communication they cover."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from milpplan.problem.plan import PAIRED_SCHEDULES, Layout
from milpplan.simulation.layers.terms import PAIRED, WORK
from milpplan.simulation.pipeline.work_order import num_pairs
from milpplan.simulation.stages import StageOptions


def saved_in_pairs_ns(layout: Layout, stages: Sequence[StageOptions], rank: int) -> int:
    """What a rank's forwards and backwards in pairs are shorter than alone, all micro-batches together."""
    if layout.schedule not in PAIRED_SCHEDULES:
        return 0
    first, second = (stages[j].terms[:, 0] for j in layout.rank_stages[rank])
    saved = np.stack([terms[list(WORK[:2])] - terms[list(PAIRED)] for terms in (first, second)])
    one, other = num_pairs(layout.pp, layout.num_micro_batches, rank)
    return int(one * (saved[0, 0] + saved[1, 1]) + other * (saved[1, 0] + saved[0, 1]))


def covered_by_pairs(breakdown: dict[str, int], saved_ns: int) -> dict[str, int]:
    """Take what pairs save off the exposed communication of a rank, that of experts first, then off the waits for
    launches; says what of each kind is covered so."""
    covered = {}
    for name, part in (*((kind, f"{kind}_exposed") for kind in ("ep", "tp", "cp", "zero")), ("launch", "launch")):
        covered[name] = min(saved_ns, breakdown[part])
        breakdown[part] -= covered[name]
        saved_ns -= covered[name]
    assert saved_ns == 0, "pairs save communication and launches only"
    return covered
