"""Grouped steps beyond brute force: published cost tables, errors, and what every plan must satisfy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks.length_groups import case_problem, data, step_problem
from benchmarks.switch_tables import Weights, switch_s
from examples.adapters import hydraulis
from milpplan.errors import IllegalPlanError, InfeasibleError, InvalidInputError
from milpplan.lengths import plan_file
from milpplan.lengths.tabled import (
    GroupedProblem,
    Pipeline,
    Strategy,
    SwitchTimes,
    TabledPipeline,
    check,
    solve_groups,
)
from tests.amounts import first, long_but
from tests.lengths.tabled.brute_force import least_time_ns

CONTENT = data()


def small_problem(**changes: object) -> GroupedProblem:
    """Many short sequences and one long one; the second strategy is dear but holds it."""
    short = Strategy.of(Pipeline("short", 1, 0.0, 12.0, 90.0, 1000), 4, 50)
    long = Strategy.of(Pipeline("long", 1, 0.0, 6.0, 90.0, 8000), 1, 0)
    values: dict[str, object] = {
        "lengths": np.array([100, 5000]),
        "counts": np.array([400, 1]),
        "strategies": (short, long),
        "switches": SwitchTimes(np.array([[0, 700], [900, 0]]), np.zeros((2, 2), np.int64)),
    }
    return GroupedProblem(**(values | changes))  # type: ignore[arg-type]


def test_switching_pays_where_it_should_by_hand() -> None:
    """Short ones: 400 * 1,200 / 4 + 10 * 90 = 120,900 and 50; the long one: 30,090; the cheaper switch 700."""
    result = solve_groups(small_problem(), "highs")
    assert result.plan.time_ns == result.bound_ns == 120_900 + 50 + 30_090 + 700
    assert result.plan.names == ("4 x short", "1 x long")
    assert [event.kind for event in plan_file(result.plan).timeline] == [
        "group", "reduce", "parameters", "group", "gradients", "reduce", "gradients", "finish",
    ]  # fmt: skip


def test_dear_switches_keep_one_strategy() -> None:
    """All under the long strategy: 400 * 600 + 30,000 and 6 micro-batches of at most 8,000 of 45,000 tokens."""
    dear = SwitchTimes(np.full((2, 2), 10**6), np.zeros((2, 2), np.int64))
    result = solve_groups(small_problem(switches=dear), "highs")
    assert result.plan.names == ("1 x long",)
    assert result.plan.time_ns == result.bound_ns == 240_000 + 30_000 + 540


def test_switch_times_come_out() -> None:
    """Parameter switches of HotSPa's strategies within 0.1 % of an element-exact computation."""
    for arc in CONTENT["arcs"]:
        model = hydraulis.pools()[arc["model"]]["model_config"]
        number = CONTENT["num_params"][arc["model"]]
        weights = Weights(number, Weights.share(model["V"] * model["H"], number))
        time_s = switch_s(tuple(arc["src"]), tuple(arc["dst"]), weights)
        assert time_s == pytest.approx(arc["param_s"], rel=1e-3, abs=1e-6)


@pytest.mark.long
def test_best_static_plan_of_seven_billion_is_proved() -> None:
    """7B on 16 GPUs: below the best static plan known, 7.03 s, and within 1 % of its bound."""
    result = solve_groups(step_problem(CONTENT, CONTENT["steps"][0], 1), "highs", 0.001, 30)
    assert result.plan.time_ns < 7.0309e9
    assert result.gap < 0.01
    assert result.plan.names == ("dp8 tp2 pp1",)


@pytest.mark.long
@pytest.mark.parametrize(("index", "known_s", "bound_s"), [(0, 7.0309, 6.576), (1, 22.103, 18.686)])
def test_published_steps_are_closed(index: int, known_s: float, bound_s: float) -> None:
    """Up to three strategies: shorter than the best plan known, a higher bound, and a gap of at most 2 %."""
    result = solve_groups(step_problem(CONTENT, CONTENT["steps"][index], 3), "highs", 0.01, 300)
    assert result.plan.time_ns < known_s * 1e9
    assert result.bound_ns > bound_s * 1e9
    assert result.gap <= 0.02


@pytest.mark.long
@pytest.mark.parametrize("backend", ["cpsat", "cbc"])
def test_steps_of_real_size_are_solved_on_every_backend(backend: str) -> None:
    """512 sequences of 7B on 16 GPUs, one strategy: rows are beyond what CP-SAT is trusted with, and go to another
    solver; the bound is below HiGHS' plan, and the plan above its bound."""
    problem = step_problem(CONTENT, CONTENT["steps"][0], 1)
    known = solve_groups(problem, "highs", 1e-3, 5.0, waits=False)
    found = solve_groups(problem, backend, 1e-3, 5.0, waits=False)
    assert found.bound_ns <= known.plan.time_ns
    assert known.bound_ns <= found.plan.time_ns
    assert found.gap < 0.05


@pytest.mark.parametrize("backend", long_but(("highs", "cpsat", "auto"), ("highs", "cbc", "cpsat", "auto")))
@pytest.mark.parametrize("tokens", first(1, [10**8, 2**40]))
def test_micro_batches_without_a_limit_are_solved(tokens: int, backend: str) -> None:
    """A capacity that stands for none is no coefficient of a program."""
    strategy = Strategy.of(Pipeline("p", 1, 0.0, 1000.0, 0, tokens), 1)
    problem = GroupedProblem(np.array([100]), np.array([3]), (strategy,), SwitchTimes.free(1))
    result = solve_groups(problem, backend)
    assert result.plan.time_ns == pytest.approx(300_000, rel=1e-4)
    assert result.bound_ns == pytest.approx(result.plan.time_ns, rel=1e-3)
    assert result.bound_ns <= result.plan.time_ns


def test_a_step_that_no_set_holds_is_refused_as_such() -> None:
    """Two sequences on one replica of two stages, of which not both may be in flight: proved at once, not a matter
    of time."""
    strategy = Strategy.of(Pipeline("p", 2, 0.0, 1000.0, 0, 1000, 1500), 1)
    problem = GroupedProblem(np.array([1000]), np.array([2]), (strategy,), SwitchTimes.free(1))
    with pytest.raises(InfeasibleError, match="holds the 2 sequences"):
        solve_groups(problem, "highs")


def test_what_a_solver_calls_infeasible_is_asked_again() -> None:
    """HiGHS simplifies the exact program of this set, with a row for what is to beat a little above its optimum,
    to one without an answer; so its bound was 4e-7 above the best of all its plans (by enumeration)."""
    lengths = (304, 400, 448, 496)

    def strategy(
        name: str, shape: tuple[int, int, int], each: int, transfer: int, table: tuple[int, ...]
    ) -> Strategy:
        stages, tokens, replicas = shape
        forward, backward = {"p0": (3, 1), "p1": (1, 4), "p2": (1, 0)}[name]
        pipeline = TabledPipeline(
            *(name, stages, 0.0, 0.0, float(each), tokens, None, None, transfer, forward, backward, 1),
            *(lengths, table),
        )
        return Strategy(name, ((pipeline, replicas),), {"p0": 915974672, "p1": 322452402, "p2": 88928184}[name])

    strategies = (
        strategy("p0", (4, 317, 1), 1852353896, 265435937, (304164591, 74457684, 228357922, 585293592)),
        strategy("p1", (3, 1206, 3), 345471182, 647890637, (929589994, 197328292, 127064147, 715413985)),
        strategy("p2", (2, 593, 1), 643955718, 542156681, (60645946, 979934061, 763687759, 60855409)),
    )
    switches = SwitchTimes(
        np.array([[0, 120779399, 829058377], [120077440, 0, 703279328], [846366839, 676061214, 0]]),
        np.array([[0, 455040216, 349591067], [546232162, 0, 839292788], [478805616, 644976545, 0]]),
    )
    problem = GroupedProblem(
        np.array(lengths), np.ones(4, np.int64), strategies, switches, 3, (), (136966975, 844598318, 57946445)
    )
    bound_ns = next(record.bound_ns for record in solve_groups(problem, "highs").sets if record.used == (2,))
    assert bound_ns <= 7677295366


@pytest.mark.parametrize("backend", ["cpsat", "highs"])
def test_units_of_a_backend_are_no_part_of_a_bound(backend: str) -> None:
    """CP-SAT has times of groups in whole units: no record of a set is above its least step. (One was: 6 ns.)"""
    replicas = (
        (Pipeline("first", 2, 640.76, 6029.63, 35449.96, 3, 4, None, 0, 2, 1), 1),
        (Pipeline("second", 1, 0.0, 5752.597490378052, 39040.292333776844, 6, 19, None, 0, 2, 3), 2),
    )
    strategies = (Strategy("0", replicas[:1], 0), Strategy("1", replicas[1:], 20_000))
    never = SwitchTimes(*np.zeros((2, 2, 2), np.int64))
    lengths, counts = np.array([3]), np.array([2])
    problem = GroupedProblem(lengths, counts, strategies, never, 1, (), (43_000, 43_000))
    for record in solve_groups(problem, backend, 0.0, 5.0).sets:
        assert record.bound_ns <= least_time_ns(problem, record.used), record


def test_what_fits_nowhere_is_refused() -> None:
    """A sequence longer than every strategy holds: the error says the most that fits."""
    with pytest.raises(InfeasibleError, match=r"A sequence of 9000 tokens .* 8000 tokens"):
        small_problem(lengths=np.array([100, 9000]))


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"lengths": np.array([100])}, "1 lengths with 2 counts"),
        ({"lengths": np.array([5000, 100])}, "Ascending"),
        ({"counts": np.array([0, 1])}, "at least once"),
        ({"max_strategies": 0}, "max_strategies is 0"),
        ({"homes": (2,)}, "homes are"),
        ({"switches": SwitchTimes.free(3)}, "2 strategies and switch times"),
        ({"finish_ns": (1,)}, "finish_ns"),
    ],
)
def test_bad_problems_are_refused(changes: dict[str, object], seen: str) -> None:
    """Each with the values seen."""
    with pytest.raises(InvalidInputError, match=seen):
        small_problem(**changes)


def test_too_many_lengths_are_refused() -> None:
    """A program would have a variable for each under every strategy."""
    with pytest.raises(InvalidInputError, match="5000 distinct lengths"):
        solve_groups(small_problem(lengths=np.arange(1, 5001), counts=np.ones(5000, np.int64)))


def test_negative_times_are_refused() -> None:
    """Pipelines, strategies and switches."""
    with pytest.raises(InvalidInputError, match="times"):
        Pipeline("p", 1, -1.0, 1.0, 1.0, 10)
    with pytest.raises(InvalidInputError, match="less than zero"):
        SwitchTimes(np.array([[-1]]), np.array([[0]]))


def test_a_wrong_plan_is_caught() -> None:
    """A plan that states another time, or runs a sequence twice, breaks the check."""
    plan = solve_groups(small_problem(), "highs").plan
    with pytest.raises(IllegalPlanError, match="Its simulation takes"):
        check(dataclasses.replace(plan, time_ns=plan.time_ns - 1))
    packing = plan.groups[0].packings[0]
    doubled = dataclasses.replace(packing, replicas=(packing.replicas[0] * 2, *packing.replicas[1:]))
    group = dataclasses.replace(plan.groups[0], packings=(doubled,))
    with pytest.raises(IllegalPlanError, match="400 expected"):
        check(dataclasses.replace(plan, groups=(group, plan.groups[1])))
    with pytest.raises(IllegalPlanError, match=r"runs 0 sequences of 5000 tokens"):
        check(dataclasses.replace(plan, groups=plan.groups[:1]))


def test_a_case_of_one_stage_replicas_is_proved() -> None:
    """Four replicas of tp16 whose memory forces a second micro-batch on each: the bound knows that."""
    case = hydraulis.cases()["H2_32b_64gpu_200K"]
    result = solve_groups(case_problem(case, 0), "highs", 0.002, 20)
    assert result.gap < 5e-4


def test_micro_batches_hold_no_more_than_is_said() -> None:
    """Random sequences that fit into so many micro-batches never have more units, some nearly as many."""
    random = np.random.default_rng(9)
    pipeline, closest = Pipeline("quadratic", 1, 0.3, 100.0, 0.0, 1000), 0.0
    for _ in range(200):
        lengths = np.unique(random.integers(1, 1000, 8))
        counts = random.integers(1, 6, lengths.size)
        problem = GroupedProblem(lengths, counts, (Strategy.of(pipeline, 1),), SwitchTimes.free(1))
        (kind,) = problem.kinds
        number, held, left = int(random.integers(1, 5)), 0, 0
        for place in random.permutation(np.repeat(np.arange(lengths.size), counts)).tolist():
            # Even if sequences could be cut where a micro-batch ends.
            if left + lengths[place] <= number * pipeline.micro_batch_tokens:
                left += int(lengths[place])
                held += int(kind.units[place])
        assert held <= kind.most_units(number)
        closest = max(closest, held / kind.most_units(number))
    assert closest > 0.9
