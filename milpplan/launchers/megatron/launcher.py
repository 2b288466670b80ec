"""Launcher Megatron-LM: ``torchrun`` with arguments, checked against its parser and rules before writing."""

from __future__ import annotations

import shlex

from milpplan.errors import IllegalPlanError
from milpplan.launchers.expressible import (
    check_replicas,
)
from milpplan.launchers.import_request import ImportRequest
from milpplan.launchers.megatron.arguments import Values, checked
from milpplan.launchers.megatron.plan import check_problem, for_version, megatron_launch
from milpplan.launchers.megatron.reader import imported
from milpplan.launchers.megatron.rules import MEGATRON, check_environment, check_rules
from milpplan.launchers.records import Imported, Launch
from milpplan.launchers.scripts import arguments_script, slurm_script
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
SCRIPT, BATCH_SCRIPT = "megatron.sh", "megatron.sbatch"


class Megatron:
    """Launcher Megatron-LM: command-line arguments of ``pretrain_gpt.py``."""

    capability = MEGATRON

    def check(self, problem: Problem, version: str) -> None:
        """Refuse a problem for which Megatron-LM can run no plan.

        Raises:
            IllegalPlanError: Megatron-LM cannot build the model, or does not support such a job or cluster.
        """
        check_problem(problem, version)

    def export(self, problem: Problem, plan: Plan, version: str) -> Launch:
        """Turn a plan into a launch.

        Raises:
            IllegalPlanError: Megatron-LM cannot express the plan or would refuse it.
        """
        check_replicas(MEGATRON, plan)
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

    def files(self, launch: Launch, version: str) -> dict[str, str]:
        """Write the launch as files by name; the first is enough to start the run. ``version`` is milpplan's."""
        return {
            SCRIPT: torchrun_script(launch, version),
            BATCH_SCRIPT: slurm_script(launch, version, SCRIPT),
        }

    def read(self, request: ImportRequest) -> Imported:
        """Read a launch script or an argument file into a problem and a plan."""
        return imported(request)


def torchrun_script(launch: Launch, version: str) -> str:
    """Write the script that every node runs; on one node it is enough by itself. ``version`` is milpplan's."""
    before = ("# Where Megatron-LM is, and where this node is.", "MEGATRON_DIR=${MEGATRON_DIR:-.}")
    fixed: dict[str, dict[str, Values]] = {
        "TRAINING_ARGS": {flag: (value,) for flag, value in TRAINING},
        "DATA_ARGS": {"--mock-data": (), "--tokenizer-type": ("NullTokenizer",)},
    }
    return arguments_script(launch, version, before, '"$MEGATRON_DIR/pretrain_gpt.py"', fixed, _written)


def _written(flag: str, values: Values) -> str:
    return " ".join((flag, *map(shlex.quote, values)))
