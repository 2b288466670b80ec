"""Placement of the ranks of a layout: size and stride of every process group, for any order of the degrees.

Accelerators are numbered through the domains, 0 .. num_gpus - 1. With the order a-b-c-d the rank with coordinates
(i, j, k, l) is i + a (j + b (k + c l)): a degree's stride is the product of the degrees inside it. Experts have
their own grid over the same ranks: etp replaces tp, ep and the experts' replicas replace dp (ep inside), and there
is no cp.
Source: Megatron-LM core/parallel_state.py at d98e8a64, RankGenerator and initialize_model_parallel (``order``).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from milpplan.problem import RANK_ORDERS
from milpplan.simulation import BoolArray, IntArray, LayoutColumns

AXES = ("tp", "cp", "dp", "pp")


class RankGroup(NamedTuple):
    """Groups of ``blocks`` rows, ``block_stride`` apart, each of ``size`` ranks ``stride`` apart; arrays [n].

    ``blocks`` is above 1 only where another degree separates two degrees that form a group. ``block_stride`` is a
    multiple of ``size * stride`` then.
    """

    size: IntArray
    stride: IntArray
    blocks: IntArray
    block_stride: IntArray

    @property
    def num_ranks(self) -> IntArray:
        """Ranks of a group."""
        return self.size * self.blocks

    def first(self, count: IntArray) -> RankGroup:
        """Split into groups of ``count`` neighbours; ``count`` divides the ranks of a group.

        If neither of ``count`` and ``size`` divides the other, rows have the length of their greatest common
        divisor: an upper bound of the distance.
        """
        inner = np.gcd(count, self.size)
        return RankGroup(inner, self.stride, count // inner, self.block_stride)

    def apart(self, count: IntArray) -> RankGroup:
        """Split into groups of every ``count``-th rank, whose ranks hold the same shares."""
        nests, rows = self.size % count == 0, np.maximum(count // self.size, 1)
        return RankGroup(
            np.where(nests, self.size // count, self.num_ranks // count),
            np.where(nests, self.stride * count, self.block_stride * rows),
            np.where(nests, self.blocks, 1),
            self.block_stride,
        )


def _inside_table() -> BoolArray:
    """Tabulate the orders, [order, a, b]: True if degree b stands inside degree a."""
    table = np.zeros((len(RANK_ORDERS), len(AXES), len(AXES)), dtype=np.bool_)
    for number, order in enumerate(RANK_ORDERS):
        names = order.split("-")
        for a, outer in enumerate(AXES):
            for b, inner in enumerate(AXES):
                table[number, a, b] = names.index(inner) < names.index(outer)
    return table


_INSIDE = _inside_table()


def _inside(columns: Mapping[str, IntArray], axis: str, other: str) -> BoolArray:
    """Find the layouts whose degree ``other`` stands inside ``axis``, [n]."""
    return np.asarray(_INSIDE[columns["rank_order"], AXES.index(axis), AXES.index(other)])


def _stride(columns: Mapping[str, IntArray], axis: str, sizes: Mapping[str, IntArray]) -> IntArray:
    """Multiply the sizes that stand inside a degree, [n]."""
    result = np.ones_like(columns["rank_order"])
    for other, size in sizes.items():
        if other != axis:
            result = result * np.where(_inside(columns, axis, other), size, 1)
    return result


def _dense(columns: Mapping[str, IntArray]) -> dict[str, IntArray]:
    """Return the sizes of the grid of dense layers."""
    return {axis: columns[axis] for axis in AXES}


def _experts(columns: Mapping[str, IntArray]) -> dict[str, IntArray]:
    """Return the sizes of the experts' grid; ep and the experts' replicas together replace dp."""
    shared = columns["tp"] * columns["cp"] * columns["dp"] // columns["etp"]
    return {"tp": columns["etp"], "dp": shared, "pp": columns["pp"]}


def _row(size: IntArray, stride: IntArray) -> RankGroup:
    """Make groups of a single row."""
    ones = np.ones_like(size)
    return RankGroup(size, stride, ones, ones)


def tensor(columns: LayoutColumns) -> RankGroup:
    """Place the tensor-parallel groups."""
    c = columns.mapping
    return _row(columns.tp, _stride(c, "tp", _dense(c)))


def context(columns: LayoutColumns) -> RankGroup:
    """Place the context-parallel groups."""
    c = columns.mapping
    return _row(columns.cp, _stride(c, "cp", _dense(c)))


def head_exchange(columns: LayoutColumns) -> RankGroup:
    """Place the groups of ``ulysses`` neighbours in a context-parallel group that exchange heads.

    Source: Megatron-LM core/parallel_state.py, create_hierarchical_groups.
    """
    return context(columns).first(columns.ulysses)


def context_ring(columns: LayoutColumns) -> RankGroup:
    """Place the rings of the ranks that hold the same heads of a context-parallel group."""
    return context(columns).apart(columns.ulysses)


def pipeline(columns: LayoutColumns) -> RankGroup:
    """Place the pipelines; the stride is the distance of neighbouring stages."""
    c = columns.mapping
    return _row(columns.pp, _stride(c, "pp", _dense(c)))


def replicas(columns: LayoutColumns) -> RankGroup:
    """Place the groups of cp * dp ranks with the same dense weights.

    They have several rows if another degree separates cp and dp.
    """
    c = columns.mapping
    cp_inside = _inside(c, "dp", "cp")
    cp_stride, dp_stride = (_stride(c, axis, _dense(c)) for axis in ("cp", "dp"))
    size, blocks = np.where(cp_inside, c["cp"], c["dp"]), np.where(cp_inside, c["dp"], c["cp"])
    stride, row_stride = np.where(cp_inside, cp_stride, dp_stride), np.where(cp_inside, dp_stride, cp_stride)
    is_row = (size == 1) | (blocks == 1) | (row_stride == size * stride)
    return RankGroup(
        np.where(is_row, size * blocks, size),
        np.where(size == 1, row_stride, stride),
        np.where(is_row, 1, blocks),
        np.where(is_row, 1, row_stride),
    )


def expert_tensor(columns: LayoutColumns) -> RankGroup:
    """Place the groups that share each expert (etp)."""
    c = columns.mapping
    return _row(columns.etp, _stride(c, "tp", _experts(c)))


def expert(columns: LayoutColumns) -> RankGroup:
    """Place the groups over which the experts are spread (ep)."""
    c = columns.mapping
    return _row(columns.ep, _stride(c, "dp", _experts(c)))


def expert_replicas(columns: LayoutColumns) -> RankGroup:
    """Place the groups of ranks with the same experts' weights."""
    c = columns.mapping
    return _row(columns.expert_dp, _stride(c, "dp", _experts(c)) * columns.ep)


def stages_agree(columns: Mapping[str, IntArray]) -> BoolArray:
    """Check that both grids give every pipeline stage the same ranks, [n]: the strides of pp are equal.

    Source: Megatron-LM core/parallel_state.py, initialize_model_parallel, "Pipeline parallel groups are expected
    to be the same for Non-Expert and Expert part".
    """
    dense, experts = (_stride(columns, "pp", sizes) for sizes in (_dense(columns), _experts(columns)))
    return np.asarray((columns["pp"] == 1) | (dense == experts))


def stages_are_blocks(columns: Mapping[str, IntArray]) -> BoolArray:
    """Check that the ranks of every pipeline stage are consecutive, [n]."""
    stride = _stride(columns, "pp", _dense(columns))
    return np.asarray(stride == columns["tp"] * columns["cp"] * columns["dp"])


def pp_is_last(columns: Mapping[str, IntArray]) -> BoolArray:
    """Check that the pipeline is the outermost degree, [n]."""
    last = np.array([order.endswith("pp") for order in RANK_ORDERS])
    return np.asarray(last[columns["rank_order"]])


def _bits(sizes: Mapping[str, IntArray]) -> IntArray:
    """Encode the degrees above 1 as the bits of a number, [n]."""
    bits = [(size > 1).astype(np.int64) << AXES.index(axis) for axis, size in sizes.items()]
    return np.asarray(np.sum(bits, axis=0))


@lru_cache(maxsize=16)
def _first_alike(offered: tuple[int, ...]) -> IntArray:
    """Tabulate the first offered order that arranges the degrees above 1 in the same way, [order, dense, experts].

    ``dense`` and ``experts`` are the ``_bits`` of the two grids.
    """
    count = 2 ** len(AXES)
    subsets = [[axis for bit, axis in enumerate(AXES) if mask >> bit & 1] for mask in range(count)]
    arrangements = [
        [tuple(name for name in order.split("-") if name in subset) for subset in subsets] for order in RANK_ORDERS
    ]
    table = np.zeros((len(RANK_ORDERS), count, count), dtype=np.int64)
    for number, dense, experts in np.ndindex(table.shape):
        wanted = arrangements[number][dense], arrangements[number][experts]
        alike = (o for o in offered if (arrangements[o][dense], arrangements[o][experts]) == wanted)
        table[number, dense, experts] = next(alike, number)
    return table


def is_first_alike(columns: Mapping[str, IntArray], offered: tuple[int, ...], has_experts: bool) -> BoolArray:
    """Check that no earlier order of ``offered`` gives a layout the same strides, [n].

    The position of a degree of 1 does not matter.
    """
    dense, order = _bits(_dense(columns)), columns["rank_order"]
    experts = _bits(_experts(columns)) if has_experts else np.zeros_like(dense)
    return np.asarray(_first_alike(offered)[order, dense, experts] == order)
