"""Node types in words."""

from __future__ import annotations

from itertools import groupby

from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem
from milpplan.simulation.report import StepReport


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


def replicas_text(problem: Problem, plan: Plan, report: StepReport) -> str:
    """How many replicas are on which nodes, with the micro-batches of each: ``4 replicas on NAME with 20
    micro-batches each; ...``. Nothing where all are alike."""
    layout = plan.layout
    block = layout.num_gpus // layout.dp
    parts = []
    for node_type, share in enumerate(layout.replica_micro_batches):
        number = problem.node_gpus[node_type] // block
        name = report.stages[layout.pp * node_type].node_type
        parts.append(f"{_counted(number, 'replica')} on {name} with {_counted(share, 'micro-batch')} each")
    return "; ".join(parts)


def _counted(number: int, noun: str) -> str:
    """``1 replica``, ``2 replicas``."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"
