"""Placement of the ranks of a layout: size and stride of every process group, for any order of the degrees.

Accelerators are numbered through the domains, 0 .. num_gpus - 1. With the order a-b-c-d the rank with coordinates
(i, j, k, l) is i + a (j + b (k + c l)): a degree's stride is the product of the degrees inside it. Experts have
their own grid over the same ranks: etp replaces tp, ep and the experts' replicas replace dp (ep inside), and there
is no cp.
Source: Megatron-LM core/parallel_state.py at d98e8a64, RankGenerator and initialize_model_parallel (``order``).

A scale-up domain holds ranks [i * D, (i + 1) * D); a group with stride t holds ranks r, r + t, r + 2 t, ... A ring
across pods, the third tier, uses the links of a domain, the network between the domains of a pod, and the network
between pods, each only if the group has neighbours there. The slowest of these tiers sets its rate. A group with a
single domain in each pod does not use the network inside pods. ``GroupPlace`` holds the position of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from milpplan.problem import RANK_ORDERS, HardwareSpec
from milpplan.simulation import BoolArray, FloatArray, IntArray, LayoutColumns
from milpplan.simulation.layers.kernels import Numbers


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
    # Minimum number of ranks that a block of consecutive ranks has in a domain, for the best segment.
    segments = hardware.scale_up.segments or (hardware.scale_up.num_gpus,)
    part = np.gcd(block[..., None], segments).max(axis=-1)
    members, domains = _parts(ranks, step, part, hardware.scale_up.num_gpus)
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
    return np.asarray((np.asarray(distance)[..., None] % segments == 0).any(axis=-1))


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


def leaves_pod(group: GroupPlace) -> BoolArray:
    """Check that groups have ranks in several pods."""
    return np.zeros(np.shape(group.size), dtype=np.bool_) if group.beyond is None else group.beyond.pods > 1


def passes_network(group: GroupPlace) -> BoolArray:
    """Check that groups have ranks in several domains of a pod."""
    return np.asarray(group.members < (group.size if group.beyond is None else group.beyond.members))


def network_bandwidth(hardware: HardwareSpec, group: GroupPlace, network: FloatArray) -> FloatArray:
    """Limit the bandwidth out of a domain by the network between pods, in bytes/s.

    ``network`` is the bandwidth of the members' NICs. Across pods: min(network, members of a pod * rate), without
    ``network`` where the group does not use it. All accelerators of a pod share its bandwidth equally, and a group
    has the shares of its members.
    """
    if hardware.pods is None or group.beyond is None:
        return network
    shares = group.beyond.members * hardware.pods.rate_bytes_per_s
    limited = np.where(passes_network(group), np.minimum(network, shares), shares)
    return np.where(leaves_pod(group), limited, network)


def hops(group: GroupPlace, shape: str) -> tuple[IntArray, IntArray]:
    """Count the successive hops of a message.

    Ring over d domains in o pods: d - o and o - 1; tree: ceil(log2) of the domains of a pod and of the pods.

    Returns:
        Hops between the domains of a pod, and hops between pods.
    """
    if group.beyond is None:
        network = group.domains - 1 if shape == "ring" else np.ceil(np.log2(group.domains)).astype(np.int64)
        return network, np.zeros((), dtype=np.int64)
    pods = group.beyond.pods
    if shape == "ring":
        return group.domains - pods, pods - 1
    each = -(-group.domains // pods)
    return np.ceil(np.log2(each)).astype(np.int64), np.ceil(np.log2(pods)).astype(np.int64)


def base_latency_s(hardware: HardwareSpec, group: GroupPlace, network: float) -> FloatArray:
    """Return the fixed latency of a collective: ``network`` inside a pod, or that of the network between pods."""
    if hardware.pods is None:
        return np.asarray(network)
    return np.where(leaves_pod(group), hardware.pods.collective_base_latency_s, network)


def hop_latency_s(hardware: HardwareSpec, between_pods: IntArray) -> FloatArray:
    """Return the latency of a number of hops between pods."""
    return np.asarray(0.0 if hardware.pods is None else between_pods * hardware.pods.hop_latency_s)


def adds_up(hardware: HardwareSpec, group: GroupPlace) -> BoolArray:
    """Check that the switches of every network that groups use reduce."""
    inside = hardware.scale_out.in_network_reduction
    if hardware.pods is None:
        return np.full(np.shape(group.size), inside)
    across = hardware.pods.in_network_reduction & (inside | ~passes_network(group))
    return np.where(leaves_pod(group), across, inside)


def all_to_all_s(
    hardware: HardwareSpec, group: GroupPlace, leaving: FloatArray, network_s: FloatArray, batch: int
) -> tuple[FloatArray, FloatArray]:
    """Add the network between pods to an all-to-all.

    A share (n - m) / (n - k) of the bytes that leave a domain leaves the pod, with m ranks of the group in a pod
    and k in a domain. A group without a second domain in the pod does not use the network inside the pod.

    Args:
        leaving: bytes that each rank sends out of its domain.
        network_s: seconds of these bytes on the NICs.
        batch: number of peers that are served at a time.

    Returns:
        Seconds on the slower network, and added latency in seconds.
    """
    if hardware.pods is None or group.beyond is None:
        return network_s, np.zeros(np.shape(network_s))
    pods, out = hardware.pods, hardware.scale_out
    outside = group.size - group.beyond.members
    share = outside / np.maximum(group.size - group.members, 1)
    pods_s = leaving * share / pods.rate_bytes_per_s
    both_s = np.maximum(pods_s, np.where(passes_network(group), network_s, 0.0))
    base = pods.collective_base_latency_s + pods.p2p_latency_s
    base = base - out.collective_base_latency_s - out.p2p_latency_s
    added_latency_s = base + outside / batch * (pods.hop_latency_s - out.hop_latency_s)
    crosses = leaves_pod(group)
    return np.where(crosses, both_s, network_s), np.where(crosses, added_latency_s, 0.0)


def message_s(
    hardware: HardwareSpec, num_bytes: FloatArray, network_s: FloatArray, same_pod: BoolArray
) -> FloatArray:
    """Time a message between domains: ``network_s`` inside a pod, bytes / rate + latency between pods."""
    if hardware.pods is None:
        return network_s
    far_s = num_bytes / hardware.pods.rate_bytes_per_s + hardware.pods.p2p_latency_s
    return np.where(same_pod, network_s, far_s)


def processor_fraction(hardware: HardwareSpec, group: GroupPlace, network: FloatArray) -> FloatArray:
    """Return the share of the compute that a collective across domains uses, a maximum over the tiers it uses.

    ``network`` is the share without pods.
    """
    if hardware.pods is None:
        return network
    inside = np.where(group.members > 1, hardware.scale_up.processor_fraction, 0.0)
    passed = np.where(passes_network(group), network, inside)
    return np.where(leaves_pod(group), np.maximum(passed, hardware.pods.processor_fraction), network)


AXES = ("tp", "cp", "dp", "pp")
Grid = Callable[[Mapping[str, IntArray]], dict[str, IntArray]]
"""Returns the sizes of a grid of ranks by axis: ``_dense`` or ``_experts``."""


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


def _stride(columns: Mapping[str, IntArray], axis: str, sizes: Mapping[str, IntArray]) -> IntArray:
    """Multiply the sizes that stand inside a degree, [n]."""
    inside, result = _INSIDE[columns["rank_order"], AXES.index(axis)], np.ones_like(columns["rank_order"])
    for other, size in sizes.items():
        if other != axis:
            result = result * np.where(inside[..., AXES.index(other)], size, 1)
    return result


def _dense(columns: Mapping[str, IntArray]) -> dict[str, IntArray]:
    """Return the sizes of the grid of dense layers."""
    return {"tp": columns["tp"], "cp": columns["cp"], "dp": columns["dp"], "pp": columns["pp"]}


def _experts(columns: Mapping[str, IntArray]) -> dict[str, IntArray]:
    """Return the sizes of the experts' grid; ep and the experts' replicas together replace dp."""
    shared = columns["tp"] * columns["cp"] * columns["dp"] // columns["etp"]
    return {"tp": columns["etp"], "dp": shared, "pp": columns["pp"]}


def _one_row(c: Mapping[str, IntArray], size: IntArray, axis: str, grid: Grid) -> RankGroup:
    """Make groups of a single row along an axis of a grid."""
    ones = np.ones_like(size)
    return RankGroup(size, _stride(c, axis, grid(c)), ones, ones)


def tensor(columns: LayoutColumns) -> RankGroup:
    """Place the tensor-parallel groups."""
    return _one_row(columns.mapping, columns.tp, "tp", _dense)


def context(columns: LayoutColumns) -> RankGroup:
    """Place the context-parallel groups."""
    return _one_row(columns.mapping, columns.cp, "cp", _dense)


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
    return _one_row(columns.mapping, columns.pp, "pp", _dense)


def replicas(columns: LayoutColumns) -> RankGroup:
    """Place the groups of cp * dp ranks with the same dense weights.

    They have several rows if another degree separates cp and dp.
    """
    c = columns.mapping
    cp_inside = _INSIDE[c["rank_order"], AXES.index("dp"), AXES.index("cp")]
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
    return _one_row(columns.mapping, columns.etp, "tp", _experts)


def expert(columns: LayoutColumns) -> RankGroup:
    """Place the groups over which the experts are spread (ep)."""
    return _one_row(columns.mapping, columns.ep, "dp", _experts)


def expert_replicas(columns: LayoutColumns) -> RankGroup:
    """Place the groups of ranks with the same experts' weights."""
    row = _one_row(columns.mapping, columns.expert_dp, "dp", _experts)
    return row._replace(stride=row.stride * columns.ep)


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
