"""Defaults of Hugging Face classes for keys that a ``config.json`` lacks.

milpplan shares ``CLASS_DEFAULTS``: settings that the Hub's files often omit because they equal the class default,
above all ``tie_word_embeddings``. It does not share ``CLASS_SIZES``: a file without a size is refused, because it
would become another model, and the message names the default of the class. Sizes that a class derives from other
sizes in the file (as many key-value heads as heads, a feed-forward width of four times the hidden size) are not
listed.

Source: transformers 5.24.0, ``models/<family>/configuration_<family>.py``.

**Keys that are not sizes.** The lists hold keys that do not change the cost, each with its reason, and keys that
must have a certain value because descriptions have no field for another value.

A key that is neither read by a family's builder (``milpplan.problem.huggingface.config``) nor listed here is
refused by name. Source: transformers 5.24.0, ``configuration_utils.py``,
``models/<family>/configuration_<family>.py`` and ``modeling_<family>.py``; 4.57.1 for the keys that older files
carry.
"""

from __future__ import annotations

from collections.abc import Mapping

CLASS_DEFAULTS: dict[str, dict[str, object]] = {
    "llama": {"max_position_embeddings": 2048},
    "granite": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072},
    "mixtral": {"max_position_embeddings": 131072},
    "qwen2": {"max_position_embeddings": 32768},
    "qwen3": {"max_position_embeddings": 32768},
    "qwen2_moe": {"max_position_embeddings": 32768, "qkv_bias": True},
    "qwen3_moe": {"max_position_embeddings": 32768},
    "deepseek_v2": {"max_position_embeddings": 2048},
    "deepseek_v3": {"max_position_embeddings": 4096},
    "glm4_moe": {"max_position_embeddings": 131072},
    "gpt_oss": {"max_position_embeddings": 131072, "attention_bias": True},
    "gpt2": {"tie_word_embeddings": True, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "gpt_neox": {"max_position_embeddings": 2048, "attention_bias": True},
    "gptj": {"max_position_embeddings": 2048},
    "opt": {"tie_word_embeddings": True, "dropout": 0.1, "enable_bias": True},
    "gemma": {"max_position_embeddings": 8192, "tie_word_embeddings": True},
    "gemma2": {"max_position_embeddings": 8192, "tie_word_embeddings": True},
    "gemma3_text": {"max_position_embeddings": 131072, "tie_word_embeddings": True},
    "starcoder2": {"max_position_embeddings": 4096, "tie_word_embeddings": True, "use_bias": True},
    "falcon": {
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "multi_query": True,
        "parallel_attn": True,
    },
    "cohere": {"max_position_embeddings": 8192, "tie_word_embeddings": True},
    "phi3": {"max_position_embeddings": 4096},
    "olmo2": {"max_position_embeddings": 2048},
}

_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_MISTRAL = {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8}
_QWEN = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_LATENT = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

CLASS_SIZES: dict[str, dict[str, int]] = {
    "llama": _LLAMA,
    "granite": _LLAMA,
    "mistral": {**_MISTRAL, "sliding_window": 4096},
    "mixtral": {**_MISTRAL, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "qwen2_moe": {
        **_QWEN,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
    },
    "qwen3_moe": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "deepseek_v2": {
        **_LLAMA,
        **_LATENT,
        "vocab_size": 102400,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "first_k_dense_replace": 0,
    },
    "deepseek_v3": {
        **_LATENT,
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
    },
    "glm4_moe": {
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
    },
    "gpt2": {
        "vocab_size": 50257,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 1024,
    },
    "gpt_neox": {
        "vocab_size": 50432,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
    },
    "gptj": {"vocab_size": 50400, "hidden_size": 4096, "num_hidden_layers": 28, "num_attention_heads": 16},
    "opt": {
        "vocab_size": 50272,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "ffn_dim": 3072,
        "max_position_embeddings": 2048,
    },
    "gemma": {
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
    },
    "gemma2": {
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
    },
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
    },
    "starcoder2": {
        "vocab_size": 49152,
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
    },
    "falcon": {"vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71},
    "cohere": {
        "vocab_size": 256000,
        "hidden_size": 8192,
        "intermediate_size": 22528,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
    },
    "phi3": {
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "olmo2": {
        "vocab_size": 50304,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
}


_REASONS: dict[str, str] = {
    "how the file came about, and how its code and weights are found": (
        "transformers_version _name_or_path name_or_path _commit_hash auto_map tokenizer_class prefix "
        "task_specific_params finetuning_task custom_pipelines unsloth_version unsloth_fixed use_auth_token"
    ),
    "the format of the stored weights; the job's precision is what is trained": "torch_dtype dtype use_bfloat16",
    "generation of text, not training": (
        "use_cache cache_implementation bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id "
        "decoder_start_token_id bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping "
        "encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id "
        "length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams "
        "num_return_sequences output_scores remove_invalid_values repetition_penalty return_dict_in_generate "
        "suppress_tokens temperature top_k top_p typical_p num_logits_to_keep"
    ),
    "a head of classes, which no accepted class has": (
        "id2label label2id num_labels problem_type classifier_dropout summary_activation summary_first_dropout "
        "summary_proj_to_labels summary_type summary_use_proj"
    ),
    "values of the weights at the start": "initializer_range init_std initializer_factor",
    "a small term inside a norm": "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_epsilon norm_eps",
    "which function of one number the feed-forward block applies, within one kernel": (
        "hidden_act hidden_activation activation_function activation"
    ),
    "angles of rotary positions, within the same kernel": (
        "rope_theta rope_scaling rope_parameters rope_interleave rope_local_base_freq partial_rotary_factor "
        "rotary rotary_dim rotary_pct rotary_emb_base original_max_position_embeddings"
    ),
    "the shape of what a function returns, and old switches of conversion": (
        "return_dict use_return_dict tf_legacy_loss tie_encoder_decoder cross_attention_hidden_size is_decoder"
    ),
    "numerics of tensor-parallel training elsewhere; the plan decides degrees": "pretraining_tp ep_size",
}

_FAMILY_REASONS: dict[str, dict[str, str]] = {
    "granite": {
        "a factor within a kernel": (
            "embedding_multiplier logits_scaling residual_multiplier attention_multiplier"
        )
    },
    "mixtral": {
        "the router's arithmetic, experts are drawn evenly": (
            "output_router_logits router_aux_loss_coef router_jitter_noise"
        )
    },
    "qwen2_moe": {
        "the router's arithmetic, experts are drawn evenly": (
            "norm_topk_prob output_router_logits router_aux_loss_coef"
        )
    },
    "qwen3_moe": {
        "the router's arithmetic, experts are drawn evenly": (
            "norm_topk_prob output_router_logits router_aux_loss_coef"
        ),
        "a border that only Qwen2's classes read": "max_window_layers",
        "shared experts, which the class does not have": "shared_expert_intermediate_size qkv_bias",
    },
    "deepseek_v2": {
        "the router's arithmetic, experts are drawn evenly": (
            "n_group topk_group topk_method scoring_func norm_topk_prob routed_scaling_factor aux_loss_alpha "
            "seq_aux output_router_logits router_aux_loss_coef"
        ),
        "sizes that latent attention derives from others": "num_key_value_heads head_dim qk_head_dim",
    },
    "glm4_moe": {
        "the router's arithmetic, experts are drawn evenly": (
            "n_group topk_group topk_method scoring_func norm_topk_prob routed_scaling_factor "
            "output_router_logits router_aux_loss_coef"
        )
    },
    "gpt_oss": {
        "the router's arithmetic, experts are drawn evenly": "output_router_logits router_aux_loss_coef",
        "limits of the activation, within one kernel": "swiglu_alpha swiglu_limit",
        "angles of rotary positions, within the same kernel": (
            "initial_context_length rope_ntk_alpha rope_ntk_beta rope_scaling_factor"
        ),
    },
    "gpt2": {
        "a factor of the scores, within one kernel": "scale_attn_weights scale_attn_by_inverse_layer_idx",
        "the context, which n_positions says": "n_ctx",
    },
    "gpt_neox": {"the order of the same products and norms": "use_parallel_residual"},
    "gptj": {
        "a factor of the scores, within one kernel": "scale_attn_weights",
        "the context, which n_positions says": "n_ctx",
    },
    "gemma2": {
        "limits of scores and logits, within the kernels of attention and loss": (
            "query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping"
        )
    },
    "falcon": {"which tensor the residual branch takes": "apply_residual_connection_post_layernorm"},
    "cohere": {"a factor of the logits, within one kernel": "logit_scale model_max_length"},
    "phi3": {"dropout of the embedding, which the class never applies": "embd_pdrop"},
}
_FAMILY_REASONS["deepseek_v3"] = _FAMILY_REASONS["deepseek_v2"]
_FAMILY_REASONS["gemma3_text"] = _FAMILY_REASONS["gemma2"]

_MULTIMODAL = (
    "image_token_id video_token_id audio_token_id vision_start_token_id vision_end_token_id image_token_index "
    "video_token_index audio_token_index boi_token_id boi_token_index eoi_token_id eoi_token_index boa_token_id "
    "eoa_token_id boa_token_index eoa_token_index mm_tokens_per_image"
)

FIXED: dict[str, tuple[object, str]] = {
    "is_encoder_decoder": (False, "a decoder alone is described"),
    "add_cross_attention": (False, "a decoder alone is described"),
    "chunk_size_feed_forward": (0, "the feed-forward block takes all tokens at once"),
    "pruned_heads": ({}, "all heads are there"),
    "output_attentions": (False, "scores that are returned need an unfused attention and its memory"),
    "output_hidden_states": (False, "hidden states that are returned stay in memory"),
    "gradient_checkpointing": (False, "the plan decides what is recomputed"),
    "torchscript": (False, "weights that are tied are one tensor"),
    "reorder_and_upcast_attn": (False, "attention works in bf16"),
    "use_bidirectional_attention": (False, "attention is causal"),
    "use_mrope": (False, "positions are one number a token"),
    "full_attn_mod": (1, "attention is full in every layer"),
    "interpolate_factor": (1, "positions are not interpolated"),
}
"""Settings of all families that must have a certain value, with its meaning."""

FUSED = ("flash_attention_2", "flash_attention_3", "flash_attention_4", "sdpa", "flex_attention")
"""Values of ``attn_implementation`` that are priced as fused attention."""

UNPRICED: dict[str, str] = {
    "quantization_config": "weights in another format have other bytes, products and states",
    "compression_config": "weights in another format have other bytes, products and states",
    "vision_config": "the image tower is not priced",
    "audio_config": "the audio tower is not priced",
    "num_nextn_predict_layers": "layers that predict further tokens are not priced",
    "num_mtp_layers": "layers that predict further tokens are not priced",
    "per_layer_config": "layers that differ in other ways than listed are not priced",
}
"""Keys of known parts that no description has a field for."""

ZERO_IS_NONE = ("num_nextn_predict_layers", "num_mtp_layers")
"""Unpriced parts whose number may be 0."""


def without_effect(family: str) -> Mapping[str, str]:
    """List the keys that do not change the cost of a family's models, each with its reason."""
    listed = [*_REASONS.items(), *_FAMILY_REASONS.get(family, {}).items()]
    return {key: reason for reason, keys in listed for key in keys.split()}


def outer_without_effect() -> Mapping[str, str]:
    """Return the same of the keys around a ``text_config``: what numbers tokens of images and sounds have."""
    return {**without_effect(""), **dict.fromkeys(_MULTIMODAL.split(), "numbers of tokens of other media")}
