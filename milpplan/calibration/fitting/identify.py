"""Identification of constants: those with a small one sigma, jointly with all other fitted constants.

A factor is identified where its one sigma is at most 15 %. A time in seconds is identified where its one sigma is
at most 30 % of it, or changes the median step (of those that depend on it) by at most 1 %. The worst unidentified
constant is reset to its prior, together with those inseparable from it, until all remaining ones are identified.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from milpplan.calibration.fitting.descent import FIRST_ITERATIONS, Linear, Model, descend
from milpplan.calibration.fitting.parameters import Parameter
from milpplan.calibration.fitting.robust import covariance, objective
from milpplan.units import percent_text, seconds_text

FloatArray = npt.NDArray[np.float64]

MAX_FACTOR_SIGMA: Final = 0.15
MAX_SECONDS_SIGMA: Final = 0.3
"""Maximum one sigma of a time, relative to its value."""
MAX_STEP_CHANGE: Final = 0.01
INSEPARABLE: Final = 0.8
"""Correlation above which two constants that both fail are reset together."""
LAUNCH: Final = "layer_launch_s"
LAUNCH_PROFILE_S: Final = (5e-4, 1e-3, 2e-3, 4e-3)
ALIKE: Final = 2.0
"""Difference of the objective (half a chi squared) up to which two fits count as equal: two sigma."""
RELATED: Final = 0.5
"""Correlation above which a constant is named as inseparable from another."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """Constant that the data do not identify, with its one sigma in its own unit (None: no prediction depends on
    it)."""

    name: str
    one_sigma: float | None
    note: str


def unidentified(model: Model, linear: Linear) -> list[Dropped]:
    """List the parameters to reset to their priors."""
    parameters = list(model.parameters)
    dropped: list[Dropped] = []
    keep = np.arange(len(parameters))
    while len(keep):
        cov = covariance(linear.point.residuals, linear.jacobian[:, keep], linear.point.scale, model.sigmas[keep])
        sigmas = np.sqrt(np.diag(cov))
        correlation = cov / np.outer(sigmas, sigmas)
        limits = np.array([_limit(parameters[i], linear.point.x[i], linear.jacobian[:, i]) for i in keep.tolist()])
        ratios = np.divide(sigmas, limits, out=np.full(len(keep), np.inf), where=limits > 0)
        if ratios.max() <= 1.0:
            break
        worst = int(ratios.argmax())
        gone = (ratios > 1.0) & ((np.abs(correlation[worst]) > INSEPARABLE) | ~np.isfinite(ratios))
        gone[worst] = True
        for index_in_fit in np.flatnonzero(gone).tolist():
            related = [
                parameters[int(keep[other])].name
                for other in np.argsort(-np.abs(correlation[index_in_fit]))
                if other != index_in_fit and abs(correlation[index_in_fit, other]) > RELATED
            ]
            index = int(keep[index_in_fit])
            inner, known = float(linear.point.x[index]), bool(np.isfinite(ratios[index_in_fit]))
            dropped.append(_dropped(parameters[index], inner, float(sigmas[index_in_fit]), known, related))
        keep = keep[~gone]
    return dropped


def rivals_of_launches(model: Model, linear: Linear) -> list[Dropped]:
    """List constants that move with other values of the launch times, although the data fit equally well.

    Where no layer waits for its launches, no slope shows the effect of longer ones. So the other constants are
    fitted again under several fixed launch times; a constant that moves by more than its maximum one sigma is not
    identified.
    """
    names = [constant.name for constant in model.parameters]
    if LAUNCH not in names or np.any(linear.jacobian[:, names.index(LAUNCH)]):
        return []
    rest = [index for index, name in enumerate(names) if name != LAUNCH]
    point, none = linear.point, np.zeros(0)
    here = objective(point.residuals, point.scale, none)
    for launch in LAUNCH_PROFILE_S:
        theta = model.theta.with_value(LAUNCH, launch)
        other = Model(model.predictor, tuple(model.parameters[i] for i in rest), theta)
        there = descend(other, point.x[rest], FIRST_ITERATIONS)
        if objective(there.residuals, point.scale, none) > here + ALIKE:
            continue
        moves = dict(zip(rest, np.abs(there.x - point.x[rest]).tolist(), strict=True))
        lost = [
            i
            for i, move in moves.items()
            if move > _limit(model.parameters[i], point.x[i], linear.jacobian[:, i]) > 0
        ]
        if lost:
            note = f"not told apart from {LAUNCH}, whose {seconds_text(launch)} would fit alike"
            rivals = [Dropped(names[i], model.parameters[i].value_sigma(point.x[i], moves[i]), note) for i in lost]
            others = " and ".join(names[i] for i in lost)
            return [Dropped(LAUNCH, launch, f"not told apart from {others}"), *rivals]
    return []


def _limit(constant: Parameter, inner: float, slopes: FloatArray) -> float:
    """Return the maximum one sigma, in the fit's unit, of an identified constant; 0 where nothing depends on
    it."""
    felt = np.abs(slopes)[np.abs(slopes) > 0]
    if not len(felt):
        return 0.0
    if constant.is_factor:
        return MAX_FACTOR_SIGMA
    return max(MAX_SECONDS_SIGMA * inner, MAX_STEP_CHANGE / float(np.median(felt)))


def _dropped(constant: Parameter, inner: float, sigma: float, is_determined: bool, related: list[str]) -> Dropped:
    if not is_determined:
        return Dropped(constant.name, None, "no prediction depends on it")
    own = constant.value_sigma(inner, sigma)
    text = percent_text(own) if constant.is_factor else seconds_text(own)
    note = f"one sigma would be {text}"
    if related:
        note += f"; not told apart from {' and '.join(related[:2])}"
    return Dropped(constant.name, own, note)
