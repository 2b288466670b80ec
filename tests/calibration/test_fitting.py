"""Constants come back from steps that were made with them, and what the data do not say is not made up."""

from __future__ import annotations

import numpy as np
import pytest

from milpplan.calibration import Observation, StepPredictor
from milpplan.calibration.fitting import Fit, Theta
from milpplan.calibration.fitting.fit import _folds, fit
from milpplan.calibration.fitting.least_squares import robust_scale
from milpplan.errors import InvalidInputError
from milpplan.problem import applied
from milpplan.simulation import simulate
from tests.amounts import long_but
from tests.calibration.cases import measured_under, record, steps, varied

TRUTH = Theta(gemm_efficiency=0.8, scale_up_efficiency=0.6, layer_launch_s=1.5e-3, step_overhead_s=0.1)
FITTED = ("gemm_efficiency", "scale_up_efficiency", "layer_launch_s", "step_overhead_s")


@pytest.fixture(scope="module")
def runs() -> list[Observation]:
    """Thirty runs with 2 % noise and three outliers."""
    return measured_under(steps(varied()), TRUTH)


@pytest.fixture(scope="module", params=long_but((), (False, True)), ids=["near", "hops"])
def fitted(request: pytest.FixtureRequest, runs: list[Observation]) -> Fit:
    """Four constants fitted to them, also with a look for lower minima; a fit takes ten seconds, so all of it is
    long, and the tests of the command have a short one."""
    return fit(runs, constants=FITTED, hops=request.param)


def test_constants_come_back_within_two_sigma(fitted: Fit) -> None:
    """2 % noise and 10 % outliers move no identified constant by more than two of its sigmas."""
    assert {one.name for one in fitted.identified} == set(FITTED)
    for one in fitted.constants:
        assert one.one_sigma is not None
        assert abs(one.value - getattr(TRUTH, one.name)) <= 2 * one.one_sigma, one


def test_errors_fall_and_left_out_runs_show_over_fitting(fitted: Fit, runs: list[Observation]) -> None:
    """The fit is better than no fit, worse on runs it has not seen, and names the outliers."""
    assert fitted.error_left_out is not None
    assert fitted.error_after < fitted.error_left_out < fitted.error_before
    assert len(fitted.outliers) == 3
    assert 0.01 < fitted.scatter < 0.04
    assert fitted.num_folds == 10
    assert fitted.ids == tuple(run.id for run in runs)


def test_the_overlay_predicts_what_the_fit_did(fitted: Fit, runs: list[Observation]) -> None:
    """Applied to the hardware, the fitted constants give the fit's own predictions."""
    overlay = fitted.overlay(runs[0].problem.hardware, "mine", "thirty runs", "2026-01-01")
    hardware = applied(runs[0].problem.hardware, overlay)
    problem = runs[0].problem.model_copy(update={"hardware": hardware})
    assert simulate(problem, runs[0].plan).step_time_s == pytest.approx(fitted.after_s[0], rel=1e-9)
    assert hardware.uncertainty is not None
    assert hardware.uncertainty.residual_fraction == fitted.residual_fraction


def test_grouped_prediction_is_the_simulators() -> None:
    """Costs shared among runs change no step time."""
    runs = steps(varied())[:9]
    times = StepPredictor(runs).times_s(Theta())
    assert times.tolist() == [simulate(run.problem, run.plan).step_time_s for run in runs]


@pytest.mark.long
def test_launches_and_overhead_of_one_shape_are_not_told_apart() -> None:
    """Equal runs of one layout say one number: not all of three constants, and the output says so."""
    same = steps([record(id=f"same-{index}") for index in range(6)])
    truth = Theta(layer_launch_s=3e-3, step_overhead_s=0.05)
    found = fit(measured_under(same, truth, outliers=0.0), constants=("layer_launch_s", "step_overhead_s"))
    assert len(found.identified) < 2
    lost = [one for one in found.constants if not one.identified]
    assert any("not told apart from" in one.note for one in lost)
    assert all(one.value == one.prior for one in lost)


def test_what_no_prediction_depends_on_is_kept() -> None:
    """Without communication the network's constants and the overlap stay, and are called not identified."""
    alone = [
        record(
            id=f"alone-{batch}",
            parallel__tp=1,
            parallel__pp=1,
            parallel__dp=1,
            parallel__global_batch=batch,
            hardware__gpus_total=1,
            parallel__grad_accum=None,
        )
        for batch in (4, 8, 16)
    ]
    names = ("gemm_efficiency", "scale_up_efficiency", "scale_out_efficiency", "overlap_tensor_parallel")
    found = fit(measured_under(steps(alone), Theta(gemm_efficiency=0.7), outliers=0.0), constants=names)
    for name in names[1:]:
        assert found.constant(name).note == "no prediction depends on it"
        assert not found.constant(name).identified
    gemm = found.constant("gemm_efficiency")
    assert gemm.one_sigma is not None
    assert abs(gemm.value - 0.7) < 2 * gemm.one_sigma


def test_the_overlap_is_found(runs: list[Observation]) -> None:
    """A framework that overlaps the tensor-parallel gradients otherwise than the description says is found out."""
    switched = not runs[0].problem.hardware.software.overlap_tensor_parallel
    truth = Theta(overlap_tensor_parallel=switched)
    made = measured_under(steps(varied())[12:24], truth, noise=0.002, outliers=0.0)
    found = fit(made, constants=("overlap_tensor_parallel",)).constant("overlap_tensor_parallel")
    assert found.identified
    assert bool(found.value) is switched


def test_labels_stay_together() -> None:
    """A fold never splits a label, and every row is in one fold."""
    labels = [index // 3 for index in range(90)]
    folds = _folds(labels, None)
    assert len(folds) == 10
    assert sorted(np.concatenate(folds).tolist()) == list(range(90))
    assert all(
        {labels[row] for row in fold}.isdisjoint(labels[row] for row in range(90) if row not in fold)
        for fold in folds
    )


def test_a_few_runs_cannot_claim_to_be_exact() -> None:
    """Two runs fitted without error still count as if others had scattered."""
    assert robust_scale(np.zeros(2), 1) > 0.02
    assert robust_scale(np.zeros(1000), 1) < 0.005


def test_mistakes_are_told(runs: list[Observation]) -> None:
    """No runs, an unknown constant, labels that do not match."""
    with pytest.raises(InvalidInputError, match="no measured step"):
        fit([])
    with pytest.raises(InvalidInputError, match="speed"):
        fit(runs, constants=("speed",))
    with pytest.raises(InvalidInputError, match="labels"):
        fit(runs, groups=["a"])
