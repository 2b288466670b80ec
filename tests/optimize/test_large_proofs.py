"""Large real problems: a thousand random legal plans each try to beat the reported lower bound."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from milpplan import load_hardware, load_model, solve
from milpplan.optimize.bounds import layout_bounds, uniform_plan
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem import Job, Plan, Problem, Space
from milpplan.simulation import (
    LayoutColumns,
    durations,
    plan_stages,
    rank_memory,
    step_times_ns,
    usable_memory_bytes,
)
from milpplan.simulation.layout_costs import layout_costs
from tests.optimize.problems import random_plan

PLANS = 1000
PLANS_PER_LAYOUT = 10
TIME_LIMIT_S = 8.0
MOST_ITEMS = 8192
MOST_TRIES = 4000


@dataclass(frozen=True)
class Case:
    """A shipped model on shipped hardware."""

    model: str
    hardware: str
    gpus: int
    batch: int
    kind: Any
    precision: Any = "bf16"

    def problem(self) -> Problem:
        """The problem, with all schedules."""
        model = load_model(self.model)
        job = Job(
            num_gpus=self.gpus,
            global_batch_size=self.batch,
            sequence_length=model.default_sequence_length,
            precision=self.precision,
        )
        space = Space(kind=self.kind, schedule=("gpipe", "1f1b", "interleaved"))
        return Problem(model=model, hardware=load_hardware(self.hardware), job=job, space=space)

    def __str__(self) -> str:
        return f"{self.model}-{self.gpus}-{self.hardware}-{self.kind}"


CASES = [
    Case("gpt3-175b", "dgx-a100-80", 1024, 1536, "uniform"),
    Case("gpt3-175b", "dgx-a100-80", 4096, 1536, "uniform"),
    Case("megatron-1t", "dgx-a100-80", 3072, 3072, "uniform"),
    Case("turing-530b", "dgx-a100-80", 2240, 1120, "uniform"),
    Case("llama3-405b", "dgx-h100", 16384, 2048, "uniform", "fp8"),
    Case("llama3-70b", "dgx-h100", 512, 1024, "uniform"),
    Case("mixtral-8x22b", "dgx-h100", 512, 1024, "uniform"),
    Case("deepseek-v3", "dgx-h100", 2048, 4096, "uniform"),
    Case("qwen3-235b-a22b", "dgx-b200", 1024, 2048, "uniform"),
    Case("gpt-oss-120b", "gb200-nvl72", 576, 1152, "uniform"),
    Case("qwen3-32b", "mi300x", 256, 512, "uniform"),
    Case("gemma-7b", "l40s", 256, 512, "uniform"),
    Case("gpt3-175b", "dgx-a100-80", 1024, 1536, "free"),
    Case("megatron-145b", "dgx-a100-80", 1536, 2304, "free"),
    Case("llama3-405b", "dgx-h100", 16384, 2048, "free"),
    Case("llama3-70b", "dgx-h100", 512, 1024, "free"),
    Case("llama2-70b", "dgx-a100-40", 512, 512, "free"),
    Case("mixtral-8x7b", "dgx-h200", 256, 512, "free"),
    Case("mixtral-8x22b", "dgx-h100", 512, 1024, "free"),
    Case("deepseek-v3", "dgx-h100", 2048, 4096, "free"),
    Case("qwen3-30b-a3b", "dgx-b200", 256, 1024, "free"),
    Case("gpt-oss-120b", "gb200-nvl72", 576, 1152, "free"),
    Case("gemma-7b", "l40s", 256, 512, "free"),
    Case("qwen3-32b", "mi300x", 256, 512, "free"),
]


def likely_rows(problem: Problem, columns: LayoutColumns, rng: random.Random) -> list[int]:
    """Layouts in random order, half of them among the most promising, whose memory bound fits."""
    rows = np.array(sorted(rng.sample(range(len(columns)), min(len(columns), 20_000))))
    part = columns.take(rows)
    bounds = layout_bounds(problem, part, layout_costs(problem, part))
    small = part.num_virtual_stages * part.num_micro_batches <= MOST_ITEMS
    good = np.flatnonzero(small & (bounds.memory_bytes <= usable_memory_bytes(problem)))
    order = good[np.argsort(bounds.step_time_ns[good])]
    best, others = order[: len(order) // 20 + 50].tolist(), order.tolist()
    return [int(rows[rng.choice(best if rng.random() < 0.5 else others)]) for _ in range(MOST_TRIES)]


def random_plans(problem: Problem, columns: LayoutColumns, row: int, rng: random.Random) -> list[Plan]:
    """Legal plans of a layout, memory aside."""
    layout = columns.at(row)
    if problem.space.kind == "uniform":
        return [uniform_plan(problem, layout, mode) for mode in problem.space.recompute]
    shares = (0.0, 1.0, rng.random(), None)
    return [random_plan(rng, problem, layout, rng.choice(shares)) for _ in range(PLANS_PER_LAYOUT)]


def fastest_random_plan(problem: Problem, seed: int) -> tuple[int, int]:
    """(least step time in nanoseconds, how many) of random plans that fit."""
    rng, columns = random.Random(seed), layout_space(problem).columns
    capacity, least, tried = usable_memory_bytes(problem), 2**62, 0
    for row in likely_rows(problem, columns, rng):
        layout = columns.at(row)
        costs = layout_costs(problem, columns.take(np.array([row]))).at(0)
        plans = [
            plan_stages(costs, problem.model.layer_kinds, plan)
            for plan in random_plans(problem, columns, row, rng)
        ]
        fitting = [
            durations(stages)
            for stages in plans
            if max(rank.peak_bytes for rank in rank_memory(layout, costs, stages)) <= capacity
        ]
        if fitting:
            least = min(least, int(step_times_ns(layout, costs, np.stack(fitting)).min()))
            tried += len(fitting)
        if tried >= PLANS:
            break
    return least, tried


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_random_plan_beats_the_bound(case: Case) -> None:
    """The bound reported, at the optimum or after seconds, is above none of 1,000 random plans that fit."""
    problem = case.problem()
    result = solve(problem, time_limit_s=None if case.kind == "uniform" else TIME_LIMIT_S)
    assert result.status in ("optimal", "feasible")
    assert result.lower_bound_s is not None
    assert result.report is not None
    assert result.lower_bound_s <= result.report.step_time_s * (1 + 1e-12)
    least, tried = fastest_random_plan(problem, seed=case.gpus)
    assert tried >= PLANS
    assert result.lower_bound_s * 1e9 <= least
