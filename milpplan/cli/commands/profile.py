"""The command ``profile``: an overlay from measurements of this machine."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from milpplan.calibration import write_overlay
from milpplan.cli import command
from milpplan.cli import options as o
from milpplan.cli.arguments import within_range
from milpplan.cli.outcome import ExitCode, emit, say, show_blocks
from milpplan.errors import InvalidInputError
from milpplan.problem import load_hardware
from milpplan.profiling.measurement_order import EXTENTS, measure, sweep
from milpplan.profiling.overlay import document_text, profile_blocks, profiled
from milpplan.profiling.records import Measurements, open_machine, read_raw, write_raw
from milpplan.reports.files import check_writable
from milpplan.units import counted

EXAMPLES: Final = (("Measure this machine for five minutes", "--hardware dgx-h200 --out my-gpus.toml"),)


def profile(
    hardware: Annotated[
        str, typer.Option("--hardware", metavar="NAME", help="The description to lie on: a name or a file.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="OVERLAY.toml", help="Write the overlay here.")],
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="RAW.json", help="Measure nothing: take these raw measurements."),
    ] = None,
    raw: Annotated[
        Path | None,
        typer.Option(
            "--raw", metavar="RAW.json", help="Write the measurements here.", show_default="OVERLAY.raw.json"
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="cuda|cpu", help="What to measure; cpu only tries it out."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="N", help="Name of the overlay.", show_default="HARDWARE-profile"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only a coarse part of the measurements.")] = False,
    time_limit: Annotated[
        float, typer.Option("--time-limit", metavar="S", help="Stop measuring after S seconds.")
    ] = 300.0,
    as_json: o.AsJson = False,
) -> ExitCode:
    """Measure this machine's GPUs, as an overlay on a description (needs PyTorch: milpplan[profile])."""
    command.positive(time_limit, "--time-limit", "number of seconds")
    load_hardware(hardware)
    check_writable(out)
    if source is None:
        raw = raw or out.with_name(f"{out.name.removesuffix('.toml')}.raw.json")
        _check_apart(out, raw)
        check_writable(raw)
        measurements = _measured(hardware, device, quick, time_limit)
        write_raw(raw, measurements)
        say(f"Measurements written to {raw}.")
    else:
        _check_only_reading(source, {"--device": device, "--raw": raw, "--quick": quick})
        measurements = read_raw(source)
    console = Console(file=sys.stderr)
    with console.status("fitting") as status, within_range():
        callback = status.update if console.is_terminal else None
        result = profiled(measurements, hardware, name, out, callback)
    write_overlay(out, result.overlay)
    if as_json:
        emit(document_text(result))
    else:
        show_blocks(profile_blocks(result))
    say(f"Written to {out}.")
    return ExitCode.STOPPED_WITH_PLAN if measurements.stopped else ExitCode.OPTIMAL


def _measured(hardware: str, device: str | None, quick: bool, time_limit_s: float) -> Measurements:
    """Measure as much as the time allows, with a line of progress on a terminal."""
    console, start_s = Console(file=sys.stderr), time.monotonic()
    with console.status("starting PyTorch") as status:
        machine, kind = open_machine(device)
        if kind == "cpu":
            say("Measuring the CPU: this tries out the command, its constants describe no accelerator.")
        tasks = sweep(load_hardware(hardware), EXTENTS[kind], machine.num_ranks, quick)
        callback = status.update if console.is_terminal else None
        measurements = measure(machine, tasks, time_limit_s - (time.monotonic() - start_s), callback)
    if measurements.stopped:
        say(
            f"Stopped early ({measurements.stopped}) after {counted(measurements.num_rows, 'measurement')}; "
            "they are kept."
        )
    if not measurements.num_rows and measurements.stopped == "interrupted":
        raise KeyboardInterrupt
    return measurements


def _check_apart(out: Path, raw: Path) -> None:
    if out.resolve() == raw.resolve():
        raise InvalidInputError(
            f"--raw and --out are both {str(out)!r}.", "Expected two files.", "Change one of them."
        )


def _check_only_reading(source: Path, others: dict[str, object]) -> None:
    """Refuse options about measuring beside --from."""
    given = [option for option, value in others.items() if value]
    if given:
        raise InvalidInputError(
            f"--from {str(source)!r} is given together with {' and '.join(given)}.",
            "Expected either measurements to read, or options of measuring.",
            f"Leave out --from or {' and '.join(given)}.",
        )
