"""Data for the page's script, as short lists of numbers: the timeline and the communication matrix."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from milpplan.communication.records import Pairs, TrafficReport
from milpplan.reports.answers.traffic import NAMES
from milpplan.simulation.layout_columns import BoolArray, IntArray
from milpplan.simulation.pipeline.lanes import SLICE_KINDS, Lane, RankLanes, StepLanes
from milpplan.units import counted

MAX_ROWS: Final = 256
"""Maximum number of rows of a heat map; beyond it a row is a node, or several."""


def nodes_per_row(report: TrafficReport, max_rows: int = MAX_ROWS) -> int:
    """Return the nodes in a row of the heat map; 0 where a row is a GPU."""
    if report.num_gpus <= max_rows:
        return 0
    # A row holds nodes of one type, so every type may leave a row half empty.
    nodes = sum(-(-block.num_gpus // block.gpus_per_node) for block in report.blocks)
    return -(-nodes // max(1, max_rows - len(report.blocks) + 1))


def gpus_per_row(report: TrafficReport, max_rows: int = MAX_ROWS) -> int:
    """Return the GPUs in a row: one, or the minimum number of whole nodes that keeps the map at ``max_rows``
    rows."""
    return max(1, nodes_per_row(report, max_rows) * report.gpus_per_node)


def row_word(report: TrafficReport, max_rows: int = MAX_ROWS) -> str:
    """Name the unit of a row of the heat map."""
    nodes = nodes_per_row(report, max_rows)
    return "GPU" if not nodes else "node" if nodes == 1 else f"group of {counted(nodes, 'node')}"


def row_of_gpu(report: TrafficReport, max_rows: int = MAX_ROWS) -> IntArray:
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


MAX_RANKS: Final = 24
"""Maximum number of rows of the timeline; of more ranks a selection from first to last is shown."""
MAX_ITEMS: Final = 40_000
"""Maximum number of slices of the timeline. Beyond it the first and last slices of every row are shown, and the
steady part between them as a single slice."""
UNITS: Final = 4_000_000
"""Units of the timeline's clock per step; nanoseconds where the step has fewer."""
MAX_MATRIX_ROWS: Final = 128
"""Maximum number of rows of the matrix."""
STEADY: Final = len(SLICE_KINDS)
"""Kind of the slice that stands for the steady part."""


def shown_ranks(num_ranks: int, max_ranks: int = MAX_RANKS) -> list[int]:
    """Select all ranks, or ``max_ranks`` ranks at even distances from first to last."""
    if num_ranks <= max_ranks:
        return list(range(num_ranks))
    return sorted(set(np.linspace(0, num_ranks - 1, max_ranks).round().astype(int).tolist()))


def timeline_data(lanes: StepLanes) -> dict[str, Any]:
    """Make the rows of the timeline.

    Every row has a list of slices of the compute lane, five numbers each (units since the end of the previous
    slice, units, kind, chunk, micro-batch or -1), and bars of its collectives (start, units, kind).
    """
    unit = max(1, lanes.step_time_ns // UNITS)
    ranks = [lanes.ranks[rank] for rank in shown_ranks(len(lanes.ranks))]
    budget = max(64, MAX_ITEMS // len(ranks))
    rows = [_row(rank, budget, unit) for rank in ranks]
    return {
        "step_ns": lanes.step_time_ns,
        "unit_ns": unit,
        "kinds": [*SLICE_KINDS, "steady"],
        "rows": rows,
        "num_ranks": len(lanes.ranks),
        "shortened": any(row["steady"] for row in rows),
    }


def _row(rank: RankLanes, budget: int, unit: int) -> dict[str, Any]:
    work = rank.lane("compute")
    slices: list[int] = []
    steady = 0
    if work is not None:
        slices, steady = _slices(work, rank, budget, unit)
    bars: list[int] = []
    for lane in (rank.lane("parameter gather"), rank.lane("gradient reduction")):
        if lane is not None:
            starts, ends = lane.start_ns // unit, lane.end_ns // unit
            bars += np.stack([starts, ends - starts, lane.kind], axis=1).ravel().tolist()
    layers = sum(rank.num_layers)
    return {
        "rank": rank.label,
        "name": rank.name,
        "layers": layers,
        "slices": slices,
        "steady": steady,
        "bars": bars,
    }


def _slices(work: Lane, rank: RankLanes, budget: int, unit: int) -> tuple[list[int], int]:
    """Return the numbers of the slices, and the number of slices that the steady part replaces."""
    keep: BoolArray = np.ones(len(work), dtype=np.bool_)
    hidden = max(0, len(work) - budget)
    if hidden:
        keep[budget // 2 : budget // 2 + hidden] = False
    chunk_of = {stage: chunk for chunk, stage in enumerate(rank.virtual_stages)}
    chunks = np.array([chunk_of.get(stage, -1) for stage in work.stage.tolist()], dtype=np.int64)
    columns = [work.start_ns // unit, work.end_ns // unit, work.kind, chunks, work.micro_batch]
    if hidden:
        first, last = budget // 2, budget // 2 + hidden
        whole = [columns[0][first], columns[1][last - 1], STEADY, -1, hidden]
        columns = [
            np.concatenate([column[:first], [value], column[last:]])
            for column, value in zip(columns, whole, strict=True)
        ]
    return _by_gaps(columns), hidden


def _by_gaps(columns: list[IntArray]) -> list[int]:
    start, end = columns[0], columns[1]
    gaps = start - np.concatenate([[0], end[:-1]])
    numbers: list[int] = np.stack([gaps, end - start, *columns[2:]], axis=1).ravel().tolist()
    return numbers


def matrix_data(report: TrafficReport, max_rows: int = MAX_MATRIX_ROWS) -> dict[str, Any]:
    """Make the matrix of bytes between at most ``max_rows`` rows of GPUs.

    Every parallelism that sends has cells (distance from the previous cell, index of the value) and values of four
    digits.
    """
    rows = row_of_gpu(report, max_rows)
    places, each = int(rows.max()) + 1, gpus_per_row(report, max_rows)
    wide = report.gpus_per_domain >= 2 * each
    shown = {"all together": report.all_pairs} | {NAMES[name]: pairs for name, pairs in report.pairs.items()}
    return {
        "places": places,
        "each": each,
        "word": row_word(report, max_rows),
        "edges": [int(rows[edge]) for edge in domain_edges(report)] if wide else [],
        "maps": {
            name: _cells(pairs, places, rows) | {"total": float(pairs.total_bytes)}
            for name, pairs in shown.items()
            if len(pairs.sender)
        },
    }


def _cells(pairs: Pairs, places: int, rows: IntArray) -> dict[str, Any]:
    flat = pairs.matrix(places, rows).ravel()
    cells = np.flatnonzero(flat > 0)
    powers = 10.0 ** (3 - np.floor(np.log10(flat[cells])))
    rounded = np.round(flat[cells] * powers) / powers
    values, numbers = np.unique(rounded, return_inverse=True)
    steps = np.diff(cells, prepend=0)
    return {
        "cells": np.stack([steps, numbers], axis=1).ravel().tolist(),
        "values": [float(f"{value:.4g}") for value in values.tolist()],
    }
