"""Measured training runs as problems and plans: reader, records, and assumptions about missing values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.validation.runs.clusters import hardware_of
    from milpplan.validation.runs.frameworks import (
        FRAMEWORKS,
        PLAIN_STACK,
        ceil_split,
        even_split,
        framework_of,
        split_by_cost,
        split_by_cost_with_ties,
        split_with_embeddings,
        stack_of,
        stacks_of,
    )
    from milpplan.validation.runs.reader import RunFile, read_runs
    from milpplan.validation.runs.records import Cluster, Run, UnstatedError
    from milpplan.validation.runs.statement import (
        SOURCE_PEAK,
        Statement,
        StepMeasure,
        flops_per_token,
        rates,
        state,
        step_measure,
    )
    from milpplan.validation.runs.variants import (
        GENERATIONS,
        SIBLINGS,
        VARIANTS,
        described,
        generation_of,
        is_scored,
        stack_hardware,
    )
else:
    __getattr__ = lazy_exports(__name__, __file__)
