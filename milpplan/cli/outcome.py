"""Exit codes, output on stdout, messages and progress on stderr."""

from __future__ import annotations

import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from milpplan.cli import interrupts
from milpplan.errors import InfeasibleError, InvalidInputError, MilpplanError, SolverError
from milpplan.units import cleaned, gap_text, lower_bound_text, printable, rate_text, seconds_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from milpplan.optimize.records import Progress, Status
    from milpplan.problem.problem import Objective
    from milpplan.reports.blocks import Block

WIDTH = 100
"""Columns of output that does not go to a terminal."""


class ExitCode(IntEnum):
    """Exit code of the program."""

    OPTIMAL = 0
    BAD_INPUT = 2
    INFEASIBLE = 3
    STOPPED_WITH_PLAN = 4
    STOPPED_WITHOUT_PLAN = interrupts.STOPPED_WITHOUT_PLAN
    INTERNAL_FAILURE = 6


OF_STATUS: dict[Status, ExitCode] = {
    "optimal": ExitCode.OPTIMAL,
    "infeasible": ExitCode.INFEASIBLE,
    "feasible": ExitCode.STOPPED_WITH_PLAN,
    "no_solution_found": ExitCode.STOPPED_WITHOUT_PLAN,
}


def of_error(error: MilpplanError) -> ExitCode:
    """Return the exit code of an error."""
    if isinstance(error, InfeasibleError):
        return ExitCode.INFEASIBLE
    return ExitCode.INTERNAL_FAILURE if isinstance(error, SolverError) else ExitCode.BAD_INPUT


def say(text: str) -> None:
    """Print a line on stderr."""
    _write(sys.stderr, printable(text) + "\n")


def emit(text: str) -> None:
    """Print text of the result on stdout; a reader that has closed the pipe is no error."""
    _write(sys.stdout, cleaned(text))


def show(renderable: RenderableType) -> None:
    """Print a result for people on stdout: with colours and in the terminal's width, or plain into a file."""
    with _reaching(sys.stdout):
        _write(sys.stdout, rendered(renderable, sys.stdout).strip("\n") + "\n")


def show_blocks(blocks: Iterable[Block]) -> None:
    """Print an answer for people on stdout."""
    # Rich takes long to import, and --help does without.
    from milpplan.reports import terminal_text

    show(terminal_text(blocks))


def rendered(renderable: RenderableType, stream: Any) -> str:
    """Render for the terminal, or the file, behind a stream. The only control characters set colours."""
    # Rich takes long to import, and --help does without.
    from rich.console import Console
    from rich.segment import Segment, Segments

    width = None if stream.isatty() else WIDTH
    console = Console(file=stream, width=width, markup=False, highlight=False, emoji=False, soft_wrap=False)
    with console.capture() as capture:
        parts = (part for part in console.render(renderable) if not part.control)
        plain = (Segment(cleaned(part.text), part.style) for part in parts)
        console.print(Segments(plain))
    lines = capture.get().split("\n")
    return "\n".join(line.rstrip() for line in lines)


def _write(stream: Any, text: str) -> None:
    with _reaching(stream):
        try:
            stream.write(text)
        except UnicodeEncodeError:
            stream.write(text.encode("ascii", "replace").decode("ascii"))
        stream.flush()


@contextmanager
def _reaching(stream: Any) -> Iterator[None]:
    """Raise if a result cannot be written; closed pipes and lost messages on stderr are no errors."""
    try:
        yield
    except OSError as error:
        # What follows, and the flush when Python ends, must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if stream is sys.stdout and not isinstance(error, BrokenPipeError):
            raise unwritten(error) from error


def unwritten(error: OSError) -> InvalidInputError:
    """Build the error for a standard output that takes no more."""
    return InvalidInputError(
        f"The result cannot be written to standard output: {error.strerror}.",
        "Expected a terminal, a pipe, or a file on a disk with room.",
        "Redirect the output to another place.",
    )


def say_error(error: MilpplanError) -> None:
    """Print the three parts of an error on stderr: what was seen, what was expected, what to do."""
    say(f"error: {error.seen}")
    say(f"  {error.expected or 'Expected input as the help describes it.'}")
    say(f"  {error.do or 'See `milpplan --help` and `milpplan schema`.'}")


def say_traceback() -> None:
    """Print the traceback of the error that is being handled on stderr."""
    _write(sys.stderr, cleaned(traceback.format_exc()) + "\n")


def is_beyond_numbers(error: BaseException) -> bool:
    """Tell whether an error comes from absurd numbers or nesting in the input, and is no bug."""
    if isinstance(error, ArithmeticError | MemoryError | RecursionError):
        return True
    # pydantic reports values outside the range of their fields so.
    mistakes = error.errors(include_url=False) if type(error).__name__ == "ValidationError" else ()  # type: ignore[attr-defined]
    if mistakes:
        return all(mistake["type"] in _OUT_OF_RANGE for mistake in mistakes)
    # Python reads and prints no whole number of thousands of digits.
    return isinstance(error, ValueError) and "set_int_max_str_digits" in str(error)


_OUT_OF_RANGE = {"less_than", "less_than_equal", "greater_than", "greater_than_equal", "finite_number"}


def beyond_numbers(error: BaseException) -> InvalidInputError:
    """Build the error for an overflow, where the input holds something absurd, or for memory that ran out."""
    if isinstance(error, MemoryError):
        return InvalidInputError(
            f"Memory ran out{f' ({error})' if str(error) else ''}.",
            "Expected what is asked to fit into the memory that is free here.",
            "Ask for less (fewer numbers of GPUs and batches, --fix tp=8, fewer --allow and --schedule), or free "
            "memory; where little is asked, look for an absurd number in the files.",
        )
    reason = str(error).split("\n  For further")[0]
    return InvalidInputError(
        f"The numbers given are beyond what can be computed ({type(error).__name__}: {reason}).",
        "Expected sizes, rates and counts of real models and clusters.",
        "Check the numbers in the files and on the command line.",
    )


@contextmanager
def shown_progress(objective: Objective, lines: bool = False) -> Iterator[Callable[[Progress], None] | None]:
    """Make a callback for ``solve`` that prints on stderr; None where stderr is no terminal.

    Args:
        objective: The objective of the search.
        lines: Print every progress as a line where stderr is no terminal.
    """
    if not sys.stderr.isatty():
        yield (lambda progress: say(progress_line(progress, objective))) if lines else None
        return
    # Rich takes long to import, and --help does without.
    from rich.console import Console

    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    best: list[float] = []
    with console.status("looking for a first plan ...") as status:

        def callback(progress: Progress) -> None:
            line = progress_line(progress, objective)
            if progress.incumbent is not None and (not best or progress.incumbent < best[-1]):
                best.append(progress.incumbent)
                console.print(line)
            status.update(line)

        yield callback


def progress_line(progress: Progress, objective: Objective) -> str:
    """Format incumbent, bound, gap, open layouts and seconds."""
    incumbent, bound = progress.incumbent, progress.bound
    gap = "-"
    open_layouts = "-" if progress.open_layouts is None else f"{progress.open_layouts:,}"
    if incumbent and bound is not None:
        gap = gap_text(max(0.0, (incumbent - bound) / incumbent))
    return (
        f"{progress.wall_time_s:7.1f} s  best {_amount(incumbent, objective)}  "
        f"bound {_amount(bound, objective, is_bound=True)}  gap {gap}  open layouts {open_layouts}"
    )


def _amount(value: float | None, objective: Objective, is_bound: bool = False) -> str:
    """Write an objective; a lower bound is rounded down."""
    if value is None:
        return "-"
    if objective == "gpu_hours":
        return f"{rate_text(math.floor(value) if is_bound else value)} GPU-hours"
    return lower_bound_text(value) if is_bound else seconds_text(value)
