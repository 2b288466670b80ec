"""Words of the command line as a problem; every mistake is an ``InvalidInputError``."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from milpplan.cli.clusters import cluster, numbers
from milpplan.errors import InvalidInputError, UnknownNameError
from milpplan.optimize.solve import fixed
from milpplan.problem.catalog import hardware_names, load_model, model_names
from milpplan.problem.plan import RANK_ORDERS, SCHEDULES, TP_OVERLAPS, Layout, Schedule
from milpplan.problem.problem import (
    MAX_BATCH,
    MAX_GPUS,
    MAX_SEQUENCE,
    MIXINGS,
    NOT_LISTS,
    SPACES,
    Job,
    Problem,
    Range,
    Space,
)
from milpplan.problem.reading import RecordType, invalid_fields, plain_reason, shown
from milpplan.simulation.layout_columns import SWITCHES, WORDS
from milpplan.units import HOURS_PER_DAY, SECONDS_PER_HOUR

MAX_CANDIDATES: Final = 4_096
"""Maximum of combinations of a number of GPUs and a batch in one problem."""
OR_A_RANGE: Final = ", or a range such as 64:512 or 64:512:64"
OBJECTIVES: Final = ("step_time_per_token", "num_gpus", "gpu_hours")

_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_FIXABLE = tuple(name for name in Space.model_fields if name not in NOT_LISTS)


def whole(text: str, option: str, most: int, or_else: str = "") -> int:
    """Read a positive integer of at most ``most``; ``or_else`` says what else the option takes."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= most:
        raise InvalidInputError(
            f"{option} is {shown(text)}.",
            f"Expected a whole number from 1 to {most:,}{or_else}.",
            f"Correct {option}.",
        )
    return value


def count_or_range(text: str, option: str, most: int) -> int | Range:
    """Read ``N``, ``LO:HI`` or ``LO:HI:STEP``."""
    parts = text.split(":")
    if len(parts) == 1:
        return whole(text, option, most, OR_A_RANGE)
    if len(parts) > 3:
        raise InvalidInputError(
            f"{option} is {shown(text)}.", "Expected N, LO:HI or LO:HI:STEP.", f"Correct {option}."
        )
    minimum, maximum, step = (whole(part, option, most, OR_A_RANGE) for part in [*parts, "1"][:3])
    return record(Range, f"{option} {text}", minimum=minimum, maximum=maximum, step=step)


def positive(value: float | None, option: str, what: str) -> None:
    """Refuse an option's number that is not positive and finite."""
    if value is not None and not 0 < value < math.inf:
        raise InvalidInputError(f"{option} is {value}.", f"Expected a positive {what}.", f"Correct {option}.")


def record(kind: type[RecordType], source: str, /, **values: Any) -> RecordType:
    """Validate a record; an error says that the values are those of ``source``."""
    try:
        return kind(**values)
    except ValidationError as error:
        raise invalid_fields(kind, error, source) from error


def choice(text: str, option: str, known: Iterable[str]) -> str:
    """Check that a text is a known word, and suggest the closest where it is not."""
    names = tuple(known)
    if text in names:
        return text
    close = difflib.get_close_matches(text.lower(), names, n=1, cutoff=0.5)
    raise UnknownNameError(
        f"{option} {shown(text)} does not exist.",
        f"Expected one of {', '.join(names)}.",
        f"Did you mean {close[0]}?" if close else "Give one of these names.",
    )


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
    elif name in WORDS:
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
        Layout.model_validate({"global_batch_size": 1, name: value}, strict=True)
    except ValidationError as error:
        reason = plain_reason(error.errors(include_url=False)[0])
        raise InvalidInputError(
            f"{option} {name}={shown(word)} makes no sense: {reason}.",
            f"Expected a value of {name} that a layout can have.",
            f"Correct the value; `milpplan schema plan` describes {name}.",
        ) from error
    return value


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


ALLOWED: Final[dict[str, dict[str, tuple[bool | str, ...]]]] = {
    "offload": dict.fromkeys(("offload_weights", "offload_activations", "offload_optimizer"), (False, True)),
    "tp-overlap": {"tp_overlap": TP_OVERLAPS},
    "scatter-gather": {"pp_scatter_gather": (False, True)},
    "kept-gathered": {"gather_again": (True, False)},
    "placement": {"rank_order": RANK_ORDERS},
    "replicas": {"mixing": MIXINGS},
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


def _all_of(problem: Problem) -> list[dict[str, tuple[bool | str, ...]]]:
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
    model: str,
    hardware: str,
    job: Mapping[str, Any],
    space: str,
    fix: list[str],
    allow: Iterable[str] = (),
    schedule: str | None = None,
) -> Problem:
    """Build the problem of a command line; ``job`` holds the options that describe the job."""
    if model in hardware_names() and hardware in model_names():
        raise InvalidInputError(
            f"{model} is a hardware description, and {hardware} a model.",
            "Expected the model first, then the hardware.",
            f"Swap them: {hardware} {model}.",
        )
    spec = load_model(model, job.get("ignore") or ())
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
        precision=choice(job["precision"], "--precision", ("bf16", "fp8")),
        attention_kernel=choice(job["attention"], "--attention", ("flash", "unfused")),
        grad_dtype=choice(job["grad_dtype"], "--grad-dtype", ("fp32", "bf16")),
        objective=choice(job["objective"], "--objective", OBJECTIVES),
        training_tokens=job["tokens"],
        deadline_s=None if hours is None else hours * SECONDS_PER_HOUR,
    )
    check_size(asked)
    declared = SPACES[choice(space, "--space", tuple(SPACES))]
    parts = {"model": spec, "hardware": first, "job": asked, "space": declared, "other_hardware": others}
    problem = record(Problem, "the command line", **parts)
    return narrowed(problem, fix, allow, schedule)


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
    for name, value, most in checks:
        if value > most:
            raise InvalidInputError(
                f"{name} is {value:,}.",
                f"Expected at most {most:,}.",
                "Give a smaller number, or a larger step.",
            )


def _extent(values: int | Range) -> tuple[int, int]:
    """Largest value of a range, and its number of values."""
    if isinstance(values, int):
        return values, 1
    return values.maximum, (values.maximum - values.minimum) // values.step + 1


def schema_of(kind: str) -> type[BaseModel]:
    """Find the record whose JSON Schema ``milpplan schema`` prints."""
    from milpplan.groups.document import DispatchFile, GroupedPlanFile
    from milpplan.groups.workload.workload_file import WorkloadFile
    from milpplan.lengths.side_by_side.team_file import TeamDispatchFile
    from milpplan.problem.hardware import HardwareSpec
    from milpplan.problem.model import ModelSpec
    from milpplan.problem.overlay import Overlay
    from milpplan.reports.answers.explain import ExplanationDocument
    from milpplan.reports.answers.gap import GapDocument
    from milpplan.reports.answers.hardware_choice import ChoiceDocument, FewestDocument
    from milpplan.reports.answers.lengths import LengthsFile
    from milpplan.reports.documents.document import ResultDocument
    from milpplan.reports.documents.plan_file import PlanFile
    from milpplan.studies.records import Study

    records: dict[str, type[BaseModel]] = {
        "problem": Problem,
        "plan": PlanFile,
        "model": ModelSpec,
        "hardware": HardwareSpec,
        "overlay": Overlay,
        "study": Study,
        "result": ResultDocument,
        "explanation": ExplanationDocument,
        "grouped-plan": GroupedPlanFile,
        "dispatch": DispatchFile,
        "team-dispatch": TeamDispatchFile,
        "gap": GapDocument,
        "choice": ChoiceDocument,
        "fewest": FewestDocument,
        "lengths": LengthsFile,
        "workload": WorkloadFile,
    }
    return records[choice(kind, "schema", records)]
