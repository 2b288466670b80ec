"""Sequence of measurements: failures are recorded, and finished measurements are kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from milpplan.problem.records import Record
from milpplan.profiling.machine import Machine, MeasurementError
from milpplan.profiling.records import (
    Attention,
    AttentionTime,
    Copy,
    CopyTime,
    Exchange,
    Failure,
    Layers,
    Measurements,
    Product,
    ProductTime,
    Traffic,
    TrafficTime,
)
from milpplan.profiling.sweep import Task

Progress = Callable[[str], None]
MAX_REASON = 900
"""Maximum number of characters of a failure's reason."""


@dataclass(slots=True)
class _Books:
    """Rows by the field of ``Measurements`` that they belong to."""

    rows: dict[str, list[Record]] = field(default_factory=dict)

    def add(self, name: str, row: Record) -> None:
        """Add a row."""
        self.rows.setdefault(name, []).append(row)


def measure(
    machine: Machine,
    tasks: Sequence[Task],
    time_limit_s: float,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Measurements:
    """Measure the tasks in order until they are done, time is up or Ctrl-C; finished measurements are kept.

    A measurement that has begun is finished, so the limit may be exceeded by one measurement.
    """
    tell = progress or (lambda text: None)
    books = _Books()
    end = clock() + time_limit_s
    stopped = ""
    try:
        for number, task in enumerate(tasks, start=1):
            if clock() >= end:
                stopped = "time limit"
                break
            tell(f"{number} of {len(tasks)}: {words_of(task)}")
            stopped = _measured(machine, task, books, lambda: clock() >= end)
            if stopped:
                break
    except KeyboardInterrupt:
        stopped = "interrupted"
    values: dict[str, Any] = {name: tuple(rows) for name, rows in books.rows.items()}
    return Measurements(environment=machine.environment(), stopped=stopped, **values)


def _measured(machine: Machine, task: Task, books: _Books, late: Callable[[], bool]) -> str:
    """Measure a task; return the reason why it was not finished, or an empty text."""
    try:
        if isinstance(task, Exchange):
            return _exchanged(machine, task, books, late)
        if isinstance(task, Product):
            books.add("products", ProductTime(shape=task, time=machine.product(task)))
        elif isinstance(task, Traffic):
            books.add("traffic", TrafficTime(shape=task, time=machine.traffic(task)))
        elif isinstance(task, Copy):
            books.add("copies", CopyTime(shape=task, time=machine.copy(task)))
        elif isinstance(task, Attention):
            forward, backward = machine.attention(task)
            books.add("attentions", AttentionTime(shape=task, forward=forward, backward=backward))
        else:
            books.add("layers", machine.layers(task))
    except MeasurementError as error:
        reason = " ".join(str(error).split())[:MAX_REASON] or type(error).__name__
        books.add("failures", Failure(what=words_of(task), reason=reason))
    return ""


def _exchanged(machine: Machine, task: Exchange, books: _Books, late: Callable[[], bool]) -> str:
    """Measure the collectives of a group. The iterator is always closed, which ends the ranks."""
    rows = machine.collectives(task)
    try:
        for row in rows:
            books.add("collectives", row)
            if late():
                return "time limit"
    finally:
        close = getattr(rows, "close", None)
        if close is not None:
            close()
    return ""


def words_of(task: Task) -> str:
    """Describe a task in a few words."""
    if isinstance(task, Product):
        return f"{task.precision} product {task.m} x {task.n} x {task.k}"
    if isinstance(task, Attention):
        return f"attention of {task.micro_batch_size} x {task.sequence_length} tokens, {task.num_heads} heads"
    if isinstance(task, Traffic):
        return f"{task.operator} of {task.num_bytes:,} bytes"
    if isinstance(task, Copy):
        return f"copy {task.direction.replace('_', ' ')} of {task.num_bytes:,} bytes"
    if isinstance(task, Exchange):
        return f"collectives of {task.num_ranks} ranks"
    return layers_words(task)


def layers_words(shape: Layers) -> str:
    """Name a measurement of layers."""
    return (
        f"{shape.num_layers} layers of width {shape.hidden_size}, {shape.micro_batch_size} x "
        f"{shape.sequence_length} tokens, recompute {shape.recompute}"
    )
