"""Parts that all commands share: sections and examples in their help, and outputs that never replace their
inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from typer.core import TyperCommand

from milpplan.cli import options as o
from milpplan.cli.examples import EXAMPLES, wrapped
from milpplan.errors import InvalidInputError
from milpplan.problem.reading import shown

WRITTEN: Final = ("out", "html", "trace", "report", "raw", "plot")
"""Parameters that name what a command writes."""
MAY_BE_REPLACED: Final = ("warm_start",)
"""Parameters whose file the result may replace: it is of the same kind, and at least as good."""
SHORT_HELP: Final = 12
"""Commands with at most so many options list them in one section."""
MOVED: Final = {"solve": o.LENGTHS}
"""Sections that a command's help leaves out, because another command has taken their options over."""


class Command(TyperCommand):
    """A command whose help has sections and examples, and which refuses to write over its inputs."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command, unless it would write over one of its inputs."""
        check_inputs_stay(ctx.params)
        return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then options by section; those without a section come first."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        parameters: list[Any] = [one for one in self.get_params(ctx) if one.get_help_record(ctx) is not None]
        in_one = sum(one.param_type_name == "option" for one in parameters) <= SHORT_HELP
        for parameter in parameters:
            section = "Options" if in_one else getattr(parameter, "rich_help_panel", None) or "Options"
            section = "Arguments" if parameter.param_type_name == "argument" else section
            sections.setdefault(section, []).append(parameter.get_help_record(ctx))
        sections.pop(MOVED.get(str(self.name), ""), None)
        for section, records in sections.items():
            if records:
                with formatter.section(section):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write examples that can be pasted."""
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
    """Yield the files that exist among the values of a parameter."""
    for path in value if isinstance(value, list | tuple) else (value,):
        try:
            if isinstance(path, str | Path) and Path(path).is_file():
                yield Path(path)
        except (OSError, ValueError):
            # Too long for a name, or with a zero in it: whoever reads it says so.
            continue
