"""Descent over the continuous constants: steps of a linearised robust fit, each checked by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from milpplan.calibration.fitting.parameters import STARTS_S, Parameter, Predictor, Theta, log_ratios
from milpplan.calibration.fitting.robust import covariance, linear_step, objective, robust_scale

FloatArray = npt.NDArray[np.float64]

MAX_ITERATIONS: Final = 15
FIRST_ITERATIONS: Final = 3
"""Number of iterations from every start before the best descent continues."""
SMALL_MOVE: Final = 2e-3
"""Step, in one sigmas of the prior, below which the descent ends."""
SMALL_GAIN: Final = 0.02
"""Gain of the objective (half a chi squared) below which the descent ends."""
SAME_SCALE: Final = 0.02
HOP_SIGMAS: Final = 5.0
HOP_GAIN: Final = 0.5
"""Length of a hop out of a local minimum, in one sigmas of the fit, and the gain that it requires."""
MAX_SHORTER: Final = 5


@dataclass(frozen=True, slots=True)
class Model:
    """Log ratios of a predictor as a function of some parameters; ``theta`` holds the values of all others."""

    predictor: Predictor
    parameters: tuple[Parameter, ...]
    theta: Theta

    def at(self, x: FloatArray) -> Theta:
        """Return all constants at x."""
        theta = self.theta
        for constant, inner in zip(self.parameters, x, strict=True):
            theta = theta.with_value(constant.name, constant.value(float(inner)))
        return theta

    def residuals(self, x: FloatArray) -> FloatArray:
        """Compute log(predicted / measured), [n]."""
        return log_ratios(self.predictor, self.at(x))

    def jacobian(self, x: FloatArray) -> FloatArray:
        """Compute forward differences (backward at an upper bound), [n, p]."""
        start = self.residuals(x)
        columns = np.zeros((len(start), len(self.parameters)))
        for index, constant in enumerate(self.parameters):
            step = constant.step if x[index] + constant.step <= constant.high else -constant.step
            moved = x.copy()
            moved[index] += step
            columns[:, index] = (self.residuals(moved) - start) / step
        return columns

    @property
    def priors(self) -> FloatArray:
        """Return the prior means, [p]."""
        return np.array([constant.prior for constant in self.parameters], dtype=np.float64)

    @property
    def sigmas(self) -> FloatArray:
        """Return the priors' one sigmas, [p]."""
        return np.array([constant.sigma for constant in self.parameters], dtype=np.float64)

    def pulls(self, x: FloatArray) -> FloatArray:
        """Compute (x - prior) / sigma, [p]."""
        return np.asarray((x - self.priors) / self.sigmas)

    def box(self, x: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the minimum and maximum change of x in an iteration."""
        low = np.array(
            [max(-constant.longest_move, constant.low - v) for constant, v in zip(self.parameters, x, strict=True)]
        )
        high = np.array(
            [min(constant.longest_move, constant.high - v) for constant, v in zip(self.parameters, x, strict=True)]
        )
        return low, high


@dataclass(frozen=True, slots=True)
class Point:
    """Point of a descent: x [p], residuals [n], and their scale."""

    x: FloatArray
    residuals: FloatArray
    scale: float

    def value(self, model: Model, scale: float) -> float:
        """Compute the objective at this point under a given scale."""
        return objective(self.residuals, scale, model.pulls(self.x))


def descend(model: Model, x: FloatArray, iterations: int = MAX_ITERATIONS) -> Point:
    """Find a local minimum from a start; the scale of the residuals is estimated anew after every step."""
    residuals = model.residuals(x)
    count = len(model.parameters)
    point = Point(x, residuals, robust_scale(residuals - np.median(residuals), count))
    for _ in range(iterations if count else 0):
        jacobian = model.jacobian(point.x)
        change = linear_step(
            point.residuals, jacobian, point.scale, model.pulls(point.x), model.sigmas, model.box(point.x)
        )
        moved = _shortened(model, point, change)
        if moved is None:
            break
        step = np.max(np.abs(moved.x - point.x) / model.sigmas)
        gain = point.value(model, point.scale) - moved.value(model, point.scale)
        same_scale = abs(moved.scale / point.scale - 1.0) < SAME_SCALE
        settled = same_scale and (step < SMALL_MOVE or gain < SMALL_GAIN)
        point = moved
        if settled:
            break
    return Point(point.x, point.residuals, robust_scale(point.residuals, count))


def _shortened(model: Model, point: Point, change: FloatArray) -> Point | None:
    """Shorten a step until it lowers the objective; None where no length does."""
    before = point.value(model, point.scale)
    for _ in range(MAX_SHORTER):
        x = point.x + change
        residuals = model.residuals(x)
        if objective(residuals, point.scale, model.pulls(x)) <= before:
            return Point(x, residuals, robust_scale(residuals, len(model.parameters)))
        change = change / 3.0
    return None


def best_descent(model: Model, starts: Sequence[FloatArray] = ()) -> Point:
    """Run several short descents and continue the best; without ``starts`` from the priors, once for every start
    of the launches."""
    chosen = list(starts) or _starts(model)
    points = [descend(model, x, FIRST_ITERATIONS if len(chosen) > 1 else MAX_ITERATIONS) for x in chosen]
    scale = min(point.scale for point in points)
    best = min(points, key=lambda point: point.value(model, scale))
    return descend(model, best.x) if len(chosen) > 1 else best


def hopped(model: Model, point: Point) -> Point:
    """Search for a lower minimum by hops along single parameters.

    Launches, rooflines and hidden communication give the objective kinks, and kinks cause local minima.
    """
    sigmas = np.sqrt(np.diag(Linear.of(model, point).covariance))
    best = point
    for index, constant in enumerate(model.parameters):
        for sign in (-1.0, 1.0):
            x = point.x.copy()
            x[index] = np.clip(x[index] + sign * HOP_SIGMAS * sigmas[index], constant.low, constant.high)
            there = descend(model, x, 1)
            if there.value(model, point.scale) < best.value(model, point.scale) - HOP_GAIN:
                best = there
    return descend(model, best.x) if best is not point else point


def _starts(model: Model) -> list[FloatArray]:
    starts = [model.priors]
    names = [constant.name for constant in model.parameters]
    for name, values in STARTS_S.items():
        for value in values if name in names else ():
            x = model.priors
            x[names.index(name)] = value
            starts.append(x)
    return starts


@dataclass(frozen=True, slots=True)
class Linear:
    """Linearisation of the model at a point, with the covariance of its parameters."""

    point: Point
    jacobian: FloatArray
    covariance: FloatArray

    @staticmethod
    def of(model: Model, point: Point) -> Linear:
        """Linearise the model at a point."""
        jacobian = model.jacobian(point.x)
        return Linear(point, jacobian, covariance(point.residuals, jacobian, point.scale, model.sigmas))
