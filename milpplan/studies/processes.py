"""Local worker processes that solve tasks, one task at a time each.

The death of a worker (killed, out of memory) only fails its task; a new worker takes the next one. Workers end
with the program, however it ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Final

from milpplan.studies.outcomes import Outcome, Solve, Task, failed, solved

PATIENCE_S: Final = 5.0
"""Seconds that a worker may take to end before it is killed."""


@dataclass(slots=True)
class Worker:
    """A process, our end of the pipe to it, and its present task."""

    process: SpawnProcess
    connection: Connection
    task: Task | None = None


def run(tasks: Sequence[Task], num_workers: int, solve: Solve = solved) -> Generator[Outcome]:
    """Yield the outcomes of tasks, in the order in which they finish.

    Args:
        tasks: the tasks.
        num_workers: maximum number of processes; at most one a task is started.
        solve: function of a module that solves a task.
    """
    waiting = list(reversed(tasks))
    workers: list[Worker] = []
    try:
        for _ in range(min(num_workers, len(tasks))):
            worker = start_worker(solve)
            workers.append(worker)
            _send_task(worker, waiting)
        while any(worker.task for worker in workers):
            ready = wait([worker.connection for worker in workers if worker.task])
            for i, worker in enumerate(workers):
                if worker.connection not in ready or worker.task is None:
                    continue
                outcome = _receive(worker)
                if outcome is None:
                    outcome = _failed_outcome(worker)
                    workers[i] = worker = start_worker(solve)
                _send_task(worker, waiting)
                yield outcome
    finally:
        end_workers(workers)


def _send_task(worker: Worker, waiting: list[Task]) -> None:
    """Send the next task to a worker, or None if there is none."""
    worker.task = waiting.pop() if waiting else None
    # A dead worker takes no task; its closed pipe shows that in the next turn.
    with suppress(OSError):
        # None ends the worker.
        worker.connection.send(worker.task)


def _receive(worker: Worker) -> Outcome | None:
    """Receive the outcome that a worker sent; None if it died instead."""
    try:
        outcome: Outcome = worker.connection.recv()
    except (EOFError, OSError):
        return None
    return outcome


def _failed_outcome(worker: Worker) -> Outcome:
    """Build the outcome of a task whose worker died."""
    assert worker.task is not None
    worker.connection.close()
    worker.process.join(PATIENCE_S)
    code = worker.process.exitcode
    reason = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    out_of_memory = "; signal 9 is usually the system's, out of memory" if code == -9 else ""
    return failed(worker.task.key, f"The process that solved this cell died ({reason}{out_of_memory}).")


def start_worker(solve: Solve) -> Worker:
    """Start a worker without a task."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, solve), daemon=True)
    with _without_interrupts():
        process.start()
    # Otherwise the pipe would stay open after the worker's death, which would go unnoticed.
    theirs.close()
    return Worker(process, ours)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Block Ctrl-C while a process starts, so that the process inherits that.

    We end workers, not the terminal. A signal in the meantime reaches us afterwards.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_workers(workers: list[Worker]) -> None:
    """End the workers, without waiting for those that are solving."""
    for worker in workers:
        if worker.task is not None:
            worker.process.terminate()
        worker.connection.close()
    for worker in workers:
        worker.process.join(PATIENCE_S)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.process.close()


def _work(connection: Connection, solve: Solve) -> None:
    """Run a worker: receive tasks and send outcomes, until there are no more tasks or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        while (task := connection.recv()) is not None:
            connection.send(solve(task))
    except (EOFError, OSError):
        return


def _die_with_parent() -> None:
    """End this process when its parent ends, since a solve may take hours."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
