"""What a replica of a pipeline takes at least if one of its micro-batches holds the longest sequence.

However the sequences are packed, some micro-batch has at least the load of the longest one on every stage. The
others cannot all be like it, so stages wait around it, and more so the shorter they are. ``windows.Window`` bounds
that for any numbers of micro-batches ahead of it and behind it. All pairs of numbers are covered by boxes: from a
to a' ahead, from c to c' behind. A box has the bound of its window, or what ``unequal.LoadBound`` says of its
numbers in all; those that give least get windows, then are halved. Of many micro-batches on one side only the next
ones are in the window: the others count for their work on the last stage, where paths begin or end. Nothing limits
how much of the load these hold, so a mixture's slope is at most their weight.

Programs know two kinds of sequences: around a long one, which leaves the other stages least to do forward, are
many short ones, which leave them more.

The time of a replica is no less than the least over the boxes, each linear in the load: a concave function again
(``LongSequenceBound``).

**A group.** With f this function of the replica with the long sequence and h that of the others, D replicas do no
more within Z than C(Z) = f^-1(Z) + (D - 1) h^-1(Z), however they share. So a group with the mean load Y takes at
least the Z of C(Z) = D Y (``group_ns``). Inverses of concave rising functions are convex, so C is, and this Z is
concave in Y: between two loads it is above its chord.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from milpplan.groups.bounds.last_stage import LoadBound, best_mixture
from milpplan.groups.bounds.linear_bounds import PathBound, loads_within
from milpplan.groups.bounds.micro_batch_ranges import Window
from milpplan.groups.bounds.path_mixtures import StageLoads
from milpplan.groups.strategies import FloatArray

# Numbers ahead and behind where boxes begin; the last ones are open.
_EDGES = (0, 1, 2, 4, 8, 16)
# Most micro-batches of a program.
_MOST = 70
# Halvings of the interval of a group's time.
_HALVINGS = 60
# Kinds of sequences in programs, the shortest and the longest: a third adds less than 0.001 %.
_KINDS = 2


@dataclass(frozen=True, slots=True)
class WindowBound:
    """A window and what is known of it: one of ``bounds`` holds; solved or not."""

    window: Window
    bounds: tuple[PathBound, ...]
    solved: bool = False

    def at(self, load: float) -> float:
        """The bound, ns."""
        return min(one.at(load) for one in self.bounds)


@dataclass(frozen=True, slots=True)
class LongSequenceBound:
    """What a replica with the longest sequence takes at least for a load on its last stage, of which the sequence
    is ``alone``; ``boxes`` say where each of the bounds holds."""

    alone: float
    bounds: tuple[PathBound, ...]
    boxes: tuple[WindowBound, ...] = ()

    @staticmethod
    def of(alone: float, boxes: Sequence[WindowBound]) -> LongSequenceBound:
        """Of boxes that cover all numbers."""
        return LongSequenceBound(alone, tuple(bound for one in boxes for bound in one.bounds), tuple(boxes))

    def at(self, load: float) -> float:
        """The bound, ns."""
        return min(one.at(load) for one in self.bounds)


def group_ns(long: LongSequenceBound, plain: LoadBound, num_replicas: int, loads: FloatArray) -> FloatArray:
    """What a group takes at least for every mean load [n] of its replicas, one of them that of ``long``, ns."""
    totals = num_replicas * loads
    low, high = np.zeros(len(loads)), np.array([long.at(total) for total in totals.tolist()])
    if num_replicas == 1:
        return high
    mine, others = loads_within(long.bounds), loads_within([one.bound for one in plain.ranges])
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        done = mine(middle) + (num_replicas - 1) * others(middle)
        enough = done >= totals
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return low


def long_bound(
    stages: StageLoads,
    num_stages: int,
    plain: LoadBound,
    least: float,
    load: float,
    enough_ns: float,
    effort: int,
) -> LongSequenceBound:
    """The bound of a micro-batch of ``least`` in a replica, highest near ``load``, up to ``enough_ns`` there;
    at most ``effort`` programs."""

    def box(window: Window) -> WindowBound:
        held = [one for one in plain.ranges if (one.last or np.inf) >= window.fewest]
        if not any(window.open):
            held = [one for one in held if one.first <= window.number]
        return WindowBound(window, tuple(one.bound for one in held))

    programmed = stages.with_kinds(_KINDS)
    boxes = [box(one) for one in _windows()]
    solved = 0
    while solved < effort:
        worst = min(boxes, key=lambda one: one.at(load))
        window = worst.window
        if worst.at(load) >= enough_ns:
            break
        boxes.remove(worst)
        if worst.solved:
            halves = halved(window)
            if not halves:
                boxes.append(worst)
                break
            # What is known of a window holds for its parts.
            boxes += [
                max(box(one), WindowBound(one, worst.bounds), key=lambda part: part.at(load)) for one in halves
            ]
            continue
        found = best_mixture(programmed, num_stages, window, load, least).bound(stages, load, least)
        solved += 1
        kept = (found,) if found.at(load) > worst.at(load) else worst.bounds
        boxes.append(WindowBound(window, kept, True))
    return LongSequenceBound.of(least, boxes)


def _windows() -> list[Window]:
    """Windows that cover all numbers."""
    spans = [(first, last - 1, False) for first, last in pairwise(_EDGES)] + [(_EDGES[-1], _EDGES[-1], True)]
    return [Window(one[:2], other[:2], (one[2], other[2])) for one, other in product(spans, spans)]


def halved(window: Window) -> tuple[Window, ...]:
    """The window cut across an open side or else its wider one; nothing where it is one pair of numbers, or where
    programs would be too large."""
    sides = (window.ahead, window.behind)
    widths = [last if opened else last - first for (first, last), opened in zip(sides, window.open, strict=True)]
    for side in sorted((0, 1), key=lambda one: -widths[one]):
        first, last = sides[side]
        if window.open[side]:
            halves = ((last, 2 * last - 1), False), ((2 * last, 2 * last), True)
        else:
            middle = (first + last) // 2
            halves = ((first, middle), False), ((middle + 1, last), False)
        cut = tuple(_with_side(window, side, *half) for half in halves)
        if widths[side] and max(one.number for one in cut) <= _MOST:
            return cut
    return ()


def _with_side(window: Window, side: int, numbers: tuple[int, int], opened: bool) -> Window:
    """The window with other numbers ahead (0) or behind (1)."""
    if side:
        return Window(window.ahead, numbers, (window.open[0], opened))
    return Window(numbers, window.behind, (opened, window.open[1]))
