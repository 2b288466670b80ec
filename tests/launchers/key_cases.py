"""Launchers' files written from settings by dotted name, so that every key of a schema can be given any value."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from milpplan.errors import MilpplanError
from milpplan.launchers import TARGETS, Imported, ImportRequest, Known, flat, is_quiet, known_settings
from milpplan.launchers.accelerate import launcher as accelerate_import
from milpplan.launchers.accelerate.launch_files import FLAG
from milpplan.launchers.automodel import launcher as automodel_import
from milpplan.launchers.deepspeed import launcher as deepspeed_settings
from milpplan.launchers.nanotron import launcher as nanotron_settings
from milpplan.launchers.shell import script_commands
from milpplan.launchers.torchtitan import settings as torchtitan_settings
from milpplan.launchers.torchtitan.run import NEWEST, V022, V030
from tests.launchers.test_fuzz import file_of
from tests.simulation.cases import shipped_hardware, shipped_model

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Schema:
    """A launcher's schema: every key with its row, those that change nothing, a file's settings, and how they are
    written. ``texts``: values are texts of a command line."""

    target: str
    file: str
    known: Known
    quiet: Callable[[str], bool]
    base: Values
    write: Callable[[Values], str]
    texts: bool = False

    def read(self, values: Values, ignored: tuple[str, ...] = ()) -> Imported | MilpplanError:
        """What an import makes of settings."""
        model = shipped_model("llama3-8b") if self.target in ("accelerate", "automodel", "deepspeed") else None
        gpus = 8 if self.target == "deepspeed" else None
        try:
            read = TARGETS[self.target].read
            return read(
                ImportRequest(
                    self.write(values), self.file, shipped_hardware("dgx-h100"), gpus, model, None, ignored
                )
            )
        except MilpplanError as error:
            return error


def nested(values: Values) -> dict[str, Any]:
    """Settings as tables in tables; what stands where a table is needed is dropped."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *path, key = name.split(".")
        table = tree
        for part in path:
            if part.endswith("[]"):
                inner = table.setdefault(part[:-2], [])
                if not isinstance(inner, list):
                    table[part[:-2]] = inner = []
                if not inner:
                    inner.append({})
                table = inner[0]
                continue
            if not isinstance(table.get(part), dict):
                table[part] = {}
            table = table[part]
        table[key] = value
    return tree


def toml(values: Values) -> str:
    """Settings as TOML."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        sections.setdefault(section, {})[key] = value
    lines = []
    for section, held in sorted(sections.items()):
        lines += [f"[{section}]"] if section else []
        lines += [f"{key} = {toml_value(value)}" for key, value in held.items()]
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """Write a value as TOML; it has no null, and a text says so."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf"
    return '"null"' if value is None else json.dumps(value)


CLASSES = {"training": "TrainingConfig", "parallelism": "ParallelismConfig", "compile": "CompileConfig"}
CALLS = {
    "loss": "CrossEntropyLoss.Config",
    "loss.loss_fn": "CrossEntropyLoss.Config",
    "optimizer": "default_adamw",
}


def recipe(values: Values) -> str:
    """Settings as a Python configuration of torchtitan."""
    tree = nested({name: value for name, value in values.items() if not _has_below(name, values)})
    names = {name: value for name, value in values.items() if _has_below(name, values)}
    model, policy = dict(tree.pop("model")), dict(tree.pop("activation_checkpoint", {}))
    name, flavor = model.pop("name"), model.pop("flavor")
    parts = [f"model_spec=model_registry({flavor!r}{_keywords(model)})"]
    kind = policy.pop("policy", None)
    if isinstance(kind, str | None):
        parts.append(
            f"activation_checkpoint={None if kind is None else f'{kind}.Config({_keywords(policy)[2:]})'}"
        )
    else:
        parts.append(f"activation_checkpoint={kind!r}")
    parts += [f"{key}={_call(key, value, names)}" for key, value in tree.items()]
    head = f"from torchtitan.models.{name} import model_registry\nfrom torchtitan.trainer import Trainer\n\n\n"
    return f"{head}def plan():\n    return Trainer.Config({', '.join(parts)})\n"


def _has_below(name: str, values: Values) -> bool:
    return any(other.startswith(f"{name}.") for other in values)


def _keywords(values: Values) -> str:
    return "".join(f", {key}={_python(value)}" for key, value in values.items())


def _call(name: str, value: Any, names: Values) -> str:
    if not isinstance(value, dict) or (not value and name not in CLASSES):
        return _python(value)
    called = CLASSES.get(name) or names.get(name) or CALLS.get(name, "Some.Config")
    if not isinstance(called, str):
        return _python(called)
    inner = ", ".join(f"{key}={_call(f'{name}.{key}', one, names)}" for key, one in value.items())
    return f"{called}({inner})"


def _python(value: Any) -> str:
    if isinstance(value, str) and value.endswith(".Config"):
        return f"{value}()"
    return "1e999" if isinstance(value, float) and not math.isfinite(value) else repr(value)


def accelerate_script(values: Values) -> str:
    """Settings of Accelerate as YAML in a script, and flags of the trainer behind the program."""
    own = {name: value for name, value in values.items() if not name.startswith(FLAG)}
    flags = [f"{name.split('.')[0]}{_argument(name, value)}" for name, value in values.items() if name not in own]
    program = "accelerate launch --config_file fsdp.yaml train_sft.py"
    return f"cat > fsdp.yaml <<'YAML'\n{yaml.safe_dump(nested(own))}YAML\n{' '.join([program, *flags])}\n"


def _argument(name: str, value: Any) -> str:
    """A flag's value as a word of the shell; a key below a flag is JSON."""
    _, _, below = name.partition(".")
    if below:
        return " " + shlex.quote(json.dumps(nested({below: value})))
    if isinstance(value, list):
        return "".join(f" {shlex.quote(str(one))}" for one in value)
    return f" {shlex.quote(json.dumps(value) if isinstance(value, dict) else str(value))}"


def bridge_script(values: Values) -> str:
    """Overrides of a recipe behind its program."""
    words = [shlex.quote(f"{name}={hydra(value)}") for name, value in values.items()]
    start = (
        "torchrun --nnodes 1 --nproc-per-node 8 scripts/training/run_recipe.py --recipe llama3_70b_pretrain_config"
    )
    return f"{start} {' '.join(words)}\n"


def hydra(value: Any) -> str:
    """Write a value as an override has it."""
    if isinstance(value, list):
        return f"[{','.join(map(hydra, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{hydra(one)}" for key, one in value.items()) + "}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


TITAN: Values = {
    "model.name": "llama3",
    "model.flavor": "8B",
    "parallelism.data_parallel_shard_degree": 8,
    "compile.enable": True,
}
BATCHES: Mapping[str, Values] = {
    V022: {"training.local_batch_size": 1, "training.seq_len": 8192, "activation_checkpoint.mode": "full"},
    V030: {"training.local_batch_size": 1, "training.seq_len": 8192, "activation_checkpoint.policy": "FullAC"},
    NEWEST: {
        "training.num_tokens_per_microbatch_per_dp_rank": 8192,
        "training.max_context_length": 8192,
        "activation_checkpoint.policy": "FullAC",
    },
}
DEEPSPEED: Values = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "bf16.enabled": True,
    "zero_optimization.stage": 3,
    "milpplan.sequence_length": 4096,
}
ACCELERATE: Values = {
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_processes": 8,
    "fsdp_config.fsdp_version": 2,
    "fsdp_config.fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    f"{FLAG}per_device_train_batch_size": 1,
    f"{FLAG}gradient_accumulation_steps": 4,
    f"{FLAG}block_size": 4096,
}


@cache
def schemas() -> dict[str, Schema]:
    """Collect every launcher's schema, torchtitan's in each dialect."""
    found = {}
    for version in (V022, V030, NEWEST):
        file, write = ("run.toml", toml) if version == V022 else ("run.py", recipe)
        quiet = torchtitan_settings.QUIET
        found[f"torchtitan {version}"] = Schema(
            "torchtitan", file, torchtitan_settings.known(version), _of(quiet), TITAN | BATCHES[version], write
        )
    known, quiet = deepspeed_settings.known(), deepspeed_settings.QUIET
    found["deepspeed"] = Schema(
        "deepspeed", "ds.json", known, _of(quiet), DEEPSPEED, lambda values: json.dumps(nested(values))
    )
    for name, known, quiet in (
        ("nanotron", nanotron_settings.known(), nanotron_settings.QUIET),
        ("automodel", known_settings("automodel_keys.json", "0.7.0"), automodel_import.QUIET),
    ):
        base = flat(yaml.safe_load(file_of(name)[2]))
        plain = {key.replace("[0]", "[]"): value for key, value in base.items()}
        found[name] = Schema(
            name, "run.yaml", known, _of(quiet), plain, lambda values: yaml.safe_dump(nested(values))
        )
    trainer = {f"{FLAG}{name}": row for name, row in known_settings("accelerate_keys.json", "trainer").items()}
    known = {**known_settings("accelerate_keys.json", "config"), **trainer}
    found["accelerate"] = Schema(
        "accelerate", "run.sh", known, _of(accelerate_import.ALL_QUIET), ACCELERATE, accelerate_script
    )
    return found | {"megatron-bridge": _bridge()}


def _of(quiet: Mapping[str, str]) -> Callable[[str], bool]:
    return lambda name: is_quiet(name, quiet)


def _bridge() -> Schema:
    words = script_commands(file_of("megatron-bridge")[2])[-1].words
    said = dict(word.split("=", 1) for word in words if "=" in word)
    listed = known_settings("bridge_keys.json", "quiet")
    known = {**{name: (value, "text") for name, value in said.items()}, **listed}
    return Schema("megatron-bridge", "run.sh", known, lambda name: name in listed, said, bridge_script, texts=True)
