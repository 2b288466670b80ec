"""Registry of launchers by name. A launcher writes launch files from a plan and reads a plan from launch files."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from milpplan.errors import IllegalPlanError, UnknownNameError
from milpplan.launchers.accelerate import launcher as accelerate_export
from milpplan.launchers.accelerate import reader as accelerate_import
from milpplan.launchers.automodel import launcher as automodel_export
from milpplan.launchers.automodel import reader as automodel_import
from milpplan.launchers.capabilities import (
    ACCELERATE,
    AUTOMODEL,
    BRIDGE,
    DEEPSPEED,
    MEGATRON,
    NANOTRON,
    TORCHTITAN,
    Capability,
)
from milpplan.launchers.deepspeed import launcher as deepspeed_export
from milpplan.launchers.deepspeed import reader as deepspeed_import
from milpplan.launchers.import_request import ImportRequest
from milpplan.launchers.megatron import launcher as megatron_export
from milpplan.launchers.megatron import reader as megatron_import
from milpplan.launchers.megatron_bridge import launcher as bridge_export
from milpplan.launchers.megatron_bridge import reader as bridge_import
from milpplan.launchers.nanotron import launcher as nanotron_export
from milpplan.launchers.nanotron import reader as nanotron_import
from milpplan.launchers.records import ConfigLaunch, Imported, Launch
from milpplan.launchers.torchtitan import launcher as torchtitan_export
from milpplan.launchers.torchtitan import reader as torchtitan_import
from milpplan.plugins import PluginError, plugin, plugin_names, plugin_title
from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem
from milpplan.problem.reading import shown

Read = Callable[[ImportRequest], Imported]


@dataclass(frozen=True, slots=True)
class Target:
    """A launcher's functions.

    ``export`` turns a problem, a plan and a launcher version into a launch. ``files`` writes the launch as files
    by name; the first file suffices to start the run. ``read`` turns a launcher's files back into a problem and a
    plan.
    """

    capability: Capability
    export: Callable[[Problem, Plan, str], Launch | ConfigLaunch]
    files: Callable[[Any, str], dict[str, str]]
    read: Read


_TARGETS: dict[str, Target] = {
    "megatron": Target(MEGATRON, megatron_export.exported, megatron_export.files_of, megatron_import.imported),
    "megatron-bridge": Target(BRIDGE, bridge_export.exported, bridge_export.files_of, bridge_import.imported),
    "torchtitan": Target(
        TORCHTITAN, torchtitan_export.exported, torchtitan_export.files_of, torchtitan_import.imported
    ),
    "nanotron": Target(NANOTRON, nanotron_export.exported, nanotron_export.files_of, nanotron_import.imported),
    "deepspeed": Target(
        DEEPSPEED, deepspeed_export.exported, deepspeed_export.files_of, deepspeed_import.imported
    ),
    "accelerate": Target(
        ACCELERATE, accelerate_export.exported, accelerate_export.files_of, accelerate_import.imported
    ),
    "automodel": Target(
        AUTOMODEL, automodel_export.exported, automodel_export.files_of, automodel_import.imported
    ),
}


def _of_replicas_alike(target: Target) -> Target:
    """Wrap a target so that its export refuses heterogeneous replicas before it checks anything else."""
    name = target.capability.name

    def export(problem: Problem, plan: Plan, version: str) -> Launch | ConfigLaunch:
        shares = " and ".join(map(str, plan.layout.replica_micro_batches))
        if shares:
            raise IllegalPlanError(
                f"The plan has replicas of different make: they run {shares} micro-batches a step, and "
                f"{name} gives every data-parallel replica as many.",
                "Expected replicas that are alike, on nodes of one type.",
                "Solve again on one of these node types alone; `milpplan report` shows this plan.",
            )
        return target.export(problem, plan, version)

    return replace(target, export=export)


TARGETS: dict[str, Target] = {name: _of_replicas_alike(target) for name, target in _TARGETS.items()}


def target_names() -> tuple[str, ...]:
    """List the built-in launchers, then those of installed plug-ins."""
    return (*TARGETS, *(name for name in plugin_names("exporters") if name not in TARGETS))


def target_named(name: str, option: str) -> Target:
    """Look up a launcher by name.

    Raises:
        UnknownNameError: no launcher has this name.
        PluginError: the launcher is a plug-in's and is not a ``Target``.
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
    if not isinstance(target, Target):
        raise PluginError(
            f"The exporter {plugin_title('exporters', name)} is a {type(target).__name__}.",
            "Expected a milpplan.launchers.targets.Target.",
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
