"""Decision of layouts one after another, with answers that worker processes compute ahead of time.

The answer for a layout is a function of the layout, its cutoff, the effort and the critical paths known for its
graph (``Question``). ``AheadDecider`` guesses the next questions of a search from its queue and its incumbent.
Worker processes answer them, and the search takes an answer only where its own question is the guessed one. So
plans, bounds and counts do not depend on the number of processes.

Layouts with the same graph hand their critical paths on (``Chain``), so they are answered one after another, and
only layouts with different graphs at the same time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import is_
from typing import Final, Literal

from milpplan.errors import UnavailableError
from milpplan.optimize import Counters, SolveOptions
from milpplan.optimize.layout import LayoutContext, LayoutOutcome, LayoutSolver
from milpplan.optimize.layout.layout_solver import AIMED_GAP_SHARE, PartBounds, graph_key, resolve_in_parts
from milpplan.optimize.layout.stage_options import contexts_of, longest_step_ns
from milpplan.optimize.layout.view_solver import resolve_views
from milpplan.optimize.milp.backends import backend, witnesses
from milpplan.optimize.milp.program import Program
from milpplan.optimize.milp.solution import Backend, running
from milpplan.optimize.search.closed_layouts import Fate
from milpplan.optimize.space.plan_space import in_parts
from milpplan.parallel import POLL_S, WorkerProcess
from milpplan.problem import Layout, Problem
from milpplan.simulation import RankCosts
from milpplan.simulation.mixed_costs import ReplicaCosts
from milpplan.simulation.pipeline.step_graph import CriticalPath
from milpplan.simulation.scenario_costs import ScenarioCosts


@dataclass(frozen=True, slots=True)
class LayoutTask:
    """Task to decide one layout.

    ``row``: in the search. ``costs``: the layout's cost constants. ``bound_ns``: proved lower bound. ``weight``:
    factor from step time (ns) to objective. ``limit_ns``: longest admissible step.
    """

    row: int
    layout: Layout
    costs: RankCosts | ReplicaCosts | ScenarioCosts
    bound_ns: int
    weight: float
    limit_ns: float


@dataclass(frozen=True, slots=True)
class LayoutResult:
    """Outcome of one layout."""

    row: int
    outcome: LayoutOutcome
    fate: Fate


def cutoff_ns(best: float, gap: float, weight: float, limit_ns: float) -> int:
    """Return the longest step of a layout that improves the incumbent by as much as proofs aim at."""
    return int(min(best * (1.0 - AIMED_GAP_SHARE * gap) / weight, limit_ns, 2.0**53))


def decide_layout(
    problem: Problem, solver: LayoutSolver, part_bounds: PartBounds, task: LayoutTask, cutoff: int, effort: int
) -> LayoutResult:
    """Decide one layout against a cutoff in nanoseconds; see ``LayoutSolver.resolve``."""
    layout, bound = task.layout, task.bound_ns
    contexts = contexts_of(problem, layout, task.costs)
    longest_ns = max(map(longest_step_ns, contexts))
    limit_ns = min(cutoff, longest_ns)
    scales = tuple(view.scale for view in task.costs.views) if isinstance(task.costs, ScenarioCosts) else ()
    # Only a cutoff that an incumbent sets may be lowered: no other plan at or below it is worse than the answer.
    slack = solver.program_slack if cutoff < int(min(task.limit_ns, longest_ns)) else 0.0

    def resolve(parts: Sequence[LayoutContext], limit_ns: int, bound: int, effort: int) -> LayoutOutcome:
        if len(parts) == 1:
            return solver.resolve(parts[0], limit_ns, bound, effort, slack)
        return resolve_views(solver, layout, parts, scales, limit_ns, bound, effort)

    if in_parts(problem) and not layout.replica_micro_batches:
        gap = solver.options.gap
        outcome = resolve_in_parts(resolve, gap, part_bounds, contexts, limit_ns, bound, effort)
    elif len(contexts) == 1:
        outcome = solver.resolve(contexts[0], limit_ns, bound, effort, slack)
    else:
        outcome = resolve(contexts, limit_ns, bound, effort)
    # No plan is at or below the cutoff, which no plan's step can exceed: so no plan fits.
    infeasible = outcome.plan is None and outcome.fate != "open" and longest_ns <= cutoff
    return LayoutResult(task.row, outcome, "does_not_fit" if infeasible else outcome.fate)


Chain = tuple[object, ...]
"""Key of a step graph without its scenario (``graph_key``): layouts that share critical paths."""
PathsByKey = dict[tuple[object, ...], list[CriticalPath]]
"""Critical paths by graph and scenario, as ``LayoutSolver.known_paths``."""
Following = Callable[[], Iterable[tuple[LayoutTask, int]]]
"""Function that returns the next tasks and their cutoffs, in the order in which the search comes to them unless
its incumbent improves."""

AHEAD_WORK_S: Final = 1.0
"""Work of a search (``Counters.work_s``) after which processes are started: most searches are over earlier."""
MIN_FOLLOWING: Final = 4
"""Minimum number of layouts left for which processes are started."""
MAX_GUESSED: Final = 64
"""Maximum number of questions that are guessed ahead."""


@dataclass(frozen=True, slots=True)
class Question:
    """Everything that the answer for a layout depends on, and the seconds until the time limit."""

    task: LayoutTask
    cutoff: int
    effort: int
    paths: PathsByKey
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a layout, and what a solver has learned on the way: all its known paths, bounds of parts, counts,
    the programs that bounds rest on, and solvers that could not run."""

    result: LayoutResult
    paths: PathsByKey
    part_bounds: PartBounds
    counters: Counters
    programs: tuple[Program, ...]
    unavailable: dict[str, str]


@dataclass(frozen=True, slots=True)
class AheadInit:
    """First message to a worker: the search it works for. ``options`` hold no functions."""

    problem: Problem
    options: SolveOptions
    tolerance: float
    wants_programs: bool

    def worker(self, gone: threading.Event) -> AheadWorker:
        """Return the worker that answers the following messages; ``gone`` is set once the parent has gone."""
        options = replace(self.options, cancelled=gone.is_set)
        solvers = backend(options.backend), witnesses(options)
        return AheadWorker(self.problem, options, *solvers, self.tolerance, self.wants_programs)


@dataclass(frozen=True, slots=True)
class AheadWorker:
    """Answers questions, each with a solver of its own."""

    problem: Problem
    options: SolveOptions
    backend: Backend
    witnesses: list[Backend]
    tolerance: float
    wants_programs: bool

    def reply(self, question: Question) -> Answer:
        """Decide a layout."""
        programs: list[Program] = []
        options = replace(self.options, on_program=programs.append if self.wants_programs else None)
        deadline = None if question.seconds is None else time.monotonic() + question.seconds
        solver = LayoutSolver(options, self.backend, self.witnesses, deadline, tolerance=self.tolerance)
        solver.known_paths = {key: list(paths) for key, paths in question.paths.items()}
        part_bounds: PartBounds = {}
        asked = question.task, question.cutoff, question.effort
        result = decide_layout(self.problem, solver, part_bounds, *asked)
        learned = solver.known_paths, part_bounds, solver.counters, tuple(programs), solver.unavailable
        return Answer(result, *learned)


@dataclass(slots=True, eq=False)
class Guess:
    """Guessed question and its answer.

    ``paths``: None until the layout before it in its chain has an answer. ``state``: ``reserved`` where this
    process answers it once the search comes to the layout.
    """

    task: LayoutTask
    cutoff: int
    effort: int
    chain: Chain
    paths: PathsByKey | None = None
    state: Literal["waiting", "running", "answered", "reserved"] = "waiting"
    answer: Answer | None = None

    def asks(self, task: LayoutTask, cutoff: int, effort: int) -> bool:
        """Return True if this is the question of a layout, in the same search."""
        guessed = self.task.row, self.task.bound_ns, self.cutoff, self.effort
        return guessed == (task.row, task.bound_ns, cutoff, effort)

    @property
    def ready(self) -> bool:
        """True if the question can be asked."""
        return self.state == "waiting" and self.paths is not None

    def question(self, deadline: float | None) -> Question:
        """Return the question."""
        assert self.paths is not None
        seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
        return Question(self.task, self.cutoff, self.effort, self.paths, seconds)


@dataclass(slots=True)
class AheadDecider:
    """Decides the layouts of one search; ``num_others``: maximum number of worker processes.

    A thread hands the processes their next questions while this process answers its own.
    """

    problem: Problem
    solver: LayoutSolver
    part_bounds: PartBounds
    num_others: int
    guesses: list[Guess] = field(default_factory=list)
    """Guessed questions in the order of the search."""
    processes: list[WorkerProcess] = field(default_factory=list)
    idle: deque[WorkerProcess] = field(default_factory=deque)
    running: dict[WorkerProcess, Guess] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Lock of ``guesses``, ``idle``, ``running`` and all guesses."""
    own: AheadWorker | None = None
    """Answers guessed questions in this process."""
    some_answered: threading.Event = field(default_factory=threading.Event)
    some_stored: threading.Event = field(default_factory=threading.Event)
    closing: threading.Event = field(default_factory=threading.Event)
    listener: threading.Thread | None = None

    def decided(self, task: LayoutTask, cutoff: int, effort: int, following: Following) -> LayoutResult | None:
        """Return a layout's result, that of ``decide_layout``; None where the caller must decide the layout."""
        chain = _chain(task)
        if chain is None or not (self.processes or self._start(following)):
            return None
        guess = self._guess(task, cutoff, effort, chain, following)
        while guess.answer is None and not self.solver.out_of_time():
            self._work(guess)
        with self.lock:
            self.guesses.remove(guess)
            answer = guess.answer if guess.paths is None or _same(guess.paths, self._known_paths(chain)) else None
            if answer is None or answer.result.outcome.plan is not None:
                # Other paths or a better incumbent change all following questions.
                self.guesses.clear()
        return None if answer is None else self._taken(answer)

    def close(self) -> None:
        """End the processes."""
        self.closing.set()
        if self.listener is not None:
            self.listener.join()
        for process in self.processes:
            process.stop()
        for process in self.processes:
            process.close()
        self.processes.clear()

    def _taken(self, answer: Answer) -> LayoutResult:
        """Store what an answer has learned, and return its result."""
        solver = self.solver
        # Copies, because guesses hold the lists of the answer.
        solver.known_paths.update((key, list(paths)) for key, paths in answer.paths.items())
        self.part_bounds.update(answer.part_bounds)
        solver.counters.add(answer.counters, Counters())
        solver.unavailable.update(answer.unavailable)
        if solver.options.on_program is not None:
            for program in answer.programs:
                solver.options.on_program(program)
        return answer.result

    def _known_paths(self, chain: Chain) -> PathsByKey:
        """Return a copy of the critical paths that are known for a chain."""
        known = self.solver.known_paths.items()
        return {key: list(paths) for key, paths in known if key[:-1] == chain}

    def _start(self, following: Following) -> bool:
        """Start the processes if there is work enough left. Returns True if some have started."""
        if not self.num_others or self.solver.counters.work_s < AHEAD_WORK_S:
            return False
        chains = [_chain(task) for task, _ in islice(following(), MAX_GUESSED)]
        num_others = min(self.num_others, len({chain for chain in chains if chain is not None}) - 1)
        if len(chains) < MIN_FOLLOWING or num_others <= 0:
            return False
        self.num_others = 0
        solver = self.solver
        options = replace(solver.options, callback=None, cancelled=None, on_program=None, warm_start=None)
        init = AheadInit(self.problem, options, solver.tolerance, solver.options.on_program is not None)
        try:
            for _ in range(num_others):
                with running("A process that works for the solve"):
                    self.processes.append(WorkerProcess(init, self.some_answered))
        except UnavailableError as error:
            solver.note_unavailable(error)
        self.idle.extend(self.processes)
        own_options = replace(options, cancelled=solver.options.cancelled)
        solvers = solver.backend, solver.witnesses
        self.own = AheadWorker(self.problem, own_options, *solvers, solver.tolerance, init.wants_programs)
        if self.processes:
            self.listener = threading.Thread(target=self._listen, daemon=True)
            self.listener.start()
        return bool(self.processes)

    def _guess(self, task: LayoutTask, cutoff: int, effort: int, chain: Chain, following: Following) -> Guess:
        """Return the guess of this question; guess the following ones if few are left, and ask them."""
        with self.lock:
            if not self.guesses or not self.guesses[0].asks(task, cutoff, effort):
                self.guesses.clear()
                self._add(task, cutoff, effort, chain)
            guess = self.guesses[0]
            if len(self.guesses) <= MAX_GUESSED // 2:
                guessed_rows = {guess.task.row for guess in self.guesses}
                for next_task, next_cutoff in islice(following(), MAX_GUESSED):
                    next_chain = _chain(next_task)
                    if next_chain is not None and next_task.row not in guessed_rows:
                        self._add(next_task, next_cutoff, effort, next_chain)
            if guess.ready:
                guess.state = "reserved"
            self._ask()
            return guess

    def _add(self, task: LayoutTask, cutoff: int, effort: int, chain: Chain) -> Guess:
        """Add a guess. It can be asked at once if it is the first of its chain, or if the guess before it in its
        chain has its answer already."""
        before = next((guess for guess in reversed(self.guesses) if guess.chain == chain), None)
        if before is None:
            paths: PathsByKey | None = self._known_paths(chain)
        else:
            paths = None if before.answer is None else before.answer.paths
        guess = Guess(task, cutoff, effort, chain, paths)
        self.guesses.append(guess)
        return guess

    def _ask(self) -> None:
        """Hand questions to idle processes."""
        while self.idle and (guess := next((guess for guess in self.guesses if guess.ready), None)):
            process = self.idle.popleft()
            guess.state, self.running[process] = "running", guess
            process.send(guess.question(self.solver.deadline))

    def _work(self, awaited: Guess) -> None:
        """Answer the awaited question or, while a process does, another; wait if there is none."""
        with self.lock:
            free = awaited.state == "reserved"
            guess = awaited if free else next((guess for guess in self.guesses if guess.ready), None)
            self.some_stored.clear()
            if guess is not None:
                guess.state = "running"
            elif awaited.answer is not None:
                return
        if guess is None:
            self.some_stored.wait(POLL_S)
            return
        assert self.own is not None
        try:
            answer = self.own.reply(guess.question(self.solver.deadline))
        except Exception:
            if guess is awaited:
                raise
            guess.state = "reserved"
            return
        with self.lock:
            self._store(guess, answer)
            self._ask()

    def _store(self, guess: Guess, answer: Answer) -> None:
        """Store an answer, and give its paths to the next layout of the chain."""
        guess.state, guess.answer = "answered", answer
        if guess in self.guesses:
            later = self.guesses[self.guesses.index(guess) + 1 :]
            following = next((other for other in later if other.chain == guess.chain), None)
            if following is not None:
                following.paths = answer.paths

    def _listen(self) -> None:
        """Store the answers of the processes and hand them further questions until the search closes."""
        while not self.closing.is_set():
            self.some_answered.wait(POLL_S)
            self.some_answered.clear()
            with self.lock:
                for process in [process for process in self.running if process.answered]:
                    guess = self.running.pop(process)
                    try:
                        self._store(guess, process.answer(None, None))
                        self.idle.append(process)
                    except UnavailableError as error:
                        guess.state = "reserved"
                        self.solver.note_unavailable(error)
                    except Exception:
                        # The process has ended. This one meets the error again if the search comes to the layout.
                        guess.state = "reserved"
                self._ask()
            self.some_stored.set()


def _chain(task: LayoutTask) -> Chain | None:
    """Return the chain of a layout; None where its views have graphs of their own, so that it is not guessed."""
    return None if isinstance(task.costs, ReplicaCosts) else graph_key(task.layout)


def _same(guessed: PathsByKey, known: PathsByKey) -> bool:
    """Return True if the guessed paths are the known ones, object by object."""
    return guessed.keys() == known.keys() and all(
        len(paths) == len(known[key]) and all(map(is_, paths, known[key])) for key, paths in guessed.items()
    )
