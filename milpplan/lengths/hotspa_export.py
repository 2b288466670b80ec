"""Export of a solved step as a configuration of HotSPa's runtime: the closest step that its rules allow.

The runtime takes a list of strategies, each a JSON file of one (dp, tp, pp) without recomputation, and bucket
boundaries ``b_0 > b_1 > ... > b_n = 0``. Its rules, which a plan must follow to be exported:

 - *one bucket a strategy*: a sequence runs under the strategy of the bucket j with b_{j+1} < length <= b_j;
 - *the longest is home*: strategy 0 has the longest bucket, makes and keeps parameters and optimizer, runs last;
 - *rising*: strategies 1 ... n - 1 run first, with the buckets n - 1 ... 1: the shortest first;
 - *even*: dp tp pp is the number of GPUs, pp divides the layers, b_0 is the sequence length.

The runtime packs by itself: sequences of a bucket, longest first, each pack filled greedily up to b_j; pack i goes
to replica i mod dp, packs beyond a multiple of dp are dropped, and a bucket with fewer packs than dp is replaced
by a dummy batch. A batch needs a sequence in the shortest bucket. So an export carries the strategies, the buckets
and the order, and ``document.DispatchFile`` carries the packing for a loader that keeps it.

Source: ccchengff/HotSPa-AE 941a18d (artefact of HotSPa, SOSP 2024), hotspa/llama_hot_switch.py
(read_ds_parallel_config, Bucket, sort_and_pack_for_global_batch, test_switch, run_plan),
hotspa/ds_parallel_config/generate_llama_3d_config.py (the fields), hotspa/scripts/llama_hot_switch.sh (arguments).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.lengths import MAX_QUANTA, quantum_problem
from milpplan.lengths.candidates import sized
from milpplan.lengths.cost_tables import typical_pipeline
from milpplan.lengths.dispatch.turn_batches import batch_tables, chosen_candidates, step_problem
from milpplan.lengths.document import Degrees
from milpplan.lengths.records import LengthsResult
from milpplan.lengths.tabled import (
    Group,
    GroupedPlan,
    Int64Array,
    Kind,
    Packing,
    Strategy,
    arranged,
    check,
)
from milpplan.lengths.tabled.construction import constructed
from milpplan.lengths.tabled.local_search import KindTimes
from milpplan.lengths.tabled.step_plan import tour_time_ns
from milpplan.problem import GroupedQueryAttention, ModelSpec, Problem
from milpplan.problem.model import Mixer
from milpplan.units import percent_text

SCRIPT = "hotspa.sh"


@dataclass(frozen=True, slots=True)
class HotSPaLaunch:
    """Strategies in the runtime's order (home first), its bucket boundaries, and files by name."""

    strategies: tuple[str, ...]
    bucket_sizes: tuple[int, ...]
    files: Mapping[str, str]


def parallel_config(degrees: Degrees, num_layers: int) -> dict[str, Any]:
    """Build one strategy's file: the splits and copies of every tensor, and its GPUs.

    GPU ``stage dp tp + replica tp + rank`` has the tensor-parallel ``rank`` of a stage: devices of a stage are
    consecutive, a batch is split over replicas (dimension 0), column-parallel weights over dimension 1 and
    row-parallel ones over dimension 0. ZeRO (states sharded over replicas) goes with more than one replica.
    """
    dp, tp, pp = degrees.dp, degrees.tp, degrees.pp
    stage_gpus = dp * tp
    stages = [list(range(stage * stage_gpus, (stage + 1) * stage_gpus)) for stage in range(pp)]

    def tensor(stage: int, split: dict[str, list[int]], copies: int, kind: str = "variable") -> dict[str, Any]:
        return {"split": split, "dup": [copies], "device_group_union": [stages[stage]], "type": kind}

    def block(stage: int) -> dict[str, Any]:
        columns, rows = tensor(stage, {"1": [tp]}, dp), tensor(stage, {"0": [tp]}, dp)
        first = stage * num_layers // pp
        return {
            "range": [first, first + num_layers // pp - 1],
            "layernorm1": tensor(stage, {}, stage_gpus),
            "attn": {"qkv": columns, "dense": rows},
            "layernorm2": tensor(stage, {}, stage_gpus),
            "mlp": {"dense_h_to_4h": columns, "dense_4h_to_h": rows},
        }

    blocks = [block(stage) for stage in range(pp)]
    return {
        "zero": dp > 1,
        "devices": list(range(stage_gpus * pp)),
        "input": tensor(0, {"0": [dp]}, tp, "placeholder"),
        "llama": {
            "wte": tensor(0, {"0": [tp]}, dp),
            "wpe": tensor(0, {}, stage_gpus),
            "blocks": {f"blocks{layers['range'][0]}-{layers['range'][1]}": layers for layers in blocks},
            "layernorm_final": tensor(pp - 1, {}, stage_gpus),
        },
        "lm_head": tensor(pp - 1, {"1": [tp]}, dp),
        "label": tensor(pp - 1, {"0": [dp]}, tp, "placeholder"),
    }


def exported(plan: GroupedPlan, layouts: Mapping[str, Degrees], num_layers: int) -> HotSPaLaunch:
    """Build the configuration of a plan that follows the runtime's rules; ``layouts`` by the strategies' names.

    The length to which the data set truncates, b_0, is that of the plan's longest sequence.

    Raises:
        InvalidInputError: a strategy without a layout, or a layout that does not fit the model or the GPUs.
        IllegalPlanError: the plan breaks a rule of the runtime; ``as_buckets`` makes one that does not.
    """
    order = _by_length(plan)
    ends = [_longest(plan, group) for group in order]
    shortest = [int(plan.problem.lengths[np.flatnonzero(group.counts)[0]]) for group in order]
    for longer, shorter in zip(range(len(order) - 1), range(1, len(order)), strict=True):
        if shortest[longer] <= ends[shorter]:
            raise _broken(
                f"The strategy {_name(plan, order[shorter])} runs sequences of {ends[shorter]} tokens, "
                f"{_name(plan, order[longer])} of {shortest[longer]}.",
                "one bucket a strategy: a sequence's length alone says where it runs",
            )
    home = order[0].strategy
    if plan.home != home or plan.order != tuple(group.strategy for group in reversed(order)):
        raise _broken(
            f"The home is {plan.problem.strategies[plan.home].name} and the order {' -> '.join(plan.names)}.",
            "rising, the longest last and at home",
        )
    names = [_name(plan, group) for group in order]
    # The runtime numbers the home first, then the other strategies as they run.
    names = [names[0], *reversed(names[1:])]
    files = {}
    for name in names:
        degrees = _checked_layout(plan, layouts, name, num_layers)
        files[_path(degrees)] = json.dumps(parallel_config(degrees, num_layers), indent=4) + "\n"
    sizes = (*ends, 0)
    paths = [_path(layouts[name]) for name in names]
    if len(set(paths)) < len(paths):
        raise IllegalPlanError(
            f"Two strategies of the plan have one layout: {', '.join(paths)}.",
            "Layouts that differ expected.",
            "Run both as one strategy.",
        )
    files[SCRIPT] = _script(paths, sizes, len(plan.problem.strategies[home].replicas), layouts[names[0]])
    return HotSPaLaunch(tuple(names), sizes, files)


def as_buckets(plan: GroupedPlan) -> GroupedPlan:
    """Change the plan as little as the runtime's rules need, packed and simulated.

    Groups are ordered by their longest sequences; boundaries between them move the fewest tokens. Home and order
    are the runtime's. The time shows the cost of its rules (without its own packing).

    Raises:
        IllegalPlanError: replicas of a strategy differ, or no packing was found.
    """
    problem = plan.problem
    groups = _by_length(plan)[::-1]
    boundaries = _boundaries(plan, groups)
    groups_in_order: list[Group] = []
    for group, first, end in zip(groups, (0, *boundaries), (*boundaries, problem.lengths.size), strict=True):
        counts = np.zeros_like(problem.counts)
        counts[first:end] = problem.counts[first:end]
        if counts.any():
            groups_in_order.append(_repacked(plan, group, counts))
    order = tuple(group.strategy for group in groups_in_order)
    times = {group.strategy: group.time_ns for group in groups_in_order}
    total = tour_time_ns(problem, order[-1], order, times)
    bucket_plan = GroupedPlan(problem, order[-1], tuple(groups_in_order), total)
    check(bucket_plan)
    return bucket_plan


def _boundaries(plan: GroupedPlan, groups: Sequence[Group]) -> tuple[int, ...]:
    """Return first indices of the lengths of every group but the first: fewest tokens moved, all where they fit.

    Dynamic program: cost[i] is the minimum for the groups so far with all lengths before i.
    """
    lengths, counts = plan.problem.lengths, plan.problem.counts
    number = lengths.size
    cost = np.full(number + 1, np.inf)
    cost[0] = 0.0
    choices = []
    for group in groups:
        fits = plan.problem.strategies[group.strategy].holds(lengths)
        moved = np.where(fits, (counts - group.counts) * lengths, np.inf)
        sums = np.concatenate([[0.0], np.cumsum(np.where(fits, moved, 0.0))])
        # Lengths that do not fit are the longest, so no interval may reach beyond the first of them.
        num_fitting = int(fits.sum())
        table = cost[None, :] + sums[:, None] - sums[None, :]
        ends = np.arange(number + 1)
        table[ends[:, None] < ends[None, :]] = np.inf
        table[(ends[:, None] > num_fitting) & (ends[:, None] > ends[None, :])] = np.inf
        choices.append(table.argmin(axis=1))
        cost = table.min(axis=1)
    # The last group holds the longest sequence, and could hold all.
    assert np.isfinite(cost[number])
    boundaries = []
    end = number
    for choice in reversed(choices):
        end = int(choice[end])
        boundaries.append(end)
    return tuple(boundaries[-2::-1])


def _repacked(plan: GroupedPlan, group: Group, counts: Int64Array) -> Group:
    """Pack other sequences in the group; only for replicas of one kind."""
    kinds = plan.problem.kinds_of(group.strategy)
    replicas = constructed(KindTimes(kinds[0]), kinds[0].num_replicas, counts) if len(kinds) == 1 else None
    if replicas is None:
        name = plan.problem.strategies[group.strategy].name
        raise IllegalPlanError(
            f"The sequences of the bucket of {name} were not packed on replicas of {len(kinds)} kinds.",
            "One kind of replicas with room for them expected.",
            "Run the plan from its JSON.",
        )
    return Group(group.strategy, (Packing(kinds[0], tuple(replicas)),))


def _by_length(plan: GroupedPlan) -> list[Group]:
    """Sort the groups, longest sequences first."""
    return sorted(plan.groups, key=lambda group: (-_longest(plan, group), -_mean(plan, group)))


def _longest(plan: GroupedPlan, group: Group) -> int:
    """Return the longest length of a group."""
    return int(plan.problem.lengths[np.flatnonzero(group.counts)[-1]])


def _mean(plan: GroupedPlan, group: Group) -> float:
    """Return the mean length of a group."""
    counts = group.counts
    return float(counts @ plan.problem.lengths) / float(counts.sum())


def _name(plan: GroupedPlan, group: Group) -> str:
    """Return the name of a group's strategy."""
    return plan.problem.strategies[group.strategy].name


def _path(degrees: Degrees) -> str:
    """Return the path of a strategy's file."""
    gpus = degrees.dp * degrees.tp * degrees.pp
    return f"ds_parallel_config/gpus{gpus}/dp{degrees.dp}_tp{degrees.tp}_pp{degrees.pp}.json"


def _broken(seen: str, rule: str) -> IllegalPlanError:
    """Build the error for a plan that breaks a rule of the runtime."""
    return IllegalPlanError(
        seen, f"HotSPa's runtime allows only: {rule}.", "Export as_buckets(plan), or run the plan from its JSON."
    )


def _checked_layout(plan: GroupedPlan, layouts: Mapping[str, Degrees], name: str, num_layers: int) -> Degrees:
    """Return the layout of a strategy, or refuse a layout that the runtime cannot run."""
    if name not in layouts:
        raise InvalidInputError(f"The strategy {name} has no layout.", "Expected dp, tp and pp of every strategy.")
    degrees = layouts[name]
    strategy = next(candidate for candidate in plan.problem.strategies if candidate.name == name)
    stages = {pipeline.num_stages for pipeline in strategy.replicas}
    gpus = {layouts[other].dp * layouts[other].tp * layouts[other].pp for other in plan.names if other in layouts}
    if degrees.dp != len(strategy.replicas) or stages != {degrees.pp} or len(gpus) > 1:
        raise InvalidInputError(
            f"Strategy {name} has {len(strategy.replicas)} replicas of {sorted(stages)} stages, its layout "
            f"dp={degrees.dp} and pp={degrees.pp}; the layouts use {sorted(gpus)} GPUs.",
            "The same numbers, and one number of GPUs, expected.",
        )
    if num_layers < 1 or num_layers % degrees.pp or degrees.cp > 1 or degrees.ep > 1:
        raise InvalidInputError(
            f"Strategy {name} has pp={degrees.pp}, cp={degrees.cp}, ep={degrees.ep} for {num_layers} layers.",
            "HotSPa's runtime splits layers evenly and knows dp, tp and pp only.",
        )
    return degrees


def _script(paths: Sequence[str], sizes: Sequence[int], home_replicas: int, degrees: Degrees) -> str:
    """Build the runtime's command; model and data come as the script's own arguments."""
    gpus = home_replicas * degrees.tp * degrees.pp
    return "\n".join(
        (
            "#!/usr/bin/env bash",
            "# HotSPa's runtime under the strategies of a plan. Run it where llama_hot_switch.py is; model, data",
            "# and batch are its arguments: --global_batch_size, --num_hidden_layers, --json_file, ...",
            "set -euo pipefail",
            f'mpirun -np {gpus} --hostfile "${{HOSTFILE:-hostfile}}" -x PATH -x LD_LIBRARY_PATH -x PYTHONPATH \\',
            "    python3 llama_hot_switch.py \\",
            f"    --num_strategy={len(paths)} \\",
            f'    --ds_parallel_config "{" ".join(paths)}" \\',
            f'    --bucket_sizes "{" ".join(str(size) for size in sizes)}" \\',
            f"    --seq_length {sizes[0]} \\",
            '    --hot_switch "$@"' if len(paths) > 1 else '    "$@"',
            "",
        )
    )


@dataclass(frozen=True, slots=True)
class HotSPaStep:
    """The files and strategies of a launch, and notes on what the files cannot express."""

    launch: HotSPaLaunch
    notes: tuple[str, ...]


def check_model(model: ModelSpec) -> None:
    """Refuse a model that the runtime cannot train.

    Raises:
        InvalidInputError: it has experts, learned positions, LayerNorm, feed-forward blocks without gates, or
            attention that is not plain grouped-query attention.
    """
    mlps, attentions = [run.mlp for run in model.layers], [run.attention for run in model.layers]
    unsupported = {
        "routed experts": model.has_experts,
        "learned positions": model.learned_positions,
        "LayerNorm": model.norm != "rmsnorm",
        "attention other than grouped-query": any(block.type != "gqa" for block in attentions),
        "biases, sinks, windows or norms in attention": any(map(_is_special, attentions)),
        "blocks without gates": not all(getattr(block, "gated", False) for block in mlps),
    }
    present = [name for name, is_present in unsupported.items() if is_present]
    if present:
        raise InvalidInputError(
            f"{model.name} has {' and '.join(present)}.",
            "Expected a model like LLaMA: HotSPa's runtime builds no other (llama_hot_switch.py).",
            "Export another model, or dispatch batches from the JSON of the step.",
        )


def _is_special(attention: Mixer) -> bool:
    return isinstance(attention, GroupedQueryAttention) and bool(
        attention.qkv_bias
        or attention.output_bias
        or attention.sinks
        or attention.gate_dim > 0
        or attention.blocks
        or attention.sliding_window
        or attention.v_head_dim
        or attention.keys_are_values
        or attention.qk_norm != "none"
    )


def plan_on_tables(problem: Problem, result: LengthsResult) -> tuple[GroupedPlan, dict[str, Degrees]]:
    """Return a step of strategies in turn as a plan on tables of typical times, and the layouts of its strategies.

    Raises:
        InvalidInputError: the strategies do not belong to the problem.
    """
    quantum_job = quantum_problem(problem, result.alignment)
    members = sized(quantum_job, chosen_candidates(quantum_job, result), MAX_QUANTA)
    pool = batch_tables(quantum_job, result, members)
    names = [member.candidate.name for member in members]
    grouped = step_problem(pool, names.index(result.home))
    strategies = [
        strategy
        if pool.num_stages(member) == 1
        else Strategy.of(
            typical_pipeline(
                pool.tables[member], members[member], pool.max_quanta(member, shared_memory=len(names) > 1)
            ),
            members[member].candidate.layout.dp,
            pool.reduce_ns(member),
            strategy.name,
        )
        for member, strategy in enumerate(grouped.strategies)
    ]
    grouped = replace(grouped, strategies=tuple(strategies))
    groups = []
    for group in result.groups:
        (kind,) = grouped.kinds_of(names.index(group.strategy))
        replicas = tuple(_counted(kind, replica) for replica in group.micro_batches)
        groups.append(Group(kind.strategy, (Packing(kind, replicas),)))
    layouts = {
        member.candidate.name: Degrees(
            **{name: getattr(member.candidate.layout, name) for name in Degrees.model_fields}
        )
        for member in members
    }
    return arranged(grouped, groups), layouts


def _counted(kind: Kind, replica: tuple[tuple[int, ...], ...]) -> Int64Array:
    """Return micro-batches as counts [v, n] of the kind's lengths."""
    width = len(kind.lengths)
    rows = [np.bincount(np.searchsorted(kind.lengths, micro_batch), minlength=width) for micro_batch in replica]
    return np.array(rows, dtype=np.int64).reshape(-1, width)


def hotspa_step(problem: Problem, result: LengthsResult) -> HotSPaStep:
    """Return the configuration of a step of strategies in turn that ``solve_lengths`` found for a problem.

    Raises:
        InvalidInputError: degrees or heterogeneous replicas run side by side, sequences are padded, or the model
            is not like LLaMA.
        IllegalPlanError: a strategy has parallelism that the runtime does not support, or two have one layout.
    """
    check_model(problem.model)
    for group in result.groups:
        layout = group.plan.layout
        unsupported = [name for name in ("cp", "ep") if getattr(layout, name) > 1]
        if unsupported and not result.turns:
            raise IllegalPlanError(
                f"The strategy {group.strategy} has {' and '.join(unsupported)} above 1.",
                "Expected tp, pp and dp only: HotSPa's runtime knows no other parallelism.",
                "Solve again with " + " ".join(f"--fix {name}=1" for name in unsupported) + ".",
            )
    plan, layouts = plan_on_tables(problem, result)
    buckets = as_buckets(plan)
    launch = exported(buckets, layouts, problem.model.num_layers)
    excess = percent_text(max(0.0, buckets.time_ns / plan.time_ns - 1.0))
    notes = [
        f"By the runtime's rules, a bucket a strategy, the step takes {excess} longer. It packs by itself, too: "
        "greedily, packs dealt out in turn, and those beyond a multiple of dp dropped."
    ]
    replayed = [group.strategy for group in result.groups if group.strategy.endswith(("selective", "full"))]
    if replayed:
        notes.append(
            f"{' and '.join(replayed)} recompute{'s' if len(replayed) == 1 else ''} activations, which these files"
            " cannot say (solve with --fix recompute=none for a step that needs none)."
        )
    if launch.strategies != (result.home, *result.order[:-1]):
        notes.append(
            "The runtime runs its home last: the step's order or home is another, so it takes longer there."
        )
    return HotSPaStep(launch, tuple(notes))
