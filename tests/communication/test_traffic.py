"""Traffic of a step: the matrix, its tiers and links, and its time line."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from milpplan import Layout, Plan, Problem, simulate, traffic
from milpplan.communication import gpus_per_domain, rank_lists
from milpplan.communication.traffic import spread
from milpplan.communication.wires import ALGORITHMS, Algorithm
from milpplan.errors import InvalidInputError
from milpplan.problem import RANK_ORDERS, VirtualStage
from milpplan.simulation import LayoutColumns
from milpplan.simulation.network import placement
from tests.amounts import first, long_but
from tests.simulation.cases import even_plan, problem_of, random_cases, shipped_hardware
from tests.simulation.rank_listing import listed
from tests.simulation.test_placement import random_grid

MIB = 2**20


def moe_case(**layout: Any) -> tuple[Problem, Plan]:
    """Qwen3 30B-A3B, 48 layers of 128 experts, on H100s."""
    problem = problem_of("qwen3-30b-a3b", "dgx-h100", sequence_length=2048)
    return problem, even_plan(problem, Layout(sequence_parallel=True, **layout), full=1)


def tied_case(**layout: Any) -> tuple[Problem, Plan]:
    """Gemma 7B, 28 layers and a tied embedding, on nodes of 8."""
    problem = problem_of("gemma-7b", "dgx-a100-80", sequence_length=1024)
    return problem, even_plan(problem, Layout(**layout), full=1)


EVERYTHING = {
    16: moe_case(tp=2, cp=2, pp=2, dp=2, ep=4, etp=1, global_batch_size=16, zero_stage=1),
    64: moe_case(tp=2, cp=2, pp=2, dp=8, ep=8, etp=2, global_batch_size=64, zero_stage=1, schedule="1f1b"),
    128: moe_case(
        tp=4, cp=2, pp=4, dp=4, ep=16, vpp=2, schedule="interleaved", global_batch_size=64, zero_stage=1
    ),
    512: moe_case(tp=2, cp=2, pp=4, dp=32, ep=32, global_batch_size=256, zero_stage=1),
    4096: moe_case(tp=2, cp=2, pp=8, dp=128, ep=64, global_batch_size=1024, zero_stage=1),
}
"""Tensor with sequence, context, expert, pipeline and data parallelism at once."""


def assert_sums(problem: Problem, plan: Plan, algorithm: Algorithm) -> None:
    """The matrix, the tiers, the links and the time line hold what the collectives send."""
    report = traffic(problem, plan, algorithm)
    for name, pairs in report.pairs.items():
        assert pairs.total_bytes == pytest.approx(report.wire_bytes[name], rel=1e-12)
        assert sum(report.tier_bytes[name].values()) == pytest.approx(report.wire_bytes[name], rel=1e-12)
        assert (pairs.sender != pairs.receiver).all()
    total = sum(report.wire_bytes.values())
    assert report.all_pairs.total_bytes == pytest.approx(total, rel=1e-12)
    links = report.gpu_links
    for out, into in ((links.out_inside, links.in_inside), (links.out_between, links.in_between)):
        assert out.sum() == pytest.approx(into.sum())
    assert links.out_inside.sum() + links.out_between.sum() == pytest.approx(total)
    assert report.node_links.out_between.sum() == pytest.approx(links.out_between.sum())
    for tier, bins in (("inside", report.timeline.inside_bytes), ("between", report.timeline.between_bytes)):
        expected = sum(tiers[tier] for tiers in report.tier_bytes.values())  # type: ignore[index]
        assert bins.sum() == pytest.approx(expected, rel=1e-9)
        assert (bins >= 0).all()


@pytest.mark.parametrize(
    ("num_gpus", "algorithm"),
    first(3, [(16, "ring"), (64, "tree"), (128, "hierarchical"), *((4096, a) for a in ALGORITHMS)]),
)
def test_the_matrix_is_the_collectives_wire_bytes(num_gpus: int, algorithm: Algorithm) -> None:
    """All parallelisms at once on 16 to 128 GPUs, in the long tests on 4,096: what the pairs exchange is what the
    collectives send."""
    problem, plan = EVERYTHING[num_gpus]
    assert plan.layout.num_gpus == num_gpus
    report = traffic(problem, plan, algorithm)
    in_use = {name for name, wire in report.wire_bytes.items() if wire > 0}
    wanted = {"sp", "cp", "ep", "pp", "gradient_reduce", "parameter_gather", "gradient_norm"}
    assert in_use >= wanted
    assert_sums(problem, plan, algorithm)


@pytest.mark.parametrize("count", long_but((2,), (2, 4)))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_random_plans_add_up(count: int, algorithm: Algorithm) -> None:
    """Random models, clusters, layouts, splits and orders of ranks: everything adds up."""
    random = np.random.default_rng(8)
    for problem, plan in random_cases(8, count):
        order = RANK_ORDERS[random.integers(24)]
        layout = plan.layout.model_copy(update={"rank_order": order})
        if not placement.stages_agree(LayoutColumns.of([layout]).mapping)[0]:
            layout = plan.layout
        assert_sums(problem, plan.model_copy(update={"layout": layout}), algorithm)


def test_a_tied_embedding_is_added_up_between_the_ends() -> None:
    """Two stages, one pair each: each end sends its 256,000 x 3,072 gradients in 4 bytes to the other."""
    problem, plan = tied_case(pp=2, dp=1, global_batch_size=4)
    report = traffic(problem, plan)
    pairs = report.pairs["tied_embedding"]
    assert pairs.sender.tolist() == [0, 1]
    assert pairs.num_bytes.tolist() == [256_000 * 3072 * 4] * 2
    assert_sums(problem, plan, "ring")


def test_tensor_parallel_bytes_by_hand() -> None:
    """GPT-3 on two GPUs without sequence parallelism, one micro-batch of 2,048 tokens: each of 96 layers has two
    all-reduces of 2 * 2,048 * 12,288 bytes forward and two backward, the ends one each and three of 4 bytes a
    token; a pair sends each message once both ways."""
    problem = problem_of("gpt3-175b", "dgx-a100-80", sequence_length=2048)
    report = traffic(problem, even_plan(problem, Layout(tp=2, global_batch_size=1)))
    message = 2 * 2048 * 12288
    assert report.pairs["tp"].matrix(2).tolist() == [
        [0, (4 * 96 + 2) * message + 3 * 4 * 2048],
        [(4 * 96 + 2) * message + 3 * 4 * 2048, 0],
    ]
    assert report.tier_bytes["tp"]["between"] == 0


def test_full_recomputation_repeats_the_forward() -> None:
    """A layer that is recomputed wholly sends its forward's messages again: three times two instead of twice."""
    problem = problem_of("gpt3-175b", "dgx-a100-80", sequence_length=2048)
    layout, message = Layout(tp=2, global_batch_size=1), 2 * 2048 * 12288
    kept = traffic(problem, even_plan(problem, layout)).wire_bytes["tp"]
    again = traffic(problem, even_plan(problem, layout, full=96)).wire_bytes["tp"]
    assert again - kept == 2 * 96 * 2 * message


def test_pipeline_bytes_by_hand() -> None:
    """Four micro-batches over four stages: each neighbouring pair passes 2 * 1,024 * 3,072 bytes there, and as
    many back, four times; with two virtual stages each the last stage sends to the first, too."""
    problem, plan = tied_case(pp=4, dp=1, global_batch_size=4)
    message = 2 * 1024 * 3072
    expected = np.zeros((4, 4))
    for stage in range(3):
        expected[stage, stage + 1] = expected[stage + 1, stage] = 4 * message
    assert np.array_equal(traffic(problem, plan).pairs["pp"].matrix(4), expected)
    layout = Layout(pp=2, vpp=2, schedule="interleaved", global_batch_size=4)
    wrapped = traffic(problem, even_plan(problem, layout)).pairs["pp"].matrix(2)
    # Two hops from rank 0 to 1 and one from 1 to 0; gradients go back the other way.
    assert wrapped.tolist() == [[0, 12 * message], [12 * message, 0]]


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v"])
def test_a_v_pipeline_sends_nothing_where_it_turns(schedule: str) -> None:
    """Each neighbouring pair of ranks passes an activation down the V and one up, and as many gradients back; the
    ends share a rank, so a tied embedding is one matrix. Everything still adds up."""
    problem, plan = tied_case(pp=7, vpp=2, tp=2, schedule=schedule, global_batch_size=16)
    report = traffic(problem, plan)
    message = 2 * 1024 * 3072
    ranks = report.pairs["pp"].matrix(14).reshape(7, 2, 7, 2).sum(axis=(1, 3))
    expected = np.zeros((7, 7))
    for stage in range(6):
        # 16 micro-batches, activations on one arm of the V and gradients on the other, from 2 GPUs.
        expected[stage, stage + 1] = expected[stage + 1, stage] = 16 * 2 * 2 * message
    assert np.array_equal(ranks, expected)
    assert report.wire_bytes["tied_embedding"] == 0
    assert_sums(problem, plan, "ring")


def test_inputs_that_stay_gathered_are_not_gathered_again() -> None:
    """GPT-3 on two GPUs with sequence parallelism, one micro-batch of 2,048 tokens: of three gathers of a linear
    pair in forward and backward two are left, and selective recomputation, which drops the inputs, brings the
    third back. A pair of GPUs sends half of each message once both ways."""
    problem = problem_of("gpt3-175b", "dgx-a100-80", sequence_length=2048)
    sent = {
        (again, selective): traffic(
            problem,
            even_plan(
                problem,
                Layout(tp=2, sequence_parallel=True, gather_again=again, global_batch_size=1),
                selective=selective,
            ),
        ).wire_bytes["sp"]
        for again in (True, False)
        for selective in (0, 40)
    }
    message = 2 * 2048 * 12288
    assert sent[True, 0] == (96 * 2 * 5 + 4) * message
    assert sent[True, 40] == sent[True, 0]
    assert sent[False, 0] == sent[True, 0] - 96 * 2 * message
    assert sent[False, 40] == sent[False, 0] + 40 * 2 * message


def test_transfers_in_parts_are_gathered_by_the_receivers() -> None:
    """Two stages of four GPUs in nodes of 2, four micro-batches of 1,024 tokens: with scatter and gather each GPU
    sends a quarter of the activation, once there and once back, and the four that receive gather all of it."""
    problem, plan = tied_case(pp=2, tp=4, global_batch_size=4)
    message = 2 * 1024 * 3072
    whole = traffic(problem, plan)
    assert whole.wire_bytes["pp"] == 4 * 2 * 4 * message
    parts = plan.model_copy(update={"layout": plan.layout.model_copy(update={"pp_scatter_gather": True})})
    report = traffic(problem, parts)
    matrix = report.pairs["pp"].matrix(8)
    across = matrix[:4, 4:].sum() + matrix[4:, :4].sum()
    assert across == 4 * 2 * message
    # A gather of B bytes among four sends 3 B, in each of the two stages four times.
    assert matrix[:4, :4].sum() == matrix[4:, 4:].sum() == 4 * 3 * message
    assert_sums(problem, parts, "ring")


def test_inference_sends_forwards_alone() -> None:
    """Of GPT-3 on 2 x 2 GPUs: two all-reduces a layer and the embedding's, a gather of the padded vocabulary's
    logits for the last token of each sequence, activations there and none back, and no gradients."""
    problem = problem_of("gpt3-175b", "dgx-a100-80", sequence_length=2048, kind="inference")
    layout = Layout(tp=2, pp=2, schedule="gpipe", global_batch_size=3)
    plan = even_plan(problem, layout)
    report, message = traffic(problem, plan), 2 * 2048 * 12288
    vocabulary = math.ceil(problem.model.vocab_size / 256) * 256
    assert report.wire_bytes["tp"] == 3 * ((2 * 96 + 1) * 2 * message + 2 * vocabulary)
    assert report.pairs["pp"].matrix(4).sum() == report.wire_bytes["pp"] == 3 * 2 * message
    others = set(report.wire_bytes) - {"tp", "pp"}
    assert {report.wire_bytes[name] for name in others} == {0.0}
    assert_sums(problem, plan, "ring")


def _switched(random: np.random.Generator, problem: Problem, layout: Layout) -> tuple[Problem, Layout]:
    """Forwards alone, or a training step, with any of the switches that change what is sent."""
    changes: dict[str, Any] = {"gather_again": not layout.sequence_parallel or bool(random.integers(2))}
    changes["pp_scatter_gather"] = layout.tp > 1 and layout.pp > 1 and not layout.sequence_parallel
    if random.integers(2):
        problem = problem.model_copy(update={"job": problem.job.model_copy(update={"kind": "inference"})})
        batch = layout.num_micro_batches * layout.micro_batch_size * layout.dp
        changes |= {"schedule": "gpipe" if layout.pp > 1 else "1f1b", "vpp": 1, "global_batch_size": batch}
        changes |= {"zero_stage": random.choice([0, 3]) if layout.dp * layout.cp > 1 else 0}
        changes |= {"overlap_grad_reduce": changes["zero_stage"] == 3}
        changes |= {"overlap_param_gather": changes["zero_stage"] == 3}
    return problem, Layout(**layout.model_dump() | changes)


def test_random_plans_with_switches_add_up() -> None:
    """Random plans, some of forwards alone, with inputs that stay gathered and transfers in parts: pairs, tiers,
    links and time line hold what the collectives send, whatever they are made of."""
    random, seen = np.random.default_rng(11), set()
    for number, (problem, plan) in enumerate(random_cases(40, 7)):
        own, layout = _switched(random, problem, plan.layout)
        edges = np.linspace(0, problem.model.num_layers, layout.num_virtual_stages + 1).astype(int).tolist()
        held = tuple(VirtualStage(layers=(first, last)) for first, last in pairwise(edges))
        assert_sums(own, Plan(layout=layout, virtual_stages=held), ALGORITHMS[number % len(ALGORITHMS)])
        seen |= {own.job.kind, *(["parts"] if layout.pp_scatter_gather else [])}
        seen |= {"kept"} if not layout.gather_again else set()
    assert seen == {"kept", "parts", "inference", "training"}


@pytest.mark.parametrize("order", ["tp-cp-dp-pp", "tp-cp-pp-dp", "dp-cp-tp-pp"])
def test_every_parallelism_stays_in_its_groups(order: str) -> None:
    """Pairs of each parallelism are members of one of its listed groups."""
    problem = problem_of("llama3-8b", "dgx-h100", sequence_length=2048)
    layout = Layout(
        tp=2, cp=2, dp=4, pp=4, global_batch_size=16, sequence_parallel=True, zero_stage=1, rank_order=order
    )
    report, groups = traffic(problem, even_plan(problem, layout)), listed(layout)
    names = {"sp": "tensor", "cp": "context_ring", "pp": "pipeline", "gradient_reduce": "replicas"}
    for name, group in names.items():
        of_rank = {rank: number for number, ranks in enumerate(groups[group]) for rank in ranks}
        pairs = report.pairs[name]
        assert len(pairs.sender) > 0
        assert all(of_rank[s] == of_rank[r] for s, r in zip(pairs.sender, pairs.receiver, strict=True))


def test_lists_of_ranks() -> None:
    """The groups of the matrix are those that are written down one by one, for any order of ranks."""
    random = np.random.default_rng(9)
    for _ in range(40):
        layout = random_grid(random, (1, 2, 3, 4))
        found = rank_lists(layout, 1, 1)
        names = ("tensor", "head_exchange", "context_ring", "replicas")
        for name in (*names, "expert_tensor", "expert", "expert_replicas"):
            groups = sorted(map(tuple, found[name].reshape(-1, found[name].shape[-1]).tolist()))
            assert tuple(groups) == listed(layout)[name]


def test_domains_of_racks_are_their_segments() -> None:
    """A rack of 72 that serves segments counts the largest that divides the job; a node its GPUs."""
    assert gpus_per_domain(shipped_hardware("dgx-h100"), 512) == 8
    rack = shipped_hardware("gb200-nvl72")
    assert gpus_per_domain(rack, 512) == max(s for s in rack.scale_up.segments if 512 % s == 0)


def test_sharding_groups_split_the_reduction() -> None:
    """With states sharded over 4 of 16 replicas the scatter stays among 4 neighbours and an all-reduce of a
    quarter follows among every fourth; together they send more than one scatter over 16."""
    problem = problem_of("llama3-8b", "dgx-h100", sequence_length=2048)
    plan = even_plan(problem, Layout(dp=16, global_batch_size=16, zero_stage=1))
    hybrid = plan.model_copy(update={"layout": plan.layout.model_copy(update={"dp_replicate": 4})})
    whole, parts = traffic(problem, plan), traffic(problem, hybrid)
    assert_sums(problem, hybrid, "ring")
    wire, before = parts.wire_bytes, whole.wire_bytes
    assert wire["parameter_gather"] / before["parameter_gather"] == pytest.approx((3 / 4) / (15 / 16))
    assert wire["gradient_reduce"] / before["gradient_reduce"] == pytest.approx(
        (3 / 4 + 2 * 3 / 4 / 4) / (15 / 16)
    )


def test_bytes_are_spread_over_their_intervals() -> None:
    """12 bytes from 0 to 3 and 5 at moment 2, in bins of one: 4, 4, 9; what ends later stays in the last bin."""
    edges = np.array([0.0, 1.0, 2.0, 3.0])
    found = spread(np.array([0, 2]), np.array([3, 2]), np.array([12.0, 5.0]), edges)
    assert found.tolist() == [4, 4, 9]
    late = spread(np.array([2]), np.array([4]), np.array([8.0]), edges)
    assert late.tolist() == [0, 0, 8]


def test_overheads_and_utilisation_are_the_simulators() -> None:
    """Exposed and hidden seconds are those of the breakdown; compute is a part of busy, busy of the step."""
    problem, plan = EVERYTHING[64]
    report, step = traffic(problem, plan), simulate(problem, plan)
    assert report.exposed_s["tp_exposed"] == step.breakdown_s["tp_exposed"]
    assert report.hidden_s == step.hidden_s
    for stage, use in zip(step.stages, report.utilisation, strict=True):
        idle = ("bubble", "param_gather_exposed", "grad_reduce_exposed", "grad_norm", "step_overhead", "optimizer")
        waits = sum(stage.breakdown_s[name] for name in idle)
        assert use.busy_fraction == pytest.approx(1 - waits / step.step_time_s)
        assert 0 < use.compute_fraction <= use.busy_fraction < 1


def test_effective_bandwidth_grows_with_the_message() -> None:
    """For every operation, group and tier the bus bandwidth never falls with the size of the message by more than
    the measured tables do, stays below the links' rate, and both tiers are there."""
    problem, plan = EVERYTHING[64]
    rows = traffic(problem, plan).bandwidths
    assert {row.tier for row in rows} == {"inside", "between"}
    for row in rows:
        assert row.seconds > 0
        if row.tier == "between" and row.stride == 8:
            assert row.bus_bandwidth_bytes_per_s <= 50e9
    largest = [row for row in rows if row.operation == "all_gather" and row.num_gpus == 8 and row.stride == 8]
    rates = [row.bus_bandwidth_bytes_per_s for row in largest]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(50e9 * 0.92, rel=0.01)


@pytest.mark.parametrize("wrong", [{"algorithm": "star"}, {"num_bins": 0}])
def test_nonsense_is_refused(wrong: dict[str, Any]) -> None:
    """An unknown algorithm and a time line without bins are the caller's mistakes."""
    problem, plan = tied_case(pp=2, dp=1, global_batch_size=4)
    with pytest.raises(InvalidInputError):
        traffic(problem, plan, **wrong)


def test_more_pairs_than_memory_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is checked before the edges are made, and the message says what to do."""
    problem, plan = tied_case(pp=2, dp=1, global_batch_size=4)
    monkeypatch.setattr("milpplan.communication.wires.MAX_PAIRS", 1)
    with pytest.raises(InvalidInputError, match="fewer GPUs"):
        traffic(problem, plan)


def test_layers_with_different_top_k_dispatch_their_own_copies() -> None:
    """Two kinds of layer, with 2 and with 8 experts a token: each dispatches as its own time has it."""
    problem, plan = EVERYTHING[64]
    (run,) = problem.model.layers
    few = run.model_copy(update={"count": 24, "mlp": run.mlp.model_copy(update={"num_experts_per_tok": 2})})
    many = run.model_copy(update={"count": 24})
    mixed = problem.model_copy(update={"model": problem.model.model_copy(update={"layers": (few, many)})})
    only = problem.model.model_copy(update={"layers": (few.model_copy(update={"count": 48}),)})
    sent = [
        traffic(one, plan).wire_bytes["ep"] for one in (problem, mixed, problem.model_copy(update={"model": only}))
    ]
    assert sent[1] == pytest.approx((sent[0] + sent[2]) / 2)
    assert_sums(mixed, plan, "ring")
