"""Registry of the solver backends: which of them work here, and which confirm the bounds of which. Libraries are
imported on demand."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Final

from milpplan.errors import MilpplanError, SolverError, UnavailableError, UnknownNameError
from milpplan.optimize.milp.program import Program, ProgramBuilder
from milpplan.optimize.milp.solution import (
    Backend,
    Limits,
    Solution,
    check_solution,
    printing_aside,
    run_interruptibly,
    running,
)
from milpplan.plugins import plugin, plugin_names, plugin_title

if TYPE_CHECKING:
    from milpplan.optimize import SolveOptions


_LIBRARIES: Final = (
    "ortools.linear_solver.python.model_builder_helper",
    "ortools.math_opt.core.python.solver",
    "ortools.math_opt.callback_pb2",
    "ortools.math_opt.model_parameters_pb2",
    "scipy.optimize",
    "scipy.sparse",
)


def load_solvers() -> None:
    """Import the solver libraries now rather than in the middle of a search: an interruption of an import may be
    lost."""
    for name in _LIBRARIES:
        import_module(name)


BACKENDS: Final = {
    "cbc": "cbc.CbcBackend",
    "cpsat": "cpsat.CpSatBackend",
    "highs": "math_opt.HighsBackend",
    "scip": "math_opt.ScipBackend",
}
"""Modules of this folder and their classes."""
AUTO: Final = "auto"
LATE_S: Final = 1.0
"""Seconds after its time limit until which a plug-in is awaited."""
PROBE_S: Final = 20.0
"""Time limit of a solver for a program of two variables."""
PROBE_OPTIMUM: Final = 10


class AutoBackend:
    """HiGHS, the fastest on deep pipelines; CBC where HiGHS fails, then CP-SAT."""

    name = AUTO

    def version(self) -> str:
        """Return the versions of all three solvers."""
        return "; ".join(backend(name).version() for name in ("highs", "cbc", "cpsat"))

    def solve(self, program: Program, limits: Limits) -> Solution:
        """Return the answer of the first backend that gives a valid answer."""
        for name in ("highs", "cbc"):
            try:
                return backend(name).solve(program, limits)
            except (SolverError, ImportError):
                continue
        return backend("cpsat").solve(program, limits)


def backend(name: str) -> Backend:
    """Return the backend called ``name``, or ``auto``."""
    if name == AUTO:
        return AutoBackend()
    if name not in BACKENDS:
        names = [*backend_names(), AUTO]
        if name in names:
            return PluginBackend(name)
        close = difflib.get_close_matches(name.lower().replace("-", ""), names, n=1)
        raise UnknownNameError(
            f"There is no solver backend {name!r}.",
            f"One of {', '.join(names)} expected.",
            f"Did you mean {close[0]!r}?" if close else "",
        )
    module, class_name = BACKENDS[name].split(".")
    built: Backend = getattr(import_module(f"milpplan.optimize.milp.{module}"), class_name)()
    return built


def check_infeasible(program: Program, limits: Limits, solution: Solution) -> Solution:
    """Solve a program again that a floating-point solver calls infeasible, by HiGHS without presolve; keep every
    other answer.

    CBC, and the presolve of HiGHS, have called feasible programs infeasible; nothing in their answers shows it.
    """
    if solution.status != "infeasible" or solution.backend == "cpsat":
        return solution
    return backend("highs").solve(program, replace(limits, presolve=False))


def backend_names() -> tuple[str, ...]:
    """Return the names of the built-in backends, then those of the installed plug-ins."""
    return (*BACKENDS, *(name for name in plugin_names("solvers") if name not in (*BACKENDS, AUTO)))


class PluginBackend:
    """Function of another package over the solver-neutral program (``milpplan.solvers``); its answers pass the
    exact check of all backends."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._function: Callable[[Program, Limits], Solution] = plugin("solvers", name)

    def version(self) -> str:
        """Return name, package and version."""
        return plugin_title("solvers", self.name)

    def solve(self, program: Program, limits: Limits) -> Solution:
        """Return the checked answer of the function."""
        # It runs in a thread, so that limits and Ctrl-C work even where it ignores them.
        most_s = None if limits.time_limit_s is None else limits.time_limit_s + LATE_S
        try:
            with printing_aside(), running(f"The solver plug-in {self.version()}"):
                solution = run_interruptibly(
                    lambda: self._function(program, limits),
                    lambda: None,
                    grace_s=0.0,
                    cancelled=limits.cancelled,
                    most_s=most_s,
                )
        except (MilpplanError, KeyboardInterrupt):
            raise
        except BaseException as error:
            # SystemExit, too: a plug-in may not end the program.
            raise UnavailableError(
                f"The solver plug-in {self.version()} fails on {program.name}: {type(error).__name__}: {error}.",
                do="Use another backend, or repair its package.",
            ) from error
        if not isinstance(solution, Solution):
            raise SolverError(
                f"The solver plug-in {self.version()} answers with {type(solution).__name__}.",
                "A milpplan Solution expected.",
                "Repair its package.",
            )
        return check_solution(program, replace(solution, backend=self.name))


def probed(name: str) -> Solution:
    """Return the answer of a backend to a program of two variables, whose optimum is ``PROBE_OPTIMUM``."""
    builder = ProgramBuilder("probe")
    pair = builder.add_variables(("a", "b"), 3)
    builder.add_row("cover", pair, (2, 3), lower=7)
    builder.minimize(pair, (3, 4))
    return backend(name).solve(builder.build(), Limits(time_limit_s=PROBE_S))


WITNESSES = {
    "highs": ("cbc", "scip", "cpsat"),
    "auto": ("cbc", "scip", "cpsat", "highs"),
    "cbc": ("cpsat", "highs", "scip"),
    "cpsat": ("highs", "cbc", "scip"),
    "scip": ("highs", "cbc", "cpsat"),
}
"""Solvers that confirm a bound of the given backend, in order: the next is asked where one cannot, and never the
solver that gave the bound."""
OWN_WITNESSES = ("highs", "cbc", "scip", "cpsat")
"""Solvers that confirm bounds of plug-ins."""


def witnesses(options: SolveOptions) -> list[Backend]:
    """Return the confirming solvers in the order in which they are asked; empty where the options want none."""
    names = WITNESSES.get(options.backend, OWN_WITNESSES) if options.witness else ()
    return [backend(name) for name in names]
