"""What interleaved chunks that do not come out even cost, and the relaxation that holds the whole graph."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from milpplan import Layout
from milpplan.optimize import Counters
from milpplan.optimize.layout import (
    CompactRelaxation,
    EventTimeRelaxation,
    LayoutContext,
    LayoutState,
    analytic_paths,
    ceiling_paths,
    chunk_paths,
    fullest_stage_bound,
    fullest_stage_branching,
    num_inner,
    rounds_on,
)
from milpplan.optimize.layout import layer_branching as layer_branching
from milpplan.problem import Problem
from milpplan.simulation import FloatArray
from milpplan.simulation.pipeline.step_graph import StepGraph, Term, step_time_ns
from tests.optimize.brute_force import Costed
from tests.optimize.test_branching import free_cases, narrowed_somewhere, some, splits_of
from tests.optimize.test_branching import test_trees_end_at_the_best_plan as check_trees


@pytest.fixture(scope="module")
def cases() -> list[tuple[Problem, LayoutContext, Costed]]:
    """Shared by the tests of this file."""
    return some(4)


def random_layout(rng: random.Random) -> Layout:
    """An interleaved layout with any switches."""
    pp, vpp = rng.randint(2, 4), rng.randint(2, 4)
    return Layout(
        pp=pp,
        vpp=vpp,
        global_batch_size=pp * rng.randint(1, 3),
        schedule="interleaved",
        overlap_grad_reduce=rng.random() < 0.5,
        overlap_param_gather=rng.random() < 0.5,
        zero_stage=1,
    )


def test_no_step_is_shorter_than_a_peak_path_through_any_inner_stage() -> None:
    """Whatever the durations: the common part of the paths and r forwards and q backwards of an inner stage."""
    rng, near = random.Random(3), 0
    for _ in range(60):
        layout = random_layout(rng)
        transfer, barrier = rng.randint(0, 30), rng.randint(0, 9)
        graph = StepGraph.of(layout, transfer, barrier)
        peaks = ceiling_paths(layout, graph.structure)
        assert len(peaks) >= layout.pp
        assert max(peak.forwards + peak.backwards for peak in peaks) >= layout.pp - 1
        durations = np.array([rng.randint(0, 100) for _ in range(len(Term) * layout.num_virtual_stages)])
        durations = durations.reshape(len(Term), -1)
        durations[[Term.CROSSING, Term.WEIGHT]] = 0
        if rng.random() < 0.5:
            # One chunk of all ranks slower than the others: as with layers that do not come out even.
            durations[:] = 0
            durations[Term.FORWARD], durations[Term.BACKWARD] = 40, 80
            first = layout.pp * rng.randrange(layout.vpp - 1)
            durations[:, first : first + layout.pp] *= 2
        step = int(step_time_ns(graph, durations))
        for peak in peaks:
            rest = int(peak.path.length_ns(durations, transfer, barrier))
            for stage in range(num_inner(layout)):
                added = (
                    peak.forwards * durations[Term.FORWARD, stage]
                    + peak.backwards * durations[Term.BACKWARD, stage]
                )
                assert rest + int(added) <= step
                near += rest + int(added) >= 0.97 * step
    assert near > 30


def test_the_least_peak_is_that_of_all_splits(cases: list[tuple[Problem, LayoutContext, Costed]]) -> None:
    """No split within the limits has a lower fullest inner stage, and where they leave any, some has just that."""
    rng, equal = random.Random(4), 0
    for problem, context, _ in cases:
        inner = num_inner(context.layout)
        for _ in range(30):
            stage = rng.randrange(context.num_stages)
            narrow = context.with_stage(stage, *sorted(rng.choices(range(problem.model.num_layers), k=2)))
            tight = narrow.tightened(np.full(context.layout.pp, problem.model.num_layers))
            splits = [] if tight is None else splits_of(tight)
            if tight is None or not splits:
                continue
            least = min(max(split[:inner]) for split in splits)
            assert fullest_stage_bound(tight) <= least
            equal += fullest_stage_bound(tight) == least
            parts = fullest_stage_branching(tight)
            if parts:
                flat, higher = parts
                shared = sorted(
                    [*splits_of(flat), *(one for one in splits if max(one[:inner]) >= higher.min_fullest_stage)]
                )
                assert shared == sorted(splits)
    assert equal > 25


def test_the_graph_in_the_relaxation_bounds_every_plan(cases: list[tuple[Problem, LayoutContext, Costed]]) -> None:
    """In any setting its bound is at most the fastest plan's step, and no less than that of the known paths."""
    rng, looked_at, higher = random.Random(5), 0, 0
    for _, context, plans in cases:
        graph = StepGraph.of(context.layout, context.costs.transfer_ns, context.costs.barrier_ns)
        fits = plans.peak_bytes <= context.capacity_bytes
        slowest = int(plans.step_time_ns[fits].max())
        timed = EventTimeRelaxation(CompactRelaxation(context, slowest), graph)
        inner = num_inner(context.layout)
        for _ in range(8):
            tight, split, within = narrowed_somewhere(rng, context, plans)
            tight = replace(tight, min_fullest_stage=int(split[:inner].max()) if rng.random() < 0.5 else 0)
            within &= plans.layers[:, :inner].max(axis=1) >= tight.min_fullest_stage
            proved, layers = timed.solve(tight)
            assert layers is not None
            assert proved <= plans.step_time_ns[within].min()
            pool = [*analytic_paths(context.layout), *chunk_paths(context.layout)]
            state = LayoutState(tight, pool, slowest, 0, 0.0, None, Counters())
            rounds = rounds_on(state, CompactRelaxation(tight, slowest))
            assert rounds is not None
            rounds.solve()
            rounds.prove()
            assert proved >= state.bound_ns * (1 - 1e-5)
            higher += proved > state.bound_ns * (1 + 1e-3)
            looked_at += 1
    assert looked_at == 8 * len(cases)
    assert higher > 5


@pytest.mark.long
def test_the_graph_in_the_relaxation_is_exact_where_a_split_fits_without_recomputation() -> None:
    """With layers of one kind: also what the ends of the model gather and reduce, with layers or without."""
    exact, empty = 0, 0
    alike_layers = (case for case in free_cases() if len(case[0].model.kinds) == 1)
    for _, context, plans in islice(alike_layers, 8):
        graph = StepGraph.of(context.layout, context.costs.transfer_ns, context.costs.barrier_ns)
        fits = plans.peak_bytes <= context.capacity_bytes
        timed = EventTimeRelaxation(CompactRelaxation(context, int(plans.step_time_ns[fits].max())), graph)
        for split in splits_of(context):
            alike = (plans.layers == split).all(axis=1)
            fastest = int(plans.step_time_ns[alike].min())
            if fits[alike][plans.step_time_ns[alike] == fastest].any():
                proved, _ = timed.solve(context.with_split(split))
                assert (1 - 1e-5) * fastest <= proved <= fastest
                exact, empty = exact + 1, empty + (split[0] == 0) + (split[-1] == 0)
    assert exact > 10
    assert empty > 2


def test_trees_with_the_graph_in_the_relaxation_end_at_the_best_plan(
    cases: list[tuple[Problem, LayoutContext, Costed]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first node on, which by default only layouts have that paths do not decide quickly."""
    solved: list[int] = []
    solve = EventTimeRelaxation.solve

    def counted(self: EventTimeRelaxation, context: LayoutContext) -> tuple[int, FloatArray | None]:
        solved.append(context.num_stages)
        return solve(self, context)

    monkeypatch.setattr(layer_branching, "PATH_NODES", 0)
    monkeypatch.setattr(EventTimeRelaxation, "solve", counted)
    check_trees(cases)
    assert len(solved) > 10


def test_paths_take_over_where_the_solver_gives_up(
    cases: list[tuple[Problem, LayoutContext, Costed]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relaxation without an answer costs time, not the proof."""
    monkeypatch.setattr(layer_branching, "PATH_NODES", 0)
    monkeypatch.setattr(EventTimeRelaxation, "solve", lambda self, context: (0, None))
    check_trees(cases)
