"""Best loads of a pipeline around a sequence that is longer than the best loads without it.

The pipeline waits around such a sequence unless the micro-batches before and after it are nearly as long, so fewer
and larger micro-batches than elsewhere are best: they rise to it and fall from it. Their shares of the total
depend on little but the share of the sequence, so they are computed once for some shares
(``path_duals.best_profile`` with a floor) and used for every batch whose longest sequence has a share near one of
them. Heuristics only.
"""

from __future__ import annotations

from collections.abc import Sequence

from milpplan.groups.bounds.path_duals import best_profile
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
