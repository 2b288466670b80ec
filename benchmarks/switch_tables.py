"""Switch times between homogeneous layouts, by the rule of HotSPa's planner, for the published cost tables.

GPU g of a layout (dp, tp, pp) holds stage g // (dp tp), replica (g // tp) mod dp and slice g mod tp. What it needs
and lacks comes from an owner of its node, the one that has sent least so far; only where its node has none, from
the owner that has sent least between nodes. A switch takes as long as the busiest link of any GPU. Source: HotSPa
(PKU-DAIR/Hetu, hetu/graph/switch_exec_graph.cc, NEW_GREEDY). Every matrix is cut evenly, every stage holds as many
layers; the embedding is on the first stage, the head on the last.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

Layout = tuple[int, int, int]
Interval = tuple[Fraction, Fraction]
Box = tuple[Interval, Interval]

INTRA_BYTES_PER_S = 200e9
INTER_BYTES_PER_S = 25e9
GPUS_PER_NODE = 8
BYTES_PER_VALUE = 2
# Each cell is sent in so many parts, which stand for the tensors of the layers in it.
_PARTS = 8


@dataclass(frozen=True)
class Weights:
    """Number of parameters, and the share of them in the embedding (as many are in the head)."""

    num_params: float
    embedding: Fraction

    @staticmethod
    def share(part: int, num_params: float) -> Fraction:
        """A part of the parameters as a share."""
        return Fraction(part, round(num_params))

    def depth(self, part: Fraction) -> Fraction:
        """Share of the parameters before this part of the layers; the ends hold embedding and head."""
        if part in (0, 1):
            return part
        return self.embedding + (1 - 2 * self.embedding) * part


def reduce_s(layout: Layout, weights: Weights) -> float:
    """Time of reduce-scattering a strategy's gradients over its replicas: 2 (D - 1) / D bytes a parameter held."""
    dp, tp, pp = layout
    volume = BYTES_PER_VALUE * (dp - 1) / dp * weights.num_params / (tp * pp)
    return volume / (INTRA_BYTES_PER_S if dp * tp <= GPUS_PER_NODE else INTER_BYTES_PER_S)


def switch_s(source: Layout, target: Layout, weights: Weights, gradients: bool = False) -> float:
    """Time of a switch of parameters, or of reduced gradients (each replica owns a slice of its own)."""
    have, need = (_boxes(layout, weights, gradients) for layout in (source, target))
    number = len(have)
    sent, received = np.zeros((2, number)), np.zeros((2, number))
    for owners, takers, values in _cells(have, need, weights):
        for _ in range(_PARTS):
            _send(owners, takers, values * BYTES_PER_VALUE / _PARTS, sent, received)
    rates = np.array([[INTRA_BYTES_PER_S], [INTER_BYTES_PER_S]])
    return float(max((sent / rates).max(), (received / rates).max()))


def _boxes(layout: Layout, weights: Weights, gradients: bool) -> list[Box]:
    """Depth and width of what every GPU holds."""
    dp, tp, pp = layout
    boxes = []
    for gpu in range(dp * tp * pp):
        stage, replica, part = gpu // (dp * tp), gpu // tp % dp, gpu % tp
        depth = (weights.depth(Fraction(stage, pp)), weights.depth(Fraction(stage + 1, pp)))
        if gradients:
            width = (Fraction(replica * tp + part, dp * tp), Fraction(replica * tp + part + 1, dp * tp))
        else:
            width = (Fraction(part, tp), Fraction(part + 1, tp))
        boxes.append((depth, width))
    return boxes


def _cells(have: list[Box], need: list[Box], weights: Weights) -> list[tuple[list[int], list[int], float]]:
    """Owners, takers that lack it, and parameters of every cell of the common refinement."""
    depths, widths = (sorted({end for box in have + need for end in box[axis]}) for axis in (0, 1))
    cells = []
    for low, high in itertools.pairwise(depths):
        for left, right in itertools.pairwise(widths):
            owners = [gpu for gpu, box in enumerate(have) if _inside(box, low, left)]
            takers = [gpu for gpu, box in enumerate(need) if _inside(box, low, left) and gpu not in owners]
            cells.append((owners, takers, float((high - low) * (right - left)) * weights.num_params))
    return cells


def _inside(box: Box, depth: Fraction, width: Fraction) -> bool:
    return box[0][0] <= depth < box[0][1] and box[1][0] <= width < box[1][1]


def _send(
    owners: list[int],
    takers: list[int],
    volume: float,
    sent: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    received: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
) -> None:
    for taker in takers:
        near = [owner for owner in owners if owner // GPUS_PER_NODE == taker // GPUS_PER_NODE]
        link = 0 if near else 1
        owner = min(near or owners, key=lambda gpu: sent[link, gpu])
        sent[link, owner] += volume
        received[link, taker] += volume
