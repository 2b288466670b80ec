"""The command ``simulate``: one step of a plan file, or of Calculon's files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from milpplan.calibration import error_bar
from milpplan.cli import calculon as calculons
from milpplan.cli import options as o
from milpplan.cli.arguments import check_plan_of_file, within_range
from milpplan.cli.command import missing
from milpplan.cli.outcome import ExitCode, emit, show_blocks
from milpplan.problem import Plan, Problem
from milpplan.problem.calculon.translation import calculon_run, read_calculon
from milpplan.reports.answers import simulation_blocks
from milpplan.reports.documents.document import document_text, read_plan, simulation_document
from milpplan.simulation import StepReport
from milpplan.simulation import simulate as simulate_plan
from milpplan.validation.evidence import evidence

EXAMPLES: Final = (
    ("Time and memory of a plan, yours or a solve's", "plan.json"),
    ("Every stage, as JSON", "plan.json --json"),
)


def simulate(
    plan: Annotated[
        Path | None, typer.Argument(metavar="PLAN.json", help="A plan file, or the JSON of a solve.")
    ] = None,
    calculon: o.Calculon = None,
    as_json: o.AsJson = False,
) -> ExitCode:
    """Simulate one step of a plan. Exits with 3 if the plan does not fit in memory."""
    if calculon is None:
        if plan is None:
            raise missing("PLAN.json", "a plan file")
        code = _simulate(*read_plan(plan), as_json)
    else:
        if plan is not None:
            raise calculons.beside("a plan file")
        files = read_calculon(*calculon)
        code = _simulate(*calculon_run(files), as_json)
        calculons.say_notes(files)
    return code


def _simulate(problem: Problem, plan: Plan, as_json: bool) -> ExitCode:
    """Simulate a plan and print the report."""
    check_plan_of_file(problem, plan)
    with within_range():
        report = simulate_plan(problem, plan)
        _check_numbers(report)
        # Evidence and error bars of one node type say nothing about a cluster of several.
        single = not problem.other_hardware
        bar = error_bar(problem, plan, report.step_time_s) if single else None
        known = None if problem.inference else evidence(problem, plan, report.step_time_s)
    if as_json:
        emit(document_text(simulation_document(problem, plan, report, bar, known)))
    else:
        show_blocks(simulation_blocks(problem, plan, report, bar, known))
    return ExitCode.OPTIMAL if report.fits else ExitCode.INFEASIBLE


def _check_numbers(report: StepReport) -> None:
    """Refuse negative sums: they left the range of 64-bit integers."""
    peaks = [stage.memory.peak_bytes for stage in report.stages]
    if report.step_time_ns <= 0 or min(peaks) < 0:
        raise OverflowError("a step time or a memory size left the range of 64-bit integers")
