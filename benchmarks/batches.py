"""Batches of training under a step that was solved: how long a dispatch takes, and how near its bound it comes.

    python -m benchmarks.batches [--batches 4] [--write]

Strategies are those of a step of Wikipedia's 2,048 sequences, cut at the longest length of each cluster's job and
solved for 15 seconds, in turn in a space of so many stages, or side by side; batches of 64 to 2,048 are drawn from
these sequences with a seed. Median CPU time of a dispatch, and gaps to their own
bounds; "own step" is the dispatched step of the sequences that were solved for, against the solver's.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.length_jobs import ALIGNMENT, Case, K, Wikipedia
from benchmarks.tables import markdown_table, replace_section
from milpplan import LengthsResult, Problem, solve_lengths
from milpplan.lengths.dispatch.dispatcher import Dispatcher
from milpplan.lengths.tabled.problem import Int64Array

DOCUMENT = Path(__file__).parent / "results" / "dispatch.md"
SIZES = (64, 512, 2048)
HEADER = ("strategies", "made in s", "own step", *(f"{size:,}" for size in SIZES))
_SOLVE_S = 15.0


@dataclass(frozen=True, slots=True)
class Solved:
    """At most ``max_strategies`` in turn, of so many ``stages``, or degrees ``beside`` each other, for the
    sequences of a job."""

    case: Case
    stages: tuple[int, ...]
    max_strategies: int = 1
    beside: bool = False

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
            side_by_side=self.beside,
        )


ALL = Wikipedia(2048)
CASES = (
    Solved(Case("llama2-7b", "dgx-a100-80", 16, 32 * K, ALL, context=False), (1,), 2),
    Solved(Case("llama2-7b", "dgx-a100-80", 16, 32 * K, ALL, context=False), (2,)),
    Solved(Case("llama2-13b", "dgx-a100-80", 32, 32 * K, ALL, context=False), (4,)),
    Solved(Case("llama2-13b", "dgx-a100-80", 32, 32 * K, ALL, context=False), (8,)),
    Solved(Case("llama-33b", "dgx-h100", 32, 64 * K, ALL, context=False), (1, 4), 2),
    Solved(Case("llama2-7b", "dgx-a100-80", 16, 32 * K, ALL), (1,), beside=True),
    Solved(Case("llama2-7b", "dgx-h100", 64, 128 * K, ALL), (1,), beside=True),
    Solved(Case("llama2-13b", "dgx-a100-80", 64, 64 * K, ALL), (1,), beside=True),
    Solved(Case("llama-33b", "dgx-h100", 64, 128 * K, ALL), (1,), beside=True),
)


def drawn(size: int, longest: int, number: int) -> list[Int64Array]:
    """So many batches."""
    random, lengths = np.random.default_rng(size), Wikipedia(2048).lengths()
    return [np.minimum(random.choice(lengths, size), longest) for _ in range(number)]


def row_of(step: Solved, sizes: tuple[int, ...], number: int, seconds: float = _SOLVE_S) -> list[str]:
    """So many batches of each size: median CPU time, and the range of gaps."""
    result, begin = step.solved(seconds), time.process_time()
    dispatcher = Dispatcher(result)
    made = f"{time.process_time() - begin:.1f}"
    case, names = step.case, ", then ".join(group.strategy for group in result.groups)
    if step.beside:
        names = f"degrees side by side, tp{result.groups[0].plan.layout.tp}"
    own = dispatcher.dispatch(np.repeat(case.workload.lengths, case.workload.counts))
    longer = f"{100.0 * (own.step_time_s / result.step_time_s - 1.0):+.1f} %"
    cells = [f"{case.model}, {case.num_gpus} x {case.hardware}: {names}", made, longer]
    for size in sizes:
        ms, gaps = [], []
        for batch in drawn(size, min(case.longest, dispatcher.longest), number):
            begin = time.process_time()
            one = dispatcher.dispatch(batch)
            ms.append(1e3 * (time.process_time() - begin))
            gaps.append(100.0 * one.gap)
        cells.append(f"{np.median(ms):.0f} ms, {np.min(gaps):.1f} to {np.max(gaps):.1f} %")
    return cells


def main() -> None:
    """Print a row for each step, and write them as the table if that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batches", type=int, default=4, help="of each size (4)")
    parser.add_argument("--write", action="store_true", help="replace the table in benchmarks/results/dispatch.md")
    words = parser.parse_args()
    if words.batches < 1:
        parser.error("one batch at least is expected for --batches")
    table = []
    for step in CASES:
        table.append(row_of(step, SIZES, words.batches))
        print(" | ".join(table[-1]), flush=True)
    if words.write:
        replace_section(DOCUMENT, "turns", markdown_table(HEADER, table))


if __name__ == "__main__":
    main()
