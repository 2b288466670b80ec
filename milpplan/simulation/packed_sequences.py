"""Times of micro-batches with sequences of several lengths, packed without padding.

The operators of a layer depend on the number of tokens of a micro-batch, except attention, which treats every
sequence separately (flash attention with variable lengths: a single kernel over all sequences). So a micro-batch
is described by its tokens and by the seconds of its attention kernels. These seconds are a sum over its sequences,
plus the latency and the last tiles of each kernel, which are those of its longest sequence. For equal sequences
the result equals ``layer_seconds`` up to rounding.

Tokens come in token quanta (``grains``): a problem whose sequences have the length of a quantum, with as many
sequences in a micro-batch as the micro-batch has quanta, has the same layers, ends, transfers and memory.
Source: FlashAttention-2 (Dao 2023); packing with per-sequence attention: Transformer Engine's THD layout
(pytorch/attention), which Megatron-LM calls with packed sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from milpplan.problem import LayerRun, Layout, LinearRecurrence, NoBlock, Problem
from milpplan.simulation.layers import (
    EXPOSED,
    Part,
    Phase,
    Shard,
    embedding_endpoint,
    flash_core_s,
    head_endpoint,
    layer_seconds,
)
from milpplan.simulation.layers.kernels import Mask
from milpplan.simulation.layers.recurrence import scan_s
from milpplan.simulation.layout_columns import FloatArray, IntArray, LayoutColumns
from milpplan.simulation.layout_costs import whole_ns
from milpplan.simulation.network import transfer_s


@dataclass(frozen=True, slots=True)
class SequenceCores:
    """Attention times of one layer on one rank, by sequence length, (forward, backward)."""

    sequence_s: FloatArray
    """[2, n] seconds that a sequence adds to a kernel."""
    once_s: FloatArray
    """[2, n] seconds that a kernel takes once if its longest sequence has this length."""


def sequence_cores(
    problem: Problem, kind: LayerRun, layout: Layout, lengths: IntArray, mask: Mask = "causal"
) -> SequenceCores:
    """Time the attention of sequences of ``lengths`` [n] under a layout.

    The last tiles of a longer sequence take at least as long, unless a window limits the keys of a query.
    """
    shard = Shard.of(problem, LayoutColumns.of([layout]))
    cp, mixer, none = shard.columns.cp, kind.attention, np.zeros(len(lengths))
    gpu = problem.hardware.accelerator
    latency_s = gpu.kernel_latency_s
    if isinstance(mixer, NoBlock):
        return SequenceCores(np.stack([none, none]), np.stack([none, none]))
    if isinstance(mixer, LinearRecurrence):
        sequence = scan_s(gpu, mixer, lengths / cp, shard.tp, none)
        once = scan_s(gpu, mixer, none, shard.tp, lengths)
    else:
        sequence = flash_core_s(shard, mixer, lengths, lengths / cp, 0, mask)
        once = flash_core_s(shard, mixer, lengths, none, cp, mask)
    return SequenceCores(np.stack(sequence) - latency_s, np.stack(once))


@dataclass(frozen=True, slots=True)
class PackedTimes:
    """Times of m micro-batches on one rank in nanoseconds, with exposed communication."""

    layer: IntArray
    """[K, Part, Phase, m] a layer of each kind."""
    ends: IntArray
    """[2, 2, m] (embedding, head) by (forward, backward)."""
    transfer: IntArray
    """[m] transfer between stages."""

    def phases(self, *, launches: bool = True) -> IntArray:
        """Sum a layer's time by phase [K, Phase, m], with or without the waits for kernel launches."""
        parts = [part for part in range(EXPOSED.stop) if launches or part != Part.LAUNCH]
        times = self.layer[:, parts].sum(axis=1)
        if not launches:
            # The replay of a whole layer repeats the waits of its forward.
            times[:, Phase.FULL] = times[:, Phase.FORWARD]
        return np.asarray(times)

    def part(self, chosen: slice) -> PackedTimes:
        """Select micro-batches."""
        return PackedTimes(self.layer[..., chosen], self.ends[..., chosen], self.transfer[chosen])


def packed_times(problem: Problem, layout: Layout, grains: IntArray, cores: FloatArray) -> PackedTimes:
    """Time packed micro-batches under one layout.

    Args:
        problem: problem whose sequence length is a token quantum.
        layout: layout of the micro-batches.
        grains: [m] token quanta of each micro-batch.
        cores: [K, 2, m] seconds of attention, forward and backward.
    """
    return packed_times_of(problem, [layout], np.zeros(len(grains), dtype=np.int64), grains, cores)


def packed_times_of(
    problem: Problem, layouts: Sequence[Layout], rows: IntArray, grains: IntArray, cores: FloatArray
) -> PackedTimes:
    """Time packed micro-batches under several layouts (see ``packed_times``); ``rows`` [m] index ``layouts``."""
    by_micro_batch = LayoutColumns.of(list(layouts)).take(rows)
    columns = replace(by_micro_batch, micro_batch_size=np.asarray(grains, dtype=np.int64))
    layers = [
        layer_seconds(problem, kind, columns, (core[0], core[1]))
        for kind, core in zip(problem.model.kinds, cores, strict=True)
    ]
    ends = [end(problem, columns).seconds for end in (embedding_endpoint, head_endpoint)]
    by_phase = [whole_ns(seconds)[EXPOSED].sum(axis=0) for seconds in ends]
    return PackedTimes(whole_ns(np.stack(layers)), np.stack(by_phase), whole_ns(transfer_s(problem, columns)))
