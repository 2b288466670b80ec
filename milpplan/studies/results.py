"""The files of a sweep: the table, the plans and the page of figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

from milpplan.errors import InvalidInputError
from milpplan.problem.problem import Problem
from milpplan.reports.documents.plan_file import PlanFile
from milpplan.reports.files import write_whole
from milpplan.studies.grid import Cell
from milpplan.studies.page import page
from milpplan.studies.running import Sweep
from milpplan.studies.store import PLANS
from milpplan.studies.tables import Row, column_types, csv_text, parquet_bytes

TABLE: Final = "results.csv"
PARQUET: Final = "results.parquet"
PAGE: Final = "report.html"


def write_results(sweep: Sweep, directory: Path, table: list[Row]) -> tuple[list[Path], list[InvalidInputError]]:
    """Write all result files. Returns the paths written, and the errors for files whose package is missing."""
    types = column_types(sweep.study)
    contents: dict[str, Callable[[], str | bytes]] = {
        TABLE: lambda: csv_text(table, types),
        PARQUET: lambda: parquet_bytes(table, types),
        PAGE: lambda: page(sweep.study, table),
    }
    written, missing = [], []
    for name, content in contents.items():
        try:
            data = content()
        except InvalidInputError as error:
            # An older file would contradict the new table.
            (directory / name).unlink(missing_ok=True)
            missing.append(error)
            continue
        write_whole(directory / name, data)
        written.append(directory / name)
    return [*written, write_plans(sweep, directory / PLANS)], missing


def write_plans(sweep: Sweep, directory: Path) -> Path:
    """Write one plan file for every cell with a plan, for ``milpplan simulate``; delete other plan files."""
    directory.mkdir(exist_ok=True)
    digits = len(str(len(sweep.cells)))
    names = set()
    for cell in sweep.cells:
        outcome = sweep.outcome(cell)
        if outcome is None or outcome.plan is None or cell.problem is None:
            continue
        file = PlanFile(plan=outcome.plan, problem=_named(sweep, cell, cell.problem))
        path = directory / f"cell-{cell.number:0{digits}}.json"
        names.add(path.name)
        text = json.dumps(file.model_dump(mode="json")) + "\n"
        if not path.is_file() or path.read_bytes() != text.encode():
            write_whole(path, text)
    for path in directory.glob("cell-*.json"):
        if path.name not in names:
            path.unlink()
    return directory


def _named(sweep: Sweep, cell: Cell, problem: Problem) -> Problem:
    """Rename the changed hardware after its changes, so that it is not mistaken for the real hardware."""
    changes = [
        f"{axis.name}: {cell.words[axis.name]}"
        for axis, cases in ((axis, axis.all_cases) for axis in sweep.study.what_if)
        if any(case.name == cell.words[axis.name] and case.changes_something for case in cases)
    ]
    if not changes:
        return problem
    name = f"{problem.hardware.name} ({'; '.join(changes)})"[:200]
    return problem.model_copy(update={"hardware": problem.hardware.model_copy(update={"name": name})})
