"""A pipeline's bounds raised by configuration programs, where they leave room for a step within some time.

Whether D replicas can do a workload within a time Z is the question of ``longest``: what one with the longest
sequence does, and D - 1 others. Of the boxes of numbers of micro-batches that leave most, the ``filling`` of the
mixture that real loads give is looked at; where one pair of numbers is left, mixtures are improved for whole
sequences, and wider ones are halved. It ends as soon as all together do less than the workload.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from milpplan.costs.columns import IntArray
from milpplan.groups.longest import Box, LongBound, halved
from milpplan.groups.unequal import MAX_MICRO_BATCHES, LoadBound, Mixture, PathBound, Range, best_mixture
from milpplan.groups.windows import Window
from milpplan.lengths.filling import Columns, Filling, within
from milpplan.lengths.stage_contents import StageContents
from milpplan.lengths.work import Loads

# Numbers in the tables of one window that are too many.
_LARGEST = 4e8
# Kinds of sequences in programs of real loads.
_KINDS = 2


@dataclass(frozen=True, eq=False)
class _Piece:
    """What is known of a window (none: of any more micro-batches), and of which mixture and contents; ``done``
    where nothing more is to be had."""

    window: Window | None
    bounds: tuple[PathBound, ...]
    start: tuple[Mixture, IntArray] | None = None
    done: bool = False

    def within(self, time_ns: float) -> float:
        """The largest load that it leaves for a time."""
        return max(within(one, time_ns) for one in self.bounds)


@dataclass(eq=False)
class _Side:
    """Pieces that cover all numbers of micro-batches of a replica, and how one is halved; ``first`` as in
    ``Filling``, with the load of such a sequence, ``least``; ``columns`` that did most in the last one that was
    improved."""

    pieces: list[_Piece]
    halved: Callable[[Window], Sequence[Window]]
    first: int | None
    least: float
    columns: Columns | None = None

    def most(self, time_ns: float) -> _Piece:
        """The piece that leaves most."""
        return max(self.pieces, key=lambda one: one.within(time_ns))


class Filled:
    """Bounds of a pipeline; ``done`` where nothing more is to be had."""

    def __init__(self, loads: Loads, contents: StageContents) -> None:
        """``loads`` have one bound; and where they hold the whole workload, they know what its longest sequence
        adds (``Loads.lengthened``)."""
        self.known, self.contents, self.done = loads, contents, False
        self.programmed = loads.stages.with_kinds(_KINDS)
        self.total, self.others = loads.num_replicas * loads.full, loads.num_replicas - 1
        (bound,) = loads.bounds
        windows = [None if part.last is None else Window.of(part.first, part.last) for part in bound.ranges]
        pieces = [_Piece(window, (part.bound,)) for window, part in zip(windows, bound.ranges, strict=True)]
        self.plain, self.long = _Side(pieces, _halves, None, 0.0), _Side([], halved, None, 0.0)
        for group in loads.classes:
            (longest,) = group.long
            boxes = [_Piece(box.window, box.bounds) for box in longest.boxes]
            self.long = _Side(boxes, halved, group.first, longest.alone)
        self.turn = 0

    @staticmethod
    def near(loads: Loads, contents: StageContents, load: float) -> Filled:
        """For groups that hold about so much of the workload."""
        return Filled(replace(loads, bounds=(loads.near(load),), classes=()), contents)

    @property
    def bound(self) -> LoadBound:
        """What is known by now of a replica."""
        return LoadBound(tuple(sorted((_range(piece) for piece in self.plain.pieces), key=lambda one: one.first)))

    @property
    def loads(self) -> Loads:
        """With what is known by now."""
        boxes = [Box(piece.window, piece.bounds, True) for piece in self.long.pieces if piece.window is not None]
        long = (LongBound.of(self.long.least, boxes),)
        return replace(
            self.known, bounds=(self.bound,), classes=tuple(replace(one, long=long) for one in self.known.classes)
        )

    def sharpen(self, load: float, rise: float, deadline: float) -> None:
        """Refine what leaves most of a time that is above the bound of a ``load`` by the share ``rise``, until all
        of it leaves less than the load, or the ``deadline``."""
        time_ns = self.bound.at(load) * (1.0 + rise)
        while time.perf_counter() < deadline:
            worst = self.plain.most(time_ns)
            if worst.within(time_ns) <= load:
                return
            if worst.done:
                self.done = True
                return
            self._refine(self.plain, worst, time_ns, load)

    def _refine(self, side: _Side, piece: _Piece, time_ns: float, enough: float) -> None:
        side.pieces.remove(piece)
        side.pieces += self._refined(side, piece, time_ns, enough)

    def run(self, time_ns: float, deadline: float) -> None:
        """Refine what leaves most for steps within a time of a replica, until nothing is left of the question or
        of the time (of ``perf_counter``)."""
        while time.perf_counter() < deadline:
            sides = self.long, self.plain
            worst = [side.most(time_ns) for side in sides]
            loads = [one.within(time_ns) for one in worst]
            if loads[0] + self.others * loads[1] <= self.total:
                return
            open_ = [side for side in ((0, 1) if self.others else (0,)) if not worst[side].done]
            if not open_:
                self.done = True
                return
            # Those that were looked at less first, else in turn.
            self.turn += 1
            chosen = min(open_, key=lambda one: (worst[one].start is not None, (one + self.turn) % 2))
            enough = self.total - self.others * loads[1], (self.total - loads[0]) / max(1, self.others)
            self._refine(sides[chosen], worst[chosen], time_ns, enough[chosen])

    def _refined(self, side: _Side, piece: _Piece, time_ns: float, enough: float) -> list[_Piece]:
        """The piece with more known of it, or its halves."""
        window = piece.window
        if window is None:
            return [replace(piece, done=True)]
        filling = Filling(self.contents, self.known.stages.last, self.known.num_stages, window, side.first)
        size = float(self.contents.entries * window.number)
        single = window.fewest == window.number and not any(window.open)
        if piece.start is None and size <= _LARGEST:
            return [self._looked_at(filling, piece, time_ns, side.least)]
        if not single:
            halves = side.halved(window)
            return [_Piece(one, piece.bounds) for one in halves] or [replace(piece, done=True)]
        if piece.start is None:
            return [replace(piece, done=True)]
        mixture, rows = piece.start
        found, side.columns = filling.improved(mixture, piece.bounds[0], rows, side.columns, time_ns, enough)
        return [_Piece(window, (found,), piece.start, done=True)]

    def _looked_at(self, filling: Filling, piece: _Piece, time_ns: float, least: float) -> _Piece:
        """With the better bound of the mixture that real loads give: by lines, or by contents."""
        window, stages = filling.window, self.known.stages
        load = max(piece.within(time_ns), least)
        mixture = best_mixture(self.programmed, filling.num_stages, window, load, least)
        line = mixture.bound(stages, load, least)
        found, rows = filling.proved(mixture, line.slope)
        best = min((line, found), key=lambda one: within(one, time_ns))
        bounds = (best,) if within(best, time_ns) < piece.within(time_ns) else piece.bounds
        return _Piece(window, bounds, (mixture, rows))


def _range(piece: _Piece) -> Range:
    window = piece.window
    first, last = (MAX_MICRO_BATCHES, None) if window is None else (window.fewest, window.number)
    return Range(first, last, piece.bounds[0])


def _halves(window: Window) -> tuple[Window, ...]:
    """Two ranges of numbers of micro-batches."""
    first, last = window.fewest, window.number
    middle = (first + last) // 2
    return (Window.of(first, middle), Window.of(middle + 1, last)) if first < last else ()
