"""How a node of the branch and bound over layers is parted: all ways that make sense, and the one to take.

A way shares out every split of the layers, each to exactly one of its parts: by what one virtual stage holds, by
what the chunks of one rank hold together, or by the fullest inner virtual stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from milpplan.optimize.layout.ceiling_cuts import fullest_stage_branching, has_ceiling_cuts
from milpplan.optimize.layout.stage_options import LayoutContext
from milpplan.simulation.layout_columns import FloatArray

Branching = list[LayoutContext]
"""The parts of a node."""

WHOLE = 1e-6
"""Numbers of layers this near to an integer are one."""
RANKS, STAGES = 4, 10
"""At most so many ways by ranks, and by virtual stages."""
LEAST_RISE = 1e-4
"""Of what is left to the cutoff: a part that does not rise counts as if it rose by so much."""


def candidate_branchings(context: LayoutContext, layers: FloatArray) -> list[Branching]:
    """Ways to part a node that exclude its fractional point, layers [J], and those that say more of the ends and
    of the peak; the ranks and stages that are furthest from whole numbers first."""
    layers, sums = _within_limits(context, layers)
    stages = _most_broken(layers)[:STAGES]
    found = [_rank_parts(context, rank, float(sums[rank])) for rank in _most_broken(sums)[:RANKS]]
    found += [_stage_parts(context, stage, float(layers[stage])) for stage in stages]
    found += [_end_parts(context, end) for end in _open_ends(context)]
    if has_ceiling_cuts(context) and (by_peak := fullest_stage_branching(context)):
        found.append(by_peak)
    return found or [default_branching(context, layers)]


def strong_branching(found: Sequence[Branching], rise: Callable[[LayoutContext], float], left: float) -> Branching:
    """The way after which the bounds of the parts rise most, by the product of the two least rises (the score of
    strong branching: Achterberg, Koch and Martin 2005). ``rise``: of a part; ``left``: to the cutoff, which counts
    at most."""
    if len(found) == 1:
        return found[0]
    best, most = found[0], -1.0
    for way in found:
        rises = sorted(min(rise(part), left) for part in way)
        score = float(np.prod([max(one, LEAST_RISE * left) for one in rises[:2]]))
        if score > most:
            best, most = way, score
        if rises[0] >= left:
            break
    return best


def default_branching(context: LayoutContext, layers: FloatArray) -> Branching:
    """The node's parts by what the fullest inner virtual stage, one virtual stage, or one rank holds at a
    fractional point, layers [J]: the rule where relaxations of the parts are dear."""
    layers, sums = _within_limits(context, layers)
    if has_ceiling_cuts(context) and (by_peak := fullest_stage_branching(context)):
        return by_peak
    for end in _open_ends(context):
        return _end_parts(context, end)
    for stage in (0, context.num_stages - 1):
        if _fraction(layers[stage]) > WHOLE:
            return _stage_parts(context, stage, float(layers[stage]))
    for rank in _most_broken(sums):
        return _rank_parts(context, rank, float(sums[rank]))
    for stage in np.argsort(-_fraction(layers), kind="stable").tolist():
        low, high = context.layer_bounds[stage]
        if low < high:
            return _stage_parts(context, stage, float(layers[stage]))
    raise AssertionError("a node with one split has no parts")


def num_splits(context: LayoutContext) -> float:
    """At most so many splits of the layers are within a node's limits."""
    return float(np.prod([most - fewest + 1.0 for fewest, most in context.layer_bounds]))


def halve_stage(context: LayoutContext) -> Branching:
    """The node's parts by half of what one virtual stage may hold; the first one that has a choice."""
    stage = next(j for j, (fewest, most) in enumerate(context.layer_bounds) if fewest < most)
    return _stage_parts(context, stage, sum(context.layer_bounds[stage]) / 2 + 0.25)


def _within_limits(context: LayoutContext, layers: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Layers of the virtual stages, and of the ranks, of a point: where layers stay unplaced it may be outside of
    the limits, and at the limit the parts are smaller still."""
    sums = np.clip(layers[context.places].sum(axis=0), *np.array(context.rank_bounds).T)
    return np.clip(layers, *np.array(context.layer_bounds).T), sums


def _open_ends(context: LayoutContext) -> list[int]:
    """The ends of the model that may hold layers or none: reductions and gathers that nothing hides are known only
    where that is decided."""
    ends = (0, context.num_stages - 1)
    return [end for end in ends if context.layer_bounds[end][0] == 0 < context.layer_bounds[end][1]]


def _end_parts(context: LayoutContext, end: int) -> Branching:
    """Some layers, or none."""
    return [context.with_stage(end, 1, context.layer_bounds[end][1]), context.with_stage(end, 0, 0)]


def _rank_parts(context: LayoutContext, rank: int, value: float) -> Branching:
    """Below and above a fraction."""
    (low, high), most = context.rank_bounds[rank], int(np.floor(value))
    return [context.with_rank(rank, low, most), context.with_rank(rank, most + 1, high)]


def _stage_parts(context: LayoutContext, stage: int, value: float) -> Branching:
    """Below and above a fraction; below, at and above a whole number."""
    low, high = context.layer_bounds[stage]
    whole = round(value)
    if _fraction(np.array(value)) <= WHOLE:
        ranges = [(low, whole - 1), (whole, whole), (whole + 1, high)]
    else:
        ranges = [(low, int(np.floor(value))), (int(np.floor(value)) + 1, high)]
    return [context.with_stage(stage, least, most) for least, most in ranges if least <= most]


def _most_broken(values: FloatArray) -> list[int]:
    """The places of numbers that are not whole, those furthest from it first."""
    fractions = _fraction(values)
    return [place for place in np.argsort(-fractions, kind="stable").tolist() if fractions[place] > WHOLE]


def _fraction(values: FloatArray) -> FloatArray:
    """Distance to the nearest integer."""
    return np.asarray(np.abs(values - np.rint(values)))
