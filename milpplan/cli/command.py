"""Parts that all commands share: options as fields of a dataclass, sections and examples in their help, outputs
that never replace their inputs, words from job files, and checks of single words."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin, get_type_hints

import typer
from pydantic import ValidationError
from typer.core import TyperCommand

from milpplan.errors import InvalidInputError, UnknownNameError
from milpplan.problem import Range, read_text
from milpplan.problem.reading import RecordType, invalid_fields, parse_toml, shown
from milpplan.reports.files import check_writable

Picked = TypeVar("Picked")
WRITTEN: Final = ("out", "html", "trace", "report", "raw", "plot")
"""Parameters that name what a command writes."""
MAY_BE_REPLACED: Final = ("warm_start",)
"""Parameters whose file the result may replace: it is of the same kind, and at least as good."""
SHORT_HELP: Final = 12
"""Commands with at most so many options list them in one section."""
LENGTHS: Final = "Sequences of several lengths"
MOVED: Final = {"solve": LENGTHS}
"""Sections that a command's help leaves out, because another command has taken their options over."""
TOGETHER: Final = re.compile(r"(?:-\S+|>) [^-]\S*|\S+")
"""Pattern of a word, or of an option with its value."""
ASIDE: Final = ("job", "help")
"""Options that a job file cannot give."""


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


def read_words(context: typer.Context, path: Path | None) -> Path | None:
    """Take the defaults of arguments and options from a job file; command-line options override the file.

    Raises:
        InvalidInputError: the file cannot be read, or names no argument and no option of the command.
    """
    if path is not None and not context.resilient_parsing:
        table = parse_toml(read_text(path), str(path))
        context.default_map = {**(context.default_map or {}), **_words(context.command, table, path)}
    return path


def _words(command: Any, table: dict[str, Any], path: Path) -> dict[str, Any]:
    """Collect the values of a job file by parameter."""
    parameters = {name: parameter for parameter in command.params for name in _names(parameter)}
    words: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("_", "-")
        if name not in parameters:
            raise InvalidInputError(
                f"{path} gives {shown(key)}, which is no argument or option of {command.name}.",
                f"Expected {', '.join(sorted(parameters))}.",
                "Correct the name, or take the line out.",
            )
        parameter = parameters[name]
        many = parameter.multiple or parameter.nargs != 1
        if isinstance(value, dict) or isinstance(value, list) != many:
            raise InvalidInputError(
                f"{path}: {key} is {shown(str(value))}.",
                f"Expected {'a list' if many else 'one value'}.",
                f"Write it as --{name} takes it.",
            )
        words[parameter.name] = value
    return words


def _names(parameter: Any) -> list[str]:
    """List the names of a parameter in a file: an option's long names, or an argument's name."""
    if parameter.param_type_name == "option":
        long = [name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("--")]
        return [name.removeprefix("--") for name in long if name.removeprefix("--") not in ASIDE]
    return [] if parameter.name is None else [parameter.name.replace("_", "-")]


MAX_KINDS: Final = 16
"""Maximum of kinds of hardware to choose from."""
OR_A_RANGE: Final = ", or a range such as 64:512 or 64:512:64"


def whole(text: str, option: str, maximum: int, or_else: str = "") -> int:
    """Read a positive integer of at most ``maximum``; ``or_else`` says what else the option takes."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= maximum:
        raise InvalidInputError(
            f"{option} is {shown(text)}.",
            f"Expected a whole number from 1 to {maximum:,}{or_else}.",
            f"Correct {option}.",
        )
    return value


def count_or_range(text: str, option: str, limit: int) -> int | Range:
    """Read ``N``, ``LO:HI`` or ``LO:HI:STEP``."""
    parts = text.split(":")
    if len(parts) == 1:
        return whole(text, option, limit, OR_A_RANGE)
    if len(parts) > 3:
        raise InvalidInputError(
            f"{option} is {shown(text)}.", "Expected N, LO:HI or LO:HI:STEP.", f"Correct {option}."
        )
    minimum, maximum, step = (whole(part, option, limit, OR_A_RANGE) for part in [*parts, "1"][:3])
    return record(Range, f"{option} {text}", minimum=minimum, maximum=maximum, step=step)


def positive(value: float | None, option: str, what: str) -> None:
    """Refuse an option's number that is not positive and finite."""
    if value is not None and not 0 < value < math.inf:
        raise InvalidInputError(f"{option} is {value}.", f"Expected a positive {what}.", f"Correct {option}.")


def record(kind: type[RecordType], source: str, /, **values: Any) -> RecordType:
    """Validate a record; an error says that the values are those of ``source``."""
    try:
        return kind(**values)
    except ValidationError as error:
        raise invalid_fields(kind, error, source) from error


def choice(text: str, option: str, known: Iterable[str]) -> str:
    """Check that a text is a known word, and suggest the closest where it is not."""
    names = tuple(known)
    if text in names:
        return text
    close = difflib.get_close_matches(text.lower(), names, n=1, cutoff=0.5)
    raise UnknownNameError(
        f"{option} {shown(text)} does not exist.",
        f"Expected one of {', '.join(names)}.",
        f"Did you mean {close[0]}?" if close else "Give one of these names.",
    )


def names_of(hardware: str | None) -> list[str]:
    """Read the kinds of hardware of a command line: words with commas between them."""
    names = [name.strip() for name in (hardware or "").split(",")]
    if len(names) > 1 and (len(set(names)) < len(names) or "" in names or len(names) > MAX_KINDS):
        raise InvalidInputError(
            f"HARDWARE is {shown(hardware)}.",
            f"Expected one description, or two to {MAX_KINDS} different ones with commas between them.",
            "Correct HARDWARE.",
        )
    return names


def missing(what: str, expected: str) -> InvalidInputError:
    """Build the error for arguments and options that are missing, where Calculon's files would do as well."""
    return InvalidInputError(
        f"{what} is missing." if " and " not in what else f"{what} are missing.",
        f"Expected {expected}, or --calculon with three files.",
        "Add it; --help lists the arguments and options.",
    )


def program_file(path: Path | None, option: str) -> Path:
    """Return the name of a file for an integer program.

    Raises:
        InvalidInputError: none was given, it ends in neither .mps nor .lp, or it cannot be written.
    """
    if path is None or path.suffix not in (".mps", ".lp"):
        raise InvalidInputError(
            f"{option} is missing." if path is None else f"{option} is {shown(str(path))}.",
            "Expected the name of a file that ends in .mps or .lp.",
            f"Give one, such as {option} plan.mps.",
        )
    check_writable(path)
    return path
