"""The monolithic program: the same optimum as the decomposed search, brute force and other solvers."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pulp
import pytest

from milpplan import Layout, load_hardware, load_model, simulate, solve
from milpplan.errors import InvalidInputError
from milpplan.optimize.milp import (
    DEGREES,
    MAX_ROW_MAGNITUDE,
    Degrees,
    IntArray,
    Limits,
    Program,
    ProgramBuilder,
    Solution,
    backends,
    exponents,
    primes_of,
    violations,
    whole_program,
    write_lp,
    write_mps,
)
from milpplan.optimize.milp.backends import backend as backend_named
from milpplan.optimize.milp.whole_program import monolithic_program
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem import Job, Problem
from milpplan.simulation import column_value
from tests.amounts import first, long_but
from tests.optimize.brute_force import Best, brute_force, naive_layouts
from tests.optimize.problems import FAMILIES, batch_range, random_problem
from tests.oracles import whole_program as oracle
from tests.oracles.whole_program import solve_monolithic

BACKENDS = ("cpsat", "cbc", "highs", "scip")


@cache
def enumerated(seed: int, family: str | None = None) -> tuple[Problem, Best | None]:
    """The problem of a seed and its optimum, worked out once for all backends."""
    problem = random_problem(seed, family=family)
    return problem, brute_force(problem)


def assert_monolith_is_right(problem: Problem, best: Best | None, backend: str) -> None:
    """To the nanosecond: proved optimal and equal to brute force, or infeasible like it."""
    result = solve_monolithic(problem, backend=backend, gap=0.0)
    if best is None:
        assert result.status == "infeasible"
        assert result.plan is None
        return
    assert result.status == "optimal"
    assert result.step_time_ns == best.value == result.bound_ns
    assert result.plan is not None
    report = simulate(problem, result.plan)
    assert report.fits
    largest = max(problem.job.global_batch_values)
    assert report.step_time_ns * largest / result.plan.layout.global_batch_size == best.value


def assert_monolith_agrees(candidates: Iterable[Problem], count: int) -> None:
    """With the default gap, for the first ``count`` problems that have at most six layouts."""
    tried = 0
    for problem in candidates:
        if tried == count:
            return
        if len(layout_space(problem)) > 6:
            continue
        tried += 1
        best, found = brute_force(problem), solve_monolithic(problem)
        assert (best is None) == (found.plan is None)
        if best is not None:
            assert found.step_time_ns is not None
            assert float(found.step_time_ns) == pytest.approx(best.value, rel=1e-9)
    assert tried == count


@pytest.mark.parametrize("backend", long_but(("cpsat",), BACKENDS))
@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.long) for block in (1, 2, 3))])
def test_monolith_is_brute_force(backend: str, block: int) -> None:
    """On 20 random problems every backend proves the optimum of brute force, to the nanosecond; most are long."""
    for seed in range(10 * block, 10 * block + 5):
        assert_monolith_is_right(*enumerated(seed, FAMILIES[seed % len(FAMILIES)]), backend)


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_monolith_is_brute_force_often(backend: str) -> None:
    """The same on 300 more problems."""
    for seed in range(20_000, 20_300):
        assert_monolith_is_right(*enumerated(seed), backend)


@pytest.mark.parametrize("backend", long_but(("highs",), BACKENDS))
def test_monolith_is_the_decomposed_search(backend: str) -> None:
    """One program for everything, and one program a layout, give the same status and the same optimum."""
    for seed in range(100, 104):
        problem = random_problem(seed)
        whole, parts = solve_monolithic(problem, backend, gap=0.0), solve(problem, backend=backend, gap=0.0)
        assert (whole.plan is None) == (parts.plan is None)
        if parts.report is not None:
            assert whole.step_time_ns == parts.report.step_time_ns


@pytest.mark.long
def test_batch_range() -> None:
    """Where the batch varies, the monolith finds the least step time per token."""
    for seed in range(200, 205):
        problem = random_problem(seed, global_batch_size=batch_range(random.Random(seed)))
        best = brute_force(problem)
        result = solve_monolithic(problem, gap=1e-9)
        assert (result.plan is None) == (best is None)
        if best is not None:
            assert result.step_time_ns == pytest.approx(best.value, rel=1e-9)


class Liar:
    """A solver that always says that nothing is left."""

    name = "liar"

    def version(self) -> str:
        """None."""
        return "0"

    def solve(self, program: Program, limits: Limits) -> Solution:
        """Say so."""
        return Solution("infeasible", None, None, None, "INFEASIBLE", self.name, 0.0)


def test_a_wrong_proof_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that wrongly proves plans away is contradicted by the witness, whose plans then count."""
    monkeypatch.setitem(sys.modules, "milpplan.optimize.milp.liar", SimpleNamespace(Liar=Liar))
    monkeypatch.setitem(backends.BACKENDS, "liar", "liar.Liar")
    monkeypatch.setitem(oracle.WITNESSES, "liar", "cpsat")
    for seed in range(600, 604):
        assert_monolith_is_right(*enumerated(seed), "liar")


def solved(problem: pulp.LpProblem) -> float | None:
    """Optimum found by CBC alone; None if it is infeasible."""
    problem.solve(pulp.COIN_CMD(path=pulp.PULP_CBC_CMD.pulp_cbc_path, msg=False, gapRel=0))
    if problem.sol_status == pulp.LpSolutionInfeasible:
        return None
    assert problem.sol_status == pulp.LpSolutionOptimal
    return float(pulp.value(problem.objective) or 0.0)


@pytest.mark.parametrize("seed", first(3, range(300, 306)))
def test_exported_program_has_the_same_optimum(seed: int, tmp_path: Path) -> None:
    """The MPS file read by PuLP and the LP file read by CBC itself have the optimum found here."""
    program = monolithic_program(random_problem(seed))
    own = backend_named("highs").solve(program, Limits())
    _, read = pulp.LpProblem.fromMPS(str(write_mps(program, tmp_path / "monolith.mps")[0]))
    assert solved(read) == own.objective
    lp, out = write_lp(program, tmp_path / "monolith.lp")[0], tmp_path / "solution.txt"
    command = [pulp.PULP_CBC_CMD.pulp_cbc_path, str(lp), "ratio", "0", "solve", "solution", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    first_line = out.read_text().splitlines()[0]
    if own.status == "infeasible":
        assert "nfeasible" in first_line
    else:
        assert first_line.startswith("Optimal")
        assert round(float(first_line.split()[-1])) == own.objective


@pytest.mark.parametrize("count", long_but((5,), (5, 12)))
def test_exported_program_bounds_the_optimum(count: int) -> None:
    """Its optimum, in the units that its name states, is a lower bound of that of brute force."""
    for seed in range(320, 320 + count):
        problem = random_problem(seed)
        program, best = monolithic_program(problem), brute_force(problem)
        solution = backend_named("cpsat").solve(program, Limits())
        base, unit = (int(word) for word in re.findall(r"\d+", program.name))
        if best is not None:
            assert solution.objective is not None
            assert base + unit * solution.objective <= best.step_time_ns


@pytest.mark.parametrize("seed", first(4, range(400, 410)))
def test_rows_are_small_enough_for_every_solver(seed: int) -> None:
    """No row of the monolith is larger than what CP-SAT is trusted with, and every layout has its literal."""
    problem = random_problem(seed)
    program = monolithic_program(problem)
    assert program.max_row_magnitude() < MAX_ROW_MAGNITUDE
    literals = [name for name in program.variable_names if name.startswith("layout[")]
    assert len(literals) == len(layout_space(problem).columns)


def encoded(degrees: Degrees, width: int, values: dict[str, int]) -> IntArray:
    """Values of the degrees and their literals."""
    point = np.zeros(width, dtype=np.int64)
    for name, value in values.items():
        literals = degrees.literals[name]
        point[literals.start - 1] = value
        point[literals[int(np.flatnonzero(degrees.values[name] == value)[0])]] = 1
    return point


def degrees_of(layout: Layout) -> dict[str, int]:
    """A layout in the words of the degree variables."""
    values = {name: getattr(layout, name) for name in DEGREES}
    return {name: column_value(name, v) for name, v in values.items()}


@pytest.mark.parametrize("seed", first(2, range(500, 510)))
def test_degree_rows_are_the_layout_rules(seed: int) -> None:
    """The rows over degrees alone let through exactly the layouts that break no rule."""
    problem, rng = random_problem(seed), random.Random(seed)
    builder = ProgramBuilder("degrees")
    degrees = Degrees.add(problem, builder)
    program = builder.build()
    unused = "gpipe" if "1f1b" in problem.space.schedule else None
    every = problem.model_copy(update={"space": problem.space.model_copy(update={"vpp_values": "all"})})
    legal = [degrees_of(one) for one in naive_layouts(every) if one.pp > 1 or one.schedule != unused]
    assert legal
    for values in legal:
        assert violations(program, encoded(degrees, program.num_variables, values)) == []
    let_through = 0
    for _ in range(400):
        near = dict(rng.choice(legal))
        for name in rng.sample(DEGREES, rng.randint(1, 3)):
            near[name] = int(rng.choice(degrees.values[name].tolist()))
        passes = not violations(program, encoded(degrees, program.num_variables, near))
        assert passes == (near in legal)
        let_through += passes
    assert let_through < 400


def test_products_are_sums_of_exponents() -> None:
    """360 = 2^3 * 3^2 * 5, and the exponents of a product are those of its factors added."""
    values = np.array([360, 1, 8, 45])
    assert primes_of(values) == [2, 3, 5]
    assert exponents(values, 2).tolist() == [3, 0, 3, 0]
    assert exponents(values, 3).tolist() == [2, 0, 0, 2]
    assert exponents(values, 5).tolist() == [1, 0, 0, 1]


def test_large_problems_are_refused() -> None:
    """A real problem is refused with what is too large, how large it may be, and what to do."""
    job = Job(num_gpus=512, global_batch_size=512, sequence_length=8192)
    hardware = load_hardware("dgx-h100")
    problem = Problem(model=load_model("llama3-70b"), hardware=hardware, job=job)
    with pytest.raises(InvalidInputError, match="legal layouts") as caught:
        monolithic_program(problem)
    assert caught.value.expected == "At most 400."
    assert "solve()" in caught.value.do


def test_large_menus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """So is a problem with few layouts whose menus are long."""
    monkeypatch.setattr(whole_program, "MAX_ITEMS", 10)
    with pytest.raises(InvalidInputError, match="items"):
        monolithic_program(random_problem(0))


def test_other_spaces_are_refused() -> None:
    """The uniform space, a deadline and other objectives are refused by name."""
    with pytest.raises(InvalidInputError, match="space=uniform"):
        solve_monolithic(random_problem(1, kind="uniform"))
    problem = random_problem(2)
    changes = {"deadline_s": 1.0, "training_tokens": 1.0, "objective": "gpu_hours"}
    with pytest.raises(InvalidInputError, match="gpu_hours"):
        solve_monolithic(problem.model_copy(update={"job": problem.job.model_copy(update=changes)}))
