"""HTML that a notebook shows for answers without a picture: the text of the command line, with its colours."""

from __future__ import annotations

from html import escape
from io import StringIO

from rich.console import Console, RenderableType

from milpplan.communication.records import TrafficReport
from milpplan.explain.candidates import Choice
from milpplan.explain.fewest import Fewest
from milpplan.explain.judge.records import GapReport
from milpplan.explain.records import Explanation
from milpplan.lengths.records import LengthsResult
from milpplan.reports.notebook.html import result_html
from milpplan.units import counted

WIDTH = 100
"""Columns of the text, as in a file."""
FRAME = '<pre style="font-family:ui-monospace,monospace;line-height:1.35;overflow-x:auto">{code}</pre>'


def told_html(renderable: RenderableType) -> str:
    """Convert a renderable to HTML of fixed width, with inline colours."""
    console = Console(
        file=StringIO(), record=True, width=WIDTH, force_terminal=True, markup=False, highlight=False, emoji=False
    )
    console.print(renderable)
    return console.export_html(inline_styles=True, code_format=FRAME)


def gap_html(report: GapReport) -> str:
    """Show the gap of a plan."""
    from milpplan.reports.documents.gap_document import Judged
    from milpplan.reports.text.gap_text import gap_report

    return told_html(gap_report(Judged("plan", report)))


def explanation_html(explanation: Explanation) -> str:
    """Show the limits of a plan, and the value of changes."""
    from milpplan.reports.text.explain_text import explanation_report

    return told_html(explanation_report(explanation))


def lengths_html(result: LengthsResult) -> str:
    """Show a step of several lengths."""
    from milpplan.reports.text.lengths_text import lengths_tables

    return told_html(lengths_tables(result))


def traffic_html(report: TrafficReport) -> str:
    """Show the traffic of a plan."""
    from milpplan.reports.text.traffic_text import traffic_tables

    return told_html(traffic_tables(report))


def choice_html(choice: Choice) -> str:
    """Show candidates in order."""
    from milpplan.reports.text.candidates import choice_report

    return told_html(choice_report(choice, 1e-4))


def fewest_html(fewest: Fewest) -> str:
    """Show the minimum number of accelerators, the reason why fewer do not suffice, and the plan."""
    number = "no number with a plan was found" if fewest.num_gpus is None else f"{counted(fewest.num_gpus, 'GPU')}"
    lack = f" (proved: no plan on up to {fewest.refused[-1]:,}). {fewest.why}" if fewest.refused else ""
    return f"<p><b>Fewest: {escape(number)}</b>{escape(lack)}</p>{result_html(fewest.result)}"
