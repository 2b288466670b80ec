"""Accelerate's files, to write and to read: a launch YAML and the script that starts Transformers' trainer with
it.

Source: accelerate 1.15.0, parallelism_config.py, commands/launch.py, commands/config/config_args.py; flags of the
trainer: transformers 5.24.0, training_args.py and examples/pytorch/language-modeling/run_clm.py; trl 1.16.0,
trainer/sft_config.py, trainer/model_config.py and scripts/utils.py; with names of older releases. All of them are
in ``accelerate_keys.json``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from milpplan.errors import InvalidInputError
from milpplan.launchers.records import ConfigLaunch
from milpplan.launchers.scripts import header
from milpplan.launchers.settings import Code, Known, check_words, flat, kinds_of, known_settings
from milpplan.launchers.shell.launch_text import load_yaml, pairs_of, program_place
from milpplan.launchers.shell.script import script_commands
from milpplan.launchers.shell.tree import unknown_in
from milpplan.problem.reading import parse_json, shown

TRAINER = {
    "gradient_accumulation_steps": "--gradient_accumulation_steps",
    "per_device_train_batch_size": "--per_device_train_batch_size",
    "block_size": "--block_size",
}
"""Settings that belong to the trainer and not to Accelerate, with their flags of ``run_clm.py``."""
CHECKPOINTING = "--gradient_checkpointing"
"""Trainer's flag that recomputes all layers where FSDP does not."""
KEYS = "accelerate_keys.json"
FLAG = "--"
"""Prefix of the trainer's flags, which sets them apart from Accelerate's settings."""
_DOCUMENT = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")
_TARGET = re.compile(r"(?<![<>&0-9])>\s*['\"]?([^\s'\"<>|;&]+)")
_EMPTY = "\x01"
"""Stand-in for an empty word, which is a value."""
_TRUE, _FALSE = ("true", "yes", "y", "t", "1"), ("false", "no", "n", "f", "0")
"""Words that HfArgumentParser takes for true and false."""


@dataclass(frozen=True, slots=True)
class Read:
    """Read launch: Accelerate's settings by name, the trainer's flags with prefix ``FLAG``, and the started
    program."""

    values: Mapping[str, Any]
    program: str | None


def yaml_text(settings: Mapping[str, Any]) -> str:
    """Write settings as YAML; a dot in a name opens a section."""
    lines: list[str] = []
    section = ""
    for name, value in settings.items():
        first, _, rest = name.rpartition(".")
        if first != section:
            section = first
            lines.append(f"{first}:")
        lines.append(f"{'  ' if first else ''}{rest}: {_scalar(value)}")
    return "\n".join(lines) + "\n"


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    # Accelerate uses the word NO, which YAML reads as false.
    return f"'{value}'" if value in ("NO", "no") else str(value)


def configuration(launch: ConfigLaunch) -> dict[str, Any]:
    """Select the settings of a launch that the YAML holds."""
    of_trainer = {*TRAINER, CHECKPOINTING}
    return {name: value for name, value in launch.settings.items() if name not in of_trainer}


def script(launch: ConfigLaunch, version: str) -> str:
    """Write the script that every node runs, which contains the YAML. ``version`` is milpplan's."""
    config = configuration(launch)
    numbers = [f"    {flag} {launch.settings[name]} \\" for name, flag in TRAINER.items()]
    if CHECKPOINTING in launch.settings:
        numbers.append(f"    {CHECKPOINTING} true \\")
    lines = ["#!/usr/bin/env bash", *header(launch, version), "set -euo pipefail", ""]
    lines += [
        "# Where this node is, what is trained by which program, and where the configuration goes.",
        "NODE_RANK=${NODE_RANK:-0}",
        "MASTER_ADDR=${MASTER_ADDR:-localhost}",
        "MASTER_PORT=${MASTER_PORT:-29500}",
        "MODEL=${MODEL:-.}",
        "TRAIN_DIR=${TRAIN_DIR:-.}",
        "CONFIG=${CONFIG:-$(mktemp)}",
        "",
        "cat > \"$CONFIG\" <<'YAML'",
        *yaml_text(config).splitlines(),
        "YAML",
        "",
        "# Not decided by the plan: data, learning rates. Any program of Transformers' Trainer takes",
        "# these flags; run_clm.py is in its examples (examples/pytorch/language-modeling).",
        'accelerate launch --config_file "$CONFIG" --machine_rank "$NODE_RANK" \\',
        '    --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" \\',
        '    "$TRAIN_DIR/run_clm.py" \\',
        *numbers,
        '    --config_name "$MODEL" --tokenizer_name "$MODEL" --dataset_name wikitext \\',
        "    --dataset_config_name wikitext-103-raw-v1 --do_train --bf16 true --max_steps 100 \\",
        *(
            ['    --accelerator_config \'{"gradient_accumulation_kwargs": {"sync_each_batch": true}}\' \\']
            if _syncs(launch.settings)
            else []
        ),
        '    --output_dir "${OUTPUT_DIR:-output}"',
    ]
    return "\n".join(lines) + "\n"


def _syncs(settings: Mapping[str, Any]) -> bool:
    """Test whether sharded gradients must be reduced in every micro-batch, as a plan assumes."""
    return "fsdp_config.fsdp_version" in settings and int(settings["gradient_accumulation_steps"]) > 1


def read_files(text: str, source: str) -> Read:
    """Read a script, or a YAML alone (which lacks the trainer's numbers).

    Raises:
        InvalidInputError: the text is neither, or only a running shell has its values.
    """
    if source.lower().endswith((".yaml", ".yml")):
        return Read(named(flat(load_yaml(text, source))), None)
    started = {launched for c in script_commands(text, source) if (launched := _launched(c.words)) is not None}
    if len(started) != 1:
        raise InvalidInputError(
            f"{source} has {len(started)} different commands `accelerate launch ... PROGRAM.py ...`.",
            "Expected one, which starts the training.",
            "Give the script that starts it, as `milpplan export --to accelerate` writes it.",
        )
    before, program, after = next(iter(started))
    launch = _flags_of(
        before, {**known_settings(KEYS, "launch"), **_unprefixed(known_settings(KEYS, "config"))}, source
    )
    values = named(flat(load_yaml(_document(text, launch.pop("config_file", None), source), source)))
    values |= named(launch, flags=True)
    trainer = _flags_of(after, known_settings(KEYS, "trainer"), source)
    return Read(values | {f"{FLAG}{name}": value for name, value in trainer.items()}, program)


def _unprefixed(schema: Known) -> Known:
    """Name settings as the command does, without their section."""
    return {name.rpartition(".")[2]: row for name, row in schema.items()}


def _launched(words: tuple[str, ...]) -> tuple[tuple[str, ...], str, tuple[str, ...]] | None:
    """Split a command into Accelerate's own words, the program, and the program's words."""
    for index, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name == "accelerate" and words[index + 1 : index + 2] == ("launch",):
            return _parted(words[index + 2 :])
        if name in ("accelerate-launch", "accelerate.commands.launch"):
            return _parted(words[index + 1 :])
    return None


def _parted(words: tuple[str, ...]) -> tuple[tuple[str, ...], str, tuple[str, ...]] | None:
    module = next((index for index, word in enumerate(words) if word in ("-m", "--module")), None)
    at = program_place(words)
    if module is not None and (at is None or module < at) and module + 1 < len(words):
        return words[:module], words[module + 1], words[module + 2 :]
    return None if at is None else (words[:at], words[at].rpartition("/")[2], words[at + 1 :])


def _document(text: str, config_file: object, source: str) -> str:
    """Find the here document that the command takes its configuration from."""
    wanted = config_file if isinstance(config_file, str) else None
    documents: list[tuple[str, str]] = []
    lines = iter(text.splitlines())
    for line in lines:
        match = _DOCUMENT.search(line)
        if match is None or line.lstrip().startswith("#"):
            continue
        body = []
        for inside in lines:
            if inside.strip() == match[1]:
                break
            body.append(inside)
        target = _TARGET.search(line)
        documents.append((target[1] if target else "", "\n".join(body)))
    # A variable may name any file.
    fitting = [(target, body) for target, body in documents if wanted in (None, target) or "$" in target]
    if len(fitting) != 1:
        raise InvalidInputError(
            f"{source} has {len(fitting)} here documents for the configuration of Accelerate.",
            "Expected one, with the YAML in it (cat > FILE <<'YAML'), or a .yaml file.",
            "Give what `milpplan export --to accelerate` writes, or put the YAML into the script.",
        )
    return fitting[0][1]


SECTIONS = {"fsdp_": "fsdp_config", "dynamo_": "dynamo_config", "parallelism_config_": "parallelism_config"}
"""Sections by the prefix of their settings."""


def named(values: Mapping[str, Any], flags: bool = False) -> dict[str, Any]:
    """Give settings their full names (commands/launch.py, _validate_launch_command).

    Args:
        values: settings; in a section they may lack its prefix, except in parallelism_config.
        flags: the settings are flags of the command, which have no section.
    """
    full: dict[str, Any] = {}
    for name, value in values.items():
        section, _, rest = name.partition(".")
        prefix = next((start for start, own in SECTIONS.items() if own == section), "")
        own_section = next((own for start, own in SECTIONS.items() if name.startswith(start) and name != own), "")
        if rest and prefix in ("fsdp_", "dynamo_") and not rest.startswith(prefix):
            name = f"{section}.{prefix}{rest}"
        elif flags and not rest and own_section:
            name = f"{own_section}.{name}"
        full[name] = value
    return full


def _flags_of(words: tuple[str, ...], schema: Known, source: str) -> dict[str, Any]:
    """Read flags and convert their values to the declared types; others stay texts.

    Raises:
        InvalidInputError: a word is not a flag, or only the running shell has it.
    """
    check_words(words, source)
    pairs, stray = pairs_of([word or _EMPTY for word in words])
    if stray:
        said = [*unknown_in(" ".join(stray)), *stray]
        raise InvalidInputError(
            f"{source}: {shown(said[0])} stands between the flags of a program, and may hold others.",
            "Expected flags that the file says.",
            "Write them out in the command.",
        )
    flags_read: dict[str, Any] = {}
    for flag, values in pairs:
        name = flag.lstrip("-").replace("-", "_")
        if name.startswith("no_") and name not in schema and not values:
            name, values = name.removeprefix("no_"), ("false",)
        flags_read |= _typed(name, values, schema.get(name, (None, "text")))
    return flags_read


def _typed(name: str, values: tuple[str, ...], row: tuple[Any, ...]) -> dict[str, Any]:
    """Convert a flag's value as the parser does; a table in JSON becomes settings below the flag."""
    kinds = kinds_of(row)
    if len(values) != 1:
        return {name: True if not values and "bool" in kinds else list(values)}
    text = "" if values[0] == _EMPTY else values[0]
    if unknown_in(text):
        return {name: Code(f"{unknown_in(text)[0]}, which only the running shell knows")}
    if text.startswith("{"):
        return flat(parse_json(text, f"--{name}"), f"{name}.") or {name: {}}
    if "bool" in kinds and text.lower() in (*_TRUE, *_FALSE):
        return {name: text.lower() in _TRUE}
    if {"count", "int", "counts"} & set(kinds) and re.fullmatch(r"-?\d{1,18}", text):
        return {name: int(text)}
    if "number" in kinds and re.fullmatch(r"[-+]?(\d{1,99}\.?\d{0,99}|\.\d{1,99})([eE][-+]?\d{1,3})?", text):
        return {name: float(text)}
    return {name: [text] if kinds == ("texts",) else text}
