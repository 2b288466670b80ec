"""A small study whose cells take a tenth of a second each."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from milpplan.studies import Row
from milpplan.studies.grid import Study, cells, study_of
from milpplan.studies.outcomes import solved
from milpplan.studies.store import Sweep

QUICK = """
name = "quick"

[grid]
model = ["llama2-7b"]
hardware = ["dgx-h100"]
num_gpus = [4, 8]
global_batch_size = [32, 64]
space = ["uniform"]
fixed = [{ tp = 1, zero_stage = 1 }]

[[what_if]]
name = "memory"
path = "accelerator.memory_bytes"
multiply = [1, 0.5, 0.2]

[prices]
dgx-h100 = 3.0
"""
"""Twelve cells; those with a fifth of the memory have no plan."""


def study(**changes: Any) -> Study:
    """The quick study with fields changed; ``grid__num_gpus`` stands for ``grid.num_gpus``."""
    return study_of(tree(**changes), "study")


def tree(**changes: Any) -> dict[str, Any]:
    """The same as plain data."""
    data: dict[str, Any] = {
        "name": "quick",
        "grid": {
            "model": ["llama2-7b"],
            "hardware": ["dgx-h100"],
            "num_gpus": [4, 8],
            "global_batch_size": [32, 64],
            "space": ["uniform"],
            "fixed": [{"tp": 1, "zero_stage": 1}],
        },
        "what_if": [{"name": "memory", "path": "accelerator.memory_bytes", "multiply": [1, 0.5, 0.2]}],
        "prices": {"dgx-h100": 3.0},
    }
    for name, value in changes.items():
        *sections, last = name.split("__")
        place = data
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = copy.deepcopy(value)
    return data


def sweep(wanted: Study) -> Sweep:
    """The study with its cells, nothing solved."""
    return Sweep(wanted, cells(wanted, Path()))


def solved_here(wanted: Study) -> Sweep:
    """The study solved in this process, one cell after another."""
    made = sweep(wanted)
    made.outcomes = {task.key: solved(task) for task in made.open_tasks}
    return made


def reproducible(table: list[Row]) -> list[Row]:
    """The table without its wall times."""
    return [{name: value for name, value in row.items() if name != "wall_time_s"} for row in table]
