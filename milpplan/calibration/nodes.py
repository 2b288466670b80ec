"""Correction of a table or curve, node by node, to measurements between its nodes."""

from __future__ import annotations

from functools import reduce
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_factor, cho_solve

FloatArray = npt.NDArray[np.float64]

SMOOTHNESS: Final = 0.3
"""One sigma of a node's correction around the mean correction, relative."""
NOISE: Final = 0.03
"""One sigma of a measurement, relative."""
ROUNDS: Final = 5
MIN_EFFICIENCY, MAX_EFFICIENCY = 1e-4, 1.5
"""Bounds on efficiencies of nodes."""
MAX_STEPS: Final = 100
"""Maximum number of steps of the projected Newton method, which takes about ten."""
OPTIMAL: Final = 1e-10
"""Gradient, relative to the right-hand side, below which a point counts as optimal."""


def hat_weights(*axes: tuple[tuple[float, ...], FloatArray]) -> FloatArray:
    """Compute interpolation weights [rows, nodes] from axes with the sizes of the rows on them.

    An interpolation that is linear in the logarithms of the sizes is linear in the nodes, so each column is that
    of a unit node.
    """
    parts = []
    for axis, sizes in axes:
        grid = np.log(np.array(axis, dtype=np.float64))
        hats = np.eye(len(grid))
        parts.append(np.stack([np.interp(np.log(sizes), grid, hat) for hat in hats], axis=1))
    return reduce(lambda left, right: (left[:, :, None] * right[:, None, :]).reshape(len(left), -1), parts)


def corrected(weights: FloatArray, nodes: FloatArray, efficiency: FloatArray) -> FloatArray:
    """Fit node values: the description's times a common factor times corrections near 1.

    The objective is the sum of squares of the relative errors of ``efficiency`` [rows], and of the corrections'
    differences from their mean; rows with large errors count less. ``weights`` [rows, nodes], ``nodes`` [nodes] of
    the description.
    """
    common = float(np.median(efficiency / (weights @ nodes)))
    start = np.clip(nodes * common, MIN_EFFICIENCY, MAX_EFFICIENCY)
    # A node without measurements beside it keeps the mean correction.
    beside = weights.any(axis=0)
    # Normal equations, because there are many measurements and a few hundred nodes.
    rows = (weights * start / efficiency[:, None])[:, beside]
    low, high = (MIN_EFFICIENCY / start)[beside], np.maximum(MAX_EFFICIENCY / start, 1.001)[beside]
    trust = np.ones(len(efficiency))
    near = np.ones(len(low))
    for _ in range(ROUNDS):
        scaled = rows * trust[:, None] / NOISE
        matrix = scaled.T @ scaled + np.eye(len(low)) / SMOOTHNESS**2
        right = scaled.T @ (trust / NOISE) + np.ones(len(low)) / SMOOTHNESS**2
        near = least_within(matrix, right, low, high)
        # Weights of soft_l1, whose square roots multiply the rows.
        trust = (1.0 + ((rows @ near - 1.0) / NOISE) ** 2) ** -0.25
    correction = np.ones(len(start))
    correction[beside] = near
    return np.clip(start * correction, MIN_EFFICIENCY, MAX_EFFICIENCY)


def least_within(matrix: FloatArray, right: FloatArray, low: FloatArray, high: FloatArray) -> FloatArray:
    """Minimise x'Ax/2 - b'x between bounds, ``matrix`` A being positive definite.

    Source: Bertsekas, "Projected Newton methods for optimization problems with simple constraints", SIAM J.
    Control Optim. 20 (1982), section 2: Newton steps over the variables that no bound holds, shortened until they
    descend.
    """

    def value(at: FloatArray) -> float:
        return float(at @ (matrix @ at) / 2 - right @ at)

    x = np.clip(np.ones(len(low)), low, high)
    for _ in range(MAX_STEPS):
        gradient = matrix @ x - right
        at_bound = ((x <= low) & (gradient > 0)) | ((x >= high) & (gradient < 0))
        free = ~at_bound
        if not free.any() or np.abs(gradient[free]).max() <= OPTIMAL * np.abs(right).max():
            break
        step = np.zeros(len(low))
        step[free] = cho_solve(cho_factor(matrix[np.ix_(free, free)]), gradient[free])
        before, length = value(x), 1.0
        while value(np.clip(x - length * step, low, high)) >= before and length > OPTIMAL:
            length /= 2
        if length <= OPTIMAL:
            break
        x = np.clip(x - length * step, low, high)
    return x
