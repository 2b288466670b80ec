"""Single change of a plan that closes most of its distance to the best, with everything else fixed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from milpplan.explain.optima import Yardstick, saved_share
from milpplan.explain.records import Interval, SingleChange
from milpplan.optimize.nearby_problems import with_space
from milpplan.problem.plan import Layout, Plan
from milpplan.problem.problem import Problem, Space

FOLLOWERS: Final = {
    "tp": ("dp", "sequence_parallel", "etp"),
    "cp": ("dp",),
    "pp": ("dp", "vpp", "schedule"),
    "vpp": ("schedule",),
    "schedule": ("vpp",),
    "etp": ("ep",),
    "zero_stage": ("overlap_grad_reduce", "overlap_param_gather"),
    "overlap_param_gather": ("overlap_grad_reduce",),
}
"""Fields that a change of another field may require to change: the product of the degrees is the number of GPUs,
and rules tie switches to degrees."""
LEADS: Final = tuple(name for name in Space.model_fields if name in Layout.model_fields and name != "dp")
"""Fields that a single change may be about; dp follows from the others."""


def candidates(plan: Plan, best: Plan) -> Iterator[tuple[str, ...]]:
    """Iterate over sets of fields to free: the empty set (only stages and recomputation change), then each field
    in which the best plan differs, with the fields that follow it."""
    yield ()
    seen: set[frozenset[str]] = set()
    for name in LEADS:
        fields = (name, *FOLLOWERS.get(name, ()))
        if getattr(plan.layout, name) != getattr(best.layout, name) and frozenset(fields) not in seen:
            seen.add(frozenset(fields))
            yield fields


def loosened(problem: Problem, plan: Plan, fields: tuple[str, ...]) -> Problem:
    """Fix every field of the layout as in the plan, except the given fields, which keep their values in the
    space."""
    layout = plan.layout
    values = {
        name: (getattr(layout, name),)
        for name in Space.model_fields
        if name in Layout.model_fields and name not in fields
    }
    return with_space(problem, **values)


def single_change(
    yardstick: Yardstick,
    problem: Problem,
    plan: Plan,
    value: float,
    fields: tuple[str, ...],
    limit_s: float | None,
) -> SingleChange | None:
    """Solve for the best plan with the given fields free, against the plan's own ``value``; None where nothing
    fits."""
    optimum = yardstick.optimum(loosened(problem, plan, fields), limit_s, plan)
    if optimum.infeasible or optimum.plan is None:
        return None
    words = fields[0] if fields else "stages and recomputation only"
    return SingleChange(fields, words, optimum, saved_share(Interval(value, value), optimum.bounds))
