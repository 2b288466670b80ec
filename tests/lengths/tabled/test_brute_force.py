"""Small grouped steps: the solver's optimum and bound are those of all plans, listed one by one."""

from __future__ import annotations

import numpy as np
import pytest

from milpplan.lengths.bounds import IdleTimeBound, PipelineCuts
from milpplan.lengths.tabled import (
    solve_groups,
    undominated_tours,
)
from milpplan.lengths.tabled.assignment_program import assignment_program, ranked_sets
from milpplan.optimize.milp import Limits
from milpplan.optimize.milp.backends import backend
from tests.amounts import first
from tests.lengths.tabled.brute_force import least_time_ns, random_problem


def check_optimum(seed: int, backend_name: str) -> None:
    """Plan and bound equal the least time of all plans."""
    problem = random_problem(seed)
    result = solve_groups(problem, backend_name)
    least = least_time_ns(problem)
    assert (result.bound_ns, result.plan.time_ns) == (least, least), seed
    assert result.gap == 0.0


@pytest.mark.parametrize("backend_name", ["cpsat", "cbc", "highs"])
@pytest.mark.parametrize("seed", first(1, range(6)))
def test_optimum_is_that_of_all_plans(seed: int, backend_name: str) -> None:
    """Strategies, assignment, packing, order and home together, on every backend."""
    check_optimum(seed, backend_name)


@pytest.mark.parametrize("seed", first(1, range(8)))
def test_bound_and_plan_hold_with_a_gap(seed: int) -> None:
    """Stopped at a gap, the least time of all plans is between bound and plan, and these are as near as asked."""
    problem = random_problem(seed)
    result = solve_groups(problem, "highs", relative_gap=0.1)
    assert result.bound_ns <= least_time_ns(problem) <= result.plan.time_ns
    assert result.gap <= 0.1


@pytest.mark.parametrize("seed", first(1, (184, 288)))
def test_cbc_is_not_believed_alone(seed: int) -> None:
    """CBC called these feasible programs infeasible, which made a wrong bound: another solver must say so too."""
    check_optimum(seed, "cbc")


@pytest.mark.long
@pytest.mark.parametrize("backend_name", ["cpsat", "cbc", "highs"])
@pytest.mark.parametrize("block", range(6, 306, 50))
def test_optimum_is_that_of_all_plans_many(block: int, backend_name: str) -> None:
    """300 more problems on every backend."""
    for seed in range(block, block + 50):
        check_optimum(seed, backend_name)


@pytest.mark.parametrize("block", range(1000, 1010, 5))
def test_bounds_of_sets_are_bounds(block: int) -> None:
    """Neither the sum bound nor the master of any set exceeds the least time of all plans with that set."""
    solver = backend("cpsat")
    for seed in range(block, block + 5):
        problem = random_problem(seed)
        cuts = {kind: PipelineCuts(kind) for kind in problem.kinds}
        for record in ranked_sets(problem, cuts):
            least = least_time_ns(problem, record.used)
            assert record.bound_ns <= least, (seed, record.used)
            solution = solver.solve(assignment_program(problem, record.used, cuts, 1, 2**6).program, Limits())
            if solution.status == "infeasible":
                assert least == float("inf"), (seed, record.used)
            else:
                assert solution.bound is not None
                assert solution.bound <= least, (seed, record.used)


def check_waits(seeds: range) -> None:
    """No master with waits exceeds the least time of all plans of its strategy; the rows are there."""
    solver = backend("cpsat")
    for seed in seeds:
        problem = random_problem(seed)
        cuts = {kind: PipelineCuts(kind) for kind in problem.kinds}
        for record in ranked_sets(problem, cuts):
            kinds = problem.kinds_of(record.used[0])
            least = least_time_ns(problem, record.used)
            if (
                len(record.used) > 1
                or max(kind.pipeline.num_stages for kind in kinds) == 1
                or least == float("inf")
            ):
                continue
            constants = [price.constant_ns for price in undominated_tours(problem, record.used)]
            ends = float(record.bound_ns - max(constants)), 1.1 * least - min(constants)
            rooms = {}
            for kind in kinds:
                waits = IdleTimeBound(kind, cuts[kind])
                for length in np.flatnonzero(kind.fits)[-2:] if kind.pipeline.num_stages > 1 else ():
                    waits.learn(int(length), *ends)
                    rooms[kind] = waits.capacity_row(*ends)
            master = assignment_program(problem, record.used, cuts, 1, 2**6, waits=rooms)
            assert any(name.startswith("waits_around_long") for name in master.program.rows.names) == bool(rooms)
            bound = solver.solve(master.program, Limits()).bound
            assert bound is not None
            assert bound <= least, (seed, record.used)


@pytest.mark.parametrize("seed", first(1, (2005, 2007, 2015, 2112)))
def test_masters_with_waits_are_bounds(seed: int) -> None:
    """Waits around the two longest sequences, for times up to a little above the least of all plans."""
    check_waits(range(seed, seed + 2))


@pytest.mark.long
@pytest.mark.parametrize("block", range(2020, 2120, 10))
def test_masters_with_waits_are_bounds_many(block: int) -> None:
    """A hundred problems more."""
    check_waits(range(block, block + 10))
