"""The simulator against published, measured training runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.validation.comparison import UNSCORED_FLAGS, Comparison, Validation, compare
    from milpplan.validation.evidence import Evidence
    from milpplan.validation.summary import summarise
    from milpplan.validation.tables import report
else:
    __getattr__ = lazy_exports(__name__, __file__)
