"""Dense model as a Hugging Face config, from which a training program builds its class.

Every candidate is read back by the reader of such configs and must give the model.
"""

from __future__ import annotations

from typing import Any

from milpplan.errors import MilpplanError
from milpplan.launchers.expressible import model_differences
from milpplan.problem.huggingface.config import model_from_config
from milpplan.problem.model import DenseMlp, GroupedQueryAttention, ModelSpec

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of ``model_type`` whose classes differ in biases, windows, and norms of queries and keys."""


def config_of(model: ModelSpec) -> dict[str, Any] | None:
    """Return the config of a model; None where no family represents it."""
    kind = model.kinds[0]
    if len(model.kinds) > 1 or not isinstance(kind.attention, GroupedQueryAttention):
        return None
    if not isinstance(kind.mlp, DenseMlp):
        return None
    sizes = {
        "hidden_size": model.hidden_size,
        "intermediate_size": kind.mlp.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": kind.attention.num_attention_heads,
        "num_key_value_heads": kind.attention.num_key_value_heads,
        "head_dim": kind.attention.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "tie_word_embeddings": model.tie_word_embeddings,
    }
    if kind.attention.output_bias:
        sizes["attention_bias"] = True
    if kind.attention.sliding_window is not None:
        sizes["sliding_window"] = kind.attention.sliding_window
    candidates = ({"model_type": family} | sizes for family in FAMILIES)
    return next((config for config in candidates if _builds(config, model)), None)


def _builds(config: dict[str, Any], model: ModelSpec) -> bool:
    try:
        return not model_differences(model_from_config(config, model.name), model)
    except MilpplanError:
        return False
