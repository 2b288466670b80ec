"""Choices of virtual stages and schedules of a layout, by its stages and micro-batches."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from milpplan.optimize.space.execution_rules import Rule
from milpplan.optimize.space.layout_space import Choices
from milpplan.optimize.space.product import Columns, ProductTable, cross, expand
from milpplan.optimize.space.rule_filter import STANDS_FOR, RuleFilter, num_rows
from milpplan.optimize.space.stage_rules import SPLIT_RULES, max_virtual_stages
from milpplan.problem.plan import SCHEDULES
from milpplan.problem.problem import Problem
from milpplan.simulation.layout_columns import IntArray, ascending, unique_rows


def allowed(values: tuple[int, ...] | None, candidates: IntArray) -> IntArray:
    """Return the candidates that a space admits."""
    return (
        candidates if values is None else np.array(sorted(set(values) & set(candidates.tolist())), dtype=np.int64)
    )


def virtual_stages(problem: Problem, columns: Mapping[str, IntArray]) -> ProductTable:
    """Cross rows with their numbers of virtual stages a rank."""
    options = {int(pp): _vpp_values(problem, int(pp)) for pp in ascending(columns["pp"])}
    return expand(columns, "vpp", options, columns["pp"])


def _vpp_values(problem: Problem, pp: int) -> IntArray:
    """Return 1 up to the maximum vpp; with ``distinct`` only values with a new largest chunk."""
    max_vpp = max(1, max_virtual_stages(problem) // pp) if pp > 1 else 1
    values = np.arange(1, max_vpp + 1)
    if problem.space.vpp is not None:
        return allowed(problem.space.vpp, values)
    if problem.space.vpp_values == "all":
        return values
    largest = -(-problem.model.num_layers // (pp * values))
    _, first = np.unique(-largest, return_index=True)
    return np.asarray(values[np.sort(first)])


def stage_choices(
    problem: Problem, rule_filter: RuleFilter, blocks: Columns, stand_for: IntArray, rules: Mapping[str, Rule]
) -> Choices:
    """Return the virtual stages and schedules of every block; each stands for ``stand_for`` [b] families."""
    names = ("pp", "num_micro_batches")
    first, key = unique_rows(*(blocks[name] for name in names))
    rows = {name: blocks[name][first] for name in names}
    rows["key"] = np.arange(len(first))
    rows[STANDS_FOR] = np.bincount(key, stand_for, minlength=len(first)).astype(np.int64)
    columns = virtual_stages(problem, rows)
    schedules = np.array([SCHEDULES.index(schedule) for schedule in problem.schedules])
    rule_filter.enumerated += num_rows(columns) * len(schedules)
    # Rules that do not read the schedule come before it: each row then stands for all schedules.
    columns = rule_filter.apply(columns, SPLIT_RULES, stand_for=len(schedules))
    columns = rule_filter.apply(cross(columns, "schedule", schedules), rules)
    table = {name: columns[name] for name in ("vpp", "schedule")}
    return Choices.listed(table, columns["key"], len(first), key)
