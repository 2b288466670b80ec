"""Cartesian products of tables of layouts during the enumeration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from milpplan.simulation.layout_columns import BoolArray, IntArray

Columns = dict[str, IntArray]


@dataclass(frozen=True, slots=True)
class ProductTable(Mapping[str, IntArray]):
    """Rows crossed with new columns, most of which rules are about to drop.

    The old columns are read on demand, through ``base_rows`` (None: unchanged).
    """

    base: Columns
    base_rows: IntArray | None
    new_columns: Columns

    def __getitem__(self, name: str) -> IntArray:
        if name in self.new_columns:
            return self.new_columns[name]
        return self.base[name] if self.base_rows is None else self.base[name].take(self.base_rows)

    def __iter__(self) -> Iterator[str]:
        return iter([*self.base, *self.new_columns])

    def __len__(self) -> int:
        return len(self.base) + len(self.new_columns)

    def where(self, legal: BoolArray) -> ProductTable:
        """Return the rows of a mask."""
        rows = np.flatnonzero(legal)
        base_rows = rows if self.base_rows is None else self.base_rows[rows]
        return ProductTable(
            self.base, base_rows, {name: values[rows] for name, values in self.new_columns.items()}
        )


def cross(columns: Mapping[str, IntArray], name: str, values: IntArray) -> ProductTable:
    """Cross every row with every value of a new column."""
    length = len(next(iter(columns.values())))
    rows = np.repeat(np.arange(length), len(values))
    return _through(columns, rows, {name: np.tile(np.asarray(values, dtype=np.int64), length)})


def expand(
    columns: Mapping[str, IntArray], name: str, options: dict[int, IntArray], key: IntArray
) -> ProductTable:
    """Cross every row with the values of a new column that ``options`` has for the row's ``key``."""
    values, inverse = np.unique(key, return_inverse=True)
    chosen = [options[int(value)] for value in values]
    sizes = np.array([len(option) for option in chosen], dtype=np.int64)
    starts, counts = np.cumsum(sizes) - sizes, sizes[inverse]
    rows = np.repeat(np.arange(len(key)), counts)
    number = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    flat = np.concatenate([*chosen, np.zeros(0, dtype=np.int64)])
    return _through(columns, rows, {name: flat[starts[inverse][rows] + number]})


def _through(columns: Mapping[str, IntArray], rows: IntArray, new_columns: Columns) -> ProductTable:
    if isinstance(columns, ProductTable):
        before = rows if columns.base_rows is None else columns.base_rows[rows]
        return ProductTable(
            columns.base,
            before,
            {name: values[rows] for name, values in columns.new_columns.items()} | new_columns,
        )
    return ProductTable(dict(columns), rows, new_columns)
