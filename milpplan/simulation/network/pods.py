"""Effect of a third network tier on collectives and messages: pods of domains with a network between the pods.

A ring across pods uses the links of a domain, the network between the domains of a pod, and the network between
pods, each only if the group has neighbours there. The slowest of these tiers sets its rate. A group with a single
domain in each pod does not use the network inside pods. Functions broadcast; ``PodPlace`` holds the position of a
group.
"""

from __future__ import annotations

import numpy as np

from milpplan.problem.hardware import HardwareSpec
from milpplan.simulation.layout_columns import BoolArray, FloatArray, IntArray
from milpplan.simulation.network.domains import GroupPlace


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


def may_add_up(hardware: HardwareSpec) -> bool:
    """Check that the switches of some network reduce."""
    pods_reduce = hardware.pods is not None and hardware.pods.in_network_reduction
    return hardware.scale_out.in_network_reduction or pods_reduce


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
