"""Switches of the network: rails, reduction inside it; and which degree's ranks are neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from milpplan import Layout, simulate
from milpplan.problem import HardwareSpec, Rails
from milpplan.simulation import LayoutColumns
from milpplan.simulation.layout_costs import layout_costs
from milpplan.simulation.network import wire_factor
from milpplan.simulation.network.collectives import all_gather_s, all_reduce_s, all_to_all_s, p2p_s
from tests.simulation.cases import even_plan, problem_of, shipped_hardware

GB = 1e9


def cluster(name: str = "dgx-h100", up: dict[str, Any] | None = None, **out: Any) -> HardwareSpec:
    """A shipped cluster without trees and congestion, so that one formula holds, and with other networks."""
    base = shipped_hardware(name)
    return base.model_copy(
        update={
            "scale_up": base.scale_up.model_copy(update=up or {}),
            "scale_out": base.scale_out.model_copy(update={"variants": (), "congestion_s_per_byte": 0.0} | out),
        }
    )


PLAIN = cluster()
HALF = cluster(rails=Rails(bandwidth_fraction=0.5, latency_s=1e-5))


@pytest.mark.parametrize(("size", "stride"), [(16, 1), (64, 1), (8, 4), (8, 8), (4, 16)])
def test_a_group_on_its_rails_pays_nothing(size: int, stride: int) -> None:
    """Groups whose ranks have the same places in all domains cost on rails what they cost without."""
    for collective in (all_reduce_s, all_gather_s):
        assert collective(HALF, GB, size, stride) == collective(PLAIN, GB, size, stride)
    assert p2p_s(HALF, GB, 8) == p2p_s(PLAIN, GB, 8)


def test_off_the_rail_the_bytes_take_twice_as_long() -> None:
    """A pair 12 apart in domains of 8 changes its rail: at half the rate a large message takes twice as long."""
    assert float(all_gather_s(HALF, GB, 2, 12) / all_gather_s(PLAIN, GB, 2, 12)) == pytest.approx(2, rel=0.01)
    slow = float(p2p_s(HALF, GB, 12) - p2p_s(PLAIN, GB, 12))
    assert slow == pytest.approx(GB / (50e9 * 0.92) + 1e-5)


def test_an_all_to_all_changes_rails_unless_copies_travel_once() -> None:
    """Of what 64 ranks send to other domains 7/8 goes to other places; deduplicated copies go to the same one."""
    ratio = float(all_to_all_s(HALF, GB, 64, 1) / all_to_all_s(PLAIN, GB, 64, 1))
    assert ratio == pytest.approx(1 / 8 + 2 * 7 / 8, rel=0.01)
    assert all_to_all_s(HALF, GB, 64, 1, 8.0) == all_to_all_s(PLAIN, GB, 64, 1, 8.0)


def test_switches_that_add_send_the_message_once() -> None:
    """Inside a domain of 8 an all-reduce takes 1 / (2 * 7/8) of the ring's time; between domains, with one rank in
    each, 1 / (2 * 63/64) for a large message. A pair gains nothing inside: 2 (n - 1) / n = 1."""
    inside = cluster(up={"in_network_reduction": True})
    between = cluster(in_network_reduction=True)
    large = 64 * GB
    assert float(all_reduce_s(inside, large, 8, 1) / all_reduce_s(PLAIN, large, 8, 1)) == pytest.approx(4 / 7)
    assert all_reduce_s(inside, large, 2, 1) == all_reduce_s(PLAIN, large, 2, 1)
    ratio = float(all_reduce_s(between, large, 64, 8) / all_reduce_s(PLAIN, large, 64, 8))
    assert ratio == pytest.approx(32 / 63, rel=0.001)


@pytest.mark.parametrize("up", [False, True])
@pytest.mark.parametrize("out", [False, True])
def test_adding_in_the_network_never_hurts(up: bool, out: bool) -> None:
    """No all-reduce becomes slower, no other collective changes."""
    spec = cluster(up={"in_network_reduction": up}, in_network_reduction=out)
    sizes, strides, message = np.meshgrid([2, 3, 8, 16, 64], [1, 2, 8, 12], [1e3, 1e6, 1e9])
    assert (all_reduce_s(spec, message, sizes, strides) <= all_reduce_s(PLAIN, message, sizes, strides)).all()
    assert np.array_equal(
        all_gather_s(spec, message, sizes, strides), all_gather_s(PLAIN, message, sizes, strides)
    )


def test_wire_factors() -> None:
    """2 (n - 1) / n for all-reduce, half of that for the others, once where switches add up, nothing alone."""
    sizes = np.array([1, 2, 8])
    assert wire_factor("all_reduce", sizes).tolist() == [0, 1, 1.75]
    assert wire_factor("all_gather", sizes).tolist() == [0, 0.5, 0.875]
    assert wire_factor("all_reduce", sizes, in_network=True).tolist() == [0, 1, 1]
    assert wire_factor("all_to_all", sizes, in_network=True).tolist() == [0, 0.5, 0.875]


def test_tensor_parallelism_across_nodes_is_slow_and_replicas_inside_are_fast() -> None:
    """With dp innermost a node holds the replicas and tp crosses nodes: exposed tensor communication grows, and
    the gradients no longer need the network."""
    problem = problem_of("llama3-8b", "dgx-h100", num_gpus=64, global_batch_size=64)
    layout = Layout(tp=8, dp=8, global_batch_size=64, sequence_parallel=True, zero_stage=1)
    usual = simulate(problem, even_plan(problem, layout)).breakdown_s
    inside_out = layout.model_copy(update={"rank_order": "dp-cp-tp-pp"})
    other = simulate(problem, even_plan(problem, inside_out)).breakdown_s
    assert other["tp_exposed"] > 3 * usual["tp_exposed"]
    assert other["grad_reduce_exposed"] < usual["grad_reduce_exposed"]
    assert other["compute"] == usual["compute"]


def test_pipelines_inside_a_node_pass_activations_over_its_links() -> None:
    """With tp=2 and pp=4 next to each other a node of 8 holds whole pipelines: a transfer of 2 * 8192 * 4096 / 2
    bytes goes over NVLink instead of the NIC, and each replica stands in a node of its own, alone on its NIC."""
    problem = problem_of("llama3-8b", "dgx-h100", num_gpus=64, global_batch_size=64)
    usual = Layout(tp=2, pp=4, dp=8, global_batch_size=64, sequence_parallel=True, zero_stage=1)
    other = usual.model_copy(update={"rank_order": "tp-cp-pp-dp"})
    table = layout_costs(problem, LayoutColumns.of([usual, other]))
    message = 8192 * 4096
    expected = message / (450e9 * 0.836) + 10e-6, message / (50e9 * 0.92) + 22.4e-6
    assert int(table.at(1).transfer_ns) == pytest.approx(expected[0] * 1e9, abs=1)
    assert int(table.at(0).transfer_ns) == pytest.approx(expected[1] * 1e9, abs=1)
    assert int(table.at(1).reduce_ns[0]) > 3 * int(table.at(0).reduce_ns[0])
