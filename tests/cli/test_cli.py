"""The command line: exit codes, three-part messages, one document, nothing half written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import milpplan
from milpplan.cli.app import app
from milpplan.errors import SolverError
from milpplan.optimize import solve as optimizer
from milpplan.problem import SCHEDULES
from milpplan.reports import files
from milpplan.reports.documents import PlanFile, ResultDocument, SimulationDocument, document_text, plan_document
from tests.small import small_problem

PAIR = ["llama3-8b", "dgx-h100"]
SOLVE = ["solve", *PAIR, "--gpus", "16", "--global-batch", "32", "--space", "uniform"]


def run(*words: str) -> Result:
    """The program, in this process."""
    return CliRunner().invoke(app, list(words))


def refused(result: Result, code: int = 2) -> str:
    """The message of a refusal, after checking that it has three parts, no traceback and no result."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0].startswith("error: ")
    assert len(lines) == 3
    assert all(line.startswith("  ") and len(line) > 10 for line in lines[1:])
    return result.stderr


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    """A plan file of the small problem."""
    problem = small_problem()
    plan = milpplan.solve(problem).plan
    assert plan is not None
    path = tmp_path / "plan.json"
    path.write_text(document_text(PlanFile(plan=plan_document(plan), problem=problem)))
    return path


@pytest.mark.long
def test_the_widest_space_is_named() -> None:
    """``--space any`` says so in the headline, and other words are refused."""
    result = run(*SOLVE[:-1], "any", "--fix", "pp=2", "--fix", "tp=1", "--time-limit", "2")
    assert "chunks of any size" in " ".join(result.stdout.split())
    assert "uniform, free, any" in refused(run(*SOLVE[:-1], "even"))


def test_a_proved_plan_exits_with_zero() -> None:
    """The proof names the tolerance, the cost model's version and the space; no colours in a pipe."""
    result = run(*SOLVE)
    assert result.exit_code == 0
    words = " ".join(result.stdout.split())
    model = f"cost model milpplan {milpplan.__version__}, space uniform"
    assert words.count("optimal") == 1
    assert f"proof optimal within 1e-3 for {model}: no plan takes less than " in words
    assert "\x1b" not in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= 100
    assert result.stderr == ""


def test_json_is_exactly_one_document() -> None:
    """stdout parses as one JSON document that satisfies the schema, and nothing else is printed."""
    result = run(*SOLVE, "--json", "--fix", "pp=2", "--fix", "dp=8")
    assert result.exit_code == 0
    document = ResultDocument.model_validate_json(result.stdout, strict=True)
    assert document_text(document) == result.stdout
    assert document.plan is not None
    assert (document.plan.layout.pp, document.plan.layout.dp) == (2, 8)


def test_the_plan_file_simulates_to_the_same_time(tmp_path: Path) -> None:
    """solve --out, then simulate --json, agree to the last bit; so does simulating that output again."""
    first, second = tmp_path / "plan.json", tmp_path / "simulation.json"
    assert run(*SOLVE, "--out", str(first)).exit_code == 0
    solved = ResultDocument.model_validate_json(first.read_text(), strict=True)
    result = run("simulate", str(first), "--json")
    assert result.exit_code == 0
    second.write_text(result.stdout)
    assert SimulationDocument.model_validate_json(result.stdout).step_time_s == solved.step_time_s
    assert run("simulate", str(second), "--json").stdout == result.stdout
    assert "a step" in run("simulate", str(first)).stdout


def test_proved_infeasible_exits_with_three(tmp_path: Path) -> None:
    """The least peak and the number of GPUs that would do are on stderr; the document says it as well."""
    words = ["solve", "llama3-70b", "dgx-h100", "--gpus", "8", "--global-batch", "8", "--space", "uniform"]
    message = refused(run(*words), 3)
    assert "smallest peak" in message
    assert "a plan exists" in message
    out = tmp_path / "out.json"
    result = run(*words, "--json", "--out", str(out))
    assert result.exit_code == 3
    document = ResultDocument.model_validate_json(result.stdout, strict=True)
    assert document.infeasible is not None
    assert document.infeasible.seen in message
    assert out.read_text() == result.stdout
    assert "without a plan" in refused(run("simulate", str(out)))


def test_impossible_batch_names_the_rule() -> None:
    """No layout at all: the rule is quoted and a batch that works is named."""
    message = refused(run("solve", *PAIR, "--gpus", "97", "--global-batch", "512"), 3)
    assert "batch_divisible_by_dp" in message
    assert "485" in message


def test_stopped_without_a_plan_exits_with_five() -> None:
    """A time limit that leaves no time gives no plan, and the document has nulls."""
    result = run(*SOLVE, "--time-limit", "1e-9", "--json")
    assert result.exit_code == 5
    assert json.loads(result.stdout)["plan"] is None


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that raises."""

    def fail(*args: object, **options: object) -> Any:
        raise error

    return fail


def test_ctrl_c_before_the_search_exits_with_five(monkeypatch: pytest.MonkeyPatch) -> None:
    """No traceback, one line."""
    monkeypatch.setattr(optimizer, "solve", raising(KeyboardInterrupt()))
    result = run(*SOLVE)
    assert result.exit_code == 5
    assert result.stderr.splitlines() == ["Interrupted before anything was found."]


def test_an_internal_failure_exits_with_six(monkeypatch: pytest.MonkeyPatch) -> None:
    """One paragraph with the version and how to report; the traceback only with --debug."""
    monkeypatch.setattr(optimizer, "solve", raising(RuntimeError("boom")))
    result = run(*SOLVE)
    assert result.exit_code == 6
    assert f"milpplan {milpplan.__version__}: RuntimeError: boom" in result.stderr
    assert "report" in result.stderr
    assert "Traceback" not in result.stderr
    assert "Traceback" in run("--debug", *SOLVE).stderr


def test_a_lying_solver_exits_with_six(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that contradicts the re-check is no mistake of the user."""
    monkeypatch.setattr(optimizer, "solve", raising(SolverError("a", "b, and more of it", "c, and more")))
    refused(run(*SOLVE), 6)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["solve", "lama3-8b", "dgx-h100", "--gpus", "8", "--global-batch", "8"], "llama3-8b"),
        (["solve", "llama3-8b", "dgx-h10", "--gpus", "8", "--global-batch", "8"], "dgx-h100"),
        ([*SOLVE, "--fix", "tpp=8"], "Did you mean tp"),
        ([*SOLVE, "--forbid", "zero=1"], "zero_stage"),
        ([*SOLVE, "--fix", "schedule=1fb"], "Did you mean 1f1b"),
        ([*SOLVE, "--backend", "cpsta"], "cpsat"),
        ([*SOLVE, "--precision", "fp9"], "Did you mean fp8"),
        ([*SOLVE, "--space", "fre"], "Did you mean free"),
        ([*SOLVE, "--objective", "gpus"], "num_gpus"),
        ([*SOLVE, "--attention", "flsh"], "Did you mean flash"),
        (["list", "model"], "Did you mean models"),
        (["solve", "dgx-h100", "llama3-8b", "--gpus", "8", "--global-batch", "8"], "Swap them"),
        (["show", "mixtral-8x21b"], "mixtral-8x22b"),
        (["schema", "problm"], "Did you mean problem"),
    ],
)
def test_misspellings_are_understood(words: list[str], meant: str) -> None:
    """An unknown word of any kind is answered with the nearest one that exists."""
    assert meant in refused(run(*words))


@pytest.mark.parametrize(
    "words",
    [
        ["--gpus", "0"],
        ["--gpus", "-1"],
        ["--gpus", "1e30"],
        ["--gpus", "nan"],
        ["--gpus", "1" + "0" * 18],
        ["--gpus", "9" * 5000],
        ["--gpus", "1048577"],
        ["--gpus", "8:"],
        ["--gpus", "64:8"],
        ["--gpus", "8:16:0"],
        ["--gpus", "1:2:3:4"],
        ["--gpus", "1:1000000"],
        ["--global-batch", "0"],
        ["--global-batch", "7.5"],
        ["--global-batch", "1" + "0" * 30],
        ["--seq-len", "-4096"],
        ["--seq-len", "1" + "0" * 15],
        ["--gap", "nan"],
        ["--gap", "1"],
        ["--gap", "-1e-3"],
        ["--time-limit", "0"],
        ["--time-limit", "nan"],
        ["--time-limit", "inf"],
        ["--deadline-hours", "5"],
        ["--objective", "gpu_hours"],
        ["--deadline-hours", "nan", "--tokens", "1e12"],
        ["--deadline-hours", "5", "--tokens", "-1"],
        ["--fix", "tp"],
        ["--fix", "tp=0"],
        ["--fix", "tp=eight"],
        ["--fix", "tp=" + "9" * 30],
        ["--fix", "zero_stage=4"],
        ["--fix", "sequence_parallel=2"],
        ["--fix", "global_batch_size=8"],
        ["--fix", "tp=2", "--fix", "tp=4"],
        ["--forbid", ""],
        ["--precision", ""],
        ["--out", "/nowhere/at/all/plan.json"],
        ["--warm-start", "/nowhere/at/all/plan.json"],
    ],
)
def test_absurd_options_are_refused(words: list[str]) -> None:
    """Zero, negative, infinite, astronomical and meaningless values: three parts, exit code 2, no waiting."""
    message = refused(run(*SOLVE, *words))
    assert "--seq-len" not in words or "range" not in message


@pytest.mark.parametrize(
    "words", [[], ["solve"], ["solve", *PAIR], ["sovle"], [*SOLVE, "--seed", "-1"], [*SOLVE, "--nope"]]
)
def test_wrong_usage_exits_with_two(words: list[str]) -> None:
    """Missing and unknown commands and options are typer's to explain, with the same exit code."""
    assert run(*words).exit_code == 2


def test_fp8_where_there_is_none_is_refused() -> None:
    """An A100 has no fp8, and the message says so."""
    words = ["solve", "llama3-8b", "dgx-a100-80", "--gpus", "8", "--global-batch", "8", "--precision", "fp8"]
    assert "no fp8" in refused(run(*words))


@pytest.mark.long
def test_fixed_forbidden_and_ranges_reach_the_problem() -> None:
    """--fix with several values, --forbid, ranges and switches all take part."""
    words = ["solve", *PAIR, "--gpus", "8:16:8", "--global-batch", "32:64:32", "--space", "uniform"]
    words += ["--fix", "tp=2,sequence_parallel=yes", "--forbid", "pp=1", "--gap", "1e-3", "--json"]
    result = run(*words)
    assert result.exit_code == 0, result.stderr
    layout = ResultDocument.model_validate_json(result.stdout).plan.layout  # type: ignore[union-attr]
    assert (layout.tp, layout.sequence_parallel) == (2, True)
    assert layout.pp > 1


@pytest.mark.long
def test_schedules_to_choose_from() -> None:
    """--schedule takes names or all; the help names every one; --fix narrows them, and what makes no sense is
    refused."""
    words = ["solve", *PAIR, "--gpus", "8", "--global-batch", "8", "--space", "uniform", "--gap", "1e-2", "--json"]
    fixed = ["--fix", "pp=4,tp=2,micro_batch_size=1"]
    for chosen, expected in (("all", SCHEDULES), ("zb-v, zb-h1", ("zb-h1", "zb-v"))):
        result = run(*words, *fixed, "--schedule", chosen)
        assert result.exit_code == 0, result.stderr
        document = ResultDocument.model_validate_json(result.stdout)
        assert document.problem.space.schedule == expected
        assert document.plan is not None
        assert document.plan.layout.schedule in expected
    assert "zb-v" in refused(run(*words, "--schedule", "zb"))
    assert "once" in refused(run(*words, "--schedule", "all,1f1b"))
    assert "does not have it" in refused(run(*words, "--schedule", "1f1b", "--fix", "schedule=gpipe"))
    assert "inference" in refused(run(*words, "--schedule", "zb-h1", "--inference"))
    text = " ".join(run("solve", "--help").stdout.replace("│", " ").split())
    assert all(name in text for name in SCHEDULES)


def test_a_file_that_cannot_be_written_is_refused_before_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No directory, a directory, standard output's name, a file system that refuses: nobody waits for it."""
    monkeypatch.setattr(optimizer, "solve", raising(AssertionError("it was solved")))
    for out in (tmp_path / "none" / "plan.json", tmp_path, Path("-"), tmp_path / ("x" * 300)):
        assert "cannot be written" in refused(run(*SOLVE, "--out", str(out)))
    monkeypatch.setattr(files, "TemporaryFile", raising(OSError("read-only file system")))
    assert "read-only" in refused(run(*SOLVE, "--out", str(tmp_path / "plan.json")))
    assert list(tmp_path.iterdir()) == []


def test_a_search_that_no_solver_can_finish_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither stopped nor proved: exit code 4, the gap that is proved, and not a word of a stop; a search that
    the limit ended is not told that."""
    result = replace(milpplan.solve(small_problem()), status="feasible", gap=1e-7)
    monkeypatch.setattr(optimizer, "solve", lambda problem, options: result)
    ended = run(*SOLVE, "--gap", "0")
    assert ended.exit_code == 4
    assert "proof     best plan so far, not proved within 0 for cost model" in ended.stdout
    assert "optimal" not in ended.stdout
    assert "gap 1.0e-07" in ended.stdout
    assert "no solver could prove --gap 0" in ended.stderr
    assert "stopped" not in ended.output
    assert "no solver" not in run(*SOLVE, "--gap", "0", "--time-limit", str(result.wall_time_s)).stderr


def test_a_failed_write_keeps_the_printed_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk is full at the end, the document is on stdout all the same, and the exit code says so."""
    monkeypatch.setattr(os, "replace", raising(OSError("disk full")))
    result = run(*SOLVE, "--json", "--out", str(tmp_path / "plan.json"))
    assert result.exit_code == 2
    assert ResultDocument.model_validate_json(result.stdout).status == "optimal"
    assert "disk full" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_warm_start_must_belong_to_the_problem(tmp_path: Path, plan_path: Path) -> None:
    """Its own plan file is accepted; a plan of another model is not."""
    path = str(tmp_path / "plan.json")
    assert "GPUs" in refused(run(*SOLVE, "--warm-start", str(plan_path)))
    assert run(*SOLVE, "--out", path).exit_code == 0
    assert run(*SOLVE, "--warm-start", path).exit_code == 0


@pytest.mark.parametrize(("field", "name"), [("num_gpus", "GPUs"), ("global_batch_size", "sequences a step")])
def test_a_plan_for_another_job_is_not_simulated(plan_path: Path, field: str, name: str) -> None:
    """A plan file whose job asks for other numbers of GPUs or sequences says both of them."""
    data = json.loads(plan_path.read_text())
    data["problem"]["job"][field] = {"minimum": 100, "maximum": 200, "step": 50}
    plan_path.write_text(json.dumps(data))
    message = refused(run("simulate", str(plan_path)))
    assert name in message
    assert f"100 to 200 in steps of 50 (job.{field})" in message


def test_a_plan_that_breaks_a_rule_is_refused_by_name(plan_path: Path) -> None:
    """The framework's rule is quoted."""
    data = json.loads(plan_path.read_text())
    data["plan"]["layout"] |= {"zero_stage": 3, "overlap_grad_reduce": False, "overlap_param_gather": False}
    plan_path.write_text(json.dumps(data))
    assert "sharded_weights_are_overlapped" in refused(run("simulate", str(plan_path)))


def test_a_plan_that_does_not_fit_is_simulated_and_exits_with_three(plan_path: Path) -> None:
    """The numbers are printed, and that they do not fit."""
    data = json.loads(plan_path.read_text())
    data["problem"]["hardware"]["accelerator"]["memory_bytes"] = 10**9
    plan_path.write_text(json.dumps(data))
    result = run("simulate", str(plan_path))
    assert result.exit_code == 3
    words = " ".join(result.stdout.split())
    assert "usable: does not fit, " in words
    assert "too much" in words


@pytest.mark.parametrize(("share", "verdict"), [(0.999, "tight"), (0.5, "safe")])
def test_the_verdict_on_memory_is_printed_with_its_margin(plan_path: Path, share: float, verdict: str) -> None:
    """A peak near the usable memory is tight, one at half of it safe; the reserves have rows of their own."""
    report = json.loads(run("simulate", str(plan_path), "--json").stdout)
    data = json.loads(plan_path.read_text())
    data["problem"]["hardware"]["fragmentation_fraction"] = 0.0
    needed = report["peak_memory_bytes"] / share + report["context_bytes"]
    data["problem"]["hardware"]["accelerator"]["memory_bytes"] = int(needed)
    plan_path.write_text(json.dumps(data))
    stdout = " ".join(run("simulate", str(plan_path)).stdout.split())
    assert f"usable: {verdict}, " in stdout
    assert "context, NCCL" in stdout
    assert json.loads(run("simulate", str(plan_path), "--json").stdout)["memory_verdict"] == verdict


KINDS = "problem plan model hardware result explanation grouped-plan dispatch choice fewest lengths"


@pytest.mark.parametrize("kind", KINDS.split())
def test_schemas_are_json_schemas(kind: str) -> None:
    """Every schema is printed, names its properties and forbids others."""
    schema = json.loads(run("schema", kind).stdout)
    assert schema["additionalProperties"] is False
    assert "schema_version" in schema["properties"]


def test_lists_and_descriptions(tmp_path: Path) -> None:
    """Every name listed can be shown; a file is shown as it was understood."""
    for kind, name in (("models", "deepseek-v3"), ("hardware", "mi300x")):
        assert name in run("list", kind).stdout
        assert "schema_version" in run("show", name).stdout
    lines = [line.split() for line in run("list", "hardware").stdout.splitlines()]
    rows = {words[0]: words[-1] for words in lines if words}
    assert (rows["h20"], int(rows["dgx-h100"]) > 0) == ("none", True)
    assert "Did you mean dgx-b300" in refused(run("show", "b300"))
    assert "No TPU or Trainium ships" in refused(run("show", "tpu-v5p"))
    path = tmp_path / "mine.toml"
    path.write_text(run("show", "dgx-h100").stdout)
    assert json.loads(run("show", str(path)).stdout)["gpus_per_node"] == 8
    path.write_text(run("show", "llama3-8b").stdout)
    assert json.loads(run("show", str(path)).stdout)["hidden_size"] == 4096
    path.write_text('name = "x"\naccelerator = 3\n')
    assert "accelerator" in refused(run("show", str(path)))
    # The keys decide which kind of file it is, and its faults are told in that kind's fields alone.
    path.write_text(run("show", "dgx-h100").stdout.replace("gpus_per_node", "gpu_per_node"))
    wrong = refused(run("show", str(path)))
    assert "Did you mean gpus_per_node" in wrong
    assert "hidden_size" not in wrong
    path.write_text(run("show", "llama3-8b").stdout.replace("hidden_size", "hiden_size"))
    wrong = refused(run("show", str(path)))
    assert "Did you mean hidden_size" in wrong
    assert "accelerator" not in wrong
    path.write_text("gpus = 8\n")
    assert "neither a model nor hardware" in refused(run("show", str(path)))
    path.write_text("name = ")
    assert "TOML" in refused(run("solve", str(path), "dgx-h100", "--gpus", "8", "--global-batch", "8"))


def test_show_counts_parameters_and_names_what_is_ignored(tmp_path: Path) -> None:
    """A config's parameters are counted beside its description; a key to ignore is named there, in the file that
    is printed, and in the answer of a solve with that file."""
    told = run("show", "llama3-8b").stderr
    assert "8,030,261,248 parameters (8.03B)" in told
    config = json.loads((Path(__file__).parents[1] / "data/hf_configs/llama3-8b.json").read_text())
    path = tmp_path / "answers.json"
    path.write_text(json.dumps(config | {"architectures": ["LlamaForQuestionAnswering"]}))
    assert "LlamaForQuestionAnswering" in refused(run("show", str(path)))
    assert "LlamaForQuestionAnswering" in refused(
        run("solve", str(path), "dgx-h100", "--gpus", "8", "--global-batch", "8")
    )
    answer = run("show", str(path), "--ignore", "architectures")
    assert "Ignored, whatever it costs: architectures." in answer.stderr
    assert json.loads(answer.stdout)["ignored_keys"] == ["architectures"]
    known = tmp_path / "known.json"
    known.write_text(answer.stdout)
    words = ["dgx-h100", "--gpus", "8", "--global-batch", "8", "--fix", "tp=8", "--space", "uniform"]
    assert "ignored   architectures of the model" in run("solve", str(known), *words).stdout
    direct = run("solve", str(path), *words, "--ignore", "architectures")
    assert "ignored   architectures of the model" in direct.stdout
    assert "no Hugging Face config" in refused(run("solve", "llama3-8b", *words, "--ignore", "architectures"))


def test_numbers_beyond_arithmetic_are_refused(tmp_path: Path) -> None:
    """A hidden size that no 64-bit integer product holds is bad input, not an internal failure."""
    model = tmp_path / "huge.json"
    data = json.loads(document_text(small_problem().model)) | {"hidden_size": 10**14}
    model.write_text(json.dumps(data))
    words = ["solve", str(model), "dgx-h100", "--gpus", "8", "--global-batch", "8", "--space", "uniform"]
    result = run(*words)
    assert result.exit_code in (2, 3), result.stderr
    assert "Traceback" not in result.stderr


def test_the_doctor_reports_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """All checks passed: 0; one could not run: 2, with the cause; one failed, whatever else: 6, with what it
    means."""
    from milpplan.cli.commands import doctor
    from milpplan.optimize.milp import solver_self_test

    good = solver_self_test.SelfTestResult("cbc: x", True, "1", "1", "nothing")
    bad = solver_self_test.SelfTestResult("cbc: x", False, "1", "2", "it lies")
    none = solver_self_test.SelfTestResult(
        "cbc: y", False, "an answer", "No space left", "unusable", answered=False
    )
    monkeypatch.setattr(doctor, "run_canaries", lambda: (good,))
    assert run("doctor").exit_code == 0
    monkeypatch.setattr(doctor, "run_canaries", lambda: (good, none))
    result = run("doctor")
    assert result.exit_code == 2
    assert "not usable" in result.stdout
    assert "No space left" in result.stdout
    assert "1 of 2 checks could not run here" in result.stderr
    monkeypatch.setattr(doctor, "run_canaries", lambda: (good, none, bad))
    result = run("doctor")
    assert result.exit_code == 6
    assert "FAILED" in result.stdout
