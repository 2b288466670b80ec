"""Parts that all commands share: options as fields of a dataclass, sections and examples in their help, and
outputs that never replace their inputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin, get_type_hints

from typer.core import TyperCommand

from milpplan.cli import options as o
from milpplan.errors import InvalidInputError
from milpplan.problem.reading import shown

Picked = TypeVar("Picked")
WRITTEN: Final = ("out", "html", "trace", "report", "raw", "plot")
"""Parameters that name what a command writes."""
MAY_BE_REPLACED: Final = ("warm_start",)
"""Parameters whose file the result may replace: it is of the same kind, and at least as good."""
SHORT_HELP: Final = 12
"""Commands with at most so many options list them in one section."""
MOVED: Final = {"solve": o.LENGTHS}
"""Sections that a command's help leaves out, because another command has taken their options over."""
TOGETHER: Final = re.compile(r"(?:-\S+|>) [^-]\S*|\S+")
"""Pattern of a word, or of an option with its value."""


def pick(record: type[Picked], parameters: Mapping[str, Any]) -> Picked:
    """Build a dataclass of the parameters of a command that have the names of its fields."""
    return record(**{field.name: parameters[field.name] for field in fields(record)})  # type: ignore[arg-type]


def spread(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the dataclasses among a command's parameters by their fields.

    Args:
        command: A command. A parameter that is a dataclass of arguments and options may be annotated with a
            mapping of values: these fields are no options of the command.

    Returns:
        A function with one keyword parameter for each other field and parameter. The first of a name counts.
    """
    hints = get_type_hints(command, include_extras=True)
    records: dict[str, tuple[type, Mapping[str, Any]]] = {}
    parameters: dict[str, Parameter] = {}
    for name, parameter in signature(command).parameters.items():
        kind, *values = (get_args(hints[name]) if get_origin(hints[name]) is Annotated else ()) or (hints[name],)
        if not (isinstance(kind, type) and is_dataclass(kind)):
            parameters.setdefault(name, parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))
            continue
        records[name] = kind, values[0] if values else {}
        kinds = get_type_hints(kind, include_extras=True)
        for field in fields(kind):
            option = Parameter(
                field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=kinds[field.name]
            )
            if field.name not in records[name][1]:
                parameters.setdefault(field.name, option)
    if not records:
        return command

    def run(**given: Any) -> Any:
        own = {name: given[name] for name in hints if name in given}
        return command(**own | {name: pick(kind, {**given, **fixed}) for name, (kind, fixed) in records.items()})

    run.__doc__ = command.__doc__
    run.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    run.__signature__ = Signature(list(parameters.values()))  # type: ignore[attr-defined]
    return run


class Command(TyperCommand):
    """A command whose help has sections and examples, and which refuses to write over its inputs."""

    examples: tuple[tuple[str, str], ...] = ()
    """Pairs of a purpose and the words after the command's name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words, and refuse to write over one of the inputs."""
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:
            check_inputs_stay(ctx.params)
        return rest

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then options by section; those without a section come first."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        parameters: list[Any] = [part for part in self.get_params(ctx) if part.get_help_record(ctx) is not None]
        in_one = sum(parameter.param_type_name == "option" for parameter in parameters) <= SHORT_HELP
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
            for meaning, words in self.examples:
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


def wrapped(words: str, width: int) -> list[str]:
    """Break a command line into lines of at most ``width`` columns that can be pasted; a word is never cut."""
    lines = [""]
    for word in TOGETHER.findall(words):
        if lines[-1] and len(lines[-1]) + len(word) + 3 > width:
            lines[-1] += " \\"
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return lines
