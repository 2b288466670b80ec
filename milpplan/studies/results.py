"""The files of a sweep: the table, the plans, and one HTML page of figures that needs no network."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Final

from milpplan.errors import InvalidInputError
from milpplan.problem.problem import Problem
from milpplan.reports.documents.plan_file import PlanFile
from milpplan.reports.files import write_whole
from milpplan.studies.grid import Cell
from milpplan.studies.records import Study
from milpplan.studies.store import PLANS, Sweep
from milpplan.studies.tables import Row, column_types, csv_text, parquet_bytes
from milpplan.units import counted
from milpplan.version import __version__

STYLE: Final = (
    "body{font-family:system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}"
    "h2{margin-top:2em}p{line-height:1.45;max-width:52em}"
)
NOTES: Final = {
    "scaling": (
        "Scaling",
        "Each line is one job on more and more GPUs, with the best plan for each number of them. Dotted: "
        "throughput in proportion to GPUs. Efficiency is throughput per GPU over that of the line's smallest "
        "number of GPUs; more GPUs leave more memory to each, so it can exceed 100 %. A number of GPUs without a "
        "point has no plan that fits in memory. Names of lines tell which what-ifs are not in their first case; a "
        "click on a name hides or shows its line.",
    ),
    "pareto": (
        "Time, cost and memory",
        "Each point is one cell of the study with its best plan: left is faster, low is cheaper, colour is "
        "memory. Outlined points are beaten by no other in time, cost and peak memory together; the line joins "
        "those that none beats in time and cost. Batch sizes are compared as if they trained equally well: they "
        "may not.",
    ),
    "sensitivity": (
        "Sensitivity",
        "Each bar changes one thing and keeps all others: the median change of throughput per GPU over all pairs "
        "of cells that differ in it alone, each with its own best plan; whiskers reach from the least to the "
        "greatest change. Pairs in which only one side has a plan that fits are counted beside the name.",
    ),
}


def page(study: Study, table: Sequence[Row]) -> str:
    """Build the page.

    Raises:
        InvalidInputError: plotly is not installed.
    """
    try:
        import plotly  # noqa: F401
    except ImportError as error:
        raise InvalidInputError(
            "report.html needs plotly, which is not installed.",
            "Expected the Python package plotly; results.csv has the numbers.",
            "Install it with pip install 'milpplan[report]' and run the same command: nothing is solved again.",
        ) from error
    from milpplan.studies.figures import pareto_figure, scaling_figure, sensitivity_figure

    parts = [_head(study, table)]
    if any(row["tokens_per_s"] is not None for row in table):
        figures = {
            "scaling": scaling_figure(study, table),
            "pareto": pareto_figure(study, table),
            "sensitivity": sensitivity_figure(table),
        }
        for i, (name, figure) in enumerate(figures.items()):
            title, note = NOTES[name]
            # The first figure includes the library for all.
            drawn = figure.to_html(full_html=False, include_plotlyjs=not i, div_id=name)
            parts.append(f"<h2>{title}</h2>\n<p>{note}</p>\n{drawn}")
    else:
        parts.append("<p>No cell has a plan: there is nothing to draw. The table says why for each.</p>")
    return "\n".join([*parts, "</body></html>\n"])


def _head(study: Study, table: Sequence[Row]) -> str:
    """Build the head of the page: title and counts of the statuses."""
    counts = Counter(str(row["status"]).replace("_", " ") for row in table)
    summary = ", ".join(f"{number:,} {status}" for status, number in sorted(counts.items()))
    name = escape(study.name)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{STYLE}</style></head><body>\n<h1>{name}</h1>\n"
        f"<p>{counted(len(table), 'cell')}: {summary}. <b>Optimal</b>: no plan of the declared space is "
        f"faster by more "
        f"than {study.solve.gap:g} (relative) under the cost model of milpplan {__version__}. <b>Infeasible</b>: "
        "proved that no plan fits. All numbers, and the plan of every cell, are in the files beside this page.</p>"
    )


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
