"""Rules of the launcher to which a space is restricted (``Space.target``), as rules of the enumeration.

They come from the launcher's ``Capability``: its export would refuse a layout that breaks
one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from milpplan.errors import UnknownNameError
from milpplan.optimize.space.execution_rules import Rule
from milpplan.optimize.space.layout_space import SHARDING
from milpplan.problem.problem import Problem
from milpplan.simulation.layout_columns import BoolArray, IntArray, column_value

if TYPE_CHECKING:
    from milpplan.launchers.capabilities import Capability


def capability_of(problem: Problem) -> Capability | None:
    """Return the capability of the launcher of a problem's space; None where there is no restriction.

    Raises:
        UnknownNameError: there is no such launcher, or no such version of it.
    """
    name, version = problem.space.target, problem.space.target_version
    if name is None:
        return None
    from milpplan.launchers.targets import TARGETS

    if name not in TARGETS:
        raise UnknownNameError(
            f"The space's target is {name!r}.",
            f"Expected one of {', '.join(TARGETS)}.",
            "Correct target in the problem's space.",
        )
    capability = TARGETS[name].capability
    if version is not None and version not in capability.versions:
        raise UnknownNameError(
            f"The space's target_version is {version!r}.",
            f"Expected one of {', '.join(capability.versions)}.",
            "Correct target_version in the problem's space.",
        )
    return capability


def target_rules(problem: Problem) -> dict[str, Rule]:
    """Return the rules on fields other than the sharding."""
    capability = capability_of(problem)
    if capability is None:
        return {}
    rules = {
        f"{problem.space.target}_has_{name}": _one_of(name, limit.values)
        for name, limit in capability.limits_of(problem).items()
        if name not in SHARDING
    }
    rules |= {
        f"{problem.space.target}_{name}": rule.keeps for name, rule in capability.rules.items() if not rule.shards
    }
    if capability.stages == "equal":
        from milpplan.launchers.capabilities import equal_stages

        rules[f"{problem.space.target}_has_equal_stages"] = equal_stages
    return rules


def target_sharding_rules(problem: Problem) -> dict[str, Rule]:
    """Return the rules on single fields of the sharding."""
    capability = capability_of(problem)
    limits = {} if capability is None else capability.limits_of(problem)
    return {
        f"{problem.space.target}_has_{name}": _one_of(name, limit.values)
        for name, limit in limits.items()
        if name in SHARDING
    }


def target_crossed_rules(problem: Problem) -> dict[str, Rule]:
    """Return the rules on the sharding together with other fields."""
    capability = capability_of(problem)
    rules = {} if capability is None else capability.rules
    return {f"{problem.space.target}_{name}": rule.keeps for name, rule in rules.items() if rule.shards}


def _one_of(name: str, values: tuple[object, ...]) -> Rule:
    """Return the rule that a field has one of some values; a table without the field has its default."""
    codes = np.array(sorted(column_value(name, value) for value in values), dtype=np.int64)

    def keeps(problem: Problem, c: Mapping[str, IntArray]) -> BoolArray:
        if name not in c:
            return np.ones(len(next(iter(c.values()))), dtype=np.bool_)
        return np.isin(c[name], codes)

    return keeps
