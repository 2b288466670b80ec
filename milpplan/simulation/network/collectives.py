"""Times of collectives and transfers for process groups of a given size and rank stride.

Ranks are laid out consecutively: a scale-up domain holds ranks [i * D, (i + 1) * D); a group with stride t holds
ranks r, r + t, r + 2 t, ... Message sizes follow nccl-tests: all-reduce, all-gather and reduce-scatter count the
whole buffer (reduced, gathered, to be scattered), all-to-all counts the bytes that one rank sends in total. Every
function broadcasts floats and arrays and returns seconds; a group of one rank and an empty message cost 0.

``call_s`` and ``far_s`` price the software's overhead of collectives, which does not depend on message sizes.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Final, Literal

import numpy as np

from milpplan.problem import BusTable, HardwareSpec, Problem
from milpplan.problem.hardware import CollectiveVariant
from milpplan.simulation import BoolArray, FloatArray, IntArray, LayoutColumns
from milpplan.simulation.layers.kernels import BF16_BYTES, FP32_BYTES, Numbers, interpolate_grid
from milpplan.simulation.network import placement
from milpplan.simulation.network.placement import GroupPlace, group_place, neighbours_share, same_rail

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]

PASSES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""Passes over the message: bus bandwidth = passes * (n - 1) / n * bytes / time (nccl-tests PERFORMANCE)."""

_PEERS_AT_ONCE = 8
"""Peers that an all-to-all serves at a time. Source: NCCL_MAX_DEV_WORK_P2P_PER_BATCH, NVIDIA/nccl
src/include/device.h."""


def members_per_domain(hardware: HardwareSpec, size: Numbers, stride: Numbers) -> IntArray:
    """Count the ranks of a group that share a scale-up domain, for the worst group and its worst domain.

    clip(gcd(size * stride, D) // stride, 1, size) with D ranks a domain. A group occupies a block of size *
    stride consecutive ranks whose start is a multiple of gcd(size * stride, D) into a domain, so no part is
    smaller than that gcd. If all numbers are powers of two, this is clip(D // stride, 1, size). Otherwise it
    rounds down: groups of 6 in domains of 8 are split 2 + 4, and the result is 2, an upper bound of the time.
    Where the scheduler need not fill domains, D is the segment that suits the group best: racks of 72 serve jobs
    of powers of two in segments of 64. A job whose groups suit different segments is priced too low.
    size, stride: positive integers, any shapes that broadcast.
    """
    return group_place(hardware, size, stride).members


def wire_factor(operation: Operation, size: IntArray, in_network: bool = False) -> FloatArray:
    """Return the bytes that a rank sends for each byte of message: passes * (n - 1) / n; 1 if switches reduce.

    size: ranks, any shape. Rings, trees and hierarchies of both send this factor on average (Patarasu and Yuan
    2009). For an all-to-all, copies are not deduplicated. Source: nccl-tests PERFORMANCE.md.
    """
    if in_network and operation == "all_reduce":
        return np.where(size > 1, 1.0, 0.0)
    return PASSES[operation] * (size - 1) / np.maximum(size, 1)


@lru_cache(maxsize=64)
def _bus_arrays(table: BusTable) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the logarithms of GPUs, message bytes and bus bandwidth [GPUs, messages].

    Times are made non-decreasing in the message bytes.
    """
    counts = np.array(table.num_gpus, dtype=np.float64)
    sizes = np.array(table.message_bytes, dtype=np.float64)
    # In a row, time is proportional to bytes / bus bandwidth; the constant of the operation cancels.
    times = np.maximum.accumulate(sizes / np.array(table.bus_bandwidth_bytes_per_s, dtype=np.float64), axis=1)
    return np.log(counts), np.log(sizes), np.log(sizes / times)


def bus_bandwidth_bytes_per_s(
    hardware: HardwareSpec, operation: Operation, num_bytes: Numbers, size: Numbers
) -> FloatArray:
    """Interpolate the bus bandwidth inside a domain: bilinear in logarithms, constant outside the table.

    num_bytes: message; size: ranks; any shapes that broadcast. Source: the hardware file's measured table.
    """
    log_counts, log_sizes, values = _bus_arrays(getattr(hardware.scale_up, operation))
    return np.exp(interpolate_grid((log_counts, log_sizes), values, (size, num_bytes)))


def _inside_s(hardware: HardwareSpec, operation: Operation, num_bytes: FloatArray, size: IntArray) -> FloatArray:
    """Time a collective inside a domain: factor * bytes / bus bandwidth.

    The smallest measured message gives a lower limit.
    """
    table: BusTable = getattr(hardware.scale_up, operation)
    message = np.maximum(num_bytes, table.message_bytes[0])
    rate = bus_bandwidth_bytes_per_s(hardware, operation, message, size)
    return wire_factor(operation, size, hardware.scale_up.in_network_reduction) * message / rate


def _network_bandwidth(hardware: HardwareSpec, group: GroupPlace) -> FloatArray:
    """Return the bandwidth of the members' NICs out of a domain, or out of a pod if that is less, in bytes/s.

    With congestion the bandwidth B of a ring through d domains becomes 1 / (1 / B + congestion * d), whatever the
    number of members: with their number in the law, runs with tp=8 on hundreds of nodes would be far too slow.
    Source of the form: all-gathers that nanotron's authors measured on 8 to 64 nodes (docs/accuracy.md).
    """
    network = group.members * hardware.scale_out.bandwidth_bytes_per_s * hardware.scale_out.efficiency
    rails, congestion_s = hardware.scale_out.rails, hardware.scale_out.congestion_s_per_byte
    if rails is not None:
        network = network * np.where(group.one_rail, 1.0, rails.bandwidth_fraction)
    network = placement.network_bandwidth(hardware, group, np.asarray(network))
    if hardware.scale_out.ring_bytes_per_s is not None:
        network = np.minimum(network, hardware.scale_out.ring_bytes_per_s)
    if congestion_s:
        network = 1.0 / (1.0 / network + congestion_s * group.domains)
    return np.asarray(network)


def _ring_of(hardware: HardwareSpec) -> CollectiveVariant:
    """Build the ring that the fields of ``ScaleUp`` and ``ScaleOut`` describe."""
    return CollectiveVariant(
        name="ring",
        shape="ring",
        base_latency_s=hardware.scale_out.collective_base_latency_s,
        scale_up_hop_latency_s=hardware.scale_up.hop_latency_s,
        scale_out_hop_latency_s=hardware.scale_out.hop_latency_s,
        bandwidth_fraction=1.0,
    )


def _variant_latency_s(
    hardware: HardwareSpec, variant: CollectiveVariant, operation: Operation, group: GroupPlace
) -> FloatArray:
    """Return the latency of a ring or a tree: base + passes * (inside hops * up + network hops * out), in seconds.

    Ring: size - domains inside hops and domains - 1 network hops; tree: members - 1 and ceil(log2(domains)). A
    group that changes rails adds their latency to every network hop.
    Source: NVIDIA/nccl src/graph/tuning.cc (ncclTopoTuneModel).
    """
    inside = group.size - group.domains if variant.shape == "ring" else group.members - 1
    network, between_pods = placement.hops(group, variant.shape)
    hops = inside * variant.scale_up_hop_latency_s + network * variant.scale_out_hop_latency_s
    hops = hops + placement.hop_latency_s(hardware, between_pods)
    if hardware.scale_out.rails is not None:
        hops = hops + np.where(group.one_rail, 0.0, network * hardware.scale_out.rails.latency_s)
    return placement.base_latency_s(hardware, group, variant.base_latency_s) + PASSES[operation] * hops


def _in_network_s(hardware: HardwareSpec, num_bytes: FloatArray, group: GroupPlace) -> FloatArray:
    """Time an all-reduce that the switches between domains reduce.

    Every domain sends the message once, each member an equal part, while the links inside scatter and gather it.
    The hops are those of a tree.

    max(bytes / members' NICs, factor(members) * bytes / busbw inside) + base + 2 * hops.
    Source: Graham et al. 2016 (SHARP); NCCL's CollNet algorithms.
    """
    largest = hardware.scale_up.all_reduce.message_bytes[-1]
    inside = bus_bandwidth_bytes_per_s(hardware, "all_reduce", largest, group.members)
    passes = wire_factor("all_reduce", group.members, hardware.scale_up.in_network_reduction)
    wire_s = np.maximum(num_bytes / _network_bandwidth(hardware, group), passes * num_bytes / inside)
    tree = _ring_of(hardware).model_copy(update={"shape": "tree"})
    return _variant_latency_s(hardware, tree, "all_reduce", group) + wire_s


def _across_s(
    hardware: HardwareSpec, operation: Operation, num_bytes: FloatArray, group: GroupPlace
) -> FloatArray:
    """Time the fastest variant across domains: latency + factor * bytes / (fraction * ring bandwidth)."""
    # The rate of a ring is that of the members' NICs, or of slower links inside a domain.
    network = _network_bandwidth(hardware, group)
    largest = getattr(hardware.scale_up, operation).message_bytes[-1]
    inside = bus_bandwidth_bytes_per_s(hardware, operation, largest, group.members)
    ring = np.where(group.members > 1, np.minimum(inside, network), network)
    wire_s = wire_factor(operation, group.size) * num_bytes / ring
    times = []
    for variant in (_ring_of(hardware), *hardware.scale_out.variants):
        if variant.shape == "ring" or operation == "all_reduce":
            latency_s = _variant_latency_s(hardware, variant, operation, group)
            times.append(latency_s + wire_s / variant.bandwidth_fraction)
    if operation == "all_reduce" and (in_network := placement.adds_up(hardware, group)).any():
        times.append(np.where(in_network, _in_network_s(hardware, num_bytes, group), np.inf))
    return np.asarray(np.minimum.reduce(times))


def _collective_s(
    operation: Operation,
    hardware: HardwareSpec,
    num_bytes: Numbers,
    size: Numbers,
    stride: Numbers,
    blocks: Numbers = 1,
    block_stride: Numbers = 1,
) -> FloatArray:
    """Time a collective: by the measured table inside a domain, else by the fastest variant across domains.

    Inside a domain: 2 (n - 1) / n * bytes / busbw(n, bytes), measured. Across d domains with k members each:
    min over ring and tree variants of base + 2 * hops * hop latency + 2 (n - 1) / n * bytes / (fraction *
    min(busbw inside, k * NIC rate * efficiency)), and over reduction in the switches, where they offer it. That is
    an all-reduce; an all-gather and a reduce-scatter have a single pass, (n - 1) / n * bytes, and rings only.

    Args:
        operation: the collective.
        hardware: hardware of the ranks.
        num_bytes: bytes of the buffer that is reduced, gathered as a result, or scattered.
        size, stride: the group has ``size`` ranks ``stride`` apart,
        blocks, block_stride: or ``blocks`` such rows of ranks, ``block_stride`` apart.

    Returns:
        Seconds, in the shape that the arguments broadcast to.

    Source: nccl-tests PERFORMANCE.md; NVIDIA/nccl src/graph/tuning.cc.
    """
    message = np.asarray(num_bytes, dtype=np.float64)
    is_free = (np.asarray(size) * blocks == 1) | (message == 0)
    # A single layout, as in a simulation, needs at most one of the two formulas.
    if is_free.all():
        return np.zeros(np.shape(is_free))
    group = group_place(hardware, size, stride, blocks, block_stride)
    inside = group.members == group.size
    if inside.all():
        time = _inside_s(hardware, operation, message, group.size)
    else:
        time = _across_s(hardware, operation, message, group)
        if inside.any():
            time = np.where(inside, _inside_s(hardware, operation, message, group.size), time)
    return np.where(is_free, 0.0, time)


all_reduce_s: Final = partial(_collective_s, "all_reduce")
"""Time an all-reduce: ``_collective_s``."""
all_gather_s: Final = partial(_collective_s, "all_gather")
"""Time an all-gather whose gathered result has ``num_bytes``: ``_collective_s``."""
reduce_scatter_s: Final = partial(_collective_s, "reduce_scatter")
"""Time a reduce-scatter whose input on each rank has ``num_bytes``: ``_collective_s``."""


def copies_sent(domains: IntArray, copies: float) -> FloatArray:
    """Return the share of a token's copies that is left when every domain receives the token at most once.

    Of ``copies`` choices, balanced and independent, the expected number of distinct domains is d (1 - (1 -
    1/d)^copies); divided by the number of copies this is the share.
    """
    spread = np.maximum(domains, 1).astype(np.float64)
    return np.asarray(spread * (1 - (1 - 1 / spread) ** copies) / copies)


def all_to_all_s(
    hardware: HardwareSpec, num_bytes: Numbers, size: Numbers, stride: Numbers, copies: float | None = None
) -> FloatArray:
    """Time an all-to-all in which each rank sends ``num_bytes`` in total, its own part included.

    Inside a domain: (n - 1) / n * bytes / busbw(n, bytes), measured. Across domains with k members each:
    max(bytes * (n - k) / n / (NIC rate * efficiency), bytes * (k - 1) / n / busbw inside) + base + transfer
    latency + (n - k) / 8 * hop latency. Balanced traffic is assumed: a lower bound for skewed routing.
    With ``copies`` (the experts of a token), a token crosses the network once for each domain that holds at least
    one of its experts, and the links of that domain spread it: DeepSeek-V3 (2024), section 3.2.2; DeepEP.
    Source: nccl-tests PERFORMANCE.md; NCCL serves peers in batches of 8 (src/include/device.h).
    """
    message = np.asarray(num_bytes, dtype=np.float64)
    is_free = (np.asarray(size) == 1) | (message == 0)
    if is_free.all():
        return np.zeros(np.shape(is_free))
    group = group_place(hardware, size, stride)
    out = hardware.scale_out
    network_bytes, link_bytes = all_to_all_bytes(message, group.size, group.members, group.domains, copies)
    network_s = network_bytes / out.rate_bytes_per_s
    largest = hardware.scale_up.all_to_all.message_bytes[-1]
    links_s = link_bytes / bus_bandwidth_bytes_per_s(hardware, "all_to_all", largest, group.members)
    outside = group.size - group.members
    batches = outside / _PEERS_AT_ONCE
    latency_s = out.collective_base_latency_s + out.p2p_latency_s + batches * out.hop_latency_s
    if out.rails is not None:
        changes = np.where(group.one_rail, 0.0 if copies is not None else 1 - 1 / group.members, 1.0)
        network_s = network_s * (1 - changes + changes / out.rails.bandwidth_fraction)
        latency_s = latency_s + np.where(changes > 0, out.rails.latency_s, 0.0)
    network_s, pod_latency_s = placement.all_to_all_s(hardware, group, network_bytes, network_s, _PEERS_AT_ONCE)
    latency_s = latency_s + pod_latency_s
    inside = _inside_s(hardware, "all_to_all", message, group.size)
    time = np.where(outside == 0, inside, np.maximum(network_s, links_s) + latency_s)
    return np.where(is_free, 0.0, time)


def all_to_all_bytes(
    num_bytes: FloatArray, size: IntArray, members: IntArray, domains: IntArray, copies: float | None
) -> tuple[FloatArray, FloatArray]:
    """Count the bytes that a rank of an all-to-all across domains sends.

    Each of n ranks sends a share bytes / n to every rank: n - k shares leave the domain, k - 1 stay inside. With
    ``copies``, the shares that leave are sent once for each domain, to the rank with the sender's position in that
    domain. This rank passes all copies on: n - d shares inside, for d domains.

    Returns:
        Bytes between domains, and bytes inside a domain.
    """
    share = num_bytes / np.maximum(size, 1)
    network = share * (size - members)
    # Deduplicated copies arrive at a single rank, which passes them on over the links of the domain.
    if copies is None:
        return network, share * (members - 1)
    return network * copies_sent(domains, copies), share * (size - domains)


def p2p_s(
    hardware: HardwareSpec,
    num_bytes: Numbers,
    stride: Numbers,
    inside: BoolArray | None = None,
    same_pod: BoolArray | None = None,
) -> FloatArray:
    """Time a message from rank r to rank r + stride.

    bytes / (rate * efficiency) + latency; 0 where bytes = 0. The links of the domain carry the message where 2 *
    stride <= D, so that a domain holds both ranks; else one accelerator's NIC share does, less between rails.
    Ranks at the edge of a domain leave it although they count as inside: a lower bound for their messages.

    Args:
        num_bytes, stride: any shapes that broadcast.
        inside: True where a message stays inside a domain; None: the rule above.
        same_pod: True where a message stays inside a pod; None: 2 * stride <= ranks of a pod.

    Returns:
        Seconds, in the broadcast shape.

    Source: latency-bandwidth (Hockney) model.
    """
    up, out = hardware.scale_up, hardware.scale_out
    message = np.asarray(num_bytes, dtype=np.float64)
    is_inside = 2 * np.asarray(stride) <= up.num_gpus if inside is None else inside
    links_s = message / (up.bandwidth_bytes_per_s * up.p2p_efficiency) + up.p2p_latency_s
    network_s = message / out.rate_bytes_per_s + out.p2p_latency_s
    if out.rails is not None:
        crossing = message / (out.rate_bytes_per_s * out.rails.bandwidth_fraction)
        crossing = crossing + out.p2p_latency_s + out.rails.latency_s
        network_s = np.where(same_rail(hardware, stride), network_s, crossing)
    if hardware.pods is not None:
        near = 2 * np.asarray(stride) <= hardware.pods.num_gpus if same_pod is None else same_pod
        network_s = placement.message_s(hardware, message, network_s, near)
    time = np.where(is_inside, links_s, network_s)
    return np.where(message == 0, 0.0, time)


def processor_fraction(
    hardware: HardwareSpec, size: Numbers, stride: Numbers, blocks: Numbers = 1, block_stride: Numbers = 1
) -> FloatArray:
    """Return the share of the accelerator's compute that a collective uses while it runs beside kernels.

    A maximum over the network tiers that the collective uses. A ring across domains with several members in each
    domain also uses the links inside. Source: Isaev et al. 2023 (Calculon), processor usage of a network.
    """
    up, out = hardware.scale_up.processor_fraction, hardware.scale_out.processor_fraction
    if up == out and hardware.pods is None:
        return np.full(np.shape(np.asarray(size) * blocks), up)
    group = group_place(hardware, size, stride, blocks, block_stride)
    inside = group.members == group.size
    across = np.where(group.members > 1, max(up, out), out)
    return np.where(inside, up, placement.processor_fraction(hardware, group, across))


def overlap_s(
    seconds: FloatArray,
    cover: FloatArray,
    processor_fraction: FloatArray,
    hidden_fraction: FloatArray | float = 1.0,
) -> tuple[FloatArray, FloatArray]:
    """Split communication beside ``cover`` seconds of compute into (exposed, hidden) seconds.

    hidden = hidden_fraction * min(seconds, cover); exposed = seconds - hidden + processor_fraction * hidden,
    because compute slows down while a share of the processor drives the network.
    """
    hidden = hidden_fraction * np.minimum(seconds, cover)
    return seconds - hidden + processor_fraction * hidden, hidden


def hidden_fraction(hardware: HardwareSpec, gather_s: FloatArray, reduce_s: FloatArray) -> FloatArray:
    """Average the hidden fractions of gathers and reductions beside the same compute, weighted by their times.

    (h_g g + h_r r) / (g + r) for g seconds of gathers and r of reductions, [n]. The time of compute and of what it
    does not hide grows with g and r.
    """
    software, total = hardware.software, gather_s + reduce_s
    hidden = software.hidden_gather_fraction * gather_s + software.hidden_reduce_fraction * reduce_s
    return np.asarray(np.divide(hidden, total, out=np.ones_like(total), where=total > 0))


def tiled_overlap_s(
    seconds: FloatArray,
    product_s: FloatArray,
    tiles: FloatArray,
    processor_fraction: FloatArray,
    pipelined: BoolArray,
) -> tuple[FloatArray, FloatArray]:
    """Split a collective in T ``tiles`` beside the tiles of its own product into (exposed, hidden) seconds.

    One tile of the product has no communication beside it: an all-gather starts with the tile that the rank has, a
    reduction ends with the tile that the rank keeps. In a ring, from neighbour to neighbour, all T - 1 steps of
    the collective run beside the other T - 1 tiles: ``overlap_s(seconds, (T - 1) / T product_s)``. ``pipelined``
    collectives move a T-th in each of T steps, and one of the steps is exposed: ``overlap_s((T - 1) / T seconds,
    (T - 1) / T product_s)`` and seconds / T. With T = 1 the whole collective is exposed.

    So exposed(ring) <= exposed(pipelined) <= seconds: tiles never slow the collective down, only the product, and
    ``product_s`` is the time of the product in tiles. Arrays [n] that broadcast. Source: Wang et al. 2023
    (ASPLOS), section 4; Isaev et al. 2023 (Calculon) for ring and pipelined tiles.
    """
    covered = (tiles - 1.0) / tiles
    overlapped_s = np.where(pipelined, covered, np.where(tiles > 1, 1.0, 0.0)) * seconds
    exposed, hidden = overlap_s(overlapped_s, covered * product_s, processor_fraction)
    return seconds - overlapped_s + exposed, hidden


def call_s(
    hardware: HardwareSpec, size: Numbers, stride: Numbers, blocks: Numbers = 1, block_stride: Numbers = 1
) -> FloatArray:
    """Time the host's checks before a collective starts, in seconds; arguments as in ``all_reduce_s``.

    c + k (n - 1) + f (n - d) for n ranks, of which d share the caller's domain; 0 for n = 1. c, k and f are
    ``collective_call_s``, ``collective_rank_s`` and ``collective_far_rank_s`` of the software, 0 by default.
    Source: nanotron's benchmark sweeps (docs/accuracy.md), whose layers need this time also for small messages.
    """
    software = hardware.software
    ranks = np.asarray(size) * np.asarray(blocks)
    if not (software.collective_call_s or software.collective_rank_s or software.collective_far_rank_s):
        return np.zeros(np.broadcast(ranks, stride, block_stride).shape)
    members = group_place(hardware, size, stride, blocks, block_stride).members
    seconds = software.collective_call_s + software.collective_rank_s * (ranks - 1)
    seconds = seconds + software.collective_far_rank_s * (ranks - members)
    return np.where(ranks > 1, seconds, 0.0)


def far_s(hardware: HardwareSpec, pair_s: Numbers, size: Numbers, stride: Numbers) -> FloatArray:
    """Time the overhead of a tensor-parallel group in d domains outside its layers: ``pair_s`` d (d - 1) / 2.

    The group has ``size`` ranks ``stride`` apart; any shapes that broadcast; 0 in a single domain.

    Source: fitted, not derived. Besides bytes and hops nanotron's steps take 11 ms a micro-batch and 71 ms a step
    where tensor parallelism spans two nodes, 91 and 395 where it spans four (docs/accuracy.md).
    """
    if not np.any(pair_s):
        return np.zeros(np.broadcast(size, stride, pair_s).shape)
    domains = group_place(hardware, size, stride).domains
    return np.asarray(pair_s * (domains * (domains - 1) / 2.0))


def transfer_s(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """Time an activation (or its gradient) from one stage to the next, in seconds [n]; 0 without a pipeline.

    With sequence parallelism each tensor-parallel rank sends its own part, 2 u h / t bytes. Without, all ranks
    send the same 2 u h bytes. With ``pp_scatter_gather`` each rank sends a part, and the receiving stage gathers
    the parts: p2p(2 u h / t) + all_gather(2 u h). Source: Narayanan et al. 2021, section 4.1. Both hosts need
    their time for a message: + 2 ``message_s``. In DPO the activation of a frozen reference is part of the
    message, and so is its gradient, which is zero (``layer_time.further_forward_s``). Where further forwards are
    phases of their own, the transfers that fill the pipeline for them are left out: a lower bound.
    """
    stages, usual = placement.pipeline(columns), columns.tp * columns.cp * columns.dp
    near = neighbours_share(problem.hardware, stages.size, stages.stride, usual)
    return _sent_s(problem, columns, problem.hardware, *near)


def crossing_transfer_s(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """Time an activation from a stage on one node type to a stage on another type, in seconds [n].

    The transfer crosses domains at the speed of the slowest node type of the cluster, an upper bound if two other
    types meet. It is no faster than a transfer inside any type.
    """
    outside = np.zeros(len(columns), dtype=np.bool_)
    seconds = [
        np.maximum(transfer_s(problem.on_type(number), columns), _sent_s(problem, columns, hardware, outside))
        for number, hardware in enumerate(problem.node_types)
    ]
    return np.asarray(np.max(seconds, axis=0))


def _sent_s(
    problem: Problem,
    columns: LayoutColumns,
    hardware: HardwareSpec,
    inside: BoolArray,
    same_pod: BoolArray | None = None,
) -> FloatArray:
    """Time the message, and the gather where ranks send parts, with the network of one node type."""
    tp = columns.tp
    tokens = columns.micro_batch_size * problem.job.sequence_length / columns.cp
    gathered = columns.pp_scatter_gather & ~columns.sequence_parallel
    width = problem.model.hidden_size * problem.model.residual_streams
    message = BF16_BYTES * tokens * width * (1 + problem.job.joined_forwards)
    share = np.where(columns.sequence_parallel | gathered, tp, 1)
    seconds = p2p_s(hardware, message / share, placement.pipeline(columns).stride, inside, same_pod)
    if columns.any_of("pp_scatter_gather"):
        gather = all_gather_s(hardware, message, *placement.tensor(columns))
        seconds = seconds + np.where(gathered, gather, 0.0)
    seconds = seconds + 2.0 * hardware.software.message_s
    return np.where(columns.pp > 1, seconds, 0.0)


def ends_reduce_s(problem: Problem, num_bytes: FloatArray, size: IntArray, stride: IntArray) -> FloatArray:
    """Time an all-reduce between the two ends of a pipeline, ``size`` ranks ``stride`` apart, in seconds [n].

    It runs at the speed of the slowest node type. With several node types it crosses domains, because nodes of two
    types never share a domain.
    """
    seconds = []
    for hardware in problem.node_types:
        domain = hardware.scale_up.num_gpus if problem.other_hardware else 0
        # Add a whole domain, so that ranks on the same rail stay on it.
        distance = np.maximum(np.where(stride < domain, stride + domain, stride), 1)
        seconds.append(all_reduce_s(hardware, num_bytes, size, distance))
    return np.asarray(np.max(seconds, axis=0))


def gradient_norm_s(problem: Problem, num_gpus: IntArray) -> FloatArray:
    """Time the norm of the gradients, a maximum over the node types. Any shape.

    It is an all-reduce of a single number over all GPUs, dominated by latency, with the host time of its call.
    """
    seconds = [
        all_reduce_s(hardware, FP32_BYTES, num_gpus, 1) + call_s(hardware, num_gpus, 1)
        for hardware in problem.node_types
    ]
    return np.asarray(np.max(seconds, axis=0))


def far_step_s(problem: Problem, columns: LayoutColumns) -> FloatArray:
    """Time the overhead of a step of tensor-parallel groups across domains, a maximum over node types, [n].

    ``far_step_s`` for every pair of domains, and ``far_reduce_s`` if gradients are reduced without ZeRO.
    """
    group = placement.tensor(columns)
    reduced = (columns.zero_stage == 0) & (columns.dp * columns.cp > 1)
    seconds = [
        far_s(
            hardware,
            hardware.software.far_step_s + np.where(reduced, hardware.software.far_reduce_s, 0.0),
            group.size,
            group.stride,
        )
        for hardware in problem.node_types
    ]
    return np.asarray(np.max(seconds, axis=0))
