"""A pipeline's bounds raised by configuration programs, where they leave room for a step within some time.

Whether D replicas can do a workload within a time Z is the question of ``longest``: what one with the longest
sequence does, and D - 1 others. Of the boxes of numbers of micro-batches that leave most, the ``filling`` of the
mixture that real loads give is looked at; where one pair of numbers is left, mixtures are improved for whole
sequences, and wider ones are halved. It ends as soon as all together do less than the workload.

**Large micro-batches.** Programs share out contents: a micro-batch that is one of all that memory holds for a
twentieth and nothing much for the rest has the times of large products and of a short pipeline at once. So
replicas are told apart by their largest micro-batch. One of more than some number of grains makes stages wait
around it, as the longest sequence does, and those who have one get windows around it; all others have programs of
smaller contents, which are faster, too. The number is the least at which real loads around such a micro-batch
already take too long.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from milpplan.groups.bounds.last_stage import MAX_MICRO_BATCHES, LoadBound, MicroBatchCountRange
from milpplan.groups.bounds.linear_bounds import PathBound
from milpplan.groups.bounds.long_sequence import LongSequenceBound, WindowBound, halved, long_bound
from milpplan.groups.bounds.micro_batch_ranges import Window
from milpplan.lengths.bounds.configuration_columns import Start, worths
from milpplan.lengths.bounds.knapsack_dp import Items
from milpplan.lengths.bounds.micro_batch_pricing import MicroBatchPricing, PinnedItem
from milpplan.lengths.bounds.window_tree import Duals, WindowNode, WindowTree, halves
from milpplan.lengths.bounds.work_bounds import PipelineWorkBound
from milpplan.simulation.layout_columns import FloatArray

# Where large micro-batches begin, in longest sequences, and programs for each of these; and where they do if the
# replica with the longest is told apart anyhow.
_LARGE, _LARGE_EFFORT = (1.1, 1.3, 1.5, 2.0, 4.0), 30
_SMALL = (0.3, 0.4, 0.5, 0.6, 0.75, 0.9)
# Fewer grains than this part of what memory holds tell something.
_SMALLER = 0.9
# A sequence is worth this part of the time it takes at least.
_LEAST_WORTH = 0.85
# What they are worth is sought for so many times as long as the time that is left of a slice.
_WEIGH_TIMES = 5.0


class ConfigurationBound:
    """Bounds of a pipeline; ``done`` where nothing more is to be had."""

    def __init__(self, loads: PipelineWorkBound, contents: MicroBatchPricing) -> None:
        """``loads`` that hold the whole workload know what its longest sequence adds
        (``PipelineWorkBound.lengthened``)."""
        self.work_bound, self.done, self.turn = loads, False, 0
        # What a sequence of every length is worth, as a load, and whether the worst window was asked for it.
        self.duals, self.has_optimised_duals = Duals.of(loads, contents.items.counts), False
        self.total, self.num_other_replicas = self.duals.total_load, loads.num_replicas - 1
        self.ordinary, self.with_longest = WindowTree(contents, halves), WindowTree(contents, halved)
        self.full_pricing = contents
        for part in loads.bound_near(loads.total_load).ranges:
            window = None if part.last is None else Window.of(part.first, part.last)
            self.ordinary.nodes.append(WindowNode(window, (part.bound,)))
        for group in loads.classes:
            longest = max(group.long_bounds, key=lambda one: one.at(loads.total_load))
            boxes = [WindowNode(box.window, box.bounds) for box in longest.boxes]
            self.with_longest = WindowTree(contents, halved, PinnedItem(group.first), longest.alone, boxes)
        # Those with a micro-batch of more than some number of grains, and the numbers that are left.
        self.with_large: list[WindowTree] = []
        items, room = contents.items, contents.base.shape[-1]
        shortest_size, longest_size = (int(one(items.sizes[items.fits])) for one in (np.min, np.max))
        larger, smaller = ({int(longest_size * part) for part in parts} for parts in (_LARGE, _SMALL))
        self.large_thresholds = sorted(one for one in larger if one < _SMALLER * room)
        self.small_thresholds = sorted(one for one in smaller if one >= shortest_size)
        self.divided = False
        self.best_work_bound = loads

    @staticmethod
    def for_load(loads: PipelineWorkBound, contents: MicroBatchPricing, load: float) -> ConfigurationBound:
        """For groups that hold about so much of the workload."""
        return ConfigurationBound(replace(loads, bounds=(loads.bound_near(load),), classes=()), contents)

    @property
    def bound(self) -> LoadBound:
        """What is known by now of a replica."""
        ranges = [_range(piece) for piece in self.ordinary.nodes]
        # How many there are around a large one says nothing of others.
        ranges += [
            MicroBatchCountRange(1, None, one)
            for side in self.with_large
            for piece in side.nodes
            for one in piece.bounds
        ]
        return LoadBound(tuple(sorted(ranges, key=lambda one: one.first)))

    @property
    def loads(self) -> PipelineWorkBound:
        """With what is known by now, or was before windows were looked at anew."""
        pieces = [*self.with_longest.nodes, *(piece for side in self.with_large for piece in side.nodes)]
        boxes = [WindowBound(piece.window, piece.bounds, True) for piece in pieces if piece.window is not None]
        # For parts of the workload what was known before may be more.
        before = self.work_bound.sequence_loads * self.work_bound.num_replicas
        bounds = (self.bound, *(self.duals.convert_bound(one, before) for one in self.work_bound.bounds))
        classes = []
        for group in self.work_bound.classes:
            boxes_before = [[self.duals.convert_window(box, before) for box in one.boxes] for one in group.long_bounds]
            known = (LongSequenceBound.of(one.alone, of) for one, of in zip(group.long_bounds, boxes_before, strict=True))
            classes.append(replace(group, long_bounds=(LongSequenceBound.of(self.with_longest.min_load, boxes), *known)))
        each = self.duals.sequence_loads / self.work_bound.num_replicas
        found = replace(self.work_bound, bounds=bounds, classes=tuple(classes), sequence_loads=each)
        return max(found, self.best_work_bound, key=lambda one: one.workload_bound_ns)

    def sharpen(self, load: float, rise: float, deadline: float) -> None:
        """Refine what leaves most of a time that is above the bound of a ``load`` by the share ``rise``, until all
        of it leaves less than the load, or the ``deadline``."""
        time_ns = self.bound.at(load) * (1.0 + rise)
        self.branch_on_large(time_ns, load)
        while time.perf_counter() < deadline:
            side, worst = self._most(time_ns, self.ordinary)
            if worst.max_load(time_ns) <= load:
                return
            if worst.done:
                self.done = True
                return
            self.duals.refine(side, worst, time_ns, load)

    def run(self, time_ns: float, deadline: float) -> None:
        """Refine what leaves most for steps within a time of a replica, until nothing is left of the question or
        of the time (of ``perf_counter``)."""
        self.branch_on_large(time_ns, self.work_bound.total_load)
        while time.perf_counter() < deadline:
            worst = [self._most(time_ns, side) for side in (self.with_longest, self.ordinary)]
            loads = [one.max_load(time_ns) for _, one in worst]
            if loads[0] + self.num_other_replicas * loads[1] <= self.total:
                return
            open_ = [place for place in ((0, 1) if self.num_other_replicas else (0,)) if not worst[place][1].done]
            if not open_:
                if self._deeper(*worst[1 if self.num_other_replicas else 0], time_ns, deadline):
                    continue
                self.done = True
                return
            # Those that were looked at less first, else in turn.
            self.turn += 1
            chosen = min(open_, key=lambda one: (worst[one][1].start is not None, (one + self.turn) % 2))
            enough = self.total - self.num_other_replicas * loads[1], (self.total - loads[0]) / max(1, self.num_other_replicas)
            self.duals.refine(*worst[chosen], time_ns, enough[chosen])

    def branch_on_smaller(self, time_ns: float) -> bool:
        """Tell replicas without the longest sequence apart by a smaller micro-batch than that, the largest number
        of grains first; whether there was any."""
        if not self.small_thresholds:
            return False
        number = self.small_thresholds.pop()
        self._tell(number, self._around(number, self.work_bound.total_load, time_ns), (self.ordinary,))
        return True

    def _most(self, time_ns: float, side: WindowTree) -> tuple[WindowTree, WindowNode]:
        """The piece that leaves most of a side, or of those with a large micro-batch, and whose it is."""
        pieces = [(one, piece) for one in (side, *self.with_large) for piece in one.nodes]
        return max(pieces, key=lambda one: one[1].max_load(time_ns))

    def _deeper(self, side: WindowTree, worst: WindowNode, time_ns: float, deadline: float) -> bool:
        """Where all is done: what sequences are worth where the worst window of one replica does all of them (of
        several, ``leaders`` ask), or micro-batches that are large from fewer grains on; whether there was any."""
        window, start = worst.window, worst.start
        if not self.has_optimised_duals and not self.num_other_replicas and window is not None and start is not None:
            self.best_work_bound, self.has_optimised_duals = self.loads, True
            begin = Start(start[0], start[1] * self.duals.sequence_loads, start[2])
            end = deadline + _WEIGH_TIMES * max(0.0, deadline - time.perf_counter())
            self._weigh(worths(self.duals.configuration(side, worst), begin, side.columns, time_ns, end))
        elif self.large_thresholds:
            self.best_work_bound, self.has_optimised_duals = self.loads, False
            number = self.large_thresholds.pop()
            self._tell(number, self._around(number, self.work_bound.total_load, time_ns), (self.ordinary, self.with_longest))
        else:
            return False
        return True

    def branch_on_large(self, time_ns: float, load: float) -> None:
        """Once: tell large micro-batches from others at the least number of grains for which real loads around one
        take too long for a ``load`` within the time."""
        if self.divided:
            return
        self.divided = True
        first, end, found = 0, len(self.large_thresholds), None
        while first < end:
            middle = (first + end) // 2
            around = self._around(self.large_thresholds[middle], load, time_ns)
            if around.at(load) < time_ns:
                first = middle + 1
            else:
                end, found = middle, around
        if found is not None:
            self._tell(self.large_thresholds[end], found, (self.ordinary, self.with_longest))
            self.large_thresholds = self.large_thresholds[:end]

    def _around(self, number: int, load: float, time_ns: float) -> LongSequenceBound:
        """What a replica takes for a load with a micro-batch of more than so many grains, up to a time."""
        return around_larger(self.lines, self.ordinary.pricing.items, number, load, time_ns)

    @property
    def lines(self) -> PipelineWorkBound:
        """What was known, in the measure of its lines."""
        known, last = self.work_bound, self.work_bound.stages.last
        bound = replace(self.duals, sequence_loads=last).convert_bound(
            known.bound_near(known.total_load), known.sequence_loads * known.num_replicas
        )
        return replace(known, bounds=(bound,), sequence_loads=last / known.num_replicas)

    def _tell(self, number: int, around: LongSequenceBound, others: Sequence[WindowTree]) -> None:
        """Tell replicas with a micro-batch of more than so many grains from ``others``."""
        contents = self.ordinary.pricing
        boxes = [self.duals.convert_window(box, self.work_bound.stages.last) for box in around.boxes]
        pieces = [WindowNode(box.window, box.bounds) for box in boxes]
        self.with_large.append(WindowTree(contents, halved, PinnedItem(quanta=number + 1), around.alone, pieces))
        for side in others:
            side.pricing = contents.with_max_quanta(number)
            side.nodes = [one.reset for one in side.nodes]

    def _weigh(self, worths: FloatArray) -> None:
        """Count what sequences are worth by ``worths`` [n], all together as much as before."""
        counts, before = self.ordinary.pricing.items.counts, self.duals.sequence_loads
        worths = np.maximum(worths / float(counts @ worths) * self.total, _LEAST_WORTH * before)
        measure = self.duals = self.duals.with_loads(worths / float(counts @ worths) * self.total)
        for side in (self.ordinary, self.with_longest, *self.with_large):
            known = [tuple(measure.convert(bound, before) for bound in one.bounds) for one in side.nodes]
            pairs = zip(side.nodes, known, strict=True)
            side.nodes = [replace(one, bounds=bounds).reset for one, bounds in pairs]


def around_larger(
    loads: PipelineWorkBound, items: Items, grains: int, load: float, time_ns: float
) -> LongSequenceBound:
    """What a replica takes for a ``load`` with a micro-batch of more than so many ``grains``, by lines, up to a
    time; ``loads`` are in the measure of their lines."""
    stages, bound = loads.stages, loads.bound_near(loads.total_load)
    least = float((stages.last[items.fits] / items.sizes[items.fits]).min()) * (grains + 1)
    return long_bound(stages, loads.num_stages, bound, least, max(load, least), time_ns, _LARGE_EFFORT)


def with_larger(
    loads: PipelineWorkBound, other: PipelineWorkBound, larger: Sequence[WindowBound]
) -> PipelineWorkBound:
    """``loads`` of a strategy as those of another, which takes no less for the same micro-batches and holds larger
    ones, too: a replica has one of these, of which ``larger`` are known in the measure of ``other``, or none."""
    ratio = float((other.sequence_loads / loads.sequence_loads).min())
    boxes = [
        replace(box, bounds=tuple(PathBound(one.constant, one.slope * ratio) for one in box.bounds))
        for box in larger
    ]
    ranges = [MicroBatchCountRange(1, None, one) for box in boxes for one in box.bounds]
    bounds = tuple(LoadBound((*ranges, *one.ranges)) for one in loads.bounds)
    classes = []
    for group in loads.classes:
        long = (LongSequenceBound.of(one.alone, (*one.boxes, *boxes)) for one in group.long_bounds)
        classes.append(replace(group, long_bounds=tuple(long)))
    return replace(loads, bounds=bounds, classes=tuple(classes))


def _range(piece: WindowNode) -> MicroBatchCountRange:
    window = piece.window
    first, last = (MAX_MICRO_BATCHES, None) if window is None else (window.fewest, window.number)
    return MicroBatchCountRange(first, last, piece.bounds[0])
