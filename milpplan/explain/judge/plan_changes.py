"""Single changes of a plan: one field of the layout with the fields that must follow it, or the stages.

Changes that ``single_change`` solves for have a proof; each of the others is a whole plan that the simulator has
priced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from milpplan.explain.judge.records import Change, Effort, layout_words
from milpplan.explain.optima import Budget, Yardstick, saved_share
from milpplan.explain.records import Interval, SingleChange
from milpplan.optimize.bounds.cluster_bounds import cluster_compute_bounds
from milpplan.optimize.infeasibility import with_space
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.optimize.space.plan_space import in_space
from milpplan.problem.plan import Layout, Plan, Recompute, VirtualStage
from milpplan.problem.problem import Problem, Space
from milpplan.simulation.layout_columns import LayoutColumns
from milpplan.simulation.mixed_costs import RankCosts, cluster_costs, costs_of, rank_capacities, rank_types
from milpplan.simulation.replica_costs import ReplicaCosts
from milpplan.simulation.simulator import rank_memory, simulate, step_times_ns
from milpplan.simulation.stages import durations, plan_stages
from milpplan.units import NS_PER_S

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


HOLDS: Final = frozenset({"tp", "cp", "ep", "etp", "pp", "dp", "vpp", "zero_stage", "rank_order", "node_order"})
"""Fields that decide which rank holds which parameters and states: changing them requires a converted
checkpoint."""
MAX_STEPS: Final = 6
"""Maximum number of changes of a chain."""
WORTH_A_STEP: Final = 1e-4
"""Minimum share of the step that a change must save for a chain to continue."""


@dataclass(frozen=True, slots=True)
class Priced:
    """Plan with the simulated values by which changes are compared."""

    plan: Plan
    step_time_s: float
    fits: bool
    peak_memory_bytes: int
    over_bytes: int

    @staticmethod
    def of(problem: Problem, plan: Plan, costs: RankCosts | ReplicaCosts | None = None) -> Priced:
        """Simulate a plan, with given constants of its layout if they are known."""
        layout = plan.layout
        if layout.replica_micro_batches or isinstance(costs, ReplicaCosts):
            report = simulate(problem, plan)
            over = max(stage.memory.peak_bytes - stage.capacity_bytes for stage in report.stages)
            fits = report.fits_with_margin
            return Priced(plan, report.step_time_s, fits, report.peak_memory_bytes, max(0, over))
        costs = costs or costs_of(problem, layout)
        stages = plan_stages(costs, problem.model.layer_kinds, plan)
        memory = rank_memory(layout, costs, stages)
        hosts = [problem.node_types[node_type].host_bytes for node_type in rank_types(problem, layout)]
        over = max(
            max(rank.peak_bytes - capacity, rank.host_bytes - host)
            for rank, capacity, host in zip(memory, rank_capacities(problem, layout), hosts, strict=True)
        )
        step_ns = int(step_times_ns(layout, costs, durations(stages)))
        peak = max(rank.peak_bytes for rank in memory)
        return Priced(plan, step_ns / NS_PER_S, over <= 0, peak, max(0, over))

    @property
    def order(self) -> tuple[bool, float]:
        """Sort key: plans that fit first, by step time; then those that do not fit, by size."""
        return not self.fits, self.step_time_s if self.fits else float(self.over_bytes)


def variants(problem: Problem, plan: Plan) -> Iterator[tuple[str, str, Plan]]:
    """Iterate over single changes as (lead, words, plan).

    First come all recomputations and an even split with the given layout, then every other value of every field,
    with the minimum of other fields changed that the rules require.
    """
    yield from _other_stages(problem, plan)
    for lead in LEADS:
        fields = (lead, *FOLLOWERS.get(lead, ()))
        columns = layout_space(loosened(problem, plan, fields)).columns
        own = LayoutColumns.of([plan.layout])
        new = getattr(columns, lead) != getattr(own, lead)[0]
        columns = columns.take(np.flatnonzero(new))
        changed = sum(
            (getattr(columns, name) != getattr(own, name)[0]).astype(np.int64) for name in Layout.model_fields
        )
        values = getattr(columns, lead)
        for value in np.unique(values):
            rows = np.flatnonzero(values == value)
            fewest = rows[changed[rows] == changed[rows].min()]
            for row in fewest.tolist():
                layout = columns.at(row)
                yield lead, layout_words(plan.layout, layout, lead), carried_over(problem, plan, layout)


def _other_stages(problem: Problem, plan: Plan) -> Iterator[tuple[str, str, Plan]]:
    """Iterate over plans of the same layout with each recomputation of all layers, and with layers spread
    evenly."""
    sizes = [stage.num_layers for stage in plan.virtual_stages]
    for mode in problem.recompute_modes:
        full, selective = float(mode == "full"), float(mode == "selective")
        other = _with_stages(plan.layout, sizes, full, selective)
        if other != plan:
            yield "recompute", f"recompute={mode}", other
    spread = carried_over(problem, plan, plan.layout, keep=False)
    if [stage.num_layers for stage in spread.virtual_stages] != sizes:
        yield "stages", "layers spread evenly", spread


def carried_over(problem: Problem, plan: Plan, layout: Layout, keep: bool = True) -> Plan:
    """Carry the plan's stages and recomputation over to another layout.

    Stages stay unchanged if the number of virtual stages does (``keep``). Otherwise the layers are spread evenly,
    with the remainder on the first stages, and each stage recomputes the same shares of its layers, rounded up.
    """
    if keep and layout.num_virtual_stages == plan.layout.num_virtual_stages:
        return Plan(layout=layout, virtual_stages=plan.virtual_stages)
    layers, stages = problem.model.num_layers, layout.num_virtual_stages
    each, remainder = divmod(layers, stages)
    sizes = [each + (stage < remainder) for stage in range(stages)]
    counts = [
        sum(getattr(stage.recompute, mode) for stage in plan.virtual_stages) for mode in ("full", "selective")
    ]
    return _with_stages(layout, sizes, counts[0] / layers, counts[1] / layers)


def _with_stages(layout: Layout, sizes: list[int], full: float, selective: float) -> Plan:
    """Build a plan from stage sizes and recomputed shares of their layers, rounded up."""
    held, first = [], 0
    for size in sizes:
        whole = math.ceil(size * full - 1e-9)
        some = min(size - whole, math.ceil(size * selective - 1e-9))
        recompute = Recompute(full=whole, selective=some)
        held.append(VirtualStage(layers=(first, first + size), recompute=recompute))
        first += size
    return Plan(layout=layout, virtual_stages=tuple(held))


def best_changes(problem: Problem, before: Priced, budget: Budget) -> dict[str, tuple[str, Priced]]:
    """Find the best improving change of every kind, by lead: (words, priced plan).

    Changes that the time does not allow to price are left out.
    """
    changes: dict[str, tuple[str, Priced]] = {}
    tried = _distinct(problem, before.plan)
    if not tried:
        return changes
    columns = LayoutColumns.of([plan.layout for _, _, plan in tried])
    least_ns = cluster_compute_bounds(problem, columns)
    costs = cluster_costs(problem, columns)
    for number in np.argsort(least_ns, kind="stable").tolist():
        lead, words, plan = tried[number]
        if budget.is_spent:
            break
        if before.fits and least_ns[number] / NS_PER_S >= before.step_time_s:
            # Changes are in order of their bounds, so no later change is faster.
            break
        priced = Priced.of(problem, plan, costs.at(number))
        best_order = changes[lead][1].order if lead in changes else before.order
        if priced.order < best_order:
            changes[lead] = (words, priced)
    return changes


def _distinct(problem: Problem, plan: Plan) -> list[tuple[str, str, Plan]]:
    """List every variant once, without stages outside the space unless the plan has such stages itself."""
    strict = in_space(problem, plan)
    once: dict[Plan, tuple[str, str, Plan]] = {}
    for variant in variants(problem, plan):
        if not strict or in_space(problem, variant[2]):
            once.setdefault(variant[2], variant)
    return list(once.values())


def change_of(
    lead: str, words: str, start: Plan, before: Priced, after: Priced, way_s: tuple[float, float]
) -> Change:
    """Make the record of a change from ``before`` to ``after``.

    ``way_s`` are the steps of the judged plan and of the fastest known plan, ``start`` is the plan before the
    change.
    """
    fields = tuple(
        name for name in Layout.model_fields if getattr(start.layout, name) != getattr(after.plan.layout, name)
    )
    if [s.layers for s in start.virtual_stages] != [s.layers for s in after.plan.virtual_stages]:
        fields += ("stages",)
    if [s.recompute for s in start.virtual_stages] != [s.recompute for s in after.plan.virtual_stages]:
        fields += ("recompute",)
    effort: Effort = "reshard" if (HOLDS | {"stages"}) & set(fields) else "flag"
    whole = way_s[0] - way_s[1]
    return Change(
        lead=lead,
        words=words,
        fields=fields,
        effort=effort,
        plan=after.plan,
        step_time_s=after.step_time_s,
        peak_memory_bytes=after.peak_memory_bytes,
        saved=1.0 - after.step_time_s / before.step_time_s,
        closed=(way_s[0] - after.step_time_s) / whole if whole > 0 and after.fits else None,
    )


def greedy_chain(
    problem: Problem, first: Priced, changes: dict[str, tuple[str, Priced]], best_s: float, budget: Budget
) -> list[Change]:
    """Chain changes greedily: the best single change, then the best change of its plan, while a change helps.

    Args:
        problem: the problem.
        first: the judged plan.
        changes: its best changes, already priced.
        best_s: step of the fastest known plan.
        budget: time limit.
    """
    chain: list[Change] = []
    before = first
    while changes and len(chain) < MAX_STEPS:
        lead = min(changes, key=lambda name: changes[name][1].order)
        words, after = changes[lead]
        if before.fits and before.step_time_s - after.step_time_s < WORTH_A_STEP * before.step_time_s:
            break
        chain.append(change_of(lead, words, before.plan, before, after, (first.step_time_s, best_s)))
        before = after
        changes = {} if budget.is_spent else best_changes(problem, before, budget)
    return chain
