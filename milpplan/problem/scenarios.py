"""Scenarios: other cost constants under which a plan must do well (``optimize.robust``).

A scenario names constants of the overlay machinery (``problem.overlay``) and their values. The problem as it
stands is always a scenario too, the *nominal* one.
"""

from __future__ import annotations

from math import exp
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from milpplan.problem.hardware import HardwareSpec
from milpplan.problem.overlay import (
    SHARES,
    Constants,
    Name,
    Text,
    constant_of,
    constant_values,
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


DEFAULT_SCENARIOS: Final = (
    scenario_of(
        "half hidden",
        "half of the data-parallel communication beside compute hides: contention, or prefetch that comes late",
        hidden_gather_fraction=0.5,
        hidden_reduce_fraction=0.5,
    ),
    scenario_of(
        "nothing hidden",
        "no data-parallel communication hides: a framework without prefetch, such as DeepSpeed before 0.6",
        hidden_gather_fraction=0.0,
        hidden_reduce_fraction=0.0,
    ),
    scenario_of(
        "slow links",
        "links between nodes at the low end of one sigma: 0.6 of the described rate",
        scale_out_efficiency=0.6,
    ),
    scenario_of(
        "congested network",
        "1 ms for a GB and node, which Aleph Alpha's and InternEvo's runs on A100 show",
        congestion_s_per_byte=1e-12,
    ),
    scenario_of(
        "slow host",
        "launches as fitted to Nanotron on H100 (1.4 ms), messages as fitted to zero-bubble on A100 (1.2 ms)",
        layer_launch_s=1.4e-3,
        message_s=1.2e-3,
    ),
    scenario_of(
        "unbalanced experts",
        "tokens are not spread evenly over the experts: half the rate (NeMo on H100 is fitted to 0.46)",
        dispatch_efficiency=0.5,
    ),
)
"""Default scenarios, before ``default_scenarios`` fits them to a problem."""


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
    """Return the default scenarios that change a constant of a problem.

    An efficiency of which the hardware states a standard deviation falls by that instead. No other constant is
    better than the hardware's own.
    """
    experts = any(run.mlp.type == "moe" for run in problem.model.layers)
    fitted = (_fitted(problem.hardware, scenario) for scenario in DEFAULT_SCENARIOS)
    return tuple(
        scenario
        for scenario in fitted
        if (experts or scenario.constants.dispatch_efficiency is None)
        and in_scenario(problem, scenario) != problem
    )


def _fitted(hardware: HardwareSpec, scenario: Scenario) -> Scenario:
    """Fit a default scenario to a description."""
    factors, others = constant_values(scenario.constants)
    values: dict[str, float] = {}
    for name, factor in factors.items():
        sigma = 0.0 if hardware.uncertainty is None else float(getattr(hardware.uncertainty, name))
        values[name] = exp(-sigma) if sigma > 0 else factor
    for name, value in others.items():
        if isinstance(value, float):
            values[name] = (min if name in SHARES else max)(value, constant_of(hardware, name))
    return scenario_of(scenario.name, scenario.reason, **values)
