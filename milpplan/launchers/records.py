"""What a launcher needs to start a plan, before it is written in the launcher's own form."""

from __future__ import annotations

from dataclasses import dataclass

from milpplan.launchers.arguments import Arguments, Values


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
class Refusal:
    """Why a target cannot run a plan, and what makes the next one expressible."""

    seen: str
    expected: str
    do: str
