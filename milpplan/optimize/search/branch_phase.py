"""Deciding the layouts of the free space that bounds have left: relaxations of all, then whatever is left in full.

``search`` imports this where it is needed: the uniform space solves no programs.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from milpplan.optimize.layout.layout_solver import LayoutSolver
from milpplan.optimize.layout.part_solving import PartBounds
from milpplan.optimize.search.best_first import Search
from milpplan.optimize.search.layout_queue import LayoutQueue, LayoutResult, LayoutTask, cutoff_ns, decided
from milpplan.optimize.search.layout_workers import LayoutWorkers
from milpplan.optimize.search.prune_reasons import FATES
from milpplan.simulation.layout_columns import IntArray

FIRST_PLAN_WORK_S = 4.0
"""Work (``Counters.work_s``) after which a search for a first plan gives up."""


@dataclass(slots=True)
class BranchPhase:
    """What a search goes on with after its bounds."""

    search: Search
    solver: LayoutSolver
    part_bounds: PartBounds = field(default_factory=dict)

    @staticmethod
    def of(search: Search) -> BranchPhase:
        """With the means of a search."""
        context = search.context
        own = LayoutSolver(
            context.options,
            context.backend,
            context.witnesses,
            context.deadline,
            context.counters,
            context.unavailable,
        )
        return BranchPhase(search, own)

    def run(self) -> None:
        """Look for a first plan if no more is wanted, else decide all layouts.

        Compact relaxations of all layouts first: they are cheap and improve the incumbent; then whatever is
        left in full, the incumbent's layout before the others, which a better incumbent makes cheaper. Layouts
        with free interleaved splits are branched a few nodes at a time, always the one with the least bound."""
        search = self.search
        self._queue()
        branched = (search.space.vpp_of(search.queue) > 1) & self._any_chunks
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
        share = LayoutQueue(search.problem, self.solver, self._case, self.part_bounds, best, keep)
        # In the order of the queue, which is that of the bounds but for the first.
        first = search.space.find(search.best[1].layout) if search.best else None
        values = [-np.inf if row == first else self._value(row) for row in search.queue.tolist()]
        share.add(zip(values, range(len(values)), search.queue.tolist(), strict=True))
        with closing(self._decided(share)) as findings:
            for finding in findings:
                self._take(finding)
                if finding.fate == "open" and self._value(finding.row) >= search.threshold():
                    search.fates[finding.row] = FATES.index("solved")
                search.note()

    def _roomiest_too(self, rows: IntArray) -> IntArray:
        """The layouts with the least bounds and, after each of them, one of those that need least memory."""
        roomiest = rows[np.argsort(self.search.memory[rows], kind="stable")]
        both = np.stack([rows, roomiest], axis=1).ravel()
        return np.asarray(both[np.sort(np.unique(both, return_index=True)[1])])

    @property
    def _any_chunks(self) -> bool:
        """Whether interleaved chunks may have any size."""
        return self.search.problem.interleaved_layers == "any"

    def _decided(self, share: LayoutQueue) -> Generator[LayoutResult]:
        """What becomes of layouts; only branching takes so long that processes of its own pay."""
        return LayoutWorkers(share, lambda: self.search.best_value).run() if self._any_chunks else share.run()

    def _queue(self) -> None:
        search = self.search
        search.queue = search.by_value(search.candidates, search.values(search.candidates))

    def _value(self, row: int) -> float:
        return float(self.search.bounds_ns[row] * self.search.weights[row])

    def _case(self, row: int) -> LayoutTask:
        search = self.search
        costs = search.known.at(search.space, row, search.queue)
        bound, limit = int(search.bounds_ns[row]), float(search.limits_ns[row])
        return LayoutTask(row, search.space.at(row), costs, bound, float(search.weights[row]), limit)

    def _relax(self, row: int) -> None:
        search, case = self.search, self._case(row)
        cutoff = cutoff_ns(search.best_value, self.solver.options.gap, case.weight, case.limit_ns)
        self._take(decided(search.problem, self.solver, self.part_bounds, case, cutoff, 0))
        search.note()

    def _take(self, finding: LayoutResult) -> None:
        """Write down what became of a layout."""
        search, row, found = self.search, finding.row, finding.resolution
        search.bounds_ns[row] = max(search.bounds_ns[row], float(found.bound_ns))
        search.fates[row] = FATES.index(finding.fate)
        if found.plan is not None and found.step_time_ns is not None:
            search.offer(row, found.step_time_ns, found.plan)
