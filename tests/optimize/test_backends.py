"""One suite for every backend: its answers against enumeration, its limits against honesty."""

import _thread
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from milpplan.errors import SolverError, UnknownNameError
from milpplan.optimize.milp import (
    INFINITY,
    MAX_ROW_MAGNITUDE,
    MINUS_INFINITY,
    Limits,
    Program,
    ProgramBuilder,
    Solution,
    cbc,
    check_solution,
    checked_solve,
    violations,
)
from milpplan.optimize.milp.backends import BACKENDS, PROBE_OPTIMUM, backend, probed
from milpplan.optimize.milp.solver_self_test import brute_force, hard_program, nanosecond_program, random_program
from tests.amounts import first, long_but

every_backend = pytest.mark.parametrize("name", sorted(BACKENDS))
floating_backend = pytest.mark.parametrize("name", ["cbc", "highs"])
LIMITS = Limits(time_limit_s=20)


@cache
def enumerated(family: Callable[[int], Program], seed: int) -> int | None:
    """Optimum of a program, enumerated once for all backends: that takes longer than to solve it."""
    return brute_force(family(seed))


def test_all_backends_work_here() -> None:
    """CBC, CP-SAT and HiGHS all come with the dependencies."""
    assert [probed(name).objective for name in BACKENDS] == [PROBE_OPTIMUM] * len(BACKENDS)


@every_backend
@pytest.mark.parametrize("count", long_but((8,), (8, 25)))
def test_random_programs_as_enumerated(name: str, count: int) -> None:
    """Optimum and infeasibility of random programs are those of brute force; bound = objective."""
    outcomes = set()
    for seed in range(100, 100 + count):
        program, expected = random_program(seed), enumerated(random_program, seed)
        solution = backend(name).solve(program, LIMITS)
        outcomes.add(solution.status)
        if expected is None:
            assert (solution.status, solution.values, solution.bound) == ("infeasible", None, None), program.name
            continue
        assert (solution.status, solution.objective) == ("optimal", expected), program.name
        assert solution.values is not None
        assert violations(program, solution.values) == []
        assert solution.bound == pytest.approx(expected, abs=1e-3)
        assert not solution.limit_reached
    assert outcomes == {"optimal", "infeasible"}


@every_backend
def test_a_cutoff_below_the_optimum_is_infeasible(name: str) -> None:
    """With the objective variable kept below its optimum, nothing is left; at its optimum, the optimum is."""
    builder = ProgramBuilder("cutoff")
    z = builder.add_variable("z", 0, 100)
    x = builder.add_variables([f"x[{i}]" for i in range(4)], 1)
    builder.add_row("one", x, [1] * 4, 1, 1)
    builder.add_row("z", [z, *x], [1, -31, -17, -23, -40], lower=0)
    builder.minimize([z], [1])
    program = builder.build()
    assert backend(name).solve(program.with_upper_bound(z, 16), LIMITS).status == "infeasible"
    assert backend(name).solve(program.with_upper_bound(z, 17), LIMITS).objective == 17


@cache
def cover_program(seed: int) -> Program:
    """The cheapest choice of 60 items that covers four rows: hard enough that solvers stop within a gap."""
    random = np.random.default_rng(seed)
    builder = ProgramBuilder(f"cover {seed}")
    items = builder.add_variables([f"x[{i}]" for i in range(60)], 1)
    for row in range(4):
        sizes = random.integers(20, 60, 60)
        builder.add_row(f"cover[{row}]", items, sizes.tolist(), int(sizes.sum() // 3))
    builder.minimize(items, random.integers(200, 600, 60).tolist())
    return builder.build()


@every_backend
def test_within_a_gap_the_objective_is_no_bound(name: str) -> None:
    """Stopped at a relative gap, every bound stays below the optimum, and some answers are above it."""
    above = 0
    for seed in (2, 6):
        program = cover_program(seed)
        optimum = backend("cpsat").solve(program, LIMITS).objective
        solution = backend(name).solve(program, replace(LIMITS, relative_gap=0.05))
        assert optimum is not None
        assert solution.objective is not None
        assert solution.bound is not None
        assert optimum * 0.95 <= solution.bound <= optimum + 1e-6 <= solution.objective + 1e-6
        above += solution.objective > optimum
    assert above


@every_backend
def test_a_time_limit_is_reported_honestly(name: str) -> None:
    """Stopped early: not optimal, limit_reached, and any bound below the best objective known."""
    program = hard_program()
    solution = backend(name).solve(program, Limits(time_limit_s=0.5))
    assert solution.status in ("feasible", "no_solution_found")
    assert solution.limit_reached
    if solution.objective is not None and solution.bound is not None:
        assert solution.bound <= solution.objective


def test_highs_has_no_deterministic_limit() -> None:
    """The limit is refused, not ignored."""
    with pytest.raises(SolverError, match="no deterministic limit"):
        backend("highs").solve(hard_program(), Limits(deterministic_limit=30))


@pytest.mark.parametrize("name", ["cbc", "cpsat"])
def test_same_seed_same_answer(name: str) -> None:
    """Two runs with the same seed and a deterministic limit give the same values."""
    program = hard_program()
    limits = Limits(deterministic_limit=0.2 if name == "cpsat" else 30, seed=3, time_limit_s=30)
    first, second = (backend(name).solve(program, limits) for _ in range(2))
    assert first.status == second.status
    assert first.objective == second.objective
    if first.values is not None and second.values is not None:
        assert first.values.tolist() == second.values.tolist()


@floating_backend
@pytest.mark.parametrize("count", long_but((2,), (2, 10)))
def test_nanosecond_rows_as_enumerated(name: str, count: int) -> None:
    """Step times of 1e12 in rows do not mislead floating-point solvers, continuous or integer."""
    for seed in range(20, 20 + count):
        program, expected = nanosecond_program(seed), enumerated(nanosecond_program, seed)
        continuous = program.is_integer.copy()
        continuous[0] = False
        for variant in (program, replace(program, is_integer=continuous)):
            solution = backend(name).solve(variant, LIMITS)
            assert (solution.objective, solution.status) == (
                expected,
                "infeasible" if expected is None else "optimal",
            )


@floating_backend
def test_wide_integers_that_cannot_be_relaxed_are_refused(name: str) -> None:
    """An integer of a million values with a coefficient of 3 is not left to tolerances."""
    builder = ProgramBuilder()
    pair = builder.add_variables(("a", "b"), 10**6)
    builder.add_row("row", pair, [3, -7], 1, 1)
    builder.minimize(pair, [1, 1])
    with pytest.raises(SolverError, match="Integer variable a"):
        backend(name).solve(builder.build(), LIMITS)


@floating_backend
def test_numbers_that_a_double_would_round_are_refused(name: str) -> None:
    """2^53 + 1 has no double."""
    builder = ProgramBuilder()
    x = builder.add_variable("x", 0, 1)
    builder.add_row("row", [x], [2**53 + 1], lower=0)
    with pytest.raises(SolverError, match="would round"):
        backend(name).solve(builder.build(), LIMITS)


def test_cpsat_refuses_large_rows_and_auto_goes_elsewhere() -> None:
    """A row of magnitude 1e7 is refused by cpsat, taken just below it, and solved by auto, which asks HiGHS."""

    def program(coefficient: int) -> Program:
        builder = ProgramBuilder()
        x = builder.add_variable("x", 0, 10)
        builder.add_row("row", [x], [coefficient], lower=coefficient * 2)
        builder.minimize([x], [1])
        return builder.build()

    large, small = program(MAX_ROW_MAGNITUDE // 10), program(MAX_ROW_MAGNITUDE // 10 - 1)
    with pytest.raises(SolverError, match="magnitude"):
        backend("cpsat").solve(large, LIMITS)
    assert backend("cpsat").solve(small, LIMITS).objective == 2
    assert backend("auto").solve(large, LIMITS).backend == "highs"
    assert backend("auto").solve(small, LIMITS).backend == "highs"


def test_cpsat_refuses_unbounded_variables() -> None:
    """CP-SAT has no infinity; the error says so."""
    builder = ProgramBuilder()
    builder.add_variable("z", 0, INFINITY, integer=False)
    with pytest.raises(SolverError, match="finite"):
        backend("cpsat").solve(builder.build(), LIMITS)


@floating_backend
def test_free_and_ranged_and_constant(name: str) -> None:
    """Free continuous variables, two-sided and free rows, and an offset come through."""
    builder = ProgramBuilder()
    x = builder.add_variable("x", -5, 5)
    z = builder.add_variable("z", MINUS_INFINITY, INFINITY, integer=False)
    builder.add_row("range", [x], [2], -7, 3)
    builder.add_row("free", [x, z], [1, 1])
    builder.add_row("z", [z, x], [1, -1], lower=2)
    builder.minimize([z], [1], offset=100)
    solution = backend(name).solve(builder.build(), LIMITS)
    assert solution.values is not None
    assert solution.values.tolist() == [-3, -1]
    assert solution.objective == 99


@floating_backend
def test_fractional_continuous_values_are_kept(name: str) -> None:
    """Where rows force a half, the value stays a float and the objective is rounded up."""
    builder = ProgramBuilder()
    z = builder.add_variable("z", 0, 10, integer=False)
    builder.add_row("half", [z], [2], 3, 3)
    builder.minimize([z], [1])
    solution = backend(name).solve(builder.build(), LIMITS)
    assert solution.values is not None
    assert solution.values.tolist() == [1.5]
    assert solution.objective == 2


def test_shares_are_not_made_whole() -> None:
    """What a solver says of a share stays, where a load would be the best whole number."""
    for shares in (False, True):
        builder = ProgramBuilder(shares=shares)
        z = builder.add_variable("z", 0, 10, integer=False)
        builder.add_row("most", [z], [1], upper=4)
        builder.minimize([z], [-1])
        found = answer(builder.build(), [4.0 - 1e-8], bound=-4.0, reported_objective=-4.0 + 1e-8)
        assert found.values is not None
        assert found.values.tolist() == [4.0 - 1e-8 if shares else 4]


def answer(program: Program, values: list[float], **changes: Any) -> Solution:
    """An answer as a backend would give it."""
    solution = Solution("optimal", np.array(values), None, None, "OPTIMAL", "test", 0.0)
    return check_solution(program, replace(solution, **changes))


def test_wrong_answers_are_refused() -> None:
    """Broken rows, fractions, wrong objectives and bounds above the answer raise SolverError."""
    builder = ProgramBuilder()
    pair = builder.add_variables(("a", "b"), 3)
    builder.add_row("cover", pair, (2, 3), lower=7)
    builder.minimize(pair, (3, 4))
    program = builder.build()
    assert answer(program, [2 + 1e-7, 1.0], reported_objective=10.0, bound=10.0).objective == 10
    with pytest.raises(SolverError, match="row cover: 5"):
        answer(program, [1.0, 1.0])
    with pytest.raises(SolverError, match=r"gave a = 1\.9"):
        answer(program, [1.9, 1.1])
    with pytest.raises(SolverError, match="reports the objective"):
        answer(program, [2.0, 1.0], reported_objective=9.0)
    with pytest.raises(SolverError, match="proved the bound"):
        answer(program, [2.0, 1.0], bound=11.0)
    with pytest.raises(SolverError, match="no values"):
        check_solution(program, Solution("optimal", None, None, None, "OPTIMAL", "test", 0.0))


def test_a_refuted_answer_is_tried_again_without_presolve() -> None:
    """The second attempt counts, and it is the last."""
    builder = ProgramBuilder()
    x = builder.add_variable("x", 0, 3)
    builder.add_row("row", [x], [1], lower=2)
    program, asked = builder.build(), []

    def solve(presolve: bool) -> Solution:
        asked.append(presolve)
        return Solution("feasible", np.array([1 if presolve else 2]), None, None, "", "test", 0.0)

    assert checked_solve(program, solve).objective == 0
    assert asked == [True, False]


def test_unknown_names_get_a_suggestion() -> None:
    """A misspelt backend is an error that names the nearest one."""
    with pytest.raises(UnknownNameError, match="Did you mean 'cpsat'"):
        backend("cp-sat")


def test_unknown_cbc_status_is_an_error() -> None:
    """A first line that CBC is not known to write is not guessed at."""
    with pytest.raises(SolverError, match="Unbounded"):
        cbc._status("Unbounded", hard_program())


def test_a_broken_cbc_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executable that fails gives SolverError with its exit code."""
    monkeypatch.setattr(cbc, "_executable", lambda: "/bin/false")
    with pytest.raises(SolverError, match="code 1"):
        backend("cbc").solve(hard_program(), LIMITS)


@pytest.mark.parametrize("name", first(1, ("cpsat", "cbc")))
def test_ctrl_c_stops_the_search(name: str) -> None:
    """An interruption ends a long solve within seconds and goes on to the caller."""
    backend(name).solve(random_program(1), LIMITS)
    timer = threading.Timer(0.5, _thread.interrupt_main)
    timer.start()
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        backend(name).solve(hard_program(), Limits(time_limit_s=60))
    timer.join()
    assert time.perf_counter() - start < 30
