"""Patterns over layers, such as ``([0]*3+[1]*58)``: which layers have experts, or slide a window.

Source: Megatron-LM megatron/training/arguments.py, ``moe_freq_type``, at d98e8a64: an integer, or a Python
expression of lists, ``+``, ``*`` and parentheses.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from itertools import groupby

from milpplan.errors import InvalidInputError
from milpplan.problem.reading import shown

MAX_LAYERS, MAX_CHARACTERS = 100_000, 20_000
"""Maximum number of layers of a pattern and of characters of its text; every operator may multiply the layers."""


def pattern_text(flags: Sequence[bool]) -> str:
    """Write a pattern of ones and zeros with its shortest period once."""
    size = len(flags)
    period = next(
        width
        for width in range(1, size + 1)
        if size % width == 0 and list(flags[:width]) * (size // width) == list(flags)
    )
    runs = [(int(flag), len(list(same))) for flag, same in groupby(flags[:period])]
    unit = "+".join(f"[{flag}]*{count}" if count > 1 else f"[{flag}]" for flag, count in runs)
    times = size // period
    return f"({unit})*{times}" if times > 1 else f"({unit})"


def pattern_flags(text: str, flag: str) -> list[bool] | int:
    """Read the layers of a pattern, or the frequency that an integer stands for. ``flag`` names it in messages.

    Raises:
        InvalidInputError: the text is neither.
    """
    try:
        if len(text) > MAX_CHARACTERS:
            raise ValueError("too long")
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidInputError(
            f"{flag} is {shown(text)}.",
            "Expected a positive whole number, or lists of 0 and 1 with + and *, such as ([0]*3+[1]*58).",
            f"Correct {flag}.",
        ) from error
    return value if isinstance(value, int) else [bool(element) for element in value]


def _value(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value <= MAX_LAYERS:
        return node.value
    if isinstance(node, ast.List):
        return _zeros_and_ones([_value(element) for element in node.elts])
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            if len(left) + len(right) > MAX_LAYERS:
                raise ValueError("too many layers")
            return left + right
        repeats = isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int)
        if repeats and len(left) * right <= MAX_LAYERS:  # type: ignore[arg-type, operator]
            return left * right  # type: ignore[operator]
    raise ValueError("no pattern")


def _zeros_and_ones(values: list[int | list[int]]) -> list[int]:
    flags = [value for value in values if value in (0, 1)]
    if len(flags) != len(values):
        raise ValueError("no pattern")
    return [int(value) for value in flags if isinstance(value, int)]
