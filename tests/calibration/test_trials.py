"""``milpplan tune``: the scenarios that measured steps leave, the choice of the trial, and the state on disk."""

from __future__ import annotations

import json
import os
import random
import shutil
from math import exp, log
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from milpplan.calibration import Trial, TrialModel, best_trial
from milpplan.cli.app import app
from tests.calibration.test_training_logs import MEGATRON
from tests.cli.test_command import refused

WORDS = (
    *("tune", "llama3-8b", "dgx-h100", "--gpus", "64", "--global-batch", "256"),
    *("--target", "megatron", "--space", "uniform"),
)


def random_model(rng: random.Random) -> TrialModel:
    """Two to four scenarios of two to five candidates."""
    num_scenarios, num_candidates = rng.randint(2, 4), rng.randint(2, 5)
    steps = np.array([[rng.uniform(1.0, 1.6) for _ in range(num_candidates)] for _ in range(num_scenarios)])
    return TrialModel(steps, 0.97 * steps.min(axis=1), rng.choice((0.01, 0.04)), rng.choice((1e-3, 0.25)))


def random_trials(rng: random.Random, model: TrialModel) -> list[Trial]:
    """Trials of some candidates, some of which failed."""
    tried = rng.sample(range(model.steps_s.shape[1]), rng.randint(0, model.steps_s.shape[1] - 1))
    return [
        Trial(
            candidate=index,
            step_time_s=None if rng.random() < 0.2 else rng.uniform(1.0, 2.0),
            one_sigma=rng.choice((0.01, 0.05)),
        )
        for index in tried
    ]


def weights_left(model: TrialModel, measured: dict[int, tuple[float, float]]) -> list[float]:
    """Posterior weights, by the inverse of the whole covariance; 0 for dropped scenarios."""
    number = len(measured)
    if not number:
        return [1 / len(model.steps_s)] * len(model.steps_s)
    variances = [model.residual_sigma**2 + sigma**2 for _, sigma in measured.values()]
    covariance = np.diag(variances) + model.shared_sigma**2 * np.ones((number, number))
    distances = []
    for steps in model.steps_s:
        residuals = np.array([log(step / steps[index]) for index, (step, _) in measured.items()])
        distances.append(residuals @ np.linalg.inv(covariance) @ residuals)
    scale = max(1.0, min(distances) / number)
    beyond = [(distance - min(distances)) / scale for distance in distances]
    weights = [exp(-distance / 2) if distance <= 9 else 0.0 for distance in beyond]
    return [weight / sum(weights) for weight in weights]


def expected_regret(model: TrialModel, measured: dict[int, tuple[float, float]], candidate: int) -> float:
    """Expected regret after a trial, every scenario in turn taken for the truth."""
    total = 0.0
    for truth, weight in enumerate(weights_left(model, measured)):
        if not weight:
            continue
        # Expected shared factor: regression of the factor on the residuals.
        precision = [1 / (model.residual_sigma**2 + sigma**2) for _, sigma in measured.values()]
        residuals = [log(step / model.steps_s[truth][index]) for index, (step, _) in measured.items()]
        shared = sum(p * r for p, r in zip(precision, residuals, strict=True))
        shared /= 1 / model.shared_sigma**2 + sum(precision)
        after = measured | {candidate: (float(model.steps_s[truth][candidate]) * exp(shared), 0.01)}
        best = min(after, key=lambda index: after[index][0])
        regrets = [
            model.steps_s[scenario][best] / model.lower_bounds_s[scenario] - 1
            for scenario, left in enumerate(weights_left(model, after))
            if left
        ]
        total += weight * max(regrets)
    return total


@pytest.mark.parametrize("seed", range(60))
def test_the_trial_has_the_smallest_expected_regret_of_all(seed: int) -> None:
    """Weights and choice equal those of an enumeration with whole covariance matrices."""
    rng = random.Random(seed)
    model = random_model(rng)
    trials = random_trials(rng, model)
    measured = {t.candidate: (t.step_time_s, t.one_sigma) for t in trials if t.step_time_s is not None}
    posterior = model.posterior(trials)
    assert posterior.weights == pytest.approx(weights_left(model, measured), abs=1e-9)
    tried = {trial.candidate for trial in trials}
    expected = {
        index: expected_regret(model, measured, index)
        for index in range(model.steps_s.shape[1])
        if index not in tried
    }
    proposal = model.propose(trials)
    assert proposal is not None
    assert proposal.candidate in expected
    assert proposal.expected_regret == pytest.approx(min(expected.values()), abs=1e-9)
    assert expected[proposal.candidate] == pytest.approx(min(expected.values()), abs=1e-9)


def test_measured_steps_drop_the_scenario_that_they_refute() -> None:
    """Two plans change their order between two scenarios; the measured order leaves one, whatever the unit."""
    steps = np.array([[1.0, 2.0], [2.0, 1.0]])
    model = TrialModel(steps, steps.min(axis=1), 0.04, 0.25)
    trials = [Trial(candidate=0, step_time_s=1.1)]
    assert model.proved_regret(trials) is None
    trials.append(Trial(candidate=1, step_time_s=2.2))
    assert list(model.posterior(trials).left) == [True, False]
    assert model.proved_regret(trials) == 0.0
    assert model.propose(trials) is None
    best = best_trial(trials)
    assert best is not None
    assert best.candidate == 0


def test_steps_that_no_scenario_explains_prove_nothing() -> None:
    """Both scenarios predict equal steps, and the measured ones differ by a factor of three."""
    model = TrialModel(np.ones((2, 3)), np.ones(2), 0.04, 0.25)
    trials = [Trial(candidate=0, step_time_s=1.0), Trial(candidate=1, step_time_s=3.0)]
    assert not model.posterior(trials).explained
    assert model.proved_regret(trials) is None


def test_failed_trials_prove_nothing_and_are_not_repeated() -> None:
    """The proposal is among the others."""
    model = TrialModel(np.array([[1.0, 2.0]]), np.ones(1), 0.04, 0.25)
    trials = [Trial(candidate=0, step_time_s=None)]
    assert model.proved_regret(trials) is None
    proposal = model.propose(trials)
    assert proposal is not None
    assert proposal.candidate == 1


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with its first trial."""
    directory = tmp_path_factory.mktemp("tune") / "trials"
    done = tune(directory, *WORDS[1:])
    assert done.exit_code == 5, done.output
    return directory


@pytest.fixture
def directory(started: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(started, tmp_path / "trials"))


def tune(directory: Path, *words: str) -> Result:
    """The command on a directory."""
    return CliRunner().invoke(app, ["tune", *words, "--dir", str(directory)])


def state(directory: Path) -> dict:  # type: ignore[type-arg]
    """The state on disk."""
    return dict(json.loads((directory / "tune.json").read_text()))


def log_text(directory: Path, seconds: float, **changes: int) -> str:
    """A log of the pending trial as Megatron-LM prints it, some of its degrees changed."""
    pending = state(directory)
    layout = pending["candidates"][pending["pending"]]["plan"]["layout"]
    names = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
    }
    lines = [f"  {name} {'.' * 20} {changes.get(key, layout[key])}" for key, name in names.items()]
    batch = changes.get("global_batch_size", 256)
    lines += [MEGATRON.format(number=n, ms=1e3 * seconds, batch=batch) for n in range(1, 11)]
    return "\n".join(lines)


def test_the_first_run_writes_the_files_of_a_trial_of_ten_steps(directory: Path) -> None:
    """They are the exporter's, and the state names the plan."""
    script = (directory / "trial-1" / "megatron.sh").read_text()
    assert "--train-iters 10\n" in script
    assert state(directory)["pending"] is not None


def test_a_second_run_goes_on_where_the_first_stopped(directory: Path) -> None:
    """With and without the words of the problem; without a result nothing changes."""
    before = (directory / "tune.json").read_text()
    for words in ((), WORDS[1:]):
        done = tune(directory, *words)
        assert done.exit_code == 5
        # One measured step proves nothing.
        assert "after it, proved once a second step is measured" in " ".join(done.stdout.split())
        assert (directory / "tune.json").read_text() == before
    other = [word.replace("256", "512") for word in WORDS[1:]]
    assert "another problem" in refused(tune(directory, *other))
    assert (directory / "tune.json").read_text() == before


def test_logs_and_steps_by_hand_lead_to_the_end(directory: Path) -> None:
    """Every trial takes what the nominal scenario predicts: its optimum is proved."""
    for number in range(1, 9):
        pending = state(directory)
        if pending["pending"] is None:
            break
        nominal = pending["candidates"][pending["pending"]]["steps_s"][0]
        if number == 1:
            log = directory / "trial-1" / "train.log"
            log.write_text(log_text(directory, nominal))
            done = tune(directory)
        else:
            done = tune(directory, "--step-time", str(nominal), "--json")
    trials = state(directory)["trials"]
    assert state(directory)["pending"] is None
    assert "median of" in trials[0]["source"]
    document = json.loads(done.stdout)
    nominal_steps = [candidate["steps_s"][0] for candidate in state(directory)["candidates"]]
    assert document["best_step_time_s"] == pytest.approx(min(nominal_steps), rel=1e-3)
    assert "nominal" in document["scenarios_left"]
    assert (done.exit_code == 0) == document["is_proved"]
    assert tune(directory, "--max-regret", "0.5").exit_code == 0
    assert state(directory)["max_regret"] == 0.5
    assert "No trial is pending" in refused(tune(directory, "--failed"))


@pytest.mark.parametrize("change", [{"tp": 64}, {"pp": 32}, {"global_batch_size": 512}])
def test_a_log_of_another_layout_is_refused(directory: Path, change: dict[str, int]) -> None:
    """The degrees and the batch that the log prints count; the state stays."""
    before = (directory / "tune.json").read_text()
    log = directory / "other.log"
    log.write_text(log_text(directory, 3.0, **change))
    message = refused(tune(directory, "--log", str(log)))
    assert str(next(iter(change.values()))) in message
    assert (directory / "tune.json").read_text() == before


def test_a_failed_trial_is_not_proposed_again(directory: Path) -> None:
    """The next one is another candidate."""
    first = state(directory)["pending"]
    assert tune(directory, "--failed").exit_code == 5
    assert state(directory)["pending"] not in (first, None)


def test_an_interrupted_write_loses_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old state stays whole; the run that follows proposes what the interrupted one did."""
    before, replace = (directory / "tune.json").read_text(), os.replace

    def stopped(source: str, target: Path) -> None:
        if Path(target).name == "tune.json":
            raise OSError("no space left")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stopped)
        refused(tune(directory, "--step-time", "4"))
    assert (directory / "tune.json").read_text() == before
    assert (directory / "trial-2" / "megatron.sh").exists()
    script = (directory / "trial-2" / "megatron.sh").read_text()
    assert tune(directory, "--step-time", "4").exit_code == 4
    assert (directory / "trial-2" / "megatron.sh").read_text() == script
    assert not list(directory.rglob("*.tmp"))


def test_bad_input_is_refused(directory: Path, tmp_path: Path) -> None:
    """A missing directory, two results at once, a state that somebody has cut, an unknown sweep."""
    assert "no MODEL" in refused(tune(tmp_path / "none"))
    assert "without MODEL" in refused(tune(directory, "--gpus", "64"))
    assert "has scenarios" in refused(tune(directory, *WORDS[1:], "--scenarios", "any.toml"))
    assert "several results" in refused(tune(directory, "--step-time", "4", "--failed")).lower()
    refused(tune(directory, "--step-time", "-1"))
    refused(tune(tmp_path / "new", *[word.replace("256", "128:256:64") for word in WORDS[1:]]))
    text = (directory / "tune.json").read_text()
    (directory / "tune.json").write_text(text[: len(text) // 2])
    refused(tune(directory))
    (directory / "tune.json").write_text(text.replace('"pending": 0', '"pending": 99'))
    refused(tune(directory))
    assert "no published sweep" in refused(CliRunner().invoke(app, ["tune", "--play", "nanotron/none"]))


@pytest.mark.long
def test_a_sweep_is_played_to_its_end() -> None:
    """Every trial is a run of the sweep, and the last row is the stop."""
    done = CliRunner().invoke(app, ["tune", "--play", "bloom/h13824-L78/02-25..27"])
    assert done.exit_code == 0, done.output
    assert "stopped after" in done.stdout
