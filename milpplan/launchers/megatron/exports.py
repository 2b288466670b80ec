"""Launchers slime, ms-swift and verl: Megatron-LM's launch under the names of programs that use Megatron-Core.

All train on sequences that stand behind each other without padding (format ``thd``), ms-swift also on pairs and
verl as GRPO does (``ALIGNED``). Their files are read by
``megatron.programs``.

Source: slime 0.3.1 (THUDM/slime at 624b824a), train_async.py, slime/utils/arguments.py,
slime/backends/megatron_utils/arguments.py, initialize.py, model.py and data.py; ms-swift 4.6.0,
swift/megatron/arguments/megatron_args.py and swift/megatron/utils/megatron_lm_utils.py; mcore-bridge 1.5.0,
config/parser.py and model/gpts/llm.py; verl 0.9.1, trainer/config, workers/engine/megatron/transformer_impl.py and
utils/megatron_utils.py.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from types import MappingProxyType
from typing import Literal

import numpy as np
import numpy.typing as npt

from milpplan.launchers import Imported, ImportRequest, Launch
from milpplan.launchers.capabilities import (
    NO_GROUPS,
    TRANSFORMER_ENGINE,
    Capability,
    Columns,
    Limit,
    RowRule,
    equal_stages,
)
from milpplan.launchers.expressible import (
    check_replicas,
    format_refusals,
    layout_refusals,
    plain_job_refusals,
    refuse,
)
from milpplan.launchers.megatron.flags import Values
from milpplan.launchers.megatron.launcher import Megatron, imported
from milpplan.launchers.megatron.plan_arguments import expert_replicas
from milpplan.launchers.megatron.rules import (
    MEGATRON,
    MEGATRON_LIMITS,
    megatron_limits,
    megatron_modes,
    megatron_modules,
)
from milpplan.launchers.records import AT_MOST, PACKED, Refusal, Section
from milpplan.launchers.scripts import RAY_CLUSTER, arguments_script, defaults
from milpplan.problem import GroupedQueryAttention, Job, MixtureOfExperts, ModelSpec, Plan, Problem


@dataclass(frozen=True, slots=True)
class MegatronTrainer:
    """Launcher of a program that trains with Megatron-Core: Megatron-LM's launch under the program's names."""

    capability: Capability
    """Layouts that the program can run."""
    renamed: Callable[[Launch, Job], Launch]
    """Writes Megatron-LM's launch of a job under the program's names."""
    script: Callable[[Launch, str], str]
    """Writes the script that every node runs, for a launch and milpplan's version."""
    losses: Callable[[ModelSpec], list[str]] = lambda model: []
    """Lists the parts of a model that the program does not build."""

    def check(self, problem: Problem, version: str) -> None:
        """Refuse a problem for which the program can run no plan.

        Raises:
            IllegalPlanError: gives the reasons.
        """
        refusals = plain_job_refusals(problem, self.capability.name)
        if problem.model.learned_positions:
            refusals.append(Refusal(f"{problem.model.name} has learned positions, and it gives no positions"))
        refusals += format_refusals(self.capability, problem.job)
        refuse(self.capability.name, [*refusals, *(Refusal(text) for text in self.losses(problem.model))])
        Megatron().check(_as_pretraining(problem), MEGATRON.versions[0])

    def export(self, problem: Problem, plan: Plan, version: str) -> Launch:
        """Turn a plan into a launch.

        Raises:
            IllegalPlanError: the program cannot express the plan, or Megatron-LM would refuse it.
        """
        check_replicas(self.capability, plan)
        self.check(problem, version)
        replicas = expert_replicas(problem, plan.layout)
        refuse(self.capability.name, layout_refusals(self.capability, problem, plan.layout, replicas))
        if self.capability.stages == "equal" and len({stage.num_layers for stage in plan.virtual_stages}) > 1:
            refuse(self.capability.name, [Refusal("its stages of a pipeline hold as many layers each")])
        core = Megatron().export(_as_pretraining(problem), plan, MEGATRON.versions[0])
        return replace(self.renamed(core, problem.job), target=self.capability.name, version=version)

    def files(self, launch: Launch, version: str) -> dict[str, str]:
        """Write the launch as files by name; the first is enough to start the run. ``version`` is milpplan's."""
        return {f"{self.capability.name}.sh": self.script(launch, version)}

    def read(self, request: ImportRequest) -> Imported:
        """Read a launch script into a problem and a plan."""
        return imported(request)


def _as_pretraining(problem: Problem) -> Problem:
    """Drop what a program adds to Megatron-LM's step: preferences, rewards and rollouts."""
    return problem.model_copy(update={"job": problem.job.model_copy(update={"alignment": None, "rollout": None})})


_PACKED_LIMITS = {
    **MEGATRON_LIMITS,
    "ulysses": Limit((1,), "all-to-all context parallelism of sequences without padding depends on the release"),
    "tp_overlap": Limit(("none",), "buffers of --tp-comm-overlap hold sequences of one length"),
}
"""Limits of programs that train on sequences without padding. Source: TransformerEngine at v2.8 and v2.9,
attention/dot_product_attention/context_parallel.py."""


def always_distributed(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require the distributed optimizer (ZeRO 1) wherever there are replicas."""
    return np.asarray(c["zero_stage"] == np.where(c["cp"] * c["dp"] > 1, 1, 0))


def _capability(
    name: str,
    versions: tuple[str, ...],
    limits: Mapping[str, Limit],
    stages: Literal["any", "equal"] = "any",
    formats: Mapping[str, str] = MappingProxyType({}),
    more_limits: Callable[[Problem], Mapping[str, Limit]] = megatron_limits,
    **more: RowRule,
) -> Capability:
    return Capability(
        name=name,
        versions=versions,
        limits={**_PACKED_LIMITS, **limits},
        rules={**TRANSFORMER_ENGINE, **more},
        hybrid_stages=MEGATRON.hybrid_stages,
        recompute_counts="block",
        stages=stages,
        formats={"attention_kernel": "sequences without padding need a fused kernel", **formats},
        batch_settings=MEGATRON.batch_settings,
        modes=megatron_modes,
        more_limits=more_limits,
        own_modules=megatron_modules,
        complete=True,
    )


def _written(flag: str, values: Values) -> str:
    """Write a flag and its values; a value in double quotes is the shell's."""
    return " ".join((flag, *(value if value.startswith('"') else shlex.quote(value) for value in values)))


_SHAPES = "Stages of a pipeline send each other the length of every micro-batch first, which is not counted."


def _slime_launch(core: Launch, job: Job) -> Launch:
    batch = core.arguments.values["--global-batch-size"]
    rollouts: dict[str, Values] = {
        "--actor-num-nodes": ('"$NUM_NODES"',),
        "--actor-num-gpus-per-node": ('"$GPUS_PER_NODE"',),
        "--num-gpus-per-node": ('"$GPUS_PER_NODE"',),
        "--rollout-batch-size": batch,
        "--n-samples-per-prompt": ("1",),
        "--debug-train-only": (),
    }
    notes = (
        *core.notes,
        _SHAPES,
        f"The plan is for sequences of {core.arguments.text('--seq-length')} tokens; the data decide the lengths.",
        "slime compares --rotary-base and --norm-epsilon with the checkpoint's config: give them in MORE_ARGS.",
    )
    part = Section("ROLLOUT_ARGS", "Processes, and the update alone: no rollouts.", rollouts)
    return replace(core, sections=(*core.sections, part), notes=notes)


def _slime_script(launch: Launch, version: str) -> str:
    before = (
        "# Where slime and Megatron-LM are, what is trained on which data, and where this node is.",
        *defaults(SLIME_DIR=".", MEGATRON_DIR=".", HF_CHECKPOINT=".", PROMPT_DATA="data.jsonl", MORE_ARGS=""),
        'export PYTHONPATH="$MEGATRON_DIR:${PYTHONPATH:-}"',
    )
    variables = ", ".join(f'"{name}": "{value}"' for name, value in launch.environment.items())
    fixed: dict[str, dict[str, Values]] = {
        "TRAINING_ARGS": {
            "--num-rollout": ("100",),
            "--lr": ("1.0e-5",),
            "--lr-decay-style": ("cosine",),
            "--train-env-vars": (f"{{{variables}}}",),
        },
        "DATA_ARGS": {
            "--hf-checkpoint": ('"$HF_CHECKPOINT"',),
            "--load": ('"$HF_CHECKPOINT"',),
            "--prompt-data": ('"$PROMPT_DATA"',),
            "--input-key": ("messages",),
            "--rollout-function-path": ("slime.rollout.sft_rollout.generate_rollout",),
            "--loss-type": ("sft_loss",),
            "--calculate-per-token-loss": (),
            "--disable-compute-advantages-and-returns": (),
        },
    }
    program = '"$SLIME_DIR/train_async.py" $MORE_ARGS'
    return arguments_script(launch, version, before, program, fixed, _written, (*RAY_CLUSTER, "python3 \\"))


SLIME = MegatronTrainer(
    capability=_capability(
        "slime",
        ("0.3.1",),
        {"zero_stage": Limit((0, 1), "it trains with the distributed optimizer, not with Megatron-FSDP")},
        distributed=RowRule(always_distributed, "it always has the distributed optimizer (ZeRO 1)", shards=True),
    ),
    renamed=_slime_launch,
    script=_slime_script,
)
"""Launcher slime: supervised training with ``train_async.py``, without rollouts, in a Ray cluster."""


def _swift_losses(model: ModelSpec) -> list[str]:
    """List the parts of a model that mcore-bridge does not build."""
    losses = []
    for kind in model.kinds:
        mixer, mlp = kind.attention, kind.mlp
        if not isinstance(mixer, GroupedQueryAttention):
            continue
        if mixer.sliding_window is not None and not mixer.sinks:
            losses.append(f"{model.name} has sliding windows, which mcore-bridge leaves out")
        plain = mixer.qk_norm == "none" and not (mixer.sinks or mixer.qkv_bias)
        if plain and isinstance(mlp, MixtureOfExperts) and not mlp.shared_intermediate_size:
            losses.append(f"{model.name} is a mixture as Mixtral's, which mcore-bridge does not build")
    if model.norm != "rmsnorm" or model.dropout:
        losses.append(f"{model.name} has LayerNorm or dropout, which mcore-bridge's models lack")
    return losses


_SWIFT_NAMES = {"--num-virtual-stages-per-pipeline-rank": "--virtual_pipeline_model_parallel_size"}
"""Names of ms-swift that are not Megatron-LM's with underscores."""
_OWN = (
    "--max-position-embeddings", "--seq-length", "--ckpt-format", "--attention-dropout", "--hidden-dropout",
)  # fmt: skip
_BATCHES = ("--micro-batch-size", "--global-batch-size")
_SWIFT_OFF: Mapping[str, Values] = {
    "--recompute_granularity": ("none",),
    "--use_distributed_optimizer": ("false",),
}
"""Settings that are on where they are not given: selective recomputation and the distributed optimizer."""


def _swift_launch(core: Launch, job: Job) -> Launch:
    """Leave out the model, which ms-swift reads from a checkpoint, write switches with their value, and count both
    sequences of a pair as one."""
    parts = []
    batches = {name: (str(core.arguments.count(name, 1) // job.sequences_together),) for name in _BATCHES}
    for part in core.sections:
        if part.name == "MODEL_ARGS":
            continue
        pairs = {
            _SWIFT_NAMES.get(flag, f"--{flag[2:].replace('-', '_')}"): batches.get(flag, values or ("true",))
            for flag, values in part.arguments.items()
            if flag not in _OWN
        }
        parts.append(replace(part, arguments=pairs))
    given = {flag for part in parts for flag in part.arguments}
    off = {flag: values for flag, values in _SWIFT_OFF.items() if flag not in given}
    length = core.arguments.values["--seq-length"]
    if job.alignment is None:
        why, note, data = "Sequences, packed to one length.", PACKED, ("--packing", "true")
    else:
        why, note = "Pairs of sequences, without padding.", AT_MOST.format(*length)
        data = "--rlhf_type", job.alignment.method
    parts.append(Section("LENGTH_ARGS", why, {data[0]: (data[1],), "--max_length": length}))
    parts += [Section("OFF_ARGS", "Off in this plan, and on where nothing is said.", off)] if off else []
    notes = (
        "MODEL is a checkpoint with the sizes of the plan's model, of a type that mcore-bridge builds.",
        note,
        _SHAPES,
        *(note for note in core.notes if not re.search("--(rotary|moe|swiglu)", note)),
    )
    return replace(core, sections=tuple(parts), notes=notes)


def _swift_script(launch: Launch, version: str) -> str:
    variables = defaults(MODEL=".", DATASET="data.jsonl")
    before = ("# What is trained on which data, and where this node is.", *variables)
    fixed: dict[str, dict[str, Values]] = {
        "TRAINING_ARGS": {
            "--train_iters": ("100",),
            "--lr": ("1.0e-5",),
            "--output_dir": ('"${OUTPUT_DIR:-output}"',),
        },
        "DATA_ARGS": {"--model": ('"$MODEL"',), "--dataset": ('"$DATASET"',)},
    }
    start = (
        f'NPROC_PER_NODE={launch.gpus_per_node} NNODES={launch.num_nodes} NODE_RANK="$NODE_RANK" \\',
        '    MASTER_ADDR="$MASTER_ADDR" MASTER_PORT="$MASTER_PORT" \\',
    )
    program = "megatron rlhf" if "--rlhf_type" in launch.arguments.values else "megatron sft"
    return arguments_script(launch, version, before, program, fixed, _written, start)


def _swift_limits(problem: Problem) -> dict[str, Limit]:
    """Return the limits of Megatron-Core, and of a reference: Megatron-FSDP shards the policy alone."""
    whole = Limit((0, 1), "its reference is whole on every replica (swift/megatron/trainers/rlhf_mixin.py)")
    limits = megatron_limits(problem)
    return limits | {"zero_stage": whole} if problem.job.reference_copies else limits


MS_SWIFT = MegatronTrainer(
    capability=_capability(
        "ms-swift",
        ("4.6.0",),
        {
            "dp_replicate": NO_GROUPS,
            "rank_order": Limit(("tp-cp-dp-pp",), "its order is Megatron-Core's own"),
        },
        formats={"grad_dtype": "it adds them up in fp32 (main_grads_dtype)"},
        more_limits=_swift_limits,
    ),
    renamed=_swift_launch,
    script=_swift_script,
    losses=_swift_losses,
)
"""Launcher ms-swift: ``megatron sft`` of all weights on packed sequences, ``megatron rlhf`` (DPO) on pairs."""


_ACTOR = "actor_rollout_ref.actor"
_ENGINE = f"{_ACTOR}.megatron"
_CORE = f"++{_ENGINE}.override_transformer_config"
_DDP = f"++{_ENGINE}.override_ddp_config"
_VERL_NAMES: Mapping[str, str] = {
    "--tensor-model-parallel-size": f"{_ENGINE}.tensor_model_parallel_size",
    "--pipeline-model-parallel-size": f"{_ENGINE}.pipeline_model_parallel_size",
    "--context-parallel-size": f"{_ENGINE}.context_parallel_size",
    "--expert-model-parallel-size": f"{_ENGINE}.expert_model_parallel_size",
    "--expert-tensor-parallel-size": f"{_ENGINE}.expert_tensor_parallel_size",
    "--num-virtual-stages-per-pipeline-rank": f"{_ENGINE}.virtual_pipeline_model_parallel_size",
    "--moe-token-dispatcher-type": f"{_CORE}.moe_token_dispatcher_type",
    "--recompute-granularity": f"{_CORE}.recompute_granularity",
    "--recompute-method": f"{_CORE}.recompute_method",
    "--recompute-num-layers": f"{_CORE}.recompute_num_layers",
    "--recompute-modules": f"{_CORE}.recompute_modules",
    "--attention-backend": f"{_CORE}.attention_backend",
    "--micro-batch-size": f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
}
"""verl's settings by Megatron-LM's flags; it reads the model from a checkpoint, and has bf16 by default."""
_VERL_SWITCHES: Mapping[str, tuple[str, str]] = {
    "--sequence-parallel": ("PARALLEL_ARGS", f"{_ENGINE}.sequence_parallel"),
    "--use-distributed-optimizer": ("STATE_ARGS", f"{_ENGINE}.use_distributed_optimizer"),
    "--overlap-grad-reduce": ("STATE_ARGS", f"{_DDP}.overlap_grad_reduce"),
    "--overlap-param-gather": ("STATE_ARGS", f"{_DDP}.overlap_param_gather"),
}
"""Switches that verl or Megatron-Bridge may have on by default, with their section: they are always written."""


_UPDATE = "The plan is for the update of the policy: not for its rollouts, log-probabilities or a critic."


def _verl_launch(core: Launch, job: Job) -> Launch:
    """Write the settings of the actor; a step is the update of the policy by one mini-batch."""
    given = core.arguments
    parts: dict[str, dict[str, Values]] = {}
    for part in core.sections:
        for flag, values in part.arguments.items():
            if flag in _VERL_NAMES:
                text = values[0] if flag != "--recompute-modules" else f"[{','.join(values)}]"
                parts.setdefault(part.name, {})[_VERL_NAMES[flag]] = (text,)
    for flag, (name, key) in _VERL_SWITCHES.items():
        parts.setdefault(name, {})[key] = (str(flag in given.values),)
    sequences, length = given.count("--global-batch-size", 1), given.count("--seq-length", 1)
    answers = gcd(sequences, 8)
    prompts = (str(sequences // answers),)
    parts["BATCH_ARGS"] |= {
        f"{_ACTOR}.ppo_mini_batch_size": prompts,
        "data.train_batch_size": prompts,
        "actor_rollout_ref.rollout.n": (str(answers),),
        "data.max_prompt_length": (str(length // 2),),
        "data.max_response_length": (str(length - length // 2),),
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": given.values["--micro-batch-size"],
    }
    counted = _UPDATE
    if job.alignment is not None:
        counted = "A step is the update of the policy, and the forwards before it; rollouts take the time given."
        parts["BATCH_ARGS"][f"{_ACTOR}.use_kl_loss"] = (str(job.alignment.reference == "frozen"),)
        reference = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"
        parts["BATCH_ARGS"][reference] = given.values["--micro-batch-size"]
    why = {part.name: part.why for part in core.sections} | {
        "STATE_ARGS": "Sharding of states, and what overlaps."
    }
    notes = (
        counted,
        f"A step updates by {sequences} sequences, {answers} answers to each prompt; other numbers with the same "
        "product run the same plan.",
        "MODEL is a checkpoint with the sizes of the plan's model, of a type that Megatron-Bridge converts.",
        _SHAPES,
        *(note for note in core.notes if "DeepEP" in note),
    )
    sections = tuple(Section(name, why[name], parts[name]) for name in why if name in parts)
    return replace(core, sections=sections, notes=notes)


def _verl_script(launch: Launch, version: str) -> str:
    before = (
        "# What is trained on which data, how many GPUs an engine of the rollouts has, and where this node is.",
        *defaults(MODEL=".", TRAIN_FILES="train.parquet", VAL_FILES="test.parquet"),
        *defaults(ROLLOUT_TP=launch.gpus_per_node),
    )
    fixed: dict[str, dict[str, Values]] = {
        "TRAINING_ARGS": {
            "algorithm.adv_estimator": ("grpo",),
            f"{_ACTOR}.optim.lr": ("1.0e-6",),
            "trainer.nnodes": ('"$NUM_NODES"',),
            "trainer.n_gpus_per_node": ('"$GPUS_PER_NODE"',),
            "trainer.logger": ("[console]",),
        },
        "DATA_ARGS": {
            "actor_rollout_ref.model.path": ('"$MODEL"',),
            "data.train_files": ('"$TRAIN_FILES"',),
            "data.val_files": ('"$VAL_FILES"',),
            "actor_rollout_ref.rollout.name": ("vllm",),
            "actor_rollout_ref.rollout.tensor_model_parallel_size": ('"$ROLLOUT_TP"',),
        },
    }
    program = "verl.trainer.main_ppo --config-name=ppo_megatron_trainer"
    start = (*RAY_CLUSTER, "python3 -m \\")
    return arguments_script(launch, version, before, program, fixed, _setting, start)


def _setting(key: str, values: Values) -> str:
    """Write a setting in Hydra's grammar; a value in double quotes is the shell's."""
    value = values[0]
    return f"{key}={value}" if value.startswith('"') else shlex.quote(f"{key}={value}")


VERL = MegatronTrainer(
    capability=_capability(
        "verl",
        ("0.9.1",),
        {
            "zero_stage": Limit((0, 1), "exports to it write no Megatron-FSDP"),
            "dp_replicate": NO_GROUPS,
            "rank_order": Limit(("tp-cp-dp-pp",), "its order is Megatron-Core's own"),
        },
        stages="equal",
        formats={
            "precision": "its dtype is bfloat16",
            "grad_dtype": "it adds them up in fp32 (grad_reduce_in_fp32)",
        },
        equal_stages=RowRule(equal_stages, "it has as many layers in every stage of a pipeline"),
    ),
    renamed=_verl_launch,
    script=_verl_script,
)
"""Launcher verl: the actor's update of ``main_ppo`` with Megatron-Core, in a Ray cluster."""
