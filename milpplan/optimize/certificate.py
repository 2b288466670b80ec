"""Certificate of a result: the claim that is checked, and the outcome of the second proof. Records only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from milpplan.errors import InvalidInputError
from milpplan.optimize.result import PlanResult, SolveOptions, Status, Strength
from milpplan.problem.plan import Plan

Verdict = Literal["certified", "refuted", "unproved"]


@dataclass(frozen=True, slots=True)
class ClaimedResult:
    """Claim of a result, apart from its problem.

    ``step_time_s``, ``value`` and ``bound``: step and objective of the plan, and the objective's bound; None where
    there is no plan, or nothing proved. ``lower_bound_s``: where the fewest GPUs are sought, a separate claim that
    no step on this number of GPUs is shorter. ``strength``: basis of the proof.
    """

    status: Status
    plan: Plan | None
    step_time_s: float | None
    value: float | None
    bound: float | None
    tolerance: float
    backend: str
    legal: int
    layouts_sha256: str
    forbid: tuple[Mapping[str, object], ...] = ()
    any_chunks_bound: float | None = None
    lower_bound_s: float | None = None
    strength: Strength = "none"

    @staticmethod
    def of(result: PlanResult, options: SolveOptions) -> ClaimedResult:
        """Extract the claim of a result that was solved with ``options``.

        Raises:
            InvalidInputError: it claims nothing: no plan, no bound and no proof that there is none.
        """
        unproved = result.status == "feasible" and result.objective_bound is None
        if result.layouts is None or result.status == "no_solution_found" or unproved:
            bound = ", without a bound" if unproved else ""
            raise InvalidInputError(
                f"The result claims nothing (status {result.status}{bound}).",
                "Expected one with a plan and a bound, or one that is proved infeasible.",
                "Solve the problem with more time.",
            )
        return ClaimedResult(
            status=result.status,
            plan=result.plan,
            step_time_s=result.step_time_s,
            value=result.objective,
            bound=result.objective_bound,
            tolerance=options.gap,
            backend=options.backend,
            legal=len(result.layouts.space),
            layouts_sha256=result.layouts.space.sha256(),
            forbid=options.forbid,
            any_chunks_bound=result.any_chunks_bound,
            lower_bound_s=result.lower_bound_s,
            strength=result.work.proof,
        )

    @property
    def gap(self) -> float | None:
        """(value - bound) / value."""
        if self.value is None or self.bound is None:
            return None
        return max(0.0, (self.value - self.bound) / self.value)


@dataclass(frozen=True, slots=True)
class Check:
    """Outcome of one repeated computation: whether it confirms the claim, and the value seen."""

    name: str
    passed: bool
    seen: str


@dataclass(frozen=True, slots=True)
class Certification:
    """All checks, and the result of the second proof (None where an earlier check failed).

    ``verdict``: ``certified``; ``refuted``: a check contradicts the claim; ``unproved``: the second proof did not
    reach the claimed bound in its time.
    """

    checks: tuple[Check, ...]
    backend: str
    again: PlanResult | None
    verdict: Verdict
