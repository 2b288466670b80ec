"""A process that works for a search: our end of it. ``worker`` is the other end.

It is a Python of its own that imports milpplan and nothing else, so a script needs no guard around its main part.
It ends when our end of its input is closed, however that comes about, and the solvers that it has started with it.
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
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from milpplan.errors import UnavailableError
from milpplan.optimize.milp.solution import end_if

POLL_S: Final = 0.1
"""How often it is asked whether the solve was cancelled, while an answer is awaited."""
PATIENCE_S: Final = 5.0
"""How long a process that was told to may take to end."""
# Who started it may be gone before it has said anything.
START: Final = (
    "import pickle, sys; sys.stdin.buffer.peek(1) or sys.exit(); sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from milpplan.optimize.search.worker import main; main()"
)


def can_start() -> bool:
    """Whether there is a Python to start."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def usable_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerProcess:
    """Answers what is sent to it, one answer for one message."""

    def __init__(self, hello: object) -> None:
        """Start it; ``hello`` is the first message, which has no answer."""
        self._answers: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        # Ctrl-C is for us to hear, and what it has started is to end with it.
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-c", START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=os.name == "posix",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        # A Python takes a while to start and to hear: that is not for us to wait for.
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()
        self.send([path for path in sys.path if isinstance(path, str)])
        self.send(hello)

    def send(self, message: object) -> None:
        """Send a message as it is now; one that has died takes nothing, which is seen when its answer is asked
        for."""
        self._messages.put(pickle.dumps(message))

    @property
    def answered(self) -> bool:
        """Whether there is an answer that was not asked for yet."""
        return not self._answers.empty()

    def answer(self, until: float | None, cancelled: Callable[[], bool] | None) -> Any:
        """The answer to a message; None where there is none at ``until`` (``time.monotonic``).

        Raises:
            KeyboardInterrupt: the solve was cancelled.
            UnavailableError: the process has died.
            Exception: what was raised there.
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
        # What cannot be read is as good as nothing: the process is of no more use.
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
        """Tell the process to end, once it has heard what was sent."""
        self._messages.put(None)

    def close(self, *, at_once: bool = False) -> None:
        """End the process, whatever it does; ``at_once`` together with the solvers that it has started."""
        assert self.process.stdout is not None
        self.stop()
        if at_once and os.name == "posix":
            # It leads a group of its own.
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
