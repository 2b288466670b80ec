"""The parts of Megatron-Bridge that read a configuration, without those that need Transformer Engine.

Its packages import every model family, and with them adapters for fine-tuning (``peft/lora.py``) whose layers are
Transformer Engine's, which does not install without CUDA. So the packages are entered without their ``__init__``,
and LoRA and DoRA, which no pre-training recipe makes, are empty names. Recipe, grammar of overrides, providers,
checks of the whole configuration and all of Megatron-Core are what is installed.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.metadata import files
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ENTERED = ("", ".models", ".peft", ".recipes")
ADAPTERS = {"lora": "LoRA", "dora": "DoRA"}


@cache
def bridge() -> SimpleNamespace:
    """The recipe that exports name, what applies overrides to it, and what checks the whole."""
    listed = next(one for one in files("megatron-bridge") or () if one.parts[:2] == ("megatron", "bridge"))
    root = Path(str(listed.locate())).parents[len(listed.parts) - 1]
    import_module("megatron.core")
    for part in ENTERED:
        name = f"megatron.bridge{part}"
        module = ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = module
    for part, adapter in ADAPTERS.items():
        module = ModuleType(f"megatron.bridge.peft.{part}")
        setattr(module, adapter, type(adapter, (), {}))
        sys.modules[module.__name__] = module
    models: Any = sys.modules["megatron.bridge.models"]
    models.GPTModelProvider = import_module("megatron.bridge.models.gpt_provider").GPTModelProvider
    models.T5ModelProvider = import_module("megatron.bridge.models.t5_provider").T5ModelProvider
    return SimpleNamespace(
        recipe=import_module("megatron.bridge.recipes.gpt.gpt3_175b").gpt3_175b_pretrain_config,
        overridden=import_module("megatron.bridge.training.utils.omegaconf_utils").process_config_with_overrides,
        checked=import_module("megatron.bridge.training.config").runtime_config_update,
    )
