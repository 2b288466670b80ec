"""Gap of any plan to the proved best, with the changes that close most of it, and its cost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from milpplan.errors import InvalidInputError, SolverError
from milpplan.explain.judge.plan_changes import Priced, best_changes, change_of, greedy_chain, loosened
from milpplan.explain.judge.records import Change, GapReport, NearPlan, SpaceGap, Spending
from milpplan.explain.optima import Budget
from milpplan.explain.records import Interval
from milpplan.optimize.infeasibility import with_job, with_space
from milpplan.optimize.milp.solution import undisturbed
from milpplan.optimize.result import DEFAULT_GAP, PlanResult, Progress, SolveOptions
from milpplan.optimize.solve import solve
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.optimize.space.plan_space import even_splits, in_space
from milpplan.problem.plan import Layout, Plan
from milpplan.problem.problem import Problem, Space
from milpplan.simulation.report import StepReport
from milpplan.simulation.simulator import simulate
from milpplan.units import gpu_hours

WHOLE: Final = "the whole space"
TIME_LIMIT_S: Final = 60.0
TOKENS: Final = 1e12
"""Tokens of the run whose cost is computed, by default."""
SHOWN_CHANGES: Final = 6
ROUNDING: Final = 1e-9
LAUNCHER, SPACE, STAGES, CHANGES = 3.0, 5.0, 0.5, 2.0
"""Weights of the questions in the distribution of the time."""


@dataclass(slots=True)
class Solves:
    """Cache of solves by problem, for several plans of one job."""

    gap: float = DEFAULT_GAP
    callback: Callable[[Progress], None] | None = None
    found: dict[tuple[Problem, bool], PlanResult] = field(default_factory=dict)

    def best(self, problem: Problem, start: Plan | None, any_chunks: bool, limit_s: float | None) -> PlanResult:
        """Return the proved best of a problem, solved at most once."""
        key = (problem, any_chunks)
        result = self.found.get(key)
        if result is None:
            result = solve(
                problem,
                gap=self.gap,
                time_limit_s=limit_s,
                warm_start=start,
                any_chunks=any_chunks,
                simplest=False,
                callback=self.callback,
            )
            self.found[key] = result
        return result


def judged(problem: Problem, plan: Plan) -> Problem:
    """Return the problem that judges a plan: that of its own job, with the plan's own switches in the space."""
    same = own_job(problem, plan)
    return with_own_margin(same.model_copy(update={"space": widened(problem.space, plan.layout)}), plan)


def with_own_margin(problem: Problem, plan: Plan) -> Problem:
    """Reduce the space's margin of memory to what a plan leaves, so that a plan that fits is in the space."""
    report = simulate(problem, plan)
    if not report.fits or report.fits_with_margin:
        return problem
    installed = {hardware.name: hardware.accelerator.memory_bytes for hardware in problem.node_types}
    left = min(
        (stage.usable_memory_bytes - stage.memory.peak_bytes) / installed[stage.node_type]
        for stage in report.stages
    )
    return with_space(problem, memory_margin_fraction=left)


def own_job(problem: Problem, plan: Plan) -> Problem:
    """Restrict the problem to the plan's own number of GPUs and batch, and to the shortest step."""
    layout = plan.layout
    job = {"objective": "step_time_per_token", "deadline_s": None, "training_tokens": None}
    return with_job(problem, num_gpus=layout.num_gpus, global_batch_size=layout.global_batch_size, **job)


def widened(space: Space, layout: Layout) -> Space:
    """Add the values of a layout to those that the space's fields offer."""
    added: dict[str, object] = {}
    for name in Space.model_fields:
        offered, own = getattr(space, name), getattr(layout, name, None)
        if name in Layout.model_fields and offered is not None and own not in offered:
            added[name] = (*offered, own)
    if layout.zero_stage > 1 and layout.pp > 1:
        added["zero_pipeline"] = True
    return space.model_copy(update=added)


def gap(
    problem: Problem,
    plan: Plan,
    *,
    runnable: tuple[str, Problem] | None = None,
    time_limit_s: float | None = TIME_LIMIT_S,
    tolerance: float = DEFAULT_GAP,
    tokens: float | None = None,
    price_per_gpu_hour: float | None = None,
    changes: bool = True,
    solves: Solves | None = None,
    callback: Callable[[Progress], None] | None = None,
) -> GapReport:
    """Judge a plan: its simulated step and memory, the proved best of the spaces, and the changes that close the
    gap.

    Args:
        problem: model, hardware, job and space of the plan; of ranges in the job the plan's own values count.
        plan: any plan that can be simulated; it need not fit, nor lie in the space.
        runnable: name and problem of a narrower space to judge it by as well: the plans that its launcher can run.
        time_limit_s: of everything together; None: until everything is proved to ``tolerance``.
        tolerance: relative gap of every proof.
        tokens: of the whole run (None: ``TOKENS``), for GPU-hours.
        price_per_gpu_hour: in any currency; None: no amounts of money.
        changes: search for changes, too.
        solves: solves to share with other plans of the same job.
        callback: called with the progress of each solve.

    Returns:
        The gap to every bound, as intervals that provably contain the cost model's value.

    Raises:
        IllegalPlanError: the plan is not legal for the problem.
        InvalidInputError: a limit, a price or a number of tokens is invalid.
    """
    started = time.monotonic()
    _check(time_limit_s, tokens, price_per_gpu_hour)
    weights = SPACE + (LAUNCHER if runnable else 0.0) + (STAGES + CHANGES if changes else 0.0)
    budget = Budget(None if time_limit_s is None else started + time_limit_s, weights)
    same = judged(problem, plan)
    talk = _Judge(same, plan, simulate(same, plan), budget, solves or Solves(tolerance, callback))
    if runnable is not None:
        talk.ask(runnable[0], with_own_margin(own_job(runnable[1], plan), plan), LAUNCHER)
    talk.ask(WHOLE, same, SPACE)
    report = _told(talk, changes, tokens or TOKENS, price_per_gpu_hour)
    return replace(report, wall_time_s=time.monotonic() - started)


def _told(talk: _Judge, changes: bool, tokens: float, price: float | None) -> GapReport:
    """Make the record of the answers, with the changes."""
    spaces = _consistent(talk)
    # The space of its launcher, if that is known: changes that the launcher cannot make do not count.
    single, chain = talk.changes(spaces[0]) if changes else ((), ())
    with undisturbed():
        return _record(talk, spaces, single, chain, changes, tokens, price)


def _record(
    talk: _Judge,
    spaces: tuple[SpaceGap, ...],
    changes_made: tuple[Change, ...],
    chain: tuple[Change, ...],
    changes: bool,
    tokens: float,
    price: float | None,
) -> GapReport:
    return GapReport(
        problem=talk.problem,
        plan=talk.plan,
        report=talk.report,
        spaces=spaces,
        changes=changes_made,
        chain=chain,
        near=_near(spaces[-1]) if changes else (),
        spending=spending(talk.report, talk.plan, spaces[-1].saved, tokens, price),
        unanswered=tuple(talk.unanswered),
        interrupted=talk.interrupted,
        wall_time_s=0.0,
    )


def _check(time_limit_s: float | None, tokens: float | None, price_per_gpu_hour: float | None) -> None:
    numbers = {"time_limit_s": time_limit_s, "tokens": tokens, "price_per_gpu_hour": price_per_gpu_hour}
    for name, value in numbers.items():
        if value is not None and not 0 < value < math.inf:
            raise InvalidInputError(f"{name}={value}.", "Expected a positive number.", f"Correct {name}.")


@dataclass(slots=True)
class _Judge:
    """Questions about a plan, and the answers so far."""

    problem: Problem
    plan: Plan
    report: StepReport
    budget: Budget
    solves: Solves
    spaces: list[SpaceGap] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    interrupted: bool = False

    def ask(self, name: str, problem: Problem, weight: float) -> None:
        """Solve for the proved best of a space."""
        limit_s = self.budget.share_s(weight)
        start = self.plan
        previous = self.spaces[-1] if self.spaces else None
        if (
            previous is not None
            and previous.best is not None
            and previous.best_s is not None
            and previous.best_s < self.step_s
        ):
            start = previous.best
        splits = even_splits(problem, self.plan.layout) if problem.space.kind == "free" else None
        sizes = tuple(stage.num_layers for stage in self.plan.virtual_stages)
        uneven = splits is not None and sizes not in splits
        result = self.solves.best(problem, start, uneven, 0.01 if self.interrupted else limit_s)
        self.interrupted = self.interrupted or bool(result.message)
        self.spaces.append(self._space_gap(name, problem, result, uneven))

    def _space_gap(self, name: str, problem: Problem, result: PlanResult, uneven: bool) -> SpaceGap:
        """Compare the plan with the result of a solve; inside the space the plan itself is a known plan."""
        bound_s, best_s, best = result.lower_bound_s, result.step_time_s, result.plan
        if uneven and result.any_chunks_bound is not None:
            # The plan has uneven chunks: the bound over chunks of any size applies, and the space that has them.
            tokens = self.plan.layout.global_batch_size * problem.job.sequence_length
            bound_s = result.any_chunks_bound * tokens
            problem = with_space(problem, interleaved_layers="any")
        outside = not belongs(problem, self.plan)
        if not outside and self.step_s < (math.inf if best_s is None else best_s):
            best_s, best = self.step_s, self.plan
        if not outside and bound_s is not None and bound_s > self.step_s * (1.0 + ROUNDING):
            raise SolverError(
                f"The bound of {name} is {bound_s!r} s, and the simulated plan takes {self.step_s!r} s.",
                "A bound may not be above a plan of its space.",
                "This is a bug: please report the plan file.",
            )
        unknown = Interval(-math.inf, math.inf)
        return SpaceGap(name, problem, result, bound_s, best_s, best, unknown, outside, proved=False)

    @property
    def step_s(self) -> float:
        """Step time of the plan; infinite where it does not fit."""
        return self.report.step_time_s if self.report.fits else math.inf

    def changes(self, within: SpaceGap) -> tuple[tuple[Change, ...], tuple[Change, ...]]:
        """Find the best single changes inside a space, fastest first, and the greedy chain."""
        best_s = math.inf if within.best_s is None else within.best_s
        problem, first = within.problem, Priced.of(within.problem, self.plan)
        if self.interrupted:
            self.unanswered.append("single changes")
            return (), ()
        try:
            balanced = self._balanced(problem, first)
            self.budget.weight_left = CHANGES
            changes = best_changes(problem, first, _half(self.budget))
            others = [priced.plan for _, priced in changes.values()]
            start = changes["stages"][1] if "stages" in changes else first
            if balanced is not None and balanced.order < start.order and balanced.plan not in others:
                changes["stages"] = ("the best stages and recomputation", balanced)
            chain = greedy_chain(problem, first, changes, best_s, self.budget)
        except KeyboardInterrupt:
            self.interrupted = True
            self.unanswered.append("single changes")
            return (), ()
        if self.budget.is_spent:
            self.unanswered.append("some single changes, or the end of their chain")
        best_s = min([best_s, *(change.step_time_s for change in chain if change.closed is not None)])
        way = (first.step_time_s, best_s)
        singles = [
            change_of(lead, words, self.plan, first, after, way)
            for lead, (words, after) in sorted(changes.items(), key=lambda item: item[1][1].order)
        ]
        return tuple(singles[:SHOWN_CHANGES]), tuple(chain)

    def _balanced(self, problem: Problem, first: Priced) -> Priced | None:
        """Find the best stages and recomputation of the plan's own layout, as far as the time allows."""
        problem = loosened(problem, self.plan, ())
        if problem.space.kind != "free":
            return None
        limit_s = self.budget.share_s(STAGES)
        options = SolveOptions(
            gap=self.solves.gap, time_limit_s=limit_s, warm_start=self.plan, any_chunks=False, simplest=False
        )
        result = solve(problem, options)
        if result.message:
            raise KeyboardInterrupt
        return None if result.plan is None or result.plan == first.plan else Priced.of(problem, result.plan)


def _half(budget: Budget) -> Budget:
    """Return a budget of half the remaining time."""
    if budget.until is None:
        return budget
    now = time.monotonic()
    return Budget(now + max(0.0, budget.until - now) * 0.5)


def belongs(problem: Problem, plan: Plan) -> bool:
    """Test whether a plan is in the declared space: its values, the rules, and its stages. Memory does not
    count."""
    layout, space = plan.layout, problem.space
    lists = {name: getattr(space, name) for name in Space.model_fields if name in Layout.model_fields}
    offered = all(values is None or getattr(layout, name) in values for name, values in lists.items())
    return offered and in_space(problem, plan) and len(layout_space(loosened(problem, plan, ()))) > 0


def _consistent(talk: _Judge) -> tuple[SpaceGap, ...]:
    """Make the gaps of the narrower and the whole space consistent.

    A bound of the whole space holds for the narrower one, and a plan of the narrower space is a plan of the whole
    one. Shares are computed afterwards.
    """
    spaces = list(talk.spaces)
    narrow, whole = spaces[0], spaces[-1]
    if whole.bound_s is not None:
        narrow = replace(narrow, bound_s=max(narrow.bound_s or 0.0, whole.bound_s))
    if narrow.best_s is not None and (whole.best_s is None or narrow.best_s < whole.best_s):
        whole = replace(whole, best_s=narrow.best_s, best=narrow.best)
    step_s = talk.report.step_time_s
    ends = [narrow, whole] if len(spaces) > 1 else [whole]
    return tuple(
        replace(
            space,
            saved=_saved(step_s, space.best_s, space.bound_s),
            proved=_proved(space, talk.solves.gap),
        )
        for space in ends
    )


def _proved(space: SpaceGap, tolerance: float) -> bool:
    """Test whether bound and best known plan meet within the tolerance, or nothing fits."""
    if space.bound_s is None or space.best_s is None:
        return space.result.status == "infeasible"
    return space.best_s - space.bound_s <= tolerance * (1.0 + ROUNDING) * space.best_s


def _saved(step_s: float, best_s: float | None, bound_s: float | None) -> Interval:
    """Compute the shares of the step that the best known plan saves, and that any plan saves at most."""
    low = -math.inf if best_s is None else 1.0 - best_s / step_s
    high = math.inf if bound_s is None else 1.0 - bound_s / step_s
    return Interval(low, max(low, high))


def _near(space: SpaceGap) -> tuple[NearPlan, ...]:
    """List the plans that a search kept, simulated, fastest first."""
    kept = [plan for plan in (space.result.plan, *space.result.runners_up) if plan is not None]
    reports = [(plan, simulate(space.result.problem, plan)) for plan in kept]
    plans = [NearPlan(plan, report.step_time_s, report.peak_memory_bytes) for plan, report in reports]
    return tuple(sorted(plans, key=lambda near: near.step_time_s))


def spending(report: StepReport, plan: Plan, saved: Interval, tokens: float, price: float | None) -> Spending:
    """Compute the cost of a run with the plan, and the possible saving."""
    hours = gpu_hours(plan.layout.num_gpus, tokens, report.tokens_per_s)
    less = Interval(saved.low * hours, saved.high * hours)
    money = None if price is None else hours * price
    saved_money = None if price is None else Interval(less.low * price, less.high * price)
    return Spending(tokens, hours, less, price, money, saved_money)
