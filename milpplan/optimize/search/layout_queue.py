"""Layouts that one process decides, always the one with the least bound next; and what processes tell each other.

How much a process does before it tells the others is measured in ``Counters.work_s``, not in time: so what it does
is the same on every machine and in every run.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterable, Set
from dataclasses import dataclass, field

import numpy as np

from milpplan.optimize.bounds.horizon import longest_step_ns
from milpplan.optimize.counters import Counters
from milpplan.optimize.layout.evaluation import settings_of
from milpplan.optimize.layout.layout_outcome import LayoutOutcome
from milpplan.optimize.layout.layout_solver import AIM, LayoutSolver
from milpplan.optimize.layout.part_solving import PartBounds, resolve_in_parts
from milpplan.optimize.layout.replica_solver import resolve_replicas
from milpplan.optimize.milp.program import Program
from milpplan.optimize.objective import threshold
from milpplan.optimize.search.prune_reasons import Fate
from milpplan.optimize.space.recompute_parts import in_parts
from milpplan.problem.plan import Layout
from milpplan.problem.problem import Problem
from milpplan.simulation.mixed_costs import RankCosts
from milpplan.simulation.replica_costs import ReplicaCosts

Entry = tuple[float, int, int]
"""(lower bound of the objective, place in the queue, row); -infinity: this one first."""
Begun = tuple[int, Entry]
"""A layout whose branching has begun, after how many nodes."""


@dataclass(frozen=True, slots=True)
class LayoutTask:
    """A layout to decide: its row in the search, its constants, what is proved of it, the weight that makes a step
    time (ns) an objective, and the longest step that counts."""

    row: int
    layout: Layout
    costs: RankCosts | ReplicaCosts
    bound_ns: int
    weight: float
    limit_ns: float


@dataclass(frozen=True, slots=True)
class LayoutResult:
    """What became of a layout."""

    row: int
    resolution: LayoutOutcome
    fate: Fate


@dataclass(frozen=True, slots=True)
class Round:
    """What a process is to do: ``cases`` at places of the queue, besides those that it has begun, without the rows
    ``dropped``, which another one goes on with.

    ``best_value``: the objective to beat. ``work_s``: about how much. ``seconds``: until the time limit.
    """

    cases: tuple[tuple[Entry, LayoutTask], ...]
    dropped: tuple[int, ...]
    best_value: float
    work_s: float
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Reply:
    """What a process did in a round. ``begun``: layouts that it goes on with; ``left``: those of the round that it
    did not look at; ``counters`` of its whole life; ``programs`` that bounds of the round rest on."""

    findings: tuple[LayoutResult, ...]
    begun: tuple[Begun, ...]
    left: tuple[Entry, ...]
    counters: Counters
    programs: tuple[Program, ...]


def cutoff_ns(best: float, gap: float, weight: float, limit_ns: float) -> int:
    """The longest step of a layout that would improve the incumbent by as much as proofs aim at."""
    return int(min(best * (1.0 - AIM * gap) / weight, limit_ns, 2.0**53))


def decided(
    problem: Problem, solver: LayoutSolver, part_bounds: PartBounds, case: LayoutTask, cutoff: int, effort: int
) -> LayoutResult:
    """Work on one layout against a cutoff in nanoseconds: see ``LayoutSolver.resolve``."""
    layout, bound = case.layout, case.bound_ns
    contexts = settings_of(problem, layout, case.costs)
    longest = max(longest_step_ns(context) for context in contexts)
    limit = min(cutoff, longest)
    if layout.replica_micro_batches:
        found = resolve_replicas(solver, layout, contexts, limit, bound, effort)
    elif in_parts(problem):
        found = resolve_in_parts(solver, part_bounds, contexts[0], limit, bound, effort)
    else:
        found = solver.resolve(contexts[0], limit, bound, effort)
    # Not even the longest step that any plan takes: no plan fits.
    nothing = found.plan is None and found.fate != "open" and longest <= cutoff
    return LayoutResult(case.row, found, "does_not_fit" if nothing else found.fate)


@dataclass(slots=True)
class LayoutQueue:
    """The layouts of one process."""

    problem: Problem
    solver: LayoutSolver
    case_of: Callable[[int], LayoutTask]
    part_bounds: PartBounds = field(default_factory=dict)
    best_value: float = np.inf
    keep_below: float = -np.inf
    heap: list[Entry] = field(default_factory=list)
    begun_rows: set[int] = field(default_factory=set)
    """Layouts of the heap whose branching goes on here."""
    bounds: dict[int, int] = field(default_factory=dict)
    """What was proved here, in nanoseconds."""

    def add(self, entries: Iterable[Entry]) -> None:
        """More layouts to decide."""
        self.heap = [*self.heap, *entries]
        heapq.heapify(self.heap)

    def run(self, work_s: float = np.inf) -> Generator[LayoutResult]:
        """Decide layouts until all are, or about so much work was done, or time is up. Free interleaved splits are
        branched a few nodes at a time."""
        until = self.solver.counters.work_s + work_s
        gap = self.solver.options.gap
        while self.heap and self.solver.counters.work_s < until and not self.solver.out_of_time():
            _, place, row = heapq.heappop(self.heap)
            case = self.case_of(row)
            bound = max(self.bounds.get(row, 0), case.bound_ns)
            self.begun_rows.discard(row)
            if bound * case.weight >= float(threshold(self.best_value, gap, self.keep_below)):
                self._forget(case.layout)
                continue
            cutoff = cutoff_ns(self.best_value, gap, case.weight, case.limit_ns)
            finding = decided(self.problem, self.solver, self.part_bounds, case, cutoff, 1)
            self._note(case, bound, finding.resolution)
            if self.solver.unfinished(case.layout):
                self.begun_rows.add(row)
                heapq.heappush(self.heap, (self.bounds[row] * case.weight, place, row))
            yield finding

    def _note(self, case: LayoutTask, bound: int, found: LayoutOutcome) -> None:
        """Remember what was proved, and the objective to beat."""
        self.bounds[case.row] = max(bound, found.bound_ns)
        if found.step_time_ns is not None and found.step_time_ns <= case.limit_ns:
            self.best_value = min(self.best_value, found.step_time_ns * case.weight)

    def begun(self) -> tuple[Begun, ...]:
        """The layouts whose branching goes on here, those with fewest nodes behind them first."""
        entries = [entry for entry in self.heap if entry[-1] in self.begun_rows]
        return tuple(sorted((self._nodes(self.case_of(entry[-1]).layout), entry) for entry in entries))

    def give_back(self) -> list[Entry]:
        """The layouts that were not begun, which are no longer this process's."""
        left = [entry for entry in self.heap if entry[-1] not in self.begun_rows]
        self._keep(self.begun_rows)
        return sorted(left)

    def drop(self, rows: Iterable[int]) -> None:
        """Begun layouts that another process goes on with."""
        for row in rows:
            self.begun_rows.discard(row)
            self._forget(self.case_of(row).layout)
            self._keep({entry[-1] for entry in self.heap} - {row})

    def _keep(self, rows: Set[int]) -> None:
        self.heap = [entry for entry in self.heap if entry[-1] in rows]
        heapq.heapify(self.heap)

    def _nodes(self, layout: Layout) -> int:
        """How many nodes of a layout were looked at."""
        return sum(tree.looked_at for (place, _), tree in self.solver.trees.items() if place == layout)

    def _forget(self, layout: Layout) -> None:
        """Drop what is begun of a layout."""
        for part in [part for part in self.solver.trees if part[0] == layout]:
            del self.solver.trees[part]
