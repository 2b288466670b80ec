"""Choice of the solvers that confirm bounds from integer programs."""

from __future__ import annotations

from milpplan.optimize.milp.backends import backend
from milpplan.optimize.milp.solution import Backend
from milpplan.optimize.result import SolveOptions

WITNESSES = {
    "highs": ("cbc", "cpsat"),
    "auto": ("cbc", "cpsat", "highs"),
    "cbc": ("cpsat", "highs"),
    "cpsat": ("highs", "cbc"),
}
"""Solvers that confirm a bound of the given backend, in order: the next is asked where one cannot, and never the
solver that gave the bound."""
OWN_WITNESSES = ("highs", "cbc", "cpsat")
"""Solvers that confirm bounds of plug-ins."""


def witnesses(options: SolveOptions) -> list[Backend]:
    """Return the confirming solvers in the order in which they are asked; empty where the options want none."""
    names = WITNESSES.get(options.backend, OWN_WITNESSES) if options.witness else ()
    return [backend(name) for name in names]
