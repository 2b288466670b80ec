"""Where the ranks of a process group lie: how many share a scale-up domain, and how many domains they touch.

A domain holds ranks [i * D, (i + 1) * D); a group with stride t holds ranks r, r + t, r + 2 t, ...
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from milpplan.costs.columns import BoolArray, IntArray
from milpplan.costs.compute import Numbers
from milpplan.specs.hardware import HardwareSpec


class GroupPlace(NamedTuple):
    """Where the ranks of groups are, all of one shape: the worst of them counts."""

    size: IntArray
    members: IntArray
    """Ranks of the group in one domain, the fewest over domains and groups."""
    domains: IntArray
    """Domains the group touches, the most over groups."""
    one_rail: BoolArray
    """Whether its ranks have the same places in all domains that it touches."""


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
    together = column.members > 1
    members = np.where(together, row.size * column.members, row.members)
    domains = np.where(together, column.domains, np.minimum(column.domains * row.domains, row.size * number))
    return GroupPlace(row.size * number, members, domains, row.one_rail & column.one_rail)


def _row(hardware: HardwareSpec, size: IntArray, step: IntArray) -> GroupPlace:
    """Groups of ``size`` ranks ``step`` apart."""
    block = size * step
    ranks = block // step
    domain = np.int64(hardware.scale_up.num_gpus)
    part = _smallest_part(hardware, block)
    members = np.asarray(np.clip(part // step, 1, ranks))
    touched = -((part - block - domain) // domain)
    domains = np.where(members == ranks, 1, np.clip(touched, 2, np.maximum(ranks, 2)))
    if hardware.scale_out.rails is None:
        return GroupPlace(ranks, members, domains, np.ones_like(ranks, dtype=np.bool_))
    # A rank's neighbour in the next domain has its place if a whole number of strides leads there.
    one_rail = (domains == 1) | same_rail(hardware, members * step)
    return GroupPlace(ranks, members, domains, one_rail)


def same_rail(hardware: HardwareSpec, distance: Numbers) -> BoolArray:
    """Whether ranks so far apart have the same place in their domains (in one of the segments)."""
    segments = hardware.scale_up.segments or (hardware.scale_up.num_gpus,)
    return np.asarray(np.logical_or.reduce([np.asarray(distance) % segment == 0 for segment in segments]))


def neighbours_share_domain(
    hardware: HardwareSpec, size: IntArray, stride: IntArray, usual_stride: IntArray
) -> BoolArray:
    """Whether a transfer from one rank to the next of a group stays inside a domain, [n].

    Where all ranks of the group are in one domain. Groups with the stride of the usual order count as inside where
    2 * stride <= D (``collectives.p2p_s``): a lower bound for their ranks at the edge, so another order is never
    preferred for what is only said of it.
    """
    place = group_place(hardware, size, stride)
    usual = (stride == usual_stride) & (2 * stride <= hardware.scale_up.num_gpus)
    return np.asarray(usual | ((stride != usual_stride) & (place.members == place.size)))
