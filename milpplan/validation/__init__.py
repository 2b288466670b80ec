"""The simulator against published, measured training runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.validation.accuracy_tables import report
    from milpplan.validation.comparison import UNSCORED_FLAGS, Comparison, Validation, compare, compare_run
    from milpplan.validation.evidence import Evidence
    from milpplan.validation.memory import MemoryMeasure, held_ahead_bytes, memory_measures, predicted_memory
    from milpplan.validation.ranking import Sweep, kendall_tau
    from milpplan.validation.summary import Errors, GroupedErrors, fitted, grouped, memory_margin, summarise
    from milpplan.validation.terms import BY_NAME, TERMS, step_doubled_s, step_without_s, used_terms
else:
    __getattr__ = lazy_exports(__name__, __file__)
