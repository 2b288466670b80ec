"""FlexSP's rule on this project's times: groups of context parallelism of different degree side by side.

A step is a few rounds of one micro-batch each. Sequences, longest first, are cut into M rounds so that the fullest
holds the fewest tokens, with M from the minimum that fits to four more. In a round the cluster is filled with
groups of d = 2, 4, ... GPUs, each runs one packed micro-batch, and the round takes as long as its slowest group;
then the next one starts. FlexSP's groups have the sequence over all their GPUs and the model sharded over the
cluster; here groups have a common tp and the context over d / tp (its all-to-all in place of the ring is the only
thing that is not reproduced), pp = 1, and one recompute setting. States stay where they are: with one tp all ranks
of the data- and context-parallel groups together hold equal states, so nothing is switched.

As in FlexSP an integer program with a time limit assigns the sequences of every round to groups; here that of
``groups``, over the sequences' own lengths in place of its 16 buckets. The reported time is the exact time of its
answer.

A round with groups of different degree is no step of equal replicas; it is one of ``teams``, whose bound holds for
this rule.

Source: FlexSP (2412.01523); PKU-DAIR/Hetu-Galvatron, branch flexsp, b466689, galvatron/flexsp_solver/solver.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from milpplan.errors import InfeasibleError, SolverError
from milpplan.groups.bounds.pipeline_bounds import PipelineCuts
from milpplan.groups.plan import GroupedPlan
from milpplan.groups.problem import GroupedProblem
from milpplan.groups.screen_subsets import ranked_sets
from milpplan.groups.search import solve_groups
from milpplan.groups.strategies import Pipeline, Strategy, SwitchTimes
from milpplan.lengths.records import BaselineStep
from milpplan.lengths.replica_time import replicas_ns
from milpplan.lengths.strategy_tables import StrategyTables
from milpplan.simulation.layout_columns import IntArray
from milpplan.units import NS_PER_S

# Number of values of M that are tried, and the minimum number of GPUs of a group.
_OPTIONS, _LEAST_DEGREE = 5, 2
_GAP = 0.01
_ROUND_S = 3.0


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
    deadline = time.perf_counter() + time_limit_s
    best: BaselineStep | None = None
    for family in _families(pool):
        for num_rounds in _numbers(pool, family):
            if best is not None and time.perf_counter() > deadline:
                return best
            best = _shorter(pool, family, num_rounds, best, (backend, min(_ROUND_S, time_limit_s)))
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
        if layout.pp == 1 and degree >= _LEAST_DEGREE and degree & (degree - 1) == 0:
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
    bound_ns = {
        id(family): min(pool.step_bound_ns(member, shared_memory=False) for member in family.values())
        for family in kept
    }
    return [_Family(family) for family in sorted(kept, key=lambda family: bound_ns[id(family)])]


def _num_gpus(pool: StrategyTables) -> int:
    return pool.members[0].candidate.layout.num_gpus


def _numbers(pool: StrategyTables, family: _Family) -> range:
    min_rounds = -(-pool.load.num_quanta * pool.load.token_quantum // family.most_tokens(pool, _num_gpus(pool)))
    return range(min_rounds, min(min_rounds + _OPTIONS, int(pool.load.counts.sum()) + 1))


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
            plan = solve_groups(problem, solver[0], _GAP, solver[1]).plan
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
