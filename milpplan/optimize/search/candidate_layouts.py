"""Choose the layouts that a search looks at one by one: those of the groups that may improve its incumbent.

Layouts are looked at in three steps, always those with the least bound first: blocks of which one bound without
communication is known, the groups of a block (``compute_groups``), the layouts of a group. What is not taken apart
keeps the bound that is proved of it.
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
"""Tells that time is up."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of what a search holds at once, and looks at before it asks for the time. What there is no room
    for keeps the bound that is proved of it.

    ``layouts``: looked at one by one, some 100 to 200 bytes each and, in the uniform space, what their
    constants take. ``groups``: closed, some 40 bytes each. ``groups_at_once``: made together, some 400 bytes each
    while they are; spaces with no more are taken apart at once. ``blocks_at_once``: bounded together.
    """

    layouts: int = 12_000_000
    groups: int = 8_000_000
    groups_at_once: int = 500_000
    blocks_at_once: int = 8_192


BUDGET = Budget()


class OpenedLayouts(NamedTuple):
    """Layouts of groups that were just opened, by their rows in the whole space, with the weights and limits of
    their steps and bounds of these, nanoseconds; all [n]."""

    rows: IntArray
    weights: FloatArray
    limits_ns: FloatArray
    bounds_ns: FloatArray


class LayoutClass(NamedTuple):
    """Layouts that share a bound: lower bounds of the objective, numbers of layouts, whether some may fit, whether
    some have several virtual stages a rank, and whether some have one; all [n]."""

    values: FloatArray
    sizes: IntArray
    fits: BoolArray
    interleaved: BoolArray
    plain: BoolArray


class ClosedLayouts(NamedTuple):
    """A frontier's state of groups [g] and blocks [b]; replaced as a whole, as Ctrl-C may come between any two
    lines, and no bound may ever leave a layout out.

    ``opened``: groups whose layouts are looked at one by one; ``values`` are infinite there. ``order``: all
    groups, those with the least bounds first.
    """

    groups: ComputeGroups
    opened: BoolArray
    values: FloatArray
    order: IntArray
    whole: BoolArray
    block_values: FloatArray


@dataclass(slots=True)
class CandidateLayouts:
    """The layouts of a space that are closed: of each block or group, one bound is all that is known."""

    problem: Problem
    space: LayoutSpace
    budget: Budget = BUDGET
    alike: Alike = field(init=False)
    fits: BoolArray = field(init=False)
    """Blocks with layouts that may fit, [b]."""
    weights: FloatArray = field(init=False)
    limits_ns: FloatArray = field(init=False)
    """Of the steps of the blocks' layouts, [b]."""
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
        self.closed = self._closed(groups, np.zeros(0, dtype=np.bool_), whole, values)

    def closed_again(self) -> CandidateLayouts:
        """Return the same blocks and groups with nothing opened."""
        again, own = copy(self), self.closed
        again.closed = self._closed(own.groups, np.zeros_like(own.opened), own.whole, own.block_values)
        return again

    def prepare(self, stop: Stop) -> None:
        """Bound every block, or where they have few groups take all of them apart; else ends when time is up."""
        if self.bounded:
            return
        if int(self.num_groups[self.fits].sum()) > self.budget.groups_at_once:
            self._bound_blocks(stop)
        else:
            self._take_apart(np.flatnonzero(self.fits & self.whole), lambda: False)
            self.bounded = True

    @property
    def groups(self) -> ComputeGroups:
        """Those of the blocks that are taken apart."""
        return self.closed.groups

    @property
    def values(self) -> FloatArray:
        """Lower bounds of the objective of the groups, [g]; infinite where one is open."""
        return self.closed.values

    @property
    def whole(self) -> BoolArray:
        """Blocks that are not taken apart, [b]."""
        return self.closed.whole

    @property
    def block_values(self) -> FloatArray:
        """Lower bounds of the objective of these blocks, [b]; 0 before anything is known."""
        return self.closed.block_values

    @property
    def num_groups(self) -> IntArray:
        """Groups of each block, [b]."""
        return np.asarray(self.alike.choices.counts * self.space.stages.counts)

    def _bound_blocks(self, stop: Stop) -> None:
        """Bound the blocks by their kernels alone."""
        classes = BlockClasses.of(self.problem, self.space)
        size, done = self.budget.blocks_at_once, 0
        least = np.zeros(len(classes.first))
        while done < len(least) and not stop():
            own = np.arange(done, min(done + size, len(least)))
            least[own] = classes.least_ns(self.problem, self.space, own)
            done += len(own)
        bounds = least[classes.key]
        values = np.where(bounds > self.limits_ns, np.inf, bounds * self.weights)
        values = np.where(np.isfinite(self.block_values), values, np.inf)
        self.closed = self.closed._replace(block_values=values)
        self.bounded = done == len(least)

    @property
    def bound(self) -> float:
        """Proved lower bound of the objective over all closed layouts."""
        return float(min(self.values.min(initial=np.inf), self.block_values.min(initial=np.inf)))

    @property
    def sizes(self) -> IntArray:
        """Layouts of each group, [g]."""
        return self.groups.sizes

    def closed_below(self, threshold: float) -> int:
        """Closed layouts that may be below a value of the objective."""
        groups = self.groups.sizes[self.values < threshold].sum()
        return int(groups + self.space.sizes[self.block_values < threshold].sum())

    def first(self, threshold: float, layouts: int, stop: Stop) -> IntArray:
        """The closed groups with the least bounds below the threshold, with so many layouts together or more.

        Blocks with lesser bounds are taken apart before, a number of them at a time: as many as it takes to find a
        group at all.
        """
        while True:
            chosen = self._chosen(threshold, layouts)
            last = (
                float(self.values[chosen].max(initial=0.0))
                if self.groups.sizes[chosen].sum() >= layouts
                else threshold
            )
            blocks = self._least(np.flatnonzero(self.block_values < min(last, threshold)))
            if not self._take_apart(blocks, stop):
                return chosen
            chosen = self._chosen(threshold, layouts)
            if len(chosen):
                return chosen

    def _chosen(self, threshold: float, layouts: int) -> IntArray:
        """The closed groups with the least bounds below the threshold, with so many layouts or more."""
        order = self.closed.order
        order = order[self.values[order] < threshold]
        most = int(np.searchsorted(np.cumsum(self.groups.sizes[order]), layouts)) + 1
        return np.sort(order[:most])

    def _least(self, blocks: IntArray) -> IntArray:
        """Those of some blocks that are taken apart next: the least bounds first, as far as there is room."""
        if not len(blocks):
            return blocks
        order = blocks[np.argsort(self.block_values[blocks], kind="stable")]
        ends = np.cumsum(self.num_groups[order])
        room = min(self.budget.groups_at_once, self.budget.groups - len(self.values))
        return np.sort(order[: np.searchsorted(ends, room, side="right")])

    def _take_apart(self, blocks: IntArray, stop: Stop) -> bool:
        """Make the groups of some blocks until time is up; whether there were any."""
        found, size, done = [self.groups], self.budget.blocks_at_once, 0
        while done < len(blocks) and not stop():
            found.append(ComputeGroups.of(self.problem, self.space, self.alike, blocks[done : done + size]))
            done = min(done + size, len(blocks))
        if not done:
            return False
        groups = ComputeGroups.joined(found)
        opened = np.zeros(len(groups.block), dtype=np.bool_)
        opened[: len(self.closed.opened)] = self.closed.opened
        whole, values = self.whole.copy(), self.block_values.copy()
        whole[blocks[:done]], values[blocks[:done]] = False, np.inf
        self.closed = self._closed(groups, opened, whole, values)
        return True

    def _closed(
        self, groups: ComputeGroups, opened: BoolArray, whole: BoolArray, block_values: FloatArray
    ) -> ClosedLayouts:
        """Return what is known with some groups, with their values and order from their bounds."""
        bounds = groups.bounds_ns
        values = np.where(bounds > self.limits_ns[groups.block], np.inf, bounds * self.weights[groups.block])
        values = np.where(opened, np.inf, values)
        return ClosedLayouts(groups, opened, values, np.argsort(values, kind="stable"), whole, block_values)

    def layouts(self, groups: IntArray) -> OpenedLayouts:
        """The layouts of some groups, which stay closed until ``open``."""
        rows, group = self.groups.layouts(groups)
        block = self.groups.block[group]
        return OpenedLayouts(rows, self.weights[block], self.limits_ns[block], self.groups.bounds_ns[group])

    def open(self, groups: IntArray) -> None:
        """From now on the bounds of these groups are those of their layouts, which are looked at one by one."""
        self.closed.opened[groups] = True
        self.values[groups] = np.inf

    def pieces(self) -> Iterator[LayoutClass]:
        """Return what is known of all closed layouts."""
        closed = np.flatnonzero(~self.closed.opened)
        several = self.groups.interleaved[closed]
        sizes, fit = self.groups.sizes[closed], np.ones(len(closed), dtype=np.bool_)
        yield LayoutClass(self.values[closed], sizes, fit, several, ~several)
        whole = np.flatnonzero(self.whole)
        chunks = self.space.stages.alike(("vpp",)).choices
        rows, number, first, group = chunks.lists()
        several = np.zeros(len(first), dtype=np.bool_)
        plain = several.copy()
        np.logical_or.at(several, number, chunks.table["vpp"][rows] > 1)
        np.logical_or.at(plain, number, chunks.table["vpp"][rows] == 1)
        own = group[whole]
        yield LayoutClass(
            self.block_values[whole], self.space.sizes[whole], self.fits[whole], several[own], plain[own]
        )
