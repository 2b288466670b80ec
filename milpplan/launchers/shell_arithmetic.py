"""Whole-number arithmetic of the shell: ``$((NODES * GPUS))``."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

_LARGEST = 2**63


def arithmetic(text: str, values: Mapping[str, str]) -> int | None:
    """The value of an expression of ``+ - * / %`` and parentheses; None where a part of it is not known."""
    plain = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", text).strip()
    try:
        return _value(ast.parse(plain, mode="eval").body, values)
    except (SyntaxError, ValueError, RecursionError, MemoryError, ZeroDivisionError):
        return None


def _value(node: ast.expr, values: Mapping[str, str]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return int(values.get(node.id, ""))
    if not isinstance(node, ast.BinOp):
        raise ValueError("no arithmetic")
    left, right = _value(node.left, values), _value(node.right, values)
    if max(abs(left), abs(right)) > _LARGEST:
        raise ValueError("beyond the shell's numbers")
    operators = {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}
    if type(node.op) in operators:
        return operators[type(node.op)]
    if isinstance(node.op, ast.Div | ast.FloorDiv):
        return left // right
    if isinstance(node.op, ast.Mod):
        return left % right
    raise ValueError("no arithmetic")
