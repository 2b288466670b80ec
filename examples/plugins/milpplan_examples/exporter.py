"""An exporter: the files of a trainer of one's own, here one JSON of settings, and how to read them back."""

from __future__ import annotations

import json

from milpplan.errors import InvalidInputError
from milpplan.launchers.capabilities import Capability, Limit
from milpplan.launchers.expressible import config_launch, field_refusals, refuse, whole_nodes
from milpplan.launchers.records import ConfigLaunch, Imported, ImportRequest, Refusal, job_of
from milpplan.problem.plan import Layout, Plan
from milpplan.problem.problem import Problem
from milpplan.problem.reading import parse_json
from milpplan.simulation.bulk.simulate_many import uniform_plan

MODES = ("none", "full")


class OwnTrainer:
    """A trainer with data, tensor and pipeline parallelism."""

    capability = Capability(
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

    def check(self, problem: Problem, version: str) -> None:
        """Refuse a model with experts, for which the trainer can run no plan."""
        refuse("own-trainer", [Refusal("it has no experts")] if problem.model.has_experts else [])

    def export(self, problem: Problem, plan: Plan, version: str) -> ConfigLaunch:
        """Turn a plan into a launch; IllegalPlanError where the trainer would run something else."""
        _, _, uneven = whole_nodes(problem, plan.layout)
        refusals = [*uneven, *field_refusals(self.capability, plan.layout)]
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
        return config_launch(self.capability, version, problem, plan, settings, ())

    def files(self, launch: ConfigLaunch, version: str) -> dict[str, str]:
        """Write the launch as files by name; the first is enough by itself."""
        start = (
            f"torchrun --nnodes {launch.num_nodes} --nproc-per-node {launch.gpus_per_node} "
            "train.py own-trainer.json"
        )
        return {"own-trainer.json": json.dumps(launch.settings, indent=2) + "\n", "own-trainer.sh": f"{start}\n"}

    def read(self, request: ImportRequest) -> Imported:
        """Read the plan of a file. The trainer's file does not name its model: ``--model`` does."""
        settings, model = parse_json(request.text, request.source), request.model
        if model is None:
            raise InvalidInputError(
                f"{request.source} does not name its model.", "Expected --model.", "Add --model NAME."
            )
        layout = Layout.model_validate(settings["layout"])
        job = job_of(layout, settings["sequence_length"])
        problem = Problem(model=model, hardware=request.hardware, job=job)
        return Imported(problem, uniform_plan(problem, layout, settings["recompute"]), (), (), ())


LAUNCHER = OwnTrainer()
