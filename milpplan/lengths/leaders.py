"""A pipeline's bound by the longest sequence of every replica.

Whether D replicas can do a workload within a time Z is in ``filled`` the question of what one with the longest
sequence does, and D - 1 others. But every replica has a longest sequence, its *leader*, around which stages wait,
and not all of the others lead with short ones: sequences longer than a leader are elsewhere. So replicas are told
apart by their leaders, in classes c of lengths. One led by class c does no more than V_c(Z), which windows around
a micro-batch with such a sequence leave for contents without longer ones. In the order of their leaders, the
longest first, replicas 1 to i - 1 hold all sequences that are longer than those of the class of replica i:

    V_c1 + ... + V_c(i-1) >= load of all classes above ci,        V_c1 + ... + V_cD >= load of all.

The largest sum of a number of replicas with some last class is a dynamic program: more of it allows no less. If no
sum reaches the workload, Z is too short.

And replicas 1 to i - 1 are as many as these sequences need at least (``together``).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from milpplan.groups.longest import Box, halved
from milpplan.groups.windows import Window
from milpplan.lengths.filled import Filled
from milpplan.lengths.sides import Piece, Side
from milpplan.lengths.stage_contents import Core, StageContents
from milpplan.lengths.together import Together

# Classes begin at these parts of the load of the longest sequence: around shorter ones stages wait no longer.
_EDGES = (0.55, 0.7, 0.8, 0.9)
# Programs of real loads for a class.
_EFFORT = 30
# Halvings of the interval of the bound, and how much longer an interval is looked at first.
_HALVINGS, _LONGER = 30, 1.2
# Of a leader's load that a replica has at least, whatever sums of floats may lose.
_SAFETY = 1.0 - 1e-6
_NONE = -np.inf


@dataclass(eq=False)
class LedClass:
    """Replicas led by one of ``first`` to ``end`` - 1, with a load of ``least`` or more, by what ``sides``
    cover them; ``longer``: how many sequences are longer, and ``above`` their load; ``looked_at``: how often."""

    first: int
    end: int
    least: float
    sides: tuple[Side, ...]
    longer: int
    above: float
    looked_at: int = 0

    def worst(self, time_ns: float) -> tuple[Side, Piece]:
        """The piece that leaves most for a time."""
        found = [(side, side.worst(time_ns)) for side in self.sides]
        return max(found, key=lambda one: one[1].within(time_ns))

    def within(self, time_ns: float) -> float:
        """What such a replica does at most, as a load; ``-inf`` where there is none."""
        left = self.worst(time_ns)[1].within(time_ns)
        return left if left >= self.least else _NONE


class Leaders:
    """Bounds of a pipeline of several replicas; ``done`` where nothing more is to be had."""

    def __init__(self, filled: Filled, time_ns: float) -> None:
        """Beyond ``filled``, of which nothing changes any more; for about a time of a replica."""
        self.filled, self.done, self.highest = filled, False, filled.loads.highest
        last, each = filled.known.stages.last, filled.measure.each
        counts, number = filled.plain.contents.items.counts, len(each)
        edges = {int(np.searchsorted(last, part * last[-1])) for part in _EDGES} | {number - 1}
        firsts = sorted({0} | edges)
        self.classes: list[LedClass] = []
        for first, end in zip(firsts, [*firsts[1:], number], strict=True):
            longer, above = int(counts[end:].sum()), float(counts[end:] @ each[end:])
            least, sides = float(each[first]) * _SAFETY, self._sides(first, end, time_ns)
            self.classes.append(LedClass(first, end, least, sides, longer, above))
        shares = [share * (filled.known.num_stages - 1) for share in filled.known.stages.shares]
        self.together = Together.of(np.repeat(last, counts) * _SAFETY, (shares[0], shares[1]))

    def run(self, time_ns: float, deadline: float) -> None:
        """Refine the classes that leave most for a time, until nothing is left of the question or of the time (of
        ``perf_counter``)."""
        left, fewest = self._left(time_ns), self._fewest(time_ns)
        while time.perf_counter() < deadline:
            total, leaders = self._chain(left, fewest)
            beyond = total - self.filled.total
            if beyond < 0.0:
                break
            # The more replicas one leads, and the less it was looked at.
            order = sorted(set(leaders), key=lambda one: self.classes[one].looked_at / leaders.count(one))
            worst = [(one, *self.classes[one].worst(time_ns)) for one in order]
            open_ = [one for one in worst if not one[2].done]
            if not open_:
                self.done = not self.filled.tell_smaller(time_ns)
                if self.done:
                    break
                self.classes[0].sides = self.filled.plain, *self.filled.large
                continue
            place, side, piece = open_[0]
            self.classes[place].looked_at += 1
            enough = max(0.0, piece.within(time_ns) - beyond / leaders.count(place))
            self.filled.measure.refine(side, piece, time_ns, enough)
            for shared in (at for at, one in enumerate(self.classes) if side in one.sides):
                left[shared] = self.classes[shared].within(time_ns)
        self.highest = max(self.highest, self._least())

    def reaches(self, time_ns: float) -> bool:
        """Whether it is not known that replicas do less than the workload within a time."""
        return self._chain(self._left(time_ns), self._fewest(time_ns))[0] >= self.filled.total

    def _left(self, time_ns: float) -> list[float]:
        """What a replica led by each class does at most."""
        return [one.within(time_ns) for one in self.classes]

    def _fewest(self, time_ns: float) -> list[int]:
        """How many replicas what is longer than each class needs at least."""
        return [self.together.fewest(one.longer, time_ns) for one in self.classes]

    def _least(self) -> float:
        """A time within which the replicas do not do the workload, ns."""
        low = high = self.highest
        while not self.reaches(high):
            low, high = high, high * _LONGER
        for _ in range(_HALVINGS if low < high else 0):
            middle = (low + high) / 2
            low, high = (low, middle) if self.reaches(middle) else (middle, high)
        return low

    def _chain(self, left: list[float], fewest: list[int]) -> tuple[float, list[int]]:
        """The largest sum of loads of replicas in a row, and the classes of their leaders, the longest first; none
        where there are no leaders."""
        last = len(self.classes) - 1
        best = {last: (left[last], [last])}
        for number in range(1, self.filled.others + 1):
            found: dict[int, tuple[float, list[int]]] = {}
            for before, (total, leaders) in best.items():
                for place in range(before + 1):
                    elsewhere = total >= self.classes[place].above and number >= fewest[place]
                    new = total + left[place]
                    if (place == before or elsewhere) and new > found.get(place, (_NONE, []))[0]:
                        found[place] = new, [*leaders, place]
            best = found
        return max(best.values(), key=lambda one: one[0], default=(_NONE, []))

    def _begun(self, box: Box) -> list[Piece]:
        """What is known of a box, with windows and mixtures that were found around the longest sequence."""
        known = [one for one in self.filled.long.pieces if one.window and _inside(one.window, box.window)]
        begun = [replace(one, bounds=box.bounds).renewed for one in known]
        return begun or [Piece(box.window, box.bounds)]

    def _sides(self, first: int, end: int, time_ns: float) -> tuple[Side, ...]:
        """Replicas led by one of ``first`` to ``end`` - 1: those with a large micro-batch are told apart where
        they do less than the class may. What is known of any replica is enough for the shortest ones."""
        filled = self.filled
        if not first:
            return filled.plain, *filled.large
        around = filled.lines.around(first, filled.known.full, _EFFORT)
        boxes = [filled.measure.box(box, filled.known.stages.last) for box in around.boxes]
        begun = [piece for box in boxes for piece in self._begun(box)]
        found = Side(_shorter(filled.whole, end), halved, Core(first), around.alone, begun)
        most = max((one.worst(time_ns).within(time_ns) for one in filled.large), default=np.inf)
        if most >= found.worst(time_ns).within(time_ns):
            return (found,)
        return replace(found, contents=_shorter(filled.plain.contents, end)), *filled.large


def _inside(window: Window, other: Window) -> bool:
    """Whether all numbers of a window are numbers of another."""
    sides = zip((window.ahead, window.behind), (other.ahead, other.behind), window.open, other.open, strict=True)
    return all(
        first >= least and (other_open or (last <= most and not is_open))
        for (first, last), (least, most), is_open, other_open in sides
    )


def _shorter(contents: StageContents, end: int) -> StageContents:
    """Those without sequences of length number ``end`` or longer."""
    fits = contents.items.fits & (np.arange(len(contents.items.fits)) < end)
    return replace(contents, items=replace(contents.items, fits=fits))
