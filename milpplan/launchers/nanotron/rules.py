"""nanotron's rules, restated: layouts that its configuration, its groups or its pipeline refuse.

Each rule has a name, its source (huggingface/nanotron at 2411b022, src/nanotron) and a function that describes the
violation, if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from milpplan.errors import IllegalPlanError
from milpplan.problem.model import GroupedQueryAttention, ModelSpec
from milpplan.problem.plan import Layout

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
