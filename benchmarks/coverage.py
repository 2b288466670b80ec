"""Coverage of error bars: measured runs within one sigma of their prediction, by framework.

    python -m benchmarks.coverage [--write benchmarks/results/accuracy.md]

Three kinds of forecast, each of at most ``MAX_RUNS`` runs of a source:

- without constants of the framework: nothing is fitted, and every constant has its prior's sigma;
- sweeps kept aside: constants fitted to four fifths of a stack's runs predict the last (``benchmarks.fifths``);
- sources left out: constants fitted to the other sources of a framework and generation (``benchmarks.leave_out``),
  with the spread between clusters that shipped stacks have.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.fifths import NUM_PARTS, labels, stacks
from benchmarks.fit_stacks import CHOSEN, CONSTANTS, LEAST_RUNS, SEED, Part, parts
from benchmarks.tables import markdown_table, replace_section
from milpplan.calibration.coverage import MAX_RUNS, Coverage, mean_share, within_one_sigma
from milpplan.calibration.fitting.fit import fit
from milpplan.calibration.fitting.records import Fit
from milpplan.calibration.measured import Observation, observations
from milpplan.problem.hardware import HardwareSpec
from milpplan.problem.overlay import applied, on_other_clusters
from milpplan.simulation.simulator import simulate
from milpplan.units import percent_text
from milpplan.validation.runs.reader import read_runs
from milpplan.validation.runs.variants import generation_of, is_scored

KINDS: Final = ("without constants", "sweeps kept aside", "sources left out")
FITTED_TO: Final = 40
"""Runs that constants are fitted to: a sample, because coverage needs no exact constants."""


def is_within(run: Observation, hardware: HardwareSpec, predicted_s: float | None = None) -> bool:
    """Test whether a run lies within one sigma of its prediction on a description.

    ``predicted_s`` replaces the description's prediction; the error bar keeps its share of the step.
    """
    problem = run.problem.model_copy(update={"hardware": hardware})
    step_s = simulate(problem, run.plan).step_time_s
    scale = 1.0 if predicted_s is None else predicted_s / step_s
    return within_one_sigma(problem, run.plan, step_s, run.step_time_s / scale)


def chosen(runs: Sequence[Observation], number: int, seed: int = SEED) -> list[int]:
    """Draw at most ``number`` rows, in order."""
    if len(runs) <= number:
        return list(range(len(runs)))
    return sorted(int(row) for row in np.random.default_rng(seed).choice(len(runs), number, replace=False))


def without_constants(runs: Sequence[Observation]) -> Coverage:
    """Count the runs of a source within one sigma of the priors."""
    rows = chosen(runs, MAX_RUNS)
    return Coverage(
        runs[0].group, len(rows), sum(is_within(runs[row], runs[row].problem.hardware) for row in rows)
    )


def kept_aside(part: Part, sweeps: dict[str, str | None]) -> Coverage:
    """Count the runs of a stack within one sigma of constants fitted without their fifth."""
    runs = [part.runs[row] for row in chosen(part.runs, FITTED_TO)]
    names = labels(runs, sweeps)
    number = min(NUM_PARTS, len(set(names)))
    result = fit(runs, constants=part.constants, groups=names, num_folds=number, hops=False)
    rows = [row for row in chosen(runs, MAX_RUNS) if np.isfinite(result.left_out_s[row])]
    inside = [
        is_within(runs[row], fitted_hardware(runs[row], result), float(result.left_out_s[row])) for row in rows
    ]
    return Coverage(part.name, len(rows), sum(inside))


def fitted_hardware(run: Observation, result: Fit) -> HardwareSpec:
    """Apply fitted constants to the description of a run."""
    base = run.problem.hardware
    return applied(base, result.overlay(base=base, name="fitted", data="", date=""))


def source_left_out(own: Sequence[Observation], others: Sequence[Observation]) -> Coverage:
    """Count the runs of a source within one sigma of constants fitted to other sources."""
    seen = [others[row] for row in chosen(others, FITTED_TO)]
    result = fit(seen, constants=CHOSEN.get(seen[0].stack, CONSTANTS), num_folds=NUM_PARTS, hops=False)
    rows = chosen(own, MAX_RUNS)
    inside = [is_within(own[row], on_other_clusters(fitted_hardware(own[row], result))) for row in rows]
    return Coverage(own[0].group, len(rows), sum(inside))


def coverages() -> Iterator[tuple[str, str, Coverage]]:
    """Yield the framework, the kind of forecast, and the coverage of each source or stack."""
    file = read_runs(None)
    found, _ = observations(file)
    groups: dict[tuple[str, str], dict[str, list[Observation]]] = defaultdict(lambda: defaultdict(list))
    for run in found:
        if is_scored(run.problem.hardware.name):
            groups[run.stack or "other", generation_of(run.problem.hardware)][run.group].append(run)
    for (stack, _), by_source in sorted(groups.items()):
        for name, own in sorted(by_source.items()):
            yield stack, KINDS[0], without_constants(own)
            others = [run for source, runs in by_source.items() if source != name for run in runs]
            if stack != "other" and len(others) >= LEAST_RUNS:
                yield stack, KINDS[2], source_left_out(own, others)
    sweeps = {run.id: run.sweep_id for run in file.runs}
    for part in parts(stacks()):
        yield part.runs[0].stack, KINDS[1], kept_aside(part, sweeps)


def table(rows: Sequence[tuple[str, str, Coverage]]) -> str:
    """Make a row a framework with the runs within one sigma by kind, and a last row of means over sources."""
    frameworks = sorted({framework for framework, _, _ in rows})
    cells = [
        [
            framework,
            *(_cell([part for name, how, part in rows if (name, how) == (framework, kind)]) for kind in KINDS),
        ]
        for framework in frameworks
    ]
    means = [mean_share([part for _, how, part in rows if how == kind]) for kind in KINDS]
    last = ["**mean of sources**", *("-" if mean is None else percent_text(mean, 0) for mean in means)]
    return markdown_table(("framework", *KINDS), [*cells, last])


def _cell(found: Sequence[Coverage]) -> str:
    if not found:
        return "-"
    return f"{sum(part.num_within for part in found)} of {sum(part.num_runs for part in found)}"


def main() -> None:
    """Count, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="put the table there")
    arguments = parser.parse_args()
    rows = []
    for framework, kind, part in coverages():
        print(f"{framework}, {kind}: {part.name} {part.num_within} of {part.num_runs}", flush=True)
        rows.append((framework, kind, part))
    text = table(rows)
    print(text)
    if arguments.write is not None:
        replace_section(arguments.write, "coverage", text)


if __name__ == "__main__":
    main()
