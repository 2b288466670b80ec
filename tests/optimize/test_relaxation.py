"""The incremental linear relaxation: its optimum, its duals, and what adding rows does."""

from dataclasses import replace

import numpy as np
import pytest

from milpplan.optimize.milp import Limits, Program, ProgramBuilder, Relaxation, RelaxationSolution, Rows
from milpplan.optimize.milp.backends import backend
from milpplan.optimize.milp.solver_self_test import brute_force, nanosecond_program, random_program
from tests.amounts import long_but

PROGRAMS = [random_program(seed) for seed in range(12)] + [nanosecond_program(seed) for seed in range(6)]


def certified(program: Program, solution: RelaxationSolution) -> float:
    """sum of duals times the sides they belong to + reduced costs times the bounds they belong to."""
    rows = program.rows
    sides = np.where(solution.row_duals > 0, rows.lower, rows.upper)[solution.row_duals != 0]
    ends = np.where(solution.reduced_costs > 0, program.lower, program.upper)[solution.reduced_costs != 0]
    return float(
        solution.row_duals[solution.row_duals != 0] @ sides
        + solution.reduced_costs[solution.reduced_costs != 0] @ ends
        + program.offset
    )


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_optimum_is_that_of_highs(program: Program) -> None:
    """GLOP and HiGHS agree on the relaxation (HiGHS' objective is rounded up to a unit)."""
    continuous = replace(program, is_integer=np.zeros(program.num_variables, np.bool_))
    solution = Relaxation(program).solve()
    other = backend("highs").solve(continuous, Limits())
    assert solution.status == other.status
    if other.reported_objective is not None:
        assert solution.objective == pytest.approx(other.reported_objective, rel=1e-7, abs=1e-6)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_duals_certify_the_objective(program: Program) -> None:
    """Strong duality: duals and reduced costs alone give the objective, and d = c - A'y."""
    solution = Relaxation(program).solve()
    if solution.status != "optimal":
        return
    assert certified(program, solution) == pytest.approx(solution.objective, rel=1e-7, abs=1e-6)
    rows = program.rows
    expected = program.objective.astype(np.float64)
    np.subtract.at(expected, rows.columns, rows.coefficients * solution.row_duals[rows.entry_rows()])
    assert solution.reduced_costs == pytest.approx(expected, rel=1e-6, abs=1e-6 * max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize("program", long_but(PROGRAMS[::6], PROGRAMS), ids=lambda program: program.name)
def test_proved_bound_is_below_the_integer_optimum(program: Program) -> None:
    """The exact bound never exceeds the enumerated optimum and is within a hair of the relaxation."""
    relaxation = Relaxation(program)
    solution = relaxation.solve()
    bound, best = relaxation.proved_bound(solution), brute_force(program)
    if best is None or bound is None:
        return
    assert bound <= best
    assert bound == pytest.approx(solution.objective, rel=1e-6, abs=1.0 + 1e-6)


@pytest.mark.parametrize("count", long_but((8,), (8, 20)))
def test_any_duals_prove_a_valid_bound(count: int) -> None:
    """Wrong duals weaken the proved bound, they never make it wrong."""
    random = np.random.default_rng(0)
    for seed in range(count):
        program = random_program(seed)
        best, relaxation = brute_force(program), Relaxation(program)
        solution = relaxation.solve()
        if best is None or solution.status != "optimal":
            continue
        noisy = replace(solution, row_duals=solution.row_duals + random.normal(size=program.num_rows))
        bound = relaxation.proved_bound(noisy)
        assert bound is not None
        assert bound <= best


def test_dual_signs() -> None:
    """Minimising, a tight >= row has a dual >= 0, a tight <= row one <= 0, each the price of its side."""
    builder = ProgramBuilder()
    x, y = builder.add_variables(("x", "y"), 10)
    builder.add_row("at_least", [x], [1], lower=2)
    builder.add_row("at_most", [y], [1], upper=4)
    builder.minimize([x, y], [3, -5])
    solution = Relaxation(builder.build()).solve()
    assert solution.row_duals == pytest.approx([3.0, -5.0])
    assert solution.objective == pytest.approx(3 * 2 - 5 * 4)


def test_adding_rows_only_raises_the_optimum() -> None:
    """Cut by cut, the warm-started optimum rises and equals that of a fresh relaxation."""
    full = nanosecond_program(3)
    cuts = full.rows.tail(5)
    base = replace(full, rows=_head(full.rows, 5))
    relaxation = Relaxation(base)
    last = relaxation.solve().objective
    for i in range(len(cuts)):
        relaxation.add_rows(_head(cuts.tail(i), 1))
        solution = relaxation.solve()
        assert solution.objective >= last * (1 - 1e-9)
        assert solution.row_duals.shape == (6 + i,)
        assert solution.objective == pytest.approx(Relaxation(relaxation.program).solve().objective, rel=1e-8)
        last = solution.objective
    assert relaxation.program.rows.names == full.rows.names
    assert last > 0


def test_other_upper_bounds_are_seen() -> None:
    """A cutoff on the objective variable turns the relaxation infeasible just below its optimum, and a higher one
    feasible again."""
    relaxation, column = Relaxation(nanosecond_program(3)), np.zeros(1, dtype=np.int64)
    best = relaxation.solve().objective
    for factor, status in ((1.001, "optimal"), (0.999, "infeasible"), (1.001, "optimal")):
        relaxation.set_upper_bounds(column, np.array([int(best * factor)]))
        solution = relaxation.solve()
        assert (solution.status, relaxation.proved_bound(solution) is None) == (status, status == "infeasible")
        assert solution.objective == (pytest.approx(best) if status == "optimal" else np.inf)


def test_no_objective_and_no_rows() -> None:
    """An empty objective gives the offset, with or without rows."""
    builder = ProgramBuilder()
    x = builder.add_variable("x", 1, 5)
    builder.minimize([], [], offset=7)
    relaxation = Relaxation(builder.build())
    assert relaxation.solve().objective == pytest.approx(7)
    relaxation.add_rows(Rows.dense(("row",), [[1]], 9, columns=[x]))
    assert relaxation.solve().status == "infeasible"


def _head(rows: Rows, count: int) -> Rows:
    end = rows.starts[count]
    return Rows(
        rows.names[:count],
        rows.starts[: count + 1],
        rows.columns[:end],
        rows.coefficients[:end],
        rows.lower[:count],
        rows.upper[:count],
    )


def test_a_relaxation_is_given_up_after_so_much_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit counts work, not seconds; what was given up proves nothing."""
    rng, builder = np.random.default_rng(0), ProgramBuilder("covering")
    columns = builder.add_variables([f"x[{i}]" for i in range(400)], 1_000)
    for row in range(400):
        chosen = np.sort(rng.choice(400, 40, replace=False))
        builder.add_row(f"cover[{row}]", chosen, rng.integers(1, 100, 40), lower=int(rng.integers(1_000, 10_000)))
    builder.minimize(columns, rng.integers(1, 1_000, 400))
    program = builder.build()
    assert Relaxation(program).solve().status == "optimal"
    monkeypatch.setattr("milpplan.optimize.milp.linear_relaxation.MAX_DETERMINISTIC_TIME", 1e-9)
    relaxation = Relaxation(program)
    stopped = relaxation.solve()
    assert stopped.status == "stopped"
    assert relaxation.proved_bound(stopped) is None
