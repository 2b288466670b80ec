"""How fast plans are proved, and what the freedom is worth, on the problems of ``benchmarks.problems``.

    python -m benchmarks.planning [--only NAME ...] [--space uniform free any] [--time-limit 60] [--json]

Prints two Markdown tables. The first: every problem in three spaces, each solve in a fresh Python process;
the time is that of the whole process, interpreter start-up and imports included. Plain enumeration simulates
every plan of the uniform space with ``milpplan.simulate``: measured where all plans fit into the sample,
otherwise extrapolated from a random sample. The second: step time of the launcher's rule of thumb against the
best plans. The rule may balance embedding and loss by a layer, which the uniform space does not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np

from benchmarks.problems import CASES, Case, Kind
from benchmarks.rules_of_thumb import rule_of_thumb
from benchmarks.tables import layout_text, markdown_table, measured_on
from milpplan import simulate
from milpplan.optimize.bounds.uniform_plans import uniform_plan
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.units import gap_text, gib_text, percent_text, seconds_text

ROOT = Path(__file__).resolve().parents[1]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
PATIENCE = 2.0
"""A process that takes this many times its time limit has overrun it: killed, and reported as that."""
NOTHING = {
    **dict.fromkeys(("bounded_fraction", "pruned_fraction")),
    **dict.fromkeys(("step_time_s", "lower_bound_s", "gap", "mfu", "layout", "peak_bytes")),
    **dict.fromkeys(("bounded_fraction", "pruned_fraction")),
    **dict.fromkeys(("legal", "integer_programs", "relaxations", "simulations"), 0),
}


@dataclass(frozen=True, slots=True)
class Enumeration:
    """Plain enumeration of the uniform space, one core. ``measured``: every plan was simulated; otherwise
    ``total_s`` is the mean of ``sampled`` plans, times their number."""

    plans: int
    sampled: int
    total_s: float
    measured: bool


def solved(case: Case, kind: Kind, time_limit_s: float) -> dict[str, Any]:
    """``benchmarks.one_solve`` in a fresh process, with the wall time of all of it."""
    request = {"case": asdict(case), "space": kind, "time_limit_s": time_limit_s}
    started = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.one_solve"],
            input=json.dumps(request),
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            check=True,
            timeout=PATIENCE * time_limit_s,
        )
        found = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        found = {**NOTHING, "status": "overran"}
    except subprocess.CalledProcessError:
        found = {**NOTHING, "status": "failed"}
    return {**found, "wall_s": time.perf_counter() - started}


def enumerated(case: Case, sample: int) -> Enumeration:
    """Time of simulating every legal plan of the uniform space. The schedule's graph, which plans of a layout
    share, is built beforehand: an enumeration in the layouts' order would have it."""
    problem = case.problem("uniform")
    columns = layout_space(problem).columns
    modes = problem.space.recompute
    plans = len(columns) * len(modes)
    measured = plans <= sample
    chosen = np.arange(plans) if measured else np.random.default_rng(1).integers(plans, size=sample)
    seconds = 0.0
    for index in chosen:
        row, mode = divmod(int(index), len(modes))
        plan = uniform_plan(problem, columns.at(row), modes[mode])
        simulate(problem, plan)
        started = time.perf_counter()
        simulate(problem, plan)
        seconds += time.perf_counter() - started
    total_s = seconds * plans / max(1, len(chosen))
    return Enumeration(plans, len(chosen), total_s, measured)


def measure(case: Case, kinds: Sequence[Kind], time_limit_s: float, sample: int) -> dict[str, Any]:
    """Everything about one case, as plain data."""
    rule = rule_of_thumb(case.problem("uniform"))
    return {
        "case": asdict(case),
        "solves": {kind: solved(case, kind, time_limit_s) for kind in kinds},
        "enumeration": asdict(enumerated(case, sample)) if sample else None,
        "rule_of_thumb": None
        if rule is None
        else {
            "step_time_s": rule.report.step_time_s,
            "mfu": rule.report.mfu,
            "layout": layout_text(rule.plan),
            "within_table": rule.within_table,
        },
    }


def planning_table(measured: Sequence[dict[str, Any]]) -> str:
    """Wall time, memory, proof and pruning of every solve, against plain enumeration."""
    header = (
        "problem",
        "space",
        "wall",
        "peak memory",
        "status",
        "gap",
        "step time",
        "legal layouts",
        "pruned by bounds",
        "and by relaxations",
        "simulations / LPs / integer programs",
        "plain enumeration",
    )
    return markdown_table(
        header,
        [
            (
                Case(**one["case"]).text(),
                kind,
                seconds_text(solve["wall_s"]),
                "-" if solve["peak_bytes"] is None else gib_text(solve["peak_bytes"]),
                solve["status"],
                "-" if solve["gap"] is None else gap_text(solve["gap"]),
                _seconds(solve["step_time_s"]),
                f"{solve['legal']:,}",
                _share(solve["bounded_fraction"]),
                _share(solve["pruned_fraction"]),
                " / ".join(f"{solve[name]:,}" for name in ("simulations", "relaxations", "integer_programs")),
                enumeration_text(one["enumeration"]) if kind == "uniform" else "-",
            )
            for one in measured
            for kind, solve in one["solves"].items()
        ],
    )


def enumeration_text(enumeration: dict[str, Any] | None) -> str:
    """Plans, hours and how they are known."""
    if enumeration is None:
        return "-"
    how = "measured" if enumeration["measured"] else f"extrapolated from {enumeration['sampled']}"
    seconds = enumeration["total_s"]
    length = seconds_text(seconds) if seconds < 3600 else f"{seconds / 3600:,.1f} h"
    return f"{enumeration['plans']:,} plans, {length} ({how})"


def freedom_table(measured: Sequence[dict[str, Any]]) -> str:
    """Step time by rule of thumb and of the best plan of every space, and what more freedom saves."""
    rows = []
    for one in measured:
        rule = one["rule_of_thumb"]
        times = {kind: solve["step_time_s"] for kind, solve in one["solves"].items()}
        rule_s = rule["step_time_s"] if rule else None
        uniform_s, free_s, any_s = (times.get(kind) for kind in KINDS)
        rows.append(
            (
                Case(**one["case"]).text(),
                f"{_seconds(rule_s)} ({rule['layout']})" if rule else "nothing fits",
                _seconds(uniform_s),
                _with_gap(one["solves"].get("free")),
                _with_gap(one["solves"].get("any")),
                _saved(rule_s, uniform_s),
                _saved(rule_s, free_s),
                _saved(uniform_s, free_s),
                _saved(free_s, any_s),
            )
        )
    header = (
        "problem",
        "rule of thumb",
        "best uniform",
        "best free",
        "best any",
        "uniform saves on the rule",
        "free saves on the rule",
        "free saves on uniform",
        "any saves on free",
    )
    return markdown_table(header, rows)


def _share(fraction: float | None) -> str:
    return "-" if fraction is None else percent_text(fraction, 3)


def _with_gap(solve: dict[str, Any] | None) -> str:
    if solve is None or solve["gap"] is None:
        return "-"
    return f"{_seconds(solve['step_time_s'])} (gap {gap_text(solve['gap'])})"


def _seconds(value: float | None) -> str:
    return "-" if value is None else seconds_text(value)


def _saved(before: float | None, after: float | None) -> str:
    return "-" if before is None or after is None else percent_text((before - after) / before, 2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="How fast plans are proved, and what the freedom is worth.")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="these problems")
    parser.add_argument("--space", nargs="+", choices=KINDS, default=list(KINDS), help="these spaces")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds a solve may take (60)")
    parser.add_argument("--sample", type=int, default=200, help="plans to time for plain enumeration (200)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    options = parser.parse_args(arguments)
    measured = []
    for name in options.only:
        print(f"{name} ...", file=sys.stderr, flush=True)
        measured.append(measure(CASES[name], options.space, options.time_limit, options.sample))
    if options.json:
        print(json.dumps({"measured_on": measured_on(), "cases": measured}, indent=2))
        return
    print(planning_table(measured), freedom_table(measured), sep="\n\n")
    print("\n" + ", ".join(f"{name} {value}" for name, value in measured_on().items()))


if __name__ == "__main__":
    main()
