"""The command ``init``: the questions of a job file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer

from milpplan.cli.command import choice, count_or_range, positive, whole
from milpplan.cli.outcome import say, say_error
from milpplan.errors import InvalidInputError, MilpplanError
from milpplan.problem import load_hardware, load_model
from milpplan.problem.hardware import PRECISIONS
from milpplan.problem.problem import MAX_BATCH, MAX_GPUS, MAX_SEQUENCE
from milpplan.reports import write_whole
from milpplan.reports.files import check_writable

EXAMPLES: Final = (("Answer a few questions; then milpplan solve --job job.toml", "job.toml"),)


def init(
    path: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The file to write.")] = Path("job.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Ask a few questions and write a job file for `solve --job`."""
    write_whole(path, ask(path, force))
    say(f"Written to {path}. Now: milpplan solve --job {path}")


def ask(path: Path, force: bool) -> str:
    """Ask a few questions and return the text of a job file.

    Raises:
        InvalidInputError: the file exists, or there are no more answers.
    """
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

    def count(maximum: int, option: str) -> Callable[[str], object]:
        return lambda text: count_or_range(text, option, maximum)

    gpus = _answer("GPUs (a number, or LO:HI:STEP)", count(MAX_GPUS, "GPUs"), str(8 * node))
    batch = _answer("Global batch size (sequences, or LO:HI:STEP)", count(MAX_BATCH, "the batch"), "512")
    length = str(spec.default_sequence_length)
    length = _answer("Sequence length (tokens)", lambda text: whole(text, "the length", MAX_SEQUENCE), length)
    formats = f"Precision, {' or '.join(PRECISIONS)}"
    precision = _answer(formats, lambda text: choice(text, "precision", PRECISIONS), "bf16")
    tokens = _answer("Tokens of the whole run, such as 15e12 (0: not known)", _amount, "0")
    price = _answer("Price of an hour of one GPU (0: not known)", _amount, "0") if float(tokens) else "0"
    lines = [f'model = "{model}"', f'hardware = "{hardware}"', f'gpus = "{gpus}"', f'global-batch = "{batch}"']
    lines += [f"seq-len = {length}", f'precision = "{precision}"']
    lines += [f"tokens = {float(tokens):g}"] if float(tokens) else []
    lines += [f'price-per-gpu-hour = "{price}"'] if float(price) else []
    head = f"# The words of `milpplan solve`, by their names there; use: milpplan solve --job {path.name}\n"
    foot = '# More of them: space = "uniform", fix = ["tp=8"], time-limit = 60, deadline-days = 90.\n'
    return head + "\n".join(lines) + "\n" + foot


def _amount(text: str) -> None:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if value != 0:
        positive(value, "The answer", "number, or 0")


def _answer(question: str, check: Callable[[str], object], default: str | None = None) -> str:
    """Ask until an answer passes its check."""
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
