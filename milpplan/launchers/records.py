"""Records that launchers share: a launch before it is written as files, an imported plan, a refusal,
and the request to import a file with the checks that all readers share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from milpplan.errors import InvalidInputError
from milpplan.launchers.megatron.flags import Arguments, Values
from milpplan.problem import Alignment, HardwareSpec, Job, Layout, Lora, ModelSpec, Plan, Problem, validated
from milpplan.problem.reading import shown


@dataclass(frozen=True, slots=True)
class Started:
    """Properties that every launch has, whatever the form of its arguments.

    The job has ``num_nodes * gpus_per_node`` processes.
    """

    target: str
    """Name of the launcher."""
    version: str
    """Version of the launcher."""
    title: tuple[str, ...]
    """Sentences that describe the plan, one per line."""
    num_nodes: int
    """Number of nodes of the job."""
    gpus_per_node: int
    """Number of processes on each node."""
    environment: dict[str, str]
    """Variables that every process needs."""
    notes: tuple[str, ...]
    """Remarks for the user: where the framework does slightly more or less than the plan says."""

    @property
    def num_gpus(self) -> int:
        """Number of processes of the job."""
        return self.num_nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True)
class Section:
    """Group of related arguments. ``name`` names the shell array, ``why`` is its comment."""

    name: str
    why: str
    arguments: dict[str, Values]


@dataclass(frozen=True, slots=True)
class Launch(Started):
    """Plan as command-line arguments and environment of a launcher."""

    sections: tuple[Section, ...]

    @property
    def arguments(self) -> Arguments:
        """Arguments of all sections."""
        return Arguments({flag: values for part in self.sections for flag, values in part.arguments.items()})


@dataclass(frozen=True, slots=True)
class ConfigLaunch(Started):
    """Plan as the settings of a configuration file, by section and name."""

    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Imported:
    """Problem and plan read from a launcher's files.

    Also holds the flags that the launcher does not know or that the caller ignores, and remarks.
    """

    problem: Problem
    plan: Plan
    unknown_flags: tuple[str, ...]
    ignored_flags: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Reason why a target cannot run a plan.

    Also holds the value (``NAME=VALUE``) that makes the next plan expressible, if such a value exists.
    """

    why: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """A launcher's file, and what its user states beside it."""

    text: str
    """The file."""
    source: str
    """Its name, for messages; its suffix may tell the format."""
    hardware: HardwareSpec
    """The cluster."""
    num_gpus: int | None = None
    """Number of processes; None: the file states it."""
    model: ModelSpec | None = None
    """Description of the model, where the file only names it, or to be checked against the file."""
    vocab_size: int | None = None
    """Vocabulary, where only a tokenizer knows it."""
    ignored: Collection[str] = ()
    """Keys whose effect on the cost the caller ignores."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a configuration file that the caller states, by name; they win over the file's."""


def described(model: ModelSpec | None, vocab_size: int | None, source: str) -> ModelSpec:
    """Return the description of a model that a file only names.

    Raises:
        InvalidInputError: no description is given, or its vocabulary differs.
    """
    if model is None or vocab_size not in (None, model.vocab_size):
        raise InvalidInputError(
            f"{source} only names its model{'' if model is None else ', and --vocab-size is another'}.",
            "Expected the description of the model.",
            "Give --model, without --vocab-size.",
        )
    return model


def check_vocabulary(asked: int | None, model: ModelSpec, words: str) -> None:
    """Check ``--vocab-size`` against the vocabulary of the file's model, called ``words``.

    Raises:
        InvalidInputError: they differ.
    """
    if asked not in (None, model.vocab_size):
        raise InvalidInputError(
            f"--vocab-size is {asked}, and {words} has {model.vocab_size} words.",
            "Expected the vocabulary of that model.",
            "Leave --vocab-size out.",
        )


def check_gpus(asked: int | None, started: int, source: str) -> None:
    """Check ``--gpus`` against the number of processes that the file starts.

    Raises:
        InvalidInputError: they differ.
    """
    if asked not in (None, started):
        raise InvalidInputError(
            f"--gpus is {asked}, and {source} starts {started} processes.",
            "Expected the same number.",
            "Leave --gpus out, or correct the sizes in the file.",
        )


def adapters_of(model: ModelSpec, rank: int, modules: Collection[str] | None, setting: str) -> Lora:
    """Describe LoRA adapters beside matrices of a model.

    Args:
        model: the frozen model.
        rank: rank of the adapters.
        modules: names of the matrices; None: all matrices of the layers.
        setting: the setting that names them, for messages.

    Raises:
        InvalidInputError: a matrix is not in the model, or adapters beside its layers are not priced.
    """
    if model.has_experts or model.has_indexers or not all(kind.has_known_adapters for kind in model.kinds):
        raise InvalidInputError(
            f"{setting} adds adapters to {model.name}.",
            "Expected a model of dense layers: which matrices of experts or of recurrences have adapters depends "
            "on releases.",
            f"Leave {setting} out to compare it as training of all weights.",
        )
    present = model.linear_modules
    strange = [name for name in modules or () if name not in present]
    if strange or (modules is not None and not modules):
        raise InvalidInputError(
            f"{setting} names {shown(strange[0]) if strange else 'no matrix'} of {model.name}.",
            f"Expected matrices of its layers: {', '.join(present)}.",
            f"Correct {setting}.",
        )
    chosen = present if modules is None else tuple(name for name in present if name in modules)
    return validated(Lora, {"rank": rank, "modules": chosen}, "the adapters that the file describes")


def job_of(layout: Layout, sequence_length: object, *, lora: Lora | None = None, **formats: str) -> Job:
    """Build the training job of a layout.

    Args:
        layout: gives the number of accelerators and the global batch size.
        sequence_length: tokens, as the file has them.
        lora: adapters; None: all weights are trained.
        formats: number formats, gradient format and kernels, where they are not the defaults.

    Raises:
        InvalidInputError: the values describe no valid job.
    """
    data = {
        "num_gpus": layout.num_gpus,
        "global_batch_size": layout.global_batch_size,
        "sequence_length": sequence_length,
    }
    return validated(
        Job,
        {**data, **formats, "lora": None if lora is None else lora.model_dump()},
        "the job that the file describes",
    )


def problem_of(
    request: ImportRequest,
    model: ModelSpec,
    layout: Layout,
    sequence_length: object,
    software: Mapping[str, object],
    *,
    lora: Lora | None = None,
    **formats: str,
) -> Problem:
    """Build the problem that a file describes, on the cluster of the request.

    Args:
        request: gives cluster and number of processes.
        model: the model that is trained.
        layout: the layout that the file starts.
        sequence_length: as in ``job_of``, like ``lora`` and ``formats``.
        software: fields of ``Software`` that the file decides.

    Raises:
        InvalidInputError: the file starts another number of processes, or the values describe no valid job.
    """
    check_gpus(request.num_gpus, layout.num_gpus, request.source)
    there = request.hardware.software.model_copy(update=software)
    hardware = request.hardware.model_copy(update={"software": there})
    job = job_of(layout, sequence_length, lora=lora, **formats)
    return Problem(model=model, hardware=hardware, job=job)


def aligned(result: Imported, alignment: Alignment | None) -> Imported:
    """Make an imported plan train on preferences or rewards; a launcher's batches count pairs as one.

    Args:
        result: the import, as if it trained on the next token.
        alignment: the training; None: on the next token.
    """
    if alignment is None:
        return result
    job = result.problem.job.model_copy(update={"alignment": alignment})
    sizes = {
        name: getattr(result.plan.layout, name) * job.sequences_together
        for name in ("micro_batch_size", "global_batch_size")
    }
    job = job.model_copy(update={"global_batch_size": sizes["global_batch_size"]})
    problem = Problem(model=result.problem.model, hardware=result.problem.hardware, job=job)
    plan = result.plan.model_copy(update={"layout": result.plan.layout.model_copy(update=sizes)})
    return replace(result, problem=problem, plan=plan)


AT_MOST = "All sequences are priced as {} tokens: without packing they are at most as long."
"""Note where a file gives the maximum length of sequences."""
PACKED = "Packed sequences hold several texts; their attention is priced as that of whole sequences."
"""Note on files that train on packed sequences."""
ADAPTERS = "Adapters are on {}."
"""Note where the matrices with adapters follow from a pattern, or from the model."""
DEFERRED = (
    "{} keeps whole gradients between micro-batches and reduces them once a step; they are priced as sharded and "
    "reduced in each."
)
"""Note where sharded gradients wait for the last micro-batch."""
