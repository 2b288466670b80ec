"""Constants of hardware and software fitted to a user's own measurements: ``milpplan calibrate``.

For measured steps the whole fit is ``fit(observations(read_runs(path))[0], hardware)``. Its result becomes an
overlay by ``Fit.overlay``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from milpplan.calibration.fitting.fit import fit
    from milpplan.calibration.fitting.records import Constant, Fit
    from milpplan.calibration.measured import Observation, observations

__all__ = ["Constant", "Fit", "Observation", "fit", "observations"]

_HOMES = {
    "Constant": "fitting.records",
    "Fit": "fitting.records",
    "fit": "fitting.fit",
    "Observation": "measured",
    "observations": "measured",
}


def __getattr__(name: str) -> Any:
    # Loaded when asked for: scipy takes half a second, and reports need only the records of this folder.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
