"""Switches of the execution beside degrees, schedule and sharding: values, rules, and what dominates what.

Where a problem leaves them at their defaults they are columns of one value, and nothing here is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields

import numpy as np

from milpplan.problem.model import LayerRun
from milpplan.problem.plan import TP_OVERLAPS
from milpplan.problem.problem import Problem
from milpplan.simulation import states
from milpplan.simulation.bulk.cache_keys import OFFLOADS
from milpplan.simulation.layers.cost_models import has_own_times
from milpplan.simulation.layout_columns import (
    DEFAULTS,
    WORDS,
    BoolArray,
    FloatArray,
    IntArray,
    LayoutColumns,
    ascending,
    column_value,
    constant,
)
from milpplan.simulation.layout_costs import host_capacity_bytes
from milpplan.simulation.network.stage_transfers import transfer_s

__all__ = [
    "CAPACITY_RULES",
    "DOMINANCE",
    "EXECUTION",
    "EXECUTION_RULES",
    "INFERENCE_RULES",
    "TRANSFER_DOMINANCE",
    "Rule",
    "asked_switches",
    "default_switches",
    "offloads",
    "offloads_asked",
]

Rule = Callable[[Problem, Mapping[str, IntArray]], BoolArray]

EXECUTION = ("tp_overlap", "pp_scatter_gather", "gather_again", *OFFLOADS)
NO_TILES, RING, PIPELINED = (TP_OVERLAPS.index(name) for name in ("none", "ring", "pipelined"))


def asked_switches(problem: Problem) -> dict[str, IntArray]:
    """Values of the switches that a problem does not leave at their defaults, as columns hold them."""
    found = {}
    for name in EXECUTION:
        values = getattr(problem.space, name)
        if tuple(values) != (DEFAULTS[name],):
            numbers = [WORDS[name].index(value) for value in values] if name in WORDS else values
            found[name] = ascending(np.array(numbers, dtype=np.int64))
    return found


def offloads_asked(problem: Problem) -> bool:
    """Whether some layouts of a problem may have something on the host."""
    return any(name in OFFLOADS for name in asked_switches(problem))


def default_switches(columns: Mapping[str, IntArray]) -> dict[str, IntArray]:
    """Columns of the switches that a table lacks, and of the node types' order where there is one type."""
    length = len(next(iter(columns.values())))
    missing = [name for name in (*EXECUTION, "node_order", "replica_micro_batches") if name not in columns]
    return {name: np.asarray(constant(column_value(name, DEFAULTS[name]), length)) for name in missing}


def offloads(c: Mapping[str, IntArray]) -> BoolArray:
    """Whether a row has anything on the host; a table that lacks a switch has it off."""
    length = len(next(iter(c.values())))
    return np.asarray(sum((c[name] for name in OFFLOADS if name in c), np.zeros(length, dtype=np.int64)) > 0)


def _states_fit_the_host(problem: Problem, c: Mapping[str, IntArray]) -> BoolArray:
    """Some rank has no less on the host than the mean of all, of layers alone and with the states sharded as far
    as the space allows; of several node types the one with the least of each, and the largest memory."""
    fits = np.ones(len(c["tp"]), dtype=np.bool_)
    divides = (c["tp"] * c["cp"] * c["dp"]) % (c["ep"] * c["etp"]) == 0
    rows = np.flatnonzero(divides & ((c["offload_weights"] > 0) | (c["offload_optimizer"] > 0)))
    if not len(rows):
        return fits
    columns = _columns({name: c[name][rows] for name in c}, zero_stage=max(problem.space.zero_stage))
    total = np.zeros(len(rows))
    for place, kind in enumerate(problem.model.kinds):
        sizes = _least_states(problem, kind, columns)
        moved = np.where(columns.offload_weights, sizes[0], 0.0) + np.where(
            columns.offload_optimizer, sizes[2], 0.0
        )
        total += moved * problem.model.layer_kinds.count(place)
    fits[rows] = total / columns.pp <= host_capacity_bytes(problem)
    return fits


def _least_states(problem: Problem, kind: LayerRun, columns: LayoutColumns) -> FloatArray:
    """Bytes of a layer's states, [3, n], each the least of the node types."""
    seen = [problem.on_type(node_type) for node_type in range(len(problem.node_types))]
    found = [states.state_bytes(p, columns, states.local_layer_parameters(p, kind, columns)) for p in seen]
    return np.asarray(np.minimum.reduce(found))


def _columns(table: Mapping[str, IntArray], **given: int) -> LayoutColumns:
    """A table that lacks columns as layouts, with some columns given and others nothing."""
    length = len(next(iter(table.values())))
    none = {field.name: constant(0, length) for field in fields(LayoutColumns)}
    own = {name: column for name, column in table.items() if name in none}
    return LayoutColumns.from_mapping(
        none | own | {name: constant(value, length) for name, value in given.items()}
    )


EXECUTION_RULES: dict[str, Rule] = {
    "tp_overlap_needs_sequence_parallel": lambda p, c: (
        (c["tp_overlap"] == NO_TILES) | (c["sequence_parallel"] == 1)
    ),
    "kept_gathered_needs_sequence_parallel": lambda p, c: (c["gather_again"] == 1) | (c["sequence_parallel"] == 1),
    "scatter_gather_needs_whole_activations": lambda p, c: (
        (c["pp_scatter_gather"] == 0) | ((c["tp"] > 1) & (c["pp"] > 1) & (c["sequence_parallel"] == 0))
    ),
    "inference_offloads_weights_alone": lambda p, c: (
        np.full(len(c["tp"]), not p.inference)
        | ((c["offload_activations"] == 0) & (c["offload_optimizer"] == 0) & (c["gather_again"] == 1))
    ),
    "offload_needs_host_memory": lambda p, c: (
        all(hardware.host_memory is not None for hardware in p.node_types) | ~offloads(c)
    ),
}
"""Tiles: Megatron-LM training/arguments.py refuses ``tp_comm_overlap`` without ``sequence_parallel``."""

INFERENCE_RULES: dict[str, Rule] = {
    "inference_shards_weights_or_nothing": lambda p, c: (
        np.full(len(c["zero_stage"]), not p.inference)
        | (c["zero_stage"] == 3)
        | ((c["zero_stage"] == 0) & (c["overlap_grad_reduce"] == 0))
    ),
}
"""Of forwards alone: sharding of all weights, or of nothing."""

CAPACITY_RULES: dict[str, Rule] = {"offloaded_states_fit_host_memory": _states_fit_the_host}
"""Of sizes, not of the values of some columns."""


def _ring_is_no_slower(problem: Problem, c: Mapping[str, IntArray]) -> BoolArray:
    """A pipelined layout never beats its twin with a ring: tiles of the same products, memory the same, and no
    collective exposes more (``collectives.tiled_overlap_s``). Only where the twin is in the space, and only by
    our own times: another cost model may see it otherwise."""
    open_twin = "ring" in problem.space.tp_overlap and has_own_times(problem)
    return np.asarray((c["tp_overlap"] != PIPELINED) | (not open_twin))


def _faster_transfer(problem: Problem, c: Mapping[str, IntArray]) -> BoolArray:
    """Scattering and gathering changes nothing but the transfers between stages, and no path gets longer with
    shorter ones: of the two twins the one with the longer transfer is left out, and of equal ones the second.
    Several node types have several transfers, whose order may differ: both twins stay."""
    space = problem.space.pp_scatter_gather
    if len(set(space)) < 2 or problem.other_hardware:
        return np.ones(len(c["tp"]), dtype=np.bool_)
    keep = np.ones(len(c["tp"]), dtype=np.bool_)
    can = np.flatnonzero((c["tp"] > 1) & (c["pp"] > 1) & (c["sequence_parallel"] == 0))
    rows = {name: c[name][can] for name in c}
    times = [transfer_s(problem, _columns(rows, pp_scatter_gather=on)) for on in (0, 1)]
    keep[can] = (times[1] < times[0]) == (rows["pp_scatter_gather"] == 1)
    return keep


DOMINANCE: dict[str, Rule] = {"dominated_by_ring": _ring_is_no_slower}
"""Rules that leave out legal layouts, each with a twin in the space that is no slower and no larger."""

TRANSFER_DOMINANCE: dict[str, Rule] = {"dominated_by_transfer": _faster_transfer}
"""The same, of rows that have micro-batches and an order of ranks; of the switches it reads sequence_parallel and
pp_scatter_gather alone."""
