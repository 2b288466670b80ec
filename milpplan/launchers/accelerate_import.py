"""From Accelerate's files to a problem and a plan: the reverse of the export."""

from __future__ import annotations

import re
from collections.abc import Collection

from milpplan.errors import InvalidInputError
from milpplan.launchers.accelerate_files import TRAINER, Read, read_files
from milpplan.launchers.accelerate_run import F, P, plan_of
from milpplan.launchers.imports import check_gpus, described, job_of
from milpplan.launchers.records import Imported
from milpplan.launchers.settings import Settings, check_priced, without
from milpplan.specs.hardware import HardwareSpec
from milpplan.specs.model import ModelSpec
from milpplan.specs.problem import Problem
from milpplan.specs.reading import shown

KNOWN: dict[str, tuple[object, ...]] = {
    "distributed_type": ("NO",),
    "mixed_precision": ("no",),
    "num_machines": (1,),
    "num_processes": (1,),
    "use_cpu": (False,),
    "downcast_bf16": ("no",),
    f"{F}version": (1,),
    f"{F}reshard_after_forward": (True,),
    f"{F}activation_checkpointing": (False,),
    f"{F}activation_checkpointing_offload": (False,),
    f"{F}offload_params": (False,),
    f"{F}auto_wrap_policy": ("NO_WRAP",),
    f"{F}transformer_layer_cls_to_wrap": (None,),
    f"{F}state_dict_type": (None,),
    f"{F}cpu_ram_efficient_loading": (True,),
    f"{F}sync_module_states": (True,),
    f"{P}dp_replicate_size": (1,),
    f"{P}dp_shard_size": (1,),
    f"{P}tp_size": (1,),
    f"{P}cp_size": (1,),
    f"{P}cp_backend": ("torch",),
    f"{P}cp_comm_strategy": ("allgather",),
    f"{P}sp_size": (1,),
}
"""Settings and their defaults (commands/launch.py, commands/config/config_args.py)."""
QUIET = re.compile(
    r"compute_environment|debug|machine_rank|main_.*|rdzv_.*|same_network|gpu_ids|enable_cpu_affinity|num_machines"
    r"|fsdp_config\.fsdp_(?:state_dict_type|cpu_ram_efficient_loading|sync_module_states|use_orig_params)"
    r"|.*cp_backend"
)
PRICED_FLAGS = re.compile(
    r"--(?:gradient_checkpointing_kwargs|fsdp.*|deepspeed|optim|torch_compile.*|use_liger.*|fp16|tf32|torch_dtype)"
)
"""Flags of the trainer that change the cost, and are nothing that a plan has."""


def imported(
    text: str,
    source: str,
    hardware: HardwareSpec,
    num_gpus: int | None = None,
    model: ModelSpec | None = None,
    vocab_size: int | None = None,
    ignored: Collection[str] = (),
) -> Imported:
    """The plan of a launch.

    Args:
        text: the script that starts it, with the YAML in a here document.
        source: its name.
        hardware: the cluster.
        num_gpus: processes; None: the file says.
        model: its description: the files only name it.
        vocab_size: that of the model, or nothing.
        ignored: settings whose effect on the cost the caller accepts not to see.

    Raises:
        InvalidInputError: the file cannot be read, leaves something open, or has settings that are not priced.
        IllegalPlanError: Accelerate would refuse it.
    """
    found = read_files(text, source)
    spec = described(model, vocab_size, source)
    _check_trainer(found, source, ignored)
    kept, left_out = without(found.settings, [name for name in ignored if name not in found.others])
    settings = Settings(kept, KNOWN)
    _check_precision(settings)
    plan = plan_of(settings, found, spec)
    settings.get(f"{F}auto_wrap_policy")
    settings.get(f"{F}transformer_layer_cls_to_wrap")
    settings.get("num_machines")
    check_priced(settings, QUIET)
    check_gpus(num_gpus, plan.layout.num_gpus, source)
    job = job_of(plan.layout, found.trainer["block_size"])
    return Imported(Problem(model=spec, hardware=hardware, job=job), plan, settings.unknown(QUIET), left_out, ())


def _check_trainer(found: Read, source: str, ignored: Collection[str]) -> None:
    """The trainer's flags say the numbers of a plan, and nothing that changes the cost besides.

    Raises:
        InvalidInputError: they do not.
    """
    missing = [flag for name, flag in TRAINER.items() if name not in found.trainer]
    if missing:
        raise InvalidInputError(
            f"{source} does not say {', '.join(missing)}.",
            "Expected the flags of the trainer: Accelerate's YAML has neither micro-batches nor lengths.",
            "Give the script that starts the trainer, as `milpplan export --to accelerate` writes it.",
        )
    priced = [flag for flag in found.others if PRICED_FLAGS.fullmatch(flag) and flag not in ignored]
    if priced:
        raise InvalidInputError(
            f"The trainer's {', '.join(priced)} may change the cost in ways that are not priced.",
            "Expected flags that change neither time nor memory.",
            f"Take them out, or accept not to see what they cost: --ignore={priced[0]}.",
        )


def _check_precision(settings: Settings) -> None:
    found = settings.get("mixed_precision")
    if found != "bf16":
        raise InvalidInputError(
            f"mixed_precision is {shown(found)}.", "Expected bf16, which is priced.", "Correct mixed_precision."
        )
