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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from milpplan.costs.columns import FloatArray, IntArray
from milpplan.groups.longest import Box, LongBound, halved, long_bound
from milpplan.groups.path_bounds import PathBound
from milpplan.groups.unequal import MAX_MICRO_BATCHES, LoadBound, Mixture, Range, best_mixture
from milpplan.groups.windows import Window
from milpplan.lengths.filling import Filling
from milpplan.lengths.filling_programs import Columns, Start, improved, worths
from milpplan.lengths.knapsacks import Items
from milpplan.lengths.stage_contents import Core, StageContents
from milpplan.lengths.work import Loads

# Numbers in the tables of one window that are too many.
_LARGEST = 4e8
# Kinds of sequences in programs of real loads.
_KINDS = 2
# Where large micro-batches begin, in longest sequences, and programs for each of these.
_LARGE, _LARGE_EFFORT = (1.1, 1.3, 1.5, 2.0, 4.0), 30
# Fewer grains than this part of what memory holds tell something.
_SMALLER = 0.9
# A sequence is worth this part of the time it takes at least.
_LEAST_WORTH = 0.85


@dataclass(frozen=True, eq=False)
class _Piece:
    """What is known of a window (none: of any more micro-batches), of which mixture, slope and contents; ``stale``
    where they were others' contents or worths, ``done`` where nothing more is to be had."""

    window: Window | None
    bounds: tuple[PathBound, ...]
    start: tuple[Mixture, float, IntArray] | None = None
    stale: bool = False
    done: bool = False

    def within(self, time_ns: float) -> float:
        """The largest load that it leaves for a time."""
        return max(one.within(time_ns) for one in self.bounds)


@dataclass(eq=False)
class _Side:
    """Pieces that cover all numbers of micro-batches of a replica with ``contents``, and how one is halved;
    ``core`` as in ``Filling``, with the load of such a micro-batch, ``least``; ``columns`` that did most in the
    last one that was improved."""

    contents: StageContents
    halved: Callable[[Window], Sequence[Window]]
    core: Core | None = None
    least: float = 0.0
    pieces: list[_Piece] = field(default_factory=list)
    columns: Columns | None = None


class Filled:
    """Bounds of a pipeline; ``done`` where nothing more is to be had."""

    def __init__(self, loads: Loads, contents: StageContents) -> None:
        """``loads`` that hold the whole workload know what its longest sequence adds (``Loads.lengthened``)."""
        self.known, self.done, self.turn = loads, False, 0
        self.programmed = loads.stages.with_kinds(_KINDS)
        self.total, self.others = loads.num_replicas * loads.full, loads.num_replicas - 1
        # What a sequence of every length is worth, as a load, and whether the worst window was asked for it.
        self.each, self.weighed = loads.each * loads.num_replicas, False
        self.plain, self.long = _Side(contents, _halves), _Side(contents, halved)
        for part in loads.near(loads.full).ranges:
            window = None if part.last is None else Window.of(part.first, part.last)
            self.plain.pieces.append(_Piece(window, (part.bound,)))
        for group in loads.classes:
            longest = max(group.long, key=lambda one: one.at(loads.full))
            boxes = [_Piece(box.window, box.bounds) for box in longest.boxes]
            self.long = _Side(contents, halved, Core(group.first), longest.alone, boxes)
        # Those with a micro-batch of more than some number of grains, and the numbers that are left.
        self.large: list[_Side] = []
        items, room = contents.items, contents.base.shape[-1]
        longest_size = int(items.sizes[items.fits].max())
        self.numbers = [int(longest_size * part) for part in _LARGE if int(longest_size * part) < _SMALLER * room]
        self.divided = False
        self.kept = loads

    @staticmethod
    def near(loads: Loads, contents: StageContents, load: float) -> Filled:
        """For groups that hold about so much of the workload."""
        return Filled(replace(loads, bounds=(loads.near(load),), classes=()), contents)

    @property
    def bound(self) -> LoadBound:
        """What is known by now of a replica."""
        ranges = [_range(piece) for piece in self.plain.pieces]
        # How many there are around a large one says nothing of others.
        ranges += [Range(1, None, one) for side in self.large for piece in side.pieces for one in piece.bounds]
        return LoadBound(tuple(sorted(ranges, key=lambda one: one.first)))

    @property
    def loads(self) -> Loads:
        """With what is known by now, or was before windows were looked at anew."""
        pieces = [*self.long.pieces, *(piece for side in self.large for piece in side.pieces)]
        boxes = [Box(piece.window, piece.bounds, True) for piece in pieces if piece.window is not None]
        # For parts of the workload what was known before may be more.
        before = self.known.each * self.known.num_replicas
        bounds = (self.bound, *(self._load_bound(one, before, self.each) for one in self.known.bounds))
        classes = []
        for group in self.known.classes:
            boxes_before = [[self._box(box, before) for box in one.boxes] for one in group.long]
            known = (LongBound.of(one.alone, of) for one, of in zip(group.long, boxes_before, strict=True))
            classes.append(replace(group, long=(LongBound.of(self.long.least, boxes), *known)))
        each = self.each / self.known.num_replicas
        found = replace(self.known, bounds=bounds, classes=tuple(classes), each=each)
        return max(found, self.kept, key=lambda one: one.highest)

    def sharpen(self, load: float, rise: float, deadline: float) -> None:
        """Refine what leaves most of a time that is above the bound of a ``load`` by the share ``rise``, until all
        of it leaves less than the load, or the ``deadline``."""
        time_ns = self.bound.at(load) * (1.0 + rise)
        self._divide(time_ns, load)
        while time.perf_counter() < deadline:
            side, worst = self._most(time_ns, self.plain)
            if worst.within(time_ns) <= load:
                return
            if worst.done:
                self.done = True
                return
            self._refine(side, worst, time_ns, load)

    def run(self, time_ns: float, deadline: float) -> None:
        """Refine what leaves most for steps within a time of a replica, until nothing is left of the question or
        of the time (of ``perf_counter``)."""
        self._divide(time_ns, self.known.full)
        while time.perf_counter() < deadline:
            worst = [self._most(time_ns, side) for side in (self.long, self.plain)]
            loads = [one.within(time_ns) for _, one in worst]
            if loads[0] + self.others * loads[1] <= self.total:
                return
            open_ = [place for place in ((0, 1) if self.others else (0,)) if not worst[place][1].done]
            if not open_:
                if self._deeper(*worst[0], time_ns):
                    continue
                self.done = True
                return
            # Those that were looked at less first, else in turn.
            self.turn += 1
            chosen = min(open_, key=lambda one: (worst[one][1].start is not None, (one + self.turn) % 2))
            enough = self.total - self.others * loads[1], (self.total - loads[0]) / max(1, self.others)
            self._refine(*worst[chosen], time_ns, enough[chosen])

    def _most(self, time_ns: float, side: _Side) -> tuple[_Side, _Piece]:
        """The piece that leaves most of a side, or of those with a large micro-batch, and whose it is."""
        pieces = [(one, piece) for one in (side, *self.large) for piece in one.pieces]
        return max(pieces, key=lambda one: one[1].within(time_ns))

    def _deeper(self, side: _Side, worst: _Piece, time_ns: float) -> bool:
        """Where all is done: what sequences are worth where the worst window does all of them, or micro-batches
        that are large from fewer grains on; whether there was any."""
        window, start = worst.window, worst.start
        if self.others == 0 and not self.weighed and window is not None and start is not None:
            self.kept, self.weighed = self.loads, True
            begin = Start(start[0], start[1] * self.each, start[2])
            self._weigh(worths(self._filling(side, window), begin, side.columns, time_ns))
        elif self.numbers:
            self.kept, self.weighed = self.loads, False
            number = self.numbers.pop()
            self._tell(number, self._around(number, self.known.full, time_ns))
        else:
            return False
        return True

    def _divide(self, time_ns: float, load: float) -> None:
        """Once: tell large micro-batches from others at the least number of grains for which real loads around one
        take too long for a ``load`` within the time."""
        if self.divided:
            return
        self.divided = True
        first, end, found = 0, len(self.numbers), None
        while first < end:
            middle = (first + end) // 2
            around = self._around(self.numbers[middle], load, time_ns)
            if around.at(load) < time_ns:
                first = middle + 1
            else:
                end, found = middle, around
        if found is not None:
            self._tell(self.numbers[end], found)
            self.numbers = self.numbers[:end]

    def _around(self, number: int, load: float, time_ns: float) -> LongBound:
        """What a replica takes for a load with a micro-batch of more than so many grains, up to a time."""
        known, last = self.known, self.known.stages.last
        bound = self._load_bound(known.near(known.full), known.each * known.num_replicas, last)
        lines = replace(known, bounds=(bound,), each=last / known.num_replicas)
        return around_larger(lines, self.plain.contents.items, number, load, time_ns)

    def _tell(self, number: int, around: LongBound) -> None:
        """Tell replicas with a micro-batch of more than so many grains from others."""
        contents = self.plain.contents
        boxes = [self._box(box, self.known.stages.last) for box in around.boxes]
        pieces = [_Piece(box.window, box.bounds) for box in boxes]
        self.large.append(_Side(contents, halved, Core(grains=number + 1), around.alone, pieces))
        for side in (self.plain, self.long):
            side.contents = contents.within(number)
            side.pieces = [_renewed(one) for one in side.pieces]

    def _weigh(self, worths: FloatArray) -> None:
        """Count what sequences are worth by ``worths`` [n], all together as much as before."""
        counts, before = self.plain.contents.items.counts, self.each
        worths = np.maximum(worths / float(counts @ worths) * self.total, _LEAST_WORTH * before)
        self.each = worths / float(counts @ worths) * self.total
        for side in (self.plain, self.long, *self.large):
            known = [tuple(self._counted(bound, before, self.each) for bound in one.bounds) for one in side.pieces]
            pairs = zip(side.pieces, known, strict=True)
            side.pieces = [_renewed(replace(one, bounds=bounds)) for one, bounds in pairs]

    def _counted(self, bound: PathBound, before: FloatArray, each: FloatArray) -> PathBound:
        """A bound by what sequences were worth ``before`` as one by what ``each`` is worth, for parts of what is
        worth the same both ways: what is missing was worth so many times as much at most."""
        times = max(1.0, float((before / each).max()))
        return PathBound(bound.constant - bound.slope * (times - 1.0) * self.total, bound.slope * times)

    def _load_bound(self, known: LoadBound, before: FloatArray, each: FloatArray) -> LoadBound:
        """The same of all ranges."""
        ranges = (replace(one, bound=self._counted(one.bound, before, each)) for one in known.ranges)
        return LoadBound(tuple(ranges))

    def _box(self, box: Box, before: FloatArray) -> Box:
        """The same of a box, by what sequences are worth now."""
        return replace(box, bounds=tuple(self._counted(one, before, self.each) for one in box.bounds))

    def _refine(self, side: _Side, piece: _Piece, time_ns: float, enough: float) -> None:
        side.pieces.remove(piece)
        side.pieces += self._refined(side, piece, time_ns, enough)

    def _filling(self, side: _Side, window: Window) -> Filling:
        stages = self.known.stages
        return Filling(side.contents, self.each, stages.last, self.known.num_stages, window, side.core)

    def _refined(self, side: _Side, piece: _Piece, time_ns: float, enough: float) -> list[_Piece]:
        """The piece with more known of it, or its halves."""
        window = piece.window
        if window is None:
            return [replace(piece, done=True)]
        filling = self._filling(side, window)
        size = float(side.contents.entries * window.number)
        if piece.start is None and size <= _LARGEST:
            return [self._looked_at(filling, piece, time_ns, side.least)]
        if piece.stale and piece.start is not None:
            mixture, slope, _ = piece.start
            return [_better(replace(piece, stale=False), filling.proved(mixture, slope)[0], time_ns)]
        if window.fewest < window.number or any(window.open):
            halves = side.halved(window)
            return [_Piece(one, piece.bounds) for one in halves] or [replace(piece, done=True)]
        if piece.start is None:
            return [replace(piece, done=True)]
        mixture, slope, rows = piece.start
        given = mixture, slope, rows, side.columns, time_ns, enough
        found, mixture, side.columns = improved(filling, *given)
        # What is enough now may not be for a longer time.
        done = found.within(time_ns) > enough
        return [_better(replace(piece, start=(mixture, found.slope, rows), done=done), found, time_ns)]

    def _looked_at(self, filling: Filling, piece: _Piece, time_ns: float, least: float) -> _Piece:
        """With the better bound of the mixture that real loads give: by lines, or by contents."""
        window, stages = filling.window, self.known.stages
        load = max(piece.within(time_ns), least)
        mixture = best_mixture(self.programmed, filling.num_stages, window, load, least)
        line = mixture.bound(stages, load, least)
        found, rows = filling.proved(mixture, line.slope)
        known = replace(piece, start=(mixture, line.slope, rows))
        return _better(_better(known, self._counted(line, stages.last, self.each), time_ns), found, time_ns)


def around_larger(loads: Loads, items: Items, grains: int, load: float, time_ns: float) -> LongBound:
    """What a replica takes for a ``load`` with a micro-batch of more than so many ``grains``, by lines, up to a
    time; ``loads`` are in the measure of their lines."""
    stages, bound = loads.stages, loads.near(loads.full)
    least = float((stages.last[items.fits] / items.sizes[items.fits]).min()) * (grains + 1)
    return long_bound(stages, loads.num_stages, bound, least, max(load, least), time_ns, _LARGE_EFFORT)


def with_larger(loads: Loads, other: Loads, larger: Sequence[Box]) -> Loads:
    """``loads`` of a strategy as those of another, which takes no less for the same micro-batches and holds larger
    ones, too: a replica has one of these, of which ``larger`` are known in the measure of ``other``, or none."""
    ratio = float((other.each / loads.each).min())
    boxes = [
        replace(box, bounds=tuple(PathBound(one.constant, one.slope * ratio) for one in box.bounds))
        for box in larger
    ]
    ranges = [Range(1, None, one) for box in boxes for one in box.bounds]
    bounds = tuple(LoadBound((*ranges, *one.ranges)) for one in loads.bounds)
    classes = []
    for group in loads.classes:
        long = (LongBound.of(one.alone, (*one.boxes, *boxes)) for one in group.long)
        classes.append(replace(group, long=tuple(long)))
    return replace(loads, bounds=bounds, classes=tuple(classes))


def _better(piece: _Piece, found: PathBound, time_ns: float) -> _Piece:
    """With another bound, where that leaves less for a time."""
    return replace(piece, bounds=(found,)) if found.within(time_ns) < piece.within(time_ns) else piece


def _renewed(piece: _Piece) -> _Piece:
    """A piece of other contents, or other worths."""
    return replace(piece, stale=piece.start is not None, done=False)


def _range(piece: _Piece) -> Range:
    window = piece.window
    first, last = (MAX_MICRO_BATCHES, None) if window is None else (window.fewest, window.number)
    return Range(first, last, piece.bounds[0])


def _halves(window: Window) -> tuple[Window, ...]:
    """Two ranges of numbers of micro-batches."""
    first, last = window.fewest, window.number
    middle = (first + last) // 2
    return (Window.of(first, middle), Window.of(middle + 1, last)) if first < last else ()
