"""What this machine lacks and a launcher's configuration code asks for: an H100, and libraries that do not install
without CUDA, whose modules import and have empty classes."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

HOPPER = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0)


def hopper(patch: pytest.MonkeyPatch) -> None:
    """PyTorch's answers about the GPU of this process are those of an H100."""
    import torch

    patch.setattr(torch.cuda, "get_device_properties", lambda *_: HOPPER)
    patch.setattr(torch.cuda, "get_device_capability", lambda *_: (HOPPER.major, HOPPER.minor))


class Empty(ModuleType):
    """A module of an absent library: its lower-case names are modules, all others are empty layers.

    The version is Transformer Engine's, on which Megatron-Core's checks depend.
    """

    __path__: list[str] = []
    __version__ = "2.8.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].islower():
            return import_module(f"{self.__name__}.{name}")
        from torch.nn import Module

        parts = {
            "__init__": lambda layer, *_, **__: Module.__init__(layer),
            "__class_getitem__": classmethod(lambda made, _: made),
            "__module__": self.__name__,
        }
        setattr(self, name, type(name, (Module,), parts))
        return getattr(self, name)

    def __call__(self, made: Any = None, **_: Any) -> Any:
        """A name that is called is a decorator, which changes nothing."""
        return self if made is None else made


class Absent(MetaPathFinder, Loader):
    """Finds every module of the libraries that are named."""

    def __init__(self, *libraries: str) -> None:
        self.libraries = libraries

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The module is an empty one."""
        known = any(f"{name}.".startswith(f"{library}.") for library in self.libraries)
        return ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Without contents."""
        return Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run."""


def stand_in(*libraries: str) -> None:
    """Let libraries be imported that are not there."""
    sys.meta_path.insert(0, Absent(*libraries))
