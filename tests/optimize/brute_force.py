"""Every plan of a small problem, costed by the simulator's own functions: what the optimiser is held to.

Nothing here knows menus, bounds or programs. Plans that share a layout are evaluated together
(``stage_options`` and ``step_times_ns``); ``test_optimality`` shows that this equals ``simulate``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np

from milpplan import Layout, Plan, Recompute, VirtualStage
from milpplan.optimize.space.enumerate_layouts import kept_rules, layout_space
from milpplan.optimize.space.rules import EXECUTION
from milpplan.problem import Problem
from milpplan.simulation import (
    IntArray,
    LayoutColumns,
    LayoutCosts,
    RankCosts,
    StageOptions,
    cluster_costs,
    durations,
    host_capacity_bytes,
    plan_stages,
    rank_capacities,
    rank_memory,
    rank_types,
    stage_options,
    step_times_ns,
    usable_memory_bytes,
)
from milpplan.simulation.layout_costs import layout_costs
from milpplan.simulation.pipeline.work_orders import live_profiles


def recompute_choices(modes: Sequence[str], count: int) -> list[tuple[int, int]]:
    """(full, selective) of a virtual stage with ``count`` layers that use only the given modes."""
    return [
        (full, selective)
        for full in range(count + 1)
        for selective in range(count + 1 - full)
        if ("full" in modes or not full)
        and ("selective" in modes or not selective)
        and ("none" in modes or full + selective == count)
    ]


def is_even(problem: Problem, layout: Layout) -> bool:
    """Whether the space wants virtual stages of nearly equal length."""
    return layout.vpp > 1 and problem.interleaved_layers == "even"


def layer_range(num_layers: int, stages: int, stage: int, even: bool) -> tuple[int, int]:
    """(fewest, most) layers of a virtual stage of the free space: at least one, or none in the first and the
    last; with ``even`` floor or ceil of the mean, in the ends any number up to ceil."""
    is_end = stage in (0, stages - 1)
    if not even:
        return 0 if is_end else 1, num_layers
    return 0 if is_end else max(1, num_layers // stages), max(1, -(-num_layers // stages))


@cache
def splits(num_layers: int, stages: int, even: bool) -> tuple[tuple[int, ...], ...]:
    """Layers of each virtual stage, for every way the free space allows."""

    def rest(stage: int, left: int) -> Iterator[tuple[int, ...]]:
        fewest, most = layer_range(num_layers, stages, stage, even)
        if stage == stages - 1:
            if fewest <= left <= most:
                yield (left,)
            return
        for count in range(fewest, min(most, left) + 1):
            for tail in rest(stage + 1, left - count):
                yield (count, *tail)

    found = tuple(rest(0, num_layers))
    if even:
        # Of the inner virtual stages the larger ones come first.
        return tuple(one for one in found if list(one[1:-1]) == sorted(one[1:-1], reverse=True))
    return found


def uniform_split(num_layers: int, stages: int) -> tuple[int, ...]:
    """ceil(L / J) layers in every virtual stage, what is left in the last."""
    each = -(-num_layers // stages)
    return (each,) * (stages - 1) + (num_layers - each * (stages - 1),)


def may_start(problem: Problem, split: Sequence[int]) -> bool:
    """Whether each virtual stage with layers starts with one that has its own keys, or needs none."""
    for number, count in enumerate(split):
        if count and number:
            attention = problem.model.kinds[problem.model.layer_kinds[sum(split[:number])]].attention
            if getattr(getattr(attention, "indexer", None), "sharing", "") == "takes":
                return False
    return True


def num_plans(problem: Problem, layouts: Iterable[Layout]) -> int:
    """Plans of the free space in some layouts."""
    modes, layers = problem.recompute_modes, problem.model.num_layers
    total = 0
    for layout in layouts:
        ways = [1] + [0] * layers
        stages = layout.num_virtual_stages
        for j in range(stages):
            least, most = layer_range(layers, stages, j, is_even(problem, layout))
            ways = [
                sum(ways[n - k] * len(recompute_choices(modes, k)) for k in range(least, min(n, most) + 1))
                for n in range(layers + 1)
            ]
        total += ways[layers]
    return total


@dataclass(frozen=True, slots=True)
class Costed:
    """All plans of a layout: layers, full and selective counts [B, J], step time and peak memory, on the device
    and on the host [B]."""

    layout: Layout
    layers: IntArray
    full: IntArray
    selective: IntArray
    step_time_ns: IntArray
    peak_bytes: IntArray
    host_bytes: IntArray

    def plan(self, row: int) -> Plan:
        """One of them."""
        return plan_of(self.layout, self.layers[row], self.full[row], self.selective[row])


def plan_of(layout: Layout, layers: IntArray, full: IntArray, selective: IntArray) -> Plan:
    """A plan from counts."""
    stages, start = [], 0
    for count, whole, part in zip(layers.tolist(), full.tolist(), selective.tolist(), strict=True):
        recompute = Recompute(full=whole, selective=part)
        stages.append(VirtualStage(layers=(start, start + count), recompute=recompute))
        start += count
    return Plan(layout=layout, virtual_stages=tuple(stages))


def _choices(problem: Problem, layout: Layout) -> Iterator[list[list[tuple[int, int, int]]]]:
    """For every split, the (layers, full, selective) of each virtual stage; their product are the plans."""
    layers, modes, stages = problem.model.num_layers, problem.recompute_modes, layout.num_virtual_stages
    if problem.space.kind == "uniform":
        split = uniform_split(layers, stages)
        for mode in modes if may_start(problem, split) else ():
            yield [[(n, n * (mode == "full"), n * (mode == "selective"))] for n in split]
        return
    for split in filter(partial(may_start, problem), splits(layers, stages, is_even(problem, layout))):
        yield [[(n, *choice) for choice in recompute_choices(modes, n)] for n in split]


def costed_layouts(problem: Problem, layouts: Sequence[Layout]) -> Iterator[Costed]:
    """Every plan of the space in each layout. The layouts' constants are computed together, in a tenth of the
    time; ``tests.simulation.test_layout_costs`` shows that they are those of each alone."""
    if layouts:
        table = cluster_costs(problem, LayoutColumns.of(layouts))
        for row, layout in enumerate(layouts):
            if any(_choices(problem, layout)):
                yield costed_plans(problem, layout, table.at(row))


def costed_plans(problem: Problem, layout: Layout, costs: RankCosts) -> Costed:
    """Every plan of the space in one layout with these constants."""
    stages = layout.num_virtual_stages
    tables, matrices, peaks, hosts = [], [], [], []
    known: dict[Any, StageOptions] = {}
    for choices in _choices(problem, layout):
        options, start = [], 0
        for j, choice in enumerate(choices):
            rank, crossing_ns = layout.rank_of(j), costs.crossing_ns(j)
            key = (start, tuple(choice), j == 0, j == stages - 1, costs.type_of(rank), crossing_ns)
            if key not in known:
                known[key] = _options(problem, costs.of_rank(rank), *key[:4], crossing_ns)
            options.append(known[key])
            start += choice[0][0]
        picked = np.array(list(product(*(range(len(choice)) for choice in choices))), dtype=np.int64)
        tables.append(np.stack([np.array(c)[picked[:, j]] for j, c in enumerate(choices)], axis=1))
        matrices.append(np.stack([o.terms[:, picked[:, j]].T for j, o in enumerate(options)], axis=2))
        peaks.append(_peaks(problem, layout, costs, options, picked))
        hosts.append(_host_peaks(problem, layout, options, picked))
    table = np.concatenate(tables)
    times = step_times_ns(layout, costs, np.concatenate(matrices))
    memory = np.concatenate(peaks), np.concatenate(hosts)
    return Costed(layout, table[..., 0], table[..., 1], table[..., 2], times, *memory)


def _options(
    problem: Problem,
    costs: LayoutCosts,
    start: int,
    choice: Sequence[tuple[int, int, int]],
    is_first: bool,
    is_last: bool,
    crossing_ns: int,
) -> StageOptions:
    kinds = problem.model.layer_kinds[start : start + choice[0][0]]
    full, selective = (np.array([c[i] for c in choice], dtype=np.int64) for i in (1, 2))
    return stage_options(
        costs, kinds, full, selective, is_first=is_first, is_last=is_last, crossing_ns=crossing_ns
    )


def _peaks(
    problem: Problem, layout: Layout, costs: RankCosts, options: list[StageOptions], picked: IntArray
) -> IntArray:
    """Peak bytes of the fullest rank of every plan; what a rank has less than the roomiest node type counts as
    filled."""
    roomiest, capacities = usable_memory_bytes(problem), rank_capacities(problem, layout)
    peak = np.zeros(len(picked), dtype=np.int64)
    profiles = live_profiles(layout.schedule, layout.pp, layout.num_micro_batches, layout.vpp)
    for rank, rows in enumerate(profiles):
        own = layout.rank_stages[rank]
        fixed = sum(int(options[j].state_bytes.sum()) for j in own) + int(costs.of_rank(rank).buffer_bytes)
        fixed += roomiest - capacities[rank]
        for running, counts in rows:
            j = own[running]
            total = fixed + options[j].transient_bytes[picked[:, j]]
            for count, held in zip(counts[: len(own)], own, strict=True):
                total = total + count * options[held].kept_bytes[picked[:, held]]
            # With split backwards as many counts follow of what waits for weight gradients.
            for count, held in zip(counts[len(own) :], own, strict=False):
                total = total + count * options[held].deferred_bytes
            peak = np.maximum(peak, total)
    return peak


def _host_peaks(problem: Problem, layout: Layout, options: list[StageOptions], picked: IntArray) -> IntArray:
    """Most bytes on the host of any rank of every plan, of a node type with less than the roomiest as above."""
    roomiest, types = host_capacity_bytes(problem), rank_types(problem, layout)
    peak = np.zeros(len(picked), dtype=np.int64)
    profiles = live_profiles(layout.schedule, layout.pp, layout.num_micro_batches, layout.vpp)
    for rank, rows in enumerate(profiles):
        own = layout.rank_stages[rank]
        for _, counts in rows:
            total = np.full(len(picked), sum(options[j].host_state_bytes for j in own))
            total += roomiest - problem.node_types[types[rank]].host_bytes
            for count, held in zip(counts[: len(own)], own, strict=True):
                total = total + count * options[held].host_kept_bytes[picked[:, held]]
            peak = np.maximum(peak, total)
    return peak


def constants(problem: Problem, layout: Layout) -> LayoutCosts:
    """Constants of one layout."""
    return layout_costs(problem, LayoutColumns.of([layout])).at(0)


def time_and_peak(problem: Problem, costs: LayoutCosts, plan: Plan) -> tuple[int, int]:
    """Step time in nanoseconds and peak memory in bytes of a plan whose layout has these constants: those of
    ``simulate``, which would compute the constants again for every plan of the layout."""
    stages = plan_stages(costs, problem.model.layer_kinds, plan)
    peak = max(rank.peak_bytes for rank in rank_memory(plan.layout, costs, stages))
    return int(step_times_ns(plan.layout, costs, durations(stages))), peak


@dataclass(frozen=True, slots=True)
class Best:
    """The optimum: step time weighed by (largest batch / batch), its plan, and its step time."""

    value: float
    plan: Plan
    step_time_ns: int


def brute_force(problem: Problem, layouts: Sequence[Layout] | None = None) -> Best | None:
    """The plan of least step time per token among all that fit and meet the deadline; None without any."""
    if layouts is None:
        columns = layout_space(problem).columns
        layouts = [columns.at(row) for row in range(len(columns))]
    capacity = usable_memory_bytes(problem)
    best: Best | None = None
    for costed in costed_layouts(problem, layouts):
        layout = costed.layout
        ok = (costed.peak_bytes <= capacity) & (costed.host_bytes <= host_capacity_bytes(problem))
        ok &= costed.step_time_ns <= deadline_ns(problem, layout)
        if not ok.any():
            continue
        row = int(np.where(ok, costed.step_time_ns, np.iinfo(np.int64).max).argmin())
        value = int(costed.step_time_ns[row]) * weight(problem, layout)
        if best is None or value < best.value:
            best = Best(value, costed.plan(row), int(costed.step_time_ns[row]))
    return best


def weight(problem: Problem, layout: Layout) -> float:
    """What a nanosecond of this layout's step costs."""
    job = problem.job
    if job.objective == "gpu_hours":
        assert job.training_tokens is not None
        steps = job.training_tokens / (layout.global_batch_size * job.sequence_length)
        return layout.num_gpus * steps / 3600e9
    return max(job.global_batch_values) / layout.global_batch_size


def deadline_ns(problem: Problem, layout: Layout) -> float:
    """Longest step that meets the deadline; one that meets it exactly must not be lost to rounding."""
    job = problem.job
    if job.deadline_s is None or job.training_tokens is None:
        return float("inf")
    steps = job.training_tokens / (layout.global_batch_size * job.sequence_length)
    return job.deadline_s / steps * 1e9 * (1.0 + 1e-12)


def naive_layouts(problem: Problem) -> list[Layout]:
    """Legal layouts found by trying every combination of values, in every order of the ranks, those dominated by
    their twins included."""
    space, job, most = problem.space, problem.job, problem.model.num_layers + 2
    found = []
    for gpus, batch in product(job.num_gpus_values, job.global_batch_values):
        degrees = range(1, gpus + 1)
        for tp, cp, pp in product(space.tp or degrees, space.cp or degrees, space.pp or degrees):
            if gpus % (tp * cp * pp):
                continue
            dp = gpus // (tp * cp * pp)
            if batch % dp or (space.dp and dp not in space.dp):
                continue
            for micro, vpp in product(
                space.micro_batch_size or range(1, batch + 1),
                space.vpp or range(1, most + 1),
            ):
                if batch // dp % micro or pp * vpp > most or not vpp_is_offered(problem, pp, vpp):
                    continue
                base = {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "vpp": vpp, "micro_batch_size": micro}
                base["global_batch_size"] = batch
                found += _switches(problem, base)
    switched = legal(problem, found)
    orders = problem.space.rank_order
    return legal(problem, [one.model_copy(update={"rank_order": order}) for one in switched for order in orders])


def legal(problem: Problem, layouts: list[Layout]) -> list[Layout]:
    """Those that break no rule; all are judged together, in a hundredth of the time."""
    if not layouts:
        return []
    kept = np.all(list(kept_rules(problem, LayoutColumns.of(layouts)).values()), axis=0)
    return [layout for layout, good in zip(layouts, kept.tolist(), strict=True) if good]


def vpp_is_offered(problem: Problem, pp: int, vpp: int) -> bool:
    """Whether the space has this number of virtual stages a rank: by default those that make the largest
    chunk smaller than any smaller number does."""
    if problem.space.vpp is not None or problem.space.vpp_values == "all":
        return True
    layers = problem.model.num_layers
    return all(-(-layers // (pp * vpp)) < -(-layers // (pp * fewer)) for fewer in range(1, vpp))


def _switches(problem: Problem, base: dict[str, int]) -> Iterator[Layout]:
    space, degrees = problem.space, range(1, base["tp"] * base["cp"] * base["dp"] + 1)
    free = {
        "ulysses": range(1, base["cp"] + 1),
        "dp_replicate": range(1, base["dp"] + 1),
        "recompute_modules": problem.module_sets,
        "offload_modules": problem.offload_sets,
    }
    switches = [
        dict(zip(EXECUTION, values, strict=True))
        for values in product(*(getattr(space, n) or free[n] for n in EXECUTION))
    ]
    has_experts = any(run.mlp.type == "moe" for run in problem.model.layers)
    one = (1,)
    for ep, etp, sp, zero, schedule, grad, param, execution in product(
        space.ep or (degrees if has_experts else one),
        space.etp or (range(1, base["tp"] + 1) if has_experts else one),
        space.sequence_parallel,
        space.zero_stage,
        problem.schedules,
        space.overlap_grad_reduce,
        space.overlap_param_gather,
        switches,
    ):
        if base["tp"] % etp == 0 and (zero <= 1 or base["pp"] == 1 or space.zero_pipeline):
            yield Layout(
                **base, ep=ep, etp=etp, sequence_parallel=sp, zero_stage=zero, schedule=schedule,
                overlap_grad_reduce=grad, overlap_param_gather=param, **execution,
            )  # fmt: skip


def with_more_overlap(layout: Layout) -> list[Layout]:
    """The layout's twins that overlap the gradient reduction, and the parameter gather as well: where one of them
    is legal, the layout need not be."""
    return [
        layout.model_copy(update={"overlap_grad_reduce": True, "overlap_param_gather": gather})
        for gather in (False, True)
    ]
