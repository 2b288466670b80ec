"""Flags with values, and the number of processes, from a script, a command line or a YAML of arguments."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from milpplan.errors import InvalidInputError
from milpplan.launchers.megatron.flags import Values
from milpplan.launchers.shell.script import script_commands
from milpplan.launchers.shell.state import Command
from milpplan.launchers.shell.tree import MARK, how_to_decide, is_mark, marked, readable, unknown_in
from milpplan.problem import Alignment
from milpplan.problem.reading import shown, unparsable

_PRINTS = ("echo", "printf")
"""Commands that only show the words of another."""
_COUNT = re.compile(r"[0-9]{1,9}")
_PROCESSES = {"nnodes": "nodes", "nproc_per_node": "per_node"}
MAX_YAML_CHARACTERS = 300_000
_SLURM = (
    ("nodes", r"(?:--nodes|-N)[=\s]+([0-9]{1,9})\s*$"),
    ("per_node", r"--(?:gpus-per-node|gres)[=\s]+(?:\w+:)*([0-9]{1,9})\s*$"),
    ("per_node", r"--ntasks-per-node[=\s]+([0-9]{1,9})\s*$"),
)


@dataclass(frozen=True, slots=True)
class Given:
    """Words of a file before they are interpreted.

    ``stray``: words that belong to no flag. ``program``: the program that the command starts; empty for flags
    alone. ``ignored``: settings that the caller ignores and that are left out already. ``notes``: remarks.
    ``parts``: fields of every layer for which Megatron-LM has no arguments, as in ``model_of``. ``alignment``:
    training otherwise than on the next token, whose pairs the batches count as one.
    """

    pairs: tuple[tuple[str, Values], ...]
    world: int | None
    stray: tuple[str, ...]
    program: str = ""
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    parts: Mapping[str, Any] = field(default_factory=dict)
    alignment: Alignment | None = None


def from_script(text: str, source: str, programs: Collection[str] = ()) -> Given:
    """Read the arguments of the training command in a shell script, or of a bare command line.

    Args:
        text: the script.
        source: its path; files that it sources are searched beside it.
        programs: file names of training programs. If the script starts one, its other commands
            only prepare the run.

    Raises:
        InvalidInputError: no command has arguments, or several do.
    """
    commands = [command for command in script_commands(text, source) if command.words[0] not in _PRINTS]
    starts = [(command, started_place(command.words)) for command in commands]
    candidates = [(command, at) for command, at in starts if at is not None and _flags(command.words[at + 1 :])]
    candidates = [
        (command, at) for command, at in candidates if program_name(command.words[at]) in programs
    ] or candidates
    if not candidates:
        words = [word for command in commands for word in command.words]
        first = next((index for index, word in enumerate(words) if word.startswith("--")), None)
        if first is None or any(at is not None or _launches(command) for command, at in starts):
            raise _no_command(source, [command for command in commands if _launches(command)])
        candidates = [(Command(tuple(words)), first - 1)]
    if len({(program_name(command.words[at]), command.words[at + 1 :]) for command, at in candidates}) > 1:
        names = ", ".join(dict.fromkeys(shown(readable(command.words[at])) for command, at in candidates[:4]))
        raise InvalidInputError(
            f"{source} starts programs in {len(candidates)} ways, with different arguments: {names}.",
            "Expected one training command.",
            "Keep the one to import in a file of its own, or decide which of them runs (--set NAME=VALUE).",
        )
    command, at = candidates[0]
    pairs, stray = pairs_of(command.words[at + 1 :])
    program = program_name(command.words[at]) if at >= 0 else ""
    return Given(tuple(pairs), world_of(command.words[: max(at, 0)], text), stray, program)


def program_place(words: tuple[str, ...]) -> int | None:
    """Return the index of the Python file that a command runs."""
    return next((index for index, word in enumerate(words) if word.endswith(".py")), None)


def started_place(words: tuple[str, ...]) -> int | None:
    """Return the index of the Python file or, without a file, of the module that a command runs."""
    place = program_place(words)
    modules = (index + 1 for index, word in enumerate(words[:-1]) if word == "-m" and not words[0].startswith("-"))
    return place if place is not None else next(modules, None)


def program_name(word: str) -> str:
    """Return the file name of a program, without its folder."""
    return readable(word).rstrip("/").rsplit("/", 1)[-1]


def _flags(words: Sequence[str]) -> bool:
    return any(word.startswith("--") or unknown_in(word) for word in words)


def _launches(command: Command) -> bool:
    """Test whether a command starts Python, or may start it where its words are unknown."""
    names = {program_name(word) for word in command.words[:12]}
    return is_mark(command.words[0]) or any(
        re.fullmatch(r"torchrun|python[\d.]*|deepspeed|accelerate|srun|mpirun", name) for name in names
    )


def _no_command(source: str, launches: Sequence[Command]) -> InvalidInputError:
    unknown = [word for command in launches for word in command.words if unknown_in(word)]
    if unknown:
        said = shown(" ".join(map(readable, launches[0].words)))
        return InvalidInputError(
            f"{source} starts {said}, which the file does not decide.",
            "Expected a command that gives a Python file arguments.",
            how_to_decide(unknown),
        )
    return InvalidInputError(
        f"{source} has no command that gives a Python file arguments.",
        "Expected a script that starts training, or the arguments alone.",
        "Give the script that starts Python; one that only submits another names that one.",
    )


_FLAG = re.compile(rf"--?(?:[A-Za-z]|{MARK})|{MARK}[0-9a-f]*{MARK}=")
_WEIGHTED = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
"""Flags that alternate weights and paths."""


def pairs_of(words: Sequence[str]) -> tuple[list[tuple[str, Values]], tuple[str, ...]]:
    """Split words into flags with their values, and stray words.

    A word that is entirely unknown may hold any number of flags. It becomes the value of a preceding flag without
    values (the caller decides whether the flag takes one); otherwise it is stray.
    """
    pairs: list[tuple[str, list[str]]] = []
    stray: list[str] = []
    for word in words:
        if not word.strip():
            continue
        if _FLAG.match(word):
            name, equals, value = word.partition("=")
            pairs.append((name, [value] if equals else []))
        elif not pairs or (is_mark(word) and not _takes(*pairs[-1])):
            stray.append(word)
        else:
            pairs[-1][1].append(word)
    return [(name, tuple(values)) for name, values in pairs], tuple(stray)


def _takes(name: str, values: Sequence[str]) -> bool:
    """Test whether an unknown word is the next value of a flag."""
    return not values or (name in _WEIGHTED and re.fullmatch(r"[\d.]+", values[-1]) is not None)


def world_of(words: Iterable[str], text: str) -> int | None:
    """Return the number of processes that torchrun or Slurm starts, where both factors are given."""
    numbers: dict[str, int] = {}
    for flag, values in pairs_of(tuple(words))[0]:
        role = _PROCESSES.get(flag.lstrip("-").replace("-", "_"))
        if role and values and _COUNT.fullmatch(values[0]):
            numbers.setdefault(role, int(values[0]))
    for line in re.findall(r"^#SBATCH\s+(.*)$", text, re.MULTILINE):
        for role, pattern in _SLURM:
            match = re.match(pattern, line)
            if match:
                numbers.setdefault(role, int(match[1]))
    if "per_node" in numbers and "nodes" not in numbers:
        # torchrun starts one node by default.
        numbers["nodes"] = 1 if "--nnodes" not in text else 0
    return numbers.get("nodes", 0) * numbers.get("per_node", 0) or None


_BESIDE = ("ENV_VARS", "TEST_TYPE", "MODE", "METRICS", "BEFORE_SCRIPT", "AFTER_SCRIPT", "LOGS_AND_CHECKPOINTS")
"""Tables beside MODEL_ARGS in Megatron-LM's own tests: they describe the check of a run, not its training."""


def from_yaml(data: dict[str, Any], source: str) -> Given:
    """Read a mapping of arguments, at the top level or in a table MODEL_ARGS or arguments.

    FlagScale sorts the arguments into tables of tables (flagscale/runner/utils.py, flatten_dict_to_args).

    Names may have dashes. True gives a switch; false and null leave a flag out.

    Raises:
        InvalidInputError: a value is none of a command line.
    """
    if {"system", "model"} <= data.keys():
        data = _with_width(_leaves({name: data[name] for name in ("system", "model", "data") if name in data}))
    table = next((key for key in ("MODEL_ARGS", "arguments", "args") if isinstance(data.get(key), dict)), None)
    rest: dict[str, Any] = {}
    if table is not None:
        # Beside the table: descriptions of Megatron-LM's tests, and unknown keys.
        rest = {key: value for key, value in data.items() if key not in (table, *_BESIDE)}
        data = data[table]
    pairs = [
        (f"--{str(name).lstrip('-').replace('_', '-')}", yaml_values(value, f"{source}: {shown(name)}"))
        for name, value in [*data.items(), *rest.items()]
    ]
    world = next((int(v[0]) for name, v in pairs if name == "--world-size" and v and _COUNT.fullmatch(v[0])), None)
    named = [(name, values) for name, values in pairs if values is not None and name != "--world-size"]
    return Given(tuple((name, values) for name, values in named if values is not None), world, ())


_FLAGSCALE_ALONE = (
    *("no_shared_fs", "tokenizer_path", "tokenizer_type", "special_tokens_file", "vocab_file", "merge_file"),
    *("rampup_save_interval", "norm_init_weight"),
)
"""Names of files, tokenizers and initial values of FlagScale's own, beside Megatron-LM's."""


def _leaves(table: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the values of nested tables under their last names."""
    leaves: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            leaves |= _leaves(value)
        elif name not in _FLAGSCALE_ALONE:
            leaves[name] = value
    return leaves


def _with_width(data: dict[str, Any]) -> dict[str, Any]:
    """Write FlagScale's width of a gated feed-forward block, a multiple of ``multiple_of``, as Megatron-LM's.

    ceil(int(int(2 / 3 * 4 hidden_size) * hidden_dim_multiplier) / multiple_of) * multiple_of.

    Source: FlagOpen/FlagScale at da4935ec, backends/Megatron-LM/megatron/training/arguments.py.patch.
    """
    hidden, multiple, factor = (data.get(name) for name in ("hidden_size", "multiple_of", "hidden_dim_multiplier"))
    whole = all(type(value) is int and 0 < value < 2**31 for value in (hidden, multiple))
    if not whole or "ffn_hidden_size" in data or data.get("swiglu") is not True:
        return data
    assert isinstance(hidden, int)
    assert isinstance(multiple, int)
    width = 4 * hidden * 2 // 3
    if factor is not None:
        if type(factor) not in (int, float) or not 0 < factor < 1024:
            return data
        width = int(width * factor)
    rest = {name: value for name, value in data.items() if name not in ("multiple_of", "hidden_dim_multiplier")}
    return rest | {"ffn_hidden_size": -(-width // multiple) * multiple}


_FORMATS: Mapping[str, tuple[frozenset[str], str]] = {
    "Primus": (frozenset(("modules", "workspace")), "megatron"),
    "GPT-NeoX": (frozenset(("pipe_parallel_size",)), "megatron"),
    "LLaMA-Factory": (frozenset(("finetuning_type", "stage")), "accelerate"),
    "axolotl": (frozenset(("base_model", "datasets")), "accelerate"),
    "FlagScale": (frozenset(("system", "model")), "megatron"),
    "Accelerate": (frozenset(("distributed_type", "compute_environment")), "accelerate"),
    "NeMo AutoModel": (frozenset(("step_scheduler", "model")), "automodel"),
    "nanotron": (frozenset(("parallelism", "tokens")), "nanotron"),
}
"""Programs by the top-level keys of their YAML, and the launcher that reads it."""


def _check_format(data: Mapping[str, Any], source: str, launcher: str) -> None:
    """Refuse a YAML of another program.

    Raises:
        InvalidInputError: names the program, and the launcher that reads its YAML.
    """
    keys = {name.replace("-", "_") for name in data if isinstance(name, str)}
    for program, (marks, reader) in _FORMATS.items():
        if marks <= keys and reader != launcher:
            raise InvalidInputError(
                f"{source} is a configuration of {program}.",
                f"Expected one that --from {launcher} reads.",
                f"Give --from {reader}."
                if reader
                else f"{program} is not read: give the arguments or the configuration of what it starts.",
            )


def load_yaml(text: str, source: str, launcher: str) -> dict[str, Any]:
    """Read the mapping of a YAML text.

    Raises:
        InvalidInputError: the text is not a mapping, is another program's than the launcher's, or PyYAML is not
            installed.
    """
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise InvalidInputError(
            f"{source} is YAML, and PyYAML is not installed.",
            "Expected the extra that reads YAML.",
            "Install milpplan[launchers].",
        ) from error
    if len(text) > MAX_YAML_CHARACTERS:
        raise InvalidInputError(
            f"{source} has {len(text):,} characters.",
            f"Expected YAML of at most {MAX_YAML_CHARACTERS:,}: its parser takes seconds for more.",
            "Give the configuration of the run alone.",
        )
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise unparsable(source, "YAML", error) from error
    if not isinstance(data, dict):
        raise InvalidInputError(
            f"{source} holds {shown(data)}.",
            "Expected a mapping of arguments at its top.",
            "Write name: value lines.",
        )
    _check_format(data, source, launcher)
    return data


def yaml_values(value: object, name: str) -> Values | None:
    """Convert a YAML value to words; None: the flag is not given.

    Raises:
        InvalidInputError: no command line has such a value.
    """
    if value is None or value is False:
        return None
    if value is True:
        return ()
    words = value if isinstance(value, list) else [value]
    if not all(isinstance(word, str | int | float) for word in words):
        raise InvalidInputError(
            f"{name} is a table, a date or a list of lists.",
            "Expected a number, a text, true or false, or a list of them.",
            "Write it as the command line would have it.",
        )
    # A shell variable that assembles the arguments.
    return tuple(
        re.sub(r"\$\{[^}]*\}|\$\w+", lambda match: marked(match[0]), str(word).replace(MARK, "")) for word in words
    )
