"""Communication of tensor parallelism around a pair of linear layers, and what of it runs beside their products.

Source: Korthikanti et al. 2022 figure 5; Megatron-LM core/tensor_parallel/layers.py. In tiles
(``Layout.tp_overlap``): Wang et al. 2023, "Overlap communication with dependent computation via decomposition"
(ASPLOS); Transformer Engine's userbuffers (pytorch/csrc/extensions/comm_gemm_overlap.cpp), which Megatron-LM calls
with ``--tp-comm-overlap``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from milpplan.problem.plan import TP_OVERLAPS
from milpplan.simulation.layers.launch_overhead import call_s
from milpplan.simulation.layers.shard import BF16_BYTES, Product, Shard
from milpplan.simulation.layers.tally import Part, Phase, Tally
from milpplan.simulation.layout_columns import BoolArray, FloatArray
from milpplan.simulation.network import collectives, placement

NONE, PIPELINED = TP_OVERLAPS.index("none"), TP_OVERLAPS.index("pipelined")
PARTS = (Part.TP, Part.TP_HIDDEN)


def linear_pair(shard: Shard, tally: Tally, columns: Sequence[Product], row: Product) -> None:
    """Tensor-parallel communication of column-parallel linear layers followed by a row-parallel one.

    With sequence parallelism: all-gather before, reduce-scatter after; backward: the output gradient is
    all-gathered (exposed), the input is gathered again beside the input-gradient product (unless it was kept) and
    the input gradient is reduce-scattered beside the weight-gradient product. Without: one all-reduce after, and
    in the backward one all-reduce beside the weight-gradient product. Where weight gradients run by themselves,
    nothing is left to hide the input gradient's reduction, and the input is gathered beside the weight gradients
    (sail-sg/zero-bubble-pipeline-parallelism, core/tensor_parallel/layers.py).
    """
    hardware, sp = shard.problem.hardware, shard.columns.sequence_parallel
    message = BF16_BYTES * shard.tokens * shard.hidden
    group = placement.tensor(shard.columns)
    gather = collectives.all_gather_s(hardware, shard.gathered_bytes, *group)
    scatter = collectives.reduce_scatter_s(hardware, message, *group)
    reduce = collectives.all_reduce_s(hardware, message, *group)
    none = np.zeros_like(shard.tokens)
    share = collectives.processor_fraction(hardware, *group)
    again = shard.columns.gather_again
    late = np.where(sp & again, 1, 0)
    tally.calls(np.where(sp, 2, 1), np.where(sp, 2, 1) + late, call_s(hardware, *group), weight=late)
    if shard.columns.any_of("tp_overlap"):
        in_tiles = _Tiles(shard, tally, share)
        in_tiles.beside(Phase.FORWARD, np.where(sp, gather, none), columns)
        in_tiles.beside(Phase.FORWARD, np.where(sp, scatter, reduce), (row,))
        in_tiles.beside(Phase.BACKWARD, np.where(sp, gather, none), (row,))
    else:
        tally.exposed(Part.TP, Phase.FORWARD, np.where(sp, gather + scatter, reduce))
        tally.exposed(Part.TP, Phase.BACKWARD, np.where(sp, gather, none))
    dgrad, wgrad = columns[0].dgrad, columns[0].wgrad
    for other in columns[1:]:
        dgrad, wgrad = dgrad + other.dgrad, wgrad + other.wgrad
    beside = 1.0 if hardware.software.overlap_tensor_parallel else 0.0
    second, reduced = np.where(sp & again, gather, none), np.where(sp, scatter, reduce)
    if tally.any_split:
        tally.exposed(Part.TP, Phase.BACKWARD, np.where(tally.split, reduced, 0.0))
        tally.overlapped(PARTS, Phase.WEIGHT, np.where(tally.split, second, 0.0), beside * wgrad, share)
        second, reduced = (np.where(tally.split, 0.0, seconds) for seconds in (second, reduced))
    tally.overlapped(PARTS, Phase.BACKWARD, second, beside * dgrad, share)
    tally.overlapped(PARTS, Phase.BACKWARD, reduced, beside * wgrad, share)
    if shard.problem.job.attention_kernel == "flash":
        # Selective recomputation drops the inputs: what was to be kept gathered is gathered again after all.
        replayed = np.where(sp & ~again, gather, none)
        tally.overlapped(PARTS, Phase.SELECTIVE, replayed, beside * dgrad, share)


class _Tiles:
    """Communication in tiles beside the tiles of its own product, where a layout asks for it."""

    def __init__(self, shard: Shard, tally: Tally, share: FloatArray) -> None:
        self.shard, self.tally, self.share = shard, tally, share
        self.chosen: BoolArray = (shard.columns.tp_overlap != NONE) & (shard.columns.tp > 1)
        self.tiles = np.where(self.chosen, shard.tp, 1.0)

    def beside(self, phase: Phase, seconds: FloatArray, products: Sequence[Product]) -> None:
        """Add communication of ``seconds`` beside its products (forwards, or input gradients backward), and what
        cutting these into tiles adds to them."""
        forward = phase == Phase.FORWARD
        whole, tile = np.zeros_like(seconds), np.zeros_like(seconds)
        for product in products:
            tokens, width, inner = product.size
            part = self.shard.gemm(tokens / self.tiles, width, inner)
            whole = whole + (product.forward if forward else product.dgrad)
            tile = tile + (part.forward if forward else part.dgrad)
        added = np.where(self.chosen & (seconds > 0), self.tiles * tile - whole, 0.0)
        self.tally.seconds[Part.COMPUTE, phase] += added
        pipelined = self.shard.columns.tp_overlap == PIPELINED
        exposed, hidden = collectives.tiled_overlap_s(seconds, whole + added, self.tiles, self.share, pipelined)
        self.tally.seconds[Part.TP, phase] += exposed
        self.tally.seconds[Part.TP_HIDDEN, phase] += hidden
