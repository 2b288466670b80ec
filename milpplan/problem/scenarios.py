"""Scenarios: other cost constants under which a plan must do well (``optimize.robust``).

A scenario names constants of the overlay machinery (``problem.overlay``) and their values. The problem as it
stands is always a scenario too, the *nominal* one.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, NamedTuple

from pydantic import Field, model_validator

from milpplan.problem.hardware import HardwareSpec, NodeGroup
from milpplan.problem.overlay import (
    CONGESTION,
    SHARES,
    Constants,
    Name,
    Text,
    constant_values,
    moved_values,
    uncertainty_of,
    with_constants,
)
from milpplan.problem.problem import Problem
from milpplan.problem.records import Record

NOMINAL: Final = "nominal"
MAX_SCENARIOS: Final = 16


class Scenario(Record):
    """Constants that differ from those of the hardware description; their ``one_sigma`` has no effect."""

    name: Name
    reason: Text = ""
    """Why the constants may have these values."""
    constants: Constants

    @model_validator(mode="after")
    def _changes_something(self) -> Scenario:
        if self.name == NOMINAL:
            raise ValueError(f"name is {NOMINAL!r}, the name of the problem as it stands: give another one")
        if self.constants == Constants():
            raise ValueError("constants are empty: give at least one")
        return self


class ScenarioFile(Record):
    """File of scenarios beside the nominal one."""

    schema_version: Literal[1] = 1
    scenarios: Annotated[tuple[Scenario, ...], Field(max_length=MAX_SCENARIOS)]

    @model_validator(mode="after")
    def _names_differ(self) -> ScenarioFile:
        names = [scenario.name for scenario in self.scenarios]
        if not names:
            raise ValueError("there are no scenarios: give at least one")
        if len(set(names)) < len(names):
            raise ValueError(f"the names of scenarios must differ, got {', '.join(names)}")
        return self


def scenario_of(name: str, reason: str, **values: float) -> Scenario:
    """Make a scenario from the values of its constants."""
    constants = {constant: {"value": value} for constant, value in values.items()}
    return Scenario(name=name, reason=reason, constants=Constants.model_validate(constants))


class Doubt(NamedTuple):
    """Default scenario before a description gives it values: constants that are slower by a number of sigmas."""

    name: str
    reason: str
    constants: tuple[str, ...]
    sigmas: float = 1.0


DOUBTS: Final = (
    Doubt("less hidden", "contention with compute, or prefetch that comes late", SHARES),
    Doubt("hardly hidden", "a framework without prefetch, such as DeepSpeed before 0.6", SHARES, 3.0),
    Doubt("slow links", "links between nodes below the described rate", ("scale_out_efficiency",)),
    Doubt("congested network", "rings that share links with others", (CONGESTION,)),
    Doubt("slow host", "launches of layers and messages between stages", ("layer_launch_s", "message_s")),
    Doubt("unbalanced experts", "tokens that are not spread evenly over the experts", ("dispatch_efficiency",)),
)
"""Doubts of the default scenarios. A sigma is that of the hardware's uncertainty: of the fit where measurements
identify the constant, else of the prior (``overlay.PRIOR_SIGMA``)."""


def in_scenario(problem: Problem, scenario: Scenario) -> Problem:
    """Give a problem the constants of a scenario, on every node type."""
    factors, others = constant_values(scenario.constants)

    def changed(hardware: HardwareSpec) -> HardwareSpec:
        return with_constants(hardware, factors, others)

    groups = tuple(
        NodeGroup(hardware=changed(group.hardware), num_gpus=group.num_gpus) for group in problem.other_hardware
    )
    return problem.model_copy(update={"hardware": changed(problem.hardware), "other_hardware": groups})


def default_scenarios(problem: Problem) -> tuple[Scenario, ...]:
    """Return the default scenarios that change a constant of a problem: none is better than the hardware's own."""
    experts = any(run.mlp.type == "moe" for run in problem.model.layers)
    doubts = (doubt for doubt in DOUBTS if experts or doubt.constants != ("dispatch_efficiency",))
    scenarios = (_valued(problem.hardware, doubt) for doubt in doubts)
    return tuple(scenario for scenario in scenarios if scenario and in_scenario(problem, scenario) != problem)


def _valued(hardware: HardwareSpec, doubt: Doubt) -> Scenario | None:
    """Give a doubt the values of a description; None where its constants are exact."""
    uncertainty = uncertainty_of(hardware)
    sigmas = {name: doubt.sigmas for name in doubt.constants if getattr(uncertainty, name) > 0}
    factors, others = moved_values(hardware, sigmas)
    values = factors | {name: value for name, value in others.items() if isinstance(value, float)}
    reason = f"{doubt.reason} ({doubt.sigmas:g} sigma slower)"
    return scenario_of(doubt.name, reason, **values) if values else None
