"""Sets of strategies that another process looks at, where no single strategy is in question any more.

Both look at sets by the same ways; the other process begins with a copy of all that was known once sets were
screened. Sets whose longest sequences run under the same strategy share the dearest of what is to be known, so
they go to the same process as far as both have enough. Which sets it looks at is told with every slice; after each
it tells their bounds and the best step that it found. If it dies, its sets are looked at here.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from milpplan.errors import MilpplanError
from milpplan.lengths.steps import Step
from milpplan.lengths.turns.screening import Node
from milpplan.lengths.turns.turn_search import TurnSearch
from milpplan.optimize.search.worker_process import WorkerProcess

# Seconds of a slice, and that are worth another process.
_SLICE_S, _WORTH_S = 0.5, 4.0


@dataclass(frozen=True, eq=False)
class SetProcessInit:
    """What the other process begins with."""

    search: TurnSearch

    def worker(self, gone: threading.Event) -> SetsWorker:
        """Who answers the messages after this one."""
        # What is found is packed and polished by the process that asks.
        self.search.packed_first = self.search.polished = True
        return SetsWorker(self.search)


@dataclass(frozen=True, slots=True)
class SetProcessRequest:
    """Which sets to look at, by their numbers, what is to beat, ns, and when all ends, by ``time.time``."""

    numbers: frozenset[int]
    below_ns: float
    end_s: float


@dataclass(frozen=True, slots=True)
class SetProcessReply:
    """The bound of every set of a slice and what its order adds to that, ns, of which nothing more is known, the
    best step, if it was not told before, and CPU seconds so far."""

    bounds: dict[int, tuple[float, float]]
    ended: frozenset[int]
    best: Step | None
    cpu_s: float


@dataclass(slots=True)
class SetsWorker:
    """Answers slices, in the other process."""

    search: TurnSearch
    num_reported: int = 0

    def reply(self, asked: SetProcessRequest) -> SetProcessReply:
        """What is known after a slice."""
        several, now = self.search, time.perf_counter()
        several.below_ns = min(several.below_ns, asked.below_ns)
        several.deadline = now + asked.end_s - time.time()
        pause = min(now + _SLICE_S, several.deadline)
        mine = [one for one in several.nodes if one.number in asked.numbers]
        several.tighten(enough_ns=lambda: -np.inf if time.perf_counter() > pause else np.inf, sets=mine)
        new = several.steps[self.num_reported :]
        self.num_reported = len(several.steps)
        return SetProcessReply(
            {one.number: (one.bound_ns, one.order_ns) for one in mine},
            frozenset(one.number for one in mine if not one.bounding_steps),
            min(new, key=lambda one: one.time_ns, default=None),
            time.process_time(),
        )


@dataclass(eq=False)
class SetProcess:
    """Our end: it takes some of the sets that are left, and gives back those that are done with."""

    search: TurnSearch
    process: WorkerProcess | None
    assigned: dict[int, Node] = field(default_factory=dict)
    awaited: bool = False
    cpu_s: float = 0.0

    @staticmethod
    def of(several: TurnSearch) -> SetProcess | None:
        """Start it, if there are sets for two and time enough."""
        open_ = [one for one in several.nodes if one.bound_ns < several.target_ns]
        if len(open_) < 2 or several.deadline - time.perf_counter() < _WORTH_S:
            return None
        return SetProcess(several, WorkerProcess(SetProcessInit(several)))

    @property
    def busy(self) -> bool:
        """Whether it looks at a set that is not closed."""
        return self.process is not None and any(self._open(self.assigned.values()))

    def share(self, left: list[Node]) -> None:
        """Hear what it has found of the sets it was given, which come back to the heap of those ``left`` where it
        knows no more of them, and give it some of these. What is left here is not given twice."""
        if self.process is None or (self.awaited and not self.process.answered):
            return
        if self.awaited:
            self.awaited = False
            try:
                self._take(self.process.answer(None, None), left)
            except MilpplanError:
                self.close()
                left += self.assigned.values()
                self.recall()
                heapq.heapify(left)
                return
        self._deal(left)
        heapq.heapify(left)
        numbers = frozenset(one.number for one in self._open(self.assigned.values()))
        if numbers:
            end_s = time.time() + self.search.deadline - time.perf_counter()
            self.process.send(SetProcessRequest(numbers, self.search.best.time_ns, end_s))
            self.awaited = True

    def _take(self, known: SetProcessReply, left: list[Node]) -> None:
        """What was told of sets, of which some may have come back meanwhile."""
        self.cpu_s = known.cpu_s
        if known.best is not None:
            self.search.take(known.best)
        for one in [*self.assigned.values(), *left]:
            bound_ns, order_ns = known.bounds.get(one.number, (0.0, 0.0))
            one.raise_to(bound_ns)
            # Its order is part of that, and is not added again.
            one.order_ns = max(one.order_ns, order_ns)
        target_ns = self.search.target_ns
        for number in [n for n, one in self.assigned.items() if n in known.ended or one.bound_ns >= target_ns]:
            one = self.assigned.pop(number)
            one.bounding_steps = []
            left.append(one)

    def _deal(self, left: list[Node]) -> None:
        """Who has nothing to do gets half of what the other one has."""
        here, there = sorted(one for one in self._open(left) if one.bounding_steps), sorted(self._open(self.assigned.values()))
        if not there:
            self.assigned |= {one.number: one for one in self._half(here)}
            left[:] = [one for one in left if one.number not in self.assigned]
        elif not here:
            left += [self.assigned.pop(one.number) for one in self._half(there)]

    def _half(self, sets: list[Node]) -> list[Node]:
        """Every other kind of sets, or every other set where all are of one kind, without the first."""
        kinds = list(dict.fromkeys(self._holds_longest(one) for one in sets))
        if len(kinds) == 1:
            return sets[1::2]
        others = set(kinds[1::2])
        return [one for one in sets if self._holds_longest(one) in others]

    def _holds_longest(self, one: Node) -> int:
        """The strategy of the set with the most room."""
        several = self.search
        return max(one.screened.strategies, key=lambda place: several.pool.max_quanta(several.members[place], beside=True))

    def _open(self, sets: Iterable[Node]) -> list[Node]:
        return [one for one in sets if one.bound_ns < self.search.target_ns]

    def recall(self) -> None:
        """Those that it was given are looked at here."""
        self.assigned.clear()

    def close(self) -> None:
        """End it."""
        if self.process is not None:
            self.process.close(at_once=True)
            self.process = None
