"""Text of ``milpplan explain``."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from milpplan.explain.judge.records import layout_words
from milpplan.explain.records import Explanation, Interval, SingleChange, WishAnswer, Worth
from milpplan.problem.plan import Layout
from milpplan.reports.text.terminal import hanging, plan_report, report_table, would_be_headline
from milpplan.reports.words.intervals import joined, range_text
from milpplan.reports.words.spaces import scope_text
from milpplan.units import counted, gib_text, percent_text, printable, rate_text, seconds_text

SHOWN_STAGES = 4
ALMOST_NOTHING = 0.001
"""Share of the step below which communication does not get a line."""


def explanation_report(told: Explanation) -> RenderableType:
    """Show all answers about a plan, the most important first."""
    parts: list[RenderableType] = [
        would_be_headline(told.problem, told.plan, told.report),
        Text(_distance(told)),
        Text(),
    ]
    parts += plan_report(told.problem, told.plan, told.report)
    parts += [Text(), *_limits(told)]
    if told.changes:
        parts += [Text(), _changes_table(told)]
    if told.worth:
        parts += [Text(), _worth_table(told)]
    if told.wishes:
        parts += [Text(), _wish_table(told)]
    parts += list(_closing(told))
    return Group(*parts)


def _distance(told: Explanation) -> str:
    """Describe the plan's distance from the proved best."""
    model = scope_text(told.problem)
    if told.is_outside:
        share = range_text(Interval(-told.above_best.high, -told.above_best.low))
        return f"not in the declared space, whose proved best takes {share} longer ({model})"
    if told.best.plan is None:
        return f"no plan of the space was found in the time; the best takes at least {_low(told)} ({model})"
    if not told.report.fits:
        return f"the proved best that fits takes {_amounts(told, told.best.bounds)} ({model})"
    if told.best.plan == told.plan or told.value <= told.best.bounds.high:
        most = range_text(Interval(-math.inf, max(0.0, told.above_best.high)))
        return f"the best plan known; {most} can be saved ({model})"
    high = told.best.bounds.high
    return (
        f"not the best: the proved best takes {_amounts(told, Interval(told.best.bounds.low, high))}, "
        f"which saves {range_text(told.above_best)} ({model})"
    )


def _low(told: Explanation) -> str:
    return _amount(told, told.best.bounds.low)


def _amount(told: Explanation, value: float) -> str:
    if math.isinf(value):
        return "-"
    return seconds_text(value) if told.unit == "s" else f"{rate_text(value)} GPU-hours"


def _amounts(told: Explanation, interval: Interval) -> str:
    low, high = _amount(told, interval.low), _amount(told, interval.high)
    return joined(low, high)


def _limits(told: Explanation) -> Iterator[RenderableType]:
    """Show memory, batch, network and rules, a line each."""
    known = told.limits
    yield Text("What binds", "bold")
    yield hanging("memory", _memory(told))
    bubble = (
        f"{counted(known.num_micro_batches, 'micro-batch', 'micro-batches')} on "
        f"{counted(told.plan.layout.pp, 'stage')}: the bubble is "
        f"{percent_text(known.bubble_share)} of the step"
    )
    yield hanging("batch", bubble if told.plan.layout.pp > 1 else "no pipeline, no bubble")
    lines = [
        f"{item.part.replace('_', ' ')} {seconds_text(item.seconds)} ({percent_text(item.share)}), groups of "
        f"{counted(item.num_ranks, 'rank')} over {printable(item.tier)}"
        for item in known.exposed
        if item.share >= ALMOST_NOTHING
    ]
    yield hanging("network", "; ".join(lines) or "no communication that adds to the step by more than 0.1 %")
    for rule in known.rules:
        bound = "nothing" if math.isinf(rule.least_bound) else f"steps of {seconds_text(rule.least_bound)} or more"
        verdict = "may keep out something better" if rule.may_bind else "keeps out nothing better"
        yield hanging("rule", f"{rule.rule} {verdict}: it alone refuses {bound} (by the bounds)")


def _words_last(title: str, *columns: str) -> Table:
    """Make a table whose last column holds words and may wrap; the other columns do not."""
    table = report_table(title, *columns)
    for column in table.columns[:-1]:
        column.no_wrap = True
    table.columns[-1].justify = "left"
    return table


def _memory(told: Explanation) -> str:
    """Describe the free memory by stage, and whether memory binds, as far as it is proved."""
    room = told.limits.headroom_bytes
    least = min(range(len(room)), key=lambda stage: room[stage])
    shown = ", ".join(gib_text(size) for size in room[:SHOWN_STAGES])
    more = f", ... ({counted(len(room), 'stage')})" if len(room) > SHOWN_STAGES else ""
    text = f"stage {least} is the fullest; left on each stage: {shown}{more}"
    unlimited = next((worth for worth in told.worth if worth.name == "unlimited_memory"), None)
    if unlimited is None:
        return text
    if unlimited.gain.low > 0:
        peak = unlimited.best.peak_bytes
        need = f"; the best plan found without a limit needs {gib_text(peak)} a GPU" if peak else ""
        text += f". Memory binds: without a limit {range_text(unlimited.gain)} would be saved{need}"
        one_more = next(
            (worth for worth in told.worth if worth.name == "more_memory" and worth.gain.low > 0), None
        )
        if one_more is not None and one_more.best.peak_bytes:
            needs = gib_text(one_more.best.peak_bytes - told.report.peak_memory_bytes)
            text += f". A better plan needs {needs} more than this one"
        return text
    if unlimited.gain.high <= ALMOST_NOTHING:
        most = range_text(Interval(-math.inf, unlimited.gain.high))
        return f"{text}. Memory does not bind: without a limit {most} would be saved"
    return f"{text}. Whether memory binds was not decided in the time"


def _changes_table(told: Explanation) -> Table:
    table = _words_last("Single changes, everything else fixed", "change", "proved best", "saves", "layout")
    for change in told.changes:
        table.add_row(
            change.words, _amounts(told, change.best.bounds), range_text(change.saved), _differs(told, change)
        )
    return table


def _differs(told: Explanation, change: SingleChange) -> str:
    return _difference(told.plan.layout, change.layout)


def _difference(own: Layout, other: Layout | None) -> str:
    """List the fields in which another layout differs; its batch is that of the question."""
    if other is None:
        return ""
    same_batch = other.model_copy(update={"global_batch_size": own.global_batch_size})
    return layout_words(own, same_batch) or "the same layout"


def _worth_table(told: Explanation) -> Table:
    title = "What more would be worth (proved)"
    table = _words_last(title, "change", "this plan", "proved best", "saves", "best with")
    for worth in told.worth:
        same = "does not fit" if worth.same_plan is None else _amount(told, worth.same_plan)
        table.add_row(worth.words, same, _best(told, worth), range_text(worth.gain), _with(told, worth))
    return table


def _best(told: Explanation, worth: Worth) -> str:
    return "as now" if worth.implied_by else _amounts(told, worth.best.bounds)


def _with(told: Explanation, worth: Worth) -> str:
    if worth.implied_by:
        return "(implied)"
    base = told.best.plan or told.plan
    other = None if worth.best.plan is None else worth.best.plan.layout
    words = _difference(base.layout, other)
    is_other = worth.best.plan is not None and worth.best.plan.virtual_stages != base.virtual_stages
    return f"{words}, other stages" if other == base.layout and is_other else words


def _wish_table(told: Explanation) -> Table:
    title = "Why not" if any(wish.asked for wish in told.wishes) else "Why not its neighbours"
    table = _words_last(title, "wish", "proved best", "price", "in time", "best with / forbidden by")
    for wish in told.wishes:
        best = "" if wish.best is None or wish.best.infeasible else _amounts(told, wish.best.bounds)
        table.add_row(wish.words, best, *_price(told, wish), _because(told, wish))
    return table


def _price(told: Explanation, wish: WishAnswer) -> tuple[str, str]:
    """Write the price in per cent of the proved best, and in its unit."""
    if wish.outcome in ("forbidden", "does_not_fit", "too_late"):
        return "impossible", ""
    if wish.price is None or wish.amount is None:
        return "", ""
    amount = _amounts(told, wish.amount) if math.isfinite(wish.price.high) else ""
    return range_text(wish.price, signed=True), amount


def _because(told: Explanation, wish: WishAnswer) -> str:
    base = told.best.plan or told.plan
    if wish.outcome == "priced" and wish.best is not None and wish.best.plan is not None:
        words = _difference(base.layout, wish.best.plan.layout)
        return f"{words}; {wish.reason}" if wish.reason else words
    if wish.outcome == "open":
        return f"{wish.reason}; none found in the time".removeprefix("; ")
    return wish.reason


def _closing(told: Explanation) -> Iterator[RenderableType]:
    if told.unanswered:
        why = "interrupted before" if told.interrupted else "no time left for"
        yield hanging("open", f"{why}: {'; '.join(told.unanswered)}")
    yield hanging("proof", f"every range holds the truth for the cost model; {seconds_text(told.wall_time_s)}")
