"""Measured training runs as problems and plans: reader, records, and assumptions about missing values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.validation.runs.clusters import generation_of
    from milpplan.validation.runs.frameworks import framework_of, stack_of
    from milpplan.validation.runs.reader import RunFile, read_runs
    from milpplan.validation.runs.records import Cluster, Run, UnstatedError
    from milpplan.validation.runs.statement import Statement, StepMeasure, rates, state, step_measure
    from milpplan.validation.runs.variants import VARIANTS, is_scored
else:
    __getattr__ = lazy_exports(__name__, __file__)
