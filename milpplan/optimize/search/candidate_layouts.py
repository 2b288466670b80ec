"""Closed layouts of a space, in groups with one bound each, from which the search opens the most promising.

Layouts are refined in three steps, always those with the smallest bound first: blocks, with a bound that ignores
communication; the groups of a block (``compute_groups``); the layouts of a group. A block or group that is not
refined keeps its proved bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from milpplan.optimize.objective import objective_weights
from milpplan.optimize.space.compute_groups import BlockClasses, ComputeGroups, alike_switches, fitting_blocks
from milpplan.optimize.space.layout_space import Alike, LayoutSpace
from milpplan.problem.problem import Problem
from milpplan.simulation.layout_columns import BoolArray, FloatArray, IntArray

Stop = Callable[[], bool]
"""Callable that returns True once time is up."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of what a search stores at once, and of what it handles between two looks at the clock.

    ``layouts``: explored one by one, some 100 to 200 bytes each and, in the uniform space, their constants.
    ``groups``: closed, some 40 bytes each. ``groups_at_once``: made together, some 400 bytes each meanwhile;
    spaces with at most this number of groups are split at once. ``blocks_at_once``: bounded together. Layouts
    beyond the limits keep the bound of their group or block.
    """

    layouts: int = 12_000_000
    groups: int = 8_000_000
    groups_at_once: int = 500_000
    blocks_at_once: int = 8_192


BUDGET = Budget()


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


class ClosedLayouts(NamedTuple):
    """State of the groups [g] and blocks [b].

    It is replaced as a whole, because Ctrl-C may come between any two lines and no bound may ever leave a layout
    out. ``opened``: groups whose layouts are explored one by one; their ``values`` are infinite. ``order``: all
    groups, smallest bound first. ``whole`` and ``block_values``: blocks that are not split, and their bounds.
    """

    groups: ComputeGroups
    opened: BoolArray
    values: FloatArray
    order: IntArray
    whole: BoolArray
    block_values: FloatArray


@dataclass(slots=True)
class CandidateLayouts:
    """Closed layouts of a space; all that is proved of them is one bound per block or group."""

    problem: Problem
    space: LayoutSpace
    budget: Budget = BUDGET
    alike: Alike = field(init=False)
    fits: BoolArray = field(init=False)
    """Blocks with layouts that may fit, [b]."""
    weights: FloatArray = field(init=False)
    limits_ns: FloatArray = field(init=False)
    """Step time limits of the blocks' layouts, [b]."""
    closed: ClosedLayouts = field(init=False)
    bounded: bool = False
    """True once every block has a bound."""

    def __post_init__(self) -> None:
        blocks = self.space.blocks
        self.alike = alike_switches(self.space)
        self.weights, self.limits_ns = objective_weights(self.problem, blocks)
        self.fits = fitting_blocks(self.problem, self.space)
        whole = np.ones(len(blocks), dtype=np.bool_)
        values = np.where(self.fits & (self.space.sizes > 0), 0.0, np.inf)
        groups = ComputeGroups.none(self.space, self.alike)
        self.closed = self._closed_layouts(groups, np.zeros(0, dtype=np.bool_), whole, values)

    def closed_again(self) -> CandidateLayouts:
        """Return a copy with the same blocks and groups and nothing opened."""
        copied, state = copy(self), self.closed
        copied.closed = self._closed_layouts(
            state.groups, np.zeros_like(state.opened), state.whole, state.block_values
        )
        return copied

    def prepare(self, stop: Stop) -> None:
        """Bound every block; where there are few groups, split all blocks at once. Stops when time is up."""
        if self.bounded:
            return
        if int(self.num_groups[self.fits].sum()) > self.budget.groups_at_once:
            self._bound_blocks(stop)
        else:
            self._split_blocks(np.flatnonzero(self.fits & self.whole), lambda: False)
            self.bounded = True

    @property
    def groups(self) -> ComputeGroups:
        """Groups of the split blocks."""
        return self.closed.groups

    @property
    def values(self) -> FloatArray:
        """Lower bounds of the groups' objective, [g]; infinite for opened groups."""
        return self.closed.values

    @property
    def whole(self) -> BoolArray:
        """Mask of blocks that are not split, [b]."""
        return self.closed.whole

    @property
    def block_values(self) -> FloatArray:
        """Lower bounds of these blocks' objective, [b]; 0 before they are bounded."""
        return self.closed.block_values

    @property
    def num_groups(self) -> IntArray:
        """Number of groups of each block, [b]."""
        return np.asarray(self.alike.choices.counts * self.space.stages.counts)

    def _bound_blocks(self, stop: Stop) -> None:
        """Bound the blocks by their kernel times only."""
        classes = BlockClasses.of(self.problem, self.space)
        size, done = self.budget.blocks_at_once, 0
        bounds_ns = np.zeros(len(classes.first))
        while done < len(bounds_ns) and not stop():
            chunk = np.arange(done, min(done + size, len(bounds_ns)))
            bounds_ns[chunk] = classes.least_ns(self.problem, self.space, chunk)
            done += len(chunk)
        bounds = bounds_ns[classes.key]
        values = np.where(bounds > self.limits_ns, np.inf, bounds * self.weights)
        values = np.where(np.isfinite(self.block_values), values, np.inf)
        self.closed = self.closed._replace(block_values=values)
        self.bounded = done == len(bounds_ns)

    @property
    def bound(self) -> float:
        """Proved lower bound of the objective over all closed layouts."""
        return float(min(self.values.min(initial=np.inf), self.block_values.min(initial=np.inf)))

    @property
    def sizes(self) -> IntArray:
        """Number of layouts of each group, [g]."""
        return self.groups.sizes

    def closed_below(self, threshold: float) -> int:
        """Return the number of closed layouts whose bound is below a value of the objective."""
        groups = self.groups.sizes[self.values < threshold].sum()
        return int(groups + self.space.sizes[self.block_values < threshold].sum())

    def first(self, threshold: float, layouts: int, stop: Stop) -> IntArray:
        """Return the closed groups with the smallest bounds below the threshold, with at least ``layouts`` layouts
        together.

        Blocks with smaller bounds are split first, in batches, until a group is found at all.
        """
        while True:
            chosen = self._chosen(threshold, layouts)
            last = (
                float(self.values[chosen].max(initial=0.0))
                if self.groups.sizes[chosen].sum() >= layouts
                else threshold
            )
            blocks = self._next_blocks(np.flatnonzero(self.block_values < min(last, threshold)))
            if not self._split_blocks(blocks, stop):
                return chosen
            chosen = self._chosen(threshold, layouts)
            if len(chosen):
                return chosen

    def _chosen(self, threshold: float, layouts: int) -> IntArray:
        """Return the closed groups with the smallest bounds below the threshold, with at least ``layouts``
        layouts."""
        order = self.closed.order
        order = order[self.values[order] < threshold]
        count = int(np.searchsorted(np.cumsum(self.groups.sizes[order]), layouts)) + 1
        return np.sort(order[:count])

    def _next_blocks(self, blocks: IntArray) -> IntArray:
        """Return the blocks to split next: smallest bounds first, within the budget."""
        if not len(blocks):
            return blocks
        order = blocks[np.argsort(self.block_values[blocks], kind="stable")]
        ends = np.cumsum(self.num_groups[order])
        capacity = min(self.budget.groups_at_once, self.budget.groups - len(self.values))
        return np.sort(order[: np.searchsorted(ends, capacity, side="right")])

    def _split_blocks(self, blocks: IntArray, stop: Stop) -> bool:
        """Make the groups of some blocks until time is up. Returns True if there were any blocks."""
        parts, size, done = [self.groups], self.budget.blocks_at_once, 0
        while done < len(blocks) and not stop():
            parts.append(ComputeGroups.of(self.problem, self.space, self.alike, blocks[done : done + size]))
            done = min(done + size, len(blocks))
        if not done:
            return False
        groups = ComputeGroups.joined(parts)
        opened = np.zeros(len(groups.block), dtype=np.bool_)
        opened[: len(self.closed.opened)] = self.closed.opened
        whole, values = self.whole.copy(), self.block_values.copy()
        whole[blocks[:done]], values[blocks[:done]] = False, np.inf
        self.closed = self._closed_layouts(groups, opened, whole, values)
        return True

    def _closed_layouts(
        self, groups: ComputeGroups, opened: BoolArray, whole: BoolArray, block_values: FloatArray
    ) -> ClosedLayouts:
        """Return the state with given groups, whose values and order follow from their bounds."""
        bounds = groups.bounds_ns
        values = np.where(bounds > self.limits_ns[groups.block], np.inf, bounds * self.weights[groups.block])
        values = np.where(opened, np.inf, values)
        return ClosedLayouts(groups, opened, values, np.argsort(values, kind="stable"), whole, block_values)

    def layouts(self, groups: IntArray) -> OpenedLayouts:
        """Return the layouts of some groups; the groups stay closed until ``open``."""
        rows, group = self.groups.layouts(groups)
        block = self.groups.block[group]
        return OpenedLayouts(rows, self.weights[block], self.limits_ns[block], self.groups.bounds_ns[group])

    def open(self, groups: IntArray) -> None:
        """Mark groups as opened: from now on their layouts are explored one by one and carry the bounds."""
        self.closed.opened[groups] = True
        self.values[groups] = np.inf

    def classes(self) -> Iterator[LayoutClass]:
        """Yield the classes of all closed layouts: first those of groups, then those of whole blocks."""
        closed = np.flatnonzero(~self.closed.opened)
        interleaved = self.groups.interleaved[closed]
        sizes, fit = self.groups.sizes[closed], np.ones(len(closed), dtype=np.bool_)
        yield LayoutClass(self.values[closed], sizes, fit, interleaved, ~interleaved)
        whole = np.flatnonzero(self.whole)
        chunks = self.space.stages.alike(("vpp",)).choices
        rows, number, first, group = chunks.lists()
        interleaved = np.zeros(len(first), dtype=np.bool_)
        plain = interleaved.copy()
        np.logical_or.at(interleaved, number, chunks.table["vpp"][rows] > 1)
        np.logical_or.at(plain, number, chunks.table["vpp"][rows] == 1)
        list_of_block = group[whole]
        yield LayoutClass(
            self.block_values[whole],
            self.space.sizes[whole],
            self.fits[whole],
            interleaved[list_of_block],
            plain[list_of_block],
        )
