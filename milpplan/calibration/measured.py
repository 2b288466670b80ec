"""Measured steps to fit to, each with the problem and the plan that it ran, and their prediction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from milpplan.calibration.fitting import Theta
from milpplan.errors import InvalidInputError
from milpplan.problem import HardwareSpec, Plan, Problem
from milpplan.simulation import LayoutColumns, plan_step_ns
from milpplan.simulation.layout_costs import layout_costs
from milpplan.units import NS_PER_S
from milpplan.validation import UNSCORED_FLAGS
from milpplan.validation.runs import RunFile, UnstatedError, stack_of, state, step_measure

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Observation:
    """Measured step: ``step_time_s`` seconds for ``plan`` of ``problem``, whose hardware is not yet fitted."""

    id: str
    group: str
    problem: Problem
    plan: Plan
    step_time_s: float
    stack: str = ""
    """Name of the constants of its framework (``milpplan.validation.runs.frameworks``)."""


def observations(
    file: RunFile,
    hardware: HardwareSpec | None = None,
    stacks: bool = False,
    unscored: frozenset[str] = UNSCORED_FLAGS,
) -> tuple[list[Observation], list[str]]:
    """Select the timed runs of a file, and give a reason for each of the others.

    Args:
        file: the runs.
        hardware: replaces the description that a run's own words would choose.
        stacks: use the constants that are already fitted to its framework.
        unscored: flags of runs that are left out.
    """
    timed: list[Observation] = []
    left_out: list[str] = []
    for run in file.runs:
        flags = unscored & set(run.flags)
        if flags:
            left_out.append(f"{run.id}: flagged {', '.join(sorted(flags))}")
            continue
        try:
            statement = state(run, file.told.get(run.id, ()), hardware, stacks)
            measure = step_measure(run, statement)
        except UnstatedError as error:
            left_out.append(f"{run.id}: {error}")
            continue
        except (ArithmeticError, MemoryError) as error:
            left_out.append(f"{run.id}: its numbers are beyond what can be computed ({error})")
            continue
        if measure is None:
            left_out.append(f"{run.id}: no step time was measured")
            continue
        timed.append(
            Observation(run.id, run.group, statement.problem, statement.plan, measure.step_time_s, stack_of(run))
        )
    return timed, left_out


def on_hardware(runs: Iterable[Observation], hardware: HardwareSpec) -> list[Observation]:
    """Replace the description of the observations."""
    return [replace(run, problem=run.problem.model_copy(update={"hardware": hardware})) for run in runs]


class StepPredictor:
    """Simulated step times of observations under constants. Runs that differ only in their layout share the costs
    of their layers, and every answer is cached."""

    def __init__(self, runs: Sequence[Observation]) -> None:
        self.runs = tuple(runs)
        self.measured_s: FloatArray = np.array([run.step_time_s for run in runs], dtype=np.float64)
        grouped: dict[tuple[object, ...], list[int]] = {}
        for index, run in enumerate(runs):
            job = run.problem.job.model_copy(update={"num_gpus": 1, "global_batch_size": 1})
            grouped.setdefault((run.problem.model, run.problem.hardware, job), []).append(index)
        self._members = [np.array(rows) for rows in grouped.values()]
        self._known: dict[Theta, FloatArray] = {}

    @property
    def ids(self) -> tuple[str, ...]:
        """Names of the runs."""
        return tuple(run.id for run in self.runs)

    @property
    def base(self) -> HardwareSpec:
        """Description of the first run."""
        return self.runs[0].problem.hardware

    def part(self, rows: npt.NDArray[np.int64]) -> StepPredictor:
        """Select runs by row."""
        return StepPredictor([self.runs[row] for row in rows])

    def times_s(self, theta: Theta) -> FloatArray:
        """Compute seconds per step of every observation.

        Raises:
            InvalidInputError: a step time left the range of numbers.
        """
        if theta not in self._known:
            times: FloatArray = np.empty(len(self.runs))
            on: dict[HardwareSpec, HardwareSpec] = {}
            for rows in self._members:
                base = self.runs[rows[0]].problem.hardware
                if base not in on:
                    on[base] = theta.on(base)
                times[rows] = self._group(rows, on[base])
            self._known[theta] = times
        return self._known[theta]

    def _group(self, rows: npt.NDArray[np.int64], hardware: HardwareSpec) -> FloatArray:
        runs = [self.runs[row] for row in rows]
        problem = runs[0].problem.model_copy(update={"hardware": hardware})
        costs = layout_costs(problem, LayoutColumns.of([run.plan.layout for run in runs]))
        times = []
        for row, run in enumerate(runs):
            step_ns = plan_step_ns(problem, run.plan, costs.at(row))
            if step_ns <= 0:
                raise InvalidInputError(
                    f"The step of {run.id!r} leaves the range of 64-bit integers.",
                    "Expected numbers of real models and clusters.",
                    "Correct or remove the run.",
                )
            times.append(step_ns / NS_PER_S)
        return np.array(times)
