"""Explanation of a plan: all questions, in order of importance, within a time limit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from milpplan.errors import InvalidInputError
from milpplan.explain.break_even import BreakEvens, break_evens
from milpplan.explain.judge.plan_changes import candidates, single_change
from milpplan.explain.limits import limits
from milpplan.explain.optima import Budget, Yardstick, asked_for, saved_share
from milpplan.explain.records import Explanation, Interval, Optimum, SingleChange, WishAnswer, Worth
from milpplan.explain.what_if import MEMORY, Change, questions, worth
from milpplan.explain.why_not import Wish, answer, checked, neighbours, wish_words
from milpplan.optimize.context import Deadline
from milpplan.optimize.infeasibility import Effort, explain
from milpplan.optimize.milp.solution import undisturbed
from milpplan.optimize.result import DEFAULT_GAP
from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem
from milpplan.simulation.report import StepReport
from milpplan.simulation.simulator import simulate
from milpplan.units import seconds_text

TIME_LIMIT_S = 60.0
BASE_SHARE = 0.4
"""Maximum share of the time for the proof that all answers rely on."""
KNOWN_SHARE = 0.05
"""Share of the time for runners-up, where that proof already exists."""
BREAK_EVEN_SHARE = 0.2
"""Maximum share of the time left after that proof for the break-even values of doubts."""
WISH, WORTH, NEIGHBOUR, CHANGE = 4.0, 3.0, 1.0, 1.0
"""Weights of the questions in the distribution of the time."""


@dataclass(slots=True)
class _Talk:
    """Questions and answers so far; the state at the end of the time or at Ctrl-C is the result."""

    yardstick: Yardstick
    problem: Problem
    plan: Plan
    value: float
    best: Optimum
    budget: Budget
    callback: Callable[[str], None] | None
    changes: list[SingleChange] = field(default_factory=list)
    worth: list[Worth] = field(default_factory=list)
    wishes: list[WishAnswer] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    interrupted: bool = False

    def ask(self, words: str, weight: float, question: Callable[[float | None], Optimum | None]) -> None:
        """Ask a question, unless the time is over or the user has interrupted."""
        if self.interrupted or self.budget.is_spent:
            self.open.append(words)
            return
        if self.callback is not None:
            self.callback(words)
        limit_s = self.budget.share_s(weight)
        try:
            optimum = question(limit_s)
        except KeyboardInterrupt:
            self.interrupted = True
            self.open.append(words)
            return
        self.interrupted = optimum is not None and optimum.interrupted


def explain_plan(
    problem: Problem,
    plan: Plan,
    wishes: Sequence[Wish] = (),
    *,
    time_limit_s: float | None = TIME_LIMIT_S,
    gap: float = DEFAULT_GAP,
    proved_bound_s: float | None = None,
    callback: Callable[[str], None] | None = None,
) -> Explanation:
    """Explain a plan: its distance from the proved best, its limits, the value of changes, and the price of
    alternatives.

    Args:
        problem: the problem of the plan.
        plan: a legal plan for it, good or bad.
        wishes: fields and values such as ``{"tp": 8}``; without any the plan's neighbours are examined.
        time_limit_s: of all questions together; None: every answer is solved to ``gap``.
        gap: relative tolerance of every solve.
        proved_bound_s: a lower bound of the problem's step time, where an earlier solve has proved one.
        callback: called with the words of a question before it is solved.

    Returns:
        Answers as proved intervals, which are wider with less time; names the questions that were not reached.

    Raises:
        InfeasibleError: the problem provably has no plan.
        IllegalPlanError: the plan is not legal for the problem.
        InvalidInputError: a wish, a gap or a limit is invalid.
    """
    started = time.monotonic()
    checked(problem, wishes)
    if time_limit_s is not None and not time_limit_s > 0:
        raise InvalidInputError(f"time_limit_s={time_limit_s}.", "Expected a positive number of seconds.", "")
    problem = asked_for(problem, plan)
    report = simulate(problem, plan)
    yardstick = Yardstick.of(problem, plan, gap)
    value = yardstick.value(problem, plan, report.step_time_ns)
    if callback is not None:
        callback("the proved best")
    until = None if time_limit_s is None else started + time_limit_s
    best = _best(yardstick, problem, plan, value, time_limit_s, proved_bound_s)
    if best.infeasible:
        raise explain(problem, effort=Effort(deadline=until))
    talk = _Talk(yardstick, problem, plan, value, best, Budget(until), callback, interrupted=best.interrupted)
    break_even = None
    try:
        break_even = _break_even(talk, report)
        _ask_all(talk, wishes)
    except KeyboardInterrupt:
        # Interrupted between two questions.
        talk.interrupted = True
    with undisturbed():
        return _told(talk, report, started, break_even)


def _best(
    yardstick: Yardstick, problem: Problem, plan: Plan, value: float, limit_s: float | None, known_s: float | None
) -> Optimum:
    """Return the proved best, with an earlier bound if there is one, which leaves the time to the questions."""
    is_close = known_s is not None and yardstick.unit == "s" and value <= known_s * (1.0 + 2.0 * yardstick.gap)
    share = KNOWN_SHARE if is_close else BASE_SHARE
    best = yardstick.optimum(problem, None if limit_s is None else share * limit_s, plan)
    if known_s is None or yardstick.unit != "s" or best.infeasible:
        return best
    low, high = max(best.bounds.low, known_s), best.bounds.high
    if low > high * (1.0 + 1e-9):
        raise InvalidInputError(
            f"No plan is said to take less than {seconds_text(known_s)}, and one takes {seconds_text(high)}.",
            "Expected a bound that was proved for this problem.",
            "Leave the bound out, or solve again.",
        )
    return replace(best, bounds=Interval(min(low, high), high))


def _break_even(talk: _Talk, report: StepReport) -> BreakEvens | None:
    """Compare the plan with others from doubt to doubt, in a share of the time."""
    if talk.interrupted or talk.budget.is_spent or not report.fits:
        return None
    if talk.callback is not None:
        talk.callback("break-even values")
    left_s = Deadline(talk.budget.until).left_s()
    deadline = Deadline.after(None if left_s is None else BREAK_EVEN_SHARE * left_s)
    kept = [] if talk.best.plan is None else [talk.best.plan]
    return break_evens(talk.problem, talk.plan, kept, talk.yardstick.gap, deadline)


def _told(talk: _Talk, report: StepReport, started: float, break_even: BreakEvens | None) -> Explanation:
    """Make the record of the answers."""
    best, high = talk.best, talk.best.bounds.high
    in_seconds = talk.yardstick.unit == "s"
    return Explanation(
        problem=talk.problem,
        plan=talk.plan,
        report=report,
        unit=talk.yardstick.unit,
        value=talk.value,
        best=best,
        above_best=saved_share(Interval(talk.value, talk.value), best.bounds),
        is_outside=report.fits and talk.value < high,
        limits=limits(talk.problem, talk.plan, report, high if in_seconds else math.inf),
        changes=tuple(sorted(talk.changes, key=lambda change: change.best.bounds.high)),
        worth=tuple(talk.worth),
        wishes=tuple(talk.wishes),
        break_even=break_even,
        unanswered=tuple(talk.open),
        interrupted=talk.interrupted,
        wall_time_s=time.monotonic() - started,
    )


def _ask_all(talk: _Talk, wishes: Sequence[Wish]) -> None:
    problem, plan, best = talk.problem, talk.plan, talk.best
    fields = _loose_fields(talk)
    changes = tuple(questions(problem))
    asked = bool(wishes)
    base = best.plan or plan
    others = tuple(wishes) if asked else tuple(neighbours(problem, base))
    talk.budget.weight_left = (
        CHANGE * len(fields) + WORTH * len(changes) + (WISH if asked else NEIGHBOUR) * len(others)
    )
    for names in fields:
        _ask_change(talk, names)
    if asked:
        _ask_wishes(talk, others, asked)
    for change, changed in changes:
        talk.ask(change.words, WORTH, _worth_question(talk, change, changed))
    if not asked:
        _ask_wishes(talk, others, asked)


def _loose_fields(talk: _Talk) -> tuple[tuple[str, ...], ...]:
    """Choose the sets of fields to free, where a better plan than the explained one is known."""
    best = talk.best
    if best.plan is None or talk.plan == best.plan:
        return ()
    return tuple(candidates(talk.plan, best.plan))


def _ask_change(talk: _Talk, names: tuple[str, ...]) -> None:
    def question(limit_s: float | None) -> Optimum | None:
        change = single_change(talk.yardstick, talk.problem, talk.plan, talk.value, names, limit_s)
        if change is None:
            return None
        talk.changes.append(change)
        return change.best

    talk.ask(f"a change of {names[0] if names else 'stages and recomputation'}", CHANGE, question)


def _worth_question(talk: _Talk, change: Change, changed: Problem) -> Callable[[float | None], Optimum | None]:
    def question(limit_s: float | None) -> Optimum | None:
        unlimited = next((answered for answered in talk.worth if answered.name == MEMORY[0]), None)
        value_of_change = worth(talk.yardstick, change, changed, talk.plan, talk.best, unlimited, limit_s)
        talk.worth.append(value_of_change)
        return value_of_change.best

    return question


def _ask_wishes(talk: _Talk, wishes: Sequence[Wish], asked: bool) -> None:
    for wish in wishes:

        def question(limit_s: float | None, wish: Wish = wish) -> Optimum | None:
            answered = answer(talk.yardstick, talk.problem, wish, talk.best, limit_s, asked)
            talk.wishes.append(answered)
            return answered.best

        talk.ask(wish_words(wish), WISH if asked else NEIGHBOUR, question)
