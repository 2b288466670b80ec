"""A third tier of network: pods of domains, by hand, against two tiers, and in the search."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from milpplan import Layout, Space, simulate, solve, traffic
from milpplan.problem import HardwareSpec, Job, Pods, Problem
from milpplan.simulation.network import group_place
from milpplan.simulation.network.collectives import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    p2p_s,
    processor_fraction,
    reduce_scatter_s,
)
from tests.optimize.brute_force import brute_force
from tests.optimize.problems import random_problem
from tests.optimize.test_optimality import EXACT, assert_optimal
from tests.simulation.cases import even_plan, problem_of
from tests.simulation.test_networks import cluster

GB = 1e9
COLLECTIVES = (all_reduce_s, all_gather_s, reduce_scatter_s)
ORDERS = ("tp-cp-dp-pp", "tp-cp-pp-dp", "pp-tp-cp-dp", "dp-tp-cp-pp")
GROUPS = [(2, 64), (4, 32), (8, 8), (16, 8), (64, 1), (128, 1), (2, 16), (8, 16)]
"""(ranks, stride) on 128 GPUs in domains of 8 and pods of 32."""


def with_pods(plain: HardwareSpec | None = None, num_gpus: int = 32, **fields: Any) -> HardwareSpec:
    """A cluster in pods whose network is that between domains, but for some fields."""
    base = plain or cluster()
    out = base.scale_out
    same = {
        name: getattr(out, name)
        for name in ("bandwidth_bytes_per_s", "efficiency", "p2p_latency_s", "collective_base_latency_s")
    }
    same |= {name: getattr(out, name) for name in ("hop_latency_s", "processor_fraction", "in_network_reduction")}
    pods = Pods.model_validate({"name": "spine", "num_gpus": num_gpus, **same, **fields})
    return base.model_copy(update={"pods": pods})


@pytest.mark.parametrize("adds_up", [False, True])
def test_pods_on_the_same_network_change_nothing(adds_up: bool) -> None:
    """Where the network between pods is that between domains every time is that of two tiers."""
    plain = cluster(in_network_reduction=adds_up, processor_fraction=0.25)
    same = with_pods(plain)
    for size, stride in GROUPS:
        for collective in (*COLLECTIVES, all_to_all_s):
            assert collective(same, GB, size, stride) == pytest.approx(
                collective(plain, GB, size, stride), rel=1e-12
            )
        assert processor_fraction(same, size, stride) == processor_fraction(plain, size, stride)
        assert p2p_s(same, GB, stride) == p2p_s(plain, GB, stride)
    assert all_to_all_s(same, GB, 64, 1, 8.0) == pytest.approx(all_to_all_s(plain, GB, 64, 1, 8.0), rel=1e-12)


def test_where_groups_lie() -> None:
    """64 neighbours: 8 in each of 8 domains, 32 in each of 2 pods; 4 ranks 32 apart: one in each of 4 pods."""
    for group, expected in (((64, 1), (8, 8, 32, 2)), ((4, 32), (1, 4, 1, 4)), ((4, 8), (1, 4, 4, 1))):
        place = group_place(with_pods(), *group)
        assert place.beyond is not None
        found = (place.members, place.domains, place.beyond.members, place.beyond.pods)
        assert tuple(map(int, found)) == expected


def test_rows_of_two_progressions() -> None:
    """Two neighbours, and as many 64 apart: 2 in a pod, 2 pods; 16 apart they are all in one."""
    for apart, expected in ((64, (2, 2)), (16, (4, 1))):
        beyond = group_place(with_pods(), 2, 1, 2, apart).beyond
        assert beyond is not None
        assert (int(beyond.members), int(beyond.pods)) == expected


def test_slow_pods_by_hand() -> None:
    """Between pods a quarter of the NICs' rate: 8 rings of 128 neighbours carry min(8 NICs, 32 shares of a
    quarter) = 8 NICs, as before; 4 ranks in as many pods have a share each; inside a pod nothing changes."""
    plain = cluster()
    rate = plain.scale_out.rate_bytes_per_s / 4
    slow = with_pods(bandwidth_bytes_per_s=plain.scale_out.bandwidth_bytes_per_s / 4)
    assert all_gather_s(slow, GB, 128, 1) == pytest.approx(all_gather_s(plain, GB, 128, 1), rel=1e-12)
    out = plain.scale_out
    expected = 0.75 * GB / rate + out.collective_base_latency_s + 3 * out.hop_latency_s
    assert float(all_gather_s(slow, GB, 4, 32)) == pytest.approx(expected)
    assert float(p2p_s(slow, GB, 32)) == pytest.approx(GB / rate + out.p2p_latency_s)
    assert p2p_s(slow, GB, 16) == p2p_s(plain, GB, 16)
    for collective in (*COLLECTIVES, all_to_all_s):
        assert collective(slow, GB, 32, 1) == collective(plain, GB, 32, 1)
    # An all-to-all of 128: 96 of 128 shares leave the pod at a quarter of the rate, slower than 120 on the NICs.
    large = 64 * GB
    assert float(all_to_all_s(slow, large, 128, 1)) == pytest.approx(large * 96 / 128 / rate, rel=1e-3)


def test_latency_and_share_of_the_pods_network() -> None:
    """Its base latency takes the place of the other, its hops count between pods, a message has its latency, and a
    group on it alone takes its share of the processor."""
    far = with_pods(collective_base_latency_s=1.0, hop_latency_s=0.1, p2p_latency_s=2.0, processor_fraction=0.5)
    assert float(all_gather_s(far, 1.0, 4, 32)) == pytest.approx(1.3, abs=1e-6)
    assert float(all_reduce_s(far, 1.0, 4, 32)) == pytest.approx(1.6, abs=1e-6)
    assert float(p2p_s(far, 1.0, 32)) == pytest.approx(2.0, abs=1e-6)
    assert float(processor_fraction(far, 4, 32)) == 0.5
    assert processor_fraction(far, 4, 8) == processor_fraction(cluster(), 4, 8)
    assert float(all_to_all_s(far, 1.0, 4, 32)) == pytest.approx(3.0 + 3 / 8 * 0.1, abs=1e-6)


def test_switches_between_pods_add_up() -> None:
    """Four ranks in as many pods send a large message once instead of 2 * 3/4 times; with several domains in a pod
    the switches between those must add up, too."""
    plain, adding = with_pods(), with_pods(in_network_reduction=True)
    large = 64 * GB
    assert float(all_reduce_s(adding, large, 4, 32) / all_reduce_s(plain, large, 4, 32)) == pytest.approx(
        2 / 3, rel=1e-3
    )
    assert all_reduce_s(adding, large, 16, 8) == all_reduce_s(plain, large, 16, 8)
    both = with_pods(cluster(in_network_reduction=True))
    assert all_reduce_s(both, large, 16, 8) < all_reduce_s(plain, large, 16, 8)


def test_a_pod_holds_whole_domains() -> None:
    """12 GPUs are one and a half domains of 8."""
    data = with_pods().model_dump()
    data["pods"]["num_gpus"] = 12
    with pytest.raises(ValidationError, match="must hold whole domains"):
        HardwareSpec.model_validate(data)


def test_the_order_of_the_degrees_decides_on_the_pods() -> None:
    """Eight stages of two domains each on two pods: with the pipeline outside the gradients stay in a pod, and
    transfers cross at slow pods; the step of every order is what its parts say."""
    slow = with_pods(num_gpus=64, bandwidth_bytes_per_s=1e9)
    problem = problem_of("llama3-8b", slow, num_gpus=128, global_batch_size=64)
    layout = Layout(tp=8, dp=8, pp=2, global_batch_size=64, sequence_parallel=True, zero_stage=1)
    outside = simulate(problem, even_plan(problem, layout)).breakdown_s
    inside = layout.model_copy(update={"rank_order": "tp-cp-pp-dp"})
    crossing = simulate(problem, even_plan(problem, inside)).breakdown_s
    assert crossing["grad_reduce_exposed"] > 10 * outside["grad_reduce_exposed"]


def test_traffic_between_pods() -> None:
    """With pp=2 on two pods only transfers and what every GPU joins (the norm) change the pod."""
    problem = problem_of("llama3-8b", with_pods(num_gpus=16), num_gpus=32, global_batch_size=16)
    layout = Layout(tp=8, dp=2, pp=2, global_batch_size=16, zero_stage=1)
    report = traffic(problem, even_plan(problem, layout))
    assert report.pod_change_bytes == pytest.approx(sum(report.tier_bytes["pp"].values()), rel=1e-6)
    plain = problem.model_copy(update={"hardware": cluster()})
    assert traffic(plain, even_plan(plain, layout)).pod_change_bytes == 0


@pytest.mark.parametrize("orders", [ORDERS[:1], ORDERS], ids=["usual", "free"])
def test_the_search_knows_of_pods(orders: tuple[str, ...]) -> None:
    """The proved best is that of pricing every plan, with the order of the degrees as a decision and without."""
    slow = with_pods(cluster("dgx-a100-80", up={"num_gpus": 2}), num_gpus=4, bandwidth_bytes_per_s=2e9)
    small = random_problem(5)
    job = Job(num_gpus=8, global_batch_size=8, sequence_length=small.job.sequence_length)
    space = Space(kind="uniform", zero_stage=(0, 1), rank_order=orders)
    problem = Problem(model=small.model, hardware=slow, job=job, space=space)
    assert_optimal(problem, solve(problem, gap=EXACT), brute_force(problem))
