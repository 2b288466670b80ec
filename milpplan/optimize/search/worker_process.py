"""Worker process: both ends of the pipe, the parent's (``WorkerProcess``) and the worker's (``main``).

The parent sends messages, the worker an answer to each. The first message creates the object that answers all
others.

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
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO, Final

from milpplan.errors import SolverError, UnavailableError
from milpplan.optimize.milp.solution import end_if

POLL_S: Final = 0.1
"""Seconds between two looks at ``cancelled`` while an answer is awaited."""
PATIENCE_S: Final = 5.0
"""Seconds that a process may take to end after it was told to."""
GRACE_S: Final = 1.0
"""Seconds that the solvers have to end once the parent has gone."""
# The parent may die before it sends anything.
START: Final = (
    "import pickle, sys; sys.stdin.buffer.peek(1) or sys.exit(); sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from milpplan.optimize.search.worker_process import main; main()"
)


def can_start() -> bool:
    """Return True if there is a Python executable to start."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerProcess:
    """Process that sends an answer to each message."""

    def __init__(self, init: object) -> None:
        """Start the process; ``init`` is the first message, which has no answer."""
        self._answers: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
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
        """True if an answer waits to be read."""
        return not self._answers.empty()

    def answer(self, until: float | None, cancelled: Callable[[], bool] | None) -> Any:
        """Return the answer to a message; None where there is none at ``until`` (``time.monotonic``).

        Raises:
            KeyboardInterrupt: the solve was cancelled.
            UnavailableError: the process has died.
            Exception: the error that was raised in the worker.
        """
        while True:
            end_if(cancelled)
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
                    f"A process that worked for the solve died ({self._how()}).",
                    "Expected it to end with the solve.",
                    "Solve with one worker, or where more memory is free.",
                )
            return value

    def _how(self) -> str:
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
        self._answers.put(("death", None))

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
