"""Rows of a heat map of traffic: a row per GPU, or per group of nodes where there are many GPUs."""

from __future__ import annotations

from typing import Final

import numpy as np

from milpplan.communication.records import TrafficReport
from milpplan.simulation.layout_columns import IntArray
from milpplan.units import counted

MAX_PLACES: Final = 256
"""Maximum number of rows of a heat map; beyond it a row is a node, or several."""


def nodes_per_row(report: TrafficReport, max_rows: int = MAX_PLACES) -> int:
    """Return the nodes in a row of the heat map; 0 where a row is a GPU."""
    if report.num_gpus <= max_rows:
        return 0
    # A row holds nodes of one type, so every type may leave a row half empty.
    nodes = sum(-(-block.num_gpus // block.gpus_per_node) for block in report.blocks)
    return -(-nodes // max(1, max_rows - len(report.blocks) + 1))


def gpus_per_row(report: TrafficReport, max_rows: int = MAX_PLACES) -> int:
    """Return the GPUs in a row: one, or the minimum number of whole nodes that keeps the map at ``max_rows``
    rows."""
    return max(1, nodes_per_row(report, max_rows) * report.gpus_per_node)


def row_word(report: TrafficReport, max_rows: int = MAX_PLACES) -> str:
    """Name the unit of a row of the heat map."""
    nodes = nodes_per_row(report, max_rows)
    return "GPU" if not nodes else "node" if nodes == 1 else f"group of {counted(nodes, 'node')}"


def row_of_gpu(report: TrafficReport, max_rows: int = MAX_PLACES) -> IntArray:
    """Return the row of every GPU, [GPUs]."""
    each, rows, first = nodes_per_row(report, max_rows), [], 0
    for block in report.blocks:
        own = np.arange(block.num_gpus) // (each * block.gpus_per_node if each else 1)
        rows.append(own + first)
        first += int(own[-1]) + 1
    return np.concatenate(rows)


def domain_edges(report: TrafficReport) -> list[int]:
    """List the GPUs at which a fast domain begins, without the first."""
    starts = [
        first
        for block in report.blocks
        for first in range(block.first_gpu, block.first_gpu + block.num_gpus, block.gpus_per_domain)
    ]
    return starts[1:]
