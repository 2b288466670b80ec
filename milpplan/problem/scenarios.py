"""Scenarios: other cost constants under which a plan must do well (``optimize.robust``).

A scenario names constants of the overlay machinery (``problem.overlay``) and their values. The problem as it
stands is always a scenario too, the *nominal* one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from milpplan.problem.hardware import HardwareSpec
from milpplan.problem.overlay import (
    TIMES,
    Constants,
    Name,
    Text,
    constant_values,
    moved,
    time_s,
    with_constants,
)
from milpplan.problem.problem import NodeGroup, Problem
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
    scenarios: Annotated[tuple[Scenario, ...], Field(min_length=1, max_length=MAX_SCENARIOS)]

    @model_validator(mode="after")
    def _names_differ(self) -> ScenarioFile:
        names = [scenario.name for scenario in self.scenarios]
        if len(set(names)) < len(names):
            raise ValueError(f"the names of scenarios must differ, got {', '.join(names)}")
        return self


def _scenario(name: str, reason: str, **values: float) -> Scenario:
    constants = {constant: {"value": value} for constant, value in values.items()}
    return Scenario(name=name, reason=reason, constants=Constants.model_validate(constants))


DEFAULT_SCENARIOS: Final = (
    _scenario(
        "slow links",
        "links between nodes at the low end of one sigma: 0.6 of the described rate",
        scale_out_efficiency=0.6,
    ),
    _scenario(
        "slow host",
        "launches as fitted to Nanotron on H100 (1.4 ms), messages as fitted to zero-bubble on A100 (1.2 ms)",
        layer_launch_s=1.4e-3,
        message_s=1.2e-3,
    ),
    _scenario(
        "unbalanced experts",
        "tokens are not spread evenly over the experts: half the rate (NeMo on H100 is fitted to 0.46)",
        dispatch_efficiency=0.5,
    ),
)
"""Default scenarios. Where the description's own uncertainty has a standard deviation of a constant, the constant
moves by that instead."""


def in_scenario(problem: Problem, scenario: Scenario) -> Problem:
    """Give a problem the constants of a scenario, on every node type."""
    factors, others = constant_values(scenario.constants)
    return _on_all_types(problem, lambda hardware: with_constants(hardware, factors, others))


def default_problems(problem: Problem) -> dict[str, Problem]:
    """Return the problem in every default scenario that changes one of its constants, by the scenario's name."""
    changed: dict[str, Problem] = {}
    for scenario in DEFAULT_SCENARIOS:
        there = _on_all_types(problem, partial(_doubted, scenario=scenario))
        experts = any(run.mlp.type == "moe" for run in problem.model.layers)
        if there != problem and (experts or scenario.constants.dispatch_efficiency is None):
            changed[scenario.name] = there
    return changed


def _doubted(hardware: HardwareSpec, scenario: Scenario) -> HardwareSpec:
    """Give a description the constants of a default scenario: by its own uncertainty where it has one, and never a
    time shorter than its own."""
    factors, others = constant_values(scenario.constants)
    sigma = hardware.uncertainty
    own = [name for name in (*factors, *others) if sigma is not None and getattr(sigma, name, 0.0) > 0]
    slower = {name: value for name, value in factors.items() if name not in own}
    longer = {
        name: max(value, time_s(hardware, name)) if name in TIMES and isinstance(value, float) else value
        for name, value in others.items()
        if name not in own
    }
    return with_constants(moved(hardware, dict.fromkeys(own, 1.0)), slower, longer)


def _on_all_types(problem: Problem, change: Callable[[HardwareSpec], HardwareSpec]) -> Problem:
    others = tuple(
        NodeGroup(hardware=change(group.hardware), num_gpus=group.num_gpus) for group in problem.other_hardware
    )
    return problem.model_copy(update={"hardware": change(problem.hardware), "other_hardware": others})
