"""The program over blocks: the optimum of the full form, of brute force and of the search, on every backend."""

from __future__ import annotations

import random
import re
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path

import pulp
import pytest

from milpplan import load_hardware, load_model, simulate, solve
from milpplan.errors import InvalidInputError
from milpplan.optimize import PlanResult, SolveOptions
from milpplan.optimize.milp import MAX_ROW_MAGNITUDE, write_mps
from milpplan.optimize.milp.block_program import block_program, solve_block_program
from milpplan.problem import Job, Problem, Space
from tests.amounts import long_but
from tests.optimize.brute_force import Best, brute_force
from tests.optimize.problems import batch_range, random_problem
from tests.oracles.whole_program import solve_monolithic

BACKENDS = ("cpsat", "cbc", "highs", "scip")


@cache
def searched(seed: int, kind: str = "free") -> tuple[PlanResult, Best | None]:
    """The problem of a seed, solved by the search and by brute force."""
    problem = random_problem(seed, kind=kind)
    return solve(problem, gap=0.0, any_chunks=False), brute_force(problem)


def assert_is_optimum(result: PlanResult, best: Best, backend: str) -> None:
    """The program's plan is as good as that of brute force, and its optimum is the plan's step up to the units."""
    answer = solve_block_program(result, SolveOptions(backend=backend))
    assert answer.proved
    assert answer.step_time_ns == best.value
    assert best.value - answer.slack_ns <= answer.optimum_ns <= best.value
    assert answer.agrees
    report = simulate(result.problem, answer.plan)
    assert report.fits
    largest = max(result.problem.job.global_batch_values)
    assert report.step_time_ns * largest / answer.plan.layout.global_batch_size == best.value


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["free", "uniform"])
@pytest.mark.parametrize("count", long_but((4,), (4, 8)))
def test_short_form_is_brute_force(backend: str, kind: str, count: int) -> None:
    """From the search's plan, blocks and open layouts have the optimum of brute force."""
    for seed in range(700, 700 + count):
        result, best = searched(seed, kind)
        if best is not None:
            assert_is_optimum(result, best, backend)


@pytest.mark.parametrize("backend", long_but(("highs",), BACKENDS))
@pytest.mark.parametrize("count", long_but((2,), (2, 4)))
def test_short_form_is_the_full_form(backend: str, count: int) -> None:
    """Rows for every legal layout, and no bound at all, lead to the same optimum."""
    for seed in range(700, 700 + count):
        result, best = searched(seed)
        full = solve_monolithic(result.problem, backend=backend, gap=0.0)
        assert (full.plan is None) == (best is None)
        if best is not None:
            assert full.step_time_ns == solve_block_program(result, SolveOptions(backend=backend)).step_time_ns


@pytest.mark.parametrize("backend", long_but(("cpsat",), BACKENDS))
@pytest.mark.parametrize("kind", long_but(("uniform",), ("free", "uniform")))
def test_a_poor_incumbent_is_improved(backend: str, kind: str) -> None:
    """From a plan up to twice as slow as the best, the program finds the best plan by itself."""
    improved = 0
    for seed in range(720, 726):
        result, best = searched(seed, kind)
        if best is None:
            continue
        loose = solve(result.problem, gap=0.5, any_chunks=False)
        assert loose.report is not None
        assert_is_optimum(loose, best, backend)
        improved += loose.report.step_time_ns > best.step_time_ns
    assert improved


@pytest.mark.parametrize("count", long_but((2,), (2, 4)))
def test_batches_and_shared_settings(count: int) -> None:
    """The optimum is that of the search where the batch varies, and where all stages share a recompute setting."""
    for seed in range(740, 740 + count):
        problem = random_problem(seed)
        for changed in (
            random_problem(seed, global_batch_size=batch_range(random.Random(seed))),
            problem.model_copy(update={"space": problem.space.model_copy(update={"recompute_counts": "block"})}),
        ):
            result = solve(changed, gap=0.0, any_chunks=False)
            if result.plan is not None:
                answer = solve_block_program(result)
                assert answer.agrees
                assert result.report is not None
                assert answer.plan.layout.global_batch_size in changed.job.global_batch_values


def preset_result(kind: str) -> PlanResult:
    """The answer of a small job of presets."""
    job = Job(num_gpus=16, global_batch_size=32, sequence_length=4096)
    space = Space(kind="uniform" if kind == "uniform" else "free")
    model, hardware = load_model("llama3-8b"), load_hardware("dgx-h100")
    return solve(Problem(model=model, hardware=hardware, job=job, space=space), any_chunks=False)


@pytest.mark.parametrize("kind", long_but(("uniform",), ("uniform", "free")))
def test_presets_agree_and_can_be_written(kind: str, tmp_path: Path) -> None:
    """A job of presets agrees with its search, its rows are small, and CBC alone finds the optimum in the file."""
    answer = solve_block_program(preset_result(kind))
    assert answer.agrees
    assert answer.unit_ns * answer.program.num_variables > 0
    assert answer.program.max_row_magnitude() < MAX_ROW_MAGNITUDE
    assert "[tp=8]" in answer.program.variable_names
    assert "one_layout" in answer.program.rows.names
    out = tmp_path / "solution.txt"
    mps = write_mps(answer.program, tmp_path / "plan.mps")[0]
    command = [pulp.PULP_CBC_CMD.pulp_cbc_path, str(mps), "ratio", "0", "solve", "solution", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    first_line = out.read_text().splitlines()[0]
    assert first_line.startswith("Optimal")
    assert round(float(first_line.split()[-1])) * answer.unit_ns == answer.optimum_ns


@pytest.mark.long
def test_spaces_that_are_not_split_whole_have_a_program() -> None:
    """Blocks of layouts whose bounds rise above the answer need no row of each layout."""
    job = Job(num_gpus=2048, global_batch_size=15_360, sequence_length=4096)
    model, hardware = load_model("deepseek-v3"), load_hardware("dgx-h100")
    problem = Problem(model=model, hardware=hardware, job=job, space=Space(kind="uniform"))
    result = solve(problem, gap=1e-4, simplest=False, any_chunks=False)
    assert result.layouts is not None
    assert result.layouts.closed.state.whole.any()
    assert solve_block_program(result).agrees


def test_units_stand_in_the_name() -> None:
    """The program before any solve states its units, which are fine."""
    result = preset_result("uniform")
    program = block_program(result)
    unit = int(re.findall(r"units of (\d+) ns", program.name)[0])
    assert result.report is not None
    assert unit <= 1e-5 * result.report.step_time_ns


def test_what_it_does_not_state_is_refused() -> None:
    """No plan, and other objectives, are refused by name."""
    result = preset_result("uniform")
    with pytest.raises(InvalidInputError, match="without a plan"):
        solve_block_program(replace(result, plan=None))
    job = result.problem.job.model_copy(update={"objective": "gpu_hours", "training_tokens": 1.0})
    with pytest.raises(InvalidInputError, match="gpu_hours"):
        solve_block_program(replace(result, problem=result.problem.model_copy(update={"job": job})))
