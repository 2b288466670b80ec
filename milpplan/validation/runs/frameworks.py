"""Frameworks of measured runs: how they are recognised, and their defaults for values that tables lack.

Every value used from here is reported with its run, unless the record states it itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from milpplan.problem import DenseMlp, ModelSpec, NoBlock, Software
from milpplan.units import GIB, MIB
from milpplan.validation.runs.records import Run


def even_split(model: ModelSpec, stages: int) -> tuple[int, ...]:
    """Split into equal virtual stages; else embedding and loss count as a layer each; else ceil, with the rest
    last.

    Source: Megatron-LM ``--account-for-embedding-in-pipeline-split`` and ``--account-for-loss-...``.
    """
    layers = model.num_layers
    if layers % stages and stages > 1 and (layers + 2) % stages == 0:
        return _shorter_ends((layers + 2) // stages, stages)
    return ceil_split(model, stages)


def ceil_split(model: ModelSpec, stages: int) -> tuple[int, ...]:
    """Give ceil(layers / stages) to virtual stages from the first on, and the rest to the last ones.

    Source: DeepSpeed ``partition_balanced`` with equal weights (runtime/utils.py).
    """
    left, counts = model.num_layers, []
    size = -(-model.num_layers // stages)
    for _ in range(stages):
        counts.append(min(size, left))
        left -= counts[-1]
    return tuple(counts)


def split_with_embeddings(model: ModelSpec, stages: int) -> tuple[int, ...]:
    """Split with the embedding and the (tied) head as layers: DeepSpeed ``type:transformer|embedding``."""
    left, counts = model.num_layers + 2, []
    size = -(-left // stages)
    for _ in range(stages):
        counts.append(min(size, left))
        left -= counts[-1]
    counts[0] -= 1
    last = max(index for index, count in enumerate(counts) if count)
    counts[last] -= 1
    return tuple(max(count, 0) for count in counts)


def split_by_cost(model: ModelSpec, stages: int) -> tuple[int, ...]:
    """Fill each stage until its layers, and all before, cost more than its share of layers and head.

    A layer costs 4 h^2 + 3 h f and the head vocab * h; the remainder of a full stage moves on. Source:
    huggingface/nanotron src/nanotron/models/base.py (build_model) and models/llama.py (get_block_compute_costs),
    as printed in the Ultra-Scale Playbook.
    """
    return _by_cost(model, stages, 1)


def split_by_cost_with_ties(model: ModelSpec, stages: int) -> tuple[int, ...]:
    """Split as ``split_by_cost``, but end a stage as soon as it costs exactly its share.

    Source: bytes that nanotron's runs with the mended pipeline engine have allocated on their first stage where
    costs and shares tie (10 of 16 layers of the 1.34 B model with pp=2, 5 with pp=4; docs/accuracy.md).
    """
    return _by_cost(model, stages, 0)


def _by_cost(model: ModelSpec, stages: int, above: int) -> tuple[int, ...]:
    """Split into stages that end once they cost at least ``above`` more than their share."""
    hidden = model.hidden_size
    costs = []
    for run in model.layers:
        mlp = run.mlp
        assert not isinstance(mlp, NoBlock)
        width = mlp.intermediate_size if isinstance(mlp, DenseMlp) else mlp.intermediate_size * mlp.num_experts
        costs += [4 * hidden * hidden + 3 * hidden * width] * run.count
    total = sum(costs) + model.vocab_size * hidden
    counts, stage, spent = [0] * stages, 0, 0
    for cost in costs:
        counts[stage] += 1
        spent += cost
        if spent * stages >= total * (stage + 1) + above and stage + 1 < stages:
            stage += 1
    return tuple(counts)


def _shorter_ends(size: int, stages: int) -> tuple[int, ...]:
    counts = [size] * stages
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts)


RecomputeMode = Literal["none", "selective", "full"]
Style = Literal["llama", "gpt", "mpt", "bloom", "nemotron"]
Split = Callable[[ModelSpec, int], tuple[int, ...]]
FlopCount = Literal["causal", "full"]


PLAIN_STACK: Final = "plain"
PREFETCHED: Final = 0.72
"""Hidden fraction of gathers and reductions of a framework that prefetches, where nothing identifies its own.
Source: the mean of four sources' fits (MaxText 0.96, Composer on H100 0.84, Megatron Bridge 0.76, Composer on A100
0.33), one sigma 0.27."""
UNKNOWN_HIDDEN: Final = 0.45
"""Hidden fraction of an unknown framework: that of frameworks with and without prefetch, one sigma 0.38."""
CORE = Software(
    name="Megatron-Core with Transformer Engine",
    hidden_gather_fraction=PREFETCHED,
    hidden_reduce_fraction=PREFETCHED,
)
PLAIN = CORE.model_copy(update={"name": "without Transformer Engine", "dummy_weight_gradients": False})
ALONE = PLAIN.model_copy(
    update={
        "name": "without Transformer Engine; tensor-parallel collectives beside nothing",
        "overlap_tensor_parallel": False,
    }
)


def _hiding(software: Software, fraction: float = UNKNOWN_HIDDEN) -> Software:
    """Set both hidden fractions."""
    fractions = {"hidden_gather_fraction": fraction, "hidden_reduce_fraction": fraction}
    return software.model_copy(update=fractions)


@dataclass(frozen=True, slots=True)
class Framework:
    """Defaults of a source's framework.

    ``flops``: attention counted as the causal half or the full matrix, in the FLOP/s and utilisation that the
    source prints. ``experts_share_tp``: tensor parallelism splits experts unless the record says otherwise.
    """

    name: str
    zero: int = 0
    recompute: RecomputeMode = "none"
    sequence_parallel: bool = True
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    attention: Literal["flash", "unfused"] = "flash"
    grad_dtype: Literal["fp32", "bf16"] = "fp32"
    gpt_dropout: bool = False
    flops: FlopCount = "causal"
    experts_share_tp: bool = False
    memory: Literal["allocated", "reserved"] = "allocated"
    """Default meaning of peak memory: that of tensors, or of memory taken by the caching allocator."""
    resets_peak: bool = False
    """True if the printed peak of tensors counts only from the optimizer's update on."""
    kept_gathers: int = 0
    """Buffers of the size of a micro-batch's whole hidden states that stay with tensor parallelism."""
    held_ahead: int = 0
    """Buffers of that size per layer that the allocator cannot reuse while the host sends further forwards of the
    warm-up ahead, because a communication stream has used them."""
    workspace_bytes: float = 0.0
    """Bytes allocated for the matrix library in addition to everything else."""
    more_context_bytes: float = 0.0
    """Bytes that the driver reports beyond the allocator's memory and the reserve of the hardware description."""
    gigabyte: float = 0.0
    """Bytes of a GB that the source prints; 0: unknown, and such values are not used."""
    split: Split = even_split
    flagged_splits: tuple[tuple[str, Split], ...] = ()
    """Flags of records whose layers were split in another way, with the split."""
    stack: str = ""
    """Name of the constants fitted to this framework; ``hardware/stacks`` has them by hardware."""
    plain: bool = False
    """True if the framework launches single operators where Megatron-LM and Transformer Engine have fused kernels.
    On hardware without constants of its own it uses those fitted to all such frameworks, ``PLAIN_STACK``."""
    slow_calls_below_bytes_per_s: float = 0.0
    """Bus bandwidth of an all-gather inside a node, measured by the source before the run, below which every call
    of a collective cost the hosts time per rank: such runs have their own constants, ``slow_calls_stack``."""
    slow_calls_stack: str = ""
    earlier_engine_flags: frozenset[str] = frozenset()
    """Flags of records with a pipeline whose time is that of an earlier, slower engine: such runs have their own
    constants, ``earlier_engine_stack``."""
    earlier_engine_below_bytes_per_s: float = 0.0
    """Bus bandwidth below which a run counts as one of the earlier engine, too."""
    earlier_engine_stack: str = ""
    micro_batch_a_stage: bool = False
    """True if a pipeline has as many micro-batches as ranks by default."""
    pipelined_zero: int | None = None
    """ZeRO stage that sharding at stages 2 and 3 amounts to in a pipeline, where it differs."""
    selective_models: tuple[str, ...] = ()
    """Models whose published recipes recompute selectively by default."""
    heads: tuple[tuple[int, int], ...] = ()
    """Hidden size and number of heads that the source prints for it elsewhere, for runs that do not state it."""
    bf16_grad_dtype: Literal["fp32", "bf16"] | None = None
    """Format of gradients in bf16 runs, where fp16 has another optimizer."""
    kernels: tuple[tuple[str, tuple[tuple[str, float], ...]], ...] = ()
    """Fields of ``Software`` to set where a run's attention kernel or number format contains a word."""
    software: Software = CORE
    """Buffers of Transformer Engine, and overlaps; the defaults are those of Megatron-Core since 2024."""
    notes: tuple[str, ...] = ()
    """Differences from the simulation that hold for every run of the source."""


MEGATRON = Framework("Megatron-LM", zero=1, split=even_split, stack="megatron-core")
NEMO = replace(
    MEGATRON,
    name="NeMo",
    stack="nemo",
    grad_dtype="bf16",
    # NVIDIA/dgxc-benchmarking@v24.11.1 (model.fp8_params), NVIDIA-NeMo/Megatron-Bridge@v0.2.0: fp8_param_gather
    # of every fp8 recipe but subchannel scaling (training/mixed_precision.py); recompute_modules
    # (scripts/performance/configs).
    software=CORE.model_copy(update={"fp8_weights_only": True}),
    selective_models=("DeepSeek-V3", "gpt-oss-120b"),
    notes=(
        "gradients are added up and reduced in bf16, as the performance recipes set (grad_reduce_in_fp32=False)",
        "overlap of tensor-parallel communication is not modelled",
    ),
)
BRIDGE = replace(NEMO, name="Megatron Bridge", stack="megatron-bridge")
"""Megatron Bridge, NeMo's successor: newer Transformer Engine, kernels and dispatchers, hence its own
constants."""
MEGATRON_2021 = Framework(
    "Megatron-LM of 2021",
    stack="megatron-2021",
    recompute="full",
    sequence_parallel=False,
    overlap_grad_reduce=False,
    overlap_param_gather=False,
    attention="unfused",
    gpt_dropout=True,
    flops="full",
    software=PLAIN,
)
MEGATRON_DEEPSPEED = replace(
    MEGATRON_2021,
    name="Megatron-DeepSpeed",
    stack="megatron-deepspeed",
    zero=1,
    gpt_dropout=False,
    grad_dtype="bf16",
    # DeepSpeed runtime/bf16_optimizer.py (update_hp_grads): fp32 sums, and the bf16 gradients stay beside them.
    bf16_grad_dtype="fp32",
    kernels=(("bf16", (("gradient_bucket_bytes", 2.0),)),),
    split=ceil_split,
    # Fitted to the memory of 48 runs in nvidia-smi, mean absolute error 5 %.
    software=ALONE.model_copy(update={"allocator_share": 0.3, "fused_gradient_sums": False}),
    notes=("DeepSpeed adds up and reduces gradients of fp16 in 16 bits, of bf16 in 32",),
)
# PyTorch FSDP with mixed precision: the shards are those of the fp32 parameters (torch.distributed.fsdp).
FSDP = Framework(
    "PyTorch FSDP",
    plain=True,
    zero=3,
    sequence_parallel=False,
    software=ALONE.model_copy(update={"master_shards_only": True}),
)

FRAMEWORKS: dict[str, Framework] = {
    "nanotron-bench": Framework(
        "nanotron",
        stack="nanotron",
        plain=True,
        # Of the runs without flags 408 have at most 246 GB/s, 216 at least 253 (medians 242 and 262). Between
        # nodes the two differ more: an all-gather over 8, 16, 32, 64 nodes reached 52, 26, 13, 6.5 GB/s in the
        # first state, a constant time for every rank, and 180, 124, 75, 44 in the second.
        slow_calls_below_bytes_per_s=250e9,
        slow_calls_stack="nanotron-slow-calls",
        # The source flags runs before its engine was mended. Rows that say "out of memory" and yet have a time are
        # attempts mixed with them: they lose the same time a micro-batch. So does every row in which a node's
        # all-gather reached 42 GB/s; of those 14 all but one have one of the two flags.
        earlier_engine_flags=frozenset({"old_pp_engine", "success_with_oom_flag"}),
        earlier_engine_below_bytes_per_s=100e9,
        earlier_engine_stack="nanotron-earlier-engine",
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        # The printed max_allocated does not grow with the micro-batch: its counter is reset before the optimizer
        # (logging/base.py, log_memory; trainer.py). Workspaces: two handles of cuBLAS with 32 MiB on Hopper
        # (PyTorch aten/src/ATen/cuda/CublasHandlePool.cpp), of the forward's thread and of the backward's.
        memory="reserved",
        resets_peak=True,
        kept_gathers=2,
        # One of the attention and one of the feed-forward block. Read off the same 657 runs (2.2 a layer and
        # warm-up forward, rounded): with these the missing bytes grow no more with the stages (docs/accuracy.md).
        held_ahead=2,
        workspace_bytes=64 * MIB,
        split=split_by_cost_with_ties,
        flagged_splits=(("old_pp_engine", split_by_cost),),
        # huggingface/nanotron@0e0a27ea: GLUActivation in single operators (models/llama.py); bf16 buckets of
        # PyTorch's DistributedDataParallel beside the fp32 sums, to which every gradient is added in a kernel of
        # its own (trainer.py, optim/gradient_accumulator.py); tensor-parallel collectives of the backward beside
        # its products (tp_async_comm of every record);
        # logits in bf16, in fp32, and shifted in fp32 (parallel/tensor_parallel/functional.py). What the allocator
        # holds beside ``held_ahead``: fitted to 657 runs, mean absolute error of the reserved memory 11 %.
        software=ALONE.model_copy(
            update={
                "fused_activation": False,
                "fused_gradient_sums": False,
                "overlap_tensor_parallel": True,
                "gradient_bucket_bytes": 2.0,
                # With ZeRO 1 and fp32 sums no DistributedDataParallel: an all-reduce of all gradients after the
                # last backward (trainer.py, _init_model and training_step), then a gather of lists of slices of
                # every weight (distributed.py, all_gather_coalesced).
                "all_reduces_gradients": True,
                "single_calls": True,
                # ddp_bucket_cap_mb of every record: 25 MB of bf16 gradients a call.
                "reduce_call_bytes": 25 * 2**20,
                "logit_kept_bytes": 10.0,
                "allocator_share": 0.1,
            }
        ),
        notes=("time of one iteration; stages balanced by nanotron's rule (the head costs vocab * hidden)",),
    ),
    "hagemann-layouts": Framework(
        "Aleph Alpha's framework",
        stack="aleph-alpha",
        plain=True,
        # Fitted to the same runs: a norm in single operators moves four times what the fused kernel does, and
        # flash attention 1 reaches 0.41 of the rate of version 2.
        kernels=(
            ("RMS kernel", (("norm_traffic", 1.0), ("norm_kept_bytes", 2.0))),
            ("flash_attentionv1", (("attention_efficiency", 0.41),)),
        ),
        zero=1,
        sequence_parallel=False,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        grad_dtype="bf16",
        # Aleph-Alpha/scaling@737f855: the norm gathers what sequence parallelism split
        # (core/nn/norm/rms_norm.py), the gated activation is in single operators (core/nn/mlp.py), the head
        # gathers the logits. Gradients are cast to fp32 and all-reduced although ZeRO-1 shards what they update
        # (core/optimizer/allreduce.py). Fitted to which of 490 runs with 128k words ran out of memory (95.5 % of
        # them right): bytes a logit, a score, and an element of a norm's input.
        software=ALONE.model_copy(
            update={
                "gathered_logits": True,
                "logit_kept_bytes": 20.0,
                "norm_traffic": 4.0,
                "norm_kept_bytes": 8.0,
                "gathered_inputs": True,
                "fused_activation": False,
                "score_kept_bytes": 6.0,
                "reduced_gradient_bytes": 4.0,
                "all_reduces_gradients": True,
            }
        ),
        notes=("ZeRO-1 as the paper says; nothing overlaps",),
    ),
    "bloom-prequel": replace(
        MEGATRON_DEEPSPEED,
        # bigscience-workshop/bigscience@053adafee train/tr11-176B-ml/chronicles-prequel.md: NHEADS=96 in the
        # commands of all models of 80 layers 14400 wide; "all NHEADS=64 (above too)" of the tables of the others.
        heads=((14400, 96), (14336, 64), (13824, 64), (13312, 64), (12288, 64)),
        notes=(*MEGATRON_DEEPSPEED.notes, "ALiBi in place of learned positions"),
    ),
    "bigscience-tr3m": MEGATRON_DEEPSPEED,
    "korthikanti-2022": replace(MEGATRON_2021, recompute="selective"),
    # Its all-reduce of the backward runs beside nothing: that came with Korthikanti et al. 2022.
    "megatron-2021": replace(MEGATRON_2021, software=ALONE),
    "megascale": replace(MEGATRON_2021, recompute="selective", sequence_parallel=True, attention="flash"),
    "mtnlg-530b": MEGATRON_2021,
    "opt-175b": FSDP,
    "zero-bubble": replace(
        MEGATRON_2021,
        stack="zero-bubble",
        recompute="none",
        split=even_split,
        # sail-sg/zero-bubble-pipeline-parallelism@475e06293 examples/pretrain_zbh1.sh: fp16 without fp32 sums of
        # the gradients, no flash attention, dropout as Megatron-LM has it unless told otherwise.
        grad_dtype="bf16",
        # With 2**30 bytes nearly all of its peaks would be predicted 3 to 9 % too low, with 1e9 none is 4 % off.
        gigabyte=1e9,
    ),
    "mist-aceso": replace(MEGATRON_2021, notes=("operators of a layer recomputed one by one",)),
    "dgxc-benchmarking": replace(NEMO, experts_share_tp=True),
    "dgxc-benchmarking/MaxText/JAX": replace(
        FSDP,
        name="MaxText",
        stack="maxtext",
        plain=False,
        grad_dtype="bf16",
        notes=("gathers and reductions of JAX's compiler are priced as those of FSDP",),
    ),
    "jax-toolbox-pax": replace(
        FSDP,
        name="Pax",
        plain=False,
        attention="unfused",
        grad_dtype="bf16",
        notes=("gathers and reductions of JAX's compiler are priced as those of FSDP",),
    ),
    "bigscience-gpt2": MEGATRON_2021,
    # Megatron-Kwai@atc24ae-1.0.0 examples/atc24: activations are offloaded to the host by a share that is printed.
    "kwai-atc24": replace(MEGATRON, notes=("offloaded activations are counted as kept on the device",)),
    "nemo-megatron-bridge": BRIDGE,
    "nemo-docs": NEMO,
    "nemo-launcher": replace(NEMO, flops="full"),
    "mlperf-training-v4.0": NEMO,
    "mlperf-training-v5.1": BRIDGE,
    "bridge-skills": BRIDGE,
    "nemotron4-15b-paper": replace(MEGATRON, experts_share_tp=True),
    "megatron-moe-recipes": MEGATRON,
    "megatron-golden": MEGATRON,
    "megatron-repo": replace(MEGATRON, recompute="selective", flops="full"),
    "moe-folding": replace(MEGATRON, flops="full"),
    "deepseek-v3-paper": MEGATRON,
    "primus": MEGATRON,
    "simumax-b200": replace(MEGATRON, overlap_grad_reduce=False, overlap_param_gather=False),
    "llm-foundry": replace(FSDP, name="MosaicML Composer with FSDP", stack="composer"),
    "fms-fsdp": FSDP,
    "torchtitan": replace(
        FSDP,
        name="torchtitan",
        stack="torchtitan",
        # pytorch/torchtitan config_manager.py and train_configs: activation_checkpoint.mode = "selective".
        recompute="selective",
        sequence_parallel=True,
        memory="reserved",
        # pytorch/torchtitan models/llama3 (parallelize.py: no resharding after forward in a pipeline; model.py:
        # the gated activation in single operators), PyTorch distributed/pipelining/stage.py
        # (backward_maybe_with_nosync: unsharded gradients until the last micro-batch). Weights are gathered in
        # bf16 or in fp8, not in both (torchao float8).
        pipelined_zero=1,
        # pytorch/torchtitan@9dec370 parallelisms/pipelining_utils.py: as many micro-batches as pipeline ranks
        # unless pipeline_parallel_microbatches is given. Compiled, the gated activation is one kernel.
        micro_batch_a_stage=True,
        kernels=tuple(
            (word, (("fused_activation", True), ("keeps_unread_results", False))) for word in ("compile", "float8")
        ),
        # torchtitan/parallelisms/parallelize_llama.py: selective_ac_option = "op" of all its configurations.
        # train.py: the loss of pred.float() in single operators, not compiled, pred freed before the backward; its
        # log-softmax and two gradients in fp32, of which the backward's own 16 bits a logit are a part.
        software=FSDP.software.model_copy(
            update={
                "fused_activation": False,
                "fp8_weights_only": True,
                "operator_checkpoints": True,
                "fused_qkv": False,
                "logit_kept_bytes": 10.0,
                "gathered_inputs": True,
            }
        ),
    ),
    # NVIDIA-NeMo/Automodel@005f66393 models/common/utils.py: BackendConfig sets layers of Transformer Engine.
    "nemo-automodel": replace(FSDP, name="NeMo AutoModel", plain=False),
    # Llama 3 (2024), section 3.3.2: FSDP shards states and gradients, and weights are not resharded after the
    # forward; gradients of a pipeline are reduced once a step, as torchtitan's.
    "llama3-paper": replace(
        FSDP, name="Meta's framework", plain=False, sequence_parallel=True, zero=2, pipelined_zero=1
    ),
    "internevo": replace(
        MEGATRON,
        name="InternEvo",
        stack="internevo",
        plain=True,
        # InternLM/InternEvo@00de61348 configs/7B_sft.py: tensor parallelism in mode "mtp", without sequence
        # parallelism; overlap_sync_grad but not overlap_sync_param; a model, and so its gradients, in bf16.
        sequence_parallel=False,
        overlap_param_gather=False,
        grad_dtype="bf16",
        software=ALONE,
    ),
    # FlagOpen/FlagPerf@1b5a03039 training/benchmarks/llama1_7B/paddle (run_pretraining.py, config): PaddleNLP of
    # 2023 with fp16 "O2", so weights and gradients in 16 bits; no sequence parallelism. Its gated activation is
    # silu(gate) * up, and its norm, where not fused, copies to fp32 (paddlenlp/transformers/llama/modeling.py):
    # the traffic is that of the same operators of Aleph Alpha.
    "flagperf": replace(
        MEGATRON,
        name="FlagPerf (PaddleNLP)",
        stack="flagperf",
        plain=True,
        sequence_parallel=False,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        grad_dtype="bf16",
        kernels=(("norm in single operators", (("norm_traffic", 4.0),)),),
        # Median of what nvidia-smi shows beyond the prediction in the groups of ranks of these runs, 2 to 5 GiB,
        # the same with 20 GiB in use as with 70: context, libraries and communicators of Paddle.
        more_context_bytes=3.4 * GIB,
        # paddle.distributed.fleet.layers.mpu.mp_layers.ColumnParallelLinear copies its input (c_identity), and the
        # products of queries, keys, values, gate and up are apart.
        software=ALONE.model_copy(update={"fused_activation": False, "copied_inputs": True}),
    ),
    # PaddlePaddle/PaddleNLP paddlenlp/trainer/training_args.py: sequence_parallel is off unless given.
    "paddlenlp": replace(
        MEGATRON,
        name="PaddleNLP",
        plain=True,
        stack="",
        sequence_parallel=False,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        software=ALONE,
    ),
}
UNKNOWN = replace(MEGATRON, name="an unknown framework, taken as Megatron-LM", software=_hiding(CORE))
UNKNOWN_SHARDED = replace(
    FSDP,
    name="an unknown framework that shards states, taken as PyTorch FSDP",
    software=_hiding(FSDP.software),
)
DEEPSPEED = replace(FSDP, name="DeepSpeed", zero=1)
DEEPSPEED_EARLY = replace(
    MEGATRON_2021,
    name="DeepSpeed before 0.6 with Megatron-LM",
    zero=3,
    grad_dtype="bf16",
    software=_hiding(ALONE, 0.0).model_copy(update={"all_reduces_gradients": True}),
)
"""DeepSpeed whose ZeRO 3 gathered weight by weight and synchronised with the device before and after each gather
(microsoft/DeepSpeed@7b46d11fa deepspeed/runtime/zero/partition_parameters.py), with reduce_scatter: false as in
BigScience's log."""


WORDS: Final[tuple[tuple[str, Framework], ...]] = (
    ("nanotron", FRAMEWORKS["nanotron-bench"]),
    ("torchtitan", FRAMEWORKS["torchtitan"]),
    ("composer|llm-?foundry|mosaicml", FRAMEWORKS["llm-foundry"]),
    ("internevo|internlm-?train", FRAMEWORKS["internevo"]),
    ("paddle(nlp|paddle)?|fleetx", FRAMEWORKS["paddlenlp"]),
    ("pax(ml)?", FRAMEWORKS["jax-toolbox-pax"]),
    ("maxtext", FRAMEWORKS["dgxc-benchmarking/MaxText/JAX"]),
    ("automodel", FRAMEWORKS["nemo-automodel"]),
    ("aleph-?alpha", FRAMEWORKS["hagemann-layouts"]),
    ("zero-?bubble", FRAMEWORKS["zero-bubble"]),
    ("megatron-?bridge", BRIDGE),
    (r"deep-?speed-zero-3-with-megatron-lm-v1|deep-?speed-v?0\.[0-5]", DEEPSPEED_EARLY),
    ("megatron-?deep-?speed|bloom", MEGATRON_DEEPSPEED),
    ("nemo", replace(NEMO, experts_share_tp=True)),
    (r"megatron(-?lm)?-?\(?v?(2019|202[012]|[123]\.[0-9.]+)\)?", MEGATRON_2021),
    ("megatron(-?lm|-?core)?|mcore|transformer-?engine", replace(MEGATRON, experts_share_tp=True)),
    ("deep-?speed", DEEPSPEED),
    ("fsdp2?|accelerate|transformers|torchtune|lit-?gpt|axolotl|llama-?factory", FSDP),
)
"""Regular expressions of whole words, special ones first, with the framework that they indicate.

Experts share tensor parallelism where an unknown source does not print their own (NVIDIA/Megatron-LM
megatron/training/arguments.py: expert_tensor_parallel_size is tensor_model_parallel_size unless given).
"""
_PATTERNS: Final = tuple((re.compile(rf"(?<![a-z])(?:{words})(?![a-z])"), framework) for words, framework in WORDS)


def framework_of(run: Run) -> Framework:
    """Determine the framework of a run.

    The order is: the framework that the record names (it also decides among several of a known source); that of a
    known source; the first that a name of the run contains; PyTorch FSDP where states are sharded as it does
    (FSDP, ZeRO 2 or 3); Megatron-LM for all others.
    """
    known = FRAMEWORKS.get(f"{run.group}/{run.parallel.noted('framework')}") or FRAMEWORKS.get(run.group)
    if known is not None and run.framework is None:
        return known
    for text in _names(run):
        for pattern, framework in _PATTERNS:
            if pattern.search(text):
                return framework
    if known is not None:
        return known
    sharded = run.parallel.fsdp or (run.parallel.zero or 0) >= 2
    return UNKNOWN_SHARDED if sharded else UNKNOWN


def _names(run: Run) -> Iterator[str]:
    """Iterate over names that may contain a framework, the most reliable first, in lower case with hyphens."""
    for text in (run.framework, run.parallel.noted("framework"), run.group, run.id, run.url, run.source):
        if isinstance(text, str):
            yield re.sub(r"[\s_]+", "-", text.lower())


def stacks_of(run: Run) -> tuple[str, ...]:
    """List the names of the constants for a run, of which the first that its hardware has counts: those of its
    framework, then, for a framework without fused kernels, those of all such frameworks."""
    plain = (PLAIN_STACK,) if framework_of(run).plain else ()
    return (stack_of(run), *plain)


def stack_of(run: Run) -> str:
    """Return the name of the constants of a run's framework, by the age of its pipeline engine and the measured
    state of its nodes. Neither is inferred from the step time."""
    framework = framework_of(run)
    if _earlier_engine(run, framework):
        return framework.earlier_engine_stack
    slow = _measured_below(run, framework.slow_calls_below_bytes_per_s)
    return framework.slow_calls_stack if slow else framework.stack


def _earlier_engine(run: Run, framework: Framework) -> bool:
    marked = framework.earlier_engine_flags & set(run.flags)
    if not marked and not _measured_below(run, framework.earlier_engine_below_bytes_per_s):
        return False
    return (run.parallel.pp or 1) > 1


def _measured_below(run: Run, limit_bytes_per_s: float) -> bool:
    """Test whether the source measured a lower bandwidth in an all-gather inside a node before the run."""
    measured = (run.hardware.measured_busbw_GBps or {}).get("allgather_intra")
    return isinstance(measured, int | float) and measured * 1e9 < limit_bytes_per_s
