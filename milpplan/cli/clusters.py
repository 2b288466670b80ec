"""The hardware of a command line: one description, or several with the number of GPUs of each."""

from __future__ import annotations

import re
from typing import Any, Final

from milpplan.errors import InvalidInputError
from milpplan.problem.catalog import load_hardware
from milpplan.problem.hardware import HardwareSpec
from milpplan.problem.problem import MAX_NODE_TYPES, NodeGroup
from milpplan.problem.reading import shown
from milpplan.units import counted

MAX_DIGITS: Final = 9
_GROUP: Final = re.compile(rf"(?P<name>.+):(?P<gpus>[0-9]{{1,{MAX_DIGITS}}})")


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
    found = _GROUP.fullmatch(part)
    count = int(found["gpus"]) if found else 0
    if found is None or not count:
        raise InvalidInputError(
            f"The part {shown(part)} of the cluster {shown(whole)} has no number of GPUs.",
            "Expected NAME:GPUS+NAME:GPUS, such as dgx-a100-80:64+dgx-h100:64.",
            "Give every node type the number of its GPUs, at least 1.",
        )
    return found["name"], count


def numbers(word: str) -> Any:
    """Read ``1-0`` as an order of node types or shares of replicas; the record checks it."""
    try:
        return tuple(int(part) for part in word.split("-"))
    except ValueError:
        return word
