"""The rules of the launcher that a space is restricted to (``Space.target``), as rules of the enumeration.

They are those of the launcher's one declaration, ``launchers.capabilities``: a layout that breaks one would be
refused by its export.
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
    """What the launcher of a problem's space can run; None where it is not restricted to one.

    Raises:
        UnknownNameError: there is no such launcher, or no such version of it.
    """
    name, version = problem.space.target, problem.space.target_version
    if name is None:
        return None
    from milpplan.launchers.capabilities import CAPABILITIES

    if name not in CAPABILITIES:
        raise UnknownNameError(
            f"The space's target is {name!r}.",
            f"Expected one of {', '.join(CAPABILITIES)}.",
            "Correct target in the problem's space.",
        )
    known = CAPABILITIES[name]
    if version is not None and version not in known.versions:
        raise UnknownNameError(
            f"The space's target_version is {version!r}.",
            f"Expected one of {', '.join(known.versions)}.",
            "Correct target_version in the problem's space.",
        )
    return known


def target_rules(problem: Problem) -> dict[str, Rule]:
    """Rules on what a row has before its sharding is chosen."""
    known = capability_of(problem)
    if known is None:
        return {}
    found = {
        f"{problem.space.target}_has_{name}": _one_of(name, limit.values)
        for name, limit in known.limits_of(problem).items()
        if name not in SHARDING
    }
    found |= {
        f"{problem.space.target}_{name}": rule.keeps for name, rule in known.rules.items() if not rule.shards
    }
    if known.stages == "equal":
        from milpplan.launchers.space_rules import equal_stages

        found[f"{problem.space.target}_has_equal_stages"] = equal_stages
    return found


def target_sharding_rules(problem: Problem) -> dict[str, Rule]:
    """Rules on single fields of the sharding."""
    known = capability_of(problem)
    limits = {} if known is None else known.limits_of(problem)
    return {
        f"{problem.space.target}_has_{name}": _one_of(name, limit.values)
        for name, limit in limits.items()
        if name in SHARDING
    }


def target_crossed_rules(problem: Problem) -> dict[str, Rule]:
    """Rules on the sharding together with other fields."""
    known = capability_of(problem)
    rules = {} if known is None else known.rules
    return {f"{problem.space.target}_{name}": rule.keeps for name, rule in rules.items() if rule.shards}


def _one_of(name: str, values: tuple[object, ...]) -> Rule:
    """Whether a field has one of some values; a table without the field has it at its default."""
    codes = np.array(sorted(column_value(name, value) for value in values), dtype=np.int64)

    def keeps(problem: Problem, c: Mapping[str, IntArray]) -> BoolArray:
        if name not in c:
            return np.ones(len(next(iter(c.values()))), dtype=np.bool_)
        return np.isin(c[name], codes)

    return keeps
