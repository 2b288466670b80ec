"""Second phase of a search in the free space: decide the layouts that closed-form bounds leave open.

First the relaxations of all these layouts, then each layout in full. ``best_first`` imports this module where it
needs it, because the uniform space solves no programs.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from milpplan.optimize.layout.layout_solver import LayoutSolver, PartBounds
from milpplan.optimize.search.best_first import Search
from milpplan.optimize.search.layout_queue import LayoutQueue, LayoutResult, LayoutTask, cutoff_ns, decided
from milpplan.optimize.search.layout_workers import LayoutWorkers
from milpplan.optimize.search.prune_reasons import FATES
from milpplan.simulation.layout_columns import IntArray

FIRST_PLAN_WORK_S = 4.0
"""Work (``Counters.work_s``) after which a search for a first plan gives up."""


@dataclass(slots=True)
class BranchPhase:
    """Second phase of one search, with its layout solver."""

    search: Search
    solver: LayoutSolver
    part_bounds: PartBounds = field(default_factory=dict)

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
        )
        return BranchPhase(search, solver)

    def run(self) -> None:
        """Look for a first plan if ``first_only`` is set, else decide all layouts.

        Compact relaxations of all layouts come first, because they are cheap and improve the incumbent. The rest
        is decided in full, the incumbent's layout first, because a better incumbent makes the others cheaper.
        Layouts with free interleaved splits are branched a few nodes at a time, always the layout with the
        smallest bound.
        """
        search = self.search
        self._queue()
        branched = (search.explored.space.vpp_of(search.queue) > 1) & self._any_chunks
        rows = search.queue[~branched]
        for row in (self._roomiest_too(rows) if search.first_only else rows).tolist():
            if search.is_over() or (search.first_only and self.solver.counters.work_s > FIRST_PLAN_WORK_S):
                return
            if self._value(row) < search.threshold():
                self._relax(row)
        if search.first_only:
            return
        self._queue()
        best, keep = search.best_value, search.keep_below
        queue = LayoutQueue(search.problem, self.solver, self._task, self.part_bounds, best, keep)
        # In the order of the bounds, but the incumbent's layout first.
        incumbent_row = search.explored.space.find(search.best[1].layout) if search.best else None
        values = [-np.inf if row == incumbent_row else self._value(row) for row in search.queue.tolist()]
        queue.add(zip(values, range(len(values)), search.queue.tolist(), strict=True))
        with closing(self._decided(queue)) as results:
            for result in results:
                self._take(result)
                if result.fate == "open" and self._value(result.row) >= search.threshold():
                    search.explored.fates[result.row] = FATES.index("solved")
                search.note()

    def _roomiest_too(self, rows: IntArray) -> IntArray:
        """Return the layouts in the order of their bounds, interleaved with the layouts in the order of their
        memory."""
        roomiest = rows[np.argsort(self.search.explored.memory[rows], kind="stable")]
        both = np.stack([rows, roomiest], axis=1).ravel()
        return np.asarray(both[np.sort(np.unique(both, return_index=True)[1])])

    @property
    def _any_chunks(self) -> bool:
        """True where interleaved chunks may have any size."""
        return self.search.problem.interleaved_layers == "any"

    def _decided(self, queue: LayoutQueue) -> Generator[LayoutResult]:
        """Yield the results of the queue's layouts; worker processes are used only where branching takes long
        enough."""
        return LayoutWorkers(queue, lambda: self.search.best_value).run() if self._any_chunks else queue.run()

    def _queue(self) -> None:
        """Fill the search's queue with its candidates, smallest bound first."""
        search = self.search
        search.queue = search.by_value(search.candidates, search.explored.values(search.candidates))

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

    def _relax(self, row: int) -> None:
        """Bound a layout by its relaxation only."""
        search, task = self.search, self._task(row)
        cutoff = cutoff_ns(search.best_value, self.solver.options.gap, task.weight, task.limit_ns)
        self._take(decided(search.problem, self.solver, self.part_bounds, task, cutoff, 0))
        search.note()

    def _take(self, result: LayoutResult) -> None:
        """Store the result of a layout in the search."""
        search, row, outcome = self.search, result.row, result.resolution
        search.explored.bounds_ns[row] = max(search.explored.bounds_ns[row], float(outcome.bound_ns))
        search.explored.fates[row] = FATES.index(result.fate)
        if outcome.plan is not None and outcome.step_time_ns is not None:
            search.offer(row, outcome.step_time_ns, outcome.plan)
