"""Best loads of a pipeline around a sequence that is longer than all that are best without it.

The pipeline waits around such a sequence unless what runs before and after it is nearly as long, so fewer and
larger micro-batches than elsewhere are best: they rise to it and fall from it. Their shares of the whole hang on
little but that of the sequence, so they are learned for some of these once (``profile.best_profile`` with a floor)
and taken for every batch whose longest sequence has one near it. Heuristics only.
"""

from __future__ import annotations

from collections.abc import Sequence

from milpplan.groups.bounds.path_duals import best_profile
from milpplan.groups.strategies import FloatArray, Pipeline

# Shares of the longest sequence that are learned: from this part above the largest share without it, each so many
# times the one before, up to the last one.
_FIRST, _TIMES, _LAST = 1.15, 1.35, 0.7
# Numbers of micro-batches tried, as multiples of those that are as large as the longest; what part of them is
# before it, or any of few, whose programs are cheap.
_NUMBERS, _BEFORE, _FEW = (1.1, 1.25, 1.5, 1.8, 2.2), 3, 10
# A load below this share of the whole is none; how far the longest sequence may be above a share.
_NOTHING, _NEAR = 1e-5, 1.02


def peaks(pipeline: Pipeline, longest_units: int, share: float) -> tuple[FloatArray, ...]:
    """Best loads [v] as shares of the whole around a sequence of about so many units, for its shares of the whole
    above ``share``, ascending."""
    found: list[FloatArray] = []
    share *= _FIRST
    while share < _LAST:
        units = int(longest_units / share)
        numbers = {max(2, int(part / share)) for part in _NUMBERS}
        tried = [
            best_profile(pipeline, number, units, longest_units, ((place, longest_units),))
            for number in sorted(numbers)
            for place in (range(number) if number <= _FEW else (number // _BEFORE,))
        ]
        best = min((one for one in tried if one is not None), key=lambda one: one.time_ns, default=None)
        if best is not None:
            shares = best.units / best.units.sum()
            shares = shares[shares > _NOTHING]
            found.append(shares / shares.sum())
        share *= _TIMES
    return tuple(found)


def around(known: Sequence[FloatArray], share: float) -> list[FloatArray]:
    """Those for a longest sequence with a share of the whole, the likeliest first; none where it is below all.
    Others than it fill micro-batches of the next lower share best, as none is to wait for one of them."""
    below = [one for one in known if one.max() * _NEAR < share]
    above = known[len(below) : len(below) + 1]
    return [*below[-1:], *above] if below else []
