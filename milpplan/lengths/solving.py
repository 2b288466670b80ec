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
from dataclasses import dataclass, replace

import numpy as np

from milpplan.costs.columns import IntArray
from milpplan.errors import InfeasibleError
from milpplan.groups.problem import GroupedProblem
from milpplan.groups.search import solve_groups
from milpplan.groups.strategies import Strategy, SwitchTimes
from milpplan.groups.tours import Tour, best_tour, least_overhead_ns
from milpplan.groups.workload import Workload
from milpplan.lengths.baselines import Degrees, baseline_steps, bucketed_step
from milpplan.lengths.candidates import grain_problem
from milpplan.lengths.pool import Packed, Pool
from milpplan.lengths.records import PACKED, BaselineStep, LengthGroup, LengthsResult, SequenceRules, StaticStep
from milpplan.lengths.screening import Bounded, OpenSet, Screened, screened, split
from milpplan.lengths.sequences import check_rules, check_step
from milpplan.lengths.switches import NEVER_NS, Switches
from milpplan.lengths.tables import Load
from milpplan.lengths.team_steps import BestTeams, best_teams, team_groups
from milpplan.lengths.teams import TeamStep
from milpplan.lengths.work import Loads, WorkBounds
from milpplan.specs.problem import Problem
from milpplan.units import NS_PER_S

# Shares of the time for the static step, and of the gap for the tables' search.
_STATIC_SHARE, _GAP_SHARE = 0.3, 0.5
_SEARCH_SHARE, _REFINE_SHARE, _LEAST_S = 0.5, 0.5, 2.0
# Parts of a pipeline's load that are bounded one by one.
_PIECES = 5
# Parts of the largest load of one replica for which its bounds with the longest sequence are sought.
_LONG_PARTS = (1.0, 0.4)
# Pipelines of sets for which they are: each costs a second or more.
_MOST_LONG = 4
# Degrees side by side may take this share of the time; the baselines' programs this one once more.
_TEAMS_SHARE = 0.2
_BASELINES_SHARE = 1 / 3


@dataclass(frozen=True, eq=False)
class _Step:
    """A step at its exact time: members of the pool with their sequences, in order, and the home."""

    home: int
    order: tuple[int, ...]
    packed: dict[int, Packed]
    time_ns: int


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
    static, static_bound_ns = best_static(pool, gap, _STATIC_SHARE * time_limit_s, backend)
    search = _Several(pool, static, gap, backend)
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
    search: _Several,
    static: _Step,
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


def best_static(pool: Pool, gap: float, time_limit_s: float, backend: str) -> tuple[_Step, int]:
    """The best step of one strategy, exactly timed, and the proved bound of all of them in ns."""
    number, deadline = len(pool.members), time.perf_counter() + time_limit_s
    best: _Step | None = None
    # One stage packs in milliseconds: what pipelines have to beat, before more is proved of them.
    least = {member: pool.least_ns(member, beside=False) for member in range(number)}
    for member in sorted(range(number), key=lambda one: least[one]):
        if pool.num_stages(member) == 1:
            best = _shorter(pool, member, best)
    best = _bucketed(pool, best, deadline)
    # The least bound first: proved better, packed, proved better still.
    steps = {member: 0 for member in range(number) if pool.num_stages(member) > 1}
    while steps:
        member = min(steps, key=lambda one: least[one])
        late = best is not None and time.perf_counter() > deadline
        if late or (best is not None and least[member] >= best.time_ns * (1.0 - gap * _GAP_SHARE)):
            break
        if not np.isfinite(least[member]) or steps[member] == 4:
            del steps[member]
            continue
        if steps[member] == 1:
            best = _shorter(pool, member, best)
        elif steps[member] == 3 and best is not None:
            once_ns = pool.reduce_ns(member) + pool.finish_ns(member)
            pool.lengthened(member, best.time_ns - once_ns, beside=False)
        else:
            pool.loads(member, beside=False, exact=steps[member] == 2)
        least[member] = pool.least_ns(member, beside=False)
        steps[member] += 1
    if best is None:
        raise InfeasibleError(
            f"No packing of {pool.load.counts.sum()} sequences was found under {number} strategies.",
            "Expected one at least.",
            "Use more GPUs, or cut sequences.",
        )
    open_ = [
        member
        for member in range(number)
        if pool.num_stages(member) == 1 and least[member] < best.time_ns * (1.0 - gap * _GAP_SHARE)
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
    found = solve_groups(problem, backend, gap * _GAP_SHARE, time_limit_s)
    proved = {members[record.used[0]]: record.bound_ns for record in found.sets}
    return {member: max(least[member], proved.get(member, 0)) for member in members}


def _shorter(pool: Pool, member: int, best: _Step | None) -> _Step | None:
    """The step of one strategy, if its least time leaves room and its exact time is shorter than the best."""
    least_ns = pool.least_ns(member, beside=False)
    if not np.isfinite(least_ns) or (best is not None and least_ns >= best.time_ns):
        return best
    packed = pool.packed(member, pool.load.counts, pool.grains(member, beside=False))
    if packed is None:
        return best
    total = packed.time_ns + pool.reduce_ns(member) + pool.finish_ns(member)
    return _Step(member, (member,), {member: packed}, total) if best is None or total < best.time_ns else best


def _bucketed(pool: Pool, best: _Step | None, deadline: float) -> _Step | None:
    """The step of plain buckets under one strategy, if it is shorter than the best: pipelines, too, for little."""
    if pool.load.rules.padded:
        return best
    found = bucketed_step(pool, float("inf") if best is None else best.time_ns, deadline)
    if found is None:
        return best
    member, packed = found
    total = packed.time_ns + pool.reduce_ns(member) + pool.finish_ns(member)
    return _Step(member, (member,), {member: packed}, total)


class _Several:
    """Steps of several strategies: the sets left, the switches between their strategies, the best step."""

    def __init__(self, pool: Pool, static: _Step, gap: float, backend: str) -> None:
        self.pool = pool
        self.best: _Step | TeamStep = static
        self.gap = gap
        self.backend = backend
        self.bound_ns = float("inf")
        self.num_sets = 0
        self.switches = Switches(pool)

    def run(self, max_strategies: int, deadline: float) -> None:
        """Screen all sets, prove more of their pipelines, and search what is left, the least bound first."""
        members = [m for m, one in enumerate(self.pool.members) if one.beside_grains]
        if len(members) < 2:
            return
        kept = self._screened(members, max_strategies, deadline)
        self.bound_ns, self.num_sets = kept.dropped_ns, len(kept.left)
        for left in kept.left:
            late = time.perf_counter() > deadline
            if late or left.bound_ns >= self.best.time_ns * (1.0 - self.gap):
                self.bound_ns = min(self.bound_ns, left.bound_ns)
                break
            self.bound_ns = min(self.bound_ns, self._search(left, members, deadline))

    def _screened(self, members: list[int], max_strategies: int, deadline: float) -> Screened:
        """Sets that may be shorter than the best step by more than the gap: with what is cheap to prove, then with
        the loads of pipelines, then with parts of these."""
        pool, target_ns = self.pool, self.best.time_ns * (1.0 - self.gap)
        plain = [pool.bounds(member, beside=True) for member in members]
        kept = screened(self._bounded(members, plain), max_strategies, target_ns)
        dropped, loaded = kept.dropped_ns, list(plain)
        known: dict[int, Loads] = {}
        end = time.perf_counter() + _REFINE_SHARE * (deadline - time.perf_counter())
        # Those of the sets with the least bounds first.
        for place in dict.fromkeys(one for held in kept.left for one in held.used):
            if pool.num_stages(members[place]) > 1 and time.perf_counter() < end:
                known[place] = pool.loads(members[place], beside=True)
                loaded[place] = known[place].within(plain[place])
        for pieces in (1, _PIECES):
            if pieces > 1:
                self._lengthened(kept, members, known, end)
            parts: list[list[int]] = []
            bounds: list[WorkBounds] = []
            owners: list[int] = []
            for place, one in enumerate(loaded):
                edges = np.linspace(0.0, 1.0, pieces + 1)
                pairs = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
                mine = [known[place].within(one, low, high) for low, high in pairs] if place in known else [one]
                parts.append(list(range(len(bounds), len(bounds) + len(mine))))
                bounds += mine
                owners += [members[place]] * len(mine)
            kept = split(self._bounded(owners, bounds), parts, kept.left, target_ns)
            dropped = min(dropped, kept.dropped_ns)
        return Screened(kept.left, dropped)

    def _lengthened(self, kept: Screened, members: list[int], known: dict[int, Loads], end: float) -> None:
        """Pipelines that may run the longest sequence with what it adds, those of the least bounds first."""
        finish_ns = min(self.pool.finish_ns(member) for member in members)
        places = dict.fromkeys(one for held in kept.left for one in held.used if one in known)
        able = [place for place in places if np.isfinite(self.pool.serial_ns(members[place]))]
        for place in able[:_MOST_LONG]:
            member = members[place]
            if time.perf_counter() < end:
                most_ns = self.best.time_ns - self.pool.reduce_ns(member) - finish_ns
                alone = self.pool.members[member].candidate.layout.dp == 1
                parts = _LONG_PARTS if alone else _LONG_PARTS[:1]
                known[place] = self.pool.lengthened(member, most_ns, parts, beside=True)

    def _bounded(self, members: list[int], bounds: list[WorkBounds]) -> Bounded:
        """What screening needs of so many strategies, or parts of them."""
        serial = np.array([self.pool.serial_ns(member) for member in members])
        once = np.array([float(self.pool.reduce_ns(member)) for member in members])
        finish = np.array([float(self.pool.finish_ns(member)) for member in members])
        return Bounded.of(bounds, serial, once, finish, self.pool.load.counts)

    def _search(self, one: OpenSet, members: list[int], deadline: float) -> float:
        """The bound of a set's steps with its switches, ns; the best of them found is timed exactly."""
        held = [members[place] for place in one.used]
        self.switches.price(held)
        problem = self._problem(held, self.switches.times(held), len(held))
        used = tuple(range(len(held)))
        # What screening counts once, and what the cheapest order of the set takes in its place.
        once_ns = min(self.pool.finish_ns(member) for member in held)
        once_ns += sum(self.pool.reduce_ns(member) for member in held)
        exact = self._exact(problem, held)
        proved = one.bound_ns + least_overhead_ns(exact, used) - once_ns
        if proved >= self.best.time_ns * (1.0 - self.gap):
            return proved
        left = max(_LEAST_S, _SEARCH_SHARE * (deadline - time.perf_counter()))
        found = solve_groups(problem, self.backend, self.gap * _GAP_SHARE, left)
        self._try(problem, held, {held[group.strategy]: group.counts for group in found.plan.groups})
        return max(proved, *(record.bound_ns for record in found.sets if record.used == used))

    def _problem(self, members: list[int], switches: SwitchTimes, max_strategies: int) -> GroupedProblem:
        return GroupedProblem(
            self.pool.load.lengths,
            self.pool.load.counts,
            tuple(self.pool.strategy(member, beside=True) for member in members),
            switches,
            max_strategies=max_strategies,
            finish_ns=tuple(self.pool.finish_ns(member) for member in members),
        )

    def _try(self, problem: GroupedProblem, members: list[int], counts: dict[int, IntArray]) -> None:
        """Pack every group, time it exactly, and keep the step in its best order if it is the shortest."""
        packed = {}
        for member, held in counts.items():
            found = self.pool.packed(member, held, self.pool.members[member].beside_grains)
            if found is None:
                return
            packed[member] = found
        exact = self._exact(problem, members)
        times = {members.index(member): one.time_ns for member, one in packed.items()}
        tour: Tour = best_tour(exact, tuple(sorted(times)), times)
        if tour.time_ns < self.best.time_ns:
            order = tuple(members[one] for one in tour.order)
            self.best = _Step(members[tour.home], order, packed, tour.time_ns)

    def _exact(self, problem: GroupedProblem, members: list[int]) -> GroupedProblem:
        """The problem with the true reductions; tables of pipelines may have ramps in theirs."""
        strategies = tuple(
            Strategy(one.name, one.pipelines, self.pool.reduce_ns(member))
            for one, member in zip(problem.strategies, members, strict=True)
        )
        return replace(problem, strategies=strategies)


def _group(pool: Pool, step: _Step, member: int) -> LengthGroup:
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
