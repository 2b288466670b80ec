"""From a script with Megatron-Bridge's overrides to a problem and a plan, through Megatron-LM's arguments."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from milpplan.errors import InvalidInputError
from milpplan.launchers.arguments import Values
from milpplan.launchers.bridge_names import CONSTANT, NAMES, PRECISIONS, Name, read
from milpplan.launchers.launch_text import Given, program_place, world_of
from milpplan.launchers.megatron_import import imported_from
from milpplan.launchers.records import Imported
from milpplan.launchers.shell_marks import unknown_in
from milpplan.launchers.shell_script import script_commands
from milpplan.specs.hardware import HardwareSpec
from milpplan.specs.model import ModelSpec
from milpplan.specs.reading import shown

OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
QUIET = re.compile(
    r"(?:optimizer\.(?!use_distributed_optimizer|optimizer_cpu|use_precision|main_|exp_)|scheduler\.|logger\.|tokenizer\."
    r"|rng\.|profiling\.|checkpoint\.(?!ckpt_format)|dataset\.(?!sequence_length)|dist\.(?:local_rank|"
    r"distributed_)|train\.(?:train_iters|eval_|exit_|manual_gc)|model\.(?:rotary_|rope_|init_method|layernorm_eps"
    r"|layernorm_epsilon|activation_func$|moe_aux_loss|moe_z_loss|moe_router_(?!topk$|padding|force))).*"
)
"""Settings that change neither time nor memory, or belong to nothing that a plan has."""


def imported(
    text: str,
    source: str,
    hardware: HardwareSpec,
    num_gpus: int | None = None,
    model: ModelSpec | None = None,
    vocab_size: int | None = None,
    ignored: Collection[str] = (),
) -> Imported:
    """The plan of a launch by overrides of a recipe. What no override says the recipe would decide, and nobody
    here knows how: settings of a plan must all be there, as an export writes them.

    Raises:
        InvalidInputError: the text cannot be read, a setting of a plan is missing, or one changes the cost and is
            not priced.
        IllegalPlanError: Megatron-Core would refuse it.
    """
    settings, world = _overrides(text, source)
    names = {name.lstrip("+-") for name in ignored}
    left_out = tuple(f"{key}={value}" for key, value in settings.items() if key in names)
    settings = {key: value for key, value in settings.items() if key not in names}
    _check_known(settings, source)
    pairs = _pairs(settings, source)
    read_in = Given(tuple(pairs.items()), world, ())
    found = imported_from(read_in, source, hardware, num_gpus, model, vocab_size)
    return Imported(found.problem, found.plan, found.unknown_flags, left_out, found.notes)


def _overrides(text: str, source: str) -> tuple[dict[str, str], int | None]:
    """The last value of every setting of the program that the script starts, and its processes."""
    for command in script_commands(text):
        at = program_place(command.words)
        after = command.words[0 if at is None else at + 1 :]
        matches = [match for match in map(OVERRIDE.fullmatch, after) if match is not None]
        found = {match[1]: match[2] for match in matches if "." in match[1] or match[1] in PLAIN}
        if found and (at is not None or len(script_commands(text)) == 1):
            return found, world_of(command.words[: at or 0], text)
    raise InvalidInputError(
        f"{source} has no command with overrides of a recipe.",
        "Expected a script that starts Python with settings such as model.tensor_model_parallel_size=4.",
        "Give the script that starts training.",
    )


PLAIN = ("comm_overlap", "mixed_precision")
"""Settings without a section."""


def _check_known(settings: Mapping[str, str], source: str) -> None:
    """Nothing that may change the cost is left unseen.

    Raises:
        InvalidInputError: something is, or only the running shell knows it.
    """
    known = {key for name in NAMES for key in name.keys} | set(CONSTANT) | {"mixed_precision"}
    left = [
        f"{key}={value}"
        for key, value in settings.items()
        if (key not in known and not QUIET.fullmatch(key)) or (key in CONSTANT and not _same(value, CONSTANT[key]))
    ]
    if left:
        raise InvalidInputError(
            f"{len(left)} setting(s) may change the cost in ways that are not priced: {', '.join(left[:12])}.",
            "Expected settings that a plan or a model has, or that change neither time nor memory.",
            f"Take them out, or accept not to see what they cost: --ignore {left[0].split('=')[0]} (repeatable).",
        )
    unknown = [f"{key}={value}" for key, value in settings.items() if key in known and unknown_in(value)]
    if unknown:
        raise InvalidInputError(
            f"{source}: {unknown[0]} is a value that only the running shell knows.",
            "Expected values that the file says.",
            "Write the value into the file, or a default such as ${TP:-8}.",
        )


def _same(value: str, other: str) -> bool:
    return value.strip("\"'").lower() == other


def _pairs(settings: Mapping[str, str], source: str) -> dict[str, Values]:
    """Megatron-LM's arguments for the settings."""
    has = {
        "all": True,
        "experts": not _same(settings.get("model.num_moe_experts", "null"), "null"),
        "latent": _same(settings.get("model.multi_latent_attention", "false"), "true"),
    }
    asked = [name for name in NAMES if has[name.part]]
    missing = [name.keys[0] for name in asked if name.keys[0] not in settings]
    missing += ["mixed_precision"] if "mixed_precision" not in settings else []
    if missing:
        raise InvalidInputError(
            f"{source} leaves {len(missing)} setting(s) of a plan to the recipe: {', '.join(missing[:12])}.",
            "Expected an override of every setting of a plan or a model: what recipes say is not known here.",
            "Add the settings, as `milpplan export --to megatron-bridge` writes them.",
        )
    pairs: dict[str, Values] = {}
    for name in asked:
        values = _agreed(name, settings)
        if values is not None:
            pairs[name.flag] = values
    pairs |= _precision(settings["mixed_precision"])
    pairs["--max-position-embeddings"] = pairs["--seq-length"]
    pairs["--attention-backend"] = ("auto",)
    if "--num-query-groups" in pairs:
        pairs["--group-query-attention"] = ()
    if not has["experts"]:
        for flag in ("--expert-model-parallel-size", "--expert-tensor-parallel-size"):
            if pairs.get(flag) == ("1",):
                del pairs[flag]
    if "--pipeline-model-parallel-layout" in pairs:
        # The string says it; Megatron-Core only checks that they agree.
        pairs.pop("--num-virtual-stages-per-pipeline-rank", None)
    return pairs


def _agreed(name: Name, settings: Mapping[str, str]) -> Values | None:
    """The values of a flag, if all settings that say it say the same.

    Raises:
        InvalidInputError: they do not.
    """
    values = {key: read(name, settings[key]) for key in name.keys if key in settings}
    if len(set(values.values())) > 1:
        raise InvalidInputError(
            f"{' and '.join(f'{key}={settings[key]}' for key in values)} contradict each other.",
            "Expected the same in all of them.",
            "Correct one of them.",
        )
    return next(iter(values.values()))


def _precision(text: str) -> dict[str, Values]:
    name = text.strip("\"'").replace("-", "_")
    if name not in PRECISIONS:
        raise InvalidInputError(
            f"mixed_precision is {shown(text)}.",
            f"Expected {' or '.join(PRECISIONS)}: others are not priced.",
            "Correct mixed_precision.",
        )
    return PRECISIONS[name]
