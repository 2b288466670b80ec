"""The command ``report``: the page and the trace of a plan."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import typer

from milpplan.cli.arguments import check_plan_of_file, within_range
from milpplan.cli.outcome import ExitCode, say
from milpplan.errors import InvalidInputError
from milpplan.explain.overview import plan_overview
from milpplan.optimize.context import undisturbed
from milpplan.problem import Plan, Problem
from milpplan.reports import lengths_in, lengths_trace, write_whole
from milpplan.reports.chrome_trace import trace_text
from milpplan.reports.documents.claims import result_in, written_by_another
from milpplan.reports.documents.document import ResultDocument, read_plan
from milpplan.reports.files import check_writable
from milpplan.reports.html.page_template import require_jinja
from milpplan.reports.html.plan_page import plan_page
from milpplan.reports.words.plan_words import cost_model_text
from milpplan.simulation import StepReport
from milpplan.simulation.pipeline.lanes import step_lanes
from milpplan.units import counted, seconds_text
from milpplan.version import __version__

EXAMPLES: Final = (("A page to show, and a trace for Perfetto", "plan.json -o report.html --trace trace.json"),)


def report(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan file, or the JSON of a solve.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="PAGE.html", help="Write the page here (milpplan[report])."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="TRACE.json", help="Write the step for ui.perfetto.dev here."),
    ] = None,
    time_limit: Annotated[
        float,
        typer.Option("--time-limit", metavar="S", help="Seconds; alternatives get what the rest leaves."),
    ] = 10.0,
    within: Annotated[
        float,
        typer.Option("--within", metavar="SHARE", help="Alternatives take at most this share more."),
    ] = 0.01,
) -> ExitCode:
    """Write a plan as a page that needs no network, and its step as a trace. A solve's file brings its proof."""
    started = time.monotonic()
    _check_outputs(out, trace)
    if not 0 <= time_limit < float("inf"):
        raise InvalidInputError(
            f"--time-limit is {time_limit}.", "Expected seconds, 0 or more.", "Correct --time-limit."
        )
    if not 0 <= within < 1:
        raise InvalidInputError(
            f"--within is {within}.", "Expected a share from 0 to below 1, such as 0.05.", "Correct --within."
        )
    lengths = lengths_in(plan) if out is None and trace is not None else None
    if lengths is not None and trace is not None:
        return _written({trace: lengths_trace(lengths)})
    if out is not None:
        require_jinja()
    problem, shown = read_plan(plan)
    check_plan_of_file(problem, shown)
    other = written_by_another(plan)
    # A proof that another version has sealed cannot be checked here, and is not shown.
    result = None if other else result_in(plan)
    files: dict[Path, str] = {}
    with within_range():
        if trace is not None:
            files[trace] = trace_text(
                step_lanes(problem, shown), f"{problem.model.name} on {counted(shown.layout.num_gpus, 'GPU')}"
            )
        if out is not None:
            left_s = max(0.0, time_limit - (time.monotonic() - started))
            files[out] = _page(problem, shown, result, other, left_s, within)
    return _written(files)


def _written(files: Mapping[Path, str]) -> ExitCode:
    with undisturbed():
        for target, text in files.items():
            write_whole(target, text)
            say(f"Written to {target}.")
    return ExitCode.OPTIMAL


def _check_outputs(out: Path | None, trace: Path | None) -> None:
    named = [target for target in (out, trace) if target is not None]
    if not named:
        raise InvalidInputError(
            "There is nothing to write.",
            "Expected -o PAGE.html, --trace TRACE.json, or both.",
            "Add -o report.html.",
        )
    if len({target.resolve() for target in named}) < len(named):
        raise InvalidInputError(
            f"The page and the trace are both {str(out)!r}.", "Expected two files.", "Change one of the options."
        )
    for target in named:
        check_writable(target)


def _page(
    problem: Problem,
    plan: Plan,
    result: ResultDocument | None,
    other: str | None,
    time_limit_s: float,
    within: float,
) -> str:
    forbid = () if result is None or result.certificate is None else result.certificate.forbid
    overview = plan_overview(problem, plan, time_limit_s=time_limit_s, within=within, forbid=forbid)
    notes = () if result is None else _old(result, overview.report)
    if other is not None:
        notes = (
            f"The file was written by milpplan {other}, this page by {__version__}: all numbers are this "
            "version's, and the proof of the file is left out. Solve again to have one.",
        )
    return plan_page(overview, None if notes else result, notes)


def _old(result: ResultDocument, report: StepReport) -> tuple[str, ...]:
    """Say why the proof in a file is not about the step that this version simulates."""
    certificate, step, here = result.certificate, result.step_time_s, cost_model_text(result.problem)
    if certificate is not None and certificate.cost_model != here:
        return (
            f"The file was proved for the cost model {certificate.cost_model}; this page is by {here}, so "
            "its proof is left out. Solve again to have one.",
        )
    if step is not None and abs(step - report.step_time_s) > 1e-9 * report.step_time_s:
        return (
            f"The file says {seconds_text(step)} a step, the simulator {seconds_text(report.step_time_s)}: it was "
            "written by another state of milpplan, so its proof is left out. Solve again to have one.",
        )
    return ()
