"""Worker process: its side of the pipe, which receives messages and sends answers.

``worker_process`` starts it. The first message creates the object that answers all others.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, Final

from milpplan.errors import SolverError
from milpplan.optimize.layout.layout_solver import LayoutSolver
from milpplan.optimize.milp.backends import backend
from milpplan.optimize.milp.cross_check import witnesses
from milpplan.optimize.milp.program import Program
from milpplan.optimize.result import SolveOptions
from milpplan.optimize.search.layout_queue import Entry, LayoutQueue, LayoutTask, Reply, Round
from milpplan.problem.problem import Problem

GRACE_S: Final = 1.0
"""Seconds that the solvers have to end once the parent has gone."""


@dataclass(frozen=True, slots=True)
class WorkerInit:
    """First message to a worker: the search it works for. ``options`` hold no functions."""

    problem: Problem
    options: SolveOptions
    keep_below: float
    wants_programs: bool

    def worker(self, gone: threading.Event) -> Worker:
        """Return the worker that answers the following messages; ``gone`` is set once the parent has gone."""
        return Worker.of(self, gone)


@dataclass(slots=True)
class Worker:
    """Decides layouts in rounds."""

    layouts: LayoutQueue
    tasks: dict[int, LayoutTask] = field(default_factory=dict)
    programs: list[Program] = field(default_factory=list)

    @staticmethod
    def of(init: WorkerInit, gone: threading.Event) -> Worker:
        """Make the worker of a search; ``gone`` is set once the parent has gone."""
        tasks: dict[int, LayoutTask] = {}
        programs: list[Program] = []
        options = replace(
            init.options, cancelled=gone.is_set, on_program=programs.append if init.wants_programs else None
        )
        solver = LayoutSolver(options, backend(options.backend), witnesses(options), None)
        layouts = LayoutQueue(init.problem, solver, tasks.__getitem__, keep_below=init.keep_below)
        return Worker(layouts, tasks, programs)

    def reply(self, work_order: Round) -> Reply:
        """Work for one round."""
        layouts = self.layouts
        layouts.solver.deadline = None if work_order.seconds is None else time.monotonic() + work_order.seconds
        layouts.best_value = min(layouts.best_value, work_order.best_value)
        self.tasks.update((task.row, task) for _, task in work_order.tasks)
        layouts.drop(work_order.dropped)
        layouts.add(entry for entry, _ in work_order.tasks)
        results = tuple(layouts.run(work_order.work_s))
        left: tuple[Entry, ...] = tuple(layouts.give_back())
        programs = tuple(self.programs)
        self.programs.clear()
        return Reply(results, layouts.begun(), left, replace(layouts.solver.counters), programs)


def main() -> None:
    """Answer messages on standard input until it ends."""
    if os.name == "posix":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The buffered reader, which may hold more bytes than were consumed.
    source, target = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # Printed text must not get between the answers.
    os.dup2(2, 1)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    gone = threading.Event()
    threading.Thread(target=_read, args=(source, messages, gone), daemon=True).start()
    with suppress(KeyboardInterrupt, OSError, MemoryError):
        serve(messages, target, gone)
    sys.stdout.flush()
    os._exit(0)


def serve(messages: queue.SimpleQueue[Any], target: BinaryIO, gone: threading.Event) -> None:
    """Answer messages.

    An error is sent as an answer. Only exhausted memory ends this process without an answer, and the parent then
    goes on alone.
    """
    try:
        init = messages.get()
        worker = None if init is None else init.worker(gone)
        while worker is not None and (message := messages.get()) is not None:
            _answer(target, "reply", worker.reply(message))
    except (KeyboardInterrupt, OSError, MemoryError):
        raise
    except Exception as error:
        _answer(target, "error", _portable(error))


def _answer(target: BinaryIO, kind: str, value: object) -> None:
    target.write(pickle.dumps((kind, value)))
    target.flush()


def _portable(error: Exception) -> Exception:
    """Return the error with its traceback as a note; its text where it cannot be pickled."""
    where = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = SolverError(f"{type(error).__name__}: {error}")
    error.add_note(f"In a worker process:\n{where}")
    return error


def _read(source: BinaryIO, messages: queue.SimpleQueue[Any], gone: threading.Event) -> None:
    """Queue messages until standard input ends; then end this process and its solvers after a moment."""
    try:
        while True:
            messages.put(pickle.load(source))
    except Exception:
        gone.set()
        messages.put(None)
    time.sleep(GRACE_S)
    if os.name == "posix" and os.getpgrp() == os.getpid():
        # Solvers may be processes of their own: end the whole group.
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
