"""Writer of torchtitan's configuration files: TOML up to 0.2.2, Python since."""

from __future__ import annotations

import json
from typing import Any

from milpplan.launchers.records import ConfigLaunch
from milpplan.launchers.scripts import header
from milpplan.launchers.torchtitan.run import NEWEST, V022

MODULE = "torchtitan_plan"
"""Name of the configuration file and of its Python module."""

WHY = {
    "model": "The model, one that torchtitan knows by name and flavor.",
    "training": "The batch of a step, and number formats.",
    "parallelism": "Degrees, stages and sharding.",
    "activation_checkpoint": "Recomputation of whole layers, of all or of none.",
    "compile": "Layers are compiled: their kernels are fused, as they are priced.",
}
TRAINING_022: dict[str, dict[str, Any]] = {
    "model": {"hf_assets_path": "./assets/hf/tokenizer"},
    "training": {"dataset": "c4", "steps": 100},
    "optimizer": {"name": "AdamW", "lr": 3e-4},
    "lr_scheduler": {"warmup_steps": 20},
}
"""Settings that a run needs and a plan does not decide."""


def config_text(launch: ConfigLaunch, version: str) -> str:
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


IMPORTS = {
    "0.3.0": (
        "from torchtitan.components.loss import CrossEntropyLoss",
        "from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw",
        "from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig",
        "from torchtitan.distributed.activation_checkpoint import FullAC",
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
        "from torchtitan.distributed.activation_checkpoint import FullAC",
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


def _python(sections: dict[str, dict[str, Any]], version: str) -> list[str]:
    model = sections.pop("model")
    policy = sections.pop("activation_checkpoint")["policy"]
    used = [line for line in IMPORTS[version] if policy is not None or "FullAC" not in line]
    lines = ["", *(line.format(model=model["name"]) for line in used), "", "", "def plan() -> Trainer.Config:"]
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
