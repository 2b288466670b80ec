"""Commands that print what there is: models, hardware, formats, the state of the solvers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from milpplan.cli import options as o
from milpplan.cli.completion import presets_like
from milpplan.cli.outcome import ExitCode, emit, say, show
from milpplan.cli.program import command


@command("list")
def list_names(kind: Annotated[str, typer.Argument(metavar="models|hardware")]) -> None:
    """List the models or the hardware that ship with milpplan."""
    from milpplan.cli import arguments
    from milpplan.reports.text import descriptions

    tables = {"models": descriptions.model_table, "hardware": descriptions.hardware_table}
    show(tables[arguments.choice(kind, "list", tables)]())


@command("show")
def show_preset(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A model or hardware, by name or path.", autocompletion=presets_like),
    ],
    ignore: o.Ignore = None,
) -> None:
    """Print a model or hardware description; a file is checked first, a config.json translated. How many
    parameters a model has is said beside it."""
    from milpplan.reports.text import descriptions

    text, told = descriptions.description(name, ignore or ())
    emit(text)
    if told:
        say(told)


@command()
def schema(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="problem|plan|model|hardware|overlay|study|result|explanation|grouped-plan|dispatch|gap|choice"
            "|fewest|lengths|team-dispatch|workload"
        ),
    ] = "problem",
) -> None:
    """Print the JSON Schema of a file that milpplan reads or writes."""
    import json

    from milpplan.cli import arguments

    emit(json.dumps(arguments.schema_of(kind).model_json_schema(), indent=2) + "\n")


@command()
def init(
    path: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The file to write.")] = Path("job.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Ask a few questions and write a job file for `solve --job`."""
    from milpplan.cli.job_file import ask
    from milpplan.reports.files import write_whole

    write_whole(path, ask(path, force))
    say(f"Written to {path}. Now: milpplan solve --job {path}")


@command()
def doctor() -> None:
    """Check the installed solvers on small programs that broken ones have got wrong. Exits with 6 if one gives a
    wrong answer, with 2 if one cannot run here and none is wrong."""
    from milpplan.optimize.milp.solver_self_test import run_canaries
    from milpplan.reports.text.doctor_text import canary_table

    say("Running the canary programs; this takes a few seconds.")
    results = run_canaries()
    show(canary_table(results))
    wrong = sum(result.answered and not result.passed for result in results)
    unanswered = sum(not result.answered for result in results)
    if wrong:
        say(f"{wrong} of {len(results)} checks failed.")
    if unanswered:
        say(f"{unanswered} of {len(results)} checks could not run here.")
    if not wrong and not unanswered:
        say(f"All {len(results)} checks passed.")
    code = ExitCode.INTERNAL_FAILURE if wrong else ExitCode.BAD_INPUT if unanswered else ExitCode.OPTIMAL
    raise typer.Exit(int(code))
