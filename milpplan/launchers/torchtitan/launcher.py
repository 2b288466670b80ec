"""Launcher torchtitan, export and import: TOML up to 0.2.2 and Python since, checked against its rules before
writing.

Python configurations are not run. A function that returns ``Trainer.Config(...)`` gives every setting in the
arguments of calls, nested calls included. Settings must be literals or products of integers. A name that has been
assigned a call stands for the call. Other code is refused where it may change the cost.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from milpplan.errors import InvalidInputError
from milpplan.launchers import Code, ConfigLaunch, Imported, ImportRequest, flat
from milpplan.launchers.expressible import (
    ConfigLauncher,
    broken_rules,
    check_rules,
    layout_differences,
    model_differences,
)
from milpplan.launchers.records import Refusal, check_vocabulary, job_of
from milpplan.launchers.scripts import HERE, header, torchrun_script
from milpplan.launchers.settings import LARGEST, MAX_DEPTH, Settings, admitted, check_priced
from milpplan.launchers.torchtitan.run import (
    NEWEST,
    RULES,
    TORCHTITAN,
    V022,
    V030,
    Pair,
    Run,
    flavor_of,
    flavors,
    layout_of_run,
    plan_losses,
    plan_of_run,
    run_of_plan,
    sharding_of,
    titan_program,
)
from milpplan.launchers.torchtitan.settings import QUIET, known, run_of, settings_of, translated
from milpplan.problem import HardwareSpec, ModelSpec, Plan, Problem
from milpplan.problem.reading import parse_toml, shown

MAX_CHARACTERS = 300_000
"""Maximum length of a configuration: the parser's tree takes hundreds of bytes per character."""
CONFIGS = {"training": "TrainingConfig", "parallelism": "ParallelismConfig", "compile": "CompileConfig"}
"""Arguments of ``Trainer.Config`` whose own arguments are settings, with their classes."""


def recipe_settings(text: str, source: str, config: object = None) -> dict[str, Any]:
    """Read settings by ``section.name``; other arguments give the name of their call.

    Args:
        text: Python, with functions that return ``Trainer.Config(...)``.
        source: its path; ``from . import model_registry`` names the folder that it lies in.
        config: the name of the function; None: there is one.

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
    names = ", ".join(function.name for function in functions[:12]) or "none"
    if config is not None:
        functions = [function for function in functions if function.name == config]
    if len(functions) != 1:
        asked = "" if config is None else f" named {shown(config)}"
        raise _wrong(source, f"it has {len(functions)} functions{asked} that return Trainer.Config(...): {names}")
    function = functions[0]
    call = _returned(function)
    assert call is not None
    calls = _assigned(function, source)
    settings: dict[str, Any] = {"model.name": _model_name(tree, source)}
    if call.args:
        raise _wrong(source, f"line {call.lineno} gives Trainer.Config arguments without names")
    for keyword in call.keywords:
        settings |= _argument(keyword, calls, source)
    return settings


def _wrong(source: str, why: str) -> InvalidInputError:
    return InvalidInputError(
        f"{source} cannot be read as a configuration: {why}.",
        "Expected one function that returns Trainer.Config(...) with literal arguments; it is not run.",
        "Name one function with --set config=NAME, and write values into its calls.",
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


def _model_name(tree: ast.Module, source: str) -> str | None:
    """Return the module that ``model_registry`` is imported from; a single dot is the folder of the file."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any(alias.name == "model_registry" for alias in node.names):
            if node.level == 1 and node.module is None:
                return Path(source).absolute().parent.name or None
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
        f"{section}.{part.arg}": _read_literal(part.value, f"{section}.{part.arg}", source)
        for part in call.keywords
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
    settings = {"model.flavor": _read_literal(value.args[0], "the flavor", source)}
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


def _read_literal(value: ast.expr, name: str, source: str) -> Any:
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

    The text is TOML (up to 0.2.2), or Python (since), which is read and not run: its source ends with .py. A model
    of the request must agree with the flavor, and gives its name. Where data_parallel_shard_degree is -1, the
    request has the number of processes.

    Raises:
        InvalidInputError: the file cannot be read, or has settings that change the cost and are not priced.
        IllegalPlanError: torchtitan would refuse the configuration.
    """
    values, version = _read(request.text, request.source, request.given)
    said, left_out = admitted(values, known(version), request.ignored, f"torchtitan {version}", QUIET)
    settings, notes = translated(said)
    flavor = _flavor(settings, request.source)
    spec = flavors()[flavor]
    _check_model(spec, flavor, request.model, request.vocab_size)
    run = run_of(settings, version, flavor, spec, request.num_gpus)
    do = "Correct the settings, or the number of GPUs (--gpus)."
    check_rules(f"torchtitan {run.version}", broken_rules(RULES, run), do)
    plan = plan_of_run(run)
    told = [*notes, *_looked_at(settings, version)]
    there = _software(run, _compiled(settings), request.hardware, told)
    check_priced(settings, QUIET)
    problem = Problem(model=request.model or spec, hardware=there, job=job_of(plan.layout, run.sequence_length))
    return Imported(problem, plan, (), left_out, tuple(told))


def _read(text: str, source: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Read the settings and determine their dialect; ``given`` settings win.

    ``config`` names the function of a registry, as ``--config`` does at torchtitan's start.
    """
    stated = {name: value for name, value in given.items() if name != "config"}
    if source.lower().endswith(".py"):
        values = recipe_settings(text, source, given.get("config")) | stated
        tokens = any(name in known(NEWEST) and name not in known(V030) for name in values)
        return values, NEWEST if tokens else V030
    return flat(parse_toml(text, source)) | dict(given), V022


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
    if not _compiled(settings):
        notes.append("Without torch.compile norms and activations are not fused; they are priced as fused.")
    if settings.get("loss") == "ChunkedLossWrapper.Config":
        notes.append("ChunkedLossWrapper keeps fewer logits than are counted.")
    return notes


def _compiled(settings: Settings) -> bool:
    """Check if layers are compiled."""
    return settings.switch("compile.enable") and "model" in (settings.get("compile.components") or [])


def _software(run: Run, compiled: bool, hardware: HardwareSpec, notes: list[str]) -> HardwareSpec:
    """Set what the settings decide of the software: the dispatcher, and what checkpoints by product keep."""
    kept = titan_program(run.version) | {"keeps_unread_results": not compiled}
    wanted = kept | ({"deduplicated_dispatch": run.deduplicated} if run.ep > 1 else {})
    changes = {name: value for name, value in wanted.items() if getattr(hardware.software, name) != value}
    told = {name: value for name, value in changes.items() if name not in kept or run.recompute == "selective"}
    notes += [f"software.{name} = {str(value).lower()}, as the settings say." for name, value in told.items()]
    software = hardware.software.model_copy(update=changes)
    return hardware.model_copy(update={"software": software})


MODULE = "torchtitan_plan"
"""Name of the configuration file and of its Python module."""

WHY = {
    "model": "The model, one that torchtitan knows by name and flavor.",
    "training": "The batch of a step, and number formats.",
    "parallelism": "Degrees, stages and sharding.",
    "activation_checkpoint": "Recomputation of all layers alike: whole, all but every second product, or none.",
    "compile": "Layers are compiled: their kernels are fused, as they are priced.",
}
TRAINING_022: dict[str, dict[str, Any]] = {
    "model": {"hf_assets_path": "./assets/hf/tokenizer"},
    "training": {"dataset": "c4", "steps": 100},
    "optimizer": {"name": "AdamW", "lr": 3e-4},
    "lr_scheduler": {"warmup_steps": 20},
}
"""Settings that a run needs and a plan does not decide."""
IMPORTS = {
    "0.3.0": (
        "from torchtitan.components.loss import CrossEntropyLoss",
        "from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw",
        "from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig",
        "from torchtitan.distributed.activation_checkpoint import {policy}",
        "from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader",
        "from torchtitan.models.common.config_utils import decoder_vocab_size",
        "from torchtitan.models.{model} import model_registry",
        "from torchtitan.trainer import Trainer",
    ),
    NEWEST: (
        "from torchtitan.components.data import ConcatThenSplitPackingConfig, GrainDataLoader",
        "from torchtitan.components.loss import CrossEntropyLoss",
        "from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw",
        "from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig",
        "from torchtitan.distributed.activation_checkpoint import {policy}",
        "from torchtitan.hf_datasets.text_datasets import DATASETS",
        "from torchtitan.models.common.config_utils import decoder_vocab_size",
        "from torchtitan.models.{model} import model_registry",
        "from torchtitan.trainer import Trainer",
    ),
}
DATA = {
    "0.3.0": 'HuggingFaceTextDataLoader.Config(dataset="c4")',
    NEWEST: 'GrainDataLoader.Config(dataset=ConcatThenSplitPackingConfig(dataset=DATASETS["c4"]))',
}
CLASSES = {"training": "TrainingConfig", "parallelism": "ParallelismConfig", "compile": "CompileConfig"}
SCRIPT = "torchtitan.sh"


def _files(launch: ConfigLaunch, version: str) -> dict[str, str]:
    """Write the launch as files by name: first the configuration, then scripts that start it. ``version`` is
    milpplan's."""
    toml = launch.version == V022
    config = f"{MODULE}.toml" if toml else f"{MODULE}.py"
    program: tuple[str, ...] = ("-m torchtitan.train", f'--job.config_file "$HERE/{config}"')
    before = [HERE]
    if not toml:
        before.append('export PYTHONPATH="$HERE${PYTHONPATH:+:$PYTHONPATH}"')
        program = ("-m torchtitan.train", f"--module {MODULE} --config plan")
    return {
        config: _config(launch, version),
        SCRIPT: torchrun_script(launch, version, program, tuple(before)),
    }


def _config(launch: ConfigLaunch, version: str) -> str:
    """Write the configuration file; ``version`` is milpplan's."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in launch.settings.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    lines = header(launch, version)
    lines += _toml(sections) if launch.version == V022 else _python(sections, launch.version)
    return "\n".join(lines) + "\n"


def _toml(sections: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    for section, values in sections.items():
        lines += ["", f"# {WHY[section]}", f"[{section}]"]
        lines += [f"{key} = {_literal(value)}" for key, value in values.items()]
        if section in TRAINING_022:
            lines.append("# Not decided by the plan:")
            lines += [f"{key} = {_literal(value)}" for key, value in TRAINING_022[section].items()]
    lines += ["", "# Not decided by the plan: learning rates."]
    for section in ("optimizer", "lr_scheduler"):
        lines += [
            f"[{section}]",
            *(f"{key} = {_literal(value)}" for key, value in TRAINING_022[section].items()),
            "",
        ]
    return lines[:-1]


def _literal(value: Any) -> str:
    """Write a value in TOML; lists of stages take a line per stage."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + "".join(f"    {json.dumps(part)},\n" for part in value) + "]"
    return json.dumps(value)


def _python(sections: dict[str, dict[str, Any]], version: str) -> list[str]:
    model = sections.pop("model")
    policy = sections.pop("activation_checkpoint")["policy"]
    used = [line for line in IMPORTS[version] if policy is not None or "{policy}" not in line]
    imports = [line.format(model=model["name"], policy=policy) for line in used]
    lines = ["", *imports, "", "", "def plan() -> Trainer.Config:"]
    lines.append('    """The run of the plan."""')
    registry = [json.dumps(model["flavor"])]
    registry += [f"{key}={value!r}" for key, value in model.items() if key == "moe_comm_backend"]
    lines.append(f"    model_spec = model_registry({', '.join(registry)})")
    lines += ["    return Trainer.Config(", "        model_spec=model_spec,"]
    for section, values in sections.items():
        if section == "compile":
            lines += [f"        # {WHY['activation_checkpoint']}"]
            lines += [f"        activation_checkpoint={f'{policy}.Config()' if policy else None},"]
        lines += [f"        # {WHY[section]}", f"        {section}={CLASSES[section]}("]
        lines += [f"            {key}={_python_literal(value)}," for key, value in values.items()]
        lines += ["            steps=100,"] * (section == "training")
        lines += ["        ),"]
    return [
        *lines,
        "        # Not decided by the plan: tokenizer, data, learning rates.",
        "        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec)),",
        '        hf_assets_path="./assets/hf/tokenizer",',
        f"        dataloader={DATA[version]},",
        "        optimizer=default_adamw(lr=3e-4),",
        "        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=20),",
        "    )",
    ]


def _python_literal(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + "".join(f"                {json.dumps(part)},\n" for part in value) + "            ]"
    return json.dumps(value) if isinstance(value, str | list) else repr(value)


def _losses(model: ModelSpec) -> list[str]:
    if flavor_of(model) is not None:
        return []
    return [f"it knows models by name and flavor, and {model.name} is none of its own (torchtitan/models)"]


def _run(problem: Problem, plan: Plan, version: str) -> Run:
    """Return the run of a plan whose model torchtitan knows."""
    flavor = flavor_of(problem.model)
    assert flavor is not None
    deduplicated = problem.hardware.software.deduplicated_dispatch
    return run_of_plan(version, flavor, problem.model.has_experts, problem.job.sequence_length, deduplicated, plan)


def _settings(problem: Problem, plan: Plan, version: str) -> dict[str, Any]:
    return settings_of(_run(problem, plan, version))


def _differences(problem: Problem, plan: Plan, version: str) -> list[Refusal]:
    """List the differences between the plan and the run that the files start."""
    run = _run(problem, plan, version)
    sharding = sharding_of(run)
    runs = layout_of_run(run)
    decided = ("zero_stage", "keep_weights", "overlap_grad_reduce", "overlap_param_gather")
    reasons = dict.fromkeys(decided, sharding.why)
    reasons |= {
        "sequence_parallel": f"up to {V022} tensor parallelism is sequence parallel always",
        "etp": "experts are cut over tp without ep; with it over 1 rank, or (0.2.2) over tp",
        "gather_again": "autograd keeps the gathered inputs of products, and nothing gathers them again",
        "schedule": "without a pipeline there is one schedule",
    }
    differences = layout_differences(plan, runs, reasons, runs.expert_dp if run.experts else 1)
    software = problem.hardware.software
    if plan.selects and not software.operator_checkpoints:
        differences.append(
            Refusal("layers replay norms and activations: it replays every second product", "recompute=none")
        )
    elif plan.selects and software.fused_qkv == (version == V022):
        products = "three products" if version == V022 else "one product"
        text = f"queries, keys and values are {products} in {version}, so it replays others than are counted"
        differences.append(Refusal(text, "recompute=none"))
    differences += [Refusal(text) for text in plan_losses(run) if run.cp == 1 or not text.startswith("context")]
    return differences + [Refusal(text) for text in broken_rules(RULES, run).values()]


def _notes(problem: Problem, plan: Plan, version: str) -> list[str]:
    run = _run(problem, plan, version)
    notes = [
        "Weights are kept in fp32, sharded, beside the gathered bf16 ones: what the plan counts as master weights."
    ]
    if run.pp > 1 and run.shard > 1:
        notes.append(
            "The first gather of weights may overlap the first forward; the plan counts it before the step."
        )
    if run.version != V022:
        notes.append("Documents are packed and masked apart; the plan counts attention over whole sequences.")
    if run.deduplicated:
        notes.append("The dispatcher deepep needs DeepEP installed.")
    if run.flavor[0] == "deepseek_v3" or run.experts:
        notes.append("Experts are balanced by torchtitan's own bias, not by dropping tokens.")
    return notes


LAUNCHER = ConfigLauncher(
    TORCHTITAN,
    _settings,
    _notes,
    _files,
    imported,
    losses=_losses,
    differences=_differences,
    environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
)
"""Launcher torchtitan, export and import: TOML configurations up to 0.2.2 and Python configurations since."""
