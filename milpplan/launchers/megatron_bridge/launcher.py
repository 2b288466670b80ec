"""Launcher Megatron-Bridge: a script that starts a recipe with every setting of the plan as override."""

from __future__ import annotations

import shlex
from dataclasses import replace

from milpplan.errors import IllegalPlanError
from milpplan.launchers.capabilities import WHOLE_NODES, Capability, Limit
from milpplan.launchers.expressible import (
    check_replicas,
)
from milpplan.launchers.import_request import ImportRequest
from milpplan.launchers.megatron.arguments import Arguments, Values
from milpplan.launchers.megatron.launcher import Megatron
from milpplan.launchers.megatron.plan import check_problem as check_megatron
from milpplan.launchers.megatron.rules import MEGATRON, MEGATRON_LIMITS, megatron_limits, megatron_modes
from milpplan.launchers.megatron_bridge.names import CONSTANT, NAMES, PRECISIONS, written
from milpplan.launchers.megatron_bridge.reader import imported
from milpplan.launchers.records import Imported, Launch, Section
from milpplan.launchers.scripts import arguments_script, slurm_script
from milpplan.problem.model import LatentAttention
from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem

_BRIDGE_TILES = Limit(("none",), "comm_overlap of a recipe switches other overlaps with it")
BRIDGE = Capability(
    name="Megatron-Bridge",
    versions=("0.3.1",),
    limits={**MEGATRON_LIMITS, "tp_overlap": _BRIDGE_TILES},
    rules=WHOLE_NODES,
    recompute_counts="block",
    modes=megatron_modes,
    more_limits=megatron_limits,
    complete=True,
)


SCRIPT, BATCH_SCRIPT = "megatron-bridge.sh", "megatron-bridge.sbatch"
RECIPES = {True: "deepseek_v3_pretrain_config", False: "gpt3_175b_pretrain_config"}
"""Recipes whose model classes have latent attention (True) or not (False); all sizes are overridden."""
WITHOUT_NAME = {
    "--max-position-embeddings": "follows from model.seq_length (models/gpt_provider.py, provide)",
    "--group-query-attention": "follows from model.num_query_groups",
    "--bf16": "part of mixed_precision",
    "--fp8-format": "part of mixed_precision",
    "--fp8-recipe": "part of mixed_precision",
    "--fp8-param-gather": "part of mixed_precision",
    "--attention-backend": "auto is the default",
}
"""Arguments of Megatron-LM without a setting of their own, with reasons."""
TRAINING = {"train.train_iters": "100", "optimizer.lr": "1.0e-4", "optimizer.min_lr": "1.0e-5"}
"""Training settings that a run needs and a plan does not decide."""


class MegatronBridge:
    """Launcher Megatron-Bridge: overrides of a recipe, written and read through Megatron-LM's arguments."""

    capability = BRIDGE

    def check(self, problem: Problem, version: str) -> None:
        """Refuse a problem for which Megatron-Bridge can run no plan.

        Raises:
            IllegalPlanError: Megatron-Bridge cannot build the model, or does not support such a job or cluster.
        """
        check_megatron(problem, MEGATRON.versions[0])
        job, model = problem.job, problem.model
        if job.grad_dtype != "fp32":
            raise _refused(
                f"gradients are accumulated in {job.grad_dtype}",
                "fp32, as in mixed_precision=bf16_mixed",
                "Solve again with --grad-dtype fp32.",
            )
        if job.attention_kernel != "flash":
            raise _refused(
                "the attention kernel is unfused, and model.attention_backend is no text that an override can "
                "give",
                "a flash kernel",
                "Solve again with --attention flash.",
            )
        if job.precision == "fp8" and not problem.hardware.software.fp8_weights_only:
            raise _refused(
                "weights are kept in bf16 beside fp8 products",
                "fp8 weights alone (fp8_weights_only), as in mixed_precision=bf16_with_fp8_current_scaling_mixed",
                "Describe the software so, or solve again with --precision bf16.",
            )
        positions = model.max_position_embeddings
        if model.learned_positions and max(positions, job.sequence_length) != job.sequence_length:
            raise _refused(
                f"the model has {positions} learned positions and sequences of {job.sequence_length} tokens",
                "as many positions as tokens (models/gpt_provider.py, provide)",
                "Change --seq-len.",
            )

    def export(self, problem: Problem, plan: Plan, version: str) -> Launch:
        """Turn a plan into a launch.

        Raises:
            IllegalPlanError: Megatron-Bridge cannot express the plan or would refuse it.
        """
        check_replicas(BRIDGE, plan)
        self.check(problem, version)
        for name, limit in BRIDGE.refused(plan.layout).items():
            if name not in MEGATRON.limits or getattr(plan.layout, name) in MEGATRON.limits[name].values:
                raise _refused(
                    f"the plan has {name}={getattr(plan.layout, name)}: {limit.why}",
                    f"{name} {' or '.join(map(str, limit.values)).lower()}",
                    f"Solve again with --target megatron-bridge, or --fix {name}={limit.values[0]}.",
                )
        core = Megatron().export(problem, plan, MEGATRON.versions[0])
        latent = isinstance(problem.model.kinds[0].attention, LatentAttention)
        given = core.arguments
        missing = set(given.values) - {name.flag for name in NAMES} - set(WITHOUT_NAME)
        assert not missing, f"no name for {missing}"
        notes = [note for note in core.notes if "--" not in note]
        notes.append(
            "The sizes are those of the plan; activation function, rotary base and router's scores are the "
            "recipe's: give RECIPE one of your model's family where they matter."
        )
        if problem.job.precision == "fp8":
            notes.append(
                "This mixed_precision runs the first and the last layer in bf16; the plan counts them as fp8."
            )
        return replace(
            core,
            target=BRIDGE.name,
            version=version,
            sections=_sections(given, core, latent),
            notes=tuple(notes),
        )

    def files(self, launch: Launch, version: str) -> dict[str, str]:
        """Write the launch as files by name; the first is enough to start the run. ``version`` is milpplan's."""
        return {SCRIPT: _script(launch, version), BATCH_SCRIPT: slurm_script(launch, version, SCRIPT)}

    def read(self, request: ImportRequest) -> Imported:
        """Read a recipe's overrides into a problem and a plan."""
        return imported(request)


def _refused(seen: str, expected: str, do: str) -> IllegalPlanError:
    return IllegalPlanError(f"Megatron-Bridge cannot run it: {seen}.", f"Expected {expected}.", do)


def _sections(given: Arguments, core: Launch, latent: bool) -> tuple[Section, ...]:
    """Rename the sections of Megatron-LM's launch to Bridge's settings, and fix settings that a recipe must not
    decide."""
    experts = given.given("--num-experts")
    has = {"all": True, "experts": experts, "latent": latent}
    of_flag = {flag: part.name for part in core.sections for flag in part.arguments}
    rows: dict[str, dict[str, tuple[str, ...]]] = {part.name: {} for part in core.sections}
    off: dict[str, tuple[str, ...]] = {}
    for name in NAMES:
        text = written(name, given.values.get(name.flag)) if has[name.part] else None
        row = rows[of_flag[name.flag]] if name.flag in of_flag else off
        if text is not None:
            row.update(dict.fromkeys(name.keys, (text,)))
    named = next(name for name, flags in PRECISIONS.items() if flags.keys() == _precision(given).keys())
    rows["KERNEL_ARGS"]["mixed_precision"] = (named,)
    off |= {key: (value,) for key, value in CONSTANT.items()}
    parts = [replace(part, arguments=rows[part.name]) for part in core.sections if rows[part.name]]
    return (*parts, Section("OFF_ARGS", "Off in this plan, whatever the recipe says.", off))


def _precision(given: Arguments) -> dict[str, tuple[str, ...]]:
    flags = PRECISIONS["bf16_with_fp8_current_scaling_mixed"]
    return {flag: values for flag, values in given.values.items() if flag in flags}


def _script(launch: Launch, version: str) -> str:
    recipe = RECIPES["model.kv_lora_rank" in launch.arguments.values]
    before = (
        "# Where Megatron-Bridge is, whose recipe says what the plan does not, and where this node is.",
        "BRIDGE_DIR=${BRIDGE_DIR:-.}",
        f"RECIPE=${{RECIPE:-{recipe}}}",
    )
    program = '"$BRIDGE_DIR/scripts/training/run_recipe.py" --recipe "$RECIPE" --dataset llm-pretrain-mock'
    fixed = {"TRAINING_ARGS": {key: (value,) for key, value in TRAINING.items()}}
    return arguments_script(launch, version, before, program, fixed, _written)


def _written(key: str, values: Values) -> str:
    return shlex.quote(f"{key}={values[0]}")
