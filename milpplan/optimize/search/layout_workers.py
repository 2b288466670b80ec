"""The processes that branch on the layouts of a search: this one, and others once there is enough to do.

They work in rounds. A layout that was begun stays where it was, the others are dealt anew, in the order of their
bounds. What a process finds counts for itself at once, for the others in the next round. Rounds end by work, not
by time, and are merged in one order: so the answer is the same in every run, unless the time limit ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from milpplan.errors import UnavailableError
from milpplan.optimize.counters import Counters
from milpplan.optimize.milp.solution import running
from milpplan.optimize.objective import threshold
from milpplan.optimize.result import SolveOptions
from milpplan.optimize.search.layout_queue import Begun, Entry, LayoutQueue, LayoutResult, Reply, Round
from milpplan.optimize.search.worker import WorkerInit
from milpplan.optimize.search.worker_process import WorkerProcess, can_start, usable_cpus

MOST_WORKERS: Final = 4
"""Processes used unless more are asked for."""
ALONE_S: Final = 0.5
"""Work after which others are started, if there is more: most problems are decided before."""
STARTING_S: Final = 1.0
"""Work that this process does while others start."""
ROUND_S: Final = 1.5
"""Work of a process in a round."""
DEALT: Final = 32
"""Most layouts that a process is given in a round, besides those that it has begun."""
LATE_S: Final = 1.0
"""How long after the time limit an answer is awaited."""


@dataclass(slots=True)
class Peer:
    """Another process, the layouts that it has begun, and what it has counted."""

    process: WorkerProcess
    begun: tuple[Begun, ...] = ()
    counted: Counters = field(default_factory=Counters)
    asked: bool = False
    given: tuple[Entry, ...] = ()
    """The layouts of the round."""


@dataclass(slots=True)
class LayoutWorkers:
    """Decides the layouts of ``own``, with others where that pays. ``best_value`` says what is to beat now."""

    own: LayoutQueue
    best_value: Callable[[], float]
    mates: list[Peer] = field(default_factory=list)

    @property
    def options(self) -> SolveOptions:
        """How to solve."""
        return self.own.solver.options

    def run(self) -> Generator[LayoutResult]:
        """What becomes of the layouts, until all are decided or time is up."""
        others = num_workers(self.options) - 1 if can_start() else 0
        yield from self.own.run(ALONE_S if others else np.inf)
        others = min(others, len(self.own.heap) - 1)
        if others <= 0 or self.own.solver.out_of_time():
            yield from self.own.run()
            return
        try:
            self._start(others)
            yield from self.own.run(STARTING_S)
            yield from self._rounds()
        finally:
            self.close()

    def _start(self, others: int) -> None:
        """Start others, as many as can be."""
        try:
            for _ in range(others):
                with running("A process that works for the solve"):
                    self.mates.append(Peer(WorkerProcess(self._hello())))
        except UnavailableError as error:
            self.own.solver.without(error)

    def close(self) -> None:
        """End the others."""
        for mate in self.mates:
            mate.process.stop()
        for mate in self.mates:
            mate.process.close()
        self.mates.clear()

    def _hello(self) -> WorkerInit:
        options = replace(self.options, callback=None, cancelled=None, on_program=None, warm_start=None)
        return WorkerInit(self.own.problem, options, self.own.keep_below, self.options.on_program is not None)

    def _rounds(self) -> Iterator[LayoutResult]:
        everything = sorted(self.own.heap)
        mine = {row for _, _, row in everything[:: len(self.mates) + 1]}
        self.own.drop(entry[-1] for _, entry in self.own.begun() if entry[-1] not in mine)
        fresh = [entry for entry in everything if entry[-1] not in self.own.begun_rows]
        self.own.give_back()
        while not self.own.solver.out_of_time():
            least = float(threshold(self.best_value(), self.options.gap, self.own.keep_below))
            fresh = [entry for entry in fresh if entry[0] < least]
            if not (fresh or self.own.heap or any(mate.begun for mate in self.mates)):
                break
            fresh = self._deal(fresh)
            yield from self.own.run(ROUND_S)
            fresh += self.own.give_back()
            for mate in [mate for mate in self.mates if mate.asked]:
                try:
                    reply = self._answer(mate)
                except UnavailableError as error:
                    fresh += self._left_by(mate, error)
                    continue
                if reply is None:
                    return
                fresh += reply.left
                yield from reply.findings
            fresh.sort()

    def _left_by(self, mate: Peer, error: UnavailableError) -> list[Entry]:
        """Go on without a process that has died: what it was deciding is dealt anew."""
        self.own.solver.without(error)
        mate.process.close(at_once=True)
        self.mates.remove(mate)
        held = {entry[-1]: entry for entry in (*mate.given, *(entry for _, entry in mate.begun))}
        return list(held.values())

    def _deal(self, fresh: Sequence[Entry]) -> list[Entry]:
        """Begin a round: the next layouts go around, first to those that have begun fewest; who has begun none is
        given one of another's. Returns the layouts that are left for later."""
        number = len(self.mates) + 1
        begun = [list(self.own.begun()), *(list(mate.begun) for mate in self.mates)]
        order = sorted(range(number), key=lambda place: len(begun[place]))
        dealt, rest = fresh[: number * DEALT], list(fresh[number * DEALT :])
        hands = {place: list(dealt[turn::number]) for turn, place in enumerate(order)}
        dropped: dict[int, list[int]] = {place: [] for place in order}
        for giver, taker, entry in moves(begun):
            dropped[giver].append(entry[-1])
            hands[taker].append(entry)
        for place, mate in enumerate(self.mates, 1):
            mate.asked = bool(hands[place] or mate.begun)
            mate.given = tuple(hands[place])
            if mate.asked:
                mate.process.send(self._round(hands[place], dropped[place]))
        self.own.best_value = self.best_value()
        self.own.drop(dropped[0])
        self.own.add(hands[0])
        return rest

    def _round(self, hand: Sequence[Entry], dropped: Sequence[int]) -> Round:
        cases = tuple((entry, self.own.case_of(entry[-1])) for entry in hand)
        deadline = self.own.solver.deadline
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        return Round(cases, tuple(dropped), self.best_value(), ROUND_S, left)

    def _answer(self, mate: Peer) -> Reply | None:
        """What a process has done in this round; None where the time limit came first."""
        deadline = self.own.solver.deadline
        until = None if deadline is None else deadline + LATE_S
        reply: Reply | None = mate.process.answer(until, self.options.cancelled)
        if reply is None:
            return None
        mate.begun = reply.begun
        self.own.solver.counters.add(reply.counters, mate.counted)
        mate.counted = reply.counters
        if self.options.on_program is not None:
            for program in reply.programs:
                self.options.on_program(program)
        return reply


def num_workers(options: SolveOptions) -> int:
    """Processes that may decide layouts, this one included."""
    return min(usable_cpus(), MOST_WORKERS) if options.workers is None else options.workers


def moves(begun: Sequence[Sequence[Begun]]) -> list[tuple[int, int, Entry]]:
    """Begun layouts that are to go from one process to another, which begins anew with what is proved: to each
    that has none the one with fewest nodes behind it, of the process that has most."""
    held = [sorted(own) for own in begun]
    found: list[tuple[int, int, Entry]] = []
    for taker in [place for place, own in enumerate(held) if not own]:
        giver = max(range(len(held)), key=lambda place: len(held[place]))
        if len(held[giver]) > 1:
            _, entry = held[giver].pop(0)
            found.append((giver, taker, entry))
    return found
