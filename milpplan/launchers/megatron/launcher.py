"""Launcher Megatron-LM, export and import: ``torchrun`` with arguments, checked against its parser and rules.

Some flags have no effect on a plan's time and memory. Any other flag that the reader does not look up is refused
unless it has its default value, because it may change time or memory.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.launchers import Imported, ImportRequest, Launch
from milpplan.launchers.expressible import check_replicas, model_differences
from milpplan.launchers.megatron.flags import COMMIT, Arguments, Values, checked, megatron_flags, model_of
from milpplan.launchers.megatron.gpt_neox import from_neox
from milpplan.launchers.megatron.megatron_deepspeed import from_megatron_deepspeed
from milpplan.launchers.megatron.plan_arguments import (
    check_engine,
    check_problem,
    for_version,
    job_of,
    megatron_launch,
    plan_of,
    software_of,
)
from milpplan.launchers.megatron.programs import from_other_script, from_primus
from milpplan.launchers.megatron.rules import MEGATRON, check_environment, check_rules, sizes_of
from milpplan.launchers.records import aligned
from milpplan.launchers.scripts import arguments_script, defaults
from milpplan.launchers.shell import is_mark, readable, unknown_in
from milpplan.launchers.shell.launch_text import Given, from_script, from_yaml, load_yaml
from milpplan.launchers.shell.tree import how_to_decide
from milpplan.problem import ModelSpec, Plan, Problem
from milpplan.problem.reading import shown

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
        r"mtp-loss-scaling-factor|muon-(momentum|nesterov|scale-mode|coefficient-type|extra-scale-factor)",
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
        r"finetune|pretrained-checkpoint|use-persistent-ckpt-worker|auto-detect-ckpt-format",
        r"non-persistent-.*|override-ckpt-iteration|exit-on-missing-checkpoint|replication.*|verify-integrity",
        r"distrib-optim-fully-reshardable.*|no-strict-fsdp-dtensor-load",
        r"eval-.*|start-eval-at-iter|skip-train|test-mode|full-validation|multiple-validation-sets|validation.*",
        r"log-(?!params-norm|num-zeros|max-attention).*|logging-level|tensorboard-.*|wandb-.*|timing-log-option|no-log-.*|no-barrier-with-level-1-timing|otel-.*",
        r"profile.*|use-pytorch-profiler|pytorch-profiler-.*|record-.*|memory-snapshot-path|nvtx-ranges",
        r"no-one-logger|one-logger-.*|app-tag-.*|straggler-.*|disable-straggler-on-startup|manual-gc.*|no-manual-gc.*",
        r"no-check-for-nan-in-loss-and-grad|check-for-.*|error-injection-.*|fault-injector-.*",
        r"config-logger-dir|inprocess-.*|enable-ft-package|calc-ft-timeouts|ft-.*|adlr-.*|check-weight-hash.*",
        r"result-rejected.*",
    ),
    "how processes find each other, and sizes of buckets, which are not part of a plan": (
        r"distributed-timeout.*|local-rank|lazy-mpu-init|flight-recorder-.*|no-flight-recorder-.*",
        r"disable-gloo-process-groups|nccl-communicator-config-path|use-mcore-models|high-priority-stream-groups",
        r"tp-comm-bootstrap-backend|tp-comm-overlap-cfg|no-align-.*|ddp-(num-buckets|bucket-size|pad-buckets.*)",
        r"ddp-average-in-collective|te-rng-tracker|inference-rng-tracker|calculate-per-token-loss|enable-experimental",
        r"fp8-(amax-.*|margin|interval)|flash-attention-version|use-flash-attn",
    ),
    "acts in Model Optimizer's builder, which other flags choose (model_provider.py:55)": (
        r"export-force-local-attention|enable-gpt-oss",
    ),
}
"""Patterns of flags without effect on the cost, by reason."""
_QUIET = {reason: re.compile("|".join(patterns)) for reason, patterns in QUIET.items()}

QUIET_VALUES = {"--rerun-mode": ("disabled", "validate_results"), "--DDP-impl": ("local",)}
"""Values without effect on the cost, of flags with other values that have one.

Megatron-LM's own reduction (``local``) was once a choice beside PyTorch's, and is the only one today.
"""

UNCOUNTED: dict[str, str] = {
    "--embed-layernorm": "a norm after the embedding, one of 2 L + 2 norms of L layers, with 2 h parameters",
}
"""Flags of a cost far under a hundredth of a step, which is not counted; a note says so."""

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
    "main_ppo": "a policy by reinforcement learning with verl, with rollouts between its steps",
    "verl.trainer": "a policy by reinforcement learning with verl, with rollouts between its steps",
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


def _is_quiet_value(flag: str, values: Sequence[str]) -> bool:
    """Test whether a flag has no effect on the cost, by its name or with this value."""
    return is_quiet(flag) or " ".join(values) in QUIET_VALUES.get(flag, ())


def unpriced(given: Arguments) -> tuple[str, ...]:
    """List given flags, with values, that no reader looked up, may change the cost, and differ from their
    defaults."""
    flags = megatron_flags()
    left = []
    for name, values in given.values.items():
        if name in given.looked_at or _is_quiet_value(name, values):
            continue
        if values and " ".join(values) == flags[name].default:
            continue
        left.append(" ".join((name, *values)))
    return tuple(left)


def imported(request: ImportRequest) -> Imported:
    """Read a launch into a problem and a plan.

    Args:
        request.text: a shell script, a command line, or a YAML of arguments.
        request.source: its name; .yaml and .yml are read as YAML.
        request.hardware: the cluster.
        request.num_gpus: processes; None: the text states them.
        request.vocab_size: the vocabulary, where only a tokenizer knows it.
        request.model: the model's description, if there is one; its sizes must be those of the arguments.
        request.ignored: flags whose effect on the cost the caller ignores.

    Raises:
        InvalidInputError: the text cannot be read, or has flags that change the cost and are not priced.
        IllegalPlanError: Megatron-LM would refuse the arguments.
    """
    if request.source.lower().endswith((".yaml", ".yml")):
        data = load_yaml(request.text, request.source, "megatron")
        read = _from_yaml(data, request)
    else:
        read = from_other_script(request) or _with_stated(_from_script(request), request)
    if read.ignored:
        request = replace(request, ignored=())
    return imported_from(read, request)


def _from_yaml(data: dict[str, Any], request: ImportRequest) -> Given:
    """Read a YAML of Megatron-LM's arguments, or of a program that has other names for them."""
    names = {str(name).replace("-", "_") for name in data}
    if {"modules", "workspace"} <= names:
        return from_primus(data, request)
    if "pipe_parallel_size" in names:
        return from_neox(data, request)
    return _with_stated(from_yaml(data, request.source), request)


def _from_script(request: ImportRequest) -> Given:
    """Read a script that starts Megatron-LM's own programs."""
    read = from_script(request.text, request.source, {*PROGRAMS, *map(_program_of, request.ignored)})
    _check_program(read.program, request.source, request.ignored)
    if any(name == "--deepspeed" for name, _ in read.pairs):
        read = from_megatron_deepspeed(read, request)
    if not re.search(rf"^\s*(?:export\s+)?{_BLOCKING}=[\"']?1", request.text, re.MULTILINE):
        return read
    if _BLOCKING not in request.ignored:
        raise InvalidInputError(
            f"{request.source} sets {_BLOCKING}=1.",
            "Expected it unset: the host then waits for the end of every kernel, which is not priced.",
            f"Take it out, or accept not to see what it costs: --ignore {_BLOCKING}.",
        )
    # An ignored flag, so that the answer names it.
    return replace(read, pairs=(*read.pairs, (_spelled(_BLOCKING), ("1",))))


_BLOCKING = "CUDA_LAUNCH_BLOCKING"


def _with_stated(read: Given, request: ImportRequest) -> Given:
    """Append what options state; the last occurrence of a flag counts."""
    stated = [(f"--{name.replace('_', '-')}", (str(value),)) for name, value in request.given.items()]
    return replace(read, pairs=(*read.pairs, *stated))


def imported_from(read: Given, request: ImportRequest) -> Imported:
    """Import arguments that have already been read from a file.

    Raises:
        InvalidInputError: flags change the cost and are not priced.
        IllegalPlanError: Megatron-LM would refuse the arguments.
    """
    world = _world(read, request.num_gpus, request.source)
    names = frozenset(map(_spelled, request.ignored))
    pairs = _resolved(read, request.source, names)
    priced = [(name, values) for name, values in pairs if name not in names and name not in UNCOUNTED]
    asked, old = _of_today(priced)
    written = dict(pairs).keys() - names
    old |= {name: f"{name} is not counted: {what}." for name, what in UNCOUNTED.items() if name in written}
    left_out = [readable(" ".join((name, *values))) for name, values in pairs if name in names]
    _check_names(read, request.ignored)
    if read.program in map(_program_of, request.ignored) and read.program not in PROGRAMS:
        left_out.insert(0, f"{read.program} is taken as a program that trains the GPT of its arguments")
    # Unknown flags tell more than values that a fork of the program accepts.
    strange = [(name, *values) for name, *values in _unknown(asked) if not _is_quiet_value(name, values)]
    _check_known([readable(" ".join(flag)) for flag in strange], request.source)
    given, flags = checked(asked, request.source)
    unknown = tuple(map(readable, flags))
    check_rules(given, world, "Correct the arguments, or the number of GPUs (--gpus).")
    built = model_of(
        given,
        "imported",
        request.model.vocab_size if request.model and not request.vocab_size else request.vocab_size,
        read.parts,
    )
    if request.model is not None:
        built = _same_model(request.model, built)
    job = job_of(given, world)
    plan = plan_of(given, world, built, job)
    there, notes = software_of(given, request.hardware, built, sizes_of(given, world).ep)
    if given.given("--fp16"):
        notes.append("fp16 is priced as bf16; the scaling of the loss and its checks are not counted.")
    check_engine(job.precision, there.accelerator)
    notes += _padding(given, built.vocab_size)
    _check_priced(given)
    problem = Problem(model=built, hardware=there, job=job)
    if read.world and read.world != world:
        notes.append(f"The file starts {read.world} processes where nothing else is set; {world} are taken.")
    left_out += read.ignored
    result = Imported(problem, plan, unknown, tuple(left_out), (*read.notes, *notes, *old.values()))
    return aligned(result, read.alignment)


def _world(read: Given, num_gpus: int | None, source: str) -> int:
    world = num_gpus or read.world
    if not world:
        raise InvalidInputError(
            f"{source} does not say how many processes it starts.",
            "Expected torchrun --nnodes N --nproc-per-node M, or #SBATCH --nodes and --gpus-per-node.",
            "Give --gpus.",
        )
    return world


def _program_of(name: str) -> str:
    """Return the program that an entry of ``--ignore`` names."""
    return name.rsplit("/", 1)[-1]


def _check_program(program: str, source: str, ignored: Collection[str]) -> None:
    """Refuse programs that are not known to train the model of the arguments.

    Raises:
        InvalidInputError: the program trains another model, or is unknown.
    """
    other = next((what for name, what in OTHERS.items() if program.startswith(name)), None)
    if other is not None:
        raise InvalidInputError(
            f"{source} starts {shown(program)}, which trains {other}.",
            f"Expected a program that trains the GPT of its arguments, such as {PROGRAMS[0]}.",
            "Import a script of one: such models are not priced yet.",
        )
    if program and program not in (*PROGRAMS, *map(_program_of, ignored)):
        raise InvalidInputError(
            f"{source} starts {shown(program)}, which is not known here: the program decides the model.",
            f"Expected one of {', '.join(PROGRAMS)}.",
            f"If it trains the GPT of its arguments, say so: --ignore {program}.",
        )


def _spelled(name: str) -> str:
    """Return the first spelling of a flag."""
    spelled = f"--{name.lstrip('-').replace('_', '-')}"
    return megatron_flags()[spelled].name if spelled in megatron_flags() else spelled


def _check_names(read: Given, ignored: Collection[str]) -> None:
    """Refuse ignored names that are neither in the file nor the launcher's: they are misspelt."""
    there = {_spelled(name) for name, _ in read.pairs} | {read.program}
    for name in ignored:
        if not {_spelled(name), _program_of(name)} & there and _spelled(name) not in megatron_flags():
            raise InvalidInputError(
                f"--ignore {shown(name)} is no argument in the file, nor one of Megatron-LM.",
                "Expected a flag, or the program that the file starts.",
                "Check it.",
            )


def _resolved(read: Given, source: str, ignored: frozenset[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Replace flags by their first spellings. Unknown values are accepted only in flags without effect on the
    cost.

    Raises:
        InvalidInputError: an unknown value may change the cost, or words belong to no flag.
    """
    pairs: list[tuple[str, tuple[str, ...]]] = []
    stray = list(read.stray)
    for written, values in read.pairs:
        name = written if unknown_in(written) else _spelled(written)
        flag = megatron_flags().get(name)
        unknown = [part for value in (written, *values) for part in unknown_in(value)]
        if not unknown or name in ignored or (flag is None and not unknown_in(written)):
            pairs.append((name, values))
        elif flag is not None and flag.kind != "value" and all(is_mark(value) for value in values):
            pairs.append((name, ()))
            stray += values
        elif is_quiet(name) and not unknown_in(written):
            # The parser of this reader could not check a number or a choice that only the shell knows.
            checks = flag is not None and (flag.type != "str" or bool(flag.choices))
            pairs += [] if checks else [(name, values)]
        else:
            raise InvalidInputError(
                f"{source}: {readable(written)} is {', '.join(unknown)}, which the file does not decide.",
                "Expected a value that the file says.",
                how_to_decide((written, *values)),
            )
    if stray:
        raise InvalidInputError(
            f"{source}: the training command has {', '.join(readable(word) for word in stray[:6])}, which "
            + ("the file does not decide." if any(map(unknown_in, stray)) else "belongs to no flag."),
            "Expected flags and their values: what is not known may be any of them.",
            how_to_decide(stray) if any(map(unknown_in, stray)) else "Take the words out.",
        )
    return pairs


OLD_FULL = "--checkpoint-activations"


def _unknown(pairs: Iterable[tuple[str, Values]]) -> list[Values]:
    """List the flags, with their values, that the launcher's parser does not have."""
    return [(name, *values) for name, values in pairs if name not in megatron_flags()]


def _of_today(
    pairs: list[tuple[str, Values]],
) -> tuple[list[tuple[str, Values]], dict[str, str]]:
    """Translate arguments of 2021 into current ones, with a note for each.

    Raises:
        InvalidInputError: they contradict current arguments.
    """
    if OLD_FULL not in dict(pairs):
        return pairs, {}
    today = [name for name, _ in pairs if name.startswith("--recompute-")]
    if today:
        raise InvalidInputError(
            f"{OLD_FULL} is given together with {today[0]}.",
            "Expected one of them: the first is of 2021, and today's parser refuses it.",
            f"Leave {OLD_FULL} out.",
        )
    notes = {
        OLD_FULL: f"{OLD_FULL} is read as in Megatron-LM of 2021, full recomputation of every layer; today's "
        "parser refuses it."
    }
    # Number of layers per kept input; only 1 is supported.
    chunk = ("--checkpoint-num-layers", ("1",))
    if chunk in pairs:
        notes[chunk[0]] = f"{chunk[0]} 1: the input of every layer is kept."
    current = [
        ("--recompute-granularity", ("full",)),
        ("--recompute-method", ("uniform",)),
        ("--recompute-num-layers", ("1",)),
    ]
    return [pair for pair in pairs if pair[0] != OLD_FULL and pair != chunk] + current, notes


def _check_known(unknown: Collection[str], source: str) -> None:
    """Refuse flags that the launcher's parser does not have: their effect is unknown.

    Raises:
        InvalidInputError: names the flags.
    """
    if unknown:
        first = next(iter(unknown)).split()[0]
        raise InvalidInputError(
            f"{source} has {len(unknown)} flag(s) that Megatron-LM does not have (at {COMMIT}): "
            f"{', '.join(list(unknown)[:12])}.",
            "Expected its own: what others do to the cost is not known.",
            f"Take them out, or accept not to see what they cost: --ignore {first.lstrip('-')} (repeatable).",
        )


_DIVISOR = "--make-vocab-size-divisible-by"


def _padding(given: Arguments, vocab_size: int) -> list[str]:
    """Accept a divisor of the vocabulary that makes the rows that are priced, within a thousandth; note others."""
    if _DIVISOR not in given.values:
        return []
    tp, default = given.needed("--tensor-model-parallel-size"), megatron_flags()[_DIVISOR].default
    sizes = [max(int(text), 1) * tp for text in (given.values[_DIVISOR][0], default or "128")]
    rows, priced = (-(-vocab_size // size) * size for size in sizes)
    if abs(rows - priced) * 1000 > priced:
        return []
    given.looked_at.add(_DIVISOR)
    return [] if rows == priced else [f"{_DIVISOR} makes {rows:,} rows of the vocabulary; {priced:,} are priced."]


def _check_priced(given: Arguments) -> None:
    left = unpriced(given)
    if left:
        shown_flags = ", ".join(left[:12]) + (f" and {len(left) - 12} more" if len(left) > 12 else "")
        raise InvalidInputError(
            f"{len(left)} flag(s) may change the cost in ways that are not priced: {shown_flags}.",
            "Expected flags that a plan or a model has, or that change neither time nor memory.",
            "Take them out, or accept not to see what they cost: "
            f"--ignore {left[0].split()[0].lstrip('-')} (repeatable).",
        )


def _same_model(model: ModelSpec, built: ModelSpec) -> ModelSpec:
    """Return the described model, if the arguments build it."""
    different = model_differences(model, built)
    if different:
        raise InvalidInputError(
            f"The arguments build another model than {model.name}: {', '.join(different)} differ.",
            f"Expected its sizes; of {different[0]} the arguments have {shown(getattr(built, different[0]))}.",
            "Correct the arguments, or leave --model out.",
        )
    return model


TRAINING = (
    ("--train-iters", "100"),
    ("--lr", "1.0e-4"),
    ("--min-lr", "1.0e-5"),
    ("--lr-decay-style", "cosine"),
    ("--weight-decay", "0.1"),
    ("--clip-grad", "1.0"),
    ("--log-interval", "1"),
    ("--eval-iters", "0"),
    ("--distributed-timeout-minutes", "60"),
)
"""Training arguments that a run needs and a plan does not decide."""
SCRIPT = "megatron.sh"


class Megatron:
    """Launcher Megatron-LM: command-line arguments of ``pretrain_gpt.py``."""

    capability = MEGATRON

    def check(self, problem: Problem, version: str) -> None:
        """Refuse a problem for which Megatron-LM can run no plan.

        Raises:
            IllegalPlanError: Megatron-LM cannot build the model, or does not support such a job or cluster.
        """
        check_problem(problem, version)

    def export(self, problem: Problem, plan: Plan, version: str) -> Launch:
        """Turn a plan into a launch.

        Raises:
            IllegalPlanError: Megatron-LM cannot express the plan or would refuse it.
        """
        check_replicas(MEGATRON, plan)
        launch = for_version(megatron_launch(problem, plan, version))
        _, unknown = checked(launch.arguments.values.items(), "the export")
        if unknown:
            raise IllegalPlanError(
                f"Megatron-LM {version} has no argument {unknown[0]}.",
                "Expected arguments of its parser.",
                "Choose another --target-version.",
            )
        fix = "Fix the degree that it names in the next solve (--fix NAME=VALUE)."
        check_rules(launch.arguments, launch.num_gpus, fix)
        check_environment(launch.arguments, launch.environment)
        return launch

    def files(self, launch: Launch, version: str) -> dict[str, str]:
        """Write the launch as files by name; the first is enough to start the run. ``version`` is milpplan's."""
        return {
            SCRIPT: torchrun_script(launch, version),
        }

    def read(self, request: ImportRequest) -> Imported:
        """Read a launch script or an argument file into a problem and a plan."""
        return imported(request)


def torchrun_script(launch: Launch, version: str) -> str:
    """Write the script that every node runs; on one node it is enough by itself. ``version`` is milpplan's."""
    before = ("# Where Megatron-LM is, and where this node is.", *defaults(MEGATRON_DIR="."))
    fixed: dict[str, dict[str, Values]] = {
        "TRAINING_ARGS": {flag: (value,) for flag, value in TRAINING},
        "DATA_ARGS": {"--mock-data": (), "--tokenizer-type": ("NullTokenizer",)},
    }
    return arguments_script(launch, version, before, '"$MEGATRON_DIR/pretrain_gpt.py"', fixed, _written)


def _written(flag: str, values: Values) -> str:
    return " ".join((flag, *map(shlex.quote, values)))
