"""Launcher torchtitan: TOML up to 0.2.2 and Python since, checked against its rules before writing."""

from __future__ import annotations

import json
from typing import Any

from milpplan.launchers.expressible import (
    check_replicas,
    config_launch,
    field_refusals,
    format_refusals,
    job_refusals,
    layout_differences,
    recompute_refusals,
    refuse,
    whole_nodes,
)
from milpplan.launchers.import_request import ImportRequest
from milpplan.launchers.records import ConfigLaunch, Imported, Refusal
from milpplan.launchers.scripts import header, slurm_script, torchrun_script
from milpplan.launchers.torchtitan.reader import imported
from milpplan.launchers.torchtitan.rules import RULES, TORCHTITAN, broken_rules
from milpplan.launchers.torchtitan.run import (
    NEWEST,
    V022,
    Pair,
    Run,
    flavor_of,
    layout_of_run,
    plan_losses,
    run_of_plan,
    sharding_of,
)
from milpplan.launchers.torchtitan.settings import settings_of
from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem

MODULE = "torchtitan_plan"
"""Name of the configuration file and of its Python module."""

WHY = {
    "model": "The model, one that torchtitan knows by name and flavor.",
    "training": "The batch of a step, and number formats.",
    "parallelism": "Degrees, stages and sharding.",
    "activation_checkpoint": "Recomputation of whole layers, of all or of none.",
    "compile": "Layers are compiled: their kernels are fused, as they are priced.",
}
TRAINING_022: dict[str, dict[str, Any]] = {
    "model": {"hf_assets_path": "./assets/hf/tokenizer"},
    "training": {"dataset": "c4", "steps": 100},
    "optimizer": {"name": "AdamW", "lr": 3e-4},
    "lr_scheduler": {"warmup_steps": 20},
}
"""Settings that a run needs and a plan does not decide."""
IMPORTS = {
    "0.3.0": (
        "from torchtitan.components.loss import CrossEntropyLoss",
        "from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw",
        "from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig",
        "from torchtitan.distributed.activation_checkpoint import FullAC",
        "from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader",
        "from torchtitan.models.common.config_utils import decoder_vocab_size",
        "from torchtitan.models.{model} import model_registry",
        "from torchtitan.trainer import Trainer",
    ),
    NEWEST: (
        "from torchtitan.components.data import ConcatThenSplitPackingConfig, GrainDataLoader",
        "from torchtitan.components.loss import CrossEntropyLoss",
        "from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw",
        "from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig",
        "from torchtitan.distributed.activation_checkpoint import FullAC",
        "from torchtitan.hf_datasets.text_datasets import DATASETS",
        "from torchtitan.models.common.config_utils import decoder_vocab_size",
        "from torchtitan.models.{model} import model_registry",
        "from torchtitan.trainer import Trainer",
    ),
}
DATA = {
    "0.3.0": 'HuggingFaceTextDataLoader.Config(dataset="c4")',
    NEWEST: 'GrainDataLoader.Config(dataset=ConcatThenSplitPackingConfig(dataset=DATASETS["c4"]))',
}
CLASSES = {"training": "TrainingConfig", "parallelism": "ParallelismConfig", "compile": "CompileConfig"}
SCRIPT = "torchtitan.sh"
BATCH_SCRIPT = "torchtitan.sbatch"


class Torchtitan:
    """Launcher torchtitan: TOML configurations up to 0.2.2 and Python configurations since."""

    capability = TORCHTITAN

    def check(self, problem: Problem, version: str) -> None:
        """Refuse a problem for which torchtitan can run no plan.

        Raises:
            IllegalPlanError: gives all reasons.
        """
        refusals = format_refusals(problem, ("flash",), ("fp32",))
        if flavor_of(problem.model) is None:
            name = problem.model.name
            refusals.append(Refusal(f"it knows models by name and flavor, and {name} is none of its own"))
        refuse(TORCHTITAN.name, refusals)

    def export(self, problem: Problem, plan: Plan, version: str) -> ConfigLaunch:
        """Turn a plan into a launch.

        Raises:
            IllegalPlanError: torchtitan cannot express the plan or would refuse it; gives all reasons.
        """
        check_replicas(TORCHTITAN, plan)
        refusals = [*job_refusals(problem), *_format_refusals(problem), *recompute_refusals(plan)]
        refusals += [*whole_nodes(problem, plan.layout)[2], *field_refusals(TORCHTITAN, plan.layout)]
        flavor = flavor_of(problem.model)
        if flavor is None:
            refuse(TORCHTITAN.name, [*refusals, Refusal(_no_flavor(problem.model.name))])
            raise AssertionError("refuse raises for a reason")
        experts = problem.model.has_experts
        deduplicated = problem.hardware.software.deduplicated_dispatch
        run = run_of_plan(version, flavor, experts, problem.job.sequence_length, deduplicated, plan)
        refusals += _run_refusals(plan, run, refusals)
        refuse(TORCHTITAN.name, refusals)
        environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        return config_launch(
            TORCHTITAN, version, problem, plan, settings_of(run), _notes(run, flavor), environment
        )

    def files(self, launch: ConfigLaunch, version: str) -> dict[str, str]:
        """Write the launch as files by name: first the configuration, then scripts that start it. ``version`` is
        milpplan's."""
        toml = launch.version == V022
        config = f"{MODULE}.toml" if toml else f"{MODULE}.py"
        program: tuple[str, ...] = ("-m torchtitan.train", f'--job.config_file "$HERE/{config}"')
        before = ['HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)']
        if not toml:
            before.append('export PYTHONPATH="$HERE${PYTHONPATH:+:$PYTHONPATH}"')
            program = ("-m torchtitan.train", f"--module {MODULE} --config plan")
        return {
            config: _config(launch, version),
            SCRIPT: torchrun_script(launch, version, program, tuple(before)),
            BATCH_SCRIPT: slurm_script(launch, version, SCRIPT),
        }

    def read(self, request: ImportRequest) -> Imported:
        """Read a configuration into a problem and a plan."""
        return imported(request)


def _config(launch: ConfigLaunch, version: str) -> str:
    """Write the configuration file; ``version`` is milpplan's."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in launch.settings.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    lines = header(launch, version)
    lines += _toml(sections) if launch.version == V022 else _python(sections, launch.version)
    return "\n".join(lines) + "\n"


def _toml(sections: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    for section, values in sections.items():
        lines += ["", f"# {WHY[section]}", f"[{section}]"]
        lines += [f"{key} = {_literal(value)}" for key, value in values.items()]
        if section in TRAINING_022:
            lines.append("# Not decided by the plan:")
            lines += [f"{key} = {_literal(value)}" for key, value in TRAINING_022[section].items()]
    lines += ["", "# Not decided by the plan: learning rates."]
    for section in ("optimizer", "lr_scheduler"):
        lines += [
            f"[{section}]",
            *(f"{key} = {_literal(value)}" for key, value in TRAINING_022[section].items()),
            "",
        ]
    return lines[:-1]


def _literal(value: Any) -> str:
    """Write a value in TOML; lists of stages take a line per stage."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + "".join(f"    {json.dumps(part)},\n" for part in value) + "]"
    return json.dumps(value)


def _python(sections: dict[str, dict[str, Any]], version: str) -> list[str]:
    model = sections.pop("model")
    policy = sections.pop("activation_checkpoint")["policy"]
    used = [line for line in IMPORTS[version] if policy is not None or "FullAC" not in line]
    lines = ["", *(line.format(model=model["name"]) for line in used), "", "", "def plan() -> Trainer.Config:"]
    lines.append('    """The run of the plan."""')
    registry = [json.dumps(model["flavor"])]
    registry += [f"{key}={value!r}" for key, value in model.items() if key == "moe_comm_backend"]
    lines.append(f"    model_spec = model_registry({', '.join(registry)})")
    lines += ["    return Trainer.Config(", "        model_spec=model_spec,"]
    for section, values in sections.items():
        if section == "compile":
            lines += [f"        # {WHY['activation_checkpoint']}"]
            lines += [f"        activation_checkpoint={f'{policy}.Config()' if policy else None},"]
        lines += [f"        # {WHY[section]}", f"        {section}={CLASSES[section]}("]
        lines += [f"            {key}={_python_literal(value)}," for key, value in values.items()]
        lines += ["            steps=100,"] * (section == "training")
        lines += ["        ),"]
    return [
        *lines,
        "        # Not decided by the plan: tokenizer, data, learning rates.",
        "        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec)),",
        '        hf_assets_path="./assets/hf/tokenizer",',
        f"        dataloader={DATA[version]},",
        "        optimizer=default_adamw(lr=3e-4),",
        "        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=20),",
        "    )",
    ]


def _python_literal(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + "".join(f"                {json.dumps(part)},\n" for part in value) + "            ]"
    return json.dumps(value) if isinstance(value, str | list) else repr(value)


def _no_flavor(name: str) -> str:
    return f"it knows models by name and flavor, and {name} is none of its own (torchtitan/models)"


def _format_refusals(problem: Problem) -> list[Refusal]:
    job, refusals = problem.job, []
    if job.precision == "fp8":
        refusals.append(
            Refusal("precision fp8: its float8 converters leave out layers that the plan counts in fp8")
        )
    if job.grad_dtype != "fp32":
        refusals.append(Refusal(f"gradients in {job.grad_dtype}: mixed_precision_reduce is float32 alone"))
    if job.attention_kernel != "flash":
        refusals.append(Refusal(f"attention kernel {job.attention_kernel}: its attention is fused"))
    return refusals


def _run_refusals(plan: Plan, run: Run, before: list[Refusal]) -> list[Refusal]:
    """List the differences between the plan and the run that the files start."""
    sharding = sharding_of(run)
    named = {refusal.why.split("=")[0] for refusal in before}
    runs = layout_of_run(run)
    reasons = dict.fromkeys(("zero_stage", "overlap_grad_reduce", "overlap_param_gather"), sharding.why)
    reasons |= {
        "sequence_parallel": f"up to {V022} tensor parallelism is sequence parallel always",
        "etp": "experts are cut over tp without ep; with it over 1 rank, or (0.2.2) over tp",
        "gather_again": "autograd keeps the gathered inputs of products, and nothing gathers them again",
        "schedule": "without a pipeline there is one schedule",
    }
    differences = layout_differences(plan, runs, reasons, runs.expert_dp if run.experts else 1, named)
    differences += [Refusal(text) for text in plan_losses(run) if run.cp == 1 or not text.startswith("context")]
    broken = broken_rules(run)
    return differences + [Refusal(f"rule {name} ({RULES[name][0]}): {text}") for name, text in broken.items()]


def _notes(run: Run, flavor: Pair) -> tuple[str, ...]:
    notes = [
        "Weights are kept in fp32, sharded, beside the gathered bf16 ones: what the plan counts as master weights."
    ]
    if run.pp > 1 and run.shard > 1:
        notes.append(
            "The first gather of weights may overlap the first forward; the plan counts it before the step."
        )
    if run.version != V022:
        notes.append("Documents are packed and masked apart; the plan counts attention over whole sequences.")
    if run.deduplicated:
        notes.append("The dispatcher deepep needs DeepEP installed.")
    if flavor[0] == "deepseek_v3" or run.experts:
        notes.append("Experts are balanced by torchtitan's own bias, not by dropping tokens.")
    return tuple(notes)
