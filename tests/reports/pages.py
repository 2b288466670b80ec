"""Small plans whose pages and traces are tested, each made once."""

from __future__ import annotations

from functools import cache

from milpplan import Overview, Plan, PlanResult, Problem, plan_overview, solve
from milpplan.problem import Layout, Schedule
from milpplan.reports.documents import ResultDocument, result_document
from tests.simulation.cases import even_plan, problem_of
from tests.small import small_problem


@cache
def solved() -> PlanResult:
    """A proved result of the free space on four GPUs."""
    return solve(small_problem(space={"kind": "free"}))


@cache
def document() -> ResultDocument:
    """Its document, as ``milpplan solve --out`` writes it."""
    return result_document(solved(), 1e-3)


@cache
def shown() -> Overview:
    """Its overview, with alternatives."""
    result = solved()
    assert result.plan is not None
    return plan_overview(result.problem, result.plan, time_limit_s=2.0)


@cache
def piped(schedule: Schedule = "interleaved", pp: int = 4, num_micro_batches: int = 8) -> tuple[Problem, Plan]:
    """A pipeline of Llama-3 8B with two virtual stages a rank where the schedule has them."""
    problem = problem_of("llama3-8b", "dgx-h100", sequence_length=2048)
    vpp = 1 if schedule in ("1f1b", "gpipe", "zb-h1") else 2
    layout = Layout(
        tp=2, pp=pp, dp=2, vpp=vpp, schedule=schedule, zero_stage=1, global_batch_size=2 * num_micro_batches,
        overlap_grad_reduce=True, overlap_param_gather=True, sequence_parallel=True,
    )  # fmt: skip
    return problem, even_plan(problem, layout)
