"""Scripts of Megatron-DeepSpeed as Megatron-LM's arguments, run under DeepSpeed's pipeline engine.

Source: bigscience-workshop/Megatron-DeepSpeed at 8387ae17, megatron/arguments.py, megatron/training.py and
megatron/model/gpt_model.py; DeepSpeed 0.19.8, runtime/pipe/engine.py and runtime/pipe/module.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from milpplan.errors import InvalidInputError
from milpplan.launchers.deepspeed.launcher import QUIET as DEEPSPEED_QUIET
from milpplan.launchers.deepspeed.launcher import known
from milpplan.launchers.megatron.flags import Values
from milpplan.launchers.records import ImportRequest
from milpplan.launchers.settings import Settings, admitted, check_priced, flat, wrong_value
from milpplan.launchers.shell import readable, script_commands, unknown_in
from milpplan.launchers.shell.launch_text import Given
from milpplan.launchers.shell.tree import how_to_decide
from milpplan.problem import read_text
from milpplan.problem.reading import parse_json, shown

QUIET: Mapping[str, str] = {
    r"codecarbon-dir|kill-switch-path|log-path|abort-on-unmet-fused-kernel-constraints|universal-checkpoint": (
        "records, checks at the start and checkpoints"
    ),
    r"(train|valid|test)-weighted-split-paths(-path)?|valid-num-workers|mmap-warmup|tokenizer-.*|"
    r"skip-train-iteration-range": ("data"),
    r"no-query-key-layer-scaling|zero-(reduce|allgather)-bucket-size|zero-contigious-gradients": (
        "a factor of the scores; sizes of buckets, which are not part of a plan"
    ),
    r"deepspeed|deepspeed-(config|activation-checkpointing)|zero-stage|pp-partition-method|pad-vocab-size-to|"
    r"position-embedding-type": "looked at below; which code recomputes does not change what is recomputed",
}
"""Patterns of the program's own flags that are not passed on, with reasons."""
_POSITIONS = {"absolute": "learned_absolute", "rotary": "rope", "alibi": "rope"}
_PARTITIONS: Mapping[str, tuple[str, ...]] = {
    "type:transformer": (),
    "type:transformer|embedding": (
        "--account-for-embedding-in-pipeline-split",
        "--account-for-loss-in-pipeline-split",
    ),
}
"""Flags of Megatron-LM that split the layers as DeepSpeed does, by its partition method.

It balances the layers of the named types; embedding and head are each one of type ``embedding``.
"""


_MEGATRONS = (
    *("--num-experts", "--use-distributed-optimizer", "--use-megatron-fsdp", "--use-torch-fsdp2"),
    *("--overlap-grad-reduce", "--overlap-param-gather", "--context-parallel-size"),
    *("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"),
)
"""Flags for parts of Megatron-LM that DeepSpeed's engine has in other ways, or not. One expert or rank is none."""


def from_megatron_deepspeed(read: Given, request: ImportRequest) -> Given:
    """Write the arguments of Megatron-DeepSpeed as Megatron-LM's.

    Its engine runs 1F1B, reduces gradients after the last backward pass, and shards as the configuration says that
    the script writes or names. The attention has no flash kernel unless a flag asks for it.

    Raises:
        InvalidInputError: a value is not decided or not priced, or the two configurations contradict each other.
    """
    pairs = [(name if unknown_in(name) else name.replace("_", "-"), values) for name, values in read.pairs]
    pairs = [pair for pair in pairs if not (pair[0] in _MEGATRONS and pair[1] == ("1",))]
    given = dict(pairs)
    foreign = next((flag for flag in _MEGATRONS if flag in given), None)
    if foreign is not None:
        raise _strange(foreign, " ".join(given[foreign]) or True, "none with --deepspeed, whose engine is another")
    notes = ["The run is DeepSpeed's: 1F1B, and gradients are reduced after the last backward pass."]
    stage = _sharding(given, request)
    positions = _word(given, "--position-embedding-type", "absolute")
    if positions not in _POSITIONS:
        raise _strange("--position-embedding-type", positions, f"one of {', '.join(_POSITIONS)}")
    if positions == "alibi":
        notes.append("alibi is priced as rotary positions: the product that makes the scores adds its bias.")
    added: list[tuple[str, Values]] = [
        ("--position-embedding-type", (_POSITIONS[positions],)),
        ("--attention-backend", ("flash" if "--use-flash-attn" in given else "unfused",)),
        *((flag, ()) for flag in _partition(given)),
    ]
    if stage == 1:
        added.append(("--use-distributed-optimizer", ()))
    if "--pad-vocab-size-to" in given:
        added.append(("--vocab-size", (str(_padded(given)),)))
    kept = [pair for pair in pairs if not any(re.fullmatch(names, pair[0].lstrip("-")) for names in QUIET)]
    return replace(read, pairs=(*kept, *added), notes=(*read.notes, *notes))


def _sharding(given: Mapping[str, Values], request: ImportRequest) -> int:
    """Read DeepSpeed's configuration and return its stage.

    Raises:
        InvalidInputError: it contradicts the arguments, or has settings that change the cost and are not priced.
    """
    settings, _ = admitted(_configuration(given, request), known(), (), "DeepSpeed", DEEPSPEED_QUIET)
    stage = settings.number("zero_optimization.stage")
    if stage not in (0, 1):
        raise _strange("zero_optimization.stage", stage, "0 or 1: the pipeline engine has no other")
    if settings.get("bf16.enabled") or "--bf16" in given:
        raise _strange(
            "bf16",
            True,
            "fp16: in bf16 the pipeline engine all-reduces gradients in fp32 before a sharded update "
            "(BF16_Optimizer), which is not priced",
        )
    said: dict[str, object] = {
        "zero_optimization.stage": _number(given, "--zero-stage"),
        "train_micro_batch_size_per_gpu": _number(given, "--micro-batch-size"),
        "train_batch_size": _number(given, "--global-batch-size"),
        "fp16.enabled": "--fp16" in given,
    }
    _check_agreement(settings, said)
    for name in ("zero_optimization.overlap_comm", "gradient_accumulation_steps"):
        # The pipeline engine overlaps nothing, and counts the micro-batches itself.
        settings.get(name)
    check_priced(settings, DEEPSPEED_QUIET)
    return stage


def _check_agreement(settings: Settings, said: Mapping[str, object]) -> None:
    """Refuse a configuration with other values than the arguments have; None: the arguments have none.

    Raises:
        InvalidInputError: names both values.
    """
    for name, value in said.items():
        configured = settings.get(name)
        if value is not None and configured is not None and configured != value:
            raise InvalidInputError(
                f"{name} is {shown(configured)} in DeepSpeed's configuration, {shown(value)} in the arguments.",
                "Expected the two to agree.",
                "Correct the one that is wrong.",
            )


def _configuration(given: Mapping[str, Values], request: ImportRequest) -> dict[str, object]:
    """Read the configuration that the script writes with ``cat``, or that lies beside it.

    Raises:
        InvalidInputError: it is not found, is written in several ways, or has undecided values.
    """
    name = " ".join(given.get("--deepspeed-config", ()))
    commands = script_commands(request.text, request.source)
    texts = list(
        {command.written[1]: None for command in commands if command.written and command.written[0] == name}
    )
    path = Path(request.source).parent / name if name and not unknown_in(name) else None
    if not texts and path is not None and path.is_file():
        texts = [read_text(path)]
    if len(texts) != 1:
        raise InvalidInputError(
            f"{request.source} names the configuration of DeepSpeed {shown(readable(name))}, which is "
            + ("written in several ways." if texts else "not found."),
            "Expected it in a here document of the script (cat), or beside the script.",
            "Write it there." if not texts else "Decide which of them is used (--set NAME=VALUE).",
        )
    if unknown_in(texts[0]):
        raise InvalidInputError(
            f"The configuration of DeepSpeed in {request.source} has {', '.join(unknown_in(texts[0]))}, which the "
            "script does not decide.",
            "Expected values.",
            how_to_decide(texts),
        )
    return flat(parse_json(texts[0], readable(name)))


def _partition(given: Mapping[str, Values]) -> tuple[str, ...]:
    """Return the flags of Megatron-LM that place the layers as DeepSpeed does.

    Raises:
        InvalidInputError: the method is another, or stages are not equally full.
    """
    method = _word(given, "--pp-partition-method", "type:transformer")
    if method not in _PARTITIONS:
        raise _strange("--pp-partition-method", method, f"one of {', '.join(_PARTITIONS)}")
    flags = _PARTITIONS[method]
    layers, pp = _number(given, "--num-layers"), _number(given, "--pipeline-model-parallel-size") or 1
    if pp == 1 or layers is None:
        return ()
    if (layers + len(flags)) % pp:
        raise _strange("--num-layers", layers, f"layers that {method} divides evenly into {pp} stages")
    return flags


def _padded(given: Mapping[str, Values]) -> int:
    """Return the padded vocabulary.

    Raises:
        InvalidInputError: what is priced would pad it further.
    """
    size, tp = _number(given, "--pad-vocab-size-to"), _number(given, "--tensor-model-parallel-size") or 1
    if size is None or size % (128 * tp):
        raise _strange("--pad-vocab-size-to", size, f"a multiple of 128 * {tp}, which the priced vocabulary is")
    return size


def _word(given: Mapping[str, Values], flag: str, otherwise: str) -> str:
    """Return the only value of a flag.

    Raises:
        InvalidInputError: the script does not decide it.
    """
    value = " ".join(given.get(flag, (otherwise,)))
    if unknown_in(value):
        raise InvalidInputError(
            f"{flag} is {readable(value)}, which the file does not decide.",
            "Expected a value that the file says.",
            how_to_decide((value,)),
        )
    return value


def _number(given: Mapping[str, Values], flag: str) -> int | None:
    """Return the only value of a flag as a whole number; None: it is missing, or is none."""
    value = _word(given, flag, "")
    return int(value) if re.fullmatch(r"[0-9]{1,9}", value) else None


_strange = partial(wrong_value, purpose=" to compare it as such a run")
