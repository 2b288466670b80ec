"""Who confirms bounds that rest on integer programs."""

from __future__ import annotations

from milpplan.optimize.backends import OWN_WITNESSES, WITNESSES, backend
from milpplan.optimize.result import SolveOptions
from milpplan.optimize.solution import Backend


def witnesses(options: SolveOptions) -> list[Backend]:
    """In the order in which they are asked; none where the options want none."""
    names = WITNESSES.get(options.backend, OWN_WITNESSES) if options.witness else ()
    return [backend(name) for name in names]
