"""Launcher Megatron-LM: ``torchrun`` with arguments, checked against its parser and rules before writing."""

from __future__ import annotations

import shlex

from milpplan.errors import IllegalPlanError
from milpplan.launchers.megatron.arguments import Values, checked
from milpplan.launchers.megatron.plan import for_version, megatron_launch
from milpplan.launchers.megatron.rules import check_environment, check_rules
from milpplan.launchers.records import Launch
from milpplan.launchers.scripts import TORCHRUN, header, places, slurm_script, wrapped
from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem

TRAINING = (
    ("--train-iters", "100"),
    ("--lr", "1.0e-4"),
    ("--min-lr", "1.0e-5"),
    ("--lr-decay-style", "cosine"),
    ("--weight-decay", "0.1"),
    ("--clip-grad", "1.0"),
    ("--log-interval", "1"),
    ("--eval-iters", "0"),
    ("--distributed-timeout-minutes", "60"),
)
"""Training arguments that a run needs and a plan does not decide."""


def torchrun_script(launch: Launch, version: str) -> str:
    """Write the script that every node runs; on one node it is enough by itself.

    Args:
        launch: the arguments.
        version: of milpplan, for the comment.
    """
    names = [part.name for part in launch.sections]
    lines = ["#!/usr/bin/env bash", *header(launch, version), "set -euo pipefail", ""]
    lines += [
        "# Where Megatron-LM is, and where this node is.",
        "MEGATRON_DIR=${MEGATRON_DIR:-.}",
        *places(launch),
    ]
    for part in launch.sections:
        lines += ["", *(f"# {line}" for line in wrapped(part.why)), *_array(part.name, part.arguments)]
    lines += [
        "",
        "# Not decided by the plan: learning rates, data and tokenizer. As it stands, it runs on mock data.",
        *_array("TRAINING_ARGS", {flag: (value,) for flag, value in TRAINING}),
        *_array("DATA_ARGS", {"--mock-data": (), "--tokenizer-type": ("NullTokenizer",)}),
        "",
        *TORCHRUN,
        '    "$MEGATRON_DIR/pretrain_gpt.py" \\',
        *(f'    "${{{name}[@]}}" \\' for name in [*names, "TRAINING_ARGS"]),
        '    "${DATA_ARGS[@]}"',
    ]
    return "\n".join(lines) + "\n"


def _array(name: str, arguments: dict[str, Values]) -> list[str]:
    rows = [f"    {' '.join((flag, *map(shlex.quote, values)))}" for flag, values in arguments.items()]
    return [f"{name}=(", *rows, ")"]


SCRIPT = "megatron.sh"
BATCH_SCRIPT = "megatron.sbatch"


def exported(problem: Problem, plan: Plan, version: str) -> Launch:
    """Turn a plan into a launch.

    Raises:
        IllegalPlanError: Megatron-LM cannot express the plan or would refuse it.
    """
    launch = for_version(megatron_launch(problem, plan, version))
    _, unknown = checked(launch.arguments.values.items(), "the export")
    if unknown:
        raise IllegalPlanError(
            f"Megatron-LM {version} has no argument {unknown[0]}.",
            "Expected arguments of its parser.",
            "Choose another --target-version.",
        )
    fix = "Fix the degree that it names in the next solve (--fix NAME=VALUE)."
    check_rules(launch.arguments, launch.num_gpus, fix)
    check_environment(launch.arguments, launch.environment)
    return launch


def files_of(launch: Launch, version: str) -> dict[str, str]:
    """Write the launch as files by name; the first is enough to start the run. ``version`` is milpplan's."""
    return {
        SCRIPT: torchrun_script(launch, version),
        BATCH_SCRIPT: slurm_script(launch, version, SCRIPT),
    }
