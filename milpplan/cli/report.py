"""The work of ``report``: the page and the trace of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from milpplan.cli.outcome import ExitCode, say
from milpplan.cli.solving import check_plan_of_file, within_range
from milpplan.errors import InvalidInputError
from milpplan.explain.overview import plan_overview
from milpplan.optimize.milp.solution import undisturbed
from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem
from milpplan.reports.chrome_trace import lengths_in, lengths_trace, trace_text
from milpplan.reports.documents.claims import result_in, written_by_another
from milpplan.reports.documents.document import ResultDocument, read_plan
from milpplan.reports.files import check_writable, write_whole
from milpplan.reports.html.page_template import require_jinja
from milpplan.reports.html.plan_page import plan_page
from milpplan.reports.words.plan_words import cost_model_text
from milpplan.simulation.pipeline.step_lanes import step_lanes
from milpplan.simulation.report import StepReport
from milpplan.units import counted, seconds_text
from milpplan.version import __version__


def run(path: Path, out: Path | None, trace: Path | None, time_limit_s: float, within: float) -> ExitCode:
    """Simulate a plan, write its page and its trace; that both can be written is checked first."""
    _check_outputs(out, trace)
    if not 0 <= time_limit_s < float("inf"):
        raise InvalidInputError(
            f"--time-limit is {time_limit_s}.", "Expected seconds, 0 or more.", "Correct --time-limit."
        )
    if not 0 <= within < 1:
        raise InvalidInputError(
            f"--within is {within}.", "Expected a share from 0 to below 1, such as 0.05.", "Correct --within."
        )
    lengths = lengths_in(path) if out is None and trace is not None else None
    if lengths is not None and trace is not None:
        return _written({trace: lengths_trace(lengths)})
    if out is not None:
        require_jinja()
    problem, plan = read_plan(path)
    check_plan_of_file(problem, plan)
    other = written_by_another(path)
    # A proof that another version has sealed cannot be checked here, and is not shown.
    found = None if other else result_in(path)
    files: dict[Path, str] = {}
    with within_range():
        if trace is not None:
            files[trace] = trace_text(
                step_lanes(problem, plan), f"{problem.model.name} on {counted(plan.layout.num_gpus, 'GPU')}"
            )
        if out is not None:
            files[out] = _page(problem, plan, found, other, time_limit_s, within)
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
    found: ResultDocument | None,
    other: str | None,
    time_limit_s: float,
    within: float,
) -> str:
    forbid = () if found is None or found.certificate is None else found.certificate.forbid
    shown = plan_overview(problem, plan, time_limit_s=time_limit_s, within=within, forbid=forbid)
    notes = () if found is None else _old(found, shown.report)
    if other is not None:
        notes = (
            f"The file was written by milpplan {other}, this page by {__version__}: all numbers are this "
            "version's, and the proof of the file is left out. Solve again to have one.",
        )
    return plan_page(shown, None if notes else found, notes)


def _old(found: ResultDocument, report: StepReport) -> tuple[str, ...]:
    """Say why the proof in a file is not about the step that this version simulates."""
    certificate, step, here = found.certificate, found.step_time_s, cost_model_text(found.problem)
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
