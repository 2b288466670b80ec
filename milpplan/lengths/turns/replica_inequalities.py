"""A pipeline's group in a step of several strategies, by the leaders of its replicas.

What is known of a pipeline alone with all sequences (``leaders``) says little of one that leaves some to others:
which, is open. So here is what its replicas hold at most within a time, told apart by classes of their longest
sequence, as rows of a program (``unlike_kinds``): every way to weigh sequences gives a class one. Replicas whose
leaders are longer than those of a class hold all longer sequences of the group between them, and are as many as
these need at least (``together``), if it is known which the group holds.

Where a program puts on the replicas what no row knows to be too much, windows of the classes that it uses are
refined, and where nothing more is to be had of them, all are asked together for the prices by which they do least
of just that (``chain_programs``): rows that cut it off. All that is learned holds for every set that the pipeline
is in.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from milpplan.lengths.bounds.configuration_bound import ConfigurationBound
from milpplan.lengths.bounds.longest_sequence_branching import LongestSequenceBranching, ReplicaClassBound
from milpplan.lengths.heterogeneous.capacity_rows import CapacityRow, ReplicaClass
from milpplan.lengths.heterogeneous.count_program import UsedKind
from milpplan.lengths.side_by_side.sequence_duals import replica_prices
from milpplan.lengths.strategy_tables import StrategyTables
from milpplan.simulation.layout_columns import FloatArray

# What a program puts on replicas is cut off if by some worths they do less than this of it.
_CUT = 1.0 - 1e-3
# Windows are refined until they leave so much less than that.
_FURTHER = 0.01
# Prices are sought for what is held and this share of all sequences, for so many seconds, so many times.
_ALL, _ASK_S, _ASKED, _OTHER = 0.02, 1.5, 24, 0.01
# Fewer replicas of a class do not count.
_FEW = 0.02
# Prices of a strategy of one stage.
_PRICES = 4


@dataclass(frozen=True, eq=False)
class _LedRoom(CapacityRow):
    """What a class does at most by the worths of ``led``."""

    led: ReplicaClassBound
    place: int

    def within(self, time_ns: float) -> float:
        return self.led.max_load(self.place, time_ns)


class ReplicaInequalities:
    """Groups of a strategy beside others, in steps of ``time_ns`` at most."""

    def __init__(self, pool: StrategyTables, member: int, time_ns: float) -> None:
        self.pool, self.member, self.time_ns = pool, member, time_ns
        self.num_replicas = pool.members[member].candidate.layout.dp
        self.kind = ReplicaClass.of(pool, member, beside=True)
        # Of pipelines, once more is asked for than bounds of all replicas.
        self.branching: LongestSequenceBranching | None = None
        self._asked: list[tuple[bytes, float]] = []

    def replica_classes(self, time_ns: float) -> list[UsedKind]:
        """Replicas of every class that has any within a time, with what is known by now."""
        kinds = [self.kind]
        if self.branching is not None:
            kinds = []
            for place, leaders in enumerate(self.branching.classes):
                rooms = tuple(_LedRoom(one.duals.sequence_loads, (), one, place) for one in self.branching.class_bounds)
                kinds.append(replace(self.kind, leaders=leaders, rooms=rooms))
        found = []
        for kind in kinds:
            holds = kind.held(time_ns)
            if holds.any() and len(rows := kind.rows(time_ns)):
                found.append(UsedKind(kind, holds, rows).sharpened)
        return found

    def min_replicas(self, first: int, time_ns: float) -> int:
        """How many replicas all sequences of length number ``first`` and longer need at least."""
        if self.branching is None:
            return 0
        number = int(self.pool.load.counts[first:].sum())
        return self.branching.min_replicas.min_replicas(number, time_ns)

    def learn(self, time_ns: float, parts: list[tuple[ReplicaClass, float, FloatArray]], deadline: float) -> bool:
        """Know more, so that so many replicas of every kind do not hold [n] each what they do within a time;
        whether they do not by now."""
        if self.pool.num_stages(self.member) == 1:
            return self._price(parts)
        if self.branching is None:
            self.branching = self._led()
            return True
        leaders = self.branching
        if any(kind.leaders is None for kind, _, _ in parts):
            # From before they were told apart.
            return True
        chain = np.zeros(len(leaders.classes))
        held = np.zeros(len(self.pool.load.counts))
        for kind, number, mine in parts:
            place = leaders.classes.index(kind.leaders or (0, 0))
            chain[place] = number if number > _FEW else 0.0
            held += mine
        if not chain.any():
            return False
        while time.perf_counter() < deadline:
            shares = [self._share(one, chain, held, time_ns) for one in leaders.class_bounds]
            best = int(np.argmin(shares))
            led, share = leaders.class_bounds[best], shares[best]
            if share <= 1.0 - _FURTHER:
                return True
            if leaders.refine_class(led, chain, time_ns, (share - 1.0 + _FURTHER) * float(led.duals.sequence_loads @ held)):
                continue
            key = np.rint(chain).tobytes()
            known = [abs(one / time_ns - 1.0) for other, one in self._asked if other == key]
            if len(self._asked) < _ASKED and share > _CUT and min(known, default=1.0) > _OTHER:
                self._asked.append((key, time_ns))
                wanted = held + _ALL * self.pool.load.counts
                if leaders.add_duals(led, chain, wanted, time_ns, _ASK_S):
                    return self._share(leaders.class_bounds[-1], chain, held, time_ns) <= _CUT
            return share <= _CUT
        return False

    def _led(self) -> LongestSequenceBranching:
        """Replicas told apart by their leaders."""
        contents = self.pool.micro_batch_pricing(self.member, beside=True)
        if contents.items.fits[-1]:
            known = self.pool.work_bound_with_longest(self.member, np.inf)
        else:
            known = replace(self.pool.best_own_memory_bound(self.member), classes=())
        filled = ConfigurationBound(known, contents)
        filled.branch_on_large(self.time_ns, known.total_load)
        return LongestSequenceBranching(filled, self.time_ns)

    def _price(self, parts: list[tuple[ReplicaClass, float, FloatArray]]) -> bool:
        """Prices under a strategy of one stage that are highest for what its replicas hold, a few times."""
        if not parts or len(self.kind.prices) == _PRICES:
            return False
        held = parts[0][2] + _ALL * self.pool.load.counts
        there = np.where(self.kind.held(self.time_ns), held, 0.0)
        prices = replica_prices(self.pool, self.member, there, self.time_ns, np.inf)
        self.kind = replace(self.kind, prices=(*self.kind.prices, prices))
        return True

    def _share(self, led: ReplicaClassBound, chain: FloatArray, held: FloatArray, time_ns: float) -> float:
        """What the replicas of a chain do at most of what they hold together."""
        places = np.flatnonzero(chain).tolist()
        left = sum(float(chain[place]) * max(0.0, led.max_load(place, time_ns)) for place in places)
        return left / float(led.duals.sequence_loads @ held)
