"""Enumeration of the layout space: every legal layout as a row of columns, and the rejections of each rule.

Rules are applied as soon as the columns they need exist, so a rejected row stands for all its extensions; the
counts say how many (partial) layouts each rule refused. Megatron-LM's rules are quoted from
megatron/core/transformer/transformer_config.py, training/arguments.py, core/parallel_state.py and
core/pipeline_parallel/schedules.py at d98e8a64.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.optimize.space.layout_space import (
    SHARDING,
    STANDS_FOR,
    Choices,
    Columns,
    LayoutSpace,
    ProductTable,
    Rule,
    RuleFilter,
    Stop,
    cross,
    expand,
    not_forbidden,
    num_rows,
)
from milpplan.optimize.space.lazy_product import Blocks, apply_ready, apply_rules, without_slower_transfers
from milpplan.optimize.space.rules import (
    ALIGNMENT_SWITCH_RULES,
    ALL_REPLICA_RULES,
    CAPACITY_RULES,
    CLUSTER_ORDER_RULES,
    CLUSTER_RULES,
    DOMINANCE,
    EXECUTION_RULES,
    HYBRID_RULES,
    HYBRID_SHARDING_RULES,
    INFERENCE_RULES,
    KEPT_RULES,
    KEPT_SHARDING_RULES,
    PIPELINE_SHARDING_RULES,
    REPLICA_DEGREE_RULES,
    REPLICA_RULES,
    SPLIT_BACKWARD_RULES,
    SPLIT_RULES,
    TRANSFER_DOMINANCE,
    WHOLE_MATRIX_RULES,
    allowed,
    asked_switches,
    default_switches,
    hybrid_sharding_rules,
    max_virtual_stages,
    meeting_once,
    node_orders,
    offloads_asked,
    replica_rank_orders,
    schedule_rules,
    shares_in,
    stage_choices,
    stage_rules,
    target_crossed_rules,
    target_rules,
    target_sharding_rules,
    virtual_stages,
    with_shares,
)
from milpplan.problem import (
    RANK_ORDERS,
    SCHEDULES,
    DenseMlp,
    Layout,
    MixtureOfExperts,
    Problem,
    Space,
)
from milpplan.simulation import BoolArray, IntArray, LayoutColumns, ascending
from milpplan.simulation.layers.shard import ALLGATHER, ALLTOALL, DEEPEP
from milpplan.simulation.layout_columns import constant
from milpplan.simulation.mixed_costs import view_of
from milpplan.simulation.network import placement

MAX_BLOCKS = 4_000_000
"""Maximum number of blocks (``LayoutSpace``) before rules split them: some 400 bytes each, up to twice as many
after the rules."""
MAX_PRODUCT = 1_000_000
"""Number of rows that degrees and switches are crossed to at a time, some 200 bytes each."""
PRODUCT_FACTOR = 8
"""Number of rows that are crossed for a legal choice of switches, about."""


def divisors(number: int) -> IntArray:
    """Return all divisors, ascending."""
    candidates = np.arange(1, int(number**0.5) + 1)
    small = candidates[number % candidates == 0]
    return ascending(np.concatenate([small, number // small]))


def _heads_fit(problem: Problem, c: Mapping[str, IntArray]) -> BoolArray:
    """Require that tensor parallelism divides the heads of all layers."""
    return _all_divide([heads for kind in problem.model.kinds for heads in kind.head_counts], c["tp"])


def _exchanged_heads_fit(problem: Problem, c: Mapping[str, IntArray]) -> BoolArray:
    """Require that tp x cp divides the heads of linear recurrences, whose ranks exchange tokens for heads.

    Source: Megatron-LM@d98e8a64 core/ssm/gated_delta_net/common.py, which divides all sections by cp;
    mamba_context_parallel.py also copies groups to more ranks, which is not priced.
    """
    heads = [heads for kind in problem.model.kinds for heads in kind.exchanged_heads]
    return np.asarray((c["cp"] == 1) | _all_divide(heads, c["tp"] * c["cp"]))


def _kv_heads_fit(problem: Problem, c: Mapping[str, IntArray]) -> BoolArray:
    """Require that tensor parallelism divides or replicates the key/value heads; latent attention has none."""
    legal = np.ones(len(c["tp"]), dtype=np.bool_)
    for kind in problem.model.kinds:
        if kind.attention.type == "gqa":
            heads = kind.attention.num_key_value_heads
            legal &= (heads % c["tp"] == 0) | (c["tp"] % heads == 0)
    return legal


def _widths(problem: Problem) -> list[int]:
    """Return the widths that tensor parallelism divides."""
    widths = []
    for kind in problem.model.kinds:
        if isinstance(kind.mlp, DenseMlp):
            widths.append(kind.mlp.intermediate_size)
        elif isinstance(kind.mlp, MixtureOfExperts) and kind.mlp.shared_intermediate_size:
            widths.append(kind.mlp.shared_intermediate_size)
    return widths


def _experts(problem: Problem) -> list[MixtureOfExperts]:
    return [kind.mlp for kind in problem.model.kinds if isinstance(kind.mlp, MixtureOfExperts)]


def _all_divide(values: list[int], by: IntArray) -> BoolArray:
    legal = np.ones(len(by), dtype=np.bool_)
    for value in values:
        legal &= value % by == 0
    return legal


DEGREE_RULES: dict[str, Rule] = {
    "heads_divisible_by_tp": _heads_fit,
    "recurrent_heads_divisible_by_tp_and_cp": _exchanged_heads_fit,
    "kv_heads_multiple_or_divisor_of_tp": _kv_heads_fit,
    "intermediate_size_divisible_by_tp": lambda p, c: _all_divide(_widths(p), c["tp"]),
    "sequence_divisible_by_twice_cp": lambda p, c: (
        (c["cp"] == 1)
        | (p.job.sequence_length % (2 * c["cp"]) == 0)
        & (not p.model.has_indexers or p.job.sequence_length >= c["cp"] * p.model.boundary_tokens)
    ),
    "pp_not_above_stages": lambda p, c: c["pp"] <= max_virtual_stages(p),
    "batch_divisible_by_dp": lambda p, c: c["global_batch_size"] % c["dp"] == 0,
}

MICRO_BATCH_RULES: dict[str, Rule] = {
    "pairs_share_a_micro_batch": lambda p, c: c["micro_batch_size"] % p.job.sequences_together == 0,
}
"""Rules where sequences of a sample belong together. Source: TRL trl/trainer/dpo_trainer.py concatenates chosen
and rejected sequences."""

EXPERT_RULES: dict[str, Rule] = {
    "experts_divisible_by_ep": lambda p, c: _all_divide([m.num_experts for m in _experts(p)], c["ep"]),
    "expert_width_divisible_by_etp": lambda p, c: _all_divide(
        [m.intermediate_size for m in _experts(p)], c["etp"]
    ),
    "expert_grid_divides_ranks": lambda p, c: (c["tp"] * c["cp"] * c["dp"]) % (c["ep"] * c["etp"]) == 0,
    "etp_divides_tp": lambda p, c: c["tp"] % c["etp"] == 0,
}

DISPATCH_RULES: dict[str, Rule] = {
    "allgather_needs_whole_experts": lambda p, c: (c["expert_dispatch"] != ALLGATHER) | (c["etp"] == 1),
}


def _dispatch_is_new(problem: Problem, c: Mapping[str, IntArray]) -> BoolArray:
    """Drop named dispatchers that send nothing, or are the default of all nodes, where the space has the default:
    the plan is the same."""
    once = {hardware.software.deduplicated_dispatch for hardware in problem.node_types}
    default = -1 if len(once) > 1 else DEEPEP if True in once else ALLTOALL
    again = (c["expert_dispatch"] > 0) & ((c["expert_dispatch"] == default) | (c["ep"] == 1))
    return np.asarray(~again | ("default" not in problem.space.expert_dispatch))


ORDER_RULES: dict[str, Rule] = {
    "experts_need_pp_last_or_equal_replicas": lambda p, c: (
        (not _experts(p)) | placement.pp_is_last(c) | (c["pp"] == 1) | (c["tp"] * c["cp"] == c["ep"] * c["etp"])
    ),
    "expert_stages_are_dense_stages": lambda p, c: (not _experts(p)) | placement.stages_agree(c),
}
"""Megatron-LM's conditions on the order of ranks, core/parallel_state.py, initialize_model_parallel."""

SEQUENCE_RULES: dict[str, Rule] = {
    "sequence_parallel_needs_tp": lambda p, c: (c["sequence_parallel"] == 0) | (c["tp"] > 1),
    "sequence_divisible_by_tp": lambda p, c: (
        (c["sequence_parallel"] == 0) | ((p.job.sequence_length // c["cp"]) % c["tp"] == 0)
    ),
    "experts_with_tp_need_sequence_parallel": lambda p, c: (
        (len(_experts(p)) == 0) | (c["tp"] == 1) | (c["sequence_parallel"] == 1)
    ),
}

SHARDING_RULES: dict[str, Rule] = {
    "zero_needs_replicas": lambda p, c: (c["zero_stage"] == 0) | (c["cp"] * c["dp"] > 1),
    "grad_overlap_needs_replicas": lambda p, c: (c["overlap_grad_reduce"] == 0) | (c["cp"] * c["dp"] > 1),
    "param_overlap_needs_zero_and_grad_overlap": lambda p, c: (
        (c["overlap_param_gather"] == 0) | ((c["zero_stage"] >= 1) & (c["overlap_grad_reduce"] == 1))
    ),
    "sharded_gradients_are_overlapped": lambda p, c: (c["zero_stage"] < 2) | (c["overlap_grad_reduce"] == 1),
    "sharded_weights_are_overlapped": lambda p, c: (c["zero_stage"] < 3) | (c["overlap_param_gather"] == 1),
}


def _dominated_by_overlap(problem: Problem, c: Mapping[str, IntArray]) -> BoolArray:
    """Drop layouts without an overlap switch that have a twin with it in the space.

    The layout never beats its twin: memory is equal, and in the step graph a stream that starts earlier ends no
    later (LEAD <= BACKWARD, where it is split <= WEIGHT, TRAIL <= REDUCE, FIRST <= GATHER, LAST <= FORWARD).
    """
    replicas = c["cp"] * c["dp"] > 1
    if problem.inference:
        return np.ones(len(replicas), dtype=np.bool_)
    grad_twin = replicas & (c["overlap_grad_reduce"] == 0)
    param_twin = replicas & (c["overlap_param_gather"] == 0) & (c["zero_stage"] >= 1)
    keep = np.ones(len(replicas), dtype=np.bool_)
    if True in problem.space.overlap_grad_reduce:
        keep &= ~grad_twin
    if True in problem.space.overlap_param_gather:
        keep &= ~(param_twin & (c["overlap_grad_reduce"] == 1))
    return keep


def _order_is_new(problem: Problem, c: Mapping[str, IntArray]) -> BoolArray:
    """Drop orders of ranks with the strides of an earlier order of the space: the layout is the same."""
    offered = tuple(sorted(map(RANK_ORDERS.index, problem.space.rank_order)))
    return placement.is_first_alike(c, offered, bool(_experts(problem)))


def layout_space(
    problem: Problem,
    forbidden: tuple[Mapping[str, Any], ...] = (),
    without: Collection[str] = (),
    stop: Stop | None = None,
) -> LayoutSpace:
    """Enumerate every legal layout of the problem's space.

    Args:
        problem: the problem.
        forbidden: partial layouts (field to value) that the caller excludes.
        without: names of rules that are not applied, to see what they exclude.
        stop: asked between two rules on large tables whether time is up.

    Raises:
        InvalidInputError: the space exceeds memory (``MAX_BLOCKS``).
        KeyboardInterrupt: time is up.
    """
    rule_filter = RuleFilter(problem, without=without, stop=stop)
    stages = not problem.other_hardware or "stages" in problem.space.mixing
    parts = [_pipelines(problem, rule_filter)] if stages else []
    if problem.other_hardware and "replicas" in problem.space.mixing:
        switches = ("sequence_parallel", *asked_switches(problem))
        parts.append(
            Blocks.of_families(_heterogeneous_replicas(problem, rule_filter), switches, ("vpp", "schedule"))
        )
    return _shardings(problem, rule_filter, parts[0] if len(parts) == 1 else Blocks.joined(parts), forbidden)


def _pipelines(problem: Problem, rule_filter: RuleFilter) -> Blocks:
    """Return layouts with equal replicas, without their sharding."""
    columns: Mapping[str, IntArray] = rule_filter.keep(_degrees(problem, rule_filter), DEGREE_RULES)
    if problem.other_hardware:
        columns = cross(rule_filter.keep(columns, CLUSTER_RULES), "node_order", node_orders(problem))
    degrees = _expert_degrees(problem, rule_filter, columns)
    # Asked here as well, because the orders of ranks multiply the rows.
    _micro_batch_sizes(problem, degrees)
    number = np.arange(len(degrees["tp"]))
    blocks = _micro_batches(problem, _rank_orders(problem, rule_filter, {**degrees, "number": number}))
    if problem.job.sequences_together > 1:
        blocks = rule_filter.keep(blocks, MICRO_BATCH_RULES)
    number_of_block = blocks.pop("number")
    stands_for = np.bincount(number_of_block, minlength=len(number))
    asked = asked_switches(problem)
    lists = _switch_lists(problem, rule_filter, {**degrees, "number": number, STANDS_FOR: stands_for})
    switches = lists.of(number_of_block)
    if asked:
        switches = without_slower_transfers(rule_filter, blocks, switches)
    rules = schedule_rules(problem)
    # Rules that read the switches as well come after both are listed.
    crossed_rules = {
        name: rules.pop(name) for name in SPLIT_BACKWARD_RULES if name in rules and offloads_asked(problem)
    }
    stages = stage_choices(problem, rule_filter, blocks, switches.counts, rules)
    product = Blocks(blocks, switches.shared(), stages.shared(), Choices.none(len(number_of_block)))
    return apply_rules(rule_filter, product, crossed_rules | target_rules(problem))


def _heterogeneous_replicas(problem: Problem, rule_filter: RuleFilter) -> Columns:
    """Return layouts with heterogeneous replicas, without their sharding."""
    orders = replica_rank_orders(problem)
    space = problem.space.model_copy(update={"rank_order": tuple(RANK_ORDERS[code] for code in orders)})
    own_filter = RuleFilter(
        problem.model_copy(update={"space": space}),
        rule_filter.rejected,
        without=rule_filter.without,
        stop=rule_filter.stop,
    )
    degrees = {name: rule for name, rule in DEGREE_RULES.items() if name != "batch_divisible_by_dp"}
    columns: Mapping[str, IntArray] = own_filter.keep(
        _degrees(problem, own_filter), REPLICA_DEGREE_RULES | degrees
    )
    columns = _expert_degrees(problem, own_filter, columns)
    crossed = cross(columns, "rank_order", np.array(orders, dtype=np.int64))
    columns = own_filter.keep(crossed, ORDER_RULES | {"rank_order_places_alike": _order_is_new})
    columns = with_shares(problem, columns)
    if problem.job.sequences_together > 1:
        columns = own_filter.keep(columns, MICRO_BATCH_RULES)
    columns = _switches(problem, own_filter, columns)
    if asked_switches(problem):
        columns = own_filter.apply(columns, TRANSFER_DOMINANCE)
    columns = virtual_stages(problem, own_filter.keep(columns, REPLICA_RULES))
    schedules = np.array([SCHEDULES.index(schedule) for schedule in problem.schedules])
    own_filter.enumerated += len(columns["vpp"]) * len(schedules)
    columns = cross(columns, "schedule", schedules)
    for node_type in range(len(problem.node_types)):
        shares = {"num_micro_batches": shares_in(columns, node_type)}
        columns = own_filter.apply({**columns, **shares}, SPLIT_RULES | schedule_rules(problem))
    rule_filter.enumerated += own_filter.enumerated
    return {name: column for name, column in columns.items() if name != "num_micro_batches"}


def _expert_degrees(problem: Problem, rule_filter: RuleFilter, columns: Mapping[str, IntArray]) -> Columns:
    """Cross rows with the degrees of their experts."""
    space = problem.space
    if not _experts(problem):
        ones = np.ones_like(columns["tp"])
        legal = 1 in (space.ep or (1,)) and 1 in (space.etp or (1,))
        rules: dict[str, Rule] = {"experts_need_moe": lambda p, c: np.full(len(c["ep"]), legal)}
        return rule_filter.keep({**columns, "ep": ones, "etp": ones}, rules)
    experts = divisors(int(np.gcd.reduce([m.num_experts for m in _experts(problem)])))
    columns = cross(columns, "ep", allowed(space.ep, experts))
    degrees = ascending(np.concatenate([[1], *(divisors(int(tp)) for tp in ascending(columns["tp"]))]))
    return rule_filter.keep(cross(columns, "etp", allowed(space.etp, degrees)), EXPERT_RULES)


def _switch_lists(problem: Problem, rule_filter: RuleFilter, columns: Columns) -> Choices:
    """List the legal switches of every row of degrees, numbered by its column ``number``.

    The rows are crossed in portions, because few of a product's rows are legal and most lists are equal.
    """
    asked, size = asked_switches(problem), len(columns["number"])
    parts, start, each = list[Choices](), 0, MAX_PRODUCT
    while start < size or not parts:
        end = min(size, start + max(1, MAX_PRODUCT // each))
        rows = {name: values[start:end] for name, values in columns.items()}
        kept = _switches(problem, rule_filter, rows)
        table = {name: kept[name] for name in ("sequence_parallel", *asked)}
        part = Choices.listed(table, kept["number"] - start, end - start, np.arange(end - start))
        each = PRODUCT_FACTOR * max(1, int(part.counts.max(initial=0)))
        parts.append(part.shared())
        start = end
    return Choices.joined(parts).shared()


MODULES_RULES: Final = ("recompute_modules_of_the_model", "offload_modules_of_the_model")


def _switches(
    problem: Problem, rule_filter: RuleFilter, columns: Mapping[str, IntArray]
) -> Mapping[str, IntArray]:
    """Cross rows with sequence parallelism, and with the switches that are not left at their defaults."""
    values = np.array(sorted(set(problem.space.sequence_parallel)), dtype=np.int64)
    columns = rule_filter.keep(cross(columns, "sequence_parallel", values), SEQUENCE_RULES)
    asked = asked_switches(problem)
    if not asked:
        return columns
    rules = EXECUTION_RULES | CAPACITY_RULES | DOMINANCE
    if problem.job.alignment is not None and "offload_weights" in asked:
        rules |= ALIGNMENT_SWITCH_RULES
    if "keep_weights" in asked:
        rules |= KEPT_RULES
    if "expert_dispatch" in asked:
        rules |= DISPATCH_RULES | {"dispatched_as_by_default": _dispatch_is_new}
    # Few rules read the modules of recomputation: they are crossed last, with the few rows that are legal.
    modules = asked.pop("recompute_modules", None)
    module_rules, each = {}, 1
    if modules is not None:
        module_rules, each = {name: rules[name] for name in MODULES_RULES}, len(modules)
        rules = {name: rule for name, rule in rules.items() if name not in MODULES_RULES}
    names, own = (*columns, *asked), columns.get(STANDS_FOR, np.ones_like(columns["tp"]))
    defaults = default_switches({**columns, **dict.fromkeys(asked, own)})
    options: dict[int, IntArray] = {}
    if "dp_replicate" in asked:
        rules |= HYBRID_RULES
        space = problem.space
        options = {int(dp): allowed(space.dp_replicate, divisors(int(dp))) for dp in ascending(columns["dp"])}
        degrees, row = np.unique(columns["dp"], return_inverse=True)
        counts = np.array([len(options[int(dp)]) for dp in degrees], dtype=np.int64)
        columns = {**columns, STANDS_FOR: own * counts[row]}
    left = each * math.prod(len(values) for name, values in asked.items() if name != "dp_replicate")
    rule_filter.enumerated += num_rows(columns) * left
    columns = {**columns, **defaults}
    # Few rows of the whole product are legal, so a rule is applied once the switches that it reads are crossed.
    for number, (name, values) in enumerate(asked.items(), 1):
        if name == "dp_replicate":
            table = expand(columns, name, options, columns["dp"])
            table = ProductTable({**table.base, STANDS_FOR: own}, table.base_rows, table.new_columns)
        else:
            table, left = cross(columns, name, values), left // len(values)
        columns = apply_ready(rule_filter, table, rules, [*asked][number:], left)
    columns = {name: columns[name] for name in names}
    if modules is not None:
        columns = cross(columns, "recompute_modules", modules)
        kept = rule_filter.apply({**columns, **default_switches(columns)}, module_rules)
        columns = {name: kept[name] for name in columns}
    return columns


def _shardings(
    problem: Problem, rule_filter: RuleFilter, blocks: Blocks, forbidden: tuple[Mapping[str, Any], ...]
) -> LayoutSpace:
    """Cross every family with every legal choice of ZeRO stage and overlap switches.

    The legality of a choice depends on the family only through having replicas. So the rules are applied to the
    choices, once with and once without replicas, and counted for all families that they stand for. Blocks with
    replicas come before blocks without (``_degrees``). Rules that read the sharding and other fields come last.
    """
    space = problem.space
    choices: Mapping[str, IntArray] = {"zero_stage": np.array(sorted(set(space.zero_stage)), dtype=np.int64)}
    for switch in ("overlap_grad_reduce", "overlap_param_gather"):
        choices = cross(choices, switch, ascending(np.array(getattr(space, switch), dtype=np.int64)))
    rules = SHARDING_RULES | INFERENCE_RULES | target_sharding_rules(problem)
    if problem.job.optimizer == "muon":
        rules |= WHOLE_MATRIX_RULES
    if not target_crossed_rules(problem):
        # Otherwise the target may lack the twin with the overlap.
        rules |= {"dominated_by_overlap": _dominated_by_overlap}
    columns, families = blocks.columns, blocks.num_families
    replicated = columns["cp"] * columns["dp"] > 1
    size, legal = len(choices["zero_stage"]), []
    counts = int(families[replicated].sum()), int(families[~replicated].sum())
    for has_replicas, count in zip((True, False), counts, strict=True):
        group = RuleFilter(problem, without=rule_filter.without)
        table = {"cp": np.full(size, 1 + has_replicas), "dp": np.ones(size, dtype=np.int64)}
        legal.append(group.keep({**choices, **table}, rules))
        rule_filter.enumerated += group.enumerated * count
        for name, num_rejected in group.rejected.items():
            rule_filter.rejected[name] = rule_filter.rejected.get(name, 0) + num_rejected * count
    table = {name: np.concatenate([part[name] for part in legal]) for name in SHARDING}
    sizes = len(legal[0]["zero_stage"]), len(legal[1]["zero_stage"])
    shardings = Choices(table, np.where(replicated, 0, sizes[0]), np.where(replicated, *sizes))
    columns = {**default_switches(columns), **columns}
    columns = {name: values for name, values in columns.items() if name not in blocks.switches.table}
    columns["num_micro_batches"] = columns["global_batch_size"] // (columns["dp"] * columns["micro_batch_size"])
    blocks = Blocks(columns, blocks.switches, blocks.stages, shardings)
    if "replica_micro_batches" in columns and columns["replica_micro_batches"].any():
        blocks = apply_rules(rule_filter, blocks, meeting_once())
    crossed_rules = target_crossed_rules(problem)
    if not space.zero_pipeline and max(space.zero_stage) > 1:
        crossed_rules |= PIPELINE_SHARDING_RULES
    if "dp_replicate" in asked_switches(problem):
        crossed_rules |= hybrid_sharding_rules(problem)
    if "keep_weights" in asked_switches(problem):
        crossed_rules |= KEPT_SHARDING_RULES
    if forbidden:
        crossed_rules["forbidden_by_caller"] = lambda p, c: not_forbidden(c, forbidden)
    if crossed_rules:
        rule_filter.enumerated += int((blocks.num_families * blocks.shardings.counts).sum())
        blocks = apply_rules(rule_filter, blocks, crossed_rules)
    none = constant(0, len(blocks.columns["tp"]))
    chosen = dict.fromkeys((*blocks.switches.table, *blocks.stages.table, *SHARDING), none)
    return LayoutSpace(
        blocks=LayoutColumns.from_mapping({**blocks.columns, **chosen}),
        switches=blocks.switches,
        stages=blocks.stages,
        shardings=blocks.shardings,
        num_choices=sizes,
        kept=None,
        rejected=rule_filter.rejected,
        enumerated=rule_filter.enumerated,
    )


def _degrees(problem: Problem, rule_filter: RuleFilter) -> Columns:
    """Return tp, cp, pp, dp with product equal to each candidate number of GPUs, and the global batch."""
    space = problem.space
    rows: list[tuple[int, ...]] = []
    batches = problem.job.global_batch_values
    for gpus in problem.job.num_gpus_values:
        rule_filter.check_time(len(rows))
        _check_size(len(rows) * len(batches))
        for tp in allowed(space.tp, divisors(gpus)):
            for cp in allowed(space.cp, divisors(gpus // tp)):
                for pp in allowed(space.pp, divisors(gpus // (tp * cp))):
                    dp = gpus // (tp * cp * pp)
                    if space.dp is None or dp in space.dp:
                        rows.append((tp, cp, pp, dp))
    tp, cp, pp, dp = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    # Rows with replicas first, as ``_shardings`` needs them; crossing keeps this order.
    order = np.argsort(cp * dp == 1, kind="stable")
    columns = {"tp": tp[order], "cp": cp[order], "pp": pp[order], "dp": dp[order]}
    return dict(cross(columns, "global_batch_size", np.array(batches, dtype=np.int64)))


def _rank_orders(problem: Problem, rule_filter: RuleFilter, columns: Mapping[str, IntArray]) -> Columns:
    """Cross rows with the orders of ranks that give different strides."""
    orders = ascending(np.array([RANK_ORDERS.index(order) for order in problem.space.rank_order]))
    crossed = cross(columns, "rank_order", orders)
    rules = ORDER_RULES | CLUSTER_ORDER_RULES if problem.other_hardware else ORDER_RULES
    return rule_filter.keep(crossed, rules | {"rank_order_places_alike": _order_is_new})


def _check_size(blocks: int) -> None:
    """Refuse spaces that exceed memory."""
    if blocks > MAX_BLOCKS:
        raise InvalidInputError(
            f"The space has more than {MAX_BLOCKS:,} combinations of GPUs, batch, degrees and order of ranks.",
            "Expected a space whose bounds fit in a few GB of memory.",
            "Ask for fewer numbers of GPUs or batches (a larger step), fix some degrees, or solve each number by "
            "itself (`milpplan sweep`).",
        )


def _micro_batch_sizes(problem: Problem, columns: Mapping[str, IntArray]) -> tuple[dict[int, IntArray], IntArray]:
    """Return the admissible micro-batch sizes by a replica's share of the batch, and the share of every row [n].

    Raises:
        InvalidInputError: the rows and their sizes make more than ``MAX_BLOCKS`` combinations.
    """
    share = columns["global_batch_size"] // columns["dp"]
    values, counts = np.unique(share, return_counts=True)
    sizes = {int(value): allowed(problem.space.micro_batch_size, divisors(int(value))) for value in values}
    _check_size(sum(len(sizes[int(value)]) * int(count) for value, count in zip(values, counts, strict=True)))
    return sizes, share


def _micro_batches(problem: Problem, columns: Mapping[str, IntArray]) -> Columns:
    """Cross rows with micro-batch sizes that divide a replica's share of the batch."""
    crossed = dict(expand(columns, "micro_batch_size", *_micro_batch_sizes(problem, columns)))
    crossed["num_micro_batches"] = crossed["global_batch_size"] // (crossed["dp"] * crossed["micro_batch_size"])
    return crossed


def broken_rules(problem: Problem, layout: Layout) -> list[str]:
    """Return the names of the rules that a layout breaks (empty when it is legal); the space's value lists do not
    count."""
    if not layout.replica_micro_batches:
        return [name for name, kept in kept_rules(problem, LayoutColumns.of([layout])).items() if not kept.all()]
    columns = LayoutColumns.of([layout]).mapping
    broken = [name for name, rule in ALL_REPLICA_RULES.items() if not np.all(rule(problem, columns))]
    views = [] if broken else [view_of(problem, layout, node_type) for node_type in range(len(problem.node_types))]
    return list(dict.fromkeys([*broken, *(name for view in views for name in broken_rules(*view))]))


def kept_rules(problem: Problem, columns: LayoutColumns) -> dict[str, BoolArray]:
    """Return, for the name of every rule, the mask of layouts that keep it, [N]; the space's value lists do not
    count."""
    problem = problem.model_copy(update={"space": Space(schedule=SCHEDULES)})
    mapping = {name: getattr(columns, name).astype(np.int64) for name in Layout.model_fields}
    mapping["num_micro_batches"] = columns.num_micro_batches
    rules = (
        DEGREE_RULES
        | MICRO_BATCH_RULES
        | SEQUENCE_RULES
        | ALIGNMENT_SWITCH_RULES
        | EXECUTION_RULES
        | KEPT_RULES
        | DISPATCH_RULES
        | CAPACITY_RULES
        | SHARDING_RULES
    )
    rules |= stage_rules(problem) | INFERENCE_RULES | HYBRID_RULES | HYBRID_SHARDING_RULES | KEPT_SHARDING_RULES
    rules.pop("layers_split_into_stages")
    rules.pop("one_schedule_without_pipeline")
    rules |= CLUSTER_RULES | CLUSTER_ORDER_RULES if problem.other_hardware else {}
    if _experts(problem):
        rules |= EXPERT_RULES | ORDER_RULES
    else:
        rules |= {"experts_need_moe": lambda p, c: (c["ep"] == 1) & (c["etp"] == 1)}
    size = len(columns)
    kept = {name: np.broadcast_to(rule(problem, mapping), size) for name, rule in rules.items()}
    share = mapping["dp"] * mapping["micro_batch_size"]
    kept["micro_batch_divides_share_of_batch"] = mapping["global_batch_size"] % share == 0
    return kept
