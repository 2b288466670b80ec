"""Solution of a small problem as the one program of ``milpplan.optimize.milp.whole_program``.

The program is solved, the plan simulated and its critical path added, until bound and simulator meet.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

import numpy as np

from milpplan.errors import SolverError
from milpplan.optimize import Status
from milpplan.optimize.layout.rounding import Choice
from milpplan.optimize.milp import Limits, Program
from milpplan.optimize.milp.backends import Backend
from milpplan.optimize.milp.backends import backend as backend_named
from milpplan.optimize.milp.whole_program import MAX_LAYOUTS, LayoutBlock, WholeProgram
from milpplan.problem import Plan, Problem
from milpplan.simulation import IntArray

MAX_PROGRAMS = 400
WITNESSES = {"highs": "cpsat", "cbc": "cpsat", "cpsat": "cbc", "auto": "cbc"}
"""Solver that proves the last bound again; CP-SAT where a plug-in proved it."""


@dataclass(frozen=True, slots=True)
class WholeProgramResult:
    """Result of the whole program.

    ``step_time_ns`` and ``bound_ns`` are step times, times largest batch / batch where the batch may vary.
    ``program`` is the last program; ``iterations`` the number of programs solved.
    """

    status: Status
    step_time_ns: float | None
    bound_ns: float | None
    plan: Plan | None
    program: Program
    iterations: int


def solve_monolithic(
    problem: Problem, backend: str = "highs", gap: float = 1e-4, max_layouts: int = MAX_LAYOUTS
) -> WholeProgramResult:
    """Solve a small problem as one program; ``gap`` 0 proves the optimum to the nanosecond.

    The bound that decides is proved by two solvers (``WITNESSES``); where they differ the better plan counts.

    Raises:
        InvalidInputError: the problem is too large, or the program does not cover it.
        SolverError: an answer fails its exact re-check.
    """
    solver, witness = backend_named(backend), backend_named(WITNESSES.get(backend, "cpsat"))
    whole, bound = WholeProgram.of(problem, max_layouts), Fraction(0)
    for iteration in range(1, MAX_PROGRAMS + 1):
        program = whole.program()
        if not any(block.program for block in whole.blocks):
            return _result(whole, whole.cutoff + whole.grain, program, iteration - 1, closed=True)
        proved = _learn_from(whole, solver, program)
        if _closed(whole, proved, gap):
            bound = min(proved, _learn_from(whole, witness, program))
            if _closed(whole, bound, gap):
                return _result(whole, bound, program, iteration, closed=True)
    return _result(whole, bound, whole.program(), MAX_PROGRAMS, closed=False)


def _closed(whole: WholeProgram, bound: Fraction, gap: float) -> bool:
    """Return True if the bound proves the incumbent within the gap, or that there is no plan."""
    if whole.value is None:
        return bound > whole.cutoff
    return whole.value - bound <= Fraction(gap) * whole.value


def _learn_from(whole: WholeProgram, solver: Backend, program: Program) -> Fraction:
    """Solve, learn from the answer, and return the bound on all plans that it proves."""
    above_cutoff = whole.cutoff + whole.grain
    solution = solver.solve(program, Limits())
    if solution.status == "infeasible":
        return above_cutoff
    if solution.status != "optimal" or solution.values is None or solution.bound is None:
        raise SolverError(f"{solution.backend} answered {solution.raw_status} without a limit.")
    _learn(whole, program, np.asarray(solution.values, dtype=np.int64))
    return min(Fraction(whole.base + whole.unit * ceil(solution.bound - 1e-6)), above_cutoff)


def _learn(whole: WholeProgram, program: Program, values: IntArray) -> None:
    """Simulate the plan of an answer: add a path, an incumbent, or a forbidden combination."""
    block, choice = _decoded(whole, program, values)
    assert block.program is not None
    layout, rank = block.context.layout, block.program.overfull_rank(choice)
    if rank is not None:
        block.forbid(choice, layout.rank_stages[rank])
        return
    path, step = block.simulate(choice)
    is_new = block.program.add_path(path)
    if not whole.offer(block, choice, step) and not is_new:
        block.forbid(choice, range(layout.num_virtual_stages))


def _decoded(whole: WholeProgram, program: Program, values: IntArray) -> tuple[LayoutBlock, Choice]:
    """Return the chosen layout and its items; the degrees must be those of the layout."""
    chosen = dict(zip(program.variable_names, values.tolist(), strict=True))
    (block,) = [block for block in whole.blocks if chosen[f"layout[{block.number}]"] == 1]
    assert block.program is not None
    for name in ("num_gpus", "tp", "cp", "pp", "dp", "ep", "etp", "vpp", "micro_batch_size"):
        assert chosen[name] == getattr(block.context.layout, name), f"{name} is not that of the layout"
    return block, block.choice(values)


def _result(
    whole: WholeProgram, bound: Fraction, program: Program, iterations: int, closed: bool
) -> WholeProgramResult:
    if whole.value is None:
        status: Status = "infeasible" if closed else "no_solution_found"
        return WholeProgramResult(status, None, None, None, program, iterations)
    status, proved = "optimal" if closed else "feasible", float(min(bound, whole.value))
    return WholeProgramResult(status, float(whole.value), proved, whole.plan, program, iterations)
