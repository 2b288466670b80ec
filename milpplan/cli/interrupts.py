"""Ctrl-C before, during and after a command. Imports nothing of weight: it has to be there first."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

MESSAGE: Final = "Interrupted before anything was found."
STOPPED_WITHOUT_PLAN: Final = 5
"""Exit code of the program, defined here because ``milpplan.cli.outcome`` takes long to import."""


def leave_at_once() -> None:
    """From now on Ctrl-C ends the program with a message and an exit code, until a command says otherwise.

    Nothing has been found or written yet. A ``KeyboardInterrupt`` would not do: imports and destructors print
    it as a traceback, or swallow it.
    """
    # A program started in the background by a shell without job control ignores Ctrl-C: that stays.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


@contextmanager
def raised() -> Iterator[None]:
    """Ctrl-C raises ``KeyboardInterrupt`` inside, and no longer matters behind: the result has been printed. So
    does SIGTERM, by which `timeout` and batch systems end a program."""
    if signal.getsignal(signal.SIGINT) is not _leave:
        yield
        return
    heard = (signal.SIGINT, signal.SIGTERM) if _is_default(signal.SIGTERM) else (signal.SIGINT,)
    for one in heard:
        signal.signal(one, signal.default_int_handler)
    try:
        yield
    finally:
        for one in heard:
            signal.signal(one, signal.SIG_IGN)


@contextmanager
def leaving() -> Iterator[None]:
    """Inside ``raised``, Ctrl-C and SIGTERM end the program at once again: nothing has been found yet, and imports
    and destructors lose an exception."""
    heard = [one for one in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(one) is signal.default_int_handler]
    if threading.current_thread() is not threading.main_thread():
        # No other thread may say what a signal does.
        heard = []
    for one in heard:
        signal.signal(one, _leave)
    try:
        yield
    finally:
        for one in heard:
            signal.signal(one, signal.default_int_handler)


def _is_default(one: signal.Signals) -> bool:
    return signal.getsignal(one) is signal.SIG_DFL


def leave_solvers(code: object) -> None:
    """Leave at once, with the exit code ``code``, where a solver that was interrupted still runs.

    A solver that comes back from C++ while Python winds up ends its thread there, which aborts the program.
    """
    if threading.active_count() == 1 or not isinstance(code, int):
        return
    from milpplan.optimize.solution import solver_runs

    if solver_runs():
        for stream in (sys.stdout, sys.stderr):
            # Nobody reads it any more, then.
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _leave(signum: int, frame: Any) -> None:
    # No flush and no destructors: imports may be half done.
    if sys.stderr is not None:
        os.write(2, f"{MESSAGE}\n".encode())
    os._exit(STOPPED_WITHOUT_PLAN)
