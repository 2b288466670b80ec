"""Configurations of GPT-NeoX as Megatron-LM's arguments, run under DeepSpeed's pipeline engine.

Source: EleutherAI/gpt-neox at ea7aefd8, megatron/neox_arguments and megatron/model/transformer.py; DeepSpeed
0.19.8, runtime/pipe/engine.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from milpplan.launchers.megatron.programs import Program, arguments_of, stated
from milpplan.launchers.records import ImportRequest
from milpplan.launchers.settings import Known, Settings, check_priced, flat, without, wrong_value
from milpplan.launchers.shell.launch_text import Given

QUIET: Mapping[str, str] = {
    r"optimizer\.params\..*|min_lr|lr.*|warmup|weight_decay|gradient_clipping|clip_grad|train_iters|train_epochs|"
    r"override_lr_scheduler|use_checkpoint_lr_scheduler|seed|init_method.*|output_layer_init_method|"
    r"(layernorm|rms_norm|scalenorm)_epsilon": "numbers of the update and first values",
    r"data_path|.*_data_paths|.*_data_weights|data_impl|split|num_workers|vocab_file|merge_file|tokenizer_type|"
    r"weight.*_by_num_documents|weighted_sampler_alpha|eod_mask_loss|mmap_warmup|use_shared_fs": "data",
    r"save|load|checkpoint_(factor|scale|validation.*)|extra_save_iters|keep_last_n_checkpoints|no_(save|load)_.*|"
    r"finetune|eval_.*|do_(train|valid|test)|s3_.*|checkpoint\..*": "works between steps",
    r"log_interval|log_dir|steps_per_print|tensorboard.*|(use_)?wandb.*|use_comet|comet_.*|log_grad_norm|"
    r"peak_theoretical_tflops|config_files": "records",
    r"hostfile|include|exclude|master_(addr|port)|launcher|num_(nodes|gpus)|deepspeed_(mpi|slurm|extra_args)|"
    r"distributed_backend|local_rank|lazy_mpu_init|no_ssh_check|force_multi": "how processes are started",
    r"(fp16|bf16)\.(?!enabled$).*|hysteresis|loss_scale.*|min_scale|dynamic_loss_scale|"
    r"attention_softmax_in_fp32": ("scales of the loss and formats inside of kernels"),
    r"zero_optimization\.(.*bucket_size|allgather_partitions|reduce_scatter|contiguous_gradients|"
    r"round_robin_gradients)": "sizes of messages, which are priced as they are best cut",
    r"rotary_.*|use_bias_in_norms|output_layer_parallelism": "functions of about equal cost",
    r"partition_activations|checkpoint_num_layers|mlp_multiple_of": "looked at where they act",
}
"""Patterns of GPT-NeoX's settings that have no effect on the cost, with reasons."""
SETTINGS: Known = {
    "num_layers": (None,), "hidden_size": (None,), "num_attention_heads": (None,), "num_kv_heads": (None,),
    "seq_length": (None,), "max_position_embeddings": (None,), "intermediate_size": (None,),
    "expansion_factor": (None,),
    "pipe_parallel_size": (0,), "model_parallel_size": (1,), "sequence_parallel": (False,), "norm": ("layernorm",),
    "pos_emb": ("learned",), "no_weight_tying": (False,), "activation": ("gelu",), "attention_config": (None,),
    "use_bias_in_attn_linear": (True,), "use_bias_in_mlp": (True,), "gpt_j_residual": (False,),
    "gpt_j_tied": (False,),
    "hidden_dropout": (0,), "attention_dropout": (0,), "checkpoint_activations": (False,), "mlp_multiple_of": (1,),
    "checkpoint_num_layers": (1,), "checkpoint_in_cpu": (False,), "contiguous_checkpointing": (False,),
    "synchronize_each_layer": (False,), "wall_clock_breakdown": (False,), "make_vocab_size_divisible_by": (128,),
    "train_micro_batch_size_per_gpu": (None,), "gradient_accumulation_steps": (None,), "train_batch_size": (None,),
    "precision": (None,), "fp16.enabled": (False,), "bf16.enabled": (False,), "optimizer.type": ("Adam",),
    "zero_optimization.stage": (0,), "zero_optimization.overlap_comm": (False,),
    "zero_optimization.cpu_offload": (False,),
    "data_types.grad_accum_dtype": (None,), "partition_activations": (False,), "sliding_window_width": (None,),
    "moe_num_experts": (1,), "use_qk_layernorm": (False,), "pipe_partition_method": ("type:transformer|mlp",),
    "bias_gelu_fusion": (False,), "layernorm_fusion": (False,), "rmsnorm_fusion": (False,),
    "rope_fusion": (False,), "bias_dropout_fusion": (False,), "global_num_gpus": (None,),
    "scaled_upper_triang_masked_softmax_fusion": (False,),
}  # fmt: skip
"""GPT-NeoX's settings that the cost depends on, with their defaults."""
_FUSIONS = (
    *("bias_gelu_fusion", "layernorm_fusion", "rmsnorm_fusion", "rope_fusion", "bias_dropout_fusion"),
    "scaled_upper_triang_masked_softmax_fusion",
)
_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
_POSITIONS = {"rotary": "rope", "learned": "learned_absolute"}


def from_neox(data: Mapping[str, Any], request: ImportRequest) -> Given:
    """Read a configuration of GPT-NeoX.

    Its stages run under DeepSpeed's pipeline engine, which reduces gradients after the last backward pass
    (deepspeed/runtime/pipe/engine.py), with ZeRO 1 or none.

    Raises:
        InvalidInputError: a setting changes the cost and is not priced, or a size is missing.
    """
    own, batch = stated(request)
    values = {name.replace("-", "_"): value for name, value in {**flat(data), **own}.items()}
    kept, left_out = without(values, request.ignored)
    s = Settings(kept, SETTINGS)
    tp, pp = s.degree("model_parallel_size"), max(s.number("pipe_parallel_size"), 1)
    world = request.num_gpus or s.get("global_num_gpus")
    arguments: dict[str, Any] = {
        "num_layers": s.size("num_layers"),
        "hidden_size": s.size("hidden_size"),
        "num_attention_heads": s.size("num_attention_heads"),
        "seq_length": s.size("seq_length"),
        "max_position_embeddings": s.get("max_position_embeddings"),
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "sequence_parallel": s.switch("sequence_parallel"),
        "normalization": _choice(s, "norm", _NORMS),
        "position_embedding_type": _choice(s, "pos_emb", _POSITIONS),
        "untie_embeddings_and_output_weights": s.switch("no_weight_tying"),
        "hidden_dropout": s.get("hidden_dropout"),
        "attention_dropout": s.get("attention_dropout"),
        "make_vocab_size_divisible_by": s.degree("make_vocab_size_divisible_by"),
        "qk_layernorm": s.switch("use_qk_layernorm"),
        **_layers(s),
        **_training(s),
    }
    if s.get("num_kv_heads") is not None:
        arguments |= {"group_query_attention": True, "num_query_groups": s.degree("num_kv_heads")}
    micro = request.given.get("micro_batch_size") or s.size("train_micro_batch_size_per_gpu")
    steps = s.get("gradient_accumulation_steps") or 1
    arguments |= {"micro_batch_size": micro}
    arguments["global_batch_size"] = s.get("train_batch_size") or (
        micro * steps * max(world // (tp * pp), 1) if isinstance(world, int) and isinstance(micro, int) else None
    )
    if tp > 1:
        _only(s, "gpt_j_residual", False, "false under tensor parallelism: one reduction of a layer is not priced")
        _only(
            s,
            "partition_activations",
            False,
            "false under tensor parallelism: inputs that are cut are not priced",
        )
    s.get("gpt_j_residual")
    off = [name for name in _FUSIONS if not s.switch(name)]
    notes = [f"{', '.join(off)}: off, and priced as fused. The step is a lower bound in this."] if off else []
    parts = {"mlp": {"bias": s.switch("use_bias_in_mlp")}}
    check_priced(s, QUIET)
    pairs = arguments_of(arguments, Program("GPT-NeoX"), request.source)
    started = world if isinstance(world, int) else None
    return Given((*pairs, *batch), started, (), ignored=left_out, notes=tuple(notes), parts=parts)


def _layers(s: Settings) -> dict[str, Any]:
    """Read the activation, the width, the biases and the attention of GPT-NeoX's layers.

    Widths are rounded up to multiples of ``mlp_multiple_of`` (megatron/model/transformer.py, ParallelMLP).

    Raises:
        InvalidInputError: the layer is not one that is priced.
    """
    gated = _choice(s, "activation", {"gelu": False, "swiglu": True})
    hidden, multiple = s.size("hidden_size"), s.degree("mlp_multiple_of")
    _only(s, "expansion_factor", None, "a width in intermediate_size")
    width = 4 * hidden if s.get("intermediate_size") is None else s.degree("intermediate_size")
    outer = -(-(width * 2 // 3 if gated else width) // (2 * multiple)) * 2 * multiple
    inner = -(-(width * 2 // 3 // 2 if gated else width) // multiple) * multiple
    if outer != (2 * inner if gated else inner):
        raise _strange("intermediate_size", width, "a width that both products of the feed-forward block share")
    kinds = s.get("attention_config")
    names = {str(name) for part in kinds for name in part[0]} if _is_attention(kinds) else {"global"}
    if names not in ({"flash"}, {"global"}) or (kinds is not None and not _is_attention(kinds)):
        raise _strange("attention_config", kinds, "flash or global in all layers")
    return {
        "swiglu": gated,
        "ffn_hidden_size": inner,
        "add_bias_linear": s.switch("use_bias_in_attn_linear"),
        "attention_backend": "flash" if names == {"flash"} else "unfused",
    }


def _is_attention(kinds: object) -> bool:
    """Test for a list of pairs: a list of names, and how often it repeats."""
    return (
        isinstance(kinds, list)
        and len(kinds) > 0
        and all(isinstance(part, list) and len(part) == 2 and isinstance(part[0], list) for part in kinds)
    )


def _training(s: Settings) -> dict[str, Any]:
    """Read formats, sharding and recomputation of a run of GPT-NeoX.

    Raises:
        InvalidInputError: they are not priced.
    """
    precision = s.get("precision")
    formats = {"fp16": s.switch("fp16.enabled"), "bfloat16": s.switch("bf16.enabled")}
    if precision is not None and precision in formats:
        formats = {name: name == precision for name in formats}
    stage = s.number("zero_optimization.stage")
    if stage not in (0, 1):
        raise _strange("zero_optimization.stage", stage, "0 or 1: its pipeline engine has no other")
    _only(s, "optimizer.type", ("Adam", "AdamW", "adam", "adamw"), "Adam, whose states and update are priced")
    _only(s, "data_types.grad_accum_dtype", (None, "bf16", "fp16"), "gradients in 16 bits")
    s.get("zero_optimization.overlap_comm")
    recomputes = s.switch("checkpoint_activations")
    return {
        "fp16": formats["fp16"],
        "bf16": formats["bfloat16"],
        "grad_reduce_in_bf16": formats["bfloat16"],
        "use_distributed_optimizer": stage == 1,
        "overlap_grad_reduce": stage == 1 and s.number("pipe_parallel_size") == 0 and s.switch(_OVERLAP),
        "recompute_granularity": "full" if recomputes else None,
        "recompute_method": "uniform" if recomputes else None,
        "recompute_num_layers": s.degree("checkpoint_num_layers") if recomputes else None,
        "cross_entropy_loss_fusion": True,
    }


_OVERLAP = "zero_optimization.overlap_comm"


def _choice(s: Settings, name: str, choices: Mapping[str, Any]) -> Any:
    """Translate a word.

    Raises:
        InvalidInputError: the word is none of the choices.
    """
    word = s.get(name)
    if word not in choices:
        raise _strange(name, word, f"one of {', '.join(choices)}, which are priced")
    return choices[word]


def _only(s: Settings, name: str, allowed: object, why: str) -> None:
    """Refuse a setting with another value than the allowed one, or ones.

    Raises:
        InvalidInputError: the value differs.
    """
    if s.get(name) not in (allowed if isinstance(allowed, tuple) else (allowed,)):
        raise _strange(name, s.get(name), why)


_strange = partial(wrong_value, purpose=" to compare it as such a run")
