"""Export of a solved step as a configuration of HotSPa's runtime (``groups.hetu``).

The runtime supports tensor parallelism, stages and replicas, one bucket a strategy, the longest last and at home.
The export is the closest step that its rules allow. Its files have no recomputation, and it packs by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.groups.hetu_configuration import HotSPaLaunch, as_buckets, exported
from milpplan.lengths.records import LengthsResult
from milpplan.lengths.turns.turn_dispatch import TurnDispatcher
from milpplan.problem.model import Attention, GroupedQueryAttention, ModelSpec
from milpplan.problem.problem import Problem
from milpplan.units import percent_text


@dataclass(frozen=True, slots=True)
class HotSPaStep:
    """The files and strategies of a launch, and notes on what the files cannot express."""

    launch: HotSPaLaunch
    notes: tuple[str, ...]


def check_model(model: ModelSpec) -> None:
    """Refuse a model that the runtime cannot train.

    Raises:
        InvalidInputError: it has experts, learned positions, LayerNorm, feed-forward blocks without gates, or
            attention that is not plain grouped-query attention.
    """
    mlps, attentions = [run.mlp for run in model.layers], [run.attention for run in model.layers]
    unsupported = {
        "routed experts": model.has_experts,
        "learned positions": model.learned_positions,
        "LayerNorm": model.norm != "rmsnorm",
        "attention other than grouped-query": any(block.type != "gqa" for block in attentions),
        "biases, sinks, windows or norms in attention": any(map(_is_special, attentions)),
        "blocks without gates": not all(block.gated for block in mlps),
    }
    present = [name for name, is_present in unsupported.items() if is_present]
    if present:
        raise InvalidInputError(
            f"{model.name} has {' and '.join(present)}.",
            "Expected a model like LLaMA: HotSPa's runtime builds no other (llama_hot_switch.py).",
            "Export another model, or dispatch batches from the JSON of the step.",
        )


def _is_special(attention: Attention) -> bool:
    return isinstance(attention, GroupedQueryAttention) and bool(
        attention.qkv_bias
        or attention.output_bias
        or attention.sinks
        or attention.sliding_window
        or attention.qk_norm != "none"
    )


def hotspa_step(problem: Problem, result: LengthsResult) -> HotSPaStep:
    """Return the configuration of a step of strategies in turn that ``solve_lengths`` found for a problem.

    Raises:
        InvalidInputError: degrees or heterogeneous replicas run side by side, sequences are padded, or the model
            is not like LLaMA.
        IllegalPlanError: a strategy has parallelism that the runtime does not support, or two have one layout.
    """
    check_model(problem.model)
    for group in result.groups:
        layout = group.plan.layout
        unsupported = [name for name in ("cp", "ep") if getattr(layout, name) > 1]
        if unsupported and not result.turns:
            raise IllegalPlanError(
                f"The strategy {group.strategy} has {' and '.join(unsupported)} above 1.",
                "Expected tp, pp and dp only: HotSPa's runtime knows no other parallelism.",
                "Solve again with " + " ".join(f"--fix {name}=1" for name in unsupported) + ".",
            )
    dispatcher = TurnDispatcher(problem, result)
    buckets = as_buckets(dispatcher.plan)
    launch = exported(buckets, dispatcher.layouts, problem.model.num_layers)
    excess = percent_text(max(0.0, buckets.time_ns / dispatcher.plan.time_ns - 1.0))
    notes = [
        f"By the runtime's rules, a bucket a strategy, the step takes {excess} longer. It packs by itself, too: "
        "greedily, packs dealt out in turn, and those beyond a multiple of dp dropped."
    ]
    replayed = [group.strategy for group in result.groups if group.strategy.endswith(("selective", "full"))]
    if replayed:
        notes.append(
            f"{' and '.join(replayed)} recompute{'s' if len(replayed) == 1 else ''} activations, which these files"
            " cannot say (solve with --fix recompute=none for a step that needs none)."
        )
    if launch.strategies != (result.home, *result.order[:-1]):
        notes.append(
            "The runtime runs its home last: the step's order or home is another, so it takes longer there."
        )
    return HotSPaStep(launch, tuple(notes))
