"""A table or a curve corrected node by node to what was measured between its nodes."""

from __future__ import annotations

from functools import reduce
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.optimize import lsq_linear

FloatArray = npt.NDArray[np.float64]

SMOOTHNESS: Final = 0.3
"""One sigma of a node's correction around the mean one, relative."""
NOISE: Final = 0.03
"""One sigma of a measurement, relative."""
ROUNDS: Final = 5
LEAST, MOST = 1e-4, 1.5
"""Efficiencies of nodes stay within these."""


def hat_weights(*axes: tuple[tuple[float, ...], FloatArray]) -> FloatArray:
    """[rows, nodes] of axes with the sizes of the rows on them: an interpolation that is linear in the logarithms
    of the sizes is linear in the nodes, so each column is that of a unit node."""
    parts = []
    for axis, sizes in axes:
        grid = np.log(np.array(axis, dtype=np.float64))
        hats = np.eye(len(grid))
        parts.append(np.stack([np.interp(np.log(sizes), grid, hat) for hat in hats], axis=1))
    return reduce(lambda left, right: (left[:, :, None] * right[:, None, :]).reshape(len(left), -1), parts)


def corrected(weights: FloatArray, nodes: FloatArray, efficiency: FloatArray) -> FloatArray:
    """Node values: the description's times a common factor times corrections near 1.

    Minimised are squares of the relative errors of ``efficiency`` [rows], and of the corrections' differences from
    their mean; rows with large errors count less. ``weights`` [rows, nodes], ``nodes`` [nodes] of the description.
    """
    common = float(np.median(efficiency / (weights @ nodes)))
    start = np.clip(nodes * common, LEAST, MOST)
    # Normal equations: many measurements on a few hundred nodes.
    rows = weights * start / efficiency[:, None]
    trust = np.ones(len(efficiency))
    correction = np.ones(len(start))
    for _ in range(ROUNDS):
        scaled = rows * trust[:, None] / NOISE
        matrix = scaled.T @ scaled + np.eye(len(start)) / SMOOTHNESS**2
        right = scaled.T @ (trust / NOISE) + np.ones(len(start)) / SMOOTHNESS**2
        root = np.linalg.cholesky(matrix)
        target = np.linalg.solve(root, right)
        correction = lsq_linear(root.T, target, bounds=(LEAST / start, np.maximum(MOST / start, 1.001))).x
        # Weights of soft_l1; their roots multiply the rows.
        trust = (1.0 + ((rows @ correction - 1.0) / NOISE) ** 2) ** -0.25
    return np.clip(start * correction, LEAST, MOST)
