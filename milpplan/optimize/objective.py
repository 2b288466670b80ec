"""Objective of a search: the step time of a layout times a weight, up to a limit."""

from __future__ import annotations

import numpy as np

from milpplan.problem import Problem
from milpplan.simulation import FloatArray, LayoutColumns
from milpplan.units import NS_PER_S, gpu_hours


def objective_weights(problem: Problem, columns: LayoutColumns) -> tuple[FloatArray, FloatArray]:
    """Return weight and limit (ns) of each layout's step time.

    step_time_per_token and num_gpus: weight 1 / sequences a step, relative to the largest batch, so that a fixed
    batch gives the step time itself. gpu_hours: GPU-hours of the whole run per nanosecond of step. The limit is
    the longest step that meets the deadline.
    """
    job = problem.job
    batch = columns.global_batch_size.astype(np.float64)
    limit = np.full(len(columns), np.inf)
    if job.deadline_s is not None and job.training_tokens is not None:
        steps = job.training_tokens / (batch * job.sequence_length)
        # Whole nanoseconds; a step that meets the deadline exactly must not be lost to rounding.
        limit = np.floor(job.deadline_s / steps * NS_PER_S * (1.0 + 1e-12))
    if job.objective == "gpu_hours":
        assert job.training_tokens is not None
        steps = job.training_tokens / (batch * job.sequence_length)
        return columns.num_gpus * steps / (3600 * NS_PER_S), limit
    largest = max(job.global_batch_values)
    return largest / batch, limit


def threshold(best: FloatArray | float, gap: float, keep_below: float) -> FloatArray:
    """Return the objective from which on layouts cannot improve the incumbent by more than the gap."""
    return np.maximum(np.asarray(best) * (1.0 - gap), keep_below)


def has_one_step_time(problem: Problem) -> bool:
    """Return True if all plans share one number of GPUs and one batch, so that a bound of the objective bounds the
    step time."""
    job = problem.job
    return len(job.num_gpus_values) == 1 and len(job.global_batch_values) == 1


def objective_per_second(problem: Problem) -> float:
    """Return the search's objective of a step of one second; the batch and the number of GPUs are fixed."""
    job = problem.job
    if job.objective != "gpu_hours":
        return NS_PER_S
    assert job.training_tokens is not None
    tokens = job.global_batch_values[0] * job.sequence_length
    return gpu_hours(job.num_gpus_values[0], job.training_tokens, tokens)


def printed_unit(problem: Problem) -> tuple[float, str]:
    """Return the factor from the search's objective to the printed objective, and the name of the latter."""
    job = problem.job
    if job.objective == "gpu_hours":
        return 1.0, "gpu_hours"
    tokens = max(job.global_batch_values) * job.sequence_length
    return 1.0 / NS_PER_S / tokens, "step_time_s_per_token"


def progress_unit(problem: Problem) -> float:
    """Return the factor from the search's objective to ``Progress``'s: seconds of step time, or GPU-hours."""
    return 1.0 if problem.job.objective == "gpu_hours" else 1.0 / NS_PER_S


def on_gpus(problem: Problem, num_gpus: int) -> Problem:
    """Return the problem of the shortest step on a given number of GPUs."""
    job = problem.job.model_copy(update={"num_gpus": num_gpus, "objective": "step_time_per_token"})
    return problem.model_copy(update={"job": job})
