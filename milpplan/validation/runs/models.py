"""Model of a record: a shipped preset that agrees with the record's dimensions, else the dimensions."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from milpplan.problem import (
    DenseMlp,
    GroupedQueryAttention,
    LatentAttention,
    LayerRun,
    MixtureOfExperts,
    ModelSpec,
    load_model,
    model_names,
)
from milpplan.problem.model import Attention, Mlp
from milpplan.validation.runs.frameworks import Framework, Style
from milpplan.validation.runs.records import ModelDims, Run, UnstatedError

PRESETS: Final = {
    "llama-3/3.1-8b": "llama3-8b",
    "llama-3/3.1-70b": "llama3-70b",
    "llama-3.1-405b": "llama3-405b",
    "llama-2-7b": "llama2-7b",
    "llama-2-13b": "llama2-13b",
    "llama-2-70b": "llama2-70b",
    "mixtral-8x7b": "mixtral-8x7b",
    "mixtral-8x22b": "mixtral-8x22b",
    "deepseek-v3": "deepseek-v3",
    "qwen3-30b-a3b": "qwen3-30b-a3b",
    "qwen3-235b-a22b": "qwen3-235b-a22b",
    "gpt-oss-120b": "gpt-oss-120b",
}
HYBRID: Final = "hybrids of attention and state-space layers are not built from records"
UNSTATABLE: Final = (
    ("llama-4", "layers with and without experts alternate, and the record does not say how"),
    ("deepseek-v4", "its attention to compressed keys is not built from records"),
    ("nemotron-3", HYBRID),
    ("nemotron3", HYBRID),
    ("nemotron_3", HYBRID),
    ("nemotron-h", HYBRID),
)
GPT_VOCAB: Final = 51_200
LLAMA_VOCAB: Final = 32_000
GROK_VOCAB: Final = 131_072
HEAD_DIM: Final = 128
FFN_MULTIPLE: Final = 256
MAX_LAYERS: Final = 10_000


def model_of(run: Run, framework: Framework, tp: int) -> tuple[ModelSpec, list[str]]:
    """Build the model of a run, and list the assumptions.

    Raises:
        UnstatedError: milpplan cannot describe its layers, or its dimensions are unknown.
    """
    dims = run.model
    name = dims.name.lower()
    for part, reason in UNSTATABLE:
        if part in name:
            raise UnstatedError(reason)
    if dims.moe is not None and dims.moe.hybrid_pattern:
        raise UnstatedError(HYBRID)
    preset = _agreeing_preset(dims)
    if preset is not None:
        notes = (
            [] if dims.vocab in (None, preset.vocab_size) else [f"vocabulary of {dims.vocab:,} as in the source"]
        )
        if dims.layers is None or dims.hidden is None:
            notes.append(f"dimensions of the shipped {preset.name} (not printed)")
        if dims.moe is not None and preset.name == "deepseek-v3":
            notes.append("without multi-token prediction")
        return preset.model_copy(update={"vocab_size": dims.vocab or preset.vocab_size}), notes
    return _from_dims(run, framework, tp)


def style_of(name: str, gated: bool | None) -> Style:
    """Return the family whose norms, biases and positions a model has."""
    text = name.lower()
    for part, style in (("mpt", "mpt"), ("bloom", "bloom"), ("nemotron", "nemotron"), ("15b_8t", "nemotron")):
        if part in text:
            return style  # type: ignore[return-value]
    return "llama" if gated or gated is None else "gpt"


@lru_cache(maxsize=64)
def _preset(name: str) -> ModelSpec:
    return load_model(name)


def _agreeing_preset(dims: ModelDims) -> ModelSpec | None:
    name = PRESETS.get(dims.name.lower())
    if name is None and (dims.layers is None or dims.hidden is None):
        name = next((preset_name for preset_name in model_names() if _bare(preset_name) == _bare(dims.name)), None)
    if name is None:
        return None
    model = _preset(name)
    attention_heads = model.layers[0].head_counts
    same = (
        dims.layers in (None, model.num_layers)
        and dims.hidden in (None, model.hidden_size)
        and (dims.heads is None or (dims.heads,) == attention_heads)
    )
    return model if same else None


def _bare(name: str) -> str:
    """Strip a model's name of its owner, signs, and words that change no size."""
    short = name.lower().rsplit("/", 1)[-1].replace("llama-3.1", "llama-3").replace("llama 3.1", "llama 3")
    return re.sub(r"[^a-z0-9]|meta|instruct|base$|-hf$|-v0\.\d$", "", short)


def _from_dims(run: Run, framework: Framework, tp: int) -> tuple[ModelSpec, list[str]]:
    dims = run.model
    notes: list[str] = []
    if dims.layers is None or dims.hidden is None:
        raise UnstatedError("the source does not print the model's dimensions")
    if dims.layers > MAX_LAYERS:
        raise UnstatedError(f"{dims.layers:,} layers are more than any model has")
    style = style_of(dims.name, dims.gated_mlp)
    heads = dims.heads or _heads(dims.hidden, tp, framework, notes)
    length = dims.seq_len or 4096
    vocab = dims.vocab or _vocab(dims.name, style, notes)
    gated = dims.gated_mlp if dims.gated_mlp is not None else style == "llama"
    attention, width = _attention(dims, heads, style), _width(dims, gated, notes)
    plain = DenseMlp(intermediate_size=width, gated=gated, bias=style in ("gpt", "bloom"))
    first = min((dims.moe.first_dense_layers or 0) if dims.moe else dims.layers, dims.layers)
    layers = []
    if first:
        layers.append(LayerRun(count=first, attention=attention, mlp=plain))
    if dims.layers > first:
        layers.append(LayerRun(count=dims.layers - first, attention=attention, mlp=_experts(dims, width, gated)))
    tied = dims.tied_embeddings
    if tied is None:
        tied = style in ("gpt", "bloom", "mpt")
        notes.append(f"embeddings {'' if tied else 'not '}tied")
    dropout = style == "gpt" and framework.gpt_dropout
    if style == "gpt":
        notes.append(f"a GPT with biases, LayerNorm, learned positions, {'with' if dropout else 'no'} dropout")
    model = ModelSpec(
        name=dims.name[:200],
        hidden_size=dims.hidden,
        vocab_size=vocab,
        max_position_embeddings=max(length, 2048),
        layers=tuple(layers),
        tie_word_embeddings=tied,
        learned_positions=style in ("gpt", "mpt"),
        norm="rmsnorm" if style == "llama" else "layernorm",
        dropout=dropout,
        default_sequence_length=length,
    )
    return model, notes


def _attention(dims: ModelDims, heads: int, style: Style) -> Attention:
    if dims.moe is not None and dims.moe.mla is not None:
        mla = dims.moe.mla
        return LatentAttention(
            num_attention_heads=heads,
            q_lora_rank=mla.q_lora_rank,
            kv_lora_rank=mla.kv_lora_rank,
            qk_nope_head_dim=mla.qk_nope_head_dim,
            qk_rope_head_dim=mla.qk_rope_head_dim,
            v_head_dim=mla.v_head_dim,
        )
    groups = dims.kv_heads or heads
    if heads % groups:
        raise UnstatedError(f"{heads} heads do not divide into {groups} groups")
    bias = style in ("gpt", "bloom")
    return GroupedQueryAttention(
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=dims.head_dim or max(1, (dims.hidden or 0) // heads),
        qkv_bias=bias,
        output_bias=bias,
    )


def _experts(dims: ModelDims, width: int, gated: bool) -> Mlp:
    moe = dims.moe
    assert moe is not None
    if moe.topk > moe.num_experts:
        raise UnstatedError(f"top-{moe.topk} of {moe.num_experts} experts")
    each = moe.moe_ffn_hidden or width
    shared = moe.shared_ffn_hidden or (moe.shared_experts or 0) * each
    return MixtureOfExperts(
        num_experts=moe.num_experts,
        num_experts_per_tok=moe.topk,
        intermediate_size=each,
        gated=gated,
        shared_intermediate_size=shared,
    )


def _heads(hidden: int, tp: int, framework: Framework, notes: list[str]) -> int:
    """Return the number of heads that the source prints for other models of this width; else the number that
    divides the hidden size and is divisible by tp, with heads nearest to 128 wide."""
    printed = dict(framework.heads).get(hidden)
    if printed is not None:
        notes.append(f"{printed} heads (as the source prints for other models of this width)")
        return printed
    legal = [n for n in range(1, min(hidden, 4096) + 1) if hidden % n == 0 and n % tp == 0]
    if not legal:
        raise UnstatedError(f"no number of heads fits a hidden size of {hidden} and tp={tp}")
    heads = min(legal, key=lambda n: abs(hidden / n - HEAD_DIM))
    notes.append(f"{heads} heads of {hidden // heads} (not printed)")
    return heads


def _vocab(name: str, style: Style, notes: list[str]) -> int:
    vocab = GROK_VOCAB if "grok" in name.lower() else LLAMA_VOCAB if style == "llama" else GPT_VOCAB
    notes.append(f"vocabulary of {vocab:,} (not printed)")
    return vocab


def _width(dims: ModelDims, gated: bool, notes: list[str]) -> int:
    if dims.ffn_hidden is not None:
        return dims.ffn_hidden
    if dims.moe is not None and dims.moe.moe_ffn_hidden is not None:
        return dims.moe.moe_ffn_hidden
    hidden = dims.hidden or 1
    width = -(-8 * hidden // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE if gated else 4 * hidden
    notes.append(f"feed-forward width of {width:,} (not printed)")
    return width
