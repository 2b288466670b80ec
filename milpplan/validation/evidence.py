"""What measured runs say about the terms of a plan: records only. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TermEvidence:
    """One term of a plan, and the scored runs on its generation of hardware that have it too.

    ``mean_abs_error`` of their step times, every source weighing the same; None without runs. ``share``: by how
    much shorter the step is without the term, ``share_doubled``: by how much longer with it twice, as shares of
    the step; None for terms that runs exercise.
    """

    name: str
    words: str
    num_runs: int
    num_sources: int
    mean_abs_error: float | None
    share: float | None = None
    share_doubled: float | None = None

    @property
    def exercised(self) -> bool:
        """Whether a run has it."""
        return self.num_runs > 0


@dataclass(frozen=True, slots=True)
class Ablated:
    """The best plan beside the fastest other one with the terms that no run exercises taken ``times`` times.

    ``rival_s`` is as if for the best plan's batch; None where no other plan is known.
    """

    times: int
    best_s: float
    rival_s: float | None

    @property
    def still_best(self) -> bool:
        """Whether no plan looked at is faster."""
        return self.rival_s is None or self.best_s <= self.rival_s


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a plan rests on.

    ``num_runs``: scored runs on the generation; ``num_memory_runs``: those that say whether they fitted.
    ``elsewhere``: words of terms that no run exercises and only the other plans have. ``ablations``: empty where
    every term of all plans is exercised, or where no run is scored on the generation.
    """

    generation: str
    num_runs: int
    num_memory_runs: int
    terms: tuple[TermEvidence, ...]
    elsewhere: tuple[str, ...] = ()
    ablations: tuple[Ablated, ...] = ()
    num_plans: int = 0

    @property
    def unexercised(self) -> tuple[TermEvidence, ...]:
        """Terms of the plan that no scored run on the generation has."""
        return tuple(term for term in self.terms if not term.exercised)
