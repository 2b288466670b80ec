"""Plan as DeepSpeed's JSON, ``section.name`` to value, and back.

Source: deepspeedai/DeepSpeed 0.19.8, runtime/config.py:590-656 (batch sizes), runtime/zero/config.py,
runtime/zero/stage_1_and_2.py and stage3.py, runtime/engine.py:2295-2325; for ``deepspeed_keys.json`` also
runtime/constants.py, runtime/precision_config.py, monitor/config.py and profiling/config.py:

- ZeRO 0 reduces bf16 gradients after the backward; bf16 with fp32 gradients is not implemented there.
- ZeRO 1 keeps whole bf16 gradients and reduces them once per step, beside the last backward with ``overlap_comm``.
  With fp32 gradients another optimizer (BF16_Optimizer) all-reduces, which is not the ZeRO 1 that is priced.
- ZeRO 2 reduces in every micro-batch, and gathers weights after the update; ZeRO 3 gathers them in every pass.

Settings that DeepSpeed leaves to the training program (sequence length, model, recomputation, kernel) are in a
section ``milpplan``, which the program reads and does not pass on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from milpplan.errors import InvalidInputError
from milpplan.launchers.capabilities import (
    NO_STREAMS,
    NO_TILES,
    WHOLE_NODES,
    Capability,
    Columns,
    Limit,
    RowRule,
    own_orders,
)
from milpplan.launchers.settings import Known, Settings, known_settings
from milpplan.problem.plan import Layout, Plan
from milpplan.problem.problem import Problem
from milpplan.problem.reading import shown, validated

_Z, _OWN = "zero_optimization", "milpplan"
TYPES = {"fp32": "fp32", "bf16": "bf16", "bfp16": "bf16"}
"""Spellings of ``grad_accum_dtype`` and ``communication_data_type`` (runtime/config.py, DtypeEnum)."""
KERNELS = {"flash": "sdpa", "unfused": "eager"}
"""Values of ``attn_implementation`` by kernel."""
QUIET: Mapping[str, str] = {
    r"milpplan\..*": "what the training program reads, which is looked at by itself",
    r"(wandb|tensorboard|comet|csv_monitor|flops_profiler)\..*|steps_per_print|dump_state|memory_breakdown": (
        "records and prints; a step that is profiled is none that is priced"
    ),
    r"checkpoint\..*|aio\..*|zero_optimization\.(stage3_gather_.*|load_from_fp32_weights|elastic_checkpoint|"
    r"pipeline_loading_checkpoint)": "works between steps, or with offloading, which is refused",
    r"scheduler\..*|gradient_clipping|optimizer\.(params\.(?!torch_adam|amsgrad).*|legacy_fusion)|seed|"
    r"dataloader_drop_last|vocabulary_size": "numbers of the update and the data, whose work is the same",
    r"zero_allow_untested_optimizer|zero_force_ds_cpu_optimizer|use_data_before_expert_parallelism|"
    r"seq_parallel_comm_data_type": "acts with other optimizers, experts, cut sequences: refused",
    r"(bf16|fp16)\.(?!enabled$|bf16_|fp16_|check_grad|immediate).*|amp\.opt_level": (
        "scales of the loss, which bf16 does not use; fp16 and amp are refused"
    ),
    r"comms_logger\.(?!enabled$).*|timers\..*": "acts with comms_logger and timers, which are refused",
    r"activation_checkpointing\.(profile|number_checkpoints|synchronize_checkpoint_boundary)": (
        "acts in models that call DeepSpeed's own checkpointing"
    ),
    r"zero_optimization\.(.*bucket_size|sub_group_size|stage3_(param_persistence_threshold|"
    r"model_persistence_threshold|max_live_parameters|max_reuse_distance))": (
        "sizes of buckets: messages are priced as they are best cut"
    ),
    r"zero_optimization\.(ignore_unused_parameters|log_trace.*|enable_sanity_checks)": "checks and records",
}
"""Patterns of settings that have no effect on the cost, with reasons."""


def known() -> Known:
    """Load the settings of DeepSpeed's JSON and of the section ``milpplan``, with defaults and types."""
    return known_settings("deepspeed_keys.json", "0.19.8")


def stage_of(layout: Layout, grad_dtype: str) -> int:
    """Return ``stage``. With one replica and fp32 gradients it is 1, which shards nothing and keeps such
    gradients."""
    return 1 if layout.dp == 1 and grad_dtype == "fp32" else layout.zero_stage


def settings_of(problem: Problem, plan: Plan, config: dict[str, Any]) -> dict[str, Any]:
    """Write the settings of a plan; ``config`` is the Hugging Face config of the model."""
    layout, job = plan.layout, problem.job
    stage = stage_of(layout, job.grad_dtype)
    settings: dict[str, Any] = {
        "train_batch_size": layout.global_batch_size,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.num_micro_batches,
        f"{_Z}.stage": stage,
        f"{_Z}.overlap_comm": layout.overlap_grad_reduce and stage > 0,
        f"{_Z}.contiguous_gradients": True,
        f"{_Z}.reduce_scatter": True,
        "bf16.enabled": True,
        "data_types.grad_accum_dtype": job.grad_dtype,
        "communication_data_type": job.grad_dtype,
        f"{_OWN}.world_size": layout.num_gpus,
        f"{_OWN}.sequence_length": job.sequence_length,
        f"{_OWN}.recompute": any(stage.recompute.full for stage in plan.virtual_stages),
        f"{_OWN}.attn_implementation": KERNELS[job.attention_kernel],
    }
    return settings | {f"{_OWN}.model.{name}": value for name, value in config.items()}


def losses_of(stage: int, dp: int, grad_dtype: str, overlap: bool) -> list[str]:
    """List the reasons why no plan expresses DeepSpeed's run."""
    losses = []
    if stage == 0 and grad_dtype == "fp32":
        losses.append("ZeRO 0 with gradients in fp32 is not implemented in bf16 (runtime/engine.py:2323)")
    if stage == 1 and grad_dtype == "fp32" and dp > 1:
        losses.append(
            "ZeRO 1 with gradients in fp32 all-reduces them (BF16_Optimizer, runtime/engine.py:2305), and what is "
            "priced scatters them"
        )
    if stage >= 2 and dp > 1 and not overlap:
        losses.append(f"ZeRO {stage} without overlap_comm is not priced")
    return losses


def layout_of(settings: Settings, world: int | None) -> Layout:
    """Read the layout of the settings on a number of processes.

    Args:
        settings: of the file.
        world: processes; None: the number that follows from the batch sizes.

    Raises:
        InvalidInputError: the batch sizes contradict each other.
    """
    size = settings.size("train_micro_batch_size_per_gpu")
    batch, steps = _given(settings, "train_batch_size"), _given(settings, "gradient_accumulation_steps")
    if world is None and batch is not None and steps is not None and batch % (size * steps) == 0:
        world = batch // (size * steps)
    if world is None or world < 1:
        raise InvalidInputError(
            "The number of processes is not known: the batch sizes do not make it.",
            "Expected train_batch_size, its size per GPU and gradient_accumulation_steps, or --gpus.",
            "Give --gpus.",
        )
    if steps is None:
        steps = 1 if batch is None else batch // (size * world)
    batch = size * world * steps if batch is None else batch
    if batch != size * steps * world:
        raise InvalidInputError(
            f"train_batch_size {batch} is not {size} * {steps} * {world}.",
            "Expected micro-batch * accumulation * processes (runtime/config.py:602).",
            "Correct the batch sizes, or the number of processes (--gpus).",
        )
    stage, overlap = sharding_of(settings)
    data = {
        "dp": world,
        "micro_batch_size": size,
        "global_batch_size": batch,
        "zero_stage": stage if world > 1 else 0,
        "overlap_grad_reduce": overlap and stage > 0 and world > 1,
        "overlap_param_gather": stage == 3 and world > 1,
    }
    return validated(Layout, data, "the layout that the settings describe")


def _given(settings: Settings, name: str) -> int | None:
    """Read a positive integer that may be left to follow from others."""
    return None if settings.get(name) is None else settings.degree(name)


def sharding_of(settings: Settings) -> tuple[int, bool]:
    """Return ``stage`` and ``overlap_comm``, whose default is true only at stage 3 (runtime/zero/config.py)."""
    stage = settings.number(f"{_Z}.stage")
    if not 0 <= stage <= 3:
        raise InvalidInputError(f"{_Z}.stage is {stage}.", "Expected 0, 1, 2 or 3.", "Correct it.")
    overlap = settings.get(f"{_Z}.overlap_comm")
    return stage, stage == 3 if overlap is None else settings.switch(f"{_Z}.overlap_comm")


def grad_dtype_of(settings: Settings) -> str:
    """Return the format of gradients, which must be kept and sent alike.

    Raises:
        InvalidInputError: gradients are kept and sent in different formats, or the format is not priced.
    """
    names = ("data_types.grad_accum_dtype", "communication_data_type")
    formats = [TYPES.get("bf16" if settings.get(name) is None else settings.text(name)) for name in names]
    if None in formats or formats[0] != formats[1]:
        raise InvalidInputError(
            f"Gradients are kept in {shown(settings.get(names[0]))} and sent in {shown(settings.get(names[1]))}.",
            "Expected both fp32 or both bf16 (the default in bf16).",
            f"Set {names[0]} and {names[1]} alike to compare it as such a run.",
        )
    return str(formats[0])


def plan_of(layout: Layout, layers: int, whole: bool) -> Plan:
    """Build the plan: one stage, with all of its layers recomputed or none."""
    stage = {"layers": [0, layers], "recompute": {"full": layers * whole}}
    data = {"layout": layout.model_dump(), "virtual_stages": [stage]}
    return validated(Plan, data, "the plan that the settings describe")


def kernel_of(implementation: str) -> str:
    """Return the attention kernel of an implementation of Transformers.

    Raises:
        InvalidInputError: the attention is not priced.
    """
    if implementation not in ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"):
        raise InvalidInputError(
            f"attn_implementation is {shown(implementation)}.",
            "Expected sdpa, flash_attention_2 or eager.",
            "Correct it.",
        )
    return "unfused" if implementation == "eager" else "flash"


def deepspeed_states(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require ZeRO states that DeepSpeed can produce.

    Up to ZeRO 2 weights are gathered after the update. Gradients in fp32 require ZeRO 2 or 3.
    """
    stage = c["zero_stage"]
    keeps = c["overlap_param_gather"] == (stage == 3)
    keeps &= (stage > 0) | (c["overlap_grad_reduce"] == 0)
    if problem.job.grad_dtype == "fp32":
        keeps &= stage >= 2
    return np.asarray(keeps)


_ONLY_DATA = "its configuration is data parallel; "
DEEPSPEED = Capability(
    name="DeepSpeed",
    versions=("0.19.8",),
    limits={
        "tp": Limit((1,), f"{_ONLY_DATA}AutoTP keeps the embedding whole on every rank, which a plan cuts"),
        "cp": Limit((1,), f"{_ONLY_DATA}Ulysses exchanges heads, and what is priced is a ring"),
        "ep": Limit((1,), f"{_ONLY_DATA}experts are layers of the model's own code (moe/layer.py)"),
        "etp": Limit((1,), f"{_ONLY_DATA}experts are layers of the model's own code (moe/layer.py)"),
        "pp": Limit((1,), f"{_ONLY_DATA}stages are a PipelineModule of the model's own code (runtime/pipe)"),
        "vpp": Limit((1,), "there is no pipeline in its configuration"),
        "schedule": Limit(("1f1b",), "there is no pipeline in its configuration"),
        "tp_overlap": Limit(("none",), NO_TILES),
        "pp_scatter_gather": Limit((False,), "there is no pipeline in its configuration"),
        "offload_weights": Limit((False,), f"{NO_STREAMS} (offload_param)"),
        "offload_activations": Limit((False,), f"{NO_STREAMS} (cpu_checkpointing)"),
        "offload_optimizer": Limit((False,), f"{NO_STREAMS} (offload_optimizer updates on the processor)"),
    },
    rules={
        **WHOLE_NODES,
        "states": RowRule(deepspeed_states, "up to ZeRO 2 weights are gathered after the update", shards=True),
    },
    stages="equal",
    more_limits=own_orders,
    complete=True,
)
