"""Self-tests of the solvers: small programs with known answers that broken solvers have got wrong, for `milpplan
doctor`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from milpplan.errors import InvalidInputError, MilpplanError, SolverError, UnavailableError
from milpplan.optimize.milp.backends import PROBE_OPTIMUM, backend, backend_names, probed
from milpplan.optimize.milp.program import MINUS_INFINITY, Program, ProgramBuilder
from milpplan.optimize.milp.solution import Limits, Solution, run_interruptibly, violations

NUM_RANDOM_PROGRAMS: Final = 20
CANARY_S: Final = 5.0
"""Time limit of a solver for a self-test, each of which takes a fraction of a second."""
_MAX_ENUMERATED: Final = 200_000


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """Outcome of one self-test; ``meaning`` tells the user the consequence of a failure.

    ``answered`` is False where the solver could not run or ran out of time; ``seen`` is then the cause.
    """

    name: str
    passed: bool
    expected: str
    seen: str
    meaning: str
    answered: bool = True


def run_canaries() -> tuple[SelfTestResult, ...]:
    """Run all self-tests, which takes a few seconds; a solver that cannot run here is not tested further."""
    results = [_guarded(f"{name}: available", _availability(name)) for name in backend_names()]
    working = [name for name, result in zip(backend_names(), results, strict=True) if result.passed]
    checks: list[tuple[str, Callable[[], SelfTestResult]]] = []
    if "cpsat" in working:
        checks += [("cpsat: published wrong optimum", _cpsat_published)]
    if "cbc" in working:
        checks += [("cbc: a time limit is not optimal", _cbc_time_limit)]
    if "highs" in working:
        checks += [("highs: relative gap zero", _highs_gap)]
    checks += [(f"{name}: large units", _large_units(name)) for name in working if name != "cpsat"]
    checks += [(f"{name}: random programs", _random_programs(name)) for name in working]
    return (*results, *(_guarded(name, check) for name, check in checks))


def random_program(seed: int) -> Program:
    """Return a small random program: one-hot groups, a count to reach, a general integer, a capacity, a min-max
    row.

    About a third are infeasible. A seed always gives the same program.
    """
    random = np.random.default_rng(seed)
    groups, size = int(random.integers(2, 5)), int(random.integers(2, 5))
    weight = random.integers(1, 10, (groups, size))
    builder = ProgramBuilder(f"random[{seed}]")
    x = np.array(builder.add_variables([f"x[{g},{k}]" for g in range(groups) for k in range(size)], 1))
    spare = builder.add_variable("spare", -2, 3)
    longest = builder.add_variable("longest", 0, 200)
    for group, columns in enumerate(x.reshape(groups, size)):
        builder.add_row(f"one_choice[{group}]", columns, np.ones(size, np.int64), 1, 1)
    total = int(random.integers(2 * groups, 8 * groups))
    builder.add_row("total", [*x, spare], [*weight.ravel(), 1], total, total)
    capacity = int(random.integers(6 * groups, 30 * groups))
    builder.add_row("capacity", x, random.integers(0, 40, x.size), MINUS_INFINITY, capacity)
    for cut in range(3):
        cost = random.integers(0, 20, x.size)
        builder.add_row(f"longest[{cut}]", [longest, *x], [1, *(-cost)], lower=0)
    cost = random.integers(-5, 6, x.size)
    builder.minimize(
        [longest, spare, *x], [7, int(random.integers(-3, 4)), *cost], offset=int(random.integers(-50, 50))
    )
    return builder.build()


def brute_force(program: Program) -> int | None:
    """Return the optimum by enumeration, None if infeasible.

    One-hot rows of binaries are enumerated by choice, other integers over their range. A variable whose range
    exceeds 100 takes the cheapest value its rows allow, so two such variables must share no row.
    """
    span = program.upper - program.lower
    wide = np.flatnonzero(span > 100)
    axes = _axes(program, set(wide.tolist()))
    if np.prod([float(len(axis)) for axis in axes]) > _MAX_ENUMERATED:
        raise InvalidInputError(f"{program.name} has too many points to enumerate.")
    matrix = np.zeros((program.num_rows, program.num_variables), np.int64)
    matrix[program.rows.entry_rows(), program.rows.columns] = program.rows.coefficients
    best: int | None = None
    for choice in itertools.product(*axes):
        point = np.sum(choice, axis=0)
        if _settle(program, matrix, point, wide) and not violations(program, point):
            value = program.objective_at(point)
            best = value if best is None else min(best, value)
    return best


def _axes(program: Program, wide: set[int]) -> list[list[np.ndarray[Any, np.dtype[np.int64]]]]:
    """Return independent sets of partial points whose sums are all candidates."""
    unit = np.eye(program.num_variables, dtype=np.int64)
    remaining = set(range(program.num_variables)) - wide
    rows, axes = program.rows, []
    for row in range(len(rows)):
        inside = slice(rows.starts[row], rows.starts[row + 1])
        columns = rows.columns[inside].tolist()
        one_hot = rows.lower[row] == rows.upper[row] == 1 and (rows.coefficients[inside] == 1).all()
        binary = all(program.lower[j] == 0 and program.upper[j] == 1 for j in columns)
        if one_hot and binary and remaining.issuperset(columns):
            remaining.difference_update(columns)
            axes.append([unit[j] for j in columns])
    ranges = {j: range(int(program.lower[j]), int(program.upper[j]) + 1) for j in sorted(remaining)}
    axes += [[unit[j] * value for value in values] for j, values in ranges.items()]
    return axes


def _settle(
    program: Program,
    matrix: np.ndarray[Any, np.dtype[np.int64]],
    point: np.ndarray[Any, np.dtype[np.int64]],
    wide: np.ndarray[Any, np.dtype[np.intp]],
) -> bool:
    """Set every wide variable (coefficient 1 in ">=" rows only, positive cost) to its smallest value."""
    for j in wide.tolist():
        rows = np.flatnonzero(matrix[:, j])
        needed = program.rows.lower[rows] - matrix[rows] @ point
        point[j] = max(int(program.lower[j]), int(needed.max(initial=MINUS_INFINITY)))
    return bool((point <= program.upper).all())


def _availability(name: str) -> Callable[[], SelfTestResult]:
    def check() -> SelfTestResult:
        solution = probed(name)
        right = _answer(solution) == _shown(PROBE_OPTIMUM)
        return SelfTestResult(
            f"{name}: available",
            right,
            _shown(PROBE_OPTIMUM),
            backend(name).version() if right else _answer(solution),
            f"It cannot solve a program of two variables; `{name}` cannot be used.",
        )

    return check


def _guarded(name: str, check: Callable[[], SelfTestResult]) -> SelfTestResult:
    """Run a self-test; errors of the system are no wrong answer, but an answer that the exact check refutes is."""
    try:
        return check()
    except (MilpplanError, ImportError, OSError, MemoryError, AttributeError) as error:
        refuted = isinstance(error, SolverError) and not isinstance(error, UnavailableError)
        meaning = "The solver fails here." if refuted else f"`{name.partition(':')[0]}` cannot be relied on here."
        seen = f"{type(error).__name__}: {error}"
        if isinstance(error, MilpplanError):
            seen, meaning = error.seen.rstrip("."), f"{error.do} {meaning}".lstrip()
        return SelfTestResult(name, False, "an answer", seen, meaning, answered=refuted)


def _solved(name: str, program: Program) -> Solution:
    """Solve within a few seconds.

    Raises:
        UnavailableError: the machine was too slow for an answer, which says nothing about the solver.
    """
    solution = backend(name).solve(program, Limits(time_limit_s=CANARY_S))
    if solution.limit_reached:
        raise UnavailableError(
            f"No answer to {program.name} within {CANARY_S:g} s.",
            "Expected a machine that is not overloaded.",
            "Run `milpplan doctor` again when less else runs here.",
        )
    return solution


def _cpsat_published() -> SelfTestResult:
    """Test google/or-tools#5293: OR-Tools 9.15 proves 33512188359."""
    from ortools.sat.python import cp_model

    cases = (
        (30, ((771568731200, 71808482240), (791560959758, 71268230336)), 3, 3),
        (10, ((438115983050, 707391060), (481923907330, 518753444)), 86, 96),
        (120, ((2767212355700, 71065904360), (2824563549044, 69895693928)), 0, 12),
    )
    model = cp_model.CpModel()
    z, r = model.new_int_var(0, 10**13, "z"), model.new_int_var(0, 96, "r")
    chosen = []
    for factor, pieces, low, high in cases:
        x = model.new_bool_var("")
        chosen.append(x)
        model.add_linear_constraint(r, low, high).only_enforce_if(x)
        for constant, slope in pieces:
            model.add(factor * z - slope * r >= constant).only_enforce_if(x)
    model.add_exactly_one(chosen)
    model.minimize(z)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = 10
    # Otherwise CP-SAT handles Ctrl-C itself, and Python never sees it.
    solver.parameters.catch_sigint_signal = False
    status = solver.status_name(run_interruptibly(lambda: solver.solve(model), solver.stop_search))
    seen = f"{status} {round(solver.objective_value) if status in ('OPTIMAL', 'FEASIBLE') else ''}".strip()
    return SelfTestResult(
        "cpsat: published wrong optimum",
        seen == "OPTIMAL 23538029576",
        "OPTIMAL 23538029576",
        seen,
        "This OR-Tools proves wrong optima on large coefficients (9.15 does). Install ortools>=9.11,<9.15.",
    )


def hard_program() -> Program:
    """Return a market split problem: five equations in 40 binaries, far beyond a second for any branch
    and bound."""
    random = np.random.default_rng(1)
    builder = ProgramBuilder("market_split")
    x = builder.add_variables([f"x[{j}]" for j in range(40)], 1)
    over = builder.add_variables([f"over[{i}]" for i in range(5)], 2000)
    under = builder.add_variables([f"under[{i}]" for i in range(5)], 2000)
    for i in range(5):
        share = random.integers(0, 100, 40)
        builder.add_row(
            f"split[{i}]", [*x, over[i], under[i]], [*share, 1, -1], share.sum() // 2, share.sum() // 2
        )
    builder.minimize([*over, *under], [1] * 10)
    return builder.build()


def _cbc_time_limit() -> SelfTestResult:
    solution = backend("cbc").solve(hard_program(), Limits(time_limit_s=0.5))
    below = solution.bound is None or solution.objective is None or solution.bound <= solution.objective
    return SelfTestResult(
        "cbc: a time limit is not optimal",
        solution.status in ("feasible", "no_solution_found") and solution.limit_reached and below,
        "feasible or no_solution_found, and a bound not above the objective",
        f"{solution.status} ({solution.raw_status}), objective {solution.objective}, bound {solution.bound}",
        "A plan found within a time limit would be reported as proved (PuLP calls it Optimal).",
    )


def _highs_gap() -> SelfTestResult:
    """Test a knapsack whose values differ by less than the default gap of HiGHS, 1e-4."""
    random = np.random.default_rng(5)
    builder = ProgramBuilder("small_differences")
    x = np.array(builder.add_variables([f"x[{j}]" for j in range(60)], 1)).reshape(12, 5)
    for group, columns in enumerate(x):
        builder.add_row(f"one[{group}]", columns, [1] * 5, 1, 1)
    weight, cost = random.integers(1, 60, 60), 100_000 + random.integers(0, 60, 60)
    builder.add_row("weight", x.ravel(), weight, lower=330)
    builder.minimize(x.ravel(), cost)
    program = builder.build()
    # Dynamic program over the weight collected so far, capped at what is needed.
    table = {0: 0}
    for choices in x.tolist():
        step: dict[int, int] = {}
        for (have, spent), j in itertools.product(table.items(), choices):
            key = min(330, have + int(weight[j]))
            step[key] = min(step.get(key, 10**12), spent + int(cost[j]))
        table = step
    solution = _solved("highs", program)
    return SelfTestResult(
        "highs: relative gap zero",
        solution.status == "optimal" and solution.objective == table[330],
        f"optimal {table[330]}",
        f"{solution.status} {solution.objective}",
        "Plans up to 0.01 % worse than the best would be reported as optimal.",
    )


def _large_units(name: str) -> Callable[[], SelfTestResult]:
    """Return the test of min-max rows in nanoseconds, where unscaled floating-point solvers prove wrong optima."""

    def check() -> SelfTestResult:
        wrong = []
        for seed in range(8):
            program = nanosecond_program(seed)
            expected = brute_force(program)
            solution = _solved(name, program)
            if _answer(solution) != _shown(expected):
                wrong.append(f"{program.name}: {_answer(solution)} instead of {_shown(expected)}")
        return SelfTestResult(
            f"{name}: large units",
            not wrong,
            "8 of 8 as enumerated",
            "; ".join(wrong) or "8 of 8 as enumerated",
            "Step times in nanoseconds are beyond this solver's tolerances; its proofs are worthless.",
        )

    return check


def nanosecond_program(seed: int) -> Program:
    """Return a program with four one-hot groups, a count, and a step time of about 1e12 above twelve
    dense rows."""
    random = np.random.default_rng(seed)
    layers = random.integers(1, 7, (4, 6))
    time_ns = layers * 10**10 + random.integers(0, 6 * 10**9, (4, 6))
    builder = ProgramBuilder(f"nanoseconds[{seed}]")
    step = builder.add_variable("step_ns", 0, 10**13)
    x = np.array(builder.add_variables([f"x[{g},{k}]" for g in range(4) for k in range(6)], 1))
    for group, columns in enumerate(x.reshape(4, 6)):
        builder.add_row(f"one_choice[{group}]", columns, [1] * 6, 1, 1)
    total = int(layers.mean() * 4)
    builder.add_row("layers", x, layers.ravel(), total, total)
    for cut in range(12):
        times = random.integers(0, 3, 4) + 16 * (np.arange(4) == cut % 4)
        builder.add_row(f"path[{cut}]", [step, *x], [1, *(-(times[:, None] * time_ns).ravel())], lower=0)
    builder.minimize([step], [1])
    return builder.build()


def _random_programs(name: str) -> Callable[[], SelfTestResult]:
    def check() -> SelfTestResult:
        wrong = []
        for seed in range(NUM_RANDOM_PROGRAMS):
            program = random_program(seed)
            expected = _shown(brute_force(program))
            answer = _answer(_solved(name, program))
            if answer != expected:
                wrong.append(f"{program.name}: {answer} instead of {expected}")
        return SelfTestResult(
            f"{name}: random programs",
            not wrong,
            f"{NUM_RANDOM_PROGRAMS} of {NUM_RANDOM_PROGRAMS} as enumerated",
            "; ".join(wrong) or f"{NUM_RANDOM_PROGRAMS} of {NUM_RANDOM_PROGRAMS} as enumerated",
            "This solver build gives wrong answers; do not use it.",
        )

    return check


def _answer(solution: Solution) -> str:
    return f"optimal {solution.objective}" if solution.status == "optimal" else solution.status


def _shown(expected: int | None) -> str:
    return "infeasible" if expected is None else f"optimal {expected}"
