"""Write, solve and check the program over blocks of README's problem and of the five large problems.

    python -m benchmarks.one_program                        all problems, spaces and backends; writes the table
    python -m benchmarks.one_program readme/free gpt3-1k/uniform --print

Every answer is compared with that of the search. The MPS file of the last program is also solved by CBC's binary
and, read by PuLP, by the HiGHS of SciPy: no code of milpplan takes part in these two.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np
import pulp
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from benchmarks.problems import CASES, Case, Kind
from benchmarks.tables import markdown_table, measured_on, replace_section
from milpplan import solve
from milpplan.optimize.milp.block_program import solve_block_program
from milpplan.optimize.milp.write_program import write_mps
from milpplan.optimize.records import ProgramAnswer, SolveOptions

README: Final = Case("readme", "llama3-70b", "dgx-h100", 512, 512, 8192)
BACKENDS: Final = ("cpsat", "cbc", "highs")
SPACES: Final[tuple[Kind, ...]] = ("uniform", "free")
GAP: Final = 1e-4
"""Tolerance of the searches: the program's optimum lies between their bounds and their plans."""
LIMIT_S: Final = 180.0
"""Time limit of every program, its statement included, and of every solver of a file."""
RESULTS: Final = Path(__file__).parent / "results" / "one_program.md"
HEADER: Final = (
    *("problem", "space", "solver", "rows", "columns", "blocks", "open layouts", "splits", "programs"),
    *("statement, s", "solver, s", "optimum, s", "search's plan, s", "equal", "file by CBC", "file by HiGHS"),
)


def cbc_alone(path: Path) -> float | None:
    """Optimum of an MPS file by CBC's own binary; None where it does not finish."""
    out = path.with_suffix(".txt")
    words = [pulp.PULP_CBC_CMD.pulp_cbc_path, str(path), "ratio", "0", "sec", str(LIMIT_S), "solve", "solution"]
    subprocess.run([*words, str(out)], check=True, capture_output=True)
    first_line = out.read_text().splitlines()[0]
    return float(first_line.split()[-1]) if first_line.startswith("Optimal") else None


def highs_alone(path: Path) -> float | None:
    """Optimum of an MPS file by the HiGHS of SciPy; None where it does not finish."""
    variables, problem = pulp.LpProblem.fromMPS(str(path))
    columns = list(variables.values())
    index = {variable: column for column, variable in enumerate(columns)}
    costs = np.zeros(len(columns))
    for variable, cost in problem.objective.items():
        costs[index[variable]] = cost
    entries, low, high = [], [], []
    for row, constraint in enumerate(problem.constraints.values()):
        entries += [(row, index[variable], factor) for variable, factor in constraint.items()]
        side = -constraint.constant
        low.append(-np.inf if constraint.sense == pulp.LpConstraintLE else side)
        high.append(np.inf if constraint.sense == pulp.LpConstraintGE else side)
    rows, inside, factors = zip(*entries, strict=True)
    matrix = csr_matrix((factors, (rows, inside)), shape=(len(low), len(columns)))
    lower = [-np.inf if variable.lowBound is None else variable.lowBound for variable in columns]
    upper = [np.inf if variable.upBound is None else variable.upBound for variable in columns]
    answer = milp(
        costs,
        constraints=LinearConstraint(matrix, low, high),
        integrality=[variable.cat == pulp.LpInteger for variable in columns],
        bounds=Bounds(lower, upper),
        options={"mip_rel_gap": 0.0, "time_limit": LIMIT_S},
    )
    return float(answer.fun) if answer.status == 0 else None


def checked(answer: ProgramAnswer, folder: Path) -> tuple[str, str]:
    """Say whether the two solvers find the optimum of the program in its MPS file."""
    path = write_mps(answer.program, folder / "plan.mps")[0]
    words = []
    for alone in (cbc_alone, highs_alone):
        started = time.perf_counter()
        optimum = alone(path)
        seconds = time.perf_counter() - started
        if optimum is None:
            words.append(f"none in {seconds:.0f} s")
        else:
            equal = round(optimum) * answer.unit_ns == answer.optimum_ns
            words.append(f"{'equal' if equal else 'OTHER'}, {seconds:.1f} s")
    return words[0], words[1]


def row(case: Case, kind: Kind, answer: ProgramAnswer, files: tuple[str, str]) -> list[str]:
    """One row of the table."""
    counts = answer.program.num_rows, answer.program.num_variables, answer.num_blocks, answer.num_open
    return [
        case.name,
        kind,
        answer.backend,
        *(f"{count:,}" for count in (*counts, answer.num_cases)),
        str(answer.rounds),
        f"{answer.wall_time_s - answer.solver_s:.1f}",
        f"{answer.solver_s:.1f}",
        f"{answer.optimum_ns / 1e9:.6f}" if answer.proved else f">= {answer.optimum_ns / 1e9:.6f}",
        f"{answer.searched_ns / 1e9:.6f}",
        "yes" if answer.agrees else "no" if answer.proved else "stopped",
        *files,
    ]


def rows_of(case: Case, kind: Kind) -> list[list[str]]:
    """Solve one problem in one space by all backends, and the file of the last program."""
    result = solve(case.problem(kind), gap=GAP, simplest=False, any_chunks=False)
    rows, files = [], ("", "")
    for backend in BACKENDS:
        answer = solve_block_program(result, SolveOptions(backend=backend), LIMIT_S)
        if backend == BACKENDS[-1]:
            with tempfile.TemporaryDirectory() as folder:
                files = checked(answer, Path(folder))
        rows.append(row(case, kind, answer, files))
        print(" | ".join(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Measure what was asked for, and write or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="PROBLEM/SPACE")
    parser.add_argument("--print", action="store_true", help="do not write the table")
    asked = parser.parse_args()
    problems = {"readme": README, **CASES}
    names = asked.cases or [f"{name}/{kind}" for kind in SPACES for name in problems]
    rows = []
    for text in names:
        name, _, kind = text.partition("/")
        rows += rows_of(problems[name], "uniform" if kind == "uniform" else "free")
    table = markdown_table(HEADER, rows)
    if asked.print:
        print(table)
        return
    machine = ", ".join(f"{name} {value}" for name, value in measured_on().items())
    replace_section(RESULTS, "one-program", f"{table}\n\n{machine}; one thread a solver.")


if __name__ == "__main__":
    main()
