"""Context of one solve: options, solvers, deadline, counters, budget, objective, and signals held back."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from milpplan.errors import UnavailableError
from milpplan.problem import Problem
from milpplan.simulation import FloatArray, LayoutColumns
from milpplan.units import NS_PER_S, gpu_hours

if TYPE_CHECKING:
    from milpplan.optimize.milp.program import Program
    from milpplan.optimize.milp.solution import Backend
    from milpplan.optimize.records import SolveOptions
    from milpplan.simulation.pipeline.step_graph import CriticalPath, StepGraph


RELAXATION_S: Final = 4e-3
"""Seconds of solving a relaxation again. The constants here are fitted to 848 calls that branched layouts of
GPT-3, Llama-3 405B and Mixtral by four nodes each: R^2 0.97, mean absolute error 14 % of the total time."""
ROW_S: Final = 1.4e-8
"""Seconds of a simplex iteration, per row."""
ENTRY_S: Final = 7e-10
"""Seconds of a simplex iteration, per coefficient."""
ITEM_S: Final = 2e-7
"""Seconds of a simulation, per work item."""
PROGRAM_S: Final = 0.5
"""Seconds of an integer program: a guess."""
LEAST_S: Final = 0.01
"""Minimum seconds given to a solve that begins after the deadline: solvers reject a limit of zero."""


@dataclass(slots=True)
class Counters:
    """Counts of relaxations, integer programs, confirmations, paths and simulations."""

    relaxations: int = 0
    integer_programs: int = 0
    witnessed: int = 0
    paths: int = 0
    simulations: int = 0
    unwitnessed: int = 0
    work_s: float = 0.0
    """Estimated seconds of all this work, from counts only: the same on every machine."""

    def simulated(self, plans: int, graph: StepGraph) -> None:
        """Count simulations on a graph."""
        self.simulations += plans
        self.work_s += ITEM_S * plans * graph.structure.num_nodes

    def relaxed(self, program: Program, iterations: int) -> None:
        """Count a solved relaxation."""
        self.relaxations += 1
        each = ROW_S * program.num_rows + ENTRY_S * len(program.rows.columns)
        self.work_s += RELAXATION_S + iterations * each

    def solved(self) -> None:
        """Count a solved integer program."""
        self.integer_programs += 1
        self.work_s += PROGRAM_S

    def add(self, now: Counters, before: Counters) -> None:
        """Add what another process has counted between ``before`` and ``now``."""
        for part in fields(self):
            gained = getattr(now, part.name) - getattr(before, part.name)
            setattr(self, part.name, getattr(self, part.name) + gained)


@dataclass(frozen=True, slots=True)
class Deadline:
    """Moment of ``time.monotonic``; None means that there is no limit.

    It is made once, where the work begins, and handed down: no part of the work starts a new limit.
    """

    until: float | None

    @staticmethod
    def after(seconds: float | None) -> Deadline:
        """Return the deadline ``seconds`` from now."""
        return Deadline(None if seconds is None else time.monotonic() + seconds)

    def left_s(self, limit_s: float | None = None) -> float | None:
        """Return the seconds left, at most ``limit_s``; None where neither is set."""
        if self.until is None:
            return limit_s
        left = max(LEAST_S, self.until - time.monotonic())
        return left if limit_s is None else min(left, limit_s)

    @property
    def passed(self) -> bool:
        """True once the deadline has passed."""
        return self.until is not None and time.monotonic() >= self.until


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of what a search stores at once, and of what it handles between two looks at the clock.

    ``layouts``: explored one by one, some 100 to 200 bytes each and, in the uniform space, their constants.
    ``groups``: closed, some 40 bytes each. ``groups_at_once``: made together, some 400 bytes each meanwhile;
    spaces with at most this number of groups are split at once. ``blocks_at_once``: bounded together. Layouts
    beyond the limits keep the bound of their group or block.
    """

    layouts: int = 12_000_000
    groups: int = 8_000_000
    groups_at_once: int = 500_000
    blocks_at_once: int = 8_192


BUDGET = Budget()


@dataclass(slots=True)
class SolveContext:
    """Options, solvers, deadline (a value of ``time.monotonic``) and counters of one search."""

    options: SolveOptions
    backend: Backend
    witnesses: list[Backend]
    """Solvers that are asked in turn to confirm a bound from an integer program; empty: bounds stay unconfirmed.
    """
    deadline: float | None
    counters: Counters = field(default_factory=Counters)
    unavailable: dict[str, str] = field(default_factory=dict)
    """Advice for the user by reason, for every solver that could not run and was replaced by another."""
    budget: Budget = BUDGET
    tolerance: float = 0.0
    """Relative gap of the answer, where it is larger than that of ``options``: integer programs take long, and
    prove no more."""
    known_paths: dict[tuple[object, ...], list[CriticalPath]] = field(default_factory=dict)
    """Critical paths by graph (``layout_solver.graph_key``) and scenario: they hold for every layout with this
    graph, whatever the problem."""

    def note_unavailable(self, error: UnavailableError) -> None:
        """Record that a solver could not run."""
        self.unavailable[error.seen] = error.do

    def out_of_time(self) -> bool:
        """Return True once the time limit has passed; raise KeyboardInterrupt if the solve was cancelled."""
        if self.options.cancelled is not None and self.options.cancelled():
            raise KeyboardInterrupt
        return self.deadline is not None and time.monotonic() >= self.deadline


@contextmanager
def undisturbed() -> Iterator[list[int]]:
    """Hold back Ctrl-C, and every other handled signal, until the end of the block.

    Yields:
        The signals that came, for the caller to handle; always empty outside of the main thread.
    """
    heard: list[int] = []
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        signals = (getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGALRM"))
        before = {signum: signal.getsignal(signum) for signum in signals if signum is not None}
        before = {signum: handler for signum, handler in before.items() if callable(handler)}
    for signum in before:
        signal.signal(signum, lambda number, frame: heard.append(number))
    try:
        yield heard
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def deferred() -> Iterator[None]:
    """Hold back Ctrl-C, and every other handled signal, and raise it when the block has ended."""
    with undisturbed() as heard:
        yield
    if heard:
        signal.raise_signal(signal.Signals(heard[0]))


def objective_weights(problem: Problem, columns: LayoutColumns) -> tuple[FloatArray, FloatArray]:
    """Return weight and limit (ns) of each layout's step time.

    step_time_per_token and num_gpus: weight 1 / sequences a step, relative to the largest batch, so that a fixed
    batch gives the step time itself. gpu_hours: GPU-hours of the whole run per nanosecond of step. The limit is
    the longest step that meets the deadline.
    """
    job = problem.job
    batch = columns.global_batch_size.astype(np.float64)
    limit = np.full(len(columns), np.inf)
    if job.deadline_s is not None and job.training_tokens is not None:
        steps = job.training_tokens / (batch * job.sequence_length)
        # Whole nanoseconds; a step that meets the deadline exactly must not be lost to rounding.
        limit = np.floor(job.deadline_s / steps * NS_PER_S * (1.0 + 1e-12))
    if job.objective == "gpu_hours":
        assert job.training_tokens is not None
        steps = job.training_tokens / (batch * job.sequence_length)
        return columns.num_gpus * steps / (3600 * NS_PER_S), limit
    largest = max(job.global_batch_values)
    return largest / batch, limit


def threshold(best: FloatArray | float, gap: float, keep_below: float) -> FloatArray:
    """Return the objective from which on layouts cannot improve the incumbent by more than the gap."""
    return np.maximum(np.asarray(best) * (1.0 - gap), keep_below)


def has_one_step_time(problem: Problem) -> bool:
    """Return True if all plans share one number of GPUs and one batch, so that a bound of the objective bounds the
    step time."""
    job = problem.job
    return len(job.num_gpus_values) == 1 and len(job.global_batch_values) == 1


def objective_per_second(problem: Problem) -> float:
    """Return the search's objective of a step of one second; the batch and the number of GPUs are fixed."""
    job = problem.job
    if job.objective != "gpu_hours":
        return NS_PER_S
    assert job.training_tokens is not None
    tokens = job.global_batch_values[0] * job.sequence_length
    return gpu_hours(job.num_gpus_values[0], job.training_tokens, tokens)


def printed_unit(problem: Problem) -> tuple[float, str]:
    """Return the factor from the search's objective to the printed objective, and the name of the latter."""
    job = problem.job
    if job.objective == "gpu_hours":
        return 1.0, "gpu_hours"
    tokens = max(job.global_batch_values) * job.sequence_length
    return 1.0 / NS_PER_S / tokens, "step_time_s_per_token"


def progress_unit(problem: Problem) -> float:
    """Return the factor from the search's objective to ``Progress``'s: seconds of step time, or GPU-hours."""
    return 1.0 if problem.job.objective == "gpu_hours" else 1.0 / NS_PER_S


def on_gpus(problem: Problem, num_gpus: int) -> Problem:
    """Return the problem of the shortest step on a given number of GPUs."""
    job = problem.job.model_copy(update={"num_gpus": num_gpus, "objective": "step_time_per_token"})
    return problem.model_copy(update={"job": job})
