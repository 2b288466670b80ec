"""Second phase of a search in the free space: decide the layouts that closed-form bounds leave open.

First the relaxations of all these layouts, then each layout in full, smallest bound first (``LayoutQueue``). Where
this takes long, worker processes compute answers ahead of time (``layout_tasks``). ``solve`` imports this module
where it needs it, because the uniform space solves no programs.

Branching on interleaved chunks of any size takes longer still. There worker processes share the queue
(``LayoutWorkers``), this process included, and work in rounds. A layout that was begun stays where it is; the
others are dealt anew, in the order of their bounds. A plan that a process finds counts for that process at once,
and for the others from the next round on. The size of a round is measured in ``Counters.work_s``, not in time, and
rounds are merged in a fixed order. So the answer is the same on every machine and in every run, unless the time
limit ends it.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Final

import numpy as np

from milpplan.errors import UnavailableError
from milpplan.optimize import Counters, SolveOptions
from milpplan.optimize.context import threshold
from milpplan.optimize.layout import LayoutOutcome, LayoutSolver
from milpplan.optimize.layout.layout_solver import PartBounds
from milpplan.optimize.milp.backends import backend, witnesses
from milpplan.optimize.milp.program import Program
from milpplan.optimize.milp.solution import running
from milpplan.optimize.search.best_first import Search
from milpplan.optimize.search.closed_layouts import FATES
from milpplan.optimize.search.layout_tasks import (
    AheadDecider,
    LayoutResult,
    LayoutTask,
    cutoff_ns,
    decide_layout,
)
from milpplan.parallel import WorkerProcess, can_start, usable_cpus
from milpplan.problem import Layout, Problem

Entry = tuple[float, int, int]
"""(lower bound of the objective, position in the queue, row); a bound of -infinity puts the layout first."""
Begun = tuple[int, Entry]
"""(number of explored nodes, entry) of a layout whose branching has begun."""


@dataclass(frozen=True, slots=True)
class Round:
    """Request to a process for one round of work.

    ``tasks``: new layouts with their positions in the queue; those that the process has begun go on. ``dropped``:
    rows that another process takes over. ``best_value``: objective of the incumbent. ``work_s``: approximate
    amount of work. ``seconds``: until the time limit.
    """

    tasks: tuple[tuple[Entry, LayoutTask], ...]
    dropped: tuple[int, ...]
    best_value: float
    work_s: float
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Reply:
    """Report of a process on its round.

    ``begun``: layouts that the process goes on with. ``left``: layouts of the round that it did not touch.
    ``counters``: of its whole life. ``programs``: integer programs that bounds of the round rest on.
    """

    results: tuple[LayoutResult, ...]
    begun: tuple[Begun, ...]
    left: tuple[Entry, ...]
    counters: Counters
    programs: tuple[Program, ...]


@dataclass(slots=True)
class LayoutQueue:
    """Layouts of one process."""

    problem: Problem
    solver: LayoutSolver
    task_of: Callable[[int], LayoutTask]
    part_bounds: PartBounds = field(default_factory=dict)
    ahead: AheadDecider | None = None
    best_value: float = np.inf
    keep_below: float = -np.inf
    heap: list[Entry] = field(default_factory=list)
    begun_rows: set[int] = field(default_factory=set)
    """Layouts of the heap whose branching has begun here."""
    bounds: dict[int, int] = field(default_factory=dict)
    """Bounds proved here, in nanoseconds, by row."""

    def add(self, entries: Iterable[Entry]) -> None:
        """Add layouts to decide."""
        self.heap = [*self.heap, *entries]
        heapq.heapify(self.heap)

    def run(self, work_s: float = np.inf) -> Generator[LayoutResult]:
        """Decide layouts until none is left, the work limit is reached or time is up.

        Free interleaved splits are branched a few nodes at a time.
        """
        work_limit_s = self.solver.counters.work_s + work_s
        gap = self.solver.options.gap
        while self.heap and self.solver.counters.work_s < work_limit_s and not self.solver.out_of_time():
            _, position, row = heapq.heappop(self.heap)
            task = self.task_of(row)
            bound = max(self.bounds.get(row, 0), task.bound_ns)
            self.begun_rows.discard(row)
            if bound * task.weight >= float(threshold(self.best_value, gap, self.keep_below)):
                self._forget(task.layout)
                continue
            cutoff = cutoff_ns(self.best_value, gap, task.weight, task.limit_ns)
            result = None if self.ahead is None else self.ahead.decided(task, cutoff, 1, self._following)
            if result is None:
                result = decide_layout(self.problem, self.solver, self.part_bounds, task, cutoff, 1)
            self._note(task, bound, result.outcome)
            if self.solver.unfinished(task.layout):
                self.begun_rows.add(row)
                heapq.heappush(self.heap, (self.bounds[row] * task.weight, position, row))
            yield result

    def _following(self) -> Iterator[tuple[LayoutTask, int]]:
        """Yield the layouts left and their cutoffs, in the order in which they are decided."""
        gap = self.solver.options.gap
        threshold_value = float(threshold(self.best_value, gap, self.keep_below))
        for _, _, row in sorted(self.heap):
            task = self.task_of(row)
            if max(self.bounds.get(row, 0), task.bound_ns) * task.weight < threshold_value:
                yield task, cutoff_ns(self.best_value, gap, task.weight, task.limit_ns)

    def _note(self, task: LayoutTask, bound: int, outcome: LayoutOutcome) -> None:
        """Store the proved bound, and the new objective to beat."""
        self.bounds[task.row] = max(bound, outcome.bound_ns)
        if outcome.step_time_ns is not None and outcome.step_time_ns <= task.limit_ns:
            self.best_value = min(self.best_value, outcome.step_time_ns * task.weight)

    def begun(self) -> tuple[Begun, ...]:
        """Return the layouts whose branching has begun here, fewest explored nodes first."""
        entries = [entry for entry in self.heap if entry[-1] in self.begun_rows]
        return tuple(sorted((self._nodes(self.task_of(entry[-1]).layout), entry) for entry in entries))

    def give_back(self) -> list[Entry]:
        """Remove and return the layouts whose branching has not begun."""
        left = [entry for entry in self.heap if entry[-1] not in self.begun_rows]
        self._keep(self.begun_rows)
        return sorted(left)

    def drop(self, rows: Iterable[int]) -> None:
        """Remove begun layouts that another process takes over."""
        for row in rows:
            self.begun_rows.discard(row)
            self._forget(self.task_of(row).layout)
            self._keep({entry[-1] for entry in self.heap} - {row})

    def _keep(self, rows: Set[int]) -> None:
        self.heap = [entry for entry in self.heap if entry[-1] in rows]
        heapq.heapify(self.heap)

    def _nodes(self, layout: Layout) -> int:
        """Return the number of explored nodes of a layout."""
        return sum(
            tree.num_explored for (tree_layout, _), tree in self.solver.trees.items() if tree_layout == layout
        )

    def _forget(self, layout: Layout) -> None:
        """Delete the branching trees of a layout."""
        for part in [part for part in self.solver.trees if part[0] == layout]:
            del self.solver.trees[part]


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

    def reply(self, request: Round) -> Reply:
        """Work for one round."""
        layouts = self.layouts
        layouts.solver.deadline = None if request.seconds is None else time.monotonic() + request.seconds
        layouts.best_value = min(layouts.best_value, request.best_value)
        self.tasks.update((task.row, task) for _, task in request.tasks)
        layouts.drop(request.dropped)
        layouts.add(entry for entry, _ in request.tasks)
        results = tuple(layouts.run(request.work_s))
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
            self.queue.solver.note_unavailable(error)

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
                yield from reply.results
            fresh.sort()

    def _left_by(self, peer: Peer, error: UnavailableError) -> list[Entry]:
        """Drop a process that has died. Returns its layouts, which are dealt anew."""
        self.queue.solver.note_unavailable(error)
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


FIRST_PLAN_WORK_S = 4.0
"""Work (``Counters.work_s``) after which a search for a first plan gives up."""


@dataclass(slots=True)
class BranchPhase:
    """Second phase of one search, with its layout solver."""

    search: Search
    solver: LayoutSolver
    ahead: AheadDecider
    relaxed: set[int] = field(default_factory=set)
    """Layouts whose compact relaxations are solved."""

    @staticmethod
    def of(search: Search) -> BranchPhase:
        """Make the phase from the options, solvers and deadline of a search."""
        context = search.context
        solver = LayoutSolver(
            context.options,
            context.backend,
            context.witnesses,
            context.deadline,
            context.counters,
            context.unavailable,
            tolerance=context.tolerance,
            known_paths=context.known_paths,
        )
        num_others = num_workers(solver.options) - 1 if can_start() and not search.first_only else 0
        return BranchPhase(search, solver, AheadDecider(search.problem, solver, {}, num_others))

    def close(self) -> None:
        """End the worker processes."""
        self.ahead.close()

    def relax(self, below: float = np.inf) -> None:
        """Solve the compact relaxations of open layouts, each once; for ``first_only``, until one has a plan.

        They come first, because they are cheap and improve the incumbent.

        Args:
            below: while ``Search.bound`` runs, the value below which the layouts with detailed bounds are chosen.
        """
        search, solver = self.search, self.solver
        self._queue()
        queue = search.queue
        if search.problem.interleaved_layers == "any":
            queue = queue[search.explored.space.vpp_of(queue) == 1]
        if below < np.inf:
            queue = queue[(search.explored.values(queue) < below) & search.explored.detailed[queue]]
        if search.first_only:
            # In turn with the layouts in the order of their memory.
            roomiest = queue[np.argsort(search.explored.memory[queue], kind="stable")]
            both = np.stack([queue, roomiest], axis=1).ravel()
            queue = both[np.sort(np.unique(both, return_index=True)[1])]
        rows = [row for row in queue.tolist() if row not in self.relaxed]
        for position, row in enumerate(rows, 1):
            if search.is_over() or (search.first_only and solver.counters.work_s > FIRST_PLAN_WORK_S):
                break
            if self._value(row) < search.threshold():
                question = *self._task_and_cutoff(row), 0
                result = self.ahead.decided(*question, partial(self._following, rows, position))
                if result is None:
                    result = decide_layout(search.problem, solver, self.ahead.part_bounds, *question)
                self._take(result)
                search.note()
            self.relaxed.add(row)

    def run(self) -> None:
        """Decide in full what the relaxations leave open.

        The incumbent's layout comes first, because a better incumbent makes the others cheaper. Layouts with free
        interleaved splits are branched a few nodes at a time, always the layout with the smallest bound.
        """
        if self.search.problem.interleaved_layers != "any":
            self._decide(self._filled_queue(self.ahead).run())
            return
        self.close()
        # Worker processes only where branching takes long enough.
        self._decide(LayoutWorkers(self._filled_queue(None), lambda: self.search.best_value).run())

    def _following(self, rows: Sequence[int], position: int) -> Iterator[tuple[LayoutTask, int]]:
        """Yield the layouts from a position on that may improve the incumbent, with their cutoffs."""
        for row in islice(rows, position, None):
            if self._value(row) < self.search.threshold():
                yield self._task_and_cutoff(row)

    def _filled_queue(self, ahead: AheadDecider | None) -> LayoutQueue:
        """Return a queue of the layouts left, in the order of their bounds, but the incumbent's layout first."""
        search = self.search
        self._queue()
        best, keep = search.best_value, search.keep_below
        queue = LayoutQueue(search.problem, self.solver, self._task, self.ahead.part_bounds, ahead, best, keep)
        incumbent_row = search.explored.space.find(search.best[1].layout) if search.best else None
        values = [-np.inf if row == incumbent_row else self._value(row) for row in search.queue.tolist()]
        queue.add(zip(values, range(len(values)), search.queue.tolist(), strict=True))
        return queue

    def _decide(self, decided_layouts: Generator[LayoutResult]) -> None:
        """Take over the results of decided layouts."""
        search = self.search
        with closing(decided_layouts) as results:
            for result in results:
                self._take(result)
                if result.fate == "open" and self._value(result.row) >= search.threshold():
                    search.explored.fates[result.row] = FATES.index("solved")
                search.note()

    def _queue(self) -> None:
        """Fill the search's queue with its open layouts, smallest bound first."""
        search = self.search
        search.queue = search.by_value(search.open_rows, search.explored.values(search.open_rows))

    def _value(self, row: int) -> float:
        """Return the lower bound of a layout's objective."""
        return float(self.search.explored.bounds_ns[row] * self.search.explored.weights[row])

    def _task(self, row: int) -> LayoutTask:
        """Return the task of deciding a layout."""
        search = self.search
        costs = search.cost_cache.at(search.explored.space, row, search.queue)
        bound, limit = int(search.explored.bounds_ns[row]), float(search.explored.limits_ns[row])
        return LayoutTask(
            row, search.explored.space.at(row), costs, bound, float(search.explored.weights[row]), limit
        )

    def _task_and_cutoff(self, row: int) -> tuple[LayoutTask, int]:
        """Return the task of deciding a layout, and the cutoff that the incumbent sets."""
        task = self._task(row)
        return task, cutoff_ns(self.search.best_value, self.solver.options.gap, task.weight, task.limit_ns)

    def _take(self, result: LayoutResult) -> None:
        """Store the result of a layout in the search."""
        search, row, outcome = self.search, result.row, result.outcome
        search.explored.bounds_ns[row] = max(search.explored.bounds_ns[row], float(outcome.bound_ns))
        search.explored.fates[row] = FATES.index(result.fate)
        if outcome.plan is not None and outcome.step_time_ns is not None:
            weight, limit_ns = float(search.explored.weights[row]), float(search.explored.limits_ns[row])
            search.offer(outcome.plan, outcome.step_time_ns, weight, limit_ns)
