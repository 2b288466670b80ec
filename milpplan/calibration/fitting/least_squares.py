"""Robust least squares on a linearised model: a step, its scale, and its covariance.

Residuals r = log(predicted / measured) have the scale s. The objective is ``sum rho((r/s)^2) / 2 + sum ((x -
prior) / sigma)^2 / 2`` with soft_l1, rho(z) = 2 (sqrt(1 + z) - 1), for the data, and plain squares for the priors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

FloatArray = npt.NDArray[np.float64]

EXPECTED_SCATTER: Final = 0.03
EXPECTED_WEIGHT: Final = 2.0
"""Number of additional runs with scatter ``EXPECTED_SCATTER`` that the scale assumes, because few runs cannot
tell."""
MAD_TO_SIGMA: Final = 1.4826


def soft_l1(num_data: int) -> Callable[[FloatArray], FloatArray]:
    """Make scipy's loss with soft_l1 for the first ``num_data`` squared residuals and squares for the others."""

    def rho(z: FloatArray) -> FloatArray:
        root = np.sqrt(1.0 + z[:num_data])
        value, first, second = z.copy(), np.ones_like(z), np.zeros_like(z)
        value[:num_data] = 2.0 * (root - 1.0)
        first[:num_data] = 1.0 / root
        second[:num_data] = -0.5 / root**3
        return np.array([value, first, second])

    return rho


def objective(residuals: FloatArray, scale: float, pulls: FloatArray) -> float:
    """Compute the objective; ``pulls`` are (x - prior) / sigma."""
    return float(np.sum(np.sqrt(1.0 + (residuals / scale) ** 2) - 1.0) + 0.5 * np.sum(pulls**2))


def robust_scale(residuals: FloatArray, num_fitted: float) -> float:
    """Estimate one sigma of residuals: 1.4826 times their median absolute value, corrected for the number of
    fitted parameters, and shrunk to the expected scatter where there are few."""
    count = len(residuals)
    spread = MAD_TO_SIGMA * float(np.median(np.abs(residuals)))
    free = max(count - num_fitted, 1.0)
    square = spread**2 * count / free
    expected = EXPECTED_WEIGHT * EXPECTED_SCATTER**2
    return float(np.sqrt((expected + count * square) / (EXPECTED_WEIGHT + count)))


def linear_step(
    residuals: FloatArray,
    jacobian: FloatArray,
    scale: float,
    pulls: FloatArray,
    sigmas: FloatArray,
    box: tuple[FloatArray, FloatArray],
) -> FloatArray:
    """Compute the change of x that minimises the objective where residuals move as ``residuals + jacobian @
    change``.

    residuals [n], jacobian [n, p], pulls and sigmas [p]; ``box`` holds the minimum and the maximum change [p].
    """
    if not jacobian.shape[1]:
        return np.zeros(0)
    unit = sigmas

    def of(change: FloatArray) -> FloatArray:
        return np.concatenate([(residuals + jacobian @ (change * unit)) / scale, pulls + change])

    slope = np.concatenate([jacobian * unit / scale, np.eye(len(sigmas))])
    low, high = box[0] / unit, box[1] / unit
    room = 1e-9 * (high - low)
    done = least_squares(
        of,
        np.clip(np.zeros(len(sigmas)), low + room, high - room),
        jac=lambda change: slope,
        bounds=(low, high),
        loss=soft_l1(len(residuals)),
        xtol=1e-12,
        max_nfev=500,
    )
    return np.asarray(np.clip(done.x, low, high) * unit)


def covariance(residuals: FloatArray, jacobian: FloatArray, scale: float, sigmas: FloatArray) -> FloatArray:
    """Compute the covariance [p, p] of x: the inverse of J^T J / (s^2 k) plus the priors' precision.

    k = mean(psi^2) / mean(psi')^2 * n / (n - p), Huber's correction of least squares for a robust loss. Source:
    Huber, Robust Statistics (1981), section 7.6.
    """
    scaled = residuals / scale
    root = np.sqrt(1.0 + scaled**2)
    psi, slope = scaled / root, root**-3
    count = len(residuals)
    free = max(count - jacobian.shape[1], 1)
    inflation = max(float(np.mean(psi**2)) / float(np.mean(slope)) ** 2, 1.0) * count / free
    information = jacobian.T @ jacobian / (scale**2 * inflation)
    return np.asarray(np.linalg.inv(information + np.diag(sigmas**-2.0)))
