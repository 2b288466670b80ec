"""Tables of single runs: measured and predicted values, and assumptions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from milpplan.units import gib_text, printable, seconds_text, signed_percent_text
from milpplan.validation.comparison import Comparison, Validation

MAX_RUNS_SHOWN: Final = 40
"""Maximum number of runs in the table; of more only the worst run of each source is shown, unless all are
requested."""
_COLUMNS: Final = ("run", "measured", "as", "predicted", "error", "peak", "predicted", "error", "fits", "assumed")
_AS: Final = {
    "step time": "time",
    "model FLOP/s": "FLOP/s",
    "hardware FLOP/s": "hw FLOP/s",
    "model FLOPs utilisation": "MFU",
    "hardware FLOPs utilisation": "HFU",
}


def run_parts(validation: Validation, each: bool) -> list[RenderableType]:
    """Show the runs, their assumptions, and the runs that were not simulated; every run if ``each`` or if there
    are few."""
    runs = validation.comparisons
    shown = list(runs) if each or len(runs) <= MAX_RUNS_SHOWN else _furthest(runs)
    parts: list[RenderableType] = []
    if shown:
        numbers = _numbers(shown)
        title = (
            "Runs (as: what the source printed; peaks in GiB, errors in per cent; fits: predicted, and what "
            "happened where it is no or the run was out of memory; assumed: numbers of the lines below)"
        )
        parts += [Text(title, style="bold"), _runs_table(shown, numbers)]
        left = len(runs) - len(shown)
        if left:
            parts.append(
                Text(f"These are the furthest off of each source; {left:,} more with --each and in --json.\n")
            )
        parts += [Text("Assumed, where the source does not say", style="bold"), _assumed_table(shown, numbers)]
    return parts


def _furthest(runs: Iterable[Comparison]) -> list[Comparison]:
    """Select the run of each source with the largest error of step time, or else of memory; scored runs first."""

    def off(comparison: Comparison) -> tuple[bool, bool, float]:
        error = comparison.error_fraction
        other = comparison.memory_error_fraction or 0.0
        return (comparison.scored, error is not None, abs(other if error is None else error))

    best: dict[str, Comparison] = {}
    for comparison in runs:
        if comparison.run.group not in best or off(comparison) > off(best[comparison.run.group]):
            best[comparison.run.group] = comparison
    return [best[group] for group in sorted(best)][:MAX_RUNS_SHOWN]


def _numbers(runs: Iterable[Comparison]) -> dict[str, int]:
    """Number the assumptions, the most frequent first."""
    counts = Counter(text for comparison in runs for text in comparison.assumptions)
    return {text: number for number, (text, _) in enumerate(counts.most_common(), start=1)}


def _table(*columns: str, words: Sequence[int]) -> Table:
    """Make a table with numbers right-aligned and unwrapped, and words left-aligned and wrapped."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, column in enumerate(columns):
        wrapped = index in words
        table.add_column(column, justify="left" if wrapped else "right", overflow="fold", no_wrap=not wrapped)
    return table


def _runs_table(runs: Iterable[Comparison], numbers: dict[str, int]) -> Table:
    table = _table(*_COLUMNS, words=(0, 9))
    for comparison in runs:
        table.add_row(*_row(comparison), _ranges([numbers[text] for text in comparison.assumptions]))
    return table


def _row(comparison: Comparison) -> tuple[str, ...]:
    step, memory, status = comparison.step, comparison.memory, comparison.run.measured.status
    step_error, memory_error = comparison.error_fraction, comparison.memory_error_fraction
    return (
        printable(comparison.run.id),
        "-" if step is None else seconds_text(step.step_time_s),
        "-" if step is None else _AS.get(words := step.how.split(",")[0], words),
        seconds_text(comparison.report.step_time_s),
        _error(step_error),
        "-" if memory is None else _gib(memory.peak_bytes),
        _gib(comparison.predicted_memory_bytes),
        _error(memory_error),
        {(True, "oom"): "yes (oom)", (False, "oom"): "no (oom)", (False, "ok"): "no (ran)"}.get(
            (comparison.report.fits, status), "yes" if comparison.report.fits else "no"
        ),
    )


def _gib(num_bytes: float) -> str:
    return gib_text(num_bytes).removesuffix(" GiB")


def _error(fraction: float | None) -> str:
    return "-" if fraction is None else signed_percent_text(fraction).removesuffix(" %")


def _ranges(numbers: Sequence[int]) -> str:
    """Write numbers in order, with runs of three or more as ``4-7``."""
    parts: list[str] = []
    for _, group in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        row = [number for _, number in group]
        parts += [f"{row[0]}-{row[-1]}"] if len(row) > 2 else [str(number) for number in row]
    return ", ".join(parts)


def _assumed_table(runs: Iterable[Comparison], numbers: dict[str, int]) -> Table:
    counts = Counter(text for comparison in runs for text in comparison.assumptions)
    table = _table("", "assumption", "runs", words=(1,))
    for text, number in numbers.items():
        table.add_row(f"{number}", printable(text), f"{counts[text]:,}")
    return table
