"""Who confirms a bound that rests on an integer program."""

from __future__ import annotations

import pytest

from milpplan.errors import SolverError
from milpplan.optimize import SolveOptions
from milpplan.optimize.layout import LayoutSolver
from milpplan.optimize.milp import Limits, Program, ProgramBuilder, Solution, Status
from milpplan.optimize.milp.backends import WITNESSES


class Scripted:
    """A backend that always answers the same, and counts how often it was asked."""

    def __init__(self, name: str, status: Status | None, objective: int | None = None) -> None:
        self.name, self.status, self.objective, self.asked = name, status, objective, 0

    def version(self) -> str:
        """None."""
        return ""

    def solve(self, program: Program, limits: Limits) -> Solution:
        """The answer, or a failure."""
        self.asked += 1
        if self.status is None:
            raise SolverError("failed")
        values = None if self.objective is None else program.lower
        return Solution(self.status, values, self.objective, None, self.status, self.name, 0.0)


def program() -> Program:
    """One variable z from 0 to 10, minimised."""
    builder = ProgramBuilder("z")
    z = builder.add_variables(("z",), 10)
    builder.minimize(z, (1,))
    return builder.build()


def confirmed(backend: str, *witnesses: Scripted) -> tuple[int | None, LayoutSolver]:
    """What of the bound 7, proved by ``backend``, the witnesses confirm."""
    solution = Solution("optimal", None, None, 7.0, "OPTIMAL", backend, 0.1)
    solver = LayoutSolver(SolveOptions(), Scripted(backend, "optimal"), list(witnesses), None)
    return solver._confirmed(program(), solution, 7), solver


def test_no_solver_confirms_itself() -> None:
    """A bound of the solver that is also a witness counts only when another one has proved it."""
    itself = Scripted("cbc", "infeasible")
    bound, solver = confirmed("cbc", itself)
    assert bound is None
    assert itself.asked == 0
    assert solver.counters.unwitnessed == 1
    bound, solver = confirmed("cbc", itself, Scripted("cpsat", "infeasible"))
    assert bound == 7
    assert itself.asked == 0
    assert solver.counters.witnessed == 1


def test_the_next_witness_is_asked_where_one_fails_and_then_goes_first() -> None:
    """Failures and missing answers pass the question on; whoever proved is asked first the next time."""
    failing, slow, good = Scripted("a", None), Scripted("b", "no_solution_found"), Scripted("c", "infeasible")
    bound, solver = confirmed("highs", failing, slow, good)
    assert bound == 7
    assert (failing.asked, slow.asked, good.asked) == (1, 1, 1)
    assert solver.witnesses[0] is good


def test_a_solution_below_the_bound_is_an_error() -> None:
    """Solvers that contradict each other prove nothing."""
    with pytest.raises(SolverError, match="finds a solution"):
        confirmed("highs", Scripted("cbc", "feasible", 5))


@pytest.mark.parametrize("backend", WITNESSES)
def test_every_backend_has_another_as_witness(backend: str) -> None:
    """Whichever solver answered for ``auto`` and the others, at least one other can confirm it."""
    answering = ("highs", "cbc", "cpsat") if backend == "auto" else (backend,)
    assert all(set(WITNESSES[backend]) - {name} for name in answering)
