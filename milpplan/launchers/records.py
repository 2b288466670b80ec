"""Records that launchers share: a launch before it is written as files, an imported plan, and a refusal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from milpplan.launchers.megatron.arguments import Arguments, Values
from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem


class Started(Protocol):
    """Properties that every launch has, whatever the form of its arguments."""

    @property
    def target(self) -> str:
        """Name of the launcher."""

    @property
    def version(self) -> str:
        """Version of the launcher."""

    @property
    def title(self) -> tuple[str, ...]:
        """Sentences that describe the plan, one per line."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the job."""

    @property
    def gpus_per_node(self) -> int:
        """Number of processes on each node."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables that every process needs."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the user."""


@dataclass(frozen=True, slots=True)
class Section:
    """Group of related arguments. ``name`` names the shell array, ``why`` is its comment."""

    name: str
    why: str
    arguments: dict[str, Values]


@dataclass(frozen=True, slots=True)
class Launch:
    """Plan as command-line arguments and environment of a launcher.

    The job has ``num_nodes * gpus_per_node`` processes.
    """

    target: str
    version: str
    title: tuple[str, ...]
    num_nodes: int
    gpus_per_node: int
    environment: dict[str, str]
    sections: tuple[Section, ...]
    notes: tuple[str, ...]
    """Remarks for the user: where the framework does slightly more or less than the plan says."""

    @property
    def num_gpus(self) -> int:
        """Number of processes of the job."""
        return self.num_nodes * self.gpus_per_node

    @property
    def arguments(self) -> Arguments:
        """Arguments of all sections."""
        return Arguments({flag: values for part in self.sections for flag, values in part.arguments.items()})


@dataclass(frozen=True, slots=True)
class ConfigLaunch:
    """Plan as the settings of a configuration file, by section and name.

    The job has ``num_nodes * gpus_per_node`` processes.
    """

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
    """Problem and plan read from a launcher's files.

    Also holds the flags that the launcher does not know or that the caller ignores, and remarks.
    """

    problem: Problem
    plan: Plan
    unknown_flags: tuple[str, ...]
    ignored_flags: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Reason why a target cannot run a plan.

    Also holds the value (``NAME=VALUE``) that makes the next plan expressible, if such a value exists.
    """

    why: str
    fix: str = ""
