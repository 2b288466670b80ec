"""Worker processes of searches and studies: both ends of the pipe, the parent's and the worker's.

The parent (``WorkerProcess``) sends messages, the worker (``main``) an answer to each. The first message
(``Init``) creates the object that answers all others (``Worker``). ``run_tasks`` keeps several workers busy with a
list of tasks; a search that deals its own work holds its ``WorkerProcess`` objects itself.

The worker is a Python process that imports only milpplan, so a script needs no guard around its main part. It ends
when its standard input is closed, for whatever reason, together with the solvers that it has started.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Any, BinaryIO, Final, Protocol, TypeVar

from milpplan.errors import SolverError, UnavailableError

Task = TypeVar("Task")
Result = TypeVar("Result")

POLL_S: Final = 0.1
"""Seconds between two looks at ``cancelled`` while an answer is awaited."""
PATIENCE_S: Final = 5.0
"""Seconds that a process may take to end after it was told to."""
GRACE_S: Final = 1.0
"""Seconds that the solvers have to end once the parent has gone."""
# The parent may die before it sends anything.
START: Final = (
    "import pickle, sys; sys.stdin.buffer.peek(1) or sys.exit(); sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from milpplan.parallel import main; main()"
)


def can_start() -> bool:
    """Return True if there is a Python executable to start."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Worker(Protocol):
    """Object that answers the messages in a worker process."""

    def reply(self, message: Any, /) -> object:
        """Return the answer to a message."""


class Init(Protocol):
    """First message to a worker process."""

    def worker(self, gone: threading.Event, /) -> Worker:
        """Return the object that answers the following messages; ``gone`` is set once the parent has gone."""


class WorkerProcess:
    """Process that sends an answer to each message."""

    def __init__(self, init: Init, some_answered: threading.Event | None = None) -> None:
        """Start the process.

        Args:
            init: first message, which has no answer.
            some_answered: event to set at every answer, and when the process dies.

        Raises:
            OSError: the system starts no process.
        """
        self._answers: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._some_answered = some_answered or threading.Event()
        # A session of its own: Ctrl-C reaches only the parent, and the solvers of the worker end with it.
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-c", START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=os.name == "posix",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        # A thread writes, because Python takes a while to start and to read.
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()
        self.send([path for path in sys.path if isinstance(path, str)])
        self.send(init)

    def send(self, message: object) -> None:
        """Send a message in its current state. A dead process ignores it, which shows when its answer is read."""
        self._messages.put(pickle.dumps(message))

    @property
    def answered(self) -> bool:
        """True if an answer, or the death of the process, waits to be read."""
        return not self._answers.empty()

    def answer(self, until: float | None, cancelled: Callable[[], bool] | None) -> Any:
        """Return the answer to a message; None where there is none at ``until`` (``time.monotonic``).

        Raises:
            KeyboardInterrupt: the solve was cancelled.
            UnavailableError: the process has died.
            Exception: the error that was raised in the worker.
        """
        while True:
            if cancelled is not None and cancelled():
                raise KeyboardInterrupt
            try:
                kind, value = self._answers.get(timeout=POLL_S)
            except queue.Empty:
                if until is not None and time.monotonic() > until:
                    return None
                continue
            if kind == "error":
                raise value
            if kind == "death":
                raise UnavailableError(
                    f"A process that worked for the solve died ({self.how_it_ended()}).",
                    "Expected it to end with the solve.",
                    "Solve with one worker, or where more memory is free.",
                )
            return value

    def how_it_ended(self) -> str:
        """Return the signal or the exit code of a process that has died."""
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(PATIENCE_S)
            out_of_memory = "; signal 9 is usually the system's, out of memory" if code == -9 else ""
            return f"signal {-code}{out_of_memory}" if code < 0 else f"exit code {code}"
        return "it closed its output"

    def _read(self) -> None:
        assert self.process.stdout is not None
        # An unreadable answer makes the process useless, like its death.
        with suppress(Exception):
            while True:
                self._answers.put(pickle.load(self.process.stdout))
                self._some_answered.set()
        self._answers.put(("death", None))
        self._some_answered.set()

    def _write(self) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):
            while (message := self._messages.get()) is not None:
                self.process.stdin.write(message)
                self.process.stdin.flush()
        with suppress(OSError):
            self.process.stdin.close()

    def stop(self) -> None:
        """Tell the process to end, once it has read all messages."""
        self._messages.put(None)

    def close(self, *, at_once: bool = False) -> None:
        """End the process; ``at_once``: kill it together with its solvers."""
        assert self.process.stdout is not None
        self.stop()
        if at_once and os.name == "posix":
            # The process leads a group of its own.
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        elif at_once:
            self.process.kill()
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(PATIENCE_S)
        self._writer.join(PATIENCE_S)
        self.process.stdout.close()


def run_tasks(
    tasks: Sequence[Task],
    num_workers: int,
    init: Init,
    lost: Callable[[Task, str], Result],
    cancelled: Callable[[], bool] | None = None,
) -> Generator[Result]:
    """Yield the results of tasks, in the order in which they finish; each worker has a task at a time.

    The death of a worker (killed, out of memory) loses only its task; a new worker takes the next task. All
    workers end with the generator, without waiting for their tasks.

    Args:
        tasks: the tasks, which are the messages.
        num_workers: maximum number of processes; at most one a task is started.
        init: first message to every worker.
        lost: function of a task without an answer, and of how its worker ended, that returns the task's result.
        cancelled: asked several times a second whether to stop.

    Raises:
        KeyboardInterrupt: the work was cancelled.
    """
    waiting = list(reversed(tasks))
    some_answered = threading.Event()
    workers: list[WorkerProcess] = []
    busy: dict[WorkerProcess, Task] = {}

    def start() -> WorkerProcess:
        workers.append(WorkerProcess(init, some_answered))
        return workers[-1]

    def send_next(process: WorkerProcess) -> None:
        if waiting:
            busy[process] = waiting.pop()
            process.send(busy[process])
        else:
            process.stop()

    try:
        for _ in range(min(num_workers, len(tasks))):
            send_next(start())
        while busy:
            # With a timeout, since an endless wait may hold back Ctrl-C.
            some_answered.wait(POLL_S)
            if cancelled is not None and cancelled():
                raise KeyboardInterrupt
            some_answered.clear()
            for process in [process for process in busy if process.answered]:
                result, died = _result(process, busy.pop(process), lost)
                if not died:
                    send_next(process)
                else:
                    process.close(at_once=True)
                    workers.remove(process)
                    if waiting:
                        send_next(start())
                yield result
    finally:
        for process in workers:
            process.close(at_once=process in busy)


def _result(process: WorkerProcess, task: Task, lost: Callable[[Task, str], Result]) -> tuple[Result, bool]:
    """Return the result of a task that was answered, and True if its worker has died."""
    try:
        result: Result = process.answer(None, None)
    except UnavailableError:
        return lost(task, process.how_it_ended()), True
    except Exception as error:
        return lost(task, f"{type(error).__name__}: {error}"), True
    return result, False


def main() -> None:
    """Answer messages on standard input until it ends."""
    # The parent ends its workers, not the terminal.
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
