"""Import of Megatron-LM's arguments as a problem and a plan."""

from __future__ import annotations

from collections.abc import Collection

from milpplan.errors import InvalidInputError
from milpplan.launchers.arguments import Arguments, checked
from milpplan.launchers.expressible import model_differences
from milpplan.launchers.import_request import ImportRequest
from milpplan.launchers.megatron.cost_free_flags import PROGRAMS, is_quiet, other_model, unpriced
from milpplan.launchers.megatron.flags import COMMIT, megatron_flags
from milpplan.launchers.megatron.model_reader import model_of
from milpplan.launchers.megatron.plan_reader import job_of, plan_of, recipe_note, software_of
from milpplan.launchers.megatron.rules import check_rules, sizes_of
from milpplan.launchers.records import Imported
from milpplan.launchers.shell.launch_text import Given, from_script, from_yaml
from milpplan.launchers.shell.marks import how_to_decide, is_mark, readable, unknown_in
from milpplan.problem.model import ModelSpec
from milpplan.problem.problem import Problem
from milpplan.problem.reading import shown


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
        read = from_yaml(request.text, request.source)
    else:
        read = from_script(request.text, request.source, {*PROGRAMS, *map(_program_of, request.ignored)})
        _check_program(read.program, request.source, request.ignored)
    return imported_from(read, request)


def imported_from(read: Given, request: ImportRequest) -> Imported:
    """Import arguments that have already been read from a file.

    Raises:
        InvalidInputError: flags change the cost and are not priced.
        IllegalPlanError: Megatron-LM would refuse the arguments.
    """
    world = _world(read, request.num_gpus, request.source)
    names = frozenset(map(_spelled, request.ignored))
    pairs = _resolved(read, request.source, names)
    everything, unknown = checked(((name, values) for name, values in pairs if name not in names), request.source)
    left_out = [readable(" ".join((name, *values))) for name, values in pairs if name in names]
    _check_names(read, request.ignored)
    if read.program in map(_program_of, request.ignored) and read.program not in PROGRAMS:
        left_out.insert(0, f"{read.program} is taken as a program that trains the GPT of its arguments")
    given, old = _of_today(everything, unknown)
    unknown = tuple(readable(flag) for flag in unknown)
    _check_known([flag for flag in unknown if not is_quiet(flag.split()[0]) and flag not in old], request.source)
    check_rules(given, world, "Correct the arguments, or the number of GPUs (--gpus).")
    built = model_of(
        given,
        "imported",
        request.model.vocab_size if request.model and not request.vocab_size else request.vocab_size,
    )
    if request.model is not None:
        built = _same_model(request.model, built)
    job = job_of(given, world)
    plan = plan_of(given, world, built, job)
    there, notes = software_of(given, request.hardware, built, sizes_of(given, world).ep)
    if job.precision == "fp8":
        notes.append(recipe_note(given, there.accelerator))
    _check_priced(given)
    problem = Problem(model=built, hardware=there, job=job)
    if read.world and read.world != world:
        notes.append(f"The file starts {read.world} processes where nothing else is set; {world} are taken.")
    return Imported(problem, plan, unknown, tuple(left_out), (*notes, *old.values()))


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
    other = other_model(program)
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
            pairs.append((name, values))
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


def _of_today(given: Arguments, unknown: Collection[str]) -> tuple[Arguments, dict[str, str]]:
    """Translate arguments of 2021 into current ones, with a note for each.

    Raises:
        InvalidInputError: they contradict current arguments.
    """
    if OLD_FULL not in given.values:
        return given, {}
    today = [flag for flag in given.values if flag.startswith("--recompute-")]
    if today:
        raise InvalidInputError(
            f"{OLD_FULL} is given together with {today[0]}.",
            "Expected one of them: the first is of 2021, and today's parser refuses it.",
            f"Leave {OLD_FULL} out.",
        )
    values = {name: value for name, value in given.values.items() if name != OLD_FULL}
    values |= {
        "--recompute-granularity": ("full",),
        "--recompute-method": ("uniform",),
        "--recompute-num-layers": ("1",),
    }
    notes = {
        OLD_FULL: f"{OLD_FULL} is read as in Megatron-LM of 2021, full recomputation of every layer; today's "
        "parser refuses it."
    }
    # Number of layers per kept input; only 1 is supported.
    chunk = next((flag for flag in unknown if flag.split() == ["--checkpoint-num-layers", "1"]), None)
    if chunk is not None:
        notes[chunk] = f"{chunk}: the input of every layer is kept."
    return Arguments(values), notes


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
