"""Grouped plans and dispatched batches as JSON that any framework can read, and back.

``GroupedPlanFile`` is self-contained: lengths, strategies with their costs (and layouts, where known), switch
times, and the plan: home, groups in the order they run, micro-batches as pairs (length, sequences), the timeline.
``DispatchFile`` is one batch: for every strategy in order and every replica, micro-batches as indices of the
batch's sequences. Derived fields (times, timeline) are checked against the simulation when a file is read.
``GroupedPlanFile.model_json_schema()`` is the schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from milpplan.errors import InvalidInputError
from milpplan.lengths.tabled.problem import (
    GroupedProblem,
    Int64Array,
    Pipeline,
    Strategy,
    SwitchTimes,
    TabledPipeline,
)
from milpplan.lengths.tabled.step_plan import Group, GroupedPlan, Packing, check, simulate
from milpplan.problem import parse_json, read_text, validated
from milpplan.problem.reading import shown
from milpplan.problem.records import Count, NonNegativeFloat, PositiveInt, Record

Pairs = tuple[tuple[PositiveInt, PositiveInt], ...]
"""Pairs (tokens, sequences)."""
Matrix = tuple[tuple[Count, ...], ...]


class Degrees(Record):
    """The layout of a strategy whose replicas are alike; ``dp`` is the number of replicas."""

    dp: PositiveInt
    tp: PositiveInt = 1
    pp: PositiveInt = 1
    cp: PositiveInt = 1
    ep: PositiveInt = 1


class PipelineRecord(Record):
    """``num_replicas`` equal pipelines; the other fields are those of ``tabled.problem.Pipeline``, but for
    ``units``: pairs (tokens, units) of all lengths that may come, where the times are from a table."""

    name: str
    num_replicas: PositiveInt
    num_stages: PositiveInt
    quadratic_ns: NonNegativeFloat
    linear_ns: NonNegativeFloat
    micro_batch_ns: NonNegativeFloat
    micro_batch_tokens: Count
    in_flight_tokens: Count | None = None
    max_micro_batches: PositiveInt | None = None
    transfer_ns: Count = 0
    forward_parts: PositiveInt
    backward_parts: Count
    num_gpus: PositiveInt
    units: tuple[tuple[PositiveInt, Count], ...] = ()

    def pipeline(self) -> Pipeline:
        """The pipeline."""
        fields = self.model_dump(exclude={"num_replicas", "units"})
        if not self.units:
            return Pipeline(**fields)
        lengths, table = zip(*sorted(self.units), strict=True)
        return TabledPipeline(**fields, table_lengths=lengths, table=table)


class StrategyRecord(Record):
    """One strategy. ``layout`` is for launchers; costs are in the pipelines."""

    name: str
    reduce_ns: Count
    pipelines: Annotated[tuple[PipelineRecord, ...], Field(min_length=1)]
    layout: Degrees | None = None


class GroupRecord(Record):
    """One strategy's part of the step: for every replica, its micro-batches in the order they run."""

    strategy: str
    time_ns: Count
    replicas: tuple[tuple[Pairs, ...], ...]


class EventRecord(Record):
    """One thing the step does; ``gradients`` run beside the group after them."""

    kind: Literal["parameters", "gradients", "group", "reduce", "finish"]
    strategy: str
    start_ns: Count
    end_ns: Count


class GroupedPlanFile(Record):
    """A grouped step: what was given, and the plan. Strategies go by their names; matrices are [from][to]."""

    schema_version: Literal[1] = 1
    lengths: Annotated[Pairs, Field(min_length=1)]
    strategies: Annotated[tuple[StrategyRecord, ...], Field(min_length=1)]
    parameters_ns: Matrix
    gradients_ns: Matrix
    max_strategies: PositiveInt
    homes: tuple[str, ...] = ()
    finish_ns: tuple[Count, ...] = ()
    home: str
    groups: Annotated[tuple[GroupRecord, ...], Field(min_length=1)]
    time_ns: Count
    bound_ns: Count | None = None
    """Proved: no plan of the step takes less. None where nothing was proved."""
    timeline: tuple[EventRecord, ...] = ()


class DispatchGroup(Record):
    """One strategy's part of a batch: for every replica, its micro-batches as indices of sequences."""

    strategy: str
    replicas: tuple[tuple[Annotated[tuple[Count, ...], Field(min_length=1)], ...], ...]


class DispatchFile(Record):
    """One batch under the strategies of a step; ``groups`` in the order they run.

    ``side_by_side``: replica r of a strategy with d replicas is the team of the GPUs from r/d of all on (as
    Megatron ranks count). Every GPU runs its own groups in order, and a replica starts once its GPUs are free.
    """

    schema_version: Literal[1] = 1
    lengths: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    home: str
    groups: Annotated[tuple[DispatchGroup, ...], Field(min_length=1)]
    time_ns: Count
    bound_ns: Count
    side_by_side: bool = False


def plan_file(
    plan: GroupedPlan, bound_ns: int | None = None, layouts: Mapping[str, Degrees] | None = None
) -> GroupedPlanFile:
    """Build the document of a plan; ``layouts`` by the strategies' names.

    Raises:
        InvalidInputError: two strategies have one name, or a layout has another number of replicas or GPUs.
    """
    problem = plan.problem
    names = _names(problem)
    for name, degrees in (layouts or {}).items():
        _check_layout(problem, names, name, degrees)
    return GroupedPlanFile(
        lengths=_pairs(problem.lengths, problem.counts),
        strategies=tuple(
            StrategyRecord(
                name=strategy.name,
                reduce_ns=strategy.reduce_ns,
                pipelines=tuple(_pipeline_record(pipeline, number) for pipeline, number in strategy.pipelines),
                layout=(layouts or {}).get(strategy.name),
            )
            for strategy in problem.strategies
        ),
        parameters_ns=_rows(problem.switches.parameters_ns),
        gradients_ns=_rows(problem.switches.gradients_ns),
        max_strategies=problem.max_strategies,
        homes=tuple(names[home] for home in problem.homes),
        finish_ns=problem.finish_ns,
        home=names[plan.home],
        groups=tuple(
            GroupRecord(
                strategy=names[group.strategy],
                time_ns=group.time_ns,
                replicas=tuple(
                    tuple(_pairs(problem.lengths, counts) for counts in replica)
                    for packing in group.packings
                    for replica in packing.replicas
                ),
            )
            for group in plan.groups
        ),
        time_ns=plan.time_ns,
        bound_ns=bound_ns,
        timeline=_timeline(plan, names),
    )


def _names(problem: GroupedProblem) -> list[str]:
    """Return the names of the strategies, which must differ."""
    names = [strategy.name for strategy in problem.strategies]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise InvalidInputError(
            f"Two strategies are called {shown(repeated[0])}.", "Names that differ expected.", "Rename one."
        )
    return names


def _check_layout(problem: GroupedProblem, names: list[str], name: str, degrees: Degrees) -> None:
    """Refuse a layout whose degrees differ from the strategy's replicas."""
    if name not in names:
        raise InvalidInputError(
            f"There is a layout for {shown(name)}.", f"Expected names of strategies: {', '.join(names)}."
        )
    replicas = problem.strategies[names.index(name)].replicas
    stages = {pipeline.num_stages for pipeline in replicas}
    if degrees.dp != len(replicas) or stages != {degrees.pp}:
        raise InvalidInputError(
            f"Strategy {name} has {len(replicas)} replicas of {sorted(stages)} stages, its layout dp={degrees.dp} "
            f"and pp={degrees.pp}.",
            "The same numbers expected.",
            "Leave out the layouts of strategies whose replicas differ.",
        )


def _pairs(lengths: Int64Array, counts: Int64Array) -> Pairs:
    """Return pairs (length, count) of the lengths with sequences."""
    present = np.flatnonzero(counts)
    return tuple(zip(lengths[present].tolist(), counts[present].tolist(), strict=True))


def _rows(matrix: Int64Array) -> Matrix:
    """Return a matrix as tuples."""
    return tuple(tuple(row) for row in matrix.tolist())


def _pipeline_record(pipeline: Pipeline, number: int) -> PipelineRecord:
    """Build the record of ``number`` equal pipelines."""
    names = [name for name in PipelineRecord.model_fields if name not in ("num_replicas", "units")]
    fields = {name: getattr(pipeline, name) for name in names}
    table: tuple[tuple[int, int], ...] = ()
    if isinstance(pipeline, TabledPipeline):
        table = tuple(zip(pipeline.table_lengths, pipeline.table, strict=True))
    return PipelineRecord(num_replicas=number, units=table, **fields)


def _timeline(plan: GroupedPlan, names: list[str]) -> tuple[EventRecord, ...]:
    """Build the records of the simulated events."""
    return tuple(
        EventRecord(kind=event.kind, strategy=names[event.strategy], start_ns=event.start_ns, end_ns=event.end_ns)
        for event in simulate(plan)
    )


def restored_plan(file: GroupedPlanFile, source: str) -> GroupedPlan:
    """Restore the plan of a document, simulated and checked anew; ``source`` names it in messages.

    Raises:
        InvalidInputError: names, shapes, replicas or lengths that do not match, or a wrong timeline.
        IllegalPlanError: a plan that drops a sequence, breaks memory or states a wrong time.
    """
    strategies = tuple(
        Strategy(
            record.name,
            tuple((pipeline.pipeline(), pipeline.num_replicas) for pipeline in record.pipelines),
            record.reduce_ns,
        )
        for record in file.strategies
    )
    names = [strategy.name for strategy in strategies]
    lengths = np.array(file.lengths, np.int64).reshape(-1, 2)
    problem = GroupedProblem(
        lengths[:, 0],
        lengths[:, 1],
        strategies,
        SwitchTimes(_matrix(file.parameters_ns, source), _matrix(file.gradients_ns, source)),
        file.max_strategies,
        tuple(_index(names, home, source) for home in file.homes),
        file.finish_ns,
    )
    _names(problem)
    groups = tuple(_group(problem, names, group, source) for group in file.groups)
    plan = GroupedPlan(problem, _index(names, file.home, source), groups, file.time_ns)
    check(plan)
    if file.timeline and file.timeline != _timeline(plan, names):
        raise InvalidInputError(
            f"{source}: the timeline is not that of the plan.",
            "Expected what its simulation does.",
            "Delete the timeline, or write the file anew.",
        )
    return plan


def _matrix(rows: Matrix, source: str) -> Int64Array:
    """Return a square matrix of switch times as an array."""
    widths = {len(row) for row in rows}
    if widths != {len(rows)}:
        raise InvalidInputError(
            f"{source}: switch times have {len(rows)} rows of {sorted(widths)} values.",
            "A row and a column for every strategy expected.",
        )
    return np.array(rows, np.int64)


def _index(names: list[str], name: str, source: str) -> int:
    """Return the index of a strategy by its name."""
    if name not in names:
        raise InvalidInputError(
            f"{source} names the strategy {shown(name)}.", f"Expected one of {', '.join(names)}."
        )
    return names.index(name)


def _group(problem: GroupedProblem, names: list[str], group: GroupRecord, source: str) -> Group:
    """Restore a group with a packing for every kind."""
    strategy = _index(names, group.strategy, source)
    kinds = problem.kinds_of(strategy)
    number = sum(kind.num_replicas for kind in kinds)
    if len(group.replicas) != number:
        raise InvalidInputError(
            f"{source}: the group of {group.strategy} has {len(group.replicas)} replicas.", f"{number} expected."
        )
    packings, offset = [], 0
    for kind in kinds:
        kind_replicas = group.replicas[offset : offset + kind.num_replicas]
        packings.append(
            Packing(kind, tuple(_counts(problem.lengths, replica, source) for replica in kind_replicas))
        )
        offset += kind.num_replicas
    return Group(strategy, tuple(packings))


def _counts(lengths: Int64Array, replica: tuple[Pairs, ...], source: str) -> Int64Array:
    """Count the sequences of each length, [micro-batches, K]."""
    counts = np.zeros((len(replica), lengths.size), np.int64)
    for row, pairs in zip(counts, replica, strict=True):
        for length, number in pairs:
            index = int(np.searchsorted(lengths, length))
            if index == lengths.size or lengths[index] != length:
                raise InvalidInputError(
                    f"{source}: a micro-batch holds a sequence of {length} tokens.",
                    "Expected lengths that the file lists.",
                )
            row[index] += number
    return counts


def restored_dispatch(file: DispatchFile, problem: GroupedProblem, source: str) -> GroupedPlan:
    """Restore a batch under the strategies of ``problem`` as a plan of its sequences, simulated and checked anew.

    Raises:
        InvalidInputError: a sequence is missing, repeated or not of the batch, or a name is wrong.
        IllegalPlanError: a batch that breaks memory or states a wrong time.
    """
    names = _names(problem)
    lengths, places, counts = np.unique(np.array(file.lengths, np.int64), return_inverse=True, return_counts=True)
    home = _index(names, file.home, source)
    problem = replace(problem, lengths=lengths, counts=counts, homes=(home,))
    missing = set(range(len(places)))
    groups = []
    for group in file.groups:
        strategy = _index(names, group.strategy, source)
        number = len(problem.strategies[strategy].replicas)
        for replica, micro_batches in enumerate(group.replicas):
            for index in (index for micro_batch in micro_batches for index in micro_batch):
                if index not in missing or replica >= number:
                    raise InvalidInputError(
                        f"{source}: sequence {index} of {len(places)} is on replica {replica} of "
                        f"{group.strategy}.",
                        "Every sequence once, on a replica that exists, expected.",
                    )
                missing.remove(index)
        rows = iter([*group.replicas, *[()] * (number - len(group.replicas))])
        packings = [
            Packing(kind, tuple(_counts_of(next(rows), places, len(lengths)) for _ in range(kind.num_replicas)))
            for kind in problem.kinds_of(strategy)
        ]
        groups.append(Group(strategy, tuple(packings)))
    if missing:
        raise InvalidInputError(
            f"{source}: sequence {min(missing)} is in no micro-batch.",
            "Every sequence once expected.",
        )
    plan = GroupedPlan(problem, home, tuple(groups), file.time_ns)
    check(plan)
    return plan


def _counts_of(replica: Sequence[Sequence[int]], places: Int64Array, num_lengths: int) -> Int64Array:
    """Count the sequences of each length in micro-batches of indices, [v, K]."""
    rows = [np.bincount(places[list(micro_batch)], minlength=num_lengths) for micro_batch in replica]
    return np.array(rows, np.int64).reshape(-1, num_lengths)


def read_plan(path: Path) -> GroupedPlan:
    """Read the plan of a file that holds a ``GroupedPlanFile``."""
    return restored_plan(validated(GroupedPlanFile, parse_json(read_text(path), str(path)), str(path)), str(path))


def read_dispatch(path: Path, problem: GroupedProblem) -> GroupedPlan:
    """Read the batch of a file that holds a ``DispatchFile``."""
    file = validated(DispatchFile, parse_json(read_text(path), str(path)), str(path))
    return restored_dispatch(file, problem, str(path))
