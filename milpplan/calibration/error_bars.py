"""Uncertainty of a step time and of the choice between plans, from that of a hardware description. Times in
seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Final, Literal

from milpplan.problem import (
    UNCERTAIN,
    HardwareSpec,
    Plan,
    Problem,
    Uncertainty,
    load_hardware,
    moved,
    uncertainty_of,
)
from milpplan.problem.catalog import stacks_on
from milpplan.simulation import step_times_s, step_weight

End = Literal["fast", "slow"]


@dataclass(frozen=True, slots=True)
class ErrorBar:
    """Step time with its uncertainty, first order.

    ``below_s`` and ``above_s``: one sigma down and up; the parts of ``parts_s`` (down, up) in quadrature.
    ``residual``: the scatter that no constant explains; ``sources``: the spread between clusters. ``overlay``: the
    source of the uncertainty. ``by_stack_s``: the step with the constants of each shipped stack of bare hardware.
    """

    step_time_s: float
    below_s: float
    above_s: float
    parts_s: dict[str, tuple[float, float]]
    overlay: str
    by_stack_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rival:
    """Comparison of the best plan with the best other plan, with all constants one sigma to the same side.

    ``rival``: the other plan. ``rival_s``: its step times ``weight``, which makes steps comparable
    (``step_weight``); None where no other plan fits or is known. ``lower_bound_s``: proved for the whole space at
    this end, ``solved``: the best plan of the end's own solve; both None where it was not solved again.
    """

    end: End
    best_s: float
    rival_s: float | None
    lower_bound_s: float | None
    solved: Plan | None = None
    rival: Plan | None = None
    weight: float = 1.0

    @property
    def still_best(self) -> bool:
        """True if no compared plan is better."""
        return self.rival_s is None or self.best_s <= self.rival_s


@dataclass(frozen=True, slots=True)
class Robustness:
    """Comparison of the best plan at both ends with ``num_plans`` other plans of the search or, if ``solved``,
    with all plans of the space within the gap proved at each end."""

    ends: tuple[Rival, ...]
    num_plans: int
    solved: bool

    @property
    def still_best(self) -> bool:
        """True if the plan is the best at both ends."""
        return all(end.still_best for end in self.ends)


ENDS: Final[tuple[tuple[End, float], ...]] = (("fast", -1.0), ("slow", 1.0))


def error_bar(problem: Problem, plan: Plan, step_time_s: float) -> ErrorBar:
    """Compute the step time of a plan with one sigma down and up.

    First order: the plan is simulated with every uncertain constant one sigma down and up, one at a time, and the
    differences are added in quadrature, with the scatter that no constant explains and the spread between
    clusters. Correlations of the fit are left out: where constants were hard to separate this is an upper bound of
    their share.
    """
    below, above = _parts_s(problem, plan, step_time_s, -1.0), _parts_s(problem, plan, step_time_s, 1.0)
    parts = {name: (below[name], above[name]) for name in below if below[name] or above[name]}
    down, up = min(_quadrature(below), step_time_s), _quadrature(above)
    by_stack_s, hardware = {}, problem.hardware
    stacks = () if problem.other_hardware else stacks_on(hardware.name)
    if stacks and load_hardware(hardware.name) == hardware:
        for name in stacks:
            fitted = problem.model_copy(update={"hardware": load_hardware(name)})
            (by_stack_s[name],) = step_times_s(fitted, [plan])
    return ErrorBar(step_time_s, down, up, parts, uncertainty_of(problem.hardware).overlay, by_stack_s)


def side_s(problem: Problem, plan: Plan, step_time_s: float, sign: float) -> float:
    """Compute one side of a plan's error bar in seconds: the slower one for ``sign`` 1, the faster one for -1."""
    return _quadrature(_parts_s(problem, plan, step_time_s, sign))


def _parts_s(problem: Problem, plan: Plan, step_time_s: float, sign: float) -> dict[str, float]:
    """Compute the seconds that each constant, the residual and the spread between clusters add to one side."""
    hardware, uncertainty = problem.hardware, uncertainty_of(problem.hardware)
    parts = {name: 0.0 for name in UNCERTAIN if getattr(uncertainty, name) > 0}
    for name in parts:
        # A time that is 0 already cannot be faster.
        if moved(hardware, {name: sign}) != hardware:
            (there_s,) = step_times_s(at(problem, {name: sign}), [plan])
            # Step times are whole nanoseconds. Further digits of a difference are rounding, and so is a negative
            # zero.
            parts[name] = max(0.0, round(sign * (there_s - step_time_s), 9))
    parts["residual"] = uncertainty.residual_fraction * step_time_s
    parts["sources"] = uncertainty.sources_fraction * step_time_s
    return parts


def _quadrature(parts: dict[str, float]) -> float:
    return sqrt(sum(part**2 for part in parts.values()))


def at(problem: Problem, sigmas: dict[str, float]) -> Problem:
    """Move constants of the problem's hardware by multiples of sigma; the moved description counts as exact."""
    exact = Uncertainty(overlay=uncertainty_of(problem.hardware).overlay)
    hardware: HardwareSpec = moved(problem.hardware, sigmas).model_copy(update={"uncertainty": exact})
    return problem.model_copy(update={"hardware": hardware})


def joint_end(problem: Problem, end: End) -> Problem:
    """Move every uncertain constant one sigma to the fast or to the slow side."""
    sign = dict(ENDS)[end]
    return at(problem, dict.fromkeys(UNCERTAIN, sign))


def robustness(
    problem: Problem,
    best: Plan,
    others: Sequence[Plan],
    solve_end: Callable[[Problem], tuple[Plan | None, float | None]] | None = None,
) -> Robustness | None:
    """Test whether ``best`` is still the best plan at both joint ends.

    Plans are compared by step time, per sequence where their batches differ, and by GPU-hours if these are the
    objective.

    Args:
        problem: the problem of the plans.
        best: the best plan.
        others: plans to simulate at both ends.
        solve_end: solves the problem of an end and returns its best plan and its proved lower bound in seconds;
            that plan is compared, too.

    Returns:
        The comparison at both ends; None where no constant is uncertain.
    """
    uncertainty = uncertainty_of(problem.hardware)
    if not any(getattr(uncertainty, name) for name in UNCERTAIN):
        return None
    rivals = []
    for end, _ in ENDS:
        there = joint_end(problem, end)
        plan, bound = solve_end(there) if solve_end is not None else (None, None)
        compared = [other for other in (*others, *([plan] if plan else [])) if other != best]
        best_s, *steps_s = step_times_s(there, [best, *compared])
        weights = [step_weight(problem, other, best) for other in compared]
        scaled_s = [step_s * weight for step_s, weight in zip(steps_s, weights, strict=True)]
        found = Rival(end, best_s, None, bound, plan)
        if scaled_s:
            place = scaled_s.index(min(scaled_s))
            found = replace(found, rival_s=scaled_s[place], rival=compared[place], weight=weights[place])
        rivals.append(found)
    return Robustness(tuple(rivals), len(others), solve_end is not None)
