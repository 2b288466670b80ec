"""Registry of launchers by name.

``restrict`` limits a problem's space to the layouts that a launcher can run.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from milpplan.errors import IllegalPlanError, UnknownNameError
from milpplan.launchers.accelerate.exports import AXOLOTL_LAUNCHER, LLAMA_FACTORY, TRL
from milpplan.launchers.accelerate.launcher import LAUNCHER as ACCELERATE
from milpplan.launchers.automodel.launcher import LAUNCHER as AUTOMODEL
from milpplan.launchers.capabilities import Capability
from milpplan.launchers.deepspeed.launcher import LAUNCHER as DEEPSPEED
from milpplan.launchers.megatron.exports import MS_SWIFT, SLIME, VERL
from milpplan.launchers.megatron.launcher import Megatron
from milpplan.launchers.megatron_bridge.launcher import MegatronBridge
from milpplan.launchers.nanotron.launcher import LAUNCHER as NANOTRON
from milpplan.launchers.records import ConfigLaunch, Imported, ImportRequest, Launch
from milpplan.launchers.torchtitan.launcher import LAUNCHER as TORCHTITAN
from milpplan.plugins import PluginError, plugin, plugin_names, plugin_title
from milpplan.problem import NO_MODULES, Plan, Problem, Space
from milpplan.problem.catalog import fitted_hardware
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
    "torchtitan": TORCHTITAN,
    "nanotron": NANOTRON,
    "deepspeed": DEEPSPEED,
    "accelerate": ACCELERATE,
    "automodel": AUTOMODEL,
    "slime": SLIME,
    "ms-swift": MS_SWIFT,
    "verl": VERL,
    "trl": TRL,
    "llama-factory": LLAMA_FACTORY,
    "axolotl": AXOLOTL_LAUNCHER,
}
"""Launchers by the name that ``--to``, ``--from`` and ``--target`` take."""


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
        raise _unknown(name, names, option)
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


def _unknown(name: str, names: Sequence[str], option: str) -> UnknownNameError:
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    return UnknownNameError(
        f"{option} {shown(name)} does not exist.",
        f"Expected one of {', '.join(names)}.",
        f"Did you mean {close[0]}?" if close else "Give one of these names.",
    )


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


def restrict(problem: Problem, target: str, version: str | None = None, *, stack: bool = True) -> Problem:
    """Restrict the space of a problem to the plans that a launcher can run.

    The restriction covers single fields of the layout, rules on several fields, stage sizes and counts of
    recomputed layers. Every plan of the restricted space can be exported to the launcher. Fields that the user has
    already narrowed stay narrow. The software keeps the bytes of the program that an export starts.

    Args:
        problem: the problem to restrict.
        target: a name in ``TARGETS``.
        version: a version of the launcher; None: its first.
        stack: give bare hardware the constants fitted to the launcher's software (``fitted_hardware``).

    Raises:
        UnknownNameError: the launcher or its version is not known.
        IllegalPlanError: the launcher can run no plan of the problem; the message says why.
    """
    capability = _capability_named(target)
    chosen = version_of(capability, version)
    TARGETS[target].check(problem, chosen)
    named = {"target": target, "target_version": chosen}
    changes = _values(problem, capability) | named
    targeted = problem.model_copy(update={"space": problem.space.model_copy(update=named)})
    changes["recompute"] = _modes(targeted, capability)
    if "selective" in changes["recompute"] and (own := capability.own_modules(problem)) != NO_MODULES:
        asked = changes.get("recompute_modules") or problem.module_sets
        changes["recompute_modules"] = tuple(dict.fromkeys(own if each == NO_MODULES else each for each in asked))
    if capability.stages == "equal":
        changes["kind"] = "uniform"
    elif problem.space.recompute_counts != "alike":
        changes["recompute_counts"] = capability.recompute_counts
    described = fitted_hardware(target, problem.hardware) if stack else problem.hardware
    space = problem.space.model_copy(update=changes)
    return run_by(target, chosen, problem.model_copy(update={"space": space, "hardware": described}))


def run_by(target: str, version: str, problem: Problem) -> Problem:
    """Return a problem whose layers keep the bytes that those of a launcher's own program do."""
    own = target_named(target, "--target").capability.program(version)
    software = problem.hardware.software.model_copy(update=dict(own))
    return problem.model_copy(update={"hardware": problem.hardware.model_copy(update={"software": software})})


def _capability_named(name: str) -> Capability:
    """Look up the capability of a launcher by name.

    Raises:
        UnknownNameError: no launcher has this name.
    """
    whole = [target for target, launcher in TARGETS.items() if launcher.capability.complete]
    if name in TARGETS and name not in whole:
        raise UnknownNameError(
            f"--target {name}: it is not declared well enough to search its plans alone.",
            f"Expected one of {', '.join(whole)}.",
            f"Solve without --target, and fix what `milpplan export --to {name}` asks for.",
        )
    if name not in TARGETS:
        raise _unknown(name, whole, "--target")
    return TARGETS[name].capability


def version_of(capability: Capability, version: str | None) -> str:
    """Return the requested version of a launcher, or its default version.

    Raises:
        UnknownNameError: the launcher has no such version.
    """
    if version is not None and version not in capability.versions:
        raise UnknownNameError(
            f"--target-version {shown(version)} of {capability.name} is not known.",
            f"Expected one of {', '.join(capability.versions)}.",
            "Give one of these versions, or leave the option out.",
        )
    return version or capability.versions[0]


def _values(problem: Problem, capability: Capability) -> dict[str, Any]:
    """Intersect the space's values with the launcher's, for every field with a limit."""
    common: dict[str, Any] = {}
    for name, limit in capability.limits_of(problem).items():
        if name not in Space.model_fields:
            continue
        asked = getattr(problem.space, name)
        values = limit.values if asked is None else tuple(value for value in asked if value in limit.values)
        if not values:
            raise _nothing_left(capability, name, asked, limit.values, limit.why)
        common[name] = values
    return common


def _modes(problem: Problem, capability: Capability) -> tuple[str, ...]:
    has = capability.modes(problem)
    modes = tuple(mode for mode in problem.space.recompute if mode in has)
    if not modes:
        why = f"{capability.name} has no other recomputation of this model's layers"
        raise _nothing_left(capability, "recompute", problem.space.recompute, has, why)
    return modes


def _nothing_left(
    capability: Capability, name: str, asked: tuple[object, ...], has: tuple[object, ...], why: str
) -> IllegalPlanError:
    return IllegalPlanError(
        f"The space has {name} {_listed(asked)}, which {capability.name} does not have: {why}.",
        f"Expected {name} {_listed(has)}.",
        f"Leave {name} free, or give another --target.",
    )


def _listed(values: tuple[object, ...]) -> str:
    return " or ".join(str(value).lower() for value in values)
