"""Plan as Accelerate's settings and back: FSDP2 over the data- and context-parallel ranks, or unsharded replicas.

``ACCELERATE`` declares the layouts that Accelerate can run.

Source: accelerate 1.15.0, parallelism_config.py (sizes and their order), utils/dataclasses.py (FSDP2 plugin).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.launchers.accelerate.files import CHECKPOINTING, FLAG
from milpplan.launchers.capabilities import FSDP_LIMITS, FSDP_RULES, Capability, Columns, Limit, RowRule
from milpplan.launchers.settings import Settings
from milpplan.problem.model import ModelSpec
from milpplan.problem.plan import Layout, Plan, Recompute, VirtualStage
from milpplan.problem.problem import Problem
from milpplan.problem.reading import shown, validated

P, F = "parallelism_config.parallelism_config_", "fsdp_config.fsdp_"
STRATEGY = "alltoall"
"""Rotation method with which PyTorch passes keys and values from rank to rank: the ring that is priced."""


def settings_of(plan: Plan, num_nodes: int, sequence_length: int) -> dict[str, Any]:
    """Write a plan as Accelerate's settings and the trainer's numbers."""
    layout = plan.layout
    kind = "FSDP" if layout.zero_stage else "MULTI_GPU" if layout.num_gpus > 1 else "NO"
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": "bf16",
        "num_machines": num_nodes,
        "num_processes": layout.num_gpus,
        "rdzv_backend": "static",
        "use_cpu": False,
        "debug": False,
    }
    if layout.zero_stage:
        settings |= {
            f"{F}version": 2,
            f"{F}reshard_after_forward": layout.zero_stage == 3,
            f"{F}auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            f"{F}activation_checkpointing": any(stage.recompute.full for stage in plan.virtual_stages),
            f"{F}offload_params": False,
            f"{P}dp_replicate_size": 1,
            f"{P}dp_shard_size": layout.dp,
            f"{P}cp_size": layout.cp,
            f"{P}tp_size": layout.tp,
        }
        if layout.cp > 1:
            settings[f"{P}cp_comm_strategy"] = STRATEGY
    elif any(stage.recompute.full for stage in plan.virtual_stages):
        settings[CHECKPOINTING] = True
    return settings | {
        "gradient_accumulation_steps": layout.num_micro_batches,
        "per_device_train_batch_size": layout.micro_batch_size,
        "block_size": sequence_length,
    }


def plan_of(settings: Settings, model: ModelSpec, recomputes: bool) -> Plan:
    """Read the plan that the settings stand for.

    Args:
        settings: of Accelerate and of the trainer.
        model: the trained model.
        recomputes: the trainer repeats the forward pass of all layers in the backward pass.

    Raises:
        InvalidInputError: a setting has a value that no plan has.
        IllegalPlanError: Accelerate would refuse the settings.
    """
    kind = settings.text("distributed_type")
    if kind not in ("FSDP", "MULTI_GPU", "NO"):
        raise _strange("distributed_type", kind, "FSDP, MULTI_GPU or NO: nothing else is priced here")
    processes = 1 if kind == "NO" and "num_processes" not in settings.values else settings.size("num_processes")
    sizes = {"dp_replicate": processes, "dp_shard": 1, "cp": 1, "tp": 1}
    stage, full = 0, recomputes
    # With these flags the command ignores the file's distributed_type and parallelism_config.
    if not any(name.startswith("parallelism_config.") for name in settings.values):
        settings.looked_at |= {"FSDP": {"use_fsdp"}, "MULTI_GPU": {"multi_gpu"}}.get(kind, set())
    if kind == "FSDP":
        sizes, stage, full = _sharded(settings, processes)
        if recomputes:
            raise _strange(CHECKPOINTING, True, f"{F}activation_checkpointing in its place, with FSDP")
    else:
        # Without FSDP its settings have no effect.
        settings.looked_at |= {name for name in settings.values if name.startswith("fsdp_config")}
    check_sizes(kind, sizes, processes)
    replicas = sizes["dp_replicate"] * sizes["dp_shard"]
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    micro, steps = (settings.size(f"{FLAG}{name}") for name in names)
    several = replicas * sizes["cp"] > 1
    data = {
        "tp": sizes["tp"],
        "cp": sizes["cp"],
        "dp": replicas,
        "micro_batch_size": micro,
        "global_batch_size": micro * steps * replicas,
        "zero_stage": stage,
        "overlap_grad_reduce": several,
        "overlap_param_gather": stage > 0,
    }
    layers = model.num_layers
    recompute = Recompute(full=layers if full else 0)
    layout = validated(Layout, data, "the layout that the settings describe")
    return Plan(layout=layout, virtual_stages=(VirtualStage(layers=(0, layers), recompute=recompute),))


def _sharded(settings: Settings, processes: int) -> tuple[dict[str, int], int, bool]:
    """Return the sizes, the ZeRO stage, and whether layers are recomputed.

    Without a parallelism_config FSDP shards over all processes (accelerator.py, where no device mesh is built).
    """
    if settings.number(f"{F}version") != 2:
        raise _strange(f"{F}version", settings.get(f"{F}version"), "2: FSDP 1 is not priced")
    policy = settings.text(f"{F}auto_wrap_policy")
    if policy != "TRANSFORMER_BASED_WRAP":
        raise _strange(
            f"{F}auto_wrap_policy", policy, "TRANSFORMER_BASED_WRAP: weights are gathered layer by layer"
        )
    if not any(name.startswith("parallelism_config.") for name in settings.values):
        sizes = {"dp_replicate": 1, "dp_shard": processes, "cp": 1, "tp": 1}
    else:
        sizes = {name: settings.degree(f"{P}{name}_size") for name in ("dp_replicate", "dp_shard", "cp", "tp")}
    if sizes["cp"] > 1 and settings.get(f"{P}cp_comm_strategy") != STRATEGY:
        found = settings.get(f"{P}cp_comm_strategy")
        raise _strange(f"{P}cp_comm_strategy", found, f"{STRATEGY}: gathered keys and values are not priced")
    if sizes["dp_replicate"] > 1:
        raise _strange(
            f"{P}dp_replicate_size", sizes["dp_replicate"], "1: shards inside replicas are no plan here"
        )
    if settings.degree(f"{P}sp_size") != 1:
        raise _strange(f"{P}sp_size", settings.get(f"{P}sp_size"), "1: Ulysses is not priced")
    for name in ("offload_params", "activation_checkpointing_offload"):
        if settings.switch(f"{F}{name}"):
            raise _strange(f"{F}{name}", True, "false: offloading is not priced here")
    stage = 3 if settings.switch(f"{F}reshard_after_forward") else 2
    return sizes, stage, settings.switch(f"{F}activation_checkpointing")


def check_sizes(kind: str, sizes: Mapping[str, int], processes: int) -> None:
    """Check Accelerate's own rules on sizes.

    Raises:
        IllegalPlanError: a rule is broken.
    """
    product = sizes["dp_replicate"] * sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
    broken = {
        "total_size is num_processes (parallelism_config.py, _validate_accelerator)": product != processes,
        "FSDP has a dimension to shard over (parallelism_config.py, _validate_accelerator)": (
            kind == "FSDP" and sizes["dp_shard"] * sizes["cp"] == 1
        ),
        "tp or cp with replicas has shards (parallelism_config.py, __post_init__)": (
            max(sizes["tp"], sizes["cp"]) > 1 and sizes["dp_replicate"] > 1 and sizes["dp_shard"] == 1
        ),
    }
    for rule, is_broken in broken.items():
        if is_broken:
            given = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise IllegalPlanError(
                f"Accelerate refuses {given} for {processes} processes; its rule: {rule}.",
                "Expected settings that its own checks admit.",
                "Change the sizes, or solve with --target accelerate.",
            )


def _strange(name: str, value: object, expected: str) -> InvalidInputError:
    return InvalidInputError(f"{name} is {shown(value)}.", f"Expected {expected}.", f"Correct {name}.")


def replicas_are_plain(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require unsharded replicas to have neither tensor nor context parallelism."""
    return np.asarray((c["zero_stage"] > 0) | (c["tp"] * c["cp"] == 1))


ACCELERATE = Capability(
    name="Accelerate",
    versions=("1.15.0",),
    limits={
        **FSDP_LIMITS,
        "pp": Limit((1,), "it has no pipeline"),
        "vpp": Limit((1,), "it has no pipeline"),
        "ep": Limit((1,), "it has no expert parallelism"),
        "schedule": Limit(("1f1b",), "it has no pipeline"),
        "sequence_parallel": Limit((False,), "Transformers' tensor-parallel plans keep whole activations"),
    },
    rules={
        **FSDP_RULES,
        "replicas_are_plain": RowRule(
            replicas_are_plain,
            "without FSDP it has neither tp nor cp (parallelism_config.py, __post_init__)",
            shards=True,
        ),
    },
    stages="equal",
    complete=True,
)
