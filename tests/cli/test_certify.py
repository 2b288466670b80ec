"""``milpplan certify``: honest files pass, changed ones are refused, lies that are sealed again are refuted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pulp
import pytest

from milpplan import simulate, solve
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.reports.documents import (
    CertificationDocument,
    ResultDocument,
    digest,
    document_text,
    proof_sentence,
    result_document,
    sealed,
)
from tests.cli.test_cli import SOLVE, refused, run
from tests.optimize.problems import random_problem
from tests.small import small_problem


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
        "Compared: Every field",
        "Proved again: Optimal within 1e-3",
        "Not certified:",
    ):
        assert words in result.stdout
    assert "cost model milpplan" in result.stdout
    document = CertificationDocument.model_validate_json(run("certify", str(solved), "--json").stdout)
    assert document.verdict == "certified"
    assert all(check.passed for check in document.checks)
    assert document.backend == "cpsat"
    assert document.compared.startswith("Every field")
    told = " ".join(result.stdout.split())
    for listed in (*document.bounds_only, *document.not_certified):
        assert f"{', '.join(listed.fields)}: {listed.why}." in told


def test_the_certificate_says_what_was_proved(solved: Path) -> None:
    """Cost model, digests, forbidden layouts and versions are in the file."""
    certificate = json.loads(solved.read_text())["certificate"]
    assert certificate["forbid"] == [{"tp": 8}]
    assert certificate["cost_model"].startswith("milpplan ")
    assert set(certificate["versions"]) == {"python", "ortools", "pulp", "numpy"}
    assert {len(certificate[name]) for name in ("sha256", "problem_sha256", "layouts_sha256")} == {64}


@pytest.mark.long
def test_shares_and_orders_that_were_forbidden_are_certified(tmp_path: Path) -> None:
    """Lists are values of forbidden layouts too: the result is written, and its sentence has them so."""
    path = tmp_path / "result.json"
    clusters = ("solve", "llama3-8b", "dgx-a100-80:8+dgx-h100:8", "--global-batch", "16", "--space", "uniform")
    left_out = ("--forbid", "replica_micro_batches=5-11", "--forbid", "node_order=1-0")
    done = run(*clusters, "--fix", "tp=8,micro_batch_size=1", "--allow", "replicas", *left_out, "--out", str(path))
    assert done.exit_code == 0, done.output
    assert "without replica_micro_batches 5-11, or node_order 1-0" in json.loads(path.read_text())["proof"]
    done = run("certify", str(path))
    assert done.exit_code == 0, done.output


def smaller(value: Any) -> Any:
    """Nine tenths of a number."""
    return value * 9 // 10 if isinstance(value, int) else value * 0.9


def factor(data: dict[str, Any], times: float, *names: str) -> None:
    """Multiply a number inside a document."""
    for name in names[:-1]:
        data = data[name]
    data[names[-1]] *= times


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
    "a bound of the step above the plan": lambda d: factor(d, 2.0, "lower_bound_s"),
    "the gap": lambda d: d.update(gap=d["gap"] + 0.01),
    "the objective": lambda d: (factor(d, 0.5, "objective", "value"), factor(d, 0.5, "objective", "bound")),
    "the name of the objective": lambda d: d["objective"].update(name="gpu_hours"),
    "a status without a plan": lambda d: d.update(plan=None),
    "the digest of the problem": lambda d: d["certificate"].update(problem_sha256="0" * 64),
    "the sentence": lambda d: d.update(proof="Optimal for every cost model and every plan there is."),
    "the share of the peak": lambda d: factor(d, 1.000001, "mfu"),
    "the rate": lambda d: factor(d, 1.000001, "tokens_per_s"),
    "the peak": lambda d: d.update(peak_memory_bytes=d["peak_memory_bytes"] - 1),
    "where the time goes": lambda d: factor(d, 1.000001, "breakdown", "compute"),
    "a stage": lambda d: d["plan"]["stages"][0].update(memory_bytes=1),
    "what the proof rests on": lambda d: d["solver"].update(proof="tolerance"),
    "evidence that is left out": lambda d: d.update(evidence=None),
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
    assert data["proof"] not in again.stdout


def resealed(data: dict[str, Any], path: Path) -> str:
    """The path of a document that was sealed again."""
    path.write_text(document_text(sealed(ResultDocument.model_validate(data))))
    return str(path)


def test_what_the_run_ran_on_is_not_confirmed_elsewhere(solved: Path, tmp_path: Path) -> None:
    """With other libraries than are here nothing speaks against a result, but it is not certified."""
    data = json.loads(solved.read_text())
    data["certificate"]["versions"]["numpy"] = "1.0"
    done = run("certify", resealed(data, tmp_path / "other.json"))
    assert done.exit_code == 4
    assert "numpy" in done.stdout
    assert "Not certified" in done.stdout
    data["milpplan_version"] = "9.9"
    assert "9.9" in refused(run("certify", resealed(data, tmp_path / "other.json")))


def test_keys_given_twice_are_refused(solved: Path, tmp_path: Path) -> None:
    """Readers disagree which of the two counts, and the seal speaks about one of them."""
    text, path = solved.read_text(), tmp_path / "twice.json"
    path.write_text(text.replace('"status": "optimal"', '"status": "infeasible",\n  "status": "optimal"', 1))
    for words in (("certify",), ("simulate",), ("report", "-o", str(tmp_path / "page.html"))):
        assert "'status' twice" in refused(run(words[0], str(path), *words[1:]))
    assert not (tmp_path / "page.html").exists()


@pytest.mark.long
def test_a_plan_outside_of_its_space_is_refuted(solved: Path, tmp_path: Path) -> None:
    """A plan that is faster than all of the space, because it is not in it: all digests and fields agree."""
    other = tmp_path / "wide.json"
    assert run(*SOLVE, "--memory-margin", "0", "--out", str(other)).exit_code == 0
    data = json.loads(other.read_text())
    layout = data["plan"]["layout"]
    data["problem"]["space"]["zero_stage"] = [(layout["zero_stage"] + 1) % 3]
    problem = ResultDocument.model_validate(data).problem
    layouts = layout_space(problem)
    data["certificate"] |= {"problem_sha256": digest(problem), "layouts_sha256": layouts.sha256()}
    none = dict.fromkeys(("does_not_fit", "relaxed", "solved", "open"), 0)
    data["layouts"] |= {"legal": len(layouts), "bounded": len(layouts), "pruned_fraction": 1.0} | none
    data["layouts"] |= {"enumerated": layouts.enumerated, "rejected": dict(layouts.rejected)}
    for one in data["layouts"]["bounds"]:
        one["fates"] |= {"bounded": 0} | none
    data["proof"] = proof_sentence("optimal", problem, 1e-3, ())
    done = run("certify", resealed(data, tmp_path / "lie.json"))
    assert done.exit_code == 2, done.output
    assert "not a plan of the space" in done.stdout


@pytest.mark.long
def test_readers_refuse_what_contradicts_itself(solved: Path, tmp_path: Path) -> None:
    """Who only reads a result believes no bound above its plan, nor another sentence, however it is sealed."""
    for name in ("a bound of the step above the plan", "the gap", "the sentence", "the digest of the problem"):
        data = json.loads(solved.read_text())
        CHANGES[name](data)
        path = resealed(data, tmp_path / "lie.json")
        assert "contradicts itself" in refused(run("compare", str(solved), path))
        assert "contradicts itself" in refused(run("export", path, "--to", "accelerate"))
        assert "contradicts itself" in refused(run("explain", path))
        assert "contradicts itself" in refused(run("report", path, "-o", str(tmp_path / "page.html")))


@pytest.mark.long
def test_other_kinds_are_refused_by_name(solved: Path, tmp_path: Path) -> None:
    """Documents without one proof say what they are and what to certify instead."""
    pair, small = ("llama3-8b", "dgx-h100"), ("--global-batch", "8", "--space", "uniform", "--fix", "tp=1")
    kinds = {
        "simulated plan": ("simulate", str(solved)),
        "comparison": ("compare", str(solved), str(solved)),
        "certification": ("certify", str(solved)),
        "min-gpus": ("min-gpus", *pair, *small),
        "choice among": ("solve", "llama3-8b", "dgx-h100,dgx-a100-80", "--gpus", "8", *small),
        "traffic": ("traffic", str(solved)),
    }
    path = tmp_path / "other.json"
    for kind, words in kinds.items():
        done = run(*words, "--json")
        assert done.exit_code == 0, done.output
        path.write_text(done.stdout)
        message = refused(run("certify", str(path)))
        assert kind in message or "a document of milpplan" in message
        assert "Give " in message


def test_bounds_that_no_plan_keeps_are_refuted(solved: Path, tmp_path: Path) -> None:
    """A bound above the plan, sealed again."""
    data = json.loads(solved.read_text())
    data["objective"]["bound"] = data["objective"]["value"] * 1.01
    path = tmp_path / "lie.json"
    path.write_text(document_text(sealed(ResultDocument.model_validate(data))))
    result = run("certify", str(path))
    assert result.exit_code == 2
    assert "Refuted" in result.stdout


@pytest.mark.parametrize("listed", [True, False])
def test_results_that_prove_nothing_are_refused(listed: bool, tmp_path: Path) -> None:
    """A search that was stopped before it had a bound, or before it had a plan: there is nothing to certify, and
    the answer says what to do. Before its layouts were listed, a result has no certificate either."""
    found = solve(small_problem())
    layouts, work = found.layouts if listed else None, replace(found.work, proof="none")
    stopped = replace(
        found, status="feasible", objective_bound=None, lower_bound_s=None, gap=None, layouts=layouts
    )
    none = replace(stopped, status="no_solution_found", plan=None, report=None, objective=None)
    path = tmp_path / "stopped.json"
    for result, seen, do in (
        (stopped, "proves nothing", "--warm-start"),
        (none, "neither a plan nor a proof", "--time-limit"),
    ):
        document = result_document(replace(result, layouts=layouts, work=work), 1e-3)
        assert (document.certificate is not None) == listed
        path.write_text(document_text(document))
        message = refused(run("certify", str(path)))
        assert seen in message
        assert do in message


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
    result.write_text(document_text(result_document(solve(problem, gap=1e-4), 1e-4)))
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


def test_plans_compared_with_must_meet_the_deadline(tmp_path: Path) -> None:
    """A runner-up that the deadline forbids was never found by the search that the file claims."""
    tokens, path = 1e9, tmp_path / "late.json"
    whole = solve(small_problem(training_tokens=tokens))
    assert whole.step_time_s is not None
    late = max(whole.runners_up, key=lambda plan: simulate(whole.problem, plan).step_time_s)
    late_s = simulate(whole.problem, late).step_time_s
    assert late_s > 1.01 * whole.step_time_s
    steps = tokens / (whole.problem.job.global_batch_values[0] * whole.problem.job.sequence_length)
    hurried = solve(small_problem(training_tokens=tokens, deadline_s=steps * 0.999 * late_s))
    path.write_text(document_text(result_document(hurried, 1e-3, others=((late, late_s),))))
    assert "misses the deadline" in refused(run("certify", str(path)))
