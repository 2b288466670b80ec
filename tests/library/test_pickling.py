"""Everything that ``import milpplan`` and ``import milpplan.graph`` offer crosses the border of a process."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

import milpplan as mp
from milpplan import errors, graph
from tests.small import small_problem


def classes(module: ModuleType) -> set[type[Any]]:
    """The public classes of a module that are no errors."""
    found = {getattr(module, name) for name in module.__all__}
    return {one for one in found if inspect.isclass(one) and not issubclass(one, Exception)}


def plain(value: Any) -> Any:
    """A value as what can be compared: records as their fields, arrays as lists."""
    if isinstance(value, BaseModel):
        return type(value), value.model_dump()
    if dataclasses.is_dataclass(value):
        return type(value), [plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, np.ndarray):
        return value.dtype, value.tolist()
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def planned() -> list[Any]:
    """A record of every class of ``milpplan``, from one small job."""
    problem = small_problem(memory_gib=40)
    result = mp.solve(problem)
    plan = result.plan
    assert plan is not None
    other = mp.solve(problem, forbid=({"tp": plan.layout.tp},)).plan
    assert other is not None
    links, workload = mp.Links(2, 2e11, 2.5e10), mp.workload_of([700, 1500, 2000], 512)
    costs = mp.switch_costs(problem.model, [plan, other], links)
    asked = [problem, problem.model, problem.hardware, problem.job, problem.space, mp.Range(minimum=1, maximum=4)]
    asked.append(mp.Scenario(name="slow", constants={"scale_out_efficiency": {"value": 0.5}}))
    decided = [plan, plan.layout, plan.virtual_stages[0], plan.virtual_stages[0].recompute]
    solved = [result, result.log[0], result.report, mp.SolveOptions(), mp.traffic(problem, plan)]
    bulk = mp.simulate_many(problem, [plan.layout])
    judged = [bulk, mp.gap(problem, plan), mp.explain_plan(problem, plan, time_limit_s=1)]
    switched = [links, costs, mp.best_order(costs), mp.plan_switch(problem.model, plan, other, links)]
    lengths = [workload, mp.solve_lengths(problem, workload, 512, 1, 0.1, 0.5, "highs")]
    return [
        *asked,
        *decided,
        *solved,
        *judged,
        *switched,
        *lengths,
        mp.plan_overview(problem, plan, time_limit_s=0),
        mp.StrategyGraph([np.array([4.0, 1.0])]),
    ]


def chosen() -> list[Any]:
    """A record of every class of ``milpplan.graph``."""
    costs, edges = [np.array([4.0, 1.0]), np.array([2.0, 3.0])], {(0, 1): np.array([[0.0, 5.0], [2.0, 0.0]])}
    chain = graph.StrategyGraph(costs, edges, [np.ones(2)] * 2, 7.0)
    told: list[graph.GraphProgress] = []
    answer = chain.solve(callback=told.append)
    peak = graph.Peak(1.0, {0: np.array([1.0, 2.0])})
    split = graph.split_chain(graph.StrategyGraph(costs, edges), 2, 4, [0.5])
    return [chain, answer, told[0], answer.memory[0], peak, split]


@pytest.mark.parametrize(("module", "records"), [(mp, planned), (graph, chosen)], ids=["milpplan", "graph"])
def test_every_public_record_crosses_borders(module: ModuleType, records: Any) -> None:
    """Each is the same on the other side; a new public class needs an example above."""
    found = records()
    assert {type(one) for one in found} == classes(module)
    for one in found:
        there = pickle.loads(pickle.dumps(one))
        assert plain(there) == plain(one)


@pytest.mark.parametrize("kind", [one for one in vars(errors).values() if inspect.isclass(one)])
def test_every_error_crosses_borders(kind: type[errors.MilpplanError]) -> None:
    """What was seen, what was expected and what to do reach the process that asked."""
    there = pickle.loads(pickle.dumps(kind("seen", "expected", "do")))
    assert type(there) is kind
    assert (str(there), there.seen, there.expected, there.do) == (
        str(kind("seen", "expected", "do")),
        "seen",
        "expected",
        "do",
    )
