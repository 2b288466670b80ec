"""Worker pool: the processes that branch on the layouts of a search, this process included.

They work in rounds. A layout that was begun stays where it is; the others are dealt anew, in the order of their
bounds. A plan that a process finds counts for that process at once, and for the others from the next round on.
Rounds end by work, not by time, and are merged in a fixed order: so the answer is the same in every run, unless
the time limit ends it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from milpplan.errors import UnavailableError
from milpplan.optimize.context import Counters
from milpplan.optimize.layout.layout_solver import LayoutSolver
from milpplan.optimize.milp.backends import backend, witnesses
from milpplan.optimize.milp.program import Program
from milpplan.optimize.milp.solution import running
from milpplan.optimize.objective import threshold
from milpplan.optimize.result import SolveOptions
from milpplan.optimize.search.layout_queue import Begun, Entry, LayoutQueue, LayoutResult, LayoutTask, Reply, Round
from milpplan.parallel import WorkerProcess, can_start, usable_cpus
from milpplan.problem.problem import Problem

MOST_WORKERS: Final = 4
"""Default maximum number of processes."""
ALONE_S: Final = 0.5
"""Work after which other processes are started: most problems are decided earlier."""
STARTING_S: Final = 1.0
"""Work that this process does while others start."""
ROUND_S: Final = 1.5
"""Work of a process in a round."""
DEALT: Final = 32
"""Maximum number of new layouts that a process is given in a round."""
LATE_S: Final = 1.0
"""Seconds after the time limit until which a reply is awaited."""


@dataclass(frozen=True, slots=True)
class WorkerInit:
    """First message to a worker: the search it works for. ``options`` hold no functions."""

    problem: Problem
    options: SolveOptions
    keep_below: float
    wants_programs: bool

    def worker(self, gone: threading.Event) -> Worker:
        """Return the worker that answers the following messages; ``gone`` is set once the parent has gone."""
        return Worker.of(self, gone)


@dataclass(slots=True)
class Worker:
    """Decides layouts in rounds."""

    layouts: LayoutQueue
    tasks: dict[int, LayoutTask] = field(default_factory=dict)
    programs: list[Program] = field(default_factory=list)

    @staticmethod
    def of(init: WorkerInit, gone: threading.Event) -> Worker:
        """Make the worker of a search; ``gone`` is set once the parent has gone."""
        tasks: dict[int, LayoutTask] = {}
        programs: list[Program] = []
        options = replace(
            init.options, cancelled=gone.is_set, on_program=programs.append if init.wants_programs else None
        )
        solver = LayoutSolver(options, backend(options.backend), witnesses(options), None)
        layouts = LayoutQueue(init.problem, solver, tasks.__getitem__, keep_below=init.keep_below)
        return Worker(layouts, tasks, programs)

    def reply(self, work_order: Round) -> Reply:
        """Work for one round."""
        layouts = self.layouts
        layouts.solver.deadline = None if work_order.seconds is None else time.monotonic() + work_order.seconds
        layouts.best_value = min(layouts.best_value, work_order.best_value)
        self.tasks.update((task.row, task) for _, task in work_order.tasks)
        layouts.drop(work_order.dropped)
        layouts.add(entry for entry, _ in work_order.tasks)
        results = tuple(layouts.run(work_order.work_s))
        left: tuple[Entry, ...] = tuple(layouts.give_back())
        programs = tuple(self.programs)
        self.programs.clear()
        return Reply(results, layouts.begun(), left, replace(layouts.solver.counters), programs)


@dataclass(slots=True)
class Peer:
    """Worker process: the layouts that it has begun, and its last counters."""

    process: WorkerProcess
    begun: tuple[Begun, ...] = ()
    counted: Counters = field(default_factory=Counters)
    asked: bool = False
    given: tuple[Entry, ...] = ()
    """Layouts that it was given in this round."""


@dataclass(slots=True)
class LayoutWorkers:
    """Worker pool around the queue of this process; ``best_value`` returns the current incumbent's objective."""

    queue: LayoutQueue
    best_value: Callable[[], float]
    peers: list[Peer] = field(default_factory=list)

    @property
    def options(self) -> SolveOptions:
        """Options of the solve."""
        return self.queue.solver.options

    def run(self) -> Generator[LayoutResult]:
        """Yield the results of the layouts until all are decided or time is up."""
        others = num_workers(self.options) - 1 if can_start() else 0
        yield from self.queue.run(ALONE_S if others else np.inf)
        others = min(others, len(self.queue.heap) - 1)
        if others <= 0 or self.queue.solver.out_of_time():
            yield from self.queue.run()
            return
        try:
            self._start(others)
            yield from self.queue.run(STARTING_S)
            yield from self._rounds()
        finally:
            self.close()

    def _start(self, others: int) -> None:
        """Start the other processes, as many as the system allows."""
        try:
            for _ in range(others):
                with running("A process that works for the solve"):
                    self.peers.append(Peer(WorkerProcess(self._init())))
        except UnavailableError as error:
            self.queue.solver.without(error)

    def close(self) -> None:
        """End the other processes."""
        for peer in self.peers:
            peer.process.stop()
        for peer in self.peers:
            peer.process.close()
        self.peers.clear()

    def _init(self) -> WorkerInit:
        options = replace(self.options, callback=None, cancelled=None, on_program=None, warm_start=None)
        return WorkerInit(self.queue.problem, options, self.queue.keep_below, self.options.on_program is not None)

    def _rounds(self) -> Iterator[LayoutResult]:
        entries = sorted(self.queue.heap)
        mine = {row for _, _, row in entries[:: len(self.peers) + 1]}
        self.queue.drop(entry[-1] for _, entry in self.queue.begun() if entry[-1] not in mine)
        fresh = [entry for entry in entries if entry[-1] not in self.queue.begun_rows]
        self.queue.give_back()
        while not self.queue.solver.out_of_time():
            threshold_value = float(threshold(self.best_value(), self.options.gap, self.queue.keep_below))
            fresh = [entry for entry in fresh if entry[0] < threshold_value]
            if not (fresh or self.queue.heap or any(peer.begun for peer in self.peers)):
                break
            fresh = self._deal(fresh)
            yield from self.queue.run(ROUND_S)
            fresh += self.queue.give_back()
            for peer in [peer for peer in self.peers if peer.asked]:
                try:
                    reply = self._answer(peer)
                except UnavailableError as error:
                    fresh += self._left_by(peer, error)
                    continue
                if reply is None:
                    return
                fresh += reply.left
                yield from reply.findings
            fresh.sort()

    def _left_by(self, peer: Peer, error: UnavailableError) -> list[Entry]:
        """Drop a process that has died. Returns its layouts, which are dealt anew."""
        self.queue.solver.without(error)
        peer.process.close(at_once=True)
        self.peers.remove(peer)
        entries = {entry[-1]: entry for entry in (*peer.given, *(entry for _, entry in peer.begun))}
        return list(entries.values())

    def _deal(self, fresh: Sequence[Entry]) -> list[Entry]:
        """Begin a round: deal the next layouts, starting with the processes that have begun the fewest.

        A process that has begun none gets a begun layout of another. Returns the layouts left for later rounds.
        """
        num_processes = len(self.peers) + 1
        begun = [list(self.queue.begun()), *(list(peer.begun) for peer in self.peers)]
        order = sorted(range(num_processes), key=lambda process: len(begun[process]))
        dealt, rest = fresh[: num_processes * DEALT], list(fresh[num_processes * DEALT :])
        dealt_to = {process: list(dealt[turn::num_processes]) for turn, process in enumerate(order)}
        dropped: dict[int, list[int]] = {process: [] for process in order}
        for giver, receiver, entry in moves(begun):
            dropped[giver].append(entry[-1])
            dealt_to[receiver].append(entry)
        for process, peer in enumerate(self.peers, 1):
            peer.asked = bool(dealt_to[process] or peer.begun)
            peer.given = tuple(dealt_to[process])
            if peer.asked:
                peer.process.send(self._round(dealt_to[process], dropped[process]))
        self.queue.best_value = self.best_value()
        self.queue.drop(dropped[0])
        self.queue.add(dealt_to[0])
        return rest

    def _round(self, entries: Sequence[Entry], dropped: Sequence[int]) -> Round:
        tasks = tuple((entry, self.queue.task_of(entry[-1])) for entry in entries)
        deadline = self.queue.solver.deadline
        seconds_left = None if deadline is None else max(0.0, deadline - time.monotonic())
        return Round(tasks, tuple(dropped), self.best_value(), ROUND_S, seconds_left)

    def _answer(self, peer: Peer) -> Reply | None:
        """Return the reply of a process on this round; None where the time limit came first."""
        deadline = self.queue.solver.deadline
        deadline_late = None if deadline is None else deadline + LATE_S
        reply: Reply | None = peer.process.answer(deadline_late, self.options.cancelled)
        if reply is None:
            return None
        peer.begun = reply.begun
        self.queue.solver.counters.add(reply.counters, peer.counted)
        peer.counted = reply.counters
        if self.options.on_program is not None:
            for program in reply.programs:
                self.options.on_program(program)
        return reply


def num_workers(options: SolveOptions) -> int:
    """Return the number of processes that may decide layouts, this process included."""
    return min(usable_cpus(), MOST_WORKERS) if options.workers is None else options.workers


def moves(begun: Sequence[Sequence[Begun]]) -> list[tuple[int, int, Entry]]:
    """Return transfers of begun layouts, as (giver, receiver, entry).

    Each process without a begun layout receives the one with the fewest explored nodes of the process that has the
    most. Branching restarts there with the bound proved so far.
    """
    sorted_begun = [sorted(entries) for entries in begun]
    transfers: list[tuple[int, int, Entry]] = []
    for receiver in [process for process, entries in enumerate(sorted_begun) if not entries]:
        giver = max(range(len(sorted_begun)), key=lambda process: len(sorted_begun[process]))
        if len(sorted_begun[giver]) > 1:
            _, entry = sorted_begun[giver].pop(0)
            transfers.append((giver, receiver, entry))
    return transfers
