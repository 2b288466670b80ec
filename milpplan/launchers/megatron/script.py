"""Shell script of a Megatron-LM launch, which runs ``torchrun`` on every node."""

from __future__ import annotations

import shlex

from milpplan.launchers.arguments import Values
from milpplan.launchers.records import Launch
from milpplan.launchers.scripts import TORCHRUN, header, places, wrapped

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


def torchrun_script(launch: Launch, version: str) -> str:
    """Write the script that every node runs; on one node it is enough by itself.

    Args:
        launch: the arguments.
        version: of milpplan, for the comment.
    """
    names = [part.name for part in launch.sections]
    lines = ["#!/usr/bin/env bash", *header(launch, version), "set -euo pipefail", ""]
    lines += [
        "# Where Megatron-LM is, and where this node is.",
        "MEGATRON_DIR=${MEGATRON_DIR:-.}",
        *places(launch),
    ]
    for part in launch.sections:
        lines += ["", *(f"# {line}" for line in wrapped(part.why)), *_array(part.name, part.arguments)]
    lines += [
        "",
        "# Not decided by the plan: learning rates, data and tokenizer. As it stands, it runs on mock data.",
        *_array("TRAINING_ARGS", {flag: (value,) for flag, value in TRAINING}),
        *_array("DATA_ARGS", {"--mock-data": (), "--tokenizer-type": ("NullTokenizer",)}),
        "",
        *TORCHRUN,
        '    "$MEGATRON_DIR/pretrain_gpt.py" \\',
        *(f'    "${{{name}[@]}}" \\' for name in [*names, "TRAINING_ARGS"]),
        '    "${DATA_ARGS[@]}"',
    ]
    return "\n".join(lines) + "\n"


def _array(name: str, arguments: dict[str, Values]) -> list[str]:
    rows = [f"    {' '.join((flag, *map(shlex.quote, values)))}" for flag, values in arguments.items()]
    return [f"{name}=(", *rows, ")"]
