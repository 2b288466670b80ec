"""Free interleaved splits: counting, parts of nodes, moves, and the branch and bound that puts them together."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product

import numpy as np
import pytest
from rich.console import Console

from milpplan import Layout, solve
from milpplan.optimize import Counters, SolveOptions
from milpplan.optimize.bounds import max_layers_on_ranks
from milpplan.optimize.layout import LayoutContext, LayoutSolver, LayoutState, fitted_plan, num_inner
from milpplan.optimize.layout.layer_branching import (
    BranchingTree,
    candidate_branchings,
    default_branching,
    improve,
    strong_branching,
)
from milpplan.optimize.milp.backends import backend
from milpplan.optimize.space import even_splits
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem import ANY_SPLIT_LAYERS, Problem, Space
from milpplan.reports import terminal_text
from milpplan.reports.answers import solve_blocks
from milpplan.reports.documents import result_document
from milpplan.reports.words.plan_words import CHUNKS, space_text
from milpplan.simulation import BoolArray, IntArray, plan_stages, rank_memory, simulate, usable_memory_bytes
from tests.amounts import first, long_but
from tests.optimize.brute_force import Costed, constants, costed_plans
from tests.optimize.problems import random_problem

NEVER = 2**60


def free_problem(seed: int) -> tuple[Problem, Layout] | None:
    """The first interleaved layout of a random problem, its splits free; None where it has none."""
    problem = random_problem(seed)
    space = problem.space.model_copy(update={"interleaved_layers": "any"})
    problem = problem.model_copy(update={"space": space})
    columns = layout_space(problem).columns
    rows = np.flatnonzero(columns.vpp > 1)
    return (problem, columns.at(int(rows[seed % len(rows)]))) if len(rows) else None


def free_cases() -> Iterator[tuple[Problem, LayoutContext, Costed]]:
    """Layouts with free splits that have plans that fit, and all their plans."""
    for seed in range(1000):
        if (case := free_problem(seed)) is None:
            continue
        problem, layout = case
        context = LayoutContext.of(problem, layout, constants(problem, layout), usable_memory_bytes(problem))
        plans = costed_plans(problem, layout, context.costs)
        if len(plans.step_time_ns) <= 30_000 and (plans.peak_bytes <= context.capacity_bytes).any():
            yield problem, context, plans


CASES = free_cases()
LISTED: list[tuple[Problem, LayoutContext, Costed]] = []
"""The first of ``CASES``: to list all plans takes long, so each is listed once."""


def some(count: int) -> list[tuple[Problem, LayoutContext, Costed]]:
    """The first so many layouts with free splits."""
    LISTED.extend(islice(CASES, max(count - len(LISTED), 0)))
    assert len(LISTED) >= count
    return LISTED[:count]


def narrowed_somewhere(
    rng: random.Random, context: LayoutContext, plans: Costed
) -> tuple[LayoutContext, IntArray, BoolArray]:
    """The setting with limits around a plan that fits, the layers of that plan [J], and which plans fit and are
    within the limits."""
    fits = plans.peak_bytes <= context.capacity_bytes
    split = plans.layers[rng.choice(np.flatnonzero(fits).tolist())]
    least = np.maximum(split - rng.randint(0, 2), [low for low, _ in context.layer_bounds])
    most = split + rng.randint(0, 2)
    narrow = replace(context, layer_bounds=tuple(zip(least.tolist(), most.tolist(), strict=True)))
    tight = narrow.tightened(np.full(context.layout.pp, context.problem.model.num_layers))
    assert tight is not None
    return tight, split, fits & (plans.layers >= least).all(axis=1) & (plans.layers <= most).all(axis=1)


@pytest.fixture(scope="module")
def cases() -> list[tuple[Problem, LayoutContext, Costed]]:
    """Shared by the tests of this file."""
    return some(7)


def splits_of(context: LayoutContext) -> list[tuple[int, ...]]:
    """Every split within the limits of the stages, the ranks and the fullest inner stage."""
    P, total = context.layout.pp, context.problem.model.num_layers
    found = []
    for head in product(*(range(low, high + 1) for low, high in context.layer_bounds[:-1])):
        split = (*head, total - sum(head))
        low, high = context.layer_bounds[-1]
        sums = [sum(split[rank::P]) for rank in range(P)]
        inside = all(least <= held <= most for held, (least, most) in zip(sums, context.rank_bounds, strict=True))
        peaked = (
            context.min_fullest_stage == 0 or max(split[: num_inner(context.layout)]) >= context.min_fullest_stage
        )
        if low <= split[-1] <= high and inside and peaked:
            found.append(split)
    return found


def test_ranks_hold_no_more_than_counting_allows(cases: list[tuple[Problem, LayoutContext, Costed]]) -> None:
    """No rank of a plan that fits, at or below a step time, holds more layers of a kind, and the limit is reached
    by some plan often enough to be one."""
    reached = 0
    for problem, context, plans in cases:
        kinds, P = np.array(problem.model.layer_kinds), context.layout.pp
        fits = plans.peak_bytes <= context.capacity_bytes
        for cutoff in np.quantile(plans.step_time_ns[fits], [0.0, 0.2, 1.0], method="lower").tolist():
            most = max_layers_on_ranks(context, int(cutoff))
            for layers in np.unique(plans.layers[fits & (plans.step_time_ns <= cutoff)], axis=0):
                stage = np.repeat(np.arange(len(layers)), layers)
                held = np.zeros_like(most)
                np.add.at(held, (kinds, stage % P), 1)
                assert (held <= most).all()
                reached += bool((held.sum(axis=0) == most.max(axis=0)).any())
    assert reached > 10


@pytest.mark.parametrize(("count", "least"), [(3, 2), pytest.param(6, 5, marks=pytest.mark.long)])
def test_tighter_limits_lose_no_split(count: int, least: int) -> None:
    """Limits that follow from others leave the same splits, and none exactly where there are none."""
    rng, none = random.Random(1), 0
    for problem, context, _ in some(count):
        layers, P = problem.model.num_layers, context.layout.pp
        for _ in range(40):
            narrow = context
            for stage in rng.sample(range(context.num_stages), 2):
                low = rng.randint(0, 2)
                narrow = narrow.with_stage(stage, low, rng.randint(low, layers))
            narrow = narrow.with_rank(rng.randrange(P), *sorted(rng.choices(range(layers + 1), k=2)))
            most = np.array([rng.randint(layers // P, layers) for _ in range(P)])
            left = [one for one in splits_of(narrow) if all(sum(one[r::P]) <= most[r] for r in range(P))]
            tighter = narrow.tightened(most)
            none += tighter is None
            assert left == ([] if tighter is None else splits_of(tighter))
    assert none > least


@pytest.mark.parametrize("count", long_but((6,), (6, 20)))
def test_parts_share_out_every_split(count: int) -> None:
    """Whatever the point, each split of a node is in exactly one of its parts, and every part is narrower."""
    rng, shared = random.Random(2), 0
    for _, context, _ in some(8):
        whole = splits_of(context)
        if context.only_split() is not None:
            continue
        shared += 1
        for _ in range(count):
            weights = np.array([rng.random() for _ in range(4)])
            points = np.array(rng.choices(whole, k=4))
            layers = points[0].astype(float) if rng.random() < 0.5 else weights / weights.sum() @ points
            for pieces in (default_branching(context, layers), *candidate_branchings(context, layers)):
                assert sorted(split for piece in pieces for split in splits_of(piece)) == sorted(whole)
                assert all(piece != context for piece in pieces)
    assert shared > 3


def test_the_strongest_way_raises_its_weaker_part_most() -> None:
    """By the product of the two least rises; rises beyond the cutoff count no more than reaching it, and a way
    that closes all its parts is taken without a look at the others."""
    _, context, _ = some(1)[0]
    nodes = [replace(context, min_fullest_stage=number) for number in range(6)]
    found, asked = [nodes[0:2], nodes[2:4], nodes[4:6]], []

    def by(rises: list[float]) -> int:
        def rise(node: LayoutContext) -> float:
            asked.append(node.min_fullest_stage)
            return rises[node.min_fullest_stage]

        return found.index(strong_branching(found, rise, 10.0))

    assert by([0.0, 90.0, 2.0, 3.0, 1.0, 5.0]) == 1
    assert by([4.0, 4.0, 2.0, 70.0, 3.0, 5.0]) == 1
    assert asked == [0, 1, 2, 3, 4, 5] * 2
    asked.clear()
    assert by([4.0, 4.0, 12.0, 10.0, 3.0, 5.0]) == 1
    assert asked == [0, 1, 2, 3]


def test_moves_make_plans_faster_and_fit(cases: list[tuple[Problem, LayoutContext, Costed]]) -> None:
    """Moving layers ends at a plan of the space that fits, is no slower, and is faster in some cases."""
    faster = 0
    for problem, context, plans in cases:
        fits = plans.peak_bytes <= context.capacity_bytes
        slow = int(np.where(fits, plans.step_time_ns, -1).argmax())
        plan = fitted_plan(context, plans.layers[slow])
        if plan is None:
            continue
        state = LayoutState(context, [], NEVER, 0, 0.0, None, Counters())
        step = improve(state, plan, np.inf)
        assert state.best is not None
        best = state.best[1]
        stages = plan_stages(context.costs, problem.model.layer_kinds, best)
        peak = max(part.peak_bytes for part in rank_memory(context.layout, context.costs, stages))
        assert peak <= context.capacity_bytes
        before = simulate(problem, plan).step_time_ns
        assert step == simulate(problem, best).step_time_ns <= before
        assert step >= plans.step_time_ns[fits].min()
        faster += step < before
    assert faster >= 2


def test_trees_end_at_the_best_plan(cases: list[tuple[Problem, LayoutContext, Costed]]) -> None:
    """However little is looked at, the bound is no more than the best plan's step; looked at to the end, the best
    plan is found or proved not to be below the cutoff."""
    partial = 0
    for _, context, plans in cases:
        best = int(plans.step_time_ns[plans.peak_bytes <= context.capacity_bytes].min())
        solver = LayoutSolver(SolveOptions(gap=0.0), backend("highs"), [], None)
        cutoff = int(best * 1.05)
        first = solver.resolve(context, cutoff, 0, effort=0)
        assert first.bound_ns <= best
        assert first.step_time_ns is None or first.step_time_ns >= best
        partial += first.fate == "open"
        after = solver.resolve(context, min(cutoff, first.step_time_ns or cutoff), first.bound_ns, effort=2)
        found = [step for step in (first.step_time_ns, after.step_time_ns) if step is not None]
        assert min(found) == best
        below = solver.resolve(context, best - 1, 0, effort=2)
        assert below.plan is None
        assert below.bound_ns <= best
        assert below.bound_ns == best or below.fate == "open"
    assert partial > 0


def test_a_tree_that_counting_closes_has_nothing_to_look_at(
    cases: list[tuple[Problem, LayoutContext, Costed]],
) -> None:
    """Below what any plan can take no node is opened, and the layout is closed."""
    for _, context, plans in cases:
        solver = LayoutSolver(SolveOptions(gap=0.0), backend("highs"), [], None)
        state = solver.new_state(context, int(plans.step_time_ns.min()) // 50, 0)
        tree = BranchingTree(state, solver._decide_split)
        tree.run(state, 4)
        assert tree.finished
        assert state.closed
        assert state.best is None


@pytest.mark.parametrize(("num_layers", "expected"), [(ANY_SPLIT_LAYERS, "any"), (ANY_SPLIT_LAYERS + 1, "even")])
def test_small_models_have_splits_of_any_kind_by_default(num_layers: int, expected: str) -> None:
    """``auto`` is ``any`` up to a number of layers, and ``even`` above; the headline of a result says which."""
    problem = random_problem(1)
    run = problem.model.layers[0].model_copy(update={"count": num_layers})
    model = problem.model.model_copy(update={"layers": (run,)})
    problem = problem.model_copy(update={"model": model, "space": Space()})
    assert problem.space.interleaved_layers == "auto"
    assert problem.interleaved_layers == expected
    assert CHUNKS[expected] in space_text(problem)
    layout = Layout(pp=2, vpp=2, global_batch_size=4, schedule="interleaved")
    assert (even_splits(problem, layout) is None) == (expected == "any")


def test_default_space_of_a_small_model_is_proved_over_every_split() -> None:
    """An uneven interleaved plan that beats all even ones is found, and proved, without asking for it."""
    problem = random_problem(109)
    auto, even = (problem.space.model_copy(update={"interleaved_layers": kind}) for kind in ("auto", "even"))
    problem = problem.model_copy(update={"space": auto})
    narrow = solve(problem.model_copy(update={"space": even}))
    wide = solve(problem)
    assert wide.status == narrow.status == "optimal"
    assert wide.step_time_s is not None
    assert narrow.lower_bound_s is not None
    assert wide.step_time_s < narrow.lower_bound_s


@pytest.mark.parametrize("seed", first(1, [9, 84, 122]))
def test_even_result_bounds_chunks_of_any_size(seed: int) -> None:
    """Where uneven chunks win, the even result already says how much they can gain at most."""
    problem = random_problem(seed)
    even, wide = (problem.space.model_copy(update={"interleaved_layers": kind}) for kind in ("even", "any"))
    narrow = solve(problem.model_copy(update={"space": even}))
    best = solve(problem.model_copy(update={"space": wide}))
    assert narrow.any_chunks_bound is not None
    assert narrow.any_chunks_gap is not None
    assert best.objective is not None
    assert narrow.objective_bound is not None
    assert narrow.any_chunks_bound <= best.objective < narrow.objective_bound
    assert best.any_chunks_bound is None
    document = result_document(narrow, 1e-3)
    assert document.any_chunks is not None
    assert document.any_chunks.gap == narrow.any_chunks_gap
    console = Console(file=io.StringIO(), width=200, record=True)
    console.print(terminal_text(solve_blocks(narrow, 1e-3, verbose=True)))
    assert "uneven interleaving could save at most" in console.export_text()
