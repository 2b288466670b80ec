"""What a launcher needs to start a plan, before it is written in the launcher's own form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from milpplan.launchers.arguments import Arguments, Values
from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem


class Started(Protocol):
    """What every launch has, whatever its arguments look like."""

    @property
    def target(self) -> str:
        """Name of the launcher."""

    @property
    def version(self) -> str:
        """Its version."""

    @property
    def title(self) -> tuple[str, ...]:
        """The plan in words, a sentence a line."""

    @property
    def num_nodes(self) -> int:
        """Nodes of the job."""

    @property
    def gpus_per_node(self) -> int:
        """Processes on each."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables that every process needs."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know."""


@dataclass(frozen=True, slots=True)
class Section:
    """Arguments that belong together. ``name`` is that of the shell's array, ``why`` its comment."""

    name: str
    why: str
    arguments: dict[str, Values]


@dataclass(frozen=True, slots=True)
class Launch:
    """A plan as a launcher's arguments and environment, for ``num_nodes * gpus_per_node`` processes."""

    target: str
    version: str
    title: tuple[str, ...]
    num_nodes: int
    gpus_per_node: int
    environment: dict[str, str]
    sections: tuple[Section, ...]
    notes: tuple[str, ...]
    """What the user should know: where the framework does a little more or less than the plan says."""

    @property
    def num_gpus(self) -> int:
        """Processes of the job."""
        return self.num_nodes * self.gpus_per_node

    @property
    def arguments(self) -> Arguments:
        """All sections together."""
        return Arguments({flag: values for part in self.sections for flag, values in part.arguments.items()})


@dataclass(frozen=True, slots=True)
class ConfigLaunch:
    """A plan as the settings of a configuration file, by section and name, for ``num_nodes * gpus_per_node``
    processes."""

    target: str
    version: str
    title: tuple[str, ...]
    num_nodes: int
    gpus_per_node: int
    environment: dict[str, str]
    settings: Mapping[str, Any]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Imported:
    """A problem and a plan for it; flags that the launcher does not know or that the caller leaves out; notes."""

    problem: Problem
    plan: Plan
    unknown_flags: tuple[str, ...]
    ignored_flags: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a target cannot run a plan, and the value (``NAME=VALUE``) that makes the next one expressible, if one
    does."""

    why: str
    fix: str = ""
