"""Linear programs of floats with their prices, through GLOP: 1.2 to 4 times as fast as HiGHS through SciPy on the
programs of this project.

Nothing that is proved rests on an answer: bounds are computed anew from its prices. The numbers that it needs are
handed over as arrays, so small programs take half a millisecond.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from milpplan.groups.strategies import FloatArray
from milpplan.groups.strategies import Int64Array as IntArray

# The simplex method on the dual: the fastest on programs of paths.
_PARAMETERS = "solve_dual_problem:ALWAYS_DO"


@dataclass(frozen=True, slots=True, eq=False)
class LinearSolution:
    """The ``value`` of a program and ``values`` [n] that reach it; what it falls by when a row that is ``at_most``
    or ``equal`` has one more, and what a variable at its end costs beyond its rows (``reduced`` [n])."""

    value: float
    values: FloatArray
    at_most: FloatArray
    equal: FloatArray
    reduced: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """What is not zero in a matrix: ``values`` at ``rows`` and ``columns``, [e] each. Small programs take longer
    to put together than to solve, so there is no other form of a matrix on the way."""

    rows: IntArray
    columns: IntArray
    values: FloatArray

    @staticmethod
    def of(*parts: tuple[IntArray, IntArray, FloatArray]) -> Entries:
        """Several together."""
        rows, columns, values = (np.concatenate(one) for one in zip(*parts, strict=True))
        return Entries(rows, columns, values)

    def below(self, number: int) -> Entries:
        """The same after so many rows of others."""
        return Entries(self.rows + number, self.columns, self.values)


def ready() -> None:
    """Import what programs need, which takes a tenth of a second: now, and not with the first one that counts."""
    one = np.ones(1)
    least(one, (-one[:, None], -one))


def least(
    cost: FloatArray,
    at_most: tuple[Any, FloatArray],
    equal: tuple[Any, FloatArray] | None = None,
    low: FloatArray | float = 0.0,
    high: FloatArray | float = np.inf,
) -> LinearSolution | None:
    """The least ``cost @ x`` with ``A x <= b`` for ``at_most`` = (A, b), ``A x = b`` for ``equal`` and
    ``low <= x <= high``; matrices dense, sparse, or ``Entries``, both of one kind. None where there is none.

    Prices ``at_most`` and ``equal`` are the derivatives of the value by b: those of ``at_most`` are not positive.
    """
    from ortools.linear_solver.python import model_builder_helper as helper

    (rows, sides), number = at_most, len(cost)
    matrices, lows, highs = [rows], [np.full(len(sides), -np.inf)], [sides]
    if equal is not None:
        matrices.append(equal[0])
        lows.append(equal[1])
        highs.append(equal[1])
    # Its stubs have arrays of another kind.
    model: Any = helper.ModelBuilderHelper()
    solver = helper.ModelSolverHelper("GLOP")
    model.fill_model_from_sparse_data(
        np.broadcast_to(np.asarray(low, dtype=np.float64), number).copy(),
        np.broadcast_to(np.asarray(high, dtype=np.float64), number).copy(),
        np.asarray(cost, dtype=np.float64),
        np.concatenate(lows, dtype=np.float64),
        np.concatenate(highs, dtype=np.float64),
        _stacked(matrices, len(sides), (sum(map(len, lows)), number)),
    )
    solver.set_solver_specific_parameters(_PARAMETERS)
    solver.solve(model)
    if solver.status() != helper.SolveStatus.OPTIMAL:
        return None
    prices = np.asarray(solver.dual_values())
    return LinearSolution(
        float(solver.objective_value()),
        np.asarray(solver.variable_values()),
        prices[: len(sides)],
        prices[len(sides) :],
        np.asarray(solver.reduced_costs()),
    )


def _stacked(matrices: list[Any], number: int, shape: tuple[int, int]) -> Any:
    """One matrix of this shape of a first one, of so many rows, and perhaps a second one below it."""
    import scipy.sparse as sparse

    if isinstance(matrices[0], Entries):
        first, *others = matrices
        parts = [first, *(one.below(number) for one in others)]
        joined = Entries.of(*((one.rows, one.columns, one.values) for one in parts))
        return sparse.csr_matrix((joined.values, (joined.rows, joined.columns)), shape=shape)
    return sparse.vstack([sparse.csr_matrix(one) for one in matrices], format="csr", dtype=np.float64)
