"""Files of a plan for Accelerate: they start Transformers' trainer, checked against its rules before writing."""

from __future__ import annotations

from milpplan.launchers.accelerate.files import configuration, script, yaml_text
from milpplan.launchers.accelerate.reader import imported
from milpplan.launchers.accelerate.run import ACCELERATE, check_sizes, settings_of
from milpplan.launchers.expressible import (
    check_replicas,
    config_launch,
    field_refusals,
    problem_refusals,
    recompute_refusals,
    refuse,
    rule_refusals,
    whole_nodes,
    word,
)
from milpplan.launchers.import_request import ImportRequest
from milpplan.launchers.records import ConfigLaunch, Imported, Refusal
from milpplan.launchers.scripts import slurm_script
from milpplan.problem.plan import Layout, Plan
from milpplan.problem.problem import Problem

SCRIPT, CONFIG, BATCH_SCRIPT = "accelerate.sh", "accelerate.yaml", "accelerate.sbatch"


class Accelerate:
    """Launcher Accelerate: FSDP2 or unsharded replicas under Transformers' trainer."""

    capability = ACCELERATE

    def check(self, problem: Problem, version: str) -> None:
        """Refuse a problem for which Accelerate can run no plan.

        Raises:
            IllegalPlanError: gives all reasons.
        """
        refuse(ACCELERATE.name, _problem_refusals(problem))

    def export(self, problem: Problem, plan: Plan, version: str) -> ConfigLaunch:
        """Turn a plan into a launch.

        Raises:
            IllegalPlanError: Accelerate cannot express the plan or would refuse it; gives all reasons.
        """
        check_replicas(ACCELERATE, plan)
        layout = plan.layout
        fields = field_refusals(ACCELERATE, layout, num_replicas=1)
        rules = rule_refusals(ACCELERATE, problem, layout)
        refuse(ACCELERATE.name, [*_problem_refusals(problem), *recompute_refusals(plan), *fields, *rules])
        kind = "FSDP" if layout.zero_stage else "DDP"
        shards = layout.dp if layout.zero_stage else 1
        sizes = {"dp_replicate": layout.dp // shards, "dp_shard": shards, "cp": layout.cp, "tp": layout.tp}
        check_sizes(kind, sizes, layout.num_gpus)
        num_nodes, _, _ = whole_nodes(problem, layout)
        settings = settings_of(plan, num_nodes, problem.job.sequence_length)
        return config_launch(ACCELERATE, version, problem, plan, settings, _notes(layout))

    def files(self, launch: ConfigLaunch, version: str) -> dict[str, str]:
        """Write the launch as files by name; the first is enough to start the run. ``version`` is milpplan's."""
        return {
            SCRIPT: script(launch, version),
            CONFIG: yaml_text(configuration(launch)),
            BATCH_SCRIPT: slurm_script(launch, version, SCRIPT),
        }

    def read(self, request: ImportRequest) -> Imported:
        """Read a configuration or a launch script into a problem and a plan."""
        return imported(request)


def _notes(layout: Layout) -> tuple[str, ...]:
    notes = ["MODEL is a directory or name of Transformers with the sizes of the plan's model."]
    if layout.zero_stage:
        notes.append("FSDP2 reduces gradients in bf16 here, half the bytes that the plan counts.")
    if layout.zero_stage == 2:
        notes.append(
            "ZeRO 2 is fsdp_reshard_after_forward false: weights stay gathered from the forward to the backward."
        )
    if layout.cp > 1:
        notes.append(f"Context parallelism needs sdpa without a mask; {word(layout.cp)} ranks pass keys around.")
    return tuple(notes)


def _problem_refusals(problem: Problem) -> list[Refusal]:
    """List the properties of a problem that no plan for Accelerate supports."""
    return problem_refusals(
        problem,
        products="mixed_precision bf16 is what is written",
        gradients="FSDP2 keeps the sharded ones in fp32",
        attention="Transformers chooses a fused one (sdpa)",
    )
