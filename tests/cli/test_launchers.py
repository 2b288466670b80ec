"""``milpplan export`` and ``milpplan import``: files, refusals, exit codes."""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner, Result

from milpplan import fixed, solve
from milpplan.cli import arguments
from milpplan.cli.app import app
from milpplan.reports.documents import PlanFile, document_text, plan_document
from tests.amounts import long_but
from tests.cli.test_traffic import JOB
from tests.launchers.cases import llama_uneven, round_trip
from tests.launchers.test_deepspeed import llama as llama_of_deepspeed
from tests.launchers.test_nanotron import llama as llama_of_nanotron
from tests.launchers.torchtitan_cases import qwen_sharded
from tests.simulation.cases import random_plan
from tests.small import small_problem

CONFIGURED = {
    "torchtitan": (qwen_sharded, ("torchtitan_plan.py",)),
    "nanotron": (llama_of_nanotron, ("nanotron.yaml",)),
    "deepspeed": (llama_of_deepspeed, ("deepspeed.json", "deepspeed_train.py")),
}
"""Launchers that are started from a configuration file: a plan of each, and its files (the first is imported)."""


def run(*words: str) -> Result:
    """The program, in this process."""
    return CliRunner().invoke(app, list(words))


def refused(result: Result, *words: str) -> None:
    """Bad input, told in three parts on stderr, with nothing on stdout."""
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) >= 3
    for word in words:
        assert word in result.stderr


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    """The plan file of an uneven interleaved plan."""
    problem, plan = llama_uneven()
    path = tmp_path / "plan.json"
    path.write_text(document_text(PlanFile(plan=plan_document(plan), problem=problem)))
    return path


def test_a_directory_gets_all_files_and_gives_the_plan_back(plan_path: Path, tmp_path: Path) -> None:
    """Export, import and simulate end at the same step time; the notes are talk, not result."""
    target, back = tmp_path / "launch", tmp_path / "back.json"
    written = run("export", str(plan_path), "--to", "megatron", "-o", str(target))
    assert written.exit_code == 0, written.stderr
    assert written.stdout == ""
    assert "Note: " in written.stderr
    assert sorted(file.name for file in target.iterdir()) == ["megatron.sbatch", "megatron.sh"]
    words = ("import", str(target / "megatron.sh"), "--from", "megatron", "--hardware", "dgx-h100", "--no-stack")
    read = run(*words, "--model", "llama3-70b", "-o", str(back))
    assert read.exit_code == 0, read.stderr
    times = [json.loads(run("simulate", str(path), "--json").stdout)["step_time_s"] for path in (plan_path, back)]
    assert times[0] == times[1]
    document = json.loads(run(*words, "--json").stdout)
    assert document["plan"] == json.loads(back.read_text())["plan"]


def test_a_file_and_standard_output_are_the_same_script(plan_path: Path, tmp_path: Path) -> None:
    """A name with a suffix is one file; without --out the script is the result; --json is one document."""
    target = tmp_path / "run.sh"
    assert run("export", str(plan_path), "--to", "megatron", "--out", str(target)).exit_code == 0
    result = run("export", str(plan_path), "--to", "megatron", "--target-version", "d98e8a64")
    assert result.stdout == target.read_text()
    document = json.loads(run("export", str(plan_path), "--to", "megatron", "--json").stdout)
    assert document["num_nodes"] * document["gpus_per_node"] == 64
    assert "--pipeline-model-parallel-layout" in document["arguments"]


def test_what_the_target_cannot_express_is_refused(plan_path: Path, tmp_path: Path) -> None:
    """Counts that differ by stage: the reason, and what makes the next plan expressible; nothing is written."""
    problem, plan = llama_uneven()
    other = random_plan(np.random.default_rng(1), problem, plan.layout)
    path, target = tmp_path / "other.json", tmp_path / "launch"
    path.write_text(document_text(PlanFile(plan=plan_document(other), problem=problem)))
    refused(run("export", str(path), "--to", "megatron", "-o", str(target)), "--fix recompute=none")
    assert not target.exists()


@pytest.mark.parametrize("target", long_but(("nanotron",), CONFIGURED))
def test_a_configuration_comes_back_through_the_command_line(target: str, tmp_path: Path) -> None:
    """All files in a directory, settings as JSON, and an import that costs what the plan costs."""
    build, names = CONFIGURED[target]
    problem, plan = build()
    path, launch, back = tmp_path / "plan.json", tmp_path / "launch", tmp_path / "back.json"
    path.write_text(document_text(PlanFile(plan=plan_document(plan), problem=problem)))
    assert run("export", str(path), "--to", target, "-o", str(launch)).exit_code == 0
    assert {file.name for file in launch.iterdir()} == {*names, f"{target}.sbatch", f"{target}.sh"}
    words = (
        "import",
        str(launch / names[0]),
        "--from",
        target,
        "--hardware",
        "dgx-h100",
        "--no-stack",
        "-o",
        str(back),
    )
    read = run(*words)
    assert read.exit_code == 0, read.stderr
    times = [json.loads(run("simulate", str(file), "--json").stdout)["step_time_s"] for file in (path, back)]
    assert times[0] == times[1]
    document = json.loads(run("export", str(path), "--to", target, "--json").stdout)
    assert (document["target"].lower(), len(document["settings"]) > 10) == (target, True)
    refused(run(*words, "--gpus", "24"), "24")


@pytest.mark.long
def test_what_was_ignored_is_in_the_answer(tmp_path: Path) -> None:
    """An import says which settings were ignored, in text and in JSON, and still writes a plan file."""
    problem, plan = llama_of_nanotron()
    path, launch, back = tmp_path / "plan.json", tmp_path / "launch", tmp_path / "back.json"
    path.write_text(document_text(PlanFile(plan=plan_document(plan), problem=problem)))
    assert run("export", str(path), "--to", "nanotron", "-o", str(launch)).exit_code == 0
    config = launch / "nanotron.yaml"
    config.write_text(config.read_text().replace("parallelism:", "parallelism:\n  no_such: 1"))
    words = ("import", str(config), "--from", "nanotron", "--hardware", "dgx-h100")
    refused(run(*words), "parallelism.no_such", "--ignore parallelism.no_such")
    words = (*words, "--ignore", "--parallelism.no_such")
    text = run(*words, "-o", str(back))
    assert "Ignored: parallelism.no_such = 1" in text.stderr
    for document in (json.loads(run(*words, "--json").stdout), json.loads(back.read_text())):
        assert document["ignored_flags"] == ["parallelism.no_such = 1"]
        assert document["unknown_flags"] == []
    assert run("simulate", str(back)).exit_code == 0
    refused(run(*words, "--ignore", "parallelism.nothing"), "no setting of the file")


def test_unknown_names_and_places(plan_path: Path, tmp_path: Path) -> None:
    """Targets, versions, files and directories that do not exist."""
    refused(run("export", str(plan_path), "--to", "megatrom"), "Did you mean megatron?")
    refused(run("export", str(plan_path), "--to", "megatron", "--target-version", "1"), "d98e8a64")
    refused(run("export", str(plan_path), "--to", "megatron", "-o", str(tmp_path / "a" / "b.sh")), "no directory")
    refused(run("export", str(plan_path), "--to", "megatron", "-o", str(tmp_path / "a" / "b")), "cannot be made")
    refused(
        run("import", str(tmp_path / "x.sh"), "--from", "megatron", "--hardware", "dgx-h100"), "does not exist"
    )
    refused(run("import", str(plan_path), "--from", "nemo", "--hardware", "dgx-h100"), "megatron")


def test_the_recomputation_can_be_fixed() -> None:
    """What refusals propose exists: one mode for all layers, in any space."""
    words = ("llama3-8b", "dgx-h100", JOB, "free")
    assert arguments.problem_of(*words, ["recompute=full,tp=2"]).space.recompute == ("full",)
    assert arguments.problem_of(*words, []).space.recompute == ("none", "selective", "full")
    solve = ("solve", "llama3-8b", "dgx-h100", "--gpus", "8", "--global-batch", "8")
    refused(run(*solve, "--fix", "recompute=some"), "none, selective, full")


def test_a_fixed_recomputation_is_expressible() -> None:
    """The proved best with all layers recomputed goes to Megatron-LM and comes back."""
    problem = fixed(
        small_problem(space={"kind": "free"}), {"recompute": "full", "schedule": "1f1b", "dp": 1, "pp": 4}
    )
    plan = solve(problem).plan
    assert plan is not None
    assert all(stage.recompute.full == stage.num_layers for stage in plan.virtual_stages)
    assert round_trip(problem, plan)[1].plan == plan


def test_job_files_of_every_scheduler(plan_path: Path, tmp_path: Path) -> None:
    """Each job file parses and has the nodes, the GPUs of a node and the time limit of the launch."""
    launch = tmp_path / "launch"
    words = ("export", str(plan_path), "--to", "megatron")
    document = json.loads(run(*words, "--json").stdout)
    nodes, gpus = document["num_nodes"], document["gpus_per_node"]
    for job in ("slurm", "skypilot", "kubeflow", "ray"):
        written = run(*words, "--job", job, "--job-minutes", "90", "-o", str(launch))
        assert written.exit_code == 0, written.stderr
    start = "timeout 90m bash megatron.sh"

    assert subprocess.run(["bash", "-n", str(launch / "megatron.sbatch")], check=False).returncode == 0
    slurm = (launch / "megatron.sbatch").read_text().splitlines()
    for line in (f"nodes={nodes}", f"gpus-per-node={gpus}", "time=90"):
        assert f"#SBATCH --{line}" in slurm

    task = yaml.safe_load((launch / "megatron.sky.yaml").read_text())
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (nodes, f"H100:{gpus}")
    assert task["run"].splitlines()[-1] == start

    trainer = yaml.safe_load((launch / "megatron.trainjob.yaml").read_text())["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (nodes, gpus)
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": gpus}
    # Kubernetes reads $$ as a dollar sign; without the last line the command only writes the files.
    program, _, last = trainer["args"][0].replace("$$", "$").rstrip().rpartition("\n")
    assert last == f"exec {start}"
    variables = {"PATH": "/usr/bin:/bin", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "1"}
    shell = ["bash", "-uc", f"{program}\ncat megatron.sh"]
    shown = subprocess.run(shell, check=True, capture_output=True, text=True, env=variables, cwd=tmp_path)
    assert shown.stdout == (launch / "megatron.sh").read_text()

    driver = ast.parse((launch / "megatron_ray.py").read_text())
    values = [ast.literal_eval(part.value) for part in driver.body[:2] if isinstance(part, ast.Assign)]
    assert values == [(nodes, gpus), start.split()]


def test_job_files_that_are_refused(plan_path: Path, tmp_path: Path) -> None:
    """Plain torchrun has no job file and so no time limit; other schedulers do not exist."""
    words = ("export", str(plan_path), "--to", "megatron")
    assert run(*words, "--job", "torchrun", "-o", str(tmp_path / "launch")).exit_code == 0
    assert [file.name for file in (tmp_path / "launch").iterdir()] == ["megatron.sh"]
    refused(run(*words, "--job", "torchrun", "--job-minutes", "5"), "Leave --job-minutes out")
    refused(run(*words, "--job", "pbs"), "Expected one of slurm")


def test_a_template_and_the_numbers_of_its_trainer(tmp_path: Path) -> None:
    """--micro-batch, --accumulation and --seq-len state what a template leaves out, and --set any setting; where
    a launcher's files say them, and for words of no script, the options are refused."""
    template = tmp_path / "ds.json"
    template.write_text(json.dumps({"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}}))
    words = ["import", str(template), "--from", "deepspeed", "--hardware", "dgx-h100", "--model", "llama3-8b"]
    numbers = ["--gpus", "8", "--micro-batch", "2", "--accumulation", "4", "--seq-len", "4096", "--json"]
    result = run(*words, *numbers, "--set", "bf16.enabled=true")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["plan"]["layout"]["global_batch_size"] == 64
    assert found["problem"]["job"]["sequence_length"] == 4096
    for more, word in (
        ([], "--set bf16.enabled=VALUE"),
        (["--set", "bf16.enabled"], "Expected NAME=VALUE"),
        (["--set", "bf16.enabled=true", "--args", "x"], "--args is given"),
        (["--set", "bf16.enabled=yes"], "bf16.enabled is 'yes'"),
    ):
        refused = run(*words, *numbers, *more)
        assert refused.exit_code == 2
        assert word in refused.stderr
    script = tmp_path / "run.sh"
    script.write_text("python pretrain_gpt.py --num-layers 2\n")
    refused = run("import", str(script), "--from", "megatron", "--hardware", "dgx-h100", "--accumulation", "4")
    assert "--accumulation is given, and files of Megatron-LM say it" in refused.stderr
