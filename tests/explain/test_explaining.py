"""A whole explanation: what it covers, in which order, and what remains when its time ends."""

from __future__ import annotations

import random

import pytest

from milpplan import Layout, Plan, Problem, explain_plan, simulate, solve
from milpplan.errors import IllegalPlanError, InfeasibleError, InvalidInputError
from milpplan.explain import explain_plan as explaining
from milpplan.explain import optima
from milpplan.explain.judge import candidates
from milpplan.explain.judge.gap import loosened
from milpplan.explain.why_not import group_shape, tier
from milpplan.optimize.space.enumerate_layouts import broken_rules, layout_space
from tests.explain.cases import feasible, holds, truth_s
from tests.optimize.problems import random_plan
from tests.small import small_problem


@pytest.fixture
def no_worths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the questions that ``test_what_if`` is about."""
    monkeypatch.setattr(explaining, "questions", lambda problem: iter(()))


def poor_plan(problem: Problem) -> Plan:
    """A legal plan that fits and is not the best."""
    best = solve(problem).plan
    space = layout_space(problem)
    for seed in range(100):
        rng = random.Random(seed)
        plan = random_plan(rng, problem, space.at(rng.randrange(len(space))), 0.5)
        if plan.layout.pp > 1 and best != plan and simulate(problem, plan).fits:
            return plan
    raise AssertionError("no poor plan")


@pytest.mark.long
@pytest.mark.usefixtures("no_worths")
def test_a_poor_plan_is_told_its_distance_and_what_closes_it() -> None:
    """The distance holds the truth; each single change keeps the other fields, and its best is that of all plans
    with them fixed; more freedom is never worse."""
    done = 0
    for problem, best, best_s in feasible((2, 3, 13)):
        space = layout_space(problem)
        rng = random.Random(1)
        plan = random_plan(rng, problem, space.at(rng.randrange(len(space))))
        report = simulate(problem, plan)
        told = explain_plan(problem, plan, [{"tp": plan.layout.tp}], time_limit_s=None)
        assert holds(told.above_best, 1 - best_s / report.step_time_s)
        assert (plan == best) == (not told.changes) or report.step_time_s == best_s
        for change in told.changes:
            truth = truth_s(loosened(problem, plan, change.fields), plan.layout.global_batch_size)
            assert holds(change.best.bounds, truth)
            assert holds(change.saved, 1 - truth / report.step_time_s)
            assert change.best.layout is not None
            kept = set(Layout.model_fields) - set(change.fields)
            assert all(getattr(change.best.layout, name) == getattr(plan.layout, name) for name in kept)
            done += 1
    assert done >= 3


def test_candidates_are_the_fields_that_differ() -> None:
    """Stages alone come first; then one group of fields for each difference, none twice."""
    problem = small_problem(space={"kind": "free"})
    plan = poor_plan(problem)
    best = solve(problem).plan
    assert best is not None
    found = list(candidates(plan, best))
    assert found[0] == ()
    assert len({frozenset(fields) for fields in found}) == len(found)
    leads = {fields[0] for fields in found[1:]}
    assert all(getattr(plan.layout, name) != getattr(best.layout, name) for name in leads)


@pytest.mark.long
def test_time_that_is_over_leaves_questions_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no time is left for is named, in the order of asking; what was answered stays."""
    problem = small_problem()
    plan = solve(problem).plan
    assert plan is not None
    asked: list[str] = []
    spent = iter([False, False, False, True])
    monkeypatch.setattr(optima.Budget, "is_spent", property(lambda budget: next(spent, True)))
    told = explain_plan(problem, plan, [{"tp": 2}], callback=asked.append)
    assert asked == ["the proved best", "break-even values", "tp=2", "memory without limit"]
    assert [one.words for one in told.wishes] == ["tp=2"]
    assert told.unanswered[0] == "1 GiB more memory"
    assert len(told.unanswered) == 7
    assert not told.interrupted


def test_ctrl_c_keeps_the_answers_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt during a question ends the asking, not the report."""
    problem = small_problem()
    plan = solve(problem).plan
    assert plan is not None

    def impatient(words: str) -> None:
        if words.startswith("10 %"):
            monkeypatch.setattr(optima, "solve", interrupted)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    told = explain_plan(problem, plan, [{"tp": 2}], callback=impatient)
    assert told.interrupted
    assert [one.name for one in told.worth] == ["unlimited_memory", "more_memory"]
    assert told.unanswered[0] == "10 % more memory bandwidth"


@pytest.mark.usefixtures("no_worths")
def test_a_plan_that_does_not_fit_is_measured_all_the_same() -> None:
    """Its headroom is negative, the best of the problem is proved, and no plan at all is an error with its
    reason."""
    problem = small_problem(memory_gib=12, space={"kind": "free"})
    layout = Layout(tp=1, pp=1, dp=4, global_batch_size=8, micro_batch_size=2)
    assert not broken_rules(problem, layout)
    plan = random_plan(random.Random(1), problem, layout, 0.0)
    told = explain_plan(problem, plan, [{"tp": 2}])
    assert min(told.limits.headroom_bytes) < 0
    assert not told.report.fits
    assert told.best.plan is not None
    assert simulate(problem, told.best.plan).fits
    with pytest.raises(InfeasibleError, match="No plan fits"):
        explain_plan(small_problem(memory_gib=5, num_gpus=1), solve(small_problem(num_gpus=1)).plan)  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.usefixtures("no_worths")
def test_a_plan_outside_the_space_is_said_to_be() -> None:
    """A better plan than the declared space has is no start for its search, and no distance is hidden."""
    free = small_problem(space={"kind": "free"})
    plan = solve(free).plan
    assert plan is not None
    narrow = small_problem(space={"kind": "free", "tp": (4,)})
    told = explain_plan(narrow, plan, [{"tp": 1}])
    assert told.is_outside
    assert told.above_best.high < 0
    assert not explain_plan(free, plan, [{"tp": 1}]).is_outside


def test_uniform_space_takes_uniform_starts_only() -> None:
    """A plan with unequal stages is no incumbent of the uniform space: nothing there is called better than it
    is."""
    problem = small_problem()
    free = poor_plan(problem)
    best = solve(problem).step_time_s
    again = solve(problem, warm_start=free)
    assert again.step_time_s == best
    assert again.step_time_s is not None
    stages = free.virtual_stages
    better = simulate(problem, free).step_time_s < again.step_time_s
    assert not better or len({stage.num_layers for stage in stages}) > 1


@pytest.mark.long
@pytest.mark.usefixtures("no_worths")
def test_other_objectives_are_explained_in_their_unit() -> None:
    """GPU-hours are counted in GPU-hours; the fewest GPUs as the shortest step on the plan's own number."""
    week = {"training_tokens": 1e9, "deadline_s": 600_000.0}
    problem = small_problem(objective="gpu_hours", **week)
    plan = solve(problem).plan
    assert plan is not None
    told = explain_plan(problem, plan, [{"tp": 2}])
    steps = 1e9 / (8 * 2048)
    assert told.unit == "GPU-hours"
    assert told.value == pytest.approx(told.report.step_time_s * 4 * steps / 3600)
    fewest = explain_plan(small_problem(objective="num_gpus", **week), plan, [{"tp": 2}])
    assert fewest.problem.job.objective == "step_time_per_token"
    assert fewest.best.bounds.high == pytest.approx(told.report.step_time_s)


def test_groups_and_their_tiers() -> None:
    """Replicas stride over tensor ranks; a group that leaves the domain needs the network."""
    problem = small_problem()
    layout = Layout(tp=2, cp=2, dp=4, global_batch_size=8)
    assert group_shape(layout, "tp_exposed") == (2, 1)
    assert group_shape(layout, "cp_exposed") == (2, 2)
    assert group_shape(layout, "zero_exposed") == (8, 2)
    up, out = problem.hardware.scale_up, problem.hardware.scale_out
    assert tier(problem, up.num_gpus, 1) == up.name
    assert tier(problem, 2 * up.num_gpus, 1) == out.name
    assert tier(problem, up.num_gpus, 2) == out.name


def test_what_makes_no_sense_is_refused() -> None:
    """A plan for another problem, or no time, is an error that says so."""
    problem = small_problem()
    plan = solve(problem).plan
    assert plan is not None
    with pytest.raises(IllegalPlanError):
        explain_plan(small_problem(num_gpus=8), plan)
    with pytest.raises(InvalidInputError):
        explain_plan(problem, plan, time_limit_s=0)


@pytest.mark.usefixtures("no_worths")
def test_a_bound_that_is_proved_already_is_taken_over() -> None:
    """With hardly any time for a proof the distance is as narrow as the bound; a false one is refused."""
    problem = small_problem()
    result = solve(problem, gap=1e-4)
    assert result.plan is not None
    assert result.step_time_s is not None
    bound_s = result.lower_bound_s
    told = explain_plan(problem, result.plan, [{"tp": 2}], time_limit_s=1e-6, proved_bound_s=bound_s)
    assert 0 <= told.above_best.high <= 1e-4
    with pytest.raises(InvalidInputError, match="No plan is said"):
        explain_plan(problem, result.plan, proved_bound_s=2 * result.step_time_s)
