"""The optimality gap of published runs, and whether runs with a large gap were slow.

    python -m benchmarks.published_gaps [--time-limit 20] [--docs] [--json FILE]

Every run that ships with milpplan, is complete (grade A) and can be stated as a plan is judged in the uniform
space by its own hardware, constants, batch and number of GPUs; runs of one problem share a solve. Beside that it
is judged by what its source's runs use: their ZeRO stages, recomputations, schedules, virtual stages, overlaps,
sequence and context parallelism, with any tp, pp, dp and micro-batch. Only order and distance of the *measured*
times test the gaps: in a sweep, runs with a larger gap should have been slower.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.tables import layout_text, markdown_table, measured_on, replace_section
from milpplan.explain.judge.gap import Solves, gap
from milpplan.problem.problem import SPACES, Space
from milpplan.units import percent_text, seconds_text
from milpplan.validation.comparison import Comparison, compare
from milpplan.validation.ranking import competitions, kendall_tau
from milpplan.validation.runs.reader import read_runs

PAGE = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "gap.md"
BINS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
"""Edges of the classes of gaps, as shares of the step."""
LEAST_RUNS = 4
"""Runs of a sweep whose rank correlation says something."""
SHOWN, FROM_ONE = 20, 6
"""Rows of a table of runs, and at most of one source."""
FAR = 1.5
"""A simulated step this many times too long or too short: what is proved of the cost model says nothing there."""


@dataclass(frozen=True, slots=True)
class PublishedGap:
    """The gap of one run. Times in seconds a step, shares of the simulated step.

    ``saved_low``: what the best known plan saves; ``saved_high``: what any uniform plan saves at most (proved).
    None where no uniform plan fits, or nothing was proved. ``own_low`` etc.: of its source's choices.
    """

    run: str
    group: str
    model: str
    hardware: str
    num_gpus: int
    global_batch: int
    sequence_length: int
    layout: str
    step_s: float
    fits: bool
    scored: bool
    measured_s: float | None
    status: str
    saved_low: float | None
    saved_high: float | None
    is_outside: bool
    best_s: float | None
    best: str | None
    own_low: float | None
    own_high: float | None
    own_s: float | None
    own: str | None


CHOICES = (
    *("zero_stage", "schedule", "vpp", "sequence_parallel", "cp", "etp"),
    *("overlap_grad_reduce", "overlap_param_gather"),
)
"""Fields of which a source's space holds the values that its runs use; and the recomputation."""


def choices_of(members: Sequence[Comparison]) -> Space:
    """The uniform space of what the runs of one source use."""
    plans = [one.statement.plan for one in members]
    used = {name: tuple(sorted({getattr(plan.layout, name) for plan in plans})) for name in CHOICES}
    held = [stage for plan in plans for stage in plan.virtual_stages]
    used["recompute"] = tuple(
        mode
        for mode, layers in (
            ("none", sum(one.num_layers - one.recompute.full - one.recompute.selective for one in held)),
            ("selective", sum(one.recompute.selective for one in held)),
            ("full", sum(one.recompute.full for one in held)),
        )
        if layers
    )
    return SPACES["uniform"].model_copy(update=used)


def judged_run(one: Comparison, own: Space, solves: Solves, time_limit_s: float) -> PublishedGap:
    """One run in the uniform space, and in that of its source's choices."""
    problem = one.statement.problem.model_copy(update={"space": SPACES["uniform"]})
    plan = one.statement.plan
    narrow = problem.model_copy(update={"space": own})
    runnable = ("its source's choices", narrow)
    told = gap(problem, plan, runnable=runnable, time_limit_s=time_limit_s, solves=solves, changes=False)
    inner, whole = told.spaces
    return PublishedGap(
        run=one.run.id,
        group=one.run.group,
        model=problem.model.name,
        hardware=problem.hardware.name,
        num_gpus=plan.layout.num_gpus,
        global_batch=plan.layout.global_batch_size,
        sequence_length=problem.job.sequence_length,
        layout=layout_text(plan),
        step_s=told.report.step_time_s,
        fits=told.report.fits,
        scored=one.scored,
        measured_s=None if one.step is None else one.step.step_time_s,
        status=whole.result.status,
        saved_low=_finite(whole.saved.low),
        saved_high=_finite(whole.saved.high),
        is_outside=whole.is_outside,
        best_s=whole.best_s,
        best=None if whole.best is None else layout_text(whole.best),
        own_low=_finite(inner.saved.low),
        own_high=_finite(inner.saved.high),
        own_s=inner.best_s,
        own=None if inner.best is None else layout_text(inner.best),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def sweep_table(groups: Sequence[Sequence[tuple[PublishedGap, float]]]) -> tuple[str, str]:
    """Rank correlation of gap and measured time inside sweeps by source, and measured slowness by class of gap."""
    taus: dict[str, list[tuple[float, int]]] = {}
    slow: dict[int, list[float]] = {}
    for members in groups:
        fastest = min(measured for _, measured in members)
        for one, measured in members:
            slow.setdefault(_class(one.own_low or 0.0), []).append(measured / fastest - 1.0)
        tau = kendall_tau([one.own_low or 0.0 for one, _ in members], [measured for _, measured in members])
        if tau is not None and len(members) >= LEAST_RUNS:
            taus.setdefault(members[0][0].group, []).append((tau, len(members)))
    rows = [(name, *_tau_cells(found)) for name, found in sorted(taus.items())]
    rows.append(("all", *_tau_cells([one for found in taus.values() for one in found])))
    first = markdown_table(("source", "sweeps", "runs", "mean tau", "mean by runs", "tau > 0"), rows)
    second = markdown_table(
        ("gap of the run", "runs", "median measured time over the fastest of its sweep", "quartiles"),
        [
            (_class_words(place), f"{len(found):,}", _plus(median(found)), _quartiles(found))
            for place, found in sorted(slow.items())
        ],
    )
    return first, second


def _tau_cells(found: Sequence[tuple[float, int]]) -> tuple[str, ...]:
    runs = sum(count for _, count in found)
    weighted = sum(tau * count for tau, count in found) / runs
    positive = sum(tau > 0 for tau, _ in found)
    return (
        f"{len(found)}",
        f"{runs:,}",
        f"{fmean(tau for tau, _ in found):.2f}",
        f"{weighted:.2f}",
        f"{positive}",
    )


def _class(share: float) -> int:
    return max(sum(share >= edge for edge in BINS[:-1]) - 1, 0)


def _class_words(place: int) -> str:
    low, high = BINS[place], BINS[place + 1]
    if place == 0:
        return f"below {percent_text(high, 0)}"
    return (
        f"{percent_text(low, 0)} and more" if high == 1.0 else f"{percent_text(low, 0)} to {percent_text(high, 0)}"
    )


def _plus(share: float) -> str:
    return f"+{percent_text(share, 0)}"


def _quartiles(values: Sequence[float]) -> str:
    ordered = sorted(values)
    ends = (ordered[len(ordered) // 4], ordered[3 * (len(ordered) - 1) // 4])
    return " to ".join(_plus(value) for value in ends)


def largest_gaps(gaps: Sequence[PublishedGap]) -> list[PublishedGap]:
    """The measured run with the largest gap of each model, cluster and source."""
    return _chosen(gaps, lambda one: one.saved_low or 0.0)


def best_runs(gaps: Sequence[PublishedGap]) -> list[PublishedGap]:
    """The fastest run measured of each model, cluster and source, those with the largest gap first."""
    return _chosen(gaps, lambda one: -(one.measured_s or math.inf))


def is_described(one: PublishedGap) -> bool:
    """Whether the cost model is near a run: scored, and its simulated step within ``FAR`` of the measured one."""
    if one.measured_s is None or not one.scored or not one.fits or one.saved_low is None:
        return False
    return 1.0 / FAR <= one.step_s / one.measured_s <= FAR


def _chosen(gaps: Sequence[PublishedGap], better: Callable[[PublishedGap], float]) -> list[PublishedGap]:
    """The best scored run of each model, cluster, source and batch; those with the largest gap first."""
    seen: dict[tuple[object, ...], PublishedGap] = {}
    for one in gaps:
        if not is_described(one):
            continue
        key = (one.group, one.model, one.hardware, one.num_gpus, one.global_batch, one.sequence_length)
        if key not in seen or better(seen[key]) < better(one):
            seen[key] = one
    counts: Counter[str] = Counter()
    found = []
    for one in sorted(seen.values(), key=lambda one: -(one.saved_low or 0.0)):
        counts[one.group] += 1
        if counts[one.group] <= FROM_ONE:
            found.append(one)
    return found[:SHOWN]


def proposal_table(chosen: Sequence[PublishedGap]) -> str:
    """Runs with milpplan's proposals: within its source's choices, and in the uniform space."""
    header = ("run", "its layout", "measured", "simulated", "best of its source's choices", "best uniform plan")
    return markdown_table(
        header,
        [
            (
                f"{one.model}, {one.num_gpus:,} GPUs, batch {one.global_batch:,} ({one.hardware}; {one.group})",
                one.layout,
                seconds_text(one.measured_s or 0.0),
                seconds_text(one.step_s),
                _proposal(one.own, one.own_s, one.own_low),
                _proposal(one.best, one.best_s, one.saved_low),
            )
            for one in chosen
        ],
    )


def _proposal(layout: str | None, step_s: float | None, share: float | None) -> str:
    if layout is None or step_s is None or share is None:
        return "none known"
    return f"{layout}: {seconds_text(step_s)}, saves {percent_text(share)}"


def summary_table(gaps: Sequence[PublishedGap]) -> str:
    """Runs by class of gap, to the best of their source's choices and to the best uniform plan."""
    rows = []
    fitting = [one for one in gaps if one.fits]
    for place in range(len(BINS) - 1):
        own = sum(one.own_low is not None and _class(one.own_low) == place for one in fitting)
        whole = sum(one.saved_low is not None and _class(one.saved_low) == place for one in fitting)
        rows.append((_class_words(place), f"{own:,}", f"{whole:,}"))
    lost = f"{len(gaps) - len(fitting):,}"
    rows.append(("does not fit (simulated)", lost, lost))
    return markdown_table(("gap", "runs, by their source's choices", "runs, by the uniform space"), rows)


def section(
    gaps: Sequence[PublishedGap], groups: Sequence[Sequence[tuple[PublishedGap, float]]], note: str
) -> str:
    """Write the text of benchmarks/results/gap.md between its marks."""
    correlation, slowness = sweep_table(groups)
    described = sum(map(is_described, gaps))
    timed = sum(one.measured_s is not None and one.fits for one in gaps)
    proved = sum(one.status in ("optimal", "infeasible") for one in gaps)
    return "\n\n".join(
        (
            f"{len(gaps):,} runs; the bounds of {proved:,} are proved to 1e-4. {note}",
            summary_table(gaps),
            "Kendall's tau of gap and measured time inside sweeps of at least four runs:",
            correlation,
            "How much longer runs took than the fastest run *measured* in their sweep, by their gap to the "
            "best of their source's choices:",
            slowness,
            f"The tables of single runs have {described:,} of the {timed:,} runs that were timed and fit: those "
            f"that are scored and whose simulated step is within a factor of {FAR:g} of the measured one.",
            f"The largest gaps (a run for each model, cluster, batch and source, at most {FROM_ONE} of a source):",
            proposal_table(largest_gaps(gaps)),
            "The largest gaps of *fastest* measured runs, a run for each model, cluster, batch and source:",
            proposal_table(best_runs(gaps)),
        )
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Judge, print, write."""
    parser = argparse.ArgumentParser(description="The optimality gap of published runs.")
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds for each distinct problem (20)")
    parser.add_argument("--docs", action="store_true", help="write the tables into benchmarks/results/gap.md")
    parser.add_argument("--json", type=Path, help="also write all gaps here")
    options = parser.parse_args(arguments)
    started = time.process_time()
    compared = compare(read_runs(None)).comparisons
    complete = [one for one in compared if one.run.grade == "A"]
    solves = Solves()
    gaps: dict[str, PublishedGap] = {}
    sources: dict[str, list[Comparison]] = defaultdict(list)
    for one in complete:
        sources[one.run.group].append(one)
    own = {name: choices_of(members) for name, members in sources.items()}
    for number, one in enumerate(complete, start=1):
        gaps[one.run.id] = judged_run(one, own[one.run.group], solves, options.time_limit)
        if number % 100 == 0:
            spent = time.process_time() - started
            print(
                f"{number} of {len(complete)} runs, {len(solves.found)} solves, {spent:.0f} CPU s", file=sys.stderr
            )
    groups = [_measured(members, gaps) for members in competitions(complete)]
    spent = time.process_time() - started
    note = (
        f"{len(solves.found)} distinct problems, at most {options.time_limit:g} s each; {spent:,.0f} CPU seconds."
    )
    text = section(list(gaps.values()), [group for group in groups if len(group) > 1], note)
    if options.json is not None:
        document: dict[str, Any] = {"measured_on": measured_on(), "gaps": [asdict(one) for one in gaps.values()]}
        options.json.write_text(json.dumps(document, indent=1))
    if options.docs:
        replace_section(PAGE, "published gaps", text)
    print(text)


def _measured(members: Sequence[Comparison], gaps: dict[str, PublishedGap]) -> list[tuple[PublishedGap, float]]:
    """Runs of one sweep that finished and whose gap is known, with their measured times."""
    return [
        (gaps[one.run.id], one.step.step_time_s)
        for one in members
        if one.step is not None and gaps[one.run.id].saved_low is not None
    ]


if __name__ == "__main__":
    main()
