"""Queue of the layouts that one process decides, smallest bound first, and the messages between processes.

The size of a round is measured in ``Counters.work_s``, not in time, so that the answer is the same on every
machine and in every run.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterable, Set
from dataclasses import dataclass, field

import numpy as np

from milpplan.optimize.context import Counters
from milpplan.optimize.layout.layout_solver import (
    AIMED_GAP_SHARE,
    LayoutOutcome,
    LayoutSolver,
    PartBounds,
    resolve_in_parts,
)
from milpplan.optimize.layout.replica_solver import resolve_replicas
from milpplan.optimize.layout.stage_options import longest_step_ns, settings_of
from milpplan.optimize.milp.program import Program
from milpplan.optimize.objective import threshold
from milpplan.optimize.search.prune_reasons import Fate
from milpplan.optimize.space.plan_space import in_parts
from milpplan.problem.plan import Layout
from milpplan.problem.problem import Problem
from milpplan.simulation.mixed_costs import RankCosts
from milpplan.simulation.replica_costs import ReplicaCosts

Entry = tuple[float, int, int]
"""(lower bound of the objective, position in the queue, row); a bound of -infinity puts the layout first."""
Begun = tuple[int, Entry]
"""(number of explored nodes, entry) of a layout whose branching has begun."""


@dataclass(frozen=True, slots=True)
class LayoutTask:
    """Task to decide one layout.

    ``row``: in the search. ``costs``: the layout's cost constants. ``bound_ns``: proved lower bound. ``weight``:
    factor from step time (ns) to objective. ``limit_ns``: longest admissible step.
    """

    row: int
    layout: Layout
    costs: RankCosts | ReplicaCosts
    bound_ns: int
    weight: float
    limit_ns: float


@dataclass(frozen=True, slots=True)
class LayoutResult:
    """Outcome of one layout."""

    row: int
    resolution: LayoutOutcome
    fate: Fate


@dataclass(frozen=True, slots=True)
class Round:
    """Work order for a process.

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

    findings: tuple[LayoutResult, ...]
    begun: tuple[Begun, ...]
    left: tuple[Entry, ...]
    counters: Counters
    programs: tuple[Program, ...]


def cutoff_ns(best: float, gap: float, weight: float, limit_ns: float) -> int:
    """Return the longest step of a layout that improves the incumbent by as much as proofs aim at."""
    return int(min(best * (1.0 - AIMED_GAP_SHARE * gap) / weight, limit_ns, 2.0**53))


def decided(
    problem: Problem, solver: LayoutSolver, part_bounds: PartBounds, task: LayoutTask, cutoff: int, effort: int
) -> LayoutResult:
    """Work on one layout against a cutoff in nanoseconds; see ``LayoutSolver.resolve``."""
    layout, bound = task.layout, task.bound_ns
    contexts = settings_of(problem, layout, task.costs)
    longest_ns = max(longest_step_ns(context) for context in contexts)
    limit_ns = min(cutoff, longest_ns)
    if layout.replica_micro_batches:
        outcome = resolve_replicas(solver, layout, contexts, limit_ns, bound, effort)
    elif in_parts(problem):
        outcome = resolve_in_parts(solver, part_bounds, contexts[0], limit_ns, bound, effort)
    else:
        outcome = solver.resolve(contexts[0], limit_ns, bound, effort)
    # No plan is at or below the cutoff, which no plan's step can exceed: so no plan fits.
    infeasible = outcome.plan is None and outcome.fate != "open" and longest_ns <= cutoff
    return LayoutResult(task.row, outcome, "does_not_fit" if infeasible else outcome.fate)


@dataclass(slots=True)
class LayoutQueue:
    """Layouts of one process."""

    problem: Problem
    solver: LayoutSolver
    task_of: Callable[[int], LayoutTask]
    part_bounds: PartBounds = field(default_factory=dict)
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
            result = decided(self.problem, self.solver, self.part_bounds, task, cutoff, 1)
            self._note(task, bound, result.resolution)
            if self.solver.unfinished(task.layout):
                self.begun_rows.add(row)
                heapq.heappush(self.heap, (self.bounds[row] * task.weight, position, row))
            yield result

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
