"""Conversion of a parsed Hugging Face ``config.json`` to a ``ModelSpec``.

Only the keys are read; neither the network nor the transformers package is needed. Both spellings in use are
understood: the Hub's files (written by transformers 4 and earlier) and what transformers 5 saves. Every key is
priced, or on a list of keys known not to change the cost, or refused by name; a key that the user ignores is named
in the model.

**Builders** of a ``ModelSpec`` from a config's fields: a function for each family of Hugging Face models. The
meaning of each class's keys is from transformers 5.24.0 (``models/<family>/modeling_<family>.py`` and
``configuration_<family>.py``) and, for older spellings, 4.57.1. A key
that a builder asks ``Fields`` for is priced; ``milpplan.problem.huggingface.defaults`` has those that change
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import groupby
from typing import Any, Literal

from pydantic import ValidationError

from milpplan.errors import InvalidInputError
from milpplan.problem import (
    DenseMlp,
    GroupedQueryAttention,
    LatentAttention,
    LayerRun,
    MixtureOfExperts,
    ModelSpec,
)
from milpplan.problem.huggingface.defaults import (
    CLASS_DEFAULTS,
    CLASS_SIZES,
    FIXED,
    FUSED,
    UNPRICED,
    ZERO_IS_NONE,
    outer_without_effect,
    without_effect,
)
from milpplan.problem.huggingface.typed_keys import DO, HEADS, HIDDEN, KEY_VALUE_HEADS, LAYERS, POSITIONS, Fields
from milpplan.problem.model import Attention, Mlp
from milpplan.problem.reading import invalid_fields, shown

QkNorm = Literal["none", "per_head", "full_width"]

DEFAULT_SEQUENCE_LENGTH = 4096
"""Default number of tokens of a sequence; the model's context if that is shorter."""


def attention_of(
    fields: Fields,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: QkNorm = "none",
    sinks: bool = False,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
) -> GroupedQueryAttention:
    """Build grouped-query attention; ``num_key_value_heads`` and ``head_dim`` are given only where a family fixes
    them."""
    return GroupedQueryAttention(
        num_attention_heads=fields.integer(HEADS),
        num_key_value_heads=num_key_value_heads or fields.num_key_value_heads,
        head_dim=head_dim or fields.head_dim,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        sinks=sinks,
    )


def plain_attention(fields: Fields, qkv_bias: bool = False, output_bias: bool = False) -> GroupedQueryAttention:
    """Build multi-head attention of classes that read neither ``num_key_value_heads`` nor ``head_dim``."""
    heads, width = fields.integer(HEADS), fields.divided_head_dim
    return attention_of(fields, qkv_bias, output_bias, num_key_value_heads=heads, head_dim=width)


def dense_mlp(
    fields: Fields,
    gated: bool = True,
    bias: bool = False,
    key: str = "intermediate_size",
    default: int | None = None,
) -> DenseMlp:
    """Build a dense feed-forward block; ``default`` is its width where the class derives one."""
    return DenseMlp(intermediate_size=fields.integer(key, default=default), gated=gated, bias=bias)


def experts_of(fields: Fields, number_key: str, size_key: str, **more: Any) -> MixtureOfExperts:
    """Build routed experts of the width under ``size_key``; ``more`` are fields that the family fixes."""
    return MixtureOfExperts(
        num_experts=fields.integer(number_key),
        num_experts_per_tok=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer(size_key),
        **more,
    )


def windowed(
    fields: Fields, attention: GroupedQueryAttention, slides: list[bool] | None = None
) -> list[GroupedQueryAttention]:
    """Repeat ``attention`` for every layer, with ``sliding_window`` where it slides (by default everywhere)."""
    slides = [True] * fields.num_layers if slides is None else slides
    if not any(slides):
        fields.unused("sliding_window")
        return [attention] * len(slides)
    sliding = attention.model_copy(update={"sliding_window": fields.window()})
    return [sliding if slide else attention for slide in slides]


def runs(attentions: Iterable[Attention], mlps: Iterable[Mlp], num_norms: int = 2) -> tuple[LayerRun, ...]:
    """Collect consecutive identical layers in runs."""
    return tuple(
        LayerRun(count=len(list(same)), attention=attention, mlp=mlp, num_norms=num_norms)
        for (attention, mlp), same in groupby(zip(attentions, mlps, strict=True))
    )


def model_of(
    fields: Fields,
    name: str,
    layers: tuple[LayerRun, ...],
    max_position_embeddings: int | None = None,
    **more: Any,
) -> ModelSpec:
    """Build the parts that all families share; ``more`` are fields of ``ModelSpec`` that the family fixes."""
    positions = max_position_embeddings or fields.integer(POSITIONS)
    if "dropout" not in more and fields.drops("attention_dropout"):
        more["attention_dropout"] = True
    return ModelSpec(
        name=name,
        hidden_size=fields.integer(HIDDEN),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=positions,
        layers=layers,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        default_sequence_length=min(positions, DEFAULT_SEQUENCE_LENGTH),
        **more,
    )


def masks(fields: Fields, residual: str, embedding: str | None, attention: str) -> dict[str, bool]:
    """Return the fields of ``ModelSpec`` about dropout masks.

    The arguments are the keys of the three probabilities; without a key, the embedding has no mask.
    """
    dropped = fields.drops(residual)
    parts = {
        "embedding_dropout": embedding is not None and fields.drops(embedding),
        "attention_dropout": fields.drops(attention),
    }
    return {"dropout": dropped, **{name: value for name, value in parts.items() if value != dropped}}


def uniform(
    fields: Fields, name: str, attention: Attention, mlp: Mlp, num_norms: int = 2, **more: Any
) -> ModelSpec:
    """Build a model whose layers are all equal."""
    run = LayerRun(count=fields.num_layers, attention=attention, mlp=mlp, num_norms=num_norms)
    return model_of(fields, name, (run,), **more)


def biased_attention(fields: Fields, qk_norm: QkNorm = "none") -> GroupedQueryAttention:
    """Build attention whose four projections have a bias if ``attention_bias`` is true."""
    bias = fields.flag("attention_bias")
    return attention_of(fields, qkv_bias=bias, output_bias=bias, qk_norm=qk_norm)


def expert_mlps(fields: Fields, experts: MixtureOfExperts, is_expert: list[bool]) -> list[Mlp]:
    """Build runs of layers with ``experts`` where a flag is true, and with a dense block elsewhere."""
    if all(is_expert):
        fields.unused("intermediate_size")
        return [experts] * len(is_expert)
    dense = dense_mlp(fields)
    return [experts if flag else dense for flag in is_expert]


Builder = Callable[[Fields, str], ModelSpec]

OPT_POSITION_OFFSET = 2
"""OPT's table of positions has two more rows than positions (``OPTLearnedPositionalEmbedding.offset``)."""


def _llama(fields: Fields, name: str) -> ModelSpec:
    return uniform(fields, name, biased_attention(fields), dense_mlp(fields, bias=fields.flag("mlp_bias")))


def _mistral(fields: Fields, name: str) -> ModelSpec:
    attentions = windowed(fields, attention_of(fields))
    return model_of(fields, name, runs(attentions, [dense_mlp(fields)] * len(attentions)))


def _mixtral(fields: Fields, name: str) -> ModelSpec:
    attentions = windowed(fields, attention_of(fields))
    experts = experts_of(fields, "num_local_experts", "intermediate_size")
    return model_of(fields, name, runs(attentions, [experts] * len(attentions)))


def _qwen_attentions(
    fields: Fields, attention: GroupedQueryAttention, slides: Callable[[int], bool]
) -> list[GroupedQueryAttention]:
    """Qwen slides only when ``use_sliding_window``: in the layers that ``layer_types`` lists, else in those of
    ``slides``, to which a layer that ``max_window_layers`` names is a border."""
    if not fields.flag("use_sliding_window"):
        fields.unused("sliding_window", "max_window_layers", "layer_types")
        return [attention] * fields.num_layers
    if (listed := fields.listed_slides()) is not None:
        fields.unused("max_window_layers")
        return windowed(fields, attention, listed)
    return windowed(fields, attention, [slides(layer) for layer in range(fields.num_layers)])


def _after_border(fields: Fields) -> Callable[[int], bool]:
    return lambda layer: layer >= fields.integer("max_window_layers", minimum=0)


def _qwen2(fields: Fields, name: str) -> ModelSpec:
    attentions = _qwen_attentions(fields, attention_of(fields, qkv_bias=True), _after_border(fields))
    return model_of(fields, name, runs(attentions, [dense_mlp(fields)] * len(attentions)))


def _qwen3_attention(fields: Fields) -> GroupedQueryAttention:
    fields.must_be("use_qk_norm", True, "the class always has norms of queries and keys")
    return biased_attention(fields, qk_norm="per_head")


def _qwen3(fields: Fields, name: str) -> ModelSpec:
    attention = _qwen3_attention(fields)
    attentions = _qwen_attentions(fields, attention, _after_border(fields))
    return model_of(fields, name, runs(attentions, [dense_mlp(fields)] * len(attentions)))


def _qwen2_moe(fields: Fields, name: str) -> ModelSpec:
    def slides(layer: int) -> bool:
        return layer % 2 == 0 and layer < fields.integer("max_window_layers", minimum=0)

    attentions = _qwen_attentions(fields, attention_of(fields, qkv_bias=fields.flag("qkv_bias")), slides)
    shared = fields.integer("shared_expert_intermediate_size")
    experts = experts_of(
        fields, "num_experts", "moe_intermediate_size", shared_intermediate_size=shared, shared_gate=True
    )
    return model_of(fields, name, runs(attentions, expert_mlps(fields, experts, fields.expert_layers())))


def _qwen3_moe(fields: Fields, name: str) -> ModelSpec:
    attention = _qwen3_attention(fields)
    if fields.flag("use_sliding_window"):
        attentions = windowed(fields, attention)
    else:
        fields.unused("sliding_window")
        attentions = [attention] * fields.num_layers
    experts = experts_of(fields, "num_experts", "moe_intermediate_size")
    return model_of(fields, name, runs(attentions, expert_mlps(fields, experts, fields.expert_layers())))


def _leading_dense(fields: Fields) -> list[bool]:
    """Build experts in all but the first ``first_k_dense_replace`` layers."""
    fields.must_be("moe_layer_freq", 1, "experts sit in every layer after the dense ones")
    dense = fields.integer("first_k_dense_replace", minimum=0)
    return [layer >= dense for layer in range(fields.num_layers)]


def _shared_experts(fields: Fields) -> MixtureOfExperts:
    # A null stands for none in DeepSeek's own files.
    none = 0 if fields.there("n_shared_experts") else None
    shared = fields.integer("n_shared_experts", default=none, minimum=0)
    size = "moe_intermediate_size"
    return experts_of(fields, "n_routed_experts", size, shared_intermediate_size=shared * fields.integer(size))


def _query_rank(fields: Fields) -> int | None:
    """Read ``q_lora_rank``; null means that the query has no low rank."""
    if not fields.there("q_lora_rank"):
        raise fields.missing("q_lora_rank")
    return fields.optional("q_lora_rank")


def _deepseek(fields: Fields, name: str) -> ModelSpec:
    fields.must_be("attention_bias", False, "latent attention is described without biases")
    fields.must_be("mlp_bias", False, "DeepSeek's experts are described without biases")
    attention = LatentAttention(
        num_attention_heads=fields.integer(HEADS),
        q_lora_rank=_query_rank(fields),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
    )
    mlps = expert_mlps(fields, _shared_experts(fields), _leading_dense(fields))
    return model_of(fields, name, runs([attention] * len(mlps), mlps))


def _glm4_moe(fields: Fields, name: str) -> ModelSpec:
    attention = attention_of(
        fields,
        qkv_bias=fields.flag("attention_bias"),
        qk_norm="per_head" if fields.flag("use_qk_norm") else "none",
    )
    mlps = expert_mlps(fields, _shared_experts(fields), _leading_dense(fields))
    return model_of(fields, name, runs([attention] * len(mlps), mlps))


def _gpt_oss(fields: Fields, name: str) -> ModelSpec:
    # A second spelling in OpenAI's own files, which the class does not read.
    fields.must_be("experts_per_token", fields.value("num_experts_per_tok"), "it is num_experts_per_tok")
    bias = fields.flag("attention_bias")
    attention = attention_of(fields, qkv_bias=bias, output_bias=bias, sinks=True)
    alternating = [layer % 2 == 0 for layer in range(fields.num_layers)]
    attentions = windowed(fields, attention, fields.listed_slides() or alternating)
    experts = experts_of(fields, "num_local_experts", "intermediate_size", bias=True, router_bias=True)
    return model_of(fields, name, runs(attentions, [experts] * len(attentions)))


def _gpt2(fields: Fields, name: str) -> ModelSpec:
    attention = plain_attention(fields, qkv_bias=True, output_bias=True)
    mlp = dense_mlp(fields, gated=False, bias=True, key="n_inner", default=4 * fields.hidden_size)
    dropout = masks(fields, "resid_pdrop", "embd_pdrop", "attn_pdrop")
    return uniform(fields, name, attention, mlp, norm="layernorm", learned_positions=True, **dropout)


def _gpt_neox(fields: Fields, name: str) -> ModelSpec:
    for key in ("attention_probs_dropout_prob", "hidden_dropout_prob"):
        fields.must_be(key, 0, "the class does not read it, and takes hidden_dropout and attention_dropout")
    bias = fields.flag("attention_bias")
    attention = plain_attention(fields, qkv_bias=bias, output_bias=bias)
    mlp = dense_mlp(fields, gated=False, bias=True)
    dropout = masks(fields, "hidden_dropout", "hidden_dropout", "attention_dropout")
    return uniform(fields, name, attention, mlp, norm="layernorm", **dropout)


def _gptj(fields: Fields, name: str) -> ModelSpec:
    mlp = dense_mlp(fields, gated=False, bias=True, key="n_inner", default=4 * fields.hidden_size)
    dropout = masks(fields, "resid_pdrop", "embd_pdrop", "attn_pdrop")
    attention = plain_attention(fields)
    return uniform(fields, name, attention, mlp, num_norms=1, norm="layernorm", lm_head_bias=True, **dropout)


def _opt(fields: Fields, name: str) -> ModelSpec:
    fields.must_be("word_embed_proj_dim", fields.hidden_size, "there is no projection of the embedding")
    fields.must_be("do_layer_norm_before", True, "a model ends with a norm")
    fields.must_be("_remove_final_layer_norm", False, "a model ends with a norm")
    fields.must_be("layer_norm_elementwise_affine", True, "norms have weights")
    fields.must_be("layerdrop", 0.0, "every layer takes part in every step")
    fields.must_be("activation_dropout", 0.0, "the feed-forward block keeps no mask")
    bias = fields.flag("enable_bias")
    return uniform(
        fields,
        name,
        plain_attention(fields, qkv_bias=bias, output_bias=bias),
        dense_mlp(fields, gated=False, bias=bias, key="ffn_dim"),
        max_position_embeddings=fields.integer(POSITIONS) + OPT_POSITION_OFFSET,
        norm="layernorm",
        learned_positions=True,
        **masks(fields, "dropout", None, "attention_dropout"),
    )


def _gemma(fields: Fields, name: str) -> ModelSpec:
    return uniform(fields, name, biased_attention(fields), dense_mlp(fields))


def _gemma2(fields: Fields, name: str) -> ModelSpec:
    alternating = [layer % 2 == 0 for layer in range(fields.num_layers)]
    attentions = windowed(fields, biased_attention(fields), fields.listed_slides() or alternating)
    return model_of(fields, name, runs(attentions, [dense_mlp(fields)] * len(attentions), num_norms=4))


def _gemma3(fields: Fields, name: str) -> ModelSpec:
    # Its own files omit the pattern, which is 6 for every one of them.
    pattern = fields.integer("sliding_window_pattern", default=6)
    slides = fields.listed_slides() or [(layer + 1) % pattern != 0 for layer in range(fields.num_layers)]
    attentions = windowed(fields, biased_attention(fields, qk_norm="per_head"), slides)
    return model_of(fields, name, runs(attentions, [dense_mlp(fields)] * len(attentions), num_norms=4))


def _starcoder2(fields: Fields, name: str) -> ModelSpec:
    fields.must_be("mlp_type", "default", "the feed-forward block has two matrices")
    fields.must_be("norm_type", "layer_norm", "the norm is LayerNorm")
    bias = fields.flag("use_bias")
    attentions = windowed(fields, attention_of(fields, qkv_bias=bias, output_bias=bias))
    mlps = [dense_mlp(fields, gated=False, bias=bias)] * len(attentions)
    dropout = masks(fields, "residual_dropout", "embedding_dropout", "attention_dropout")
    return model_of(fields, name, runs(attentions, mlps), norm="layernorm", **dropout)


def _falcon(fields: Fields, name: str) -> ModelSpec:
    fields.must_be("alibi", False, "fused attention without a bias of positions is priced")
    for key in ("hidden_dropout", "attention_dropout"):
        fields.must_be(key, 0.0, "Falcon's masks are neither those of the residual stream nor of the scores")
    new = fields.flag("new_decoder_architecture")
    bias = fields.flag("bias")
    heads, norms = fields.integer(HEADS), 2
    # Only the new architecture reads num_kv_heads; the old one has one key-value head or as many as heads.
    if new:
        key_value_heads = fields.integer(KEY_VALUE_HEADS, default=heads)
        fields.unused("multi_query")
    else:
        key_value_heads = 1 if fields.flag("multi_query") else heads
        fields.unused("num_kv_heads", KEY_VALUE_HEADS)
    if fields.flag("parallel_attn"):
        norms = fields.integer("num_ln_in_parallel_attn", default=2 if new else 1)
    else:
        fields.unused("num_ln_in_parallel_attn")
    width = fields.divided_head_dim
    attention = attention_of(fields, bias, bias, num_key_value_heads=key_value_heads, head_dim=width)
    mlp = dense_mlp(fields, gated=False, bias=bias, key="ffn_hidden_size", default=4 * fields.hidden_size)
    return uniform(fields, name, attention, mlp, num_norms=2 if norms == 2 else 1, norm="layernorm")


def _cohere(fields: Fields, name: str) -> ModelSpec:
    # Cohere's LayerNorm has no bias, which is what "rmsnorm" counts; attention and MLP share one norm.
    attention = biased_attention(fields, qk_norm="full_width" if fields.flag("use_qk_norm") else "none")
    return uniform(fields, name, attention, dense_mlp(fields), num_norms=1)


def _phi3(fields: Fields, name: str) -> ModelSpec:
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        fields.must_be(key, False, "Phi-3's class has no biases")
    attentions = windowed(fields, attention_of(fields))
    dropout = masks(fields, "resid_pdrop", None, "attention_dropout")
    return model_of(fields, name, runs(attentions, [dense_mlp(fields)] * len(attentions)), **dropout)


def _olmo2(fields: Fields, name: str) -> ModelSpec:
    return uniform(fields, name, biased_attention(fields, qk_norm="full_width"), dense_mlp(fields))


BUILDERS: dict[str, Builder] = {
    "llama": _llama,
    "granite": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "gptj": _gptj,
    "opt": _opt,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "starcoder2": _starcoder2,
    "falcon": _falcon,
    "cohere": _cohere,
    "phi3": _phi3,
    "olmo2": _olmo2,
}
"""Bloom (a norm after the embedding), Llama 4, Qwen3-Next, DBRX and others have parts with no field here."""


_GPT2_NAMES: dict[str, tuple[str, ...]] = {
    HIDDEN: ("n_embd",),
    LAYERS: ("n_layer",),
    HEADS: ("n_head",),
    POSITIONS: ("n_positions",),
}
ALIASES: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt2": _GPT2_NAMES,
    "gptj": _GPT2_NAMES,
    "mixtral": {"num_local_experts": ("num_experts",)},
    "gpt_oss": {"num_local_experts": ("num_experts",)},
    "qwen3_moe": {"num_experts": ("num_local_experts",)},
    "deepseek_v2": {"n_routed_experts": ("num_experts",)},
    "deepseek_v3": {"n_routed_experts": ("num_local_experts",)},
    "glm4_moe": {"n_routed_experts": ("num_local_experts",)},
    "gemma3_text": {"sliding_window_pattern": ("_sliding_window_pattern",)},
    "falcon": {
        HIDDEN: ("n_embed",),
        LAYERS: ("n_layer",),
        HEADS: ("n_head",),
        KEY_VALUE_HEADS: ("num_kv_heads", "n_head_kv"),
    },
}
"""Other spellings of keys in a family's class (its ``attribute_map``, and keys of its older versions)."""

_GENERIC = {
    "layers": (LAYERS, "n_layer", "n_layers", "num_layers"),
    "hidden size": (HIDDEN, "n_embd", "d_model"),
    "heads": (HEADS, "n_head", "n_heads"),
    "key-value heads": (KEY_VALUE_HEADS, "num_kv_heads", "n_head_kv"),
    "feed-forward width": ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "vocabulary": ("vocab_size",),
    "context": (POSITIONS, "n_positions"),
}
_REQUIRED = ("layers", "hidden size", "heads", "feed-forward width", "vocabulary")
_CAUSAL = ("forcausallm", "lmheadmodel")
_CLASS_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "Model")
_CLASS_NAMES = {"falcon": ("rw",), "gemma3_text": ("gemma3text", "gemma3")}
"""Names of classes, without their suffix, that are not the family's name without its underscores."""
_TEXT_PART = {"gemma3": "gemma3_text"}
"""Model type of the text part of multimodal configs that do not name it."""
_TOWER = "vision_config"


def is_huggingface_config(data: Mapping[str, object]) -> bool:
    """Tell a Hugging Face config from a ``ModelSpec``, both JSON objects."""
    return "model_type" in data or "architectures" in data or isinstance(data.get("text_config"), dict)


def model_from_config(config: object, name: str, ignore: Collection[str] = ()) -> ModelSpec:
    """Build the model that a Hugging Face config describes.

    Args:
        config: The parsed file.
        name: What the model is called.
        ignore: Keys that are left out, whatever they cost; the model names those that the file has.

    Raises:
        InvalidInputError: an unknown family, a missing or impossible value, or a key that is not understood.
    """
    source = f"Hugging Face config of {name}"
    if not isinstance(config, Mapping):
        raise InvalidInputError(f"{source} is {shown(config)}.", "Expected a JSON object.", DO)
    ignored = [key for key in dict.fromkeys(ignore) if _has(config, key)]
    config = {key: value for key, value in config.items() if key not in ignored}
    text = _text_part(config, ignored)
    family = _family(text)
    if family not in BUILDERS:
        raise _unknown_family(text, family, source)
    _check_class(config, family, ignored, source)
    fields = Fields(text, source, ALIASES.get(family, {}), CLASS_DEFAULTS[family], CLASS_SIZES[family])
    try:
        model = BUILDERS[family](fields, name)
    except ValidationError as error:
        raise invalid_fields(ModelSpec, error, source) from error
    _check_keys(config, fields, family)
    return model.model_copy(update={"ignored_keys": tuple(ignored)}) if ignored else model


def _has(config: Mapping[str, object], key: str) -> bool:
    text = config.get("text_config")
    return config.get(key) is not None or (isinstance(text, Mapping) and text.get(key) is not None)


def _text_part(config: Mapping[str, object], ignored: Collection[str]) -> Mapping[str, object]:
    """Return the language model of a multimodal config, which may inherit its family and its tying."""
    text = config.get("text_config")
    outer = config.get("model_type")
    if isinstance(text, Mapping):
        inherited = {key: config[key] for key in ("model_type", "tie_word_embeddings") if key in config}
        config = {**inherited, **{key: value for key, value in text.items() if key not in ignored}}
    if config.get("model_type") == outer and isinstance(outer, str) and outer in _TEXT_PART:
        config = {**config, "model_type": _TEXT_PART[outer]}
    return config


def _class_name(config: Mapping[str, object]) -> str | None:
    """Return the first class in ``architectures``."""
    classes = config.get("architectures")
    return classes[0] if isinstance(classes, list) and classes and isinstance(classes[0], str) else None


def _family(config: Mapping[str, object]) -> str:
    """Return ``model_type``, or the family named by the class in ``architectures``."""
    family = config.get("model_type")
    if family is not None:
        return family if isinstance(family, str) else shown(family)
    name = _class_name(config) or "missing"
    stem = name.split("For", 1)[0] if "For" in name else name
    for suffix in _CLASS_SUFFIXES:
        stem = stem.removesuffix(suffix)
    return next((builder for builder in BUILDERS if stem.lower() in _class_stems(builder)), stem)


def _class_stems(family: str) -> tuple[str, ...]:
    """List the names of a family's classes without their suffix."""
    return (family.replace("_", ""), *_CLASS_NAMES.get(family, ()))


def _check_class(config: Mapping[str, object], family: str, ignored: Collection[str], source: str) -> None:
    """Refuse classes with a head or other parts that a causal language model does not have."""
    classes = config.get("architectures")
    if classes is None or classes == []:
        return
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise InvalidInputError(
            f"{source}: architectures is {shown(classes)}.", "Expected a list of names of classes.", DO
        )
    causal = {stem + suffix for stem in _class_stems(family) for suffix in _CAUSAL}
    other = [name for name in classes if name.lower() not in causal]
    if isinstance(config.get("text_config"), Mapping) and _TOWER in ignored:
        other = [name for name in other if not name.endswith("ForConditionalGeneration")]
    if other:
        raise InvalidInputError(
            f"{source}: architectures names {', '.join(map(shown, other))}.",
            f"Expected the class of {family} with a head over the vocabulary (...ForCausalLM): other heads, "
            "models without one and models of other media are not priced.",
            "Price the model as if it had such a head with --ignore architectures, or write it as TOML.",
        )


def _check_keys(config: Mapping[str, object], fields: Fields, family: str) -> None:
    """Refuse every key that is neither priced nor known to leave the cost unchanged.

    Raises:
        InvalidInputError: keys are left; all of them are named.
    """
    wrapped = isinstance(config.get("text_config"), Mapping)
    outer = Fields(config if wrapped else {}, fields.source)
    for key, (expected, reason) in FIXED.items():
        for level in (fields, outer):
            level.must_be(key, expected, reason)
    implementation = fields.value("attn_implementation") or fields.value("_attn_implementation")
    if implementation is not None and implementation not in FUSED:
        raise fields.refuse(
            f"attn_implementation is {shown(implementation)}.",
            f"Expected one of {', '.join(FUSED)}: an unfused attention is asked for with --attention unfused.",
        )
    known_keys = {"model_type", "architectures", *fields.read, *without_effect(family)}
    outer_keys = {"model_type", "architectures", "text_config", "tie_word_embeddings"}
    outer_keys |= {*outer.read, *outer_without_effect()}
    unknown = {key: value for key, value in fields.values.items() if key not in known_keys}
    unknown |= {key: value for key, value in outer.values.items() if key not in outer_keys}
    unknown = {key: value for key, value in unknown.items() if value is not None}
    unknown = {key: value for key, value in unknown.items() if not (key in ZERO_IS_NONE and value == 0)}
    if unknown:
        findings = ", ".join(f"{shown(key)[1:-1]} ({UNPRICED.get(key, 'not understood')})" for key in unknown)
        ignore = " ".join(f"--ignore {shown(key)[1:-1]}" for key in list(unknown)[:6])
        raise InvalidInputError(
            f"{fields.source}: {findings}.",
            f"Expected keys of {family} that are priced or known not to change the cost.",
            f"Correct the spelling, or price the model without: milpplan show CONFIG {ignore}.",
        )


def _unknown_family(config: Mapping[str, object], family: str, source: str) -> InvalidInputError:
    """Make the error of a family without builder; it names the dimensions in the config."""
    present, missing = [], []
    for dimension, keys in _GENERIC.items():
        key = next((key for key in keys if config.get(key) is not None), None)
        if key is not None:
            present.append(f"{key}={shown(config[key])}")
        elif dimension in _REQUIRED:
            missing.append(f"{dimension} ({' or '.join(keys)})")
    return InvalidInputError(
        f"{source} has model_type {shown(family)}, which is not supported; "
        f"found {', '.join(present) or 'no known dimension'}; missing {', '.join(missing) or 'none'}.",
        f"Supported families: {', '.join(sorted({*BUILDERS, *_TEXT_PART}))}.",
        "Write the model as TOML: `milpplan show llama3-8b` prints one to start from.",
    )
