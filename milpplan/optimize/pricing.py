"""Memory in the bounds: live micro-batches, fixed bytes, and the price of a byte.

Lagrangian relaxation of a rank's memory: for any price >= 0, T + price * (bytes - capacity) bounds the step time
of every plan that fits from below, and each layer chooses its recompute mode by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from milpplan.costs.columns import FloatArray, IntArray
from milpplan.costs.layers import Phase
from milpplan.costs.layout_costs import LayoutCosts
from milpplan.costs.stages import EMBEDDING, HEAD
from milpplan.specs.plan import SCHEDULES

GPIPE, INTERLEAVED = SCHEDULES.index("gpipe"), SCHEDULES.index("interleaved")


@dataclass(frozen=True)
class Group:
    """Layouts with the same pp; arrays [r] or, with ranks, [r, P]."""

    num_ranks: int
    micro_batches: FloatArray
    vpp: FloatArray
    schedule: IntArray
    costs: LayoutCosts
    counts: FloatArray
    """Layers of each kind, [K]."""
    even: bool
    """Whether interleaved virtual stages hold floor or ceil of the mean (``Space.interleaved_layers``)."""

    def take(self, rows: IntArray) -> Group:
        """The chosen layouts."""
        return Group(
            self.num_ranks,
            self.micro_batches[rows],
            self.vpp[rows],
            self.schedule[rows],
            self.costs.take(rows),
            self.counts,
            self.even,
        )

    @cached_property
    def live(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """``live_at_peak`` of the layouts."""
        return live_at_peak(self.micro_batches, self.schedule, self.num_ranks, self.vpp)

    @property
    def ranks(self) -> FloatArray:
        """Rank numbers as a row [1, P]."""
        return np.arange(self.num_ranks, dtype=np.float64)[None, :]


def live_at_peak(
    micro_batches: FloatArray, schedule: IntArray, num_ranks: int, vpp: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Micro-batches alive when the warm-up of a rank ends, in its last, first and any other chunk: [r, P] each.

    1f1b min(m, P - s), gpipe m (one chunk: all three equal). Interleaved: the warm-up and one forward are
    2 (P - s - 1) + (v - 1) P + 1 items, P a chunk in order, so the last chunk has min(P, 2 (P - s - 1) + 1),
    the first P + max(0, P - 2 s - 1), others P.
    """
    depth = num_ranks - np.arange(num_ranks, dtype=np.float64)[None, :]
    m = micro_batches[:, None]
    plain = np.minimum(m, depth)
    gpipe = (schedule == GPIPE)[:, None] & (num_ranks > 1)
    plain = np.where(gpipe, m, plain)
    last = np.minimum(num_ranks, 2 * depth - 1) + 0 * m
    first = np.minimum(num_ranks + np.maximum(0, 2 * depth - 1 - num_ranks), m)
    other = np.where((vpp > 2)[:, None], float(num_ranks), first)
    interleaved = (schedule == INTERLEAVED)[:, None]
    return (
        np.asarray(np.where(interleaved, last, plain)),
        np.asarray(np.where(interleaved, first, plain)),
        np.asarray(np.where(interleaved, other, plain)),
    )


def least_kept(costs: LayoutCosts, modes: tuple[str, ...]) -> IntArray:
    """Least bytes kept of a layer, [K, r]."""
    dropped = np.zeros_like(costs.kept_bytes)
    if "selective" in modes:
        dropped = np.maximum(dropped, costs.dropped_selective_bytes)
    if "full" in modes:
        dropped = np.maximum(dropped, costs.dropped_full_bytes)
    return costs.kept_bytes - dropped


def fixed_bytes(group: Group) -> FloatArray:
    """Bytes of a rank without layers, [r, P]: buffers, and the ends of the model on the first and last rank."""
    costs = group.costs
    fixed = np.repeat(costs.buffer_bytes[:, None].astype(np.float64), group.num_ranks, axis=1)
    last, first, _ = group.live
    states = costs.state_bytes.sum(axis=0)
    fixed[:, 0] += states[EMBEDDING] + first[:, 0] * costs.embedding_kept_bytes
    fixed[:, -1] += states[HEAD] + last[:, -1] * costs.head_kept_bytes + costs.head_workspace_bytes
    return fixed


def over_kinds(counts: FloatArray, values: FloatArray) -> FloatArray:
    """sum_k counts_k values_k of values [K, ...]: a few kinds, so faster than a general product."""
    total = counts[0] * values[0]
    for count, value in zip(counts[1:], values[1:], strict=True):
        total = total + count * value
    return np.asarray(total)


def forced_layers(group: Group) -> FloatArray:
    """Layers that every plan has in the last, the first and the other chunks of each rank, [3, r, P]: the fewest
    of an inner virtual stage, none in the model's first and last."""
    v = np.repeat(group.vpp[:, None], group.num_ranks, axis=1)
    fewest = np.ones_like(v)
    if group.even:
        fewest = np.maximum(1.0, group.counts.sum() // (v * group.num_ranks))
    several = (v > 1) * fewest
    last, first = several.copy(), several.copy()
    last[:, -1] = 0.0
    first[:, 0] = 0.0
    return np.asarray(np.stack([last, first, np.maximum(v - 2, 0.0) * fewest]))


def _mode_costs(group: Group, modes: tuple[str, ...]) -> list[tuple[FloatArray, FloatArray]]:
    """(extra nanoseconds, kept bytes) of a layer under each recompute mode of the space, [K, r] each."""
    costs, duration = group.costs, group.costs.duration_ns
    choices = {
        "none": (0 * costs.kept_bytes, costs.kept_bytes),
        "selective": (duration[:, Phase.SELECTIVE], costs.kept_bytes - costs.dropped_selective_bytes),
        "full": (duration[:, Phase.FULL], costs.kept_bytes - costs.dropped_full_bytes),
    }
    return [
        (choices[mode][0].astype(np.float64), choices[mode][1].astype(np.float64))
        for mode in choices
        if mode in modes
    ]


def priced_layers(group: Group, modes: tuple[str, ...], on_backward: FloatArray, price: FloatArray) -> FloatArray:
    """Recomputation and memory of one layer in the last, the first and the other chunks, [3, K, r, P]: the
    cheapest mode's extra time (times ``on_backward`` [r, P]) plus the price [r, P] of its bytes."""
    choices = _mode_costs(group, modes)
    states = group.costs.state_bytes.sum(axis=0)[:-2].astype(np.float64)
    by_chunk = []
    for live in group.live:
        best = np.full((len(states), *price.shape), np.inf)
        for extra, kept in choices:
            np.minimum(best, extra[:, :, None] * on_backward + kept[:, :, None] * (price * live), out=best)
        by_chunk.append(best + states[:, :, None] * price)
    return np.asarray(np.stack(by_chunk))


def memory_price(group: Group, capacity: float, modes: tuple[str, ...], on_backward: FloatArray) -> FloatArray:
    """The price of a byte on each rank that bounds best at the balanced placement, [r, P].

    The bound is concave and piecewise linear in the price, with corners where two modes of a layer cost the
    same; the corners are tried. The balanced rank holds counts / P layers: the forced ones in their chunks, the
    rest where they keep least, in the last chunk.
    """
    share = group.counts / group.num_ranks
    mean = [(share @ extra / share.sum(), share @ kept / share.sum()) for extra, kept in _mode_costs(group, modes)]
    states = group.costs.state_bytes.sum(axis=0)[:-2].astype(np.float64)
    lives = group.live
    held = forced_layers(group)
    held[0] += np.maximum(share.sum() - held.sum(axis=0), 0.0)
    needed = (share @ states)[:, None] + fixed_bytes(group) - capacity
    tight = (
        needed
        + sum(held[chunk] * lives[chunk] for chunk in range(3 if (group.vpp > 1).any() else 1))
        * (mean[0][1][:, None])
    )
    rows = np.flatnonzero((tight > 0).any(axis=1))
    price = np.zeros_like(needed)
    if len(rows):
        price[rows] = _best_corner(
            [(extra[rows], kept[rows]) for extra, kept in mean],
            (lives[0][rows], lives[1][rows], lives[2][rows]),
            held[:, rows],
            needed[rows],
            on_backward[rows],
        )
    return np.asarray(price)


def _best_corner(
    mean: list[tuple[FloatArray, FloatArray]],
    lives: tuple[FloatArray, FloatArray, FloatArray],
    held: FloatArray,
    needed: FloatArray,
    on_backward: FloatArray,
) -> FloatArray:
    """The corner with the best bound, [r, P]; zero where nothing is forced."""
    several = bool((held[1] + held[2]).any())
    best = np.zeros_like(needed)
    value = held.sum(axis=0) * on_backward * np.min([extra for extra, _ in mean], axis=0)[:, None]
    for live in (lives[0], lives[2]) if several else lives[:1]:
        for price in _corners(mean, live, on_backward):
            bound = price * needed
            for chunk in range(3 if several else 1):
                cost = lives[chunk] * price
                least = mean[0][0][:, None] * on_backward + mean[0][1][:, None] * cost
                for extra, kept in mean[1:]:
                    np.minimum(least, extra[:, None] * on_backward + kept[:, None] * cost, out=least)
                bound += held[chunk] * least
            better = bound > value
            best, value = np.where(better, price, best), np.where(better, bound, value)
    return best


def _corners(
    mean: list[tuple[FloatArray, FloatArray]], live: FloatArray, on_backward: FloatArray
) -> list[FloatArray]:
    """Prices at which two recompute modes of the mean layer cost the same, [r, P] each."""
    corners = []
    for i, (extra, kept) in enumerate(mean):
        for more_extra, less_kept in mean[i + 1 :]:
            saved = np.maximum(kept - less_kept, 1.0)[:, None] * live
            corners.append(np.maximum(more_extra - extra, 0.0)[:, None] * on_backward / saved)
    return corners
