"""The results of a study as a table, one row a cell, as CSV and Parquet."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any, Final

from milpplan.errors import InvalidInputError
from milpplan.problem import Layout
from milpplan.studies.grid import GRID_AXES, Cell, Study
from milpplan.studies.outcomes import Outcome
from milpplan.studies.store import Sweep
from milpplan.units import TRILLION, gpu_hours

Value = str | int | float | bool | None
Row = dict[str, Value]

WHAT_IF: Final = "what_if."
LAYOUT: Final = "layout."
LAYOUT_FIELDS: Final = tuple(name for name in Layout.model_fields if name != "global_batch_size")
MEASURES: Final = {
    "status": "string",
    "step_time_s": "float64",
    "lower_bound_s": "float64",
    "gap": "float64",
    "tokens_per_s": "float64",
    "mfu": "float64",
    "peak_memory_bytes": "int64",
    "usable_memory_bytes": "int64",
    "least_memory_bytes": "float64",
}
"""Columns taken from an outcome, with their types."""
DERIVED: Final = {
    "full_recompute_layers": "int64",
    "selective_recompute_layers": "int64",
    "gpu_hours_per_trillion_tokens": "float64",
    "price_per_gpu_hour": "float64",
    "cost_per_trillion_tokens": "float64",
    "message": "string",
    "key": "string",
    "wall_time_s": "float64",
}


def column_types(study: Study) -> dict[str, str]:
    """Return every column of a study's table with its type, in order."""
    coordinates = dict.fromkeys(GRID_AXES, "string") | {"sequence_length": "int64"}
    what_ifs = {f"{WHAT_IF}{axis.name}": "string" for axis in study.what_if}
    sizes = {"num_gpus": "int64", "global_batch_size": "int64"}
    layout = {f"{LAYOUT}{name}": _layout_type(name) for name in LAYOUT_FIELDS}
    return {"cell": "int64"} | coordinates | what_ifs | sizes | MEASURES | layout | DERIVED


def _layout_type(name: str) -> str:
    """Return the type of a column of the layout."""
    default = Layout.model_fields[name].default
    return "bool" if isinstance(default, bool) else "int64" if isinstance(default, int) else "string"


def rows(sweep: Sweep) -> list[Row]:
    """Build one row for every decided cell, in the order of the cells."""
    table = []
    for cell in sweep.cells:
        outcome = sweep.outcome(cell)
        if outcome is not None:
            table.append(_row(sweep.study, cell, outcome))
    return table


def _row(study: Study, cell: Cell, outcome: Outcome) -> Row:
    """Build the row of a cell."""
    what_ifs = {axis.name for axis in study.what_if}
    row: Row = dict.fromkeys(column_types(study))
    row["cell"] = cell.number
    row |= {f"{WHAT_IF}{name}" if name in what_ifs else name: word for name, word in cell.words.items()}
    row |= {name: getattr(outcome, name) for name in (*MEASURES, "message", "key", "wall_time_s")}
    row["price_per_gpu_hour"] = cell.price_per_gpu_hour
    if outcome.plan is not None:
        layout = outcome.plan.layout.model_dump(mode="json")
        row |= {f"{LAYOUT}{name}": _simple(layout[name]) for name in LAYOUT_FIELDS}
        recomputes = [recompute for stage in outcome.plan.stages for recompute in stage.recomputes]
        row["full_recompute_layers"] = sum(recompute.full for recompute in recomputes)
        row["selective_recompute_layers"] = sum(recompute.selective for recompute in recomputes)
    if outcome.tokens_per_s:
        hours = gpu_hours(int(cell.words["num_gpus"]), TRILLION, outcome.tokens_per_s)
        row["gpu_hours_per_trillion_tokens"] = hours
        price = cell.price_per_gpu_hour
        row["cost_per_trillion_tokens"] = None if price is None else hours * price
    return row


def _simple(value: Any) -> Value:
    """Return a field of a layout, a list or table as text."""
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def what_if_words(study: Study, row: Row) -> str:
    """Name the changes of a row's hardware: what-ifs that are not in their first case; empty if there are none."""
    first = {axis.name: axis.all_cases[0].name for axis in study.what_if}
    changed = {name: row[f"{WHAT_IF}{name}"] for name in first}
    return ", ".join(f"{name}: {case}" for name, case in changed.items() if case != first[name])


def csv_text(table: Iterable[Row], columns: Iterable[str]) -> str:
    """Write the table as CSV: floats with all their digits, missing values empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(columns), lineterminator="\n")
    writer.writeheader()
    for row in table:
        writer.writerow(
            {name: str(value).lower() if isinstance(value, bool) else value for name, value in row.items()}
        )
    return out.getvalue()


def parquet_bytes(table: list[Row], types: dict[str, str]) -> bytes:
    """Write the table as a Parquet file.

    Raises:
        InvalidInputError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise InvalidInputError(
            "results.parquet needs pyarrow, which is not installed.",
            "Expected the Python package pyarrow; results.csv has the same table.",
            "Install it with pip install -e '.[study]' and run the same command: nothing is solved again.",
        ) from error
    schema = pa.schema(
        [(name, getattr(pa, "bool_" if kind == "bool" else kind)()) for name, kind in types.items()]
    )
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(table, schema=schema), out)
    return out.getvalue()
