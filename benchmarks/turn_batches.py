"""Batches of training under strategies in turn: how long a dispatch takes, and how near its bound it comes.

    python -m benchmarks.turn_batches [--batches 4] [--write]

Strategies are those of a step of Wikipedia's 2,048 sequences, cut at the longest length of each cluster's job and
solved for 15 seconds in a space of so many stages; batches of 64 to 2,048 are drawn from these sequences with a
seed. CPU time of one dispatch, and gaps to their own bounds.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np

from benchmarks.length_jobs import ALIGNMENT, K, Wikipedia
from benchmarks.tables import markdown_table, replace_section
from benchmarks.team_batches import DOCUMENT, drawn
from milpplan import Job, LengthsResult, Problem, Space, load_hardware, load_model, solve_lengths, workload_of
from milpplan.lengths.turn_dispatch import TurnDispatcher

SIZES = (64, 256, 512, 1024, 2048)
HEADER = ("strategies", "made in s", "sequences", "CPU ms", "gap")
_SOLVE_S = 15.0


@dataclass(frozen=True, slots=True)
class Turns:
    """At most ``max_strategies`` in turn without context parallelism, of so many ``stages``."""

    model: str
    hardware: str
    num_gpus: int
    longest: int
    stages: tuple[int, ...]
    max_strategies: int = 1

    @property
    def problem(self) -> Problem:
        """The problem without its lengths."""
        return Problem(
            model=load_model(self.model),
            hardware=load_hardware(self.hardware),
            job=Job(num_gpus=self.num_gpus, global_batch_size=1, sequence_length=ALIGNMENT),
            space=Space(cp=(1,), pp=self.stages),
        )

    def solved(self, seconds: float = _SOLVE_S) -> LengthsResult:
        """The step of all sequences."""
        workload = workload_of(Wikipedia(2048).lengths(), ALIGNMENT, self.longest)
        return solve_lengths(
            self.problem, workload, ALIGNMENT, self.max_strategies, time_limit_s=seconds, side_by_side=False
        )


CASES = (
    Turns("llama2-7b", "dgx-a100-80", 16, 32 * K, (1,), 2),
    Turns("llama2-7b", "dgx-a100-80", 16, 32 * K, (2,)),
    Turns("llama2-13b", "dgx-a100-80", 32, 32 * K, (4,)),
    Turns("llama2-13b", "dgx-a100-80", 32, 32 * K, (8,)),
    Turns("llama-33b", "dgx-h100", 32, 64 * K, (1, 4), 2),
)


def rows(case: Turns, sizes: tuple[int, ...], number: int, seconds: float = _SOLVE_S) -> list[list[str]]:
    """So many batches of each size: the least and the most of each figure."""
    result, begin = case.solved(seconds), time.process_time()
    dispatcher = TurnDispatcher(case.problem, result)
    made = f"{time.process_time() - begin:.1f}"
    names = ", then ".join(group.strategy for group in result.groups)
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
        cells = [f"{np.min(ms):.0f} to {np.max(ms):.0f}", f"{np.min(gaps):.1f} to {np.max(gaps):.1f} %"]
        found.append([f"{case.model}, {case.num_gpus} x {case.hardware}: {names}", made, f"{size:,}", *cells])
    return found


def main() -> None:
    """Print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batches", type=int, default=4, help="of each size (4)")
    parser.add_argument("--write", action="store_true", help="replace the table in docs/dispatch.md")
    words = parser.parse_args()
    if words.batches < 1:
        parser.error("one batch at least is expected for --batches")
    table = []
    for case in CASES:
        for row in rows(case, SIZES, words.batches):
            table.append(row)
            print(" | ".join(row), flush=True)
    if words.write:
        replace_section(DOCUMENT, "turns", markdown_table(HEADER, table))


if __name__ == "__main__":
    main()
