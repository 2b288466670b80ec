"""What is proved of sets of strategies that take turns, before any is opened.

All sets are *screened* (``screening``): with what is cheap to prove of their strategies, then with the loads of
pipelines, in intervals. A set that is left is *branched*: cut by the intervals of its pipelines, then by what is
told apart there, with all that is known of them by then (``parts``) and of the sequences that only one of its
strategies holds (``forced``).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from milpplan.lengths.bounds.exclusive_programs import ExclusiveProgram
from milpplan.lengths.bounds.work_bounds import LinearBounds, PipelineWorkBound, serial_times
from milpplan.lengths.strategy_tables import StrategyTables
from milpplan.lengths.turns.interval_bounds import IntervalBounds, Kind
from milpplan.lengths.turns.lagrangian_mixtures import Bounded
from milpplan.lengths.turns.replica_inequalities import ReplicaInequalities
from milpplan.lengths.turns.screening import Node, ScreeningResult, StrategySet, branched, screened, split
from milpplan.lengths.turns.set_branch_and_bound import Participant, SetBranchAndBound
from milpplan.simulation.layout_columns import BoolArray, FloatArray, IntArray

# Parts of the time for all sets at once, and then each for loads of pipelines and for sets cut by these.
_SCREEN_SHARE, _REFINE_SHARE = 0.35, 0.5
# Share of the sets that a strategy is in to have more proved of it before others have.
_COMMON = 0.15
# Bounds of a strategy that programs of a set get for every way to divide its sequences.
_FLOORS = 3
# So often replicas of a set are looked at for nothing.
_FRUITLESS = 3
# Programs of what strategies hold for sure prove a little more than is needed.
_ENOUGH = 1.001


class SetBounds:
    """Bounds of sets of ``members`` of the pool, by their places among these."""

    def __init__(self, pool: StrategyTables, members: Sequence[int]) -> None:
        self.pool, self.members = pool, list(members)
        # Linear bounds by place; pipelines whose loads are known, and strategies of many sets.
        self.linear_bounds: list[LinearBounds] = []
        self.pipelines_with_loads: set[int] = set()
        self.interval_bounds = IntervalBounds(pool, self.members, [])
        # What a sequence is of the workload, [n], as the first pipeline weighs it.
        self.load_shares: FloatArray | None = None
        self.common_strategies: set[int] = set()
        # By place: what is proved of groups that hold all from some length on, and the last programs of that.
        self.programs: dict[int, list[tuple[int, LinearBounds]]] = {}
        self.last_programs: dict[tuple[int, int], ExclusiveProgram] = {}
        # By member: what its replicas hold at most; by set: what that proves of it.
        self.replica_inequalities: dict[int, ReplicaInequalities] = {}
        self.set_searches: dict[int, SetBranchAndBound] = {}
        self.fruitless: Counter[int] = Counter()

    def screen(self, max_strategies: int, target_ns: float, deadline: float) -> ScreeningResult:
        """Sets that may hold a step shorter than a target: with what is cheap to prove, then with the loads of
        pipelines, then with parts of these."""
        pool, members = self.pool, self.members
        self.linear_bounds = [pool.linear_bounds(member, beside=True) for member in members]
        self.interval_bounds = IntervalBounds(pool, members, self.linear_bounds)
        end = time.perf_counter() + _SCREEN_SHARE * (deadline - time.perf_counter())
        kept = screened(self.screening_problem(list(range(len(members))), self.linear_bounds), max_strategies, target_ns, end)
        dropped = kept.dropped_ns
        end = time.perf_counter() + _REFINE_SHARE * (deadline - time.perf_counter())
        # Those of the sets with the least bounds first.
        for place in dict.fromkeys(one for held in kept.sets for one in held.strategies):
            if pool.num_stages(members[place]) > 1 and time.perf_counter() < end:
                self.pipelines_with_loads.add(place)
                pool.work_bound(members[place], beside=True)
        end = time.perf_counter() + _REFINE_SHARE * (deadline - time.perf_counter())
        kept = self.split_by_intervals(kept.sets, target_ns, end)
        times = Counter(place for one in kept.sets for place in one.strategies)
        self.common_strategies = {place for place, number in times.items() if number >= _COMMON * len(kept.sets)}
        return ScreeningResult(kept.sets, min(dropped, kept.dropped_ns))

    def split_by_intervals(self, sets: Sequence[StrategySet], target_ns: float, deadline: float) -> ScreeningResult:
        """Sets bounded anew with the loads of their pipelines in intervals, with what is known of them alone, and
        with sequences that run under one strategy for sure; until the ``deadline``."""
        if not sets:
            return ScreeningResult((), np.inf)
        # A strategy of a set, with how many sequences it holds for sure.
        keys: dict[tuple[int, int], int] = {}
        numbered = []
        for one in sets:
            held = zip(one.strategies, self.num_exclusive(one.strategies), strict=True)
            numbered.append(StrategySet(one.bound_ns, tuple(keys.setdefault(key, len(keys)) for key in held)))
        bounds = [self._whole(place, number, self.linear_bounds[place]) for place, number in keys]
        owners, shares, parts = [place for place, _ in keys], [(0.0, 1.0)] * len(keys), {}
        for key, (place, number) in enumerate(keys):
            intervals = self.interval_bounds.of(place, "alone") if place in self.pipelines_with_loads else []
            parts[key] = list(range(len(bounds), len(bounds) + len(intervals))) or [key]
            bounds += [self._whole(place, number, whole) for whole, *_ in intervals]
            owners += [place] * len(intervals)
            if intervals:
                each, ends = self.interval_bounds.ends(place, "alone")
                shares += [self._held(place, each, *pair) for pair in pairwise(ends.tolist())]
        found = split(self.screening_problem(owners, bounds, shares), parts, numbered, target_ns, deadline)
        left = tuple(StrategySet(one.bound_ns, tuple(owners[key] for key in one.strategies)) for one in found.sets)
        return ScreeningResult(left, found.dropped_ns)

    def _held(self, place: int, each: FloatArray, least: float, most: float) -> tuple[float, float]:
        """The least and the most of the workload, by one measure for all, that a pipeline holds with between two
        loads by its own, to which a sequence adds ``each`` [n]."""
        if self.load_shares is None:
            self.load_shares = each / float(self.pool.load.counts @ each)
        return _within(self.load_shares, np.isfinite(self.linear_bounds[place].shares[0]), each, least, most)

    def linear_problem(self, used: tuple[int, ...]) -> Bounded:
        """A set with nothing but linear bounds."""
        pairs = zip(used, self.num_exclusive(used), strict=True)
        return self.screening_problem(list(used), [self._whole(*pair, self.linear_bounds[pair[0]]) for pair in pairs])

    def _whole(self, place: int, number: int, bounds: LinearBounds) -> LinearBounds:
        """``bounds`` of a strategy that holds so many of the longest sequences for sure."""
        return bounds.with_bounds(self.pool.bounds_with_longest(self.members[place], number)) if number else bounds

    def _linear(self, used: tuple[int, ...], place: int, number: int) -> LinearBounds:
        """All linear bounds of a strategy of a set that holds so many of the longest sequences for sure."""
        return _joined(self._whole(place, number, self.linear_bounds[place]), self._programs(used, place))

    def _loads(self, member: int) -> PipelineWorkBound:
        """The most that is known of a pipeline beside others."""
        return self.pool.fine_work_bounds.get(member, self.pool.work_bound(member, beside=True))

    def num_exclusive(self, used: tuple[int, ...]) -> list[int]:
        """How many sequences each strategy of a set holds for sure."""
        held = [self.members[place] for place in used]
        return [self.pool.num_exclusive(one, held[:place] + held[place + 1 :]) for place, one in enumerate(held)]

    def screening_problem(
        self, places: list[int], bounds: list[LinearBounds], held: Sequence[tuple[float, float]] = ()
    ) -> Bounded:
        """What screening needs of so many strategies, or parts of them, that may hold so much."""
        members = [self.members[place] for place in places]
        serial = np.array([self.pool.latency_bound_ns(member, beside=True) for member in members])
        once = np.array([float(self.pool.reduce_ns(member)) for member in members])
        finish = np.array([float(self.pool.finish_ns(member)) for member in members])
        return Bounded.of(bounds, serial, once, finish, self.pool.load.counts, held)

    def first_exclusive(self, used: tuple[int, ...], place: int) -> int:
        """``StrategyTables.first_forced`` of a strategy of a set."""
        others = [self.members[one] for one in used if one != place]
        return self.pool.first_exclusive(self.members[place], others)

    def _programs(self, used: tuple[int, ...], place: int) -> list[LinearBounds]:
        """What is proved of a strategy of a set with what it holds for sure, by programs."""
        if place not in self.programs:
            return []
        forced = self.first_exclusive(used, place)
        return [bounds for first, bounds in self.programs[place] if first >= forced]

    def prove_exclusive(self, one: Node, target_ns: float, deadline: float) -> bool:
        """Prove more of the pipelines of the set that are of one replica and hold some sequences for sure, by
        programs of these; whether there are any."""
        used, pool = one.screened.strategies, self.pool
        found = False
        for place in used:
            member, first = self.members[place], self.first_exclusive(used, place)
            is_one = pool.members[member].candidate.layout.dp == 1 and pool.num_stages(member) > 1
            # Where all is held for sure others hold nothing, and take nothing off it.
            if not is_one or not 0 < first < len(pool.load.lengths):
                continue
            held = np.where(np.arange(len(pool.load.lengths)) < first, pool.load.counts, 0).astype(np.float64)
            worths = np.min([self._worths(other, held) for other in used if other != place], axis=0)
            once = pool.fixed_cost_ns([self.members[other] for other in used])
            program = self._program(place, first, worths)
            program.run(_ENOUGH * (target_ns - one.order_ns - once), deadline)
            self.programs.setdefault(place, []).append((first, program.bounds))
            found = True
        return found

    def _program(self, place: int, first: int, worths: FloatArray) -> ExclusiveProgram:
        """That of a pipeline with all from a length on, beside others of some worths: programs of several sets are
        much alike."""
        member, key = self.members[place], (place, first)
        if key not in self.last_programs:
            loads, contents = self.pool.work_bound(member, beside=True), self.pool.micro_batch_pricing(member, beside=True)
            self.last_programs[key] = ExclusiveProgram(loads, contents, first, worths)
        self.last_programs[key] = self.last_programs[key].beside(worths)
        return self.last_programs[key]

    def _worths(self, place: int, held: FloatArray) -> FloatArray:
        """What each of so many sequences [n] takes under a strategy of a set at least, all that it takes shared
        out, ns; infinite where one does not fit."""
        known = self.interval_bounds.bounds_near(place, held)
        fits = np.isfinite(known.shares[0])
        parts = known.shares[:, fits] @ held[fits]
        # One that every sequence adds to: a constant alone cannot be shared out.
        best = int(np.where(parts > 0.0, parts + known.constants, -np.inf).argmax())
        return np.asarray(known.shares[best] * (1.0 + known.constants[best] / parts[best]))

    def bound_by_replicas(
        self, one: Node, target_ns: float, deadline: float, *, learns: bool = True, anew: bool = False
    ) -> bool:
        """Prove more of a set by what replicas of its strategies hold at most; whether more is to be had.
        ``learns``: or only by what is known of them. ``anew``: with what is open of their loads now."""
        if anew or one.number not in self.set_searches:
            self.set_searches[one.number] = self._led_set(one, target_ns)
        led, before_ns = self.set_searches[one.number], one.bound_ns
        more = led.run(deadline, learns=learns)
        one.raise_to(led.bound_ns)
        # A few times for nothing are enough.
        self.fruitless[one.number] += learns and one.bound_ns == before_ns
        return more and one.bound_ns < target_ns and self.fruitless[one.number] < _FRUITLESS

    def _led_set(self, one: Node, target_ns: float) -> SetBranchAndBound:
        """What replicas of its strategies hold at most."""
        used, pool = one.screened.strategies, self.pool
        once_ns = one.order_ns + pool.fixed_cost_ns([self.members[place] for place in used])
        takers = []
        for place, number in zip(used, self.num_exclusive(used), strict=True):
            member = self.members[place]
            bounds = self._linear(used, place, number)
            serial = serial_times(pool.tables[member], pool.members[member], pool.max_quanta(member, beside=True))
            loads = [self._loads(member)] if pool.num_stages(member) > 1 else []
            loads += [pool.best_own_memory_bound(member)] if loads and pool.has_own_memory_bound(member) else []
            led = partial(self._led_group, member, target_ns)
            takers.append(Participant(bounds, serial, led, tuple(loads), one.open_loads.get(place)))
        return SetBranchAndBound(takers, once_ns, target_ns)

    def _led_group(self, member: int, time_ns: float) -> ReplicaInequalities:
        """What replicas of a strategy hold at most, in steps of so long at most."""
        known = self.replica_inequalities.get(member)
        if known is None or known.time_ns < time_ns:
            known = self.replica_inequalities[member] = ReplicaInequalities(self.pool, member, time_ns)
        return known

    def floors(self, one: Node, splits: Sequence[IntArray]) -> dict[int, list[tuple[FloatArray, float]]]:
        """By position in a set: bounds that are high where its sequences are divided about as in ``splits``
        [q, n], for loads of its pipelines that are open."""
        used, found = one.screened.strategies, {}
        for position, (place, number) in enumerate(zip(used, self.num_exclusive(used), strict=True)):
            bounds = self._linear(used, place, number)
            fits, member, rows = np.isfinite(bounds.shares[0]), self.members[place], set()
            if self.pool.num_stages(member) > 1:
                loads = self._loads(member)
                low, high = 0.0, 1.0
                if place in one.open_loads:
                    low, high = _within(loads.sequence_loads / loads.total_load, fits, *one.open_loads[place])
                    high = min(1.0, high)
                rows.add(len(bounds.constants))
                bounds = loads.chords_between(bounds, min(low, high / 2), high)
            for held in splits:
                values = bounds.shares[:, fits] @ held[position][fits] + bounds.constants
                rows |= set(np.argsort(values)[-_FLOORS:].tolist())
            shares = np.where(fits, bounds.shares, 0.0)
            found[position] = [(shares[row], float(bounds.constants[row])) for row in sorted(rows)]
        return found

    def branch(self, one: Node, kinds: Sequence[Kind], target_ns: float) -> None:
        """The set with its pipelines cut into intervals, then into classes, of these kinds."""
        used = one.screened.strategies
        pieces = [self.interval_bounds.of(*pair) for pair in zip(used, kinds, strict=True)]
        numbers = self.num_exclusive(used)
        programs = [self._programs(used, place) for place in used]
        bounds = [self._linear(used, place, number) for place, number in zip(used, numbers, strict=True)]
        owners, held = list(used), [(0.0, 1.0)] * len(used)
        first: list[tuple[int, dict[int, list[int]]]] = []
        then: list[tuple[int, dict[int, list[int]]]] = []
        for position, intervals in enumerate(pieces):
            if not intervals:
                continue
            places = np.cumsum([len(bounds), *(len(kinds) for kinds in intervals)]).tolist()
            known = [bound for kinds in intervals for bound in kinds]
            whole = [self._whole(used[position], numbers[position], bound) for bound in known]
            bounds += [_joined(bound, programs[position]) for bound in whole]
            owners += [owners[position]] * (len(bounds) - len(owners))
            each, ends = self.interval_bounds.ends(used[position], kinds[position])
            for kinds_, pair in zip(intervals, pairwise(ends.tolist()), strict=True):
                held += [self._held(used[position], each, *pair)] * len(kinds_)
            first.append((position, {position: places[:-1]}))
            if len(intervals[0]) > 1:
                then.append((position, {low: list(range(low + 1, high)) for low, high in pairwise(places)}))
        if first or any(numbers):
            problem = self.screening_problem(owners, bounds, held)
            cuts = first + then
            bound_ns, row, left = branched(problem, list(range(len(pieces))), cuts, target_ns - one.order_ns)
            one.raise_to(bound_ns + one.order_ns)
            one.worst_intervals = {} if row is None else _intervals(used, first, row.tolist())
            for position, parts in first if len(left) else []:
                numbered = _numbers(parts, left[:, position])
                each, ends = self.interval_bounds.ends(used[position], kinds[position])
                one.open_loads[used[position]] = each, float(ends[numbered.min()]), float(ends[numbered.max() + 1])


def _within(
    measure: FloatArray, fits: BoolArray, each: FloatArray, least: float, most: float
) -> tuple[float, float]:
    """The least and the most of a measure [n] that lengths which fit have together between two loads, to which
    each adds ``each`` [n]."""
    times = (measure / each)[fits]
    return (least * float(times.min()), most * float(times.max())) if len(times) else (0.0, 0.0)


def _joined(bounds: LinearBounds, more: Sequence[LinearBounds]) -> LinearBounds:
    """With more of the same groups."""
    for one in more:
        bounds = bounds.with_bounds(one)
    return bounds


def _intervals(
    used: tuple[int, ...],
    first: list[tuple[int, dict[int, list[int]]]],
    row: list[int],
) -> dict[int, int]:
    """Which interval of its load every pipeline of a set has in a choice of parts, by its place."""
    return {used[position]: int(_numbers(parts, np.array(row[position]))) for position, parts in first}


def _numbers(parts: dict[int, list[int]], chosen: IntArray) -> IntArray:
    """The intervals of chosen parts of a pipeline [...]: those that one is cut into stand behind it."""
    ((_, places),) = parts.items()
    return np.asarray(np.searchsorted(places, chosen, side="right") - 1)
