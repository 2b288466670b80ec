"""What each source's framework does where its tables do not say: the assumptions, in one place.

Every value used from here is told with the run it was used for, unless the record states it itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from milpplan.specs.hardware import Software
from milpplan.specs.model import ModelSpec
from milpplan.validation.splits import ceil_split, even_split, split_by_cost

Recompute = Literal["none", "selective", "full"]
Style = Literal["llama", "gpt", "mpt", "bloom", "nemotron"]
Split = Callable[[ModelSpec, int], tuple[int, ...]]
FlopCount = Literal["causal", "full"]


CORE = Software(name="Megatron-Core with Transformer Engine")
PLAIN = Software(name="without Transformer Engine", dummy_weight_gradients=False)
ALONE = Software(
    name="without Transformer Engine; tensor-parallel collectives beside nothing",
    dummy_weight_gradients=False,
    overlap_tensor_parallel=False,
)


@dataclass(frozen=True, slots=True)
class Framework:
    """Defaults of a source's framework.

    ``flops``: attention counted as the causal half or the full matrix, in the FLOP/s and utilisation that the
    source prints. ``experts_share_tp``: experts are split by tensor parallelism unless the record says no.
    """

    name: str
    zero: int = 0
    recompute: Recompute = "none"
    sequence_parallel: bool = True
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    attention: Literal["flash", "unfused"] = "flash"
    grad_dtype: Literal["fp32", "bf16"] = "fp32"
    gpt_dropout: bool = False
    flops: FlopCount = "causal"
    experts_share_tp: bool = False
    memory: Literal["allocated", "reserved"] = "allocated"
    """What a peak memory without further words means: tensors, or all that the caching allocator took."""
    split: Split = even_split
    stack: str = ""
    """Name of the constants fitted to this framework: ``hardware/stacks`` has them by hardware."""
    kernels: tuple[tuple[str, tuple[tuple[str, float], ...]], ...] = ()
    """Fields of ``Software`` where the name of a run's attention kernel holds a word."""
    software: Software = CORE
    """Transformer Engine's buffers, and what overlaps: the defaults are those of Megatron-Core since 2024."""
    notes: tuple[str, ...] = ()
    """Differences from what is simulated that hold for every run of the source."""


MEGATRON = Framework("Megatron-LM", zero=1, split=even_split, stack="megatron-core")
NEMO = replace(
    MEGATRON,
    name="NeMo",
    stack="nemo",
    grad_dtype="bf16",
    notes=(
        "gradients are added up and reduced in bf16, as the performance recipes set (grad_reduce_in_fp32=False)",
        "overlap of tensor-parallel communication is not modelled",
    ),
)
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
    split=ceil_split,
    software=ALONE,
    notes=("DeepSpeed adds up and reduces gradients in 16 bits",),
)
FSDP = Framework("PyTorch FSDP", zero=3, sequence_parallel=False, software=ALONE)

FRAMEWORKS: dict[str, Framework] = {
    "nanotron-bench": Framework(
        "nanotron",
        stack="nanotron",
        overlap_param_gather=False,
        # The printed max_allocated does not grow with the micro-batch: its counter is reset before the optimizer.
        memory="reserved",
        split=split_by_cost,
        software=ALONE,
        notes=("time of one iteration; stages balanced by nanotron's rule (the head costs vocab * hidden)",),
    ),
    "hagemann-layouts": Framework(
        "Aleph Alpha's framework",
        stack="aleph-alpha",
        # Fitted to the same runs: a norm in single operators moves four times what the fused kernel does, and
        # flash attention 1 reaches 0.41 of the rate of version 2.
        kernels=(
            ("RMS kernel", (("norm_traffic", 1.0),)),
            ("flash_attentionv1", (("attention_efficiency", 0.41),)),
        ),
        zero=1,
        sequence_parallel=False,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        grad_dtype="bf16",
        # Fitted to where 490 runs with 128k words ran out of memory: about 22 bytes a logit, on every rank.
        software=ALONE.model_copy(update={"gathered_logits": True, "logit_kept_bytes": 20.0, "norm_traffic": 4.0}),
        notes=("ZeRO-1 as the paper says; nothing overlaps",),
    ),
    "bloom-prequel": replace(
        MEGATRON_DEEPSPEED, notes=(*MEGATRON_DEEPSPEED.notes, "ALiBi in place of learned positions")
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
        attention="flash",
        gpt_dropout=False,
    ),
    "mist-aceso": replace(MEGATRON_2021, notes=("operators of a layer recomputed one by one",)),
    "dgxc-benchmarking": replace(NEMO, experts_share_tp=True),
    "nemo-megatron-bridge": NEMO,
    "nemo-docs": NEMO,
    "nemo-launcher": replace(NEMO, flops="full"),
    "mlperf-training-v4.0": NEMO,
    "mlperf-training-v5.1": NEMO,
    "bridge-skills": NEMO,
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
    "torchtitan": replace(FSDP, name="torchtitan", stack="torchtitan", sequence_parallel=True, memory="reserved"),
    "nemo-automodel": replace(FSDP, name="NeMo AutoModel"),
    "llama3-paper": replace(FSDP, name="Meta's framework", sequence_parallel=True, zero=2),
    "internevo": replace(
        MEGATRON,
        name="InternEvo",
        stack="internevo",
        software=ALONE,
        notes=("ZeRO within groups is priced as over all replicas",),
    ),
    "flagperf": replace(
        MEGATRON,
        name="FlagPerf",
        stack="flagperf",
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        software=PLAIN,
    ),
    "paddlenlp": replace(
        MEGATRON, name="PaddleNLP", stack="", overlap_grad_reduce=False, overlap_param_gather=False, software=ALONE
    ),
}
UNKNOWN = replace(MEGATRON, name="an unknown framework, taken as Megatron-LM")


def framework_of(group: str) -> Framework:
    """The framework of a source; Megatron-LM's habits for one that is not known."""
    return FRAMEWORKS.get(group, UNKNOWN)
