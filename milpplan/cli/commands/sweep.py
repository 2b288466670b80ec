"""The command ``sweep``: a design study with progress, files and a summary."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from milpplan.cli import options as o
from milpplan.cli.outcome import ExitCode, emit, say, show
from milpplan.optimize.context import undisturbed
from milpplan.parallel import usable_cpus
from milpplan.problem.records import Count, Record
from milpplan.reports.documents.document import document_text
from milpplan.studies import outcomes, ray_cluster
from milpplan.studies.cell_table import Row, rows, what_if_words
from milpplan.studies.grid import cells, read_study
from milpplan.studies.outcomes import Outcome, Task
from milpplan.studies.results import write_results
from milpplan.studies.store import Runner, StudyProgress, Sweep, complete, opened, resume
from milpplan.units import count_text, counted, gib_text, percent_text, printable, seconds_text
from milpplan.version import __version__

EXAMPLES: Final = (("Solve all cells of a study, or go on", "examples/studies/llama3-70b-which-gpu.toml"),)
QUIET_S = 10.0
"""Seconds between lines of progress where stderr is no terminal."""
SHOWN_CELLS = 21
HEADS = {"num_gpus": "GPUs", "global_batch_size": "batch", "sequence_length": "tokens"}


class SweepDocument(Record):
    """Document of a sweep: cells by status, files, and the table of results."""

    milpplan_version: str
    study: str
    num_cells: Count
    statuses: dict[str, Count]
    directory: str
    files: tuple[str, ...]
    rows: tuple[dict[str, str | int | float | bool | None], ...]


def sweep(
    study: Annotated[
        Path, typer.Argument(metavar="STUDY.toml", help="A study file; docs/commands.md describes it.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Directory of the results.",
            show_default="STUDY-results, beside the study",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", metavar="N", min=1, max=4096, help="Solves at once.", show_default="all CPUs"),
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Solve on a Ray cluster (RAY_ADDRESS, else one started here).")
    ] = False,
    fastest: o.Fastest = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Solve the cells again that failed before.")
    ] = False,
    as_json: o.AsJson = False,
) -> ExitCode:
    """Solve every cell of a design study. If it is stopped, the same command continues."""
    design = read_study(study)
    if fastest:
        design = design.model_copy(update={"solve": design.solve.model_copy(update={"simplest": False})})
    progress = Sweep(design, cells(design, study.parent))
    directory = out if out is not None else study.with_name(f"{study.stem}-results")
    with opened(directory) as store:
        resume(progress, store, retry_failed)
        interrupted = False
        try:
            with _shown() as tell:
                complete(progress, store, _runner(workers, ray), tell)
        except KeyboardInterrupt:
            interrupted = True
        table = rows(progress)
        with undisturbed():
            files, missing = write_results(progress, directory, table)
    with undisturbed():
        for error in missing:
            say(f"{error.seen} {error.do}")
        if as_json:
            emit(document_text(_document(progress, directory, files, table)))
        else:
            show(_summary(progress, directory, files, table))
        if interrupted:
            done = f"{len(table)} of {counted(len(progress.cells), 'cell')}"
            say(f"Stopped with {done} done. The same command continues from there.")
    return _code(progress, interrupted)


def _runner(workers: int | None, ray: bool) -> Runner:
    def solve_all(tasks: Sequence[Task]) -> Generator[Outcome]:
        if ray:
            return ray_cluster.run(tasks, workers)
        return outcomes.run(tasks, workers or usable_cpus())

    return solve_all


def _code(sweep: Sweep, interrupted: bool) -> ExitCode:
    counts = sweep.counts()
    if counts.get("failed"):
        return ExitCode.INTERNAL_FAILURE
    if interrupted and not sweep.proved:
        return ExitCode.STOPPED_WITH_PLAN if sweep.outcomes else ExitCode.STOPPED_WITHOUT_PLAN
    return ExitCode.OPTIMAL if sweep.proved else ExitCode.STOPPED_WITH_PLAN


@contextmanager
def _shown() -> Iterator[Callable[[StudyProgress], None]]:
    """Show progress on stderr: a bar on a terminal, a line every ``QUIET_S`` seconds elsewhere."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    columns = (TextColumn("cells"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True, emoji=False)) as bar:
        line = bar.add_task("starting", total=None)

        def tell(progress: StudyProgress) -> None:
            bar.update(line, total=progress.total, completed=progress.done, description=_words(progress))

        yield tell


def _lines() -> Callable[[StudyProgress], None]:
    last_s = [time.monotonic()]

    def tell(progress: StudyProgress) -> None:
        first, last = progress.seconds_left is None, progress.done == progress.total
        if first or last or time.monotonic() - last_s[0] >= QUIET_S:
            last_s[0] = time.monotonic()
            say(f"cells {progress.done:,}/{progress.total:,}  {_words(progress)}".rstrip())

    return tell


def _words(progress: StudyProgress) -> str:
    """Describe the time left and the failed cells."""
    failures = f"  {progress.failed:,} failed" if progress.failed else ""
    if progress.done == progress.total:
        return f"done{failures}"
    left = "" if progress.seconds_left is None else f"about {_duration(progress.seconds_left)} left"
    return f"{left}{failures}"


def _duration(seconds: float) -> str:
    """Format a duration as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _document(sweep: Sweep, directory: Path, files: list[Path], table: list[Row]) -> SweepDocument:
    return SweepDocument(
        milpplan_version=__version__,
        study=sweep.study.name,
        num_cells=len(sweep.cells),
        statuses=sweep.counts(),
        directory=str(directory),
        files=tuple(file.name for file in files),
        rows=tuple(table),
    )


def _summary(sweep: Sweep, directory: Path, files: list[Path], table: list[Row]) -> RenderableType:
    """Show counts, the cells of minimum cost (or GPU-hours), messages of failed cells, and the files."""
    counts = ", ".join(f"{number:,} {status.replace('_', ' ')}" for status, number in sweep.counts().items())
    parts: list[RenderableType] = [
        Text(f"{printable(sweep.study.name)}: {counted(len(sweep.cells), 'cell')}, {counts}", "bold")
    ]
    with_plan = [row for row in table if row["step_time_s"] is not None]
    if with_plan:
        parts += [Text(), _cells_table(sweep, with_plan)]
    failed = [row for row in table if row["status"] == "failed"]
    if failed:
        parts += [
            Text(),
            *(Text(f"cell {row['cell']} failed: {printable(str(row['message']))}") for row in failed[:3]),
        ]
        parts.append(Text("--retry-failed solves failed cells again."))
    names = ", ".join(file.name + ("/" if file.is_dir() else "") for file in files)
    return Group(*parts, Text(), Text(f"Written to {printable(str(directory))}: {names}"))


def _cells_table(sweep: Sweep, table: list[Row]) -> RenderableType:
    """Show the best cell for every model on every variant of the hardware."""
    priced = all(row["cost_per_trillion_tokens"] is not None for row in table)
    measure = "cost_per_trillion_tokens" if priced else "gpu_hours_per_trillion_tokens"
    best: dict[tuple[object, ...], Row] = {}
    for row in sorted(table, key=lambda row: (_number(row[measure]), row["cell"])):
        best.setdefault((row["model"], row["hardware"], what_if_words(sweep.study, row)), row)
    what_ifs = {axis.name for axis in sweep.study.what_if}
    words = [name for name in sweep.cells[0].words if len({cell.words[name] for cell in sweep.cells}) > 1]
    plain = [name for name in words if name not in what_ifs]
    of = "each variant of the hardware" if "model" not in plain else "each model and variant of the hardware"
    more = f"; {len(best) - SHOWN_CELLS:,} more in the table" if len(best) > SHOWN_CELLS else ""
    title = f"The cell with the least {'cost' if priced else 'GPU-hours'} of {of}{more}"
    drawn = Table(box=None, pad_edge=False, title=title, title_justify="left")
    last = f"{sweep.study.currency}/1T tokens" if priced else "GPU-hours/1T tokens"
    heads = [
        "cell",
        *(HEADS.get(name, name.replace("_", " ")) for name in plain),
        *(["what if"] if what_ifs else []),
    ]
    for head in [*heads, "step", "MFU", "peak", "layout", last]:
        left = head in ("layout", "what if", "hardware", "model")
        drawn.add_column(head, justify="left" if left else "right", overflow="fold")
    for row in list(best.values())[:SHOWN_CELLS]:
        own = [str(row[name]) for name in ("cell", *plain)]
        own += [what_if_words(sweep.study, row) or "-"] if what_ifs else []
        drawn.add_row(*map(printable, own), *_measures(row), count_text(_number(row[measure])))
    return drawn


def _measures(row: Row) -> list[str]:
    degrees = [f"{name}={row[f'layout.{name}']}" for name in ("tp", "cp", "ep", "pp", "dp", "vpp")]
    shown = " ".join(word for word in degrees if not word.endswith("=1")) or "one GPU"
    star = "" if row["status"] == "optimal" else " (not proved)"
    return [
        f"{seconds_text(_number(row['step_time_s']))}{star}",
        percent_text(_number(row["mfu"])),
        gib_text(_number(row["peak_memory_bytes"])),
        shown,
    ]


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)
