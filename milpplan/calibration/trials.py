"""Trial runs: which plan to measure next, and which scenarios the measured steps leave (``milpplan tune``).

A scenario s predicts the step t_s(x) of plan x, up to a factor exp(b_s) that all plans share:

    log m(x) = log t_s(x) + b_s + e_x,    b_s ~ N(0, tau^2),    e_x ~ N(0, sigma^2),

with the measured step m(x). With r = log m - log t_s, weights p = 1 / sigma^2 and sums over the measured plans,

    D_s = sum p r^2 - (sum p r)^2 / (1 / tau^2 + sum p)      squared distance, -2 log likelihood up to a constant
    E[b_s] = sum p r / (1 / tau^2 + sum p)                   shared factor

Where min D exceeds the number n of measured plans, no scenario explains them, and all D are divided by min D / n
(the square of Birge's ratio). The posterior weight of s is proportional to exp(-D_s / 2); scenarios with
D_s > min D + ``DROPPED`` are dropped. With the proved lower bound L_s of all plans of the space, the regret of a
plan is at most max_s t_s(x) / L_s - 1 over the scenarios that are left. That counts as proved only if the nearest
scenario explains the measured steps (min D before the division, chi-squared with n degrees of freedom), of which
there must be three: the shared factor absorbs one of them, and a single contrast is small by chance too often.

Source: normal-normal model with a random effect, Gelman et al., Bayesian Data Analysis, 3rd ed., ch. 5; Birge, The
calculation of errors by the method of least squares, Physical Review 40, 1932; one-step
look-ahead, Frazier, Powell and Dayanik, A knowledge-gradient policy for sequential information collection, 2008.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, hypot, sqrt
from typing import Annotated, Final, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from milpplan.problem import Plan, Problem, Scenario, default_scenarios, in_scenario, uncertainty_of
from milpplan.problem.records import Count, NonNegativeFloat, PositiveFloat, Record
from milpplan.simulation import simulate
from milpplan.validation.comparison import Comparison
from milpplan.version import __version__

FloatArray = npt.NDArray[np.float64]
SIGMAS: Final = 3.0
"""Number of standard deviations beyond which a scenario, or all of them, do not explain the measured steps."""
DROPPED: Final = SIGMAS**2
"""Squared distance beyond the least above which a scenario is dropped."""
MIN_MEASURED: Final = 3
"""Minimum of measured plans for a proof, of as many candidates: two contrasts beside the shared factor."""
MEASURED_SIGMA: Final = 0.01
"""Default one sigma of a measured step, as a fraction: repeated runs of a plan."""
LEAST_SHARED_SIGMA: Final = 1e-3
"""Least one sigma of the factor that all plans share."""


class Trial(Record):
    """Trial of a candidate: its measured step, or a run that failed (None)."""

    candidate: Count
    step_time_s: PositiveFloat | None
    one_sigma: PositiveFloat = MEASURED_SIGMA
    """Of the measured step, as a fraction."""
    source: str = ""
    """Origin of the step: a log's name and its lines, or by hand."""


class Candidate(Record):
    """Plan that may be tried, with its predicted steps in all scenarios."""

    plan: Plan
    steps_s: tuple[PositiveFloat, ...]


class TrialScenario(Record):
    """Scenario with the proved lower bound of the steps of all plans; ``scenario`` is None for the nominal one."""

    name: str
    scenario: Scenario | None = None
    lower_bound_s: PositiveFloat


class TuneState(Record):
    """State of ``milpplan tune`` in its directory."""

    schema_version: Literal[1] = 1
    milpplan_version: str
    """Version of the cost model that the predicted steps and the bounds are of."""
    problem: Problem
    max_regret: NonNegativeFloat
    """Proved regret at which no further trial is proposed, as a fraction."""
    scenarios: Annotated[tuple[TrialScenario, ...], Field(min_length=1)]
    candidates: Annotated[tuple[Candidate, ...], Field(min_length=1)]
    trials: tuple[Trial, ...] = ()
    pending: Count | None = None
    """Index of the proposed candidate whose step is awaited."""

    @model_validator(mode="after")
    def _indices_fit(self) -> TuneState:
        tried = [trial.candidate for trial in self.trials]
        indices = [*tried, *([] if self.pending is None else [self.pending])]
        if len(set(indices)) < len(indices) or any(index >= len(self.candidates) for index in indices):
            raise ValueError(
                f"trials name the candidates {indices} of {len(self.candidates)}: each may occur once"
            )
        if any(len(candidate.steps_s) != len(self.scenarios) for candidate in self.candidates):
            raise ValueError("every candidate needs one step for each scenario")
        return self

    @property
    def model(self) -> TrialModel:
        """Predicted steps and bounds as arrays."""
        steps = np.array([candidate.steps_s for candidate in self.candidates], dtype=np.float64).T
        bounds = np.array([scenario.lower_bound_s for scenario in self.scenarios], dtype=np.float64)
        return TrialModel(steps, bounds, *sigmas(self.problem))

    @property
    def proved_regret(self) -> float | None:
        """Proved regret of the best measured plan; None where nothing is proved."""
        return self.model.proved_regret(self.trials)

    @property
    def is_proved(self) -> bool:
        """True if the proved regret is within its limit."""
        regret = self.proved_regret
        return regret is not None and regret <= self.max_regret

    def with_trial(self, step_time_s: float | None, one_sigma: float, source: str) -> TuneState:
        """Add the result of the pending trial, which then is no longer pending."""
        assert self.pending is not None
        trial = Trial(candidate=self.pending, step_time_s=step_time_s, one_sigma=one_sigma, source=source)
        return self.model_copy(update={"trials": (*self.trials, trial), "pending": None})


def sigmas(problem: Problem) -> tuple[float, float]:
    """Return one sigma of a predicted step that no constant explains, and of the factor that all plans share.

    The factor is that of the matrix products and of the spread between clusters.
    """
    uncertainty = uncertainty_of(problem.hardware)
    shared = hypot(uncertainty.gemm_efficiency, uncertainty.sources_fraction)
    return uncertainty.residual_fraction, max(shared, LEAST_SHARED_SIGMA)


@dataclass(frozen=True, slots=True)
class Posterior:
    """Scenarios after the measured steps; arrays over the scenarios.

    Attributes:
        explained: True where the nearest scenario explains the measured steps within three sigma.
        shared: expected logarithms of the factor that all plans share.
        left: True for scenarios that are not dropped.
        weights: posterior weights; 0 for dropped scenarios.
    """

    explained: bool
    shared: FloatArray
    left: npt.NDArray[np.bool_]
    weights: FloatArray


@dataclass(frozen=True, slots=True)
class Proposal:
    """Next trial, and the regret that is expected to be proved after it."""

    candidate: int
    expected_regret: float


@dataclass(frozen=True, slots=True)
class TrialModel:
    """Predicted steps of candidates in scenarios.

    Attributes:
        steps_s: seconds, scenarios x candidates.
        lower_bounds_s: proved lower bounds of all plans of the space, by scenario.
        residual_sigma: one sigma of a predicted step that no constant explains, as a fraction.
        shared_sigma: one sigma of the factor that all plans share, as a fraction.
    """

    steps_s: FloatArray
    lower_bounds_s: FloatArray
    residual_sigma: float
    shared_sigma: float

    def posterior(self, trials: Sequence[Trial]) -> Posterior:
        """Compare the scenarios with the measured steps; failed trials say nothing of them."""
        measured = [trial for trial in trials if trial.step_time_s is not None]
        steps = np.array([trial.step_time_s for trial in measured], dtype=np.float64)
        measured_sigmas = np.array([trial.one_sigma for trial in measured], dtype=np.float64)
        precisions = 1.0 / (self.residual_sigma**2 + measured_sigmas**2)
        residuals = np.log(steps) - np.log(self.steps_s[:, [trial.candidate for trial in measured]])
        total = 1.0 / self.shared_sigma**2 + float(precisions.sum())
        sums = residuals @ precisions
        distances = residuals**2 @ precisions - sums**2 / total
        least, number = float(distances.min()), len(measured)
        beyond = (distances - least) / max(1.0, least / max(1, number))
        left = beyond <= DROPPED
        weights = np.where(left, np.exp(-0.5 * beyond), 0.0)
        explained = least <= number + SIGMAS * sqrt(2.0 * number)
        return Posterior(explained, sums / total, left, weights / weights.sum())

    def regret(self, candidate: int, left: npt.NDArray[np.bool_]) -> float:
        """Return the proved upper bound of a candidate's regret over the scenarios that are left."""
        ratios = self.steps_s[left, candidate] / self.lower_bounds_s[left]
        return max(0.0, float(ratios.max()) - 1.0)

    def proved_regret(self, trials: Sequence[Trial]) -> float | None:
        """Return the proved regret of the best measured plan; None where the measured steps prove none."""
        best, posterior = best_trial(trials), self.posterior(trials)
        num_measured = sum(trial.step_time_s is not None for trial in trials)
        if best is None or not posterior.explained or num_measured < min(MIN_MEASURED, self.steps_s.shape[1]):
            return None
        return self.regret(best.candidate, posterior.left)

    def propose(self, trials: Sequence[Trial]) -> Proposal | None:
        """Choose the trial after which the smallest regret is expected.

        A trial's outcome is predicted in every scenario that is left, and weighted by the scenario. Ties go to the
        candidate with the smaller expected step, then to the first.

        Returns:
            The proposal; None where every candidate was tried.
        """
        tried, posterior = {trial.candidate for trial in trials}, self.posterior(trials)
        steps = posterior.weights @ np.log(self.steps_s)
        open_candidates = [index for index in range(self.steps_s.shape[1]) if index not in tried]
        values = [
            (self._expected_regret(index, trials, posterior), steps[index], index) for index in open_candidates
        ]
        return Proposal(min(values)[2], min(values)[0]) if values else None

    def _expected_regret(self, candidate: int, trials: Sequence[Trial], posterior: Posterior) -> float:
        """Return the expected regret of the best measured plan after the trial of a candidate."""
        expected = 0.0
        for scenario in np.flatnonzero(posterior.left):
            outcome = float(self.steps_s[scenario, candidate]) * exp(posterior.shared[scenario])
            after = [*trials, Trial.model_construct(candidate=candidate, step_time_s=outcome)]
            best = best_trial(after)
            assert best is not None
            expected += posterior.weights[scenario] * self.regret(best.candidate, self.posterior(after).left)
        return float(expected)


def best_trial(trials: Sequence[Trial]) -> Trial | None:
    """Return the trial with the shortest measured step; None where no step was measured."""
    measured = [(trial.step_time_s, index) for index, trial in enumerate(trials) if trial.step_time_s is not None]
    return trials[min(measured)[1]] if measured else None


@dataclass(frozen=True, slots=True)
class Played:
    """Measured sweep as a cluster: runs in the order of their trials, up to the last one.

    Attributes:
        trials: all trials; ``candidate`` is the index of the run.
        num_until_stop: number of trials after which ``milpplan tune`` stops.
        regrets: proved regret after each trial; None before the first measured step.
    """

    trials: tuple[Trial, ...]
    num_until_stop: int
    regrets: tuple[float | None, ...]


def play(runs: Sequence[Comparison], max_regret: float) -> Played:
    """Play a sweep as if it were a cluster: its runs are the space, and a trial is looked up.

    Runs that are predicted not to fit are no plans of the space; they are tried last, fastest prediction first.

    Args:
        runs: competing runs of one job.
        max_regret: proved regret at which the trials stop, as a fraction. The order goes on to the last run.
    """
    problem = runs[0].statement.problem
    fitting = [index for index, run in enumerate(runs) if run.report.fits] or list(range(len(runs)))
    problems = [None, *default_scenarios(problem)]
    steps = np.array([[_step_s(runs[index], scenario) for index in fitting] for scenario in problems])
    model = TrialModel(steps, steps.min(axis=1), *sigmas(problem))
    trials: list[Trial] = []
    regrets: list[float | None] = []
    while (proposal := model.propose(trials)) is not None:
        run = runs[fitting[proposal.candidate]]
        trials.append(Trial(candidate=proposal.candidate, step_time_s=run.step and run.step.step_time_s))
        regrets.append(model.proved_regret(trials))
    reached = (number for number, regret in enumerate(regrets, 1) if regret is not None and regret <= max_regret)
    num_until_stop = next(reached, len(trials))
    others = sorted(set(range(len(runs))) - set(fitting), key=lambda index: runs[index].report.step_time_s)
    known = [trial.model_copy(update={"candidate": fitting[trial.candidate]}) for trial in trials]
    further = [
        Trial(candidate=index, step_time_s=step.step_time_s if (step := runs[index].step) else None)
        for index in others
    ]
    return Played((*known, *further), num_until_stop, (*regrets, *(regrets[-1] for _ in further)))


def _step_s(run: Comparison, scenario: Scenario | None) -> float:
    """Predict the step of a run in a scenario; None is the nominal one."""
    if scenario is None:
        return run.report.step_time_s
    return simulate(in_scenario(run.statement.problem, scenario), run.statement.plan).step_time_s


def first_state(
    problem: Problem, scenarios: Sequence[TrialScenario], plans: Iterable[Plan], max_regret: float
) -> TuneState:
    """Start the trials.

    Args:
        problem: the nominal problem.
        scenarios: all scenarios with their proved bounds.
        plans: plans that may be tried; equal plans become one candidate.
        max_regret: proved regret at which the trials stop, as a fraction.
    """
    problems = [problem if entry.scenario is None else in_scenario(problem, entry.scenario) for entry in scenarios]
    candidates = tuple(
        Candidate(plan=plan, steps_s=tuple(simulate(there, plan).step_time_s for there in problems))
        for plan in dict.fromkeys(plans)
    )
    return TuneState(
        milpplan_version=__version__,
        problem=problem,
        max_regret=max_regret,
        scenarios=tuple(scenarios),
        candidates=candidates,
    )
