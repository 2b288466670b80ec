"""Worker processes: answers to every task whatever becomes of the processes, errors, and no process left."""

from __future__ import annotations

import io
import os
import pickle
import queue
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from milpplan.parallel import run_tasks, serve


@dataclass(frozen=True)
class Failing:
    """A first message, and the worker that answers all others with an error."""

    error: Exception

    def worker(self, gone: threading.Event) -> Failing:
        """Return itself."""
        return self

    def reply(self, asked: object) -> object:
        """Raise the error."""
        raise self.error


@dataclass(frozen=True)
class Obeying:
    """A first message, and the worker that does what a task says."""

    def worker(self, gone: threading.Event) -> Obeying:
        """Return itself."""
        return self

    def reply(self, task: str) -> int:
        """Return the number of the process, or do not."""
        if task == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if task == "raise":
            raise ValueError("seen")
        if task == "sleep":
            time.sleep(3600)
        return os.getpid()


def lost(task: str, how: str) -> str:
    """Return both."""
    return f"{task}: {how}"


def exists(pid: int) -> bool:
    """Return True if there is such a process."""
    return Path(f"/proc/{pid}").exists()


def served(error: Exception) -> tuple[str, Any]:
    """Return what is written for an error."""
    messages, target = queue.SimpleQueue[Any](), io.BytesIO()
    messages.put(Failing(error))
    messages.put("anything")
    serve(messages, target, threading.Event())
    kind, value = pickle.loads(target.getvalue())
    return str(kind), value


def test_errors_are_told() -> None:
    """With where they happened."""
    kind, value = served(ValueError("seen"))
    assert kind == "error"
    assert isinstance(value, ValueError)
    assert "In a worker process" in value.__notes__[0]


def test_a_process_without_memory_ends() -> None:
    """Like one that is killed, which whoever waits goes on without; its error would end them."""
    with pytest.raises(MemoryError):
        served(MemoryError())


def test_a_lost_task_costs_no_other_task() -> None:
    """A worker that is killed, or raises an error, loses its task and is replaced; the others keep theirs."""
    results = list(run_tasks(["", "die", "", "raise", "", ""], 1, Obeying(), lost))
    first, died, third, raised, fifth, sixth = results
    assert "die: signal 9" in str(died)
    assert raised == "raise: ValueError: seen"
    assert first != third != fifth == sixth
    for pid in (first, third, fifth):
        assert isinstance(pid, int)
        assert not exists(pid)


def test_workers_end_with_the_generator() -> None:
    """Whoever stops asking for results, as Ctrl-C does, leaves no process behind, and waits for no task."""
    started = time.monotonic()
    results = run_tasks(["sleep", "", "sleep", "sleep"], 2, Obeying(), lost)
    pid = next(results)
    results.close()
    assert time.monotonic() - started < 600
    assert isinstance(pid, int)
    assert not exists(pid)


def test_no_tasks_start_no_process() -> None:
    """Nothing to do, nothing done."""
    assert list(run_tasks([], 4, Obeying(), lost)) == []
