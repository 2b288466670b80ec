"""Reader of a model from Megatron-LM's arguments."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from milpplan.errors import InvalidInputError
from milpplan.launchers.arguments import Arguments
from milpplan.launchers.layer_patterns import pattern_flags
from milpplan.problem.model import ModelSpec
from milpplan.problem.reading import shown, validated

POSITIONS = {"learned_absolute": True, "rope": False, "yarn": False, "none": False}
"""True for learned positions, by ``--position-embedding-type``; other positions have no cost."""


def model_of(given: Arguments, name: str, vocab_size: int | None = None) -> ModelSpec:
    """Build the model that the arguments describe.

    Args:
        given: the arguments.
        name: of the model.
        vocab_size: the vocabulary, where only the tokenizer knows it.

    Raises:
        InvalidInputError: sizes are missing or invalid, or the model has parts that are not modelled.
    """
    layers = given.needed("--num-layers")
    hidden = given.needed("--hidden-size")
    positions = given.text("--position-embedding-type") or ""
    if given.given("--use-rotary-position-embeddings"):
        positions = "rope"
    if positions not in POSITIONS:
        raise InvalidInputError(
            f"--position-embedding-type is {positions}.",
            f"Expected one of {', '.join(POSITIONS)}, which are priced.",
            "Describe the model in a .toml file and give it with --model.",
        )
    attentions = _attentions(given, layers, hidden)
    mlps = _mlps(given, layers, hidden)
    runs = [
        {"count": len(list(same)), "attention": attention, "mlp": mlp}
        for (attention, mlp), same in groupby(zip(attentions, mlps, strict=True))
    ]
    length = given.needed("--seq-length")
    dropout, scores = (given.real(f"--{name}-dropout") > 0 for name in ("hidden", "attention"))
    data = {
        "name": name,
        "hidden_size": hidden,
        "vocab_size": _vocabulary(given, vocab_size),
        "max_position_embeddings": given.count("--max-position-embeddings", length),
        "layers": runs,
        "tie_word_embeddings": not given.given("--untie-embeddings-and-output-weights"),
        "learned_positions": POSITIONS[positions],
        "norm": (given.text("--normalization") or "").lower(),
        "dropout": dropout,
        "attention_dropout": None if scores == dropout else scores,
        "default_sequence_length": length,
    }
    return validated(ModelSpec, data, "the model that the arguments describe")


def _vocabulary(given: Arguments, vocab_size: int | None) -> int:
    size = given.number("--vocab-size") or vocab_size
    if size is None:
        raise InvalidInputError(
            "--vocab-size is missing: only the tokenizer knows the vocabulary.",
            "Expected its size, which decides the embedding, the head and the loss.",
            "Give --vocab-size N, in the arguments or to the import, or name the model with --model.",
        )
    return size


def _attentions(given: Arguments, layers: int, hidden: int) -> list[dict[str, Any]]:
    heads = given.needed("--num-attention-heads")
    if given.given("--multi-latent-attention"):
        given.given("--kv-channels")
        _check_latent(given)
        latent = {
            "type": "mla",
            "num_attention_heads": heads,
            "q_lora_rank": given.number("--q-lora-rank"),
            "kv_lora_rank": given.stated("--kv-lora-rank"),
            "qk_nope_head_dim": given.stated("--qk-head-dim"),
            "qk_rope_head_dim": given.stated("--qk-pos-emb-head-dim"),
            "v_head_dim": given.stated("--v-head-dim"),
        }
        return [latent] * layers
    grouped = given.given("--group-query-attention")
    groups = given.stated("--num-query-groups") if grouped else heads
    biased = not given.given("--disable-bias-linear")
    softmax = given.text("--softmax-type")
    base = {
        "type": "gqa",
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": given.count("--kv-channels", hidden // heads),
        "qkv_bias": biased or given.given("--add-qkv-bias"),
        "output_bias": biased,
        "qk_norm": "per_head" if given.given("--qk-layernorm") else "none",
        "sinks": softmax == "learnable",
        "sliding_window": None,
    }
    return [base | {"sliding_window": window} for window in _windows(given, layers)]


def _check_latent(given: Arguments) -> None:
    """Check for norms of the low-rank projections and no biases, as priced (DeepSeek-V2, 2.1)."""
    for flag in ("--qk-layernorm", "--disable-bias-linear"):
        if not given.given(flag):
            raise InvalidInputError(
                f"--multi-latent-attention comes without {flag}.",
                "Expected both: norms of the low-rank projections and no biases, which is what is priced.",
                f"Add {flag} if the model is of this kind.",
            )


def _windows(given: Arguments, layers: int) -> list[int | None]:
    """List the number of tokens that a query sees in every layer: its own and those before it."""
    text = given.text("--window-size")
    skip = given.text("--window-attn-skip-freq")
    if text is None:
        return [None] * layers
    parts = text.strip("()").split(",")
    if len(parts) != 2 or not parts[0].strip().isdigit() or parts[1].strip() != "0":
        raise InvalidInputError(
            f"--window-size is {shown(text)}.",
            "Expected tokens before the query and none after it, such as 4095,0.",
            "Correct --window-size.",
        )
    width = int(parts[0]) + 1
    slides = True if skip is None else pattern_flags(skip, "--window-attn-skip-freq")
    if slides is True:
        return [width] * layers
    if isinstance(slides, list):
        return [
            width if slides_here else None for slides_here in _of_length(slides, layers, "--window-attn-skip-freq")
        ]
    return [width if slides and (layer + 1) % slides else None for layer in range(layers)]


def _mlps(given: Arguments, layers: int, hidden: int) -> list[dict[str, Any]]:
    gated = given.given("--swiglu") | given.given("--quick-geglu")
    biased = not given.given("--disable-bias-linear")
    # Width that the parser derives where none is given (training/arguments.py, validate_args).
    width = given.count("--ffn-hidden-size", int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden)
    dense = {"type": "dense", "intermediate_size": width, "gated": gated, "bias": biased}
    experts = given.number("--num-experts")
    if not experts:
        return [dense] * layers
    shared = given.count("--moe-shared-expert-intermediate-size", 0)
    moe = {
        "type": "moe",
        "num_experts": experts,
        "num_experts_per_tok": given.stated("--moe-router-topk"),
        "intermediate_size": given.count("--moe-ffn-hidden-size", width),
        "gated": gated,
        "bias": biased,
        "router_bias": biased,
        "shared_intermediate_size": shared,
        "shared_gate": given.given("--moe-shared-expert-gate") and shared > 0,
    }
    frequency = pattern_flags(given.text("--moe-layer-freq") or "1", "--moe-layer-freq")
    if isinstance(frequency, list):
        flags = _of_length(frequency, layers, "--moe-layer-freq")
    else:
        flags = [layer % max(frequency, 1) == 0 for layer in range(layers)]
    return [moe if flag else dense for flag in flags]


def _of_length(flags: list[bool], layers: int, flag: str) -> list[bool]:
    if len(flags) != layers:
        raise InvalidInputError(
            f"{flag} describes {len(flags)} layers, --num-layers is {layers}.",
            "Expected one entry for every layer.",
            f"Correct {flag}.",
        )
    return flags
