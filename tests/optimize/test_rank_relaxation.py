"""The relaxation by what whole ranks hold: its choices, its bounds, and the trees that use it."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from milpplan.optimize import Counters
from milpplan.optimize.layout import (
    CompactRelaxation,
    LayoutContext,
    LayoutState,
    RankRelaxation,
    analytic_paths,
    ceiling_paths,
    chunk_paths,
    rank_choices,
    rounds_on,
)
from milpplan.optimize.layout import layer_branching as layer_branching
from milpplan.problem import Plan, Problem, Recompute, VirtualStage
from milpplan.simulation import IntArray, durations, plan_stages
from milpplan.simulation.pipeline.step_graph import StepGraph, Term
from tests.optimize.brute_force import Costed
from tests.optimize.test_branching import narrowed_somewhere, some
from tests.optimize.test_branching import test_trees_end_at_the_best_plan as check_trees

Case = tuple[Problem, LayoutContext, Costed]


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Shared by the tests of this file."""
    return some(4)


def stage_terms(context: LayoutContext, plans: Costed, row: int) -> IntArray:
    """Durations of a listed plan, [Term, J]."""
    stages, start = [], 0
    for count, full, selective in zip(plans.layers[row], plans.full[row], plans.selective[row], strict=True):
        recompute = Recompute(full=int(full), selective=int(selective))
        stages.append(VirtualStage(layers=(start, start + int(count)), recompute=recompute))
        start += int(count)
    plan = Plan(layout=context.layout, virtual_stages=tuple(stages))
    return durations(plan_stages(context.costs, context.problem.model.layer_kinds, plan))


def bound_of(state: LayoutState, relaxation: CompactRelaxation | RankRelaxation) -> int:
    """Proved with the known paths."""
    run = rounds_on(state, relaxation)
    assert run is not None
    relaxation.narrow(run.relaxation, state.context)
    run.relaxation.set_sides(*relaxation.path_limits(state.context, state.pool, run.base, run.unit))
    run.solve()
    run.prove()
    return state.bound_ns


def test_a_choice_serves_every_rank_of_every_plan(cases: list[Case]) -> None:
    """With the same layers in every chunk, and no longer forwards or backwards."""
    rng, ranks = random.Random(7), 0
    work = [Term.FORWARD, Term.BACKWARD]
    for _, context, plans in cases:
        choices = [rank_choices(context, rank) for rank in range(context.layout.pp)]
        fits = np.flatnonzero(plans.peak_bytes <= context.capacity_bytes).tolist()
        for row in rng.sample(fits, min(20, len(fits))):
            terms = stage_terms(context, plans, row)
            for own in choices:
                assert own is not None
                held = list(own.stages)
                alike = (own.runs.sum(axis=2) == plans.layers[row][held]).all(axis=1)
                better = (own.terms[work] <= terms[work][:, held, None]).all(axis=(0, 1))
                assert (alike & better).any()
                ranks += 1
    assert ranks > 50


def test_whole_ranks_bound_every_plan_and_more_nearly(cases: list[Case]) -> None:
    """In any setting at most the fastest plan's step, and no less than the compact relaxation says."""
    rng, higher = random.Random(8), 0
    for _, context, plans in cases:
        graph = StepGraph.of(context.layout, context.costs.transfer_ns, context.costs.barrier_ns)
        fits = plans.peak_bytes <= context.capacity_bytes
        slowest = int(plans.step_time_ns[fits].max())
        compact = CompactRelaxation(context, slowest, ceiling_paths(context.layout, graph.structure))
        pool = [*analytic_paths(context.layout), *chunk_paths(context.layout)]
        ranks = RankRelaxation.of(compact, context, pool, slowest)
        assert ranks is not None
        for _ in range(8):
            tight, _, within = narrowed_somewhere(rng, context, plans)
            state = LayoutState(tight, pool, slowest, 0, 0.0, None, Counters())
            known = bound_of(replace(state), compact.narrowed(tight))
            proved = bound_of(state, ranks)
            assert known * (1 - 1e-5) <= proved <= plans.step_time_ns[within].min()
            higher += proved > known * (1 + 1e-3)
    assert higher > 3


def test_trees_over_whole_ranks_end_at_the_best_plan(cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second node on, also where memory does not bind."""
    made: list[RankRelaxation | None] = []
    make = RankRelaxation.of

    def kept(*known: object) -> RankRelaxation | None:
        made.append(make(*known))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(layer_branching, "SMALL_GRAPH", 0)
    monkeypatch.setattr(layer_branching, "recomputes", lambda *_: True)
    monkeypatch.setattr(RankRelaxation, "of", kept)
    check_trees(cases)
    assert sum(one is not None for one in made) > 0
