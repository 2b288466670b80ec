"""Layouts that each launcher can run.

Each target has one declaration. It restricts a problem's space (``restriction.restrict``), gives the rules for the
layouts of the restricted space, and yields the refusals of an export.

A field without an entry in ``limits`` may take any value. A condition on several fields is a rule.
``recompute_counts`` and ``stages`` declare how recomputation and stage sizes may differ between stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from milpplan.launchers.megatron.recompute import selective_modules
from milpplan.launchers.space_rules import (
    Columns,
    deepspeed_states,
    experts_are_not_split,
    fills_the_pipeline,
    fsdp_states,
    nanotron_pipelines,
    nanotron_stages,
    piped_states,
    reduces_beside,
    replicas_are_plain,
    titan_experts,
    titan_pipelines,
    titan_sequences,
    titan_states,
    unsharded_is_alone,
    whole_kv_heads,
    whole_nodes,
    whole_words,
)
from milpplan.problem.model import MixtureOfExperts
from milpplan.problem.plan import Layout
from milpplan.problem.problem import Problem

Mode = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True)
class Limit:
    """Values of a field that a target supports. ``why`` says what the target has in place of other values."""

    values: tuple[object, ...]
    why: str


@dataclass(frozen=True, slots=True)
class RowRule:
    """Rule on several fields of a layout.

    ``keeps`` maps columns [N] of a problem's layouts to booleans [N]: True where the layout keeps the rule.
    ``why`` says what the target does, with its source. ``shards``: the rule depends on the ZeRO stage or the
    overlap switches.
    """

    keeps: Callable[[Problem, Columns], npt.NDArray[np.bool_]]
    why: str
    shards: bool = False


def _no_limits(problem: Problem) -> Mapping[str, Limit]:
    return {}


def _all_or_none(problem: Problem) -> tuple[Mode, ...]:
    return ("none", "full")


@dataclass(frozen=True, slots=True)
class Capability:
    """Declaration of a target: its name, its versions (the first is the default) and the layouts that it can run.

    ``stages``: ``any`` split of the layers, or only ``equal`` virtual stages. ``modes``: recompute modes available
    for a problem's model. ``more_limits``: limits that depend on the problem.
    """

    name: str
    versions: tuple[str, ...]
    limits: Mapping[str, Limit]
    rules: Mapping[str, RowRule] = field(default_factory=dict)
    recompute_counts: Literal["alike", "block"] = "alike"
    stages: Literal["any", "equal"] = "any"
    modes: Callable[[Problem], tuple[Mode, ...]] = _all_or_none
    more_limits: Callable[[Problem], Mapping[str, Limit]] = _no_limits
    complete: bool = False
    """True if limits and rules cover every refusal of an export, so that a space can be restricted to them."""

    def refused(self, layout: Layout) -> dict[str, Limit]:
        """Find the fields of a layout whose values the target does not support."""
        return {name: limit for name, limit in self.limits.items() if getattr(layout, name) not in limit.values}

    def limits_of(self, problem: Problem) -> dict[str, Limit]:
        """Merge the target's fixed limits with those that depend on the problem."""
        limits = dict(self.limits)
        for name, limit in self.more_limits(problem).items():
            fixed = limits.get(name)
            values = limit.values if fixed is None else tuple(v for v in fixed.values if v in limit.values)
            limits[name] = Limit(values, limit.why)
        return limits


WHOLE_NODES = {"whole_nodes": RowRule(whole_nodes, "torchrun starts as many processes on every node")}


def _experts_have_biases(problem: Problem) -> bool:
    mlps = [kind.mlp for kind in problem.model.kinds]
    return any(isinstance(mlp, MixtureOfExperts) and mlp.bias for mlp in mlps)


def _megatron_modes(problem: Problem) -> tuple[Mode, ...]:
    selective = selective_modules(problem.model, problem.job)
    return ("none", "selective", "full") if selective else ("none", "full")


def _megatron_limits(problem: Problem) -> dict[str, Limit]:
    """Return the limits that depend on the problem.

    Source: Megatron-LM training/arguments.py:1095, core/transformer/transformer_config.py:2612.
    """
    limits = {}
    if problem.job.precision == "fp8" and problem.hardware.software.fp8_weights_only:
        limits["zero_stage"] = Limit((1, 2, 3), "--fp8-param-gather needs --use-distributed-optimizer")
    if _experts_have_biases(problem):
        limits["etp"] = Limit((1,), "it splits no experts with biases (core/transformer/transformer_config.py)")
    return limits


_NO_HOST = "Megatron-LM keeps on the host what this plan streams beside the layers only in other ways"
_MEGATRON_LIMITS = {
    "schedule": Limit(
        ("1f1b", "interleaved"),
        "its schedules are 1F1B and interleaved 1F1B (core/pipeline_parallel/schedules.py)",
    ),
    "tp_overlap": Limit(
        ("none", "ring"),
        "Transformer Engine gathers in a ring only, --tp-comm-overlap has no pipelined gather",
    ),
    "pp_scatter_gather": Limit(
        (False,),
        "core/pipeline_parallel sends whole activations; without sequence parallelism none is scattered",
    ),
    "gather_again": Limit(
        (True,), "core/tensor_parallel/layers.py keeps the sharded input and gathers it again in the backward"
    ),
    "offload_weights": Limit((False,), _NO_HOST),
    "offload_activations": Limit((False,), _NO_HOST),
    "offload_optimizer": Limit((False,), f"{_NO_HOST} (--optimizer-cpu-offload updates on the processor)"),
    "rank_order": Limit(
        ("tp-cp-dp-pp", "tp-cp-pp-dp"),
        "its orders are tp-cp-ep-dp-pp, and tp-cp-ep-pp-dp with --use-tp-pp-dp-mapping",
    ),
}
MEGATRON = Capability(
    name="Megatron-LM",
    versions=("d98e8a64", "core_v0.16.0", "core_v0.15.0", "core_v0.14.0"),
    limits=_MEGATRON_LIMITS,
    rules=WHOLE_NODES,
    recompute_counts="block",
    modes=_megatron_modes,
    more_limits=_megatron_limits,
    complete=True,
)
_BRIDGE_TILES = Limit(("none",), "comm_overlap of a recipe switches other overlaps with it")
BRIDGE = Capability(
    name="Megatron-Bridge",
    versions=("0.3.1",),
    limits={**_MEGATRON_LIMITS, "tp_overlap": _BRIDGE_TILES},
    rules=WHOLE_NODES,
    recompute_counts="block",
    modes=_megatron_modes,
    more_limits=_megatron_limits,
    complete=True,
)


FSDP_RULES = {
    **WHOLE_NODES,
    "whole_key_value_heads": RowRule(
        whole_kv_heads, "its tensor-parallel plans split key and value heads, and copy none"
    ),
    "fsdp_states": RowRule(
        fsdp_states,
        "FSDP2 is ZeRO 3, or with one micro-batch ZeRO 2, always overlapped; DDP is ZeRO 0, overlapped",
        shards=True,
    ),
}
_FSDP_HOST = Limit((False,), "its offloading is another than is priced")
_FSDP_LIMITS = {
    "etp": Limit((1,), "it splits no expert"),
    "zero_stage": Limit((0, 2, 3), "FSDP2 shards weights, gradients and states together"),
    "tp_overlap": Limit(("none",), "it has no tiles of products beside their messages"),
    "pp_scatter_gather": Limit((False,), "PyTorch's pipeline sends whole activations"),
    "gather_again": Limit((True,), "it gathers sharded inputs again in the backward"),
    "offload_weights": _FSDP_HOST,
    "offload_activations": _FSDP_HOST,
    "offload_optimizer": _FSDP_HOST,
    "rank_order": Limit(("tp-cp-dp-pp",), "its mesh has pp outside, then dp, cp and tp"),
}


ACCELERATE = Capability(
    name="Accelerate",
    versions=("1.15.0",),
    limits={
        **_FSDP_LIMITS,
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


AUTOMODEL = Capability(
    name="NeMo AutoModel",
    versions=("0.7.0",),
    limits={
        **_FSDP_LIMITS,
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


def _own_orders(problem: Problem) -> dict[str, Limit]:
    """Limit rank orders to tp-cp-dp-pp. An export may replace it by another order with the same placement."""
    return {"rank_order": Limit(("tp-cp-dp-pp",), "its ranks stand as tp-cp-dp-pp")}


_NO_STREAMS = "it keeps on the host what this plan streams beside the layers only in other ways"
_NO_TILES = "it has no tiles of products beside their messages that are known to take the time that is priced"
TORCHTITAN = Capability(
    name="torchtitan",
    versions=("b5bcd76c", "0.3.0", "0.2.2"),
    limits={
        "cp": Limit((1,), "its context parallelism gathers keys and values, and what is priced is a ring"),
        "schedule": Limit(
            ("1f1b", "interleaved", "gpipe"),
            "its zero-bubble schedules fail on the mask of FlexAttention and are off in its own tests "
            "(tests/integration_tests/features.py:129)",
        ),
        "tp_overlap": Limit(("none",), _NO_TILES),
        "pp_scatter_gather": Limit((False,), "PyTorch's pipeline sends whole activations"),
        "offload_weights": Limit((False,), _NO_STREAMS),
        "offload_activations": Limit((False,), _NO_STREAMS),
        "offload_optimizer": Limit((False,), f"{_NO_STREAMS} (enable_cpu_offload updates on the processor)"),
    },
    rules={
        **WHOLE_NODES,
        "whole_key_value_heads": RowRule(whole_kv_heads, "heads of a rank are whole"),
        "whole_words": RowRule(whole_words, "DTensor shards of the vocabulary are even here"),
        "experts": RowRule(titan_experts, "experts are cut over tp without ep, with it over one rank"),
        "sequences": RowRule(titan_sequences, "with sequence parallelism gathered inputs are kept"),
        "pipelines": RowRule(titan_pipelines, "1F1B wants as many micro-batches as stages"),
        "states": RowRule(titan_states, "fully_shard decides what is sharded and when", shards=True),
    },
    more_limits=_own_orders,
    complete=True,
)
NANOTRON = Capability(
    name="nanotron",
    versions=("2411b022",),
    limits={
        "cp": Limit((1,), "its ring attention gathers keys and values, and what is priced is a ring"),
        "ep": Limit(
            (1,), "expert_parallel_size above 1 passes only one of its two checks (parallel/context.py:24, :62)"
        ),
        "vpp": Limit((1,), "its pipeline has one stage a rank (models/base.py, build_model)"),
        "schedule": Limit(("1f1b", "gpipe"), "pp_engine is 1f1b or afab"),
        "zero_stage": Limit((0, 1), "zero_stage above 0 is ZeRO 1 (helpers.py:409)"),
        "tp_overlap": Limit(("none",), _NO_TILES),
        "pp_scatter_gather": Limit((False,), "its pipeline sends whole activations"),
        "offload_weights": Limit((False,), "it keeps nothing on the host"),
        "offload_activations": Limit((False,), "it keeps nothing on the host"),
        "offload_optimizer": Limit((False,), "it keeps nothing on the host"),
        "overlap_param_gather": Limit(
            (False,), "weights are gathered when the update is over (optim/zero.py:119)"
        ),
    },
    rules={
        **WHOLE_NODES,
        "whole_key_value_heads": RowRule(whole_kv_heads, "heads of a rank are whole"),
        "stages": RowRule(nanotron_stages, "it places layers by its own costs (models/base.py:216)"),
        "pipelines": RowRule(nanotron_pipelines, "1F1B wants one micro-batch less than ranks"),
        "reduces_beside": RowRule(reduces_beside, "gradients are reduced beside the backward", shards=True),
    },
    stages="equal",
    more_limits=_own_orders,
    complete=True,
)
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
        "tp_overlap": Limit(("none",), _NO_TILES),
        "pp_scatter_gather": Limit((False,), "there is no pipeline in its configuration"),
        "offload_weights": Limit((False,), f"{_NO_STREAMS} (offload_param)"),
        "offload_activations": Limit((False,), f"{_NO_STREAMS} (cpu_checkpointing)"),
        "offload_optimizer": Limit((False,), f"{_NO_STREAMS} (offload_optimizer updates on the processor)"),
    },
    rules={
        **WHOLE_NODES,
        "states": RowRule(deepspeed_states, "up to ZeRO 2 weights are gathered after the update", shards=True),
    },
    stages="equal",
    more_limits=_own_orders,
    complete=True,
)
CAPABILITIES: dict[str, Capability] = {
    "megatron": MEGATRON,
    "megatron-bridge": BRIDGE,
    "torchtitan": TORCHTITAN,
    "nanotron": NANOTRON,
    "deepspeed": DEEPSPEED,
    "accelerate": ACCELERATE,
    "automodel": AUTOMODEL,
}
"""Capabilities by the name that ``--to``, ``--from`` and ``--target`` take."""
