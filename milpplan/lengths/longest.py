"""What a replica of a pipeline takes at least if one of its micro-batches holds the longest sequence.

However the sequences are packed, some micro-batch has at least the load of the longest one on every stage. The
others cannot all be like it, so stages wait around it, and more so the shorter they are. ``unequal.Window`` bounds
that for any numbers of micro-batches ahead of it and behind it. All pairs of numbers are covered by boxes: from a
to a' ahead, from c to c' behind. A box has the bound of its window, or what ``unequal.LoadBound`` says of its
numbers in all; those that give least get windows, then are halved.

The time of a replica is no less than the least over the boxes, each linear in the load: a concave function again
(``LongBound``).

**A group.** With f this function of the replica with the long sequence and h that of the others, D replicas do no
more within Z than C(Z) = f^-1(Z) + (D - 1) h^-1(Z), however they share. So a group with the mean load Y takes at
least the Z of C(Z) = D Y (``group_ns``). Inverses of concave rising functions are convex, so C is, and this Z is
concave in Y: between two loads it is above its chord.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from milpplan.costs.columns import FloatArray
from milpplan.lengths.unequal import (
    MAX_MICRO_BATCHES,
    LoadBound,
    PathBound,
    StageLoads,
    Window,
    best_mixture,
    loads_within,
)

# Numbers ahead and behind where boxes begin.
_EDGES = (0, 1, 2, 4, 8, 16, 32, 64, MAX_MICRO_BATCHES)
# Most micro-batches of a program.
_MOST = 70
# Halvings of the interval of a group's time.
_HALVINGS = 60


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


def group_ns(long: LongBound, plain: LoadBound, num_replicas: int, loads: FloatArray) -> FloatArray:
    """What a group takes at least for every mean load [n] of its replicas, one of them that of ``long``, ns."""
    others = [one.bound for one in plain.ranges]
    totals = num_replicas * loads
    low, high = np.zeros(len(loads)), np.array([long.at(total) for total in totals.tolist()])
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        done = loads_within(long.bounds, middle) + (num_replicas - 1) * loads_within(others, middle)
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
) -> LongBound:
    """The bound of a micro-batch of ``least`` in a replica, highest near ``load``, up to ``enough_ns`` there;
    at most ``effort`` programs."""

    def box(window: Window) -> _Box:
        numbers = window.fewest, window.number
        held = [one.bound for one in plain.ranges if one.first <= numbers[1] and (one.last or 10**9) >= numbers[0]]
        return _Box(window, tuple(held))

    spans = [(first, last - 1) for first, last in pairwise(_EDGES)]
    boxes = [box(Window(*pair)) for pair in product(spans, spans)]
    boxes.append(_Box(None, tuple(one.bound for one in plain.ranges if one.last is None)))
    solved = 0
    while solved < effort:
        worst = min(boxes, key=lambda one: one.at(load))
        window = worst.window
        if window is None or window.fewest > _MOST or worst.at(load) >= enough_ns:
            break
        boxes.remove(worst)
        if worst.solved or window.number > _MOST:
            halves = _halved(window)
            if not halves:
                boxes.append(worst)
                break
            boxes += [box(one) for one in halves]
            continue
        found = best_mixture(stages.with_kinds(1), num_stages, window, load, least).bound(stages, load, least)
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
