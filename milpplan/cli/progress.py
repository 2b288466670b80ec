"""Progress of a solve on a terminal: a live line, and a line for every better plan."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from milpplan.optimize.result import Progress
from milpplan.problem.problem import Objective
from milpplan.units import gap_text, rate_text, seconds_text


@contextmanager
def shown_progress(objective: Objective) -> Iterator[Callable[[Progress], None] | None]:
    """Make a callback for ``solve`` that prints on stderr; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    best: list[float] = []
    with console.status("counting layouts and their bounds ...") as status:

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
    if incumbent and bound is not None:
        gap = gap_text(max(0.0, (incumbent - bound) / incumbent))
    return (
        f"{progress.wall_time_s:7.1f} s  best {_amount(incumbent, objective)}  "
        f"bound {_amount(bound, objective)}  gap {gap}  open layouts {progress.open_layouts:,}"
    )


def _amount(value: float | None, objective: Objective) -> str:
    if value is None:
        return "-"
    return f"{rate_text(value)} GPU-hours" if objective == "gpu_hours" else seconds_text(value)
