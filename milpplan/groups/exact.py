"""The whole problem of a set of strategies as one integer program, for steps of few sequences.

**Variables.** q_jrmk >= 0 integer, sequences of length k in micro-batch m of replica r of kind j; z_jrm binary,
that the micro-batch exists; F_prm, B_prm >= 0, the ends of its forward and backward on stage p; Z_s and y_t as in
``pricing``. Every replica has as many places as it may have micro-batches; those that do not exist come first.

Rows, in the order of the functions that add them:

 - ``every_sequence_runs``: sum_jrm q_jrmk = n_k.
 - ``micro_batch_exists``: sum_k q_jrmk >= z_jrm; q_jrmk <= n_k z_jrm; z_jrm <= z_jr,m+1.
 - ``micro_batch_fits``: sum_k l_k q_jrmk <= C_j; over P consecutive places, at most what may be in flight.
 - ``work_in_order``: the recurrence of ``pipeline``, with f sum_k u_k q + f c z for the forward (b for the
   backward) and transfers times z; Z_s >= B_0 of the last place.
 - ``replicas_alike``: equal replicas in the order of their micro-batches' number.
 - ``one_tour``, ``every_strategy_is_used``.

**Exact**: places that do not exist take no time and no transfer, and before the first micro-batch they change
nothing in the order of 1F1B. With e of them, stage p's P - p - 1 forwards of the start are e empty ones and the
others; the e empty backwards that follow come between e more forwards; and then the first backward that exists
follows P - p forwards, as without them. So with ``unit_ns`` = 1 the optimum is the least time of all plans; with
larger units it is a lower bound, because every duration is rounded down.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from milpplan.groups.packing.pack import Packing
from milpplan.groups.plan import Group
from milpplan.groups.problem import GroupedProblem, Kind
from milpplan.groups.strategies import Int64Array
from milpplan.groups.tour_costs import TourCostRows, every_strategy_is_used, serial_ns
from milpplan.optimize.milp.program import Program, ProgramBuilder


@dataclass(frozen=True, slots=True, eq=False)
class _Replica:
    """Columns of a replica: sequences [places][K] (-1 where a length does not fit), existence [places]."""

    kind: Kind
    sequences: list[list[int]]
    exists: range


@dataclass(frozen=True, slots=True, eq=False)
class ExactProgram:
    """The program, and where its decisions are."""

    program: Program
    unit_ns: int
    replicas: tuple[_Replica, ...]

    def groups(self, values: Int64Array) -> list[Group]:
        """The groups that an answer describes."""
        packed: dict[Kind, list[Int64Array]] = {}
        for replica in self.replicas:
            columns = np.array(replica.sequences, np.int64).reshape(-1, replica.kind.units.size)
            held = np.where(columns >= 0, values[columns], 0)
            packed.setdefault(replica.kind, []).append(held[held.any(axis=1)])
        found: dict[int, list[Packing]] = {}
        for kind, replicas in packed.items():
            found.setdefault(kind.strategy, []).append(Packing(kind, tuple(replicas)))
        return [Group(strategy, tuple(packings)) for strategy, packings in found.items()]


def num_places(kind: Kind) -> int:
    """Most micro-batches of a replica."""
    return min(int(kind.counts[kind.fits].sum()), kind.pipeline.max_micro_batches or 2**31)


def exact_size(problem: GroupedProblem, used: tuple[int, ...]) -> int:
    """Integer variables of the program."""
    return sum(
        kind.num_replicas * num_places(kind) * (int(kind.fits.sum()) + 2 * kind.pipeline.num_stages)
        for strategy in used
        for kind in problem.kinds_of(strategy)
    )


def exact_program(problem: GroupedProblem, used: tuple[int, ...], unit_ns: int) -> ExactProgram:
    """The program for exactly the strategies ``used``."""
    builder = ProgramBuilder(f"exact {'+'.join(problem.strategies[s].name for s in used)}")
    kinds = [kind for s in used for kind in problem.kinds_of(s)]
    prices = TourCostRows.add(builder, problem, used, kinds, unit_ns)
    replicas = [_replica(builder, kind, r) for kind in kinds for r in range(kind.num_replicas)]
    for k, (length, count) in enumerate(zip(problem.lengths.tolist(), problem.counts.tolist(), strict=True)):
        columns = [place[k] for one in replicas for place in one.sequences if place[k] >= 0]
        builder.add_row(f"every_sequence_runs[{length}]", columns, [1] * len(columns), count, count)
    for one in replicas:
        micro_batch_exists(builder, one)
        micro_batch_fits(builder, one)
        work_in_order(builder, one, prices.times[one.kind.strategy], unit_ns)
    replicas_alike(builder, replicas)
    for strategy in used:
        held = [
            column
            for one in replicas
            if one.kind.strategy == strategy
            for place in one.sequences
            for column in place
            if column >= 0
        ]
        every_strategy_is_used(builder, problem.strategies[strategy].name, held)
    prices.minimize(builder)
    return ExactProgram(builder.build(), unit_ns, tuple(replicas))


def _replica(builder: ProgramBuilder, kind: Kind, index: int) -> _Replica:
    name = f"{kind.pipeline.name},{index}"
    places = num_places(kind)
    sequences = [
        [
            builder.add_variable(f"q[{name},{m},{length}]", 0, count) if fits else -1
            for length, count, fits in zip(
                kind.lengths.tolist(), kind.counts.tolist(), kind.fits.tolist(), strict=True
            )
        ]
        for m in range(places)
    ]
    return _Replica(kind, sequences, builder.add_variables([f"z[{name},{m}]" for m in range(places)], 0, 1))


def _held(place: list[int]) -> list[tuple[int, int]]:
    return [(k, column) for k, column in enumerate(place) if column >= 0]


def micro_batch_exists(builder: ProgramBuilder, one: _Replica) -> None:
    """Where it exists it holds something, and nothing where not; those that exist come last."""
    for m, place in enumerate(one.sequences):
        held = _held(place)
        columns = [column for _, column in held]
        builder.add_row(f"holds[{m}]", [*columns, one.exists[m]], [1] * len(columns) + [-1], 0)
        for k, column in held:
            builder.add_row(
                f"micro_batch_exists[{m},{k}]", [column, one.exists[m]], [-1, int(one.kind.counts[k])], 0
            )
        if m:
            builder.add_row(f"exist_last[{m}]", [one.exists[m], one.exists[m - 1]], [1, -1], 0)


def micro_batch_fits(builder: ProgramBuilder, one: _Replica) -> None:
    """Tokens of a micro-batch, and of as many consecutive ones as are in flight."""
    pipeline, lengths = one.kind.pipeline, one.kind.lengths
    for m, place in enumerate(one.sequences):
        held = _held(place)
        tokens = [int(lengths[k]) for k, _ in held]
        columns = [column for _, column in held]
        builder.add_row(f"micro_batch_fits[{m}]", columns, tokens, upper=pipeline.micro_batch_tokens)
    if pipeline.in_flight_tokens is None:
        return
    width = min(pipeline.num_stages, len(one.sequences))
    for m in range(len(one.sequences) - width + 1):
        pairs = [pair for place in one.sequences[m : m + width] for pair in _held(place)]
        builder.add_row(
            f"in_flight_fits[{m}]",
            [column for _, column in pairs],
            [int(lengths[k]) for k, _ in pairs],
            upper=pipeline.in_flight_tokens,
        )


def work_in_order(builder: ProgramBuilder, one: _Replica, time: int, unit_ns: int) -> None:
    """The recurrence of ``pipeline`` over all places."""
    kind, pipeline = one.kind, one.kind.pipeline
    num_stages, places = pipeline.num_stages, len(one.sequences)
    horizon = -(-serial_ns(kind) // unit_ns) + 1
    forward: dict[tuple[int, int], int] = {}
    backward: dict[tuple[int, int], int] = {}
    last: list[int | None] = [None] * num_stages

    def work(ends: dict[tuple[int, int], int], parts: int, stage: int, m: int, needed: int | None) -> None:
        end = builder.add_variable(f"end[{stage},{m}]", 0, horizon, False)
        ends[stage, m] = end
        held = _held(one.sequences[m])
        spent = [-(int(kind.units[k]) * parts // unit_ns) for k, _ in held]
        own = -(pipeline.micro_batch_units * parts // unit_ns)
        columns = [end, *(column for _, column in held), one.exists[m]]
        for before, lag in ((last[stage], 0), (needed, pipeline.transfer_ns // unit_ns)):
            if before is not None:
                builder.add_row("work_in_order", [*columns, before], [1, *spent, own - lag, -1], 0)
        if last[stage] is None and needed is None:
            builder.add_row("work_in_order", columns, [1, *spent, own], 0)
        last[stage] = end

    for turn in range(places + num_stages):
        for stage in range(num_stages):
            done = turn - num_stages + stage
            if 0 <= done < places:
                work(backward, pipeline.backward_parts, stage, done, backward.get((stage + 1, done)))
            if turn < places:
                work(forward, pipeline.forward_parts, stage, turn, forward.get((stage - 1, turn)))
    if places:
        builder.add_row("group_waits", [time, backward[0, places - 1]], [1, -1], 0)


def replicas_alike(builder: ProgramBuilder, replicas: list[_Replica]) -> None:
    """Of two equal replicas the first has no fewer micro-batches."""
    for one, other in itertools.pairwise(replicas):
        if one.kind is other.kind:
            places = len(one.exists)
            builder.add_row("replicas_alike", [*one.exists, *other.exists], [1] * places + [-1] * places, 0)
