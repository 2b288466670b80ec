"""Paths, menus and rows: what the integer programs are built of must hold for every plan it claims to."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import strategies as st

from milpplan import Layout, Plan, load_hardware, load_model
from milpplan.optimize.bounds import SplitBounds
from milpplan.optimize.layout import (
    RESOLUTION,
    CompactRelaxation,
    LayoutContext,
    LayoutProgram,
    analytic_paths,
    chunk_paths,
    max_stage_layers,
    nearby_choice,
    stage_menu,
)
from milpplan.optimize.milp import Program, violations
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem import Job, Problem, Space
from milpplan.simulation import (
    IntArray,
    LayoutCosts,
    durations,
    plan_stages,
    rank_memory,
    step_times_ns,
    usable_memory_bytes,
)
from milpplan.simulation.pipeline.step_graph import CriticalPath, StepGraph, Term, critical_path
from tests.amounts import few_or_many, long_but
from tests.optimize.brute_force import constants, costed_plans
from tests.optimize.problems import problems, random_plan, random_problem, with_memory

SEEDS = st.integers(0, 10**6)
EDGES = (
    (Term.LEAD, Term.BACKWARD),
    (Term.TRAIL, Term.REDUCE),
    (Term.FIRST, Term.GATHER),
    (Term.LAST, Term.FORWARD),
)


def a_layout(problem: Problem, seed: int) -> Layout:
    """One of the legal layouts."""
    columns = layout_space(problem).columns
    return columns.at(seed % len(columns))


def matrix(problem: Problem, costs: LayoutCosts, plan: Plan) -> IntArray:
    """Durations of a plan, [Term, J]."""
    return durations(plan_stages(costs, problem.model.layer_kinds, plan))


def path_of(layout: Layout, costs: LayoutCosts, plan_durations: IntArray) -> CriticalPath:
    """A longest path of the plan."""
    return critical_path(StepGraph.of(layout, costs.transfer_ns, costs.barrier_ns), plan_durations)


def through_chunks(layout: Layout) -> list[CriticalPath]:
    """``chunk_paths``, where the layout has chunks: one through each but the first of every rank."""
    paths = chunk_paths(layout) if layout.vpp > 1 else []
    assert len(paths) == layout.pp * (layout.vpp - 1)
    return paths


def length(path: CriticalPath, costs: LayoutCosts, plan_durations: IntArray) -> int:
    """Nanoseconds of a path at the durations of a plan."""
    return int(path.length_ns(plan_durations, int(costs.transfer_ns), int(costs.barrier_ns)))


@few_or_many(5, 12, problems(), SEEDS)
def test_paths_bound_every_plan_of_their_layout(problem: Problem, seed: int) -> None:
    """Analytic paths, and critical paths of other plans, are not longer than the step of any plan; a plan's
    own critical path is exactly as long."""
    rng, layout = random.Random(seed), a_layout(problem, seed)
    costs = constants(problem, layout)
    plans = [matrix(problem, costs, random_plan(rng, problem, layout)) for _ in range(12)]
    steps = step_times_ns(layout, costs, np.stack(plans))
    own = [path_of(layout, costs, plan) for plan in plans]
    for plan, step, mine in zip(plans, steps, own, strict=True):
        assert length(mine, costs, plan) == step
        for path in (*analytic_paths(layout), *through_chunks(layout), *own):
            assert length(path, costs, plan) <= step


@few_or_many(5, 12, problems(), SEEDS)
def test_paths_of_fractional_points_bound_every_plan(problem: Problem, seed: int) -> None:
    """The critical path of a mean of plans, as a relaxation gives it, is not longer than any plan's step."""
    rng, layout = random.Random(seed), a_layout(problem, seed)
    costs = constants(problem, layout)
    plans = np.stack([matrix(problem, costs, random_plan(rng, problem, layout)) for _ in range(8)])
    path = path_of(layout, costs, np.rint(plans[:4].mean(axis=0)).astype(np.int64))
    for plan, step in zip(plans, step_times_ns(layout, costs, plans), strict=True):
        assert length(path, costs, plan) <= step


@pytest.mark.parametrize("count", long_but((10,), (10, 20)))
@pytest.mark.parametrize("name", long_but(("llama3-70b",), ("llama3-70b", "mixtral-8x7b", "deepseek-v3")))
def test_paths_bound_real_plans(count: int, name: str) -> None:
    """The same for real models on deep pipelines, plans with nearly all layers in one stage included."""
    model, rng = load_model(name), random.Random(3)
    job = Job(num_gpus=256, global_batch_size=256, sequence_length=4096)
    schedules = ("1f1b", "interleaved", "gpipe")
    space = Space(schedule=schedules, interleaved_layers="any", vpp_values="all")
    problem = Problem(model=model, hardware=load_hardware("dgx-h100"), job=job, space=space)
    columns = layout_space(problem).columns
    for _ in range(count):
        layout = columns.at(rng.randrange(len(columns)))
        if layout.num_virtual_stages * layout.num_micro_batches > 2048:
            continue
        costs = constants(problem, layout)
        plans = [matrix(problem, costs, random_plan(rng, problem, layout)) for _ in range(6)]
        steps = step_times_ns(layout, costs, np.stack(plans))
        paths = [path_of(layout, costs, plan) for plan in plans[:3]]
        for plan, step in zip(plans, steps, strict=True):
            assert all(
                length(path, costs, plan) <= step
                for path in (*paths, *analytic_paths(layout), *through_chunks(layout))
            )


@few_or_many(5, 12, problems(), SEEDS)
def test_most_layers_keeps_good_plans(problem: Problem, seed: int) -> None:
    """No virtual stage of a fitting plan at or below the cutoff has more layers than ``max_stage_layers``."""
    layout = a_layout(problem, seed)
    context = LayoutContext.of(problem, layout, constants(problem, layout), usable_memory_bytes(problem))
    plans = costed_plans(problem, layout, context.costs)
    for cutoff in np.quantile(plans.step_time_ns, [0.0, 0.1, 0.5, 1.0], method="lower").tolist():
        most = max_stage_layers(context, int(cutoff))
        kept = (plans.step_time_ns <= cutoff) & (plans.peak_bytes <= context.capacity_bytes)
        assert (plans.layers[kept] <= most).all()


@few_or_many(5, 12, problems(), SEEDS)
def test_menus_keep_something_as_good(problem: Problem, seed: int) -> None:
    """For every virtual stage of a plan that fits, the menu has an item with the same layers, no longer a
    backward (and part of it that reductions wait for), no more memory where ranks hold several stages, and room on
    its rank where they hold one."""
    rng, layout = random.Random(seed), a_layout(problem, seed)
    costs = constants(problem, layout)
    for _ in range(6):
        plan = random_plan(rng, problem, layout)
        stages = plan_stages(costs, problem.model.layer_kinds, plan)
        peak = max(part.peak_bytes for part in rank_memory(layout, costs, stages))
        context = LayoutContext.of(with_memory(problem, peak), layout, costs, peak)
        for j, (stage, held) in enumerate(zip(stages, plan.virtual_stages, strict=True)):
            menu = stage_menu(context, j, problem.model.num_layers)
            same = (menu.runs == runs_of(context, *held.layers)).all(axis=1)
            good = same & (menu.terms[Term.BACKWARD] <= stage.terms[Term.BACKWARD, 0])
            if layout.vpp > 1:
                good &= menu.kept_bytes <= stage.kept_bytes[0]
                good &= menu.transient_bytes <= stage.transient_bytes[0]
            assert good.any()
            assert (menu.terms[Term.LEAD, good] <= stage.terms[Term.LEAD, 0]).all()
            others = np.delete(menu.terms[:, good], [Term.BACKWARD, Term.LEAD], axis=0)
            assert (others == np.delete(stage.terms, [Term.BACKWARD, Term.LEAD], axis=0)).all()


def runs_of(context: LayoutContext, start: int, stop: int) -> list[int]:
    """Layers of each run among layers ``start`` to ``stop - 1``."""
    held, first = [], 0
    for _, count in context.runs:
        held.append(max(0, min(stop, first + count) - max(start, first)))
        first += count
    return held


def best_in_memory(problem: Problem, context: LayoutContext) -> list[tuple[int, Plan]]:
    """(step time, plan) of the best plans that fit, and of some others."""
    plans = costed_plans(problem, context.layout, context.costs)
    fits = np.flatnonzero(plans.peak_bytes <= context.capacity_bytes)
    order = fits[np.argsort(plans.step_time_ns[fits], kind="stable")]
    rows = [*order[:20], *order[20 :: max(1, len(order) // 20)]]
    return [(int(plans.step_time_ns[row]), plans.plan(int(row))) for row in rows]


def choice_of(program: LayoutProgram, context: LayoutContext, plan: Plan) -> list[int] | None:
    """Items of the menus that make up exactly this plan; None if one was left out of them."""
    choice = []
    for menu, stage in zip(program.menus, plan.virtual_stages, strict=True):
        same = (menu.runs == runs_of(context, *stage.layers)).all(axis=1)
        same &= (menu.full == stage.recompute.full) & (menu.selective == stage.recompute.selective)
        found = np.flatnonzero(same)
        if not len(found):
            return None
        choice.append(int(found[0]))
    return choice


def with_split_of(context: LayoutContext, plan: Plan) -> LayoutContext:
    """The layers of a plan fixed, and what each rank then recomputes at least."""
    split = tuple(stage.num_layers for stage in plan.virtual_stages)
    bounds = SplitBounds(context, analytic_paths(context.layout))
    return context.with_split(split, bounds.min_backward_ns(split))


def program_of(context: LayoutContext, cutoff: int) -> LayoutProgram:
    """The program of a layout at a cutoff, with many paths."""
    problem, layout, costs = context.problem, context.layout, context.costs
    menus = [stage_menu(context, j, problem.model.num_layers) for j in range(context.num_stages)]
    program = LayoutProgram(context, menus, cutoff)
    for path in analytic_paths(layout):
        program.add_path(path)
    rng = random.Random(layout.num_gpus)
    for _ in range(10):
        any_plan = random_plan(rng, problem, layout)
        program.add_path(path_of(layout, costs, matrix(problem, costs, any_plan)))
    assert program.drop_hopeless_items(), "a plan at the cutoff exists, so no menu may run empty"
    return program


def assert_rows_hold(problem: Problem, layout: Layout, share: float, one_split: bool = False) -> int:
    """Every plan at or below a cutoff satisfies every row of a program with many paths; returns how many
    plans the menus contain. ``one_split``: of the plans with the layers of the best one."""
    costs = constants(problem, layout)
    context = LayoutContext.of(problem, layout, costs, usable_memory_bytes(problem))
    plans = best_in_memory(problem, context)
    if not plans:
        return 0
    if one_split:
        context = with_split_of(context, plans[0][1])
        ends = [stage.layers for stage in plans[0][1].virtual_stages]
        plans = [entry for entry in plans if [stage.layers for stage in entry[1].virtual_stages] == ends]
    steps = sorted(step for step, _ in plans)
    cutoff = steps[int(share * (len(steps) - 1))]
    program = program_of(context, cutoff)
    base, unit = program.scaling()
    built = program.program(base, unit)
    contained = 0
    for step, plan in plans:
        choice = choice_of(program, context, plan) if step <= cutoff else None
        if choice is None:
            continue
        contained += 1
        values = np.zeros(built.num_variables, dtype=np.int64)
        values[program.offsets[:-1] + np.array(choice)] = 1
        values[built.variable_names.index("z")] = max(0, (step - base) // unit)
        assert violations(built, values) == []
        assert program.overfull_rank(choice) is None
        assert program.plan(choice) == plan
        assert base <= step
    return contained


@few_or_many(5, 12, problems(), SEEDS, st.sampled_from((0.0, 0.1, 0.5)), st.booleans())
def test_rows_hold_for_every_plan_below_the_cutoff(
    problem: Problem, seed: int, share: float, one_split: bool
) -> None:
    """A plan at or below the cutoff satisfies every row of its layout's program, with its z."""
    assert_rows_hold(problem, a_layout(problem, seed), share, one_split)


@pytest.mark.parametrize(("count", "least"), [(10, 5), pytest.param(20, 10, marks=pytest.mark.long)])
def test_rows_hold_for_plans_that_the_menus_contain(count: int, least: int) -> None:
    """The test above is not empty: most layouts' menus contain plans at the cutoff, the best one included."""
    contained = 0
    for seed in range(count):
        problem = random_problem(seed)
        contained += assert_rows_hold(problem, a_layout(problem, seed), 0.2, seed % 2 == 1) > 0
    assert contained >= least


@few_or_many(5, 12, problems(), SEEDS)
def test_no_rank_recomputes_less_than_the_least(problem: Problem, seed: int) -> None:
    """In every plan that fits, each rank's backwards take at least what is the least for its split."""
    layout = a_layout(problem, seed)
    costs = constants(problem, layout)
    context = LayoutContext.of(problem, layout, costs, usable_memory_bytes(problem))
    for _, plan in best_in_memory(problem, context)[:8]:
        backward = matrix(problem, costs, plan)[Term.BACKWARD]
        least = with_split_of(context, plan).min_backward_ns
        assert (backward.reshape(layout.vpp, layout.pp).sum(axis=0) >= np.array(least)).all()


@few_or_many(5, 12, problems(), SEEDS)
def test_step_time_is_monotone_in_durations(problem: Problem, seed: int) -> None:
    """Making a virtual stage's backward longer, as recomputation does, never makes the step shorter."""
    rng, layout = random.Random(seed), a_layout(problem, seed)
    costs = constants(problem, layout)
    plan = matrix(problem, costs, random_plan(rng, problem, layout))
    longer = np.repeat(plan[None], 8, axis=0)
    for row in range(8):
        longer[row, Term.BACKWARD, rng.randrange(plan.shape[1])] += rng.choice((1, 10**3, 10**6, 10**8))
    assert (step_times_ns(layout, costs, longer) >= step_times_ns(layout, costs, plan[None])).all()


@few_or_many(5, 12, problems(), SEEDS)
def test_edge_terms_are_parts(problem: Problem, seed: int) -> None:
    """The buckets at the edges of a stage take no longer than the whole: LEAD <= BACKWARD, TRAIL <= REDUCE,
    FIRST <= GATHER, LAST <= FORWARD. Overlap never costs, because of that."""
    rng, layout = random.Random(seed), a_layout(problem, seed)
    costs = constants(problem, layout)
    for _ in range(5):
        plan = matrix(problem, costs, random_plan(rng, problem, layout))
        for part, whole in EDGES:
            assert (plan[part] <= plan[whole]).all()


@few_or_many(5, 12, problems(), SEEDS)
def test_compact_relaxation_holds_for_every_plan(problem: Problem, seed: int) -> None:
    """A plan that fits satisfies every row and bound of the compact relaxation with its z, and its durations
    are nowhere below what the relaxation takes them for."""
    rng, layout = random.Random(seed), a_layout(problem, seed)
    costs = constants(problem, layout)
    for _ in range(4):
        plan = random_plan(rng, problem, layout)
        stages = plan_stages(costs, problem.model.layer_kinds, plan)
        peak = max(part.peak_bytes for part in rank_memory(layout, costs, stages))
        context = LayoutContext.of(with_memory(problem, peak), layout, costs, peak)
        step = int(step_times_ns(layout, costs, durations(stages)))
        compact = CompactRelaxation(rng.choice((context, with_split_of(context, plan))), step)
        values = compact_values(compact, problem, plan)
        assert (compact.durations(values.astype(np.float64)) <= durations(stages)).all()
        others = [
            path_of(layout, costs, matrix(problem, costs, random_plan(rng, problem, layout))) for _ in range(3)
        ]
        paths = [*analytic_paths(layout), path_of(layout, costs, durations(stages)), *others]
        base = compact.base_ns(paths)
        unit = max(rng.choice((1, 7, 1000)), (step - base) // RESOLUTION)
        assert base <= step
        program = compact.program.with_rows(compact.path_rows(paths, base, unit))
        values[compact.num_counts] = (step - base) // unit
        assert violations(program, values) == []
        assert_prices_hold(compact, program, values, rng)


def compact_values(compact: CompactRelaxation, problem: Problem, plan: Plan) -> IntArray:
    """Layer and recompute counts of a plan by virtual stage and kind, then zeros for z and the rest."""
    kinds = np.array(problem.model.layer_kinds)
    counts = np.zeros(compact.slope.shape[1:], dtype=np.int64)
    for j, stage in enumerate(plan.virtual_stages):
        held = kinds[slice(*stage.layers)]
        full = stage.recompute.full
        parts = (held, held[:full], held[full : full + stage.recompute.selective])
        for place, part in enumerate(parts):
            np.add.at(counts[place, j], part, 1)
    return np.concatenate([counts.ravel(), np.zeros(1 + counts.shape[2], dtype=np.int64)])


def assert_prices_hold(compact: CompactRelaxation, program: Program, values: IntArray, rng: random.Random) -> None:
    """Whatever the duals: z >= bound + prices * counts, for the whole plan and so for each of its stages."""
    for _ in range(5):
        duals = np.array([rng.uniform(-1.0, 1.0) * rng.choice((0.0, 0.3)) for _ in program.rows.names])
        bound, prices = compact.item_prices(program, duals)
        counts = values[: compact.num_counts].reshape(prices.shape)
        assert bound + float((prices * counts).sum()) <= values[compact.num_counts]


def test_nearby_choices_obey_every_row() -> None:
    """A choice that exchanges of items find satisfies the program with z at the cutoff, wherever they start; and
    they find the best plan again where the items of two of its stages were changed."""
    again = started = 0
    for seed in range(12):
        problem, rng = random_problem(seed), random.Random(seed)
        layout = a_layout(problem, seed)
        context = LayoutContext.of(problem, layout, constants(problem, layout), usable_memory_bytes(problem))
        plans = best_in_memory(problem, context)
        if not plans:
            continue
        program = program_of(context, plans[0][0])
        base, unit = program.scaling()
        built = program.program(base, unit)
        best = choice_of(program, context, plans[0][1])
        for _ in range(5):
            anywhere = [rng.randrange(len(menu)) for menu in program.menus]
            starts = [anywhere]
            if best is not None:
                changed = rng.sample(range(len(best)), min(2, len(best)))
                starts.append([anywhere[j] if j in changed else item for j, item in enumerate(best)])
            found = [nearby_choice(program, base, unit, start) for start in starts]
            started, again = started + (best is not None), again + (best is not None and found[-1] is not None)
            for choice in found:
                if choice is not None:
                    values = np.zeros(built.num_variables, dtype=np.int64)
                    values[program.offsets[:-1] + np.array(choice)] = 1
                    values[-1] = (plans[0][0] - base) // unit
                    assert violations(built, values) == []
    assert again >= 0.9 * started > 0
