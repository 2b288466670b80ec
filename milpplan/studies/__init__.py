"""Studies: many planning problems from one file, solved in parallel, with tables and figures of the results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.studies.cell_table import Row, column_types, csv_text, parquet_bytes, rows
    from milpplan.studies.results import effects, front, page, scaling_lines, write_results
else:
    __getattr__ = lazy_exports(__name__, __file__)
