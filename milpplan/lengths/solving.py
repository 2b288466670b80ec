"""The best step of sequences of many lengths: one strategy for all, or several in turn, with a proved bound.

 1. The best *static* step: every strategy alone, with its own memory (``best_static``).
 2. *Several*: sets of strategies that switches and reductions do not already make longer than the static step
    (``screening``), their switches priced by the planner of switches, and ``groups`` on what is left.

``groups`` works on tables that are never above the exact times (``tables``), so its bound holds for the exact
times. Every answer is packed, and only its exact time counts (``replicas``); the bound of the step is the least of
the static one's, that of ``groups`` and that of the sets that were screened out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from milpplan.errors import InfeasibleError
from milpplan.groups.problem import GroupedProblem
from milpplan.groups.search import solve_groups
from milpplan.groups.strategies import SwitchTimes
from milpplan.groups.workload import Workload
from milpplan.lengths.baselines import Degrees, baseline_steps, bucketed_step
from milpplan.lengths.candidates import grain_problem
from milpplan.lengths.pool import Packed, Pool
from milpplan.lengths.records import PACKED, BaselineStep, LengthGroup, LengthsResult, SequenceRules, StaticStep
from milpplan.lengths.sequences import check_rules, check_step
from milpplan.lengths.several import GAP_SHARE, Several, Step
from milpplan.lengths.switches import NEVER_NS
from milpplan.lengths.tables import Load
from milpplan.lengths.team_steps import BestTeams, best_teams, team_groups
from milpplan.lengths.teams import TeamStep
from milpplan.specs.problem import Problem
from milpplan.units import NS_PER_S

# Shares of the time for the static step: where others follow, and where none do (its last packing may take
# longer); the least time of its programs.
_STATIC_SHARE, _ALONE_SHARE, _LEAST_S = 0.3, 0.85, 2.0
# Strategies whose packings are improved for longer, where it may matter; not those that are longer than the best
# by this part, which is more than that gains.
_MOST_POLISHED, _HOPELESS = 3, 0.01
# Degrees side by side may take this share of the time; the baselines' programs this one once more.
_TEAMS_SHARE = 0.2
_BASELINES_SHARE = 1 / 3


def solve_lengths(
    problem: Problem,
    workload: Workload,
    alignment: int = 128,
    max_strategies: int = 3,
    gap: float = 0.01,
    time_limit_s: float = 60.0,
    backend: str = "auto",
    baselines: bool = False,
    hotspa: Sequence[Degrees] = (),
    rules: SequenceRules = PACKED,
    side_by_side: bool = False,
) -> LengthsResult:
    """The best step for the sequences of a workload (lengths in multiples of ``alignment``).

    ``problem`` gives model, cluster, formats and space; its sequence length and batch mean nothing here. At most
    ``max_strategies`` take turns; ``time_limit_s`` is soft. ``rules``: how sequences are attended to and put
    together. With ``baselines`` the result has what others' rules make of the same (in a third of the time more);
    with ``hotspa``, (dp, tp, pp) of a strategy for every bucket, the longest first, HotSPa's with these, too. With
    ``side_by_side`` context parallelism of several degrees on different GPUs at once is in the space (``teams``).

    Raises:
        InfeasibleError: no strategy holds the longest sequence.
        InvalidInputError: the problem, the workload or the numbers make no sense here.
    """
    start, cpu_start = time.perf_counter(), time.process_time()
    check_step(problem, workload, alignment, max_strategies)
    check_rules(problem, rules, baselines, side_by_side)
    load = Load(workload.lengths, workload.counts, alignment, rules)
    pool = Pool.of(grain_problem(problem, alignment), load)
    share = _STATIC_SHARE if max_strategies > 1 else _ALONE_SHARE - (_TEAMS_SHARE if side_by_side else 0.0)
    static, static_bound_ns = best_static(pool, gap, share * time_limit_s, backend)
    search = Several(pool, static, gap, backend)
    teams = None
    if side_by_side:
        teams = best_teams(pool, static.time_ns, gap, time.perf_counter() + _TEAMS_SHARE * time_limit_s)
        search.best = teams.step or static
    if max_strategies > 1:
        search.run(max_strategies, start + time_limit_s)
    seconds = _BASELINES_SHARE * time_limit_s
    compared = baseline_steps(pool, search.switches, seconds, backend, hotspa) if baselines else ()
    return _result(search, static, static_bound_ns, compared, (start, cpu_start), teams)


def _result(
    search: Several,
    static: Step,
    static_bound_ns: int,
    baselines: tuple[BaselineStep, ...],
    started: tuple[float, float],
    teams: BestTeams | None,
) -> LengthsResult:
    """Everything that is known; ``started``: wall clock and CPU time at the beginning."""
    pool, best = search.pool, search.best
    bound_ns = min(static_bound_ns, search.bound_ns, best.time_ns, *([teams.bound_ns] if teams else []))
    reached = best.time_ns - bound_ns <= search.gap * best.time_ns
    names = [one.candidate.name for one in pool.members]
    if isinstance(best, TeamStep):
        home, groups, switches = best.order[-1], team_groups(best), []
    else:
        home, groups = best.home, tuple(_group(pool, best, member) for member in best.order)
        switches = search.switches.of_step(home, best.order)
    return LengthsResult(
        status="optimal" if reached else "feasible",
        step_time_s=best.time_ns / NS_PER_S,
        lower_bound_s=bound_ns / NS_PER_S,
        home=names[home],
        groups=groups,
        switches=tuple(switches),
        finish_s=pool.finish_ns(home) / NS_PER_S,
        static=StaticStep(
            names[static.home],
            pool.members[static.home].candidate.plan,
            static.time_ns / NS_PER_S,
            static_bound_ns / NS_PER_S,
        ),
        num_sequences=int(pool.load.counts.sum()),
        num_tokens=int(pool.load.counts @ pool.load.lengths),
        alignment=pool.load.grain,
        num_candidates=len(pool.members),
        num_sets=search.num_sets,
        cpu_time_s=time.process_time() - started[1],
        wall_time_s=time.perf_counter() - started[0],
        baselines=baselines,
        rules=pool.load.rules,
        side_by_side=None if teams is None else teams.record(),
    )


def best_static(pool: Pool, gap: float, time_limit_s: float, backend: str) -> tuple[Step, int]:
    """The best step of one strategy, exactly timed, and the proved bound of all of them in ns."""
    number, deadline = len(pool.members), time.perf_counter() + time_limit_s
    best: Step | None = None
    packed: dict[int, Packed] = {}
    # One stage packs in milliseconds: what pipelines have to beat, before more is proved of them.
    least = {member: pool.least_ns(member, beside=False) for member in range(number)}
    for member in sorted(range(number), key=lambda one: least[one]):
        if pool.num_stages(member) == 1:
            best = _shorter(pool, member, best, packed)
    best = _bucketed(pool, best, deadline)
    # The least bound first: proved better, packed, proved better still.
    steps = {member: 0 for member in range(number) if pool.num_stages(member) > 1}
    while steps:
        member = min(steps, key=lambda one: least[one])
        late = best is not None and time.perf_counter() > deadline
        if late or (best is not None and least[member] >= best.time_ns * (1.0 - gap * GAP_SHARE)):
            break
        if not np.isfinite(least[member]) or steps[member] == 4:
            del steps[member]
            continue
        if steps[member] == 1:
            best = _shorter(pool, member, best, packed)
        elif steps[member] == 3 and best is not None:
            once_ns = pool.reduce_ns(member) + pool.finish_ns(member)
            pool.lengthened(member, best.time_ns - once_ns)
        else:
            pool.loads(member, beside=False, exact=steps[member] == 2)
        least[member] = pool.least_ns(member, beside=False)
        steps[member] += 1
    best = _polished(pool, best, packed, min(least.values()) / (1.0 - gap), deadline)
    if best is None:
        raise InfeasibleError(
            f"No packing of {pool.load.counts.sum()} sequences was found under {number} strategies.",
            "Expected one at least.",
            "Use more GPUs, or cut sequences.",
        )
    open_ = [
        member
        for member in range(number)
        if pool.num_stages(member) == 1 and least[member] < best.time_ns * (1.0 - gap * GAP_SHARE)
    ]
    if open_:
        left_s = max(_LEAST_S, deadline - time.perf_counter())
        least |= _proved_in_integers(pool, open_, least, gap, left_s, backend)
    return best, min(int(min(least.values())), best.time_ns)


def _proved_in_integers(
    pool: Pool, members: list[int], least: dict[int, float], gap: float, time_limit_s: float, backend: str
) -> dict[int, float]:
    """Bounds of strategies of one stage, raised by the programs of ``groups``."""
    number = len(members)
    # Nothing is switched: the home is the strategy itself.
    switches = np.full((number, number), NEVER_NS, np.int64)
    np.fill_diagonal(switches, 0)
    problem = GroupedProblem(
        pool.load.lengths,
        pool.load.counts,
        tuple(pool.strategy(member, beside=False) for member in members),
        SwitchTimes(switches, switches),
        max_strategies=1,
        finish_ns=tuple(pool.finish_ns(member) for member in members),
    )
    found = solve_groups(problem, backend, gap * GAP_SHARE, time_limit_s)
    proved = {members[record.used[0]]: record.bound_ns for record in found.sets}
    return {member: max(least[member], proved.get(member, 0)) for member in members}


def _shorter(pool: Pool, member: int, best: Step | None, known: dict[int, Packed]) -> Step | None:
    """The step of one strategy, if its least time leaves room and its exact time is shorter than the best."""
    least_ns = pool.least_ns(member, beside=False)
    if not np.isfinite(least_ns) or (best is not None and least_ns >= best.time_ns):
        return best
    packed = pool.packed(member, pool.load.counts, pool.grains(member, beside=False))
    if packed is None:
        return best
    known[member] = packed
    step = _alone(pool, member, packed)
    return step if best is None or step.time_ns < best.time_ns else best


def _polished(
    pool: Pool, best: Step | None, known: dict[int, Packed], enough_ns: float, deadline: float
) -> Step | None:
    """The best step after its strategy and the next best are packed with more care, and the best of these with
    most, until it is short enough."""
    steps = sorted((_alone(pool, *one) for one in known.items()), key=lambda one: one.time_ns)[:_MOST_POLISHED]
    for turn in range(len(steps) + 1):
        if best is None or best.time_ns <= enough_ns or time.perf_counter() > deadline:
            break
        most = turn == len(steps)
        home = best.home if most else steps[turn].home
        if home in known and (most or steps[turn].time_ns <= best.time_ns * (1.0 + _HOPELESS)):
            packed = pool.polished(home, known[home], pool.grains(home, beside=False), most=most)
            best = min(best, _alone(pool, home, packed), key=lambda one: one.time_ns)
    return best


def _alone(pool: Pool, member: int, packed: Packed) -> Step:
    """The step of one strategy."""
    total = packed.time_ns + pool.reduce_ns(member) + pool.finish_ns(member)
    return Step(member, (member,), {member: packed}, total)


def _bucketed(pool: Pool, best: Step | None, deadline: float) -> Step | None:
    """The step of plain buckets under one strategy, if it is shorter than the best: pipelines, too, for little."""
    if pool.load.rules.padded:
        return best
    found = bucketed_step(pool, float("inf") if best is None else best.time_ns, deadline)
    if found is None:
        return best
    return _alone(pool, *found)


def _group(pool: Pool, step: Step, member: int) -> LengthGroup:
    one, packed, lengths = pool.members[member], step.packed[member], pool.load.lengths
    grains = one.alone_grains if len(step.order) == 1 else one.beside_grains
    return LengthGroup(
        strategy=one.candidate.name,
        plan=one.candidate.plan,
        buckets=tuple(
            (int(length), int(count)) for length, count in zip(lengths, packed.counts, strict=True) if count
        ),
        micro_batches=tuple(
            tuple(tuple(np.repeat(lengths, row).tolist()) for row in replica) for replica in packed.replicas
        ),
        micro_batch_tokens=grains * pool.load.grain,
        time_s=packed.time_ns / NS_PER_S,
        reduce_s=pool.reduce_ns(member) / NS_PER_S,
    )
