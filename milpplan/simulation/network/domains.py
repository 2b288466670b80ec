"""Where the ranks of a process group lie: how many share a scale-up domain, and how many domains they touch.

A domain holds ranks [i * D, (i + 1) * D); a group with stride t holds ranks r, r + t, r + 2 t, ...
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from milpplan.problem.hardware import HardwareSpec
from milpplan.simulation.layers.kernels import Numbers
from milpplan.simulation.layout_columns import BoolArray, IntArray


class PodPlace(NamedTuple):
    """Where the ranks of groups are among pods, counted as ``members`` and ``domains`` are."""

    members: IntArray
    """Ranks of the group in one pod."""
    pods: IntArray
    """Pods the group touches."""


class GroupPlace(NamedTuple):
    """Where the ranks of groups are, all of one shape: the worst of them counts."""

    size: IntArray
    members: IntArray
    """Ranks of the group in one domain, the fewest over domains and groups."""
    domains: IntArray
    """Domains the group touches, the most over groups."""
    one_rail: BoolArray
    """Whether its ranks have the same places in all domains that it touches."""
    beyond: PodPlace | None = None
    """None where the hardware has no pods."""


def _smallest_part(hardware: HardwareSpec, block: IntArray) -> IntArray:
    """Fewest consecutive ranks that a block of ranks has in one domain, with the best of the segments."""
    segments = hardware.scale_up.segments or (hardware.scale_up.num_gpus,)
    parts = [np.gcd(block, np.int64(segment)) for segment in segments]
    return np.asarray(np.maximum.reduce(parts))


def group_place(
    hardware: HardwareSpec, size: Numbers, stride: Numbers, blocks: Numbers = 1, block_stride: Numbers = 1
) -> GroupPlace:
    """Members and domains of groups of ``size`` ranks ``stride`` apart, or of ``blocks`` such rows.

    Members as ``collectives.members_per_domain`` says; domains = ceil((size * stride + D - part) / D), at most
    ``size``, of one row; of several those of the rows, or of each row times their number.
    """
    row = _row(hardware, np.asarray(size, dtype=np.int64), np.asarray(stride, dtype=np.int64))
    number, apart = np.asarray(blocks, dtype=np.int64), np.asarray(block_stride, dtype=np.int64)
    if (number == 1).all():
        return row
    column = _row(hardware, number, apart)
    size, beyond = row.size * number, None
    members, domains = _rows(row.size, number, (row.members, row.domains), (column.members, column.domains))
    if row.beyond is not None and column.beyond is not None:
        beyond = PodPlace(*_rows(row.size, number, row.beyond, column.beyond))
    return GroupPlace(size, members, domains, row.one_rail & column.one_rail, beyond)


def _rows(
    size: IntArray, number: IntArray, row: tuple[IntArray, IntArray], column: tuple[IntArray, IntArray]
) -> tuple[IntArray, IntArray]:
    """(members, parts) of ``number`` rows of ``size`` ranks, from those of a row and of the rows' first ranks."""
    together = column[0] > 1
    members = np.where(together, size * column[0], row[0])
    return members, np.where(together, column[1], np.minimum(column[1] * row[1], size * number))


def _row(hardware: HardwareSpec, size: IntArray, step: IntArray) -> GroupPlace:
    """Groups of ``size`` ranks ``step`` apart."""
    block = size * step
    ranks = block // step
    members, domains = _parts(ranks, step, _smallest_part(hardware, block), hardware.scale_up.num_gpus)
    beyond = None
    if hardware.pods is not None:
        pod = np.int64(hardware.pods.num_gpus)
        beyond = PodPlace(*_parts(ranks, step, np.gcd(block, pod), hardware.pods.num_gpus))
    if hardware.scale_out.rails is None:
        return GroupPlace(ranks, members, domains, np.ones_like(ranks, dtype=np.bool_), beyond)
    # A rank's neighbour in the next domain has its place if a whole number of strides leads there.
    one_rail = (domains == 1) | same_rail(hardware, members * step)
    return GroupPlace(ranks, members, domains, one_rail, beyond)


def _parts(ranks: IntArray, step: IntArray, part: IntArray, whole: int) -> tuple[IntArray, IntArray]:
    """(members, parts): ranks of a row in a domain (a pod) of ``whole`` ranks, of which ``part`` neighbours at
    least belong to it, and how many of these it touches."""
    members = np.asarray(np.clip(part // step, 1, ranks))
    touched = -((part - ranks * step - whole) // np.int64(whole))
    return members, np.where(members == ranks, 1, np.clip(touched, 2, np.maximum(ranks, 2)))


def same_rail(hardware: HardwareSpec, distance: Numbers) -> BoolArray:
    """Whether ranks so far apart have the same place in their domains (in one of the segments)."""
    segments = hardware.scale_up.segments or (hardware.scale_up.num_gpus,)
    return np.asarray(np.logical_or.reduce([np.asarray(distance) % segment == 0 for segment in segments]))


def neighbours_share(
    hardware: HardwareSpec, size: IntArray, stride: IntArray, usual_stride: IntArray
) -> tuple[BoolArray, BoolArray | None]:
    """Whether a transfer from one rank to the next of a group stays inside a domain, and inside a pod (None where
    there are none), [n].

    Where all ranks of the group are in one of them. Groups with the stride of the usual order count as inside
    where 2 * stride <= D (``collectives.p2p_s``): a lower bound for their ranks at the edge, so another order is
    never preferred for what is only said of it.
    """
    place, usual = group_place(hardware, size, stride), stride == usual_stride
    near = np.where(usual, 2 * stride <= hardware.scale_up.num_gpus, place.members == size)
    if hardware.pods is None or place.beyond is None:
        return near, None
    return near, np.where(usual, 2 * stride <= hardware.pods.num_gpus, place.beyond.pods == 1)
