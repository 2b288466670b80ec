"""Collectives and transfers against published points and invariants."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milpplan.problem import HardwareSpec
from milpplan.simulation.network import members_per_domain
from milpplan.simulation.network.collectives import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    p2p_s,
    reduce_scatter_s,
)
from tests.amounts import few_or_many

HARDWARE = Path(__file__).parents[2] / "hardware"


def quiet(spec: HardwareSpec) -> HardwareSpec:
    """A description without congestion: the published points were measured on quiet networks."""
    return spec.model_copy(update={"scale_out": spec.scale_out.model_copy(update={"congestion_s_per_byte": 0.0})})


SPECS = {
    path.stem: quiet(HardwareSpec.model_validate(tomllib.loads(path.read_text(encoding="utf-8"))))
    for path in sorted(HARDWARE.glob("*.toml"))
}
H100, H200, A100, B200 = (SPECS[name] for name in ("dgx-h100", "dgx-h200", "dgx-a100-80", "dgx-b200"))
Collective = Callable[..., np.ndarray]
COLLECTIVES: dict[str, Collective] = {
    "all_reduce": all_reduce_s,
    "all_gather": all_gather_s,
    "reduce_scatter": reduce_scatter_s,
    "all_to_all": all_to_all_s,
}
MIB, GIB = 2**20, 2**30

specs = st.sampled_from(list(SPECS.values()))
collectives = st.sampled_from(list(COLLECTIVES.values()))
sizes = st.integers(1, 600)
strides = st.integers(1, 600)
messages = st.floats(1, 1e12)


def bus_bandwidth(seconds: np.ndarray, passes: int, size: int, num_bytes: float) -> float:
    """GB/s of bus bandwidth in nccl-tests' definition."""
    return passes * (size - 1) / size * num_bytes / float(seconds) / 1e9


# Algorithm: fastest of the published (latency us, algorithm GB/s) pairs, size / time.
# Source: meta-pytorch/autoparallel@a54c252 nccl_cost_model.py L739-853, from NCCL 2.27.5 tuning logs on H100.
NCCL_ALL_GATHER = {
    (2, 8): [(23.3, 41.6), (44.6, 313.2), (70.0, 409.6)],
    (4, 8): [(42.7, 21.1), (79.2, 303.1), (145.6, 396.4)],
    (8, 8): [(81.5, 20.7), (148.4, 298.3), (296.8, 390.1)],
    (32, 8): [(314.3, 20.5), (563.6, 294.8), (1204.0, 385.5)],
    (2, 1): [(11.6, 48.0), (22.5, 88.3), (22.4, 96.0)],
    (8, 1): [(41.6, 23.3), (73.5, 50.5), (106.4, 54.9)],
}
NCCL_ALL_REDUCE = {
    (4, 8): [(78.8, 10.5), (144.4, 151.5), (282.8, 198.2), (65.5, 98.6), (120.4, 122.4), (81.0, 160.0)],
    (8, 8): [(156.4, 10.4), (282.8, 149.1), (585.2, 195.0), (82.5, 98.6), (148.4, 122.4), (109.0, 160.0)],
    (32, 8): [(622.0, 10.2), (1113.2, 147.4), (2399.6, 192.8), (116.5, 98.6), (204.4, 122.4), (165.0, 160.0)],
    (4, 1): [(36.6, 13.6), (65.0, 29.4), (92.4, 32.0), (26.8, 4.9), (48.0, 17.6), (64.4, 18.8)],
}


@pytest.mark.parametrize("num_bytes", [MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB])
@pytest.mark.parametrize("nodes_and_ranks", sorted(NCCL_ALL_GATHER))
def test_all_gather_matches_nccl_tuning_on_h100(nodes_and_ranks: tuple[int, int], num_bytes: int) -> None:
    """Gathers over 2 to 32 H100 nodes are within 15 % of what NCCL's tuner expects, 1 MiB to 1 GiB."""
    nodes, ranks = nodes_and_ranks
    expected = min(us * 1e-6 + num_bytes / (gb * 1e9) for us, gb in NCCL_ALL_GATHER[nodes_and_ranks])
    seconds = all_gather_s(H100, num_bytes, nodes * ranks, 8 // ranks)
    assert float(seconds) == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("num_bytes", [MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB])
@pytest.mark.parametrize("nodes_and_ranks", sorted(NCCL_ALL_REDUCE))
def test_all_reduce_matches_nccl_tuning_on_h100(nodes_and_ranks: tuple[int, int], num_bytes: int) -> None:
    """All-reduces over 4 to 32 H100 nodes are within 15 % of what NCCL's tuner expects."""
    nodes, ranks = nodes_and_ranks
    expected = min(us * 1e-6 + num_bytes / (gb * 1e9) for us, gb in NCCL_ALL_REDUCE[nodes_and_ranks])
    seconds = all_reduce_s(H100, num_bytes, nodes * ranks, 8 // ranks)
    assert float(seconds) == pytest.approx(expected, rel=0.15)


RACK = SPECS["gb200-nvl72"]


@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [(16, 1, 16), (64, 1, 64), (16, 4, 16), (72, 1, 72), (48, 1, 48), (128, 1, 64), (8, 64, 1), (144, 1, 72)],
)
def test_groups_that_fit_in_a_rack_stay_in_it(size: int, stride: int, expected: int) -> None:
    """A rack of 72 holds groups of 16 and 64 whole, because jobs of powers of two take 64 of the 72."""
    assert int(members_per_domain(RACK, size, stride)) == expected


def test_a_stage_of_64_ranks_sends_to_the_next_rack() -> None:
    """Pipeline stages of 64 ranks cannot share a rack of 72, stages of 32 can."""
    out = RACK.scale_out
    outside = 1e9 / (out.bandwidth_bytes_per_s * out.efficiency) + out.p2p_latency_s
    assert float(p2p_s(RACK, 1e9, 64)) == pytest.approx(outside)
    assert p2p_s(RACK, 1e9, 32) < 0.1 * outside


def test_deduplicated_copies_by_hand() -> None:
    """Two choices among two domains visit 1.5 of them, so the network carries 0.75 of the copies; one choice
    cannot be deduplicated."""
    out, sent = H100.scale_out, 1e9
    wire = sent * 8 / 16 / (out.bandwidth_bytes_per_s * out.efficiency)
    every, once = (float(all_to_all_s(H100, sent, 16, 1, copies)) for copies in (None, 2.0))
    assert every - once == pytest.approx(0.25 * wire)
    assert all_to_all_s(H100, sent, 16, 1, 1.0) == all_to_all_s(H100, sent, 16, 1)
    assert all_to_all_s(H100, sent, 8, 1, 4.0) == all_to_all_s(H100, sent, 8, 1)


def test_four_h100_nodes_match_the_voltage_park_report() -> None:
    """4 nodes x 8 H100: 330.9 GB/s of all-reduce and 323.5 of all-gather bus bandwidth, within 15 %."""
    large = 16 * GIB
    assert bus_bandwidth(all_reduce_s(H100, large, 32, 1), 2, 32, large) == pytest.approx(330.9, rel=0.15)
    assert bus_bandwidth(all_gather_s(H100, large, 32, 1), 1, 32, large) == pytest.approx(323.5, rel=0.15)


def test_three_a100_nodes_with_half_the_nics() -> None:
    """3 nodes x 8 A100 with 4 x HDR reach about 96 of 100 GB/s (NVIDIA/nccl-tests#119), within 5 %."""
    half = A100.scale_out.model_copy(update={"bandwidth_bytes_per_s": 12.5e9})
    spec = A100.model_copy(update={"scale_out": half})
    large = 16 * GIB
    assert bus_bandwidth(all_reduce_s(spec, large, 24, 1), 2, 24, large) == pytest.approx(96, rel=0.05)


@pytest.mark.parametrize(
    ("mebibytes", "published"),
    [(1, 5.37), (16, 64.43), (64, 156.74), (256, 229.09), (1024, 361.99), (16384, 381.8)],
)
def test_four_b200_nodes_match_the_published_table(mebibytes: int, published: float) -> None:
    """4 P6-B200 nodes: all-reduce time by message within 25 % (ml-engineering network L1400-1423)."""
    num_bytes = mebibytes * MIB
    expected = 2 * 31 / 32 * num_bytes / (published * 1e9)
    assert float(all_reduce_s(B200, num_bytes, 32, 1)) == pytest.approx(expected, rel=0.25)


@pytest.mark.parametrize(
    ("spec", "mebibytes", "published"),
    [
        (B200, 64, 400.6),
        (B200, 512, 688.99),
        (H200, 64, 346.51),
        (H200, 512, 450.29),
        (A100, 64, 171.54),
        (A100, 512, 222.72),
    ],
)
def test_one_node_matches_an_independent_measurement(spec: HardwareSpec, mebibytes: int, published: float) -> None:
    """All-reduce in a node of 8: within 20 % of ml-engineering's tables, which the presets do not use."""
    num_bytes = mebibytes * MIB
    seen = bus_bandwidth(all_reduce_s(spec, num_bytes, 8, 1), 2, 8, num_bytes)
    assert seen == pytest.approx(published, rel=0.20)


def test_small_groups_on_a_mesh_are_slow() -> None:
    """Two MI300X reach 47.7 GB/s and eight 312.9 (measured), so a pair is more than six times slower."""
    spec, large = SPECS["mi300x"], 4 * GIB
    pair = bus_bandwidth(all_reduce_s(spec, large, 2, 1), 2, 2, large)
    node = bus_bandwidth(all_reduce_s(spec, large, 8, 1), 2, 8, large)
    assert pair == pytest.approx(47.7, rel=0.02)
    assert node == pytest.approx(312.9, rel=0.02)


def test_members_of_powers_of_two() -> None:
    """With powers of two the members are clip(D // stride, 1, size)."""
    size, stride = np.meshgrid(2 ** np.arange(8), 2 ** np.arange(8))
    assert np.array_equal(members_per_domain(H100, size, stride), np.clip(8 // stride, 1, size))


@pytest.mark.parametrize(("size", "stride", "expected"), [(6, 1, 2), (12, 1, 4), (3, 2, 1), (24, 1, 8), (3, 1, 1)])
def test_members_of_other_sizes_are_the_worst_part(size: int, stride: int, expected: int) -> None:
    """Groups of 6 in domains of 8 are split 2 + 4 at worst, so 2 members count."""
    assert int(members_per_domain(H100, size, stride)) == expected


@few_or_many(40, 100, st.integers(1, 40), st.integers(1, 40))
def test_members_never_exceed_any_real_part(size: int, stride: int) -> None:
    """Enumerating every group of a large cluster, no domain holds fewer of its ranks than the answer."""
    answer = int(members_per_domain(H100, size, stride))
    block = size * stride
    fewest = size
    for start in range(0, 8 * block, block):
        for offset in range(stride):
            domains = (start + offset + stride * np.arange(size)) // 8
            fewest = min(fewest, int(np.unique(domains, return_counts=True)[1].min()))
    assert answer <= max(fewest, 1)


def test_transfer_uses_the_links_inside_and_the_nic_outside() -> None:
    """1 GB takes 1 / (450 * 0.836) s over NVLink and 1 / (50 * 0.92) s over the NIC, plus the latency."""
    assert float(p2p_s(H100, 1e9, 1)) == pytest.approx(1 / (450 * 0.836) + 10e-6)
    assert float(p2p_s(H100, 1e9, 8)) == pytest.approx(1 / (50 * 0.92) + 22.4e-6)


def test_all_to_all_across_nodes_is_limited_by_the_nic() -> None:
    """Of 1 GB sent by each of 64 ranks 7/8 leave the node at 46 GB/s, within 2 % of latency."""
    assert float(all_to_all_s(H100, 1e9, 64, 1)) == pytest.approx(7 / 8 / 46, rel=0.02)


@given(specs, collectives, messages, strides)
def test_one_rank_is_free(spec: HardwareSpec, collective: Collective, num_bytes: float, stride: int) -> None:
    """A group of one rank costs exactly zero."""
    assert collective(spec, num_bytes, 1, stride) == 0


@given(specs, collectives, sizes, strides)
def test_an_empty_message_is_free(spec: HardwareSpec, collective: Collective, size: int, stride: int) -> None:
    """No bytes cost exactly zero, for collectives and transfers."""
    assert collective(spec, 0, size, stride) == 0 == p2p_s(spec, 0, stride)


@given(specs, collectives, messages, st.floats(1, 1000), sizes, strides)
def test_more_bytes_are_never_cheaper(
    spec: HardwareSpec, collective: Collective, num_bytes: float, growth: float, size: int, stride: int
) -> None:
    """A longer message takes at least as long; times are finite and positive for two ranks and more."""
    before = float(collective(spec, num_bytes, size, stride))
    after = float(collective(spec, num_bytes * growth, size, stride))
    assert np.isfinite(after)
    assert before <= after * (1 + 1e-12)
    assert before > 0 or size == 1
    assert 0 < p2p_s(spec, num_bytes, stride) <= p2p_s(spec, num_bytes * growth, stride)


@few_or_many(40, 100, specs, collectives, st.lists(st.tuples(messages, sizes, strides), min_size=1, max_size=10))
def test_arrays_equal_scalars(
    spec: HardwareSpec, collective: Collective, groups: list[tuple[float, int, int]]
) -> None:
    """Costing many groups at once gives the same seconds as one at a time."""
    num_bytes, size, stride = (np.array(column) for column in zip(*groups, strict=True))
    together = collective(spec, num_bytes, size, stride)
    assert together.tolist() == [float(collective(spec, *group)) for group in groups]


@given(specs, messages, st.sampled_from([2, 4, 8]), st.integers(0, 5))
def test_an_all_reduce_costs_no_less_than_a_gather_across_domains(
    spec: HardwareSpec, num_bytes: float, size: int, doublings: int
) -> None:
    """With rings alone, an all-reduce (two passes) takes at least an all-gather's time across domains."""
    rings = spec.scale_out.model_copy(
        update={"variants": tuple(v for v in spec.scale_out.variants if v.shape == "ring")}
    )
    spec = spec.model_copy(update={"scale_out": rings})
    stride = spec.scale_up.num_gpus * 2**doublings
    assert all_reduce_s(spec, num_bytes, size, stride) >= all_gather_s(spec, num_bytes, size, stride)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter"])
def test_congestion_slows_rings_with_their_domains(name: str) -> None:
    """A ring through d nodes takes factor * bytes * congestion * d longer where its NICs are slower than the
    links, and a group inside a node as long as before."""
    free = A100.scale_out.model_copy(update={"variants": (), "rails": None})
    busy = free.model_copy(update={"congestion_s_per_byte": 1e-12})
    times = [
        COLLECTIVES[name](A100.model_copy(update={"scale_out": out}), GIB, [8, 64, 4], [1, 1, 8])
        for out in (free, busy)
    ]
    passes, sizes, nodes = (2 if name == "all_reduce" else 1), np.array([8, 64, 4]), np.array([0, 8, 4])
    added = passes * (sizes - 1) / sizes * GIB * 1e-12 * nodes
    assert times[1] - times[0] == pytest.approx(added, rel=1e-9, abs=1e-12)


def test_a_ring_that_does_not_use_all_nics() -> None:
    """4 GB among 16 nodes of 4 V100 with four links each took 1.16 s on Jean Zay (bigscience-workshop/bigscience
    experiments/bandwidth, n16_32gb): 54 Gb/s of bus bandwidth, not 400; inside a node nothing changes."""
    up = A100.scale_up.model_copy(update={"num_gpus": 4})
    free = A100.scale_out.model_copy(update={"bandwidth_bytes_per_s": 12.5e9, "variants": (), "rails": None})
    capped = free.model_copy(update={"ring_bytes_per_s": 6.8e9})
    fast, slow = (A100.model_copy(update={"scale_up": up, "scale_out": out}) for out in (free, capped))
    assert float(all_reduce_s(slow, 4e9, 64, 1)) == pytest.approx(1.16, rel=0.02)
    assert all_reduce_s(fast, 4e9, 64, 1) < 0.25
    assert all_reduce_s(fast, 4e9, 4, 1) == all_reduce_s(slow, 4e9, 4, 1)
