"""The command ``calibrate``: an overlay from measurements."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from milpplan.calibration import write_overlay
from milpplan.calibration.calibration_tables import calibration_blocks, document_text
from milpplan.calibration.sources import LoggedRun, calibrated, calibrated_from_logs
from milpplan.cli import options as o
from milpplan.cli.arguments import check_plan_of_file, within_range
from milpplan.cli.command import positive
from milpplan.cli.interrupts import limited
from milpplan.cli.launcher_text import launcher_text
from milpplan.cli.outcome import ExitCode, emit, say, show_blocks
from milpplan.errors import InvalidInputError
from milpplan.launchers import ImportRequest, target_named
from milpplan.problem import load_hardware, load_model
from milpplan.problem.overlay import USUAL
from milpplan.reports.files import check_writable
from milpplan.units import counted

EXAMPLES: Final = (
    ("Constants that fit your measured steps", "my_runs.json --hardware dgx-h100 --out my-cluster.toml"),
    (
        "Constants that fit a run, from its launch script and its log",
        "run.sh run.log --from megatron --hardware dgx-h100 --out mine.toml",
    ),
)


def calibrate(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE [LOG]",
            help="Measured runs (JSON), nccl-tests output, a CSV of products, a trace of PyTorch's profiler; or"
            " launch scripts, each followed by the log or the TensorBoard file of its run.",
        ),
    ],
    hardware: Annotated[
        str, typer.Option("--hardware", metavar="NAME", help="The description to lie on: a name or a file.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="OVERLAY.toml", help="Write the overlay here.")],
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="N", help="Name of the overlay.", show_default="from hardware and source"),
    ] = None,
    constant: Annotated[
        list[str] | None,
        typer.Option(
            "--constant",
            metavar="NAME",
            help="Fit only this constant. Repeatable.",
            show_default="the usual eight",
        ),
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            "--gpus-per-node", metavar="N", min=2, help="Ranks of an nccl-tests output that does not say them."
        ),
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option("--from", metavar=o.LAUNCHERS, help="The launcher of scripts that stand before logs."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", metavar="N", min=1, help="Processes of a run.", show_default="the script's"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="The scripts' model.", show_default="the script's"),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option("--vocab-size", metavar="N", min=1, help="Its vocabulary.", show_default="the script's"),
    ] = None,
    ignore: o.IgnoreFlag = None,
    settings: o.Settings = None,
    arguments: o.Arguments = None,
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", metavar="S", help="Give up after S seconds, without an overlay."),
    ] = None,
    as_json: o.AsJson = False,
) -> ExitCode:
    """Fit constants of hardware and software to your own measurements, as an overlay on a description."""
    positive(time_limit, "--time-limit", "number of seconds")
    check_writable(out)
    console = Console(file=sys.stderr)
    with limited(time_limit), console.status("reading") as status, within_range():
        callback = status.update if console.is_terminal else None
        if len(sources) == 1 and launcher is None:
            result = calibrated(sources[0], hardware, name, out, constant or USUAL, gpus_per_node, callback)
        else:
            spec = None if model is None else load_model(model)
            asked = ImportRequest("", "", load_hardware(hardware), gpus, spec, vocab_size, ignore or [])
            runs = _logged_runs(sources, launcher, asked, settings or (), arguments)
            result = calibrated_from_logs(runs, hardware, name, out, constant or USUAL, callback)
    write_overlay(out, result.overlay)
    if as_json:
        emit(document_text(result))
    else:
        show_blocks(calibration_blocks(result))
    say(f"Written to {out}.")
    return ExitCode.OPTIMAL


def _logged_runs(
    sources: Sequence[Path],
    launcher: str | None,
    asked: ImportRequest,
    settings: Sequence[str],
    arguments: str | None,
) -> list[LoggedRun]:
    """Read pairs of a launch script and a log; ``asked`` holds what is stated beside the scripts."""
    if launcher is None or len(sources) % 2:
        seen = "--from is missing" if launcher is None else f"{counted(len(sources), 'file')} given with --from"
        raise InvalidInputError(
            f"{seen}.",
            "Expected one file of measurements, or pairs of a launch script and its log with --from LAUNCHER.",
            "For example: milpplan calibrate run.sh run.log --from megatron --hardware dgx-h100 --out mine.toml",
        )
    target, runs = target_named(launcher, "--from"), []
    for script, log in zip(sources[::2], sources[1::2], strict=True):
        text, name, given = launcher_text(script, settings, arguments)
        imported = target.read(replace(asked, text=text, source=name, given=given))
        check_plan_of_file(imported.problem, imported.plan)
        for note in imported.notes:
            say(f"{script.name}: {note}")
        runs.append(LoggedRun(log, launcher, imported.problem, imported.plan))
    return runs
