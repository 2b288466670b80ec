"""Replicas of different make: brute force, bounds, the space, and the choice between them and stages."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from milpplan import Layout, SolveOptions, fixed, load_model, simulate, solve
from milpplan.errors import InvalidInputError
from milpplan.explain.why_not import WORDS
from milpplan.optimize import ClaimedResult, refusing_rules
from milpplan.optimize.bounds.cluster_bounds import cluster_bounds, cluster_compute_bounds, cluster_uniform_bounds
from milpplan.optimize.certify import certify
from milpplan.optimize.space import rules
from milpplan.optimize.space.enumerate_layouts import broken_rules, layout_space
from milpplan.optimize.space.rules import ALL_REPLICA_RULES, num_shares
from milpplan.problem import Problem
from milpplan.simulation import cluster_costs
from tests.optimize.mixed_problems import two_types
from tests.optimize.problems import preset
from tests.optimize.replica_problems import (
    BOTH,
    brute_force_of_both,
    costed_views,
    naive_replicas,
    replica_problem,
    together,
)
from tests.optimize.test_optimality import assert_optimal
from tests.oracles.whole_program import solve_monolithic


def check(problem: Problem, backend: str = "auto") -> Layout | None:
    """``solve`` against brute force; the best layout if anything fits."""
    best = brute_force_of_both(problem)
    assert_optimal(problem, solve(problem, backend=backend, gap=0.0), best)
    return None if best is None else best.plan.layout


@pytest.mark.parametrize("backend", ["highs", pytest.param("cpsat", marks=pytest.mark.long)])
def test_optimum_is_that_of_brute_force(backend: str) -> None:
    """On random clusters of two types ``solve`` finds the best plan over degrees, shares of the batch, layers of
    the stages and what each type recomputes, or proves that none fits."""
    seeds = {"highs": (0, 3), "cpsat": (104, 105)}
    found = [check(replica_problem(seed), backend) for seed in seeds[backend]]
    assert any(layout is not None and layout.pp > 1 for layout in found)


@pytest.mark.long
@pytest.mark.parametrize(("types", "seed"), [(3, 0), pytest.param(4, 2, marks=pytest.mark.long)])
def test_optimum_on_more_types_is_that_of_brute_force(types: int, seed: int) -> None:
    """The same with replicas of three and of four makes, each with its own share and recomputation."""
    layout = check(replica_problem(seed, types=types))
    assert layout is None or len(layout.replica_micro_batches) == types


@pytest.mark.long
@pytest.mark.parametrize("seed", range(7000, 7080))
def test_optimum_on_more_types_is_that_of_brute_force_often(seed: int) -> None:
    """The same on 80 more of each, with stages or replicas to choose from and in the uniform space too."""
    for types in (3, 4):
        check(replica_problem(seed, types=types))
        check(replica_problem(seed, mixing=BOTH, types=types))
        check(replica_problem(seed, "uniform", BOTH, types=types))
        check(replica_problem(seed, types=types, vpp=(2,), pp=(2,), schedule=("zb-v",)))


@pytest.mark.long
def test_stages_or_replicas_is_a_decision() -> None:
    """With both to choose from, ``solve`` finds the better of the two, which is now the one and now the other."""
    best = [check(replica_problem(seed, mixing=BOTH)) for seed in (3, 5, 104)]
    kinds = {bool(layout.replica_micro_batches) for layout in best if layout is not None}
    assert kinds == {False, True}


def test_uniform_optimum_is_that_of_brute_force() -> None:
    """The same in the uniform space, where all replicas recompute alike."""
    for seed in (5, 104):
        check(replica_problem(seed, "uniform", BOTH))


@pytest.mark.long
def test_interleaved_optimum_is_that_of_brute_force() -> None:
    """The same with several chunks a rank, even and of any size, where the types recompute differently."""
    kinds = ({"schedule": ("interleaved",), "interleaved_layers": "even"}, {"schedule": ("zb-v",)})
    for seed, kind in zip((1, 3), kinds, strict=True):
        check(replica_problem(seed, vpp=(2,), pp=(2,), **kind))
    check(replica_problem(7, vpp=(2,), pp=(2,), schedule=("interleaved",), interleaved_layers="any"))


@pytest.mark.long
@pytest.mark.parametrize("block", range(20))
def test_optimum_is_that_of_brute_force_often(block: int) -> None:
    """The same on 200 more of each."""
    for seed in range(5000 + 10 * block, 5010 + 10 * block):
        check(replica_problem(seed))
        check(replica_problem(seed, mixing=BOTH))
        check(replica_problem(seed, "uniform", BOTH))
        for schedule in ("interleaved", "zb-v"):
            check(replica_problem(seed, vpp=(2,), pp=(2,), schedule=(schedule,)))


def test_no_plan_beats_the_bounds() -> None:
    """Of every layout no plan that fits is faster than the bounds, the coarse one included."""
    tight = 0
    for seed in (3, 6, 8):
        problem = replica_problem(seed)
        columns = layout_space(problem).columns
        bounds = cluster_bounds(problem, columns, cluster_costs(problem, columns))
        coarse = cluster_compute_bounds(problem, columns)
        roomiest = max(hardware.usable_bytes for hardware in problem.node_types)
        for row in range(len(columns)):
            steps = [step for _, step in together(problem, costed_views(problem, columns.at(row)))]
            if steps:
                assert coarse[row] <= bounds.step_time_ns[row] * (1 + 1e-9)
                assert bounds.step_time_ns[row] <= min(steps)
                assert bounds.memory_bytes[row] <= roomiest
                tight += bounds.step_time_ns[row] > 0.8 * min(steps)
    assert tight > 4


def test_tables_of_both_kinds_are_those_of_each() -> None:
    """Constants and bounds of layouts of both kinds together are those of each layout alone."""
    problem = replica_problem(3, mixing=BOTH)
    columns = layout_space(problem).columns
    whole = cluster_costs(problem, columns)
    together = cluster_bounds(problem, columns, whole), cluster_uniform_bounds(problem, columns, whole)
    kinds = set()
    for row in reversed(range(len(columns))):
        one = columns.take(np.array([row]))
        own = cluster_costs(problem, one)
        for bounds, alone in zip(
            together, (cluster_bounds(problem, one, own), cluster_uniform_bounds(problem, one, own)), strict=True
        ):
            assert (bounds.step_time_ns[row] == alone.step_time_ns[0]).all()
            assert (bounds.memory_bytes[row] == alone.memory_bytes[0]).all()
        kinds.add(type(own.at(0)))
        assert type(whole.at(row)) is type(own.at(0))
    assert len(kinds) == 2


def test_shares_are_all_that_make_up_the_batch() -> None:
    """The space holds all shares of every legal degree and micro-batch size, and no other."""
    for seed, types in ((0, 2), (2, 2), (1, 3)):
        problem = replica_problem(seed, types=types)
        space = problem.space.model_copy(update={"schedule": ("1f1b",), "vpp": (1,)})
        problem = problem.model_copy(update={"space": space})
        columns = layout_space(problem).columns
        layouts = [columns.at(row) for row in range(len(columns))]
        found = {
            (one.tp, one.cp, one.pp, one.dp, one.micro_batch_size, one.replica_micro_batches) for one in layouts
        }
        naive = naive_replicas(problem)
        assert found <= naive
        # What is left out breaks a rule of the degrees, whatever the other fields.
        for tp, cp, pp, dp, micro, shares in naive - found:
            batch = max(problem.job.global_batch_values)
            degrees = {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "micro_batch_size": micro}
            lost = Layout(
                **degrees, global_batch_size=batch, replica_micro_batches=shares, rank_order="tp-cp-pp-dp"
            )
            assert broken_rules(problem, lost)
        assert all(not broken_rules(problem, layout) for layout in layouts)


LEGAL = {"tp": 2, "pp": 2, "dp": 3, "global_batch_size": 8, "zero_stage": 1, "overlap_grad_reduce": True}
LEGAL |= {"replica_micro_batches": (2, 4), "rank_order": "tp-cp-pp-dp", "sequence_parallel": True}
SINGLE = {"dp": 6, "tp": 1, "sequence_parallel": False}
BROKEN = [
    ("node_types_hold_whole_replicas", {"pp": 4, "tp": 1, "sequence_parallel": False, "dp": 3}, (6, 6)),
    ("different_replicas_offload_nothing", {"offload_optimizer": True}, (8, 4)),
    ("different_replicas_are_neighbours", {"rank_order": "tp-cp-dp-pp"}, (8, 4)),
    ("different_replicas_meet_once_a_step", {"zero_stage": 2}, (8, 4)),
    ("different_replicas_hold_all_experts", {"ep": 3}, (8, 4)),
    (
        "different_replicas_shard_together",
        {"dp": 6, "tp": 1, "sequence_parallel": False, "dp_replicate": 3},
        (8, 4),
    ),
]


@pytest.mark.parametrize(("rule", "changes", "gpus"), BROKEN)
def test_rule_rejects_an_example(rule: str, changes: dict[str, object], gpus: tuple[int, int]) -> None:
    """Each rule refuses a layout made to break it, which is legal otherwise, and has words."""
    problem = two_types(load_model("llama3-8b"), preset("dgx-a100-80"), preset("dgx-h100"), gpus[0])
    group = problem.other_hardware[0].model_copy(update={"num_gpus": gpus[1]})
    job = problem.job.model_copy(update={"num_gpus": sum(gpus), "global_batch_size": 8})
    problem = problem.model_copy(update={"job": job, "other_hardware": (group,)})
    if gpus == (8, 4):
        assert broken_rules(problem, Layout.model_validate(LEGAL)) == []
    assert rule in broken_rules(problem, Layout.model_validate(LEGAL | changes))
    assert "replica" in WORDS[rule](problem) or "GPUs" in WORDS[rule](problem)


def test_every_rule_has_an_example_or_is_of_the_cluster() -> None:
    """No rule goes without an example or without words."""
    of_the_cluster = {"different_replicas_need_two_node_types", "different_replicas_are_trained"}
    assert set(ALL_REPLICA_RULES) - of_the_cluster == {rule for rule, _, _ in BROKEN}
    assert set(ALL_REPLICA_RULES) <= set(WORDS)


@pytest.mark.long
def test_shares_follow_the_speed_of_the_nodes() -> None:
    """On A100 and H100 nodes the replicas on H100 take about three times as many micro-batches; the step is proved
    shorter than with equal shares and than with any way to put whole stages on the types."""
    a100, h100 = preset("dgx-a100-80"), preset("dgx-h100")
    problem = two_types(
        load_model("llama3-8b"), a100, h100, 32, mixing=BOTH, pp=(1, 2), tp=(1, 2), cp=(1,), vpp=(1,)
    )
    problem = problem.model_copy(update={"job": problem.job.model_copy(update={"global_batch_size": 128})})
    result = solve(problem)
    assert result.status == "optimal"
    assert result.plan is not None
    assert result.step_time_s is not None
    layout = result.plan.layout
    slow, fast = layout.replica_micro_batches
    assert 2 * slow < fast < 4 * slow
    stages = solve(fixed(problem, {"mixing": "stages"}))
    assert stages.lower_bound_s is not None
    assert result.step_time_s < 0.95 * stages.lower_bound_s
    share = 128 // (layout.micro_batch_size * layout.dp)
    equal = fixed(problem, {"mixing": "replicas", "replica_micro_batches": (share, share)})
    bound = solve(fixed(equal, {"micro_batch_size": layout.micro_batch_size})).lower_bound_s
    assert bound is not None
    assert result.step_time_s < 0.8 * bound


def test_kind_can_be_fixed_and_forbidden() -> None:
    """``mixing`` and the shares are decisions like the others."""
    problem = replica_problem(3, mixing=BOTH)
    every = layout_space(problem).columns
    for mixing in BOTH:
        only = layout_space(fixed(problem, {"mixing": mixing})).columns
        rows = [every.at(row) for row in range(len(every))]
        wanted = [one for one in rows if bool(one.replica_micro_batches) == (mixing == "replicas")]
        assert [only.at(row) for row in range(len(only))] == wanted
    shares = next(one.replica_micro_batches for one in rows if one.replica_micro_batches)
    fixed_to = layout_space(fixed(problem, {"mixing": "replicas", "replica_micro_batches": shares})).columns
    assert {fixed_to.at(row).replica_micro_batches for row in range(len(fixed_to))} == {shares}
    rest = layout_space(problem, ({"replica_micro_batches": shares},)).columns
    assert shares not in {rest.at(row).replica_micro_batches for row in range(len(rest))}
    assert len(rest) < len(every)
    with pytest.raises(InvalidInputError, match="node types"):
        fixed(problem, {"replica_micro_batches": (1,)})
    assert fixed(problem, {"replica_micro_batches": ()}) == fixed(problem, {"mixing": "stages"})


def test_shares_say_where_the_types_differ() -> None:
    """Shares fixed in a space of whole stages only open it for replicas, and contradict a ``mixing`` of stages."""
    problem = replica_problem(3, mixing=BOTH)
    every = layout_space(problem)
    layouts = map(every.at, range(len(every)))
    shares = next(one.replica_micro_batches for one in layouts if one.replica_micro_batches)
    wanted = fixed(problem, {"mixing": "replicas", "replica_micro_batches": shares})
    assert fixed(fixed(problem, {"mixing": "stages"}), {"replica_micro_batches": shares}) == wanted
    for mixing, wrong in (("stages", shares), ("replicas", ())):
        with pytest.raises(InvalidInputError, match="replica_micro_batches"):
            fixed(problem, {"mixing": mixing, "replica_micro_batches": wrong})


def test_rows_of_sharding_are_found_again() -> None:
    """Every layout of a space of both kinds is found in its row, and shardings of every micro-batch are left out
    with their rule's name."""
    hardware = preset("dgx-a100-80"), preset("dgx-h100")
    problem = two_types(load_model("llama3-8b"), *hardware, 16, mixing=BOTH, pp=(2,), tp=(2,), vpp=(1,))
    problem = problem.model_copy(update={"space": problem.space.model_copy(update={"zero_pipeline": True})})
    space = layout_space(problem)
    layouts = [space.at(row) for row in range(len(space))]
    assert [space.find(layout) for layout in layouts] == list(range(len(layouts)))
    assert space.rejected["different_replicas_meet_once_a_step"] > 0
    assert {one.zero_stage for one in layouts if one.replica_micro_batches} == {0, 1}
    assert {one.zero_stage for one in layouts if not one.replica_micro_batches} >= {2, 3}
    without = layout_space(problem, without=("different_replicas_meet_once_a_step",))
    zero = [without.at(row) for row in range(len(without))]
    assert any(one.zero_stage == 2 and one.replica_micro_batches for one in zero)


@pytest.mark.long
def test_warm_start_and_second_proof_are_of_the_cluster() -> None:
    """The best plan of a search starts another one, which proves the same, and so does another backend; a bound
    above it is refuted."""
    problem = replica_problem(104)
    first = solve(problem)
    assert first.plan is not None
    assert simulate(problem, type(first.plan).model_validate_json(first.plan.model_dump_json())) == first.report
    again = solve(problem, SolveOptions(warm_start=first.plan))
    assert again.step_time_s == first.step_time_s
    claim = ClaimedResult.of(first, SolveOptions())
    assert certify(problem, claim).verdict == "certified"
    assert claim.bound is not None
    assert certify(problem, replace(claim, bound=1.1 * claim.bound)).verdict == "refuted"


def test_too_many_shares_and_one_program_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of shares that no memory holds, and the one program over all layouts, are refused in three parts."""
    problem = replica_problem(0)
    with pytest.raises(InvalidInputError, match="mixing=replicas"):
        solve_monolithic(problem)
    monkeypatch.setattr(rules, "MAX_ROWS", 1)
    with pytest.raises(InvalidInputError, match="share the batch"):
        layout_space(problem)


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_sharding_that_meets_too_often_is_named(zero_stage: int) -> None:
    """Replicas with different numbers of micro-batches cannot meet in each: the message says so first."""
    space = replica_problem(0).space.model_copy(update={"zero_stage": (zero_stage,)})
    problem = replica_problem(0).model_copy(update={"space": space})
    rules = refusing_rules(problem, layout_space(problem).rejected)
    assert rules[0] == "different_replicas_meet_once_a_step"
    # With the choice left free the rule empties nothing.
    free = replica_problem(0)
    assert len(layout_space(free)) > 0
    assert "different_replicas_meet_once_a_step" not in refusing_rules(free, layout_space(free).rejected)


def test_one_type_has_no_replicas_of_different_make() -> None:
    """Where there is one node type, nothing comes of ``mixing``: the space is what it was."""
    problem = replica_problem(1, mixing=BOTH)
    alone = problem.model_copy(update={"other_hardware": ()})
    stages = alone.model_copy(update={"space": alone.space.model_copy(update={"mixing": ("stages",)})})
    assert layout_space(alone).sha256() == layout_space(stages).sha256()


def test_shares_are_counted_before_they_are_made() -> None:
    """The number of shares that a table of too many is refused by is the number of shares, for one to four types;
    of four types on a batch of thousands they are refused, with what to do."""
    rng = random.Random(3)
    for _ in range(40):
        numbers = [rng.randint(1, 4) for _ in range(rng.randint(1, 4))]
        total = rng.randint(1, 24)
        counted = sum(
            sum(n * m for n, m in zip(numbers, own, strict=True)) == total
            for own in product(range(1, total + 1), repeat=len(numbers))
        ) if len(numbers) < 4 else num_shares(numbers, total)  # fmt: skip
        assert num_shares(numbers, total) == counted
        assert len(list(rules._shares(None, *numbers, total))) == counted
    problem = replica_problem(0, types=4)
    job = problem.job.model_copy(update={"global_batch_size": 65_536})
    with pytest.raises(InvalidInputError, match="share the batch"):
        layout_space(problem.model_copy(update={"job": job}))
