"""Position of process groups in the network: ranks per scale-up domain, and number of domains.

A domain holds ranks [i * D, (i + 1) * D); a group with stride t holds ranks r, r + t, r + 2 t, ...
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from milpplan.problem.hardware import HardwareSpec
from milpplan.simulation.layers.kernels import Numbers
from milpplan.simulation.layout_columns import BoolArray, IntArray


class PodPlace(NamedTuple):
    """Position of groups among pods, counted as in ``GroupPlace``."""

    members: IntArray
    """Ranks of a group in a pod."""
    pods: IntArray
    """Pods that a group spans."""


class GroupPlace(NamedTuple):
    """Position of groups of equal shape in the network; the worst group counts."""

    size: IntArray
    """Ranks of a group."""
    members: IntArray
    """Ranks of a group in a domain, a minimum over domains and groups."""
    domains: IntArray
    """Domains that a group spans, a maximum over groups."""
    one_rail: BoolArray
    """True if the ranks of a group have equal positions in all domains that it spans."""
    beyond: PodPlace | None = None
    """Position among pods; None without pods."""


def _smallest_part(hardware: HardwareSpec, block: IntArray) -> IntArray:
    """Find the minimum number of ranks that a block of consecutive ranks has in a domain, for the best segment."""
    segments = hardware.scale_up.segments or (hardware.scale_up.num_gpus,)
    parts = [np.gcd(block, np.int64(segment)) for segment in segments]
    return np.asarray(np.maximum.reduce(parts))


def group_place(
    hardware: HardwareSpec, size: Numbers, stride: Numbers, blocks: Numbers = 1, block_stride: Numbers = 1
) -> GroupPlace:
    """Find the position of groups of ``size`` ranks ``stride`` apart, or of ``blocks`` such rows.

    Members: see ``collectives.members_per_domain``. Domains of a row: ceil((size * stride + D - part) / D), at
    most ``size``. Domains of several rows: those of the rows' first ranks if a domain holds several rows, else
    those of a row times the number of rows.
    """
    row = _row(hardware, np.asarray(size, dtype=np.int64), np.asarray(stride, dtype=np.int64))
    num_rows, row_stride = np.asarray(blocks, dtype=np.int64), np.asarray(block_stride, dtype=np.int64)
    if (num_rows == 1).all():
        return row
    column = _row(hardware, num_rows, row_stride)
    size, beyond = row.size * num_rows, None
    members, domains = _rows(row.size, num_rows, (row.members, row.domains), (column.members, column.domains))
    if row.beyond is not None and column.beyond is not None:
        beyond = PodPlace(*_rows(row.size, num_rows, row.beyond, column.beyond))
    return GroupPlace(size, members, domains, row.one_rail & column.one_rail, beyond)


def _rows(
    size: IntArray, num_rows: IntArray, row: tuple[IntArray, IntArray], column: tuple[IntArray, IntArray]
) -> tuple[IntArray, IntArray]:
    """Combine (members, parts) of a row of ``size`` ranks and of the first ranks of all rows (the column)."""
    is_shared = column[0] > 1
    members = np.where(is_shared, size * column[0], row[0])
    return members, np.where(is_shared, column[1], np.minimum(column[1] * row[1], size * num_rows))


def _row(hardware: HardwareSpec, size: IntArray, step: IntArray) -> GroupPlace:
    """Find the position of groups of ``size`` ranks ``step`` apart."""
    block = size * step
    ranks = block // step
    members, domains = _parts(ranks, step, _smallest_part(hardware, block), hardware.scale_up.num_gpus)
    beyond = None
    if hardware.pods is not None:
        pod = np.int64(hardware.pods.num_gpus)
        beyond = PodPlace(*_parts(ranks, step, np.gcd(block, pod), hardware.pods.num_gpus))
    if hardware.scale_out.rails is None:
        return GroupPlace(ranks, members, domains, np.ones_like(ranks, dtype=np.bool_), beyond)
    # A rank and its neighbour in the next domain have equal positions if a whole number of strides is between
    # them.
    one_rail = (domains == 1) | same_rail(hardware, members * step)
    return GroupPlace(ranks, members, domains, one_rail, beyond)


def _parts(ranks: IntArray, step: IntArray, part: IntArray, whole: int) -> tuple[IntArray, IntArray]:
    """Find the position of a row in domains (or pods) of ``whole`` ranks.

    Args:
        ranks: number of ranks of the row.
        step: distance of neighbours in the row.
        part: minimum number of consecutive ranks of the row's block in a domain.
        whole: ranks of a domain.

    Returns:
        Ranks of the row in a domain, and the number of domains that it spans.
    """
    members = np.asarray(np.clip(part // step, 1, ranks))
    spanned = -((part - ranks * step - whole) // np.int64(whole))
    return members, np.where(members == ranks, 1, np.clip(spanned, 2, np.maximum(ranks, 2)))


def same_rail(hardware: HardwareSpec, distance: Numbers) -> BoolArray:
    """Check that ranks at a distance have equal positions in their domains (for at least one segment)."""
    segments = hardware.scale_up.segments or (hardware.scale_up.num_gpus,)
    return np.asarray(np.logical_or.reduce([np.asarray(distance) % segment == 0 for segment in segments]))


def neighbours_share(
    hardware: HardwareSpec, size: IntArray, stride: IntArray, usual_stride: IntArray
) -> tuple[BoolArray, BoolArray | None]:
    """Find the groups whose transfers to the next rank stay inside a domain, and inside a pod.

    They do if all ranks of the group are in a single domain (pod). Groups with the stride of the usual rank order
    also count as inside if 2 * stride <= D (``collectives.p2p_s``). This is a lower bound for their ranks at the
    edge, so that no other order is preferred only because its price is lower.

    Returns:
        Two masks [n]: inside a domain, and inside a pod (None without pods).
    """
    place, is_usual = group_place(hardware, size, stride), stride == usual_stride
    inside = np.where(is_usual, 2 * stride <= hardware.scale_up.num_gpus, place.members == size)
    if hardware.pods is None or place.beyond is None:
        return inside, None
    return inside, np.where(is_usual, 2 * stride <= hardware.pods.num_gpus, place.beyond.pods == 1)
