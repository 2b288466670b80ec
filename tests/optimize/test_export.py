"""Exported files: readable by others, same optimum, never half written."""

import json
from pathlib import Path

import pulp
import pytest

from milpplan.errors import InvalidInputError
from milpplan.optimize.milp import Limits, ProgramBuilder, portable_names, write_lp, write_mps
from milpplan.optimize.milp.backends import backend
from milpplan.optimize.milp.solver_self_test import brute_force, random_program
from tests.amounts import first


@pytest.mark.parametrize("seed", first(5, range(200, 212)))
def test_mps_read_back_has_the_same_optimum(seed: int, tmp_path: Path) -> None:
    """PuLP reads the MPS file and CBC finds the enumerated optimum, offset included."""
    program = random_program(seed)
    path = write_mps(program, tmp_path / "program.mps")[0]
    _, problem = pulp.LpProblem.fromMPS(str(path))
    problem.solve(pulp.COIN_CMD(path=pulp.PULP_CBC_CMD.pulp_cbc_path, msg=False, gapRel=0))
    expected = brute_force(program)
    if expected is None:
        assert problem.sol_status == pulp.LpSolutionInfeasible
    else:
        assert problem.sol_status == pulp.LpSolutionOptimal
        assert round(pulp.value(problem.objective)) == expected
        assert backend("cpsat").solve(program, Limits()).objective == expected


def test_lp_text(tmp_path: Path) -> None:
    """The LP file of a small program is the one worked out by hand."""
    builder = ProgramBuilder("small")
    x = builder.add_variable("x[0]", 0, 5)
    y = builder.add_variable("y", -2, 7, integer=False)
    builder.add_row("both", [x, y], [3, -1], 1, 9)
    builder.add_row("same", [x], [1], 2, 2)
    builder.minimize([x, y], [4, 1], offset=6)
    files = write_lp(builder.build(), tmp_path / "small.lp")
    assert files[0].read_text().splitlines() == [
        "\\* small *\\",
        "Minimize",
        "OBJ: 6 _objective_offset + 4 x_0 + y",
        "Subject To",
        "both__lower: 3 x_0 - y >= 1",
        "both__upper: 3 x_0 - y <= 9",
        "same: x_0 = 2",
        "Bounds",
        " _objective_offset = 1",
        " 0 <= x_0 <= 5",
        " -2 <= y <= 7",
        "Generals",
        "x_0",
        "End",
    ]
    names = json.loads(files[1].read_text())
    assert names == {"schema_version": 1, "variables": {"x_0": "x[0]"}, "rows": {}}


def test_names_stay_different() -> None:
    """Names that collide or are too long once cleaned get their position; others stay readable."""
    names = portable_names(["x[1,2]", "x(1,2)", "9", "e1", "a" * 150, "a" * 151, "r__lower", "plain"])
    assert len(set(names)) == 8
    assert names[0] == "x_1_2"
    assert names[-1] == "plain"
    assert all(len(name) <= 102 and name[0] not in "0123456789eE" for name in names)


def test_a_failed_export_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When writing fails half way, the earlier file is untouched and nothing else remains."""
    path = tmp_path / "program.lp"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise RuntimeError("disk full")

    monkeypatch.setattr(pulp.LpProblem, "writeLP", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        write_lp(random_program(1), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_numbers_that_the_file_would_round_are_refused(tmp_path: Path) -> None:
    """LP files hold 12 digits; a 13th is an error, not a rounding."""
    builder = ProgramBuilder()
    x = builder.add_variable("x", 0, 1)
    builder.minimize([x], [10**12 + 1])
    with pytest.raises(InvalidInputError, match="would round"):
        write_lp(builder.build(), tmp_path / "p.lp")
