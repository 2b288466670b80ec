"""Layouts in groups that compute alike, with one lower bound for each group.

The bound from the layers' compute alone (``mixed_bounds.cluster_compute_bounds``, in the uniform space the sharper
``uniform.uniform_compute_bounds``) depends on few of the switches
(``LAYER_KEYS``) and not on the sharding: the layouts of a block with the same virtual stages and schedule and the
same of these switches have the same bound: some twenty where all switches are open. It is computed once, and the
rows of a group are only made where somebody looks at its layouts one by one.

Blocks whose layers' states alone are too large for the device, whatever is sharded and offloaded, have no groups:
none of their layouts fits (``fitting_blocks``). Of large spaces not even the groups are all made: a bound without
communication holds for all blocks that differ in nothing but the order of their ranks, whatever their switches
(``BlockClasses``), and only blocks that it does not exclude are taken apart into groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from milpplan.optimize.bounds.closed_form import SAFETY
from milpplan.optimize.bounds.mixed_clusters import cluster_compute_bounds
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
    """The groups of some blocks of a space.

    ``block``, ``switch`` (a row of ``alike.choices``) and ``stage`` (place among those of the block) say which
    they are; ``bounds_ns`` are lower bounds of their steps; all [g].
    """

    space: LayoutSpace
    alike: Alike
    block: npt.NDArray[np.int32]
    switch: npt.NDArray[np.int32]
    stage: npt.NDArray[np.int32]
    bounds_ns: FloatArray

    @staticmethod
    def of(problem: Problem, space: LayoutSpace, alike: Alike, blocks: IntArray) -> ComputeGroups:
        """All groups of some blocks, block by block; ``alike``: the space's switches by what computes alike."""
        seen = replace(space, switches=alike.choices)
        number, place = within(seen.num_families[blocks])
        block = blocks[number]
        switch, stage = chosen_rows(seen.switches, seen.stages, block, place)
        bounds = _bounds_ns(problem, seen.families_of(blocks))
        stage = stage - seen.stages.starts[block]
        return ComputeGroups(space, alike, _short(block), _short(switch), _short(stage), bounds)

    @staticmethod
    def none(space: LayoutSpace, alike: Alike) -> ComputeGroups:
        """No groups."""
        none = np.zeros(0, dtype=np.int32)
        return ComputeGroups(space, alike, none, none, none, np.zeros(0))

    @staticmethod
    def joined(parts: Sequence[ComputeGroups]) -> ComputeGroups:
        """The groups of several sets of blocks of a space, one after another."""
        names = ("block", "switch", "stage", "bounds_ns")
        own = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
        return ComputeGroups(parts[0].space, parts[0].alike, *own)

    @property
    def sizes(self) -> IntArray:
        """Layouts of each group, [g]; where the space does not keep all of its rows, at most so many."""
        return np.asarray(self.alike.counts[self.switch] * self.space.shardings.counts[self.block])

    @property
    def interleaved(self) -> BoolArray:
        """Tell whether the layouts of each group have several virtual stages a rank, [g]."""
        stages = self.space.stages
        return np.asarray(stages.table["vpp"][stages.starts[self.block] + self.stage] > 1)

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


def _short(places: IntArray) -> npt.NDArray[np.int32]:
    """Places in half of the memory: there are millions."""
    return places.astype(np.int32)


def alike_switches(space: LayoutSpace) -> Alike:
    """The switches of a space by those that the layers' compute depends on."""
    return space.switches.alike(LAYER_KEYS)


def fitting_blocks(problem: Problem, space: LayoutSpace) -> BoolArray:
    """Blocks with layouts that may fit, [b]: those whose layers' states leave room on the device with the best of
    the space's ways to shard and to offload them."""
    return _may_fit(problem, space.blocks)


def _may_fit(problem: Problem, blocks: LayoutColumns) -> BoolArray:
    if problem.other_hardware:
        return np.ones(len(blocks), dtype=np.bool_)
    own = problem.space
    away = {name: constant(True in getattr(own, name), len(blocks), np.bool_) for name in STATE_OFFLOADS}
    stages = (constant(stage, len(blocks)) for stage in own.zero_stage)
    ways: list[dict[str, Any]] = [{"zero_stage": stage, **away} for stage in stages]
    held = [least_held_bytes(problem, replace(blocks, **way)) for way in ways]
    return np.asarray(np.min(held, axis=0) * SAFETY <= usable_memory_bytes(problem))


@dataclass(frozen=True, slots=True)
class BlockClasses:
    """Blocks that differ in nothing but where their ranks lie: ``first`` [c] is a block of each class, ``key`` [b]
    the class of each block."""

    first: IntArray
    key: IntArray

    @staticmethod
    def of(problem: Problem, space: LayoutSpace) -> BlockClasses:
        """The classes of a space; every block by itself where a cost model is not ours."""
        if not has_own_times(problem):
            every = np.arange(len(space.blocks))
            return BlockClasses(every, every)
        columns = [getattr(space.blocks, name) for name in BLOCK_KEYS]
        lists = [factor.lists()[3] for factor in (space.switches, space.stages)]
        return BlockClasses(*unique_rows(*columns, *lists))

    def least_ns(self, problem: Problem, space: LayoutSpace, classes: IntArray) -> FloatArray:
        """Lower bounds of the steps of all layouts of some classes, nanoseconds [c], from the layers' kernels
        alone; infinite where a block has no layouts."""
        switches, stages = alike_switches(space).choices, space.stages.alike(("schedule",)).choices
        seen = replace(space, switches=switches, stages=stages)
        blocks = self.first[classes]
        number, _ = within(seen.num_families[blocks])
        bounds = cluster_compute_bounds(problem, seen.families_of(blocks), placed=not has_own_times(problem))
        least = np.full(len(classes), np.inf)
        np.minimum.at(least, number, bounds)
        return least


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
    fits = np.flatnonzero(fitting_blocks(problem, space))
    groups = ComputeGroups.of(problem, space, alike_switches(space), fits)
    rows, group = groups.layouts(np.arange(len(groups.block)))
    weights, limits = (column[groups.block[group]] for column in objective_weights(problem, space.blocks))
    bounds, values = groups.bounds_ns[group], np.full(len(space), np.inf)
    values[rows] = np.where(bounds > limits, np.inf, bounds * weights)
    return values
