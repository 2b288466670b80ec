"""Closed layouts of a space, in groups with one bound each, and the record of a search (``PruneRecord``).

A layout is closed until its group is opened: it shares the bound of its group or block. Best-first search calls
such layouts unexpanded; its "closed list" is something else.

Layouts are refined in three steps, always those with the smallest bound first: blocks, with a bound that ignores
communication; the groups of a block; the layouts of a group. A block or group that is not refined keeps its proved
bound.

The bound from the layers' compute alone (``closed_form.compute_bounds``, in the uniform space the tighter
``uniform_plans.uniform_compute_bounds``) depends on few of the switches (``compute_keys``), not on the sharding.
So layouts of a block with equal virtual stages, schedule and such switches form a group and share their bound. The
rows of a group are made only when its layouts are explored.

Blocks whose layers' states alone exceed the device, with any sharding and offloading, have no groups: none of
their layouts fits (``fitting_blocks``). In large spaces not even all groups are made. A bound without
communication holds for all blocks that differ only in the order of their ranks, with any switches
(``BlockClasses``), and only blocks that it does not prune are split into groups.

Large groups are bounded again before they are opened, by the minimum of each constant over sets of their layouts
(``closed_form.bounds_over_sets``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from milpplan.optimize.bounds.closed_form import SAFETY, bounds_over_sets, compute_bounds, layers_work_ns
from milpplan.optimize.bounds.cluster_bounds import cluster_compute_bounds
from milpplan.optimize.bounds.uniform_plans import uniform_compute_bounds
from milpplan.optimize.context import BUDGET, Budget, objective_weights
from milpplan.optimize.space.layout_space import Alike, Choices, LayoutSpace, Stop, chosen_rows, within
from milpplan.problem import PAIRED_SCHEDULES, SCHEDULES, SPLIT_SCHEDULES, Problem
from milpplan.simulation import (
    BoolArray,
    FloatArray,
    IntArray,
    ascending,
    least_held_bytes,
    unique_rows,
    usable_memory_bytes,
)
from milpplan.simulation.layers.layer_time import has_own_times
from milpplan.simulation.layout_columns import LAYER_KEYS, constant
from milpplan.simulation.layout_costs import layer_positions
from milpplan.simulation.pipeline.step_graph import CriticalPath
from milpplan.simulation.states import STATE_OFFLOADS

CLASSES_AT_ONCE = 1_024
"""Number of classes of blocks whose layers are timed together (``PlacedClasses``)."""
EARLY_SHARE = 256
"""Fraction of the groups that may be made at once for which blocks with larger bounds wait."""
BLOCK_KEYS = (
    *("tp", "cp", "ep", "etp", "pp", "dp", "micro_batch_size", "global_batch_size", "replica_micro_batches"),
)
"""Fields that kernels, states and weights of a block's layouts depend on, besides its choices."""
LARGE_GROUP = 16
"""Minimum number of layouts of a group whose bound is raised by sets."""
RAISED_AT_ONCE = 1_024
"""Number of groups with the smallest bounds that are raised together, with all others that share constants."""
_SPLITS, _PAIRS = (np.isin(SCHEDULES, list(names)) for names in (SPLIT_SCHEDULES, PAIRED_SCHEDULES))


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
        families = compute_space.families_of(blocks)
        if problem.other_hardware:
            bounds = cluster_compute_bounds(problem, families)
        elif problem.space.kind == "uniform":
            bounds = uniform_compute_bounds(problem, families)
            if families.split_backward.any():
                # Otherwise the longest path is at least the mean over the ranks, which is the other bound.
                bounds = np.maximum(bounds, compute_bounds(problem, families))
        else:
            bounds = compute_bounds(problem, families)
        stage = stage - compute_space.stages.starts[block]
        # Short integers: there are millions of groups.
        indices = block.astype(np.int32), switch.astype(np.int32), stage.astype(np.int32)
        return ComputeGroups(space, alike, *indices, bounds)

    @staticmethod
    def joined(parts: Sequence[ComputeGroups]) -> ComputeGroups:
        """Concatenate the groups of several sets of blocks of a space."""
        columns = zip(*((part.block, part.switch, part.stage, part.bounds_ns) for part in parts), strict=True)
        return ComputeGroups(parts[0].space, parts[0].alike, *map(np.concatenate, columns))

    def sizes(self, groups: IntArray) -> IntArray:
        """Return the number of layouts of some groups; an upper bound where the space does not keep all of its
        rows."""
        switch, block = self.switch[groups], self.block[groups]
        return np.asarray(self.alike.counts[switch] * self.space.shardings.counts[block])

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


def fitting_blocks(problem: Problem, space: LayoutSpace) -> BoolArray:
    """Mask the blocks with layouts that may fit, [b]: the layers' states fit with the best sharding and
    offloading."""
    blocks, declared = space.blocks, problem.space
    fits = np.ones(len(blocks), dtype=np.bool_)
    if problem.other_hardware:
        return fits
    offloaded: dict[str, Any] = {
        name: constant(True in getattr(declared, name), len(blocks), np.bool_) for name in STATE_OFFLOADS
    }
    offloaded["dp_replicate"] = constant(1, len(blocks))
    least_bytes = np.full(len(blocks), np.inf)
    for stage in declared.zero_stage:
        sharding = {"zero_stage": constant(stage, len(blocks)), **offloaded}
        least_bytes = np.minimum(least_bytes, least_held_bytes(problem, replace(blocks, **sharding)))
    return np.asarray(least_bytes * SAFETY <= usable_memory_bytes(problem))


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

    def least_ns(self, problem: Problem, kernels: LayoutSpace, classes: IntArray) -> FloatArray:
        """Return lower bounds of the steps of all layouts of some classes, nanoseconds [c], from the layers'
        kernels alone; infinite where a block has no layouts. ``kernels``: ``kernel_space`` of the space."""
        blocks = self.first[classes]
        number, _ = within(kernels.num_families[blocks])
        families, placed = kernels.families_of(blocks), not has_own_times(problem)
        bounds = cluster_compute_bounds(problem, families, placed)
        minima = np.full(len(classes), np.inf)
        np.minimum.at(minima, number, bounds)
        return minima


@dataclass(frozen=True, slots=True)
class PlacedClasses:
    """Blocks whose layers lie alike in the network: ``first`` [c] is a block of each class, ``key`` [b] the class
    of each block.

    Of the schedules, bounds tell apart those with whole backwards, with split backwards and with pairs.
    """

    space: LayoutSpace
    blocks: IntArray
    first: IntArray
    key: IntArray
    has_form: BoolArray
    """True where a block has schedules of a form, [form, b]."""

    @staticmethod
    def of(problem: Problem, space: LayoutSpace, blocks: IntArray) -> PlacedClasses:
        """Make the classes of some blocks."""
        part, switches = space.blocks.take(blocks), space.switches.alike(compute_keys(problem)).choices.shared()
        degrees = [getattr(part, name) for name in LAYER_KEYS if name in BLOCK_KEYS]
        lists = switches.of(blocks).lists()[3]
        first, key = unique_rows(*degrees, lists, *layer_positions(problem, part))
        rows, number, _, group = space.stages.of(blocks).lists()
        forms = space.stages.table["schedule"][rows]
        forms = _SPLITS[forms].astype(np.int64) + _PAIRS[forms]
        has_form = np.zeros((3, int(group.max(initial=-1)) + 1), dtype=np.bool_)
        has_form[forms, number] = True
        return PlacedClasses(replace(space, switches=switches), blocks, first, key, has_form[:, group])

    def bounds_ns(self, problem: Problem, classes: IntArray) -> tuple[IntArray, FloatArray]:
        """Return the positions of the blocks of some classes, and lower bounds of the steps of their layouts,
        [r] ns: the minimum over its forms of ``compute_bounds`` without ramps, with a layer's work at its minimum
        over the switches.

        m S / P, or (P S + (m - P) D) / P in pairs, for the work S = F + B + W of a micro-batch alone and D in a
        pair.
        """
        rows = np.flatnonzero(np.isin(self.key, classes))
        part = self.space.blocks.take(self.blocks[rows])
        m, P, has_form = part.num_micro_batches, part.pp, self.has_form[:, rows]
        split = has_form[1] | has_form[2]
        whole = m * self._work_ns(problem, "1f1b", rows, has_form[0]) / P
        alone = self._work_ns(problem, "zb-h1", rows, split)
        paired = (P * alone + (m - P) * self._work_ns(problem, "dualpipe-v", rows, has_form[2])) / P
        forms = np.where(has_form, np.stack([whole, m * alone / P, paired]), np.inf)
        return rows, np.asarray(forms.min(axis=0) * SAFETY)

    def _work_ns(self, problem: Problem, schedule: str, rows: IntArray, asked: BoolArray) -> FloatArray:
        """Return the minimum over the switches of the layers' work for the blocks at some positions that are asked
        for, [r] ns; zero for others."""
        code = np.array([SCHEDULES.index(schedule)])
        stages = Choices({"schedule": code, "vpp": code}, *np.tile([[0], [1]], len(self.space.blocks)))
        minima, classes = np.zeros(len(self.first)), ascending(self.key[rows[asked]])
        if len(classes):
            blocks = self.blocks[self.first[classes]]
            number, _ = within(self.space.switches.counts[blocks])
            families = replace(self.space, stages=stages).families_of(blocks)
            minima[classes] = np.inf
            np.minimum.at(minima, classes[number], layers_work_ns(problem, families))
        return minima[self.key[rows]]


@dataclass(slots=True)
class Placing:
    """Classes of blocks whose bounds are about to count what their layers send, smallest bound first.

    ``order`` [c] of the classes; ``starts_at`` [c] is the smallest bound of a block of each, in this order.
    ``done``: number of classes that are bounded.
    """

    classes: PlacedClasses
    order: IntArray
    starts_at: FloatArray
    done: int = 0

    @staticmethod
    def of(classes: PlacedClasses, values: FloatArray) -> Placing:
        """Put classes in the order of their blocks' bounds ``values`` [b]."""
        minima = np.full(len(classes.first), np.inf)
        np.minimum.at(minima, classes.key, values)
        order = np.argsort(minima, kind="stable")
        return Placing(classes, order, minima[order])

    def next(self, below: float) -> IntArray:
        """Return the next classes, at most ``CLASSES_AT_ONCE``, that have blocks with bounds below a value."""
        end = min(int(np.searchsorted(self.starts_at, below)), self.done + CLASSES_AT_ONCE)
        return self.order[self.done : end]


def compute_keys(problem: Problem) -> tuple[str, ...]:
    """Return the fields of a layout that its layers' times depend on before anything is recomputed: with a plug-in
    cost model all ``LAYER_KEYS``."""
    if not has_own_times(problem):
        return LAYER_KEYS
    return tuple(name for name in LAYER_KEYS if name not in ("recompute_vision", "recompute_modules"))


def kernel_space(problem: Problem, space: LayoutSpace) -> LayoutSpace:
    """Return the space with only the choices that kernels' times depend on; gathering again only communicates."""
    names = [name for name in compute_keys(problem) if name != "gather_again" or not has_own_times(problem)]
    switches, stages = space.switches.alike(names).choices, space.stages.alike(("schedule",)).choices
    return replace(space, switches=switches.shared(), stages=stages.shared())


def compute_values(problem: Problem, space: LayoutSpace) -> FloatArray:
    """Return lower bounds of every layout's objective, [n], from the layers' compute alone.

    Infinite where the layout cannot meet the deadline, or its states alone do not fit.
    """
    fits = np.flatnonzero(fitting_blocks(problem, space))
    groups = ComputeGroups.of(problem, space, space.switches.alike(compute_keys(problem)), fits)
    rows, group = groups.layouts(np.arange(len(groups.block)))
    weights, limits = (column[groups.block[group]] for column in objective_weights(problem, space.blocks))
    bounds, values = groups.bounds_ns[group], np.full(len(space), np.inf)
    values[rows] = np.where(bounds > limits, np.inf, bounds * weights)
    return values


class OpenedLayouts(NamedTuple):
    """Layouts of groups that were just opened: rows in the whole space, weights and limits (ns) of their steps,
    and lower bounds of the steps (ns); all [n]."""

    rows: IntArray
    weights: FloatArray
    limits_ns: FloatArray
    bounds_ns: FloatArray


class LayoutClass(NamedTuple):
    """Layouts that share a bound; all [n].

    Lower bounds of the objective, numbers of layouts, and flags: some layouts may fit, some have several virtual
    stages a rank, some have a single stage a rank.
    """

    values: FloatArray
    sizes: IntArray
    fits: BoolArray
    interleaved: BoolArray
    plain: BoolArray


class GroupStates(NamedTuple):
    """State of the groups [g] and blocks [b].

    It is replaced as a whole, because Ctrl-C may come between any two lines and no bound may ever leave a layout
    out. ``opened``: groups whose layouts are explored one by one; their ``values`` are infinite. ``whole`` and
    ``block_values``: blocks that are not split, and their bounds.
    """

    groups: ComputeGroups
    opened: BoolArray
    values: FloatArray
    whole: BoolArray
    block_values: FloatArray


@dataclass(slots=True)
class ClosedLayouts:
    """Closed layouts of a space; all that is proved of them is one bound per block or group."""

    problem: Problem
    space: LayoutSpace
    budget: Budget = BUDGET
    alike: Alike = field(init=False)
    """Switches grouped by those that the layers' compute depends on."""
    fits: BoolArray = field(init=False)
    """Blocks with layouts that may fit, [b]."""
    weights: FloatArray = field(init=False)
    limits_ns: FloatArray = field(init=False)
    """Step time limits of the blocks' layouts, [b]."""
    state: GroupStates = field(init=False)
    placed: BoolArray = field(init=False)
    """Blocks whose bounds count what their layers send, [b]."""
    raised_ns: FloatArray = field(default_factory=lambda: np.zeros(0))
    """Bounds of the groups from sets of their layouts, [g]; zero where they are not raised."""
    placing: Placing | None = None
    """Blocks that are not ``placed``, among them all that may be split next."""
    bounded: bool = False
    """True once every block has a bound."""

    def __post_init__(self) -> None:
        blocks = self.space.blocks
        self.alike = self.space.switches.alike(compute_keys(self.problem))
        self.weights, self.limits_ns = objective_weights(self.problem, blocks)
        self.fits = fitting_blocks(self.problem, self.space)
        whole, self.placed = np.ones(len(blocks), dtype=np.bool_), np.zeros(len(blocks), dtype=np.bool_)
        values = np.where(self.fits & (self.space.sizes > 0), 0.0, np.inf)
        none = np.zeros(0, dtype=np.int32)
        groups = ComputeGroups(self.space, self.alike, none, none, none, np.zeros(0))
        self.state = self._group_states(groups, np.zeros(0, dtype=np.bool_), whole, values)

    def closed_again(self) -> ClosedLayouts:
        """Return a copy with the same blocks and groups and nothing opened."""
        copied, state = copy(self), self.state
        copied.placed, copied.placing = self.placed.copy(), None
        copied.raised_ns = np.zeros_like(self.raised_ns)
        copied.state = copied._group_states(
            state.groups, np.zeros_like(state.opened), state.whole, state.block_values
        )
        return copied

    @property
    def are_few(self) -> bool:
        """True if there are so few groups that all blocks are split at once."""
        return int(self.num_groups[self.fits].sum()) <= self.budget.groups_at_once

    @property
    def num_groups(self) -> IntArray:
        """Number of groups of each block, [b]."""
        return np.asarray(self.alike.choices.counts * self.space.stages.counts)

    def bound_blocks(self, stop: Stop) -> None:
        """Bound the blocks by their kernel times only, until time is up."""
        kernels = kernel_space(self.problem, self.space)
        classes = BlockClasses.of(self.problem, kernels)
        size, done = self.budget.blocks_at_once, 0
        bounds_ns = np.zeros(len(classes.first))
        # Classes with equal layers follow each other, so that their kernels are timed together.
        blocks = self.space.blocks.take(classes.first)
        order = np.lexsort([getattr(blocks, name) for name in LAYER_KEYS if name in BLOCK_KEYS])
        while done < len(bounds_ns) and not stop():
            chunk = order[done : done + size]
            bounds_ns[chunk] = classes.least_ns(self.problem, kernels, chunk)
            done += len(chunk)
        bounds = bounds_ns[classes.key]
        values = np.where(bounds > self.limits_ns, np.inf, bounds * self.weights)
        values = np.where(np.isfinite(self.state.block_values), values, np.inf)
        self.state = self.state._replace(block_values=values)
        self.bounded = done == len(bounds_ns)

    @property
    def bound(self) -> float:
        """Proved lower bound of the objective over all closed layouts."""
        return float(min(self.state.values.min(initial=np.inf), self.state.block_values.min(initial=np.inf)))

    def closed_below(self, threshold: float) -> int:
        """Return the number of closed layouts whose bound is below a value of the objective."""
        groups = self.state.groups.sizes(np.flatnonzero(self.state.values < threshold)).sum()
        return int(groups + self.space.sizes[self.state.block_values < threshold].sum())

    def first(self, threshold: float, layouts: int, stop: Stop, below: float = np.inf) -> IntArray:
        """Return the closed groups with the smallest bounds below the threshold and a value, with at least
        ``layouts`` layouts together.

        Blocks with smaller bounds are split first, in batches, until a group is found at all.
        """
        below = min(below, threshold)
        while True:
            chosen = self._raised(below, layouts, threshold, stop)
            enough = self.state.groups.sizes(chosen).sum() >= layouts
            last = float(self.state.values[chosen].max(initial=0.0)) if enough else below
            if np.isfinite(below):
                last = self._place(last, threshold, stop)
            blocks = np.flatnonzero(self.state.block_values < last)
            if len(blocks):
                # Within the budget.
                order = blocks[np.argsort(self.state.block_values[blocks], kind="stable")]
                ends = np.cumsum(self.num_groups[order])
                capacity = min(self.budget.groups_at_once, self.budget.groups - len(self.state.values))
                blocks = np.sort(order[: np.searchsorted(ends, capacity, side="right")])
            if not self.split_blocks(blocks, stop):
                return chosen
            chosen = self._raised(below, layouts, threshold, stop)
            if len(chosen):
                return chosen

    def _raised(self, below: float, layouts: int, threshold: float, stop: Stop) -> IntArray:
        """Return ``_chosen`` once the bounds of its large groups are raised, or time is up."""
        space, groups = self.problem.space, self.state.groups
        chosen = self._chosen(below, layouts)
        if space.kind == "uniform" or self.problem.other_hardware or not np.isfinite(threshold):
            return chosen
        waits = (self.raised_ns == 0) & (groups.sizes(np.arange(len(self.raised_ns))) >= LARGE_GROUP)
        codes = groups.block.astype(np.int64) * (self.alike.choices.size + 1) + groups.switch
        while waits[chosen].any() and not stop():
            new = np.flatnonzero(waits & (self.state.values < threshold))
            families = codes[new[np.argsort(self.state.values[new], kind="stable")][:RAISED_AT_ONCE]]
            group = new[np.isin(codes[new], families)]
            self._raise(group, threshold)
            waits[group] = False
            chosen = self._chosen(below, layouts)
        return chosen

    def _raise(self, group: IntArray, threshold: float) -> None:
        """Raise the bounds of groups to the minimum over their sets; sets below the threshold are cut further.

        Groups of a block and a switch with equal backwards share constants, whatever their virtual stages.
        """
        groups, space = self.state.groups, self.space
        block, switch = groups.block[group], groups.switch[group]
        heads = space.take(
            space.first_rows(block, self.alike.members[self.alike.starts[switch]], groups.stage[group])[0]
        )
        first, family = unique_rows(block, switch, heads.backward_form, heads.ends_meet)
        rows, of = groups.layouts(group[first])
        owner = np.argsort(group[first])[np.searchsorted(np.sort(group[first]), of)]
        limits = threshold / self.weights[block]
        bounds = bounds_over_sets(self.problem, heads, family, space.take(rows), owner, limits)
        self.raised_ns[group] = np.maximum(bounds, groups.bounds_ns[group])
        state = self.state
        self.state = self._group_states(groups, state.opened, state.whole, state.block_values)

    def _place(self, below: float, threshold: float, stop: Stop) -> float:
        """Raise the bounds of blocks by what their layers send, smallest bound first, until those below a value
        are done, or so many that no more are split at once.

        Returns:
            The value below which blocks may be split: no other block has a smaller bound.
        """
        if self.problem.other_hardware or not has_own_times(self.problem):
            return below
        while True:
            values = self.state.block_values
            new = np.flatnonzero((values < below) & ~self.placed)
            least = float(values[new].min(initial=below))
            ready = int(self.num_groups[values < least].sum())
            if not len(new) or ready >= self.budget.groups_at_once // EARLY_SHARE or stop():
                return least
            if self.placing is None or not len(classes := self.placing.next(below)):
                new = np.flatnonzero((values < threshold) & ~self.placed)
                parts = PlacedClasses.of(self.problem, self.space, new)
                self.placing = Placing.of(parts, values[new])
                classes = self.placing.next(below)
            rows, bounds = self.placing.classes.bounds_ns(self.problem, classes)
            blocks = self.placing.classes.blocks[rows]
            raised = np.where(bounds > self.limits_ns[blocks], np.inf, bounds * self.weights[blocks])
            values = values.copy()
            values[blocks] = np.maximum(values[blocks], raised)
            self.state = self.state._replace(block_values=values)
            self.placed[blocks] = True
            self.placing.done += len(classes)

    def _chosen(self, threshold: float, layouts: int) -> IntArray:
        """Return the closed groups with the smallest bounds below the threshold, with at least ``layouts``
        layouts."""
        below = np.flatnonzero(self.state.values < threshold)
        order = below[np.argsort(self.state.values[below], kind="stable")]
        count = int(np.searchsorted(np.cumsum(self.state.groups.sizes(order)), layouts)) + 1
        return np.sort(order[:count])

    def split_blocks(self, blocks: IntArray | None = None, stop: Stop | None = None) -> bool:
        """Make the groups of some blocks, or of all, until time is up. Returns True if there were any blocks."""
        if blocks is None:
            blocks, self.bounded = np.flatnonzero(self.fits & self.state.whole), True
        parts, size, done = [self.state.groups], self.budget.blocks_at_once, 0
        while done < len(blocks) and not (stop is not None and stop()):
            parts.append(ComputeGroups.of(self.problem, self.space, self.alike, blocks[done : done + size]))
            done = min(done + size, len(blocks))
        if not done:
            return False
        groups = ComputeGroups.joined(parts)
        opened = np.zeros(len(groups.block), dtype=np.bool_)
        opened[: len(self.state.opened)] = self.state.opened
        whole, values = self.state.whole.copy(), self.state.block_values.copy()
        whole[blocks[:done]], values[blocks[:done]] = False, np.inf
        self.raised_ns = np.concatenate([self.raised_ns, np.zeros(len(opened) - len(self.state.opened))])
        self.state = self._group_states(groups, opened, whole, values)
        return True

    def _group_states(
        self, groups: ComputeGroups, opened: BoolArray, whole: BoolArray, block_values: FloatArray
    ) -> GroupStates:
        """Return the state with given groups, whose values follow from their bounds."""
        bounds = np.maximum(groups.bounds_ns, self.raised_ns[: len(groups.block)])
        values = np.where(bounds > self.limits_ns[groups.block], np.inf, bounds * self.weights[groups.block])
        values = np.where(opened, np.inf, values)
        return GroupStates(groups, opened, values, whole, block_values)

    def layouts(self, groups: IntArray) -> OpenedLayouts:
        """Return the layouts of some groups; the groups stay closed until ``open``."""
        rows, group = self.state.groups.layouts(groups)
        block = self.state.groups.block[group]
        bounds = np.maximum(self.state.groups.bounds_ns, self.raised_ns[: len(self.state.opened)])[group]
        return OpenedLayouts(rows, self.weights[block], self.limits_ns[block], bounds)

    def open(self, groups: IntArray) -> None:
        """Mark groups as opened: from now on their layouts are explored one by one and carry the bounds."""
        self.state.opened[groups] = True
        self.state.values[groups] = np.inf

    def classes(self) -> Iterator[LayoutClass]:
        """Yield the classes of all closed layouts: first those of groups, then those of whole blocks."""
        closed = np.flatnonzero(~self.state.opened)
        interleaved = self.state.groups.interleaved[closed]
        sizes, fit = self.state.groups.sizes(closed), np.ones(len(closed), dtype=np.bool_)
        yield LayoutClass(self.state.values[closed], sizes, fit, interleaved, ~interleaved)
        whole = np.flatnonzero(self.state.whole)
        chunks = self.space.stages.alike(("vpp",)).choices
        rows, number, first, group = chunks.lists()
        interleaved = np.zeros(len(first), dtype=np.bool_)
        plain = interleaved.copy()
        np.logical_or.at(interleaved, number, chunks.table["vpp"][rows] > 1)
        np.logical_or.at(plain, number, chunks.table["vpp"][rows] == 1)
        list_of_block = group[whole]
        yield LayoutClass(
            self.state.block_values[whole],
            self.space.sizes[whole],
            self.fits[whole],
            interleaved[list_of_block],
            plain[list_of_block],
        )


Fate = Literal["open", "does_not_fit", "bounded", "relaxed", "solved"]
FATES: tuple[Fate, ...] = ("open", "does_not_fit", "bounded", "relaxed", "solved")
"""Reasons why a layout is decided.

``does_not_fit``: proved above memory. ``bounded``: by a closed-form bound, or because no stage option is left.
``relaxed``: by the linear relaxation, its duals checked in exact arithmetic. ``solved``: by an integer program or,
in the uniform space, by simulating every plan of the layout. ``open``: not decided.
"""

PRUNED: tuple[Fate, ...] = ("does_not_fit", "bounded", "relaxed")
"""Fates of layouts that were never solved."""


@dataclass(frozen=True)
class PruneRecord:
    """Record of a search: a proved lower bound of every legal layout's objective, and what decided the
    layout.

    Layouts that were not explored one by one have the bound of their group or block in ``closed``. Their own
    bounds are computed on demand.
    """

    problem: Problem
    space: LayoutSpace
    rows: IntArray
    """Rows of the explored layouts."""
    own_bounds: FloatArray
    own_fates: npt.NDArray[np.int8]
    closed: ClosedLayouts
    """Closed layouts: all others."""
    threshold: float
    """Objective from which on a bound makes a layout ``bounded``."""
    best: float | None = None
    """Objective of the best plan found, in the unit of the bounds; None without a plan."""
    known_paths: dict[tuple[object, ...], list[CriticalPath]] = field(default_factory=dict)
    """Critical paths that the search has found (``SolveContext.known_paths``)."""

    def __repr__(self) -> str:
        """Write the number of layouts and what decided them in a line."""
        counts = ", ".join(f"{count:,} {fate}" for fate in FATES if (count := self.count(fate)))
        return f"PruneRecord: {len(self.space):,} layouts: {counts or 'none legal'}"

    @cached_property
    def bounds(self) -> FloatArray:
        """Proved lower bounds of the objective, [n]; infinite where no plan fits or meets the deadline."""
        values = compute_values(self.problem, self.space)
        raised = np.flatnonzero(self.closed.raised_ns)
        rows, group = self.closed.state.groups.layouts(raised)
        weights = self.closed.weights[self.closed.state.groups.block[group]]
        values[rows] = np.maximum(values[rows], self.closed.raised_ns[group] * weights)
        values[self.rows] = self.own_bounds
        return values

    @cached_property
    def fates(self) -> npt.NDArray[np.int8]:
        """Indices into ``FATES``, [n]."""
        fits = self.closed.fits[self.space.block_of(np.arange(len(self.space)))]
        fates = self._of_closed(self.bounds, fits)
        fates[self.rows] = self.own_fates
        return fates

    def _of_closed(self, values: FloatArray, fits: BoolArray) -> npt.NDArray[np.int8]:
        """Return fates of closed layouts from their bounds and from whether they may fit, [n]."""
        names: tuple[Fate, ...] = ("open", "bounded", "does_not_fit")
        open_, bounded, too_large = (FATES.index(name) for name in names)
        fates = np.where(values >= self.threshold, bounded, open_)
        return np.where(fits, fates, too_large).astype(np.int8)

    @cached_property
    def parts(self) -> tuple[tuple[FloatArray, npt.NDArray[np.int8], IntArray], ...]:
        """All layouts in classes that share a bound: bounds, fates and numbers of layouts, [n] in each part."""
        closed = (
            (layout_class.values, self._of_closed(layout_class.values, layout_class.fits), layout_class.sizes)
            for layout_class in self.closed.classes()
        )
        return (self.own_bounds, self.own_fates, np.ones(len(self.rows), dtype=np.int64)), *closed

    def least(self, interleaved: bool) -> float:
        """Return the proved lower bound over the layouts with several virtual stages a rank, or over the layouts
        with a single stage a rank."""
        mask = (self.space.vpp_of(self.rows) > 1) == interleaved
        minima = [float(self.own_bounds[mask].min(initial=np.inf))]
        for layout_class in self.closed.classes():
            members = layout_class.interleaved if interleaved else layout_class.plain
            minima.append(float(layout_class.values[members].min(initial=np.inf)))
        return min(minima)

    def count(self, fate: Fate) -> int:
        """Return the number of layouts with a fate."""
        code = FATES.index(fate)
        return sum(int(sizes[fates == code].sum()) for _, fates, sizes in self.parts)

    @property
    def pruned_fraction(self) -> float | None:
        """Share of the legal layouts that bounds and relaxations decided without solving for a plan; None where no
        layout is legal."""
        pruned = sum(self.count(fate) for fate in PRUNED)
        return pruned / len(self.space) if len(self.space) else None
