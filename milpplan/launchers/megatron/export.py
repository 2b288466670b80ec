"""Export of a plan as files that start Megatron-LM, checked against its parser and rules before writing."""

from __future__ import annotations

from milpplan.errors import IllegalPlanError
from milpplan.launchers.arguments import checked
from milpplan.launchers.megatron.plan import megatron_launch
from milpplan.launchers.megatron.rules import check_environment, check_rules
from milpplan.launchers.megatron.script import torchrun_script
from milpplan.launchers.megatron.versions import for_version
from milpplan.launchers.records import Launch
from milpplan.launchers.scripts import slurm_script
from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem

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
