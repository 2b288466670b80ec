"""Cartesian products of tables of layouts, and the filter that applies rules to them and counts the rejections."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import ValidationError

from milpplan.errors import InvalidInputError
from milpplan.problem import Layout, Problem
from milpplan.problem.reading import plain_reason, shown
from milpplan.simulation import BoolArray, IntArray, column_value

Columns = dict[str, IntArray]
Rule = Callable[[Problem, Mapping[str, IntArray]], BoolArray]
"""Function of a problem and a table of layouts: the mask of the rows that it keeps, [n]."""
Stop = Callable[[], bool]
"""Callable that returns True once time is up."""
SMALL_TABLE = 100_000
"""Maximum number of rows to which rules are applied without a look at the clock."""
STANDS_FOR = "stands_for"


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

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(next(iter(self.base.values()))) if self.base_rows is None else len(self.base_rows)

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


def num_rows(columns: Mapping[str, IntArray]) -> int:
    """Return the number of rows of a table, or the number of rows that they stand for."""
    if STANDS_FOR in columns:
        return int(columns[STANDS_FOR].sum())
    return len(columns[next(iter(columns))])


@dataclass(slots=True)
class RuleFilter:
    """Drops rows that rules forbid, and counts them by rule."""

    problem: Problem
    rejected: dict[str, int] = field(default_factory=dict)
    enumerated: int = 0
    without: Collection[str] = ()
    """Rules that are not applied."""
    stop: Stop | None = None

    def check_time(self, rows: int) -> None:
        """Raise KeyboardInterrupt, as at Ctrl-C, before rules on so many rows once time is up.

        Small spaces are listed whole, so that what their rules refuse does not depend on the clock.
        """
        if rows > SMALL_TABLE and self.stop is not None and self.stop():
            raise KeyboardInterrupt

    def keep(self, columns: Mapping[str, IntArray], rules: Mapping[str, Rule]) -> Columns:
        """Drop the rows that a rule forbids; the first rule that rejects a row gets the count."""
        self.enumerated += num_rows(columns)
        return dict(self.apply(columns, rules))

    def apply(
        self, columns: Mapping[str, IntArray], rules: Mapping[str, Rule], stand_for: int = 1
    ) -> ProductTable:
        """Drop forbidden rows that stand for ``stand_for`` rows each, without counting them as enumerated.

        A column ``STANDS_FOR`` gives a further factor for each row.
        """
        rows = columns if isinstance(columns, ProductTable) else ProductTable(dict(columns), None, {})
        for name, rule in rules.items():
            if name in self.without:
                continue
            self.check_time(rows.size)
            legal = np.asarray(rule(self.problem, rows))
            rejects = not legal.all()
            num_rejected = num_rows(rows.where(~legal)) if rejects else 0
            self.rejected[name] = self.rejected.get(name, 0) + num_rejected * stand_for
            if rejects:
                rows = rows.where(legal)
        return rows


def check_forbidden(forbidden: Collection[Mapping[str, Any]]) -> None:
    """Refuse partial layouts with fields or values that no layout has.

    Raises:
        InvalidInputError: names the field, and its admissible values.
    """
    for partial in forbidden:
        unknown = set(partial) - set(Layout.model_fields)
        if unknown or not partial:
            raise InvalidInputError(
                f"forbid names {sorted(unknown) or 'nothing'}.",
                f"Expected fields of a layout: {', '.join(Layout.model_fields)}.",
                "Check the spelling.",
            )
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in partial.items()}
        try:
            Layout.model_validate({"global_batch_size": 1} | values, strict=True)
        except ValidationError as error:
            finding = error.errors(include_url=False)[0]
            said = f" {finding['loc'][0]}={shown(partial[str(finding['loc'][0])])}" if finding["loc"] else ""
            raise InvalidInputError(
                f"forbid{said} makes no sense: {plain_reason(finding)}.",
                "Expected values that a layout can have.",
                "Correct the value; `milpplan schema plan` describes the fields of a layout.",
            ) from error


def not_forbidden(c: Mapping[str, IntArray], forbidden: tuple[Mapping[str, Any], ...]) -> BoolArray:
    """Mask the rows that match no partial layout of the caller's list, [n]."""
    keep = np.ones(len(c["tp"]), dtype=np.bool_)
    for partial in forbidden:
        hit = np.ones_like(keep)
        for name, value in partial.items():
            hit &= c[name] == column_value(name, value)
        keep &= ~hit
    return keep
