"""The option ``--calculon MODEL EXECUTION SYSTEM``: Calculon's three files instead of our own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from milpplan.cli import arguments, solving
from milpplan.cli.clusters import is_cluster
from milpplan.cli.outcome import ExitCode, say
from milpplan.errors import InvalidInputError
from milpplan.problem.calculon.translation import (
    CalculonFiles,
    calculon_problem,
    calculon_run,
    notes,
    read_calculon,
)
from milpplan.problem.problem import MAX_BATCH, MAX_GPUS, SPACES, Problem

Files = tuple[Path, Path, Path]
FROM_FILES: Final = (
    "kind",
    "seq_len",
    "precision",
    "attention",
    "grad_dtype",
    "objective",
    "deadline_hours",
    "tokens",
    "ignore",
)
"""Options that the files replace."""


def simulate(files: Files | None, plan: Path | None, as_json: bool) -> ExitCode:
    """Simulate a plan file, or Calculon's files; then say what Calculon prices differently."""
    if files is None:
        if plan is None:
            raise _missing("PLAN.json", "a plan file")
        return solving.simulate_file(plan, as_json)
    if plan is not None:
        raise _beside("a plan file")
    read = read_calculon(*files)
    code = solving.simulate_file(None, as_json, calculon_run(read))
    _say_notes(read)
    return code


def _say_notes(files: CalculonFiles, free: bool = False) -> None:
    for note in notes(files, free):
        say(note)


def problem_of(
    files: Files | None,
    named: Mapping[str, str | None],
    job: Mapping[str, Any],
    space: str,
    fix: list[str],
    allow: Iterable[str] = (),
    schedule: str | None = None,
) -> Problem:
    """Build the problem of Calculon's files, or of the words of the command line.

    Args:
        files: the paths; None: all is in the words.
        named: MODEL and HARDWARE as given.
        job: the options that describe the job.
        space: name of the space.
        fix: fields of the layout that are fixed.
        allow: switches that are opened.
        schedule: names of schedules to choose from.
    """
    if files is None:
        words = {**named, "--gpus": job["gpus"], "--global-batch": job["global_batch"]}
        if is_cluster(named["HARDWARE"] or ""):
            words.pop("--gpus")
        missing = [name for name, value in words.items() if value is None]
        if missing:
            raise _missing(" and ".join(missing), ", ".join(words))
        model, hardware = str(named["MODEL"]), str(named["HARDWARE"])
        return arguments.problem_of(model, hardware, job, space, fix, allow, schedule)
    _refuse_beside(named, job)
    read = read_calculon(*files)
    declared = SPACES[arguments.choice(space, "--space", tuple(SPACES))]
    problem = calculon_problem(read, declared)
    sizes = {
        "num_gpus": ("gpus", "--gpus", MAX_GPUS),
        "global_batch_size": ("global_batch", "--global-batch", MAX_BATCH),
    }
    changes = {
        field: arguments.count_or_range(job[name], option, most)
        for field, (name, option, most) in sizes.items()
        if job[name] is not None
    }
    problem = problem.model_copy(update={"job": problem.job.model_copy(update=changes)})
    arguments.check_size(problem.job)
    problem = arguments.narrowed(problem, fix, allow, schedule)
    _say_notes(read, free=True)
    return problem


def _refuse_beside(named: Mapping[str, str | None], job: Mapping[str, Any]) -> None:
    """Refuse options that the files replace; those with defaults are refused where they differ from the files."""
    given = [name for name, value in named.items() if value is not None]
    defaults = {
        "kind": "training",
        "precision": "bf16",
        "attention": "flash",
        "grad_dtype": "fp32",
        "objective": arguments.OBJECTIVES[0],
    }
    options = {"kind": "--inference"}
    said = [name for name in FROM_FILES if job[name] != defaults.get(name)]
    given += [options.get(name, f"--{name.replace('_', '-')}") for name in said]
    if given:
        raise _beside(" and ".join(given))


def _missing(what: str, expected: str) -> InvalidInputError:
    return InvalidInputError(
        f"{what} is missing." if " and " not in what else f"{what} are missing.",
        f"Expected {expected}, or --calculon with three files.",
        "Add it; --help lists the arguments and options.",
    )


def _beside(what: str) -> InvalidInputError:
    return InvalidInputError(
        f"--calculon is given together with {what}.",
        "Expected the three files MODEL, EXECUTION and SYSTEM alone: they say all of it.",
        "Leave one of them out; with --calculon, solve takes --gpus and --global-batch in place of the file's.",
    )
