"""Flags of Megatron-LM that have no effect on a plan's time and memory.

Any other flag that a reader does not look up is refused unless it has its default value, because it may change
time or memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from milpplan.launchers.arguments import Arguments
from milpplan.launchers.megatron.flags import megatron_flags

QUIET: dict[str, tuple[str, ...]] = {
    "data and tokenizers: what is read, not how much is computed": (
        r"(train-|valid-|test-)?data-path|per-split-data.*|per-dataset.*|data-args-path|data-cache-path|split",
        r"mock-data|dataloader-.*|num-workers|num-dataset-builder-threads|no-mmap-bin-files|object-storage.*",
        r"mid-level-dataset-surplus|reset-(position-ids|attention-mask)|eod-mask-loss|fim-.*|sample-rate",
        r"no-create-attention-mask-in-dataloader|phase-transition-iterations|allow-ambiguous-pad-tokens|enable-msc",
        r"tokenizer-.*|no-tokenizer-.*|vocab-file|merge-file|tiktoken-.*|null-tokenizer-.*|trust-remote-code",
        r"chat-template|special-tokens|no-use-tokenizer-model-from-checkpoint-args|use-gigatoken|disable-msc",
        r"data-impl",
    ),
    "learning: rates, decay, initial values, seeds": (
        r"lr|lr-.*|min-lr|decoupled-.*lr|warmup|weight-decay.*|start-weight-decay|end-weight-decay|adam-.*",
        r"sgd-momentum|clip-grad|.*opt_param-scheduler|init-method.*|embedding-init-method-std|seed|train-iters",
        r"train-samples|exit-.*|norm-epsilon|apply-layernorm-1p|data-parallel-random-init|loss-scale.*|hysteresis",
        r"initial-loss-scale|min-loss-scale|attention-softmax-in-fp32|iterations-to-skip|apply-wd-to-qk-layernorm",
        r"use-cpu-initialization|no-initialization|init-model-with-meta-device|no-weight-decay-cond-type",
    ),
    "the router's choices and losses, which an even load does not see; its fused kernels are what is priced": (
        r"moe-aux-loss-coeff|moe-z-loss-coeff|moe-router-(load-balancing-type|num-groups|group-topk|pre-softmax)",
        r"moe-router-(topk-scaling-factor|score-function|dtype|enable-expert-bias|bias-update-rate|fusion)",
        r"moe-router-force-load-balancing|moe-input-jitter-eps|moe-permute-fusion",
        r"moe-per-layer-logging|moe-token-drop-policy|moe-flex-dispatcher-backend|moe-enable-deepep",
    ),
    "rotary angles and functions of the same cost": (
        r"rotary-.*|use-rotary-position-embeddings|use-rope-scaling|rope-.*|mscale.*|yarn-.*|no-yarn.*",
        r"openai-gelu|glu-linear-offset|activation-func-clamp-value|squared-relu|no-position-embedding",
        r"no-masked-softmax-fusion",
    ),
    "checkpoints, evaluation, logs, profiles and faults: not in a step of training": (
        r"save.*|load|load-main-params.*|ckpt-.*|no-ckpt.*|no-(save|load)-.*|async-.*|dist-ckpt-.*|use-dist-ckpt",
        r"finetune|pretrained-checkpoint|use-checkpoint-args|use-persistent-ckpt-worker|auto-detect-ckpt-format",
        r"non-persistent-.*|override-ckpt-iteration|exit-on-missing-checkpoint|replication.*|verify-integrity",
        r"distrib-optim-fully-reshardable.*|no-strict-fsdp-dtensor-load|use-mp-args-from-checkpoint-args",
        r"eval-.*|start-eval-at-iter|skip-train|test-mode|full-validation|multiple-validation-sets|validation.*",
        r"log-.*|logging-level|tensorboard-.*|wandb-.*|timing-.*|no-log-.*|no-barrier-with-level-1-timing|otel-.*",
        r"profile.*|use-pytorch-profiler|pytorch-profiler-.*|record-.*|memory-snapshot-path|nvtx-ranges",
        r"no-one-logger|one-logger-.*|app-tag-.*|straggler-.*|disable-straggler-on-startup|manual-gc.*|no-manual-gc.*",
        r"no-check-for-nan-in-loss-and-grad|check-for-.*|rerun-mode|error-injection-.*|fault-injector-.*",
        r"config-logger-dir|inprocess-.*|enable-ft-package|calc-ft-timeouts|ft-.*|adlr-.*|check-weight-hash.*",
        r"result-rejected.*",
    ),
    "how processes find each other, and sizes of buckets, which are not part of a plan": (
        r"distributed-(backend|timeout.*)|local-rank|lazy-mpu-init|flight-recorder-.*|no-flight-recorder-.*",
        r"disable-gloo-process-groups|nccl-communicator-config-path|use-mcore-models|high-priority-stream-groups",
        r"tp-comm-bootstrap-backend|tp-comm-overlap-cfg|no-align-.*|ddp-(num-buckets|bucket-size|pad-buckets.*)",
        r"ddp-average-in-collective|te-rng-tracker|inference-rng-tracker|calculate-per-token-loss|enable-experimental",
        r"fp8-(amax-.*|margin|interval)|flash-attention-version|use-flash-attn|empty-unused-memory-level",
    ),
}
"""Patterns of flags without effect on the cost, by reason."""
_QUIET = {reason: re.compile("|".join(patterns)) for reason, patterns in QUIET.items()}

PROGRAMS = ("pretrain_gpt.py", "pretrain_gpt_core.py", "pretrain_gpt2.py")
"""Megatron-LM's programs, current and older, that train the GPT which the arguments describe."""
OTHERS: dict[str, str] = {
    "pretrain_bert": "a BERT: an encoder with two losses and a head of its own",
    "pretrain_t5": "a T5: an encoder and a decoder",
    "pretrain_mamba": "a hybrid with Mamba layers",
    "pretrain_hybrid": "a hybrid with Mamba layers",
    "pretrain_retro": "a GPT that retrieves: chunked cross-attention to an encoder",
    "pretrain_vlm": "a vision-language model: an image encoder before the decoder",
    "pretrain_mimo": "a multimodal model: encoders before the decoder",
    "pretrain_vision": "a vision model",
    "pretrain_ict": "two encoders that are compared",
    "pretrain_realm": "a retriever",
    "train_rl": "reinforcement learning, with rollouts between its steps",
    "finetune_retriever": "a retriever",
}
"""Models that Megatron-LM's other programs train, by prefix of the program's name."""


def is_quiet(flag: str) -> bool:
    """Test whether a flag has no effect on the cost."""
    return reason_to_be_quiet(flag) is not None


def reason_to_be_quiet(flag: str) -> str | None:
    """Return the reason why a flag has no effect on the cost; None: it may have one."""
    name = flag.removeprefix("--")
    return next((reason for reason, names in _QUIET.items() if names.fullmatch(name)), None)


def other_model(program: str) -> str | None:
    """Return the model of a known program that does not train a GPT."""
    return next((what for name, what in OTHERS.items() if program.startswith(name)), None)


def unpriced(given: Arguments, ignored: Iterable[str] = ()) -> tuple[str, ...]:
    """List given flags, with values, that no reader looked up, may change the cost, and differ from their
    defaults."""
    flags = megatron_flags()
    left = []
    for name, values in given.values.items():
        if name in given.looked_at or is_quiet(name) or name in ignored:
            continue
        if values and " ".join(values) == flags[name].default:
            continue
        left.append(" ".join((name, *values)))
    return tuple(left)
