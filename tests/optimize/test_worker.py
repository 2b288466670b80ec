"""What a process that works for another one says of its errors."""

from __future__ import annotations

import io
import pickle
import queue
import threading
from dataclasses import dataclass
from typing import Any

import pytest

from milpplan.optimize.search.worker_process import serve


@dataclass(frozen=True)
class Failing:
    """A first message, and who answers the others: with an error."""

    error: Exception

    def worker(self, gone: threading.Event) -> Failing:
        """Itself."""
        return self

    def reply(self, asked: object) -> object:
        """Nothing."""
        raise self.error


def served(error: Exception) -> tuple[str, Any]:
    """What is written of an error."""
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
