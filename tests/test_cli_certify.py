"""``milpplan certify``: honest files pass, changed ones are refused, lies that are sealed again are refuted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pulp
import pytest

from milpplan import solve
from milpplan.reports.certificate import CertificationDocument, sealed
from milpplan.reports.document import ResultDocument, document_text, result_document
from tests.optimize.problems import random_problem
from tests.test_cli import SOLVE, refused, run


@pytest.fixture(scope="module")
def solved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of a small solve."""
    path = tmp_path_factory.mktemp("certify") / "result.json"
    assert run(*SOLVE, "--forbid", "tp=8", "--out", str(path)).exit_code == 0
    return path


def test_honest_results_are_certified(solved: Path) -> None:
    """The report names the checks, the other solver, and what the claim speaks about; --json says the same."""
    result = run("certify", str(solved))
    assert result.exit_code == 0, result.output
    for words in (
        "Certified",
        "layouts listed again",
        "critical path summed",
        "proved again",
        "Second proof by cpsat",
    ):
        assert words in result.stdout
    assert "cost model milpplan" in result.stdout
    document = CertificationDocument.model_validate_json(run("certify", str(solved), "--json").stdout)
    assert document.verdict == "certified"
    assert all(check.passed for check in document.checks)
    assert document.backend == "cpsat"


def test_the_certificate_says_what_was_proved(solved: Path) -> None:
    """Cost model, digests, forbidden layouts and versions are in the file."""
    certificate = json.loads(solved.read_text())["certificate"]
    assert certificate["forbid"] == [{"tp": 8}]
    assert certificate["cost_model"].startswith("milpplan ")
    assert set(certificate["versions"]) == {"python", "ortools", "pulp", "numpy"}
    assert {len(certificate[name]) for name in ("sha256", "problem_sha256", "layouts_sha256")} == {64}


def smaller(value: Any) -> Any:
    """Nine tenths of a number."""
    return value * 9 // 10 if isinstance(value, int) else value * 0.9


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a step time": lambda d: d.update(step_time_s=smaller(d["step_time_s"])),
    "a bound": lambda d: d["objective"].update(bound=smaller(d["objective"]["bound"])),
    "the layouts": lambda d: d["layouts"].update(legal=d["layouts"]["legal"] - 1),
    "a fate": lambda d: d["layouts"].update(does_not_fit=d["layouts"]["does_not_fit"] + 1),
    "a cost": lambda d: d["problem"]["hardware"]["accelerator"].update(
        memory_bandwidth_bytes_per_s=smaller(
            d["problem"]["hardware"]["accelerator"]["memory_bandwidth_bytes_per_s"]
        )
    ),
    "the memory": lambda d: d["problem"]["hardware"]["accelerator"].update(
        memory_bytes=smaller(d["problem"]["hardware"]["accelerator"]["memory_bytes"]) // 4
    ),
    "what was forbidden": lambda d: d["certificate"].update(forbid=[]),
    "the digest": lambda d: d["certificate"].update(layouts_sha256="0" * 64),
    "the tolerance": lambda d: d["solver"].update(tolerance=0.5),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_files_are_refused(solved: Path, tmp_path: Path, name: str) -> None:
    """Any change breaks the seal; sealed again, it is refuted."""
    data = json.loads(solved.read_text())
    CHANGES[name](data)
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(data))
    assert "not as it was written" in refused(run("certify", str(path)))
    path.write_text(document_text(sealed(ResultDocument.model_validate(data))))
    again = run("certify", str(path))
    assert again.exit_code == 2, again.output
    assert "Refuted" in again.stdout


def test_bounds_that_no_plan_keeps_are_refuted(solved: Path, tmp_path: Path) -> None:
    """A bound above the plan, sealed again."""
    data = json.loads(solved.read_text())
    data["objective"]["bound"] = data["objective"]["value"] * 1.01
    path = tmp_path / "lie.json"
    path.write_text(document_text(sealed(ResultDocument.model_validate(data))))
    result = run("certify", str(path))
    assert result.exit_code == 2
    assert "Refuted" in result.stdout


def test_what_is_no_result_is_refused(solved: Path, tmp_path: Path) -> None:
    """Other files, results without a certificate, and those of another version say what they are."""
    path = tmp_path / "other.json"
    path.write_text("{}")
    refused(run("certify", str(path)))
    refused(run("certify", str(tmp_path / "missing.json")))
    data = json.loads(solved.read_text())
    path.write_text(json.dumps(data | {"certificate": None}))
    assert "no certificate" in refused(run("certify", str(path)))
    data["certificate"]["cost_model"] = "milpplan 9.9"
    path.write_text(document_text(sealed(ResultDocument.model_validate(data))))
    assert "9.9" in refused(run("certify", str(path)))
    assert "Did you mean" in refused(run("certify", str(solved), "--backend", "cpsta"))
    refused(run("certify", str(solved), "--time-limit", "-1"))


@pytest.fixture
def earlier(solved: Path, tmp_path: Path) -> Path:
    """The result as milpplan would have written it before the host's time of a collective call was a constant."""
    data = json.loads(solved.read_text())
    del data["problem"]["hardware"]["software"]["collective_call_s"]
    data["certificate"] |= {"problem_sha256": sha256(data["problem"]), "sha256": ""}
    data["certificate"]["sha256"] = sha256(data)
    path = tmp_path / "earlier.json"
    path.write_text(json.dumps(data))
    return path


def sha256(data: Any) -> str:
    """As the certificate defines it."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def test_results_before_a_constant_have_a_plan_and_no_proof(solved: Path, earlier: Path, tmp_path: Path) -> None:
    """Nobody changed the file: its plan is read everywhere, its proof is about another cost model."""
    assert "without some of the constants" in refused(run("certify", str(earlier)))
    done = run("compare", str(solved), str(earlier), "--json")
    assert done.exit_code == 0, done.output
    first, second = json.loads(done.stdout)["plans"]
    assert first["step_time_s"] == second["step_time_s"]
    page = tmp_path / "page.html"
    assert run("report", str(earlier), "-o", str(page), "--time-limit", "0").exit_code == 0
    assert "with fewer constants" in page.read_text()
    assert "not as it was written" not in run("export", str(earlier), "--to", "accelerate").output
    data = json.loads(earlier.read_text())
    earlier.write_text(json.dumps(data | {"step_time_s": data["step_time_s"] / 2}))
    assert "not as it was written" in refused(run("certify", str(earlier)))


def test_nothing_is_exported_from_a_changed_result(solved: Path, tmp_path: Path) -> None:
    """A script that runs for weeks does not come from a file that somebody changed, unless it claims nothing."""
    data = json.loads(solved.read_text())
    path, launch = tmp_path / "changed.json", tmp_path / "launch"
    path.write_text(json.dumps(data | {"step_time_s": data["step_time_s"] / 2}))
    assert "not as it was written" in refused(run("export", str(path), "--to", "accelerate", "-o", str(launch)))
    assert not launch.exists()
    for whole in (data, data | {"certificate": None, "step_time_s": data["step_time_s"] / 2}):
        path.write_text(json.dumps(whole))
        done = run("export", str(path), "--to", "accelerate")
        assert "not as it was written" not in done.output


def test_programs_are_for_any_solver(tmp_path: Path) -> None:
    """What bounds leave open is written as MPS files that another reader and solver call infeasible; with the
    objective free they have a solution, so it is the bound that makes them so."""
    problem = random_problem(14)
    result = tmp_path / "result.json"
    result.write_text(document_text(result_document(solve(problem), 1e-4)))
    folder = tmp_path / "programs"
    done = run("certify", str(result), "--programs", str(folder))
    assert done.exit_code == 0, done.output
    files = sorted(folder.glob("*.mps"))
    assert f"{len(files)} integer programs written" in done.stderr
    assert files
    solver = pulp.COIN_CMD(path=pulp.PULP_CBC_CMD.pulp_cbc_path, msg=False)
    for path in files:
        variables, program = pulp.LpProblem.fromMPS(str(path))
        program.solve(solver)
        assert program.status == pulp.LpStatusInfeasible
        z = list(variables.values())[-1]
        z.upBound = None
        program.solve(solver)
        assert program.status == pulp.LpStatusOptimal
    again = run("certify", str(result), "--programs", str(folder))
    assert again.exit_code == 2
    assert "not an empty directory" in again.stderr


def test_no_program_is_said(solved: Path, tmp_path: Path) -> None:
    """Where bounds decide everything there is nothing to hand on."""
    done = run("certify", str(solved), "--programs", str(tmp_path / "none"))
    assert done.exit_code == 0
    assert "integer program" in done.stderr


def test_the_same_backend_is_said(solved: Path) -> None:
    """A proof by the same solver is less of a proof."""
    result = run("certify", str(solved), "--backend", "auto")
    assert result.exit_code == 0
    assert "another --backend" in result.stderr
