"""Fit of hardware and software constants to measured steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from milpplan.calibration.fitting.descent import Linear, Model, Point, best_descent, descend, hopped
from milpplan.calibration.fitting.identify import Dropped, rivals_of_launches, unidentified
from milpplan.calibration.fitting.parameters import Theta, parameter
from milpplan.calibration.fitting.predicting import Predictor
from milpplan.calibration.fitting.records import Constant, Fit
from milpplan.calibration.fitting.robust import linear_step
from milpplan.calibration.measured import Observation, StepPredictor, on_hardware
from milpplan.errors import InvalidInputError
from milpplan.problem.hardware import HardwareSpec
from milpplan.problem.overlay import CONSTANTS, FACTORS, SWITCHES, USUAL

FloatArray = npt.NDArray[np.float64]
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
        hops: search for a lower minimum near the first one (``calibration.fitting.descent.hopped``), which
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
        model = Model(model.predictor, tuple(model.parameters[i] for i in keep), model.theta)
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
