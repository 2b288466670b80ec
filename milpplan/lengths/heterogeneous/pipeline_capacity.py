"""What a replica of a pipeline does at most within a time, told apart by the longest sequence that it holds.

The bounds are those of ``filled`` and ``leaders``, of one replica: windows around a micro-batch with a sequence of
some length or longer, for contents without longer ones than those of its class; of the class of the shortest, all
micro-batches, large ones told apart. Where a program of ``unlike_bound`` puts nearly as much on a replica as is
known to be too much, windows are refined; where nothing more is to be had, it is asked for prices by which a
replica does least of just that (``chain_programs``): another measure of the load, with rooms of its own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from milpplan.groups.bounds.long_sequence import halved
from milpplan.lengths.bounds.configuration_bound import ConfigurationBound
from milpplan.lengths.bounds.longest_sequence_branching import begin, copied, shorter
from milpplan.lengths.bounds.micro_batch_pricing import PinnedItem
from milpplan.lengths.bounds.restricted_master import ClassWindow, restricted_master_duals
from milpplan.lengths.bounds.window_tree import Duals, WindowNode, WindowTree
from milpplan.lengths.heterogeneous.capacity_rows import CapacityRow
from milpplan.lengths.strategy_tables import StrategyTables
from milpplan.simulation.layout_columns import FloatArray

# Classes begin at these parts of the load of the longest sequence that fits, if that is so much of a replica's.
_EDGES, _MUCH = (0.3, 0.55, 0.8), 0.03
# Programs of real loads for a class.
_EFFORT = 24
# Times that a class is asked for worths, for so many seconds, what they are at least of what they were, and the
# share of all sequences that count beside those that are held.
_ASKED, _ASK_S, _LEAST_WORTH, _ALL = 4, 1.0, 0.5, 0.03
# What bounds are asked to add to the time of what a program puts on a replica.
_RISE = 0.02


@dataclass(eq=False)
class _View:
    """What replicas of a class do at most by a measure: sides that cover them all, and ``windows`` that sequences
    are worth so much by."""

    duals: Duals
    trees: tuple[WindowTree, ...]
    windows: tuple[ClassWindow, ...] = ()

    @property
    def capacity_row(self) -> CapacityRow:
        """What is known by now."""
        bounds = tuple(bound for side in self.trees for piece in side.nodes for bound in piece.bounds)
        return CapacityRow(self.duals.sequence_loads, bounds)

    def loosest(self, time_ns: float) -> tuple[WindowTree, WindowNode]:
        """What leaves most for a time."""
        found = [(side, side.loosest(time_ns)) for side in self.trees]
        return max(found, key=lambda one: one[1].max_load(time_ns))

    def max_share(self, time_ns: float, held: FloatArray) -> float:
        """What is done at most within a time, of so many sequences [n]."""
        return self.loosest(time_ns)[1].max_load(time_ns) / float(self.duals.sequence_loads @ held)

    def with_loads(self, each: FloatArray, windows: tuple[ClassWindow, ...]) -> _View:
        """By other worths [n], with the mixtures of windows that were found with them."""
        times = self.duals.total_load / float(self.duals.counts @ each)
        measure = self.duals.with_loads(times * each)
        sides = tuple(copied(side, measure, self.duals) for side in self.trees)
        begun = tuple(replace(one, flow=one.flow * times) for one in windows)
        for one in begun:
            begin(sides, one)
        return _View(measure, sides, begun)


class LongestSequenceClass:
    """Replicas whose longest sequence is one of numbers ``first`` to ``end`` - 1; the shortest class begins at 0,
    and has replicas without sequences, too."""

    def __init__(self, first: int, end: int, measure: Duals, sides: tuple[WindowTree, ...]) -> None:
        self.first, self.end = first, end
        self._views = [_View(measure, sides)]
        # What was asked for worths.
        self._asked = 0

    @property
    def capacity_rows(self) -> tuple[CapacityRow, ...]:
        """What is known by now, by every measure."""
        return tuple(one.capacity_row for one in self._views)

    def sharpen(self, time_ns: float, held: FloatArray, deadline: float) -> bool:
        """Know more, so that a replica does not hold so many sequences [n], and a little less, within a time,
        until the ``deadline`` (of ``perf_counter``); whether there was anything."""
        found = False
        while time.perf_counter() < deadline:
            view = min(self._views, key=lambda one: one.max_share(time_ns, held))
            if view.max_share(time_ns, held) <= 1.0 - _RISE:
                break
            side, worst = view.loosest(time_ns)
            if worst.done and not self._ask(view, time_ns, held):
                break
            if not worst.done:
                load = float(view.duals.sequence_loads @ held) * (1.0 - _RISE)
                view.duals.refine(side, worst, time_ns, load)
            found = True
        return found

    def _ask(self, view: _View, time_ns: float, held: FloatArray) -> bool:
        """What sequences are worth where a replica does least of what is held [n] within a time, as long as that
        is little known; whether that is less than by the worths there are."""
        side, worst = view.loosest(time_ns)
        if self._asked == _ASKED or worst.window is None or worst.start is None:
            return False
        self._asked += 1
        mixture, slope, rows = worst.start
        filling = view.duals.configuration(side, worst)
        new = ClassWindow(0, filling, mixture, 1.0 / slope, rows, side.columns)
        known = [
            one
            for one in view.windows
            if (one.configuration.window, one.configuration.pinned_item) != (worst.window, side.pinned_item)
        ]
        counts, each, end = view.duals.counts, view.duals.sequence_loads, time.perf_counter() + _ASK_S
        wanted = held + _ALL * counts * (float(each @ held) / float(each @ counts))
        found = restricted_master_duals((*known, new), np.array([1]), wanted, each, time_ns, end)
        if found is None:
            return False
        self._views.append(view.with_loads(np.maximum(found[0], _LEAST_WORTH * each), found[1]))
        return True


def longest_sequence_classes(pool: StrategyTables, member: int, time_ns: float, held: FloatArray) -> list[LongestSequenceClass]:
    """The classes of a pipeline whose replicas hold about so many sequences [n] within about a time."""
    known, contents = pool.best_own_memory_bound(member), pool.micro_batch_pricing(member)
    each = known.sequence_loads * known.num_replicas
    load = float(each @ held)
    fits = contents.items.fits
    end = int(np.flatnonzero(fits)[-1]) + 1 if fits.any() else len(fits)
    parts = [part * each[end - 1] for part in _EDGES]
    starts = {int(np.searchsorted(each[:end], part)) for part in parts if part > _MUCH * load}
    classes = []
    for first, last in pairwise([*sorted({0, *(one for one in starts if one < end)}), end]):
        filled = ConfigurationBound.for_load(known, shorter(contents, last), load)
        if not first:
            filled.branch_on_large(time_ns, load)
            classes.append(LongestSequenceClass(first, last, filled.duals, (filled.ordinary, *filled.with_large)))
            continue
        around = filled.lines.around_long_sequence(first, load, _EFFORT)
        boxes = [filled.duals.convert_window(box, known.stages.last) for box in around.boxes]
        pieces = [WindowNode(box.window, box.bounds) for box in boxes]
        side = WindowTree(filled.full_pricing, halved, PinnedItem(first), around.alone, pieces)
        classes.append(LongestSequenceClass(first, last, filled.duals, (side,)))
    return classes
