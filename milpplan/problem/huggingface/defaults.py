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

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

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
    "deepseek_v32": {"max_position_embeddings": 163840},
    "glm_moe_dsa": {"max_position_embeddings": 202752},
    "glm4_moe": {"max_position_embeddings": 131072},
    "gpt_oss": {"max_position_embeddings": 131072, "attention_bias": True},
    "gpt2": {"tie_word_embeddings": True, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "gpt_neox": {"max_position_embeddings": 2048, "attention_bias": True},
    "gptj": {"max_position_embeddings": 2048},
    "opt": {"tie_word_embeddings": True, "dropout": 0.1, "enable_bias": True},
    "gemma": {"max_position_embeddings": 8192, "tie_word_embeddings": True},
    "gemma2": {"max_position_embeddings": 8192, "tie_word_embeddings": True},
    "gemma3_text": {"max_position_embeddings": 131072, "tie_word_embeddings": True},
    "gemma4_text": {
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "hidden_size_per_layer_input": 256,
    },
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
    "olmo3": {"max_position_embeddings": 2048},
    "olmoe": {"max_position_embeddings": 4096},
    "smollm3": {"max_position_embeddings": 32768, "tie_word_embeddings": True},
    "seed_oss": {
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
    },
    "ernie4_5": {"max_position_embeddings": 131072, "tie_word_embeddings": True},
    "ernie4_5_moe": {"max_position_embeddings": 131072, "tie_word_embeddings": True},
    "arcee": {"max_position_embeddings": 4096},
    "nemotron": {"max_position_embeddings": 4096},
    "ministral": {"max_position_embeddings": 131072},
    "ministral3": {"max_position_embeddings": 262144},
    "hunyuan_v1_dense": {"max_position_embeddings": 2048},
    "stablelm": {"max_position_embeddings": 4096},
    "phi": {"max_position_embeddings": 2048},
    "phimoe": {"max_position_embeddings": 131072},
    "glm": {"max_position_embeddings": 131072, "attention_bias": True},
    "glm4": {"max_position_embeddings": 131072, "attention_bias": True},
    "exaone4": {"max_position_embeddings": 2048},
    "cohere2": {"max_position_embeddings": 8192, "tie_word_embeddings": True},
    "granitemoe": {"max_position_embeddings": 2048},
    "dots1": {"max_position_embeddings": 2048},
    "kimi_linear": {"max_position_embeddings": 1048576},
    "minimax": {"max_position_embeddings": 131072},
    "nemotron-nas": {"max_position_embeddings": 2048},
    "minimax_m2": {"max_position_embeddings": 196608},
    "mimo_v2_flash": {"max_position_embeddings": 131072},
    "step3p7": {"max_position_embeddings": 128000},
    "granitemoehybrid": {"max_position_embeddings": 2048, "mamba_conv_bias": True},
    "bamba": {"max_position_embeddings": 262144, "mamba_conv_bias": True},
    "minimax_m3_vl_text": {"max_position_embeddings": 524288},
    "deepseek_v4": {"max_position_embeddings": 1048576},
    "llama4_text": {"max_position_embeddings": 131072, "use_qk_norm": True, "no_rope_layer_interval": 4},
    "qwen3_next": {"max_position_embeddings": 32768},
    "qwen3_5_text": {"max_position_embeddings": 32768},
    "qwen3_5_moe_text": {"max_position_embeddings": 32768},
    "nemotron_h": {"max_position_embeddings": 4096, "use_conv_bias": True},
}

CLASS_SIZES: dict[str, dict[str, int]] = json.loads(
    Path(__file__).with_name("class_sizes.json").read_text(encoding="utf-8")
)
"""Sizes that the classes assume, by family."""

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
    "a head of classes, which decides by the name of the class": (
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
    "numbers of tokens of other media": (
        "image_token_id video_token_id audio_token_id vision_start_token_id vision_end_token_id image_token_index "
        "video_token_index audio_token_index boi_token_id boi_token_index eoi_token_id eoi_token_index "
        "boa_token_id eoa_token_id boa_token_index eoa_token_index mm_tokens_per_image ignore_index "
        "media_placeholder_token_id video_placeholder use_unified_vision_chunk vision_soft_tokens_per_image"
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
_ROUTER = "the router's arithmetic, experts are drawn evenly"
_FAMILY_REASONS |= {
    family: {_ROUTER: "output_router_logits router_aux_loss_coef router_jitter_noise " + keys}
    for family, keys in {
        "olmoe": "norm_topk_prob",
        "phimoe": "input_jitter_noise",
        "dots1": "n_group topk_group norm_topk_prob routed_scaling_factor scoring_func topk_method",
        "minimax": "",
        "minimax_m2": "use_routing_bias scoring_func",
        "mimo_v2_flash": "n_group topk_group norm_topk_prob routed_scaling_factor scoring_func topk_method",
        "step3p7": "scoring_func moe_router_scaling_factor use_moe_router_bias norm_expert_weight",
        "minimax_m3_vl_text": "use_routing_bias scoring_func routed_scaling_factor",
        "ernie4_5_moe": "moe_norm_min",
        "llama4_text": "",
        "qwen3_next": "norm_topk_prob",
        "qwen3_5_moe_text": "norm_topk_prob",
        "nemotron_h": "n_group topk_group norm_topk_prob routed_scaling_factor",
    }.items()
}
_FAMILY_REASONS["mimo_v2_flash"] |= {
    "numbers within kernels": "attention_value_scale layernorm_epsilon swa_rope_theta",
    "the window, which sliding_window says": "attention_chunk_size",
}
_FAMILY_REASONS["minimax_m3_vl_text"] |= {
    "numbers within kernels": "swiglu_alpha swiglu_limit use_gemma_norm",
    "a block that is always one of the selected": "index_local_blocks",
}
_FAMILY_REASONS["step3p7"] |= {
    "numbers within kernels": "query_pre_attn_scalar swiglu_limits swiglu_limits_shared partial_rotary_factors",
}
_FAMILY_REASONS["minimax"] |= {
    "factors of the residual stream, and which tensor it takes": (
        "full_attn_alpha_factor full_attn_beta_factor linear_attn_alpha_factor linear_attn_beta_factor "
        "mlp_alpha_factor mlp_beta_factor layernorm_full_attention_alpha layernorm_full_attention_beta "
        "layernorm_linear_attention_alpha layernorm_linear_attention_beta layernorm_mlp_alpha layernorm_mlp_beta "
        "postnorm"
    ),
    "the gate of shared experts, of which there are none": "shared_moe_mode",
}
_FAMILY_REASONS["granitemoe"] = _FAMILY_REASONS["mixtral"] | _FAMILY_REASONS["granite"]
_FAMILY_REASONS["bamba"] = {"limits of a number within the scan": "time_step_limit"}
_FAMILY_REASONS["granitemoehybrid"] = _FAMILY_REASONS["granitemoe"] | {
    "limits of a number within the scan": "time_step_limit",
    "rotary positions: without them, the pass over queries and keys is counted": "position_embedding_type",
}
_FAMILY_REASONS["smollm3"] = {
    "layers without rotary positions": "no_rope_layers no_rope_layer_interval",
    "windows, which use_sliding_window turns off": "sliding_window max_window_layers layer_types",
}
for _family in ("qwen3_5_text", "qwen3_5_moe_text"):
    _FAMILY_REASONS[_family] = _FAMILY_REASONS.get(_family, {}) | {
        "the format of states in generation": "mamba_ssm_dtype",
        "which function of one number the gate applies, within one kernel": "output_gate_type",
        "a part of layers that predict further tokens": "mtp_use_dedicated_embeddings",
        "dense layers, which the class does not have": "mlp_only_layers",
    }
_FAMILY_REASONS["nemotron_h"] |= {
    "functions of one number, and their limits, within one kernel": (
        "mlp_hidden_act mamba_hidden_act time_step_min time_step_max time_step_limit time_step_floor "
        "time_step_rank"
    ),
    "widths and switches that the class does not read": (
        "expand n_shared_experts use_mamba_kernels moe_shared_expert_overlap mamba_ssm_cache_dtype"
    ),
    "values of the weights at the start": "rescale_prenorm_residual",
    "a part of layers that predict further tokens": "mtp_layers_block_type mtp_hybrid_override_pattern",
}
_FAMILY_REASONS["cohere2"] = _FAMILY_REASONS["cohere"]
_FAMILY_REASONS["llama4_text"] |= {
    "the scale of queries, within a kernel": "attn_temperature_tuning attn_scale floor_scale",
    "how an export stores projections": "for_llm_compressor",
}
_FAMILY_REASONS["hunyuan_v1_dense"] = {"the number of a token": "eod_token_id"}
_FAMILY_REASONS["deepseek_v3"] = _FAMILY_REASONS["deepseek_v2"]
_FAMILY_REASONS["deepseek_v32"] = _FAMILY_REASONS["deepseek_v2"]
_FAMILY_REASONS["deepseek_v4"] = {
    _ROUTER: (
        "topk_method scoring_func norm_topk_prob routed_scaling_factor output_router_logits router_aux_loss_coef "
        "router_jitter_noise num_hash_layers"
    ),
    "numbers within kernels": "swiglu_limit compress_rope_theta qk_rope_head_dim hc_sinkhorn_iters hc_eps",
    "the format of the stored weights; the job's precision is what is trained": "expert_dtype",
}
_FAMILY_REASONS["kimi_linear"] = _FAMILY_REASONS["deepseek_v2"] | {
    "names that Kimi's own files have for the router's arithmetic": (
        "num_expert_group moe_renormalize moe_router_activation_func use_grouped_topk"
    ),
    "rotary positions: without them, the pass copies the keys' shared part to all heads": "mla_use_nope",
}
_FAMILY_REASONS["glm_moe_dsa"] = _FAMILY_REASONS["deepseek_v2"] | {
    "angles of rotary positions, within the same kernel": "indexer_rope_interleave",
    "the number format of the router's scores": "moe_router_dtype",
    "further tokens in generation": "index_share_for_mtp_iteration",
}
_FAMILY_REASONS["gemma3_text"] = _FAMILY_REASONS["gemma2"]
_FAMILY_REASONS["gemma4_text"] = _FAMILY_REASONS["gemma2"] | {
    "the vocabulary of embeddings of layers, of which there are none": "vocab_size_per_layer_input",
}

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
    "language_model_only": (False, "the encoder of images is part of the model"),
    "full_attn_mod": (1, "attention is full in every layer"),
    "interpolate_factor": (1, "positions are not interpolated"),
}
"""Settings of all families that must have a certain value, with its meaning."""

FUSED = ("flash_attention_2", "flash_attention_3", "flash_attention_4", "sdpa", "flex_attention")
"""Values of ``attn_implementation`` that are priced as fused attention."""

UNPRICED: dict[str, str] = {
    "vision_config": "the image tower is not priced",
    "audio_config": "the audio tower is not priced",
    "per_layer_config": "layers that differ in other ways than listed are not priced",
}
"""Keys of known parts that no description has a field for."""

STORED: Final = frozenset(["fp8", "mxfp8", "mxfp4", "nvfp4", "compressed-tensors", "modelopt"])
"""Methods of ``quantization_config`` that say how a published checkpoint is stored. Loaders of training make the
job's precision of it. Other methods (bitsandbytes, GPTQ, AWQ) keep the base in few bits beside adapters.

Source: Megatron-Bridge@067f987d models/conversion/quantization_utils.py, NeMo Automodel@36044ad3
_transformers/auto_model.py, torchtitan@b5bcd76c models/{deepseek_v3,gpt_oss}/state_dict_adapter.py.
"""

STORED_KEYS: Final = frozenset(
    [
        *("quant_method", "quant_algo", "moe_quant_algo", "kv_cache_quant_algo", "kv_cache_scheme", "version"),
        *("activation_scheme", "fmt", "format", "scale_fmt", "weight_block_size", "group_size", "config_groups"),
        *("quantized_layers", "ignore", "exclude_modules", "modules_to_not_convert", "producer", "dequantize"),
        *("global_compression_ratio", "quantization_status"),
    ]
)
"""Keys within ``quantization_config`` that describe the stored format alone."""

OBSTACLES: Final = {
    "falcon_h1": ("Mamba-2 beside attention in every layer", "bamba"),
    "jamba": ("layers of Mamba", "mixtral"),
    "mamba2": ("layers of Mamba-2 without attention", "bamba"),
    "lfm2": ("short convolutions", "llama"),
    "kimi_k3": ("attention to earlier residuals, and gates of latent attention", "kimi_linear"),
    "bloom": ("a norm after the embedding, and a bias of positions in the scores", "gpt_neox"),
    "mpt": ("a bias of positions in the scores", "gpt_neox"),
    "apertus": ("an activation with weights of its own", "llama"),
    "dbrx": ("queries, keys and values that are clipped", "mixtral"),
    "olmo": ("norms without weights", "llama"),
    "bert": ("an encoder, whose attention sees both sides", "gpt2"),
    "roberta": ("an encoder, whose attention sees both sides", "gpt2"),
    "modernbert": ("an encoder, whose attention sees both sides", "gpt2"),
    "t5": ("an encoder beside the decoder, and cross attention", "gpt2"),
}
"""Known families without a builder: the part that milpplan does not price, and the nearest family that it has."""


_TOKENS_TOO: Final = (
    *("arcee", "deepseek_v3", "exaone4", "gemma", "gemma2", "glm", "glm4", "gpt_oss", "llama", "minimax"),
    *("ministral", "ministral3", "mistral", "mixtral", "nemotron", "phi", "phi3", "qwen2", "qwen2_moe"),
    *("qwen3", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "stablelm", "starcoder2"),
)
_SEQUENCES_ALONE: Final = (
    *("deepseek_v2", "falcon", "gemma3_text", "gpt2", "gpt_neox", "gptj", "hunyuan_v1_dense", "olmo2", "olmo3"),
    *("opt", "phimoe", "qwen3_5_text"),
)
SCORED: Final[dict[str, frozenset[str]]] = {
    "forsequenceclassification": frozenset([*_TOKENS_TOO, *_SEQUENCES_ALONE]),
    "fortokenclassification": frozenset(_TOKENS_TOO),
}
"""Families with a class whose head is a matrix of scores, by the class's suffix; that of tokens has a bias.

Source: transformers 5.24.0 (``GenericForSequenceClassification``, ``GenericForTokenClassification``, and alike).
"""


MTP_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Keys of the number of layers of multi-token prediction."""


def without_effect(family: str) -> Mapping[str, str]:
    """List the keys that do not change the cost of a family's models, each with its reason."""
    listed = [*_REASONS.items(), *_FAMILY_REASONS.get(family, {}).items()]
    return {key: reason for reason, keys in listed for key in keys.split()}
