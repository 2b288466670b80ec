"""The directory of a study: one file for every finished cell, each written whole, and its sweep."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from pydantic import ValidationError

from milpplan.errors import InvalidInputError
from milpplan.problem import read_text
from milpplan.problem.reading import shown
from milpplan.reports import write_whole
from milpplan.reports.files import TEMPORARY, check_writable, make_directory, unwritable
from milpplan.studies.grid import Cell, Study
from milpplan.studies.outcomes import PROVED, Outcome, Task, impossible, task_of

CELLS: Final = "cells"
PLANS: Final = "plans"
LOCK: Final = ".lock"
LEFTOVERS: Final = "*".join(TEMPORARY)
"""Pattern of temporary files of a run that was killed while writing."""


class Store:
    """Outcomes by key in a directory. Use as ``with opened(directory) as store``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, key: str) -> Path:
        """Return the file of a cell."""
        return self.directory / CELLS / f"{key}.json"

    def read(self, key: str) -> Outcome | None:
        """Read the outcome of a key; None if there is none, or the file is damaged."""
        try:
            outcome = Outcome.model_validate_json(read_text(self.path(key)))
        except (InvalidInputError, ValidationError):
            return None
        return outcome if outcome.key == key else None

    def write(self, outcome: Outcome) -> None:
        """Write an outcome, so that it survives the end of the program."""
        write_whole(self.path(outcome.key), json.dumps(outcome.model_dump(mode="json")) + "\n")


@contextmanager
def opened(directory: Path) -> Iterator[Store]:
    """Open the store in a directory, created if it is missing, and lock it until the end.

    Raises:
        InvalidInputError: the directory cannot be written, or another sweep uses it.
    """
    make_directory(directory / CELLS, "--out")
    lock = directory / LOCK
    check_writable(lock)
    try:
        # Opened for appending, since the path may be a link to another file.
        file = lock.open("a", encoding="utf-8")
    except OSError as error:
        raise unwritable(lock, error) from error
    with file:
        _lock(file, directory)
        for leftover in (*directory.glob(LEFTOVERS), *directory.glob(f"*/{LEFTOVERS}")):
            leftover.unlink(missing_ok=True)
        yield Store(directory)


def _lock(file: IO[str], directory: Path) -> None:
    """Lock the directory until the file is closed, however the program ends."""
    try:
        import fcntl
    except ImportError:
        # Without such locks two sweeps may solve equal cells, but still write whole files.
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise InvalidInputError(
            f"Another sweep is at work in {shown(str(directory))}.",
            "Expected a directory that no other sweep writes to.",
            "Wait for it to end, or give another directory with --out.",
        ) from error


Runner = Callable[[Sequence[Task]], Generator[Outcome]]
"""Function that solves tasks and yields each outcome as soon as it is known, in any order."""


@dataclass(frozen=True, slots=True)
class StudyProgress:
    """Cells decided and in total, failed cells, and an estimate of the seconds left."""

    done: int
    total: int
    failed: int
    seconds_left: float | None


@dataclass(slots=True)
class Sweep:
    """A study with the outcomes of its cells. Cells of equal problems share a task."""

    study: Study
    cells: tuple[Cell, ...]
    tasks: dict[int, Task] = field(init=False)
    """Tasks by number of the cell; impossible cells have none."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """Outcomes by key of the task."""

    def __post_init__(self) -> None:
        self.tasks = {
            cell.number: task_of(cell.problem, self.study.solve) for cell in self.cells if cell.problem is not None
        }

    def outcome(self, cell: Cell) -> Outcome | None:
        """Return the outcome of a cell; None while it is open."""
        if cell.number not in self.tasks:
            return impossible(cell.impossible)
        return self.outcomes.get(self.tasks[cell.number].key)

    @property
    def open_tasks(self) -> tuple[Task, ...]:
        """Tasks without an outcome, in the order of their cells, each once."""
        unique = {task.key: task for task in self.tasks.values()}
        return tuple(task for key, task in unique.items() if key not in self.outcomes)

    def counts(self) -> dict[str, int]:
        """Count the cells by status; ``open`` cells have no outcome yet."""
        counts: dict[str, int] = {}
        for cell in self.cells:
            outcome = self.outcome(cell)
            status: str = "open" if outcome is None else outcome.status
            counts[status] = counts.get(status, 0) + 1
        return counts

    @property
    def proved(self) -> bool:
        """True if every cell has its proof."""
        return set(self.counts()) <= set(PROVED)


def resume(sweep: Sweep, store: Store, retry_failed: bool) -> None:
    """Take finished outcomes from the store; failed ones too, unless they are to be solved again."""
    for task in sweep.open_tasks:
        outcome = store.read(task.key)
        if outcome is not None and not (retry_failed and outcome.status == "failed"):
            sweep.outcomes[task.key] = outcome


def complete(sweep: Sweep, store: Store, runner: Runner, tell: Callable[[StudyProgress], Any]) -> None:
    """Solve the open tasks; every outcome is on disk before the next is awaited."""
    started = time.monotonic()
    sharing: dict[str, int] = {}
    for task in sweep.tasks.values():
        sharing[task.key] = sharing.get(task.key, 0) + 1
    open_tasks, total = sweep.open_tasks, len(sweep.cells)
    done = total - sum(sharing[task.key] for task in open_tasks)
    failures = sweep.counts().get("failed", 0)
    tell(StudyProgress(done, total, failures, None))
    # Closing the runner ends its workers, however this loop ends.
    with closing(runner(open_tasks)) as outcomes:
        for number, outcome in enumerate(outcomes, start=1):
            store.write(outcome)
            sweep.outcomes[outcome.key] = outcome
            done += sharing[outcome.key]
            failures += sharing[outcome.key] * (outcome.status == "failed")
            seconds_left = (time.monotonic() - started) / number * (len(open_tasks) - number)
            tell(StudyProgress(done, total, failures, seconds_left))
