"""Search for the fewest accelerators that have a plan.

First come plans with equal stages, which closed forms and simulation decide quickly; whether any plan fits may
take relaxations and integer programs of thousands of layouts. So the first result is a number with a plan, then
the best plan on it. After that every smaller number is refuted by proof, found to have a plan, or left open.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from milpplan.optimize.context import Deadline, on_gpus
from milpplan.optimize.records import PlanResult, SolveOptions, SolverWork, Status, proof_strength
from milpplan.problem import Plan, Problem

ANY_PLAN: Final = 0.999
"""Gap of a solve that only asks whether there is a plan: the first plan ends it."""
EQUAL_SHARE, BEST_SHARE, QUICK_SHARE = 0.4, 0.3, 0.3
"""Maximum shares of the time limit: for equal stages, where the space has other plans; then, of the time left each
time, for the best plan on the number found and for a quick try of the smaller numbers."""
BEFORE_OTHERS: Final = 512
"""Number of accelerators without an equal-stage plan from which on plans of any kind are searched."""

Solve = Callable[[Problem, SolveOptions, Sequence[Plan]], PlanResult]


@dataclass(slots=True)
class FewestSearch:
    """Search over numbers of accelerators; ``solve`` searches one number."""

    problem: Problem
    options: SolveOptions
    solve: Solve
    untried: Iterator[int] = field(default_factory=lambda: iter(()))
    """Numbers that are still to be tried, in ascending order."""
    deadline: Deadline = field(init=False)
    refused: set[int] = field(default_factory=set)
    """Numbers proved to have no plan."""
    open: set[int] = field(default_factory=set)
    """Numbers that are neither proved infeasible nor known to have a plan."""
    best: PlanResult | None = None
    """Result with the plan on the fewest accelerators so far."""
    last: PlanResult | None = None
    message: str = ""
    programs: int = 0
    """Integer programs of all solves: the answer rests on all their proofs."""

    def __post_init__(self) -> None:
        self.deadline = Deadline.after(self.options.time_limit_s)

    def run(self, counts: Iterable[int]) -> PlanResult:
        """Try numbers of accelerators in ascending order until the fewest is found."""
        started, self.untried = time.monotonic(), iter(counts)
        try:
            self._equal_stages()
            if self.problem.space.kind != "uniform":
                self._others()
        except KeyboardInterrupt:
            # Between two solves.
            self.message = "" if self.deadline.passed else "Interrupted."
        return replace(self._summary(), wall_time_s=time.monotonic() - started)

    def _equal_stages(self) -> None:
        """Find the first number with an equal-stage plan; from ``BEFORE_OTHERS`` on try plans of any kind too."""
        share = 1.0 if self.problem.space.kind == "uniform" else EQUAL_SHARE
        until, waiting = Deadline.after(self._share(share)), list[int]()
        for count in self.untried:
            self.open.add(count)
            waiting.append(count)
            self._ask(count, self._equal(), self.options.gap, until.left_s())
            if count >= BEFORE_OTHERS and self.best is None and self.problem.space.kind != "uniform":
                self._try_counts(waiting, until.left_s())
                waiting.clear()
            if self.best is not None or self.message or until.passed:
                return

    def _others(self) -> None:
        """Improve the plan on the number found, and search plans of any kind on smaller numbers."""
        if self.options.time_limit_s is not None:
            # Closed forms refute most of the smaller numbers.
            self._try_counts(self._smaller(), self._share(QUICK_SHARE))
        self._improve()
        # The largest numbers are the likeliest to have a plan, which leaves fewer numbers to refute.
        before = self._num_gpus
        self._try_counts(self._smaller()[::-1], self.deadline.left_s())
        while self.best is None and not (self.message or self.deadline.passed):
            if (count := next(self.untried, None)) is None:
                break
            self.open.add(count)
            self._try_counts([count], self.deadline.left_s())
        if self._num_gpus != before:
            self._improve()

    def _improve(self) -> None:
        """Improve the plan on the number found."""
        if self.best is None or self.best.plan is None or self.message:
            return
        count, incumbent = self.best.plan.layout.num_gpus, self.best.plan
        result = self._solved(
            on_gpus(self.problem, count), self.options.gap, self._share(BEST_SHARE), (incumbent,)
        )
        if result.plan is not None:
            self.best = result

    def _try_counts(self, counts: Sequence[int], seconds: float | None) -> None:
        """Ask for numbers of accelerators, in this order, whether they have a plan of any kind."""
        until = Deadline.after(seconds)
        for index, count in enumerate(counts):
            if self.message or until.passed:
                return
            fewest = self._num_gpus
            if fewest is not None and count >= fewest:
                continue
            left = until.left_s()
            share = None if left is None else left / (len(counts) - index)
            self._ask(count, self.problem, ANY_PLAN, share)

    @property
    def _num_gpus(self) -> int | None:
        return None if self.best is None or self.best.plan is None else self.best.plan.layout.num_gpus

    def _smaller(self) -> list[int]:
        """Return the open numbers below the fewest with a plan."""
        fewest = self._num_gpus
        return sorted(count for count in self.open if fewest is None or count < fewest)

    def _ask(self, count: int, problem: Problem, gap: float, seconds: float | None) -> None:
        """Search a plan on a number of accelerators."""
        result = self._solved(on_gpus(problem, count), gap, seconds, ())
        self.last = result
        if result.plan is not None:
            # A bound over equal stages does not hold for other plans.
            self.best = result if problem.space == self.problem.space else _unproved(result)
            self.open.discard(count)
        elif result.status == "infeasible" and problem.space == self.problem.space:
            self.open.discard(count)
            self.refused.add(count)

    def _solved(self, problem: Problem, gap: float, seconds: float | None, starts: Sequence[Plan]) -> PlanResult:
        simplest = self.options.simplest and gap != ANY_PLAN
        limit = self.deadline.left_s(seconds)
        options = replace(self.options, gap=gap, time_limit_s=limit, simplest=simplest)
        result = self.solve(problem, options, starts)
        self.message, self.programs = result.message, self.programs + result.work.integer_programs
        return result

    def _share(self, share: float) -> float | None:
        left = self.deadline.left_s()
        return None if left is None else share * left

    def _equal(self) -> Problem:
        """Return the problem restricted to equal stages and one recompute setting.

        Its plans are in the whole space too: one chunk a rank, and the last stage not empty.
        """
        space = self.problem.space
        if space.kind == "uniform":
            return self.problem
        alone = (1,) if space.vpp is None or 1 in space.vpp else space.vpp
        return self.problem.model_copy(
            update={"space": space.model_copy(update={"kind": "uniform", "vpp": alone})}
        )

    def _summary(self) -> PlanResult:
        """Return the result on the fewest accelerators; open smaller numbers keep it from being optimal."""
        result = self.best or self.last
        if result is None:
            # Interrupted before the first solve.
            raise KeyboardInterrupt
        if self.best is None:
            # Nothing is known of the numbers that no time was left for: the first of them stands for all.
            self.open.update(islice(self.untried, 1))
        open_counts = self._smaller()
        min_open = min(open_counts, default=None)
        details = {
            "refused": tuple(sorted(self.refused)),
            "open_counts": tuple(open_counts),
            "step_time_gap": result.gap,
        }
        changed = replace(
            result,
            problem=self.problem,
            objective_name="num_gpus",
            objective=None,
            objective_bound=None,
            lower_bound_s=None,
            gap=None,
            message=self.message,
            details=result.details | details,
        )
        if result.plan is None:
            status: Status = "infeasible" if not open_counts else "no_solution_found"
            bound = None if min_open is None else float(min_open)
            if open_counts:
                # The layouts of the number tried last say nothing of the others.
                changed = replace(changed, layouts=None, rejected={}, enumerated=0)
            return replace(changed, status=status, objective_bound=bound, work=self._work(result, status))
        gpus = float(result.plan.layout.num_gpus)
        bound_gpus = gpus if min_open is None else float(min_open)
        gap = (gpus - bound_gpus) / gpus
        status = "optimal" if gap <= self.options.gap else "feasible"
        return replace(
            changed,
            status=status,
            objective=gpus,
            objective_bound=bound_gpus,
            lower_bound_s=result.lower_bound_s,
            gap=gap,
            work=self._work(result, status),
        )

    def _work(self, result: PlanResult, status: Status) -> SolverWork:
        """Return the work on the number found, with the integer programs of all numbers."""
        proof = proof_strength(status, self.programs)
        return replace(result.work, integer_programs=self.programs, proof=proof)


def _unproved(result: PlanResult) -> PlanResult:
    """Return a result of a part of the space without its bounds: its plan is valid in the whole space, its bounds
    are not."""
    return replace(
        result,
        status="feasible",
        objective_bound=None,
        lower_bound_s=None,
        gap=None,
        any_chunks_bound=None,
        layouts=None,
        rejected={},
        enumerated=0,
    )
