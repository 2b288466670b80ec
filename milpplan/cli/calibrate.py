"""The work of ``calibrate``: an overlay from measurements."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from milpplan.calibration.sources import calibrated, write_overlay
from milpplan.calibration.tables import document_text, report
from milpplan.cli.arguments import positive
from milpplan.cli.interrupts import limited
from milpplan.cli.outcome import ExitCode, emit, say, show
from milpplan.cli.solving import within_range
from milpplan.problem.overlay import USUAL
from milpplan.reports.files import check_writable


def run(
    source: Path,
    hardware: str,
    out: Path,
    name: str | None,
    constants: list[str],
    gpus: int | None,
    time_limit_s: float | None,
    as_json: bool,
) -> ExitCode:
    """Fit the constants, print and write the overlay."""
    positive(time_limit_s, "--time-limit", "number of seconds")
    check_writable(out)
    console = Console(file=sys.stderr)
    with limited(time_limit_s), console.status("reading") as status, within_range():
        told = status.update if console.is_terminal else None
        result = calibrated(source, hardware, name, out, constants or USUAL, gpus, told)
    write_overlay(out, result.overlay)
    if as_json:
        emit(document_text(result))
    else:
        show(report(result))
    say(f"Written to {out}.")
    return ExitCode.OPTIMAL
