"""Steps by other planners' published rules for the same sequences, strategies and exact times, for comparison.

 - *bucketing*: one strategy for all. Sequences of one bucket share micro-batches, filled to the strategy's
   capacity; the strategy is the one with the shortest step.
 - *HotSPa*: a strategy for every bucket. Buckets end at the longest sequence and at published lengths; a bucket's
   sequences, longest first, are packed greedily up to the bucket's end, one pack a micro-batch; pack i goes to
   replica i mod dp; the shortest bucket runs first, the longest last, and its strategy is the home. HotSPa is
   given its strategies by hand: here every bucket has the strategy under which it takes least time by itself,
   reduction included. Packs beyond a multiple of dp, which its runtime drops, run here.
 - *FlexSP*: ``flexsp_rule``.

Every figure is the exact time of a plan that fits (``strategy_tables``, ``switches``): strategies of several
buckets have the memory of a step of several strategies. Sequences of one strategy form one group.

Source: HotSPa (SOSP 2024), artefact ccchengff/HotSPa-AE 941a18d: hotspa/scripts/llama_hot_switch.sh (ends of
buckets c1 and c2), hotspa/llama_hot_switch.py (packing, order); as in ``hotspa_export``.

**FlexSP's rule** on this project's times: groups of context parallelism of different degree side by side.

A step is a few rounds of one micro-batch each. Sequences, longest first, are cut into M rounds so that the fullest
holds the fewest tokens, with M from the minimum that fits to four more. In a round the cluster is filled with
groups of d = 2, 4, ... GPUs, each runs one packed micro-batch, and the round takes as long as its slowest group;
then the next one starts. FlexSP's groups have the sequence over all their GPUs and the model sharded over the
cluster; here groups have a common tp and the context over d / tp (its all-to-all in place of the ring is the only
thing that is not reproduced), pp = 1, and one recompute setting. States stay where they are: with one tp all ranks
of the data- and context-parallel groups together hold equal states, so nothing is switched.

As in FlexSP an integer program with a time limit assigns the sequences of every round to groups; here that of
``tabled``, over the sequences' own lengths in place of its 16 buckets. The reported time is the exact time of its
answer.

A round with groups of different degree is no step of equal replicas; it is one of ``teams``, whose bound holds for
this rule.

Source: FlexSP (2412.01523); PKU-DAIR/Hetu-Galvatron, branch flexsp, b466689, galvatron/flexsp_solver/solver.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from milpplan.errors import InfeasibleError, SolverError
from milpplan.lengths.bounds import PipelineCuts
from milpplan.lengths.cost_tables import replicas_ns
from milpplan.lengths.deadline import Deadline
from milpplan.lengths.records import BaselineStep
from milpplan.lengths.strategy_tables import Packed, StrategyTables
from milpplan.lengths.tabled import (
    GroupedPlan,
    GroupedProblem,
    Pipeline,
    Strategy,
    SwitchTimes,
    solve_groups,
)
from milpplan.lengths.tabled.assignment_program import ranked_sets
from milpplan.lengths.tabled.step_plan import tour_time_ns
from milpplan.lengths.turns.switches import NEVER_NS, Switches
from milpplan.simulation import IntArray
from milpplan.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class _Family:
    """Members of one tp and recompute setting without stages, by the GPUs of a replica."""

    members: dict[int, int]

    def most_tokens(self, pool: StrategyTables, num_gpus: int) -> int:
        """Return the maximum number of tokens of a round."""
        return max(
            num_gpus // degree * pool.max_quanta(member, shared_memory=False) * pool.load.token_quantum
            for degree, member in self.members.items()
        )


def flexsp_step(pool: StrategyTables, time_limit_s: float, backend: str) -> BaselineStep:
    """Return the shortest step of the rule found in the time, or the reason why there is none."""
    deadline = Deadline.after(time_limit_s)
    best: BaselineStep | None = None
    for family in _families(pool):
        for num_rounds in _numbers(pool, family):
            if best is not None and deadline.passed:
                return best
            best = _shorter(pool, family, num_rounds, best, (backend, min(3.0, time_limit_s)))
    if best is None:
        return BaselineStep(
            "FlexSP", (), None, "No groups of GPUs without stages hold the model and the longest sequence."
        )
    return best


def _families(pool: StrategyTables) -> list[_Family]:
    """Return the families, the lowest bound first."""
    members_of: dict[tuple[object, ...], dict[int, int]] = {}
    for member, strategy in enumerate(pool.members):
        layout = strategy.candidate.layout
        degree = layout.tp * layout.cp
        if layout.pp == 1 and degree > 1 and degree & (degree - 1) == 0:
            key = (layout.tp, layout.ep, layout.etp, strategy.candidate.recompute)
            members_of.setdefault(key, {})[degree] = member
    longest = int(pool.load.lengths[-1])
    kept = [
        members
        for members in members_of.values()
        if any(
            pool.max_quanta(member, shared_memory=False) * pool.load.token_quantum >= longest
            for member in members.values()
        )
    ]
    bound_ns = {id(family): min(pool.step_bound_ns(member) for member in family.values()) for family in kept}
    return [_Family(family) for family in sorted(kept, key=lambda family: bound_ns[id(family)])]


def _num_gpus(pool: StrategyTables) -> int:
    return pool.members[0].candidate.layout.num_gpus


def _numbers(pool: StrategyTables, family: _Family) -> range:
    min_rounds = -(-pool.load.num_quanta * pool.load.token_quantum // family.most_tokens(pool, _num_gpus(pool)))
    # Five values of M are tried.
    return range(min_rounds, min(min_rounds + 5, int(pool.load.counts.sum()) + 1))


def rounds(lengths: IntArray, counts: IntArray, num_rounds: int) -> list[IntArray]:
    """Return the counts [n] of ``num_rounds`` runs of the sequences, longest first, the fullest with the fewest
    tokens.

    Dynamic program over the ends of the runs: F[m, i] = min_j max(F[m - 1, j], tokens from j to i).
    """
    items = np.repeat(np.arange(len(lengths)), counts)[::-1]
    sums = np.concatenate(([0], np.cumsum(lengths[items])))
    min_fullest, starts = sums.copy(), []
    later = np.triu_indices(len(sums), 1)
    for _ in range(num_rounds - 1):
        table = np.maximum(min_fullest[None, :], sums[:, None] - sums[None, :])
        table[later] = sums[-1] + 1
        starts.append(table.argmin(axis=1))
        min_fullest = table.min(axis=1)
    end, runs = len(items), []
    for start in [*reversed(starts), None]:
        first = 0 if start is None else int(start[end])
        runs.append(np.bincount(items[first:end], minlength=len(lengths)))
        end = first
    return [run for run in reversed(runs) if run.any()]


def _shorter(
    pool: StrategyTables, family: _Family, num_rounds: int, best: BaselineStep | None, solver: tuple[str, float]
) -> BaselineStep | None:
    """Return the step of some rounds if it is shorter than the best; ``solver``: backend, seconds a round."""
    members = list(family.members.values())
    total = max(map(pool.reduce_ns, members)) + max(map(pool.finish_ns, members))
    limit = np.inf if best is None or best.step_time_s is None else best.step_time_s * NS_PER_S
    try:
        problems = [
            _round(pool, family, counts) for counts in rounds(pool.load.lengths, pool.load.counts, num_rounds)
        ]
    except InfeasibleError:
        return best
    if total + sum(map(_least_ns, problems)) >= limit:
        return best
    names: list[str] = []
    for problem in problems:
        try:
            plan = solve_groups(problem, solver[0], 0.01, solver[1]).plan
        except (InfeasibleError, SolverError):
            # Whole sequences may not fit where their tokens would.
            return best
        total += _exact_ns(pool, family, plan)
        names += plan.names
        if total >= limit:
            return best
    return BaselineStep("FlexSP", tuple(names), total / NS_PER_S, "")


def _least_ns(problem: GroupedProblem) -> int:
    """Return the first bound of the search for a round."""
    return ranked_sets(problem, {kind: PipelineCuts(kind) for kind in problem.kinds})[0].bound_ns


def _round(pool: StrategyTables, family: _Family, counts: IntArray) -> GroupedProblem:
    """Return the problem of one round: every way to fill the cluster is a strategy, of which one is chosen."""
    present = np.flatnonzero(counts)
    lengths = pool.load.lengths[present]
    pipelines = {
        degree: replace(
            pool.strategy(member, shared_memory=False).pipelines[0][0],
            name=" ".join(word for word in pool.members[member].candidate.name.split() if word[:2] != "dp"),
            max_micro_batches=1,
        )
        for degree, member in family.members.items()
    }
    strategies = [
        Strategy(
            " + ".join(f"{count} x {pipelines[degree].name}" for degree, count in mix), _pipelines(pipelines, mix)
        )
        for mix in _mixes(_num_gpus(pool), sorted(pipelines))
    ]
    fitting = tuple(strategy for strategy in strategies if strategy.holds(lengths).all())
    if not fitting:
        raise InfeasibleError(f"A sequence of {int(lengths[-1]):,} tokens fits into no group.")
    return GroupedProblem(lengths, counts[present], fitting, SwitchTimes.free(len(fitting)), max_strategies=1)


def _pipelines(pipelines: dict[int, Pipeline], mix: Sequence[tuple[int, int]]) -> tuple[tuple[Pipeline, int], ...]:
    return tuple((pipelines[degree], count) for degree, count in mix)


def _mixes(num_gpus: int, degrees: list[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield pairs (degree, groups) that use all GPUs, the largest degrees first."""
    if not degrees:
        if num_gpus == 0:
            yield ()
        return
    largest = degrees[-1]
    for count in range(num_gpus // largest + 1):
        own = ((largest, count),) if count else ()
        yield from (own + others for others in _mixes(num_gpus - count * largest, degrees[:-1]))


def _exact_ns(pool: StrategyTables, family: _Family, plan: GroupedPlan) -> int:
    """Return the time of the slowest group of a round."""
    slowest = 0
    for group in plan.groups:
        for packing in group.packings:
            candidate = pool.members[family.members[packing.kind.pipeline.num_gpus]].candidate
            times = replicas_ns(
                pool.problem, candidate, plan.problem.lengths, packing.replicas, pool.load.rules.mask
            )
            slowest = max(slowest, int(times.max()))
    return slowest


BOUNDARIES = ((16_384, 4_096), (16_384, 8_192, 4_096))
"""Ends of HotSPa's buckets below the longest sequence: its c1 and c2."""

Degrees = tuple[int, int, int]
"""(dp, tp, pp)."""


def baseline_steps(
    pool: StrategyTables, switches: Switches, time_limit_s: float, backend: str, given: Sequence[Degrees] = ()
) -> tuple[BaselineStep, ...]:
    """Return the steps of the three rules, whose programs stop after ``time_limit_s``.

    Args:
        pool: the strategies.
        switches: their switches.
        time_limit_s: limit of FlexSP's programs.
        backend: solver.
        given: degrees of HotSPa's strategies, longest bucket first: adds a step with these on its first buckets.
    """
    steps = [bucketing_step(pool), hotspa_step(pool, switches)]
    if given:
        steps.append(hotspa_step(pool, switches, given))
    return (*steps, flexsp_step(pool, time_limit_s, backend))


@dataclass(frozen=True, slots=True)
class Bucket:
    """Lengths above the end of the next shorter bucket, up to its own ``end``, as a slice of indices."""

    places: slice
    end: int


def buckets(lengths: IntArray, boundaries: Sequence[int]) -> list[Bucket]:
    """Return the nonempty buckets of the ascending ``lengths`` [n], the longest first."""
    ends = [*(end for end in sorted(boundaries) if end < lengths[-1]), int(lengths[-1])]
    edges = [0, *np.searchsorted(lengths, ends, side="right").tolist()]
    filled = [Bucket(slice(a, b), end) for (a, b), end in zip(pairwise(edges), ends, strict=True) if b > a]
    return filled[::-1]


def packs(lengths: IntArray, counts: IntArray, max_tokens: int) -> IntArray:
    """Pack sequences by first fit, longest first; return the packs, [m, n]."""
    rows: list[IntArray] = []
    tokens_left = np.zeros(int(counts.sum()), dtype=np.int64)
    for index in np.repeat(np.arange(len(lengths)), counts)[::-1].tolist():
        length = int(lengths[index])
        fitting = np.flatnonzero(tokens_left[: len(rows)] >= length)
        pack = int(fitting[0]) if len(fitting) else len(rows)
        if pack == len(rows):
            rows.append(np.zeros(len(lengths), dtype=np.int64))
            tokens_left[pack] = max_tokens
        rows[pack][index] += 1
        tokens_left[pack] -= length
    return np.array(rows).reshape(-1, len(lengths))


def dealt(rows: IntArray, num_replicas: int) -> tuple[IntArray, ...]:
    """Return the packs of every replica: pack i on replica i mod dp."""
    return tuple(rows[first::num_replicas] for first in range(num_replicas))


def bucketing_step(pool: StrategyTables) -> BaselineStep:
    """Return the shortest step of one strategy whose micro-batches hold sequences of one bucket."""
    best_ns, name = float("inf"), ""
    for member in sorted(range(len(pool.members)), key=pool.step_bound_ns):
        if pool.step_bound_ns(member) >= best_ns:
            break
        quanta = pool.max_quanta(member, shared_memory=False)
        if quanta * pool.load.token_quantum < pool.load.lengths[-1]:
            continue
        packed = _bucketed(pool, member, quanta)
        total_ns = packed.time_ns + pool.reduce_ns(member) + pool.finish_ns(member)
        if total_ns < best_ns:
            best_ns, name = total_ns, pool.members[member].candidate.name
    # Pools in which the longest sequence does not fit are refused.
    assert name
    return BaselineStep("bucketing", (name,), best_ns / NS_PER_S, "")


def _bucketed(pool: StrategyTables, member: int, quanta: int) -> Packed:
    tokens = quanta * pool.load.token_quantum
    rows = [_of_bucket(pool, bucket, tokens) for bucket in buckets(pool.load.lengths, BOUNDARIES[0])]
    return pool.time_packing(member, dealt(np.concatenate(rows), _replicas(pool, member)), quanta)


def _of_bucket(pool: StrategyTables, bucket: Bucket, max_tokens: int) -> IntArray:
    """Return the packs of a bucket over all lengths of the workload, [m, n]."""
    counts = np.zeros_like(pool.load.counts)
    counts[bucket.places] = pool.load.counts[bucket.places]
    return packs(pool.load.lengths, counts, max_tokens)


def _replicas(pool: StrategyTables, member: int) -> int:
    return pool.members[member].candidate.layout.dp


def hotspa_step(pool: StrategyTables, switches: Switches, given: Sequence[Degrees] = ()) -> BaselineStep:
    """Return HotSPa's step, the shorter one of its two sets of buckets; ``given``: see ``baseline_steps``."""
    name = "HotSPa, its strategies" if given else "HotSPa"
    steps = [_Buckets(pool, switches, name, ends, given).step() for ends in BOUNDARIES[: 1 if given else None]]
    return min(steps, key=lambda step: float("inf") if step.step_time_s is None else step.step_time_s)


class _Buckets:
    """Buckets of one set of ends, under HotSPa's rules."""

    def __init__(
        self, pool: StrategyTables, switches: Switches, name: str, ends: Sequence[int], given: Sequence[Degrees]
    ) -> None:
        self.pool, self.switches, self.name, self.given = pool, switches, name, given
        self.buckets = buckets(pool.load.lengths, ends)

    def step(self) -> BaselineStep:
        """Return the step, or the reason why there is none."""
        try:
            return self._made()
        except InfeasibleError as error:
            return BaselineStep(self.name, (), None, str(error))

    def _made(self) -> BaselineStep:
        chosen = [self._chosen(index, bucket) for index, bucket in enumerate(self.buckets)]
        # Longest bucket first; the group of a strategy runs where its longest bucket is.
        order = tuple(dict.fromkeys(chosen))[::-1]
        groups = {member: self._group(member, chosen) for member in order}
        self.switches.price(order)
        times = self.switches.times(order)
        index = range(len(order))
        total = tour_time_ns(
            GroupedProblem(
                self.pool.load.lengths,
                self.pool.load.counts,
                tuple(self.pool.strategy_with_true_reduction(member, shared_memory=True) for member in order),
                times,
                len(order),
                finish_ns=tuple(self.pool.finish_ns(member) for member in order),
            ),
            len(order) - 1,
            tuple(index),
            {position: groups[member].time_ns for position, member in enumerate(order)},
        )
        names = tuple(self.pool.members[member].candidate.name for member in order)
        if total >= NEVER_NS:
            raise InfeasibleError(f"The switches between {', '.join(names)} do not fit in memory.")
        return BaselineStep(self.name, names, total / NS_PER_S, "")

    def _group(self, member: int, chosen: Sequence[int]) -> Packed:
        """Return the group of a strategy: its buckets, the longest first."""
        own = [bucket for bucket, owner in zip(self.buckets, chosen, strict=True) if owner == member]
        return self._timed(member, np.concatenate([self._packs(bucket) for bucket in own]))

    def _packs(self, bucket: Bucket) -> IntArray:
        return _of_bucket(self.pool, bucket, bucket.end)

    def _timed(self, member: int, rows: IntArray) -> Packed:
        quanta = self.pool.max_quanta(member, shared_memory=True)
        return self.pool.time_packing(member, dealt(rows, _replicas(self.pool, member)), quanta)

    def _chosen(self, index: int, bucket: Bucket) -> int:
        """Return the strategy with the shortest time for a bucket, of those that hold a full pack."""
        rows, best = self._packs(bucket), None
        for bound_ns, member in sorted(self._candidates(index, bucket)):
            if best is not None and bound_ns >= best[0]:
                break
            total = self._timed(member, rows).time_ns + self.pool.reduce_ns(member)
            best = (total, member) if best is None or total < best[0] else best
        if best is None:
            raise InfeasibleError(f"No strategy of the rule holds packs of {bucket.end:,} tokens beside others.")
        return best[1]

    def _candidates(self, index: int, bucket: Bucket) -> Iterator[tuple[float, int]]:
        """Yield strategies that hold the bucket's packs, each after its lower bound in ns."""
        load, part = self.pool.load, bucket.places
        for member, candidate in enumerate(self.pool.members):
            layout = candidate.candidate.layout
            required = self.given[min(index, len(self.given) - 1)] if self.given else None
            is_required = (layout.dp, layout.tp, layout.pp) == required and layout.cp == layout.ep == 1
            if candidate.shared_memory_quanta * load.token_quantum < bucket.end or not (
                required is None or is_required
            ):
                continue
            pipeline, replicas = self.pool.strategy(member, shared_memory=True).pipelines[0]
            work = float(load.counts[part] @ pipeline.units(load.lengths[part])) * pipeline.parts
            yield work / replicas + self.pool.reduce_ns(member), member
