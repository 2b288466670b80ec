"""The command ``tune``: trial runs, proposed until the regret of the best measured plan is proved small."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer

from milpplan.calibration.sources import LoggedRun, steps_of
from milpplan.calibration.training_logs import LoggedSteps
from milpplan.calibration.trials import (
    MEASURED_SIGMA,
    TrialScenario,
    TuneState,
    first_state,
    play,
)
from milpplan.cli import command, interrupts
from milpplan.cli.arguments import within_range
from milpplan.cli.outcome import ExitCode, emit, say, show_blocks, shown_progress
from milpplan.cli.solve_options import DEFAULTS, SolveWords
from milpplan.errors import InfeasibleError, InvalidInputError
from milpplan.launchers import target_named
from milpplan.launchers.targets import restrict
from milpplan.optimize import SolveOptions, solve_robust
from milpplan.optimize.records import ROBUST_GAP
from milpplan.problem import Problem, load_scenarios, parse_json, read_text, validated
from milpplan.problem.reading import nearest, shown
from milpplan.reports.answers.tune import play_blocks, tune_blocks, tune_document
from milpplan.reports.documents.document import document_text
from milpplan.reports.files import make_directory, write_all, write_whole
from milpplan.reports.words.plan_words import layout_text
from milpplan.units import counted, percent_text
from milpplan.validation import compare
from milpplan.validation.ranking import competitions
from milpplan.validation.runs import RunFile, read_runs
from milpplan.version import __version__

EXAMPLES: Final = (
    (
        "The first trial and its launch files",
        "llama3-8b dgx-h100 --gpus 64 --global-batch 256 --target megatron --dir trials",
    ),
    ("The next trial, from the log of the last", "--dir trials --log trials/trial-1/train.log"),
    ("A published sweep as if it were a cluster", "--play nanotron/8.86B/1nodes"),
)
STATE: Final = "tune.json"
MAX_REGRET: Final = 0.02
"""Default of the proved regret at which the trials stop."""
STEPS: Final = 10
"""Number of steps of a trial."""
_STEPS: Final = re.compile(r"(\b(?:train[-_]iters|train_steps|max_steps|steps)\"?[ =:]+)100\b")
"""Number of steps in a launch file, with its name."""


NOT_ASKED: Final = {
    name: value
    for name, value in DEFAULTS.items()
    if name
    not in (
        *("model", "hardware", "target", "gpus", "global_batch", "seq_len", "precision", "space", "fix", "allow"),
        *("memory_margin", "stack", "scenarios", "time_limit", "as_json"),
    )
}
"""Values of ``solve``'s options that are no options of trial runs."""


def tune(
    *,
    directory: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="Directory of the trials and their state.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option("--log", metavar="FILE", help="Log or event file of the pending trial.")
    ] = None,
    step_time: Annotated[
        float | None, typer.Option("--step-time", metavar="S", help="Measured step of the pending trial.")
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="The pending trial did not run: out of memory, for example.")
    ] = False,
    sigma: Annotated[
        float, typer.Option("--sigma", metavar="SHARE", help="One sigma of the measured step between runs.")
    ] = MEASURED_SIGMA,
    max_regret: Annotated[
        float | None,
        typer.Option("--max-regret", metavar="SHARE", help="Stop at this proved regret.", show_default="0.02"),
    ] = None,
    played: Annotated[
        str | None, typer.Option("--play", metavar="SWEEP", help="Play a published sweep as if it were a cluster.")
    ] = None,
    words: Annotated[SolveWords, NOT_ASKED],
) -> ExitCode:
    """Choose trial runs one after another: propose a plan with its launch files, take its log, drop the scenarios
    that it refutes, and stop when the regret of the best measured plan is proved small."""
    command.positive(max_regret, "--max-regret", "share")
    command.positive(sigma, "--sigma", "share")
    command.positive(step_time, "--step-time", "number of seconds")
    if played is not None:
        return _play(played, max_regret or MAX_REGRET)
    if directory is None:
        raise command.missing("--dir", "Expected the directory of the trials.")
    problem = None
    if words.model is None:
        _check_unused(words)
    else:
        problem = _restricted(words.whole(words.hardware), words.target, words.stack)
    state = _state(directory / STATE, problem)
    if state is None:
        if problem is None:
            raise InvalidInputError(
                f"{shown(str(directory / STATE))} does not exist, and no MODEL is given.",
                "Expected a directory in which trials were started, or MODEL and HARDWARE to start them.",
                "Give MODEL, HARDWARE, --gpus, --global-batch and --target.",
            )
        make_directory(directory, "--dir")
        with within_range():
            state = _started(problem, words.scenarios, words.time_limit)
    elif words.scenarios is not None:
        raise InvalidInputError(
            f"--scenarios is given, and {shown(str(directory / STATE))} has scenarios.",
            "Expected the scenarios that the trials were started with.",
            "Leave --scenarios out, or give another --dir.",
        )
    if max_regret is not None:
        state = state.model_copy(update={"max_regret": max_regret})
    state = _measured(state, directory, log, step_time, failed, sigma)
    return _answer(_proposed(state, directory), directory, words.as_json)


def _check_unused(words: SolveWords) -> None:
    """Refuse options of the problem without MODEL: the trials have their problem.

    Raises:
        InvalidInputError: one is given.
    """
    given = (
        words.gpus,
        words.global_batch,
        words.seq_len,
        words.target,
        words.fix,
        words.allow,
        words.memory_margin,
    )
    if any(given):
        raise InvalidInputError(
            "Options of the problem are given without MODEL.",
            "Expected MODEL and HARDWARE with them, or --dir and the result of the pending trial alone.",
            "Add MODEL and HARDWARE, or leave --gpus, --global-batch, --target, --fix and the like out.",
        )


def _restricted(problem: Problem, target: str | None, stack: bool) -> Problem:
    """Restrict a problem to what its launcher can run; its number of GPUs and its batch must be fixed."""
    if target is None:
        raise command.missing("--target", "Expected the launcher that runs the trials.")
    if len(problem.job.num_gpus_values) > 1 or len(problem.job.global_batch_values) > 1:
        raise InvalidInputError(
            "--gpus or --global-batch is a range.",
            "Expected one number of GPUs and one batch: trials are compared by their steps.",
            "Give one value of each.",
        )
    return restrict(problem, target, stack=stack)


def _state(path: Path, problem: Problem | None) -> TuneState | None:
    """Read the state of the trials; None where there is none.

    Raises:
        InvalidInputError: it cannot be read, or belongs to another problem.
    """
    if not path.exists():
        return None
    state = validated(TuneState, parse_json(read_text(path), str(path)), str(path))
    if problem is not None and problem != state.problem:
        raise InvalidInputError(
            f"{shown(str(path))} holds the trials of another problem.",
            "Expected the model, the hardware, the job and the space that the trials were started with.",
            "Give --dir alone to go on, or another --dir to start anew.",
        )
    return state


def _started(problem: Problem, path: Path | None, time_limit: float | None) -> TuneState:
    """Solve the problem in all scenarios, and start the trials."""
    command.positive(time_limit, "--time-limit", "number of seconds")
    given = None if path is None else load_scenarios(path)
    options = SolveOptions(gap=ROBUST_GAP, time_limit_s=time_limit, cancelled=interrupts.asked_to_stop)
    with shown_progress("step_time_per_token") as callback, interrupts.limited(time_limit):
        result = solve_robust(problem, given, replace(options, callback=callback))
    if result.status == "infeasible":
        raise InfeasibleError(
            "No plan satisfies the request: proved.",
            "Expected a problem with a plan.",
            "`milpplan solve` with the same words says what would help.",
        )
    regret = result.regret
    bounds = [] if regret is None else [entry.lower_bound_s for entry in regret.scenarios]
    if regret is None or result.plan is None or None in bounds:
        raise InvalidInputError(
            "The search ended before every scenario had a proved bound.",
            "Expected a plan and bounds in every scenario.",
            "Give more --time-limit, or fewer choices (--space uniform, --fix tp=8).",
        )
    entries = [
        TrialScenario(name=entry.name, scenario=entry.scenario, lower_bound_s=bound)
        for entry, bound in zip(regret.scenarios, bounds, strict=True)
        if bound is not None
    ]
    plans = (result.plan, *(entry.best_plan for entry in regret.scenarios))
    return first_state(problem, entries, plans, MAX_REGRET)


def _measured(
    state: TuneState, directory: Path, log: Path | None, step_time: float | None, failed: bool, sigma: float
) -> TuneState:
    """Add the result of the pending trial, given by hand or found as ``train.log`` beside its launch files."""
    given = [log is not None, step_time is not None, failed]
    if sum(given) > 1 or (any(given) and state.pending is None):
        seen = "no trial is pending" if state.pending is None else "several results of one trial are given"
        raise InvalidInputError(
            f"{seen.capitalize()}.",
            "Expected one of --log, --step-time and --failed for a pending trial.",
            "Run the command without them to see where the trials stand.",
        )
    if state.pending is None:
        return state
    beside = _folder(directory, state) / "train.log"
    if not any(given) and beside.is_file():
        log = beside
    if failed:
        return state.with_trial(None, sigma, "failed")
    if step_time is not None:
        return state.with_trial(step_time, sigma, "by hand")
    if log is None:
        return state
    plan = state.candidates[state.pending].plan
    steps = steps_of(LoggedRun(log, state.problem.space.target or "", state.problem, plan))
    return state.with_trial(steps.step_s, (sigma**2 + (steps.scatter or 0.0) ** 2) ** 0.5, _source(log, steps))


def _source(log: Path, steps: LoggedSteps) -> str:
    """Describe what was read of a log."""
    warm_up = f", {counted(steps.num_warm_up, 'line')} of warm-up left out" if steps.num_warm_up else ""
    return f"{log.name}: median of {counted(len(steps.steps_s), 'line')} of {steps.program}{warm_up}"


def _folder(directory: Path, state: TuneState) -> Path:
    """Return the folder of the pending trial."""
    return directory / f"trial-{len(state.trials) + 1}"


def _proposed(state: TuneState, directory: Path) -> TuneState:
    """Propose the next trial where none is pending, and write its files before the state that names it."""
    if state.pending is None and not state.is_proved:
        proposal = state.model.propose(state.trials)
        if proposal is not None:
            state = state.model_copy(update={"pending": proposal.candidate})
            folder = _folder(directory, state)
            make_directory(folder, "--dir")
            write_all({folder / name: text for name, text in _files(state).items()})
    write_whole(directory / STATE, document_text(state))
    return state


def _files(state: TuneState) -> Mapping[str, str]:
    """Write the launch files of the pending trial, of ``STEPS`` steps where the launcher's files say how many."""
    assert state.pending is not None
    assert state.problem.space.target is not None
    launcher, version = target_named(state.problem.space.target, "--target"), state.problem.space.target_version
    launch = launcher.export(state.problem, state.candidates[state.pending].plan, version or "")
    files = launcher.files(launch, __version__)
    return {name: _STEPS.sub(rf"\g<1>{STEPS}", text) for name, text in files.items()}


def _answer(state: TuneState, directory: Path, as_json: bool) -> ExitCode:
    """Print the state; the exit code says whether the trials are finished."""
    files: list[str] = []
    steps: list[str] = []
    if state.pending is not None:
        folder = _folder(directory, state)
        files = [str(folder / name) for name in _files(state)]
        steps = [
            f"run it for {STEPS} steps, its output into {folder / 'train.log'}",
            f"milpplan tune --dir {directory}   (or with --log FILE, --step-time S, --failed)",
        ]
    if as_json:
        emit(document_text(tune_document(state, files)))
    else:
        show_blocks(tune_blocks(state, files, steps))
    if state.is_proved:
        return ExitCode.OPTIMAL
    measured = any(trial.step_time_s is not None for trial in state.trials)
    return ExitCode.STOPPED_WITH_PLAN if measured else ExitCode.STOPPED_WITHOUT_PLAN


def _play(name: str, max_regret: float) -> ExitCode:
    """Play the published sweeps of a name: every trial is looked up."""
    file = read_runs(None)
    names = sorted({run.sweep_id for run in file.runs if run.sweep_id})
    if name not in names:
        raise InvalidInputError(
            f"--play {shown(name)} is no published sweep.",
            f"Expected one of {len(names)} names, such as {', '.join(nearest(name, names, 3) or names[:3])}.",
            "`milpplan validate --each` prints the runs.",
        )
    chosen = RunFile(tuple(run for run in file.runs if run.sweep_id == name), file.told, ())
    with within_range():
        groups = competitions(compare(chosen, stacks=False).comparisons)
        for runs in groups:
            layout = runs[0].statement.plan.layout
            title = f"{name}, {layout.num_gpus} GPUs, batch {layout.global_batch_size}"
            layouts = [layout_text(run.statement.plan) for run in runs]
            show_blocks(play_blocks(title, layouts, play(runs, max_regret)))
    if not groups:
        say(f"No two runs of {name} compete: equal model, GPUs, batch and framework, with measured steps.")
    say(f"Stopped at a proved regret of {percent_text(max_regret)}, with the constants of the hardware alone.")
    return ExitCode.OPTIMAL
