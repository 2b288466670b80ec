"""Builders of a ``ModelSpec`` from the fields of a Hugging Face config: a function for each family of models.

The meaning of each class's keys is from transformers 5.24.0 (``models/<family>/modeling_<family>.py`` and
``configuration_<family>.py``), for older spellings 4.57.1, and 5.23.0 for the families after ``olmo2`` in
``BUILDERS``. A key that a builder asks ``Fields`` for is priced; ``milpplan.problem.huggingface.defaults`` has
those that change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from milpplan.problem import (
    GroupedQueryAttention,
    Indexer,
    LatentAttention,
    LayerRun,
    MixtureOfExperts,
    ModelSpec,
)
from milpplan.problem.huggingface import hybrids
from milpplan.problem.huggingface.parts import (
    Builder,
    QkNorm,
    attention_of,
    biased_attention,
    dense_mlp,
    expert_mlps,
    experts_of,
    latent_attention,
    leading_dense,
    listed_experts,
    masks,
    model_of,
    plain_attention,
    runs,
    shared_experts,
    uniform,
    windowed,
)
from milpplan.problem.huggingface.typed_keys import HEADS, HIDDEN, KEY_VALUE_HEADS, LAYERS, POSITIONS, Fields
from milpplan.problem.model import Mlp
from milpplan.problem.reading import shown

INDEXED = ("indexed_attention", "deepseek_sparse_attention")
"""Names of attention to keys that an indexer selects."""
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
    fields.must_be("attention_bias", True, "queries, keys and values always have biases")
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


def _deepseek(fields: Fields, name: str) -> ModelSpec:
    mlps = expert_mlps(fields, shared_experts(fields), leading_dense(fields))
    return model_of(fields, name, runs([latent_attention(fields)] * len(mlps), mlps))


def _indexed(fields: Fields, takes: list[bool]) -> list[LatentAttention]:
    """Build latent attention with indexers, but for layers that take the keys of the layer before."""
    kinds = fields.sequence("layer_types") or [INDEXED[0]] * fields.num_layers
    if len(kinds) != fields.num_layers or not {*map(str, kinds)} <= {*INDEXED}:
        raise fields.refuse(f"layer_types is {shown(kinds)}.", f"Expected {INDEXED[0]} in every layer.")
    sizes = {key: fields.integer(key) for key in ("index_n_heads", "index_head_dim", "index_topk")}
    attention = latent_attention(fields)
    return [
        attention.model_copy(update={"indexer": Indexer(**sizes, sharing=sharing)})
        for sharing in Indexer.sharings(takes)
    ]


def _deepseek_v32(fields: Fields, name: str) -> ModelSpec:
    attentions = _indexed(fields, [False] * fields.num_layers)
    mlps = expert_mlps(fields, shared_experts(fields), listed_experts(fields, leading_dense(fields)))
    return model_of(fields, name, runs(attentions, mlps))


def _takes_keys(fields: Fields) -> list[bool]:
    """Find layers that take the keys of the layer before: a list, a pattern, or every but the freq-th layer."""
    listed, pattern = fields.sequence("indexer_types"), fields.value("index_topk_pattern")
    freq = fields.integer("index_topk_freq", default=1)
    offset = fields.integer("index_skip_topk_offset", default=2, minimum=0)
    names = ["shared" if taken else "full" for taken in Indexer.taking(fields.num_layers, freq, offset)]
    if isinstance(pattern, str):
        names = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    elif pattern is not None:
        names = [str(kind) for kind in fields.sequence("index_topk_pattern") or []]
    names = names if listed is None else [str(kind) for kind in listed]
    if len(names) != fields.num_layers or not {*names} <= {"full", "shared"} or names[0] == "shared":
        raise fields.refuse(
            f"indexer_types or index_topk_pattern is {shown(pattern if listed is None else listed)}.",
            f"Expected full or shared for {fields.num_layers} layers, the first of them full.",
        )
    return [kind == "shared" for kind in names]


def _glm_moe_dsa(fields: Fields, name: str) -> ModelSpec:
    takes = _takes_keys(fields)
    attentions = _indexed(fields, takes)
    mlps = expert_mlps(fields, shared_experts(fields), listed_experts(fields, leading_dense(fields)))
    model = model_of(fields, name, runs(attentions, mlps))
    if not takes[-1]:
        return model
    # A layer of multi-token prediction has an indexer of its own.
    own = _indexed(fields, [False] * fields.num_layers)[-1]
    return model.model_copy(update={"mtp_layer": LayerRun(count=1, attention=own, mlp=mlps[-1])})


def _glm4_moe(fields: Fields, name: str) -> ModelSpec:
    attention = attention_of(
        fields,
        qkv_bias=fields.flag("attention_bias"),
        qk_norm="per_head" if fields.flag("use_qk_norm") else "none",
    )
    mlps = expert_mlps(fields, shared_experts(fields), leading_dense(fields))
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


def _gemma4(fields: Fields, name: str) -> ModelSpec:
    fields.must_be("hidden_size_per_layer_input", 0, "layers have no embeddings of their own")
    fields.must_be("num_kv_shared_layers", 0, "every layer has keys and values of its own")
    fields.must_be("use_double_wide_mlp", False, "feed-forward blocks are equally wide")
    layers = range(fields.num_layers)
    slides = fields.listed_slides() or [(layer + 1) % 6 != 0 for layer in layers]
    slides[-1] = False
    near = biased_attention(fields, qk_norm="per_head")
    shared = fields.flag("attention_k_eq_v")
    heads = fields.optional("num_global_key_value_heads") if shared else None
    fields.unused("num_global_key_value_heads")
    wide = {
        "head_dim": fields.integer("global_head_dim"),
        "num_key_value_heads": heads or near.num_key_value_heads,
        "keys_are_values": shared,
    }
    listed = zip(windowed(fields, near, slides), slides, strict=True)
    attentions = [attention if slide else attention.model_copy(update=wide) for attention, slide in listed]
    mlp: Mlp = dense_mlp(fields)
    if experts := fields.flag("enable_moe_block"):
        mlp = MixtureOfExperts(
            num_experts=fields.integer("num_experts"),
            num_experts_per_tok=fields.integer("top_k_experts"),
            intermediate_size=fields.integer("moe_intermediate_size"),
            shared_intermediate_size=fields.integer("intermediate_size"),
            router_scales=True,
        )
    fields.unused("num_experts", "top_k_experts", "moe_intermediate_size")
    return model_of(fields, name, runs(attentions, [mlp] * len(slides), num_norms=7 if experts else 4))


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


def _smollm3(fields: Fields, name: str) -> ModelSpec:
    fields.must_be("use_sliding_window", False, "attention is full in every layer")
    return _llama(fields, name)


def _seed_oss(fields: Fields, name: str) -> ModelSpec:
    attention = attention_of(fields, fields.flag("attention_bias"), fields.flag("attention_out_bias"))
    dropout = masks(fields, "residual_dropout", None, "attention_dropout")
    return uniform(fields, name, attention, dense_mlp(fields, bias=fields.flag("mlp_bias")), **dropout)


def _ernie(fields: Fields, name: str) -> ModelSpec:
    bias = fields.flag("use_bias")
    return uniform(fields, name, attention_of(fields, bias, bias), dense_mlp(fields, bias=bias))


def _ernie_moe(fields: Fields, name: str) -> ModelSpec:
    fields.must_be("use_bias", False, "ERNIE's experts are described without biases")
    width = fields.integer("moe_intermediate_size")
    experts = MixtureOfExperts(
        num_experts=fields.integer("moe_num_experts"),
        num_experts_per_tok=fields.integer("moe_k"),
        intermediate_size=width,
        router_bias=True,
        shared_intermediate_size=width * fields.integer("moe_num_shared_experts", minimum=0),
    )
    first = fields.integer("moe_layer_start_index", minimum=0)
    last, step = fields.integer("moe_layer_end_index", minimum=-1), fields.integer("moe_layer_interval")
    last = fields.num_layers - 1 if last == -1 else last
    is_expert = [(layer + 1) % step == 0 and first <= layer <= last for layer in range(fields.num_layers)]
    mlps = expert_mlps(fields, experts, is_expert)
    return model_of(fields, name, runs([attention_of(fields)] * len(mlps), mlps))


def _arcee(fields: Fields, name: str) -> ModelSpec:
    mlp = dense_mlp(fields, gated=False, bias=fields.flag("mlp_bias"))
    return uniform(fields, name, biased_attention(fields), mlp)


def _nemotron(fields: Fields, name: str) -> ModelSpec:
    mlp = dense_mlp(fields, gated=False, bias=fields.flag("mlp_bias"))
    return uniform(fields, name, biased_attention(fields), mlp, norm="layernorm")


def _plain(fields: Fields, name: str) -> ModelSpec:
    return uniform(fields, name, attention_of(fields), dense_mlp(fields))


def _ministral(fields: Fields, name: str) -> ModelSpec:
    attentions = windowed(fields, attention_of(fields), fields.listed_slides())
    return model_of(fields, name, runs(attentions, [dense_mlp(fields)] * len(attentions)))


def _hunyuan(fields: Fields, name: str) -> ModelSpec:
    return uniform(fields, name, biased_attention(fields, qk_norm="per_head"), dense_mlp(fields))


def _stablelm(fields: Fields, name: str) -> ModelSpec:
    fields.must_be("qk_layernorm", False, "a norm of each head's queries is not described")
    fields.must_be("hidden_dropout", 0.0, "StableLM's mask follows the feed-forward block alone")
    attention = attention_of(fields, qkv_bias=fields.flag("use_qkv_bias"), head_dim=fields.divided_head_dim)
    norms = 1 if fields.flag("use_parallel_residual") else 2
    return uniform(fields, name, attention, dense_mlp(fields), num_norms=norms, norm="layernorm")


def _phi(fields: Fields, name: str) -> ModelSpec:
    fields.must_be("qk_layernorm", False, "a norm of queries and keys with a bias is not described")
    width = fields.divided_head_dim
    return uniform(
        fields,
        name,
        attention_of(fields, qkv_bias=True, output_bias=True, head_dim=width),
        dense_mlp(fields, gated=False, bias=True),
        num_norms=1,
        norm="layernorm",
        lm_head_bias=True,
        **masks(fields, "resid_pdrop", "embd_pdrop", "attention_dropout"),
    )


def _glm(fields: Fields, name: str, num_norms: int = 2) -> ModelSpec:
    attention = attention_of(fields, qkv_bias=fields.flag("attention_bias"))
    return uniform(fields, name, attention, dense_mlp(fields), num_norms=num_norms)


def _glm4(fields: Fields, name: str) -> ModelSpec:
    return _glm(fields, name, num_norms=4)


def _three_of_four(fields: Fields) -> list[bool]:
    """Find sliding layers: those that ``layer_types`` lists, else all but every fourth (or ``_pattern``-th)."""
    pattern = fields.integer("sliding_window_pattern", default=4)
    return fields.listed_slides() or [(layer + 1) % pattern != 0 for layer in range(fields.num_layers)]


def _exaone4(fields: Fields, name: str) -> ModelSpec:
    attention = attention_of(fields, qk_norm="per_head")
    if fields.there("sliding_window") and fields.optional("sliding_window") is None:
        fields.unused("sliding_window_pattern", "layer_types")
        attentions = [attention] * fields.num_layers
    else:
        attentions = windowed(fields, attention, _three_of_four(fields))
    return model_of(fields, name, runs(attentions, [dense_mlp(fields)] * len(attentions)))


def _olmo3(fields: Fields, name: str) -> ModelSpec:
    attentions = windowed(fields, biased_attention(fields, qk_norm="full_width"), _three_of_four(fields))
    return model_of(fields, name, runs(attentions, [dense_mlp(fields)] * len(attentions)))


def _cohere2(fields: Fields, name: str) -> ModelSpec:
    fields.must_be("use_qk_norm", False, "the class has no norms of queries and keys")
    attentions = windowed(fields, biased_attention(fields), _three_of_four(fields))
    return model_of(fields, name, runs(attentions, [dense_mlp(fields)] * len(attentions), num_norms=1))


def _olmoe(fields: Fields, name: str) -> ModelSpec:
    fields.must_be("clip_qkv", None, "queries, keys and values are not clipped")
    experts = experts_of(fields, "num_experts", "intermediate_size")
    return uniform(fields, name, biased_attention(fields, qk_norm="full_width"), experts)


def _granite_moe(fields: Fields, name: str) -> ModelSpec:
    experts = experts_of(fields, "num_local_experts", "intermediate_size")
    return uniform(fields, name, biased_attention(fields), experts)


def _phimoe(fields: Fields, name: str) -> ModelSpec:
    experts = experts_of(fields, "num_local_experts", "intermediate_size")
    attentions = windowed(fields, biased_attention(fields))
    head_bias = fields.flag("lm_head_bias")
    layers = runs(attentions, [experts] * len(attentions))
    return model_of(fields, name, layers, norm="layernorm", lm_head_bias=head_bias)


def _dots1(fields: Fields, name: str) -> ModelSpec:
    attention = biased_attention(fields, qk_norm="per_head")
    if fields.there("sliding_window") and fields.optional("sliding_window") is None:
        fields.unused("max_window_layers", "layer_types")
        attentions = [attention] * fields.num_layers
    else:
        border = _after_border(fields)
        slides = fields.listed_slides() or [border(layer) for layer in range(fields.num_layers)]
        attentions = windowed(fields, attention, slides)
    return model_of(
        fields, name, runs(attentions, expert_mlps(fields, shared_experts(fields), leading_dense(fields)))
    )


def _mimo_v2(fields: Fields, name: str) -> ModelSpec:
    """Windows with sinks and twice the key-value heads, six layers in a row but for the first and each sixth."""
    heads, shared = fields.integer(HEADS), fields.num_key_value_heads
    full = attention_of(fields, qkv_bias=fields.flag("attention_bias")).model_copy(
        update={"v_head_dim": fields.integer("v_head_dim")}
    )
    as_class = "it is what the class builds"
    fields.must_be("swa_num_attention_heads", heads, as_class)
    fields.must_be("swa_num_key_value_heads", 2 * shared, as_class)
    fields.must_be("swa_head_dim", full.head_dim, as_class)
    fields.must_be("swa_v_head_dim", full.value_dim, as_class)
    fields.must_be("add_swa_attention_sink_bias", True, as_class)
    fields.must_be("add_full_attention_sink_bias", False, as_class)
    layers = range(fields.num_layers)
    slides = fields.listed_slides() or [layer > 0 and (layer + 1) % 6 != 0 for layer in layers]
    fields.must_be("hybrid_layer_pattern", [int(slide) for slide in slides], as_class)
    is_expert = listed_experts(fields, [layer > 0 for layer in layers])
    fields.must_be("moe_layer_freq", [int(flag) for flag in is_expert], as_class)
    fields.must_be("n_shared_experts", 0, as_class)
    # The class counts the query's own position beside sliding_window_size others.
    window = fields.window()
    others = fields.optional("sliding_window_size")
    window = window if others is None else others + 1
    near = {"sliding_window": window, "sinks": True, "num_key_value_heads": 2 * shared}
    sliding = full.model_copy(update=near)
    experts = experts_of(fields, "n_routed_experts", "moe_intermediate_size")
    mlps = expert_mlps(fields, experts, is_expert)
    return model_of(fields, name, runs([sliding if slide else full for slide in slides], mlps))


def _minimax_m2(fields: Fields, name: str) -> ModelSpec:
    fields.must_be("use_qk_norm", True, "the class always has norms of queries and keys")
    fields.must_be("qk_norm_type", "per_layer", "norms span all heads")
    fields.must_be("shared_intermediate_size", 0, "there are no shared experts")
    fields.must_be("attn_type_list", [1] * fields.num_layers, "attention is full in every layer")
    experts = experts_of(fields, "num_local_experts", "intermediate_size")
    return uniform(fields, name, attention_of(fields, qk_norm="full_width"), experts)


def _llama4(fields: Fields, name: str) -> ModelSpec:
    layers = range(fields.num_layers)
    interval = fields.integer("no_rope_layer_interval")
    listed = fields.sequence("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in layers]
    if len(listed) != len(layers) or any(flag not in (0, 1) for flag in listed):
        raise fields.refuse(f"no_rope_layers is {shown(listed)}.", "Expected 0 or 1 for every layer.")
    kinds = ["chunked_attention" if has_rope else "full_attention" for has_rope in listed]
    fields.must_be("layer_types", kinds, "layers with rotary positions attend in chunks")
    chunk = fields.window("attention_chunk_size")
    full = biased_attention(fields)
    norm: QkNorm = "unweighted" if fields.flag("use_qk_norm") else "none"
    update = {"qk_norm": norm, "sliding_window": chunk, "chunked": chunk is not None}
    attentions = [full.model_copy(update=update) if has_rope else full for has_rope in listed]
    width = fields.integer("intermediate_size")
    experts = experts_of(fields, "num_local_experts", "intermediate_size", shared_intermediate_size=width)
    step = fields.integer("interleave_moe_layer_step")
    sparse = fields.sequence("moe_layers")
    is_expert = [(layer + 1) % step == 0 if sparse is None else layer in sparse for layer in layers]
    dense = dense_mlp(fields, key="intermediate_size_mlp")
    mlps: list[Mlp] = [experts if flag else dense for flag in is_expert]
    return model_of(fields, name, runs(attentions, mlps))


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
    "deepseek_v32": _deepseek_v32,
    "glm_moe_dsa": _glm_moe_dsa,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "gptj": _gptj,
    "opt": _opt,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gemma4_text": _gemma4,
    "starcoder2": _starcoder2,
    "falcon": _falcon,
    "cohere": _cohere,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "olmoe": _olmoe,
    "smollm3": _smollm3,
    "seed_oss": _seed_oss,
    "ernie4_5": _ernie,
    "ernie4_5_moe": _ernie_moe,
    "arcee": _arcee,
    "nemotron": _nemotron,
    "ministral": _ministral,
    "ministral3": _plain,
    "hunyuan_v1_dense": _hunyuan,
    "stablelm": _stablelm,
    "phi": _phi,
    "phimoe": _phimoe,
    "glm": _glm,
    "glm4": _glm4,
    "exaone4": _exaone4,
    "cohere2": _cohere2,
    "granitemoe": _granite_moe,
    "dots1": _dots1,
    "minimax_m2": _minimax_m2,
    "mimo_v2_flash": _mimo_v2,
    "llama4_text": _llama4,
    **hybrids.BUILDERS,
}
"""Families by ``model_type``."""

RENAMED: Final = {
    "deepseek_ref": "deepseek_v4",
    "kimi_k2": "deepseek_v3",
    "mimo": "qwen2",
    "minimax_m1": "minimax",
    "minimax_text_01": "minimax",
    "minimax_m3": "minimax_m3_vl_text",
    "step3p5": "step3p7",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Families whose language model is that of another family, under a name of their own. Source: transformers 5.23.0
(the classes of the text parts); the code beside Kimi-K2's, MiMo-7B's and MiniMax's weights, whose layers are those
of the other family's classes."""

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
    "deepseek_v32": {"n_routed_experts": ("num_local_experts", "num_experts")},
    "deepseek_v4": {"n_routed_experts": ("num_local_experts",), "moe_intermediate_size": ("intermediate_size",)},
    "glm_moe_dsa": {"n_routed_experts": ("num_local_experts", "num_experts")},
    "glm4_moe": {"n_routed_experts": ("num_local_experts",)},
    "gemma3_text": {"sliding_window_pattern": ("_sliding_window_pattern",)},
    "dots1": {"n_routed_experts": ("num_local_experts",)},
    "nemotron_h": {
        "layers_block_type": ("layer_types",),
        "n_routed_experts": ("num_local_experts",),
        "head_dim": ("attention_head_dim",),
    },
    "kimi_linear": {
        "n_routed_experts": ("num_experts", "num_local_experts"),
        "num_experts_per_tok": ("num_experts_per_token",),
        "n_shared_experts": ("num_shared_experts",),
        POSITIONS: ("model_max_length",),
    },
    "minimax": {"num_local_experts": ("num_experts",)},
    "minimax_m2": {"num_local_experts": ("num_experts",)},
    "granitemoehybrid": {"layer_types": ("layers_block_type",)},
    "minimax_m3_vl_text": {"num_local_experts": ("num_experts",)},
    "mimo_v2_flash": {"n_routed_experts": ("num_local_experts",)},
    "step3p7": {
        KEY_VALUE_HEADS: ("num_attention_groups",),
        "n_routed_experts": ("num_local_experts", "moe_num_experts", "num_experts"),
        "num_experts_per_tok": ("moe_top_k",),
        "share_expert_dim": ("share_expert_dims",),
    },
    "granitemoe": {"num_local_experts": ("num_experts",)},
    "phimoe": {"num_local_experts": ("num_experts",)},
    "olmoe": {"num_experts": ("num_local_experts",)},
    "cohere2": {"sliding_window_pattern": ("_sliding_window_pattern",)},
    "falcon": {
        HIDDEN: ("n_embed",),
        LAYERS: ("n_layer",),
        HEADS: ("n_head",),
        KEY_VALUE_HEADS: ("num_kv_heads", "n_head_kv"),
    },
}
"""Other spellings of keys in a family's class (its ``attribute_map``, and keys of its older versions)."""
