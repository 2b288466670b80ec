"""Records that launchers share: a launch before it is written as files, an imported plan, and a refusal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from milpplan.launchers.megatron.arguments import Arguments, Values
from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem


@dataclass(frozen=True, slots=True)
class Started:
    """Properties that every launch has, whatever the form of its arguments.

    The job has ``num_nodes * gpus_per_node`` processes.
    """

    target: str
    """Name of the launcher."""
    version: str
    """Version of the launcher."""
    title: tuple[str, ...]
    """Sentences that describe the plan, one per line."""
    num_nodes: int
    """Number of nodes of the job."""
    gpus_per_node: int
    """Number of processes on each node."""
    environment: dict[str, str]
    """Variables that every process needs."""
    notes: tuple[str, ...]
    """Remarks for the user: where the framework does slightly more or less than the plan says."""

    @property
    def num_gpus(self) -> int:
        """Number of processes of the job."""
        return self.num_nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True)
class Section:
    """Group of related arguments. ``name`` names the shell array, ``why`` is its comment."""

    name: str
    why: str
    arguments: dict[str, Values]


@dataclass(frozen=True, slots=True)
class Launch(Started):
    """Plan as command-line arguments and environment of a launcher."""

    sections: tuple[Section, ...]

    @property
    def arguments(self) -> Arguments:
        """Arguments of all sections."""
        return Arguments({flag: values for part in self.sections for flag, values in part.arguments.items()})


@dataclass(frozen=True, slots=True)
class ConfigLaunch(Started):
    """Plan as the settings of a configuration file, by section and name."""

    settings: Mapping[str, Any]


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
