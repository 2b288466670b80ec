"""One builder for each family of Hugging Face models: from a config's fields to a ``ModelSpec``.

What each class does with its keys is from transformers 5.23.0 (``models/<family>/modeling_<family>.py`` and
``configuration_<family>.py``) and, for older spellings, 4.57.1.
"""

from __future__ import annotations

from collections.abc import Callable

from milpplan.specs.hf_fields import HEADS, POSITIONS, Fields
from milpplan.specs.hf_parts import (
    attention_of,
    biased_attention,
    dense_mlp,
    expert_mlps,
    experts_of,
    model_of,
    runs,
    uniform,
    windowed,
)
from milpplan.specs.model import GroupedQueryAttention, LatentAttention, MixtureOfExperts, ModelSpec

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
    experts = experts_of(fields, "intermediate_size")
    return model_of(fields, name, runs(attentions, [experts] * len(attentions)))


def _qwen_attentions(
    fields: Fields, attention: GroupedQueryAttention, all_slide: bool = False
) -> list[GroupedQueryAttention]:
    """Qwen slides only when ``use_sliding_window``, and then from layer ``max_window_layers`` on."""
    if not fields.flag("use_sliding_window"):
        return [attention] * fields.num_layers
    first = 0 if all_slide else fields.integer("max_window_layers", default=28, minimum=0)
    return windowed(fields, attention, [layer >= first for layer in range(fields.num_layers)])


def _qwen2(fields: Fields, name: str) -> ModelSpec:
    attentions = _qwen_attentions(fields, attention_of(fields, qkv_bias=True))
    return model_of(fields, name, runs(attentions, [dense_mlp(fields)] * len(attentions)))


def _qwen3(fields: Fields, name: str) -> ModelSpec:
    attentions = _qwen_attentions(fields, biased_attention(fields, qk_norm="per_head"))
    return model_of(fields, name, runs(attentions, [dense_mlp(fields)] * len(attentions)))


def _qwen2_moe(fields: Fields, name: str) -> ModelSpec:
    attentions = _qwen_attentions(fields, attention_of(fields, qkv_bias=fields.flag("qkv_bias", True)))
    shared = fields.integer("shared_expert_intermediate_size")
    experts = experts_of(fields, "moe_intermediate_size", shared_intermediate_size=shared, shared_gate=True)
    return model_of(fields, name, runs(attentions, expert_mlps(fields, experts, fields.expert_layers())))


def _qwen3_moe(fields: Fields, name: str) -> ModelSpec:
    attentions = _qwen_attentions(fields, biased_attention(fields, qk_norm="per_head"), all_slide=True)
    experts = experts_of(fields, "moe_intermediate_size")
    return model_of(fields, name, runs(attentions, expert_mlps(fields, experts, fields.expert_layers())))


def _leading_dense(fields: Fields) -> list[bool]:
    """Experts in all but the first ``first_k_dense_replace`` layers."""
    fields.must_be("moe_layer_freq", 1, "experts sit in every layer after the dense ones")
    dense = fields.integer("first_k_dense_replace", default=0, minimum=0)
    return [layer >= dense for layer in range(fields.num_layers)]


def _shared_experts(fields: Fields) -> MixtureOfExperts:
    shared = fields.integer("n_shared_experts", default=0, minimum=0)
    size = "moe_intermediate_size"
    return experts_of(fields, size, shared_intermediate_size=shared * fields.integer(size))


def _deepseek(fields: Fields, name: str) -> ModelSpec:
    fields.must_be("attention_bias", False, "latent attention is described without biases")
    fields.must_be("mlp_bias", False, "DeepSeek's experts are described without biases")
    attention = LatentAttention(
        num_attention_heads=fields.integer(*HEADS),
        q_lora_rank=fields.optional("q_lora_rank"),
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
    bias = fields.flag("attention_bias", True)
    attention = attention_of(fields, qkv_bias=bias, output_bias=bias, sinks=True)
    attentions = windowed(fields, attention, [layer % 2 == 0 for layer in range(fields.num_layers)])
    experts = experts_of(fields, "intermediate_size", bias=True, router_bias=True)
    return model_of(fields, name, runs(attentions, [experts] * len(attentions)))


def _gpt2(fields: Fields, name: str) -> ModelSpec:
    attention = attention_of(fields, qkv_bias=True, output_bias=True)
    mlp = dense_mlp(fields, gated=False, bias=True, default=4 * fields.hidden_size)
    return uniform(fields, name, attention, mlp, norm="layernorm", learned_positions=True, dropout=True)


def _gpt_neox(fields: Fields, name: str) -> ModelSpec:
    bias = fields.flag("attention_bias", True)
    attention = attention_of(fields, qkv_bias=bias, output_bias=bias)
    return uniform(fields, name, attention, dense_mlp(fields, gated=False, bias=True), norm="layernorm")


def _gptj(fields: Fields, name: str) -> ModelSpec:
    mlp = dense_mlp(fields, gated=False, bias=True, default=4 * fields.hidden_size)
    return uniform(fields, name, attention_of(fields), mlp, num_norms=1, norm="layernorm", lm_head_bias=True)


def _opt(fields: Fields, name: str) -> ModelSpec:
    fields.must_be("word_embed_proj_dim", fields.hidden_size, "there is no projection of the embedding")
    fields.must_be("do_layer_norm_before", True, "a model ends with a norm")
    fields.must_be("_remove_final_layer_norm", False, "a model ends with a norm")
    fields.must_be("layer_norm_elementwise_affine", True, "norms have weights")
    bias = fields.flag("enable_bias", True)
    attention = attention_of(fields, qkv_bias=bias, output_bias=bias)
    return uniform(
        fields,
        name,
        attention,
        dense_mlp(fields, gated=False, bias=bias),
        max_position_embeddings=fields.integer(*POSITIONS) + OPT_POSITION_OFFSET,
        norm="layernorm",
        learned_positions=True,
        dropout=True,
    )


def _gemma(fields: Fields, name: str) -> ModelSpec:
    return uniform(fields, name, biased_attention(fields), dense_mlp(fields))


def _gemma2(fields: Fields, name: str) -> ModelSpec:
    slides = [layer % 2 == 0 for layer in range(fields.num_layers)]
    attentions = windowed(fields, biased_attention(fields), slides)
    return model_of(fields, name, runs(attentions, [dense_mlp(fields)] * len(attentions), num_norms=4))


def _gemma3(fields: Fields, name: str) -> ModelSpec:
    pattern = fields.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
    slides = [(layer + 1) % pattern != 0 for layer in range(fields.num_layers)]
    attentions = windowed(fields, biased_attention(fields, qk_norm="per_head"), slides)
    return model_of(fields, name, runs(attentions, [dense_mlp(fields)] * len(attentions), num_norms=4))


def _starcoder2(fields: Fields, name: str) -> ModelSpec:
    bias = fields.flag("use_bias", True)
    attentions = windowed(fields, attention_of(fields, qkv_bias=bias, output_bias=bias))
    mlps = [dense_mlp(fields, gated=False, bias=bias)] * len(attentions)
    return model_of(fields, name, runs(attentions, mlps), norm="layernorm")


def _falcon(fields: Fields, name: str) -> ModelSpec:
    new = fields.flag("new_decoder_architecture")
    bias = fields.flag("bias")
    heads = fields.integer(*HEADS)
    # Only the new architecture reads num_kv_heads; the old one has one key-value head or as many as heads.
    key_value_heads = None if new else 1 if fields.flag("multi_query", True) else heads
    attention = attention_of(fields, qkv_bias=bias, output_bias=bias, num_key_value_heads=key_value_heads)
    norms = 2
    if fields.flag("parallel_attn", True):
        norms = fields.integer("num_ln_in_parallel_attn", default=2 if new else 1)
    mlp = dense_mlp(fields, gated=False, bias=bias, default=4 * fields.hidden_size)
    return uniform(fields, name, attention, mlp, num_norms=2 if norms == 2 else 1, norm="layernorm")


def _cohere(fields: Fields, name: str) -> ModelSpec:
    # Cohere's LayerNorm has no bias, which is what "rmsnorm" counts; attention and MLP share one norm.
    attention = biased_attention(fields, qk_norm="full_width" if fields.flag("use_qk_norm") else "none")
    return uniform(fields, name, attention, dense_mlp(fields), num_norms=1)


def _phi3(fields: Fields, name: str) -> ModelSpec:
    attentions = windowed(fields, attention_of(fields))
    return model_of(fields, name, runs(attentions, [dense_mlp(fields)] * len(attentions)))


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
