"""An exporter: the files of a trainer of one's own, here one JSON of settings, and how to read them back."""

from __future__ import annotations

import json
from collections.abc import Collection

from milpplan.errors import InvalidInputError
from milpplan.launchers.capabilities import Capability, Limit
from milpplan.launchers.expressible import field_refusals, refuse, whole_nodes
from milpplan.launchers.records import ConfigLaunch, Imported, Refusal
from milpplan.launchers.targets import Target
from milpplan.problem.hardware import HardwareSpec
from milpplan.problem.model import ModelSpec
from milpplan.problem.plan import Layout, Plan
from milpplan.problem.problem import Job, Problem
from milpplan.problem.reading import parse_json
from milpplan.simulation.bulk.simulate_many import uniform_plan

CAPABILITY = Capability(
    name="own-trainer",
    versions=("1",),
    limits={
        "schedule": Limit(("1f1b",), "the trainer runs 1F1B"),
        "zero_stage": Limit((0, 1), "it shards optimizer states only"),
        "cp": Limit((1,), "it has no context parallelism"),
        "ep": Limit((1,), "it has no experts"),
    },
    stages="equal",
)
MODES = ("none", "full")


def exported(problem: Problem, plan: Plan, version: str) -> ConfigLaunch:
    """The launch of a plan; IllegalPlanError where the trainer would run something else."""
    nodes, per_node, uneven = whole_nodes(problem, plan.layout)
    refusals = [*uneven, *field_refusals(CAPABILITY, plan.layout)]
    mode = next((mode for mode in MODES if uniform_plan(problem, plan.layout, mode) == plan), None)
    if mode is None:
        refusals.append(
            Refusal("stages or recomputation differ: it has equal stages that recompute all or nothing")
        )
    refuse("own-trainer", refusals)
    settings = {
        "layout": plan.layout.model_dump(mode="json", exclude_defaults=True),
        "recompute": mode,
        "sequence_length": problem.job.sequence_length,
    }
    return ConfigLaunch("own-trainer", version, (), nodes, per_node, {}, settings, ())


def files_of(launch: ConfigLaunch, milpplan_version: str) -> dict[str, str]:
    """File names and their texts; the first is enough by itself."""
    start = (
        f"torchrun --nnodes {launch.num_nodes} --nproc-per-node {launch.gpus_per_node} train.py own-trainer.json"
    )
    return {"own-trainer.json": json.dumps(launch.settings, indent=2) + "\n", "own-trainer.sh": f"{start}\n"}


def imported(
    text: str,
    source: str,
    hardware: HardwareSpec,
    num_gpus: int | None,
    model: ModelSpec | None,
    vocab_size: int | None,
    ignore: Collection[str],
) -> Imported:
    """The plan of a file. The trainer's file does not name its model: ``--model`` does."""
    settings = parse_json(text, source)
    if model is None:
        raise InvalidInputError(f"{source} does not name its model.", "Expected --model.", "Add --model NAME.")
    layout = Layout.model_validate(settings["layout"])
    length = settings["sequence_length"]
    job = Job(num_gpus=layout.num_gpus, global_batch_size=layout.global_batch_size, sequence_length=length)
    problem = Problem(model=model, hardware=hardware, job=job)
    return Imported(problem, uniform_plan(problem, layout, settings["recompute"]), (), (), ())


TARGET = Target(CAPABILITY, exported, files_of, imported)
