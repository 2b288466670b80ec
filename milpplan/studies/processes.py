"""Tasks solved by worker processes of this machine."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from milpplan.parallel import run_tasks
from milpplan.studies.outcomes import Outcome, Solve, Task, failed, solved


@dataclass(frozen=True, slots=True)
class CellWorker:
    """Worker that solves cells; also the first message to it, as it has no state."""

    solve: Solve

    def worker(self, gone: threading.Event) -> CellWorker:
        """Return the object that answers the following messages."""
        return self

    def reply(self, task: Task) -> Outcome:
        """Solve a task."""
        return self.solve(task)


def run(tasks: Sequence[Task], num_workers: int, solve: Solve = solved) -> Generator[Outcome]:
    """Return the outcomes of tasks, in the order in which they finish.

    The task of a worker that dies has failed; a new worker takes the next task.

    Args:
        tasks: the tasks.
        num_workers: maximum number of processes; at most one a task is started.
        solve: function of a module that solves a task.
    """
    return run_tasks(tasks, num_workers, CellWorker(solve), _failed_outcome)


def _failed_outcome(task: Task, how: str) -> Outcome:
    """Build the outcome of a task whose worker died."""
    return failed(task.key, f"The process that solved this cell died ({how}).")
