"""One command: its examples in the help, and that it never writes over what it reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from milpplan.cli.examples import EXAMPLES, wrapped
from milpplan.errors import InvalidInputError
from milpplan.problem.reading import shown

WRITTEN = ("out", "html", "trace", "report", "raw", "plot")
"""Parameters that name what a command writes."""
MAY_BE_REPLACED = ("warm_start",)
"""Parameters whose file the result may replace: it is one of the same kind, and at least as good."""


class Command(TyperCommand):
    """What all commands do beside their own work."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command, unless it would write over one of its inputs."""
        check_inputs_stay(ctx.params)
        return super().invoke(ctx)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Examples, as they can be pasted."""
        with formatter.section("Examples"):
            for meaning, words in EXAMPLES[str(self.name)]:
                formatter.write(f"  # {meaning}\n")
                for line in wrapped(f"milpplan {self.name} {words}".rstrip(), formatter.width - 2):
                    formatter.write(f"  {line}\n")


def check_inputs_stay(parameters: Mapping[str, Any]) -> None:
    """Refuse to write over a file that is read.

    Raises:
        InvalidInputError: an output is one of the inputs.
    """
    read = {
        path.resolve(): name
        for name, value in parameters.items()
        if name not in (*WRITTEN, *MAY_BE_REPLACED)
        for path in _files(value)
    }
    for name in WRITTEN:
        for path in _files(parameters.get(name)):
            if path.resolve() in read:
                raise InvalidInputError(
                    f"{shown(str(path))} would be written over, and it is read ({read[path.resolve()]}).",
                    "Expected another file for the output.",
                    "Give another name to write to.",
                )


def _files(value: Any) -> Iterator[Path]:
    """The files there are among the values of a parameter."""
    for one in value if isinstance(value, list | tuple) else (value,):
        try:
            if isinstance(one, str | Path) and Path(one).is_file():
                yield Path(one)
        except (OSError, ValueError):
            # Too long for a name, or with a zero in it: whoever reads it says so.
            continue
