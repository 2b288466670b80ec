"""Tasks solved by processes of this machine, one task at a time each.

A worker that dies (killed, out of memory) costs its task only: the task has failed, and another worker takes
the next one. Workers end with the program, however it ends.
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
"""How long a worker may take to end before it is killed."""


@dataclass(slots=True)
class Worker:
    """A process, our end of the pipe to it, and what it is solving."""

    process: SpawnProcess
    connection: Connection
    task: Task | None = None


def run(tasks: Sequence[Task], num_workers: int, solve: Solve = solved) -> Generator[Outcome]:
    """The outcomes of tasks, in the order in which they are finished.

    Args:
        tasks: what to solve.
        num_workers: processes, at most one a task.
        solve: what a worker does with a task; a function of a module.
    """
    waiting = list(reversed(tasks))
    workers: list[Worker] = []
    try:
        for _ in range(min(num_workers, len(tasks))):
            worker = started(solve)
            workers.append(worker)
            _give(worker, waiting)
        while any(worker.task for worker in workers):
            ready = wait([worker.connection for worker in workers if worker.task])
            for i, worker in enumerate(workers):
                if worker.connection not in ready or worker.task is None:
                    continue
                outcome = _received(worker)
                if outcome is None:
                    outcome = _dead(worker)
                    workers[i] = worker = started(solve)
                _give(worker, waiting)
                yield outcome
    finally:
        ended(workers)


def _give(worker: Worker, waiting: list[Task]) -> None:
    worker.task = waiting.pop() if waiting else None
    # A worker that is dead takes nothing: the next look at its pipe will tell.
    with suppress(OSError):
        # None tells a worker that there is nothing more to do.
        worker.connection.send(worker.task)


def _received(worker: Worker) -> Outcome | None:
    """The outcome that a worker has sent; None if it died instead."""
    try:
        outcome: Outcome = worker.connection.recv()
    except (EOFError, OSError):
        return None
    return outcome


def _dead(worker: Worker) -> Outcome:
    assert worker.task is not None
    worker.connection.close()
    worker.process.join(PATIENCE_S)
    code = worker.process.exitcode
    reason = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    out_of_memory = "; signal 9 is usually the system's, out of memory" if code == -9 else ""
    return failed(worker.task.key, f"The process that solved this cell died ({reason}{out_of_memory}).")


def started(solve: Solve) -> Worker:
    """A new worker without a task."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, solve), daemon=True)
    with _without_interrupts():
        process.start()
    # Else the pipe would stay open after the worker's death, and nobody would notice.
    theirs.close()
    return Worker(process, ours)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """A process started inside does not hear Ctrl-C: it is for us to end it, not for the terminal. What comes in
    the meantime comes to us afterwards."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ended(workers: list[Worker]) -> None:
    """End workers; those that are solving are not waited for."""
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
    """The life of a worker: tasks in, outcomes out, until there is no more or nobody left to tell."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        while (task := connection.recv()) is not None:
            connection.send(solve(task))
    except (EOFError, OSError):
        return


def _die_with_parent() -> None:
    """A solve may take hours: do not finish it for a program that is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
