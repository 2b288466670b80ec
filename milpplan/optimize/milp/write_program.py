"""Writer of LP and MPS files for other solvers, through PuLP; a file is written completely or not at all.

Names keep the characters that both formats allow; where a name had to change, ``<file>.names.json`` maps it back.
A row with two different sides becomes two rows, ``<name>__lower`` and ``<name>__upper``.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.optimize.milp.program import INFINITY, MINUS_INFINITY, Program
from milpplan.reports import write_whole
from milpplan.reports.files import check_writable, unwritable

# PuLP writes LP files with 12 significant digits.
_MAX_NUMBER: Final = 10**12
_MAX_NAME: Final = 100
# No portable name starts with an underscore.
_OFFSET: Final = "_objective_offset"
_SIDES: Final = ("__lower", "__upper")
_FORBIDDEN: Final = re.compile(r"[^A-Za-z0-9_]+")


def write_lp(program: Program, path: Path | str) -> tuple[Path, ...]:
    """Write CPLEX LP. Returns the files written (the second maps changed names)."""
    return _write(program, Path(path), lambda problem, name: problem.writeLP(name))


def write_mps(program: Program, path: Path | str) -> tuple[Path, ...]:
    """Write MPS. Returns the files written (the second maps changed names)."""
    return _write(program, Path(path), lambda problem, name: problem.writeMPS(name))


WRITERS: Final = {".mps": write_mps, ".lp": write_lp}
"""Writer by the end of a file's name."""


def portable_names(names: Iterable[str]) -> list[str]:
    """Return distinct names of letters, digits and ``_``, at most about 100 long, without a digit or ``e`` first.

    ``x[3,2]`` becomes ``x_3_2``. A name that is too long, or taken already, ends in its position.
    """
    taken: set[str] = set()
    result = []
    for index, name in enumerate(names):
        plain = _FORBIDDEN.sub("_", name).strip("_") or "v"
        if plain[0] in "0123456789eE":
            plain = f"v_{plain}"
        if plain.endswith(_SIDES):
            plain += "_"
        if len(plain) > _MAX_NAME or plain in taken:
            plain = f"{plain[: _MAX_NAME - 8]}_{index}"
        while plain in taken:
            plain += "_"
        taken.add(plain)
        result.append(plain)
    return result


def _write(program: Program, path: Path, write: Callable[[Any, str], object]) -> tuple[Path, ...]:
    _require_printable(program)
    variables = portable_names(program.variable_names)
    rows = portable_names(program.rows.names)
    problem = _pulp_problem(program, variables, rows)
    _whole(path, lambda temporary: write(problem, temporary))
    changed = {
        "variables": {new: old for new, old in zip(variables, program.variable_names, strict=True) if new != old},
        "rows": {new: old for new, old in zip(rows, program.rows.names, strict=True) if new != old},
    }
    if not any(changed.values()):
        return (path,)
    names = path.with_name(path.name + ".names.json")
    text = json.dumps({"schema_version": 1, **changed}, indent=1)
    write_whole(names, text + "\n")
    return path, names


def _whole(path: Path, write: Callable[[str], object]) -> None:
    """Let ``write`` fill a file by its name, in a private directory, then move it into place."""
    check_writable(path)
    try:
        with tempfile.TemporaryDirectory(prefix=".milpplan-", dir=path.parent) as folder:
            temporary = Path(folder) / path.name
            write(str(temporary))
            content = temporary.read_bytes()
    except OSError as error:
        raise unwritable(path, error) from error
    write_whole(path, content)


def _require_printable(program: Program) -> None:
    rows = program.rows
    for array in (rows.coefficients, rows.lower, rows.upper, program.objective, program.lower, program.upper):
        size = np.abs(array)
        wrong = size[(size >= _MAX_NUMBER) & (size < INFINITY)]
        if wrong.size:
            raise InvalidInputError(
                f"{program.name} holds {int(wrong[0])}, which the file would round.",
                f"Numbers below {_MAX_NUMBER} expected.",
                "State the program in a coarser unit.",
            )


def _pulp_problem(program: Program, variables: list[str], row_names: list[str]) -> Any:
    import pulp

    problem = pulp.LpProblem(portable_names([program.name])[0], pulp.LpMinimize)
    columns = [
        problem.add_variable(
            name,
            None if low <= MINUS_INFINITY else low,
            None if high >= INFINITY else high,
            pulp.LpInteger if integer else pulp.LpContinuous,
        )
        for name, low, high, integer in zip(
            variables,
            program.lower.tolist(),
            program.upper.tolist(),
            program.is_integer.tolist(),
            strict=True,
        )
    ]
    # Every variable is in the objective, if only with 0, so that the file holds all of them.
    costs = list(zip(columns, program.objective.tolist(), strict=True))
    if program.offset:
        # PuLP drops constants, so the offset is a variable fixed at 1.
        costs.append((problem.add_variable(_OFFSET, 1, 1), program.offset))
    problem += pulp.LpAffineExpression(costs)
    rows = program.rows
    for i, (name, low, high) in enumerate(zip(row_names, rows.lower.tolist(), rows.upper.tolist(), strict=True)):
        inside = slice(rows.starts[i], rows.starts[i + 1])
        terms = zip(rows.columns[inside].tolist(), rows.coefficients[inside].tolist(), strict=True)
        expression = pulp.LpAffineExpression([(columns[j], factor) for j, factor in terms])
        both = MINUS_INFINITY < low < high < INFINITY
        if low == high:
            problem += pulp.LpConstraint(expression, pulp.LpConstraintEQ, name, low)
            continue
        if low > MINUS_INFINITY:
            suffix = _SIDES[0] if both else ""
            problem += pulp.LpConstraint(expression.copy(), pulp.LpConstraintGE, name + suffix, low)
        if high < INFINITY:
            suffix = _SIDES[1] if both else ""
            problem += pulp.LpConstraint(expression, pulp.LpConstraintLE, name + suffix, high)
    return problem
