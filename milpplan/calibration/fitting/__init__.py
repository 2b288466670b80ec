"""Robust least-squares fit of hardware and software constants to measured times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.calibration.fitting.fitted_constants import Theta
    from milpplan.calibration.fitting.records import Fit
else:
    __getattr__ = lazy_exports(__name__, __file__)
