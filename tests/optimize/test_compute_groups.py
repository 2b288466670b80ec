"""Layouts that are bounded together: each is in one group, whose bound is its own, and none is lost on the way."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from milpplan import load_hardware, load_model, simulate, simulate_many, solve
from milpplan.optimize import Budget, SolveContext, SolveOptions, objective_weights, with_space
from milpplan.optimize.bounds import SAFETY, uniform_compute_bounds, uniform_plan
from milpplan.optimize.bounds.cluster_bounds import cluster_bounds, cluster_compute_bounds, cluster_uniform_bounds
from milpplan.optimize.layout import LayoutSolver
from milpplan.optimize.milp.backends import backend
from milpplan.optimize.search import best_first, closed_layouts
from milpplan.optimize.search.best_first import Search
from milpplan.optimize.search.branch_phase import BranchPhase
from milpplan.optimize.search.closed_layouts import (
    FATES,
    BlockClasses,
    ClosedLayouts,
    ComputeGroups,
    PlacedClasses,
    compute_values,
    fitting_blocks,
    kernel_space,
)
from milpplan.optimize.solve import bound_and_decide, decide_layouts
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.optimize.space.layout_space import LayoutSpace
from milpplan.problem import RANK_ORDERS, SCHEDULES, Job, Problem, Space
from milpplan.simulation import (
    LAYER_KEYS,
    FloatArray,
    LayoutColumns,
    cluster_costs,
    distinct_layers,
    layer_durations_ns,
    least_held_bytes,
    usable_memory_bytes,
)
from milpplan.simulation.layout_costs import least_layer_ns
from milpplan.units import NS_PER_S
from tests.amounts import first, long_but
from tests.optimize.mixed_problems import mixed_problem, switched_problem
from tests.optimize.problems import random_plan, random_problem
from tests.optimize.replica_problems import replica_problem
from tests.optimize.test_execution import with_execution

OPEN: dict[str, Any] = {
    "rank_order": ("tp-cp-dp-pp", "pp-dp-tp-cp", "dp-tp-cp-pp"),
    "sequence_parallel": (False, True),
    "tp_overlap": ("none", "ring", "pipelined"),
    "gather_again": (False, True),
    "pp_scatter_gather": (False, True),
    "offload_optimizer": (False, True),
    "zero_stage": (0, 1),
}
"""Most of the switches."""


def opened(gpus: int = 16, model: str = "gpt3-175b", **space: Any) -> Problem:
    """A model with most switches open."""
    return Problem(
        model=load_model(model),
        hardware=load_hardware("dgx-a100-80"),
        job=Job(num_gpus=gpus, global_batch_size=32, sequence_length=2048),
        space=Space(**{"kind": "uniform"} | OPEN | space),
    )


@pytest.mark.parametrize("seeds", long_but((1,), (1, 40)))
@pytest.mark.parametrize(
    "make",
    first(4, (random_problem, mixed_problem, switched_problem, with_execution, replica_problem)),
)
def test_every_layout_is_in_one_group_with_its_bound(make: Any, seeds: int) -> None:
    """The groups' layouts are all of the space, once each, and the bound of a group is what the formula says of
    each of its layouts by itself: no layout bounds below its group, and no uniform plan is faster."""
    for seed in range(seeds):
        problem = make(seed)
        for forbidden in ((), ({"tp": 2}, {"zero_stage": 1})):
            check_groups(problem, forbidden)
            check_groups(with_space(problem, kind="uniform"), forbidden)


@pytest.mark.parametrize("schedules", [("1f1b", "interleaved"), pytest.param(SCHEDULES, marks=pytest.mark.long)])
def test_groups_of_a_space_with_all_switches(schedules: tuple[str, ...]) -> None:
    """The same where switches, schedules and orders of ranks are all to decide; groups are few."""
    problem = opened(schedule=schedules, cp=(1, 2))
    groups, layouts = check_groups(problem)
    assert layouts > 1.5 * groups > 5000


def check_groups(problem: Problem, forbidden: tuple[dict[str, int], ...] = ()) -> tuple[int, int]:
    """Numbers of groups and of layouts, which agree."""
    space = layout_space(problem, forbidden)
    groups = ComputeGroups.of(problem, space, space.switches.alike(LAYER_KEYS), np.arange(len(space.blocks)))
    rows, group = groups.layouts(np.arange(len(groups.block)))
    assert np.array_equal(np.sort(rows), np.arange(len(space)))
    columns = space.columns
    own = cluster_compute_bounds(problem, columns)
    if problem.space.kind == "uniform" and not problem.other_hardware:
        # Sharper, as stages are equal; whatever is recomputed, and whether or not a plan fits.
        sharper = uniform_compute_bounds(problem, columns)
        assert (sharper >= own * (1 - 1e-9))[~columns.split_backward].all()
        if columns.split_backward.any():
            sharper = np.maximum(sharper, own)
        sample = np.random.default_rng(1).permutation(len(space))[:400]
        steps = simulate_many(problem, columns.take(sample)).step_time_ns
        assert (sharper[sample] <= steps.min(axis=1)).all()
        own = sharper
    fits = fitting_blocks(problem, space)
    assert np.array_equal(groups.bounds_ns[group], own[rows])
    check_too_large(problem, columns.take(np.sort(rows[~fits[groups.block[group]]])))
    sizes = groups.sizes(np.arange(len(groups.block)))
    assert np.array_equal(np.bincount(group, minlength=len(groups.block)), sizes)
    assert np.array_equal(groups.interleaved[group], columns.vpp[rows] > 1)
    check_blocks(problem, space, own)
    assert np.array_equal(space.block_of(rows), groups.block[group])
    weights, limits = objective_weights(problem, columns)
    values = np.where((own > limits) | ~fits[space.block_of(np.arange(len(space)))], np.inf, own * weights)
    assert np.array_equal(compute_values(problem, space), values)
    return len(groups.block), len(space)


def check_blocks(problem: Problem, space: LayoutSpace, bounds: FloatArray) -> None:
    """What is said of all blocks of a class is below what is said of each of their layouts (where the node types
    differ the two are bounds of other kinds, and plans of either are above both)."""
    kernels = kernel_space(problem, space)
    classes = BlockClasses.of(problem, kernels)
    assert np.array_equal(np.sort(classes.key[classes.first]), np.arange(len(classes.first)))
    least = classes.least_ns(problem, kernels, np.arange(len(classes.first)))
    of_layout = least[classes.key][space.block_of(np.arange(len(space)))]
    assert (of_layout > 0).all()
    if not problem.other_hardware:
        assert (of_layout <= bounds).all()
    uniform = with_space(problem, kind="uniform")
    sample = np.random.default_rng(2).permutation(len(space))[:100]
    steps = simulate_many(uniform, space.take(sample)).step_time_ns
    assert (of_layout[sample] <= steps.min(axis=1)).all()
    fits = fitting_blocks(problem, space)
    assert np.array_equal(fits, fits[classes.first][classes.key])


def check_too_large(problem: Problem, columns: LayoutColumns) -> None:
    """Of layouts that are left out unseen none fits, by the bounds that know all of their memory."""
    if not len(columns):
        return
    costs = cluster_costs(problem, columns)
    if problem.space.kind == "uniform":
        memory = cluster_uniform_bounds(problem, columns, costs).memory_bytes.min(axis=1)
    else:
        memory = cluster_bounds(problem, columns, costs).memory_bytes
    assert (memory > usable_memory_bytes(problem)).all()


@pytest.mark.parametrize("kind", ["free", "uniform"])
def test_blocks_too_large_for_their_states_are_left_out(kind: str) -> None:
    """Of 175 billion parameters on 64 GPUs most blocks are left out, with optimizer states offloaded or not: none
    of their layouts fits. What is left is not too large for its states with the best sharding and offload."""
    for offload in ((False,), (False, True)):
        problem = with_space(opened(64, offload_optimizer=offload, tp_overlap=("none",)), kind=kind)
        space = layout_space(problem)
        fits = fitting_blocks(problem, space)
        assert 0 < fits.sum() < 0.5 * len(fits)
        unseen = np.flatnonzero(~fits[space.block_of(np.arange(len(space)))])
        check_too_large(problem, space.take(unseen[:: max(1, len(unseen) // 3000)]))
        least = np.full(len(fits), np.inf)
        held = least_held_bytes(problem, space.columns)
        np.minimum.at(least, space.block_of(np.arange(len(space))), held)
        assert (least[fits & (space.sizes > 0)] * SAFETY <= usable_memory_bytes(problem)).all()


def test_what_does_not_fit_is_counted_unseen_or_not() -> None:
    """Layouts that a search of a model too large for most of its layouts never listed are counted as too large,
    and none of them fits; forbidden ones are not counted."""
    for forbid in ((), ({"tp": 8, "pp": 2},)):
        problem = opened(offload_optimizer=(True,))
        fates = solve(problem, gap=1e-4, forbid=forbid).layouts
        assert fates is not None
        counts = {fate: fates.count(fate) for fate in FATES}
        assert counts == {fate: int((fates.fates == code).sum()) for code, fate in enumerate(FATES)}
        assert sum(counts.values()) == len(fates.space)
        large = fates.fates == FATES.index("does_not_fit")
        unseen = np.setdiff1d(np.flatnonzero(large), fates.rows)
        assert len(unseen) > 1000
        check_too_large(problem, fates.space.take(unseen[:: len(unseen) // 1000]))


def test_what_became_of_every_layout_adds_up() -> None:
    """Layouts that the search never looked at are bounded away: no plan of theirs is below what is proved."""
    problem = opened(model="llama2-7b")
    result = solve(problem, gap=1e-4)
    fates = result.layouts
    assert result.status == "optimal"
    assert fates is not None
    assert len(fates.rows) < len(fates.space)
    counts = {fate: fates.count(fate) for fate in FATES}
    assert sum(counts.values()) == len(fates.space)
    assert counts == {fate: int((fates.fates == code).sum()) for code, fate in enumerate(FATES)}
    assert counts["open"] == 0
    unseen = np.setdiff1d(np.arange(len(fates.space)), fates.rows)
    assert set(fates.fates[unseen].tolist()) == {FATES.index("bounded")}
    priced = simulate_many(problem, fates.space.take(unseen[:: max(1, len(unseen) // 3000)]))
    assert result.lower_bound_s is not None
    assert priced.step_time_ns.min() >= result.lower_bound_s * NS_PER_S * (1 - 1e-9)


def test_all_that_may_be_below_a_value_is_opened() -> None:
    """Also where few layouts of a group are left in the space."""
    problem = opened(model="llama2-7b")
    space = layout_space(problem, ({"zero_stage": 0}, {"tp_overlap": "ring"}))
    values = compute_values(problem, space)
    solver = LayoutSolver(SolveOptions(), backend("auto"), [], None)
    search = Search(problem, space, solver, 0.0, keep_below=float(np.median(values)))
    search.best = 1.0, uniform_plan(problem, space.at(0), "none")
    search.open_all()
    assert np.array_equal(np.sort(search.explored.rows), np.flatnonzero(values < search.keep_below))
    assert search.explored.closed.bound >= search.keep_below


SMALL = Budget(groups_at_once=40, blocks_at_once=3)
"""No space is small, and little of one is done at once."""


@pytest.mark.parametrize("seeds", long_but((3,), (3, 100)))
@pytest.mark.parametrize("make", [random_problem, mixed_problem, with_execution])
def test_a_space_taken_apart_piece_by_piece_has_the_same_optimum(make: Any, seeds: int) -> None:
    """Where blocks are bounded together and few are taken apart at a time the optimum is the same; where there is
    no room for all groups or layouts the bound stays below it, and every layout is still counted once."""
    stopped = 0
    for seed in range(seeds):
        problem = with_space(make(seed), kind="uniform")
        known = solve(problem, gap=1e-4)
        rooms = (SMALL, replace(SMALL, groups=3), replace(SMALL, layouts=1), replace(SMALL, layouts=0))
        for budget in rooms:
            context = SolveContext(SolveOptions(gap=1e-4), backend("auto"), [], None, budget=budget)
            search = Search(problem, layout_space(problem), context, 0.0)
            search.bound()
            decide_layouts(search)
            fates = search.prune_record()
            assert sum(fates.count(fate) for fate in FATES) == len(search.whole)
            bound = min(search.global_bound(), search.best_value)
            assert bound == min(fates.least(interleaved=True), fates.least(interleaved=False), search.best_value)
            stopped += fates.count("open") > 0
            scale = len(problem.job.global_batch_values) == 1
            if known.report is None:
                assert search.best is None
            elif scale:
                assert bound <= known.report.step_time_ns
            if budget == SMALL and scale:
                assert fates.count("open") == 0
                step = None if known.report is None else known.report.step_time_ns
                assert (None if search.best is None else search.best[0]) == step
    assert stopped > 0


def test_a_large_space_is_bounded_before_it_is_taken_apart() -> None:
    """With few groups made at once most blocks are excluded whole, and the answer is the same."""
    problem = opened(model="llama2-7b", rank_order=RANK_ORDERS)
    known = solve(problem, any_chunks=False, gap=1e-4)
    context = SolveContext(SolveOptions(gap=1e-4), backend("auto"), [], None, budget=Budget(groups_at_once=2_000))
    search = Search(problem, layout_space(problem), context, 0.0)
    search.bound()
    decide_layouts(search)
    assert search.best is not None
    assert known.report is not None
    assert search.best[0] == known.report.step_time_ns
    assert search.explored.closed.state.whole.mean() > 0.5
    assert search.explored.closed.placed.any()
    assert search.prune_record().count("open") == 0
    again = search.explored.closed.closed_again()
    assert not again.state.opened.any()
    assert again.bound <= search.global_bound()


def test_a_search_without_time_says_so() -> None:
    """With no time to look at anything the layouts are open, and the bound is the least of the groups'."""
    result = solve(opened(), time_limit_s=1e-9)
    fates = result.layouts
    assert fates is not None
    assert result.status == "no_solution_found"
    large = fates.count("does_not_fit")
    assert 0 < large < len(fates.space)
    assert fates.count("open") == len(fates.space) - large == int((fates.fates == FATES.index("open")).sum())
    assert result.lower_bound_s is not None
    assert result.lower_bound_s * NS_PER_S == pytest.approx(fates.bounds.min(), rel=1e-12)


@pytest.mark.parametrize("hardware", ["dgx-a100-80", "gb200-nvl72", "l40s"])
def test_layers_that_count_as_one_take_as_long(hardware: str) -> None:
    """Wherever orders of ranks put the tensor-parallel groups: where they lie alike, layers take as long."""
    problem = opened(gpus=48, rank_order=RANK_ORDERS, cp=(1,))
    problem = problem.model_copy(update={"hardware": load_hardware(hardware)})
    columns = layout_space(problem).families
    assert len(np.unique(columns.rank_order)) > 3
    rows, place = distinct_layers(problem, columns)
    sample = np.random.default_rng(1).permutation(len(columns))[:4000]
    few = layer_durations_ns(problem, columns.take(rows))
    assert np.array_equal(few[..., place[sample]], layer_durations_ns(problem, columns.take(sample)))
    assert len(rows) < len(columns) // 8


WITH_EXPERTS: dict[str, Any] = {
    "kind": "free",
    "rank_order": RANK_ORDERS,
    "ulysses": None,
    "zero_stage": (1,),
    "offload_optimizer": (False,),
    "pp_scatter_gather": (False,),
    "micro_batch_size": (1,),
}
"""All places of all groups, with experts."""


@pytest.mark.parametrize("hardware", ["dgx-h100", "l40s"])
def test_layers_with_experts_that_count_as_one_take_as_long(hardware: str) -> None:
    """Rings, exchanges of heads and of tokens too: where all groups of a layer lie alike, layers take as long."""
    few_switches = WITH_EXPERTS | {"tp_overlap": ("ring",), "gather_again": (True,), "ulysses": (1, 2)}
    problem = opened(gpus=64, model="qwen3-30b-a3b", schedule=("1f1b", "dualpipe-v"), **few_switches)
    problem = problem.model_copy(update={"hardware": load_hardware(hardware)})
    space = layout_space(problem)
    columns = space.take(np.random.default_rng(2).permutation(len(space))[:4000])
    rows, place = distinct_layers(problem, columns)
    few = layer_durations_ns(problem, columns.take(rows))
    assert np.array_equal(few[..., place], layer_durations_ns(problem, columns))
    assert len(rows) < 0.8 * len(columns)


@pytest.mark.parametrize("schedules", [("1f1b", "interleaved"), ("zb-h1", "dualpipe-v"), SCHEDULES])
def test_bounds_of_placed_blocks_hold_for_each_of_their_layouts(schedules: tuple[str, ...]) -> None:
    """What a block's layers send raises its bound, yet to no more than the least bound of its layouts."""
    problem = opened(gpus=16, model="qwen3-30b-a3b", schedule=schedules, vpp=(1, 2), **WITH_EXPERTS)
    space = layout_space(problem)
    blocks = np.flatnonzero(space.sizes)[::3]
    placed = PlacedClasses.of(problem, space, blocks)
    rows, bounds = placed.bounds_ns(problem, np.arange(len(placed.first)))
    assert np.array_equal(rows, np.arange(len(blocks)))
    families = space.families_of(blocks)
    own = cluster_compute_bounds(problem, families)
    least = np.full(len(blocks), np.inf)
    np.minimum.at(least, np.repeat(np.arange(len(blocks)), space.num_families[blocks]), own)
    assert (bounds <= least * (1 + 1e-9)).all()
    assert (bounds > 0.6 * least).mean() > 0.5
    kernels = kernel_space(problem, space)
    classes = BlockClasses.of(problem, kernels)
    of_kernels = classes.least_ns(problem, kernels, np.arange(len(classes.first)))[classes.key[blocks]]
    assert (bounds > 1.2 * of_kernels).any()


def test_bounds_of_placed_blocks_count_slice_by_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped at any moment, the bound is at least the last one and at most the least of all layouts; in the end
    it is the one of all blocks at once."""
    monkeypatch.setattr(closed_layouts, "CLASSES_AT_ONCE", 9)
    problem = opened(gpus=16, model="qwen3-30b-a3b", schedule=("zb-h1", "dualpipe-v"), vpp=(1, 2), **WITH_EXPERTS)
    space = layout_space(problem)
    closed = closed_layouts.ClosedLayouts(problem, space, Budget(groups_at_once=10**9, blocks_at_once=50))
    closed.bound_blocks(lambda: False)
    kernels = closed.state.block_values
    blocks = np.flatnonzero(np.isfinite(kernels))
    least = cluster_compute_bounds(problem, space.families_of(blocks)).min()
    below, bounds = float(np.median(kernels[blocks])), [closed.bound]
    while not closed.placed[kernels < below].all():
        calls = iter((False, True))
        closed._place(below, below, lambda calls=calls: next(calls))  # type: ignore[misc]
        bounds.append(closed.bound)
    assert len(bounds) > 4
    assert bounds == sorted(bounds)
    assert bounds[0] < bounds[-1] <= least * (1 + 1e-9)
    placed = PlacedClasses.of(problem, space, blocks)
    _, at_once = placed.bounds_ns(problem, np.arange(len(placed.first)))
    expected = np.where(closed.placed[blocks], np.maximum(kernels[blocks], at_once), kernels[blocks])
    assert np.array_equal(closed.state.block_values[blocks], expected)


@pytest.mark.long
def test_layouts_are_relaxed_before_all_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In large spaces: the optimum is the same, no layout is relaxed twice, and the bound never falls."""
    monkeypatch.setattr(best_first, "FIRST_UNIFORM_CHUNK", 2)
    monkeypatch.setattr(best_first, "CHUNK", 3)
    early, bounds, bounding = 0, [0.0], False
    relax, bound = BranchPhase.relax, Search.bound

    def counted(phase: BranchPhase, below: float = np.inf) -> None:
        nonlocal early
        before = set(phase.relaxed)
        relax(phase, below)
        early += bounding * len(phase.relaxed - before)
        bounds.append(min(phase.search.global_bound(), phase.search.best_value))

    def bounded(search: Search, relaxing: Callable[[float], None] | None = None) -> None:
        nonlocal bounding
        bounding = True
        bound(search, relaxing)
        bounding = False

    monkeypatch.setattr(BranchPhase, "relax", counted)
    monkeypatch.setattr(Search, "bound", bounded)
    for seed in range(14):
        problem = with_space(random_problem(seed), kind="free")
        known = solve(problem, gap=1e-4, simplest=False).report
        budget = Budget(groups_at_once=2, blocks_at_once=3)
        context = SolveContext(SolveOptions(gap=1e-4), backend("auto"), [], None, budget=budget)
        search = Search(problem, layout_space(problem), context, 0.0)
        bounds[:] = [0.0]
        bound_and_decide(search)
        assert bounds == sorted(bounds)
        if known is None:
            assert search.best is None
        elif search.prune_record().count("open"):
            # Blocks with more groups than are made at once stay whole.
            assert min(search.global_bound(), search.best_value) <= known.step_time_ns
        else:
            assert search.best is not None
            assert search.best[0] == known.step_time_ns
    assert early > 0


@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b", "deepseek-v3"])
def test_kernels_take_as_long_whether_inputs_are_gathered_again(model: str) -> None:
    """Blocks are bounded without the switch of gathering again, which changes communication alone."""
    job = Job(num_gpus=32, global_batch_size=32, sequence_length=4096)
    problem = Problem(model=load_model(model), hardware=load_hardware("dgx-h100"), job=job)
    columns = layout_space(problem).columns
    times = [
        least_layer_ns(problem, replace(columns, gather_again=np.full(len(columns), again)))
        for again in (False, True)
    ]
    assert len(columns)
    assert (times[0] == times[1]).all()


@pytest.mark.parametrize("seed", long_but((3, 8, 21), range(60)))
def test_sets_of_a_group_bound_each_of_its_plans(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most switches are open: no plan that fits is faster than the bound that its group is raised to. All
    groups below the threshold are raised, and groups made again have the bounds of compute alone."""
    monkeypatch.setattr(closed_layouts, "LARGE_GROUP", 1)
    rng, problem = random.Random(seed), with_execution(seed)
    space = layout_space(problem)
    drawn = []
    for row in rng.sample(range(len(space)), min(len(space), 150)):
        plan = random_plan(rng, problem, space.at(row), recompute=0.4)
        report = simulate(problem, plan)
        if report.fits:
            drawn.append((row, report.step_time_ns * float(objective_weights(problem, space.take([row]))[0][0])))
    threshold = float(np.median([value for _, value in drawn])) if drawn else 1e12
    closed = ClosedLayouts(problem, space)
    closed.split_blocks()
    before = closed.state.values.copy()
    closed.first(threshold, len(space) + 1, lambda: False)
    assert (closed.state.values >= before).all()
    rows, group = closed.state.groups.layouts(np.arange(len(before)))
    value_of = dict(zip(rows.tolist(), closed.state.values[group].tolist(), strict=True))
    assert all(value_of[row] <= value for row, value in drawn)
    assert np.array_equal(closed.raised_ns > 0, before < threshold)
    assert np.array_equal(closed.closed_again().state.values, before)
