"""A process that works for a search: what it does. ``worker_process`` starts it. Its first message knows who
answers the others: here, who decides layouts."""

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
"""How long the solvers may take to end when nobody waits for them any more."""


@dataclass(frozen=True, slots=True)
class WorkerInit:
    """What a worker has to know of a search; ``options`` without functions."""

    problem: Problem
    options: SolveOptions
    keep_below: float
    wants_programs: bool

    def worker(self, gone: threading.Event) -> Worker:
        """Who answers the messages after this one; ``gone``: nobody waits any more."""
        return Worker.of(self, gone)


@dataclass(slots=True)
class Worker:
    """Answers rounds."""

    share: LayoutQueue
    cases: dict[int, LayoutTask] = field(default_factory=dict)
    programs: list[Program] = field(default_factory=list)

    @staticmethod
    def of(hello: WorkerInit, gone: threading.Event) -> Worker:
        """For a search; ``gone``: nobody waits any more."""
        cases: dict[int, LayoutTask] = {}
        programs: list[Program] = []
        options = replace(
            hello.options, cancelled=gone.is_set, on_program=programs.append if hello.wants_programs else None
        )
        solver = LayoutSolver(options, backend(options.backend), witnesses(options), None)
        share = LayoutQueue(hello.problem, solver, cases.__getitem__, keep_below=hello.keep_below)
        return Worker(share, cases, programs)

    def reply(self, asked: Round) -> Reply:
        """Do a round."""
        share = self.share
        share.solver.deadline = None if asked.seconds is None else time.monotonic() + asked.seconds
        share.best_value = min(share.best_value, asked.best_value)
        self.cases.update((case.row, case) for _, case in asked.cases)
        share.drop(asked.dropped)
        share.add(entry for entry, _ in asked.cases)
        findings = tuple(share.run(asked.work_s))
        left: tuple[Entry, ...] = tuple(share.give_back())
        programs = tuple(self.programs)
        self.programs.clear()
        return Reply(findings, share.begun(), left, replace(share.solver.counters), programs)


def main() -> None:
    """The life of a worker: messages in, answers out, until our input ends."""
    if os.name == "posix":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The buffer, which may hold more than was read of it.
    source, target = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # Whatever prints must not get between the answers.
    os.dup2(2, 1)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    gone = threading.Event()
    threading.Thread(target=_read, args=(source, messages, gone), daemon=True).start()
    with suppress(KeyboardInterrupt, OSError, MemoryError):
        serve(messages, target, gone)
    sys.stdout.flush()
    os._exit(0)


def serve(messages: queue.SimpleQueue[Any], target: BinaryIO, gone: threading.Event) -> None:
    """Answer messages; an error is an answer too, but that of no memory, which ends this process: whoever waits
    goes on alone."""
    try:
        hello = messages.get()
        worker = None if hello is None else hello.worker(gone)
        while worker is not None and (asked := messages.get()) is not None:
            _answer(target, "reply", worker.reply(asked))
    except (KeyboardInterrupt, OSError, MemoryError):
        raise
    except Exception as error:
        _answer(target, "error", _portable(error))


def _answer(target: BinaryIO, kind: str, value: object) -> None:
    target.write(pickle.dumps((kind, value)))
    target.flush()


def _portable(error: Exception) -> Exception:
    """The error with where it happened, or its text where it cannot be sent."""
    where = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = SolverError(f"{type(error).__name__}: {error}")
    error.add_note(f"In a worker process:\n{where}")
    return error


def _read(source: BinaryIO, messages: queue.SimpleQueue[Any], gone: threading.Event) -> None:
    """Messages until there are no more; then everything ends, at the latest after a moment."""
    try:
        while True:
            messages.put(pickle.load(source))
    except Exception:
        gone.set()
        messages.put(None)
    time.sleep(GRACE_S)
    if os.name == "posix" and os.getpgrp() == os.getpid():
        # Solvers that are processes of their own, too.
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
