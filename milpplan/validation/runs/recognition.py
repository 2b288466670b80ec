"""Framework of a run: named by the record, recognised by words in its names, or by its sharding."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from milpplan.validation.runs.frameworks import (
    BRIDGE,
    DEEPSPEED,
    FRAMEWORKS,
    FSDP,
    MEGATRON,
    MEGATRON_2021,
    MEGATRON_DEEPSPEED,
    NEMO,
    PLAIN_STACK,
    UNKNOWN,
    UNKNOWN_SHARDED,
    Framework,
)
from milpplan.validation.runs.records import Run

WORDS: Final[tuple[tuple[str, Framework], ...]] = (
    ("nanotron", FRAMEWORKS["nanotron-bench"]),
    ("torchtitan", FRAMEWORKS["torchtitan"]),
    ("composer|llm-?foundry|mosaicml", FRAMEWORKS["llm-foundry"]),
    ("internevo|internlm-?train", FRAMEWORKS["internevo"]),
    ("paddle(nlp|paddle)?|fleetx", FRAMEWORKS["paddlenlp"]),
    ("maxtext", FRAMEWORKS["dgxc-benchmarking/MaxText/JAX"]),
    ("automodel", FRAMEWORKS["nemo-automodel"]),
    ("aleph-?alpha", FRAMEWORKS["hagemann-layouts"]),
    ("zero-?bubble", FRAMEWORKS["zero-bubble"]),
    ("megatron-?bridge", BRIDGE),
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
