"""Exact step times and memory of many uniform plans at a time, equal to those of ``simulate``.

A uniform plan is a layout and a recompute mode. Every virtual stage holds ceil(L / J) layers, and the last stages
hold the rest. So a plan has few distinct virtual stages (``stage_classes``), whose costs are computed for all
layouts together. Plans that differ only in the gathers before and the reductions after the work items share the
work items. Layouts with the same schedule, ranks and chunks go through the schedule in lockstep (``lockstep``);
other schedules are swept over their graphs.

Gathers: without them every first forward j starts at S_j. The gather of rank 0 ends at o_0 and shifts all
forwards. If no other gather ends after o_0 + S_j, no gather delays a forward, and the step is o_0 longer. Plans
with a gather that ends later are simulated again with the ends of all their gathers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Literal

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.problem import (
    EXPERT_DISPATCHES,
    MODULE_SETS,
    OFFLOAD_SETS,
    SCHEDULES,
    V_SCHEDULES,
    Layout,
    MixtureOfExperts,
    ModelSpec,
    Plan,
    Problem,
    Range,
    Recompute,
    Schedule,
    VirtualStage,
)
from milpplan.simulation import (
    BoolArray,
    CostTable,
    IntArray,
    LayoutColumns,
    LayoutCosts,
    StageOptions,
    ascending,
    simulate,
    stage_options,
    unique_rows,
    usable_memory_bytes,
)
from milpplan.simulation.bulk.lockstep import Work, repeats, work_ends
from milpplan.simulation.bulk.peak_memory import chunk_classes, peak_bytes
from milpplan.simulation.layers import Term
from milpplan.simulation.layout_columns import hosts_apart, priced_sets
from milpplan.simulation.layout_costs import layout_costs
from milpplan.simulation.network import placement
from milpplan.simulation.pipeline.step_graph import (
    StepGraph,
    first_starts,
    overlapped_reductions,
    step_time_ns,
    structure,
)
from milpplan.simulation.simulator import check_plan

Mode = Literal["none", "selective", "full"]
MODES = ("none", "selective", "full")
CHUNK = 100_000
"""Number of layouts that are simulated at a time."""
GROUP_KEYS = ("schedule", "pp", "vpp")
"""Fields that layouts in lockstep share."""
OVERLAPS = ((False, False), (False, True), (True, False), (True, True))
"""Values of (``overlap_param_gather``, ``overlap_grad_reduce``)."""
AROUND = (
    *(Term.FORWARD, Term.BACKWARD, Term.GATHER, Term.REDUCE, Term.OPTIMIZER),
    *(Term.LEAD, Term.TRAIL, Term.FIRST, Term.LAST),
)
"""Terms that decide on gathers, reductions and updates."""
_IS_V = np.array([name in V_SCHEDULES for name in SCHEDULES])
_GPIPE, _INTERLEAVED = SCHEDULES.index("gpipe"), SCHEDULES.index("interleaved")

Member = tuple[tuple[int, ...], bool, bool]
"""Class of a virtual stage: kinds of its layers, True for the first virtual stage, True for the last."""


def even_chunks(num_layers: int, num_stages: int) -> list[tuple[int, int]]:
    """Split layers into the virtual stages of a uniform plan: ceil(L / J) layers each, the last stages the rest.

    Returns:
        First layer and end of every virtual stage.
    """
    size = -(-num_layers // num_stages)
    return [(min(j * size, num_layers), min((j + 1) * size, num_layers)) for j in range(num_stages)]


def has_uniform_plan(model: ModelSpec, num_stages: int) -> bool:
    """Return True if the layers fill all virtual stages of a uniform plan but the last, and no stage starts with a
    layer that takes the keys of the layer before."""
    size = -(-model.num_layers // num_stages)
    starts = range(size, size * num_stages, size)
    return size * (num_stages - 1) <= model.num_layers and model.taking_layers.isdisjoint(starts)


def uniform_plan(problem: Problem, layout: Layout, mode: str) -> Plan:
    """Build the uniform plan of a layout, with the same recompute mode for all layers."""
    stages = _even_stages(problem.model.num_layers, layout.num_virtual_stages, mode)
    other = tuple(stage.recompute for stage in stages) * max(0, len(layout.replica_micro_batches) - 1)
    return Plan(layout=layout, virtual_stages=stages, other_recompute=other)


@lru_cache(maxsize=512)
def _even_stages(num_layers: int, num_stages: int, mode: str) -> tuple[VirtualStage, ...]:
    """Build the virtual stages of a uniform plan, which many plans share."""
    stages = []
    for first, last in even_chunks(num_layers, num_stages):
        recompute = Recompute(**({mode: last - first} if mode != "none" else {}))
        stages.append(VirtualStage(layers=(first, last), recompute=recompute))
    return tuple(stages)


@dataclass(frozen=True, slots=True)
class StageClasses:
    """Classes of equal virtual stages of a uniform plan."""

    members: tuple[Member, ...]
    """The distinct virtual stages."""
    class_of: IntArray
    """[J] index in ``members`` of every virtual stage."""


@lru_cache(maxsize=512)
def stage_classes(layer_kinds: tuple[int, ...], num_stages: int) -> StageClasses:
    """Classify the virtual stages of uniform plans of J stages."""
    index_of: dict[Member, int] = {}
    class_of = np.zeros(num_stages, dtype=np.int64)
    for stage, (first, last) in enumerate(even_chunks(len(layer_kinds), num_stages)):
        member = (layer_kinds[first:last], stage == 0, stage == num_stages - 1)
        class_of[stage] = index_of.setdefault(member, len(index_of))
    class_of.flags.writeable = False
    return StageClasses(tuple(index_of), class_of)


@dataclass(frozen=True, slots=True)
class BulkSteps:
    """Results of uniform plans, arrays [n, modes] by layout and recompute mode."""

    modes: tuple[Mode, ...]
    step_time_ns: IntArray
    peak_memory_bytes: IntArray
    """Device memory of the fullest rank."""
    host_memory_bytes: IntArray
    """Host memory of the fullest rank."""
    fits: BoolArray
    """True if both fit."""


def simulate_many(
    problem: Problem, layouts: Iterable[Layout] | LayoutColumns, modes: Sequence[Mode] | None = None
) -> BulkSteps:
    """Simulate the uniform plans of many layouts; the results are those of ``simulate``.

    Args:
        problem: model, cluster and job.
        layouts: records, or columns (which are faster to build).
        modes: recompute modes to simulate each layout with; None: those of the problem's space.

    Returns:
        Step times and memory, [n, modes].

    Raises:
        IllegalPlanError: a layout is not for the problem, or cannot run; the message names the first such layout.
    """
    columns = layouts if isinstance(layouts, LayoutColumns) else LayoutColumns.of(layouts)
    chosen: tuple[Mode, ...] = problem.recompute_modes if modes is None else tuple(modes)
    if problem.other_hardware:
        return _one_by_one(problem, columns, chosen)
    _check_columns(problem, columns, chosen)
    results = np.zeros((3, len(columns), len(chosen)), dtype=np.int64)
    for start in range(0, len(columns), CHUNK):
        rows = slice(start, start + CHUNK)
        part = columns.take(np.arange(start, min(start + CHUNK, len(columns))))
        _fill_results(problem, part, chosen, layout_costs(problem, part), results[:, rows])
    return _bulk_steps(problem, chosen, results, problem.hardware.usable_bytes)


def simulate_known(
    problem: Problem, columns: LayoutColumns, modes: tuple[Mode, ...], costs: CostTable
) -> BulkSteps:
    """Simulate uniform plans as ``simulate_many`` does, with given constants and without checks.

    The layouts are of the problem's space and of a cluster with a single node type. Plans that fit leave the
    margin of the space.
    """
    results = np.zeros((3, len(columns), len(modes)), dtype=np.int64)
    _fill_results(problem, columns, modes, costs, results)
    return _bulk_steps(problem, modes, results, usable_memory_bytes(problem))


def _bulk_steps(problem: Problem, modes: tuple[Mode, ...], results: IntArray, capacity_bytes: int) -> BulkSteps:
    """Compare the memory of the results [3, n, modes] with the capacities of device and host."""
    step, device, host = results
    fits = (device <= capacity_bytes) & (host <= problem.hardware.host_bytes)
    return BulkSteps(modes, step, device, host, fits)


def _one_by_one(problem: Problem, columns: LayoutColumns, modes: tuple[Mode, ...]) -> BulkSteps:
    """Simulate the plans in turn: in a cluster of several node types ranks differ, and plans share no work."""
    reports = [
        simulate(problem, uniform_plan(problem, columns.at(row), mode))
        for row in range(len(columns))
        for mode in modes
    ]
    values = [
        (report.step_time_ns, report.peak_memory_bytes, report.host_memory_bytes, report.fits)
        for report in reports
    ]
    step, device, host, fits = np.array(values, dtype=np.int64).reshape(-1, 4).T.reshape(4, -1, len(modes))
    return BulkSteps(modes, step, device, host, fits.astype(np.bool_))


def _fill_results(
    problem: Problem, columns: LayoutColumns, modes: tuple[Mode, ...], costs: CostTable, results: IntArray
) -> None:
    """Fill ``results`` [3, n, modes]: step time, bytes on the device and on the host."""
    first, group_of = unique_rows(*(getattr(columns, name) for name in GROUP_KEYS))
    order = np.argsort(group_of, kind="stable")
    groups = np.split(order, np.cumsum(np.bincount(group_of, minlength=len(first)))[:-1])
    overlaps = 2 * columns.overlap_param_gather + columns.overlap_grad_reduce
    micro_batches = columns.num_micro_batches
    for lead, rows in zip(first, groups, strict=True):
        cases, case_of = unique_rows(costs.place[rows], micro_batches[rows])
        wanted = ascending(overlaps[rows])
        group = _Group.of(problem, columns, int(lead), costs, rows[cases], modes, micro_batches[rows[cases]])
        steps = group.steps(wanted.tolist())
        device, host = group.memory()
        results[0, rows] = steps[overlaps[rows], :, case_of]
        results[1, rows], results[2, rows] = device[:, case_of].T, host[:, case_of].T


def _taken(*chosen: tuple[CostTable, IntArray]) -> LayoutCosts:
    """Concatenate the constants of chosen layouts of several tables.

    ``parts`` stay those of the first table's layouts; the bulk simulation does not read them.
    """
    names = [field.name for field in fields(LayoutCosts) if field.name != "parts"]
    columns = {
        name: [getattr(table.distinct, name)[..., table.place[rows]] for table, rows in chosen] for name in names
    }
    joined = {
        name: parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1) for name, parts in columns.items()
    }
    return LayoutCosts(chosen[0][0].distinct.parts, **joined)


def together(tables: Sequence[CostTable], table: IntArray, rows: IntArray) -> CostTable:
    """Join layouts of several tables into a single table, which only ``simulate_known`` may read (``_taken``).

    Args:
        table: [n] index in ``tables`` of each layout.
        rows: [n] row of each layout in its table.
    """
    used: list[int] = ascending(table).tolist()
    if len(used) == 1:
        return tables[used[0]].take(rows)
    constants = np.empty(len(rows), dtype=np.int64)
    for number in used:
        in_table = table == number
        constants[in_table] = tables[number].place[rows[in_table]]
    # Representatives are in ascending order of their tables.
    first, index = unique_rows(table, constants)
    chosen = [(tables[number], rows[first[table[first] == number]]) for number in used]
    return CostTable(_taken(*chosen), index)


@dataclass(frozen=True, slots=True)
class _Group:
    """Layouts with the same schedule, ranks and chunks: x cases that differ in more than their overlaps."""

    schedule: Schedule
    num_ranks: int
    vpp: int
    costs: LayoutCosts
    classes: StageClasses
    stages: list[StageOptions]
    micro_batches: IntArray

    @staticmethod
    def of(
        problem: Problem,
        columns: LayoutColumns,
        lead: int,
        costs: CostTable,
        rows: IntArray,
        modes: tuple[Mode, ...],
        micro_batches: IntArray,
    ) -> _Group:
        """Build the group of the layout ``lead`` with the layouts ``rows`` as its cases."""
        pp, vpp = int(columns.pp[lead]), int(columns.vpp[lead])
        group_costs, classes = _taken((costs, rows)), stage_classes(problem.model.layer_kinds, pp * vpp)
        stages = []
        for kinds, is_first, is_last in classes.members:
            full, selective = (
                np.array([len(kinds) * (mode == name) for mode in modes], dtype=np.int64)
                for name in ("full", "selective")
            )
            stages.append(stage_options(group_costs, kinds, full, selective, is_first=is_first, is_last=is_last))
        schedule = SCHEDULES[int(columns.schedule[lead])]
        return _Group(schedule, pp, vpp, group_costs, classes, stages, micro_batches)

    def memory(self) -> tuple[IntArray, IntArray]:
        """Find the peak memory of the fullest rank on the device and on the host, in bytes [modes, x]."""
        class_of = chunk_classes(self.schedule, self.num_ranks, self.vpp, self.classes.class_of)
        return peak_bytes(self.schedule, self.stages, class_of, self.costs.buffer_bytes, self.micro_batches)

    def steps(self, wanted: Sequence[int]) -> IntArray:
        """Simulate the step times [OVERLAPS, modes, x]; times of overlaps that are not ``wanted`` may be zero."""
        by_class = np.stack([stage.terms for stage in self.stages], axis=1)
        shape = by_class.shape[2:]
        by_class = by_class.reshape(*by_class.shape[:2], -1)
        by_case = [np.broadcast_to(v, shape).reshape(-1) for v in (self.costs.transfer_ns, self.micro_batches)]
        flat = _Flat(self, by_class, *by_case)
        steps = np.zeros((len(OVERLAPS), by_class.shape[2]), dtype=np.int64)
        if repeats(self.schedule, self.vpp):
            flat.repeated(wanted, steps)
        else:
            flat.swept(wanted, steps)
        return steps.reshape(-1, *shape) + self.costs.barrier_ns


@dataclass(frozen=True, slots=True)
class _Flat:
    """Cases and modes of a group in a single axis of y plans."""

    group: _Group
    terms: IntArray
    """[Term, C, y] by class of virtual stage."""
    transfer_ns: IntArray
    """[y]."""
    micro_batches: IntArray
    """[y]."""

    def take(self, rows: IntArray) -> _Flat:
        """Select plans."""
        return _Flat(self.group, self.terms[..., rows], self.transfer_ns[rows], self.micro_batches[rows])

    def repeated(self, wanted: Sequence[int], steps: IntArray) -> None:
        """Fill the step times [OVERLAPS, y], without the barrier, of a schedule with ``lockstep.repeats``."""
        ranks = _RankClasses.of(self.group)
        matrix = ranks.matrix(self.terms)
        first_start, last_end = self._distinct_ends(ranks)
        for param_gather in sorted({OVERLAPS[number][0] for number in wanted}):
            origin = _origins(matrix, param_gather)
            is_delayed = (origin > origin[0, 0] + first_start).any(axis=(0, 1))
            numbers = [number for number in wanted if OVERLAPS[number][0] == param_gather]
            for number in numbers:
                steps[number] = origin[0, 0] + _after_work(matrix, last_end, OVERLAPS[number][1])
            rows = np.flatnonzero(is_delayed)
            if len(rows):
                all_ranks = origin[:, ranks.class_of][..., rows].reshape(-1, len(rows))
                ends = work_ends(self.group.schedule, self.take(rows)._work(all_ranks))
                latest = ranks.latest(ends.last_end)
                for number in numbers:
                    steps[number, rows] = _after_work(matrix[..., rows], latest, OVERLAPS[number][1])

    def _work(self, origin: IntArray | None) -> Work:
        """Collect the durations of the work items."""
        group = self.group
        return Work(
            group.num_ranks,
            group.vpp,
            group.classes.class_of,
            self.terms[Term.FORWARD],
            self.terms[Term.BACKWARD],
            self.transfer_ns,
            self.micro_batches,
            origin,
        )

    def _distinct_ends(self, ranks: _RankClasses) -> tuple[IntArray, IntArray]:
        """Find the earliest first starts and the latest last ends without gathers, [v, R, y] each.

        Each distinct plan is simulated once.
        """
        work = self._work(None)
        rows = np.concatenate([work.forward, work.backward, [work.transfer_ns, work.micro_batches]])
        first, inverse = _distinct_columns(rows)
        ends = work_ends(self.group.schedule, work.take(first))
        return -ranks.latest(-ends.first_start)[..., inverse], ranks.latest(ends.last_end)[..., inverse]

    def swept(self, wanted: Sequence[int], steps: IntArray) -> None:
        """Fill the step times of any schedule by sweeps over its graph.

        Transfers differ from plan to plan, so the graph has transfers of 0 and the durations hold them.
        """
        group = self.group
        for number in ascending(self.micro_batches):
            rows = np.flatnonzero(self.micro_batches == number)
            durations = np.moveaxis(self.terms[..., rows][:, group.classes.class_of], -1, 0).copy()
            durations[:, Term.CROSSING] += self.transfer_ns[rows, None]
            for overlap in wanted:
                param_gather, grad_reduce = OVERLAPS[overlap]
                shape = structure(group.schedule, group.num_ranks, int(number), group.vpp)
                graph = StepGraph(shape, 0, grad_reduce, param_gather)
                steps[overlap, rows] = step_time_ns(graph, durations)


@dataclass(frozen=True, slots=True)
class _RankClasses:
    """Classes of ranks with equal virtual stages, for schedules whose chunks all run in the same direction.

    The time that a rank adds to its last ends is the same on all ranks of a class, and a later end never makes it
    earlier. So the latest ends represent a class, and likewise the earliest starts.
    """

    chunks: IntArray
    """[v, R] classes of the virtual stages of R distinct ranks."""
    class_of: IntArray
    """[P] index of every rank among the R distinct ranks."""

    @staticmethod
    def of(group: _Group) -> _RankClasses:
        """Classify a group's ranks; the class of the first rank comes first."""
        stages = group.classes.class_of.reshape(group.vpp, group.num_ranks)
        chunks, class_of = np.unique(stages, axis=1, return_inverse=True)
        return _RankClasses(chunks, class_of.reshape(-1))

    def matrix(self, terms: IntArray) -> IntArray:
        """Expand ``terms`` [Term, C, y] to [Term, v, R, y]; only the rows of ``AROUND`` are filled."""
        matrix = np.empty((len(Term), *self.chunks.shape, terms.shape[-1]), dtype=np.int64)
        for term in AROUND:
            terms[term].take(self.chunks, axis=0, out=matrix[term], mode="clip")
        return matrix

    def latest(self, of_stages: IntArray) -> IntArray:
        """Find the maximum over each class, [v, R, y], of times of virtual stages [J, y]."""
        by_rank = of_stages.reshape(len(self.chunks), len(self.class_of), -1)
        return np.stack(
            [by_rank[:, self.class_of == index].max(axis=1) for index in range(self.chunks.shape[1])], axis=1
        )


def _origins(matrix: IntArray, param_gather: bool) -> IntArray:
    """Find the earliest starts of the first forwards [v, R, y] from ``matrix`` [Term, v, R, y]."""
    if param_gather:
        return np.asarray(np.maximum(*first_starts(matrix)))
    origin = np.zeros(matrix.shape[1:], dtype=np.int64)
    origin[0] = matrix[Term.GATHER].sum(axis=0)
    return origin


def _after_work(matrix: IntArray, last: IntArray, grad_reduce: bool) -> IntArray:
    """Complete the step without its barrier [y] from the ends of the last backwards [v, R, y]."""
    if grad_reduce:
        _, ready = overlapped_reductions(matrix, last - matrix[Term.BACKWARD], last)
    else:
        ready = last[0] + matrix[Term.REDUCE].sum(axis=0)
    return np.asarray(ready.max(axis=0) + matrix[Term.OPTIMIZER].sum(axis=0).max(axis=0))


def _distinct_columns(rows: IntArray) -> tuple[IntArray, IntArray]:
    """Find the distinct columns of [r, y].

    Returns:
        Index of a representative of every distinct column, and for each column the position of its representative.
    """
    with np.errstate(over="ignore"):
        mixed = (rows * _odd_numbers(len(rows))[:, None]).sum(axis=0)
    _, first, inverse = np.unique(mixed, return_index=True, return_inverse=True)
    if (rows[:, first[inverse]] != rows).any():
        # Different columns with equal hashes hardly ever occur; compare whole columns then.
        _, first, inverse = np.unique(rows, axis=1, return_index=True, return_inverse=True)
    return first.astype(np.int64), inverse.reshape(-1).astype(np.int64)


def _odd_numbers(count: int) -> IntArray:
    """Make pseudo-random odd numbers of 64 bits, [count]. Source: Steele et al. 2014, SplitMix64."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)) | np.uint64(1)).view(np.int64)


def _check_columns(problem: Problem, columns: LayoutColumns, modes: Sequence[str]) -> None:
    """Check all rows by the rules of ``simulator.check_plan``, and raise its error for the first illegal row.

    Raises:
        InvalidInputError: a recompute mode is unknown.
        IllegalPlanError: a layout is not for the problem, or cannot run.
    """
    for mode in modes:
        if mode not in MODES:
            raise InvalidInputError(
                f"The recompute mode is {mode!r}.",
                f"Expected one of {', '.join(MODES)}.",
                "Change the modes.",
            )
    if problem.inference and len(columns) and set(modes) - {"none"}:
        check_plan(problem, uniform_plan(problem, columns.at(0), next(mode for mode in modes if mode != "none")))
    legal = np.ones(len(columns), dtype=np.bool_)
    for rule in _rules(problem, columns):
        legal &= rule
    if not legal.all():
        check_plan(problem, uniform_plan(problem, columns.at(int(np.argmin(legal))), "none"))
        raise AssertionError("a layout breaks a rule in bulk only")


def _rules(problem: Problem, c: LayoutColumns) -> Iterator[BoolArray]:
    """Yield the rules, each as a mask [n] of the legal rows."""
    job, replicas, m = problem.job, c.dp * c.micro_batch_size, c.num_micro_batches
    yield _admitted(c.num_gpus, job.num_gpus)
    yield _admitted(c.global_batch_size, job.global_batch_size)
    yield c.global_batch_size % replicas == 0
    for kind in problem.model.kinds:
        for heads in kind.head_counts:
            yield heads % c.tp == 0
        for heads in kind.exchanged_heads:
            yield (c.cp == 1) | (heads % (c.tp * c.cp) == 0)
    yield job.sequence_length % c.cp == 0
    if problem.model.has_indexers:
        yield (c.cp == 1) | (job.sequence_length >= c.cp * problem.model.boundary_tokens)
    if problem.model.taking_layers:
        yield np.array([has_uniform_plan(problem.model, number) for number in (c.pp * c.vpp).tolist()])
    heads = problem.model.common_heads
    if c.any_of("recompute_modules"):
        priced = priced_sets(c.recompute_modules, MODULE_SETS, problem.prices_modules)
        yield priced & ((c.recompute_modules == 0) | c.gather_again)
    if c.any_of("offload_modules"):
        yield priced_sets(c.offload_modules, OFFLOAD_SETS, problem.prices_offload)
        yield hosts_apart(c.mapping)
    yield (c.ulysses == 1) | ((c.cp % c.ulysses == 0) & (heads % (c.tp * c.ulysses) == 0))
    experts = [kind.mlp.num_experts for kind in problem.model.kinds if isinstance(kind.mlp, MixtureOfExperts)]
    expert_ranks = c.ep * c.etp
    yield (expert_ranks == 1) | bool(experts)
    yield (c.tp * c.cp * c.dp) % expert_ranks == 0
    for number in experts:
        yield number % c.ep == 0
    if experts and c.any_of("rank_order"):
        yield placement.stages_agree(c.mapping)
    offloads = c.offload_weights | c.offload_activations | c.offload_optimizer | (c.offload_modules > 0)
    yield ~offloads | (problem.hardware.host_memory is not None)
    yield ~offloads | ~c.split_backward
    yield (c.expert_dispatch != EXPERT_DISPATCHES.index("allgather")) | (c.etp == 1)
    once = not problem.inference and not problem.job.further_forwards
    yield ~c.keep_weights | ((c.zero_stage == 3) & (c.pp == 1) & ~c.offload_weights & once)
    yield c.node_order == 0
    yield from _schedule_rules(problem, c, m)


def _admitted(numbers: IntArray, asked: int | Range) -> BoolArray:
    """Find the numbers [n] that a job admits."""
    if isinstance(asked, int):
        return np.asarray(numbers == asked)
    inside = (numbers >= asked.minimum) & (numbers <= asked.maximum)
    return np.asarray(inside & ((numbers - asked.minimum) % asked.step == 0))


def _schedule_rules(problem: Problem, c: LayoutColumns, m: IntArray) -> Iterator[BoolArray]:
    """Yield the rules of ``schedule.check_schedule``, and that inference fills and drains the pipeline."""
    interleaved, is_v = c.schedule == _INTERLEAVED, _IS_V[c.schedule]
    yield m >= 1
    yield np.where(is_v, c.vpp == 2, (c.vpp == 1) | interleaved)
    yield ((c.vpp == 1) & ~c.split_backward) | (c.pp > 1)
    yield ~interleaved | (c.vpp == 1) | (m % c.pp == 0)
    yield ~c.runs_pairs | (m >= 2 * c.pp)
    if problem.inference:
        yield (c.pp == 1) | (c.schedule == _GPIPE)


__all__ = ["BulkSteps", "simulate_many"]
