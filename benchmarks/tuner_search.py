"""Black-box tuners behind one call: they turn the knobs of an encoding until the budget or the target ends it.

Random search draws every knob evenly. Optuna's TPE and SMAC3's random forests (the facade for hyperparameters)
run with their defaults, by ask and tell, one evaluation at a time. All three see the same knobs and costs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tuner_encoding import Ask, Encoding, Knob, picked

Evaluate = Callable[[Ask], float]


class BudgetSpentError(Exception):
    """Raised out of an evaluation when the run is over; every tuner lets it pass."""


@dataclass(frozen=True, slots=True)
class Budget:
    """When a run ends: evaluations, CPU seconds, or a step time in seconds that is good enough."""

    evaluations: int
    cpu_s: float
    target_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TunerRun:
    """One run: ``improvements`` are (evaluations so far, CPU seconds so far, step time in seconds) whenever the
    best plan got faster. ``evaluations`` counts all that was proposed, ``legal`` and ``fitting`` what was."""

    tuner: str
    seed: int
    evaluations: int
    legal: int
    fitting: int
    cpu_s: float
    improvements: tuple[tuple[int, float, float], ...]

    def reached(self, step_time_s: float) -> tuple[float, float]:
        """Evaluations and CPU seconds until a plan was as fast as that; infinite where none was."""
        hits = ((count, cpu_s) for count, cpu_s, best_s in self.improvements if best_s <= step_time_s)
        return next(hits, (float("inf"), float("inf")))

    def best_s(self, evaluations: float = float("inf")) -> float:
        """The fastest step after that many evaluations, in seconds; infinite where nothing fitted."""
        return min(
            (best_s for count, _, best_s in self.improvements if count <= evaluations), default=float("inf")
        )


class _Recorder:
    """Evaluates settings, keeps what the tables need, and ends the run."""

    def __init__(self, encoding: Encoding, budget: Budget) -> None:
        self.encoding, self.budget = encoding, budget
        self.evaluations = self.legal = self.fitting = 0
        self.improvements: list[tuple[int, float, float]] = []
        self.started_s = time.process_time()

    @property
    def cpu_s(self) -> float:
        return time.process_time() - self.started_s

    def __call__(self, ask: Ask) -> float:
        if self.evaluations >= self.budget.evaluations or self.cpu_s >= self.budget.cpu_s:
            raise BudgetSpentError
        found = self.encoding.evaluate(ask)
        self.evaluations += 1
        self.legal += found.is_legal
        if found.step_time_s is not None:
            self.fitting += 1
            self._better(found.step_time_s)
        return found.cost

    def _better(self, step_time_s: float) -> None:
        if self.improvements and step_time_s >= self.improvements[-1][2]:
            return
        self.improvements.append((self.evaluations, self.cpu_s, step_time_s))
        if step_time_s <= self.budget.target_s:
            raise BudgetSpentError


def tune(tuner: str, encoding: Encoding, seed: int, budget: Budget) -> TunerRun:
    """One run of a tuner of ``TUNERS``."""
    recorder = _Recorder(encoding, budget)
    with suppress(BudgetSpentError):
        TUNERS[tuner](encoding, seed, recorder)
    name = f"{tuner}, guided" if encoding.is_guided else tuner
    return TunerRun(
        name,
        seed,
        recorder.evaluations,
        recorder.legal,
        recorder.fitting,
        recorder.cpu_s,
        tuple(recorder.improvements),
    )


def random_search(encoding: Encoding, seed: int, evaluate: Evaluate) -> None:
    """Every knob drawn evenly, until the budget ends it."""
    generator = np.random.default_rng(seed)

    def ask(knob: Knob) -> Any:
        return knob.values[generator.integers(len(knob.values))] if knob.values else generator.random()

    while True:
        evaluate(ask)


def optuna_tpe(encoding: Encoding, seed: int, evaluate: Evaluate) -> None:
    """Optuna's tree-structured Parzen estimator with its defaults; knobs are suggested when they are asked for."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))

    while True:
        trial = study.ask()
        study.tell(trial, evaluate(lambda knob, trial=trial: _suggested(trial, knob)))


def _suggested(trial: Any, knob: Knob) -> Any:
    """A knob's value from an Optuna trial."""
    if knob.picking == "choice":
        return trial.suggest_categorical(knob.name, knob.values)
    if knob.picking == "order":
        return knob.values[trial.suggest_int(knob.name, 0, len(knob.values) - 1)]
    return _by_share(knob, trial.suggest_float(knob.name, 0.0, 1.0))


def _by_share(knob: Knob, share: float) -> Any:
    return knob.values[picked(share, len(knob.values) - 1)] if knob.values else share


def smac(encoding: Encoding, seed: int, evaluate: Evaluate) -> None:
    """SMAC3's facade for hyperparameters (random forest, log expected improvement) with its defaults."""
    from smac import HyperparameterOptimizationFacade, Scenario
    from smac.runhistory import TrialValue

    with _folder() as folder:
        scenario = Scenario(
            _configuration_space(encoding, seed),
            deterministic=True,
            n_trials=10**6,
            seed=seed,
            output_directory=folder,
        )
        facade = HyperparameterOptimizationFacade(
            scenario, lambda config, seed=0: 0.0, overwrite=True, logging_level=50
        )
        while True:
            trial = facade.ask()
            config = dict(trial.config)
            cost = evaluate(lambda knob, config=config: _configured(config, knob))
            facade.tell(trial, TrialValue(cost=cost))


def _configuration_space(encoding: Encoding, seed: int) -> Any:
    """Every knob; those of single virtual stages are active only where ``detail`` is ``stages``."""
    from ConfigSpace import Categorical, ConfigurationSpace, EqualsCondition, Float, Integer

    space = ConfigurationSpace(seed=seed)
    parents: dict[str, Any] = {}
    for knob in encoding.knobs():
        if knob.picking == "choice":
            parameter = Categorical(knob.name, list(knob.values))
        elif knob.picking == "order":
            parameter = Integer(knob.name, (0, max(1, len(knob.values) - 1)))
        else:
            parameter = Float(knob.name, (0.0, 1.0))
        parents[knob.name] = parameter
        space.add(parameter)
        if knob.name.rpartition("_")[2].isdigit():
            space.add(EqualsCondition(parameter, parents["detail"], "stages"))
    return space


def _configured(config: dict[str, Any], knob: Knob) -> Any:
    """A knob's value from a SMAC configuration; a knob that offers one value has no say."""
    value = config[knob.name]
    if knob.picking == "order":
        return knob.values[min(int(value), len(knob.values) - 1)]
    if knob.picking == "choice":
        return next(own for own in knob.values if own == value)
    return _by_share(knob, float(value))


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder for what SMAC writes, gone afterwards."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


TUNERS: dict[str, Callable[[Encoding, int, Evaluate], None]] = {
    "random": random_search,
    "Optuna TPE": optuna_tpe,
    "SMAC3": smac,
}
