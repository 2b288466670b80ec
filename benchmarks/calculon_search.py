"""Calculon's searches and milpplan's proofs: time, growth with the GPUs, and each one's choice priced by both.

    python -m benchmarks.calculon_search CHECKOUT_PATH [--case NAME ...] [--time-limit 60] [--plot FILE.svg]

Three tables, everything measured in this run on the same cores.

Searches: milpplan proves the best plan of the uniform space on the imported system (without the start of Python
and its imports); Calculon's own search runs for the time limit in one process (it writes nothing when it is
stopped), and its time for the whole space is the number of its executions times its CPU seconds an execution.
Its space has more: offload, overlap of tensor parallelism, a choice of networks. The executions that both have
are counted beside it, with the CPU seconds of a sample of them, called as its search calls them.

Cross-pricing: in that shared space Calculon's estimate of every execution is taken, so its choice is its true
optimum. Both choices are priced by both. What milpplan's own space adds (free splits and recomputation, context
parallelism, ZeRO 2 and 3) is solved with the same limit.

Growth: GPT-3 175B on 64 to 16,384 processors, batch as many sequences (at least 512); with ``--proofs`` all cases
in place of it. Calculon's seconds are its executions times the mean CPU seconds of a random sample of them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import calculon_space
from benchmarks.calculon_side import Checkout, Tree, execution_of, load, mode_of, search_problem
from benchmarks.rules_of_thumb import layout_text
from benchmarks.tables import markdown_table, measured_on
from milpplan import Layout, PlanResult, Problem, Space, simulate, solve
from milpplan.optimize.layouts import layout_space
from milpplan.optimize.result import FATES
from milpplan.optimize.uniform import uniform_plan
from milpplan.presets.calculon import SWITCHES, has_field
from milpplan.reports.files import write_whole
from milpplan.units import GIB, gap_text, percent_text, seconds_text

CASES = {
    "22b-64": ("megatron-22B", 64, 512),
    "175b-1024": ("gpt3-175B", 1024, 1536),
    "175b-4096": ("gpt3-175B", 4096, 4096),
    "530b-2240": ("turing-530B", 2240, 2240),
    "530b-2240-2520": ("turing-530B", 2240, 2520),
    "530b-2520": ("turing-530B", 2520, 2520),
    "1t-3072": ("megatron-1T", 3072, 3072),
}
"""The problems of Isaev et al. 2023's artifacts that this repository compares on, each with its batch."""
GROWTH = (64, 256, 1024, 4096, 16384)
SHARED: dict[str, Any] = {"kind": "uniform", "cp": (1,), "zero_stage": (0, 1)}
"""The part of the uniform space that Calculon has too."""
GAP = 1e-4


@dataclass(frozen=True, slots=True)
class Solved:
    """One proof: seconds, status, and the plan."""

    status: str
    gap: float | None
    step_s: float | None
    wall_s: float
    cpu_s: float
    legal: int
    plan: str


@dataclass(frozen=True, slots=True)
class Search:
    """One problem, both searches. ``space``: executions of Calculon's space; ``shared``: those both have."""

    name: str
    ours: Solved
    free: Solved
    space: int
    shared: int
    theirs: calculon_space.Searched
    execution_s: float
    shared_execution_s: float

    @property
    def whole_s(self) -> float:
        """CPU seconds of Calculon for its whole space."""
        return self.space * self.execution_s

    @property
    def shared_s(self) -> float:
        """CPU seconds of Calculon for the shared executions."""
        return self.shared * self.shared_execution_s


@dataclass(frozen=True, slots=True)
class Crossed:
    """Step times of both choices by both models, and what Calculon's needs here; None: Calculon says that it does
    not fit."""

    name: str
    our_choice: str
    their_choice: str
    ours_by_ours: float
    theirs_by_ours: float
    theirs_gib: float
    usable_gib: float
    ours_by_theirs: float | None
    theirs_by_theirs: float


@dataclass(frozen=True, slots=True)
class Grown:
    """One problem: CPU and wall seconds of the proof, and of Calculon's space."""

    name: str
    procs: int
    ours: Solved
    space: int
    execution_s: float


def solved(problem: Problem, limit_s: float) -> tuple[Solved, PlanResult]:
    """Prove, and measure."""
    cpu, wall = time.process_time(), time.monotonic()
    result = solve(problem, time_limit_s=limit_s, gap=GAP)
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    legal = 0 if result.layouts is None else sum(result.layouts.count(fate) for fate in FATES)
    text = "-" if result.plan is None else layout_text(result.plan)
    return Solved(result.status, result.gap, result.step_time_s, wall, cpu, legal, text), result


def opened() -> dict[str, Any]:
    """Every switch of Calculon that a layout has here, with all its values."""
    return {
        switch.ours: tuple(switch.values.values())
        for switch in SWITCHES
        if switch.record is Layout and has_field(Space, switch.ours) and switch.ours != "sequence_parallel"
    }


def shared_executions(problem: Problem, system: Tree) -> list[tuple[Any, str, Tree]]:
    """(layout, recompute setting, execution) of every plan of the uniform space that Calculon can run too: with
    equal chunks."""
    space, blocks = layout_space(problem), problem.model.num_layers
    columns = space.columns
    rows = np.flatnonzero(blocks % (columns.pp * columns.vpp) == 0)
    layouts = [columns.at(int(row)) for row in rows]
    modes = problem.space.recompute
    return [(one, mode, execution_of(problem, one, mode, system)) for one in layouts for mode in modes]


def search_of(
    checkout: Checkout, name: str, system: Tree, limit_s: float, sample: int, switches: bool
) -> tuple[Search, Crossed | None]:
    """Both searches of a case, and the cross-pricing (not with all ``switches``: too many executions)."""
    model_name, procs, batch = CASES[name]
    model = checkout.files("models")[model_name]
    space_of_both = Space(**SHARED | (opened() if switches else {}))
    problem = search_problem(model, system, procs, batch, space_of_both)
    ours, result = solved(problem, limit_s)
    free, _ = solved(search_problem(model, system, procs, batch, Space()), limit_s)
    shared = shared_executions(problem, system)
    crossed = None if switches else cross_priced(checkout, name, problem, result, shared, model, system)
    theirs = calculon_space.search(checkout, model, system, procs, batch, limit_s, seed=1)
    space = calculon_space.size(calculon_space.tasks(checkout, model, procs, batch), system)
    picked = np.random.default_rng(1).integers(len(shared), size=sample)
    each = calculon_space.cpu_s(checkout, model, system, [shared[int(index)][2] for index in picked]) / sample
    rate = theirs.cpu_s / theirs.executions
    return Search(name, ours, free, space, len(shared), theirs, rate, each), crossed


def cross_priced(
    checkout: Checkout,
    name: str,
    problem: Problem,
    result: PlanResult,
    shared: Sequence[tuple[Any, str, Tree]],
    model: Tree,
    system: Tree,
) -> Crossed | None:
    """Both choices by both models; None where one has none."""
    application, built = checkout.llm.Application(model), checkout.system(system)

    def priced(execution: Tree) -> float | None:
        stats = checkout.estimate(application, execution, built)
        return None if stats is None else stats["total_time"]

    best: tuple[float, Any, str] | None = None
    for layout, mode, execution in shared:
        step = priced(execution)
        if step is not None and (best is None or step < best[0]):
            best = step, layout, mode
    if best is None or result.plan is None or result.step_time_s is None:
        return None
    plan = uniform_plan(problem, best[1], best[2])
    report = simulate(problem, plan)
    mode = mode_of(result.plan)
    assert mode is not None
    return Crossed(
        name=name,
        our_choice=layout_text(result.plan),
        their_choice=layout_text(plan),
        ours_by_ours=result.step_time_s,
        theirs_by_ours=report.step_time_s,
        theirs_gib=report.peak_memory_bytes / GIB,
        usable_gib=report.usable_memory_bytes / GIB,
        ours_by_theirs=priced(execution_of(problem, result.plan.layout, mode, system)),
        theirs_by_theirs=best[0],
    )


def grown(
    checkout: Checkout, system: Tree, name: str, case: tuple[str, int, int], limit_s: float, sample: int
) -> Grown:
    """The proof of a problem, and Calculon's executions of it with the CPU seconds of a random sample."""
    model_name, procs, batch = case
    model = checkout.files("models")[model_name]
    problem = search_problem(model, system, procs, batch, Space(**SHARED))
    ours, _ = solved(problem, limit_s)
    space = calculon_space.size(calculon_space.tasks(checkout, model, procs, batch), system)
    each = calculon_space.seconds_an_execution(checkout, model, system, procs, batch, sample, seed=1)
    return Grown(name, procs, ours, space, each)


def search_table(all_: Sequence[Search]) -> str:
    """Time to the proof, and to the end of Calculon's space."""
    rows = [
        (
            one.name,
            f"{one.ours.status}, gap {_gap(one.ours.gap)}",
            seconds_text(one.ours.wall_s),
            seconds_text(one.ours.cpu_s),
            f"{one.theirs.executions:,} of {one.space:,} ({percent_text(one.theirs.executions / one.space, 2)})",
            f"{seconds_text(one.theirs.wall_s)} / {seconds_text(one.theirs.cpu_s)}",
            _hours(one.whole_s),
            f"{one.whole_s / one.ours.cpu_s:,.0f}",
            f"{one.shared:,}: {_hours(one.shared_s)}",
            f"{one.shared_s / one.ours.cpu_s:,.0f}",
        )
        for one in all_
    ]
    header = (
        "problem",
        "milpplan",
        "wall",
        "CPU",
        "Calculon's search went through",
        "in wall / CPU",
        "its whole space, CPU",
        "ratio of CPU",
        "shared executions, CPU",
        "ratio of CPU",
    )
    return markdown_table(header, rows)


def crossed_table(searches: Sequence[Search], all_: Sequence[Crossed | None]) -> str:
    """Both choices by both models, and the wider space."""
    rows = []
    for search, one in zip(searches, all_, strict=True):
        if one is None:
            continue
        free, uniform = search.free.step_s, search.ours.step_s
        gain = "-" if free is None or uniform is None else percent_text((uniform - free) / uniform, 2)
        rows.append(
            (
                one.name,
                one.our_choice,
                one.their_choice,
                f"{seconds_text(one.ours_by_ours)} / {seconds_text(one.theirs_by_ours)}",
                _loss(one.theirs_by_ours, one.ours_by_ours)
                if one.theirs_gib <= one.usable_gib
                else f"needs {one.theirs_gib:.1f} of {one.usable_gib:.1f} GiB",
                f"{_step(one.ours_by_theirs)} / {seconds_text(one.theirs_by_theirs)}",
                _loss(one.ours_by_theirs, one.theirs_by_theirs),
                f"{gain} (gap {_gap(search.free.gap)}): {search.free.plan}",
            )
        )
    header = (
        "problem",
        "milpplan's choice",
        "Calculon's choice",
        "by milpplan: ours / theirs",
        "theirs loses",
        "by Calculon: ours / theirs",
        "ours loses",
        "the wider space saves",
    )
    return markdown_table(header, rows)


def growth_table(all_: Sequence[Grown]) -> str:
    """Seconds by problem."""
    rows = [
        (
            one.name,
            f"{one.procs:,}",
            f"{one.ours.status}, gap {_gap(one.ours.gap)}",
            f"{one.ours.legal:,}",
            seconds_text(one.ours.wall_s),
            seconds_text(one.ours.cpu_s),
            f"{one.space:,}",
            f"{1 / one.execution_s:,.0f}",
            _hours(one.space * one.execution_s),
            f"{one.space * one.execution_s / one.ours.cpu_s:,.0f}",
        )
        for one in all_
    ]
    header = ("problem", "processors", "milpplan", "legal layouts", "wall", "CPU")
    header += ("Calculon's executions", "a CPU second", "CPU, all", "ratio of CPU")
    return markdown_table(header, rows)


def growth_figure(all_: Sequence[Grown]) -> str:
    """Both growths as an SVG with logarithmic axes."""
    series = {
        "Calculon, executions x measured CPU seconds": [(g.procs, g.space * g.execution_s) for g in all_],
        "milpplan, proved (CPU)": [(g.procs, g.ours.cpu_s) for g in all_],
    }
    values = [second for points in series.values() for _, second in points]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    first, last = math.log2(min(GROWTH)), math.log2(max(GROWTH))

    def place(procs: float, seconds: float) -> tuple[float, float]:
        x = 80 + 480 * (math.log2(procs) - first) / (last - first)
        return x, 340 - 300 * (math.log10(seconds) - low) / (high - low)

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="620" height="420" font-family="sans-serif"',
        'font-size="12">',
        '<rect width="100%" height="100%" fill="white"/><path d="M80 40V340H560" fill="none" stroke="#888"/>',
        '<text x="320" y="395" text-anchor="middle">processors (GPT-3 175B, A100)</text>',
    ]
    for power in range(low, high + 1):
        y = place(min(GROWTH), 10.0**power)[1]
        label = seconds_text(10.0**power)
        parts.append(f'<path d="M75 {y:.1f}h485" stroke="#ddd"/><text x="70" y="{y + 4:.1f}" text-anchor="end">')
        parts.append(f"{label}</text>")
    for procs in [one.procs for one in all_]:
        x = place(procs, 10.0**low)[0]
        parts.append(f'<text x="{x:.1f}" y="360" text-anchor="middle">{procs:,}</text>')
    for (name, points), colour in zip(series.items(), ("#d62728", "#1f77b4"), strict=True):
        at = [place(*point) for point in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in at]
        parts.append(f'<text x="90" y="{at[0][1] - 10:.1f}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _gap(gap: float | None) -> str:
    return "-" if gap is None else gap_text(gap)


def _step(seconds: float | None) -> str:
    return "does not fit" if seconds is None else seconds_text(seconds)


def _loss(seconds: float | None, best: float) -> str:
    return "-" if seconds is None else percent_text(seconds / best - 1, 2)


def _hours(seconds: float) -> str:
    return seconds_text(seconds) if seconds < 3600 else f"{seconds / 3600:,.1f} h"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Calculon's searches and milpplan's proofs.")
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT_PATH", help="a checkout of Calculon")
    parser.add_argument("--case", nargs="*", choices=CASES, default=list(CASES), help="search in these (all)")
    parser.add_argument("--growth", nargs="*", type=int, default=list(GROWTH), help="these numbers of processors")
    parser.add_argument("--system", default="a100_80g", help="a system of the checkout (a100_80g)")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of each search (60)")
    parser.add_argument("--sample", type=int, default=300, help="executions that give Calculon's rate (300)")
    parser.add_argument(
        "--switches", action="store_true", help="open every switch that both have; no cross-pricing"
    )
    parser.add_argument("--proofs", action="store_true", help="every case in place of the growth")
    parser.add_argument("--plot", type=Path, help="write the growth as SVG here")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    options = parser.parse_args(arguments)
    checkout = load(options.checkout)
    system = checkout.files("systems")[options.system]
    searches, crossed = [], []
    for name in options.case:
        print(f"{name} ...", file=sys.stderr, flush=True)
        search, cross = search_of(checkout, name, system, options.time_limit, options.sample, options.switches)
        searches.append(search)
        crossed.append(cross)
    cases = {f"gpt3-175B, {procs:,}": ("gpt3-175B", procs, max(512, procs)) for procs in options.growth}
    if options.proofs:
        cases = {f"{name}, {options.system}": case for name, case in CASES.items()}
    extent = (options.time_limit, options.sample)
    growth = [grown(checkout, system, name, case, *extent) for name, case in cases.items()]
    if options.plot and growth:
        write_whole(options.plot, growth_figure(growth))
    if options.json:
        document = {"measured_on": measured_on(), "searches": [asdict(one) for one in searches]}
        document |= {"crossed": [asdict(one) for one in crossed if one], "growth": [asdict(one) for one in growth]}
        print(json.dumps(document, indent=2))
        return
    if searches:
        print(search_table(searches), crossed_table(searches, crossed), sep="\n\n", end="\n\n")
    print(growth_table(growth))
    print("\n" + ", ".join(f"{name} {value}" for name, value in measured_on().items()))


if __name__ == "__main__":
    main()
