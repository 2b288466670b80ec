"""From a YAML of NeMo AutoModel to a problem and a plan: the reverse of the export."""

from __future__ import annotations

import re
from collections.abc import Collection

from milpplan.launchers.automodel_export import problem_refusals
from milpplan.launchers.automodel_run import PIPE, D, plan_of
from milpplan.launchers.capabilities import AUTOMODEL
from milpplan.launchers.expressible import field_refusals, refuse
from milpplan.launchers.imports import check_gpus, described, job_of
from milpplan.launchers.launch_text import load_yaml
from milpplan.launchers.records import Imported
from milpplan.launchers.rule_refusals import rule_refusals
from milpplan.launchers.settings import Settings, check_priced, flat, without
from milpplan.specs.hardware import HardwareSpec
from milpplan.specs.model import ModelSpec
from milpplan.specs.problem import Problem

KNOWN: dict[str, tuple[object, ...]] = {
    "step_scheduler.global_batch_size": (None,),
    "step_scheduler.local_batch_size": (1,),
    "dataset.seq_len": (None,),
    "dataset.vocab_size": (None,),
    f"{D}strategy": ("fsdp2",),
    f"{D}dp_size": (None,),
    f"{D}dp_replicate_size": (None,),
    f"{D}tp_size": (1,),
    f"{D}cp_size": (1,),
    f"{D}pp_size": (1,),
    f"{D}ep_size": (1,),
    f"{D}sequence_parallel": (False,),
    f"{D}activation_checkpointing": (False,),
    f"{D}activation_checkpointing_scope": ("all",),
    f"{D}reshard_after_forward": (None,),
    f"{D}defer_fsdp_grad_sync": (True,),
    f"{D}enable_async_tensor_parallel": (False,),
    f"{D}enable_compile": (False,),
    f"{D}enable_fsdp2_prefetch": (True,),
    f"{D}fsdp2_backward_prefetch_depth": (2,),
    f"{D}fsdp2_forward_prefetch_depth": (1,),
    f"{D}offload_policy": (None,),
    f"{D}tp_plan": (None,),
    f"{D}autocast_dtype": (None,),
    f"{D}moe.reshard_after_forward": (False,),
    f"{D}moe.ignore_router_for_ac": (True,),
    f"{D}moe.wrap_outer_model": (True,),
    f"{PIPE}pp_schedule": ("1f1b",),
    f"{PIPE}pp_schedule_csv": (None,),
    f"{PIPE}pp_microbatch_size": (1,),
    f"{PIPE}pp_batch_size": (1,),
    f"{PIPE}layers_per_stage": (None,),
    f"{PIPE}round_virtual_stages_to_pp_multiple": (None,),
    f"{PIPE}module_fqns_per_model_part": (None,),
    f"{PIPE}scale_grads_in_schedule": (False,),
    f"{PIPE}pp_recv_buffer_pool": (False,),
}
"""Settings and their defaults (components/distributed/config.py, pipelining/config.py, recipes/_dist_utils.py)."""
QUIET = re.compile(
    r"recipe|seed|dist_env\..*|loss_fn\..*|optimizer\.(?!_target_).*|optimizer\._target_|lr_scheduler.*|checkpoint.*"
    r"|logging.*|wandb.*|validation_.*|rng.*|dataloader\..*|dataset\.(?!seq_len$).*|clip_grad_norm.*"
    r"|step_scheduler\.(?!global_batch_size|local_batch_size).*|model\.(?:_target_|config|torch_dtype"
    r"|pretrained_model_name_or_path|attn_implementation|trust_remote_code)|distributed\.patch_.*"
    r"|distributed\.pipeline\.(?:patch_.*|scale_grads.*|dtype)"
)
"""Settings that change neither time nor memory, or that belong to nothing that a plan has."""
COSTLY = re.compile(r"distributed\..*|packed_sequence\..*|peft\..*|fp8\..*|compile\..*|model\..*|quantization\..*")
"""Of settings that are not known here, those that may change the cost."""


def imported(
    text: str,
    source: str,
    hardware: HardwareSpec,
    num_gpus: int | None = None,
    model: ModelSpec | None = None,
    vocab_size: int | None = None,
    ignored: Collection[str] = (),
) -> Imported:
    """The plan of a recipe.

    Args:
        text: the YAML.
        source: its name.
        hardware: the cluster.
        num_gpus: processes, where distributed.dp_size is not given.
        model: its description: the file only names it.
        vocab_size: that of the model, or nothing.
        ignored: settings whose effect on the cost the caller accepts not to see.

    Raises:
        InvalidInputError: the file cannot be read, leaves something open, or has settings that are not priced.
        IllegalPlanError: AutoModel would refuse it.
    """
    spec = described(model, vocab_size, source)
    kept, left_out = without(flat(load_yaml(text, source)), ignored)
    strange = {name: (None,) for name in kept if name not in KNOWN and COSTLY.fullmatch(name)}
    settings = Settings(kept, {**KNOWN, **strange})
    length = settings.degree("dataset.seq_len")
    settings.get("dataset.vocab_size")
    plan = plan_of(settings, spec, num_gpus)
    check_priced(settings, QUIET)
    check_gpus(num_gpus, plan.layout.num_gpus, source)
    problem = Problem(model=spec, hardware=hardware, job=job_of(plan.layout, length))
    fields, rules = field_refusals(AUTOMODEL, plan.layout), rule_refusals(AUTOMODEL, problem, plan.layout)
    refuse(AUTOMODEL.name, [*problem_refusals(problem), *fields, *rules])
    return Imported(problem, plan, settings.unknown(QUIET), left_out, ())
