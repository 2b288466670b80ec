"""The lanes of a step: what the simulator's timeline says, rank by rank and stream by stream."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from milpplan import Plan, Problem, simulate
from milpplan.simulation.pipeline.lanes import SLICE_KINDS, StepLanes, pipeline_runs, step_lanes
from tests.simulation.cases import random_layout, random_plan, random_problem

SEEDS = range(5)


@cache
def case(seed: int) -> tuple[Problem, Plan, StepLanes]:
    """A random problem, a plan for it, and its lanes."""
    random = np.random.default_rng(seed)
    problem = random_problem(random)
    plan = random_plan(random, problem, random_layout(random, problem))
    return problem, plan, step_lanes(problem, plan)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_does_one_thing_at_a_time(seed: int) -> None:
    """Compute, gathers and reductions of a rank do not overlap with their like, and end with the step."""
    _, _, lanes = case(seed)
    for rank in lanes.ranks:
        for name in ("compute", "parameter gather", "gradient reduction"):
            lane = rank.lane(name)
            if lane is not None:
                assert (lane.start_ns[1:] >= lane.end_ns[:-1]).all()
                assert (lane.end_ns > lane.start_ns).all()
                assert lane.start_ns[0] >= 0
    ends = [int(lane.end_ns.max()) for rank in lanes.ranks for lane in rank.lanes]
    assert max(ends) == lanes.step_time_ns


@pytest.mark.parametrize("seed", SEEDS)
def test_work_is_that_of_the_simulator(seed: int) -> None:
    """Forwards, backwards and weight gradients of a rank add up to its busy time, one of each a micro-batch and
    virtual stage."""
    problem, plan, lanes = case(seed)
    timeline = pipeline_runs(problem, plan)[0].timeline
    work = {SLICE_KINDS.index(kind) for kind in ("forward", "backward", "weight gradients")}
    for rank in lanes.ranks:
        lane = rank.lane("compute")
        assert lane is not None
        own = np.isin(lane.kind, list(work))
        assert int((lane.end_ns - lane.start_ns)[own].sum()) == int(timeline.busy_ns[rank.rank])
        triples = list(zip(lane.kind[own], lane.stage[own], lane.micro_batch[own], strict=True))
        assert len(set(triples)) == len(triples)
        assert set(lane.stage[own]) <= set(rank.virtual_stages)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_starts_before_what_it_needs_has_come(seed: int) -> None:
    """An activation comes before the forward of the next virtual stage, a gradient before the backward of the one
    before: of pairs the first part waits for both."""
    _, plan, lanes = case(seed)
    starts = {}
    for rank in lanes.ranks:
        work = rank.lane("compute")
        assert work is not None
        for kind, stage, batch, start in zip(work.kind, work.stage, work.micro_batch, work.start_ns, strict=True):
            starts[int(kind), int(stage), int(batch)] = int(start)
    sends = {"to next stage": ("forward", 1), "to previous stage": ("backward", -1)}
    seen = 0
    for rank in lanes.ranks:
        for name, (kind, way) in sends.items():
            lane = rank.lane(name)  # type: ignore[arg-type]
            if lane is None:
                continue
            for stage, batch, end in zip(lane.stage, lane.micro_batch, lane.end_ns, strict=True):
                assert end <= starts[SLICE_KINDS.index(kind), int(stage) + way, int(batch)]
                seen += 1
    rank_of = plan.layout.stage_ranks
    borders = sum(one != other for one, other in pairwise(rank_of))
    assert seen == 2 * borders * plan.layout.num_micro_batches


@pytest.mark.parametrize("seed", SEEDS)
def test_memory_is_that_of_the_report(seed: int) -> None:
    """The memory of a rank reaches the peak of its report."""
    problem, plan, lanes = case(seed)
    report = simulate(problem, plan)
    for rank, stage in zip(lanes.ranks, report.stages, strict=True):
        assert int(rank.memory.total_bytes.max()) == stage.memory.peak_bytes
        assert rank.usable_memory_bytes == stage.usable_memory_bytes
