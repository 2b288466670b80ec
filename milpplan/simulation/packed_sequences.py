"""Micro-batches of sequences of several lengths, packed one after another without padding.

A layer sees a packed micro-batch as so many tokens, but for its attention, which every sequence has to itself
(flash attention with variable lengths: one kernel over all sequences). So a micro-batch is given by its tokens and
by the seconds of its attention kernels: the sum over its sequences, and once a kernel its latency and what its
last tiles waste, those of its longest sequence. Of equal sequences this is what ``layer_seconds`` says, to
rounding.

Tokens come in whole ``grains``: a problem whose sequences are one grain long, with as many of them in a
micro-batch as it has grains, has the same layers, ends, transfers and memory. Source: FlashAttention-2 (Dao 2023);
packing with per-sequence attention: Transformer Engine's THD layout (pytorch/attention), which Megatron-LM calls
with packed sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from milpplan.problem.model import LayerRun
from milpplan.problem.plan import Layout
from milpplan.problem.problem import Problem
from milpplan.simulation.layers.embedding_and_head import embedding_endpoint, head_endpoint
from milpplan.simulation.layers.kernels import Mask
from milpplan.simulation.layers.layer_time import Shard, flash_core_s, layer_seconds
from milpplan.simulation.layers.terms import EXPOSED, Part, Phase
from milpplan.simulation.layout_columns import FloatArray, IntArray, LayoutColumns
from milpplan.simulation.network.stage_transfers import transfer_s
from milpplan.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class SequenceCores:
    """Attention of one layer on one rank, by length, forward and backward: ``sequence_s`` [2, n] what a sequence
    adds to a kernel, ``once_s`` [2, n] what a kernel takes once if that is its longest."""

    sequence_s: FloatArray
    once_s: FloatArray


def sequence_cores(
    problem: Problem, kind: LayerRun, layout: Layout, lengths: IntArray, mask: Mask = "causal"
) -> SequenceCores:
    """Attention of ``lengths`` [n] under a layout. A longer sequence's last tiles take no less, but where windows
    cut what a query attends to."""
    shard = Shard.of(problem, LayoutColumns.of([layout]))
    cp = shard.columns.cp
    latency_s = problem.hardware.accelerator.kernel_latency_s
    whole = flash_core_s(shard, kind.attention, lengths, lengths / cp, 0, mask)
    once = flash_core_s(shard, kind.attention, lengths, np.zeros(len(lengths)), cp, mask)
    return SequenceCores(np.stack(whole) - latency_s, np.stack(once))


@dataclass(frozen=True, slots=True)
class PackedTimes:
    """Nanoseconds of m micro-batches on one rank, exposed communication included: ``layer`` [K, Part, Phase, m] of
    one layer of each kind, ``ends`` [2, 2, m] (embedding and head, forward and backward), ``transfer`` [m]."""

    layer: IntArray
    ends: IntArray
    transfer: IntArray

    def phases(self, *, launches: bool = True) -> IntArray:
        """A layer's time by phase [K, Phase, m]; without ``launches`` what the host delays is left out."""
        parts = [part for part in range(EXPOSED.stop) if launches or part != Part.LAUNCH]
        found = self.layer[:, parts].sum(axis=1)
        if not launches:
            # The replay of a whole layer repeats the waits of its forward.
            found[:, Phase.FULL] = found[:, Phase.FORWARD]
        return np.asarray(found)

    def part(self, chosen: slice) -> PackedTimes:
        """Those of some micro-batches."""
        return PackedTimes(self.layer[..., chosen], self.ends[..., chosen], self.transfer[chosen])


def packed_times(problem: Problem, layout: Layout, grains: IntArray, cores: FloatArray) -> PackedTimes:
    """Times of micro-batches of ``grains`` [m] grains with ``cores`` [K, 2, m] seconds of attention.

    ``problem``: one whose sequence length is a grain.
    """
    return packed_times_of(problem, [layout], np.zeros(len(grains), dtype=np.int64), grains, cores)


def packed_times_of(
    problem: Problem, layouts: Sequence[Layout], rows: IntArray, grains: IntArray, cores: FloatArray
) -> PackedTimes:
    """``packed_times`` of micro-batches each under the layout of its row [m]: many layouts in one go."""
    one = LayoutColumns.of(list(layouts)).take(rows)
    columns = replace(one, micro_batch_size=np.asarray(grains, dtype=np.int64))
    layers = [
        layer_seconds(problem, kind, columns, (core[0], core[1]))
        for kind, core in zip(problem.model.kinds, cores, strict=True)
    ]
    ends = [end(problem, columns).seconds for end in (embedding_endpoint, head_endpoint)]
    by_phase = [whole_ns(seconds)[EXPOSED].sum(axis=0) for seconds in ends]
    return PackedTimes(whole_ns(np.stack(layers)), np.stack(by_phase), whole_ns(transfer_s(problem, columns)))


def whole_ns(seconds: FloatArray) -> IntArray:
    """Whole nanoseconds, rounded as ``layout_costs`` rounds them."""
    return np.rint(seconds * NS_PER_S).astype(np.int64)
