"""Batches of training on degrees side by side: how long a dispatch takes, and how near its bound it comes.

    python -m benchmarks.team_batches [--batches 4] [--write]

Batches of 64, 512 and 2,048 sequences are drawn from Wikipedia's 2,048 with a seed, and cut at the longest length
of each cluster's job. CPU time of one dispatch, without a search and with one; gaps of both to their own bounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.length_jobs import K, Wikipedia
from benchmarks.tables import markdown_table, replace_section
from milpplan import Job, Problem, load_hardware, load_model
from milpplan.lengths.dispatch.team_dispatch import TeamDispatch, TeamDispatcher
from milpplan.lengths.tabled.problem import Int64Array

DOCUMENT = Path(__file__).parent / "results" / "dispatch.md"
SIZES = (64, 512, 2048)
HEADER = ("cluster", "sequences", "CPU ms", "gap", "with a search: CPU s", "gap", "step shorter by")


@dataclass(frozen=True, slots=True)
class Cluster:
    """Teams of one tensor parallelism, and the longest sequence."""

    model: str
    hardware: str
    num_gpus: int
    tp: int
    longest: int

    @property
    def dispatcher(self) -> TeamDispatcher:
        """That of the cluster."""
        job = Job(num_gpus=self.num_gpus, global_batch_size=1, sequence_length=128)
        problem = Problem(model=load_model(self.model), hardware=load_hardware(self.hardware), job=job)
        return TeamDispatcher(problem, self.tp, self.longest)


CLUSTERS = (
    Cluster("llama2-7b", "dgx-a100-80", 16, 1, 32 * K),
    Cluster("llama2-7b", "dgx-h100", 64, 1, 128 * K),
    Cluster("llama2-13b", "dgx-a100-80", 64, 2, 64 * K),
    Cluster("llama-33b", "dgx-h100", 64, 4, 128 * K),
)


def drawn(size: int, longest: int, number: int) -> list[Int64Array]:
    """So many batches."""
    random, lengths = np.random.default_rng(size), Wikipedia(2048).lengths()
    return [np.minimum(random.choice(lengths, size), longest) for _ in range(number)]


def timed(dispatcher: TeamDispatcher, batch: Int64Array, *, thorough: bool) -> tuple[TeamDispatch, float]:
    """A dispatch and its CPU seconds."""
    begin = time.process_time()
    found = dispatcher.dispatch(batch, thorough=thorough)
    return found, time.process_time() - begin


def row(cluster: Cluster, dispatcher: TeamDispatcher, size: int, number: int) -> list[str]:
    """So many batches of one size: the least and the most of each figure."""
    ms, gaps, seconds, search_gaps, gains = [], [], [], [], []
    for batch in drawn(size, cluster.longest, number):
        quick, quick_s = timed(dispatcher, batch, thorough=False)
        searched, searched_s = timed(dispatcher, batch, thorough=True)
        ms.append(1e3 * quick_s)
        seconds.append(searched_s)
        gaps.append(100.0 * quick.gap)
        search_gaps.append(100.0 * searched.gap)
        gains.append(100.0 * (1.0 - searched.step_time_s / quick.step_time_s))
    name = f"{cluster.model}, {cluster.num_gpus} x {cluster.hardware}, tp{cluster.tp}"
    spans = zip((ms, gaps, seconds, search_gaps, gains), (0, 1, 1, 1, 1), strict=True)
    cells = [f"{min(one):.{digits}f} to {max(one):.{digits}f}" for one, digits in spans]
    return [name, f"{size:,}", cells[0], cells[1] + " %", cells[2], cells[3] + " %", cells[4] + " %"]


def written(
    description: str, name: str, header: Sequence[str], rows: Callable[[int], Iterator[list[str]]]
) -> None:
    """Print the rows of so many batches of each size, as the command line says, or write them as the table of that
    name of benchmarks/results/dispatch.md, too."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--batches", type=int, default=4, help="of each size (4)")
    parser.add_argument("--write", action="store_true", help="replace the table in benchmarks/results/dispatch.md")
    words = parser.parse_args()
    if words.batches < 1:
        parser.error("one batch at least is expected for --batches")
    table = []
    for one in rows(words.batches):
        table.append(one)
        print(" | ".join(one), flush=True)
    if words.write:
        replace_section(DOCUMENT, name, markdown_table(header, table))


def rows(number: int) -> Iterator[list[str]]:
    """Those of all clusters and sizes."""
    for cluster in CLUSTERS:
        dispatcher = cluster.dispatcher
        # What is imported at first is not the batch's.
        dispatcher.dispatch([128] * 64)
        for size in SIZES:
            yield row(cluster, dispatcher, size, number)


if __name__ == "__main__":
    written(__doc__ or "", "batches", HEADER, rows)
