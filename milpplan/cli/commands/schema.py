"""The command ``schema``."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from milpplan.cli.outcome import emit

EXAMPLES: Final = (("The JSON Schema of plan files", "plan"),)


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
