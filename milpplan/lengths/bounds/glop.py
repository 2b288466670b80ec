"""Linear programs of floats with their dual values, through GLOP.

No proof rests on an answer: bounds are recomputed from its dual values. Matrices are handed over as arrays, so
small programs take half a millisecond; GLOP is faster here than HiGHS through SciPy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from milpplan.lengths.deadline import spend
from milpplan.lengths.tabled import FloatArray
from milpplan.lengths.tabled import Int64Array as IntArray


@dataclass(frozen=True, slots=True, eq=False)
class LinearSolution:
    """Optimum ``value`` of a program and ``values`` [n] of its variables.

    ``at_most`` and ``equal`` are the rows' dual values: the derivatives of the value by the right-hand sides.
    ``reduced`` [n] are the variables' reduced costs.
    """

    value: float
    values: FloatArray
    at_most: FloatArray
    equal: FloatArray
    reduced: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """Non-zero entries of a matrix: ``values`` at ``rows`` and ``columns``, [e] each.

    Building small programs takes longer than solving them, so no other matrix type is built on the way.
    """

    rows: IntArray
    columns: IntArray
    values: FloatArray

    @staticmethod
    def of(*parts: tuple[IntArray, IntArray, FloatArray]) -> Entries:
        """Join several sets of entries."""
        rows, columns, values = (np.concatenate(part) for part in zip(*parts, strict=True))
        return Entries(rows, columns, values)

    def below(self, number: int) -> Entries:
        """Return the entries below ``number`` rows of other entries."""
        return Entries(self.rows + number, self.columns, self.values)


def ready() -> None:
    """Import the solver, which takes a tenth of a second, before the first program that counts."""
    ones = np.ones(1)
    least(ones, (-ones[:, None], -ones))


def least(
    cost: FloatArray,
    at_most: tuple[Any, FloatArray],
    equal: tuple[Any, FloatArray] | None = None,
    low: FloatArray | float = 0.0,
    high: FloatArray | float = np.inf,
) -> LinearSolution | None:
    """Minimise ``cost @ x``.

    Subject to ``A x <= b`` for ``at_most`` = (A, b), ``A x = b`` for ``equal`` and ``low <= x <= high``. Matrices
    are dense, sparse, or ``Entries``, both of one type. Dual values are the derivatives of the optimum by b; those
    of ``at_most`` are not positive.

    Returns:
        The solution; None if there is no optimum.
    """
    from ortools.linear_solver.python import model_builder_helper as helper

    (rows, sides), number = at_most, len(cost)
    matrices, lows, highs = [rows], [np.full(len(sides), -np.inf)], [sides]
    if equal is not None:
        matrices.append(equal[0])
        lows.append(equal[1])
        highs.append(equal[1])
    num_rows = sum(map(len, lows))
    spend(3e-4 + num_rows * (8e-6 + 4e-8 * number))
    # The stubs of OR-Tools declare other array types.
    model: Any = helper.ModelBuilderHelper()
    solver = helper.ModelSolverHelper("GLOP")
    model.fill_model_from_sparse_data(
        np.broadcast_to(np.asarray(low, dtype=np.float64), number).copy(),
        np.broadcast_to(np.asarray(high, dtype=np.float64), number).copy(),
        np.asarray(cost, dtype=np.float64),
        np.concatenate(lows, dtype=np.float64),
        np.concatenate(highs, dtype=np.float64),
        _stacked(matrices, len(sides), (num_rows, number)),
    )
    # The simplex method on the dual is the fastest on programs of paths.
    solver.set_solver_specific_parameters("solve_dual_problem:ALWAYS_DO")
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
    """Stack one or two matrices, the first of ``number`` rows, to a sparse matrix of ``shape``."""
    import scipy.sparse as sparse

    if isinstance(matrices[0], Entries):
        first, *others = matrices
        parts = [first, *(matrix.below(number) for matrix in others)]
        joined = Entries.of(*((matrix.rows, matrix.columns, matrix.values) for matrix in parts))
        return sparse.csr_matrix((joined.values, (joined.rows, joined.columns)), shape=shape)
    return sparse.vstack([sparse.csr_matrix(matrix) for matrix in matrices], format="csr", dtype=np.float64)
