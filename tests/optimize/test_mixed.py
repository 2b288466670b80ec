"""Clusters of several node types: brute force, bounds, and the same numbers where the types are equal."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from milpplan import Layout, SolveOptions, fixed, load_model, simulate, solve
from milpplan.optimize import ClaimedResult, explain
from milpplan.optimize.bounds.cluster_bounds import cluster_bounds, cluster_compute_bounds
from milpplan.optimize.certify import certify
from milpplan.optimize.layout import LayoutContext
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem import Job, NodeGroup, Problem, Space
from milpplan.simulation import capacities_bytes, cluster_costs, costs_of, rank_capacities, rank_types
from tests.amounts import long_but
from tests.optimize.brute_force import brute_force, costed_layouts
from tests.optimize.mixed_problems import mixed_problem, switched_problem, two_types, with_memories
from tests.optimize.problems import preset
from tests.optimize.test_optimality import assert_optimal
from tests.oracles.whole_program import solve_monolithic


def check(problem: Problem, backend: str = "auto") -> Layout | None:
    """``solve`` against brute force; the best layout if anything fits."""
    best = brute_force(problem)
    assert_optimal(problem, solve(problem, backend=backend, gap=0.0), best)
    return None if best is None else best.plan.layout


@pytest.mark.parametrize("count", long_but((3,), (3, 4)))
@pytest.mark.parametrize("backend", long_but(("highs",), ("highs", "cpsat")))
def test_optimum_is_that_of_brute_force(count: int, backend: str) -> None:
    """On random clusters of two and three types ``solve`` finds the best plan over layouts, orders of the types,
    uneven layers and recompute counts, or proves that none fits."""
    for seed in range(count):
        check(mixed_problem(seed + 100 * (backend == "cpsat")), backend)


@pytest.mark.long
def test_margins_are_those_of_the_node_types() -> None:
    """Each type leaves its own share of its own memory; a share of the space is that of every type."""
    found = 0
    for seed in range(4):
        problem = mixed_problem(seed)
        sizes = [hardware.usable_bytes for hardware in problem.node_types]
        shares = (0.05, 0.3, 0.1)[: len(sizes)]
        larger = with_memories(
            problem, tuple(int(s / (1 - share)) for s, share in zip(sizes, shares, strict=True))
        )
        first, *others = (
            hardware.model_copy(update={"memory_margin_fraction": share})
            for hardware, share in zip(larger.node_types, shares, strict=True)
        )
        groups = tuple(
            group.model_copy(update={"hardware": other})
            for group, other in zip(larger.other_hardware, others, strict=True)
        )
        asked = larger.model_copy(update={"hardware": first, "other_hardware": groups})
        left = tuple(
            h.accelerator.memory_bytes - int(share * h.accelerator.memory_bytes)
            for h, share in zip(asked.node_types, shares, strict=True)
        )
        assert capacities_bytes(asked) == left
        best = brute_force(with_memories(problem, left))
        result = solve(asked, gap=0.0)
        assert_optimal(asked, result, best)
        found += best is not None
        space = asked.space.model_copy(update={"memory_margin_fraction": 0.0})
        assert capacities_bytes(asked.model_copy(update={"space": space})) == tuple(
            hardware.usable_bytes for hardware in asked.node_types
        )
    assert found


@pytest.mark.long
@pytest.mark.parametrize("block", range(20))
def test_optimum_is_that_of_brute_force_often(block: int) -> None:
    """The same on 400 more, and with execution switches, of training and of forwards alone."""
    for seed in range(2000 + 20 * block, 2020 + 20 * block):
        check(mixed_problem(seed))
        check(switched_problem(seed, inference=seed % 4 == 0))


@pytest.mark.long
def test_optimum_with_switches_is_that_of_brute_force() -> None:
    """The same where weights, activations or optimizer states may be on the hosts, each of its own type's size and
    speed, and where orders of ranks and switches of the execution are to decide."""
    best = [check(switched_problem(seed)) for seed in (2, 9, 11, 17, 19)]
    assert sum(layout is not None and layout.offloads for layout in best) >= 3
    assert None in best


@pytest.mark.long
def test_optimum_of_forwards_alone_is_that_of_brute_force() -> None:
    """The same of inference, whose step is what filling and draining take, with the borders between the types."""
    best = [check(switched_problem(seed, inference=True)) for seed in (1001, 1003, 1005, 1007)]
    assert None not in best


@pytest.mark.long
def test_uniform_optimum_is_that_of_brute_force() -> None:
    """The same in the uniform space."""
    for seed in range(200, 203):
        check(mixed_problem(seed, kind="uniform"))
    check(switched_problem(203, kind="uniform"))


def test_monolith_agrees() -> None:
    """The one program with the order of the types as a degree has the same optimum."""
    for seed in range(300, 302):
        problem = mixed_problem(seed)
        problem = problem.model_copy(update={"space": problem.space.model_copy(update={"vpp": (1,)})})
        best, result = brute_force(problem), solve_monolithic(problem, gap=0.0)
        assert result.status == ("infeasible" if best is None else "optimal")
        if best is not None:
            assert result.step_time_ns == pytest.approx(best.value, rel=1e-9)


@pytest.mark.long
def test_no_plan_beats_the_bounds() -> None:
    """Of every layout no plan that fits is faster than the bounds, the coarse one included."""
    tight = offloaded = 0
    for seed in range(400, 409):
        switched = seed % 3 == 0
        problem = switched_problem(seed, inference=seed % 6 == 0) if switched else mixed_problem(seed)
        columns = layout_space(problem).columns
        bounds = cluster_bounds(problem, columns, cluster_costs(problem, columns))
        coarse = cluster_compute_bounds(problem, columns)
        layouts = [columns.at(row) for row in range(len(columns))]
        roomiest = max(max(rank_capacities(problem, layout)) for layout in layouts)
        for row, costed in enumerate(costed_layouts(problem, layouts)):
            fits = costed.peak_bytes <= roomiest
            if fits.any():
                best = int(costed.step_time_ns[fits].min())
                assert coarse[row] <= best
                assert bounds.step_time_ns[row] <= best
                assert bounds.memory_bytes[row] <= roomiest
                tight += bounds.step_time_ns[row] > 0.8 * best
                offloaded += layouts[row].offloads
    assert tight > 4
    assert offloaded > 4


def test_equal_types_are_one_type() -> None:
    """Two groups of the same nodes cost a plan what one group of all does, to the nanosecond and the byte, where
    stages are whole nodes apart; and both orders are equally good."""
    hardware = preset("dgx-a100-80")
    problem = two_types(
        load_model("llama3-8b"), hardware, hardware, 32, pp=(2,), tp=(8,), vpp=(1,), zero_stage=(1,)
    )
    alone = problem.model_copy(update={"other_hardware": ()})
    mixed, single = solve(problem, gap=1e-4), solve(alone, gap=1e-4)
    assert mixed.plan is not None
    assert mixed.step_time_s == pytest.approx(single.step_time_s, rel=1e-4)
    layout = mixed.plan.layout.model_copy(update={"node_order": ()})
    same = simulate(alone, mixed.plan.model_copy(update={"layout": layout}))
    assert mixed.report == same
    for order in permutations(range(2)):
        plan = mixed.plan.model_copy(update={"layout": layout.model_copy(update={"node_order": order})})
        assert simulate(problem, plan).step_time_ns == same.step_time_ns


@pytest.mark.long
def test_slower_nodes_get_fewer_layers() -> None:
    """On A100 and H100 nodes the stages on H100 hold more layers than those on A100, the best plan is faster than
    the best with equal stages, and half of the A100 nodes replaced by H100 is better than A100 alone."""
    a100, h100 = preset("dgx-a100-80"), preset("dgx-h100")
    problem = two_types(
        load_model("llama3-8b"), a100, h100, 32, pp=(4,), tp=(2,), zero_stage=(1,), schedule=("1f1b",)
    )
    result = solve(problem)
    assert result.status == "optimal"
    assert result.plan is not None
    assert result.report is not None
    types = rank_types(problem, result.plan.layout)
    layers = np.array([stage.num_layers for stage in result.plan.virtual_stages])
    slow, fast = (layers[np.array(types) == node_type].sum() for node_type in (0, 1))
    assert fast > 1.5 * slow
    assert [stage.node_type for stage in result.report.stages] == [
        (a100.name, h100.name)[node_type] for node_type in types
    ]
    even = solve(problem.model_copy(update={"space": problem.space.model_copy(update={"kind": "uniform"})}))
    assert even.step_time_s is not None
    assert result.step_time_s is not None
    assert result.step_time_s < 0.85 * even.step_time_s


@pytest.mark.long
def test_too_little_memory_is_explained() -> None:
    """What is too small is said of the type that has most, and what helps of the type that would grow."""
    small, large = preset("l40s"), preset("dgx-a100-80")
    job = Job(num_gpus=16, global_batch_size=16, sequence_length=4096)
    problem = Problem(
        model=load_model("llama3-70b"),
        hardware=small,
        job=job,
        space=Space(kind="uniform"),
        other_hardware=(NodeGroup(hardware=large, num_gpus=8),),
    )
    assert solve(problem).status == "infeasible"
    text = str(explain(problem))
    assert f"{large.accelerator.name} has 71.6 GiB usable of 80.0 GiB with a margin of 4.0 GiB" in text
    assert "on every GPU of the node type that has most" in text
    assert f"GPUs in all, the added ones {small.name}" in text


def test_order_can_be_fixed_and_forbidden() -> None:
    """``node_order`` is a decision like the others: fixed it holds, forbidden another one is taken."""
    problem = mixed_problem(3)
    orders = {tuple(order) for order in permutations(range(len(problem.node_types)))}
    columns = layout_space(problem).columns
    assert {columns.at(row).node_order for row in range(len(columns))} == orders
    first = min(orders)
    only = layout_space(fixed(problem, {"node_order": first})).columns
    assert {only.at(row).node_order for row in range(len(only))} == {first}
    rest = layout_space(problem, ({"node_order": first},)).columns
    assert {rest.at(row).node_order for row in range(len(rest))} == orders - {first}


def test_ranks_have_the_memory_of_their_type() -> None:
    """A plan that fits on the larger devices does not fit where one of its ranks is on smaller ones."""
    rng = random.Random(1)
    seen = set()
    for seed in range(500, 504):
        problem = mixed_problem(seed)
        layout = layout_space(problem).at(0)
        capacities = rank_capacities(problem, layout)
        context = LayoutContext.of(problem, layout, costs_of(problem, layout), max(capacities))
        assert [context.capacity_of(rank) for rank in range(layout.pp)] == list(capacities)
        (costed,) = costed_layouts(problem, [layout])
        for row in rng.sample(range(len(costed.step_time_ns)), min(5, len(costed.step_time_ns))):
            report = simulate(problem, costed.plan(row))
            peaks = [stage.memory.peak_bytes for stage in report.stages]
            fits = all(peak <= room for peak, room in zip(peaks, capacities, strict=True))
            assert report.fits == fits == (costed.peak_bytes[row] <= max(capacities))
            assert report.step_time_ns == costed.step_time_ns[row]
            seen.add((fits, max(peaks) <= max(capacities)))
    assert (False, True) in seen


def test_warm_start_and_second_proof_are_of_the_cluster() -> None:
    """The best plan of a search starts another one, which proves the same, and so does another backend; a bound
    above it is refuted."""
    problem = mixed_problem(7)
    first = solve(problem)
    again = solve(problem, SolveOptions(warm_start=first.plan))
    assert again.step_time_s == first.step_time_s
    claim = ClaimedResult.of(first, SolveOptions())
    assert certify(problem, claim).verdict == "certified"
    assert claim.bound is not None
    assert certify(problem, replace(claim, bound=1.1 * claim.bound)).verdict == "refuted"


def test_group_of_nodes_is_a_record() -> None:
    """A problem of several types survives its JSON."""
    problem = mixed_problem(0)
    assert type(problem).model_validate_json(problem.model_dump_json()) == problem
    assert all(isinstance(group, NodeGroup) for group in problem.other_hardware)
