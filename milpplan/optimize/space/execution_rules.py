"""Switches of the execution beside degrees, schedule and sharding: values, rules and dominance.

Where a problem leaves them at their defaults they are constant columns, and these rules are skipped.
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
    """Return the values of the switches that a problem does not leave at their defaults, as columns hold them."""
    values_by_name = {}
    for name in EXECUTION:
        values = getattr(problem.space, name)
        if tuple(values) != (DEFAULTS[name],):
            numbers = [WORDS[name].index(value) for value in values] if name in WORDS else values
            values_by_name[name] = ascending(np.array(numbers, dtype=np.int64))
    return values_by_name


def offloads_asked(problem: Problem) -> bool:
    """Return True if layouts of a problem may offload to the host."""
    return any(name in OFFLOADS for name in asked_switches(problem))


def default_switches(columns: Mapping[str, IntArray]) -> dict[str, IntArray]:
    """Return columns of the switches that a table lacks, and of the node types' order where there is one type."""
    length = len(next(iter(columns.values())))
    missing = [name for name in (*EXECUTION, "node_order", "replica_micro_batches") if name not in columns]
    return {name: np.asarray(constant(column_value(name, DEFAULTS[name]), length)) for name in missing}


def offloads(c: Mapping[str, IntArray]) -> BoolArray:
    """Mask the rows that offload to the host; a table that lacks a switch has it off."""
    length = len(next(iter(c.values())))
    return np.asarray(sum((c[name] for name in OFFLOADS if name in c), np.zeros(length, dtype=np.int64)) > 0)


def _states_fit_the_host(problem: Problem, c: Mapping[str, IntArray]) -> BoolArray:
    """Mask rows whose offloaded states may fit the host.

    Some rank has at least the mean over the ranks on the host. Only layers count, with the states sharded as far
    as the space allows; of several node types the smallest states and the largest memory.
    """
    fits = np.ones(len(c["tp"]), dtype=np.bool_)
    divides = (c["tp"] * c["cp"] * c["dp"]) % (c["ep"] * c["etp"]) == 0
    rows = np.flatnonzero(divides & ((c["offload_weights"] > 0) | (c["offload_optimizer"] > 0)))
    if not len(rows):
        return fits
    columns = _columns({name: c[name][rows] for name in c}, zero_stage=max(problem.space.zero_stage))
    total = np.zeros(len(rows))
    for kind_index, kind in enumerate(problem.model.kinds):
        sizes = _min_states(problem, kind, columns)
        moved = np.where(columns.offload_weights, sizes[0], 0.0) + np.where(
            columns.offload_optimizer, sizes[2], 0.0
        )
        total += moved * problem.model.layer_kinds.count(kind_index)
    fits[rows] = total / columns.pp <= host_capacity_bytes(problem)
    return fits


def _min_states(problem: Problem, kind: LayerRun, columns: LayoutColumns) -> FloatArray:
    """Return bytes of a layer's states, [3, n], each the minimum over node types."""
    views = [problem.on_type(node_type) for node_type in range(len(problem.node_types))]
    sizes = [states.state_bytes(p, columns, states.local_layer_parameters(p, kind, columns)) for p in views]
    return np.asarray(np.minimum.reduce(sizes))


def _columns(table: Mapping[str, IntArray], **given: int) -> LayoutColumns:
    """Return a table as layouts, with some columns given and missing columns zero."""
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
"""Rules of forward-only runs: all weights are sharded, or nothing."""

CAPACITY_RULES: dict[str, Rule] = {"offloaded_states_fit_host_memory": _states_fit_the_host}
"""Rules on sizes rather than on values of columns."""


def _ring_is_no_slower(problem: Problem, c: Mapping[str, IntArray]) -> BoolArray:
    """Drop pipelined layouts that have a twin with a ring in the space.

    The layout never beats its twin: tiles of the same products, equal memory, and no collective exposes more
    (``collectives.tiled_overlap_s``). The rule holds only for the built-in cost model.
    """
    open_twin = "ring" in problem.space.tp_overlap and has_own_times(problem)
    return np.asarray((c["tp_overlap"] != PIPELINED) | (not open_twin))


def _faster_transfer(problem: Problem, c: Mapping[str, IntArray]) -> BoolArray:
    """Keep the faster of two twins that differ in scattering and gathering; of equal ones the first.

    The switch changes only the transfers between stages, and no path gets longer with shorter transfers. Several
    node types have several transfers, whose order may differ: there both twins stay.
    """
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
"""Rules that drop legal layouts, each with a twin in the space that is no slower and no larger."""

TRANSFER_DOMINANCE: dict[str, Rule] = {"dominated_by_transfer": _faster_transfer}
"""Dominance rules for rows with micro-batches and an order of ranks; of the switches they read only
sequence_parallel and pp_scatter_gather."""
