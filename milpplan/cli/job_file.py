"""Job files: the words of ``solve`` in a TOML file, and the questions of ``milpplan init`` that write it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from milpplan.errors import InvalidInputError, MilpplanError

ASIDE = ("job", "help")
"""Options that a file cannot give."""


def read_words(context: typer.Context, path: Path | None) -> Path | None:
    """Take the defaults of arguments and options from a job file; command-line options override the file.

    Raises:
        InvalidInputError: the file cannot be read, or names no argument and no option of the command.
    """
    from milpplan.problem.reading import parse_toml, read_text

    if path is not None and not context.resilient_parsing:
        table = parse_toml(read_text(path), str(path))
        context.default_map = {**(context.default_map or {}), **_words(context.command, table, path)}
    return path


def _words(command: Any, table: dict[str, Any], path: Path) -> dict[str, Any]:
    """Collect the values of a job file by parameter."""
    from milpplan.problem.reading import shown

    parameters = {name: one for one in command.params for name in _names(one)}
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
    """Names of a parameter in a file: an option's long names, or an argument's name."""
    if parameter.param_type_name == "option":
        long = [name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("--")]
        return [name.removeprefix("--") for name in long if name.removeprefix("--") not in ASIDE]
    return [] if parameter.name is None else [parameter.name.replace("_", "-")]


def ask(path: Path, force: bool) -> str:
    """Ask a few questions and return the text of a job file.

    Raises:
        InvalidInputError: the file exists, or there are no more answers.
    """
    from milpplan.cli import arguments
    from milpplan.cli.outcome import say
    from milpplan.problem.catalog import load_hardware, load_model
    from milpplan.problem.problem import MAX_BATCH, MAX_GPUS, MAX_SEQUENCE
    from milpplan.reports.files import check_writable

    if path.exists() and not force:
        raise InvalidInputError(f"{path} exists.", "Expected a new file.", "Give another name, or --force.")
    check_writable(path)
    say(
        "An empty answer takes what stands in brackets. `milpplan list models` and `list hardware` show the names."
    )
    model = _answer("Model (a name, or the path of a config.json)", load_model)
    spec = load_model(model)
    hardware = _answer("Hardware (a name or a path)", load_hardware)
    node = load_hardware(hardware).gpus_per_node

    def count(most: int, option: str) -> Callable[[str], object]:
        return lambda text: arguments.count_or_range(text, option, most)

    gpus = _answer("GPUs (a number, or LO:HI:STEP)", count(MAX_GPUS, "GPUs"), str(8 * node))
    batch = _answer("Global batch size (sequences, or LO:HI:STEP)", count(MAX_BATCH, "the batch"), "512")
    length = str(spec.default_sequence_length)
    length = _answer(
        "Sequence length (tokens)", lambda text: arguments.whole(text, "the length", MAX_SEQUENCE), length
    )
    precision = _answer(
        "Precision, bf16 or fp8", lambda text: arguments.choice(text, "precision", ("bf16", "fp8")), "bf16"
    )
    tokens = _answer("Tokens of the whole run, such as 15e12 (0: not known)", _amount, "0")
    price = _answer("Price of an hour of one GPU (0: not known)", _amount, "0") if float(tokens) else "0"
    lines = [f'model = "{model}"', f'hardware = "{hardware}"', f'gpus = "{gpus}"', f'global-batch = "{batch}"']
    lines += [f"seq-len = {length}", f'precision = "{precision}"']
    lines += [f"tokens = {float(tokens):g}"] if float(tokens) else []
    lines += [f'price-per-gpu-hour = "{price}"'] if float(price) else []
    head = f"# The words of `milpplan solve`, by their names there; use: milpplan solve --job {path.name}\n"
    more = '# More of them: space = "uniform", fix = ["tp=8"], time-limit = 60, deadline-days = 90.\n'
    return head + "\n".join(lines) + "\n" + more


def _amount(text: str) -> None:
    from milpplan.cli import arguments

    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if value != 0:
        arguments.positive(value, "The answer", "number, or 0")


def _answer(question: str, check: Callable[[str], object], default: str | None = None) -> str:
    """Ask until an answer passes its check."""
    from milpplan.cli.outcome import say, say_error

    while True:
        try:
            text = str(typer.prompt(question, default=default, err=True)).strip()
        except (typer.Abort, EOFError) as error:
            raise InvalidInputError(
                f"There is no answer to: {question}.", "Expected one.", "Run `milpplan init` on a terminal."
            ) from error
        try:
            if '"' in text or "\\" in text:
                raise InvalidInputError(
                    f"The answer is {text!r}.", "Expected no quotes and no backslashes.", "Leave them out."
                )
            check(text)
        except MilpplanError as error:
            say_error(error)
            say("Once more:")
            continue
        return text
