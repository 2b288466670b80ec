"""A study from its cells to their outcomes: finished cells come from the store, the others are solved and kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from milpplan.studies.grid import Cell
from milpplan.studies.outcomes import PROVED, Outcome, Task, impossible, task_of
from milpplan.studies.records import Study
from milpplan.studies.store import Store

Runner = Callable[[Sequence[Task]], Generator[Outcome]]
"""Function that solves tasks and yields each outcome as soon as it is known, in any order."""


@dataclass(frozen=True, slots=True)
class StudyProgress:
    """Cells decided and in total, cells decided in this run, failed cells, and an estimate of the seconds left."""

    done: int
    total: int
    now: int
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
    failures, now = sweep.counts().get("failed", 0), 0
    tell(StudyProgress(done, total, 0, failures, None))
    # Closing the runner ends its workers, however this loop ends.
    with closing(runner(open_tasks)) as outcomes:
        for number, outcome in enumerate(outcomes, start=1):
            store.write(outcome)
            sweep.outcomes[outcome.key] = outcome
            now += sharing[outcome.key]
            failures += sharing[outcome.key] * (outcome.status == "failed")
            seconds_left = (time.monotonic() - started) / number * (len(open_tasks) - number)
            tell(StudyProgress(done + now, total, now, failures, seconds_left))
