"""Integer programs: ``program``, ``solution``, ``backends`` and the solvers ``highs``, ``cbc``, ``cpsat``;
``linear_relaxation``; ``whole_program`` states a small problem as one program, ``block_program`` any problem after
its search; ``degrees`` are their rows about the layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.optimize.milp.cpsat import MAX_ROW_MAGNITUDE, CpSatBackend
    from milpplan.optimize.milp.degrees import DEGREES, Degrees, exponents, primes_of
    from milpplan.optimize.milp.linear_relaxation import Relaxation, RelaxationSolution
    from milpplan.optimize.milp.program import INFINITY, MINUS_INFINITY, IntArray, Program, ProgramBuilder, Rows
    from milpplan.optimize.milp.solution import Limits, Solution, Status, check_solution, checked_solve, violations
    from milpplan.optimize.milp.write_program import portable_names, write_lp, write_mps
else:
    __getattr__ = lazy_exports(__name__, __file__)
