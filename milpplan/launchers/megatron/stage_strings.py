"""Megatron-LM's strings for uneven stages: ``E`` embedding, ``t`` layer, ``L`` loss, ``|`` between virtual stages.

``x*n`` repeats a character and ``(...)*n`` a group; commas are ignored. The k-th part is virtual stage k (chunk k
// pp of rank k % pp). Source: megatron/core/transformer/pipeline_parallel_layer_layout.py at d98e8a64.
"""

from __future__ import annotations

import re
from itertools import groupby

from milpplan.errors import InvalidInputError
from milpplan.problem.reading import shown

MAX_CHARACTERS = 100_000
"""Maximum length of a string after repetition; no model has more layers."""


def stage_string(layers: tuple[int, ...]) -> str:
    """Write the string of stages with given numbers of layers; equal neighbours are written once."""
    parts = [f"t*{count}" if count > 1 else "t" * count for count in layers]
    if len(parts) == 1:
        return f"E{parts[0]}L"
    inner = [(part, len(list(same))) for part, same in groupby(parts[1:-1])]
    middle = "".join(f"({part}|)*{times}" if times > 1 and part else f"{part}|" * times for part, times in inner)
    return f"E{parts[0]}|{middle}{parts[-1]}L"


def stage_layers(text: str) -> tuple[int, ...]:
    """Return the number of layers of every virtual stage, in model order.

    Raises:
        InvalidInputError: Megatron-LM's ``validate_layer_layout`` refuses the string, or it has layers of
            multi-token
            prediction, which a plan does not have.
    """
    if len(text) > MAX_CHARACTERS:
        raise _wrong(text, "it is too long")
    text = text.replace(",", "")
    for repeated in (r"\(([^()]+)\)\*(\d+)", r"(.)\*(\d+)"):
        # Sizes are checked first, because repetitions may need more characters than memory holds.
        total = 0
        for match in re.finditer(repeated, text):
            total += MAX_CHARACTERS + 1 if len(match[2]) > 5 else len(match[1]) * int(match[2])
            if total > MAX_CHARACTERS:
                raise _wrong(text, f"{shown(match[0])} repeats too often")
        text = re.sub(repeated, lambda match: match[1] * int(match[2]), text)
        if len(text) > MAX_CHARACTERS:
            raise _wrong(text, "it is too long")
    strange = sorted(set(text) - set("EtmL|"))
    if strange:
        raise _wrong(text, f"it holds {shown(strange[0])}")
    if "m" in text:
        raise _wrong(text, "it places layers of multi-token prediction (m), which a plan does not have")
    order = text.replace("|", "")
    if order != f"E{'t' * order.count('t')}L":
        raise _wrong(text, "embedding (E), layers (t) and loss (L) do not come once each and in this order")
    if text[0] != "E" or text[-1] != "L":
        raise _wrong(text, "embedding and loss are not in the first and the last part, where a plan has them")
    return tuple(part.count("t") for part in text.split("|"))


def _wrong(text: str, why: str) -> InvalidInputError:
    return InvalidInputError(
        f"--pipeline-model-parallel-layout is {shown(text)}: {why}.",
        "Expected E first, L last, t for every layer and | between virtual stages, such as 'Et*19|t*21|t*20L'.",
        "Correct the string (core/transformer/pipeline_parallel_layer_layout.py).",
    )
