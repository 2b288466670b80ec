"""Layouts in groups that compute alike, with one lower bound for each group.

The bound from the layers' compute alone (``mixed_bounds.cluster_compute_bounds``, in the uniform space the sharper
``uniform.uniform_compute_bounds``) depends on few of the switches
(``LAYER_KEYS``) and not on the sharding: the layouts of a block with the same virtual stages and schedule and the
same of these switches have the same bound: some twenty where all switches are open. It is computed once, and the
rows of a group are only made where somebody looks at its layouts one by one.

Blocks whose layers' states alone are too large for the device, whatever is sharded and offloaded, have no bounds:
none of their layouts fits (``fitting_blocks``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from milpplan.costs.columns import BoolArray, FloatArray, IntArray, LayoutColumns, constant
from milpplan.costs.distinct import LAYER_KEYS
from milpplan.costs.layout_costs import usable_memory_bytes
from milpplan.costs.states import STATE_OFFLOADS, least_held_bytes
from milpplan.optimize.bounds import SAFETY
from milpplan.optimize.layout_space import Alike, LayoutSpace, chosen_rows, within
from milpplan.optimize.mixed_bounds import cluster_compute_bounds
from milpplan.optimize.objective import objective_weights
from milpplan.optimize.uniform import uniform_compute_bounds
from milpplan.specs.problem import Problem


@dataclass(frozen=True, slots=True)
class ComputeGroups:
    """The groups of a space.

    ``block``, ``switch`` (a row of ``alike.choices``) and ``stage`` (place among those of the block) say which
    they are; ``weights`` and ``limits_ns`` are those of their steps, ``bounds_ns`` lower bounds of these (infinite
    where no layout fits); all [g]. ``fits`` [b]: ``fitting_blocks``.
    """

    space: LayoutSpace
    alike: Alike
    block: IntArray
    switch: IntArray
    stage: IntArray
    weights: FloatArray
    limits_ns: FloatArray
    bounds_ns: FloatArray
    fits: BoolArray

    @staticmethod
    def of(problem: Problem, space: LayoutSpace) -> ComputeGroups:
        """All groups of a space, block by block."""
        alike = space.switches.alike(LAYER_KEYS)
        seen = replace(space, switches=alike.choices)
        block, place = within(seen.num_families)
        switch, stage = chosen_rows(seen.switches, seen.stages, block, place)
        fits = fitting_blocks(problem, space)
        bounds = np.full(len(block), np.inf)
        bounds[fits[block]] = _bounds_ns(problem, seen.families_of(np.flatnonzero(fits)))
        weights, limits = (values[block] for values in objective_weights(problem, space.blocks))
        return ComputeGroups(
            space, alike, block, switch, stage - seen.stages.starts[block], weights, limits, bounds, fits
        )

    @property
    def values(self) -> FloatArray:
        """Lower bounds of the objective of each group's layouts, [g]; infinite where none meets the deadline."""
        return np.where(self.bounds_ns > self.limits_ns, np.inf, self.bounds_ns * self.weights)

    @property
    def sizes(self) -> IntArray:
        """Layouts of each group, [g]; where the space does not keep all of its rows, at most so many."""
        return np.asarray(self.alike.counts[self.switch] * self.space.shardings.counts[self.block])

    def layouts(self, groups: IntArray) -> tuple[IntArray, IntArray]:
        """The rows of the layouts of some groups, group by group, and the group of each."""
        number, place = within(self.alike.counts[self.switch[groups]])
        group = groups[number]
        switch = self.alike.members[self.alike.starts[self.switch[group]] + place]
        crossed, shardings = self.space.first_rows(self.block[group], switch, self.stage[group])
        number, place = within(shardings)
        crossed, group = crossed[number] + place, group[number]
        if self.space.kept is None:
            return crossed, group
        rows = np.searchsorted(self.space.kept, crossed)
        there = np.take(self.space.kept, rows, mode="clip") == crossed if len(self.space) else rows < 0
        return rows[there], group[there]


def fitting_blocks(problem: Problem, space: LayoutSpace) -> BoolArray:
    """Blocks with layouts that may fit, [b]: those whose layers' states leave room on the device with the best of
    the space's ways to shard and to offload them."""
    if problem.other_hardware:
        return np.ones(len(space.blocks), dtype=np.bool_)
    blocks, own = space.blocks, problem.space
    away = {name: constant(True in getattr(own, name), len(blocks), np.bool_) for name in STATE_OFFLOADS}
    stages = (constant(stage, len(blocks)) for stage in own.zero_stage)
    ways: list[dict[str, Any]] = [{"zero_stage": stage, **away} for stage in stages]
    held = [least_held_bytes(problem, replace(blocks, **way)) for way in ways]
    return np.asarray(np.min(held, axis=0) * SAFETY <= usable_memory_bytes(problem))


def _bounds_ns(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """Lower bounds of the layouts' steps from the layers' compute alone, nanoseconds [n]."""
    if problem.space.kind != "uniform" or problem.other_hardware:
        return cluster_compute_bounds(problem, columns)
    bounds = uniform_compute_bounds(problem, columns)
    if columns.split_backward.any():
        # Else the longest of these paths is no shorter than their mean over the ranks, which the other bound is.
        bounds = np.maximum(bounds, cluster_compute_bounds(problem, columns))
    return bounds


def compute_values(problem: Problem, space: LayoutSpace) -> FloatArray:
    """Lower bounds of the objective of every layout, [n], from the layers' compute alone; infinite where it cannot
    meet the deadline, or its states alone do not fit."""
    groups = ComputeGroups.of(problem, space)
    rows, group = groups.layouts(np.arange(len(groups.block)))
    values = np.empty(len(space))
    values[rows] = groups.values[group]
    return values
