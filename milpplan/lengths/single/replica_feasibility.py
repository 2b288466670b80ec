"""Feasibility of one replica as an integer program, for pipelines whose micro-batches have few possible contents.

If sequences have few lengths (equal ones, powers of two, a handful of buckets), bounds that divide contents among
the micro-batches of a pipeline are weak: real micro-batches are whole, and stages wait for one that differs from
its neighbours. But then a replica is a small program.

With whole prices w of the sequences some replica of a packing holds at least its share of all sequences, W =
ceil(sum_k n_k w_k / D). So no packing takes at most Z if for every number v of micro-batches no replica of v is
worth W and finishes within Z:

 - y_jc, binary: micro-batch j has the content c; ``one_content``: sum_c y_jc = 1.
 - ``holds_its_share``: sum_jc w_c y_jc >= W, with w_c the value of the content.
 - F_pj, B_pj <= Z: ``work_in_order``: the recurrence of ``cost_tables``, with the exact times of the contents as
   durations.

The contents are all sets of sequences that fit into a micro-batch. If there are too many, there is one for every
number of quanta, with the minimum of their times on every stage and the maximum of their values. Times are rounded
down to a 20,000th of Z.

*Number of micro-batches.* On the last stage v micro-batches take at least v min_c (t_c - m w_c) + m W for any m,
plus the ramp before and after. That closes all but some v, and, by those m for which it rises in v, all beyond
``MOST``.

If all sequences are equal, a feasible replica gives a packing of all: the other replicas hold as many or fewer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from milpplan.errors import SolverError
from milpplan.lengths import StrategyTables, micro_batch_times, pipeline_ns
from milpplan.lengths.cost_tables import StageTimes
from milpplan.lengths.deadline import Deadline
from milpplan.optimize.milp.backends import AUTO, backend, check_infeasible
from milpplan.optimize.milp.program import Program, ProgramBuilder
from milpplan.optimize.milp.solution import Limits
from milpplan.simulation import FloatArray, IntArray

# Maximum number of contents in a program, and in the full list; maximum number of micro-batches of a replica.
_CONTENTS, _LISTED, MOST = 48, 20_000, 32
# Resolution of durations, as parts of the time.
_PARTS = 20_000
# Seconds of a program after which its number of micro-batches is given up.
_LONG_S = 8.0
# Factor on the next time asked for if a replica is feasible but gives no packing.
_LESS = 0.996
# Factor that covers the rounding of float sums.
_SAFETY = 1.0 - 1e-9


@dataclass(eq=False)
class ReplicaFeasibility:
    """Feasibility of one replica of a ``member``, by number of micro-batches."""

    pool: StrategyTables
    member: int
    rows: IntArray
    """Contents, [C, n]."""
    times: StageTimes
    """Exact times of the contents in ns, [P, C]."""
    values: IntArray
    """Whole values of the contents, [C]."""
    share: int
    """Minimum value of some replica."""
    proved_ns: dict[int, float] = field(default_factory=dict)
    """Time within which no replica is feasible."""
    feasible_ns: dict[int, float] = field(default_factory=dict)
    """Time of a feasible replica; 0 if the number was given up."""

    @staticmethod
    def of(pool: StrategyTables, member: int) -> ReplicaFeasibility | None:
        """Build the problem of a pipeline; None if its micro-batches have too many possible contents."""
        load, capacity = pool.load, pool.max_quanta(member, shared_memory=False)
        rows = (
            None
            if pool.num_stages(member) == 1
            else _contents(load.lengths // load.token_quantum, load.counts, capacity)
        )
        if rows is None or not 0 < len(np.unique(rows @ load.lengths)) <= _CONTENTS:
            return None
        prices = _prices(pool)
        worths, candidate = rows @ prices, pool.members[member].candidate
        times = micro_batch_times(pool.problem, candidate, load.lengths, rows, load.rules.mask)
        if len(rows) > _CONTENTS:
            rows, times, worths = _by_grains(rows @ load.lengths // load.token_quantum, rows, times, worths)
        share = -(-int(load.counts @ prices) // candidate.layout.dp)
        return ReplicaFeasibility(pool, member, rows, times, worths, share)

    def open_numbers(self, time_ns: float) -> list[int]:
        """Return the numbers of micro-batches that are not excluded within a time, the likeliest first; a number
        above ``MOST`` stands for all larger ones."""
        min_times_ns = self._least()
        open_numbers = [
            number
            for number, min_ns in enumerate(min_times_ns, 1)
            if min_ns <= time_ns > self.proved_ns.get(number, 0.0)
        ]
        return sorted(open_numbers, key=lambda number: min_times_ns[number - 1])

    def provable_ns(self, time_ns: float) -> float:
        """Return the time in ns for which a proof may exist.

        With several lengths a feasible replica is no packing of all, so it is slightly less than the time of such
        a replica.
        """
        feasible_ns = [ns for ns in self.feasible_ns.values() if ns]
        return time_ns if self._equal else min([time_ns, *(_LESS * ns for ns in feasible_ns)])

    def run(
        self, time_ns: float, backend_name: str, pause: Deadline, deadline: Deadline
    ) -> tuple[IntArray, ...] | None:
        """Exclude numbers of micro-batches, or find a replica within the time.

        Args:
            time_ns: time of a replica.
            backend_name: solver.
            pause: after it no program is begun later.
            deadline: ends a running program.

        Returns:
            The packing of all sequences that a feasible replica gives if they are equal, [v, 1] each.
        """
        for number in self.open_numbers(time_ns):
            left_s = deadline.left_s
            if self.done(time_ns) or left_s <= 0.0 or pause.passed:
                break
            if self.feasible_ns.get(number, np.inf) > time_ns:
                replica = self._replica(number, time_ns, backend_name, left_s)
                if replica is not None and self._equal:
                    return self._dealt_alike(replica)
        return None

    def done(self, time_ns: float) -> bool:
        """Return whether nothing more can be proved for a time: all open numbers are feasible, or one was given
        up."""
        open_numbers = self.open_numbers(time_ns)
        feasible_ns = [0.0 if number > MOST else self.feasible_ns.get(number, np.inf) for number in open_numbers]
        return all(ns <= time_ns for ns in feasible_ns) or 0.0 in feasible_ns

    @property
    def _equal(self) -> bool:
        return len(self.pool.load.lengths) == 1

    def _dealt_alike(self, feasible: IntArray) -> tuple[IntArray, ...]:
        """Distribute all sequences over replicas like the feasible one [v, 1]; its largest micro-batches lose one
        sequence where a replica holds fewer."""
        num_sequences, num_replicas = (
            int(self.pool.load.counts[0]),
            self.pool.members[self.member].candidate.layout.dp,
        )
        packing = []
        for replica in range(num_replicas):
            replica_counts = feasible.copy()
            for _ in range(
                int(feasible.sum()) - num_sequences // num_replicas - (replica < num_sequences % num_replicas)
            ):
                replica_counts[replica_counts.argmax()] -= 1
            packing.append(replica_counts[replica_counts[:, 0] > 0])
        return tuple(packing)

    def _replica(self, number: int, time_ns: float, backend_name: str, left_s: float) -> IntArray | None:
        """Solve the program of a number of micro-batches and record the result; return a feasible replica."""
        name, seconds = "cpsat" if backend_name == AUTO else backend_name, min(_LONG_S, left_s)
        try:
            program, limits = self.program(number, time_ns), Limits(time_limit_s=max(0.1, seconds))
            solution = check_infeasible(program, limits, backend(name).solve(program, limits))
        except SolverError:
            # An answer that fails the checks proves nothing.
            self.feasible_ns[number] = 0.0
            return None
        if solution.status == "infeasible":
            self.proved_ns[number] = time_ns
        elif solution.values is not None:
            chosen = np.asarray(solution.values[: number * len(self.rows)]).reshape(number, -1).argmax(axis=1)
            times = self.times
            taken_ns = pipeline_ns(times.forward[:, chosen], times.backward[:, chosen], times.transfer[chosen])
            # The program rounds durations down.
            self.feasible_ns[number] = min(float(taken_ns), time_ns)
            return np.asarray(self.rows[chosen])
        elif seconds == _LONG_S:
            self.feasible_ns[number] = 0.0
        return None

    def _least(self) -> list[float]:
        """Return the minimum time in ns of a replica of 1, 2, ... MOST micro-batches, and of more."""
        last = (self.times.forward[-1] + self.times.backward[-1]).astype(np.float64)
        ahead, behind = (value[:-1] + self.times.transfer for value in (self.times.forward, self.times.backward))
        ramp = float(ahead.sum(axis=0).min() + behind.sum(axis=0).min())
        slopes = _slopes(last, self.values.astype(np.float64))
        constants = (last - slopes[:, None] * self.values).min(axis=1)
        numbers = np.arange(1, MOST + 2)
        lines = constants * numbers[:, None] + slopes * self.share
        # For more than MOST only the lines that do not fall are valid.
        lines[-1, constants < 0] = 0.0
        holds = numbers * int(self.values.max()) >= self.share
        holds[-1] = True
        min_times = np.where(holds, lines.max(axis=1) * _SAFETY + ramp, np.inf)
        return [float(value) for value in min_times]

    def program(self, number: int, time_ns: float) -> Program:
        """Build the program of the module for a number of micro-batches, a feasibility problem."""
        unit = max(1, int(time_ns) // _PARTS)
        horizon = int(time_ns) // unit
        builder = ProgramBuilder(f"whole replicas of {number}")
        width = len(self.rows)
        content = [builder.add_variables([f"y[{j},{c}]" for c in range(width)], 0, 1) for j in range(number)]
        for j, columns in enumerate(content):
            builder.add_row(f"one_content[{j}]", columns, [1] * width, 1, 1)
        builder.add_row(
            "holds_its_share",
            [column for columns in content for column in columns],
            self.values.tolist() * number,
            self.share,
        )
        forward, backward, transfer = (
            (duration // unit).astype(np.int64)
            for duration in (self.times.forward, self.times.backward, self.times.transfer)
        )
        ends = {
            (kind, p, j): builder.add_variable(f"{kind}[{p},{j}]", 0, horizon, False)
            for kind in "FB"
            for p in range(len(forward))
            for j in range(number)
        }
        for p in range(len(forward)):
            before: int | None = None
            for kind, j in _order(len(forward), p, number):
                duration, end = (forward if kind == "F" else backward)[p], ends[kind, p, j]
                predecessor = _earlier(ends, len(forward), kind, p, j)
                waits = [(before, duration)] + (
                    [] if predecessor is None else [(predecessor[0], duration + predecessor[1] * transfer)]
                )
                for index, (start, taken) in enumerate(waits):
                    starts = [] if start is None else [start]
                    builder.add_row(
                        f"work_in_order[{kind},{p},{j},{index}]",
                        [end, *starts, *content[j]],
                        [1, *([-1] * len(starts)), *(-taken).tolist()],
                        0,
                    )
                before = end
        return builder.build()


def _order(num_stages: int, stage: int, number: int) -> Iterator[tuple[str, int]]:
    """Yield the forwards and backwards of a stage in the order of 1F1B."""
    ahead = min(num_stages - stage - 1, number)
    yield from (("F", j) for j in range(ahead))
    for j in range(number):
        if ahead + j < number:
            yield "F", ahead + j
        yield "B", j


def _earlier(
    ends: dict[tuple[str, int, int], int], num_stages: int, kind: str, p: int, j: int
) -> tuple[int, int] | None:
    """Return the work on another stage that this work waits for, and 1 if there is a transfer between."""
    if kind == "F":
        return (ends["F", p - 1, j], 1) if p else None
    return (ends["B", p + 1, j], 1) if p + 1 < num_stages else (ends["F", p, j], 0)


def _contents(quanta: IntArray, counts: IntArray, capacity: int) -> IntArray | None:
    """Return all nonempty sets of sequences, [C, n], of up to ``capacity`` quanta; None if there are too many."""
    rows, sizes = np.zeros((1, 0), dtype=np.int64), np.zeros(1, dtype=np.int64)
    for size, count in zip(quanta.tolist(), counts.tolist(), strict=True):
        max_counts = np.minimum(count, (capacity - sizes) // size)
        if int((max_counts + 1).sum()) > _LISTED:
            return None
        column = np.concatenate([np.arange(number + 1) for number in max_counts.tolist()])
        rows = np.column_stack([np.repeat(rows, max_counts + 1, axis=0), column])
        sizes = np.repeat(sizes, max_counts + 1) + column * size
    return rows[sizes > 0]


def _prices(pool: StrategyTables) -> IntArray:
    """Return the prices of sequences, [n]: their tokens.

    Priced by their work, contents of equal tokens would have the value of the content with most attention in the
    time of the content with least.
    """
    quanta = pool.load.lengths // pool.load.token_quantum
    return np.asarray(quanta // np.gcd.reduce(quanta))


def _by_grains(
    quanta: IntArray, rows: IntArray, times: StageTimes, worths: IntArray
) -> tuple[IntArray, StageTimes, IntArray]:
    """Return one content per number of quanta, with the minimum of all times and the maximum of all values."""
    sizes, first, group = np.unique(quanta, return_index=True, return_inverse=True)
    max_worths = np.zeros(len(sizes), dtype=np.int64)
    np.maximum.at(max_worths, group, worths)

    def least(values: IntArray) -> IntArray:
        minima = np.full((*values.shape[:-1], len(sizes)), np.iinfo(np.int64).max)
        np.minimum.at(minima.T, group, values.T)
        return minima

    minima = StageTimes(least(times.forward), least(times.backward), least(times.transfer))
    return rows[first], minima, max_worths


def _slopes(times: FloatArray, worths: FloatArray) -> FloatArray:
    """Return the nonnegative slopes between any two contents, and of each by itself."""
    with np.errstate(divide="ignore", invalid="ignore"):
        between = (times[:, None] - times[None]) / (worths[:, None] - worths[None])
    slopes = np.append(between[np.isfinite(between) & (between > 0)], times / np.maximum(1.0, worths))
    return np.unique(slopes)
