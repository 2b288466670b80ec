"""Layout space: all legal layouts of a problem, whose rows are built on demand.

``RuleFilter`` applies rules to Cartesian products of tables of layouts, and counts the rejections.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from milpplan.errors import InvalidInputError
from milpplan.problem import Layout, Problem
from milpplan.problem.reading import plain_reason, shown
from milpplan.simulation import BoolArray, IntArray, LayoutColumns, column_value, unique_rows
from milpplan.simulation.layout_columns import DEFAULTS, SWITCHES, constant

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


T = TypeVar("T", bound=np.generic)
SHARDING = ("zero_stage", "overlap_grad_reduce", "overlap_param_gather")
"""Fields whose choices are crossed with every family of layouts that agree in the other fields."""
MAX_LISTED = 2**21
"""Maximum number of families that are listed for a digest."""


@dataclass(frozen=True, slots=True)
class Choices:
    """Values of some fields for every block: ``counts`` [b] rows of ``table``, from ``starts`` [b] on."""

    table: Columns
    starts: IntArray
    counts: IntArray

    @staticmethod
    def none(blocks: int) -> Choices:
        """Return choices without fields: a single empty choice per block."""
        return Choices({}, np.zeros(blocks, dtype=np.int64), np.ones(blocks, dtype=np.int64))

    @staticmethod
    def listed(table: Columns, key_of_row: IntArray, keys: int, key: IntArray) -> Choices:
        """Make choices from a table whose rows belong to keys.

        Args:
            table: the values.
            key_of_row: key of each row of the table, ascending.
            keys: number of keys.
            key: key of each block, [b].
        """
        counts = np.bincount(key_of_row, minlength=keys)
        return Choices(table, (np.cumsum(counts) - counts)[key], counts[key])

    @staticmethod
    def of_rows(columns: Columns, names: Collection[str]) -> Choices:
        """Make choices from a table [b]: each row's values in some columns are its only choice."""
        first, key = unique_rows(np.zeros_like(columns["tp"]), *(columns[name] for name in names))
        return Choices({name: columns[name][first] for name in names}, key, np.ones(len(key), dtype=np.int64))

    @staticmethod
    def joined(parts: Sequence[Choices]) -> Choices:
        """Concatenate the choices of several tables of blocks; all have the same fields."""
        sizes = [part.size for part in parts]
        offsets = np.cumsum([0, *sizes])
        return Choices(
            {name: np.concatenate([part.table[name] for part in parts]) for name in parts[0].table},
            np.concatenate([part.starts + start for part, start in zip(parts, offsets, strict=False)]),
            np.concatenate([part.counts for part in parts]),
        )

    @property
    def size(self) -> int:
        """Number of rows of the table."""
        return len(next(iter(self.table.values()))) if self.table else 0

    def of(self, blocks: IntArray) -> Choices:
        """Return the choices of some blocks, in their order."""
        return Choices(self.table, self.starts[blocks], self.counts[blocks])

    def shared(self) -> Choices:
        """Return equal choices in which blocks with equal lists share one list."""
        if not self.table:
            return self
        rows, number, first, group = self.lists()
        _, code = unique_rows(*(values[rows] for values in self.table.values()))
        ends = np.cumsum(self.counts[first])
        numbers: dict[bytes, int] = {}
        list_number = np.array(
            [
                numbers.setdefault(code[end - count : end].tobytes(), len(numbers))
                for end, count in zip(ends.tolist(), self.counts[first].tolist(), strict=True)
            ],
            dtype=np.int64,
        )
        _, distinct = np.unique(list_number, return_index=True)
        kept = np.isin(number, distinct)
        counts = self.counts[first][distinct]
        starts = np.cumsum(counts) - counts
        table = {name: values[rows[kept]] for name, values in self.table.items()}
        return Choices(table, starts[list_number][group], counts[list_number][group])

    def lists(self, *keys: npt.NDArray[np.generic]) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Return the distinct lists of rows; lists of blocks with different ``keys`` [b] count as distinct.

        Returns:
            Their rows, one list after another; the list of each row; a block of each list; the list of each block.
        """
        first, group = unique_rows(self.starts, self.counts, *keys)
        number, position = within(self.counts[first])
        return self.starts[first][number] + position, number, first, group

    def alike(self, names: Collection[str]) -> Alike:
        """Group the choices by some of the fields."""
        rows, number, first, group = self.lists()
        table = {name: values[rows] for name, values in self.table.items() if name in names}
        # Ascending by list, because the list is the first key.
        keep, same = unique_rows(number, *table.values())
        choices = Choices.listed(
            {name: values[keep] for name, values in table.items()}, number[keep], len(first), group
        )
        counts = np.bincount(same, minlength=len(keep))
        members = (rows - self.starts[first][number])[np.argsort(same, kind="stable")]
        return Alike(choices, members, np.cumsum(counts) - counts, counts)


@dataclass(frozen=True, slots=True)
class Alike:
    """Choices grouped by equal values of some fields.

    ``counts`` [r] of the ``members`` (positions among a block's choices), from ``starts`` [r] on, belong to row r
    of ``choices``.
    """

    choices: Choices
    members: IntArray
    starts: IntArray
    counts: IntArray


def within(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Return, for counts of items per box, the box of each item and its position in the box."""
    box = np.repeat(np.arange(len(counts)), counts)
    return box, np.arange(len(box)) - np.repeat(np.cumsum(counts) - counts, counts)


def chosen_rows(
    switches: Choices, stages: Choices, block: IntArray, family: IntArray
) -> tuple[IntArray, IntArray]:
    """Return rows of the tables of ``switches`` and ``stages`` for families given by block and position in the
    block, [n]."""
    counts = np.maximum(stages.counts, 1)[block]
    switch = family // counts
    return switches.starts[block] + switch, stages.starts[block] + family - switch * counts


@dataclass(frozen=True)
class LayoutSpace:
    """All legal layouts of a problem, and the number of partial layouts that each rule rejected.

    A *block* is a choice of degrees, order of ranks and micro-batch. Its layouts are the product of its
    ``switches``, its ``stages`` (virtual stages and schedule) and its ``shardings``. Where a rule allows only part
    of this product, several blocks have equal degrees. A *family* is a layout without its sharding. There may be
    billions of layouts, so rows are built on demand.
    """

    blocks: LayoutColumns
    """One row a block; the fields that its choices set are meaningless."""
    switches: Choices
    stages: Choices
    shardings: Choices
    num_choices: tuple[int, int]
    """Number of shardings of a family with replicas, and of a family without, before rules on other fields."""
    kept: IntArray | None
    """Crossed rows that are kept; None: all."""
    rejected: dict[str, int]
    enumerated: int

    def __len__(self) -> int:
        return int(self.sizes.sum()) if self.kept is None else len(self.kept)

    @cached_property
    def replicated(self) -> BoolArray:
        """Mask of the blocks with replicas, [b]."""
        return np.asarray(self.blocks.cp * self.blocks.dp > 1)

    @cached_property
    def num_families(self) -> IntArray:
        """Number of families of each block, [b]."""
        return np.asarray(self.switches.counts * self.stages.counts)

    @cached_property
    def sizes(self) -> IntArray:
        """Number of layouts of each block, [b], including rows that are not kept."""
        return np.asarray(self.num_families * self.shardings.counts)

    @cached_property
    def _ends(self) -> IntArray:
        """Crossed rows up to the end of each block, [b]."""
        return np.cumsum(self.sizes)

    @cached_property
    def _first(self) -> IntArray:
        """First crossed row of each block, [b]."""
        return self._ends - self.sizes

    @cached_property
    def families(self) -> LayoutColumns:
        """All families; their sharding is meaningless."""
        return self.families_of(np.arange(len(self.blocks)))

    def families_of(self, blocks: IntArray) -> LayoutColumns:
        """Return the families of some blocks, in their order."""
        number, family = within(self.num_families[blocks])
        return self._rows(blocks[number], family, None)

    def _rows(self, block: IntArray, family: IntArray, choice: IntArray | None) -> LayoutColumns:
        """Return layouts by block and position in the block; families if ``choice`` of sharding is None."""
        switch, stage = chosen_rows(self.switches, self.stages, block, family)
        sharding = constant(0, len(block)) if choice is None else choice
        none = dict.fromkeys(SHARDING, np.zeros(1, dtype=np.int64))
        table = self.shardings.table if choice is not None else none
        tables = ((self.switches.table, switch), (self.stages.table, stage), (table, sharding))
        chosen: dict[str, Any] = {
            name: (values.astype(np.bool_) if name in SWITCHES else values)[rows]
            for choices, rows in tables
            for name, values in choices.items()
        }
        return replace(self.blocks.take(block, chosen), **chosen)

    def first_rows(
        self, block: npt.NDArray[np.integer], switch: IntArray, stage: npt.NDArray[np.integer]
    ) -> tuple[IntArray, IntArray]:
        """Return the first crossed row and the number of shardings of families, [n].

        Families are given by their blocks and the positions of their switches and stages there.
        """
        shardings, start = self.shardings.counts[block], self._first[block]
        return start + (switch * self.stages.counts[block] + stage) * shardings, shardings

    def block_of(self, rows: npt.NDArray[np.integer]) -> IntArray:
        """Return the blocks of some layouts."""
        crossed = np.asarray(rows, dtype=np.int64) if self.kept is None else self.kept[rows]
        return np.searchsorted(self._ends, crossed, side="right")

    def take(self, rows: npt.NDArray[np.integer]) -> LayoutColumns:
        """Return the chosen layouts."""
        crossed = np.asarray(rows, dtype=np.int64) if self.kept is None else self.kept[rows]
        block = np.searchsorted(self._ends, crossed, side="right")
        position = crossed - self._first[block]
        shardings = self.shardings.counts[block]
        family = position // shardings
        return self._rows(block, family, self.shardings.starts[block] + position - family * shardings)

    def at(self, row: int) -> Layout:
        """Return one layout."""
        return self.take(np.array([row])).at(0)

    def only(self, rows: IntArray) -> LayoutSpace:
        """Return the space of some of the layouts, in this order."""
        return replace(self, kept=rows if self.kept is None else self.kept[rows])

    def spread(self, of_families: npt.NDArray[T]) -> npt.NDArray[T]:
        """Return every layout's value [n] of an array with one value per family."""
        crossed = np.repeat(of_families, np.repeat(self.shardings.counts, self.num_families))
        return crossed if self.kept is None else crossed[self.kept]

    @property
    def is_interleaved(self) -> bool:
        """True if some layouts have several virtual stages a rank."""
        return bool((self.stages.table["vpp"][self.stages.of(np.flatnonzero(self.sizes)).lists()[0]] > 1).any())

    def vpp_of(self, rows: npt.NDArray[np.integer]) -> IntArray:
        """Return the virtual stages a rank of some layouts, [n]."""
        crossed = np.asarray(rows, dtype=np.int64) if self.kept is None else self.kept[rows]
        block = np.searchsorted(self._ends, crossed, side="right")
        family = (crossed - self._first[block]) // self.shardings.counts[block]
        _, stage = chosen_rows(self.switches, self.stages, block, family)
        return np.asarray(self.stages.table["vpp"][stage])

    def find(self, layout: Layout) -> int | None:
        """Return the row of a layout; None where the space does not contain it."""
        target = LayoutColumns.of([layout])
        matching = np.ones(len(self.blocks), dtype=np.bool_)
        for name in Layout.model_fields.keys() - set(SHARDING) - set(self.switches.table) - set(self.stages.table):
            matching &= getattr(self.blocks, name) == getattr(target, name)[0]
        number, position = within(self.sizes[matching])
        rows = self._first[matching][number] + position
        if self.kept is not None:
            rows = np.flatnonzero(np.isin(self.kept, rows))
        part = self.take(rows)
        for name in (*self.switches.table, *self.stages.table, *SHARDING):
            keep = getattr(part, name) == getattr(target, name)[0]
            rows, part = rows[keep], part.take(keep)
        return int(rows[0]) if len(rows) else None

    @cached_property
    def columns(self) -> LayoutColumns:
        """All layouts at once."""
        return self.take(np.arange(len(self)))

    def sha256(self) -> str:
        """Return a digest of all layouts in their order.

        It is computed from the families and their shardings, or, where there are too many to list or blocks have
        shardings of their own, from the blocks and their lists of choices.
        """
        listed = self.shardings.size == sum(self.num_choices) and self.num_families.sum() <= MAX_LISTED
        rows = self.families if listed else self.blocks
        parts: dict[str, npt.NDArray[np.generic]] = {
            field.name: getattr(rows, field.name) for field in fields(LayoutColumns)
        }
        later = ("replica_micro_batches", "dp_replicate", "keep_weights", "expert_dispatch", "offload_modules")
        for name in later:
            # Spaces without them keep the digest of earlier certificates.
            if (parts[name] == column_value(name, DEFAULTS[name])).all():
                del parts[name]
        if listed:
            parts |= {f"choices.{name}": self.shardings.table[name] for name in sorted(self.shardings.table)}
            replicated = int(self.num_families[self.replicated].sum())
            parts["sizes"] = np.array([replicated, *self.num_choices, len(self)])
        else:
            for word, factor in (
                ("switches", self.switches),
                ("stages", self.stages),
                ("shardings", self.shardings),
            ):
                rows_of_lists, number, _, group = factor.lists()
                parts |= {f"{word}.{name}": factor.table[name][rows_of_lists] for name in sorted(factor.table)}
                parts |= {f"{word}.of_row": number, f"{word}.of_block": group}
        if self.kept is not None:
            parts["kept"] = self.kept
        digest = hashlib.sha256()
        for name, values in parts.items():
            digest.update(name.encode() + np.ascontiguousarray(values, dtype=np.int64).tobytes())
        return digest.hexdigest()
