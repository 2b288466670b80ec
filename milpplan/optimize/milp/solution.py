"""Interface of the solver backends, and the exact check that every answer passes."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from milpplan.errors import InvalidInputError, SolverError, UnavailableError
from milpplan.optimize.milp.program import (
    INFINITY,
    MINUS_INFINITY,
    SAFE,
    BoolArray,
    FloatArray,
    IntArray,
    Program,
    Values,
    exact,
    sums_of,
)

# Twice the relative error of one floating-point operation.
_EPSILON: Final = 2.0**-52
Status = Literal["optimal", "feasible", "infeasible", "no_solution_found"]
T = TypeVar("T")
# An integer variable may come back this far from an integer before the answer is refused.
INTEGRALITY_TOLERANCE: Final = 1e-5
# Allowed relative excess in rows with several continuous variables, and in the objective a solver reports.
ROW_TOLERANCE: Final = 1e-6
# How often a running solver is asked whether it was cancelled.
POLL_S: Final = 0.1
# Name of the threads that solvers run in.
SOLVER_THREAD: Final = "milpplan-solver"
# Floating-point solvers get only numbers that a double holds exactly.
EXACT_FLOAT: Final = 2**53


@dataclass(frozen=True, slots=True)
class Violation:
    """Row, bound or integrality that a vector of values violates."""

    kind: Literal["row", "bound", "integrality"]
    name: str
    value: int | float
    lower: int
    upper: int

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.value} is not in [{_shown(self.lower)}, {_shown(self.upper)}]"


def violations(program: Program, values: Values, tolerance: float = 0.0) -> list[Violation]:
    """Return all violations of a program by ``values``.

    Fractions are a hundred times slower than floats, so only values that may be violated within the rounding error
    are checked exactly.

    Args:
        program: rows, bounds and integrality.
        values: one value per variable, integers or floats.
        tolerance: allowed excess in bounds of continuous variables, relative to these (at least 1), and in rows
            with a continuous variable, relative to the row's magnitude (at least its largest coefficient of such a
            variable). Rows of integer variables have no tolerance.
    """
    if values.shape != (program.num_variables,):
        raise InvalidInputError(
            f"{values.shape} values for {program.num_variables} variables.",
            "One value per variable expected.",
        )
    floats, names = values.astype(np.float64), program.variable_names
    broken = program.is_integer & (values != np.rint(values))
    violated = [
        Violation("integrality", names[i], float(values[i]), int(program.lower[i]), int(program.upper[i]))
        for i in np.flatnonzero(broken).tolist()
    ]
    slack = np.where(program.is_integer, 0.0, tolerance * np.maximum(1.0, np.abs(floats)))
    doubtful = _doubtful(floats, _EPSILON * np.abs(floats) - slack, program.lower, program.upper)
    for i in doubtful.tolist():
        violated += _out_of_range(
            "bound", names[i], exact(values[i]), program.lower[i], program.upper[i], slack[i]
        )
    rows = program.rows
    terms = rows.coefficients * floats[rows.columns]
    size, slack = sums_of(np.abs(terms), rows.starts), np.zeros(len(rows))
    if tolerance:
        loose = np.where(program.is_integer[rows.columns], 0, np.abs(rows.coefficients))
        # A continuous variable at zero may exceed it by the tolerance of any other.
        largest_loose = np.zeros(len(rows))
        np.maximum.at(largest_loose, rows.entry_rows(), loose)
        slack = np.where(largest_loose > 0, tolerance * np.maximum(largest_loose, size), 0.0)
    error = (np.diff(rows.starts) + 4) * _EPSILON * size
    doubtful = _doubtful(sums_of(terms, rows.starts), error - slack, rows.lower, rows.upper)
    if not doubtful.size:
        return violated
    activities = rows.chosen(doubtful).activities(_as_exact(values))
    for i, activity in zip(doubtful.tolist(), activities.tolist(), strict=True):
        violated += _out_of_range("row", rows.names[i], activity, rows.lower[i], rows.upper[i], slack[i])
    return violated


def _doubtful(sums: FloatArray, margin: FloatArray, lower: IntArray, upper: IntArray) -> IntArray:
    """Return the indices of ``sums`` that may be outside of their limits, given a margin and rounding errors."""
    low = sums - margin >= lower + _EPSILON * np.abs(lower * 1.0)
    high = sums + margin <= upper - _EPSILON * np.abs(upper * 1.0)
    inside: BoolArray = (low | (lower <= MINUS_INFINITY)) & (high | (upper >= INFINITY))
    return np.flatnonzero(~inside)


def _as_exact(values: Values) -> npt.NDArray[Any]:
    """Return values as int64, or as exact fractions where some are fractional."""
    if np.issubdtype(values.dtype, np.integer):
        return values.astype(np.int64)
    if (values == np.rint(values)).all() and (np.abs(values) < SAFE).all():
        return values.astype(np.int64)
    return np.array([exact(value) for value in values.tolist()], dtype=object)


def _out_of_range(
    kind: Literal["row", "bound"],
    name: str,
    value: int | Fraction,
    lower: np.int64,
    upper: np.int64,
    slack: np.float64,
) -> list[Violation]:
    """Return a violation if an exact value is outside of its limits by more than ``slack``."""
    below = int(lower) - value if lower > MINUS_INFINITY else 0
    above = value - int(upper) if upper < INFINITY else 0
    if max(below, above) <= float(slack):
        return []
    shown = float(value) if isinstance(value, Fraction) else int(value)
    return [Violation(kind, name, shown, int(lower), int(upper))]


def _shown(bound: int) -> str:
    return "inf" if bound >= INFINITY else "-inf" if bound <= MINUS_INFINITY else str(bound)


@dataclass(frozen=True, slots=True)
class Limits:
    """Stopping conditions.

    ``deterministic_limit`` is in the solver's own unit of work, so that runs reproduce: deterministic seconds for
    CP-SAT, branch-and-bound nodes for CBC; HiGHS has none. Wall-clock limits are soft. ``cancelled`` is asked
    regularly: once it returns True, the solve ends as by Ctrl-C. ``presolve`` False: slower, but safe from
    presolve errors.
    """

    time_limit_s: float | None = None
    deterministic_limit: float | None = None
    seed: int = 1
    relative_gap: float = 0.0
    cancelled: Callable[[], bool] | None = None
    presolve: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """Answer of a backend.

    ``values`` are int64 and exact unless a continuous variable is fractional. ``objective`` is recomputed from
    them in Python integers (rounded up when fractional); ``reported_objective`` is the solver's value. ``bound``
    is the solver's proved bound, with its own tolerance; None when it proved nothing.
    """

    status: Status
    values: Values | None
    objective: int | None
    bound: float | None
    raw_status: str
    backend: str
    wall_time_s: float
    limit_reached: bool = False
    reported_objective: float | None = None


class Backend(Protocol):
    """Solver of integer programs."""

    @property
    def name(self) -> str:
        """Name in the registry."""

    def solve(self, program: Program, limits: Limits) -> Solution:
        """Solve; the answer has passed ``check_solution``."""

    def version(self) -> str:
        """Return name and version of the solver itself."""


def check_solution(program: Program, solution: Solution) -> Solution:
    """Return the solution with exact values and objective.

    Integer variables are rounded (at most by ``INTEGRALITY_TOLERANCE``) and every row of integers is then checked
    without any tolerance. A continuous variable is recomputed as the best integer that the rows allow, if one
    costs less than a unit, so that the solver's rounding errors do not reach the objective; unless the program has
    ``shares``.

    Raises:
        SolverError: the answer breaks a row, a bound or its objective.
    """
    if solution.values is None:
        if solution.status in ("optimal", "feasible"):
            raise SolverError(f"{solution.backend} said {solution.raw_status} but gave no values.")
        return replace(solution, objective=None)
    values = _rounded(program, solution)
    broken = violations(program, values, tolerance=ROW_TOLERANCE)
    if broken:
        raise SolverError(
            f"{solution.backend} said {solution.raw_status}, but its answer to {program.name} breaks "
            f"{len(broken)} rows or bounds exactly: {'; '.join(map(str, broken[:3]))}.",
            "An answer must satisfy every row in integers.",
            "Use another backend, or run `milpplan doctor`.",
        )
    objective = program.objective_at(values)
    reported, allowed = solution.reported_objective, _objective_tolerance(program, values)
    # A better objective than reported is no contradiction: a solver that stops at a gap leaves continuous values
    # slack. Its bound must hold for the better objective too.
    if reported is not None and objective - reported > allowed:
        raise SolverError(
            f"{solution.backend} reports the objective {reported!r}, but its values give {objective}.",
            "Both must agree.",
            "Use another backend, or run `milpplan doctor`.",
        )
    if solution.bound is not None and solution.bound > objective + allowed:
        raise SolverError(
            f"{solution.backend} claims to have proved the bound {solution.bound!r}, "
            f"but its own answer costs {objective}."
        )
    return replace(solution, values=values, objective=objective)


def checked_solve(program: Program, solve: Callable[[bool], Solution], relaxed: Program | None = None) -> Solution:
    """Call ``solve(presolve=True)`` and check the answer; if the check refutes it, solve once more without
    presolve.

    Where the solver was given ``relaxed``, its answer is first checked against that program, then against
    ``program``.
    """

    def attempt(presolve: bool) -> Solution:
        solution = solve(presolve)
        if relaxed is not None and relaxed is not program and solution.values is not None:
            # The reported objective is that of the relaxed program and is checked against it.
            reported = solution.reported_objective
            solution = check_solution(relaxed, solution)
            whole = check_solution(program, replace(solution, reported_objective=solution.objective))
            return replace(whole, reported_objective=reported)
        return check_solution(program, solution)

    try:
        return attempt(True)
    except UnavailableError:
        raise
    except SolverError:
        return attempt(False)


def require_exact_floats(program: Program, backend: str) -> None:
    """Refuse programs whose numbers a double would round."""
    rows = program.rows
    numbers = (rows.coefficients, program.objective, rows.lower, rows.upper, program.lower, program.upper)
    for array in numbers:
        size = np.abs(array)
        wrong = size[(size > EXACT_FLOAT) & (size < INFINITY)]
        if wrong.size:
            raise SolverError(
                f"{program.name} holds {int(wrong[0])}, which {backend} would round.",
                f"At most 2^53 = {EXACT_FLOAT} expected.",
                "State the program in a coarser unit.",
            )


@contextmanager
def running(what: str) -> Iterator[None]:
    """Turn errors of the system into ``UnavailableError``, so that the solve can go on with another solver.

    Raises:
        UnavailableError: no disk space, no memory, or no process; the cause is named.
    """
    try:
        yield
    except MemoryError as error:
        raise UnavailableError(
            f"{what} could not run: memory ran out.",
            "Expected more free memory.",
            "Free some, or use fewer workers.",
        ) from error
    except TimeoutError as error:
        raise UnavailableError(
            f"{what} was {error}.", "Expected it to keep its time limit.", "Use another backend."
        ) from error
    except OSError as error:
        file = "" if error.filename is None else f" ({error.filename})"
        raise UnavailableError(
            f"{what} could not run: {error.strerror or error}{file}.",
            "Expected room for its files in the temporary folder, and free memory.",
            "Let TMPDIR name a folder with room, or free memory.",
        ) from error


@contextmanager
def printing_aside() -> Iterator[None]:
    """Send everything printed inside to stderr: stdout is for the result."""
    before, kept = sys.stdout, None
    with suppress(OSError, ValueError, AttributeError):
        before.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        # A solver that still runs goes on printing to stderr.
        sys.stdout = _Aside(before) if solver_runs() else before
        with suppress(OSError, ValueError, AttributeError):
            before.flush()
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)


class _Aside:
    """Stream that solver threads write to stderr, all other threads to the original stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        in_solver = threading.current_thread().name == SOLVER_THREAD
        return getattr(sys.stderr if in_solver else self._stream, name)


def end_if(cancelled: Callable[[], bool] | None) -> None:
    """Raise KeyboardInterrupt, like Ctrl-C, if the solve was cancelled."""
    if cancelled is not None and cancelled():
        raise KeyboardInterrupt


def run_interruptibly(
    work: Callable[[], T],
    stop: Callable[[], None],
    grace_s: float = 5.0,
    cancelled: Callable[[], bool] | None = None,
    most_s: float | None = None,
) -> T:
    """Run ``work`` in a thread, so that Ctrl-C reaches Python while a C++ solver runs.

    On an interruption, or once ``cancelled`` returns True, ``stop`` is called, the thread gets ``grace_s`` to end,
    and the interruption is raised.

    Raises:
        TimeoutError: ``work`` takes longer than ``most_s``.
    """
    results: list[T] = []
    failures: list[BaseException] = []

    def body() -> None:
        try:
            results.append(work())
        except BaseException as error:
            failures.append(error)

    until = None if most_s is None else time.monotonic() + most_s
    thread = threading.Thread(target=body, name=SOLVER_THREAD, daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(POLL_S)
            end_if(cancelled)
            if until is not None and time.monotonic() > until and thread.is_alive():
                raise TimeoutError(f"not back {most_s:g} s after it was called")
    except BaseException:
        stop()
        thread.join(grace_s)
        raise
    if failures:
        raise failures[0]
    return results[0]


def solver_runs() -> bool:
    """Return True if an interrupted solver has not ended yet."""
    return any(thread.name == SOLVER_THREAD for thread in threading.enumerate())


def _rounded(program: Program, solution: Solution) -> Values:
    values = solution.values
    assert values is not None
    if np.issubdtype(values.dtype, np.integer):
        return values
    if not np.isfinite(values).all():
        raise SolverError(f"{solution.backend} said {solution.raw_status} but gave values that are not finite.")
    nearest = np.rint(values)
    off = np.where(program.is_integer, np.abs(values - nearest), 0.0)
    if off.size and off.max() > INTEGRALITY_TOLERANCE:
        worst = int(off.argmax())
        raise SolverError(
            f"{solution.backend} gave {program.variable_names[worst]} = {float(values[worst])!r}.",
            f"An integer within {INTEGRALITY_TOLERANCE} expected.",
            "Use another backend.",
        )
    continuous = np.flatnonzero(~program.is_integer)
    if continuous.size == 0:
        return nearest.astype(np.int64)
    if program.shares:
        return np.where(program.is_integer, nearest, values)
    whole = np.clip(nearest, -(2.0**62), 2.0**62).astype(np.int64)
    for column in continuous.tolist():
        best = _best_whole_value(program, whole, column)
        if best is not None:
            whole[column] = best
    reported = solution.reported_objective
    near = reported is None or program.objective_at(whole) <= reported + _objective_tolerance(program, values)
    if near and not violations(program, whole):
        return whole
    return np.where(program.is_integer, nearest, values)


def _objective_tolerance(program: Program, values: Values) -> float:
    """Return the allowed rounding error of a reported objective, plus a unit where continuous values are made
    integral."""
    scale = float(np.abs(program.objective * values.astype(np.float64)).sum()) + abs(program.offset)
    return ROW_TOLERANCE * max(1.0, scale) + (0.0 if program.is_integer.all() else 1.0)


def _best_whole_value(program: Program, values: IntArray, column: int) -> int | None:
    """Return the cheapest integer that the rows allow for ``column``, the others fixed; None if there is none."""
    rows = program.rows
    entries = np.flatnonzero(rows.columns == column)
    inside = rows.entry_rows()[entries]
    others = values.copy()
    others[column] = 0
    rest = rows.activities(others)
    low, high = int(program.lower[column]), int(program.upper[column])
    for entry, row in zip(entries.tolist(), inside.tolist(), strict=True):
        factor, activity = int(rows.coefficients[entry]), int(rest[row])
        ends = (int(rows.lower[row]), int(rows.upper[row]))
        lower, upper = ends if factor > 0 else (-ends[1], -ends[0])
        activity, factor = (activity, factor) if factor > 0 else (-activity, -factor)
        if lower > -INFINITY:
            low = max(low, -((activity - lower) // factor))
        if upper < INFINITY:
            high = min(high, (upper - activity) // factor)
    if low > high:
        return None
    cost = int(program.objective[column])
    if cost:
        best = low if cost > 0 else high
        return best if abs(best) < INFINITY else None
    return min(max(int(values[column]), low), high)
