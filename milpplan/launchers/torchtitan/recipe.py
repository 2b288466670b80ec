"""Reader of torchtitan's Python configurations, which are not run.

A function that returns ``Trainer.Config(...)`` gives every setting in the arguments of calls, nested calls
included. Settings must be literals or products of integers. A name that has been assigned a call stands for the
call. Other code is refused where it may change the cost.
"""

from __future__ import annotations

import ast
import warnings
from typing import Any

from milpplan.errors import InvalidInputError
from milpplan.launchers.settings import LARGEST, MAX_DEPTH, Code

MAX_CHARACTERS = 300_000
"""Maximum length of a configuration: the parser's tree takes hundreds of bytes per character."""
CONFIGS = {"training": "TrainingConfig", "parallelism": "ParallelismConfig", "compile": "CompileConfig"}
"""Arguments of ``Trainer.Config`` whose own arguments are settings, with their classes."""


def recipe_settings(text: str, source: str) -> dict[str, Any]:
    """Read settings by ``section.name``; other arguments give the name of their call.

    Raises:
        InvalidInputError: the text is not Python, has no or several such functions, or has arguments that only
            running
            it would give.
    """
    if len(text) > MAX_CHARACTERS:
        raise _wrong(source, f"it has {len(text):,} characters, and {MAX_CHARACTERS:,} are read at most")
    try:
        with warnings.catch_warnings():
            # Warnings about the text, such as its escapes, are not what the user asked for.
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _wrong(source, f"it is no Python: {error}") from error
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and _returned(node) is not None]
    if len(functions) != 1:
        names = ", ".join(function.name for function in functions[:6]) or "none"
        raise _wrong(source, f"it has {len(functions)} functions that return Trainer.Config(...): {names}")
    function = functions[0]
    call = _returned(function)
    assert call is not None
    calls = _assigned(function, source)
    settings: dict[str, Any] = {"model.name": _model_name(tree)}
    if call.args:
        raise _wrong(source, f"line {call.lineno} gives Trainer.Config arguments without names")
    for keyword in call.keywords:
        settings |= _argument(keyword, calls, source)
    return settings


def _wrong(source: str, why: str) -> InvalidInputError:
    return InvalidInputError(
        f"{source} cannot be read as a configuration: {why}.",
        "Expected one function that returns Trainer.Config(...) with literal arguments; it is not run.",
        "Write the values into the calls, and keep one function in the file.",
    )


def _returned(function: ast.FunctionDef) -> ast.Call | None:
    last = function.body[-1]
    value = last.value if isinstance(last, ast.Return) else None
    return value if isinstance(value, ast.Call) and _name(value.func) == "Trainer.Config" else None


def _name(node: ast.expr) -> str:
    """Return a dotted name, or an empty text."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute) and len(parts) < MAX_DEPTH:
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _assigned(function: ast.FunctionDef, source: str) -> dict[str, ast.expr]:
    """Map names to their assigned expressions; a docstring and asserts are skipped."""
    assigned: dict[str, ast.expr] = {}
    for node in function.body[:-1]:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            assigned[node.targets[0].id] = node.value
        elif not isinstance(node, ast.Assert) and not (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            raise _wrong(source, f"line {node.lineno} is code that only runs")
    return assigned


def _model_name(tree: ast.Module) -> str | None:
    """Return the module that ``model_registry`` is imported from."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any(alias.name == "model_registry" for alias in node.names):
            return (node.module or "").rpartition(".")[2] or None
    return None


def _argument(keyword: ast.keyword, calls: dict[str, ast.expr], source: str) -> dict[str, Any]:
    name, value = keyword.arg, keyword.value
    if name is None:
        raise _wrong(source, f"line {keyword.value.lineno} passes arguments by **")
    if isinstance(value, ast.Name) and value.id in calls:
        value = calls[value.id]
    if name == "model_spec":
        return _model(value, source)
    if name == "activation_checkpoint":
        return _policy(value, source)
    if name in CONFIGS:
        if not isinstance(value, ast.Call) or _name(value.func) != CONFIGS[name] or value.args:
            raise _wrong(source, f"{name} is not {CONFIGS[name]}(...)")
        return _named_literals(value, name, source)
    return _call(value, name, source)


def _named_literals(call: ast.Call, section: str, source: str) -> dict[str, Any]:
    """Read the arguments of a call as settings of a section."""
    if any(part.arg is None for part in call.keywords):
        raise _wrong(source, f"line {call.lineno} passes arguments by **")
    return {
        f"{section}.{part.arg}": _literal(part.value, f"{section}.{part.arg}", source) for part in call.keywords
    }


def _call(value: ast.expr, name: str, source: str) -> dict[str, Any]:
    """Read a call: the setting is its name, and its arguments are settings below it."""
    if not isinstance(value, ast.Call) or value.args:
        return {name: _loose(value)}
    if any(part.arg is None for part in value.keywords) or name.count(".") >= MAX_DEPTH:
        raise _wrong(source, f"line {value.lineno} passes arguments by **, or nests calls too deeply")
    settings: dict[str, Any] = {name: _name(value.func) or _code(value)}
    for part in value.keywords:
        settings |= _call(part.value, f"{name}.{part.arg}", source)
    return settings


def _model(value: ast.expr, source: str) -> dict[str, Any]:
    if not isinstance(value, ast.Call) or _name(value.func) != "model_registry" or len(value.args) != 1:
        raise _wrong(source, "model_spec is not model_registry(FLAVOR)")
    settings = {"model.flavor": _literal(value.args[0], "the flavor", source)}
    return settings | _named_literals(value, "model", source)


def _policy(value: ast.expr, source: str) -> dict[str, Any]:
    name = "activation_checkpoint.policy"
    if isinstance(value, ast.Constant) and value.value is None:
        return {name: None}
    if not isinstance(value, ast.Call) or not _name(value.func).endswith(".Config"):
        raise _wrong(source, "activation_checkpoint is neither None nor a policy's Config()")
    if value.args:
        raise _wrong(source, f"line {value.lineno} gives a policy arguments without names")
    settings = {name: _name(value.func).removesuffix(".Config")}
    return settings | _named_literals(value, "activation_checkpoint", source)


def _loose(value: ast.expr) -> Any:
    """Read a literal, or return the mark for code."""
    try:
        return _value(value)
    except (ValueError, TypeError, RecursionError):
        return _code(value)


def _code(value: ast.expr) -> Code:
    return Code(f"code of line {value.lineno}")


def _literal(value: ast.expr, name: str, source: str) -> Any:
    try:
        return _value(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise _wrong(source, f"{name} is not a literal") from error


def _value(node: ast.expr) -> Any:
    """Evaluate a literal, or a product of integers."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _value(node.left), _value(node.right)
        if type(left) is int and type(right) is int and max(abs(left), abs(right), abs(left * right)) < LARGEST:
            return left * right
        raise ValueError("no whole numbers that a setting has")
    return ast.literal_eval(node)
