"""The fewest accelerators on which a job has a plan, looked for from one upwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from milpplan.optimize.deadline import Deadline
from milpplan.optimize.infeasibility import explain
from milpplan.optimize.nearby_problems import Effort
from milpplan.optimize.result import PlanResult, SolveOptions
from milpplan.optimize.solve import fewest
from milpplan.problem.problem import MAX_GPUS, Problem, Range

WIDENING = 8
"""How many times as far each span of numbers reaches as the one before."""
REASON_LAYOUTS = 1_500_000
"""Layouts listed to say what the largest number that was refused lacks."""


@dataclass(frozen=True, slots=True)
class Fewest:
    """The answer. ``result`` is of the span that holds it, or of the last one tried; ``refused``: the smaller
    numbers of accelerators proved to have no plan, ``why`` what is missing with the largest of them where there
    was time to say; ``open``: the smaller ones of which that is not proved; ``whole_nodes``: beyond one node only
    whole nodes were tried, and nothing is proved of the numbers between them."""

    result: PlanResult
    refused: tuple[int, ...]
    open: tuple[int, ...]
    why: str | None
    whole_nodes: bool

    @property
    def num_gpus(self) -> int | None:
        """The fewest; None where none was found."""
        return None if self.result.plan is None else self.result.plan.layout.num_gpus


def fewest_gpus(problem: Problem, options: SolveOptions | None = None, *, widen: bool = True) -> Fewest:
    """The fewest accelerators, of the numbers tried, whose best plan fits, and meets the deadline if the job has
    one.

    Args:
        problem: its ``num_gpus`` are the candidates; with ``widen`` what a cluster can have: every number up
            to one node, then whole nodes.
        options: as for ``solve``; the time limit holds for all numbers together.
        widen: whether to look beyond the problem's own numbers.
    """
    options = options or SolveOptions()
    deadline = Deadline.after(options.time_limit_s)
    tried: list[Range | int] = []

    def counts() -> Iterator[int]:
        for span in _spans(problem.hardware.gpus_per_node) if widen else (problem.job.num_gpus,):
            tried.append(span)
            yield from _on(problem, span).job.num_gpus_values

    result = fewest(_on(problem, 1), options, counts())
    num_gpus = None if result.plan is None else result.plan.layout.num_gpus
    span = next((span for span in tried if num_gpus in _on(problem, span).job.num_gpus_values), tried[-1])
    refused, open_ = result.details["refused"], result.details["open_counts"]
    below = [count for count in refused if num_gpus is None or count < num_gpus]
    why = None
    if below and not deadline.passed and not result.message:
        with suppress(KeyboardInterrupt):
            why = _reason(problem, below[-1], options, deadline)
    return Fewest(replace(result, problem=_on(problem, span)), tuple(below), open_, why, widen)


def _on(problem: Problem, num_gpus: int | Range) -> Problem:
    job = problem.job.model_copy(update={"num_gpus": num_gpus, "objective": "num_gpus"})
    return problem.model_copy(update={"job": job})


def _spans(per_node: int) -> Iterator[Range]:
    """Up to one node by one, then whole nodes."""
    yield Range(minimum=1, maximum=per_node, step=1)
    first, last = 2 * per_node, WIDENING * per_node
    while first <= MAX_GPUS:
        last = min(last, MAX_GPUS // per_node * per_node)
        yield Range(minimum=first, maximum=last, step=per_node)
        first, last = last + per_node, WIDENING * last


def _reason(problem: Problem, count: int, options: SolveOptions, deadline: Deadline) -> str:
    """Return what a number that was refused lacks."""
    job = _on(problem, count).job.model_copy(update={"objective": "step_time_per_token"})
    return explain(
        problem.model_copy(update={"job": job}), options.forbid, Effort(REASON_LAYOUTS, deadline.until)
    ).seen
