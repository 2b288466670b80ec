"""What a library's checks of a collective cost the host before the collective starts."""

from __future__ import annotations

import numpy as np

from milpplan.costs.columns import FloatArray
from milpplan.costs.compute import Numbers
from milpplan.costs.domains import group_place
from milpplan.specs.hardware import HardwareSpec


def call_s(
    hardware: HardwareSpec, size: Numbers, stride: Numbers, blocks: Numbers = 1, block_stride: Numbers = 1
) -> FloatArray:
    """Host seconds of one call of a collective among ``size`` ranks ``stride`` apart, or among ``blocks`` such
    rows ``block_stride`` apart; any shapes that broadcast.

    c + k (n - 1) + f (n - d) for n ranks, of which d share the caller's domain; nothing for n = 1. c, k and f are
    ``collective_call_s``, ``collective_rank_s`` and ``collective_far_rank_s`` of the software, 0 by default.
    Source: nanotron's benchmark sweeps (docs/accuracy.md), whose layers take this however small their messages.
    """
    software = hardware.software
    ranks = np.asarray(size) * np.asarray(blocks)
    if not (software.collective_call_s or software.collective_rank_s or software.collective_far_rank_s):
        return np.zeros(np.broadcast(ranks, stride, block_stride).shape)
    near = group_place(hardware, size, stride, blocks, block_stride).members
    seconds = software.collective_call_s + software.collective_rank_s * (ranks - 1)
    seconds = seconds + software.collective_far_rank_s * (ranks - near)
    return np.where(ranks > 1, seconds, 0.0)
