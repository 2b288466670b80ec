"""Plan as the settings of a recipe of NeMo AutoModel, and back: FSDP2, or unsharded replicas by DDP.

``AUTOMODEL`` declares the layouts that AutoModel can run.

Source: nemo-automodel 0.7.0, components/distributed/config.py and mesh_utils.py, its pipelining/config.py and
pipelining/functional.py, components/training/step_scheduler.py, recipes/llm/train_ft.py.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from milpplan.errors import InvalidInputError
from milpplan.launchers.capabilities import (
    FSDP_LIMITS,
    FSDP_RULES,
    Capability,
    Columns,
    Limit,
    RowRule,
    piped_states,
)
from milpplan.launchers.expressible import problem_refusals, word
from milpplan.launchers.records import Refusal
from milpplan.launchers.settings import Settings
from milpplan.problem.model import ModelSpec
from milpplan.problem.plan import Layout, Plan, Recompute, Schedule, VirtualStage
from milpplan.problem.problem import Problem
from milpplan.problem.reading import shown, validated

D, PIPE = "distributed.", "distributed.pipeline."
SCHEDULES: dict[Schedule, str] = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "gpipe": "GPipe"}
"""Names of PyTorch's schedules (torch/distributed/pipelining/schedules.py, get_schedule_class)."""


CHECKPOINTING = {"true": True, "on": True, "full": True, "enabled": True, "yes": True} | dict.fromkeys(
    ("false", "off", "none", "disabled", "no"), False
)
"""Words of ``activation_checkpointing`` (recipes/_dist_utils.py, _normalize_activation_checkpointing)."""


def settings_of(plan: Plan, model: ModelSpec, sequence_length: int) -> dict[str, Any]:
    """Write a plan as settings of the recipe, by section and name."""
    layout = plan.layout
    local = layout.micro_batch_size * (layout.num_micro_batches if layout.pp > 1 else 1)
    settings: dict[str, Any] = {
        "step_scheduler.global_batch_size": layout.global_batch_size,
        "step_scheduler.local_batch_size": local,
        f"{D}strategy": "ddp" if layout.zero_stage == 0 and layout.dp > 1 else "fsdp2",
        f"{D}dp_size": layout.dp,
        f"{D}activation_checkpointing": any(stage.recompute.full for stage in plan.virtual_stages),
    }
    if settings[f"{D}strategy"] == "fsdp2":
        settings |= {
            f"{D}dp_replicate_size": 1,
            f"{D}tp_size": layout.tp,
            f"{D}cp_size": layout.cp,
            f"{D}pp_size": layout.pp,
            f"{D}ep_size": layout.ep,
            f"{D}sequence_parallel": layout.sequence_parallel,
            f"{D}reshard_after_forward": layout.zero_stage == 3,
            f"{D}defer_fsdp_grad_sync": layout.pp > 1,
        }
    if layout.ep > 1:
        settings[f"{D}moe.reshard_after_forward"] = layout.zero_stage == 3
    if layout.pp > 1:
        settings |= {
            f"{PIPE}pp_schedule": SCHEDULES[layout.schedule],
            f"{PIPE}pp_microbatch_size": layout.micro_batch_size,
            f"{PIPE}pp_batch_size": local,
            f"{PIPE}module_fqns_per_model_part": parts_of(plan),
        }
    return settings | {"dataset.seq_len": sequence_length, "dataset.vocab_size": model.vocab_size}


def parts_of(plan: Plan) -> list[list[str]]:
    """List the modules of every virtual stage by the names of Transformers' decoders."""
    parts = []
    last = len(plan.virtual_stages) - 1
    for number, stage in enumerate(plan.virtual_stages):
        names = [f"model.layers.{layer}" for layer in range(*stage.layers)]
        if number == 0:
            names.insert(0, "model.embed_tokens")
        if number == last:
            names += ["model.norm", "lm_head"]
        parts.append([*names, "model.rotary_emb"])
    return parts


def plan_of(settings: Settings, model: ModelSpec, world: int | None) -> Plan:
    """Read the plan that the settings stand for.

    Raises:
        InvalidInputError: a setting has a value that no plan has, or the number of processes is open.
    """
    kind = settings.get(f"{D}strategy")
    if kind not in ("fsdp2", "ddp"):
        raise _strange(f"{D}strategy", kind, "fsdp2 or ddp: nothing else is priced here")
    sharded = kind == "fsdp2"
    # Null stands for one rank (recipes/_dist_utils.py).
    size = {
        name: 1 if settings.get(f"{D}{name}_size") is None else settings.degree(f"{D}{name}_size")
        for name in ("tp", "cp", "pp", "ep")
    }
    if settings.get(f"{D}dp_replicate_size") not in (None, 1):
        found = settings.get(f"{D}dp_replicate_size")
        raise _strange(f"{D}dp_replicate_size", found, "1: shards inside replicas are no plan here")
    dp = _replicas(settings, size["tp"] * size["cp"] * size["pp"], world)
    local, batch = (
        settings.size("step_scheduler.local_batch_size"),
        settings.size("step_scheduler.global_batch_size"),
    )
    several = dp * size["cp"] > 1
    once = size["pp"] == 1 and batch == local * dp
    stage = _zero_stage(settings, size["ep"], size["pp"] > 1, once) if sharded and several else 0
    for name in ("reshard_after_forward", "defer_fsdp_grad_sync", "moe.reshard_after_forward"):
        # These settings have no effect on unsharded replicas.
        settings.get(f"{D}{name}")
    stages, vpp, schedule, micro = _pipeline(settings, model, size["pp"], local)
    full = CHECKPOINTING.get(str(settings.get(f"{D}activation_checkpointing")).lower())
    if full is None:
        full = settings.get(f"{D}activation_checkpointing")
        raise _strange(f"{D}activation_checkpointing", full, "true or false: selective is another than a plan's")
    parallel = settings.switch(f"{D}sequence_parallel")
    data = {
        **size,
        "dp": dp,
        "vpp": vpp,
        "micro_batch_size": micro,
        "global_batch_size": batch,
        "sequence_parallel": sharded and size["tp"] > 1 and parallel,
        "zero_stage": stage,
        "schedule": schedule,
        "overlap_grad_reduce": several and size["pp"] == 1,
        "overlap_param_gather": stage > 1,
    }
    layout = validated(Layout, data, "the layout that the recipe describes")
    held, first = [], 0
    for count in stages:
        recompute = Recompute(full=count if full else 0)
        held.append(VirtualStage(layers=(first, first + count), recompute=recompute))
        first += count
    return Plan(layout=layout, virtual_stages=tuple(held))


def _zero_stage(settings: Settings, ep: int, pipelined: bool, once: bool) -> int:
    """Return the ZeRO stage.

    In a pipeline nothing is sharded until all micro-batches have run: ZeRO 1. By default weights are gathered
    again in the backward pass, except in a pipeline (components/distributed/parallelizer.py). With a single
    micro-batch per step (``once``) there is nothing to defer.
    """
    reshards = settings.get(f"{D}reshard_after_forward")
    reshard = not pipelined if reshards is None else settings.switch(f"{D}reshard_after_forward")
    if settings.switch(f"{D}defer_fsdp_grad_sync") != pipelined and not once:
        what = "gradients are whole under a pipeline" if pipelined else "a plan reduces in every micro-batch"
        raise _strange(f"{D}defer_fsdp_grad_sync", not pipelined, f"{word(pipelined)}: {what}")
    if pipelined and reshard:
        raise _strange(
            f"{D}reshard_after_forward",
            True,
            "false: weights gathered for every micro-batch of a pipeline, with whole gradients, are no ZeRO stage",
        )
    if ep > 1 and settings.switch(f"{D}moe.reshard_after_forward") != reshard:
        raise _strange(f"{D}moe.reshard_after_forward", not reshard, "the same as of the other layers")
    return 1 if pipelined else 3 if reshard else 2


def _replicas(settings: Settings, others: int, world: int | None) -> int:
    size = settings.get(f"{D}dp_size")
    if size is not None:
        return settings.degree(f"{D}dp_size")
    if world is None:
        raise InvalidInputError(
            f"{D}dp_size is left to the number of processes.",
            "Expected that number, or the size.",
            "Give --gpus.",
        )
    if world % others:
        raise InvalidInputError(
            f"{world} processes are no multiple of tp_size * cp_size * pp_size = {others}.",
            "Expected whole replicas (components/distributed/mesh_utils.py).",
            "Correct --gpus, or the sizes.",
        )
    return world // others


def _pipeline(
    settings: Settings, model: ModelSpec, pp: int, local: int
) -> tuple[tuple[int, ...], int, Schedule, int]:
    """Return the layers of every virtual stage, the virtual stages per rank, the schedule and the micro-batch
    size."""
    if pp == 1:
        # The recipe warns and ignores the section.
        settings.looked_at |= {name for name in settings.values if name.startswith(PIPE)}
        return (model.num_layers,), 1, "1f1b", local
    word = settings.text(f"{PIPE}pp_schedule").lower()
    named = {name.lower(): schedule for schedule, name in SCHEDULES.items()}
    if word not in named:
        raise _strange(f"{PIPE}pp_schedule", word, " or ".join(SCHEDULES.values()))
    parts, each = settings.get(f"{PIPE}module_fqns_per_model_part"), settings.get(f"{PIPE}layers_per_stage")
    count = pp * (2 if named[word] == "interleaved" else 1)
    if parts is None and each is not None:
        count = _rounded(settings, -(-model.num_layers // settings.degree(f"{PIPE}layers_per_stage")), pp)
    if parts is None and not 0 < count <= model.num_layers:
        raise _strange(f"{D}pp_size", pp, f"stages for {model.num_layers} layers, and not {count} of them")
    sizes = _evenly(model.num_layers, count) if parts is None else _sizes(parts, model)
    if len(sizes) % pp or (len(sizes) > pp) != (named[word] == "interleaved"):
        raise _strange(f"{PIPE}pp_schedule", word, f"one that has {len(sizes)} virtual stages on {pp} ranks")
    return sizes, len(sizes) // pp, named[word], settings.size(f"{PIPE}pp_microbatch_size")


def _rounded(settings: Settings, stages: int, pp: int) -> int:
    """Round the number of virtual stages to a multiple of the ranks
    (components/distributed/pipelining/functional.py)."""
    how = settings.get(f"{PIPE}round_virtual_stages_to_pp_multiple")
    if how is None or stages % pp == 0:
        return stages
    return stages + (-stages % pp if how == "up" else -(stages % pp))


def _evenly(layers: int, stages: int) -> tuple[int, ...]:
    """Split layers evenly; the first stages hold the remainder
    (components/distributed/pipelining/functional.py)."""
    each, remainder = divmod(layers, stages)
    return tuple(each + (number < remainder) for number in range(stages))


def _sizes(listed: list[list[str]], model: ModelSpec) -> tuple[int, ...]:
    """Count the layers of the listed modules, which must be all modules in order."""
    name = f"{PIPE}module_fqns_per_model_part"
    layers = [re.fullmatch(r".*layers\.(\d{1,9})", module) for part in listed for module in part]
    numbers = [int(match[1]) for match in layers if match]
    ends = bool(listed) and any("embed" in module for module in listed[0]) and "lm_head" in listed[-1]
    if numbers != list(range(model.num_layers)) or not ends:
        raise _strange(name, f"{len(numbers)} layers", f"all {model.num_layers} layers in order, and both ends")
    return tuple(sum(bool(re.fullmatch(r".*layers\.\d+", module)) for module in part) for part in listed)


def _strange(name: str, value: object, expected: str) -> InvalidInputError:
    return InvalidInputError(f"{name} is {shown(value)}.", f"Expected {expected}.", f"Correct {name}.")


def unsharded_is_alone(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require unsharded replicas to have no other parallelism."""
    plain = (c["cp"] * c["dp"] == 1) | (c["tp"] * c["pp"] * c["ep"] == 1)
    return np.asarray((c["zero_stage"] > 0) | plain)


def fills_the_pipeline(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require at least as many micro-batches as pipeline ranks."""
    return np.asarray((c["pp"] == 1) | (c["num_micro_batches"] >= c["pp"]))


def experts_are_not_split(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require models with experts to have no tensor parallelism."""
    return np.asarray((c["tp"] == 1) | (not problem.model.has_experts))


AUTOMODEL = Capability(
    name="NeMo AutoModel",
    versions=("0.7.0",),
    limits={
        **FSDP_LIMITS,
        "zero_stage": Limit((0, 1, 2, 3), ""),
        "cp": Limit((1,), "its context parallelism gathers keys and values, and what is priced is a ring"),
        "schedule": Limit(
            ("1f1b", "interleaved", "gpipe"),
            "PyTorch's zero-bubble schedules wait for weight gradients in other ways than is priced",
        ),
    },
    rules={
        **FSDP_RULES,
        "fsdp_states": RowRule(
            piped_states,
            "FSDP2 is ZeRO 3, or with one micro-batch ZeRO 2, always overlapped; under a pipeline ZeRO 1, never "
            "overlapped (components/moe/fsdp_mixin.py); DDP is ZeRO 0, overlapped",
            shards=True,
        ),
        "unsharded_is_alone": RowRule(
            unsharded_is_alone,
            "its ddp has neither tp, pp nor ep (components/distributed/mesh_utils.py)",
            shards=True,
        ),
        "fills_the_pipeline": RowRule(
            fills_the_pipeline,
            "it wants as many micro-batches as pipeline ranks (recipes/llm/train_ft.py:675)",
        ),
        "experts_are_not_split": RowRule(
            experts_are_not_split, "tensor parallelism of its models with experts leaves the experts whole"
        ),
    },
    complete=True,
)


def automodel_refusals(problem: Problem) -> list[Refusal]:
    """List the properties of a problem that no plan for AutoModel supports."""
    return problem_refusals(
        problem,
        products="its mp_policy computes in bf16",
        gradients="its mp_policy reduces them in fp32",
        attention="its models take a fused one",
    )
