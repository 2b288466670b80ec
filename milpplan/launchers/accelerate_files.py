"""Accelerate's files: the YAML of a launch and the script that starts Transformers' trainer with it, both ways.

Source: accelerate 1.15.0, parallelism_config.py, commands/launch.py, commands/config/config_args.py; flags of the
trainer: transformers examples/pytorch/language-modeling/run_clm.py and TrainingArguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from milpplan.errors import InvalidInputError
from milpplan.launchers.launch_text import load_yaml, pairs_of, program_place
from milpplan.launchers.records import ConfigLaunch
from milpplan.launchers.scripts import header
from milpplan.launchers.settings import flat
from milpplan.launchers.shell_script import script_commands

TRAINER = {
    "gradient_accumulation_steps": "--gradient_accumulation_steps",
    "per_device_train_batch_size": "--per_device_train_batch_size",
    "block_size": "--block_size",
}
"""What belongs to the trainer and not to Accelerate: flags of ``run_clm.py``."""
CHECKPOINTING = "--gradient_checkpointing"
"""The trainer's flag that recomputes all layers, where no FSDP does."""
_CONFIG = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?[^\n]*\n(.*?\n)\1[ \t]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Read:
    """Settings of Accelerate by name, numbers of the trainer, and flags that nothing here looks at."""

    settings: Mapping[str, Any]
    trainer: Mapping[str, int]
    others: Mapping[str, tuple[str, ...]]


def yaml_text(settings: Mapping[str, Any]) -> str:
    """Settings as YAML; a dot in a name opens a section."""
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
    # NO is a word of Accelerate, and false in YAML.
    return f"'{value}'" if value in ("NO", "no") else str(value)


def configuration(launch: ConfigLaunch) -> dict[str, Any]:
    """What of a launch is in the YAML."""
    of_trainer = {*TRAINER, CHECKPOINTING}
    return {name: value for name, value in launch.settings.items() if name not in of_trainer}


def script(launch: ConfigLaunch, version: str) -> str:
    """The script that every node runs; the YAML is in it. ``version`` is that of milpplan."""
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
    """Whether sharded gradients are to be reduced in every micro-batch, as a plan has them."""
    return "fsdp_config.fsdp_version" in settings and int(settings["gradient_accumulation_steps"]) > 1


def read_files(text: str, source: str) -> Read:
    """What a script says, or a YAML alone (which lacks the numbers of the trainer).

    Raises:
        InvalidInputError: there is neither.
    """
    if source.lower().endswith((".yaml", ".yml")):
        return Read(flat(load_yaml(text, source)), {}, {})
    found = _CONFIG.search(text)
    if found is None:
        raise InvalidInputError(
            f"{source} has no configuration of Accelerate in it.",
            "Expected a script with the YAML in a here document (cat > FILE <<'YAML'), or a .yaml file.",
            "Give what `milpplan export --to accelerate` writes, or the YAML with its values.",
        )
    settings = flat(load_yaml(found[2], source))
    words = next((c.words for c in script_commands(text) if program_place(c.words) is not None), ())
    at = program_place(words) or 0
    given = dict(pairs_of(words[at + 1 :])[0])
    trainer = {name: _number(flag, given.pop(flag)) for name, flag in TRAINER.items() if flag in given}
    return Read(settings, trainer, given)


def _number(flag: str, values: tuple[str, ...]) -> int:
    if len(values) != 1 or not values[0].isdigit() or int(values[0]) < 1:
        raise InvalidInputError(
            f"{flag} is {' '.join(values) or 'empty'}.", "Expected a whole number above zero.", f"Correct {flag}."
        )
    return int(values[0])
