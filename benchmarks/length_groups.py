"""Grouped steps on published cost tables: `python -m benchmarks.length_groups` (about a minute of CPU).

Prints the tables of results/length_groups.md, with `--write` into it. The instances and figures of others are in
data/length_groups.json and beside the adapters of examples/, with their sources; the cost tables are the same for
all rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.switch_tables import Layout, Weights, reduce_s, switch_s
from benchmarks.tables import markdown_table, replace_section
from examples.adapters import flexsp, hydraulis
from milpplan.lengths.tabled.problem import GroupedProblem, Strategy, SwitchTimes
from milpplan.lengths.tabled.search import solve_groups
from milpplan.lengths.workload import workload_of

DATA = Path(__file__).parent / "data" / "length_groups.json"
FLEXSP_LIMIT_S = 8.0
"""FlexSP itself allows a micro-batch 10 s; a limit is overrun a little."""
DOCUMENT = Path(__file__).parent / "results" / "length_groups.md"


def data() -> dict[str, Any]:
    """Instances and published figures."""
    content: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return content


def step_problem(content: dict[str, Any], step: dict[str, Any], max_strategies: int) -> GroupedProblem:
    """One of the steps with HotSPa's switches. Memory of the least fortunate home holds for all."""
    pool = hydraulis.pools()[step["pool"]]
    model = pool["model_config"]
    num_params = content["num_params"][step["pool"]]
    weights = Weights(num_params, Weights.share(model["V"] * model["H"], num_params))
    layouts: list[Layout] = [(dp, tp, pp) for dp, tp, pp in step["strategies"]]
    strategies = []
    for layout in layouts:
        dp, tp, pp = layout
        tokens = min(hydraulis.max_seqlen(pool, tp, pp, home) for home in layouts)
        reduction_ns = round(reduce_s(layout, weights) * 1e9)
        strategies.append(
            Strategy.of(hydraulis.pipeline(pool, tp, pp, tokens), dp, reduction_ns, f"dp{dp} tp{tp} pp{pp}")
        )
    if max_strategies == 1:
        # The home is the one strategy, and nothing is switched.
        return _problem(step, strategies, SwitchTimes.free(len(layouts)), 1)
    times = [
        np.array([[round(switch_s(a, b, weights, gradients) * 1e9) for b in layouts] for a in layouts])
        for gradients in (False, True)
    ]
    return _problem(step, strategies, SwitchTimes(times[0], times[1]), max_strategies)


def _problem(
    step: dict[str, Any], strategies: list[Strategy], switches: SwitchTimes, max_strategies: int
) -> GroupedProblem:
    workload = workload_of(step["lengths"])
    return GroupedProblem(workload.lengths, workload.counts, tuple(strategies), switches, max_strategies)


def case_problem(case: dict[str, Any], number: int | None = None) -> GroupedProblem:
    """One of Hydraulis' cases: one of its strategies, or (None) the best of them; no switches."""
    results = case["results"] if number is None else [case["results"][number]]
    strategies, tokens = ([one[name] for one in results] for name in ("strategy", "max_seqlen"))
    return hydraulis.problem_of(case["pool"], strategies, case["lengths"], tokens)


def _seconds(time_ns: float) -> str:
    return f"{time_ns / 1e9:.3f}"


def steps_table(content: dict[str, Any]) -> str:
    """The two steps, against HotSPa's rules and the prototype."""
    rows = []
    for step in content["steps"]:
        reference = {name: f"{value / 1e3:.2f}" for name, value in step["reference_ms"].items()}
        static = solve_groups(step_problem(content, step, 1), "highs", 0.001, 60)
        grouped = solve_groups(step_problem(content, step, 3), "highs", 0.01, 120)
        rows.append(
            [
                step["name"],
                reference["hotspa"],
                reference["joint"],
                f"{_seconds(static.plan.time_ns)} ({static.gap:.2%})",
                _seconds(grouped.plan.time_ns),
                f"{grouped.gap:.2%}",
                " -> ".join(grouped.plan.names),
                f"{grouped.cpu_time_s:.0f}",
            ]
        )
    header = ["step", "HotSPa's rules", "best known", "best static (gap)", "this plan", "gap"]
    return markdown_table([*header, "strategies in order", "CPU s"], rows)


def cases_table() -> str:
    """Hydraulis' estimate of every strategy, its packing as it runs, and the proved best of the strategy."""
    rows = []
    for name, case in hydraulis.cases().items():
        for number, result in enumerate(case["results"]):
            solved = solve_groups(case_problem(case, number), "highs", 0.002, 20)
            estimate_ms, own_ms = hydraulis.own_times_ms(result)
            rows.append(
                [
                    f"{name}: {hydraulis.name_of(result['strategy'])}",
                    f"{estimate_ms / 1e3:.3f}",
                    f"{own_ms / 1e3:.3f}",
                    _seconds(solved.plan.time_ns),
                    f"{solved.gap:.2%}",
                    f"{1 - solved.plan.time_ns / (own_ms * 1e6):.1%}",
                ]
            )
    header = ["case and strategy", "its estimate", "its packing", "this plan", "gap", "shorter by"]
    return markdown_table(header, rows)


def choices_table() -> str:
    """Hydraulis' pick by its estimate, beside the best of its packings and the best plan over its strategies."""
    rows = []
    for name, case in hydraulis.cases().items():
        times = [hydraulis.own_times_ms(result) for result in case["results"]]
        names = [hydraulis.name_of(result["strategy"]) for result in case["results"]]
        picked = min(range(len(times)), key=lambda one: times[one][0])
        picked_ms, best_ms = times[picked][1], min(own_ms for _, own_ms in times)
        solved = solve_groups(case_problem(case), "highs", 0.002, 20)
        took_s = sum(one["dispatch_wall_s"] + one["packing_wall_s"] for one in case["results"])
        rows.append(
            [
                name,
                names[picked],
                f"{picked_ms / best_ms - 1:.1%}",
                f"{picked_ms * 1e6 / solved.plan.time_ns - 1:.1%}",
                f"{took_s:.0f}",
                f"{solved.cpu_time_s:.1f}",
            ]
        )
    header = ["case", "it picks", "longer than its best packing", "longer than this plan", "its wall s"]
    return markdown_table([*header, "this, CPU s"], rows)


def flexsp_table() -> str:
    """FlexSP's micro-batches in its own space and cost model."""
    rows = []
    for name, case in flexsp.cases().items():
        parts = flexsp.split(case["lengths"], len(case["known"]))
        for number, (lengths, known) in enumerate(zip(parts, case["known"], strict=True), 1):
            solved = solve_groups(flexsp.problem_of(case, lengths), "highs", 0.002, FLEXSP_LIMIT_S)
            rows.append(
                [
                    f"{name}, {number}",
                    f"{known['flexsp_ms'] / 1e3:.4f}",
                    f"{known['best_ms'] / 1e3:.4f}",
                    f"{solved.plan.time_ns / 1e9:.4f}",
                    f"{solved.gap:.2%}",
                    f"{solved.cpu_time_s:.1f}",
                ]
            )
    header = ["case, micro-batch", "FlexSP", "best known", "this plan", "gap", "CPU s"]
    return markdown_table(header, rows)


def main() -> None:
    """Solve everything, or the tables named, and print or write them."""
    tables: dict[str, Callable[[], str]] = {
        "steps": lambda: steps_table(data()),
        "hydraulis": cases_table,
        "choices": choices_table,
        "flexsp": flexsp_table,
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "tables", nargs="*", metavar="TABLE", help=f"some of {', '.join(tables)}; all unless given"
    )
    parser.add_argument("--write", action="store_true", help=f"replace the tables in {DOCUMENT.name}")
    words = parser.parse_args()
    if unknown := set(words.tables) - set(tables):
        parser.error(f"no table {sorted(unknown)[0]}")
    for name in words.tables or tables:
        found = tables[name]()
        if words.write:
            replace_section(DOCUMENT, name, found)
        else:
            print(f"{name}\n\n{found}\n", flush=True)


if __name__ == "__main__":
    main()
