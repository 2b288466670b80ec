"""What a replica of a pipeline does at most within a time, told apart by the longest sequence that it holds.

The bounds are those of ``filled`` and ``leaders``, of one replica: windows around a micro-batch with a sequence of
some length or longer, for contents without longer ones than those of its class; of the class of the shortest, all
micro-batches. Each class has a measure of the load, and of the load that it leaves for a time it is asked for more
where a program of ``unlike_bound`` puts nearly as much.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from milpplan.costs.columns import FloatArray
from milpplan.groups.longest import halved
from milpplan.groups.path_bounds import PathBound
from milpplan.lengths.filled import Filled
from milpplan.lengths.leaders import shorter
from milpplan.lengths.pool import Pool
from milpplan.lengths.sides import Measure, Piece, Side
from milpplan.lengths.stage_contents import Core
from milpplan.lengths.work import Loads

# Classes begin where a sequence has these shares of a replica's load.
_EDGES = (0.1, 0.2, 0.3, 0.45)
# Programs of real loads for a class.
_EFFORT = 24
# What bounds are asked to add to the time of what a program puts on a replica.
_RISE = 0.02


@dataclass(frozen=True, eq=False)
class Room:
    """What a replica does at most: sequences add ``each`` [n] to its load, and one of the ``bounds`` holds."""

    each: FloatArray
    bounds: tuple[PathBound, ...]

    @staticmethod
    def of_loads(loads: Loads) -> list[Room]:
        """Those of all bounds of a pipeline alone."""
        each = loads.each * loads.num_replicas
        return [Room(each, tuple(one.bound for one in bound.ranges)) for bound in loads.bounds]

    def within(self, time_ns: float) -> float:
        """The most load for a time."""
        return max((one.within(time_ns) for one in self.bounds), default=float("inf"))


class LedClass:
    """Replicas whose longest sequence is one of numbers ``first`` to ``end`` - 1; the shortest class begins at 0,
    and has replicas without sequences, too."""

    def __init__(self, first: int, end: int, filled: Filled, side: Side | None) -> None:
        self.first, self.end = first, end
        self._filled, self._side = filled, side

    @property
    def room(self) -> Room:
        """What is known by now."""
        if self._side is None:
            return Room(self._filled.measure.each, tuple(one.bound for one in self._filled.bound.ranges))
        bounds = tuple(bound for piece in self._side.pieces for bound in piece.bounds)
        return Room(self._measure.each, bounds)

    @property
    def _measure(self) -> Measure:
        return self._filled.measure

    def sharpen(self, time_ns: float, held: FloatArray, deadline: float) -> bool:
        """Know more, so that a replica does not hold so many sequences [n] and a little less within a time, until
        the ``deadline`` (of ``perf_counter``); whether there was anything."""
        load = float(self._measure.each @ held) * (1.0 - _RISE)
        side, found = self._side, False
        if side is None:
            if self._filled.done:
                return False
            self._filled.sharpen_for(load, time_ns, deadline)
            return True
        while time.perf_counter() < deadline:
            worst = side.worst(time_ns)
            if worst.within(time_ns) <= load or worst.done:
                break
            self._measure.refine(side, worst, time_ns, load)
            found = True
        return found


def led_classes(pool: Pool, member: int, time_ns: float, held: FloatArray) -> list[LedClass]:
    """The classes of a pipeline whose replicas hold about so many sequences [n] within about a time."""
    known, contents = pool.alone(member), pool.contents(member)
    each = known.each * known.num_replicas
    load = float(each @ held)
    fits = contents.items.fits
    end = int(np.flatnonzero(fits)[-1]) + 1 if fits.any() else len(fits)
    starts = {int(np.searchsorted(each[:end], share * load)) for share in _EDGES}
    classes = []
    for first, last in pairwise([*sorted({0, *(one for one in starts if one < end)}), end]):
        filled = Filled.near(known, shorter(contents, last), load)
        if not first:
            classes.append(LedClass(first, last, filled, None))
            continue
        around = filled.lines.around(first, load, _EFFORT)
        boxes = [filled.measure.box(box, known.stages.last) for box in around.boxes]
        pieces = [Piece(box.window, box.bounds) for box in boxes]
        side = Side(filled.whole, halved, Core(first), around.alone, pieces)
        classes.append(LedClass(first, last, filled, side))
    return classes
