"""Ctrl-C, SIGTERM and the time limit before, during and after a command.

This module imports nothing that takes long, because it is loaded first.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sized
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Final

MESSAGE: Final = "Interrupted before anything was found."
OVER: Final = "The time limit has passed before anything was found."
STOPPED: Final = "Interrupted."
STOPPED_WITHOUT_PLAN: Final = 5
"""Exit code of the program, defined here because ``milpplan.cli.outcome`` takes long to import."""
REPEATED_S: Final = 1.0
"""Seconds in which a repeated signal is ignored: ``timeout`` sends its own twice."""
LATE_S: Final = 1.5
"""Seconds after the time limit at which a command that has not ended by itself is interrupted as by Ctrl-C."""

SIGNALS: Final = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM") if hasattr(signal, name))
_last: dict[str, float] = {}
"""Time (of ``time.monotonic``) of the last interruption, by its kind: "signal" or "limit"."""


def leave_at_once() -> None:
    """Let Ctrl-C and SIGTERM end the program with a message and an exit code, until a command says otherwise.

    A signal that is ignored stays so, as Ctrl-C does in a process that a shell has started in the background.
    Nothing has been found or written yet. ``KeyboardInterrupt`` does not suffice: imports and destructors print it
    as a traceback, or swallow it.
    """
    for number in SIGNALS:
        if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(number, _leave)


@contextmanager
def raised() -> Iterator[None]:
    """Raise ``KeyboardInterrupt`` at Ctrl-C and SIGTERM inside the block, and ignore both after it.

    `timeout` and batch systems end a program by SIGTERM. After the block the result has been printed.
    """
    numbers = [number for number in SIGNALS if signal.getsignal(number) is _leave]
    _last.clear()
    for number in numbers:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def leaving() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the program at once, for a part of ``raised`` that has no result yet.

    Imports and destructors may lose an exception.
    """
    numbers = [number for number in SIGNALS if signal.getsignal(number) is _raise]
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may set what a signal does.
        numbers = []
    for number in numbers:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, _raise)


@contextmanager
def limited(seconds: float | None) -> Iterator[None]:
    """Interrupt the block ``LATE_S`` after its time limit, as Ctrl-C would."""
    main = threading.current_thread() is threading.main_thread()
    if seconds is None or not main or not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, _raise_over)
    # An alarm cannot be set any later, which is as good as no limit.
    signal.setitimer(signal.ITIMER_REAL, min(seconds + LATE_S, 1e8))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def keeping(results: Sized) -> Iterator[None]:
    """End the block at an interrupt, and continue the command with what is in ``results``, if anything is."""
    try:
        yield
    except KeyboardInterrupt:
        if not results:
            raise


def asked_to_stop() -> bool:
    """Tell whether a signal has come, because its exception may be lost in a destructor or an import."""
    return "signal" in _last


def message() -> str:
    """Return the message for an interruption before anything was found."""
    return OVER if "limit" in _last and "signal" not in _last else MESSAGE


def leave_solvers(code: object) -> None:
    """End the process at once with an exit code, if an interrupted solver still runs.

    A solver that returns from C++ while Python shuts down ends its thread there, which aborts the program.
    """
    if threading.active_count() == 1 or not isinstance(code, int):
        return
    from milpplan.optimize.milp.solution import solver_runs

    if solver_runs():
        for stream in (sys.stdout, sys.stderr):
            # Nobody reads the stream any more.
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _raise(signum: int, frame: Any) -> None:
    now = time.monotonic()
    repeated = now - _last.get("signal", -REPEATED_S) < REPEATED_S
    _last["signal"] = now
    if not repeated:
        _interrupt(frame)


def _raise_over(signum: int, frame: Any) -> None:
    _last["limit"] = time.monotonic()
    _interrupt(frame)


def _interrupt(frame: FrameType | None) -> None:
    """Raise ``KeyboardInterrupt``, or at the next line of NumPy's caller if the signal came inside NumPy.

    Where NumPy's C code calls Python (to compare rows), it replaces an exception by an error of its own.

    Args:
        frame: What the signal interrupted.

    Raises:
        KeyboardInterrupt: the interrupted code is not NumPy's.
    """
    caller = frame
    while caller is not None and caller.f_globals.get("__name__", "").partition(".")[0] == "numpy":
        caller = caller.f_back
    if caller is frame or caller is None or sys.gettrace() is not None:
        raise KeyboardInterrupt

    def next_line(frame: FrameType, event: str, arg: object) -> Any:
        sys.settrace(None)
        raise KeyboardInterrupt

    # A running frame is traced if it has a trace function and any tracing is on.
    caller.f_trace = next_line
    sys.settrace(lambda frame, event, arg: None)


def _leave(signum: int, frame: Any) -> None:
    # Without flush and destructors, because imports may be half done.
    if sys.stderr is not None:
        os.write(2, f"{MESSAGE}\n".encode())
    os._exit(STOPPED_WITHOUT_PLAN)
