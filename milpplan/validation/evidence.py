"""Records of the measured runs that support a plan's terms. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Outside:
    """Measure of a plan outside the range that the runs of a term have: a layout or job field, its value in the
    plan, and the limit that the value exceeds or falls below."""

    measure: str
    value: int
    limit: int

    @property
    def ratio(self) -> float:
        """Factor between value and limit, at least 1."""
        return max(self.value / self.limit, self.limit / self.value)


@dataclass(frozen=True, slots=True)
class TermEvidence:
    """Term of a plan, with the scored runs on its generation of hardware that exercise it.

    ``mean_abs_error`` is that of their step times, with equal weight for every source, in the number format where
    it is largest; None without runs.
    ``share``: the reduction of the step without the term; ``share_doubled``: its increase with the term doubled;
    both are shares of the step, and None for exercised terms. ``ranges``: minimum and maximum of every measure
    over the runs; ``outside``: measures of the plan that are not in them.
    """

    name: str
    words: str
    num_runs: int
    num_sources: int
    mean_abs_error: float | None
    share: float | None = None
    share_doubled: float | None = None
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    outside: tuple[Outside, ...] = ()

    @property
    def exercised(self) -> bool:
        """True if a run exercises the term."""
        return self.num_runs > 0


@dataclass(frozen=True, slots=True)
class Ablated:
    """Comparison of the best plan with the fastest other plan, with unexercised terms scaled by ``times``.

    ``rival_s`` is scaled to the best plan's batch; None without another plan.
    """

    times: int
    best_s: float
    rival_s: float | None

    @property
    def still_best(self) -> bool:
        """True if no compared plan is faster."""
        return self.rival_s is None or self.best_s <= self.rival_s


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence for a plan.

    ``num_runs``: scored runs on the generation; ``num_memory_runs``: runs that state whether they fitted.
    ``elsewhere``: words of unexercised terms that only the other plans have. ``ablations``: empty where every term
    of all plans is exercised, or without scored runs on the generation. ``constants_error``: mean error of the
    hardware's constants on the runs of a framework, the largest over frameworks where none is fitted, and
    ``constants_of``, the stack fitted to these runs.
    """

    generation: str
    num_runs: int
    num_memory_runs: int
    terms: tuple[TermEvidence, ...]
    constants_error: float | None = None
    constants_of: str | None = None
    elsewhere: tuple[str, ...] = ()
    ablations: tuple[Ablated, ...] = ()
    num_plans: int = 0

    @property
    def unexercised(self) -> tuple[TermEvidence, ...]:
        """Terms of the plan that no scored run on the generation exercises."""
        return tuple(term for term in self.terms if not term.exercised)

    @property
    def extrapolated(self) -> tuple[TermEvidence, ...]:
        """Exercised terms of the plan with a measure outside the range of their runs."""
        return tuple(term for term in self.terms if term.outside)
