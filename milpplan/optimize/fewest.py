"""The fewest accelerators: the first number on which equal stages fit, then what is known of every smaller one.

Whether a plan with equal stages fits is decided by closed forms and simulation in a moment; whether any plan fits
may take relaxations and integer programs of thousands of layouts. So the number that a user can rely on comes
first, then the best plan on it, and every smaller number is refused by proof, found to do as well, or left open.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from milpplan.optimize.deadline import Deadline
from milpplan.optimize.objective import on_gpus
from milpplan.optimize.result import PlanResult, SolveOptions, SolverWork, Status, proof_strength
from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem

ANY_PLAN: Final = 0.999
"""The gap of a solve that only asks whether there is a plan: the first one ends it."""
EQUAL_SHARE, BEST_SHARE, QUICK_SHARE = 0.4, 0.3, 0.3
"""Of the time limit, at most: for equal stages; then, of what is left each time, for the best plan on the number
found and for a first look at the smaller ones."""
BEFORE_OTHERS: Final = 512
"""So many accelerators may have no plan with equal stages before plans of any kind are looked for."""

Solve = Callable[[Problem, SolveOptions, Sequence[Plan]], PlanResult]


@dataclass(slots=True)
class FewestSearch:
    """Numbers of accelerators and what is known of them. ``solve`` searches one number."""

    problem: Problem
    options: SolveOptions
    solve: Solve
    deadline: Deadline = field(init=False)
    refused: set[int] = field(default_factory=set)
    """Proved to have no plan."""
    open: set[int] = field(default_factory=set)
    """Nothing is known of these but what is proved of their layouts."""
    best: PlanResult | None = None
    """The plan on the fewest so far."""
    last: PlanResult | None = None
    message: str = ""
    programs: int = 0
    """Integer programs of all numbers: the answer rests on all their proofs."""

    def __post_init__(self) -> None:
        self.deadline = Deadline.after(self.options.time_limit_s)

    def run(self, counts: Iterable[int]) -> PlanResult:
        """Try numbers of accelerators in ascending order: as many of them as it takes."""
        started = time.monotonic()
        try:
            self._equal_stages(counts)
            if self.problem.space.kind != "uniform":
                self._others()
        except KeyboardInterrupt:
            # Between two solves.
            self.message = "" if self.deadline.passed else "Interrupted."
        return replace(self._told(), wall_time_s=time.monotonic() - started)

    def _equal_stages(self, counts: Iterable[int]) -> None:
        """The first number with a plan with equal stages; far from the first one tried, plans of any kind too."""
        until, waiting = Deadline.after(self._share(EQUAL_SHARE)), list[int]()
        for count in counts:
            self.open.add(count)
            waiting.append(count)
            self._ask(count, self._equal(), self.options.gap, until.left_s())
            if count >= BEFORE_OTHERS and self.best is None and self.problem.space.kind != "uniform":
                self._look(waiting, until.left_s())
                waiting.clear()
            if self.best is not None or self.message or until.passed:
                return

    def _others(self) -> None:
        """The best plan on the number found, and plans of any kind on the smaller ones."""
        if self.options.time_limit_s is not None:
            # Most of the smaller ones are refused by closed forms.
            self._look(self._smaller(), self._share(QUICK_SHARE))
        self._improve()
        # The largest ones are the likeliest to have a plan; one that has leaves fewer to be refused.
        known = self._num_gpus
        self._look(self._smaller()[::-1], self.deadline.left_s())
        if self._num_gpus != known:
            self._improve()

    def _improve(self) -> None:
        """The best plan on the number found."""
        if self.best is None or self.best.plan is None or self.message:
            return
        count, known = self.best.plan.layout.num_gpus, self.best.plan
        found = self._solved(on_gpus(self.problem, count), self.options.gap, self._share(BEST_SHARE), (known,))
        if found.plan is not None:
            self.best = found

    def _look(self, counts: Sequence[int], seconds: float | None) -> None:
        """Ask of numbers of accelerators whether they have a plan of any kind, in this order."""
        until = Deadline.after(seconds)
        for number, count in enumerate(counts):
            if self.message or until.passed:
                return
            known = self._num_gpus
            if known is not None and count >= known:
                continue
            left = until.left_s()
            share = None if left is None else left / (len(counts) - number)
            self._ask(count, self.problem, ANY_PLAN, share)

    @property
    def _num_gpus(self) -> int | None:
        return None if self.best is None or self.best.plan is None else self.best.plan.layout.num_gpus

    def _smaller(self) -> list[int]:
        """Open numbers below the fewest that are known to do."""
        known = self._num_gpus
        return sorted(count for count in self.open if known is None or count < known)

    def _ask(self, count: int, problem: Problem, gap: float, seconds: float | None) -> None:
        """Look for a plan on so many accelerators."""
        found = self._solved(on_gpus(problem, count), gap, seconds, ())
        self.last = found
        if found.plan is not None:
            # What is proved of equal stages holds for no others.
            self.best = found if problem.space == self.problem.space else _unproved(found)
            self.open.discard(count)
        elif found.status == "infeasible" and problem.space == self.problem.space:
            self.open.discard(count)
            self.refused.add(count)

    def _solved(self, problem: Problem, gap: float, seconds: float | None, known: Sequence[Plan]) -> PlanResult:
        options = replace(self.options, gap=gap, time_limit_s=self.deadline.left_s(seconds))
        found = self.solve(problem, options, known)
        self.message, self.programs = found.message, self.programs + found.work.integer_programs
        return found

    def _share(self, share: float) -> float | None:
        left = self.deadline.left_s()
        return None if left is None else share * left

    def _equal(self) -> Problem:
        """The problem with equal stages and one recomputation, whose plans are of the whole space too: one chunk a
        rank, and the last stage not empty."""
        space = self.problem.space
        if space.kind == "uniform":
            return self.problem
        alone = (1,) if space.vpp is None or 1 in space.vpp else space.vpp
        return self.problem.model_copy(
            update={"space": space.model_copy(update={"kind": "uniform", "vpp": alone})}
        )

    def _told(self) -> PlanResult:
        """The plan on the fewest; what is open below keeps it from being proved the fewest."""
        result = self.best or self.last
        if result is None:
            # Nothing was looked at.
            raise KeyboardInterrupt
        open_ = self._smaller()
        least = min(open_, default=None)
        told = {"refused": tuple(sorted(self.refused)), "open_counts": tuple(open_), "step_time_gap": result.gap}
        changed = replace(
            result,
            problem=self.problem,
            objective_name="num_gpus",
            objective=None,
            objective_bound=None,
            lower_bound_s=None,
            gap=None,
            message=self.message,
            details=result.details | told,
        )
        if result.plan is None:
            status: Status = "infeasible" if not open_ else "no_solution_found"
            bound = None if least is None else float(least)
            return replace(changed, status=status, objective_bound=bound, work=self._work(result, status))
        gpus = float(result.plan.layout.num_gpus)
        known = gpus if least is None else float(least)
        gap = (gpus - known) / gpus
        status = "optimal" if gap <= self.options.gap else "feasible"
        return replace(
            changed,
            status=status,
            objective=gpus,
            objective_bound=known,
            lower_bound_s=result.lower_bound_s,
            gap=gap,
            work=self._work(result, status),
        )

    def _work(self, result: PlanResult, status: Status) -> SolverWork:
        """Return what the solvers did on the number found, with the integer programs of all."""
        proof = proof_strength(status, self.programs)
        return replace(result.work, integer_programs=self.programs, proof=proof)


def _unproved(found: PlanResult) -> PlanResult:
    """A result of a part of the space: its plan is one of the whole space, its bounds are not."""
    return replace(
        found,
        status="feasible",
        objective_bound=None,
        lower_bound_s=None,
        gap=None,
        any_chunks_bound=None,
        layouts=None,
        rejected={},
        enumerated=0,
    )
