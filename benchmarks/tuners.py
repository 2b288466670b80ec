"""Black-box tuners against the proof, on the same space and the same cost.

    python -m benchmarks.tuners [--only NAME ...] [--space uniform free] [--seeds 10] [--evaluations 1000]
                                [--cpu-s 10] [--tuners NAME ...] [--json] > tuners.json
    python -m benchmarks.tuners --from tuners.json ... [--write FILE.md] [--figure FILE.svg]

For every problem ``milpplan.solve`` finds and proves the optimum first; then every tuner runs with every seed
until it is within 0.1 % of that, or its evaluations or CPU seconds are spent. ``benchmarks.tuner_encoding`` says
which knobs a tuner turns, ``benchmarks.tuner_search`` how. Seconds are CPU seconds of the process, all threads.
A tuner's best plan below the proved bound would disprove it, and stops the run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.problems import CASES, Case, Kind
from benchmarks.tables import markdown_table, measured_on, replace_section
from benchmarks.tuner_encoding import Encoding, tuned_problem
from benchmarks.tuner_figure import figure
from benchmarks.tuner_search import TUNERS, Budget, TunerRun, tune
from milpplan import PlanResult, solve
from milpplan.reports.files import write_whole
from milpplan.units import gap_text, percent_text, seconds_text

KINDS: tuple[Kind, ...] = ("uniform", "free")
LEVELS = (0.1, 0.01, 0.001)
"""Step time above the optimum, relative, at which evaluations and seconds are noted; the last ends a run."""
NEEDS = {"Optuna TPE": "optuna", "SMAC3": "smac"}
SETUPS = (("random", False), ("Optuna TPE", False), ("random", True), ("Optuna TPE", True), ("SMAC3", True))
"""Tuners and whether their layout knobs are guided; SMAC3, the slowest, in the encoding that helps it more."""
IN_FREE_SPACE = ("random", "Optuna TPE")
"""Tuners for the free space; SMAC3 takes too long to sample its hundreds of conditional knobs."""
EVEN = 1e-12
"""Relative slack between a simulated time and a bound that were rounded to seconds each."""


class BoundBrokenError(Exception):
    """A tuner found a plan below the proved bound: a bug in the proof or in the encoding."""


def measure(
    case: Case, kind: Kind, setups: Sequence[tuple[str, bool]], seeds: int, budget: Budget
) -> dict[str, Any]:
    """The proof, and every run of every tuner, as plain data."""
    problem = tuned_problem(case, kind)
    started_s = time.process_time()
    result = solve(problem, gap=1e-4)
    proof_cpu_s = time.process_time() - started_s
    best_s = _optimum_s(result)
    limited = Budget(budget.evaluations, budget.cpu_s, best_s * (1 + LEVELS[-1]))
    runs = []
    for is_guided in sorted({guided for _, guided in setups}):
        encoding = Encoding(problem, is_guided=is_guided)
        for tuner in (name for name, guided in setups if guided == is_guided and serves(name, kind)):
            runs += [_checked(tune(tuner, encoding, seed, limited), result) for seed in range(seeds)]
            print(f"{case.name}, {kind}: {runs[-1].tuner}", file=sys.stderr, flush=True)
    return {
        "case": asdict(case),
        "space": kind,
        "budget": asdict(limited),
        "proof": {
            "status": result.status,
            "step_time_s": best_s,
            "lower_bound_s": result.lower_bound_s,
            "gap": result.gap,
            "cpu_s": proof_cpu_s,
            "wall_s": result.wall_time_s,
            "layouts": 0 if result.layouts is None else len(result.layouts.space),
            "simulations": result.work.simulations,
        },
        "runs": [asdict(run) for run in runs],
    }


def serves(tuner: str, kind: Kind) -> bool:
    """Whether a tuner is measured in a space."""
    return kind == "uniform" or tuner in IN_FREE_SPACE


def _optimum_s(result: PlanResult) -> float:
    """The proved optimum; without one there is nothing to compare with."""
    if result.status != "optimal" or result.step_time_s is None:
        raise SystemExit(f"The optimum is not proved: {result.status}. Choose another problem.")
    return result.step_time_s


def _checked(run: TunerRun, result: PlanResult) -> TunerRun:
    """The run, if nothing that it found is below the proved bound."""
    bound_s = result.lower_bound_s or 0.0
    if run.best_s() < bound_s * (1 - EVEN):
        raise BoundBrokenError(f"{run.tuner}, seed {run.seed}: {run.best_s()} s is below the bound {bound_s} s")
    return run


def tuner_runs(measured: dict[str, Any]) -> Iterator[tuple[str, list[TunerRun]]]:
    """The runs of each tuner, in the order measured."""
    runs = [
        TunerRun(**{**run, "improvements": tuple(map(tuple, run["improvements"]))}) for run in measured["runs"]
    ]
    for name in dict.fromkeys(run.tuner for run in runs):
        yield name, [run for run in runs if run.tuner == name]


def tuner_table(cases: Sequence[dict[str, Any]]) -> str:
    """A row for each proof, and below it one for each tuner."""
    header = (
        "problem and tuner",
        *(f"within {percent_text(level, 1 if level < 0.01 else 0)}" for level in LEVELS),
        "left at the end",
        "legal / fitting",
        "evaluations, CPU a run",
    )
    rows: list[tuple[str, ...]] = []
    for one in cases:
        proof, case = one["proof"], Case(**one["case"])
        proved = f"{seconds_text(proof['cpu_s'])} to the proof"
        text = f"**{case.text()}, {one['space']}: milpplan**"
        rows.append((text, "", "", f"**{proved}**", f"gap {gap_text(proof['gap'])}", "", ""))
        rows += [_tuner_row(name, runs, proof["step_time_s"]) for name, runs in tuner_runs(one)]
    return markdown_table(header, rows)


def _tuner_row(name: str, runs: Sequence[TunerRun], best_s: float) -> tuple[str, ...]:
    evaluations = sum(run.evaluations for run in runs)
    legal, fitting = (sum(getattr(run, of) for run in runs) / evaluations for of in ("legal", "fitting"))
    left = _quartiles([run.best_s() / best_s - 1 for run in runs])
    spent = f"{_quartiles([run.evaluations for run in runs])[1]:,.0f}"
    spent += f", {seconds_text(_quartiles([run.cpu_s for run in runs])[1])}"
    return (
        name,
        *(_reached(runs, best_s * (1 + level)) for level in LEVELS),
        f"{_left(left[1])} [{_left(left[0])}, {_left(left[2])}]",
        f"{legal:.0%} / {fitting:.0%}",
        spent,
    )


def _reached(runs: Sequence[TunerRun], step_time_s: float) -> str:
    """Evaluations (quartiles) and CPU seconds until the median run was there."""
    hits = [run.reached(step_time_s) for run in runs]
    number = sum(np.isfinite(count) for count, _ in hits)
    low, middle, high = (_count(value) for value in _quartiles([count for count, _ in hits]))
    cpu_s = _quartiles([seconds for _, seconds in hits])[1]
    share = f"{number} of {len(runs)}"
    if not np.isfinite(cpu_s):
        return f"not reached ({share})"
    return f"{middle} [{low}, {high}], {seconds_text(cpu_s)} ({share})"


def _quartiles(values: Sequence[float]) -> list[float]:
    """Lower quartile, median, upper quartile: of ten values the third, fifth and eighth, which may be infinite."""
    return [float(value) for value in np.quantile(values, [0.25, 0.5, 0.75], method="inverted_cdf")]


def _count(value: float) -> str:
    return f"{value:,.0f}" if np.isfinite(value) else "-"


def _left(value: float) -> str:
    return percent_text(value, 2) if np.isfinite(value) else "nothing fits"


def merged(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry a problem and space, with all the runs; the proof is the first one's, and all must agree."""
    by_problem: dict[tuple[str, str], dict[str, Any]] = {}
    for one in cases:
        key = (one["case"]["name"], one["space"])
        first = by_problem.setdefault(key, {**one, "runs": []})
        if (first["case"], first["proof"]["step_time_s"]) != (one["case"], one["proof"]["step_time_s"]):
            raise SystemExit(f"{key[0]}, {key[1]}: the files are of different problems or versions.")
        first["runs"] = [*first["runs"], *one["runs"]]
    return list(by_problem.values())


def _setups(names: Sequence[str]) -> list[tuple[str, bool]]:
    """The setups of the named tuners; a clear word where a package is missing."""
    missing = [NEEDS[name] for name in names if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None]
    if missing:
        raise SystemExit(
            f"{' and '.join(missing)} not installed: pip install 'milpplan[benchmark]', or --tuners random."
        )
    return [setup for setup in SETUPS if setup[0] in names]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Black-box tuners against the proved optimum.")
    parser.add_argument("--only", nargs="+", choices=CASES, default=["gpt3-1k", "llama3-16k", "mixtral-512"])
    parser.add_argument("--space", nargs="+", choices=KINDS, default=list(KINDS), help="these spaces")
    parser.add_argument("--tuners", nargs="+", choices=TUNERS, default=list(TUNERS), help="these tuners")
    parser.add_argument("--seeds", type=int, default=10, help="runs of each tuner (10)")
    parser.add_argument("--evaluations", type=int, default=1000, help="evaluations a run may take (1,000)")
    parser.add_argument("--cpu-s", type=float, default=10.0, help="CPU seconds a run may take (10)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.add_argument("--from", dest="files", nargs="+", type=Path, default=[], help="take these measurements")
    parser.add_argument("--write", type=Path, help="put the table into the section of this document")
    parser.add_argument("--figure", type=Path, help="draw best so far against evaluations into this SVG file")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or read what was measured, and print."""
    options = _parser().parse_args(arguments)
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in options.files]
    cases = merged([case for document in documents for case in document["cases"]])
    machine = documents[0]["measured_on"] if documents else measured_on()
    if not documents:
        setups, budget = _setups(options.tuners), Budget(options.evaluations, options.cpu_s)
        pairs = [(name, kind) for name in options.only for kind in options.space]
        cases = [measure(CASES[name], kind, setups, options.seeds, budget) for name, kind in pairs]
    if options.figure:
        panels = [
            (
                f"{Case(**one['case']).name}, {one['space']}",
                one["proof"]["step_time_s"],
                dict(tuner_runs(one)),
            )
            for one in cases
        ]
        write_whole(options.figure, figure(panels))
    if options.json:
        print(json.dumps({"measured_on": machine, "cases": cases}))
        return
    text = (
        f"{tuner_table(cases)}\n\nMeasured on {', '.join(f'{name} {value}' for name, value in machine.items())}."
    )
    if options.write:
        replace_section(options.write, "tuners", text)
    print(text)


if __name__ == "__main__":
    main()
