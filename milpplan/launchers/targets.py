"""Registry of launchers by name."""

from __future__ import annotations

import difflib
import json
from typing import Any, Protocol, runtime_checkable

from milpplan.errors import UnknownNameError
from milpplan.launchers.accelerate.launcher import Accelerate
from milpplan.launchers.automodel.launcher import AutoModel
from milpplan.launchers.capabilities import Capability
from milpplan.launchers.deepspeed.launcher import DeepSpeed
from milpplan.launchers.megatron.launcher import Megatron
from milpplan.launchers.megatron_bridge.launcher import MegatronBridge
from milpplan.launchers.nanotron.launcher import Nanotron
from milpplan.launchers.records import ConfigLaunch, Imported, ImportRequest, Launch
from milpplan.launchers.torchtitan.launcher import Torchtitan
from milpplan.plugins import PluginError, plugin, plugin_names, plugin_title
from milpplan.problem.catalog import STACK_MARK, stack_names
from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem
from milpplan.problem.reading import shown


@runtime_checkable
class Launcher(Protocol):
    """Launcher: declares what it can run, writes launch files from a plan and reads a plan from launch files."""

    @property
    def capability(self) -> Capability:
        """Name, versions, and the layouts that the launcher can run."""

    def check(self, problem: Problem, version: str) -> None:
        """Refuse a problem for which the launcher can run no plan.

        Raises:
            IllegalPlanError: the message says why.
        """

    def export(self, problem: Problem, plan: Plan, version: str) -> Launch | ConfigLaunch:
        """Turn a plan into a launch of a version of the launcher.

        Raises:
            IllegalPlanError: the launcher cannot express the plan or would run something else.
        """

    def files(self, launch: Any, version: str) -> dict[str, str]:
        """Write a launch as files by name; the first suffices to start the run. ``version`` is milpplan's."""

    def read(self, request: ImportRequest) -> Imported:
        """Read the launcher's file back into a problem and a plan."""


TARGETS: dict[str, Launcher] = {
    "megatron": Megatron(),
    "megatron-bridge": MegatronBridge(),
    "torchtitan": Torchtitan(),
    "nanotron": Nanotron(),
    "deepspeed": DeepSpeed(),
    "accelerate": Accelerate(),
    "automodel": AutoModel(),
}
"""Launchers by the name that ``--to``, ``--from`` and ``--target`` take."""


STACKS: dict[str, tuple[str, ...]] = {
    "megatron": ("megatron-core", "nemo"),
    "megatron-bridge": ("nemo", "megatron-core"),
    "nanotron": ("nanotron",),
}
"""Software stacks whose fitted constants are those of a launcher, best match first. NeMo and Megatron-Bridge train
with Megatron-Core. Other launchers have none: ``plain`` is fitted to many frameworks at once."""


def target_stack(target: str | None, hardware: str) -> str | None:
    """Find the shipped stack of a launcher on a bare hardware name; None where there is none.

    Args:
        target: name of the launcher; None: no launcher.
        hardware: a hardware name, or any other word, which has no stack.
    """
    shipped = stack_names()
    names = (f"{hardware}{STACK_MARK}{stack}" for stack in STACKS.get(target or "", ()))
    return next((name for name in names if name in shipped), None)


def target_names() -> tuple[str, ...]:
    """List the built-in launchers, then those of installed plug-ins."""
    return (*TARGETS, *(name for name in plugin_names("exporters") if name not in TARGETS))


def target_named(name: str, option: str) -> Launcher:
    """Look up a launcher by name.

    Raises:
        UnknownNameError: no launcher has this name.
        PluginError: the launcher is a plug-in's and is not a ``Launcher``.
    """
    names = target_names()
    if name not in names:
        close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
        raise UnknownNameError(
            f"{option} {shown(name)} does not exist.",
            f"Expected one of {', '.join(names)}.",
            f"Did you mean {close[0]}?" if close else "Give one of these names.",
        )
    if name in TARGETS:
        return TARGETS[name]
    target = plugin("exporters", name)
    if not isinstance(target, Launcher):
        raise PluginError(
            f"The exporter {plugin_title('exporters', name)} is a {type(target).__name__}.",
            "Expected an object with the members of milpplan.launchers.targets.Launcher.",
            "Repair its package.",
        )
    return target


def launch_document(launch: Launch | ConfigLaunch) -> str:
    """Write a launch as one JSON document."""
    if isinstance(launch, Launch):
        pairs = launch.arguments.values.items()
        said: dict[str, Any] = {"arguments": [word for flag, values in pairs for word in (flag, *values)]}
    else:
        said = {"settings": launch.settings}
    document = {
        "schema_version": 1,
        "target": launch.target,
        "version": launch.version,
        "num_nodes": launch.num_nodes,
        "gpus_per_node": launch.gpus_per_node,
        "environment": launch.environment,
        **said,
        "notes": list(launch.notes),
    }
    return json.dumps(document, indent=2) + "\n"
