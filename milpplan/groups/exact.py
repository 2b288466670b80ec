"""The whole problem of a set of strategies as one integer program, for steps of few sequences.

**Variables.** q_jrmk >= 0 integer, sequences of length k in micro-batch m of replica r of kind j; z_jrm binary,
that the micro-batch exists; F_prm, B_prm >= 0, the ends of its forward and backward on stage p; Z_s and y_t as in
``tours``. Every replica has as many slots m as it may have micro-batches; slots without a micro-batch come
first.

Rows, in the order of the functions that add them:

 - ``every_sequence_runs``: sum_jrm q_jrmk = n_k.
 - ``micro_batch_exists``: sum_k q_jrmk >= z_jrm; q_jrmk <= n_k z_jrm; z_jrm <= z_jr,m+1.
 - ``micro_batch_fits``: sum_k l_k q_jrmk <= C_j; over P consecutive slots, at most the tokens in flight.
 - ``work_in_order``: the recurrence of ``pipeline_times_ns``, with f sum_k u_k q + f c z for the forward (b for
   the backward) and transfers times z; Z_s >= B_0 of the last slot.
 - ``replicas_alike``: equal replicas in the order of their micro-batches' number.
 - ``one_tour``, ``every_strategy_is_used``.

**Exact**: empty slots take no time and no transfer, and before the first micro-batch they change nothing in the
order of 1F1B. With e empty slots, stage p's first P - p - 1 forwards are e empty forwards and the others; the e
empty backwards that follow alternate with e further forwards; and then the first real backward follows P - p
forwards, as without empty slots. So with ``unit_ns`` = 1 the optimum is the minimum time of all plans; with
larger units it is a lower bound, because every duration is rounded down.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from milpplan.groups.plan import Group, Packing
from milpplan.groups.problem import GroupedProblem, Kind
from milpplan.groups.strategies import Int64Array
from milpplan.groups.tours import TourCostRows, every_strategy_is_used, serial_ns
from milpplan.optimize.milp.program import Program, ProgramBuilder


@dataclass(frozen=True, slots=True, eq=False)
class _Replica:
    """Columns of a replica: sequences [slots][K] (-1 where a length does not fit), existence [slots]."""

    kind: Kind
    sequences: list[list[int]]
    exists: range


@dataclass(frozen=True, slots=True, eq=False)
class ExactProgram:
    """Exact program of one set of strategies, with the columns of its decisions."""

    program: Program
    replicas: tuple[_Replica, ...]

    def groups(self, values: Int64Array) -> list[Group]:
        """Decode the groups of an answer."""
        packed: dict[Kind, list[Int64Array]] = {}
        for replica in self.replicas:
            columns = np.array(replica.sequences, np.int64).reshape(-1, replica.kind.units.size)
            counts = np.where(columns >= 0, values[columns], 0)
            packed.setdefault(replica.kind, []).append(counts[counts.any(axis=1)])
        packings_of: dict[int, list[Packing]] = {}
        for kind, replicas in packed.items():
            packings_of.setdefault(kind.strategy, []).append(Packing(kind, tuple(replicas)))
        return [Group(strategy, tuple(packings)) for strategy, packings in packings_of.items()]


def num_slots(kind: Kind) -> int:
    """Return the maximum number of micro-batches of a replica."""
    return min(int(kind.counts[kind.fits].sum()), kind.pipeline.max_micro_batches or 2**31)


def exact_size(problem: GroupedProblem, used: tuple[int, ...]) -> int:
    """Return the number of integer variables of the program."""
    return sum(
        kind.num_replicas * num_slots(kind) * (int(kind.fits.sum()) + 2 * kind.pipeline.num_stages)
        for strategy in used
        for kind in problem.kinds_of(strategy)
    )


def exact_program(problem: GroupedProblem, used: tuple[int, ...], unit_ns: int) -> ExactProgram:
    """Build the program for exactly the strategies ``used``; times in units of ``unit_ns``."""
    builder = ProgramBuilder(f"exact {'+'.join(problem.strategies[s].name for s in used)}")
    kinds = [kind for s in used for kind in problem.kinds_of(s)]
    tour_costs = TourCostRows.add(builder, problem, used, kinds, unit_ns)
    replicas = [_replica(builder, kind, r) for kind in kinds for r in range(kind.num_replicas)]
    for k, (length, count) in enumerate(zip(problem.lengths.tolist(), problem.counts.tolist(), strict=True)):
        columns = [slot[k] for replica in replicas for slot in replica.sequences if slot[k] >= 0]
        builder.add_row(f"every_sequence_runs[{length}]", columns, [1] * len(columns), count, count)
    for replica in replicas:
        micro_batch_exists(builder, replica)
        micro_batch_fits(builder, replica)
        work_in_order(builder, replica, tour_costs.times[replica.kind.strategy], unit_ns)
    replicas_alike(builder, replicas)
    for strategy in used:
        strategy_columns = [
            column
            for replica in replicas
            if replica.kind.strategy == strategy
            for slot in replica.sequences
            for column in slot
            if column >= 0
        ]
        every_strategy_is_used(builder, problem.strategies[strategy].name, strategy_columns)
    tour_costs.minimize(builder)
    return ExactProgram(builder.build(), tuple(replicas))


def _replica(builder: ProgramBuilder, kind: Kind, index: int) -> _Replica:
    """Add the columns of a replica."""
    name = f"{kind.pipeline.name},{index}"
    slots = num_slots(kind)
    sequences = [
        [
            builder.add_variable(f"q[{name},{m},{length}]", 0, count) if fits else -1
            for length, count, fits in zip(
                kind.lengths.tolist(), kind.counts.tolist(), kind.fits.tolist(), strict=True
            )
        ]
        for m in range(slots)
    ]
    return _Replica(kind, sequences, builder.add_variables([f"z[{name},{m}]" for m in range(slots)], 0, 1))


def _columns_of(slot: list[int]) -> list[tuple[int, int]]:
    """List pairs (length's index, column) of a slot."""
    return [(k, column) for k, column in enumerate(slot) if column >= 0]


def micro_batch_exists(builder: ProgramBuilder, replica: _Replica) -> None:
    """A micro-batch exists if and only if it holds sequences; existing micro-batches come last."""
    for m, slot in enumerate(replica.sequences):
        pairs = _columns_of(slot)
        columns = [column for _, column in pairs]
        builder.add_row(f"holds[{m}]", [*columns, replica.exists[m]], [1] * len(columns) + [-1], 0)
        for k, column in pairs:
            builder.add_row(
                f"micro_batch_exists[{m},{k}]", [column, replica.exists[m]], [-1, int(replica.kind.counts[k])], 0
            )
        if m:
            builder.add_row(f"exist_last[{m}]", [replica.exists[m], replica.exists[m - 1]], [1, -1], 0)


def micro_batch_fits(builder: ProgramBuilder, replica: _Replica) -> None:
    """Tokens fit into each micro-batch, and into as many consecutive ones as are in flight."""
    pipeline, lengths = replica.kind.pipeline, replica.kind.lengths
    for m, slot in enumerate(replica.sequences):
        pairs = _columns_of(slot)
        tokens = [int(lengths[k]) for k, _ in pairs]
        columns = [column for _, column in pairs]
        builder.add_row(f"micro_batch_fits[{m}]", columns, tokens, upper=pipeline.micro_batch_tokens)
    if pipeline.in_flight_tokens is None:
        return
    width = min(pipeline.num_stages, len(replica.sequences))
    for m in range(len(replica.sequences) - width + 1):
        pairs = [pair for slot in replica.sequences[m : m + width] for pair in _columns_of(slot)]
        builder.add_row(
            f"in_flight_fits[{m}]",
            [column for _, column in pairs],
            [int(lengths[k]) for k, _ in pairs],
            upper=pipeline.in_flight_tokens,
        )


def work_in_order(builder: ProgramBuilder, replica: _Replica, time: int, unit_ns: int) -> None:
    """Work follows the recurrence of ``pipeline_times_ns`` over all slots."""
    kind, pipeline = replica.kind, replica.kind.pipeline
    num_stages, slots = pipeline.num_stages, len(replica.sequences)
    horizon = -(-serial_ns(kind) // unit_ns) + 1
    forward: dict[tuple[int, int], int] = {}
    backward: dict[tuple[int, int], int] = {}
    last: list[int | None] = [None] * num_stages

    def work(ends: dict[tuple[int, int], int], parts: int, stage: int, m: int, needed: int | None) -> None:
        end = builder.add_variable(f"end[{stage},{m}]", 0, horizon, False)
        ends[stage, m] = end
        pairs = _columns_of(replica.sequences[m])
        spent = [-(int(kind.units[k]) * parts // unit_ns) for k, _ in pairs]
        empty = -(pipeline.micro_batch_units * parts // unit_ns)
        columns = [end, *(column for _, column in pairs), replica.exists[m]]
        for predecessor, lag in ((last[stage], 0), (needed, pipeline.transfer_ns // unit_ns)):
            if predecessor is not None:
                builder.add_row("work_in_order", [*columns, predecessor], [1, *spent, empty - lag, -1], 0)
        if last[stage] is None and needed is None:
            builder.add_row("work_in_order", columns, [1, *spent, empty], 0)
        last[stage] = end

    for turn in range(slots + num_stages):
        for stage in range(num_stages):
            backward_of = turn - num_stages + stage
            if 0 <= backward_of < slots:
                work(backward, pipeline.backward_parts, stage, backward_of, backward.get((stage + 1, backward_of)))
            if turn < slots:
                work(forward, pipeline.forward_parts, stage, turn, forward.get((stage - 1, turn)))
    if slots:
        builder.add_row("group_waits", [time, backward[0, slots - 1]], [1, -1], 0)


def replicas_alike(builder: ProgramBuilder, replicas: list[_Replica]) -> None:
    """The first of two equal replicas has at least as many micro-batches as the second."""
    for first, second in itertools.pairwise(replicas):
        if first.kind is second.kind:
            slots = len(first.exists)
            builder.add_row("replicas_alike", [*first.exists, *second.exists], [1] * slots + [-1] * slots, 0)
