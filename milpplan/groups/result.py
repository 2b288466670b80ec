"""The result of a search for a grouped step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from milpplan.errors import InfeasibleError
from milpplan.groups.plan import GroupedPlan
from milpplan.groups.problem import GroupedProblem
from milpplan.groups.screen_subsets import SetRecord

NO_PLAN_NS = 2**62
"""The bound of a set without any plan."""


@dataclass(frozen=True, eq=False)
class GroupedResult:
    """Result of a search: the best plan, the proved bound, and the bounds of all sets of strategies."""

    plan: GroupedPlan
    bound_ns: int
    sets: tuple[SetRecord, ...]
    cpu_time_s: float

    def num_open(self, relative_gap: float = 0.0) -> int:
        """Count the sets that may still hold a plan shorter by more than ``relative_gap``."""
        return sum(record.bound_ns < self.plan.time_ns * (1.0 - relative_gap) for record in self.sets)

    @property
    def gap(self) -> float:
        """(time - bound) / time."""
        return (self.plan.time_ns - self.bound_ns) / self.plan.time_ns


def check_held(problem: GroupedProblem, sets: Sequence[SetRecord]) -> None:
    """Refuse a step that no set of strategies holds.

    Raises:
        InfeasibleError: every set is proved to hold no plan.
    """
    # Bounds are rounded to whole units, so they may be a little below NO_PLAN_NS.
    if min(record.bound_ns for record in sets) >= NO_PLAN_NS // 2:
        raise InfeasibleError(
            f"No set of {len(problem.strategies)} strategies holds the {problem.num_sequences} sequences.",
            "Proved by their programs: some do not fit beside the others.",
            "Give larger micro-batches or more in flight, or fewer sequences.",
        )
