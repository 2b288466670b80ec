"""Gaps: intervals against trying every plan, changes against simulating them, costs against arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

import milpplan
from milpplan import Layout, Plan, Problem, simulate
from milpplan.errors import InvalidInputError, SolverError
from milpplan.explain import Budget
from milpplan.explain.judge import Solves, widened
from milpplan.explain.judge.gap import WHOLE, Priced, belongs, best_changes, carried_over, gap, judged, variants
from milpplan.optimize import with_space
from milpplan.optimize.bounds import uniform_plan
from milpplan.optimize.solve import solve
from milpplan.optimize.space.enumerate_layouts import broken_rules, layout_space
from milpplan.problem import Space
from milpplan.simulation import LayoutColumns, cluster_costs
from milpplan.units import gpu_hours
from tests.explain.cases import feasible, holds, truth_s
from tests.optimize.mixed_problems import mixed_problem, switched_problem
from tests.optimize.problems import random_problem
from tests.simulation.cases import random_plan
from tests.small import small_problem


def random_plan_of(problem: Problem, seed: int) -> Plan:
    """Some plan of some legal layout, which need not fit."""
    random = np.random.default_rng(seed)
    columns = layout_space(problem).columns
    layout = columns.at(int(random.integers(len(columns))))
    if problem.space.kind == "uniform" or problem.inference:
        return uniform_plan(problem, layout, str(random.choice(problem.recompute_modes)))
    return random_plan(random, problem, layout)


def bad_plan(problem: Problem) -> Plan:
    """Two stages of a small model, all layers recomputed: legal, and slow."""
    layout = Layout(pp=2, dp=2, global_batch_size=problem.job.global_batch_values[0])
    return uniform_plan(problem, layout, "full")


@pytest.mark.parametrize("kind", ["uniform", "free"])
def test_gaps_hold_the_truth(kind: str) -> None:
    """Of any plan, the share that the best of all plans saves lies in the interval, solved or not."""
    tried = 0
    for problem, _, _ in feasible(range(6, 9), kind):
        plan = random_plan_of(problem, tried)
        if problem.job.objective != "step_time_per_token":
            continue
        same = judged(problem, plan)
        truth = truth_s(same, plan.layout.global_batch_size)
        for limit in (None, 0.01):
            told = gap(problem, plan, time_limit_s=limit, tolerance=1e-4, changes=False)
            step = told.report.step_time_s
            if told.whole.is_outside or not math.isfinite(truth):
                continue
            assert holds(told.whole.saved, 1.0 - truth / step)
            # Beside a plan with uneven chunks stands a bound of chunks of any size, which is wider.
            if limit is None and told.whole.problem == same:
                assert told.whole.proved
                assert told.whole.saved.high - told.whole.saved.low <= 1e-4
        tried += 1
    assert tried >= 2


def test_the_best_plan_has_no_gap() -> None:
    """The proved best is known to be it, and no change or chain betters it by more than the tolerance."""
    problem = small_problem(space={"kind": "free"})
    best = solve(problem, gap=1e-4).plan
    assert best is not None
    told = gap(problem, best, time_limit_s=None, tolerance=1e-4)
    assert told.proved
    assert 0.0 <= told.whole.saved.low <= told.whole.saved.high <= 1e-4
    assert all(change.saved <= 1e-4 for change in told.changes)
    assert told.chain == ()


def test_changes_are_simulated_and_legal() -> None:
    """Each change's numbers are the simulator's, its fields are what differs, and each step of the chain is
    faster than the one before it; none passes the proved bound."""
    problem = small_problem(num_gpus=8, space={"kind": "free"})
    plan = uniform_plan(problem, Layout(pp=4, dp=2, global_batch_size=8), "full")
    told = gap(problem, plan, time_limit_s=None)
    assert len(told.changes) >= 3
    assert told.whole.bound_s is not None
    for change in (*told.changes, *told.chain):
        report = simulate(told.problem, change.plan)
        assert report.step_time_s == change.step_time_s
        assert report.peak_memory_bytes == change.peak_memory_bytes
        assert report.fits
        assert broken_rules(told.problem, change.plan.layout) == []
        assert change.step_time_s >= told.whole.bound_s * (1 - 1e-9)
        assert change.closed is not None
        assert change.closed <= 1 + 1e-6
    for change in told.changes:
        differs = {n for n in Layout.model_fields if getattr(plan.layout, n) != getattr(change.plan.layout, n)}
        assert set(change.fields) - {"stages", "recompute"} == differs
        assert change.effort == ("reshard" if differs & {"tp", "pp", "dp", "vpp"} else change.effort)
        assert change.saved == 1 - change.step_time_s / told.report.step_time_s > 0
    steps = [told.report.step_time_s, *(change.step_time_s for change in told.chain)]
    assert all(after < before for before, after in pairwise(steps))
    assert told.chain[0].plan == told.changes[0].plan
    assert [change.step_time_s for change in told.changes] == sorted(one.step_time_s for one in told.changes)


def test_single_changes_are_all_of_a_field() -> None:
    """The best change of the micro-batch is the best of all sizes that divide, everything else as it was."""
    problem = small_problem(global_batch_size=32)
    plan = uniform_plan(problem, Layout(pp=2, dp=2, micro_batch_size=16, global_batch_size=32), "full")
    found = best_changes(problem, Priced.of(problem, plan), Budget(None))["micro_batch_size"]
    every = [
        simulate(problem, plan.model_copy(update={"layout": layout}))
        for size in (1, 2, 4, 8, 16)
        for layout in [plan.layout.model_copy(update={"micro_batch_size": size})]
    ]
    assert found[1].step_time_s == min(report.step_time_s for report in every if report.fits)


def test_a_variant_changes_its_field_and_what_must_follow() -> None:
    """Twice tp takes half of dp with it and nothing else; stages stay where their number does."""
    problem = small_problem(num_gpus=8, space={"kind": "free"})
    plan = uniform_plan(problem, Layout(tp=2, pp=2, dp=2, global_batch_size=8), "none")
    words = {words: other for lead, words, other in variants(problem, plan) if lead == "tp"}
    assert set(words) == {"tp=1 dp=4", "tp=4 dp=1"}
    assert all(other.virtual_stages == plan.virtual_stages for other in words.values())
    deeper = carried_over(problem, plan, Layout(tp=2, pp=4, global_batch_size=8))
    assert [stage.num_layers for stage in deeper.virtual_stages] == [2, 2, 1, 1]


def test_a_plan_that_does_not_fit() -> None:
    """It is judged all the same: what fits is the best, and changes are what makes it fit."""
    problem = small_problem(memory_gib=14, space={"kind": "free"})
    plan = uniform_plan(problem, Layout(dp=4, global_batch_size=8), "none")
    told = gap(problem, plan, time_limit_s=None)
    assert not told.report.fits
    assert not told.whole.is_outside
    assert told.whole.best is not None
    assert simulate(problem, told.whole.best).fits
    fitting = [change for change in told.chain if change.closed is not None]
    assert fitting or told.chain == ()


def test_the_plans_own_switches_join_the_space() -> None:
    """A schedule that the space does not name does not put the plan outside; a stricter space stays a list."""
    problem = small_problem(space={"kind": "free"})
    plan = uniform_plan(problem, Layout(pp=4, schedule="gpipe", global_batch_size=8), "none")
    assert not belongs(problem, plan)
    told = gap(problem, plan, changes=False)
    assert not told.whole.is_outside
    assert told.whole.problem.space.schedule == ("1f1b", "interleaved", "gpipe")
    assert widened(Space(), plan.layout).zero_stage == Space().zero_stage


def test_a_narrower_space_lies_inside() -> None:
    """What is proved of the whole holds for what a launcher runs, and changes stay inside what it runs."""
    problem = small_problem(num_gpus=8, space={"kind": "free"})
    narrow = with_space(problem, zero_stage=(0, 1), recompute=("none", "full"), tp=(1, 2))
    plan = uniform_plan(problem, Layout(tp=2, pp=4, global_batch_size=8), "full")
    told = gap(problem, plan, runnable=("what it can run", narrow), time_limit_s=None)
    inner, whole = told.spaces
    assert (inner.name, whole.name) == ("what it can run", WHOLE)
    assert inner.best_s is not None
    assert whole.best_s is not None
    assert inner.bound_s is not None
    assert whole.bound_s is not None
    assert inner.bound_s >= whole.bound_s
    assert inner.best_s >= whole.best_s
    assert inner.saved.low <= whole.saved.low
    for change in (*told.changes, *told.chain):
        assert change.plan.layout.zero_stage <= 1
        assert change.plan.layout.tp <= 2


def test_uneven_chunks_are_judged_by_a_bound_that_holds_for_them() -> None:
    """Interleaved chunks of any size are outside of a space of even ones: the bound is that of any size."""
    problem = small_problem(space={"kind": "free", "interleaved_layers": "even"})
    stages = [(0, 3), (3, 4), (4, 5), (5, 6)]
    plan = Plan.model_validate(
        {
            "layout": {"pp": 2, "vpp": 2, "dp": 2, "schedule": "interleaved", "global_batch_size": 8},
            "virtual_stages": [{"layers": span} for span in stages],
        }
    )
    told = gap(problem, plan, time_limit_s=None, changes=False)
    assert told.whole.problem.interleaved_layers == "any"
    assert not told.whole.is_outside
    truth = solve(with_space(told.whole.problem, interleaved_layers="any")).step_time_s
    assert truth is not None
    assert told.whole.bound_s is not None
    assert told.whole.bound_s <= truth * (1 + 1e-9)


def test_a_bound_above_the_plan_is_an_error() -> None:
    """A solve that claims too much is not believed."""
    problem = small_problem()
    best = solve(problem).plan
    assert best is not None
    solves = Solves()
    gap(problem, best, solves=solves, changes=False)
    (key, result), *_ = solves.found.items()
    assert result.lower_bound_s is not None
    solves.found[key] = replace(result, lower_bound_s=1.5 * result.lower_bound_s)
    with pytest.raises(SolverError, match="may not be above"):
        gap(problem, best, solves=solves, changes=False)


def test_plans_of_one_job_share_a_solve() -> None:
    """Two plans, one solve, the same bound."""
    problem = small_problem()
    solves = Solves()
    told = [
        gap(problem, uniform_plan(problem, layout, "none"), solves=solves, changes=False)
        for layout in (Layout(dp=4, global_batch_size=8), Layout(tp=4, global_batch_size=8))
    ]
    assert len(solves.found) == 1
    assert told[0].whole.bound_s == told[1].whole.bound_s


def test_what_a_run_costs() -> None:
    """1,000 steps of 2 s on 8 GPUs are 4.44 GPU-hours; a saved half is half of them, times the price."""
    assert gpu_hours(8, 1e9, 0.5e6) == pytest.approx(4.4444, rel=1e-4)
    assert gpu_hours(8, 1e9, np.array([0.5e6, 0.25e6])) == pytest.approx([4.4444, 8.8889], rel=1e-4)
    problem = small_problem()
    told = gap(problem, bad_plan(problem), tokens=1e9, price_per_gpu_hour=2.5, changes=False)
    spent = told.spending
    steps = 1e9 / (8 * 2048)
    assert spent.gpu_hours == pytest.approx(steps * told.report.step_time_s * 4 / 3600)
    assert spent.money == pytest.approx(2.5 * spent.gpu_hours)
    assert spent.saved_gpu_hours.low == pytest.approx(told.whole.saved.low * spent.gpu_hours)
    assert spent.saved_money is not None
    assert spent.saved_money.high == pytest.approx(2.5 * told.whole.saved.high * spent.gpu_hours)


@pytest.mark.parametrize("wrong", [{"time_limit_s": 0}, {"tokens": -1.0}, {"price_per_gpu_hour": math.nan}])
def test_numbers_that_make_no_sense(wrong: dict[str, float]) -> None:
    """Limits, tokens and prices are positive."""
    problem = small_problem()
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        milpplan.gap(problem, bad_plan(problem), **wrong)


@pytest.mark.long
def test_clusters_of_several_types_and_forwards_alone() -> None:
    """Plans on mixed clusters, with the host's memory, and of inference are judged and changed like others, and
    priced as the simulator prices them."""
    for problem in (mixed_problem(1), switched_problem(1), switched_problem(1, inference=True)):
        plan = random_plan_of(problem, 1)
        told = gap(problem, plan, time_limit_s=1.0)
        priced, report = Priced.of(told.problem, plan), told.report
        assert (priced.step_time_s, priced.fits) == (report.step_time_s, report.fits)
        assert told.whole.saved.low <= told.whole.saved.high
        for change in told.chain:
            assert simulate(told.problem, change.plan).step_time_s == change.step_time_s


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_is_priced_as_it_is_simulated(seed: int) -> None:
    """Step, peak and whether it fits, with the constants of one layout or of a whole batch of layouts."""
    problem = random_problem(seed, "free")
    plan = random_plan_of(problem, seed)
    other = random_plan_of(problem, seed + 1)
    batch = cluster_costs(problem, LayoutColumns.of([other.layout, plan.layout]))
    report = simulate(problem, plan)
    for priced in (Priced.of(problem, plan), Priced.of(problem, plan, batch.at(1))):
        assert priced.step_time_s == report.step_time_s
        assert priced.fits == report.fits
        assert priced.peak_memory_bytes == report.peak_memory_bytes
        assert (priced.over_bytes == 0) == report.fits
