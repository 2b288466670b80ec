"""Comparison of measured runs with simulation, for every run that can be stated as a problem and a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from milpplan.simulation import StepReport, simulate
from milpplan.validation.memory import MemoryMeasure, memory_measures, not_compared, predicted_memory
from milpplan.validation.runs import (
    Run,
    RunFile,
    Statement,
    StepMeasure,
    UnstatedError,
    framework_of,
    generation_of,
    is_scored,
    rates,
    state,
    step_measure,
)

UNSCORED_FLAGS = frozenset({"old_pp_engine", "conflicting_reruns", "modified_model", "heterogeneous_stages"})
"""Flags of runs that do not test the cost model: another engine, contradictory reruns, another model."""
LONGEST_STEP_S: Final = 1e9
"""Maximum plausible step time; a longer one is a misprint."""
OOM_FLAGS = UNSCORED_FLAGS | {"success_with_oom_flag"}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Run with prediction and measurement. Times in seconds, memory in bytes."""

    run: Run
    statement: Statement
    report: StepReport
    step: StepMeasure | None
    memories: tuple[MemoryMeasure, ...]

    @property
    def error_fraction(self) -> float | None:
        """Predicted over measured step time, minus 1: negative where the prediction is too fast."""
        return None if self.step is None else self.report.step_time_s / self.step.step_time_s - 1

    @property
    def memory(self) -> MemoryMeasure | None:
        """First measured peak: of tensors before that of the allocator, of the fullest ranks before others."""
        return self.memories[0] if self.memories else None

    @property
    def predicted_memory_bytes(self) -> float:
        """Predicted peak of the ranks and kind measured first; of the fullest rank if none was measured."""
        return float(self.report.peak_memory_bytes) if self.memory is None else self.predicted_peak(self.memory)

    @property
    def memory_error_fraction(self) -> float | None:
        """Predicted over measured peak memory, minus 1, of the first measure."""
        return None if self.memory is None else self.memory_error(self.memory)

    def predicted_peak(self, measure: MemoryMeasure) -> float:
        """Return the predicted peak bytes for the ranks and kind of an element of ``memories``."""
        return predicted_memory(self.report, self.statement, measure, framework_of(self.run))

    def memory_error(self, measure: MemoryMeasure) -> float:
        """Return predicted over measured peak memory, minus 1, for an element of ``memories``."""
        return self.predicted_peak(measure) / measure.peak_bytes - 1

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Assumptions, and measured values that could not be compared."""
        return (*self.statement.assumptions, *not_compared(self.run, self.memories))

    @property
    def scored(self) -> bool:
        """True if the run counts for accuracy: complete, measured, valid, and on an accelerator with constants
        of its own."""
        own = is_scored(self.statement.problem.hardware.name)
        return self.step is not None and self.run.grade == "A" and own and not UNSCORED_FLAGS & set(self.run.flags)

    @property
    def decides_fit(self) -> bool:
        """True if the run shows whether the plan fits: it ran, or ran out of memory."""
        return self.run.measured.status in ("ok", "oom") and not OOM_FLAGS & set(self.run.flags)

    @property
    def has_experts(self) -> bool:
        """True if the model has routed experts."""
        return self.statement.problem.model.has_experts

    @property
    def generation(self) -> str:
        """Architecture of the accelerator."""
        return generation_of(self.statement.problem.hardware)

    @property
    def measured_rates(self) -> dict[str, float | None]:
        """Rates of the measured step in the source's way of counting, and the utilisation to compare with the
        prediction's."""
        if self.step is None:
            return dict.fromkeys((*self.predicted_rates, "mfu"))
        seconds = self.step.step_time_s
        mfu = self.report.mfu * self.report.step_time_s / seconds
        return {**rates(self.statement, seconds, framework_of(self.run).flops), "mfu": mfu}

    @property
    def predicted_rates(self) -> dict[str, float]:
        """Rates of the predicted step in the source's way of counting."""
        return rates(self.statement, self.report.step_time_s, framework_of(self.run).flops)


@dataclass(frozen=True, slots=True)
class Unstated:
    """Run that was not simulated, with the reason."""

    run: Run
    reason: str


@dataclass(frozen=True, slots=True)
class Validation:
    """All runs of a file, compared or not."""

    comparisons: tuple[Comparison, ...]
    unstated: tuple[Unstated, ...]
    rejected: tuple[str, ...]


def compare(file: RunFile, progress: Callable[[int], None] | None = None, stacks: bool = True) -> Validation:
    """Compare every run of a file.

    Args:
        file: the runs.
        progress: called with the number of runs done.
        stacks: use the constants fitted to each framework (docs/accuracy.md says on which runs).
    """
    comparisons, unstated = [], []
    for done, run in enumerate(file.runs, start=1):
        try:
            comparisons.append(compare_run(run, file.told.get(run.id, ()), stacks))
        except UnstatedError as error:
            unstated.append(Unstated(run, str(error)))
        except (ArithmeticError, MemoryError) as error:
            unstated.append(Unstated(run, f"its numbers are beyond what can be computed: {error}"))
        if progress is not None:
            progress(done)
    return Validation(tuple(comparisons), tuple(unstated), tuple(str(error) for error in file.rejected))


def compare_run(run: Run, notes: tuple[str, ...] = (), stacks: bool = True) -> Comparison:
    """Simulate a run and compare it.

    Raises:
        UnstatedError: the run cannot be stated as a problem and a plan.
    """
    statement = state(run, notes, stacks=stacks)
    report = simulate(statement.problem, statement.plan)
    if report.step_time_ns <= 0 or report.peak_memory_bytes < 0:
        raise UnstatedError("its numbers leave the range of 64-bit integers")
    step = step_measure(run, statement)
    if step is not None and not 0 < step.step_time_s < LONGEST_STEP_S:
        raise UnstatedError(f"what it measured means a step of {step.step_time_s:.3g} s ({step.how})")
    return Comparison(run, statement, report, step, memory_measures(run, statement))


def scored(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """Select the comparisons that count for accuracy."""
    return [comparison for comparison in comparisons if comparison.scored]
