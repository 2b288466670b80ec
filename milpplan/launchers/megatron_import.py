"""From Megatron-LM's arguments to a problem and a plan: the reverse of the export."""

from __future__ import annotations

from collections.abc import Collection

from milpplan.errors import InvalidInputError
from milpplan.launchers.arguments import Arguments, checked
from milpplan.launchers.expressible import model_differences
from milpplan.launchers.launch_text import Given, from_script, from_yaml
from milpplan.launchers.megatron_flags import megatron_flags
from milpplan.launchers.megatron_model_reading import model_of
from milpplan.launchers.megatron_plan_reading import job_of, plan_of, software_of
from milpplan.launchers.megatron_roles import is_quiet, unpriced
from milpplan.launchers.megatron_rules import check_rules, sizes_of
from milpplan.launchers.records import Imported
from milpplan.launchers.shell_marks import unknown_in
from milpplan.specs.hardware import HardwareSpec
from milpplan.specs.model import ModelSpec
from milpplan.specs.problem import Problem
from milpplan.specs.reading import shown


def imported(
    text: str,
    source: str,
    hardware: HardwareSpec,
    num_gpus: int | None = None,
    model: ModelSpec | None = None,
    vocab_size: int | None = None,
    ignored: Collection[str] = (),
) -> Imported:
    """The plan of a launch.

    Args:
        text: a shell script, a command line, or a YAML of arguments.
        source: its name; .yaml and .yml are read as YAML.
        hardware: the cluster.
        num_gpus: processes, where the text does not say; None: it does.
        vocab_size: where only a tokenizer and the caller know it.
        model: what the model is, where it has a description; its sizes must be those of the arguments.
        ignored: flags whose effect on the cost the caller accepts not to see.

    Raises:
        InvalidInputError: the text cannot be read, or has flags that change the cost and are not priced.
        IllegalPlanError: Megatron-LM would refuse it.
    """
    read = from_yaml(text, source) if source.lower().endswith((".yaml", ".yml")) else from_script(text, source)
    return imported_from(read, source, hardware, num_gpus, model, vocab_size, ignored)


def imported_from(
    read: Given,
    source: str,
    hardware: HardwareSpec,
    num_gpus: int | None = None,
    model: ModelSpec | None = None,
    vocab_size: int | None = None,
    ignored: Collection[str] = (),
) -> Imported:
    """``imported`` of arguments that have been read, from whatever said them.

    Raises:
        InvalidInputError: there are flags that change the cost and are not priced.
        IllegalPlanError: Megatron-LM would refuse them.
    """
    world = _world(read, num_gpus, source)
    names = _spelled(ignored)
    pairs, loose = _resolved(read, source, names)
    everything, unknown = checked(pairs, source)
    left_out = tuple(" ".join((name, *values)) for name, values in everything.values.items() if name in names)
    given = Arguments({name: values for name, values in everything.values.items() if name not in names})
    check_rules(given, world, "Correct the arguments, or the number of GPUs (--gpus).")
    found = model_of(given, "imported", model.vocab_size if model and not vocab_size else vocab_size)
    if model is not None:
        found = _same_model(model, found)
    job = job_of(given, world)
    plan = plan_of(given, world, found, job)
    there, notes = software_of(given, hardware, found, sizes_of(given, world).ep)
    _check_priced(given)
    if job.precision == "fp8" and there.accelerator.fp8 is None:
        raise InvalidInputError(
            f"--fp8-format is given, and {there.accelerator.name} has no fp8.",
            "Expected hardware with fp8.",
            "Choose another --hardware.",
        )
    problem = Problem(model=found, hardware=there, job=job)
    if read.world and read.world != world:
        notes.append(f"The file starts {read.world} processes where nothing else is set; {world} are taken.")
    stray = tuple(f"{', '.join(unknown_in(word)) or word} (taken as empty)" for word in (*read.stray, *loose))
    return Imported(problem, plan, (*unknown, *stray), left_out, tuple(notes))


def _world(read: Given, num_gpus: int | None, source: str) -> int:
    world = num_gpus or read.world
    if not world:
        raise InvalidInputError(
            f"{source} does not say how many processes it starts.",
            "Expected torchrun --nnodes N --nproc-per-node M, or #SBATCH --nodes and --gpus-per-node.",
            "Give --gpus.",
        )
    return world


def _spelled(names: Collection[str]) -> frozenset[str]:
    """Flags by the first of their spellings."""
    found = set()
    for name in names:
        spelled = f"--{name.lstrip('-').replace('_', '-')}"
        if spelled not in megatron_flags():
            raise InvalidInputError(
                f"--ignore {shown(name)} is no argument of Megatron-LM.", "Expected one of its flags.", "Check it."
            )
        found.add(megatron_flags()[spelled].name)
    return frozenset(found)


def _resolved(
    read: Given, source: str, ignored: frozenset[str]
) -> tuple[list[tuple[str, tuple[str, ...]]], list[str]]:
    """Pairs without values that only the running shell knows, which matter to no plan unless a flag does; and
    words that follow a switch, which takes no value."""
    pairs: list[tuple[str, tuple[str, ...]]] = []
    loose: list[str] = []
    for name, values in read.pairs:
        unknown = [part for value in (name, *values) for part in unknown_in(value)]
        flag = megatron_flags().get(name)
        if not unknown:
            pairs.append((name, values))
        elif flag is not None and flag.kind != "value" and all(unknown_in(value) for value in values):
            pairs.append((name, ()))
            loose += values
        elif not (is_quiet(name) or name in ignored):
            raise InvalidInputError(
                f"{source}: {name} is {', '.join(unknown)}, which only the running shell knows.",
                "Expected a value that the file says.",
                "Write the value into the file, or a default such as ${TP:-8}.",
            )
    return pairs, loose


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


def _same_model(model: ModelSpec, found: ModelSpec) -> ModelSpec:
    """The described model, if the arguments build it."""
    different = model_differences(model, found)
    if different:
        raise InvalidInputError(
            f"The arguments build another model than {model.name}: {', '.join(different)} differ.",
            f"Expected its sizes; of {different[0]} the arguments have {shown(getattr(found, different[0]))}.",
            "Correct the arguments, or leave --model out.",
        )
    return model
