"""What a library's checks of a collective cost the host before the collective starts."""

from __future__ import annotations

import numpy as np

from milpplan.problem.hardware import HardwareSpec
from milpplan.simulation.layers.kernels import Numbers
from milpplan.simulation.layout_columns import FloatArray
from milpplan.simulation.network.domains import group_place


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


def far_s(hardware: HardwareSpec, pair_s: Numbers, size: Numbers, stride: Numbers) -> FloatArray:
    """Seconds of what a tensor-parallel group of ``size`` ranks ``stride`` apart in d domains takes outside its
    layers: ``pair_s`` d (d - 1) / 2, nothing in one domain; any shapes that broadcast.

    The law is fitted, not derived: besides bytes and hops nanotron's steps take 11 ms a micro-batch and 71 ms a
    step where tensor parallelism spans two nodes, 91 and 395 where it spans four (docs/accuracy.md).
    """
    if not np.any(pair_s):
        return np.zeros(np.broadcast(size, stride, pair_s).shape)
    domains = group_place(hardware, size, stride).domains
    return np.asarray(pair_s * (domains * (domains - 1) / 2.0))
