"""The gaps of plans as one HTML page that needs no network: figures, tables, and the whole JSON document in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from milpplan.insight.gap_records import Change, GapReport, SpaceGap
from milpplan.reports.certificate import certificate_sentence
from milpplan.reports.clusters import cluster_text
from milpplan.reports.gap_document import (
    GapDocument,
    Judged,
    PlanGapDocument,
    SpaceGapDocument,
)
from milpplan.reports.gap_figures import (
    COLOURS,
    ends_figure,
    fates_figure,
    memory_figure,
    progress_figure,
    times_figure,
)
from milpplan.reports.gap_text import (
    EFFORTS,
    space_row,
    spending_text,
    verdict,
)
from milpplan.reports.layout_fates import WORDS
from milpplan.reports.spaces import cost_model_text
from milpplan.reports.traffic_page import require_plotly
from milpplan.units import gib_text, percent_text, seconds_text

NEAR_FRACTION: Final = 0.05
"""Plans up to this share slower than the fastest are listed."""
_PAGE: Final = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{{ title }}</title>
<style>
:root { color-scheme: light dark; }
body { font-family: system-ui, sans-serif; margin: 2em auto; max-width: 1060px; padding: 0 1em; }
body { line-height: 1.45; }
h2 { margin-top: 2.2em; border-top: 1px solid #8886; padding-top: 0.8em; } h3 { margin-top: 1.8em; }
p { max-width: 54em; }
.wide { overflow-x: auto; } .figure { background: #fff; border-radius: 6px; }
table { border-collapse: collapse; margin: 0.6em 0; }
td, th { padding: 0.25em 0.8em; text-align: right; border-bottom: 1px solid #8886; vertical-align: top; }
td:first-child, th:first-child, .words { text-align: left; }
td { white-space: nowrap; } td.words, td:first-child { white-space: normal; min-width: 12em; }
code { word-break: break-all; }
</style></head><body>
<h1>{{ title }}</h1>
<p>A gap says how much of a plan's step the best plan of a space saves. Its lower end is a plan that was simulated,
its upper end a lower bound: proved, no plan of the space saves more. All of it speaks about the cost model.</p>
{% if summary|length > 1 or failed %}<h2>All plans</h2>{{ table(summary_head, summary) }}
{% for one in failed %}<p><b>{{ one.name }}</b> was not judged: {{ one.seen }} {{ one.expected }} {{ one.do }}</p>
{% endfor %}{% endif %}
{% for plan in plans %}
<h2>{{ plan.name }}</h2>
<p><b>{{ plan.headline }}</b></p>
<ul>{% for line in plan.verdicts %}<li>{{ line }}</li>{% endfor %}<li>{{ plan.cost }}</li></ul>
{{ plan.ends }}
{{ table(best_head, plan.best) }}
<h3>What closes the gap</h3>
{% if plan.changes %}<p>Each change by itself, simulated; everything else stays as it is.</p>
{{ table(change_head, plan.changes) }}{% else %}<p>No single change makes the plan faster.</p>{% endif %}
{% if plan.chain|length > 1 %}<p>One after the other:</p>{{ table(change_head, plan.chain) }}{% endif %}
<h3>Where the time goes</h3>{{ plan.times }}
<h3>Memory of every stage</h3>{{ plan.memory }}
{% for space in plan.spaces %}
<h3>The proof for {{ space.name }}</h3>
<p>{{ space.text }}</p>
{{ space.progress }}
<p>{{ space.layouts }}</p>
{{ space.fates }}
<p>{{ space.certificate }}</p>
{% endfor %}
<h3>Plans within {{ near_text }} of the fastest</h3>
<p>{{ plan.near_text }}</p>
{{ table(near_head, plan.near) }}
{% if plan.flags %}<p>Not priced, by the file: {{ plan.flags }}</p>{% endif %}
{% endfor %}
<script type="application/json" id="gap-document">{{ document }}</script>
</body></html>
"""


def gap_page(document: GapDocument, judged: Sequence[Judged]) -> str:
    """The whole page.

    Raises:
        InvalidInputError: plotly or jinja2 is not installed.
    """
    _, writer, jinja2 = require_plotly()
    drawn: list[str] = []
    markup = jinja2.utils.markupsafe.Markup

    def draw(figure: Any) -> Any:
        """The first figure brings the library along for all."""
        script: str | bool = False if drawn else "inline"
        html = writer.to_html(
            figure, full_html=False, include_plotlyjs=script == "inline", div_id=f"f{len(drawn)}"
        )
        drawn.append(html)
        return markup(f'<div class="wide figure">{html}</div>')

    escape = jinja2.utils.markupsafe.escape
    plans = [_plan(one, said, draw) for one, said in zip(judged, document.plans, strict=True)]
    title = f"Optimality gap: {judged[0].name}" if len(judged) == 1 else f"Optimality gaps of {len(judged)} plans"
    template = jinja2.Environment(autoescape=True).from_string(_PAGE)
    # In a script element only "</" and "<!" could end or change it.
    text = json.dumps(document.model_dump(mode="json")).replace("<", "\\u003c")
    return str(
        template.render(
            title=title,
            table=lambda head, rows: markup(_table(escape, head, rows)),
            summary_head=("plan", "step", "memory", "gap", "GPU-hours a run"),
            summary=[_summary(one) for one in judged],
            failed=document.failed,
            plans=plans,
            best_head=("space", "bound", "best known", "can be saved", "proof", "best known differs in"),
            change_head=("change", "step", "memory", "saves", "of the gap", "takes"),
            near_head=("step", "slower", "memory", "layout"),
            near_text=percent_text(NEAR_FRACTION, 0),
            document=markup(text),
        )
    )


def _table(escape: Any, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose last column is words as well."""
    heads = [*(f"<th>{escape(cell)}</th>" for cell in head[:-1]), f'<th class="words">{escape(head[-1])}</th>']
    lines = ["".join(heads)]
    for row in rows:
        cells = [f"<td>{escape(cell)}</td>" for cell in row[:-1]]
        lines.append("".join([*cells, f'<td class="words">{escape(row[-1])}</td>']))
    return f'<div class="wide"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def _summary(one: Judged) -> tuple[str, ...]:
    told = one.gap
    memory = gib_text(told.report.peak_memory_bytes)
    return (
        one.name,
        seconds_text(told.report.step_time_s),
        memory if told.report.fits else f"{memory}: does not fit",
        "; ".join(f"{space.name}: {verdict(told, space)}" for space in told.spaces),
        f"{told.spending.gpu_hours:,.0f}",
    )


def _plan(one: Judged, said: PlanGapDocument, draw: Any) -> dict[str, Any]:
    """Everything that the page shows about a plan."""
    told = one.gap
    fits = "" if told.report.fits else "; it does not fit in memory, so the step is only what it would be"
    cluster, step = (
        cluster_text(told.problem, told.plan.layout.num_gpus),
        seconds_text(told.report.step_time_s),
    )
    return {
        "name": one.name,
        "headline": f"{told.problem.model.name} on {cluster}: {step} a step{fits}",
        "verdicts": [f"Gap to {space.name}: {verdict(told, space)}." for space in told.spaces],
        "cost": f"Cost: {spending_text(told)}.",
        "ends": draw(ends_figure(told)),
        "best": [space_row(told, space) for space in told.spaces],
        "changes": [_change_row(change) for change in told.changes],
        "chain": [_change_row(change) for change in told.chain],
        "times": draw(times_figure(told)),
        "memory": draw(memory_figure(told)),
        "spaces": [_space(told, space, own, draw) for space, own in zip(told.spaces, said.spaces, strict=True)],
        "near": _near_rows(told),
        "near_text": _near_text(told, said.spaces[-1]),
        "flags": ", ".join((*one.unknown_flags, *one.ignored_flags)),
    }


def _change_row(change: Change) -> tuple[str, ...]:
    return (
        change.words,
        seconds_text(change.step_time_s),
        gib_text(change.peak_memory_bytes),
        percent_text(change.saved),
        "-" if change.closed is None else percent_text(change.closed, 0),
        EFFORTS[change.effort],
    )


def _space(told: GapReport, space: SpaceGap, said: SpaceGapDocument, draw: Any) -> dict[str, Any]:
    """The proof of one space: the search over time, what became of its layouts, the certificate."""
    layouts, certificate = said.layouts, said.certificate
    refused = (
        ""
        if layouts is None
        else ", ".join(
            f"{name.replace('_', ' ')} ({count:,})"
            for name, count in sorted(layouts.rejected.items(), key=lambda item: -item[1])[:5]
        )
    )
    words = ""
    if layouts is not None:
        fates = ", ".join(f"{layouts.fates[fate]:,} {WORDS[fate]}" for fate in COLOURS if layouts.fates[fate])
        words = (
            f"{layouts.enumerated:,} partial layouts were listed, {layouts.legal:,} layouts are legal: {fates}. "
            f"Rules refused the others, most of them by {refused or 'none'}."
        )
    sealed = (
        ""
        if certificate is None
        else f"{certificate_sentence(certificate)} milpplan certify proves what solve writes for the same space."
    )
    return {
        "name": space.name,
        "text": f"Cost model {cost_model_text(told.problem)}; {said.space}; {said.status.replace('_', ' ')}.",
        "progress": draw(progress_figure(told, said)),
        "layouts": words,
        "fates": draw(fates_figure(said)) if layouts is not None and space.best_s is not None else "",
        "certificate": sealed,
    }


def _near_rows(told: GapReport) -> list[tuple[str, ...]]:
    """Plans of the search within ``NEAR_FRACTION`` of the fastest."""
    fastest = min((near.step_time_s for near in told.near), default=0.0)
    close = [near for near in told.near if near.step_time_s <= (1.0 + NEAR_FRACTION) * fastest]
    return [
        (
            seconds_text(near.step_time_s),
            percent_text(near.step_time_s / fastest - 1.0, 2),
            gib_text(near.peak_memory_bytes),
            " ".join(
                f"{name}={value}" for name, value in near.plan.layout.model_dump(exclude_defaults=True).items()
            ),
        )
        for near in close
    ]


def _near_text(told: GapReport, whole: SpaceGapDocument) -> str:
    """What the list leaves out, as far as it is proved."""
    if whole.layouts is None or not told.near:
        return "The search kept no plans."
    beyond = sum(sum(one.fates.values()) for one in whole.layouts.bounds if one.low >= 1.0 + NEAR_FRACTION)
    lost = whole.layouts.fates["does_not_fit"]
    rest = max(0, whole.layouts.legal - beyond - lost)
    return (
        f"The fastest plans that the search simulated, one a layout. Of {whole.layouts.legal:,} legal layouts "
        f"{lost:,} are proved not to fit and {beyond:,} proved to be further away; of the other {rest:,} "
        "the search stopped looking once they could not be faster than the best, so some may be as close."
    )
