"""Exact step times and memory of uniform plans in bulk: what ``simulate`` says of each, many of them at once.

A uniform plan is a layout and a recompute mode; every virtual stage holds ceil(L / J) layers, the last ones what
is left. So a plan has few distinct virtual stages (``stage_classes``), whose costs are sums over the constants of
all layouts together, and plans that differ in what surrounds the work items only, gathers before and reductions
after them, share those. Layouts of one schedule, ranks and chunks go through the schedule in lockstep
(``repeating``); schedules that ``repeating`` does not know are swept over their graphs.

Gathers. Without them every first forward j starts at S_j. Rank 0 has its own at o_0, which shifts all of it, and
if no other gather ends after o_0 + S_j, none delays anything: the step is o_0 longer. Plans in which one does are
walked through once more with all their origins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Literal

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.problem.model import MixtureOfExperts
from milpplan.problem.plan import SCHEDULES, V_SCHEDULES, Layout, Plan, Recompute, Schedule, VirtualStage
from milpplan.problem.problem import Problem, Range
from milpplan.simulation.bulk.lockstep import Work
from milpplan.simulation.bulk.peak_memory import chunk_classes, peak_bytes
from milpplan.simulation.bulk.periodic import repeats, work_ends
from milpplan.simulation.layers.terms import Term
from milpplan.simulation.layout_columns import BoolArray, IntArray, LayoutColumns, ascending, unique_rows
from milpplan.simulation.layout_costs import CostTable, LayoutCosts, layout_costs
from milpplan.simulation.network import placement
from milpplan.simulation.pipeline.step_graph import (
    StepGraph,
    first_starts,
    overlapped_reductions,
    step_time_ns,
    structure,
)
from milpplan.simulation.simulator import check_plan, simulate
from milpplan.simulation.stages import StageOptions, stage_options

Member = tuple[tuple[int, ...], bool, bool]
"""(kinds of the layers held, whether the first virtual stage, whether the last)."""


def even_chunks(num_layers: int, num_stages: int) -> list[tuple[int, int]]:
    """First layer and end of every virtual stage of a uniform plan: ceil(L / J) layers in each, the last ones hold
    what is left."""
    each = -(-num_layers // num_stages)
    return [(min(j * each, num_layers), min((j + 1) * each, num_layers)) for j in range(num_stages)]


def uniform_plan(problem: Problem, layout: Layout, mode: str) -> Plan:
    """The plan of ``even_chunks`` with one recompute mode for all layers."""
    held = _even_stages(problem.model.num_layers, layout.num_virtual_stages, mode)
    other = tuple(stage.recompute for stage in held) * max(0, len(layout.replica_micro_batches) - 1)
    return Plan(layout=layout, virtual_stages=held, other_recompute=other)


@lru_cache(maxsize=512)
def _even_stages(num_layers: int, num_stages: int, mode: str) -> tuple[VirtualStage, ...]:
    """The virtual stages of a uniform plan: few kinds of plans share them."""
    held = []
    for first, last in even_chunks(num_layers, num_stages):
        recompute = Recompute(**({mode: last - first} if mode != "none" else {}))
        held.append(VirtualStage(layers=(first, last), recompute=recompute))
    return tuple(held)


@dataclass(frozen=True, slots=True)
class StageClasses:
    """The distinct virtual stages of a uniform plan, and which one each is, ``class_of`` [J]."""

    members: tuple[Member, ...]
    class_of: IntArray


@lru_cache(maxsize=512)
def stage_classes(layer_kinds: tuple[int, ...], num_stages: int) -> StageClasses:
    """Classes of the virtual stages of uniform plans of J stages."""
    known: dict[Member, int] = {}
    class_of = np.zeros(num_stages, dtype=np.int64)
    for stage, (first, last) in enumerate(even_chunks(len(layer_kinds), num_stages)):
        member = (layer_kinds[first:last], stage == 0, stage == num_stages - 1)
        class_of[stage] = known.setdefault(member, len(known))
    class_of.flags.writeable = False
    return StageClasses(tuple(known), class_of)


Mode = Literal["none", "selective", "full"]
CHUNK = 100_000
"""Layouts priced at a time."""
GROUP_KEYS = ("schedule", "pp", "vpp")
OVERLAPS = ((False, False), (False, True), (True, False), (True, True))
"""``overlap_param_gather``, ``overlap_grad_reduce``."""

AROUND = (
    *(Term.FORWARD, Term.BACKWARD, Term.GATHER, Term.REDUCE, Term.OPTIMIZER),
    *(Term.LEAD, Term.TRAIL, Term.FIRST, Term.LAST),
)
"""The terms that gathers, reductions and updates look at."""


@dataclass(frozen=True, slots=True)
class BulkSteps:
    """Per layout and recompute mode, arrays [n, modes]: the step time, bytes of the fullest rank on the device and
    on the host, and whether both fit."""

    modes: tuple[Mode, ...]
    step_time_ns: IntArray
    peak_memory_bytes: IntArray
    host_memory_bytes: IntArray
    fits: BoolArray


def simulate_many(
    problem: Problem, layouts: Iterable[Layout] | LayoutColumns, modes: Sequence[Mode] | None = None
) -> BulkSteps:
    """Simulate the uniform plans of many layouts, exactly as ``simulate`` does one by one.

    Args:
        layouts: records, or columns (which are made faster).
        modes: recompute modes to price each layout with; None: those of the problem's space.

    Raises:
        IllegalPlanError: one of them is no plan for the problem, or cannot run; the first such one is named.
    """
    columns = layouts if isinstance(layouts, LayoutColumns) else LayoutColumns.of(layouts)
    chosen: tuple[Mode, ...] = problem.recompute_modes if modes is None else tuple(modes)
    if problem.other_hardware:
        return _one_by_one(problem, columns, chosen)
    _check_columns(problem, columns, chosen)
    found = np.zeros((3, len(columns), len(chosen)), dtype=np.int64)
    for start in range(0, len(columns), CHUNK):
        rows = slice(start, start + CHUNK)
        part = columns.take(np.arange(start, min(start + CHUNK, len(columns))))
        _price(problem, part, chosen, layout_costs(problem, part), found[:, rows])
    return _bulk_steps(problem, chosen, found)


def simulate_known(
    problem: Problem, columns: LayoutColumns, modes: tuple[Mode, ...], costs: CostTable
) -> BulkSteps:
    """``simulate_many`` of layouts of a space, of one node type, whose constants are known: nothing is checked."""
    found = np.zeros((3, len(columns), len(modes)), dtype=np.int64)
    _price(problem, columns, modes, costs, found)
    return _bulk_steps(problem, modes, found)


def _bulk_steps(problem: Problem, modes: tuple[Mode, ...], found: IntArray) -> BulkSteps:
    step, device, host = found
    fits = (device <= problem.hardware.usable_bytes) & (host <= problem.hardware.host_bytes)
    return BulkSteps(modes, step, device, host, fits)


def _one_by_one(problem: Problem, columns: LayoutColumns, modes: tuple[Mode, ...]) -> BulkSteps:
    """Clusters of several node types: their ranks differ, so that nothing is shared."""
    reports = [
        simulate(problem, uniform_plan(problem, columns.at(row), mode))
        for row in range(len(columns))
        for mode in modes
    ]
    values = [(one.step_time_ns, one.peak_memory_bytes, one.host_memory_bytes, one.fits) for one in reports]
    step, device, host, fits = np.array(values, dtype=np.int64).reshape(-1, 4).T.reshape(4, -1, len(modes))
    return BulkSteps(modes, step, device, host, fits.astype(np.bool_))


def _price(
    problem: Problem, columns: LayoutColumns, modes: tuple[Mode, ...], costs: CostTable, found: IntArray
) -> None:
    """Fill step time, bytes on the device and on the host, ``found`` [3, n, modes]."""
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
        found[0, rows] = steps[overlaps[rows], :, case_of]
        found[1, rows], found[2, rows] = device[:, case_of].T, host[:, case_of].T


def _taken(*chosen: tuple[CostTable, IntArray]) -> LayoutCosts:
    """Constants of the chosen layouts of some tables, one table after another; ``parts`` stay those of all layouts
    of the first table, and nobody looks at them here."""
    names = [field.name for field in fields(LayoutCosts) if field.name != "parts"]
    found = {
        name: [getattr(table.distinct, name)[..., table.place[rows]] for table, rows in chosen] for name in names
    }
    whole = {name: own[0] if len(own) == 1 else np.concatenate(own, axis=-1) for name, own in found.items()}
    return LayoutCosts(chosen[0][0].distinct.parts, **whole)


def together(tables: Sequence[CostTable], table: IntArray, rows: IntArray) -> CostTable:
    """One table of layouts by their tables and rows there, both [n]; for ``simulate_known`` alone (``_taken``)."""
    asked: list[int] = ascending(table).tolist()
    if len(asked) == 1:
        return tables[asked[0]].take(rows)
    constants = np.empty(len(rows), dtype=np.int64)
    for number in asked:
        own = table == number
        constants[own] = tables[number].place[rows[own]]
    # Ascending by the table.
    first, place = unique_rows(table, constants)
    chosen = [(tables[number], rows[first[table[first] == number]]) for number in asked]
    return CostTable(_taken(*chosen), place)


@dataclass(frozen=True, slots=True)
class _Group:
    """Cases, x of them, of one schedule, ranks and chunks: layouts that differ in more than overlaps."""

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
        """The group of the layout ``lead`` with the layouts ``rows`` as its cases."""
        pp, vpp = int(columns.pp[lead]), int(columns.vpp[lead])
        own, classes = _taken((costs, rows)), stage_classes(problem.model.layer_kinds, pp * vpp)
        stages = []
        for kinds, is_first, is_last in classes.members:
            full, selective = (
                np.array([len(kinds) * (mode == name) for mode in modes], dtype=np.int64)
                for name in ("full", "selective")
            )
            stages.append(stage_options(own, kinds, full, selective, is_first=is_first, is_last=is_last))
        schedule = SCHEDULES[int(columns.schedule[lead])]
        return _Group(schedule, pp, vpp, own, classes, stages, micro_batches)

    def memory(self) -> tuple[IntArray, IntArray]:
        """Bytes of the fullest rank on the device and on the host, [modes, x]."""
        class_of = chunk_classes(self.schedule, self.num_ranks, self.vpp, self.classes.class_of)
        return peak_bytes(self.schedule, self.stages, class_of, self.costs.buffer_bytes, self.micro_batches)

    def steps(self, wanted: Sequence[int]) -> IntArray:
        """Step times [OVERLAPS, modes, x]; those not ``wanted`` may be left at zero."""
        by_class = np.stack([stage.terms for stage in self.stages], axis=1)
        shape = by_class.shape[2:]
        by_class = by_class.reshape(*by_class.shape[:2], -1)
        spread = [np.broadcast_to(v, shape).reshape(-1) for v in (self.costs.transfer_ns, self.micro_batches)]
        flat = _Flat(self, by_class, *spread)
        steps = np.zeros((len(OVERLAPS), by_class.shape[2]), dtype=np.int64)
        if repeats(self.schedule, self.vpp):
            flat.repeated(wanted, steps)
        else:
            flat.swept(wanted, steps)
        return steps.reshape(-1, *shape) + self.costs.barrier_ns


@dataclass(frozen=True, slots=True)
class _Flat:
    """Cases and modes of a group in one axis, y of them: ``terms`` [Term, C, y] by class, ``transfer_ns``,
    ``micro_batches`` [y]."""

    group: _Group
    terms: IntArray
    transfer_ns: IntArray
    micro_batches: IntArray

    def take(self, rows: IntArray) -> _Flat:
        """The chosen ones."""
        return _Flat(self.group, self.terms[..., rows], self.transfer_ns[rows], self.micro_batches[rows])

    def repeated(self, wanted: Sequence[int], steps: IntArray) -> None:
        """Fill step times [OVERLAPS, y], less the barrier, of a schedule that ``repeating`` knows."""
        ranks = _RankClasses.of(self.group)
        matrix = ranks.matrix(self.terms)
        first_start, last_end = self._distinct_ends(ranks)
        for param_gather in sorted({OVERLAPS[number][0] for number in wanted}):
            origin = _origins(matrix, param_gather)
            late = (origin > origin[0, 0] + first_start).any(axis=(0, 1))
            mine = [number for number in wanted if OVERLAPS[number][0] == param_gather]
            for number in mine:
                steps[number] = origin[0, 0] + _after_work(matrix, last_end, OVERLAPS[number][1])
            rows = np.flatnonzero(late)
            if len(rows):
                all_ranks = origin[:, ranks.class_of][..., rows].reshape(-1, len(rows))
                ends = work_ends(self.group.schedule, self.take(rows)._work(all_ranks))
                latest = ranks.latest(ends.last_end)
                for number in mine:
                    steps[number, rows] = _after_work(matrix[..., rows], latest, OVERLAPS[number][1])

    def _work(self, origin: IntArray | None) -> Work:
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
        """Least first starts and greatest last ends without gathers, [v, R, y] each; each distinct plan is walked
        through once."""
        work = self._work(None)
        rows = np.concatenate([work.forward, work.backward, [work.transfer_ns, work.micro_batches]])
        first, inverse = _distinct_columns(rows)
        ends = work_ends(self.group.schedule, work.take(first))
        return -ranks.latest(-ends.first_start)[..., inverse], ranks.latest(ends.last_end)[..., inverse]

    def swept(self, wanted: Sequence[int], steps: IntArray) -> None:
        """The same of any schedule, over its graph. Transfers differ from plan to plan, so they are in the
        durations, as what each takes beyond none."""
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
    """Ranks with the same classes of virtual stages, of schedules whose chunks run over the ranks in one
    direction: ``chunks`` [v, R] the classes that R distinct ranks hold, ``class_of`` [P] which one a rank is like.

    What a rank adds to its last ends is the same on all ranks of a class and grows with them, so the latest ends
    of a class stand for it; likewise the earliest starts.
    """

    chunks: IntArray
    class_of: IntArray

    @staticmethod
    def of(group: _Group) -> _RankClasses:
        """The classes of a group's ranks, that of the first rank first."""
        stages = group.classes.class_of.reshape(group.vpp, group.num_ranks)
        chunks, class_of = np.unique(stages, axis=1, return_inverse=True)
        return _RankClasses(chunks, class_of.reshape(-1))

    def matrix(self, terms: IntArray) -> IntArray:
        """[Term, v, R, y] of ``terms`` [Term, C, y]; what the work items take alone is left out."""
        matrix = np.empty((len(Term), *self.chunks.shape, terms.shape[-1]), dtype=np.int64)
        for term in AROUND:
            terms[term].take(self.chunks, axis=0, out=matrix[term], mode="clip")
        return matrix

    def latest(self, of_stages: IntArray) -> IntArray:
        """The greatest of each class, [v, R, y], of numbers of virtual stages [J, y]."""
        by_rank = of_stages.reshape(len(self.chunks), len(self.class_of), -1)
        return np.stack(
            [by_rank[:, self.class_of == own].max(axis=1) for own in range(self.chunks.shape[1])], axis=1
        )


def _origins(matrix: IntArray, param_gather: bool) -> IntArray:
    """Earliest starts of the first forwards [v, R, y], of ``matrix`` [Term, v, R, y]."""
    if param_gather:
        return np.asarray(np.maximum(*first_starts(matrix)))
    origin = np.zeros(matrix.shape[1:], dtype=np.int64)
    origin[0] = matrix[Term.GATHER].sum(axis=0)
    return origin


def _after_work(matrix: IntArray, last: IntArray, grad_reduce: bool) -> IntArray:
    """The step without its barrier [y], from the ends of the last backwards [v, R, y]."""
    if grad_reduce:
        _, ready = overlapped_reductions(matrix, last - matrix[Term.BACKWARD], last)
    else:
        ready = last[0] + matrix[Term.REDUCE].sum(axis=0)
    return np.asarray(ready.max(axis=0) + matrix[Term.OPTIMIZER].sum(axis=0).max(axis=0))


def _distinct_columns(rows: IntArray) -> tuple[IntArray, IntArray]:
    """A representative of every distinct column of [r, y], and for each column the place of its own."""
    with np.errstate(over="ignore"):
        mixed = (rows * _odd_numbers(len(rows))[:, None]).sum(axis=0)
    _, first, inverse = np.unique(mixed, return_index=True, return_inverse=True)
    if (rows[:, first[inverse]] != rows).any():
        # Two columns with one sum: hardly ever, and then exactly.
        _, first, inverse = np.unique(rows, axis=1, return_index=True, return_inverse=True)
    return first.astype(np.int64), inverse.reshape(-1).astype(np.int64)


def _odd_numbers(count: int) -> IntArray:
    """Odd numbers of 64 bits, [count], as if drawn at random. Source: Steele et al. 2014, SplitMix64."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)) | np.uint64(1)).view(np.int64)


MODES = ("none", "selective", "full")
_IS_V = np.array([name in V_SCHEDULES for name in SCHEDULES])
_GPIPE, _INTERLEAVED = SCHEDULES.index("gpipe"), SCHEDULES.index("interleaved")


def _check_columns(problem: Problem, columns: LayoutColumns, modes: Sequence[str]) -> None:
    """Raise the error of ``check_plan`` for the first row that breaks a rule.

    Raises:
        InvalidInputError: a recompute mode is unknown.
        IllegalPlanError: a layout is none for the problem, or cannot run.
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
    """The rules, each a mask [n] of the rows that keep it."""
    job, replicas, m = problem.job, c.dp * c.micro_batch_size, c.num_micro_batches
    yield _admitted(c.num_gpus, job.num_gpus)
    yield _admitted(c.global_batch_size, job.global_batch_size)
    yield c.global_batch_size % replicas == 0
    for kind in problem.model.kinds:
        yield kind.attention.num_attention_heads % c.tp == 0
    yield job.sequence_length % c.cp == 0
    experts = [kind.mlp.num_experts for kind in problem.model.kinds if isinstance(kind.mlp, MixtureOfExperts)]
    expert_ranks = c.ep * c.etp
    yield (expert_ranks == 1) | bool(experts)
    yield (c.tp * c.cp * c.dp) % expert_ranks == 0
    for number in experts:
        yield number % c.ep == 0
    if experts and c.any_of("rank_order"):
        yield placement.stages_agree(c.mapping)
    offloads = c.offload_weights | c.offload_activations | c.offload_optimizer
    yield ~offloads | (problem.hardware.host_memory is not None)
    yield ~offloads | ~c.split_backward
    yield c.node_order == 0
    yield from _schedule_rules(problem, c, m)


def _admitted(numbers: IntArray, asked: int | Range) -> BoolArray:
    """Which numbers [n] a job admits."""
    if isinstance(asked, int):
        return np.asarray(numbers == asked)
    inside = (numbers >= asked.minimum) & (numbers <= asked.maximum)
    return np.asarray(inside & ((numbers - asked.minimum) % asked.step == 0))


def _schedule_rules(problem: Problem, c: LayoutColumns, m: IntArray) -> Iterator[BoolArray]:
    """Those of ``work_order.check_schedule``, and that forwards alone fill and drain the pipeline."""
    interleaved, turns = c.schedule == _INTERLEAVED, _IS_V[c.schedule]
    yield m >= 1
    yield np.where(turns, c.vpp == 2, (c.vpp == 1) | interleaved)
    yield (c.vpp == 1) | (c.pp > 1)
    yield ~interleaved | (c.vpp == 1) | (m % c.pp == 0)
    yield ~c.runs_pairs | (m >= 2 * c.pp)
    if problem.inference:
        yield ((c.pp == 1) & ~c.split_backward) | (c.schedule == _GPIPE)


__all__ = ["BulkSteps", "simulate_many"]
