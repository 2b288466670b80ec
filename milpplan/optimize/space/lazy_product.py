"""Lazy products: layouts as products of choices, each listed once for many blocks.

The switches of a block depend only on its degrees (and on the transfers between its stages), its virtual stages
and schedules only on its stages and micro-batches. So rules are applied to rows that stand for many layouts, and
count for all of these. A rule on several factors of the product splits a block where necessary (``apply_rules``).
The product itself is never listed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from milpplan.optimize.space.layout_space import (
    Alike,
    Choices,
    Columns,
    ProductTable,
    Rule,
    RuleFilter,
    cross,
    within,
)
from milpplan.optimize.space.rules import TRANSFER_DOMINANCE
from milpplan.problem import Problem
from milpplan.simulation import BoolArray, IntArray, unique_rows
from milpplan.simulation.layout_columns import taken

MAX_ROWS = 1_000_000
"""Maximum number of combinations to which a rule is applied at once."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks with their choices.

    ``columns`` has one row a block. Each family of a block has one of its ``switches`` and one of its ``stages``,
    each layout one of its ``shardings``.
    """

    columns: Columns
    switches: Choices
    stages: Choices
    shardings: Choices

    @staticmethod
    def of_families(columns: Columns, switches: Collection[str], stages: Collection[str]) -> Blocks:
        """Make every family a block; ``switches`` and ``stages`` name the columns that become its choices."""
        columns_of_blocks = {name: values for name, values in columns.items() if name not in (*switches, *stages)}
        none = Choices.none(len(columns["tp"]))
        return Blocks(
            columns_of_blocks, Choices.of_rows(columns, switches), Choices.of_rows(columns, stages), none
        )

    @staticmethod
    def joined(parts: Sequence[Blocks]) -> Blocks:
        """Concatenate blocks, those with replicas first; a column that some lack is 0 there."""
        names = dict.fromkeys(name for part in parts for name in part.columns)
        columns = {
            name: np.concatenate(
                [part.columns.get(name, np.zeros_like(part.columns["tp"])) for part in parts],
            )
            for name in names
        }
        order = np.argsort(columns["cp"] * columns["dp"] == 1, kind="stable")
        factors = (Choices.joined(own).of(order) for own in zip(*(part.factors for part in parts), strict=True))
        return Blocks({name: values[order] for name, values in columns.items()}, *factors)

    @property
    def factors(self) -> tuple[Choices, Choices, Choices]:
        """Choices of a block."""
        return self.switches, self.stages, self.shardings

    @property
    def num_families(self) -> IntArray:
        """Number of families of each block, [b]."""
        return np.asarray(self.switches.counts * self.stages.counts)


def apply_rules(rule_filter: RuleFilter, blocks: Blocks, rules: Mapping[str, Rule]) -> Blocks:
    """Drop layouts that rules forbid and count them by rule, whatever columns and choices a rule reads.

    A rule is evaluated once for all layouts that agree in the columns that it reads. Where the rest of a block is
    not one product of choices, the block becomes several with the same columns.
    """
    for name, rule in rules.items():
        if name not in rule_filter.without:
            blocks, lost = _without(rule_filter, blocks, rule)
            rule_filter.rejected[name] = rule_filter.rejected.get(name, 0) + lost
    return blocks


def _without(rule_filter: RuleFilter, blocks: Blocks, rule: Rule) -> tuple[Blocks, int]:
    """Drop the layouts that a rule forbids. Returns the remaining blocks and the number of dropped layouts."""
    read: list[str] = []
    while True:
        try:
            return _Classes.of(blocks, read).apply(rule_filter, rule)
        except NotReadError as missing:
            read.append(missing.name)


class NotReadError(Exception):
    """Raised when a rule reads a column that its table leaves out."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class ReadableColumns(Mapping[str, IntArray]):
    """Some columns of a table; reading one of the ``others`` raises ``NotReadError``."""

    def __init__(self, columns: Mapping[str, IntArray], others: Collection[str]) -> None:
        self.columns, self.others = columns, [name for name in others if name not in columns]

    def __getitem__(self, name: str) -> IntArray:
        if name in self.others:
            raise NotReadError(name)
        return self.columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self.columns or name in self.others

    def __iter__(self) -> Iterator[str]:
        return iter([*self.columns, *self.others])

    def __len__(self) -> int:
        return len(self.columns) + len(self.others)


def apply_ready(
    rule_filter: RuleFilter, table: ProductTable, rules: dict[str, Rule], others: Collection[str], stand_for: int
) -> ProductTable:
    """Drop the rows that those rules forbid which read none of ``others``, columns that the table lacks.

    These rules are removed from ``rules``. Every row stands for ``stand_for`` rows.
    """
    for name, rule in [*rules.items()]:

        def readable(problem: Problem, columns: Mapping[str, IntArray], rule: Rule = rule) -> BoolArray:
            return rule(problem, ReadableColumns(columns, others))

        with suppress(NotReadError):
            table = rule_filter.apply(table, {name: readable}, stand_for)
            del rules[name]
    return table


@dataclass(frozen=True, slots=True)
class _Axis:
    """Factor of the product that a rule reads: its number, its choices grouped by the columns read, and the list
    of each block."""

    number: int
    factor: Choices
    alike: Alike
    lists: IntArray


@dataclass(frozen=True, slots=True)
class _Classes:
    """Blocks in classes that look equal to a rule.

    ``first`` [c]: a block of each class. ``key`` [b]: class of each block. ``axes``: factors of which the rule
    reads columns.
    """

    blocks: Blocks
    names: Sequence[str]
    axes: Sequence[_Axis]
    first: IntArray
    key: IntArray

    @staticmethod
    def of(blocks: Blocks, names: Sequence[str]) -> _Classes:
        """Make the classes for the columns of some names."""
        axes = []
        for number, factor in enumerate(blocks.factors):
            names_read = [name for name in names if name in factor.table]
            if names_read:
                axes.append(_Axis(number, factor, factor.alike(names_read), factor.lists()[3]))
        columns = [blocks.columns[name] for name in names if name in blocks.columns]
        same = np.zeros(len(blocks.columns["tp"]), dtype=np.int64)
        return _Classes(blocks, names, axes, *unique_rows(same, *columns, *(axis.lists for axis in axes)))

    def apply(self, rule_filter: RuleFilter, rule: Rule) -> tuple[Blocks, int]:
        """Drop the layouts that the rule forbids. Returns the remaining blocks and the number of
        dropped layouts."""
        counts = [axis.alike.choices.counts[self.first] for axis in self.axes]
        sizes = np.prod([np.ones_like(self.first), *counts], axis=0)
        stand_for, lost = self._stand_for(), 0
        remainder = _Remainder([axis.factor for axis in self.axes], len(self.first))
        ends = np.cumsum(sizes)
        start = 0
        while start < len(sizes):
            rule_filter.check_time(len(self.key))
            before = ends[start] - sizes[start]
            end = max(start + 1, int(np.searchsorted(ends, before + MAX_ROWS, side="right")))
            number, position = within(sizes[start:end])
            rows = self._rows(start + number, position, [count[start:end][number] for count in counts])
            legal = self._ask(rule_filter.problem, rule, start + number, rows)
            if not legal.all():
                weights = stand_for[start + number[~legal]]
                for axis, row in zip(self.axes, rows, strict=True):
                    weights = weights * axis.alike.counts[row[~legal]]
                lost += int(weights.sum())
                self._store_remainder(
                    remainder, start, np.bincount(number, legal, end - start), sizes[start:end], legal
                )
            start = end
        return (remainder.of(self.blocks, self.key, self.axes) if lost else self.blocks), lost

    def _stand_for(self) -> IntArray:
        """Return the number of layouts per combination of each class, apart from the factors read, [c]."""
        others = np.ones(len(self.key), dtype=np.int64)
        for number, factor in enumerate(self.blocks.factors):
            if all(axis.number != number for axis in self.axes):
                others = others * factor.counts
        counts = np.zeros(len(self.first), dtype=np.int64)
        np.add.at(counts, self.key, others)
        return counts

    def _rows(self, number: IntArray, position: IntArray, counts: list[IntArray]) -> list[IntArray]:
        """Return rows of the axes' tables, one array an axis, for combinations given by class and
        position in it."""
        rows = []
        for axis, count in zip(reversed(self.axes), reversed(counts), strict=True):
            rows.append(axis.alike.choices.starts[self.first[number]] + position % count)
            position = position // count
        return rows[::-1]

    def _ask(self, problem: Problem, rule: Rule, number: IntArray, rows: list[IntArray]) -> BoolArray:
        """Mask the combinations that the rule allows, given by class and rows of the axes' tables."""
        names = {*self.names}
        columns = {n: v[self.first[number]] for n, v in self.blocks.columns.items() if n in names}
        others = list(self.blocks.columns)
        for axis, row in zip(self.axes, rows, strict=True):
            columns |= {name: values[row] for name, values in axis.alike.choices.table.items()}
        for factor in self.blocks.factors:
            others += factor.table
        return np.broadcast_to(
            np.asarray(rule(problem, ReadableColumns(columns, others)), dtype=np.bool_), len(number)
        )

    def _store_remainder(
        self, remainder: _Remainder, start: int, allowed: IntArray, sizes: IntArray, legal: BoolArray
    ) -> None:
        """Store what remains of the classes from ``start`` on, given the number of allowed
        combinations of each."""
        ends = np.cumsum(sizes)
        remainder.num_parts[start + np.flatnonzero((allowed == 0) & (sizes > 0))] = 0
        for index in np.flatnonzero((allowed > 0) & (allowed < sizes)).tolist():
            block = self.first[start + index]
            lists = tuple(int(axis.lists[block]) for axis in self.axes)
            remainder.note(start + index, block, lists, legal[ends[index] - sizes[index] : ends[index]], self.axes)


class _Remainder:
    """Remainder of classes of blocks: unchanged where ``first_part`` is negative, else parts with lists of their
    own on some axes."""

    def __init__(self, factors: list[Choices], classes: int) -> None:
        self.num_parts = np.ones(classes, dtype=np.int64)
        self.first_part = np.full(classes, -1)
        self.known_parts: dict[tuple[tuple[int, ...], bytes], tuple[int, int]] = {}
        self.parts: list[tuple[int, ...]] = []
        self.lists: list[dict[tuple[int, bytes], int]] = [{} for _ in factors]
        self.rows: list[list[IntArray]] = [[] for _ in factors]

    def note(
        self, number: int, block: int, lists: tuple[int, ...], legal: BoolArray, axes: Sequence[_Axis]
    ) -> None:
        """Store the parts of a class; classes with equal lists and equal legal combinations share them."""
        key = lists, legal.tobytes()
        if key not in self.known_parts:
            shape = [int(axis.alike.choices.counts[block]) for axis in axes]
            parts = [
                tuple(
                    self._list(axis_index, axis, block, members)
                    for axis_index, (axis, members) in enumerate(zip(axes, box, strict=True))
                )
                for box in boxes(legal.reshape(shape))
            ]
            self.known_parts[key] = len(self.parts), len(parts)
            self.parts += parts
        self.first_part[number], self.num_parts[number] = self.known_parts[key]

    def _list(self, axis_index: int, axis: _Axis, block: int, members: IntArray) -> int:
        """Return the number of a new list of some rows of an axis; -1 where it is the block's whole list."""
        alike = axis.alike
        if len(members) == alike.choices.counts[block]:
            return -1
        key = int(axis.lists[block]), members.tobytes()
        if key not in self.lists[axis_index]:
            rows = alike.choices.starts[block] + members
            members_of_rows = [
                alike.members[start : start + count]
                for start, count in zip(alike.starts[rows], alike.counts[rows], strict=True)
            ]
            self.lists[axis_index][key] = len(self.rows[axis_index])
            self.rows[axis_index].append(axis.factor.starts[block] + np.sort(np.concatenate(members_of_rows)))
        return self.lists[axis_index][key]

    def of(self, blocks: Blocks, key: IntArray, axes: Sequence[_Axis]) -> Blocks:
        """Return the remaining blocks; ``key`` [b] is the class of each block."""
        source, position = within(self.num_parts[key])
        first = self.first_part[key[source]]
        parts = np.array([*self.parts, (-1,) * len(axes)], dtype=np.int64)
        part = parts[np.where(first < 0, len(parts) - 1, first + position)]
        factors = [factor.of(source) for factor in blocks.factors]
        for number, axis in enumerate(axes):
            factors[axis.number] = _with_lists(factors[axis.number], self.rows[number], part[:, number])
        return Blocks({name: taken(values, source) for name, values in blocks.columns.items()}, *factors)


def _with_lists(choices: Choices, rows: list[IntArray], chosen: IntArray) -> Choices:
    """Return the choices with other lists for some blocks: ``chosen`` [b] indexes ``rows``, -1 keeps
    the old list."""
    if not rows:
        return choices
    table = {
        name: np.concatenate([values, values[np.concatenate(rows)]]) for name, values in choices.table.items()
    }
    counts = np.array([len(list_rows) for list_rows in rows], dtype=np.int64)
    starts = choices.size + np.cumsum(counts) - counts
    new = chosen >= 0
    return Choices(
        table, np.where(new, starts[chosen], choices.starts), np.where(new, counts[chosen], choices.counts)
    )


def boxes(legal: npt.NDArray[np.bool_]) -> list[tuple[IntArray, ...]]:
    """Cut the legal part of a product into products of indices per axis.

    Indices of the first axis that allow the same combinations of the others form one product.
    """
    if not legal.ndim:
        return [()] if legal else []
    products = []
    patterns: dict[bytes, list[int]] = {}
    for index, slice_ in enumerate(legal):
        patterns.setdefault(slice_.tobytes(), []).append(index)
    for indices in patterns.values():
        products += [(np.array(indices, dtype=np.int64), *box) for box in boxes(legal[indices[0]])]
    return products


def without_slower_transfers(rule_filter: RuleFilter, blocks: Columns, switches: Choices) -> Choices:
    """Return the switches of every block without transfers that are dominated by a twin
    (``TRANSFER_DOMINANCE``)."""
    size, values = len(blocks["tp"]), np.arange(2)
    crossed = cross(cross(blocks, "sequence_parallel", values), "pp_scatter_gather", values)
    legal = np.ones((size, 4), dtype=np.bool_)
    for name, rule in TRANSFER_DOMINANCE.items():
        rule_filter.rejected.setdefault(name, 0)
        if name not in rule_filter.without:
            legal &= np.asarray(rule(rule_filter.problem, crossed)).reshape(size, 4)
    if legal.all():
        return switches
    rows, list_of_row, first, group = switches.lists(*legal.T)
    pair = 2 * switches.table["sequence_parallel"] + switches.table["pp_scatter_gather"]
    keep = legal[first[list_of_row], pair[rows]]
    table = {name: values[rows[keep]] for name, values in switches.table.items()}
    remaining = Choices.listed(table, list_of_row[keep], len(first), group)
    (name,) = TRANSFER_DOMINANCE
    rule_filter.rejected[name] += int(switches.counts.sum() - remaining.counts.sum())
    return remaining
