"""Who confirms bounds that rest on integer programs."""

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
"""Who confirms a bound that rests on an integer program; the next is asked where one cannot, and never the solver
that gave the bound."""
OWN_WITNESSES = ("highs", "cbc", "cpsat")
"""Who confirms what a plug-in proves."""


def witnesses(options: SolveOptions) -> list[Backend]:
    """In the order in which they are asked; none where the options want none."""
    names = WITNESSES.get(options.backend, OWN_WITNESSES) if options.witness else ()
    return [backend(name) for name in names]
