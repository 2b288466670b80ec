"""nanotron's rules, restated: layouts that its configuration, its groups or its pipeline refuse.

Each rule has a name, its source (huggingface/nanotron at 2411b022, src/nanotron) and a function that describes the
violation, if there is one. ``NANOTRON`` declares the layouts that nanotron can run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from milpplan.errors import IllegalPlanError
from milpplan.launchers.capabilities import (
    NO_TILES,
    ONE_F_ONE_B,
    WHOLE_NODES,
    Capability,
    Columns,
    Limit,
    RowRule,
    own_orders,
    whole_kv_heads,
)
from milpplan.launchers.nanotron.settings import stage_sizes
from milpplan.problem.model import GroupedQueryAttention, ModelSpec
from milpplan.problem.plan import Layout
from milpplan.problem.problem import Problem

Check = Callable[[ModelSpec, Layout, int], str]
"""Check of a model, a layout and a sequence length in tokens: describes the violation, or returns an empty
text."""


def _heads(model: ModelSpec, layout: Layout, tokens: int) -> str:
    heads = model.kinds[0].attention.num_attention_heads
    return f"{heads} heads over tp={layout.tp}" if heads % layout.tp else ""


def _groups(model: ModelSpec, layout: Layout, tokens: int) -> str:
    attention = model.kinds[0].attention
    groups = attention.num_key_value_heads if isinstance(attention, GroupedQueryAttention) else 0
    if groups < layout.tp or groups % layout.tp:
        return f"{groups} heads of keys and values over tp={layout.tp}"
    return ""


def _widths(model: ModelSpec, layout: Layout, tokens: int) -> str:
    width = model.kinds[0].mlp.intermediate_size
    return f"a width of {width} over tp={layout.tp}" if width % layout.tp else ""


def _sequence(model: ModelSpec, layout: Layout, tokens: int) -> str:
    count = tokens * layout.micro_batch_size
    return f"{count} tokens over tp={layout.tp}" if layout.sequence_parallel and count % layout.tp else ""


def _micro_batches(model: ModelSpec, layout: Layout, tokens: int) -> str:
    if layout.pp == 1 or layout.schedule != "1f1b" or layout.num_micro_batches >= layout.pp - 1:
        return ""
    return f"{layout.num_micro_batches} micro-batches are fewer than {layout.pp - 1}"


RULES: Mapping[str, tuple[str, Check]] = {
    "heads_divide": ("config/config.py:537", _heads),
    "key_value_heads_divide": ("config/config.py:543, models/llama.py: heads of a rank are whole", _groups),
    "widths_divide": ("parallel/tensor_parallel/nn.py:63, :128", _widths),
    "micro_batches": ("parallel/pipeline_parallel/engine.py:252", _micro_batches),
    "sequence_divides": ("parallel/tensor_parallel/distributed_differentiable_primitives.py", _sequence),
}
"""Rules by name, with source and check."""


def broken_rules(model: ModelSpec, layout: Layout, tokens: int) -> dict[str, str]:
    """List the rules that a layout breaks for a model and a sequence length, with sources and descriptions."""
    violations = {name: (source, check(model, layout, tokens)) for name, (source, check) in RULES.items()}
    return {name: f"rule {name} ({source}): {text}" for name, (source, text) in violations.items() if text}


def check_rules(model: ModelSpec, layout: Layout, tokens: int, do: str) -> None:
    """Raise an error for the rules that a layout breaks.

    Raises:
        IllegalPlanError: names the rules, their sources and the violations.
    """
    broken = broken_rules(model, layout, tokens)
    if broken:
        raise IllegalPlanError(
            f"nanotron refuses it, {'; '.join(broken.values())}.",
            "Expected settings that its own checks admit.",
            do,
        )


def nanotron_stages(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require equal stages where nanotron's own placement makes equal stages."""
    layers = problem.model.num_layers
    equal = {int(pp): stage_sizes(problem.model, int(pp)) == (layers // int(pp),) * int(pp) for pp in set(c["pp"])}
    return np.asarray([equal[int(pp)] for pp in c["pp"]], dtype=np.bool_)


def nanotron_pipelines(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require at least pp - 1 micro-batches for 1F1B (parallel/pipeline_parallel/engine.py)."""
    few = (c["pp"] > 1) & (c["schedule"] == ONE_F_ONE_B) & (c["num_micro_batches"] < c["pp"] - 1)
    return np.asarray(~few)


def reduces_beside(problem: Problem, c: Columns) -> npt.NDArray[np.bool_]:
    """Require the gradient reduction of several replicas to overlap with the last backward pass."""
    return np.asarray((c["cp"] * c["dp"] == 1) | (c["overlap_grad_reduce"] == 1))


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
        "tp_overlap": Limit(("none",), NO_TILES),
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
    more_limits=own_orders,
    complete=True,
)
