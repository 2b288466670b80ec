"""Text of ``milpplan gap``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from milpplan.explain.judge.records import Change, GapReport, SpaceGap, layout_words
from milpplan.explain.records import Interval
from milpplan.reports.documents.gap_document import Failed, Judged
from milpplan.reports.text.terminal import hanging, plan_report, report_table, would_be_headline
from milpplan.reports.words.proof_words import cost_model_text, joined, range_text, space_text
from milpplan.units import count_text, gib_text, money_text, percent_text, printable, rate_text, seconds_text

EFFORTS = {"flag": "arguments", "reshard": "converts the checkpoint"}


def gap_report(entry: Judged) -> RenderableType:
    """Show all answers about the gap of a plan, the most important first."""
    gap = entry.gap
    parts: list[RenderableType] = [
        would_be_headline(gap.problem, gap.plan, gap.report),
        *(Text(line) for line in _verdicts(gap)),
        Text(),
    ]
    parts += plan_report(gap.problem, gap.plan, gap.report)
    parts += [Text(), _spaces_table(gap)]
    if gap.changes:
        parts += [Text(), _changes_table("Single changes, each simulated", "saves", gap.changes)]
    if len(gap.chain) > 1:
        parts += [Text(), _changes_table("One after the other, each simulated", "saves more", gap.chain)]
    return Group(*parts, Text(), *_closing(gap))


def _verdicts(gap: GapReport) -> Iterator[str]:
    """Write a sentence on every space."""
    for space in gap.spaces:
        yield f"gap to {space.name}: {verdict(gap, space)}"


def verdict(gap: GapReport, space: SpaceGap) -> str:
    """Describe the gap to the best of a space."""
    if space.result.status == "infeasible" and space.best is None:
        return "no plan of it fits (proved)"
    if not gap.report.fits:
        if space.best_s is None:
            return "no plan that fits was found in the time"
        return f"the best that fits takes {_times(space)}"
    if space.is_outside and space.saved.low < 0:
        return f"the plan is outside of it, and its best takes {_times(space)}"
    if space.best == gap.plan and space.proved:
        return f"none: no plan saves more than {percent_text(max(0.0, space.saved.high), 2)} (proved)"
    if space.best == gap.plan:
        return (
            f"no better plan was found; {range_text(Interval(-math.inf, space.saved.high))} can be saved (proved)"
        )
    return f"{range_text(space.saved)} of the step can be saved"


def _times(space: SpaceGap) -> str:
    """Write the bound and the best step time of a space."""
    low = "-" if space.bound_s is None else seconds_text(space.bound_s)
    return low if space.best_s is None else joined(low, seconds_text(space.best_s))


def _spaces_table(gap: GapReport) -> Table:
    table = report_table("Proved best", "space", "bound", "best known", "saves", "proof", "best known differs in")
    table.columns[-1].justify = "left"
    for space in gap.spaces:
        name, *words = space_row(gap, space)
        table.add_row(Text(printable(name)), *words)
    return table


def space_row(gap: GapReport, space: SpaceGap) -> tuple[str, ...]:
    """Write a space's row: name, bound and best step, saving, proof, and the difference of the best plan."""
    return (
        space.name,
        "-" if space.bound_s is None else seconds_text(space.bound_s),
        "-" if space.best_s is None else seconds_text(space.best_s),
        saved_text(gap, space),
        proof_text(space),
        layout_difference(gap, space),
    )


def saved_text(gap: GapReport, space: SpaceGap) -> str:
    """Write the saving with the best plan of a space; a plan that cannot run has no saving."""
    return range_text(space.saved) if gap.report.fits else "-"


def proof_text(space: SpaceGap) -> str:
    """Describe how far the proof came."""
    if space.result.status == "infeasible" and space.best_s is None:
        return "nothing fits"
    return "proved" if space.proved else "open"


def layout_difference(gap: GapReport, space: SpaceGap) -> str:
    """Describe the difference between the plan and the best known plan of a space."""
    if space.best is None:
        return ""
    words = layout_words(gap.plan.layout, space.best.layout)
    if space.best.virtual_stages == gap.plan.virtual_stages:
        return words or "nothing: it is this plan"
    return f"{words}, stages" if words else "stages"


def _changes_table(title: str, saves: str, changes: Sequence[Change]) -> Table:
    table = report_table(title, "change", "step", "memory", saves, "of the gap", "takes")
    table.columns[-1].justify = "left"
    for change in changes:
        table.add_row(
            Text(change.words),
            seconds_text(change.step_time_s),
            gib_text(change.peak_memory_bytes),
            percent_text(change.saved),
            "-" if change.closed is None else percent_text(change.closed, 0),
            EFFORTS[change.effort],
        )
    return table


def spending_text(gap: GapReport) -> str:
    """Write GPU-hours and money of a run, and the possible savings."""
    spent = gap.spending
    text = f"a run of {count_text(spent.tokens)} tokens takes {rate_text(spent.gpu_hours)} GPU-hours"
    if spent.money is not None:
        text += f" ({money_text(spent.money)} at {spent.price_per_gpu_hour:g} a GPU-hour)"
    if not gap.report.fits:
        return f"{text}, if it fitted"
    less = spent.saved_gpu_hours
    if less.high <= 0:
        return f"{text}, none of which can be saved"
    text += f"; {_amounts(less)} GPU-hours can be saved"
    return text if spent.saved_money is None else f"{text} ({_amounts(spent.saved_money)})"


def _amounts(interval: Interval) -> str:
    """Write an interval in whole numbers, rounded outwards."""
    low = max(0.0, interval.low)
    if math.isinf(interval.high):
        return f"at least {rate_text(math.floor(low))}"
    ends = rate_text(math.floor(low)), rate_text(math.ceil(interval.high))
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def _closing(gap: GapReport) -> Iterator[RenderableType]:
    yield hanging("cost", spending_text(gap))
    if gap.unanswered:
        why = "interrupted before" if gap.interrupted else "no time left for"
        yield hanging("open", f"{why}: {'; '.join(gap.unanswered)}")
    spaces = "; ".join(f"{space.name} is {space_text(space.problem)}" for space in gap.spaces)
    model = f"cost model {cost_model_text(gap.problem)}; {spaces}; {seconds_text(gap.wall_time_s)}"
    yield hanging("proof", printable(model))


def gaps_table(judged: Sequence[Judged], failed: Sequence[Failed]) -> RenderableType:
    """Show several plans, a row each, in the given order."""
    narrow = next((entry.gap.spaces[0].name for entry in judged if len(entry.gap.spaces) > 1), None)
    columns = ["plan", "step", "memory", *([f"gap to {narrow}"] if narrow else []), "gap to the whole space"]
    table = report_table("Gaps", *columns, "GPU-hours to save", "best single change")
    table.columns[-1].justify = "left"
    for entry in judged:
        gap = entry.gap
        shares = [_share(gap, space) for space in gap.spaces]
        table.add_row(
            Text(printable(entry.name)),
            seconds_text(gap.report.step_time_s),
            gib_text(gap.report.peak_memory_bytes) if gap.report.fits else "does not fit",
            *(["-"] * (len(columns) - 3 - len(shares)) + shares),
            _amounts(gap.spending.saved_gpu_hours) if gap.report.fits else "-",
            _first(gap),
        )
    for lost in failed:
        empty = ["-"] * len(columns)
        table.add_row(Text(printable(lost.name)), *empty, "not judged (see below)")
    tokens = {count_text(entry.gap.spending.tokens) for entry in judged}
    return Group(table, hanging("cost", f"runs of {' or '.join(sorted(tokens))} tokens")) if judged else table


def _share(gap: GapReport, space: SpaceGap) -> str:
    if space.best_s is None:
        return "nothing fits" if space.result.status == "infeasible" else "unknown"
    return range_text(space.saved) if gap.report.fits else f"best {seconds_text(space.best_s)}"


def _first(gap: GapReport) -> str:
    if not gap.changes:
        return ""
    first = gap.changes[0]
    closes = "" if first.closed is None else f" ({percent_text(first.closed, 0)} of it)"
    return f"{first.words}{closes}"
