"""What more would be worth: the intervals hold what trying every plan gives."""

from __future__ import annotations

import math

import pytest

from milpplan import Problem, simulate, solve
from milpplan.explain import Interval, Worth, Yardstick, explain_plan, saved_share
from milpplan.explain.explain_plan import CHANGES, MORE, questions, worth
from milpplan.problem import Accelerator
from milpplan.simulation import usable_memory_bytes
from tests.explain.cases import feasible, holds, truth_s
from tests.small import GIB, small_hardware, small_problem


def test_every_worth_holds_the_truth() -> None:
    """The proved best of every changed problem, and what it saves, are those of trying every plan."""
    gained = 0
    for problem, plan, best_s in feasible((3, 13)):
        yardstick = Yardstick.of(problem, plan, gap=1e-4)
        batch = plan.layout.global_batch_size
        before = yardstick.optimum(problem, None, plan)
        assert holds(before.bounds, best_s)
        for change, changed in questions(problem):
            answer = worth(yardstick, change, changed, plan, before, None, None)
            after_s = truth_s(changed, batch)
            assert holds(answer.best.bounds, after_s), change.name
            assert holds(answer.gain, 1 - after_s / best_s), change.name
            assert answer.gain.high - answer.gain.low < 1e-3
            gained += answer.gain.low > 0.001
    assert gained > 8


@pytest.mark.long
def test_time_for_nothing_still_gives_what_is_true() -> None:
    """With hardly any time the intervals are wide, and hold the truth all the same."""
    problem, plan, best_s = next(feasible((2,)))
    yardstick = Yardstick.of(problem, plan, gap=1e-4)
    before = yardstick.optimum(problem, 1e-6, plan)
    assert holds(before.bounds, best_s)
    for change, changed in questions(problem):
        answer = worth(yardstick, change, changed, plan, before, None, 1e-6)
        assert holds(answer.gain, 1 - truth_s(changed, plan.layout.global_batch_size) / best_s)


def memory_worths(problem: Problem) -> tuple[Worth, Worth]:
    """What memory without limit and 1 GiB more are worth for the best plan of a problem."""
    plan = solve(problem).plan
    assert plan is not None
    yardstick = Yardstick.of(problem, plan, gap=1e-4)
    best = yardstick.optimum(problem, None, plan)
    asked = {change.name: (change, changed) for change, changed in questions(problem)}
    unlimited = worth(yardstick, *asked["unlimited_memory"], plan, best, None, None)
    return unlimited, worth(yardstick, *asked["more_memory"], plan, best, unlimited, None)


def test_one_more_gib_is_implied_where_no_limit_changes_nothing() -> None:
    """Where memory without limit is worth nothing, 1 GiB is not solved for."""
    _, more = memory_worths(small_problem(memory_gib=80))
    assert more.implied_by == "unlimited_memory"
    assert more.gain.low == 0
    assert more.gain.high <= 1e-4


@pytest.mark.long
def test_one_more_gib_is_solved_for_where_memory_binds() -> None:
    """With too little memory for the fastest plan, 1 GiB saves something, and no limit saves no less."""
    problem = small_problem(memory_gib=14, space={"kind": "free"})
    unlimited, more = memory_worths(problem)
    assert more.implied_by == ""
    assert 0 < more.gain.low <= unlimited.gain.high
    assert more.best.peak_memory_bytes is not None
    assert unlimited.best.peak_memory_bytes is not None
    assert unlimited.best.peak_memory_bytes > usable_memory_bytes(problem)


def test_changes_change_what_they_say() -> None:
    """Every change of the hardware touches its own numbers and no others, by the amount in its words."""
    before = small_problem()
    after = {change.name: change.problem(before) for change in CHANGES}
    gpu = before.hardware.accelerator

    def accelerator(name: str) -> Accelerator:
        changed = after[name]
        assert changed is not None
        return changed.hardware.accelerator

    assert accelerator("more_memory").memory_bytes - gpu.memory_bytes == GIB
    assert accelerator("memory_bandwidth").memory_bandwidth_bytes_per_s == pytest.approx(
        MORE * gpu.memory_bandwidth_bytes_per_s
    )
    assert accelerator("matrix_flops").bf16.peak_flops_per_s == pytest.approx(MORE * gpu.bf16.peak_flops_per_s)
    assert accelerator("matrix_flops").fp8.peak_flops_per_s == pytest.approx(MORE * gpu.fp8.peak_flops_per_s)
    assert accelerator("no_latency").kernel_latency_s == 0
    doubled = after["twice_the_batch"]
    assert doubled is not None
    assert doubled.job.global_batch_size == 2 * before.job.global_batch_size
    up, faster = before.hardware.scale_up, after["domain_bandwidth"].hardware.scale_up
    rates, more = up.all_gather.bus_bandwidth_bytes_per_s, faster.all_gather.bus_bandwidth_bytes_per_s
    assert more[0][0] == pytest.approx(MORE * rates[0][0])
    assert after["network_bandwidth"].hardware.scale_up == up


def test_a_faster_part_never_slows_a_plan() -> None:
    """More of a rate, or less latency, simulates no slower: same plan, every change but the batch."""
    for problem, plan, best_s in feasible(range(60, 63)):
        for change, changed in questions(problem):
            if change.name != "twice_the_batch":
                assert simulate(changed, plan).step_time_s <= best_s * (1 + 1e-12), change.name


def test_shares_of_intervals() -> None:
    """1 - after / before, worked out by hand; nothing known gives ends that say nothing."""
    saved = saved_share(Interval(8.0, 10.0), Interval(4.0, 5.0))
    assert (saved.low, saved.high) == (1 - 5 / 8, 1 - 4 / 10)
    assert saved_share(Interval(8.0, math.inf), Interval(4.0, math.inf)) == Interval(-math.inf, 1.0)
    assert small_hardware().accelerator.memory_bytes < explain_plan.UNLIMITED_BYTES
