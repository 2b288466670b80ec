"""The option ``--calculon MODEL EXECUTION SYSTEM``: Calculon's three files instead of our own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from milpplan.cli import arguments, command
from milpplan.cli.outcome import say
from milpplan.errors import InvalidInputError
from milpplan.problem import Problem
from milpplan.problem.calculon.translation import (
    CalculonFiles,
    calculon_problem,
    notes,
    read_calculon,
)
from milpplan.problem.problem import MAX_BATCH, MAX_GPUS, SPACES

Files = tuple[Path, Path, Path]
FROM_FILES: Final = (
    "kind",
    "seq_len",
    "precision",
    "attention",
    "grad_dtype",
    "lora_rank",
    "lora_modules",
    "freeze",
    "mtp_layers",
    "expert_imbalance",
    "optimizer",
    "muon_tp_mode",
    "vision_tokens",
    "image_tokens",
    "images",
    "alignment",
    "reference",
    "rollout_seconds",
    "rollout_tokens_per_s",
    "rollout_memory",
    "rollout_apart",
    "objective",
    "deadline_hours",
    "tokens",
    "ignore",
)
"""Options that the files replace."""


def say_notes(files: CalculonFiles, free: bool = False) -> None:
    """Print what Calculon prices differently; ``free``: for any plan, not that of the files."""
    for note in notes(files, free):
        say(note)


def problem_of(
    files: Files,
    model: str | None,
    hardware: str | None,
    job: Mapping[str, Any],
    space: str,
    fix: Iterable[str],
    allow: Iterable[str] = (),
    schedule: str | None = None,
) -> Problem:
    """Build the problem of Calculon's files; the other arguments are those of ``arguments.problem_of``.

    Raises:
        InvalidInputError: a file is wrong, or an option is given that the files replace.
    """
    _refuse_beside({"MODEL": model, "HARDWARE": hardware}, job)
    read = read_calculon(*files)
    declared = SPACES[command.choice(space, "--space", tuple(SPACES))]
    problem = calculon_problem(read, declared)
    sizes = {
        "num_gpus": ("gpus", "--gpus", MAX_GPUS),
        "global_batch_size": ("global_batch", "--global-batch", MAX_BATCH),
    }
    changes = {
        field: command.count_or_range(job[name], option, maximum)
        for field, (name, option, maximum) in sizes.items()
        if job[name] is not None
    }
    problem = problem.model_copy(update={"job": problem.job.model_copy(update=changes)})
    arguments.check_size(problem.job)
    problem = arguments.with_margin(arguments.narrowed(problem, fix, allow, schedule), job.get("memory_margin"))
    say_notes(read, free=True)
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
        "mtp_layers": 0,
        "rollout_apart": False,
        "optimizer": "adam",
    }
    options = {"kind": "--inference"}
    said = [name for name in FROM_FILES if job[name] != defaults.get(name)]
    given += [options.get(name, f"--{name.replace('_', '-')}") for name in said]
    if given:
        raise beside(" and ".join(given))


def beside(what: str) -> InvalidInputError:
    """Build the error for words that are given beside Calculon's files."""
    return InvalidInputError(
        f"--calculon is given together with {what}.",
        "Expected the three files MODEL, EXECUTION and SYSTEM alone: they say all of it.",
        "Leave one of them out; with --calculon, solve takes --gpus and --global-batch in place of the file's.",
    )
