"""Batches of training under strategies in turn: how long a dispatch takes, and how near its bound it comes.

    python -m benchmarks.turn_batches [--batches 4] [--write]

Strategies are those of a step of Wikipedia's 2,048 sequences, cut at the longest length of each cluster's job and
solved for 15 seconds in a space of so many stages; batches of 64 to 2,048 are drawn from these sequences with a
seed. CPU time of one dispatch, and gaps to their own bounds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.length_jobs import ALIGNMENT, Case, K, Wikipedia
from benchmarks.team_batches import drawn, written
from milpplan import LengthsResult, Problem, solve_lengths
from milpplan.lengths.dispatch.turn_dispatch import TurnDispatcher

SIZES = (64, 256, 512, 1024, 2048)
HEADER = ("strategies", "made in s", "sequences", "CPU ms", "gap")
_SOLVE_S = 15.0


@dataclass(frozen=True, slots=True)
class Turns:
    """At most ``max_strategies`` in turn, of so many ``stages``, for the sequences of a job."""

    case: Case
    stages: tuple[int, ...]
    max_strategies: int = 1

    @property
    def problem(self) -> Problem:
        """The job's, with so many stages."""
        problem = self.case.problem
        return problem.model_copy(update={"space": problem.space.model_copy(update={"pp": self.stages})})

    def solved(self, seconds: float = _SOLVE_S) -> LengthsResult:
        """The step of all sequences."""
        return solve_lengths(
            self.problem,
            self.case.workload,
            ALIGNMENT,
            self.max_strategies,
            time_limit_s=seconds,
            side_by_side=False,
        )


ALL = Wikipedia(2048)
CASES = (
    Turns(Case("llama2-7b", "dgx-a100-80", 16, 32 * K, ALL, context=False), (1,), 2),
    Turns(Case("llama2-7b", "dgx-a100-80", 16, 32 * K, ALL, context=False), (2,)),
    Turns(Case("llama2-13b", "dgx-a100-80", 32, 32 * K, ALL, context=False), (4,)),
    Turns(Case("llama2-13b", "dgx-a100-80", 32, 32 * K, ALL, context=False), (8,)),
    Turns(Case("llama-33b", "dgx-h100", 32, 64 * K, ALL, context=False), (1, 4), 2),
)


def rows_of(turns: Turns, sizes: tuple[int, ...], number: int, seconds: float = _SOLVE_S) -> list[list[str]]:
    """So many batches of each size: the least and the most of each figure."""
    result, begin = turns.solved(seconds), time.process_time()
    dispatcher = TurnDispatcher(turns.problem, result)
    made = f"{time.process_time() - begin:.1f}"
    case, names = turns.case, ", then ".join(group.strategy for group in result.groups)
    cells = [f"{case.model}, {case.num_gpus} x {case.hardware}: {names}", made]
    # What is imported at first is not the batch's.
    dispatcher.dispatch([ALIGNMENT] * 64)
    found = []
    for size in sizes:
        ms, gaps = [], []
        for batch in drawn(size, min(case.longest, dispatcher.longest), number):
            begin = time.process_time()
            one = dispatcher.dispatch(batch)
            ms.append(1e3 * (time.process_time() - begin))
            gaps.append(100.0 * one.gap)
        spans = [f"{np.min(ms):.0f} to {np.max(ms):.0f}", f"{np.min(gaps):.1f} to {np.max(gaps):.1f} %"]
        found.append([*cells, f"{size:,}", *spans])
    return found


def rows(number: int) -> Iterator[list[str]]:
    """Those of all cases and sizes."""
    for one in CASES:
        yield from rows_of(one, SIZES, number)


if __name__ == "__main__":
    written(__doc__ or "", "turns", HEADER, rows)
