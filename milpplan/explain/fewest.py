"""Minimum number of accelerators on which a job has a plan, searched upwards from one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from milpplan.optimize.context import Deadline
from milpplan.optimize.infeasibility import explain
from milpplan.optimize.nearby_problems import Effort
from milpplan.optimize.result import PlanResult, SolveOptions
from milpplan.optimize.solve import fewest
from milpplan.problem.problem import MAX_GPUS, Problem, Range

WIDENING = 8
"""Growth factor of the range of numbers from each span to the next."""
REASON_LAYOUTS = 1_500_000
"""Maximum number of layouts listed to explain why the largest refused number has no plan."""


@dataclass(frozen=True, slots=True)
class Fewest:
    """Minimum number of accelerators.

    ``result`` is of the span that holds the number, or of the last one tried. ``refused``: the smaller numbers
    that provably have no plan; ``why``: what the largest of them lacks, if there was time to determine it;
    ``open``: smaller numbers without such a proof; ``whole_nodes``: beyond one node only whole nodes were tried,
    and nothing is proved about the numbers between them.
    """

    result: PlanResult
    refused: tuple[int, ...]
    open: tuple[int, ...]
    why: str | None
    whole_nodes: bool

    @property
    def num_gpus(self) -> int | None:
        """Minimum number; None where no plan was found."""
        return None if self.result.plan is None else self.result.plan.layout.num_gpus


def fewest_gpus(problem: Problem, options: SolveOptions | None = None, *, widen: bool = True) -> Fewest:
    """Find the minimum number of accelerators whose best plan fits and meets the job's deadline, if there is one.

    Args:
        problem: its ``num_gpus`` are the candidates; with ``widen`` the possible sizes of a cluster: every number
            up
            to one node, then whole nodes.
        options: as for ``solve``; the time limit holds for all numbers together.
        widen: search beyond the problem's own numbers.
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
    """Iterate over spans of numbers: up to one node all numbers, then whole nodes."""
    yield Range(minimum=1, maximum=per_node, step=1)
    first, last = 2 * per_node, WIDENING * per_node
    while first <= MAX_GPUS:
        last = min(last, MAX_GPUS // per_node * per_node)
        yield Range(minimum=first, maximum=last, step=per_node)
        first, last = last + per_node, WIDENING * last


def _reason(problem: Problem, count: int, options: SolveOptions, deadline: Deadline) -> str:
    """Describe what a refused number of accelerators lacks."""
    job = _on(problem, count).job.model_copy(update={"objective": "step_time_per_token"})
    return explain(
        problem.model_copy(update={"job": job}), options.forbid, Effort(REASON_LAYOUTS, deadline.until)
    ).seen
