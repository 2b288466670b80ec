"""Scored runs as if their sweeps had been kept aside.

    python -m benchmarks.fifths [--processes N] [--write benchmarks/results/accuracy.md]

Constants of a software stack are fitted to runs of the sources that they then predict. Here the runs that each
stack is fitted to are dealt into five parts, whole sweeps together (of runs without one, those of a model), and
each part is predicted by constants fitted to the other four: linearised at the full fit, with the same constants
identified, the steps simulated exactly, as the column "left out" of the stacks is. Runs that no stack is fitted
to, because they are not in its sample or have none, are predicted as always. The table compares scored runs.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np

from benchmarks.fit_stacks import FLAGGED, parts
from benchmarks.leave_out import figures
from benchmarks.tables import markdown_table, replace_section
from milpplan.calibration.fitting.fit import fit
from milpplan.calibration.measured import Observation
from milpplan.problem.catalog import stack_names
from milpplan.validation.comparison import Comparison, compare, scored
from milpplan.validation.runs.frameworks import PLAIN_STACK
from milpplan.validation.runs.reader import read_runs

NUM_PARTS: Final = 5
HEADER: Final = ("generation", "source", "scored runs", "held out", "as fitted", "held out, error")


def stacks() -> list[str]:
    """Names of the stacks that are fitted to runs without flags, of one framework, the longest fits first."""
    others = {PLAIN_STACK, *FLAGGED}
    names = [name for name in stack_names() if name.split("+")[1] not in others]
    return sorted(names, key=lambda name: "nanotron" not in name)


def labels(runs: Sequence[Observation], sweeps: Mapping[str, str | None]) -> list[str]:
    """What is held out together: a sweep, else a model; layouts where that would be fewer than two parts."""
    found = [sweeps.get(run.id) or run.problem.model.name for run in runs]
    return found if len(set(found)) > 1 else [str(run.plan.layout) for run in runs]


def held_out(name: str) -> dict[str, float]:
    """Errors of the runs that a stack is fitted to, by id, each by constants fitted without its part."""
    sweeps = {run.id: run.sweep_id for run in read_runs(None).runs}
    (part,) = parts([name])
    names = labels(part.runs, sweeps)
    num_parts = min(NUM_PARTS, len(set(names)))
    result = fit(part.runs, constants=part.constants, groups=names, num_folds=num_parts, hops=False)
    ratios = result.left_out_s / result.measured_s - 1.0
    return {name: float(error) for name, error in zip(result.ids, ratios, strict=True) if np.isfinite(error)}


def table(runs: Sequence[Comparison], held: Mapping[str, float]) -> str:
    """A row a source of scored runs of dense models, and one a generation, every source weighing the same."""
    by_source: dict[tuple[str, str], list[Comparison]] = defaultdict(list)
    for one in scored(runs):
        if not one.has_experts:
            by_source[one.generation, one.run.group].append(one)
    return markdown_table(HEADER, list(_rows(by_source, held)))


def _rows(
    by_source: Mapping[tuple[str, str], Sequence[Comparison]], held: Mapping[str, float]
) -> Iterator[tuple[object, ...]]:
    for generation in sorted({name for name, _ in by_source}):
        means = []
        for (name, source), runs in sorted(by_source.items()):
            if name == generation:
                fitted = np.array([one.error_fraction or 0.0 for one in runs])
                aside = np.array([held.get(one.run.id, one.error_fraction or 0.0) for one in runs])
                yield (
                    generation,
                    source,
                    len(runs),
                    sum(one.run.id in held for one in runs),
                    *map(figures, (fitted, aside)),
                )
                means.append((np.abs(fitted).mean(), np.abs(aside).mean()))
        texts = [f"{100 * fmean(pair[place] for pair in means):.1f} %" for place in (0, 1)]
        yield f"**{generation}**", "mean of sources", "", "", *texts


def main() -> None:
    """Hold out, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="stacks at a time (2)")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="put the table there")
    arguments = parser.parse_args()
    names = stacks()
    held: dict[str, float] = {}
    with ProcessPoolExecutor(arguments.processes) as pool:
        for name, found in zip(names, pool.map(held_out, names), strict=True):
            print(f"{name}: {len(found)} runs held out", flush=True)
            held |= found
    text = table(compare(read_runs(None)).comparisons, held)
    print(text)
    if arguments.write is not None:
        replace_section(arguments.write, "kept aside", text)


if __name__ == "__main__":
    main()
