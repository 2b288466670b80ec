"""The assignment program: the number of sequences of each length on every kind of a set of strategies.

Its optimum is a lower bound of the step's time.

**Sets.** Lengths k; strategies s of the given set; kinds j of pipelines of each strategy (one unless its replicas
differ), with D_j replicas, units u_jk, tokens l_k, capacity C_j; slots v of each kind, its numbers of
micro-batches (``count_cuts``; pipelines of one stage have slots only where all pipelines in the program have
one stage). **Variables.** x_jk >= 0 integer, sequences of length k on kind j; W_jv >= 0, the load of kind j if its
slot is v; nu_jv binary, its slot; N_j integer, micro-batches of all its replicas; g_jk binary, that x_jk > 0; Z_s
>= 0 the time of the group, or of the gradient switch hidden behind it; y_t binary, the tour
(``undominated_tours``). **Objective.** Minimise sum_s Z_s + sum_t constant_t y_t, the time of the step.
Times are whole units of ``unit_ns``; every rounding lowers the bound.

Rows, in the order of the functions that add them:

 - ``every_sequence_runs``: sum_j x_jk = n_k.
 - ``load_has_one_slot``: sum_v W_jv = sum_k u_jk x_jk; sum_v nu_jv = 1 (<= 1 where replicas differ: a kind
   may stay empty); W_jv <= min(all that fits, D_j times what v micro-batches hold) nu_jv.
 - ``slowest_replica_obeys_cuts``: Z_s >= sum_v [slope_iv W_jv / D_j + constant_iv nu_jv] for i = 1, 2, ...
 - ``work_fills_replicas``: D_j Z_s >= (f + b) (sum_k u_jk x_jk + c N_j) + ramps of the replicas in use.
 - ``tokens_need_micro_batches``: C_j N_j >= sum_k l_k x_jk; N_j >= sum over l_k > C_j / 2 of x_jk;
   2 N_j >= sum over l_k > C_j / 3 of x_jk.
 - ``longest_passes_all_stages``: Z_s >= P ((f + b) (u_jk + c)) + 2 (P - 1) l where g_jk = 1; x_jk <= n_k g_jk.
 - ``waits_around_long``: A Z_s >= sum_k u_jk x_jk - b_j0 + sum_i (b_j,i-1 - b_ji) G_ji for the lengths i whose
   ``count_cuts.CapacityRow`` has a capacity; G_ji = 1 where it or a longer one is present: x_jk <= n_k G_ji <= n_k
   G_j,i-1.
 - ``every_strategy_is_used``: sum of all x_jk of a strategy >= 1 (a plan without it belongs to another set).
 - ``one_tour``: sum_t y_t = 1; Z_s >= sum_t hidden_ts y_t.

**Each row holds for every plan** that uses exactly these strategies, with Z_s the exact time of its group:
slots by ``count_cuts`` (nu marks the slot of the replica with the largest load, which is at least W / D_j);
the work row adds the last-stage bound of all replicas; a micro-batch holds at most C_j tokens, so at most one
sequence above half of it and two above a third; a micro-batch that holds length k passes all P stages forward and
back. So the optimum is at most the time of every such plan.

**Screening** (``ranked_sets``) of all sets of strategies by a bound from work and the longest sequence: the *sum*
of ``search``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.lengths.bounds import CapacityRow, PipelineCuts, last_stage_cut
from milpplan.lengths.bounds.count_cuts import SCALE_BITS, CountCuts
from milpplan.lengths.tabled.problem import FloatArray, GroupedProblem, Int64Array, Kind
from milpplan.lengths.tabled.step_plan import TourCostRows, every_strategy_is_used, least_overhead_ns
from milpplan.optimize.milp.program import Program, ProgramBuilder

Proof = Literal["sum", "relaxation", "master", "waits", "exact"]

_MAX_SETS = 300_000


@dataclass(slots=True)
class SetRecord:
    """One set of strategies: its proved bound, and the bounding procedure that proved it."""

    used: tuple[int, ...]
    bound_ns: int
    by: Proof = "sum"


def ranked_sets(problem: GroupedProblem, cuts: dict[Kind, PipelineCuts]) -> list[SetRecord]:
    """List all sets of at most ``max_strategies`` strategies that hold every length, by their *sum* bound."""
    shares, constants = sequence_shares(problem, cuts)
    useful = [s for s in range(len(problem.strategies)) if np.isfinite(shares[s]).any()]
    max_size = min(problem.max_strategies, len(useful))
    num_sets = sum(math.comb(len(useful), size) for size in range(1, max_size + 1))
    if num_sets > _MAX_SETS:
        raise InvalidInputError(
            f"{len(useful)} strategies make {num_sets} sets of at most {max_size}.",
            f"At most {_MAX_SETS} sets expected.",
            "Offer fewer strategies, or lower max_strategies.",
        )
    times_alone = np.array([alone_ns(problem, s) for s in range(len(problem.strategies))])
    records = []
    for size in range(1, max_size + 1):
        for used in itertools.combinations(useful, size):
            lowest_shares = shares[list(used)].min(axis=0)
            if np.isfinite(lowest_shares).all():
                total = math.floor(float(problem.counts @ lowest_shares) * (1.0 - 1e-9)) + int(
                    constants[list(used)].sum()
                )
                longest = int(times_alone[list(used)].min(axis=0).max())
                records.append(SetRecord(used, max(total, longest) + least_overhead_ns(problem, used)))
    return sorted(records, key=lambda record: (record.bound_ns, record.used))


def alone_ns(problem: GroupedProblem, strategy: int) -> FloatArray:
    """Return the time of each length in a micro-batch of its own on the strategy's best replica, ns, [K].

    Infinite if the length fits nowhere. The micro-batch passes all stages forward and back, so no group that holds
    the sequence takes less.
    """
    times = []
    for kind in problem.kinds_of(strategy):
        pipeline = kind.pipeline
        lag = 2 * (pipeline.num_stages - 1) * pipeline.transfer_ns
        passed = (kind.units + pipeline.micro_batch_units) * (pipeline.num_stages * pipeline.parts) + lag
        times.append(np.where(kind.fits, passed, np.inf))
    return np.asarray(np.min(times, axis=0))


def sequence_shares(problem: GroupedProblem, cuts: dict[Kind, PipelineCuts]) -> tuple[FloatArray, Int64Array]:
    """Bound the time that a sequence, and a group without sequences, add to the group's time from below, ns.

    Shapes [strategies, K], infinite where a length does not fit, and [strategies]. For kinds j side by side and
    any weights w_j >= 0 with sum 1, there are two forms; a strategy whose pipelines all have one stage takes the
    second:

     - Z >= r_j (f + b) W_j / D_j for each j (r_j the inflation), so Z >= sum_j w_j r_j (f + b) W_j / D_j.
     - Z >= (f + b) W_j / D_j + e_j for each kind that is used (e_j the minimum that one micro-batch adds).
     Weighted
       over these, Z sum_used w_j >= sum_used w_j ((f + b) W_j / D_j + e_j), so Z >= sum_j w_j (f + b) W_j / D_j +
       min_j e_j, because an unused kind has W_j = 0 and the weights used add up to at most 1.

    A sequence then adds at least its smallest term over j. Weights are in proportion to the kinds' speeds.
    """
    shares = np.full((len(problem.strategies), problem.lengths.size), np.inf)
    constants = np.zeros(len(problem.strategies), np.int64)
    for s in range(len(problem.strategies)):
        kinds = [kind for kind in problem.kinds_of(s) if kind.fits.any()]
        if not kinds:
            continue
        is_single_stage = all(kind.pipeline.num_stages == 1 for kind in kinds)
        times = [_unit_times(kind, 1.0 if is_single_stage else cuts[kind].inflation) for kind in kinds]
        common = np.logical_and.reduce([kind.fits for kind in kinds])
        speeds = np.array(
            [1.0 / max(1e-9, float((unit_times * problem.counts)[common].sum())) for unit_times in times]
        )
        weights = speeds / speeds.sum()
        shares[s] = np.min(
            [unit_times * weight for unit_times, weight in zip(times, weights, strict=True)], axis=0
        )
        if is_single_stage:
            constants[s] = min(last_stage_cut(kind, 1).constant >> SCALE_BITS for kind in kinds)
    return shares, constants


def _unit_times(kind: Kind, inflation: float) -> FloatArray:
    """Return the time of one sequence of each length if all replicas share it, ns, [K]; infinite if too long."""
    times = kind.units * (inflation * kind.pipeline.parts / kind.num_replicas)
    return np.where(kind.fits, times, np.inf)


# Slopes of cuts are whole multiples of 1 / this, rounded down.
DEFAULT_FRACTIONS = 2**14


@dataclass(slots=True)
class _Columns:
    """Columns of one kind: sequences [K] (-1 where a length does not fit), loads, slots, micro-batches."""

    kind: Kind
    sequences: list[int]
    micro_batches: int
    time: int
    loads: range = field(default_factory=lambda: range(0))
    slots: range = field(default_factory=lambda: range(0))

    def fitting(self) -> list[tuple[int, int]]:
        """List pairs (length's index, column)."""
        return [(k, column) for k, column in enumerate(self.sequences) if column >= 0]


@dataclass(frozen=True, slots=True, eq=False)
class AssignmentProgram:
    """Assignment program of one set of strategies, with the columns of its decisions."""

    program: Program
    kinds: tuple[Kind, ...]
    sequence_columns: Int64Array

    def loads(self, values: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> dict[int, Int64Array]:
        """Return the sequences of every kind (its index in ``kinds``), [K]."""
        return {
            j: np.where(columns >= 0, np.asarray(values)[columns], 0).astype(np.int64)
            for j, columns in enumerate(self.sequence_columns)
        }


def assignment_program(
    problem: GroupedProblem,
    used: tuple[int, ...],
    cuts: Mapping[Kind, PipelineCuts],
    unit_ns: int,
    fractions: int = DEFAULT_FRACTIONS,
    profiles: bool = True,
    waits: Mapping[Kind, CapacityRow] | None = None,
) -> AssignmentProgram:
    """Build the program for exactly the strategies ``used``.

    Args:
        problem: the step.
        used: indices of the strategies.
        cuts: bounds of every kind by number of micro-batches.
        unit_ns: unit of times.
        fractions: slopes of cuts are multiples of 1 / ``fractions``.
        profiles: False leaves out the cuts of profiles, which are then not computed.
        waits: capacity rows of idle time, valid for plans whose group times are in the rows' interval.
    """
    builder = ProgramBuilder(f"groups {'+'.join(problem.strategies[s].name for s in used)}")
    kinds = tuple(kind for s in used for kind in problem.kinds_of(s))
    tour_costs = TourCostRows.add(builder, problem, used, kinds, unit_ns)
    columns = [_add_columns(builder, kind, tour_costs.times[kind.strategy]) for kind in kinds]
    every_sequence_runs(builder, problem, columns)
    # Beside pipelines of several stages, slots of single-stage ones hardly raise the bound, and cost time.
    single_stage_only = all(kind.pipeline.num_stages == 1 for kind in kinds)
    for kind_columns in columns:
        if kind_columns.kind.pipeline.num_stages > 1 or single_stage_only:
            is_only_kind = len(problem.kinds_of(kind_columns.kind.strategy)) == 1
            slots = cuts[kind_columns.kind].slots if profiles else cuts[kind_columns.kind].rough
            capacities = [cuts[kind_columns.kind].most_units(slot) for slot in slots]
            load_has_one_slot(builder, kind_columns, slots, capacities, unit_ns, is_only_kind)
            slowest_replica_obeys_cuts(builder, kind_columns, slots, unit_ns, fractions)
        work_fills_replicas(builder, kind_columns, unit_ns)
        tokens_need_micro_batches(builder, kind_columns)
        longest_passes_all_stages(builder, kind_columns, unit_ns)
        if waits is not None and kind_columns.kind in waits:
            waits_around_long(builder, kind_columns, waits[kind_columns.kind], unit_ns, fractions)
    for strategy in used:
        strategy_columns = [kind_columns for kind_columns in columns if kind_columns.kind.strategy == strategy]
        name = problem.strategies[strategy].name
        every_strategy_is_used(
            builder, name, [column for kind_columns in strategy_columns for _, column in kind_columns.fitting()]
        )
    tour_costs.minimize(builder)
    table = np.array([kind_columns.sequences for kind_columns in columns], np.int64)
    return AssignmentProgram(builder.build(), kinds, table)


def _add_columns(builder: ProgramBuilder, kind: Kind, time: int) -> _Columns:
    """Add the columns of a kind."""
    name = kind.pipeline.name
    sequences = [
        builder.add_variable(f"x[{name},{length}]", 0, count) if fits else -1
        for length, count, fits in zip(
            kind.lengths.tolist(), kind.counts.tolist(), kind.fits.tolist(), strict=True
        )
    ]
    limit = int(kind.counts[kind.fits].sum())
    if kind.pipeline.max_micro_batches is not None:
        limit = min(limit, kind.num_replicas * kind.pipeline.max_micro_batches)
    micro_batches = builder.add_variable(f"N[{name}]", 0, limit)
    return _Columns(kind, sequences, micro_batches, time)


def every_sequence_runs(builder: ProgramBuilder, problem: GroupedProblem, columns: list[_Columns]) -> None:
    """sum_j x_jk = n_k for every length; a row without variables makes the program infeasible, as it should."""
    for k, (length, count) in enumerate(zip(problem.lengths.tolist(), problem.counts.tolist(), strict=True)):
        length_columns = [kind_columns.sequences[k] for kind_columns in columns if kind_columns.sequences[k] >= 0]
        builder.add_row(f"every_sequence_runs[{length}]", length_columns, [1] * len(length_columns), count, count)


def _work(kind_columns: _Columns, unit_ns: int) -> tuple[list[int], list[int]]:
    """Return the columns of the kind's sequences and their times on a stage, in units rounded down."""
    parts = kind_columns.kind.pipeline.parts
    fitting = kind_columns.fitting()
    return [column for _, column in fitting], [
        int(kind_columns.kind.units[k]) * parts // unit_ns for k, _ in fitting
    ]


def load_has_one_slot(
    builder: ProgramBuilder,
    kind_columns: _Columns,
    slots: tuple[CountCuts, ...],
    capacities: list[float],
    unit_ns: int,
    is_only_kind: bool,
) -> None:
    """The W_jv add up to the load, and are zero but in the chosen slot."""
    columns, works = _work(kind_columns, unit_ns)
    name = kind_columns.kind.pipeline.name
    highest_load = sum(
        work * int(kind_columns.kind.counts[k]) for work, (k, _) in zip(works, kind_columns.fitting(), strict=True)
    )
    labels = [slot.num_micro_batches for slot in slots]
    first = builder.num_variables
    for label in labels:
        builder.add_variable(f"W[{name},{label}]", 0, highest_load, False)
    kind_columns.loads = range(first, builder.num_variables)
    kind_columns.slots = builder.add_variables([f"slot[{name},{label}]" for label in labels], 1)
    builder.add_row(
        f"load_adds_up[{name}]",
        [*kind_columns.loads, *columns],
        [1] * len(slots) + [-work for work in works],
        0,
        0,
    )
    # A kind beside others may stay empty, without a slot.
    builder.add_row(f"one_slot[{name}]", kind_columns.slots, [1] * len(slots), 1 if is_only_kind else 0, 1)
    for load, column, slot, capacity_units in zip(
        kind_columns.loads, kind_columns.slots, slots, capacities, strict=True
    ):
        # The largest load of a replica is at least the mean, and fits into its micro-batches.
        capacity = kind_columns.kind.num_replicas * capacity_units * kind_columns.kind.pipeline.parts / unit_ns
        limit = int(min(highest_load, math.ceil(capacity))) if capacity < math.inf else highest_load
        builder.add_row(f"load_in_slot[{name},{slot.num_micro_batches}]", [load, column], [-1, limit], 0)


def slowest_replica_obeys_cuts(
    builder: ProgramBuilder, kind_columns: _Columns, slots: tuple[CountCuts, ...], unit_ns: int, fractions: int
) -> None:
    """F D Z >= sum_v [floor(F slope / parts) W_v + floor(F D constant / unit) slot_v], for each layer of cuts."""
    kind, parts = kind_columns.kind, kind_columns.kind.pipeline.parts
    replicas = kind.num_replicas
    scale = 2**SCALE_BITS
    layers = max(len(slot.cuts) for slot in slots)
    for layer in range(layers):
        chosen = [slot.cuts[min(layer, len(slot.cuts) - 1)] for slot in slots]
        slopes = [fractions * cut.slope // (scale * parts) for cut in chosen]
        constants = [fractions * replicas * cut.constant // (scale * unit_ns) for cut in chosen]
        builder.add_row(
            f"slowest_replica_obeys_cuts[{kind.pipeline.name},{layer}]",
            [kind_columns.time, *kind_columns.loads, *kind_columns.slots],
            [fractions * replicas, *(-slope for slope in slopes), *(-constant for constant in constants)],
            0,
        )


def work_fills_replicas(builder: ProgramBuilder, kind_columns: _Columns, unit_ns: int) -> None:
    """D Z >= work + (f + b) c N: the last stages of all replicas together."""
    columns, works = _work(kind_columns, unit_ns)
    pipeline = kind_columns.kind.pipeline
    empty = pipeline.parts * pipeline.micro_batch_units // unit_ns
    builder.add_row(
        f"work_fills_replicas[{pipeline.name}]",
        [kind_columns.time, kind_columns.micro_batches, *columns],
        [kind_columns.kind.num_replicas, -empty, *(-work for work in works)],
        0,
    )


def tokens_need_micro_batches(builder: ProgramBuilder, kind_columns: _Columns) -> None:
    """Micro-batches hold at most their capacity, one sequence above half of it, two above a third."""
    kind = kind_columns.kind
    # No micro-batch holds more than all tokens; larger numbers only cause numerical trouble in solvers.
    capacity = min(kind.pipeline.micro_batch_tokens, int(kind.counts @ kind.lengths))
    name, fitting = kind.pipeline.name, kind_columns.fitting()
    columns = [column for _, column in fitting]
    tokens = [int(kind.lengths[k]) for k, _ in fitting]
    # In units of the lengths' common divisor; rounding the capacity down to it loses nothing.
    step = int(np.gcd.reduce(kind.lengths))
    builder.add_row(
        f"tokens_need_micro_batches[{name}]",
        [kind_columns.micro_batches, *columns],
        [capacity // step, *(-length // step for length in tokens)],
        0,
    )
    halves = [column for column, length in zip(columns, tokens, strict=True) if 2 * length > capacity]
    thirds = [
        column for column, length in zip(columns, tokens, strict=True) if 3 * length > capacity >= 2 * length
    ]
    if halves:
        builder.add_row(
            f"one_above_half[{name}]", [kind_columns.micro_batches, *halves], [1] + [-1] * len(halves), 0
        )
    if thirds:
        builder.add_row(
            f"above_a_third[{name}]",
            [kind_columns.micro_batches, *halves, *thirds],
            [2, *([-1] * len(halves)), *([-1] * len(thirds))],
            0,
        )


def longest_passes_all_stages(builder: ProgramBuilder, kind_columns: _Columns, unit_ns: int) -> None:
    """Z >= P (f + b) (u + c) + 2 (P - 1) l where a length is present."""
    kind, pipeline = kind_columns.kind, kind_columns.kind.pipeline
    lag = 2 * (pipeline.num_stages - 1) * pipeline.transfer_ns
    for k, column in kind_columns.fitting():
        time_alone = pipeline.num_stages * pipeline.parts * (int(kind.units[k]) + pipeline.micro_batch_units) + lag
        name = f"{pipeline.name},{int(kind.lengths[k])}"
        present = builder.add_variable(f"present[{name}]", 0, 1)
        builder.add_row(f"present[{name}]", [column, present], [-1, int(kind.counts[k])], 0)
        builder.add_row(
            f"longest_passes_all_stages[{name}]", [kind_columns.time, present], [1, -(time_alone // unit_ns)], 0
        )


def waits_around_long(
    builder: ProgramBuilder, kind_columns: _Columns, capacity_row: CapacityRow, unit_ns: int, fractions: int
) -> None:
    """F Z >= floor(F / A) work - F b_0 / A + sum_i F (b_{i-1} - b_i) / A G_i.

    G_i = 1 where a sequence of its lengths is present; the G_i fall with i.
    """
    columns, works = _work(kind_columns, unit_ns)
    name, fraction_per_slope = kind_columns.kind.pipeline.name, fractions / capacity_row.slope
    presences: list[int] = []
    losses: list[int] = []
    ends = [length for length, _ in capacity_row.capacities[1:]] + [kind_columns.kind.lengths.size]
    capacity = capacity_row.capacity_of_any
    # Without any learned length there is one end too many, so the zip is not strict.
    for (length, next_capacity), end in zip(capacity_row.capacities, ends, strict=False):
        present = builder.add_variable(f"long[{name},{int(kind_columns.kind.lengths[length])}]", 0, 1)
        for k, column in kind_columns.fitting():
            if length <= k < end:
                label = f"long[{name},{int(kind_columns.kind.lengths[k])}]"
                builder.add_row(label, [column, present], [-1, int(kind_columns.kind.counts[k])], 0)
        if presences:
            builder.add_row(
                f"longer[{name},{int(kind_columns.kind.lengths[length])}]", [presences[-1], present], [1, -1], 0
            )
        presences.append(present)
        losses.append(math.floor(fraction_per_slope * (capacity - next_capacity) / unit_ns))
        capacity = next_capacity
    builder.add_row(
        f"waits_around_long[{name}]",
        [kind_columns.time, *columns, *presences],
        [fractions, *(-math.floor(fraction_per_slope) * work for work in works), *(-loss for loss in losses)],
        math.floor(-fraction_per_slope * capacity_row.capacity_of_any / unit_ns) - 1,
    )
