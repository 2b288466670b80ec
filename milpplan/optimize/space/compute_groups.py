"""Groups of layouts with equal compute time, with one lower bound per group.

The bound from the layers' compute alone (``cluster_bounds.cluster_compute_bounds``, in the uniform space the
tighter ``uniform_plans.uniform_compute_bounds``) depends on few of the switches (``LAYER_KEYS``) and not on the
sharding. So layouts of a block with equal virtual stages, schedule and such switches share their bound. It is
computed once per group, and the rows of a group are made only when its layouts are explored.

Blocks whose layers' states alone exceed the device, with any sharding and offloading, have no groups: none of
their layouts fits (``fitting_blocks``). In large spaces not even all groups are made. A bound without
communication holds for all blocks that differ only in the order of their ranks, with any switches
(``BlockClasses``), and only blocks that it does not prune are split into groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from milpplan.optimize.bounds.closed_form import SAFETY
from milpplan.optimize.bounds.cluster_bounds import cluster_compute_bounds
from milpplan.optimize.bounds.uniform_plans import uniform_compute_bounds
from milpplan.optimize.objective import objective_weights
from milpplan.optimize.space.layout_space import Alike, LayoutSpace, chosen_rows, within
from milpplan.problem.problem import Problem
from milpplan.simulation.bulk.cache_keys import LAYER_KEYS
from milpplan.simulation.layers.cost_models import has_own_times
from milpplan.simulation.layout_columns import (
    BoolArray,
    FloatArray,
    IntArray,
    LayoutColumns,
    constant,
    unique_rows,
)
from milpplan.simulation.layout_costs import usable_memory_bytes
from milpplan.simulation.states import STATE_OFFLOADS, least_held_bytes

BLOCK_KEYS = (
    *("tp", "cp", "ep", "etp", "pp", "dp", "micro_batch_size", "global_batch_size", "replica_micro_batches"),
)
"""Fields that kernels, states and weights of a block's layouts depend on, besides its choices."""


@dataclass(frozen=True, slots=True)
class ComputeGroups:
    """Groups of some blocks of a space; all arrays [g].

    ``block``, ``switch`` (a row of ``alike.choices``) and ``stage`` (position among those of the block) identify a
    group. ``bounds_ns``: lower bounds of the layouts' steps.
    """

    space: LayoutSpace
    alike: Alike
    block: npt.NDArray[np.int32]
    switch: npt.NDArray[np.int32]
    stage: npt.NDArray[np.int32]
    bounds_ns: FloatArray

    @staticmethod
    def of(problem: Problem, space: LayoutSpace, alike: Alike, blocks: IntArray) -> ComputeGroups:
        """Make all groups of some blocks, block by block; ``alike``: the space's switches grouped by compute."""
        compute_space = replace(space, switches=alike.choices)
        number, family = within(compute_space.num_families[blocks])
        block = blocks[number]
        switch, stage = chosen_rows(compute_space.switches, compute_space.stages, block, family)
        bounds = _bounds_ns(problem, compute_space.families_of(blocks))
        stage = stage - compute_space.stages.starts[block]
        return ComputeGroups(space, alike, _short(block), _short(switch), _short(stage), bounds)

    @staticmethod
    def none(space: LayoutSpace, alike: Alike) -> ComputeGroups:
        """Return an empty set of groups."""
        none = np.zeros(0, dtype=np.int32)
        return ComputeGroups(space, alike, none, none, none, np.zeros(0))

    @staticmethod
    def joined(parts: Sequence[ComputeGroups]) -> ComputeGroups:
        """Concatenate the groups of several sets of blocks of a space."""
        names = ("block", "switch", "stage", "bounds_ns")
        own = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
        return ComputeGroups(parts[0].space, parts[0].alike, *own)

    @property
    def sizes(self) -> IntArray:
        """Number of layouts of each group, [g]; an upper bound where the space does not keep all of its rows."""
        return np.asarray(self.alike.counts[self.switch] * self.space.shardings.counts[self.block])

    @property
    def interleaved(self) -> BoolArray:
        """Mask of the groups whose layouts have several virtual stages a rank, [g]."""
        stages = self.space.stages
        return np.asarray(stages.table["vpp"][stages.starts[self.block] + self.stage] > 1)

    def layouts(self, groups: IntArray) -> tuple[IntArray, IntArray]:
        """Return the rows of the layouts of some groups, group by group, and the group of each."""
        number, position = within(self.alike.counts[self.switch[groups]])
        group = groups[number]
        switch = self.alike.members[self.alike.starts[self.switch[group]] + position]
        crossed, shardings = self.space.first_rows(self.block[group], switch, self.stage[group])
        number, position = within(shardings)
        crossed, group = crossed[number] + position, group[number]
        if self.space.kept is None:
            return crossed, group
        rows = np.searchsorted(self.space.kept, crossed)
        present = np.take(self.space.kept, rows, mode="clip") == crossed if len(self.space) else rows < 0
        return rows[present], group[present]


def _short(positions: IntArray) -> npt.NDArray[np.int32]:
    """Halve the memory of positions: there are millions."""
    return positions.astype(np.int32)


def alike_switches(space: LayoutSpace) -> Alike:
    """Group the switches of a space by those that the layers' compute depends on."""
    return space.switches.alike(LAYER_KEYS)


def fitting_blocks(problem: Problem, space: LayoutSpace) -> BoolArray:
    """Mask the blocks with layouts that may fit, [b]: the layers' states fit with the best sharding and
    offloading."""
    return _may_fit(problem, space.blocks)


def _may_fit(problem: Problem, blocks: LayoutColumns) -> BoolArray:
    if problem.other_hardware:
        return np.ones(len(blocks), dtype=np.bool_)
    space = problem.space
    offloaded = {name: constant(True in getattr(space, name), len(blocks), np.bool_) for name in STATE_OFFLOADS}
    stages = (constant(stage, len(blocks)) for stage in space.zero_stage)
    shardings: list[dict[str, Any]] = [{"zero_stage": stage, **offloaded} for stage in stages]
    state_bytes = [least_held_bytes(problem, replace(blocks, **sharding)) for sharding in shardings]
    return np.asarray(np.min(state_bytes, axis=0) * SAFETY <= usable_memory_bytes(problem))


@dataclass(frozen=True, slots=True)
class BlockClasses:
    """Blocks that differ only in the position of their ranks: ``first`` [c] is a block of each class, ``key`` [b]
    the class of each block."""

    first: IntArray
    key: IntArray

    @staticmethod
    def of(problem: Problem, space: LayoutSpace) -> BlockClasses:
        """Make the classes of a space; with a plug-in cost model every block is a class."""
        if not has_own_times(problem):
            every = np.arange(len(space.blocks))
            return BlockClasses(every, every)
        columns = [getattr(space.blocks, name) for name in BLOCK_KEYS]
        lists = [factor.lists()[3] for factor in (space.switches, space.stages)]
        return BlockClasses(*unique_rows(*columns, *lists))

    def least_ns(self, problem: Problem, space: LayoutSpace, classes: IntArray) -> FloatArray:
        """Return lower bounds of the steps of all layouts of some classes, nanoseconds [c], from the layers'
        kernels alone; infinite where a block has no layouts."""
        switches, stages = alike_switches(space).choices, space.stages.alike(("schedule",)).choices
        compute_space = replace(space, switches=switches, stages=stages)
        blocks = self.first[classes]
        number, _ = within(compute_space.num_families[blocks])
        bounds = cluster_compute_bounds(
            problem, compute_space.families_of(blocks), placed=not has_own_times(problem)
        )
        minima = np.full(len(classes), np.inf)
        np.minimum.at(minima, number, bounds)
        return minima


def _bounds_ns(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """Return lower bounds of the layouts' steps from the layers' compute alone, nanoseconds [n]."""
    if problem.space.kind != "uniform" or problem.other_hardware:
        return cluster_compute_bounds(problem, columns)
    bounds = uniform_compute_bounds(problem, columns)
    if columns.split_backward.any():
        # Otherwise the longest path is at least the mean over the ranks, which is the other bound.
        bounds = np.maximum(bounds, cluster_compute_bounds(problem, columns))
    return bounds


def compute_values(problem: Problem, space: LayoutSpace) -> FloatArray:
    """Return lower bounds of every layout's objective, [n], from the layers' compute alone.

    Infinite where the layout cannot meet the deadline, or its states alone do not fit.
    """
    fits = np.flatnonzero(fitting_blocks(problem, space))
    groups = ComputeGroups.of(problem, space, alike_switches(space), fits)
    rows, group = groups.layouts(np.arange(len(groups.block)))
    weights, limits = (column[groups.block[group]] for column in objective_weights(problem, space.blocks))
    bounds, values = groups.bounds_ns[group], np.full(len(space), np.inf)
    values[rows] = np.where(bounds > limits, np.inf, bounds * weights)
    return values
