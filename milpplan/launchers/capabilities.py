"""Layouts that a launcher can run: the declaration that every launcher has, and the rules that several share.

Each launcher's folder has one declaration. It restricts a problem's space (``targets.restrict``), gives the
rules for the layouts of the restricted space, and yields the refusals of an export.

A field without an entry in ``limits`` may take any value. A condition on several fields is a rule: it takes a
problem and columns [N] of numbers, and returns booleans [N], True where the layout keeps the rule. A schedule is
given by its index in ``SCHEDULES``. Columns that are not enumerated yet have their defaults. ``recompute_counts``
and ``stages`` declare how recomputation and stage sizes may differ between stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from milpplan.problem import NO_MODULES, SCHEDULES, Layout, Problem

Mode = Literal["none", "selective", "full"]
Columns = Mapping[str, npt.NDArray[np.int64]]
ONE_F_ONE_B = SCHEDULES.index("1f1b")


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


def _as_planned(problem: Problem) -> str:
    return NO_MODULES


def _as_described(version: str) -> Mapping[str, object]:
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
    own_modules: Callable[[Problem], str] = _as_planned
    """Modules that its selective recomputation replays where the space names none; ``NO_MODULES``: those that a
    plan counts."""
    program: Callable[[str], Mapping[str, object]] = _as_described
    """Fields of ``Software``, by version, in which the program that an export starts is not the hardware's."""
    formats: Mapping[str, str] = field(default_factory=dict)
    """Reasons, by fields of ``Job``, why it has no other number format or attention kernel than the default."""
    batch_settings: Mapping[str, str] = field(default_factory=dict)
    """Settings that ``--micro-batch``, ``--accumulation`` and ``--seq-len`` state where files leave them out."""
    hybrid_stages: tuple[int, ...] = (1, 2, 3)
    """ZeRO stages that it can shard within groups of replicas (``Layout.dp_replicate``)."""
    complete: bool = False
    """True if limits and rules cover every refusal of an export, so that a space can be restricted to them."""

    def refused(self, layout: Layout) -> dict[str, Limit]:
        """Find the fields of a layout whose values the target does not support."""
        return {name: limit for name, limit in self.limits.items() if getattr(layout, name) not in limit.values}

    def shards_within_groups(self, problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
        """Find the layouts whose hybrid sharding, if any, the target supports, [N]."""
        return np.asarray((c["dp_replicate"] == 1) | np.isin(c["zero_stage"], self.hybrid_stages))

    def limits_of(self, problem: Problem) -> dict[str, Limit]:
        """Merge the target's fixed limits with those that depend on the problem."""
        limits = dict(self.limits)
        for name, limit in self.more_limits(problem).items():
            fixed = limits.get(name)
            values = limit.values if fixed is None else tuple(v for v in fixed.values if v in limit.values)
            limits[name] = Limit(values, limit.why)
        return limits


def whole_nodes(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require the number of GPUs to fit on one node or to fill whole nodes."""
    gpus, node = c["tp"] * c["cp"] * c["pp"] * c["dp"], problem.hardware.gpus_per_node
    return np.asarray((gpus <= node) | (gpus % node == 0))


def shared_indexers(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require sequence parallelism beside tensor parallelism where an indexer selects keys."""
    return np.asarray((not problem.model.has_indexers) | (c["tp"] == 1) | (c["sequence_parallel"] == 1))


def whole_windows(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require that every rank attends over whole sequences where layers have sliding windows or sinks."""
    mixers = [kind.attention for kind in problem.model.kinds]
    plain = not any(mixer.type == "gqa" and (mixer.sliding_window is not None or mixer.sinks) for mixer in mixers)
    ranks = c["ulysses"] if "ulysses" in c else np.ones(len(c["tp"]), dtype=np.int64)
    return np.asarray(plain | (c["cp"] == ranks))


def equal_stages(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require an equal number of layers in every virtual stage."""
    return np.asarray(problem.model.num_layers % (c["pp"] * c["vpp"]) == 0)


def whole_kv_heads(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require that tensor parallelism does not split a key/value head."""
    keeps = np.ones(len(c["tp"]), dtype=np.bool_)
    for kind in problem.model.kinds:
        if kind.attention.type == "gqa":
            keeps &= kind.attention.num_key_value_heads % c["tp"] == 0
        else:
            keeps &= c["tp"] == 1
    return keeps


def whole_words(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require a tensor-parallel degree that divides the vocabulary."""
    return np.asarray(problem.model.vocab_size % c["tp"] == 0)


def fsdp_states(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require ZeRO states that FSDP2 or DDP can produce.

    FSDP2 gathers weights and reduces gradients beside the work of every micro-batch. With resharding this is ZeRO
    3. Without resharding it is ZeRO 2, but weights are gathered once per step only with a single micro-batch. DDP
    is ZeRO 0.
    """
    several, stage = c["cp"] * c["dp"] > 1, c["zero_stage"]
    sharded = (stage == 3) | ((stage == 2) & (c["num_micro_batches"] == 1))
    overlaps = (c["overlap_grad_reduce"] == 1) & ((stage == 0) | (c["overlap_param_gather"] == 1))
    return np.asarray(np.where(several, ((stage == 0) | sharded) & overlaps, stage == 0))


def piped_states(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require ZeRO states that FSDP2 or DDP can produce, with or without a pipeline.

    In a pipeline, weights stay gathered and gradients unreduced until all micro-batches have run, and gradients
    are reduced afterwards: ZeRO 1 without overlap. Without a pipeline ``fsdp_states`` applies.
    """
    several, stage = c["cp"] * c["dp"] > 1, c["zero_stage"]
    after = (stage == 1) & (c["overlap_grad_reduce"] == 0) & (c["overlap_param_gather"] == 0)
    return np.asarray(np.where(several & (c["pp"] > 1), after, fsdp_states(problem, c)))


TRANSFORMERS: Mapping[str, object] = {
    "norm_kept_bytes": 4.0,
    "fused_activation": False,
    "logit_kept_bytes": 10.0,
}
"""Bytes of a model of Transformers that nothing compiles, whose operators run one by one: a norm keeps its input
in fp32 and normalised instead of as it is, the gate its activation, the loss its log-softmax and two gradients in
fp32.

Source: transformers 5.24.0, models/llama/modeling_llama.py and loss/loss_utils.py; the sum over the tensors that
autograd saves in a layer is equal to the byte, but for the rotary tables and the norms' statistics."""
WHOLE_NODES = {"whole_nodes": RowRule(whole_nodes, "torchrun starts as many processes on every node")}
TRANSFORMER_ENGINE = {
    **WHOLE_NODES,
    "whole_windows": RowRule(
        whole_windows,
        "Transformer Engine's context parallelism has sliding windows and sinks with all-to-alls alone "
        "(TransformerEngine at d0067d0d, pytorch/attention/dot_product_attention/context_parallel.py:5057-5067)",
    ),
}
"""Rules of programs that train with Megatron-Core."""
NO_STREAMS = "it keeps on the host what this plan streams beside the layers only in other ways"
NO_GROUPS = Limit((1,), "it has no hybrid sharding that is priced: states are sharded over all replicas")
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
FSDP_LIMITS = {
    "etp": Limit((1,), "it splits no expert"),
    "zero_stage": Limit((0, 2, 3), "FSDP2 shards weights, gradients and states together"),
    "tp_overlap": Limit(("none",), "it has no tiles of products beside their messages"),
    "pp_scatter_gather": Limit((False,), "PyTorch's pipeline sends whole activations"),
    "expert_dispatch": Limit(("default",), "the hardware's software says how tokens reach experts"),
    "keep_weights": Limit((False,), "weights that are kept after a forward are ZeRO 2 with one micro-batch alone"),
    "gather_again": Limit((True,), "it gathers sharded inputs again in the backward"),
    "ulysses": Limit((1,), "its context parallelism passes keys and values around a ring"),
    "offload_weights": _FSDP_HOST,
    "offload_activations": _FSDP_HOST,
    "offload_modules": Limit((NO_MODULES,), "it offloads no single module"),
    "offload_optimizer": _FSDP_HOST,
    "rank_order": Limit(("tp-cp-dp-pp",), "its mesh has pp outside, then dp, cp and tp"),
}


def own_orders(problem: Problem) -> dict[str, Limit]:
    """Limit rank orders to tp-cp-dp-pp. An export may replace it by another order with the same placement."""
    return {"rank_order": Limit(("tp-cp-dp-pp",), "its ranks stand as tp-cp-dp-pp")}


def config_capability(limits: Mapping[str, Limit], rules: Mapping[str, RowRule], **declared: Any) -> Capability:
    """Declare a target of one configuration file, which torchrun starts on whole nodes.

    Its ranks stand as tp-cp-dp-pp, and no products are tiled beside their messages.

    Args:
        limits: its limits beside tiles.
        rules: its rules beside whole nodes.
        declared: other fields of ``Capability``.
    """
    tiles = Limit(("none",), "it has no tiles of products beside messages that are known to take the time priced")
    rules = {**WHOLE_NODES, **rules}
    return Capability(limits={"tp_overlap": tiles, **limits}, rules=rules, more_limits=own_orders, **declared)
