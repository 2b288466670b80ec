"""Least worst-case regret: time and proof on large problems, and measured regret of picks in published sweeps.

python -m benchmarks.robust problems [NAME ...] [--write]
python -m benchmarks.robust sweeps [--write]
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from statistics import fmean

from benchmarks.problems import CASES, Case
from benchmarks.tables import layout_text, markdown_table, replace_section
from milpplan import Problem, Scenario, SolveOptions, solve_robust
from milpplan.optimize.records import ROBUST_GAP
from milpplan.problem.scenarios import default_scenarios, in_scenario
from milpplan.simulation.simulator import simulate
from milpplan.units import percent_text, seconds_text
from milpplan.validation.comparison import Comparison, compare
from milpplan.validation.ranking import competitions
from milpplan.validation.runs.reader import read_runs

RESULTS = Path(__file__).parent / "results" / "robust.md"
# README's first problem.
README = Case("llama3-512", "llama3-70b", "dgx-h100", 512, 1024, 8192)
PROBLEMS = {case.name: case for case in (*CASES.values(), README)}
HEADER = (
    *("problem", "wall", "CPU", "loses at most", "no plan promises less than", "apart"),
    *("best nominal plan loses", "proof", "robust plan"),
)
SWEEP_HEADER = ("sweep", "runs", "nominal pick", "robust pick")


def cpu_s() -> float:
    """CPU seconds of this process and its children."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in spent)


def solved(case: Case, options: SolveOptions) -> tuple[str, ...]:
    """Solve a problem in the free space; a row of the table."""
    started, before = time.monotonic(), cpu_s()
    result = solve_robust(case.problem("free"), options=options)
    regret = result.regret
    if regret is None or result.plan is None:
        return (case.text(), *("-",) * (len(HEADER) - 1))
    at_most, at_least = regret.at_most, regret.at_least
    proved = at_most is not None and at_least is not None
    return (
        case.text(),
        seconds_text(time.monotonic() - started),
        seconds_text(cpu_s() - before),
        "-" if at_most is None else percent_text(at_most, 2),
        "-" if at_least is None else percent_text(at_least, 2),
        percent_text((at_most or 0.0) - (at_least or 0.0), 2) if proved else "-",
        percent_text(regret.nominal),
        result.status,
        layout_text(result.plan),
    )


def _problem(run: Comparison) -> Problem:
    return run.statement.problem


def _step_s(run: Comparison, scenario: Scenario) -> float:
    return simulate(in_scenario(_problem(run), scenario), run.statement.plan).step_time_s


def picks(runs: list[Comparison]) -> tuple[float, float]:
    """Measured regret of the run with the shortest prediction, and of that with the least worst-case regret over
    the default scenarios, both among the runs of a sweep."""
    ran = [run for run in runs if run.step is not None]
    measured = [run.step.step_time_s for run in ran if run.step is not None]
    nominal = [run.report.step_time_s for run in ran]
    steps = [nominal, *([_step_s(run, entry) for run in ran] for entry in default_scenarios(_problem(ran[0])))]
    # Loss of every run to the best run of each scenario.
    losses = [[seconds / min(times) for seconds in times] for times in steps]
    regrets = list(map(max, zip(*losses, strict=True)))
    chosen = nominal.index(min(nominal)), regrets.index(min(regrets))
    first, robust = (measured[index] / min(measured) - 1.0 for index in chosen)
    return first, robust


def sweep_rows(stacks: bool) -> list[tuple[str, ...]]:
    """Measured regrets of both picks in every published sweep whose picks differ, and over all sweeps."""
    found = []
    for runs in competitions(compare(read_runs(None), stacks=stacks).comparisons):
        first = runs[0]
        layout = first.statement.plan.layout
        sweep = first.run.sweep_id or first.run.model.name
        name = f"{sweep}, {layout.num_gpus} GPUs, batch {layout.global_batch_size}"
        found.append((name, sum(run.step is not None for run in runs), *picks(runs)))
    rows = [
        (name, str(number), percent_text(nominal), percent_text(robust))
        for name, number, nominal, robust in sorted(found)
        if nominal != robust
    ]
    for words, summary in (("mean", fmean), ("worst", max)):
        nominal, robust = (summary([entry[column] for entry in found]) for column in (2, 3))
        rows.append((f"**{words} of {len(found)} sweeps**", "", percent_text(nominal), percent_text(robust)))
    return rows


def main() -> None:
    """Run what is asked for, and print or write its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("problems", "sweeps"))
    parser.add_argument("names", nargs="*", default=list(PROBLEMS))
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    tables: dict[str, str] = {}
    if asked.what == "problems":
        options = SolveOptions(gap=ROBUST_GAP, time_limit_s=asked.time_limit)
        tables["problems"] = markdown_table(HEADER, [solved(PROBLEMS[name], options) for name in asked.names])
    else:
        tables["sweeps"] = markdown_table(SWEEP_HEADER, sweep_rows(stacks=True))
        tables["sweeps without stacks"] = markdown_table(SWEEP_HEADER, sweep_rows(stacks=False))
    for name, table in tables.items():
        print(table)
        if asked.write:
            replace_section(RESULTS, name, table)


if __name__ == "__main__":
    main()
