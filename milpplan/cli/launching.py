"""``milpplan export`` and ``milpplan import``: plans to and from the files of launchers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from milpplan.cli import options as o
from milpplan.cli.outcome import ExitCode, emit, say, show
from milpplan.cli.program import command
from milpplan.version import __version__

if TYPE_CHECKING:
    from milpplan.launchers.records import Imported

NAMES = "megatron|megatron-bridge|torchtitan|nanotron|deepspeed|accelerate|automodel"
"""Targets, as the help shows them."""


Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A variable of the script, as make takes it. Repeatable."),
]
Arguments = Annotated[
    str | None,
    typer.Option("--args", metavar="WORDS", help='The arguments that the script is given; "": none.'),
]


@command()
def export(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan file, or the JSON of a solve.")],
    to: Annotated[str, typer.Option("--to", metavar=NAMES, help="The launcher.")],
    target_version: Annotated[
        str | None,
        typer.Option("--target-version", metavar="V", help="Its version.", show_default="the newest known"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE|DIR",
            help="Write the script here; into a directory (a name without suffix) all.",
        ),
    ] = None,
    as_json: o.AsJson = False,
) -> None:
    """Write the files that start a plan with a launcher, checked against the launcher's own rules."""
    from milpplan.cli.solving import check_plan_of_file
    from milpplan.launchers.restriction import version_of
    from milpplan.launchers.targets import launch_document, target_named
    from milpplan.reports.documents.claims import result_in
    from milpplan.reports.documents.document import read_plan

    target = target_named(to, "--to")
    version = version_of(target.capability, target_version)
    problem, decided = read_plan(plan)
    check_plan_of_file(problem, decided)
    # A script that somebody launches for weeks is not made from a result that somebody has changed.
    result_in(plan)
    launch = target.export(problem, decided, version)
    files = target.files(launch, __version__)
    if out is not None:
        _write(files, out)
    if as_json:
        emit(launch_document(launch))
    elif out is None:
        emit(next(iter(files.values())))
    for note in launch.notes:
        say(f"Note: {note}")
    raise typer.Exit(int(ExitCode.OPTIMAL))


def _write(files: dict[str, str], out: Path) -> None:
    """All files into a directory, or the first one under its own name; nothing unless all can be written."""
    from milpplan.reports.files import check_writable, make_directory, write_whole

    into = out.is_dir() or not (out.suffix or out.exists())
    places = {out / name: text for name, text in files.items()} if into else {out: next(iter(files.values()))}
    if into:
        make_directory(out, "--out", parents=False)
    for place in places:
        check_writable(place)
    for place, text in places.items():
        write_whole(place, text)
        say(f"Written to {place}.")


@command("import")
def import_(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A script, a command line, or a .yaml of arguments; -: standard input."
        ),
    ],
    source: Annotated[str, typer.Option("--from", metavar=NAMES, help="The launcher.")],
    hardware: Annotated[str, typer.Option("--hardware", metavar="NAME", help="The cluster: a name or a file.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="NAME", help="The model, checked against the file.", show_default="the file's"
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", metavar="N", min=1, help="Processes.", show_default="the file's"),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option("--vocab-size", metavar="N", min=1, help="Its vocabulary.", show_default="the file's"),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="FLAG", help="Accept not to see what this flag costs. Repeatable."),
    ] = None,
    settings: Settings = None,
    arguments: Arguments = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="PLAN.json", help="Write the plan file here.")
    ] = None,
    as_json: o.AsJson = False,
) -> None:
    """Read the plan out of a launcher's files, and say what it costs; flags that cannot be priced are refused."""
    from milpplan.cli.launcher_text import launcher_text
    from milpplan.launchers.targets import target_named
    from milpplan.problem.catalog import load_hardware, load_model
    from milpplan.reports.files import check_writable

    target = target_named(source, "--from")
    cluster = load_hardware(hardware)
    spec = None if model is None else load_model(model)
    if out is not None:
        check_writable(out)
    text, name = launcher_text(file, settings or (), arguments)
    found = target.read(text, name, cluster, gpus, spec, vocab_size, ignore or [])
    _tell(found, out, as_json)
    raise typer.Exit(int(ExitCode.OPTIMAL))


def _tell(found: Imported, out: Path | None, as_json: bool) -> None:
    """What was read: flags and notes as talk, the simulated plan or the plan file as the result."""
    from milpplan.cli.solving import check_plan_of_file, within_range
    from milpplan.reports.documents.document import document_text
    from milpplan.reports.documents.plan_file import ImportedFile, plan_document
    from milpplan.reports.files import write_whole
    from milpplan.reports.text.terminal import simulation_report
    from milpplan.simulation.simulator import simulate

    check_plan_of_file(found.problem, found.plan)
    for what, flags in (("Not known to the launcher", found.unknown_flags), ("Ignored", found.ignored_flags)):
        for flag in flags:
            say(f"{what}: {flag}")
    for note in found.notes:
        say(f"Note: {note}")
    file = ImportedFile(
        plan=plan_document(found.plan),
        problem=found.problem,
        unknown_flags=found.unknown_flags,
        ignored_flags=found.ignored_flags,
        notes=found.notes,
    )
    text = document_text(file)
    if as_json:
        emit(text)
    else:
        with within_range():
            show(simulation_report(found.problem, found.plan, simulate(found.problem, found.plan)))
    if out is not None:
        write_whole(out, text)
        say(f"Written to {out}.")
