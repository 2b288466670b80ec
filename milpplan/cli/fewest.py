"""``milpplan min-gpus``: the fewest accelerators that a job needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from rich.console import Group
from rich.text import Text

from milpplan.cli import arguments
from milpplan.cli.outcome import OF_STATUS, ExitCode, emit, say, show
from milpplan.cli.progress import shown_progress
from milpplan.cli.solving import within_range
from milpplan.insight.fewest import Fewest, fewest_gpus
from milpplan.optimize.result import SolveOptions
from milpplan.reports.document import ResultDocument, document_text, result_document
from milpplan.reports.files import check_writable, write_whole
from milpplan.reports.terminal import printable, solve_report
from milpplan.specs.problem import Problem
from milpplan.specs.records import Record
from milpplan.version import __version__


class FewestDocument(Record):
    """The fewest accelerators; ``refused`` are the numbers proved to have no plan, ``why`` what the largest of
    them lacks; ``result`` is the best plan on the fewest."""

    schema_version: Literal[1] = 1
    milpplan_version: str
    num_gpus: int | None
    refused: tuple[int, ...]
    why: str | None
    result: ResultDocument


def run(problem: Problem, options: SolveOptions, widen: bool, out: Path | None, as_json: bool) -> ExitCode:
    """Look for the fewest, print them with their plan and with what fewer lack."""
    arguments.positive(options.time_limit_s, "--time-limit", "number of seconds")
    if out is not None:
        check_writable(out)
    with shown_progress("step_time_per_token") as callback, within_range():
        found = fewest_gpus(problem, replace(options, callback=callback), widen=widen)
    result = found.result
    if result.message:
        say(result.message)
    document = result_document(result, options.gap, forbid=options.forbid)
    if as_json:
        emit(document_text(_document(found, document)))
    else:
        show(Group(_headline(found), Text(), solve_report(result, options.gap)))
    if out is not None and result.plan is not None:
        write_whole(out, document_text(document))
        say(f"Written to {out}.")
    return OF_STATUS[result.status]


def _document(found: Fewest, result: ResultDocument) -> FewestDocument:
    return FewestDocument(
        milpplan_version=__version__,
        num_gpus=found.num_gpus,
        refused=found.refused,
        why=found.why,
        result=result,
    )


def _headline(found: Fewest) -> Text:
    most = f"{found.refused[-1]:,}" if found.refused else ""
    if found.num_gpus is None:
        known = f"; up to {most} it is proved that there is none" if most else ""
        return Text(f"no number of GPUs with a plan was found{known}", "bold yellow")
    text = Text(f"{found.num_gpus:,} GPUs are the fewest that have a plan", "bold green")
    if most:
        text.append(f": proved of all {len(found.refused):,} smaller numbers tried, up to {most}.\n", "bold green")
        text.append(printable(f"With {most}: {found.why}"), "default")
    return text
