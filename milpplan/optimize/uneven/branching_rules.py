"""Branching rules of the branch and bound over layers: the candidate branchings of a node, and the choice among
them.

A branching divides the splits of a node among its parts, so that each split is in exactly one part: by the layers
of one virtual stage, by the layers of all chunks of one rank, or by the fullest inner virtual stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from milpplan.optimize.layout.ceiling_cuts import fullest_stage_branching, has_ceiling_cuts
from milpplan.optimize.layout.stage_options import LayoutContext
from milpplan.simulation.layout_columns import FloatArray

Branching = list[LayoutContext]
"""Parts of a node."""

INTEGRAL = 1e-6
"""Numbers of layers this close to an integer count as integers."""
MAX_RANKS, MAX_STAGES = 4, 10
"""Maximum number of branchings by ranks, and by virtual stages."""
MIN_RISE_SHARE = 1e-4
"""Minimum rise of a part in the branching score, as a share of the distance to the cutoff."""


def candidate_branchings(context: LayoutContext, layers: FloatArray) -> list[Branching]:
    """Return branchings of a node that exclude its fractional point, layers [J], or settle its ends or its fullest
    stage.

    The most fractional ranks and stages come first.
    """
    layers, sums = _within_limits(context, layers)
    stages = _most_fractional(layers)[:MAX_STAGES]
    branchings = [_rank_parts(context, rank, float(sums[rank])) for rank in _most_fractional(sums)[:MAX_RANKS]]
    branchings += [_stage_parts(context, stage, float(layers[stage])) for stage in stages]
    branchings += [_end_parts(context, end) for end in _open_ends(context)]
    if has_ceiling_cuts(context) and (by_fullest_stage := fullest_stage_branching(context)):
        branchings.append(by_fullest_stage)
    return branchings or [default_branching(context, layers)]


def strong_branching(
    branchings: Sequence[Branching], rise: Callable[[LayoutContext], float], distance: float
) -> Branching:
    """Return the branching whose parts' bounds rise most: strong branching.

    The score is the product of the two smallest rises (Achterberg, Koch and Martin 2005).

    Args:
        branchings: candidates.
        rise: returns the rise of a part's bound over the node's.
        distance: from the node's bound to the cutoff; a rise counts at most this.
    """
    if len(branchings) == 1:
        return branchings[0]
    best, best_score = branchings[0], -1.0
    for branching in branchings:
        rises = sorted(min(rise(part), distance) for part in branching)
        score = float(np.prod([max(raised, MIN_RISE_SHARE * distance) for raised in rises[:2]]))
        if score > best_score:
            best, best_score = branching, score
        if rises[0] >= distance:
            break
    return best


def default_branching(context: LayoutContext, layers: FloatArray) -> Branching:
    """Return the branching by the fullest inner virtual stage, one virtual stage, or one rank of a fractional
    point, layers [J]: the rule where relaxations of the parts are expensive."""
    layers, sums = _within_limits(context, layers)
    if has_ceiling_cuts(context) and (by_fullest_stage := fullest_stage_branching(context)):
        return by_fullest_stage
    for end in _open_ends(context):
        return _end_parts(context, end)
    for stage in (0, context.num_stages - 1):
        if _fraction(layers[stage]) > INTEGRAL:
            return _stage_parts(context, stage, float(layers[stage]))
    for rank in _most_fractional(sums):
        return _rank_parts(context, rank, float(sums[rank]))
    for stage in np.argsort(-_fraction(layers), kind="stable").tolist():
        low, high = context.layer_bounds[stage]
        if low < high:
            return _stage_parts(context, stage, float(layers[stage]))
    raise AssertionError("a node with one split has no parts")


def num_splits(context: LayoutContext) -> float:
    """Return an upper bound of the number of splits within a node's limits."""
    return float(np.prod([high - low + 1.0 for low, high in context.layer_bounds]))


def halve_stage(context: LayoutContext) -> Branching:
    """Return the branching that halves the limits of the first virtual stage with a choice."""
    stage = next(j for j, (low, high) in enumerate(context.layer_bounds) if low < high)
    return _stage_parts(context, stage, sum(context.layer_bounds[stage]) / 2 + 0.25)


def _within_limits(context: LayoutContext, layers: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Clip a point's layers of virtual stages and ranks to the node's limits.

    A point with unplaced layers may be outside of the limits. At the limit the parts are smaller still.
    """
    sums = np.clip(layers[context.stage_grid].sum(axis=0), *np.array(context.rank_bounds).T)
    return np.clip(layers, *np.array(context.layer_bounds).T), sums


def _open_ends(context: LayoutContext) -> list[int]:
    """Return the ends of the model that may hold layers or none: reductions and gathers that nothing hides are
    known only once that is decided."""
    ends = (0, context.num_stages - 1)
    return [end for end in ends if context.layer_bounds[end][0] == 0 < context.layer_bounds[end][1]]


def _end_parts(context: LayoutContext, end: int) -> Branching:
    """Branch on whether an end holds layers."""
    return [context.with_stage(end, 1, context.layer_bounds[end][1]), context.with_stage(end, 0, 0)]


def _rank_parts(context: LayoutContext, rank: int, value: float) -> Branching:
    """Branch below and above a fractional number of layers of a rank."""
    (low, high), floor = context.rank_bounds[rank], int(np.floor(value))
    return [context.with_rank(rank, low, floor), context.with_rank(rank, floor + 1, high)]


def _stage_parts(context: LayoutContext, stage: int, value: float) -> Branching:
    """Branch below and above a fractional number of layers; below, at and above an integer."""
    low, high = context.layer_bounds[stage]
    whole = round(value)
    if _fraction(np.array(value)) <= INTEGRAL:
        ranges = [(low, whole - 1), (whole, whole), (whole + 1, high)]
    else:
        ranges = [(low, int(np.floor(value))), (int(np.floor(value)) + 1, high)]
    return [context.with_stage(stage, start, end) for start, end in ranges if start <= end]


def _most_fractional(values: FloatArray) -> list[int]:
    """Return the indices of fractional numbers, most fractional first."""
    fractions = _fraction(values)
    return [index for index in np.argsort(-fractions, kind="stable").tolist() if fractions[index] > INTEGRAL]


def _fraction(values: FloatArray) -> FloatArray:
    """Return the distance to the nearest integer."""
    return np.asarray(np.abs(values - np.rint(values)))
