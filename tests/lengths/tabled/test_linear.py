"""Linear programs of floats: values, prices and reduced costs against another solver."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sparse
from scipy.optimize import linprog

from milpplan.lengths.bounds.glop import least


def test_values_and_prices_are_those_of_another_solver() -> None:
    """Random programs with rows of both kinds and ends on both sides, dense and sparse: the same value, the same
    prices, what a variable at its upper end is worth, and the same programs without an answer."""
    random, answered = np.random.default_rng(0), 0
    for turn in range(60):
        rows, equal = random.normal(size=(6, 8)), random.normal(size=(2, 8))
        inside, cost, high = random.random(8), random.normal(size=8), np.where(random.random(8) < 0.7, 1.5, 3.0)
        sides, ends = rows @ inside + 0.3 * random.random(6), equal @ inside
        if turn % 5 == 0:
            ends = ends + 100.0
        bounds = np.stack([np.zeros(8), high], axis=1)
        other = linprog(cost, rows, sides, equal, ends, bounds=bounds, method="highs")
        kind = sparse.csr_matrix if turn % 2 else np.array
        found = least(cost, (kind(rows), sides), (kind(equal), ends), high=high)
        assert (found is None) == (other.status != 0)
        if found is not None:
            answered += 1
            np.testing.assert_allclose(found.value, other.fun, rtol=1e-7, atol=1e-9)
            np.testing.assert_allclose(found.at_most, other.ineqlin.marginals, atol=1e-6)
            np.testing.assert_allclose(found.equal, other.eqlin.marginals, atol=1e-6)
            np.testing.assert_allclose(np.minimum(found.reduced, 0.0), other.upper.marginals, atol=1e-6)
            np.testing.assert_allclose(cost @ found.values, found.value, atol=1e-8)
    assert answered > 30


def test_rows_of_one_kind_are_enough() -> None:
    """The cheapest cover of two needs, by hand: 3 x >= 6 and y >= 1 at costs 2 and 5."""
    found = least(np.array([2.0, 5.0]), (-np.array([[3.0, 0.0], [0.0, 1.0]]), -np.array([6.0, 1.0])))
    assert found is not None
    np.testing.assert_allclose([found.value, *found.values, *found.at_most], [9.0, 2.0, 1.0, -2.0 / 3.0, -5.0])
