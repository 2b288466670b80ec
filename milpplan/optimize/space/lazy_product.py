"""Layouts as products: what is chosen in a block of them is listed once for many blocks.

Which switches a block may have depends on its degrees alone, but for the transfers between its stages, and which
virtual stages and schedules on its stages and micro-batches. So rules are applied to rows that stand for many, and
are counted for all of these. Rules on several factors of the product split a block where they have to
(``sifted``): the product itself is never listed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from milpplan.optimize.space.execution_rules import TRANSFER_DOMINANCE, Rule
from milpplan.optimize.space.layout_space import Alike, Choices, within
from milpplan.optimize.space.product import Columns, cross
from milpplan.optimize.space.rule_filter import RuleFilter
from milpplan.problem.problem import Problem
from milpplan.simulation.layout_columns import BoolArray, IntArray, taken, unique_rows

MAX_ROWS = 1_000_000
"""Most combinations that a rule is asked about at once."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """``columns`` has one row a block; each family of it has one of its ``switches`` and one of its ``stages``,
    each layout one of its ``shardings``."""

    columns: Columns
    switches: Choices
    stages: Choices
    shardings: Choices

    @staticmethod
    def of_families(columns: Columns, switches: Collection[str], stages: Collection[str]) -> Blocks:
        """Make every family a block; ``switches`` and ``stages`` name the columns that are its choices."""
        own = {name: values for name, values in columns.items() if name not in (*switches, *stages)}
        none = Choices.none(len(columns["tp"]))
        return Blocks(own, Choices.of_rows(columns, switches), Choices.of_rows(columns, stages), none)

    @staticmethod
    def joined(parts: Sequence[Blocks]) -> Blocks:
        """Put blocks one after another, those with replicas first; a column that some lack is 0 there."""
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
        """The choices of a block."""
        return self.switches, self.stages, self.shardings

    @property
    def num_families(self) -> IntArray:
        """Families of each block, [b]."""
        return np.asarray(self.switches.counts * self.stages.counts)


def sifted(sieve: RuleFilter, blocks: Blocks, rules: Mapping[str, Rule]) -> Blocks:
    """Drop what rules forbid and count it by rule, whatever columns and choices a rule looks at.

    A rule is asked once for all layouts that agree in the columns that it reads. Where it leaves more of a block
    than one product of choices, the block becomes several with the same columns.
    """
    for name, rule in rules.items():
        if name not in sieve.without:
            blocks, lost = _without(sieve.problem, blocks, rule)
            sieve.rejected[name] = sieve.rejected.get(name, 0) + lost
    return blocks


def _without(problem: Problem, blocks: Blocks, rule: Rule) -> tuple[Blocks, int]:
    """Drop what a rule forbids; returns what is left and the number of layouts that is not."""
    read: list[str] = []
    while True:
        try:
            return _Classes.of(blocks, read).sift(problem, rule)
        except _NotReadError as missing:
            read.append(missing.name)


class _NotReadError(Exception):
    """A rule reads a column that its table leaves out."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class _Known(Mapping[str, IntArray]):
    """Some columns of a table; reading one of the ``others`` raises ``_NotReadError``."""

    def __init__(self, columns: Columns, others: Collection[str]) -> None:
        self.columns, self.others = columns, [name for name in others if name not in columns]

    def __getitem__(self, name: str) -> IntArray:
        if name in self.others:
            raise _NotReadError(name)
        return self.columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self.columns or name in self.others

    def __iter__(self) -> Iterator[str]:
        return iter([*self.columns, *self.others])

    def __len__(self) -> int:
        return len(self.columns) + len(self.others)


@dataclass(frozen=True, slots=True)
class _Axis:
    """A factor of the product that a rule reads: which one, by the columns read, and the list of each block."""

    number: int
    factor: Choices
    alike: Alike
    lists: IntArray


@dataclass(frozen=True, slots=True)
class _Classes:
    """Blocks in classes that a rule cannot tell apart which reads some columns: ``first`` [c] is a block of each
    class, ``key`` [b] the class of each block, ``axes`` are the factors of which the rule reads columns."""

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
            own = [name for name in names if name in factor.table]
            if own:
                axes.append(_Axis(number, factor, factor.alike(own), factor.lists()[3]))
        columns = [blocks.columns[name] for name in names if name in blocks.columns]
        same = np.zeros(len(blocks.columns["tp"]), dtype=np.int64)
        return _Classes(blocks, names, axes, *unique_rows(same, *columns, *(axis.lists for axis in axes)))

    def sift(self, problem: Problem, rule: Rule) -> tuple[Blocks, int]:
        """Drop what the rule forbids; returns what is left and the number of layouts that is not."""
        counts = [axis.alike.choices.counts[self.first] for axis in self.axes]
        sizes = np.prod([np.ones_like(self.first), *counts], axis=0)
        stand_for, lost = self._stand_for(), 0
        left = _Left([axis.factor for axis in self.axes], len(self.first))
        ends = np.cumsum(sizes)
        start = 0
        while start < len(sizes):
            before = ends[start] - sizes[start]
            end = max(start + 1, int(np.searchsorted(ends, before + MAX_ROWS, side="right")))
            number, place = within(sizes[start:end])
            rows = self._rows(start + number, place, [count[start:end][number] for count in counts])
            legal = self._ask(problem, rule, start + number, rows)
            if not legal.all():
                weights = stand_for[start + number[~legal]]
                for axis, row in zip(self.axes, rows, strict=True):
                    weights = weights * axis.alike.counts[row[~legal]]
                lost += int(weights.sum())
                self._leave(left, start, np.bincount(number, legal, end - start), sizes[start:end], legal)
            start = end
        return (left.of(self.blocks, self.key, self.axes) if lost else self.blocks), lost

    def _stand_for(self) -> IntArray:
        """For how many layouts a combination of each class stands, besides those of the factors read, [c]."""
        others = np.ones(len(self.key), dtype=np.int64)
        for number, factor in enumerate(self.blocks.factors):
            if all(axis.number != number for axis in self.axes):
                others = others * factor.counts
        found = np.zeros(len(self.first), dtype=np.int64)
        np.add.at(found, self.key, others)
        return found

    def _rows(self, number: IntArray, place: IntArray, counts: list[IntArray]) -> list[IntArray]:
        """Rows of the axes' tables, one array an axis, for combinations by their class and place in it."""
        rows = []
        for axis, count in zip(reversed(self.axes), reversed(counts), strict=True):
            rows.append(axis.alike.choices.starts[self.first[number]] + place % count)
            place = place // count
        return rows[::-1]

    def _ask(self, problem: Problem, rule: Rule, number: IntArray, rows: list[IntArray]) -> BoolArray:
        """Tell whether the rule allows each combination, by its class and the rows of the axes' tables."""
        names = {*self.names}
        columns = {n: v[self.first[number]] for n, v in self.blocks.columns.items() if n in names}
        others = list(self.blocks.columns)
        for axis, row in zip(self.axes, rows, strict=True):
            columns |= {name: values[row] for name, values in axis.alike.choices.table.items()}
        for factor in self.blocks.factors:
            others += factor.table
        return np.broadcast_to(np.asarray(rule(problem, _Known(columns, others)), dtype=np.bool_), len(number))

    def _leave(self, left: _Left, start: int, allowed: IntArray, sizes: IntArray, legal: BoolArray) -> None:
        """Write down what is left of the classes from ``start`` on, of which so many combinations are allowed."""
        ends = np.cumsum(sizes)
        left.num_parts[start + np.flatnonzero((allowed == 0) & (sizes > 0))] = 0
        for own in np.flatnonzero((allowed > 0) & (allowed < sizes)).tolist():
            block = self.first[start + own]
            lists = tuple(int(axis.lists[block]) for axis in self.axes)
            left.note(start + own, block, lists, legal[ends[own] - sizes[own] : ends[own]], self.axes)


class _Left:
    """Remainder of classes of blocks: as it was where ``first_part`` is negative, else parts with lists
    of their own on some axes."""

    def __init__(self, factors: list[Choices], classes: int) -> None:
        self.num_parts = np.ones(classes, dtype=np.int64)
        self.first_part = np.full(classes, -1)
        self.known: dict[tuple[tuple[int, ...], bytes], tuple[int, int]] = {}
        self.parts: list[tuple[int, ...]] = []
        self.lists: list[dict[tuple[int, bytes], int]] = [{} for _ in factors]
        self.rows: list[list[IntArray]] = [[] for _ in factors]

    def note(
        self, number: int, block: int, lists: tuple[int, ...], legal: BoolArray, axes: Sequence[_Axis]
    ) -> None:
        """Write down the parts of a class; classes with the same lists and the same legal combinations share
        them."""
        key = lists, legal.tobytes()
        if key not in self.known:
            shape = [int(axis.alike.choices.counts[block]) for axis in axes]
            parts = [
                tuple(
                    self._list(place, axis, block, members)
                    for place, (axis, members) in enumerate(zip(axes, box, strict=True))
                )
                for box in boxes(legal.reshape(shape))
            ]
            self.known[key] = len(self.parts), len(parts)
            self.parts += parts
        self.first_part[number], self.num_parts[number] = self.known[key]

    def _list(self, place: int, axis: _Axis, block: int, members: IntArray) -> int:
        """The number of a new list of some rows of an axis; -1 where it is the block's whole list."""
        alike = axis.alike
        if len(members) == alike.choices.counts[block]:
            return -1
        key = int(axis.lists[block]), members.tobytes()
        if key not in self.lists[place]:
            rows = alike.choices.starts[block] + members
            own = [
                alike.members[start : start + count]
                for start, count in zip(alike.starts[rows], alike.counts[rows], strict=True)
            ]
            self.lists[place][key] = len(self.rows[place])
            self.rows[place].append(axis.factor.starts[block] + np.sort(np.concatenate(own)))
        return self.lists[place][key]

    def of(self, blocks: Blocks, key: IntArray, axes: Sequence[_Axis]) -> Blocks:
        """The blocks that are left; ``key`` [b] is the class of each block."""
        source, place = within(self.num_parts[key])
        first = self.first_part[key[source]]
        parts = np.array([*self.parts, (-1,) * len(axes)], dtype=np.int64)
        part = parts[np.where(first < 0, len(parts) - 1, first + place)]
        factors = [factor.of(source) for factor in blocks.factors]
        for number, axis in enumerate(axes):
            factors[axis.number] = _with_lists(factors[axis.number], self.rows[number], part[:, number])
        return Blocks({name: taken(values, source) for name, values in blocks.columns.items()}, *factors)


def _with_lists(choices: Choices, rows: list[IntArray], chosen: IntArray) -> Choices:
    """The choices with other lists for some blocks: ``chosen`` [b] says which of ``rows``, -1: as before."""
    if not rows:
        return choices
    table = {
        name: np.concatenate([values, values[np.concatenate(rows)]]) for name, values in choices.table.items()
    }
    counts = np.array([len(own) for own in rows], dtype=np.int64)
    starts = choices.size + np.cumsum(counts) - counts
    new = chosen >= 0
    return Choices(
        table, np.where(new, starts[chosen], choices.starts), np.where(new, counts[chosen], choices.counts)
    )


def boxes(legal: npt.NDArray[np.bool_]) -> list[tuple[IntArray, ...]]:
    """Cut what is legal of a product into products: places on each axis, those of the first axis that allow the
    same of the others together."""
    if not legal.ndim:
        return [()] if legal else []
    found = []
    patterns: dict[bytes, list[int]] = {}
    for place, own in enumerate(legal):
        patterns.setdefault(own.tobytes(), []).append(place)
    for places in patterns.values():
        found += [(np.array(places, dtype=np.int64), *box) for box in boxes(legal[places[0]])]
    return found


def without_slower_transfers(sieve: RuleFilter, blocks: Columns, switches: Choices) -> Choices:
    """The switches of every block without the transfers that a twin of it beats (``TRANSFER_DOMINANCE``)."""
    size, values = len(blocks["tp"]), np.arange(2)
    crossed = cross(cross(blocks, "sequence_parallel", values), "pp_scatter_gather", values)
    legal = np.ones((size, 4), dtype=np.bool_)
    for name, rule in TRANSFER_DOMINANCE.items():
        sieve.rejected.setdefault(name, 0)
        if name not in sieve.without:
            legal &= np.asarray(rule(sieve.problem, crossed)).reshape(size, 4)
    if legal.all():
        return switches
    rows, place, first, group = switches.lists(*legal.T)
    pair = 2 * switches.table["sequence_parallel"] + switches.table["pp_scatter_gather"]
    keep = legal[first[place], pair[rows]]
    table = {name: values[rows[keep]] for name, values in switches.table.items()}
    left = Choices.listed(table, place[keep], len(first), group)
    (name,) = TRANSFER_DOMINANCE
    sieve.rejected[name] += int(switches.counts.sum() - left.counts.sum())
    return left
