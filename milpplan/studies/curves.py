"""Data of a study's figures as plain numbers: scaling lines, the Pareto front, and the effect of every axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from milpplan.studies.grid import GRID_AXES
from milpplan.studies.records import Study
from milpplan.studies.tables import WHAT_IF, Row, Value, what_if_words

SIZES: Final = ("num_gpus", "global_batch_size")
VARIANT_AXES: Final = ("hardware",)
"""Axes whose values are lines of the scaling figure, like the what-ifs; other axes are chosen from a menu."""
HOURS_PER_DAY: Final = 24.0


def coordinates(table: Sequence[Row]) -> tuple[str, ...]:
    """Return the columns that identify the cell of a row."""
    what_ifs = [name for name in (table[0] if table else ()) if name.startswith(WHAT_IF)]
    return (*GRID_AXES, *what_ifs, *SIZES)


def varied(table: Sequence[Row]) -> tuple[str, ...]:
    """Return the coordinates with more than one value."""
    return tuple(name for name in coordinates(table) if len({row[name] for row in table}) > 1)


def label(row: Row, names: Iterable[str]) -> str:
    """Write the values of some coordinates in words; numbers get a unit."""
    plain = ("model", "hardware", "precision", "attention_kernel")
    words = []
    for name in names:
        value = row[name]
        if name in plain:
            words.append(str(value))
        elif name in SIZES or name == "sequence_length":
            unit = {"num_gpus": "GPUs", "global_batch_size": "sequences a step"}.get(name, "tokens a sequence")
            words.append(f"{value:,} {unit}")
        else:
            words.append(f"{name.removeprefix(WHAT_IF).replace('_', ' ')}: {value}")
    return ", ".join(words)


def number(row: Row, name: str) -> float:
    """Return a measure of a row that has it."""
    value = row[name]
    assert isinstance(value, int | float)
    return float(value)


def throughput(row: Row) -> float:
    """Return tokens per second and GPU; 0 without a plan."""
    return 0.0 if row["tokens_per_s"] is None else number(row, "tokens_per_s") / number(row, "num_gpus")


def days_per_trillion(row: Row) -> float:
    """Return the days of training on 10^12 tokens."""
    return number(row, "gpu_hours_per_trillion_tokens") / number(row, "num_gpus") / HOURS_PER_DAY


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the scaling figure: rows by ascending number of GPUs, all of one job on one hardware."""

    menu: str
    name: str
    rows: tuple[Row, ...]

    @property
    def efficiency(self) -> tuple[float, ...]:
        """Tokens per second and GPU over those of the smallest number of GPUs with a plan."""
        first = throughput(self.rows[0])
        return tuple(throughput(row) / first for row in self.rows)


def scaling_lines(study: Study, table: Sequence[Row]) -> list[Line]:
    """Build the lines of all rows with a plan, by menu entry and variant; unchanged hardware first."""
    names = [name for name in varied(table) if name != "num_gpus"]
    several = [name for name in names if name in VARIANT_AXES]
    of_menu = [name for name in names if name not in several and not name.startswith(WHAT_IF)]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in table:
        if row["tokens_per_s"] is not None:
            changes = what_if_words(study, row)
            plain = label(row, several or ([] if changes else ["hardware"]))
            name = ", ".join(part for part in (plain, changes) if part)
            groups.setdefault((label(row, of_menu), name), []).append(row)
    lines = [
        Line(menu, name, tuple(sorted(rows, key=lambda row: number(row, "num_gpus"))))
        for (menu, name), rows in groups.items()
    ]
    return sorted(lines, key=lambda line: len(what_if_words(study, line.rows[0])) > 0)


def front(points: Sequence[tuple[float, ...]]) -> list[int]:
    """Return indices of the undominated points.

    A point dominates another if it is at most as large everywhere and smaller somewhere.
    """
    values = np.array(points, dtype=np.float64)
    kept: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: points[i]):
        # A dominating point comes earlier in this order.
        others = values[kept]
        dominated = (others <= values[i]).all(axis=1) & (others < values[i]).any(axis=1) if kept else np.zeros(0)
        if not dominated.any():
            kept.append(i)
    return sorted(kept)


@dataclass(frozen=True, slots=True)
class Effect:
    """Effect of one value of an axis on tokens per second and GPU, against the axis's first value, all else equal.

    ``least``, ``middle`` and ``most`` are relative changes over the ``compared`` pairs in which both have a plan;
    ``lost`` pairs have a plan with the first value only, ``gained`` pairs with this one only.
    """

    axis: str
    value: str
    first: str
    least: float
    middle: float
    most: float
    compared: int
    lost: int
    gained: int


def effects(table: Sequence[Row]) -> list[Effect]:
    """List the effects of every value of every varied axis but the model, in the order of the table."""
    result = []
    for axis in varied(table):
        if axis != "model":
            result += _effects(table, axis)
    return result


def _effects(table: Sequence[Row], axis: str) -> list[Effect]:
    """List the effects of the values of one axis."""
    others = [name for name in coordinates(table) if name != axis]
    groups: dict[tuple[Value, ...], dict[Value, Row]] = {}
    for row in table:
        groups.setdefault(tuple(row[name] for name in others), {})[row[axis]] = row
    values = list(dict.fromkeys(row[axis] for row in table))
    return [_effect(axis, value, values[0], list(groups.values())) for value in values[1:]]


def _effect(axis: str, value: Value, first: Value, groups: list[dict[Value, Row]]) -> Effect:
    """Compare two values of an axis over all pairs of cells."""
    pairs = [
        (throughput(group[first]), throughput(group[value])) for group in groups if {first, value} <= set(group)
    ]
    changes = [after / before - 1.0 for before, after in pairs if before and after]
    low, middle, high = (min(changes), median(changes), max(changes)) if changes else (0.0, 0.0, 0.0)
    lost = sum(bool(before) and not after for before, after in pairs)
    gained = sum(bool(after) and not before for before, after in pairs)
    return Effect(axis, str(value), str(first), low, middle, high, len(changes), lost, gained)
