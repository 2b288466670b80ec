"""Filter that applies rules to tables of layouts and counts the rejections of each rule."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import ValidationError

from milpplan.errors import InvalidInputError
from milpplan.optimize.space.execution_rules import Rule
from milpplan.optimize.space.product import Columns, ProductTable
from milpplan.problem.plan import Layout
from milpplan.problem.problem import Problem
from milpplan.problem.reading import plain_reason, shown
from milpplan.simulation.layout_columns import BoolArray, IntArray, column_value

STANDS_FOR = "stands_for"


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
