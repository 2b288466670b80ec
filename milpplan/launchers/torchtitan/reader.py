"""Import of torchtitan's configuration file as a problem and a plan.

Python configurations are not run. A function that returns ``Trainer.Config(...)`` gives every setting in the
arguments of calls, nested calls included. Settings must be literals or products of integers. A name that has been
assigned a call stands for the call. Other code is refused where it may change the cost.
"""

from __future__ import annotations

import ast
import warnings
from typing import Any

from milpplan.errors import InvalidInputError
from milpplan.launchers.expressible import model_differences
from milpplan.launchers.import_request import ImportRequest, check_vocabulary, job_of
from milpplan.launchers.records import Imported
from milpplan.launchers.settings import LARGEST, MAX_DEPTH, Code, Settings, admitted, check_priced, flat
from milpplan.launchers.torchtitan.rules import check_rules
from milpplan.launchers.torchtitan.run import NEWEST, V022, V030, Pair, Run, flavors, plan_of_run
from milpplan.launchers.torchtitan.settings import QUIET, known, run_of, translated
from milpplan.problem.hardware import HardwareSpec
from milpplan.problem.model import ModelSpec
from milpplan.problem.problem import Problem
from milpplan.problem.reading import parse_toml, shown

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


def imported(request: ImportRequest) -> Imported:
    """Read a configuration into a problem and a plan.

    Args:
        request.text: TOML (up to 0.2.2), or Python (since), which is read and not run.
        request.source: its name; .py is Python.
        request.hardware: the cluster.
        request.num_gpus: processes, where data_parallel_shard_degree is -1; else they must be the product of the
        degrees. request.model: its description, which must agree with the flavor and gives its name.
        request.vocab_size: that of the flavor, or None. request.ignored: settings (section.name) whose effect on
        the cost the caller ignores.

    Raises:
        InvalidInputError: the file cannot be read, or has settings that change the cost and are not priced.
        IllegalPlanError: torchtitan would refuse the configuration.
    """
    values, version = _read(request.text, request.source)
    said, left_out = admitted(values, known(version), request.ignored, f"torchtitan {version}", QUIET)
    settings, notes = translated(said)
    flavor = _flavor(settings, request.source)
    spec = flavors()[flavor]
    _check_model(spec, flavor, request.model, request.vocab_size)
    run = run_of(settings, version, flavor, spec.has_experts, spec.num_layers, request.num_gpus)
    check_rules(run, "Correct the settings, or the number of GPUs (--gpus).")
    plan = plan_of_run(run)
    told = [*notes, *_looked_at(settings, version)]
    there = _software(run, request.hardware, told)
    check_priced(settings, QUIET)
    problem = Problem(model=request.model or spec, hardware=there, job=job_of(plan.layout, run.sequence_length))
    return Imported(problem, plan, (), left_out, tuple(told))


def _read(text: str, source: str) -> tuple[dict[str, Any], str]:
    """Read the settings and determine their dialect."""
    if source.lower().endswith(".py"):
        values = recipe_settings(text, source)
        tokens = any(name in known(NEWEST) and name not in known(V030) for name in values)
        return values, NEWEST if tokens else V030
    return flat(parse_toml(text, source)), V022


def _flavor(settings: Settings, source: str) -> Pair:
    # A class's defaults are not the model of this run.
    settings.looked_at |= {"model.name", "model.flavor"}
    name, flavor = settings.values.get("model.name"), settings.values.get("model.flavor")
    if (name, flavor) not in flavors():
        names = ", ".join(f"{name} {flavor}" for name, flavor in flavors())
        raise InvalidInputError(
            f"{source} has model.name {shown(name)} in flavor {shown(flavor)}, whose sizes are not known here.",
            f"Expected one of {names}.",
            "Plan it from its sizes instead: milpplan simulate with a model file.",
        )
    return str(name), str(flavor)


def _check_model(spec: ModelSpec, flavor: Pair, model: ModelSpec | None, vocab_size: int | None) -> None:
    if model is not None and model_differences(model, spec):
        raise InvalidInputError(
            f"--model {model.name} is not {flavor[0]} {flavor[1]}.",
            "Expected a description with the sizes of the flavor.",
            "Give another --model, or leave it out.",
        )
    check_vocabulary(vocab_size, spec, f"{flavor[0]} {flavor[1]}")


def _looked_at(settings: Settings, version: str) -> list[str]:
    """Check the number formats and kernels that are priced; note differences without effect.

    Raises:
        InvalidInputError: a format or an optimizer is not priced.
    """
    for name, wanted in (("dtype", "float32"), ("mixed_precision_param", "bfloat16")):
        text = settings.text(f"training.{name}")
        if text != wanted:
            raise InvalidInputError(
                f"training.{name} is {text}.",
                f"Expected {wanted}: weights in fp32, products in bf16, which is what is priced.",
                f"Use {wanted} to compare it as such a run.",
            )
    settings.text("training.mixed_precision_reduce")
    optimizer = settings.get("optimizer.name" if version == V022 else "optimizer")
    if optimizer not in ("Adam", "AdamW", "default_adamw", "OptimizersContainer.Config"):
        raise InvalidInputError(
            f"{'optimizer.name' if version == V022 else 'optimizer'} is {shown(optimizer)}.",
            "Expected AdamW, whose states and update are priced.",
            "Use AdamW to compare it as such a run.",
        )
    notes = []
    parts = settings.get("compile.components") or []
    if not settings.switch("compile.enable") or "model" not in parts:
        notes.append("Without torch.compile norms and activations are not fused; they are priced as fused.")
    if settings.get("loss") == "ChunkedLossWrapper.Config":
        notes.append("ChunkedLossWrapper keeps fewer logits than are counted.")
    return notes


def _software(run: Run, hardware: HardwareSpec, notes: list[str]) -> HardwareSpec:
    """Set the dispatcher of the hardware that the settings name."""
    if run.ep == 1 or hardware.software.deduplicated_dispatch == run.deduplicated:
        return hardware
    notes.append(f"software.deduplicated_dispatch = {str(run.deduplicated).lower()}, as the settings say.")
    software = hardware.software.model_copy(update={"deduplicated_dispatch": run.deduplicated})
    return hardware.model_copy(update={"software": software})
