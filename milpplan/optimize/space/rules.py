"""Rules and choices beyond the degrees: switches, virtual stages and schedules, node types, launchers.

Switches that a problem leaves at their defaults are constant columns, and their rules are skipped. Rules of
Megatron-LM are quoted from core/transformer/transformer_config.py and training/arguments.py at d98e8a64.

Node types differ either between the stages of equal replicas, where each pipeline rank is on one type, or between
replicas. Then a replica is wholly on one node type. The replicas of all types have equal degrees, layers and
switches, and each type has its own number of micro-batches. Replicas are numbered outermost (the order of ranks
ends with dp), so those of a type are neighbours.

A launcher's rules (``Space.target``) come from its ``Capability``: its export refuses what breaks one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np

from milpplan.errors import InvalidInputError, UnknownNameError
from milpplan.optimize.space.layout_space import (
    SHARDING,
    STANDS_FOR,
    Choices,
    Columns,
    ProductTable,
    Rule,
    RuleFilter,
    cross,
    expand,
    num_rows,
)
from milpplan.optimize.space.plan_space import splits_exist
from milpplan.problem import (
    MODULE_SETS,
    OFFLOAD_SETS,
    PAIRED_SCHEDULES,
    RANK_ORDERS,
    SCHEDULES,
    SPLIT_SCHEDULES,
    TP_OVERLAPS,
    V_SCHEDULES,
    LayerRun,
    Problem,
    RankOrder,
    order_code,
    shares_code,
    shares_of,
)
from milpplan.problem.plan import SHARE_BASES, MicroBatchShares
from milpplan.simulation import (
    BoolArray,
    FloatArray,
    IntArray,
    LayoutColumns,
    ascending,
    column_value,
    host_capacity_bytes,
    states,
    unique_rows,
)
from milpplan.simulation.layers.layer_time import has_own_times
from milpplan.simulation.layout_columns import DEFAULTS, HOSTED, WORDS, constant, hosts_apart, priced_sets
from milpplan.simulation.network import placement, transfer_s

if TYPE_CHECKING:
    from milpplan.launchers.capabilities import Capability

EXECUTION = (
    *("tp_overlap", "pp_scatter_gather", "gather_again", "recompute_vision", "recompute_modules", "ulysses"),
    "vision_data_parallel",
    *(*HOSTED, "dp_replicate", "keep_weights", "expert_dispatch"),
)
NO_TILES, RING, PIPELINED = map(TP_OVERLAPS.index, ("none", "ring", "pipelined"))


def switch_values(problem: Problem, name: str) -> Sequence[int | str]:
    """Return the values of a switch in the space.

    Switches of what a problem lacks are at their defaults. Where the space leaves them open: all divisors of the
    heads for ``ulysses``, all numbers up to the GPUs for ``dp_replicate``, and ``Problem.module_sets``.
    """
    if name == "recompute_vision" and not problem.recomputes_vision:
        return (False,)
    if name == "vision_data_parallel" and not problem.job.has_images:
        return (False,)
    if name == "expert_dispatch" and not problem.model.has_experts:
        return ("default",)
    if name == "recompute_modules":
        return problem.module_sets
    values: tuple[int | str, ...] | None = getattr(problem.space, name)
    if values is not None:
        return values
    if name == "offload_modules":
        return problem.offload_sets
    if name == "dp_replicate":
        return range(1, max(problem.job.num_gpus_values) + 1)
    heads = problem.model.common_heads
    return [number for number in range(1, heads + 1) if heads % number == 0]


def asked_switches(problem: Problem) -> dict[str, IntArray]:
    """Return the values of the switches that a problem does not leave at their defaults, as columns hold them."""
    values_by_name = {}
    for name in EXECUTION:
        values = switch_values(problem, name)
        if tuple(values) != (DEFAULTS[name],):
            numbers = [WORDS[name].index(value) for value in values] if name in WORDS else values
            values_by_name[name] = ascending(np.array(numbers, dtype=np.int64))
    return values_by_name


def offloads_asked(problem: Problem) -> bool:
    """Return True if layouts of a problem may offload to the host."""
    return any(name in HOSTED for name in asked_switches(problem))


def default_switches(columns: Mapping[str, IntArray]) -> dict[str, IntArray]:
    """Return columns of the switches that a table lacks, and of the node types' order where there is one type."""
    length = len(next(iter(columns.values())))
    missing = [name for name in (*EXECUTION, "node_order", "replica_micro_batches") if name not in columns]
    return {name: np.asarray(constant(column_value(name, DEFAULTS[name]), length)) for name in missing}


def offloads(c: Mapping[str, IntArray]) -> BoolArray:
    """Mask the rows that offload to the host; a table that lacks a switch has it off."""
    length = len(next(iter(c.values())))
    return np.asarray(sum((c[name] for name in HOSTED if name in c), np.zeros(length, dtype=np.int64)) > 0)


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
    sharding = {"zero_stage": max(problem.space.zero_stage), "dp_replicate": 1}
    columns = _columns({name: c[name][rows] for name in c}, **sharding)
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


def _windows_exchange(problem: Problem, c: Mapping[str, IntArray]) -> BoolArray:
    """Require that layers with a window have either the ring or the exchange of heads."""
    kinds = problem.model.kinds
    windows = any(kind.attention.type == "gqa" and kind.attention.sliding_window is not None for kind in kinds)
    return np.asarray((not windows) | (c["ulysses"] == 1) | (c["ulysses"] == c["cp"]))


EXECUTION_RULES: dict[str, Rule] = {
    "tp_overlap_needs_sequence_parallel": lambda p, c: (
        (c["tp_overlap"] == NO_TILES) | (c["sequence_parallel"] == 1)
    ),
    "kept_gathered_needs_sequence_parallel": lambda p, c: (c["gather_again"] == 1) | (c["sequence_parallel"] == 1),
    "recomputed_vision_needs_images": lambda p, c: (c["recompute_vision"] == 0) | p.recomputes_vision,
    "shared_images_need_context_parallelism": lambda p, c: (
        (c["vision_data_parallel"] == 0) | ((c["cp"] > 1) & p.job.has_images)
    ),
    "recompute_modules_of_the_model": lambda p, c: (
        priced_sets(c["recompute_modules"], MODULE_SETS, p.prices_modules)
        & ((c["recompute_modules"] == 0) | (c["gather_again"] == 1))
    ),
    "scatter_gather_needs_whole_activations": lambda p, c: (
        (c["pp_scatter_gather"] == 0) | ((c["tp"] > 1) & (c["pp"] > 1) & (c["sequence_parallel"] == 0))
    ),
    "ulysses_divides_cp_and_heads": lambda p, c: (
        (c["ulysses"] == 1)
        | ((c["cp"] % c["ulysses"] == 0) & (p.model.common_heads % (c["tp"] * c["ulysses"]) == 0))
    ),
    "ulysses_needs_flash_attention": lambda p, c: (c["ulysses"] == 1) | (p.job.attention_kernel == "flash"),
    "windows_need_one_exchange": _windows_exchange,
    "inference_offloads_weights_alone": lambda p, c: (
        np.full(len(c["tp"]), not p.inference)
        | ((c["offload_activations"] == 0) & (c["offload_optimizer"] == 0) & (c["gather_again"] == 1))
    ),
    "offload_modules_of_the_model": lambda p, c: (
        priced_sets(c["offload_modules"], OFFLOAD_SETS, p.prices_offload) & hosts_apart(c)
    ),
    "offload_needs_host_memory": lambda p, c: (
        all(hardware.host_memory is not None for hardware in p.node_types) | ~offloads(c)
    ),
}
"""Tiles: Megatron-LM training/arguments.py refuses ``tp_comm_overlap`` without ``sequence_parallel``. Heads
exchanged by all-to-alls: Transformer Engine at d0067d0d, pytorch/attention/dot_product_attention/
context_parallel.py, requires that the ranks divide the heads of queries, keys and values, and refuses windows with
a2a+p2p."""

KEPT_RULES: dict[str, Rule] = {
    "kept_weights_need_no_pipeline": lambda p, c: (c["keep_weights"] == 0) | (c["pp"] == 1),
    "kept_weights_are_trained_once": lambda p, c: (
        (c["keep_weights"] == 0) | ((c["offload_weights"] == 0) & (not (p.inference or p.job.further_forwards)))
    ),
}
"""Rules of weights that stay gathered until the backward: in a pipeline other micro-batches run in between."""
KEPT_SHARDING_RULES: dict[str, Rule] = {
    "kept_weights_need_zero_3": lambda p, c: (c["keep_weights"] == 0) | (c["zero_stage"] == 3),
}
ALIGNMENT_SWITCH_RULES: dict[str, Rule] = {
    "offloaded_weights_need_no_reference": lambda p, c: (c["offload_weights"] == 0) | (not p.job.reference_copies),
}
"""Rules on switches of jobs that train on preferences."""

HYBRID_RULES: dict[str, Rule] = {
    "dp_replicate_divides_dp": lambda p, c: c["dp"] % c["dp_replicate"] == 0,
    "dp_replicate_divides_expert_replicas": lambda p, c: (
        (c["tp"] * c["cp"] * c["dp"]) % (c["ep"] * c["etp"] * c["dp_replicate"]) == 0
    ),
    "dp_replicate_leaves_shards": lambda p, c: (c["dp_replicate"] == 1) | (c["dp_replicate"] < c["dp"]),
}
"""Rules of hybrid sharding on degrees. Groups of a single replica share nothing, which is ZeRO 0. Source:
Megatron-LM core/parallel_state.py (``num_distributed_optimizer_instances``); torchtitan parallel_dims.py."""

HYBRID_SHARDING_RULES: dict[str, Rule] = {
    "dp_replicate_needs_zero": lambda p, c: (c["dp_replicate"] == 1) | (c["zero_stage"] >= 1),
}

INFERENCE_RULES: dict[str, Rule] = {
    "inference_shards_weights_or_nothing": lambda p, c: (
        np.full(len(c["zero_stage"]), not p.inference)
        | (c["zero_stage"] == 3)
        | ((c["zero_stage"] == 0) & (c["overlap_grad_reduce"] == 0))
    ),
}
"""Rules of forward-only runs: all weights are sharded, or nothing."""

PIPELINE_SHARDING_RULES: dict[str, Rule] = {
    "zero_2_and_3_without_pipeline": lambda p, c: (
        np.full(len(c["zero_stage"]), p.space.zero_pipeline) | (c["zero_stage"] <= 1) | (c["pp"] == 1)
    ),
}
"""Rules that ``Space.zero_pipeline`` lifts. DeepSpeed refuses the combination (runtime/pipe/engine.py: "ZeRO-2
and ZeRO-3 are incompatible with pipeline parallelism"). FSDP of torchtitan and AutoModel with a pipeline is ZeRO 1
here (``launchers.capabilities.piped_states``)."""

WHOLE_MATRIX_RULES: dict[str, Rule] = {"muon_needs_whole_matrices": lambda p, c: c["zero_stage"] <= 1}
"""Rules of Muon. ZeRO 2 and 3 cut every matrix; Megatron-FSDP takes SGD and Adam alone (Megatron-LM
training/arguments.py), and its ZeRO 1 deals whole matrices out."""

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


_IS_SPLIT = np.isin(SCHEDULES, list(SPLIT_SCHEDULES))
_IS_PAIRED = np.isin(SCHEDULES, list(PAIRED_SCHEDULES))
_IS_V = np.isin(SCHEDULES, list(V_SCHEDULES))


def max_virtual_stages(problem: Problem) -> int:
    """Return the maximum number of virtual stages: in the free space the first and the last may be empty."""
    return problem.model.num_layers + 2 * (problem.space.kind == "free")


def _has_v(problem: Problem) -> bool:
    return not V_SCHEDULES.isdisjoint(problem.schedules)


def _schedule_matches_vpp(problem: Problem, c: Mapping[str, IntArray]) -> BoolArray:
    """Require one chunk a rank, several for interleaved schedules, two for V schedules."""
    matches = (c["schedule"] == SCHEDULES.index("interleaved")) == (c["vpp"] > 1)
    return np.asarray(np.where(_IS_V[c["schedule"]], c["vpp"] == 2, matches) if _has_v(problem) else matches)


def _plain_schedule(problem: Problem) -> int:
    """Return the schedule that stands for gpipe and 1f1b without a pipeline, where both are gradient accumulation.

    Schedules that split the backward need a pipeline, whose bubble their weight gradients fill.
    """
    return SCHEDULES.index("gpipe" if "1f1b" not in problem.schedules and "gpipe" in problem.schedules else "1f1b")


SPLIT_RULES: dict[str, Rule] = {
    "virtual_stages_not_above_layers": lambda p, c: c["pp"] * c["vpp"] <= max_virtual_stages(p),
    "interleaving_needs_two_stages": lambda p, c: (c["vpp"] == 1) | (c["pp"] > 1),
    # A V schedule takes any number of micro-batches, and its rows are not apart from others yet.
    "interleaved_micro_batches_divisible_by_pp": lambda p, c: (
        (c["vpp"] == 1) | (c["num_micro_batches"] % c["pp"] == 0) | ((c["vpp"] == 2) & _has_v(p))
    ),
    "layers_split_into_stages": splits_exist,
}

SCHEDULE_RULES: dict[str, Rule] = {
    "schedule_matches_vpp": _schedule_matches_vpp,
    "one_schedule_without_pipeline": lambda p, c: (c["pp"] > 1) | (c["schedule"] == _plain_schedule(p)),
}

V_RULES: dict[str, Rule] = {
    "interleaved_micro_batches_divisible_by_pp": lambda p, c: (
        (c["vpp"] == 1) | (c["num_micro_batches"] % c["pp"] == 0) | _IS_V[c["schedule"]]
    ),
}
"""Replacement of the rule of the same name where the space has V schedules."""

SPLIT_BACKWARD_RULES: dict[str, Rule] = {
    # Weight gradients apart from the rest fill a bubble; no launcher splits backwards without a pipeline.
    "split_backward_needs_two_stages": lambda p, c: ~_IS_SPLIT[c["schedule"]] | (c["pp"] > 1),
    "offload_needs_whole_backward": lambda p, c: ~_IS_SPLIT[c["schedule"]] | ~offloads(c),
}
"""Further rules where the space has schedules that split the backward: no framework offloads data that waits for a
weight gradient, and it is not priced."""

PAIR_RULES: dict[str, Rule] = {
    "pairs_need_two_micro_batches_per_stage": lambda p, c: (
        ~_IS_PAIRED[c["schedule"]] | (c["num_micro_batches"] >= 2 * c["pp"])
    ),
    "pairs_need_one_node_type": lambda p, c: ~_IS_PAIRED[c["schedule"]] | (not p.other_hardware),
}
"""Further rules where the space has schedules with pairs: deepseek-ai/DualPipe, dualpipe/dualpipev.py, and
PyTorch's ScheduleDualPipeV refuse fewer micro-batches than there are virtual stages. Bounds of mixed clusters
ignore pairs."""


def schedule_rules(problem: Problem) -> dict[str, Rule]:
    """Return the rules that read the schedule."""
    rules = SCHEDULE_RULES | V_RULES if _has_v(problem) else SCHEDULE_RULES
    rules = rules if PAIRED_SCHEDULES.isdisjoint(problem.schedules) else rules | PAIR_RULES
    return rules if SPLIT_SCHEDULES.isdisjoint(problem.schedules) else rules | SPLIT_BACKWARD_RULES


def stage_rules(problem: Problem) -> dict[str, Rule]:
    """Return the rules of virtual stages and schedules for rows that have both."""
    return SPLIT_RULES | schedule_rules(problem)


def allowed(values: tuple[int, ...] | None, candidates: IntArray) -> IntArray:
    """Return the candidates that a space admits."""
    return (
        candidates if values is None else np.array(sorted(set(values) & set(candidates.tolist())), dtype=np.int64)
    )


def virtual_stages(problem: Problem, columns: Mapping[str, IntArray]) -> ProductTable:
    """Cross rows with their numbers of virtual stages a rank."""
    options = {int(pp): _vpp_values(problem, int(pp)) for pp in ascending(columns["pp"])}
    return expand(columns, "vpp", options, columns["pp"])


def _vpp_values(problem: Problem, pp: int) -> IntArray:
    """Return 1 up to the maximum vpp; with ``distinct`` only values with a new largest chunk."""
    max_vpp = max(1, max_virtual_stages(problem) // pp) if pp > 1 else 1
    values = np.arange(1, max_vpp + 1)
    if problem.space.vpp is not None:
        return allowed(problem.space.vpp, values)
    if problem.space.vpp_values == "all":
        return values
    largest = -(-problem.model.num_layers // (pp * values))
    _, first = np.unique(-largest, return_index=True)
    return np.asarray(values[np.sort(first)])


def stage_choices(
    problem: Problem, rule_filter: RuleFilter, blocks: Columns, stand_for: IntArray, rules: Mapping[str, Rule]
) -> Choices:
    """Return the virtual stages and schedules of every block; each stands for ``stand_for`` [b] families."""
    names = ("pp", "num_micro_batches")
    first, key = unique_rows(*(blocks[name] for name in names))
    rows = {name: blocks[name][first] for name in names}
    rows["key"] = np.arange(len(first))
    rows[STANDS_FOR] = np.bincount(key, stand_for, minlength=len(first)).astype(np.int64)
    columns = virtual_stages(problem, rows)
    schedules = np.array([SCHEDULES.index(schedule) for schedule in problem.schedules])
    rule_filter.enumerated += num_rows(columns) * len(schedules)
    # Rules that do not read the schedule come before it: each row then stands for all schedules.
    columns = rule_filter.apply(columns, SPLIT_RULES, stand_for=len(schedules))
    columns = rule_filter.apply(cross(columns, "schedule", schedules), rules)
    table = {name: columns[name] for name in ("vpp", "schedule")}
    return Choices.listed(table, columns["key"], len(first), key)


USUAL_ORDER: RankOrder = "tp-cp-pp-dp"
"""Order of ranks where the space names none with the replicas outermost."""
MAX_ROWS = 4_000_000
"""Maximum number of shares of two types over all degrees and micro-batch sizes."""
MAX_ROWS_OF_MANY = 400_000
"""Maximum number of shares of more types, which grow with a power of the batch: about two million
layouts, 1.5 GB."""
OUTERMOST = np.array([order.endswith("dp") for order in RANK_ORDERS])
REPLICA_RULES: dict[str, Rule] = {
    "different_replicas_hold_all_experts": lambda p, c: (c["tp"] * c["cp"]) % (c["ep"] * c["etp"]) == 0,
    "different_replicas_offload_nothing": lambda p, c: ~offloads(c),
    "different_replicas_are_neighbours": lambda p, c: OUTERMOST[c["rank_order"]],
    "different_replicas_shard_together": lambda p, c: c.get("dp_replicate", np.int64(1)) == 1,
}
REPLICA_SHARDING_RULES: dict[str, Rule] = {
    "different_replicas_meet_once_a_step": lambda p, c: c["zero_stage"] <= 1,
}
"""ZeRO 2 and 3 exchange gradients or weights in every micro-batch, and replicas have different numbers of them."""
CLUSTER_ORDER_RULES: dict[str, Rule] = {
    "node_types_need_stages_of_neighbours": lambda p, c: placement.stages_are_blocks(c),
}
"""Rules on the order of ranks where node types differ between stages: a stage whose accelerators are
interleaved with another stage's would be on several types."""


def replicas_of(problem: Problem, c: Mapping[str, IntArray]) -> list[IntArray]:
    """Return the replicas on each node type, [n] each; integral only for legal layouts."""
    block = c["tp"] * c["cp"] * c["pp"]
    return [gpus // block for gpus in problem.node_gpus]


def _whole_replicas(problem: Problem, c: Mapping[str, IntArray]) -> BoolArray:
    block = c["tp"] * c["cp"] * c["pp"]
    return np.asarray(np.logical_and.reduce([gpus % block == 0 for gpus in problem.node_gpus]))


REPLICA_DEGREE_RULES: dict[str, Rule] = {
    "different_replicas_need_two_node_types": lambda p, c: np.full(len(c["tp"]), len(p.node_types) >= 2),
    "different_replicas_are_trained": lambda p, c: np.full(len(c["tp"]), not p.inference),
    "node_types_hold_whole_replicas": _whole_replicas,
}


ALL_REPLICA_RULES = REPLICA_DEGREE_RULES | REPLICA_RULES | REPLICA_SHARDING_RULES
"""All rules of heterogeneous replicas, for rows with all columns."""


def replica_rank_orders(problem: Problem) -> tuple[int, ...]:
    """Return codes of the space's orders of ranks with the replicas outermost, or the usual one."""
    orders = [order for order in problem.space.rank_order if order.endswith("dp")]
    return tuple(sorted({column_value("rank_order", order) for order in orders or [USUAL_ORDER]}))


def with_shares(problem: Problem, columns: Mapping[str, IntArray]) -> ProductTable:
    """Cross rows with all micro-batch sizes and all shares of the types that make up the batch."""
    batch = columns["global_batch_size"]
    sizes = problem.space.micro_batch_size
    by_batch = {
        int(value): np.array(
            [size for size in (sizes or range(1, int(value) + 1)) if value % size == 0], dtype=np.int64
        )
        for value in ascending(batch)
    }
    sized = expand(columns, "micro_batch_size", by_batch, batch)
    if len(problem.node_types) not in SHARE_BASES:
        none = {0: np.zeros(0, dtype=np.int64)}
        return expand(sized, "replica_micro_batches", none, np.zeros_like(batch, shape=len(sized["tp"])))
    numbers = [np.maximum(number, 1) for number in replicas_of(problem, sized)]
    total = sized["global_batch_size"] // sized["micro_batch_size"]
    # One key for all values that the shares depend on.
    keys, key_of_row = np.unique(np.stack([*numbers, total]), axis=1, return_inverse=True)
    key_of_row, asked_shares = np.asarray(key_of_row).reshape(-1), problem.space.replica_micro_batches
    if asked_shares is None:
        share_counts = np.array([num_shares(key[:-1].tolist(), int(key[-1])) for key in keys.T], dtype=np.int64)
        max_rows = MAX_ROWS if len(problem.node_types) == 2 else MAX_ROWS_OF_MANY
        _check_size(float(share_counts[key_of_row].astype(np.float64).sum()), max_rows)
    codes: dict[int, IntArray] = {
        number: np.array([shares_code(shares) for shares in _shares(asked_shares, *key.tolist())], dtype=np.int64)
        for number, key in enumerate(keys.T)
    }
    return expand(sized, "replica_micro_batches", codes, key_of_row)


def _check_size(rows: float, max_rows: int) -> None:
    """Refuse tables that exceed memory."""
    if rows > max_rows:
        raise InvalidInputError(
            f"Replicas of different make share the batch in {rows:,.0f} ways, over all degrees and micro-batches.",
            f"Expected at most {max_rows:,}.",
            "Fix micro_batch_size or some degrees (--fix micro_batch_size=1,tp=8), or take a smaller batch.",
        )


def num_shares(numbers: Sequence[int], total: int) -> int:
    """Return the number of ways in which replicas of each type run ``total`` micro-batches, each at least 1."""
    surplus = total - sum(numbers)
    if surplus < 0:
        return 0
    # ways[t]: for the types so far, to run t micro-batches beyond one each; floats, exact below 2**53.
    ways = np.zeros(surplus + 1)
    ways[0] = 1
    for number in numbers:
        for first in range(min(number, surplus + 1)):
            ways[first::number] = np.cumsum(ways[first::number])
    return int(min(ways[surplus], 2.0**62))


def _shares(asked: tuple[MicroBatchShares, ...] | None, *key: int) -> Iterator[MicroBatchShares]:
    """Yield all shares of the replicas of each type that run ``total`` micro-batches, each at least 1.

    ``key``: replicas of each type, then the total. ``asked``: only these shares.
    """
    *numbers, total = key
    if asked is not None:
        whole = (
            shares
            for shares in sorted(set(asked))
            if sum(n * m for n, m in zip(numbers, shares, strict=True)) == total
        )
        yield from whole
        return
    first, *rest = numbers
    if not rest:
        if total >= first and total % first == 0:
            yield (total // first,)
        return
    for micro_batches in range(1, (total - sum(rest)) // first + 1):
        for others in _shares(None, *rest, total - first * micro_batches):
            yield (micro_batches, *others)


def shares_in(columns: Mapping[str, IntArray], node_type: int) -> IntArray:
    """Return the micro-batches of the replicas on one type, [n]."""
    codes, index = np.unique(columns["replica_micro_batches"], return_inverse=True)
    of_code = np.array([shares_of(code)[node_type] for code in codes.tolist()], dtype=np.int64)
    return of_code[np.asarray(index).reshape(-1)]


def meeting_once() -> dict[str, Rule]:
    """Return the rules of shardings (``REPLICA_SHARDING_RULES``) for tables that also have rows with equal
    replicas."""

    def of_different(rule: Rule) -> Rule:
        return lambda p, c: (c["replica_micro_batches"] == 0) | rule(p, c)

    return {name: of_different(rule) for name, rule in REPLICA_SHARDING_RULES.items()}


def _whole_ranks(node_gpus: tuple[int, ...], pp: IntArray) -> BoolArray:
    """Require that all tp x cp x dp accelerators of a pipeline rank are of one type: each type has a whole number
    of ranks."""
    total = sum(node_gpus)
    return np.asarray(np.logical_and.reduce([pp * gpus % total == 0 for gpus in node_gpus]))


CLUSTER_RULES: dict[str, Rule] = {
    "node_types_hold_whole_ranks": lambda p, c: _whole_ranks(p.node_gpus, c["pp"]),
}
"""Rules of layouts whose stages differ in node type."""


def cluster_rules(problem: Problem) -> dict[str, Rule]:
    """Return the rules of stages on several node types; rules on the order only where some order of the space may
    break them."""
    if not problem.other_hardware:
        return {}
    outermost = all(order.endswith("pp") for order in problem.space.rank_order)
    return CLUSTER_RULES if outermost else CLUSTER_RULES | CLUSTER_ORDER_RULES


def node_orders(problem: Problem) -> IntArray:
    """Return codes of the orders of node types along the pipeline that the space admits."""
    types = len(problem.node_types)
    orders = permutations(range(types)) if problem.space.node_order is None else problem.space.node_order
    return np.array(sorted({order_code(tuple(order)) for order in orders}) if types > 1 else [0], dtype=np.int64)


def capability_of(problem: Problem) -> Capability | None:
    """Return the capability of the launcher of a problem's space; None where there is no restriction.

    Raises:
        UnknownNameError: there is no such launcher, or no such version of it.
    """
    name, version = problem.space.target, problem.space.target_version
    if name is None:
        return None
    from milpplan.launchers import TARGETS

    if name not in TARGETS:
        raise UnknownNameError(
            f"The space's target is {name!r}.",
            f"Expected one of {', '.join(TARGETS)}.",
            "Correct target in the problem's space.",
        )
    capability = TARGETS[name].capability
    if version is not None and version not in capability.versions:
        raise UnknownNameError(
            f"The space's target_version is {version!r}.",
            f"Expected one of {', '.join(capability.versions)}.",
            "Correct target_version in the problem's space.",
        )
    return capability


def target_rules(problem: Problem) -> dict[str, Rule]:
    """Return the rules on fields other than the sharding."""
    capability = capability_of(problem)
    if capability is None:
        return {}
    rules = {
        f"{problem.space.target}_has_{name}": _one_of(name, limit.values)
        for name, limit in capability.limits_of(problem).items()
        if name not in SHARDING
    }
    rules |= {
        f"{problem.space.target}_{name}": rule.keeps for name, rule in capability.rules.items() if not rule.shards
    }
    if capability.stages == "equal":
        from milpplan.launchers.capabilities import equal_stages

        rules[f"{problem.space.target}_has_equal_stages"] = equal_stages
    return rules


def target_sharding_rules(problem: Problem) -> dict[str, Rule]:
    """Return the rules on single fields of the sharding."""
    capability = capability_of(problem)
    limits = {} if capability is None else capability.limits_of(problem)
    return {
        f"{problem.space.target}_has_{name}": _one_of(name, limit.values)
        for name, limit in limits.items()
        if name in SHARDING
    }


def hybrid_sharding_rules(problem: Problem) -> dict[str, Rule]:
    """Return the rules on hybrid sharding together with the ZeRO stage, of all plans and of the launcher."""
    capability = capability_of(problem)
    if capability is None:
        return HYBRID_SHARDING_RULES
    return HYBRID_SHARDING_RULES | {
        f"{problem.space.target}_shards_within_groups": capability.shards_within_groups
    }


def target_crossed_rules(problem: Problem) -> dict[str, Rule]:
    """Return the rules on the sharding together with other fields."""
    capability = capability_of(problem)
    rules = {} if capability is None else capability.rules
    return {f"{problem.space.target}_{name}": rule.keeps for name, rule in rules.items() if rule.shards}


def _one_of(name: str, values: tuple[object, ...]) -> Rule:
    """Return the rule that a field has one of some values; a table without the field has its default."""
    codes = np.array(sorted(column_value(name, value) for value in values), dtype=np.int64)

    def keeps(problem: Problem, c: Mapping[str, IntArray]) -> BoolArray:
        if name not in c:
            return np.ones(len(next(iter(c.values()))), dtype=np.bool_)
        return np.isin(c[name], codes)

    return keeps
