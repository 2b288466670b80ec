"""Rules and choices of virtual stages and schedules, by stages and micro-batches.

Rules of Megatron-LM are quoted from core/transformer/transformer_config.py and training/arguments.py at d98e8a64.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from milpplan.optimize.space.execution_rules import Rule, offloads
from milpplan.optimize.space.layout_space import Choices
from milpplan.optimize.space.rule_filter import (
    STANDS_FOR,
    Columns,
    ProductTable,
    RuleFilter,
    cross,
    expand,
    num_rows,
)
from milpplan.problem.plan import PAIRED_SCHEDULES, SCHEDULES, SPLIT_SCHEDULES, V_SCHEDULES
from milpplan.problem.problem import Problem
from milpplan.simulation.layout_columns import BoolArray, IntArray, ascending, unique_rows

_IS_SPLIT = np.array([name in SPLIT_SCHEDULES for name in SCHEDULES])
_IS_PAIRED = np.array([name in PAIRED_SCHEDULES for name in SCHEDULES])
_IS_V = np.array([name in V_SCHEDULES for name in SCHEDULES])


def max_virtual_stages(problem: Problem) -> int:
    """Return the maximum number of virtual stages: in the free space the first and the last may be empty."""
    layers = problem.model.num_layers
    return layers + 2 if problem.space.kind == "free" else layers


def _splits_evenly(problem: Problem, stages: IntArray) -> BoolArray:
    """Uniform space: keep splits with ceil(L / J) layers in all virtual stages but the last, which
    gets the rest."""
    if problem.space.kind == "free":
        return np.ones(len(stages), dtype=np.bool_)
    layers = problem.model.num_layers
    each = -(-layers // stages)
    return np.asarray(layers - each * (stages - 1) >= 1)


def _has_v(problem: Problem) -> bool:
    return not V_SCHEDULES.isdisjoint(problem.schedules)


def _schedule_matches_vpp(problem: Problem, c: Mapping[str, IntArray]) -> BoolArray:
    """Require one chunk a rank, several for interleaved schedules, two for V schedules."""
    matches = (c["schedule"] == SCHEDULES.index("interleaved")) == (c["vpp"] > 1)
    return np.asarray(np.where(_IS_V[c["schedule"]], c["vpp"] == 2, matches) if _has_v(problem) else matches)


def _plain_schedule(problem: Problem) -> int:
    """Return the schedule that stands for gpipe and 1f1b without a pipeline, where both are gradient accumulation.

    Schedules that split the backward need a pipeline, whose bubble their weight gradients fill.
    """
    return SCHEDULES.index("gpipe" if "1f1b" not in problem.schedules and "gpipe" in problem.schedules else "1f1b")


SPLIT_RULES: dict[str, Rule] = {
    "virtual_stages_not_above_layers": lambda p, c: c["pp"] * c["vpp"] <= max_virtual_stages(p),
    "interleaving_needs_two_stages": lambda p, c: (c["vpp"] == 1) | (c["pp"] > 1),
    # A V schedule takes any number of micro-batches, and its rows are not apart from others yet.
    "interleaved_micro_batches_divisible_by_pp": lambda p, c: (
        (c["vpp"] == 1) | (c["num_micro_batches"] % c["pp"] == 0) | ((c["vpp"] == 2) & _has_v(p))
    ),
    "layers_split_uniformly": lambda p, c: _splits_evenly(p, c["pp"] * c["vpp"]),
}

SCHEDULE_RULES: dict[str, Rule] = {
    "schedule_matches_vpp": lambda p, c: _schedule_matches_vpp(p, c),
    "one_schedule_without_pipeline": lambda p, c: (c["pp"] > 1) | (c["schedule"] == _plain_schedule(p)),
}

V_RULES: dict[str, Rule] = {
    "interleaved_micro_batches_divisible_by_pp": lambda p, c: (
        (c["vpp"] == 1) | (c["num_micro_batches"] % c["pp"] == 0) | _IS_V[c["schedule"]]
    ),
}
"""Replacement of the rule of the same name where the space has V schedules."""

SPLIT_BACKWARD_RULES: dict[str, Rule] = {
    # Weight gradients apart from the rest fill a bubble; no launcher splits backwards without a pipeline.
    "split_backward_needs_two_stages": lambda p, c: ~_IS_SPLIT[c["schedule"]] | (c["pp"] > 1),
    "offload_needs_whole_backward": lambda p, c: ~_IS_SPLIT[c["schedule"]] | ~offloads(c),
}
"""Further rules where the space has schedules that split the backward: no framework offloads data that waits for a
weight gradient, and it is not priced."""

PAIR_RULES: dict[str, Rule] = {
    "pairs_need_two_micro_batches_per_stage": lambda p, c: (
        ~_IS_PAIRED[c["schedule"]] | (c["num_micro_batches"] >= 2 * c["pp"])
    ),
    "pairs_need_one_node_type": lambda p, c: ~_IS_PAIRED[c["schedule"]] | (not p.other_hardware),
}
"""Further rules where the space has schedules with pairs: deepseek-ai/DualPipe, dualpipe/dualpipev.py, and
PyTorch's ScheduleDualPipeV refuse fewer micro-batches than there are virtual stages. Bounds of mixed clusters
ignore pairs."""

STAGE_RULES = SPLIT_RULES | SCHEDULE_RULES | SPLIT_BACKWARD_RULES | PAIR_RULES
"""All rules of stages, to look them up by name."""


def schedule_rules(problem: Problem) -> dict[str, Rule]:
    """Return the rules that read the schedule."""
    rules = SCHEDULE_RULES | V_RULES if _has_v(problem) else SCHEDULE_RULES
    rules = rules if PAIRED_SCHEDULES.isdisjoint(problem.schedules) else rules | PAIR_RULES
    return rules if SPLIT_SCHEDULES.isdisjoint(problem.schedules) else rules | SPLIT_BACKWARD_RULES


def stage_rules(problem: Problem) -> dict[str, Rule]:
    """Return the rules of virtual stages and schedules for rows that have both."""
    return SPLIT_RULES | schedule_rules(problem)


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
