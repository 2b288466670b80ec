"""Pipelines whose micro-batches can be few things: one replica as an integer program.

Where sequences have few lengths (equal ones, powers of two, a handful of buckets), bounds that share contents out
among the places of a pipeline lose most: real micro-batches are whole, and stages wait for the one that is not
like its neighbours (4 to 6 % of 60 equal sequences on four stages). But then a replica is a small program.

With prices w of the sequences, whole numbers, some replica of a packing holds at least its share of all of
them, W = ceil(sum_k n_k w_k / D). So no packing takes at most Z, if for every number v of micro-batches there is
no replica of v that is worth W and done within Z:

 - y_jc, binary: place j has the content c; ``one_content``: sum_c y_jc = 1.
 - ``holds_its_share``: sum_jc w_c y_jc >= W, with w_c what the content is worth.
 - F_pj, B_pj <= Z: ``work_in_order``: the recurrence of ``replicas``, with the exact times of the contents in the
   place of the durations.

Contents are all sets of sequences that fit into a micro-batch, or where these are too many, one of every number of
grains, with the least of their times on every stage and the most that they are worth. Times are rounded down to a
20,000th of Z.

*How many micro-batches.* On the last stage v of them take at least v min_c (t_c - m w_c) + m W for any m, besides
the ramp before and after. That closes all but some v, and by those m for which it rises in v, all beyond ``MOST``.

Where all sequences are equal a replica that is found is a packing of all: the others hold as many or fewer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from milpplan.errors import SolverError
from milpplan.lengths.replica_time import StageTimes, micro_batch_times, pipeline_ns
from milpplan.lengths.strategy_tables import StrategyTables
from milpplan.optimize.milp.backends import AUTO, backend, witnessed
from milpplan.optimize.milp.program import Program, ProgramBuilder
from milpplan.optimize.milp.solution import Limits
from milpplan.simulation.layout_columns import FloatArray, IntArray

# Contents of a micro-batch at most in a program, of which more are never listed; micro-batches of a replica.
_CONTENTS, _LISTED, MOST = 48, 20_000, 32
# Parts of the time that durations are multiples of.
_PARTS = 20_000
# A number of micro-batches that took so long is not looked at again.
_LONG_S = 8.0
# How much less is asked for where a replica is found that is no packing of all.
_LESS = 0.996
# What sums of floats may add.
_SAFETY = 1.0 - 1e-9


@dataclass(eq=False)
class ReplicaFeasibility:
    """One replica of a ``member``: ``rows`` [C, n] contents with ``times`` (ns, [P, C]) and whole ``worths`` [C];
    what a replica ``share`` is worth at least. By number of micro-batches, ``proved_ns``: no replica of so many is
    done within so long; ``known_ns``: one is, or it is not looked at again (0)."""

    pool: StrategyTables
    member: int
    rows: IntArray
    times: StageTimes
    worths: IntArray
    share: int
    proved_ns: dict[int, float] = field(default_factory=dict)
    known_ns: dict[int, float] = field(default_factory=dict)

    @staticmethod
    def of(pool: StrategyTables, member: int) -> ReplicaFeasibility | None:
        """That of a pipeline, or None where its micro-batches can be too many things."""
        load, room = pool.load, pool.max_quanta(member, beside=False)
        rows = None if pool.num_stages(member) == 1 else _contents(load.lengths // load.token_quantum, load.counts, room)
        if rows is None or not 0 < len(np.unique(rows @ load.lengths)) <= _CONTENTS:
            return None
        prices = _prices(pool)
        worths, candidate = rows @ prices, pool.members[member].candidate
        times = micro_batch_times(pool.problem, candidate, load.lengths, rows, load.rules.mask)
        if len(rows) > _CONTENTS:
            rows, times, worths = _by_grains(rows @ load.lengths // load.token_quantum, rows, times, worths)
        share = -(-int(load.counts @ prices) // candidate.layout.dp)
        return ReplicaFeasibility(pool, member, rows, times, worths, share)

    def within(self, time_ns: float) -> list[int]:
        """Numbers of micro-batches of which a replica may be done within a time, the likeliest first; one above
        ``MOST`` stands for all of these."""
        least = self._least()
        open_ = [number for number, ns in enumerate(least, 1) if ns <= time_ns > self.proved_ns.get(number, 0.0)]
        return sorted(open_, key=lambda number: least[number - 1])

    def asked(self, time_ns: float) -> float:
        """For what time there may be a proof, ns: of several lengths a replica that is done sooner is no packing
        of all, so a little less than what such a one takes."""
        found = [known for known in self.known_ns.values() if known]
        return time_ns if self._equal else min([time_ns, *(_LESS * one for one in found)])

    def run(self, time_ns: float, backend_name: str, pause: float, deadline: float) -> tuple[IntArray, ...] | None:
        """Close numbers of micro-batches, or find a replica of one that is done within the time: the packing of
        all that it is where sequences are equal, [v, 1] each. After the ``pause`` none is begun, at the
        ``deadline`` (both of ``perf_counter``) all ends."""
        for number in self.within(time_ns):
            left_s = deadline - time.perf_counter()
            if self.done(time_ns) or left_s <= 0.0 or time.perf_counter() > pause:
                break
            if self.known_ns.get(number, np.inf) > time_ns:
                found = self._replica(number, time_ns, backend_name, left_s)
                if found is not None and self._equal:
                    return self._dealt_alike(found)
        return None

    def done(self, time_ns: float) -> bool:
        """Whether nothing more comes to be known of replicas done within a time: of all numbers that are open one
        is, or one cannot be closed."""
        open_ = self.within(time_ns)
        known = [0.0 if number > MOST else self.known_ns.get(number, np.inf) for number in open_]
        return all(ns <= time_ns for ns in known) or 0.0 in known

    @property
    def _equal(self) -> bool:
        return len(self.pool.load.lengths) == 1

    def _dealt_alike(self, found: IntArray) -> tuple[IntArray, ...]:
        """All sequences on replicas like the one that was found [v, 1]: the largest micro-batches have one less
        where a replica holds fewer."""
        number, replicas = int(self.pool.load.counts[0]), self.pool.members[self.member].candidate.layout.dp
        dealt = []
        for replica in range(replicas):
            held = found.copy()
            for _ in range(int(found.sum()) - number // replicas - (replica < number % replicas)):
                held[held.argmax()] -= 1
            dealt.append(held[held[:, 0] > 0])
        return tuple(dealt)

    def _replica(self, number: int, time_ns: float, backend_name: str, left_s: float) -> IntArray | None:
        name, seconds = "cpsat" if backend_name == AUTO else backend_name, min(_LONG_S, left_s)
        try:
            program, limits = self.program(number, time_ns), Limits(time_limit_s=max(0.1, seconds))
            found = witnessed(program, limits, backend(name).solve(program, limits))
        except SolverError:
            # An answer that does not stand says nothing.
            self.known_ns[number] = 0.0
            return None
        if found.status == "infeasible":
            self.proved_ns[number] = time_ns
        elif found.values is not None:
            chosen = np.asarray(found.values[: number * len(self.rows)]).reshape(number, -1).argmax(axis=1)
            times = self.times
            taken_ns = pipeline_ns(times.forward[:, chosen], times.backward[:, chosen], times.transfer[chosen])
            # Durations are rounded down in the program.
            self.known_ns[number] = min(float(taken_ns), time_ns)
            return np.asarray(self.rows[chosen])
        elif seconds == _LONG_S:
            self.known_ns[number] = 0.0
        return None

    def _least(self) -> list[float]:
        """What a replica of 1, 2, ... MOST micro-batches takes at least, and of more, ns."""
        last = (self.times.forward[-1] + self.times.backward[-1]).astype(np.float64)
        ahead, behind = (one[:-1] + self.times.transfer for one in (self.times.forward, self.times.backward))
        ramp = float(ahead.sum(axis=0).min() + behind.sum(axis=0).min())
        slopes = _slopes(last, self.worths.astype(np.float64))
        constants = (last - slopes[:, None] * self.worths).min(axis=1)
        numbers = np.arange(1, MOST + 2)
        lines = constants * numbers[:, None] + slopes * self.share
        # Of more than so many: those that do not fall.
        lines[-1, constants < 0] = 0.0
        holds = numbers * int(self.worths.max()) >= self.share
        holds[-1] = True
        least = np.where(holds, lines.max(axis=1) * _SAFETY + ramp, np.inf)
        return [float(one) for one in least]

    def program(self, number: int, time_ns: float) -> Program:
        """That of the module for so many micro-batches, a feasibility problem."""
        unit = max(1, int(time_ns) // _PARTS)
        horizon = int(time_ns) // unit
        builder = ProgramBuilder(f"whole replicas of {number}")
        width = len(self.rows)
        content = [builder.add_variables([f"y[{j},{c}]" for c in range(width)], 0, 1) for j in range(number)]
        for j, columns in enumerate(content):
            builder.add_row(f"one_content[{j}]", columns, [1] * width, 1, 1)
        builder.add_row(
            "holds_its_share",
            [one for columns in content for one in columns],
            self.worths.tolist() * number,
            self.share,
        )
        forward, backward, transfer = (
            (one // unit).astype(np.int64)
            for one in (self.times.forward, self.times.backward, self.times.transfer)
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
                own, end = (forward if kind == "F" else backward)[p], ends[kind, p, j]
                earlier = _earlier(ends, len(forward), kind, p, j)
                waits = [(before, own)] + ([] if earlier is None else [(earlier[0], own + earlier[1] * transfer)])
                for place, (start, taken) in enumerate(waits):
                    starts = [] if start is None else [start]
                    builder.add_row(
                        f"work_in_order[{kind},{p},{j},{place}]",
                        [end, *starts, *content[j]],
                        [1, *([-1] * len(starts)), *(-taken).tolist()],
                        0,
                    )
                before = end
        return builder.build()


def _order(num_stages: int, stage: int, number: int) -> Iterator[tuple[str, int]]:
    """1F1B: what a stage does one after another."""
    ahead = min(num_stages - stage - 1, number)
    yield from (("F", j) for j in range(ahead))
    for j in range(number):
        if ahead + j < number:
            yield "F", ahead + j
        yield "B", j


def _earlier(
    ends: dict[tuple[str, int, int], int], num_stages: int, kind: str, p: int, j: int
) -> tuple[int, int] | None:
    """What work waits for on another stage, and whether there is a transfer between."""
    if kind == "F":
        return (ends["F", p - 1, j], 1) if p else None
    return (ends["B", p + 1, j], 1) if p + 1 < num_stages else (ends["F", p, j], 0)


def _contents(grains: IntArray, counts: IntArray, room: int) -> IntArray | None:
    """All sets of sequences, [C, n], that fill up to ``room`` grains, none of which is empty; None if too many."""
    found, sizes = np.zeros((1, 0), dtype=np.int64), np.zeros(1, dtype=np.int64)
    for size, count in zip(grains.tolist(), counts.tolist(), strict=True):
        most = np.minimum(count, (room - sizes) // size)
        if int((most + 1).sum()) > _LISTED:
            return None
        each = np.concatenate([np.arange(number + 1) for number in most.tolist()])
        found = np.column_stack([np.repeat(found, most + 1, axis=0), each])
        sizes = np.repeat(sizes, most + 1) + each * size
    return found[sizes > 0]


def _prices(pool: StrategyTables) -> IntArray:
    """What sequences are worth, [n]: their tokens. (By their load, contents of as many tokens would be worth what
    the one with most attention is, in the time of the one with least.)"""
    grains = pool.load.lengths // pool.load.token_quantum
    return np.asarray(grains // np.gcd.reduce(grains))


def _by_grains(
    grains: IntArray, rows: IntArray, times: StageTimes, worths: IntArray
) -> tuple[IntArray, StageTimes, IntArray]:
    """One content of every number of grains: the least of all times, the most of all worths, and one of them."""
    sizes, first, place = np.unique(grains, return_index=True, return_inverse=True)
    most = np.zeros(len(sizes), dtype=np.int64)
    np.maximum.at(most, place, worths)

    def least(values: IntArray) -> IntArray:
        found = np.full((*values.shape[:-1], len(sizes)), np.iinfo(np.int64).max)
        np.minimum.at(found.T, place, values.T)
        return found

    found = StageTimes(least(times.forward), least(times.backward), least(times.transfer))
    return rows[first], found, most


def _slopes(times: FloatArray, worths: FloatArray) -> FloatArray:
    """Slopes between any two contents, and of each by itself, none of them negative."""
    with np.errstate(divide="ignore", invalid="ignore"):
        between = (times[:, None] - times[None]) / (worths[:, None] - worths[None])
    found = np.append(between[np.isfinite(between) & (between > 0)], times / np.maximum(1.0, worths))
    return np.unique(found)
