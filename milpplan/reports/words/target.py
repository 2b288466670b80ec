"""Launcher that a result is restricted to, and the price of the restriction: record and sentence."""

from __future__ import annotations

from typing import Literal

from milpplan.optimize.result import PlanResult, TargetPrice
from milpplan.problem.problem import Problem, Space
from milpplan.problem.records import Record
from milpplan.reports.documents.certificate import digest
from milpplan.reports.documents.plan_file import PlanDocument, plan_document
from milpplan.units import percent_text

SAME_SHARE = 1e-3
"""Difference up to which the two ends of a price are printed as one value, and below which a price counts as
none."""


class TargetPriceDocument(Record):
    """Price of the restriction to a launcher.

    It holds the best of the whole space and its proved bound, in the objective's unit, and the minimum and maximum
    share by which the launcher's best exceeds it. ``space`` is the whole space, ``plan`` its best,
    ``problem_sha256`` the digest of the problem with that space; a price without these cannot be certified.
    """

    objective: float
    objective_bound: float
    least_fraction: float
    most_fraction: float
    status: Literal["optimal", "feasible", "infeasible", "no_solution_found"]
    wall_time_s: float
    space: Space | None = None
    plan: PlanDocument | None = None
    problem_sha256: str | None = None


class TargetDocument(Record):
    """Launcher that the space is restricted to; ``price`` is null where the whole space was not solved."""

    name: str
    version: str | None
    price: TargetPriceDocument | None


def target_document(result: PlanResult) -> TargetDocument | None:
    """Make the record of the launcher that a result is restricted to; None without a launcher."""
    space, price = result.problem.space, result.target_price
    if space.target is None:
        return None
    priced = None if price is None else target_price_document(result.problem, price)
    return TargetDocument(name=space.target, version=space.target_version, price=priced)


def target_price_document(problem: Problem, price: TargetPrice) -> TargetPriceDocument:
    """Make the record of the price of a problem's restriction."""
    return TargetPriceDocument(
        objective=price.objective,
        objective_bound=price.objective_bound,
        least_fraction=price.least_fraction,
        most_fraction=price.most_fraction,
        status=price.status,
        wall_time_s=price.wall_time_s,
        space=price.space,
        plan=plan_document(price.plan),
        problem_sha256=digest(problem.model_copy(update={"space": price.space})),
    )


def target_price_text(problem: Problem, price: TargetPrice | TargetPriceDocument) -> str:
    """Describe the price of the restriction to a launcher, as an interval where the proofs leave one."""
    least, most = price.least_fraction, price.most_fraction
    more = "slower" if problem.job.objective == "step_time_per_token" else f"more {problem.job.objective}"
    proved = f"(proved; --target {problem.space.target})"
    best = f"than the best of any launcher (the same space without --target {problem.space.target})"
    if most <= 0:
        return f"no plan of any launcher is better {proved}"
    if most <= SAME_SHARE:
        return f"no plan of any launcher is more than {percent_text(most, 2)} better {proved}"
    if most - least <= SAME_SHARE:
        return f"{percent_text((least + most) / 2)} {more} {best}, proved"
    return f"proved: between {percent_text(least)} and {percent_text(most)} {more} {best}"
