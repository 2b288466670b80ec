"""Price of alternatives: the proved best with a wish, or the reason that forbids it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from pydantic import ValidationError

from milpplan.errors import InvalidInputError
from milpplan.explain.limits import rule_words
from milpplan.explain.optima import Yardstick, ratio
from milpplan.explain.records import Interval, Optimum, Outcome, WishAnswer
from milpplan.optimize.infeasibility import floor, refusing_rules, with_space
from milpplan.optimize.solve import fixed
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem.plan import Layout, Plan
from milpplan.problem.problem import Problem, Space
from milpplan.problem.reading import plain_reason
from milpplan.simulation.layout_costs import usable_memory_bytes
from milpplan.units import gib_text

Wish = Mapping[str, object]
WISHABLE = tuple(name for name in Space.model_fields if name in {*Layout.model_fields, "recompute"})
"""Names that a wish may have: the fields of a layout that a space has, and the recomputation of all layers."""


def wished(problem: Problem, wish: Wish) -> Problem:
    """Grant a wish, whatever the problem's own space says about its fields.

    Raises:
        InvalidInputError: a name that no wish can have, or an invalid value.
    """
    unknown = [name for name in wish if name not in WISHABLE]
    if unknown or not wish:
        raise InvalidInputError(
            f"A wish names {', '.join(map(repr, unknown)) or 'nothing'}.",
            f"Expected one of {', '.join(WISHABLE)}.",
            "Check the spelling.",
        )
    values = {name: value for name, value in wish.items() if name != "recompute"}
    try:
        Layout.model_validate({"global_batch_size": 1, **values}, strict=True)
    except ValidationError as error:
        raise InvalidInputError(
            f"A wish is {wish_words(wish)}: {plain_reason(error.errors(include_url=False)[0])}.",
            "Expected values that a layout can have.",
            "Correct it; `milpplan schema plan` describes the fields.",
        ) from error
    granted = fixed(problem, values) if values else problem
    if "recompute" not in wish:
        return granted
    modes = Space().recompute
    if wish["recompute"] not in modes:
        raise InvalidInputError(
            f"A wish names recompute={wish['recompute']!r}.", f"Expected one of {', '.join(modes)}.", "Correct it."
        )
    return with_space(granted, recompute=(wish["recompute"],))


def wish_words(wish: Wish) -> str:
    """Write a wish as on the command line."""
    return ",".join(f"{name}={_word(value)}" for name, value in wish.items())


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def neighbours(problem: Problem, plan: Plan) -> Iterator[Wish]:
    """Iterate over the plan's neighbours: every degree halved and doubled, every switch flipped, every other value
    that the space offers for a choice, and every recomputation."""
    layout = plan.layout.model_dump()
    default = Space()
    for name in WISHABLE:
        own = layout.get(name)
        if isinstance(own, bool):
            yield {name: not own}
        elif name == "recompute" or getattr(default, name) is not None:
            yield from ({name: value} for value in getattr(problem.space, name) if not _has(plan, {name: value}))
        elif isinstance(own, int) and not (name in ("ep", "etp") and not problem.model.has_experts):
            values = ([own // 2] if own % 2 == 0 else []) + [own * 2]
            yield from ({name: value} for value in values if _divides(problem, name, value))


def _divides(problem: Problem, name: str, value: int) -> bool:
    """Test whether a degree divides the number of GPUs; otherwise it is not a neighbour."""
    return name not in ("tp", "cp", "pp", "dp") or any(n % value == 0 for n in problem.job.num_gpus_values)


def _has(plan: Plan, wish: Wish) -> bool:
    """Test whether a plan already has the wish."""
    return all(_has_one(plan, name, value) for name, value in wish.items())


def _has_one(plan: Plan, name: str, value: object) -> bool:
    if name != "recompute":
        return bool(getattr(plan.layout, name) == value)
    full, selective = (
        sum(getattr(s.recompute, mode) for s in plan.virtual_stages) for mode in ("full", "selective")
    )
    layers = sum(stage.num_layers for stage in plan.virtual_stages)
    counts = {"full": full, "selective": selective, "none": layers - full - selective}
    return counts.get(str(value)) == layers


def _in_space(problem: Problem, wish: Wish) -> bool:
    """Test whether the declared space has plans with the wish, so that such a plan cannot beat the best."""
    for name, value in wish.items():
        offered = getattr(problem.space, name)
        if offered is None:
            if name == "vpp" and problem.space.vpp_values != "all":
                return False
        elif value not in offered:
            return False
    return True


def answer(
    yardstick: Yardstick, problem: Problem, wish: Wish, best: Optimum, limit_s: float | None, asked: bool = True
) -> WishAnswer:
    """Solve for the best plan with a wish and its price, or determine the reason that forbids it.

    Args:
        yardstick: the unit and the tolerance.
        problem: the problem of the plan.
        wish: fields and values.
        best: the proved best of the problem.
        limit_s: seconds to spend.
        asked: the user asked; False for a neighbour.
    """
    granted = wished(problem, wish)
    inside = _in_space(problem, wish) and granted.space.zero_pipeline == problem.space.zero_pipeline
    wish_answer = WishAnswer(wish, wish_words(wish), "open", None, None, None, "", inside, asked)
    if inside and best.plan is not None and _has(best.plan, wish):
        same = replace(wish_answer, outcome="chosen", best=best, reason="the best plan found has it")
        return _priced(same, best.bounds, best.bounds, at_least_zero=True)
    legal = layout_space(granted)
    if not len(legal):
        return replace(wish_answer, outcome="forbidden", reason=_forbidden(granted, legal.rejected, wish))
    start = next(
        (candidate for candidate in (best.plan, *best.runners_up) if candidate and _has(candidate, wish)), None
    )
    optimum = yardstick.optimum(granted, limit_s, start)
    if optimum.infeasible:
        return _impossible(replace(wish_answer, best=optimum), granted, optimum)
    bounds = optimum.bounds
    if inside:
        bounds = Interval(min(max(bounds.low, best.bounds.low), bounds.high), bounds.high)
    outcome: Outcome = "open" if optimum.plan is None else "priced"
    reason = "" if inside else "outside the declared space"
    return _priced(replace(wish_answer, outcome=outcome, best=optimum, reason=reason), bounds, best.bounds, inside)


def _priced(wish_answer: WishAnswer, with_it: Interval, without: Interval, at_least_zero: bool) -> WishAnswer:
    """Add the price to an answer; a plan with a wish that the space offers is provably no better than the best."""
    minimum = 0.0 if at_least_zero else -math.inf
    price = Interval(
        max(minimum, ratio(with_it.low, without.high) - 1.0), max(minimum, ratio(with_it.high, without.low) - 1.0)
    )
    low = with_it.low - without.high if math.isfinite(without.high) else -math.inf
    amount = Interval(max(minimum, low), max(minimum, with_it.high - without.low))
    best = None if wish_answer.best is None else replace(wish_answer.best, bounds=with_it)
    return replace(wish_answer, best=best, price=price, amount=amount)


def _forbidden(granted: Problem, rejected: Mapping[str, int], wish: Wish) -> str:
    """Describe the minimal set of rules that leaves no layout; without rules to blame, the numbers that do."""
    rules = _together(granted, refusing_rules(granted, rejected))
    if rules:
        return "; ".join(rule_words(granted, name) for name in rules)
    job, space = granted.job, granted.space
    degrees = (space.tp, space.cp, space.pp, space.dp)
    product = math.prod(values[0] for values in degrees if values and len(values) == 1)
    counts = " or ".join(f"{count:,}" for count in job.num_gpus_values)
    if all(count % product for count in job.num_gpus_values):
        return f"{wish_words(wish)} does not divide {counts} GPUs"
    batches = " or ".join(f"{batch:,}" for batch in job.global_batch_values)
    return f"no degrees and micro-batches with {wish_words(wish)} give {counts} GPUs and a batch of {batches}"


def _together(granted: Problem, refusing: Sequence[str]) -> list[str]:
    """Find a minimal set of rules whose removal leaves a layout; empty where no rule is to blame."""
    removed = list(refusing)
    if not len(layout_space(granted, without=removed)):
        return []
    for name in refusing:
        rest = [other for other in removed if other != name]
        if len(layout_space(granted, without=rest)):
            removed = rest
    return removed


def _impossible(wish_answer: WishAnswer, granted: Problem, optimum: Optimum) -> WishAnswer:
    """Answer that every layout with the wish is provably too large, or too slow for the deadline."""
    usable = usable_memory_bytes(granted)
    peak_bytes = optimum.least_peak_bytes
    if peak_bytes is None:
        bounds = floor(granted, layout_space(granted))
        peak_bytes = bounds.memory_bytes if bounds is not None else 0.0
    if peak_bytes > usable:
        reason = f"does not fit: the least peak is at least {gib_text(peak_bytes)} of {gib_text(usable)} usable"
        return replace(wish_answer, outcome="does_not_fit", reason=reason)
    if granted.job.deadline_s is not None:
        return replace(
            wish_answer, outcome="too_late", reason="every layout is too large, or misses the deadline (proved)"
        )
    reason = (
        f"does not fit: every layout was proved to need more than {gib_text(usable)}, one by one (the bound "
        f"of all at once is {gib_text(peak_bytes)})"
    )
    return replace(wish_answer, outcome="does_not_fit", reason=reason)


def checked(problem: Problem, wishes: Sequence[Wish]) -> None:
    """Refuse invalid wishes before time is spent on valid ones."""
    for wish in wishes:
        wished(problem, wish)
