"""What a replica of a pipeline takes at least if one of its micro-batches holds the longest sequence.

However the sequences are packed, some micro-batch has at least the load of the longest one on every stage. The
others cannot all be like it, so stages wait around it, and more so the shorter they are. ``unequal.Window`` bounds
that for any numbers of micro-batches ahead of it and behind it. All pairs of numbers are covered by boxes: from a
to a' ahead, from c to c' behind. A box has the bound of its window, or what ``unequal.LoadBound`` says of its
numbers in all; those that give least get windows, then are halved.

The time of a replica is no less than the least over the boxes, each linear in the load: a concave function again
(``LongBound``), between two loads above its chord.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product

from milpplan.lengths.unequal import (
    MAX_MICRO_BATCHES,
    LoadBound,
    PathBound,
    StageLoads,
    Window,
    best_mixture,
)

# Numbers ahead and behind where boxes begin.
_EDGES = (0, 1, 2, 4, 8, 16, 32, MAX_MICRO_BATCHES)
# Programs solved, and the most micro-batches of one.
_EFFORT, _MOST = 70, 70


@dataclass(frozen=True, slots=True)
class _Box:
    """A window (None: beyond all of these) and what is known of it: one of ``bounds`` holds; solved or not."""

    window: Window | None
    bounds: tuple[PathBound, ...]
    solved: bool = False

    def at(self, load: float) -> float:
        return min(one.at(load) for one in self.bounds)


@dataclass(frozen=True, slots=True)
class LongBound:
    """What a replica with the longest sequence takes at least for a load on its last stage, of which the sequence
    is ``alone``."""

    alone: float
    bounds: tuple[PathBound, ...]

    def at(self, load: float) -> float:
        """The bound, ns."""
        return min(one.at(load) for one in self.bounds)

    def beyond(self, line: tuple[float, float], least: float, most: float) -> float:
        """How far it is above a line (constant, slope) at least, for loads from ``least`` to ``most``, ns."""
        ends = (min(max(self.alone, least), most), most)
        return max(0.0, min(self.at(load) - line[0] - line[1] * load for load in ends))


def long_bound(
    stages: StageLoads, num_stages: int, plain: LoadBound, least: float, load: float, enough_ns: float
) -> LongBound:
    """The bound of a micro-batch of ``least`` in a replica, highest near ``load``, up to ``enough_ns`` there."""

    def box(window: Window) -> _Box:
        numbers = window.fewest, window.number
        held = [one.bound for one in plain.ranges if one.first <= numbers[1] and (one.last or 10**9) >= numbers[0]]
        return _Box(window, tuple(held))

    spans = [(first, last - 1) for first, last in pairwise(_EDGES)]
    boxes = [box(Window(*pair)) for pair in product(spans, spans)]
    boxes.append(_Box(None, tuple(one.bound for one in plain.ranges if one.last is None)))
    solved = 0
    while solved < _EFFORT:
        worst = min(boxes, key=lambda one: one.at(load))
        window = worst.window
        if window is None or worst.at(load) >= enough_ns:
            break
        boxes.remove(worst)
        if worst.solved or window.number > _MOST:
            halves = _halved(window)
            if not halves:
                boxes.append(worst)
                break
            boxes += [box(one) for one in halves]
            continue
        found = best_mixture(stages, num_stages, window, load, least).bound(stages, least)
        solved += 1
        kept = (found,) if found.at(load) > worst.at(load) else worst.bounds
        boxes.append(_Box(window, kept, True))
    return LongBound(least, tuple(bound for one in boxes for bound in one.bounds))


def _halved(window: Window) -> tuple[Window, ...]:
    """The window cut across its wider side; nothing where it is one pair of numbers."""
    ahead, behind = window.ahead, window.behind
    if ahead[1] - ahead[0] >= behind[1] - behind[0]:
        middle = sum(ahead) // 2
        halves = (Window((ahead[0], middle), behind), Window((middle + 1, ahead[1]), behind))
        return halves if ahead[0] < ahead[1] else ()
    middle = sum(behind) // 2
    return Window(ahead, (behind[0], middle)), Window(ahead, (middle + 1, behind[1]))
