"""Sentences on node types."""

from __future__ import annotations

from itertools import groupby

from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem
from milpplan.simulation.report import StepReport


def cluster_text(problem: Problem, num_gpus: int) -> str:
    """Write ``64 x NAME``, or for several node types ``64 x NAME + 64 x NAME``."""
    counts = problem.node_gpus if problem.other_hardware else (num_gpus,)
    parts = zip(counts, problem.node_types, strict=True)
    return " + ".join(f"{count:,} x {hardware.name}" for count, hardware in parts)


def node_types_text(report: StepReport) -> str:
    """Write the nodes of the stages, in pipeline order: ``stages 0-7: NAME; 8-15: NAME``."""
    blocks, first = [], 0
    for name, same in groupby(stage.node_type for stage in report.stages):
        last = first + len(list(same)) - 1
        blocks.append(f"{first}: {name}" if first == last else f"{first}-{last}: {name}")
        first = last + 1
    return f"stages {'; '.join(blocks)}"


def replicas_text(problem: Problem, plan: Plan, report: StepReport) -> str:
    """Write the replicas by node type with their micro-batches: ``4 replicas on NAME with 20 micro-batches each;
    ...``.

    Empty where all replicas are alike.
    """
    layout = plan.layout
    block = layout.num_gpus // layout.dp
    parts = []
    for node_type, share in enumerate(layout.replica_micro_batches):
        number = problem.node_gpus[node_type] // block
        name = report.stages[layout.pp * node_type].node_type
        parts.append(f"{_counted(number, 'replica')} on {name} with {_counted(share, 'micro-batch')} each")
    return "; ".join(parts)


def _counted(number: int, noun: str) -> str:
    """Write a count with its noun: ``1 replica``, ``2 replicas``."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"
