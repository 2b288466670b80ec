"""A solved step as the configuration of HotSPa's runtime (``groups.hetu``).

The runtime knows tensor parallelism, stages and replicas, one bucket a strategy, the longest last and at home; the
closest step that its rules allow is what it gets. It recomputes nothing by these files, and packs by itself.
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
    """The files and strategies of a launch, and what they do not say, in sentences."""

    launch: HotSPaLaunch
    notes: tuple[str, ...]


def check_model(model: ModelSpec) -> None:
    """Refuse a model that is not of the kind that the runtime trains.

    Raises:
        InvalidInputError: it has experts, learned positions, LayerNorm, feed-forward blocks without gates, or
            attention that is not plain grouped-query attention.
    """
    mlps, attentions = [run.mlp for run in model.layers], [run.attention for run in model.layers]
    foreign = {
        "routed experts": model.has_experts,
        "learned positions": model.learned_positions,
        "LayerNorm": model.norm != "rmsnorm",
        "attention other than grouped-query": any(one.type != "gqa" for one in attentions),
        "biases, sinks, windows or norms in attention": any(map(_is_special, attentions)),
        "blocks without gates": not all(one.gated for one in mlps),
    }
    found = [name for name, has in foreign.items() if has]
    if found:
        raise InvalidInputError(
            f"{model.name} has {' and '.join(found)}.",
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
    """The configuration of a step that ``solve_lengths`` found for a problem, in turn.

    Raises:
        InvalidInputError: degrees or unlike replicas run side by side, sequences are padded, or the model is not
            like LLaMA.
        IllegalPlanError: a strategy has parallelism that the runtime does not know, or two have one layout.
    """
    check_model(problem.model)
    for group in result.groups:
        layout = group.plan.layout
        foreign = [name for name in ("cp", "ep") if getattr(layout, name) > 1]
        if foreign and not result.turns:
            raise IllegalPlanError(
                f"The strategy {group.strategy} has {' and '.join(foreign)} above 1.",
                "Expected tp, pp and dp only: HotSPa's runtime knows no other parallelism.",
                "Solve again with " + " ".join(f"--fix {name}=1" for name in foreign) + ".",
            )
    dispatcher = TurnDispatcher(problem, result)
    buckets = as_buckets(dispatcher.plan)
    launch = exported(buckets, dispatcher.layouts, problem.model.num_layers)
    longer = percent_text(max(0.0, buckets.time_ns / dispatcher.plan.time_ns - 1.0))
    notes = [
        f"By the runtime's rules, a bucket a strategy, the step takes {longer} longer. It packs by itself, too: "
        "greedily, packs dealt out in turn, and those beyond a multiple of dp dropped."
    ]
    replayed = [one.strategy for one in result.groups if one.strategy.endswith(("selective", "full"))]
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
