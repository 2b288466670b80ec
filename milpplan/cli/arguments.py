"""Words of the command line as a problem, and checks of plan files; mistakes are an ``InvalidInputError``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from pydantic import ValidationError

from milpplan.cli.command import choice, count_or_range, missing, positive, record, whole
from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.optimize import fixed
from milpplan.optimize.space.enumerate_layouts import broken_rules
from milpplan.problem import (
    EXPERT_DISPATCHES,
    RANK_ORDERS,
    SCHEDULES,
    TP_OVERLAPS,
    HardwareSpec,
    Images,
    Job,
    Layout,
    ModelSpec,
    NodeGroup,
    Plan,
    Problem,
    Range,
    Schedule,
    Space,
    hardware_names,
    load_hardware,
    load_model,
    model_names,
)
from milpplan.problem.hardware import MAX_NODE_TYPES, PRECISIONS
from milpplan.problem.problem import (
    FROZEN_PARTS,
    MAX_BATCH,
    MAX_GPUS,
    MAX_MARGIN,
    MAX_SEQUENCE,
    METHODS,
    MIXINGS,
    MUON_TP_MODES,
    NOT_LISTS,
    OPTIMIZERS,
    REFERENCES,
    SCORE_METHODS,
    SPACES,
)
from milpplan.problem.reading import plain_reason, shown
from milpplan.simulation.layout_columns import SWITCHES, WORDS
from milpplan.simulation.simulator import check_plan
from milpplan.units import GIB, HOURS_PER_DAY, SECONDS_PER_HOUR, counted

MAX_CANDIDATES: Final = 4_096
"""Maximum of combinations of a number of GPUs and a batch in one problem."""
MAX_WORK_ITEMS: Final = 33_554_432
"""Maximum of virtual stages x micro-batches of a plan file that is simulated (a few GiB)."""
MAX_DIGITS: Final = 9
_GROUP: Final = re.compile(rf"(?P<name>.+):(?P<gpus>[0-9]{{1,{MAX_DIGITS}}})")
ALL_LINEAR: Final = "all-linear"
"""Word of Hugging Face PEFT for all matrices of the layers."""
OBJECTIVES: Final = ("step_time_per_token", "num_gpus", "gpu_hours")

_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_FIXABLE = tuple(name for name in Space.model_fields if name not in NOT_LISTS)


def assignments(text: str, option: str, known: tuple[str, ...]) -> dict[str, object]:
    """Read ``tp=8,pp=4`` as a mapping from fields of a layout to values."""
    values: dict[str, object] = {}
    for part in text.split(","):
        name, equals, word = (piece.strip() for piece in part.partition("="))
        if not equals or not word:
            raise InvalidInputError(
                f"{option} {shown(text)} has no value for {shown(part.strip())}.",
                "Expected NAME=VALUE, several separated by commas, such as tp=8,pp=4.",
                f"Correct {option}.",
            )
        if name not in known and name in ("num_gpus", "global_batch_size", "schema_version"):
            raise InvalidInputError(
                f"{option} names {name}.",
                f"Expected one of {', '.join(known)}.",
                "Use --gpus or --global-batch for it.",
            )
        known_name = choice(name, option, known)
        values[known_name] = _value(known_name, word, option)
    return values


def _value(name: str, word: str, option: str) -> object:
    if name == "recompute":
        return choice(word, f"{option} {name}", Space().recompute)
    value: object = word
    if name in SWITCHES:
        value = {"1": True, "0": False, **_WORDS}.get(word.lower(), word)
    elif name in WORDS and name not in ("recompute_modules", "offload_modules"):
        value = choice(word, f"{option} {name}", WORDS[name])
    elif name == "mixing":
        return choice(word, f"{option} {name}", MIXINGS)
    elif name in ("node_order", "replica_micro_batches"):
        value = numbers(word)
    else:
        try:
            value = int(word)
        except ValueError:
            value = word
    try:
        layout = Layout.model_validate({"global_batch_size": 1, name: value}, strict=True)
    except ValidationError as error:
        reason = plain_reason(error.errors(include_url=False)[0])
        raise InvalidInputError(
            f"{option} {name}={shown(word)} makes no sense: {reason}.",
            f"Expected a value of {name} that a layout can have.",
            f"Correct the value; `milpplan schema plan` describes {name}.",
        ) from error
    return getattr(layout, name) if name in ("recompute_modules", "offload_modules") else value


def fixed_values(options: Iterable[str]) -> dict[str, object]:
    """Read all ``--fix`` options together; two values for a field are an error."""
    values: dict[str, object] = {}
    for text in options:
        for name, value in assignments(text, "--fix", _FIXABLE).items():
            if values.setdefault(name, value) != value:
                raise InvalidInputError(
                    f"--fix gives {name} both {values[name]} and {value}.",
                    "Expected one value for each field.",
                    "Leave one of them out.",
                )
    return values


def forbidden_values(options: Iterable[str]) -> tuple[Mapping[str, object], ...]:
    """Read a partial layout from each ``--forbid`` option."""
    return tuple(assignments(text, "--forbid", tuple(Layout.model_fields)) for text in options)


ALLOWED: Final[dict[str, dict[str, bool | tuple[bool | str, ...] | None]]] = {
    "offload": dict.fromkeys(("offload_weights", "offload_activations", "offload_optimizer"), (False, True)),
    "tp-overlap": {"tp_overlap": TP_OVERLAPS},
    "scatter-gather": {"pp_scatter_gather": (False, True)},
    "kept-gathered": {"gather_again": (True, False)},
    "recompute-modules": {"recompute_modules": None},
    "offload-modules": {"offload_modules": None},
    "ulysses": {"ulysses": None},
    "placement": {"rank_order": RANK_ORDERS},
    "shared-images": {"vision_data_parallel": (False, True)},
    "hsdp": {"dp_replicate": None},
    "kept-weights": {"keep_weights": (False, True)},
    "dispatch": {"expert_dispatch": EXPERT_DISPATCHES},
    "replicas": {"mixing": MIXINGS},
    "zero-pipeline": {"zero_pipeline": True},
}
"""Fields of the space and their values, by the word of ``--allow`` that opens them; off by default."""


def allowed_values(options: Iterable[str], problem: Problem) -> dict[str, object]:
    """Collect the fields of the space that all ``--allow`` options open."""
    values: dict[str, object] = {}
    for text in options:
        for word in text.split(","):
            name = choice(word.strip(), "--allow", (*ALLOWED, "all"))
            opened = [ALLOWED[name]] if name != "all" else _all_of(problem)
            without = [hardware.name for hardware in problem.node_types if hardware.host_memory is None]
            if name == "offload" and without:
                raise InvalidInputError(
                    f"--allow offload, but {without[0]} has no [host_memory].",
                    "Expected the capacity, bandwidth and efficiency of the host's memory in the hardware file.",
                    "Add the section (hardware/README.md), or leave the option out.",
                )
            if name == "replicas" and not problem.other_hardware:
                raise InvalidInputError(
                    f"--allow replicas, and the cluster has {len(problem.node_types)} node types.",
                    "Expected several, such as dgx-a100-80:64+dgx-h100:64.",
                    "Leave the option out, or name two types or more.",
                )
            for part in opened:
                values |= part
    return values


def _all_of(problem: Problem) -> list[dict[str, bool | tuple[bool | str, ...] | None]]:
    """List everything that a problem can open."""
    return [part for name, part in ALLOWED.items() if name != "replicas" or problem.other_hardware]


def schedules(text: str) -> tuple[Schedule, ...]:
    """Read the schedules of ``--schedule``: names with commas between them, or ``all``."""
    words = [word.strip() for word in text.split(",")]
    if words == ["all"]:
        return SCHEDULES
    named = {choice(word, "--schedule", (*SCHEDULES, "all")) for word in words}
    if "all" in named or len(named) < len(words):
        raise InvalidInputError(
            f"--schedule is {shown(text)}.",
            "Expected each name once, or all by itself.",
            "Correct --schedule.",
        )
    return tuple(name for name in SCHEDULES if name in named)


def problem_of(
    model: str | None,
    hardware: str | None,
    job: Mapping[str, Any],
    space: str,
    fix: Iterable[str],
    allow: Iterable[str] = (),
    schedule: str | None = None,
) -> Problem:
    """Build the problem of a command line.

    Args:
        model: MODEL as given.
        hardware: HARDWARE as given.
        job: the options that describe the job.
        space: name of the space.
        fix: fields of the layout that are fixed.
        allow: switches that are opened.
        schedule: names of schedules to choose from.

    Raises:
        InvalidInputError: a word is missing or wrong.
    """
    words = {"MODEL": model, "HARDWARE": hardware}
    if not is_cluster(hardware or ""):
        words["--gpus"] = job["gpus"]
    words["--global-batch"] = job["global_batch"]
    absent = [name for name, value in words.items() if value is None]
    if model is None or hardware is None or absent:
        raise missing(" and ".join(absent), ", ".join(words))
    if model in hardware_names() and hardware in model_names():
        raise InvalidInputError(
            f"{model} is a hardware description, and {hardware} a model.",
            "Expected the model first, then the hardware.",
            f"Swap them: {hardware} {model}.",
        )
    spec = load_model(model, job.get("ignore") or ())
    if job.get("alignment") in SCORE_METHODS and spec.num_labels is None:
        spec = spec.with_scores()
    first, others, gpus = cluster(hardware, job["gpus"])
    length = job["seq_len"]
    sequence_length = spec.default_sequence_length if length is None else whole(length, "--seq-len", MAX_SEQUENCE)
    hours = job["deadline_hours"]
    _check_deadline(job["objective"], hours, job["tokens"])
    asked = record(
        Job,
        "the command line",
        kind=job["kind"],
        num_gpus=count_or_range(gpus, "--gpus", MAX_GPUS),
        global_batch_size=count_or_range(job["global_batch"], "--global-batch", MAX_BATCH),
        sequence_length=sequence_length,
        precision=choice(job["precision"], "--precision", PRECISIONS),
        attention_kernel=choice(job["attention"], "--attention", ("flash", "unfused")),
        grad_dtype=choice(job["grad_dtype"], "--grad-dtype", ("fp32", "bf16")),
        objective=choice(job["objective"], "--objective", OBJECTIVES),
        training_tokens=job["tokens"],
        deadline_s=None if hours is None else hours * SECONDS_PER_HOUR,
        lora=_lora(spec, job.get("lora_rank"), job.get("lora_modules")),
        vision_tokens=job.get("vision_tokens") or 0,
        image_tokens=job.get("image_tokens"),
        images=_images(job["images"]) if job.get("images") else None,
        frozen=tuple(dict.fromkeys(choice(name, "--freeze", FROZEN_PARTS) for name in job.get("freeze") or ())),
        mtp_layers=job.get("mtp_layers") or 0,
        expert_imbalance=job.get("expert_imbalance") or 1.0,
        alignment=_alignment(job.get("alignment"), job.get("reference")),
        **_optimizer(job.get("optimizer") or OPTIMIZERS[0], job.get("muon_tp_mode")),
    )
    asked = _with_rollout(asked, job)
    check_size(asked)
    declared = SPACES[choice(space, "--space", tuple(SPACES))]
    parts = {"model": spec, "hardware": first, "job": asked, "space": declared, "other_hardware": others}
    problem = record(Problem, "the command line", **parts)
    return with_margin(narrowed(problem, fix, allow, schedule), job.get("memory_margin"))


def _images(text: str) -> Images:
    """Read ``--images``: numbers of images and their shares, ``N:SHARE`` with commas between them.

    Raises:
        InvalidInputError: the words are no such pairs.
    """
    pairs = [part.partition(":")[::2] for part in text.split(",")]
    try:
        numbers, shares = tuple(int(number) for number, _ in pairs), tuple(float(share) for _, share in pairs)
    except ValueError as error:
        raise InvalidInputError(
            f"--images is {shown(text)}.",
            "Expected numbers of images and their shares of the sequences, such as 0:0.5,1:0.3,4:0.2.",
            "Correct --images.",
        ) from error
    return record(Images, f"--images {shown(text)}", numbers=numbers, shares=shares)


def _lora(model: ModelSpec, rank: int | None, modules: str | None) -> dict[str, Any] | None:
    """Read ``--lora-rank`` and ``--lora-modules``.

    Raises:
        InvalidInputError: modules without a rank, or a matrix that the model lacks.
    """
    if rank is None and modules is not None:
        raise InvalidInputError(
            f"--lora-modules is {shown(modules)}, without --lora-rank.",
            "Expected the rank of the adapters.",
            "Add --lora-rank, such as --lora-rank 16, or leave --lora-modules out.",
        )
    if rank is None:
        return None
    if modules is None:
        return {"rank": rank}
    if modules == ALL_LINEAR:
        return {"rank": rank, "modules": model.linear_modules}
    known = (*model.linear_modules, ALL_LINEAR)
    return {
        "rank": rank,
        "modules": tuple(choice(name.strip(), "--lora-modules", known) for name in modules.split(",")),
    }


def _optimizer(name: str, mode: str | None) -> dict[str, str]:
    """Read ``--optimizer`` and ``--muon-tp-mode``.

    Raises:
        InvalidInputError: a mode of Muon without Muon.
    """
    if mode is not None and name != "muon":
        raise InvalidInputError(
            f"--muon-tp-mode is {shown(mode)}, and the optimizer is {shown(name)}.",
            "Expected the optimizer that has the mode.",
            "Add --optimizer muon, or leave --muon-tp-mode out.",
        )
    chosen = choice(name, "--optimizer", OPTIMIZERS)
    return {
        "optimizer": chosen,
        "muon_tp_mode": choice(mode or MUON_TP_MODES[0], "--muon-tp-mode", MUON_TP_MODES),
    }


def _alignment(method: str | None, reference: str | None) -> dict[str, str] | None:
    """Read ``--alignment`` and ``--reference``.

    Raises:
        InvalidInputError: a reference without a method.
    """
    if method is None:
        if reference is not None:
            raise InvalidInputError(
                f"--reference is {shown(reference)}, without --alignment.",
                "Expected the method that has a reference.",
                "Add --alignment dpo, or leave --reference out.",
            )
        return None
    asked = {"method": choice(method, "--alignment", METHODS)}
    return asked if reference is None else asked | {"reference": choice(reference, "--reference", REFERENCES)}


def _with_rollout(asked: Job, job: Mapping[str, Any]) -> Job:
    """Read ``--rollout-seconds`` or ``--rollout-tokens-per-s``, ``--rollout-memory`` (GiB), ``--rollout-apart``.

    Raises:
        InvalidInputError: no time or two, a rate for ranges, or a job without generation.
    """
    seconds, rate = job.get("rollout_seconds"), job.get("rollout_tokens_per_s")
    memory, apart = job.get("rollout_memory"), bool(job.get("rollout_apart"))
    if seconds is None and rate is None and memory is None and not apart:
        return asked
    if (seconds is None) == (rate is None):
        raise InvalidInputError(
            "A rollout is described with " + ("both times." if rate is not None else "no time."),
            "Expected either --rollout-seconds or --rollout-tokens-per-s.",
            "Give one of them; milpplan has no model of generation.",
        )
    if rate is not None:
        if len(asked.num_gpus_values) * len(asked.global_batch_values) > 1:
            raise InvalidInputError(
                "--rollout-tokens-per-s is given with a range of GPUs or batches.",
                "Expected one number of each: the time of a step's rollout depends on both.",
                "Give --rollout-seconds, or single numbers.",
            )
        tokens = max(asked.global_batch_values) * asked.sequence_length
        seconds = tokens / (rate * max(asked.num_gpus_values)) if rate > 0 else -1.0
    held = round((memory or 0.0) * GIB)
    rollout = {"seconds": seconds, "held_bytes": held, "apart": apart}
    return record(Job, "the command line", **asked.model_dump() | {"rollout": rollout})


def narrowed(problem: Problem, fix: Iterable[str], allow: Iterable[str], schedule: str | None) -> Problem:
    """Open and narrow the space of a problem as ``--allow``, ``--schedule`` and ``--fix`` say."""
    opened = allowed_values(allow, problem)
    values = fixed_values(fix)
    if schedule is not None:
        opened["schedule"] = named = schedules(schedule)
        if problem.inference:
            raise InvalidInputError(
                f"--schedule is {shown(schedule)}, and the job is inference.",
                "Forwards alone run in one order, that of gpipe.",
                "Leave --schedule out.",
            )
        if values.get("schedule", named[0]) not in named:
            raise InvalidInputError(
                f"--fix gives schedule {values['schedule']}, and --schedule {shown(schedule)} does not have it.",
                "Expected one of the schedules to choose from.",
                "Leave one of the two options out.",
            )
    problem = problem.model_copy(update={"space": problem.space.model_copy(update=opened)})
    return fixed(problem, values) if values else problem


def with_margin(problem: Problem, margin: float | None) -> Problem:
    """Set the space's margin of memory as ``--memory-margin`` says; None: that of the hardware.

    Raises:
        InvalidInputError: it is no share from 0 to 0.5.
    """
    if margin is None:
        return problem
    if not 0 <= margin <= MAX_MARGIN:
        raise InvalidInputError(
            f"--memory-margin is {margin:g}.",
            f"Expected a share of the device's memory from 0 to {MAX_MARGIN:g}, such as 0.05.",
            "Correct --memory-margin, or leave it out.",
        )
    space = problem.space.model_copy(update={"memory_margin_fraction": margin})
    return problem.model_copy(update={"space": space})


def deadline_hours(hours: float | None, days: float | None) -> float | None:
    """Convert a deadline, given in hours or in days, to hours.

    Raises:
        InvalidInputError: both are given, or days that are no number of days.
    """
    if days is None:
        return hours
    if hours is not None:
        raise InvalidInputError(
            f"--deadline-hours is {hours:g} and --deadline-days is {days:g}.",
            "Expected one of them.",
            "Leave one out.",
        )
    positive(days, "--deadline-days", "number of days")
    return days * HOURS_PER_DAY


def _check_deadline(objective: str, hours: float | None, tokens: float | None) -> None:
    choice(objective, "--objective", OBJECTIVES)
    positive(hours, "--deadline-hours", "number of hours")
    positive(tokens, "--tokens", "number of tokens")
    if tokens is None and (hours is not None or objective == "gpu_hours"):
        raise InvalidInputError(
            f"--tokens is missing ({'a deadline' if hours is not None else f'objective {objective}'}).",
            "Expected the tokens that the whole run trains on.",
            "Add --tokens, such as --tokens 15e12.",
        )


def check_size(job: Job) -> None:
    """Refuse jobs beyond any cluster, whose layouts alone would fill the memory here."""
    gpus, batches = _extent(job.num_gpus), _extent(job.global_batch_size)
    checks = (
        ("The number of GPUs", gpus[0], MAX_GPUS),
        ("The global batch", batches[0], MAX_BATCH),
        ("The sequence length", job.sequence_length, MAX_SEQUENCE),
        ("The number of combinations of GPUs and batch", gpus[1] * batches[1], MAX_CANDIDATES),
    )
    for name, value, maximum in checks:
        if value > maximum:
            raise InvalidInputError(
                f"{name} is {value:,}.",
                f"Expected at most {maximum:,}.",
                "Give a smaller number, or a larger step.",
            )


def _extent(values: int | Range) -> tuple[int, int]:
    """Find the largest value of a range, and count its values."""
    if isinstance(values, int):
        return values, 1
    return values.maximum, (values.maximum - values.minimum) // values.step + 1


def is_cluster(text: str) -> bool:
    """Tell whether a word names several node types, as in ``dgx-a100-80:64+dgx-h100:64``."""
    return "+" in text and any(_GROUP.fullmatch(part) for part in text.split("+"))


def cluster(text: str, gpus: str | None) -> tuple[HardwareSpec, tuple[NodeGroup, ...], str]:
    """Read the first node type, the groups of the others, and the number of all GPUs as a word.

    Raises:
        InvalidInputError: a part without a number, too many parts, or ``--gpus`` that is not their sum.
    """
    if not is_cluster(text):
        assert gpus is not None, "the caller asks for what is missing"
        return load_hardware(text), (), gpus
    groups = [_group(part, text) for part in text.split("+")]
    if len(groups) > MAX_NODE_TYPES:
        raise InvalidInputError(
            f"The cluster {shown(text)} has {len(groups)} node types.",
            f"Expected at most {MAX_NODE_TYPES}.",
            "Add up the GPUs of nodes that are alike.",
        )
    total = sum(count for _, count in groups)
    if gpus is not None and gpus != str(total):
        raise InvalidInputError(
            f"--gpus is {shown(gpus)}, and the cluster {shown(text)} has {counted(total, 'GPU')}.",
            "Expected the sum of the numbers of the node types.",
            "Leave --gpus out, or correct a number.",
        )
    others = tuple(NodeGroup(hardware=load_hardware(name), num_gpus=count) for name, count in groups[1:])
    return load_hardware(groups[0][0]), others, str(total)


def _group(part: str, whole: str) -> tuple[str, int]:
    """Read name and number of GPUs of a node type."""
    match = _GROUP.fullmatch(part)
    count = int(match["gpus"]) if match else 0
    if match is None or not count:
        raise InvalidInputError(
            f"The part {shown(part)} of the cluster {shown(whole)} has no number of GPUs.",
            "Expected NAME:GPUS+NAME:GPUS, such as dgx-a100-80:64+dgx-h100:64.",
            "Give every node type the number of its GPUs, at least 1.",
        )
    return match["name"], count


def numbers(word: str) -> Any:
    """Read ``1-0`` as an order of node types or shares of replicas; the record checks it."""
    try:
        return tuple(int(part) for part in word.split("-"))
    except ValueError:
        return word


def check_plan_of_file(problem: Problem, plan: Plan) -> None:
    """Check that a plan belongs to the problem, breaks no rule, and is of a size that can be simulated."""
    check_size(problem.job)
    check_plan(problem, plan)
    layout = plan.layout
    items = layout.num_virtual_stages * layout.num_micro_batches
    if items > MAX_WORK_ITEMS:
        raise IllegalPlanError(
            f"The plan has {items:,} work items a pipeline (virtual stages x micro-batches).",
            f"Expected at most {MAX_WORK_ITEMS:,}.",
            "Use larger micro-batches or more replicas.",
        )
    broken = broken_rules(problem, layout)
    if broken:
        raise IllegalPlanError(
            f"The layout breaks {'the rule' if len(broken) == 1 else 'the rules'} {', '.join(broken)}.",
            "Expected a layout that keeps every rule of the frameworks.",
            "Change the degrees and switches that the rule names.",
        )


def within_range() -> np.errstate:
    """Raise where a number leaves the range of floats or 64-bit integers, instead of computing on."""
    return np.errstate(over="raise", invalid="raise", divide="raise")
