"""Layouts as columns: what goes in comes out, and equal rows are found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milpplan.problem import Layout
from milpplan.simulation import LayoutColumns, ascending, unique_rows
from tests.simulation.cases import random_layout, random_problem


def layouts(count: int = 40) -> list[Layout]:
    """Random layouts."""
    random = np.random.default_rng(11)
    return [random_layout(random, random_problem(random)) for _ in range(count)]


def test_records_to_columns_and_back() -> None:
    """A layout survives the way into columns and out of them."""
    rows = layouts()
    columns = LayoutColumns.of(rows)
    assert len(columns) == len(rows)
    assert [columns.at(i) for i in range(len(rows))] == rows


def test_derived_columns_equal_the_record() -> None:
    """Products of degrees are the same as columns and as properties of the record."""
    rows = layouts()
    columns = LayoutColumns.of(rows)
    for name in ("num_gpus", "num_micro_batches", "num_virtual_stages"):
        assert getattr(columns, name).tolist() == [getattr(row, name) for row in rows]
    expert_dp = [row.tp * row.cp * row.dp // (row.ep * row.etp) for row in rows]
    assert columns.expert_dp.tolist() == expert_dp


def test_take_and_concatenate() -> None:
    """Taking all rows in two parts and joining them changes nothing; a mask takes what an index takes."""
    columns = LayoutColumns.of(layouts())
    halves = [columns.take(np.arange(0, 25)), columns.take(np.arange(25, 40))]
    joined = LayoutColumns.concatenate(halves)
    mask = columns.tp == 2
    for name in Layout.model_fields:
        assert np.array_equal(getattr(joined, name), getattr(columns, name))
        assert np.array_equal(getattr(columns.take(mask), name), getattr(columns.take(np.flatnonzero(mask)), name))


@pytest.mark.parametrize("scale", [4, 2**40])
def test_unique_rows(scale: int) -> None:
    """Every row is equal to its representative, and representatives differ, for huge values too."""
    random = np.random.default_rng(5)
    keys = [random.integers(0, 3, 200) * scale for _ in range(4)] + [random.random(200) < 0.5]
    first, inverse = unique_rows(*keys)
    for key in keys:
        assert np.array_equal(key[first][inverse], key)
    representatives = {tuple(key[row].item() for key in keys) for row in first}
    assert len(representatives) == len(first)


def test_no_rows() -> None:
    """An empty space has no representatives."""
    first, inverse = unique_rows(np.zeros(0, dtype=np.int64))
    assert len(first) == len(inverse) == 0


@given(st.lists(st.integers(-5, 5), max_size=12))
def test_ascending_are_the_distinct_values(values: list[int]) -> None:
    """Each value of a column once, the least first."""
    assert ascending(np.array(values, dtype=np.int64)).tolist() == sorted(set(values))
