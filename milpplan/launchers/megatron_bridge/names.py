"""Megatron-Bridge's names for Megatron-LM's arguments, in both directions.

Bridge is built on Megatron-Core and takes its settings as overrides of a recipe, ``section.name=value`` in Hydra's
grammar. Every setting that a plan decides is written, even where it is off, so that a recipe decides none of them.
Source: megatron-bridge 0.3.1, training/config.py, models/gpt_provider.py, training/mixed_precision.py;
megatron-core 0.16.1, transformer/transformer_config.py, distributed/distributed_data_parallel_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from milpplan.errors import InvalidInputError
from milpplan.launchers.megatron.arguments import Values
from milpplan.launchers.megatron.model import pattern_flags
from milpplan.problem.reading import shown

Part = Literal["all", "experts", "latent"]


@dataclass(frozen=True, slots=True)
class Name:
    """Flag of Megatron-LM and the equivalent settings of Bridge.

    ``kind``: a value, a switch that is on where the flag is given, a switch that is off where it is given, a pair
    of numbers, a list of words, a pattern over layers, or a text that needs Hydra's quotes. ``absent``: the value
    to write where the flag is not given; None: nothing. ``part``: the models that have the flag.
    """

    flag: str
    keys: tuple[str, ...]
    kind: Literal["value", "on", "off", "pair", "words", "pattern", "text"] = "value"
    absent: str | None = None
    part: Part = "all"


def _value(flag: str, *keys: str, absent: str | None = None, part: Part = "all") -> Name:
    return Name(flag, keys, "value", absent, part)


def _on(flag: str, *keys: str, part: Part = "all") -> Name:
    return Name(flag, keys, "on", "false", part)


NAMES = (
    _value("--num-layers", "model.num_layers"),
    _value("--hidden-size", "model.hidden_size"),
    _value("--ffn-hidden-size", "model.ffn_hidden_size"),
    _value("--num-attention-heads", "model.num_attention_heads"),
    _value("--num-query-groups", "model.num_query_groups", absent="null"),
    _value("--kv-channels", "model.kv_channels", absent="null"),
    _value("--vocab-size", "model.vocab_size"),
    _value("--seq-length", "model.seq_length", "dataset.sequence_length"),
    _value("--position-embedding-type", "model.position_embedding_type"),
    _value("--normalization", "model.normalization"),
    _value("--attention-dropout", "model.attention_dropout"),
    _value("--hidden-dropout", "model.hidden_dropout"),
    Name("--untie-embeddings-and-output-weights", ("model.share_embeddings_and_output_weights",), "off", "true"),
    Name("--disable-bias-linear", ("model.add_bias_linear",), "off", "true"),
    _on("--add-qkv-bias", "model.add_qkv_bias"),
    _on("--swiglu", "model.gated_linear_unit"),
    _on("--qk-layernorm", "model.qk_layernorm"),
    _value("--softmax-type", "model.softmax_type", absent="vanilla"),
    Name("--window-size", ("model.window_size",), "pair", "null"),
    Name("--window-attn-skip-freq", ("model.window_attn_skip_freq",), "pattern", "null"),
    _value("--num-experts", "model.num_moe_experts", absent="null"),
    _value("--moe-router-topk", "model.moe_router_topk", part="experts"),
    _value("--moe-ffn-hidden-size", "model.moe_ffn_hidden_size", part="experts"),
    _on("--moe-grouped-gemm", "model.moe_grouped_gemm", part="experts"),
    Name("--moe-layer-freq", ("model.moe_layer_freq",), "pattern", "1", "experts"),
    _value(
        "--moe-shared-expert-intermediate-size",
        "model.moe_shared_expert_intermediate_size",
        absent="null",
        part="experts",
    ),
    _on("--moe-shared-expert-gate", "model.moe_shared_expert_gate", part="experts"),
    _value("--moe-token-dispatcher-type", "model.moe_token_dispatcher_type", part="experts"),
    _value("--q-lora-rank", "model.q_lora_rank", absent="null", part="latent"),
    _value("--kv-lora-rank", "model.kv_lora_rank", part="latent"),
    _value("--qk-head-dim", "model.qk_head_dim", part="latent"),
    _value("--qk-pos-emb-head-dim", "model.qk_pos_emb_head_dim", part="latent"),
    _value("--v-head-dim", "model.v_head_dim", part="latent"),
    _on("--multi-latent-attention", "model.multi_latent_attention"),
    _value("--tensor-model-parallel-size", "model.tensor_model_parallel_size"),
    _value("--context-parallel-size", "model.context_parallel_size"),
    _value("--pipeline-model-parallel-size", "model.pipeline_model_parallel_size"),
    _value("--expert-model-parallel-size", "model.expert_model_parallel_size", absent="1"),
    _value("--expert-tensor-parallel-size", "model.expert_tensor_parallel_size", absent="1"),
    _value("--cp-comm-type", "model.cp_comm_type", absent="null"),
    _on("--sequence-parallel", "model.sequence_parallel"),
    _on("--use-tp-pp-dp-mapping", "dist.use_tp_pp_dp_mapping"),
    _value(
        "--num-virtual-stages-per-pipeline-rank", "model.virtual_pipeline_model_parallel_size", absent="null"
    ),
    Name("--pipeline-model-parallel-layout", ("model.pipeline_model_parallel_layout",), "text", "null"),
    _value("--recompute-granularity", "model.recompute_granularity", absent="null"),
    _value("--recompute-method", "model.recompute_method", absent="null"),
    _value("--recompute-num-layers", "model.recompute_num_layers", absent="null"),
    Name("--recompute-modules", ("model.recompute_modules",), "words", "null"),
    _value("--micro-batch-size", "train.micro_batch_size"),
    _value("--global-batch-size", "train.global_batch_size"),
    _on("--use-distributed-optimizer", "ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer"),
    _on("--use-megatron-fsdp", "dist.use_megatron_fsdp", "ddp.use_megatron_fsdp"),
    _value(
        "--data-parallel-sharding-strategy", "ddp.data_parallel_sharding_strategy", absent="no_shard"
    ),
    _value("--ckpt-format", "checkpoint.ckpt_format", absent="torch_dist"),
    _on("--overlap-grad-reduce", "ddp.overlap_grad_reduce"),
    _on("--overlap-param-gather", "ddp.overlap_param_gather"),
    _on("--cross-entropy-loss-fusion", "model.cross_entropy_loss_fusion"),
    _value("--cross-entropy-fusion-impl", "model.cross_entropy_fusion_impl", absent="native"),
)  # fmt: skip
CONSTANT = {
    "model.should_pad_vocab": "true",
    "model.mtp_num_layers": "null",
    "model.account_for_embedding_in_pipeline_split": "false",
    "model.account_for_loss_in_pipeline_split": "false",
    "model.num_layers_in_first_pipeline_stage": "null",
    "model.num_layers_in_last_pipeline_stage": "null",
    "model.cuda_graph_impl": "none",
    "model.moe_shared_expert_overlap": "false",
    "comm_overlap": "null",
}
"""Settings that a recipe may enable and a plan does not have: an export disables them."""
PRECISIONS: Mapping[str, dict[str, Values]] = {
    "bf16_mixed": {"--bf16": ()},
    "bf16_with_fp8_current_scaling_mixed": {
        "--bf16": (),
        "--fp8-format": ("hybrid",),
        "--fp8-recipe": ("tensorwise",),
        "--fp8-param-gather": (),
    },
}
"""Values of ``mixed_precision`` with the equivalent arguments of Megatron-LM."""


def written(name: Name, values: Values | None) -> str | None:
    """Write a flag's values in Hydra's grammar; None where nothing is written."""
    if values is None:
        return name.absent
    if name.kind in ("on", "off"):
        return "true" if name.kind == "on" else "false"
    if name.kind == "pair":
        return f"[{values[0]}]"
    if name.kind == "words":
        return f"[{','.join(values)}]"
    if name.kind == "pattern":
        flags = pattern_flags(values[0], name.flag)
        return str(flags) if isinstance(flags, int) else f"[{','.join(str(int(flag)) for flag in flags)}]"
    return f'"{values[0]}"' if name.kind == "text" else values[0]


def read(name: Name, text: str) -> Values | None:
    """Read a setting's value as the values of a flag; None where the flag is not given.

    Raises:
        InvalidInputError: a switch is neither true nor false.
    """
    bare = text.strip("\"'")
    if name.kind in ("on", "off"):
        if bare.lower() not in ("true", "false"):
            raise InvalidInputError(
                f"{name.keys[0]} is {shown(bare)}.", "Expected true or false.", f"Correct {name.keys[0]}."
            )
        return () if (bare.lower() == "true") == (name.kind == "on") else None
    if bare.lower() in ("null", "none"):
        return None
    if name.kind == "pair":
        return (bare.strip("[]() ").replace(" ", ""),)
    if name.kind == "words":
        return tuple(word.strip(" \"'") for word in bare.strip("[]").split(",") if word.strip())
    return (bare,)
