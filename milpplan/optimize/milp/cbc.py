"""CBC 2.10, the program that PuLP bundles: floating point, one thread, in a process that can be killed.

PuLP's ``COIN_CMD`` starts the same executable, but it drops the bound, calls a time limit "Optimal", reads values
back with 8 digits, and leaves the process running on Ctrl-C. So this module writes the file (all digits), reads
CBC's binary solution (all bits) and takes the status from the first line that CBC itself writes.
"""

from __future__ import annotations

import math
import re
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from milpplan.errors import SolverError, UnavailableError
from milpplan.optimize.milp.program import FloatArray, Program, Scaling, as_floats, without_wide_integers
from milpplan.optimize.milp.solution import (
    POLL_S,
    Limits,
    Solution,
    Status,
    checked_solve,
    end_if,
    require_exact_floats,
    running,
)

# First words of CBC's solution file. "Integer infeasible" is infeasible too.
_STATUSES: Final[tuple[tuple[str, Status], ...]] = (
    ("Optimal", "optimal"),
    ("Infeasible", "infeasible"),
    ("Integer infeasible", "infeasible"),
    ("Stopped on", "feasible"),
)
_NO_SOLUTION: Final = "no integer solution"
# CBC stopped at ``Limits.relative_gap``: its objective is no bound.
_WITHIN_GAP: Final = "within gap"
_BOUND: Final = re.compile(r"^Lower bound:\s+(\S+)\s*$", re.MULTILINE)
# CBC prints its bound with 3 decimals.
_BOUND_ROUNDING: Final = 1e-3
# A CBC that ignores its limit for this long is killed.
_GRACE_S: Final = 30.0


class CbcBackend:
    """CBC executable inside the PuLP wheel."""

    name = "cbc"

    def version(self) -> str:
        """Return the version that the executable prints."""
        log = _run([_executable(), "-quit"], Limits(), Path.cwd())
        match = re.search(r"^Version:\s*(\S+)", log, re.MULTILINE)
        return f"CBC {match.group(1)}" if match else "CBC"

    def solve(self, program: Program, limits: Limits) -> Solution:
        """Solve with both gaps zero unless ``limits.relative_gap`` says otherwise."""
        require_exact_floats(program, self.name)
        relaxed = without_wide_integers(program, self.name)
        with running("CBC"):
            return checked_solve(
                program, lambda presolve: _solve(relaxed, limits, presolve and limits.presolve), relaxed
            )


def _executable() -> str:
    import pulp

    path = str(pulp.PULP_CBC_CMD.pulp_cbc_path)
    if not Path(path).is_file():
        raise UnavailableError(
            f"PuLP {pulp.__version__} bundles no CBC at {path}.", do="Install pulp>=3.3,<4, or use highs."
        )
    return path


def _solve(program: Program, limits: Limits, presolve: bool) -> Solution:
    start = time.perf_counter()
    scaling = replace(Scaling.of(program, integer=True), cost=1.0)
    with tempfile.TemporaryDirectory(prefix="milpplan-cbc-") as folder:
        directory = Path(folder)
        (directory / "program.mps").write_text(mps_text(program, scaling), encoding="ascii")
        command = [_executable(), "program.mps", *_options(limits, presolve), "-solve"]
        command += ["-solution", "answer.txt", "-saveSolution", "answer.bin", "-quit"]
        log = _run(command, limits, directory)
        answer = directory / "answer.txt"
        if not answer.is_file():
            raise UnavailableError(
                f"CBC wrote no answer to {program.name}. Its log ends: {log[-500:]}",
                "Expected room for its files in the temporary folder.",
                "Let TMPDIR name a folder with room, or use another backend.",
            )
        first, newline, _ = answer.read_text(encoding="ascii", errors="replace").partition("\n")
        if not newline:
            raise _cut_off(answer)
        raw = first.partition(" - objective value")[0].strip()
        status = _status(raw, program)
        has_values = status in ("optimal", "feasible")
        values = _values(directory / "answer.bin", program) * scaling.columns if has_values else None
    return _solution(program, status, values, raw, log, time.perf_counter() - start)


def _cut_off(path: Path) -> UnavailableError:
    """Build the error for an answer that breaks off, as a full disk leaves it."""
    return UnavailableError(
        f"The answer that CBC has written is cut off after {path.stat().st_size} bytes.",
        "Expected room for its files in the temporary folder.",
        "Let TMPDIR name a folder with room, or use another backend.",
    )


def _options(limits: Limits, presolve: bool) -> list[str]:
    options = ["-randomSeed", str(limits.seed), "-randomCbcSeed", str(limits.seed)]
    options += ["-ratio", repr(limits.relative_gap), "-allow", "0", "-timeMode", "elapsed"]
    if limits.time_limit_s is not None:
        options += ["-sec", repr(limits.time_limit_s)]
    if limits.deterministic_limit is not None:
        options += ["-maxNodes", str(int(limits.deterministic_limit))]
    if not presolve:
        options += ["-presolve", "off", "-preprocess", "off"]
    return options


def _run(command: list[str], limits: Limits, directory: Path) -> str:
    """Run CBC and return its log; whatever happens, no process is left behind."""
    kill_after_s = math.inf if limits.time_limit_s is None else 2 * limits.time_limit_s + _GRACE_S
    process = subprocess.Popen(
        command, cwd=directory, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    with process:
        try:
            output = _output(process, kill_after_s, limits.cancelled)
        except BaseException:
            process.kill()
            process.wait()
            raise
    log = output.decode("ascii", errors="replace")
    if process.returncode < 0:
        raise UnavailableError(
            f"CBC was ended by signal {-process.returncode}.",
            "Expected it to end by itself; signal 9 is usually the system's, out of memory.",
            "Free memory, or use another backend.",
        )
    if process.returncode != 0:
        raise SolverError(f"CBC ended with code {process.returncode}. Its log ends: {log[-500:]}")
    return log


def _output(process: subprocess.Popen[bytes], kill_after_s: float, cancelled: Callable[[], bool] | None) -> bytes:
    """Return all that a process prints, until it ends or is cancelled."""
    until = time.monotonic() + kill_after_s
    while True:
        seconds_left = until - time.monotonic()
        wait_s = seconds_left if cancelled is None else min(seconds_left, POLL_S)
        try:
            return process.communicate(timeout=None if wait_s == math.inf else max(wait_s, 0.0))[0]
        except subprocess.TimeoutExpired:
            end_if(cancelled)
            if time.monotonic() >= until:
                raise SolverError(f"CBC ignored its time limit and was killed after {kill_after_s} s.") from None


def _status(raw: str, program: Program) -> Status:
    for beginning, status in _STATUSES:
        if raw.startswith(beginning):
            return "no_solution_found" if _NO_SOLUTION in raw else status
    raise SolverError(
        f"CBC answered {raw!r} to {program.name}.",
        f"One of {', '.join(beginning for beginning, _ in _STATUSES)} expected.",
    )


def _values(path: Path, program: Program) -> FloatArray:
    """Read the column values of a CBC binary solution.

    The file holds two int32 counts, the objective, row activities and duals, column values and reduced costs.
    """
    data = path.read_bytes()
    try:
        num_rows, num_columns = struct.unpack_from("=ii", data)
        values = np.frombuffer(data, np.float64, num_columns, offset=16 + 16 * num_rows).copy()
    except (struct.error, ValueError) as error:
        raise _cut_off(path) from error
    if num_columns != program.num_variables:
        raise SolverError(f"CBC gave {num_columns} values for {program.num_variables} variables.")
    return values


def _solution(
    program: Program, status: Status, values: FloatArray | None, raw: str, log: str, wall_time_s: float
) -> Solution:
    reported = None if values is None else float(program.objective @ values) + program.offset
    bound: float | None = None
    if status == "optimal" and _WITHIN_GAP not in raw:
        bound = reported
    elif status != "infeasible" and (printed := _BOUND.search(log)):
        value = float(printed.group(1))
        bound = value - _BOUND_ROUNDING + program.offset if np.isfinite(value) and abs(value) < 1e50 else None
    return Solution(
        status=status,
        values=values,
        objective=None,
        bound=bound,
        raw_status=raw,
        backend=CbcBackend.name,
        wall_time_s=wall_time_s,
        limit_reached=raw.startswith("Stopped on"),
        reported_objective=reported,
    )


def mps_text(program: Program, scaling: Scaling) -> str:
    """Return the scaled program in free MPS, every number with all its digits; columns x0, ..., rows r0, ..."""
    rows = program.rows
    factor = scaling.rows(rows)
    low, high = (as_floats(rows.lower) * factor).tolist(), (as_floats(rows.upper) * factor).tolist()
    kinds = [_kind(a, b) for a, b in zip(low, high, strict=True)]
    lines = ["NAME program FREE", "ROWS", " N cost", *(f" {kind} r{i}" for i, kind in enumerate(kinds))]
    lines += ["COLUMNS", *_columns(program, scaling, factor), "RHS"]
    for i, (a, b, kind) in enumerate(zip(low, high, kinds, strict=True)):
        side = a if kind in "EG" else b
        if kind != "N" and side:
            lines.append(f" RHS r{i} {side!r}")
    lines.append("RANGES")
    for i, (a, b, kind) in enumerate(zip(low, high, kinds, strict=True)):
        if kind == "L" and a > -math.inf:
            lines.append(f" RNG r{i} {b - a!r}")
    lines += ["BOUNDS", *_bounds(program, scaling), "ENDATA", ""]
    return "\n".join(lines)


def _kind(lower: float, upper: float) -> str:
    """Return the MPS type of a row: N (free), E, G, or L (with a range if it has a lower side too)."""
    if lower == -math.inf and upper == math.inf:
        return "N"
    if lower == upper:
        return "E"
    return "G" if upper == math.inf else "L"


def _columns(program: Program, scaling: Scaling, factor: FloatArray) -> list[str]:
    rows = program.rows
    order = np.argsort(rows.columns, kind="stable")
    row = rows.entry_rows()[order]
    column = rows.columns[order]
    coefficient = rows.coefficients[order] * scaling.columns[column] * factor[row]
    triples = zip(column.tolist(), row.tolist(), coefficient.tolist(), strict=True)
    entries = [f" x{j} r{i} {value!r}" for j, i, value in triples]
    ends = np.searchsorted(column, np.arange(program.num_variables + 1)).tolist()
    costs = (program.objective * scaling.columns).tolist()
    lines: list[str] = []
    inside = False
    for j, (cost, integer) in enumerate(zip(costs, program.is_integer.tolist(), strict=True)):
        if integer != inside:
            lines.append(f" M{j} 'MARKER' " + ("'INTORG'" if integer else "'INTEND'"))
            inside = integer
        lines.append(f" x{j} cost {cost!r}")
        lines += entries[ends[j] : ends[j + 1]]
    if inside:
        lines.append(" MEND 'MARKER' 'INTEND'")
    return lines


def _bounds(program: Program, scaling: Scaling) -> list[str]:
    lower = (as_floats(program.lower) / scaling.columns).tolist()
    upper = (as_floats(program.upper) / scaling.columns).tolist()
    lines: list[str] = []
    for j, (low, high) in enumerate(zip(lower, upper, strict=True)):
        lines.append(f" LO BND x{j} {low!r}" if low > -math.inf else f" MI BND x{j}")
        lines.append(f" UP BND x{j} {high!r}" if high < math.inf else f" PL BND x{j}")
    return lines
