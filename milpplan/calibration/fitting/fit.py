"""Fit of hardware and software constants to measured steps.

Only constants are fitted that have a small one sigma, jointly with all other fitted constants. A factor is
identified where its one sigma is at most 15 %. A time in seconds is identified where its one sigma is at most 30 %
of it, or changes the median step (of those that depend on it) by at most 1 %; so is a hidden fraction up to 0.15,
and the congestion up to 0.5 of its logarithm. The worst unidentified constant is
reset to its prior, together with those inseparable from it, until all remaining ones are identified.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from milpplan.calibration import Observation, StepPredictor
from milpplan.calibration.fitting.fitted_constants import (
    STARTS_S,
    Parameter,
    Predictor,
    Theta,
    parameter,
)
from milpplan.calibration.fitting.least_squares import covariance, linear_step, objective, robust_scale
from milpplan.calibration.fitting.records import Constant, Fit
from milpplan.calibration.measured import on_hardware
from milpplan.errors import InvalidInputError
from milpplan.problem import FACTORS, HardwareSpec
from milpplan.problem.overlay import CONGESTION, CONSTANTS, SHARES, SWITCHES, TIMES, USUAL
from milpplan.units import percent_text, seconds_text

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
        return np.asarray(np.log(self.predictor.times_s(self.at(x)) / self.predictor.measured_s))

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


FloatArray = npt.NDArray[np.float64]

MAX_FACTOR_SIGMA: Final = 0.15
MAX_SECONDS_SIGMA: Final = 0.3
"""Maximum one sigma of a time, relative to its value."""
MAX_SHARE_SIGMA: Final = 0.15
MAX_CONGESTION_SIGMA: Final = 0.5
"""Maximum one sigma of the congestion's logarithm."""
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
    if constant.name == CONGESTION:
        limit = MAX_CONGESTION_SIGMA
    else:
        limit = MAX_SHARE_SIGMA if constant.name in SHARES else MAX_SECONDS_SIGMA * inner
    return max(limit, MAX_STEP_CHANGE / float(np.median(felt)))


def _dropped(constant: Parameter, inner: float, sigma: float, is_determined: bool, related: list[str]) -> Dropped:
    if not is_determined:
        return Dropped(constant.name, None, "no prediction depends on it")
    own = constant.value_sigma(inner, sigma)
    text = seconds_text(own) if constant.name in TIMES else percent_text(own)
    note = f"one sigma would be {text}"
    if related:
        note += f"; not told apart from {' and '.join(related[:2])}"
    return Dropped(constant.name, own, note)


Progress = Callable[[str], None]

LEAVE_ONE_OUT: Final = 20
"""Maximum number of runs or groups that are left out one by one; more are left out a tenth at a time."""
MANY_FOLDS: Final = 10
MAX_ROUNDS: Final = 4
"""Maximum number of rounds of fitting and of resetting unidentified constants."""
SWITCH_EVIDENCE: Final = 2.0
"""Difference of the objective (half a chi squared) that decides a switch: two sigma."""


def fit(
    runs: Sequence[Observation],
    hardware: HardwareSpec | None = None,
    constants: Sequence[str] = USUAL,
    groups: Sequence[Hashable] | None = None,
    num_folds: int | None = None,
    progress: Progress | None = None,
    hops: bool = True,
) -> Fit:
    """Fit constants to measured steps, robustly, and determine which of them the data identify.

    Args:
        runs: measured steps (``milpplan.calibration.measured``).
        hardware: replaces the runs' own descriptions; None keeps each run's own.
        constants: the subset of ``milpplan.problem.overlay.CONSTANTS`` to fit; others keep their values.
        groups: a label for every run; runs of one label are left out together. None: every run is its own group.
        num_folds: number of parts that are left out in turn; None: one per label, or 10 beyond 20 labels.
        progress: called with a description of the present work.
        hops: search for a lower minimum near the first one (``hopped``), which
        doubles the
            time.

    Returns:
        Values, uncertainties and errors. The left-out errors come from fits without the fold, linearised at the
        full fit with the same constants identified; the steps left out are simulated exactly.

    Raises:
        InvalidInputError: no runs, an unknown constant, or labels that do not match the runs.
    """
    _check(runs, constants, groups)
    chosen = list(runs) if hardware is None else on_hardware(runs, hardware)
    return fit_predicted(StepPredictor(chosen), constants, groups, num_folds, progress, hops)


def fit_predicted(
    predictor: Predictor,
    constants: Sequence[str],
    groups: Sequence[Hashable] | None = None,
    num_folds: int | None = None,
    progress: Progress | None = None,
    hops: bool = True,
) -> Fit:
    """Fit constants to the measurements of any predictor."""
    tell = progress or (lambda text: None)
    base = predictor.base
    parameters = tuple(parameter(name, base) for name in CONSTANTS if name in constants and name not in SWITCHES)
    settle = hopped if hops else (lambda model, point: point)
    model, point, switch = _switched(
        Model(predictor, parameters, Theta()), base, SWITCHES[0] in constants, tell, settle
    )
    model, point, dropped = _without_unidentified(model, point, tell)
    linear = Linear.of(model, point)
    folds = _folds(groups if groups is not None else range(len(predictor.ids)), num_folds)
    tell(f"leaving out {len(folds)} parts in turn")
    continuous = [_constant(constant.name, base, model, linear, dropped) for constant in parameters]
    return Fit(
        constants=(*continuous, *switch),
        ids=predictor.ids,
        measured_s=predictor.measured_s,
        before_s=predictor.times_s(Theta()),
        after_s=predictor.times_s(model.at(point.x)),
        left_out_s=_left_out(model, linear, folds),
        scatter=point.scale,
        num_folds=len(folds),
    )


def _without_unidentified(model: Model, point: Point, tell: Progress) -> tuple[Model, Point, dict[str, Dropped]]:
    """Fit the constants that the data identify, with the others at their priors, until no further one must be
    reset."""
    dropped: dict[str, Dropped] = {}
    for _ in range(MAX_ROUNDS):
        linear = Linear.of(model, point)
        # The test of rival launches says more than a slope does.
        gone = {
            constant.name: constant
            for constant in (*unidentified(model, linear), *rivals_of_launches(model, linear))
        }
        if not gone:
            break
        dropped |= gone
        tell(f"not identified: {', '.join(gone)}")
        keep = [i for i, constant in enumerate(model.parameters) if constant.name not in dropped]
        theta = model.theta
        for constant in model.parameters:
            # The congestion's prior is not the description's value where that is 0.
            if constant.name == CONGESTION and constant.name in gone:
                theta = theta.with_value(constant.name, constant.value(constant.prior))
        model = Model(model.predictor, tuple(model.parameters[i] for i in keep), theta)
        point = best_descent(model, [point.x[keep], model.priors]) if keep else descend(model, np.zeros(0))
    return model, point, dropped


def _check(runs: Sequence[Observation], constants: Sequence[str], groups: Sequence[Hashable] | None) -> None:
    if not runs:
        raise InvalidInputError(
            "There is no measured step to fit to.",
            "Expected at least one run that can be simulated and was timed.",
            "See docs/calibration.md for what a run must say.",
        )
    unknown = [name for name in constants if name not in CONSTANTS]
    if unknown or not constants:
        raise InvalidInputError(
            f"The constants to fit are {', '.join(unknown) or 'none'}.",
            f"Expected some of {', '.join(CONSTANTS)}.",
            "Correct the names.",
        )
    if groups is not None and len(groups) != len(runs):
        raise InvalidInputError(
            f"There are {len(groups)} labels for {len(runs)} runs.", "Expected one label a run.", "Match them."
        )


def _switched(
    model: Model, base: HardwareSpec, wanted: bool, tell: Progress, settle: Callable[[Model, Point], Point]
) -> tuple[Model, Point, tuple[Constant, ...]]:
    """Fit under the better value of ``overlap_tensor_parallel``, and record what the data say about it."""
    tell("fitting")
    point = settle(model, best_descent(model))
    if not wanted:
        return model, point, ()
    name = SWITCHES[0]
    prior = base.software.overlap_tensor_parallel
    other = Model(model.predictor, model.parameters, Theta(overlap_tensor_parallel=not prior))
    at = model.at(point.x)
    same = np.array_equal(model.predictor.times_s(at), model.predictor.times_s(other.at(point.x)))
    if same:
        note = "no prediction depends on it"
        return model, point, (Constant(name, float(prior), None, False, float(prior), note),)
    tell(f"fitting with {name} = {'false' if prior else 'true'}")
    rival = descend(other, point.x)
    scale = min(point.scale, rival.scale)
    evidence = point.value(model, scale) - rival.value(other, scale)
    identified = abs(evidence) > SWITCH_EVIDENCE
    note = "" if identified else "both values fit alike"
    if identified and evidence > 0:
        return other, rival, (Constant(name, float(not prior), None, True, float(prior), note),)
    return model, point, (Constant(name, float(prior), None, identified, float(prior), note),)


def _constant(
    name: str, base: HardwareSpec, model: Model, linear: Linear, dropped: dict[str, Dropped]
) -> Constant:
    constant = parameter(name, base)
    prior = constant.value(constant.prior)
    if name in dropped:
        return Constant(name, prior, dropped[name].one_sigma, False, prior, dropped[name].note)
    index = [constant.name for constant in model.parameters].index(name)
    inner, sigma = float(linear.point.x[index]), float(np.sqrt(linear.covariance[index, index]))
    note = ""
    if name in FACTORS and min(inner - constant.low, constant.high - inner) < 1e-6:
        note = "at the bound of what is admitted"
    return Constant(name, constant.value(inner), constant.value_sigma(inner, sigma), True, prior, note)


def _folds(labels: Sequence[Hashable], wanted: int | None) -> list[npt.NDArray[np.int64]]:
    """Split rows into folds of about equal size in a fixed order, with every label in a single fold."""
    rows: dict[Hashable, list[int]] = {}
    for row, label in enumerate(labels):
        rows.setdefault(label, []).append(row)
    number = wanted or (len(rows) if len(rows) <= LEAVE_ONE_OUT else MANY_FOLDS)
    folds: list[list[int]] = [[] for _ in range(max(1, min(number, len(rows))))]
    for members in sorted(rows.values(), key=len, reverse=True):
        min(folds, key=len).extend(members)
    return [np.array(sorted(fold)) for fold in folds]


def _left_out(model: Model, linear: Linear, folds: list[npt.NDArray[np.int64]]) -> FloatArray:
    """Predict seconds per step of every fold by a fit to the others; NaN with a single fold."""
    point = linear.point
    times: FloatArray = np.full(len(point.residuals), np.nan)
    if len(folds) < 2:
        return times
    low = np.array([constant.low for constant in model.parameters]) - point.x
    high = np.array([constant.high for constant in model.parameters]) - point.x
    for fold in folds:
        seen = np.setdiff1d(np.arange(len(times)), fold)
        change = linear_step(
            point.residuals[seen],
            linear.jacobian[seen],
            point.scale,
            model.pulls(point.x),
            model.sigmas,
            (low, high),
        )
        times[fold] = model.predictor.part(fold).times_s(model.at(point.x + change))
    return times
