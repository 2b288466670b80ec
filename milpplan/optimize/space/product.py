"""Tables of layouts while they are enumerated: every row with several values of a new column."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from milpplan.simulation.layout_columns import BoolArray, IntArray

Columns = dict[str, IntArray]


@dataclass(frozen=True, slots=True)
class ProductTable(Mapping[str, IntArray]):
    """Rows with several values of new columns, most of which rules are about to drop: the old columns are read
    through ``place`` (None: as they are) when they are asked for."""

    base: Columns
    place: IntArray | None
    own: Columns

    def __getitem__(self, name: str) -> IntArray:
        if name in self.own:
            return self.own[name]
        return self.base[name] if self.place is None else self.base[name].take(self.place)

    def __iter__(self) -> Iterator[str]:
        return iter([*self.base, *self.own])

    def __len__(self) -> int:
        return len(self.base) + len(self.own)

    def where(self, legal: BoolArray) -> ProductTable:
        """The rows of a mask."""
        rows = np.flatnonzero(legal)
        place = rows if self.place is None else self.place[rows]
        return ProductTable(self.base, place, {name: values[rows] for name, values in self.own.items()})


def cross(columns: Mapping[str, IntArray], name: str, values: IntArray) -> ProductTable:
    """Every row with every value of a new column."""
    length = len(next(iter(columns.values())))
    place = np.repeat(np.arange(length), len(values))
    return _through(columns, place, {name: np.tile(np.asarray(values, dtype=np.int64), length)})


def expand(
    columns: Mapping[str, IntArray], name: str, options: dict[int, IntArray], key: IntArray
) -> ProductTable:
    """Every row with the values of a new column that ``options`` has for the row's ``key``."""
    values, inverse = np.unique(key, return_inverse=True)
    chosen = [options[int(value)] for value in values]
    sizes = np.array([len(option) for option in chosen], dtype=np.int64)
    starts, counts = np.cumsum(sizes) - sizes, sizes[inverse]
    place = np.repeat(np.arange(len(key)), counts)
    number = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
    flat = np.concatenate([*chosen, np.zeros(0, dtype=np.int64)])
    return _through(columns, place, {name: flat[starts[inverse][place] + number]})


def _through(columns: Mapping[str, IntArray], place: IntArray, own: Columns) -> ProductTable:
    if isinstance(columns, ProductTable):
        before = place if columns.place is None else columns.place[place]
        return ProductTable(
            columns.base, before, {name: values[place] for name, values in columns.own.items()} | own
        )
    return ProductTable(dict(columns), place, own)
