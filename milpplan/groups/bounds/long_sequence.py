"""Lower bound of a replica's time if one of its micro-batches holds the longest sequence.

However the sequences are packed, some micro-batch has at least the load of the longest sequence on every stage.
The other micro-batches cannot all be as long, so stages wait around it, and more so the shorter they are.
``pipeline_bounds.Window`` bounds that for ranges of micro-batches ahead of it and behind it. Boxes cover all
pairs of numbers: from a to a' ahead, from c to c' behind. A box has the bound of its window, or the
``last_stage.LoadBound`` of its total number; boxes with the smallest bound get programs for their windows, then
are halved. Of many micro-batches on one side only the nearest ones are in the window: the others count for their
work on the last stage, where paths begin or end. Their load is not limited, so a mixture's slope is at most their
weight.

Programs distinguish two kinds of sequences: around a long one, with the smallest forward share on the other
stages, are many short ones with a larger share.

The time of a replica is at least the minimum over the boxes, each linear in the load: a concave function again
(``LongSequenceBound``).

**A group.** With f this function of the replica with the long sequence and h that of the others, D replicas do at
most C(Z) = f^-1(Z) + (D - 1) h^-1(Z) within Z, however they share the work. So a group with the mean load Y takes
at least the Z of C(Z) = D Y (``group_ns``). Inverses of concave rising functions are convex, so C is, and this Z
is
concave in Y: between two loads it is above its chord.

**Best loads** around a sequence that is longer than the best loads without it. The pipeline waits around such a
sequence unless the micro-batches before and after it are nearly as long, so fewer and larger micro-batches than
elsewhere are best: they rise to it and fall from it. Their shares of the total depend on little but the share of
the sequence, so they are computed once for some shares (``path_duals.best_profile`` with a floor) and used for
every batch whose longest sequence has a share near one of them. Heuristics only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from milpplan.groups.bounds.last_stage import LoadBound, best_mixture
from milpplan.groups.bounds.path_duals import best_profile
from milpplan.groups.bounds.path_mixtures import StageLoads
from milpplan.groups.bounds.pipeline_bounds import PathBound, Window, loads_within
from milpplan.groups.strategies import FloatArray, Pipeline

# Shares of the longest sequence that are computed: from the largest share without it times _FIRST, rising by the
# factor _TIMES, up to _LAST.
_FIRST, _TIMES, _LAST = 1.15, 1.35, 0.7
# Numbers of micro-batches tried, as multiples of the total over the longest sequence; the divisor that gives the
# position of the sequence; and the number up to which all positions are tried, since small programs are cheap.
_NUMBERS, _BEFORE, _FEW = (1.1, 1.25, 1.5, 1.8, 2.2), 3, 10
# Loads below this share of the total are dropped; factor by which the longest sequence may exceed a shape's peak.
_NOTHING, _NEAR = 1e-5, 1.02


def peaks(pipeline: Pipeline, longest_units: int, share: float) -> tuple[FloatArray, ...]:
    """Compute best loads around a long sequence, for shares of the sequence above ``share``.

    Args:
        pipeline: the pipeline.
        longest_units: work of the sequence.
        share: largest share of a micro-batch in best loads without the sequence.

    Returns:
        Loads [v] as shares of the total, in ascending order of the sequence's share.
    """
    shapes: list[FloatArray] = []
    share *= _FIRST
    while share < _LAST:
        units = int(longest_units / share)
        numbers = {max(2, int(part / share)) for part in _NUMBERS}
        profiles = [
            best_profile(pipeline, number, units, longest_units, ((position, longest_units),))
            for number in sorted(numbers)
            for position in (range(number) if number <= _FEW else (number // _BEFORE,))
        ]
        best = min(
            (profile for profile in profiles if profile is not None),
            key=lambda profile: profile.time_ns,
            default=None,
        )
        if best is not None:
            shares = best.units / best.units.sum()
            shares = shares[shares > _NOTHING]
            shapes.append(shares / shares.sum())
        share *= _TIMES
    return tuple(shapes)


def around(shapes: Sequence[FloatArray], share: float) -> list[FloatArray]:
    """Select the shapes for a longest sequence with this share of the total, most likely first.

    The next lower shape comes first, since no other sequence should make the pipeline wait. Returns no shape if
    the share is below all.
    """
    below = [shape for shape in shapes if shape.max() * _NEAR < share]
    above = shapes[len(below) : len(below) + 1]
    return [*below[-1:], *above] if below else []


# Numbers ahead and behind at which boxes begin; the last boxes are open.
_EDGES = (0, 1, 2, 4, 8, 16)
# Maximum number of micro-batches of a program.
_MAX_PROGRAM_SIZE = 70
# Bisection steps for a group's time.
_HALVINGS = 60
# Kinds of sequences in programs, the shortest and the longest; a third hardly raises the bound.
_KINDS = 2


@dataclass(frozen=True, slots=True)
class WindowBound:
    """A window with its bounds, of which at least one holds; ``solved``: they come from a program."""

    window: Window
    bounds: tuple[PathBound, ...]
    solved: bool = False

    def at(self, load: float) -> float:
        """Return the bound, ns."""
        return min(bound.at(load) for bound in self.bounds)


@dataclass(frozen=True, slots=True)
class LongSequenceBound:
    """Lower bound of a replica with the longest sequence, for a load on its last stage.

    ``alone`` is the load of that sequence; ``boxes`` are the windows where each of the bounds holds.
    """

    alone: float
    bounds: tuple[PathBound, ...]
    boxes: tuple[WindowBound, ...] = ()

    @staticmethod
    def of(alone: float, boxes: Sequence[WindowBound]) -> LongSequenceBound:
        """Combine boxes that cover all numbers of micro-batches."""
        return LongSequenceBound(alone, tuple(bound for box in boxes for bound in box.bounds), tuple(boxes))

    def at(self, load: float) -> float:
        """Return the bound, ns."""
        return min(bound.at(load) for bound in self.bounds)


def group_ns(long: LongSequenceBound, plain: LoadBound, num_replicas: int, loads: FloatArray) -> FloatArray:
    """Return the lower bound of a group's time for every mean load [n] of its replicas, ns.

    One replica holds the sequence of ``long``, the others have the bound ``plain``.
    """
    totals = num_replicas * loads
    low, high = np.zeros(len(loads)), np.array([long.at(total) for total in totals.tolist()])
    if num_replicas == 1:
        return high
    own_capacity, other_capacity = (
        loads_within(long.bounds),
        loads_within([micro_batch_range.bound for micro_batch_range in plain.ranges]),
    )
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        capacity = own_capacity(middle) + (num_replicas - 1) * other_capacity(middle)
        reaches_total = capacity >= totals
        low, high = np.where(reaches_total, low, middle), np.where(reaches_total, middle, high)
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
    """Bound the time of a replica with a micro-batch of at least the load ``least``.

    Args:
        stages: the pipeline's minimum times.
        num_stages: number of its stages.
        plain: bound without the long sequence, by number of micro-batches.
        least: load of the long sequence on the last stage.
        load: the load at which the bound is to be high.
        enough_ns: cutoff of the bound at ``load``.
        effort: maximum number of programs.
    """

    def box(window: Window) -> WindowBound:
        ranges = [window_range for window_range in plain.ranges if (window_range.last or np.inf) >= window.fewest]
        if not any(window.open):
            ranges = [window_range for window_range in ranges if window_range.first <= window.number]
        return WindowBound(window, tuple(window_range.bound for window_range in ranges))

    programmed = stages.with_kinds(_KINDS)
    boxes = [box(window) for window in _windows()]
    solved = 0
    while solved < effort:
        worst = min(boxes, key=lambda candidate: candidate.at(load))
        window = worst.window
        if worst.at(load) >= enough_ns:
            break
        boxes.remove(worst)
        if worst.solved:
            halves = halved(window)
            if not halves:
                boxes.append(worst)
                break
            # A window's bounds hold for its parts.
            boxes += [
                max(box(half), WindowBound(half, worst.bounds), key=lambda part: part.at(load)) for half in halves
            ]
            continue
        program_bound = best_mixture(programmed, num_stages, window, load, least).bound(stages, load, least)
        solved += 1
        bounds = (program_bound,) if program_bound.at(load) > worst.at(load) else worst.bounds
        boxes.append(WindowBound(window, bounds, True))
    return LongSequenceBound.of(least, boxes)


def _windows() -> list[Window]:
    """List windows that cover all numbers."""
    spans = [(first, last - 1, False) for first, last in pairwise(_EDGES)] + [(_EDGES[-1], _EDGES[-1], True)]
    return [Window(ahead[:2], behind[:2], (ahead[2], behind[2])) for ahead, behind in product(spans, spans)]


def halved(window: Window) -> tuple[Window, ...]:
    """Cut the window across an open side, or else across its wider side.

    Returns:
        The parts; empty for a single pair of numbers, or where programs would be too large.
    """
    sides = (window.ahead, window.behind)
    widths = [last if opened else last - first for (first, last), opened in zip(sides, window.open, strict=True)]
    for side in sorted((0, 1), key=lambda number: -widths[number]):
        first, last = sides[side]
        if window.open[side]:
            halves = ((last, 2 * last - 1), False), ((2 * last, 2 * last), True)
        else:
            middle = (first + last) // 2
            halves = ((first, middle), False), ((middle + 1, last), False)
        cut = tuple(_with_side(window, side, *half) for half in halves)
        if widths[side] and max(part.number for part in cut) <= _MAX_PROGRAM_SIZE:
            return cut
    return ()


def _with_side(window: Window, side: int, numbers: tuple[int, int], opened: bool) -> Window:
    """Replace the numbers ahead (0) or behind (1)."""
    if side:
        return Window(window.ahead, numbers, (window.open[0], opened))
    return Window(numbers, window.behind, (opened, window.open[1]))
