"""The integer program's data: building, exact checking, magnitudes, appending."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from milpplan.errors import InvalidInputError
from milpplan.optimize.milp import INFINITY, MINUS_INFINITY, Program, ProgramBuilder, Rows, violations


def knapsack() -> Program:
    """2a + 3b >= 7, a, b in 0..3, minimise 3a + 4b + 5."""
    builder = ProgramBuilder("knapsack")
    pair = builder.add_variables(("a", "b"), 3)
    builder.add_row("cover", pair, (2, 3), lower=7)
    builder.minimize(pair, (3, 4), offset=5)
    return builder.build()


def test_broken_rows_bounds_and_integrality_are_named() -> None:
    """Every broken thing is listed with its name and value, and nothing else is."""
    program = knapsack()
    assert violations(program, np.array([2, 1])) == []
    assert [str(v) for v in violations(program, np.array([1, 1]))] == ["row cover: 5 is not in [7, inf]"]
    assert [str(v) for v in violations(program, np.array([4, 1]))] == ["bound a: 4 is not in [0, 3]"]
    assert [v.kind for v in violations(program, np.array([2.5, 1.0]))] == ["integrality"]


def test_objective_is_a_python_integer() -> None:
    """Objective = 3 * 2 + 4 * 1 + 5."""
    value = knapsack().objective_at(np.array([2, 1]))
    assert value == 15
    assert type(value) is int


def test_columns_named_twice_are_summed() -> None:
    """x + 2 y - x has only y left."""
    builder = ProgramBuilder()
    x, y = builder.add_variables(("x", "y"), 9)
    builder.add_row("row", [x, y, x], [1, 2, -1], upper=4)
    program = builder.build()
    assert program.rows.columns.tolist() == [y]
    assert program.rows.coefficients.tolist() == [2]


def test_sums_beyond_64_bits_are_exact() -> None:
    """4e18 + 4e18 + 4e18 does not wrap round, neither in rows, nor in the objective, nor in magnitudes."""
    builder = ProgramBuilder()
    columns = builder.add_variables(("x", "y", "z"), 4)
    big = 10**18
    builder.add_row("row", columns, [big, big, big], upper=5)
    builder.minimize(columns, [big, big, big])
    program = builder.build()
    point = np.array([4, 4, 4])
    (broken,) = violations(program, point)
    assert broken.value == 12 * big
    assert program.objective_at(point) == 12 * big
    assert program.max_row_magnitude() == 12 * big


def test_appended_rows_equal_built_rows() -> None:
    """A program with appended rows is the program built with them, empty rows included."""
    extra = Rows.dense(("cut[0]", "cut[1]", "empty"), [[1, 1], [0, -2], [0, 0]], [1, -6, 0], [INFINITY, 4, 0])
    program = knapsack().with_rows(extra)
    assert program.rows.names == ("cover", "cut[0]", "cut[1]", "empty")
    assert program.rows.starts.tolist() == [0, 2, 4, 5, 5]
    assert program.rows.activities(np.array([1, 3])).tolist() == [11, 4, -6, 0]
    assert program.rows.tail(2).activities(np.array([1, 3])).tolist() == [-6, 0]


def test_rows_of_a_matrix_are_rows_one_by_one() -> None:
    """Many rows of the same columns at once are those added singly; columns that do not ascend are refused."""
    matrix = [[1, 0, -2], [0, 0, 0], [3, 4, 5]]
    one, many = ProgramBuilder(), ProgramBuilder()
    for builder in (one, many):
        for name in "abcd":
            builder.add_variable(name, 0, 9)
    for name, row in zip("xyz", matrix, strict=True):
        one.add_row(name, [0, 2, 3], row, -1, 7)
    many.add_rows("xyz", [0, 2, 3], matrix, -1, 7)
    first, second = one.build().rows, many.build().rows
    assert first.names == second.names
    for field in ("starts", "columns", "coefficients", "lower", "upper"):
        assert getattr(first, field).tolist() == getattr(second, field).tolist()
    for wrong in ([0, 2, 2], [2, 0, 3], [0, 2, 4], [-1, 2, 3]):
        with pytest.raises(InvalidInputError, match="not ascending"):
            many.add_rows("xyz", wrong, matrix)


def test_upper_bounds_are_only_tightened() -> None:
    """A looser bound changes nothing, a bound below the lower one is refused."""
    program = knapsack().with_upper_bound(0, 2)
    assert program.with_upper_bound(0, 9).upper.tolist() == [2, 3]
    with pytest.raises(InvalidInputError, match="below its lower bound"):
        program.with_upper_bound(0, -1)


def test_wrong_input_is_refused() -> None:
    """Fractions, unknown columns, numbers beyond 64 bits and crossed bounds are errors of the caller."""
    builder = ProgramBuilder()
    builder.add_variable("x", 0, 1)
    with pytest.raises(InvalidInputError, match="64-bit integers"):
        builder.add_row("row", [0], [0.5])
    with pytest.raises(InvalidInputError, match="names columns"):
        builder.add_row("row", [1], [1])
    with pytest.raises(InvalidInputError, match="64"):
        builder.add_row("row", [0], [2**64])
    with pytest.raises(InvalidInputError, match="lower <= upper"):
        builder.add_variable("y", 2, 1)
    with pytest.raises(InvalidInputError, match="names column"):
        builder.build().with_rows(Rows.dense(("r",), [[1, 1]], 0))


def test_tolerance_is_for_continuous_rows_only() -> None:
    """A row with a continuous variable may be off by the tolerance, a row of integers may not."""
    builder = ProgramBuilder()
    x = builder.add_variable("x", 0, 9)
    z = builder.add_variable("z", 0, 9, integer=False)
    builder.add_row("mixed", [x, z], [1, 1], 2, 2)
    builder.add_row("whole", [x], [1], 1, 1)
    program = builder.build()
    assert violations(program, np.array([1.0, 1.0 + 1e-9]), tolerance=1e-6) == []
    assert [v.name for v in violations(program, np.array([1.0, 1.0 + 1e-9]))] == ["mixed"]
    assert "whole" in [v.name for v in violations(program, np.array([2.0, 0.0]), tolerance=1e-6)]


def test_nothing_of_a_continuous_variable_may_be_a_little_more() -> None:
    """The tolerance of a row is that of its largest coefficient of a continuous variable where all are nothing."""
    builder = ProgramBuilder()
    x = builder.add_variable("x", 0, 9)
    z = builder.add_variable("z", 0, 9, integer=False)
    builder.add_row("mixed", [x, z], [-(10**7), 10**7], upper=0)
    program = builder.build()
    assert violations(program, np.array([0.0, 5e-7]), tolerance=1e-6) == []
    assert [v.name for v in violations(program, np.array([0.0, 2e-6]), tolerance=1e-6)] == ["mixed"]


@given(
    st.lists(st.lists(st.integers(-(10**12), 10**12), min_size=3, max_size=3), min_size=1, max_size=4),
    st.lists(st.one_of(st.integers(-(10**9), 10**9), st.floats(-1e6, 1e6)), min_size=3, max_size=3),
)
def test_activities_are_exact(matrix: list[list[int]], point: list[float]) -> None:
    """Rows checked at any point agree with rational arithmetic."""
    builder = ProgramBuilder()
    for name in "xyz":
        builder.add_variable(name, MINUS_INFINITY, INFINITY, integer=False)
    rows = [
        sum((Fraction(c) * Fraction(float(v)) for c, v in zip(r, point, strict=True)), Fraction(0)) for r in matrix
    ]
    program = builder.build().with_rows(Rows.dense([f"r{i}" for i in range(len(rows))], matrix, 0, 0))
    broken = {v.name for v in violations(program, np.array(point, dtype=np.float64))}
    assert broken == {f"r{i}" for i, value in enumerate(rows) if value != 0}


@given(
    st.lists(st.integers(-(2**60), 2**60), min_size=3, max_size=3),
    st.lists(st.one_of(st.integers(-2, 2), st.floats(-1e3, 1e3)), min_size=3, max_size=3),
    st.integers(-1, 1),
)
def test_limits_are_exact(row: list[int], point: list[float], further: int) -> None:
    """What no sum of floats can tell from its limit, a unit or less away, is told, above and below."""
    value = sum((Fraction(c) * Fraction(float(v)) for c, v in zip(row, point, strict=True)), Fraction(0))
    limit = value.numerator // value.denominator + further
    assume(abs(limit) < 2**62)
    builder = ProgramBuilder()
    for name in "xyz":
        builder.add_variable(name, MINUS_INFINITY, INFINITY, integer=False)
    upper = Rows.dense(("at most",), [row], MINUS_INFINITY, limit)
    lower = Rows.dense(("at least",), [row], limit)
    program = builder.build().with_rows(Rows.concatenate((upper, lower)))
    broken = {one.name for one in violations(program, np.array(point, dtype=np.float64))}
    assert broken == {name for name, off in (("at most", value > limit), ("at least", value < limit)) if off}
