"""A pipeline's bound by the longest sequence of every replica.

Whether D replicas can do a workload within a time Z is in ``filled`` the question of what one with the longest
sequence does, and D - 1 others. But every replica has a longest sequence, its *leader*, around which stages wait,
and not all of the others lead with short ones: sequences longer than a leader are elsewhere. So replicas are told
apart by their leaders, in classes c of lengths. One led by class c does no more than V_c(Z), which windows around
a micro-batch with such a sequence leave for contents without longer ones. In the order of their leaders, the
longest first, replicas 1 to i - 1 hold all sequences that are longer than those of the class of replica i:

    V_c1 + ... + V_c(i-1) >= load of all classes above ci,        V_c1 + ... + V_cD >= load of all,

and they are as many as these sequences need at least (``together``). If no chain of classes (``leader_chains``)
has that, Z is too short.

**One head.** Where one replica alone leads with long sequences, it holds all of them, but V_c counts what is done
most cheaply, which may be none of them. What is true of loads is true whatever sequences are worth: so the window
of the head that does most is asked for the prices at which it takes longest for all long sequences, and chains
with such a head are looked at with these worths, too. Those led by shorter ones hold none of what is worth more,
and do what they did before. (Of two heads each might do all that is worth more: that takes too long to exclude.)
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from milpplan.costs.columns import FloatArray, IntArray
from milpplan.groups.longest import Box, halved
from milpplan.groups.windows import Window
from milpplan.lengths.filled import Filled
from milpplan.lengths.filling import PriceBound
from milpplan.lengths.filling_programs import Start, shared_out
from milpplan.lengths.leader_chains import MOST_CHAINS, Chains
from milpplan.lengths.sides import Measure, Piece, Side
from milpplan.lengths.stage_contents import Core, StageContents
from milpplan.lengths.together import Together

# Classes begin at these parts of the load of the longest sequence: around shorter ones stages wait no longer.
_EDGES = (0.55, 0.7, 0.8, 0.9)
# Programs of real loads for a class.
_EFFORT = 30
# Halvings of the interval of the bound, and how much longer an interval is looked at first.
_HALVINGS, _LONGER = 14, 1.01
# Of a leader's load that a replica has at least, whatever sums of floats may lose.
_SAFETY = 1.0 - 1e-6
_NONE = -np.inf
# Seconds in which it is asked what sequences are worth for a head.
_ASK_S = 2.0

Classes = list[tuple[int, int]]
"""Of lengths: from which number on, up to one before which."""


@dataclass(eq=False)
class Led:
    """What replicas led by each class do at most, by ``sides`` that cover them, as loads by a measure: at least
    that of a leader, ``least`` [C] (its own is there); all sequences longer than those of a class are ``above``
    [C]. ``head``: the class from which on sequences are worth more here, for chains where one replica leads with
    these; 0: for all. ``looked_at``: how often, by class."""

    measure: Measure
    sides: dict[int, tuple[Side, ...]]
    least: FloatArray
    above: FloatArray
    head: int = 0
    looked_at: Counter[int] = field(default_factory=Counter)

    @staticmethod
    def of(measure: Measure, classes: Classes, sides: dict[int, tuple[Side, ...]], head: int = 0) -> Led:
        """By a measure."""
        each, counts = measure.each, measure.counts
        least = [float(each[first:end].min()) * _SAFETY for first, end in classes]
        above = [float(counts[end:] @ each[end:]) for _, end in classes]
        return Led(measure, sides, np.array(least), np.array(above), head)

    def worst(self, place: int, time_ns: float) -> tuple[Side, Piece]:
        """The piece of a class that leaves most for a time."""
        found = [(side, side.worst(time_ns)) for side in self.sides[place]]
        return max(found, key=lambda one: one[1].within(time_ns))

    def within(self, place: int, time_ns: float) -> float:
        """What a replica led by a class does at most, as a load; ``-inf`` where there is none."""
        left = self.worst(place, time_ns)[1].within(time_ns)
        return left if left >= self.least[place] else _NONE

    def worth(self, measure: Measure, classes: Classes, head: int) -> Led:
        """The same of those that lead with a class or a longer one, where sequences are worth no less."""
        before, mine = self.measure.each, {place: of for place, of in self.sides.items() if place >= head}
        copies = {side: _copied(side, measure, before) for sides in mine.values() for side in sides}
        sides = {place: tuple(copies[side] for side in of) for place, of in mine.items()}
        return Led.of(measure, classes, sides, head)


class Leaders:
    """Bounds of a pipeline of several replicas; ``done`` where nothing more is to be had."""

    def __init__(self, filled: Filled, time_ns: float) -> None:
        """Beyond ``filled``, of which nothing changes any more; for about a time of a replica."""
        self.filled, self.done, self.highest = filled, False, filled.loads.highest
        last, counts, number = filled.known.stages.last, filled.measure.counts, len(filled.measure.each)
        edges = list(_EDGES)
        while Chains.number(len(edges) + 2, filled.others + 1) > MOST_CHAINS:
            edges.pop()
        starts = {int(np.searchsorted(last, part * last[-1])) for part in edges} | {0, number - 1}
        firsts = sorted(starts)
        self.classes: Classes = list(zip(firsts, [*firsts[1:], number], strict=True))
        sides = {place: self._sides(first, end, time_ns) for place, (first, end) in enumerate(self.classes)}
        # By what ``filled`` counts, and by what sequences are worth for a head.
        self.led = [Led.of(filled.measure, self.classes, sides)]
        self.asked: set[int] = set()
        self.chains = Chains.of(len(self.classes), filled.others + 1)
        shares = [share * (filled.known.num_stages - 1) for share in filled.known.stages.shares]
        self.together = Together.of(np.repeat(last, counts) * _SAFETY, (shares[0], shares[1]))

    def run(self, time_ns: float, deadline: float) -> None:
        """Refine the classes that leave most for a time, until nothing is left of the question or of the time (of
        ``perf_counter``)."""
        enough = self.chains.enough(self._fewest(time_ns))
        while time.perf_counter() < deadline:
            beyond = self._beyond(time_ns)
            most = np.where(enough, beyond.min(axis=0), _NONE)
            worst = int(most.argmax())
            if most[worst] < 0.0:
                break
            if not self._refine(self.chains.numbers[worst], beyond[:, worst], time_ns):
                self.done = True
                break
        self.highest = max(self.highest, self._least())

    def reaches(self, time_ns: float) -> bool:
        """Whether it is not known that replicas do less than the workload within a time."""
        beyond = self._beyond(time_ns).min(axis=0)
        return bool((beyond[self.chains.enough(self._fewest(time_ns))] >= 0.0).any())

    def _beyond(self, time_ns: float) -> FloatArray:
        """How much more than the workload chains do at most, by all worths, [w, m]."""
        base, found = np.zeros(len(self.classes)), []
        for one in self.led:
            # Those led by shorter sequences than a head hold nothing that is worth more.
            left = base.copy() if one.head else base
            for place in one.sides:
                left[place] = one.within(place, time_ns)
            found.append(self.chains.beyond(left, one.above, one.measure.total))
        return np.array(found)

    def _refine(self, chain: IntArray, beyond: FloatArray, time_ns: float) -> bool:
        """Know more of the classes of a chain that does so much more than the workload by all worths [w]; whether
        there was any."""
        present = np.flatnonzero(chain)
        # All but the shortest leaders, if that is one.
        head = int(present[0]) + 1 if chain[present[0] + 1 :].sum() == 1 else 0
        for one, more in zip(self.led, beyond.tolist(), strict=True):
            places = [place for place in present.tolist() if place in one.sides and one.head in (0, head)]
            # The more replicas one leads, and the less it was looked at.
            for place in sorted(places, key=lambda at: one.looked_at[at] / chain[at]):
                side, piece = one.worst(place, time_ns)
                if not piece.done:
                    one.looked_at[place] += 1
                    enough = max(0.0, piece.within(time_ns) - more / int(chain[place]))
                    one.measure.refine(side, piece, time_ns, enough)
                    return True
        if head and head not in self.asked:
            self.asked.add(head)
            self._ask(head, int(present[-1]), time_ns)
            return True
        if not self.filled.tell_smaller(time_ns):
            return False
        self.led[0].sides[0] = self.filled.plain, *self.filled.large
        return True

    def _ask(self, head: int, place: int, time_ns: float) -> None:
        """What sequences of a class and longer ones are worth where one replica holds all of them, by the worst
        window of the class that leads it."""
        base, first = self.led[0], self.classes[head][0]
        measure = base.measure
        side, piece = base.worst(place, time_ns)
        if piece.window is None or piece.start is None:
            return
        mixture, slope, rows = piece.start
        above = float(base.above[head - 1])
        rest = max(0.0, base.within(place, time_ns) - above) / (measure.total - above)
        shares = np.where(np.arange(len(measure.counts)) < first, rest, 1.0)
        needed = np.asarray(measure.counts * shares, dtype=np.float64)
        dearest, begin = np.full(len(needed), np.inf), Start(mixture, slope * measure.each, rows)
        filling, end = measure.filling(side, piece.window), time.perf_counter() + _ASK_S

        def value(bound: PriceBound) -> float:
            return bound.at(needed)

        given = filling, needed, dearest, begin, side.columns, time_ns
        found = shared_out(*given, value, deadline=end, first=first)
        if found is None:
            return
        each = np.maximum(found[0].prices / slope, measure.each)
        each[:first] = measure.each[:first]
        if (each > measure.each).any():
            self.led.append(base.worth(measure.worth(each), self.classes, head))

    def _fewest(self, time_ns: float) -> IntArray:
        """How many replicas what is longer than each class needs at least."""
        counts = self.filled.measure.counts
        longer = [int(counts[end:].sum()) for _, end in self.classes]
        return np.array([self.together.fewest(one, time_ns) for one in longer])

    def _least(self) -> float:
        """A time within which the replicas do not do the workload, ns."""
        low = high = self.highest
        while not self.reaches(high):
            low, high = high, high * _LONGER
        for _ in range(_HALVINGS if low < high else 0):
            middle = (low + high) / 2
            low, high = (low, middle) if self.reaches(middle) else (middle, high)
        return low

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


def _copied(side: Side, measure: Measure, before: FloatArray) -> Side:
    """What is known of a side, by other worths."""
    pieces = [
        replace(one, bounds=tuple(measure.counted(bound, before) for bound in one.bounds)).renewed
        for one in side.pieces
    ]
    return replace(side, pieces=pieces)


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
