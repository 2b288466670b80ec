"""The command ``import``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from milpplan.cli import options as o
from milpplan.cli.arguments import check_plan_of_file, within_range
from milpplan.cli.launcher_text import batch_settings, launcher_text
from milpplan.cli.outcome import ExitCode, emit, say, show_blocks
from milpplan.launchers import Imported, ImportRequest, target_named
from milpplan.problem import load_hardware, load_model
from milpplan.problem.catalog import fitted_hardware
from milpplan.reports import write_whole
from milpplan.reports.answers import simulation_blocks
from milpplan.reports.documents.document import document_text
from milpplan.reports.documents.plan_file import ImportedFile, plan_document
from milpplan.reports.files import check_writable
from milpplan.reports.words.result_words import constants_text
from milpplan.simulation import simulate

EXAMPLES: Final = (
    (
        "What a Megatron-LM script costs, as a plan file",
        "run.sh --from megatron --hardware dgx-h100 -o plan.json",
    ),
)


def import_plan(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A script, a command line, or a .yaml of arguments; -: standard input."
        ),
    ],
    source: Annotated[str, typer.Option("--from", metavar=o.LAUNCHERS, help="The launcher.")],
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
    micro_batch: Annotated[
        int | None,
        typer.Option("--micro-batch", metavar="N", min=1, help="Sequences of a GPU.", show_default="the file's"),
    ] = None,
    accumulation: Annotated[
        int | None,
        typer.Option("--accumulation", metavar="N", min=1, help="Micro-batches.", show_default="the file's"),
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option("--seq-len", metavar="N", min=1, help="Tokens of a sequence.", show_default="the file's"),
    ] = None,
    ignore: o.IgnoreFlag = None,
    settings: o.Settings = None,
    arguments: o.Arguments = None,
    stack: o.Stack = True,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="PLAN.json", help="Write the plan file here.")
    ] = None,
    as_json: o.AsJson = False,
) -> ExitCode:
    """Read the plan from a launcher's files and simulate it. Flags that cannot be priced are refused."""
    target = target_named(source, "--from")
    cluster = fitted_hardware(source, load_hardware(hardware)) if stack else load_hardware(hardware)
    spec = None if model is None else load_model(model)
    if out is not None:
        check_writable(out)
    text, name, given = launcher_text(file, settings or (), arguments)
    numbers = {"micro-batch": micro_batch, "accumulation": accumulation, "seq-len": seq_len}
    given |= batch_settings(target.capability.batch_settings, numbers, target.capability.name)
    imported = target.read(ImportRequest(text, name, cluster, gpus, spec, vocab_size, ignore or [], given))
    check_plan_of_file(imported.problem, imported.plan)
    constants = constants_text(imported.problem, None, source)
    if constants:
        say(f"Constants: {constants}.")
    _tell(imported, out, as_json)
    return ExitCode.OPTIMAL


def _tell(imported: Imported, out: Path | None, as_json: bool) -> None:
    """Print flags and notes on stderr, the simulated plan or the plan file on stdout, and write the file."""
    for what, flags in (
        ("Not known to the launcher", imported.unknown_flags),
        ("Ignored", imported.ignored_flags),
    ):
        for flag in flags:
            say(f"{what}: {flag}")
    for note in imported.notes:
        say(f"Note: {note}")
    file = ImportedFile(
        plan=plan_document(imported.plan),
        problem=imported.problem,
        unknown_flags=imported.unknown_flags,
        ignored_flags=imported.ignored_flags,
        notes=imported.notes,
    )
    text = document_text(file)
    if as_json:
        emit(text)
    else:
        with within_range():
            report = simulate(imported.problem, imported.plan)
            show_blocks(simulation_blocks(imported.problem, imported.plan, report))
    if out is not None:
        write_whole(out, text)
        say(f"Written to {out}.")
