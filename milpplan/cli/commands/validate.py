"""The command ``validate``: predictions against measured runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import Progress

from milpplan.calibration import mean_share
from milpplan.calibration.coverage import coverage
from milpplan.cli import options as o
from milpplan.cli.arguments import within_range
from milpplan.cli.outcome import ExitCode, emit, say, say_error, show
from milpplan.reports.files import make_directory
from milpplan.validation import Validation, compare, report, summarise
from milpplan.validation.accuracy_tables import document_text
from milpplan.validation.figures import write_figures
from milpplan.validation.runs import RunFile, read_runs

EXAMPLES: Final = (("The simulator against published runs", ""), ("Against your own", "--runs my_runs.json"))
MAX_TOLD = 20
"""Maximum of rejected records that are reported one by one."""


def validate(
    runs: Annotated[
        Path | None,
        typer.Option(
            "--runs",
            metavar="FILE",
            help="Measured runs as JSON, plain or gzipped.",
            show_default="published runs",
        ),
    ] = None,
    as_json: o.AsJson = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="DIR", help="Write figures (SVG) into this directory.")
    ] = None,
    each: Annotated[
        bool,
        typer.Option("--each", help="Print every run with what was assumed, where they are more than a page."),
    ] = False,
    stacks: Annotated[
        bool, typer.Option("--stacks/--no-stacks", help="With the constants fitted to each framework, or without.")
    ] = True,
) -> ExitCode:
    """Compare the simulator with measured training runs: step time, memory, and the order of layouts."""
    if plot is not None:
        make_directory(plot, "--plot")
    file = read_runs(runs)
    for error in file.rejected[:MAX_TOLD]:
        say_error(error)
    if len(file.rejected) > MAX_TOLD:
        say(f"and {len(file.rejected) - MAX_TOLD} more records were rejected.")
    with within_range():
        validation = _compared(file, stacks)
        covered = coverage(validation.comparisons)
    summary = summarise(validation)
    if as_json:
        emit(document_text(validation, summary, {part.name: part.share for part in covered}))
    else:
        show(report(validation, summary, each, mean_share(covered)))
    if plot is not None:
        for path in write_figures(validation, plot):
            say(f"Written to {path}.")
    return ExitCode.BAD_INPUT if file.rejected else ExitCode.OPTIMAL


def _compared(file: RunFile, stacks: bool) -> Validation:
    """Compare all runs, with a bar on a terminal."""
    console = Console(file=sys.stderr)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("simulating", total=len(file.runs))
        return compare(file, lambda done: progress.update(task, completed=done), stacks)
