"""Node types in words."""

from __future__ import annotations

from itertools import groupby

from milpplan.costs.report import StepReport
from milpplan.specs.problem import Problem


def cluster_text(problem: Problem, num_gpus: int) -> str:
    """``64 x NAME``, or of several node types ``64 x NAME + 64 x NAME``."""
    counts = problem.node_gpus if problem.other_hardware else (num_gpus,)
    parts = zip(counts, problem.node_types, strict=True)
    return " + ".join(f"{count:,} x {hardware.name}" for count, hardware in parts)


def node_types_text(report: StepReport) -> str:
    """Which stages are on which nodes, in the order of the pipeline: ``stages 0-7: NAME; 8-15: NAME``."""
    blocks, first = [], 0
    for name, same in groupby(stage.node_type for stage in report.stages):
        last = first + len(list(same)) - 1
        blocks.append(f"{first}: {name}" if first == last else f"{first}-{last}: {name}")
        first = last + 1
    return f"stages {'; '.join(blocks)}"
