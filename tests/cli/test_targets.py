"""``solve --target``: only plans of one launcher, and what that costs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from milpplan.cli.app import app
from milpplan.cli.solve_options import SolveWords
from milpplan.launchers import TARGETS, restrict
from milpplan.problem import Job, Problem, load_hardware, load_model, stack_names, uncertainty_of
from milpplan.problem.catalog import LAUNCHER_STACKS, fitted_hardware
from tests.amounts import first

SMALL = ["solve", "llama3-8b", "dgx-h100", "--gpus", "8", "--global-batch", "16", "--gap", "1e-3"]


@pytest.mark.parametrize("target", first(1, ("megatron", "accelerate")))
def test_solve_export_import(target: str, tmp_path: Path) -> None:
    """The plan of a target is written, exported without a word of refusal, and imported with the same step."""
    out, launch = tmp_path / "plan.json", tmp_path / "launch"
    runner = CliRunner()
    solved = runner.invoke(app, [*SMALL, "--target", target, "--out", str(out)])
    assert solved.exit_code == 0, solved.output
    assert f"what {target}" in solved.output
    assert f"the same space without --target {target}" in " ".join(solved.output.split())
    assert runner.invoke(app, ["export", str(out), "--to", target, "--out", str(launch)]).exit_code == 0
    document = json.loads(out.read_text(encoding="utf-8"))
    assert document["target"]["name"] == target
    price = document["target"]["price"]
    assert 0 <= price["least_fraction"] <= price["most_fraction"] < 1
    assert price["objective_bound"] <= price["objective"]
    script = sorted(launch.glob("*.sh"))[0]
    read = ["import", str(script), "--from", target, "--hardware", "dgx-h100", "--model", "llama3-8b", "--json"]
    found = runner.invoke(app, read)
    assert found.exit_code == 0, found.output
    imported = json.loads(found.stdout)
    assert imported["plan"]["layout"] == document["plan"]["layout"]
    constants = [one["problem"]["hardware"]["uncertainty"] for one in (imported, document)]
    assert constants[0] == constants[1]


@pytest.mark.long
def test_the_price_is_asked_only_where_there_is_one() -> None:
    """Without seconds for it there is no price, without --target no target; both are said by null."""
    runner = CliRunner()
    unpriced = runner.invoke(app, [*SMALL, "--target", "accelerate", "--price-limit", "0", "--json"])
    assert json.loads(unpriced.stdout)["target"] == {"name": "accelerate", "version": "1.15.0", "price": None}
    assert json.loads(runner.invoke(app, [*SMALL, "--space", "uniform", "--json"]).stdout)["target"] is None


@pytest.mark.parametrize(
    ("hardware", "options", "overlay"),
    [
        ("dgx-h100", ["--target", "megatron"], "dgx-h100+nemo"),
        ("dgx-b200", ["--target", "megatron-bridge"], "dgx-b200+megatron-core"),
        ("dgx-h100", ["--target", "megatron", "--no-stack"], "none"),
        ("dgx-h100+plain", ["--target", "megatron"], "dgx-h100+plain"),
        ("dgx-h100", ["--target", "torchtitan"], "dgx-h100+plain"),
        ("dgx-h100", ["--target", "nanotron"], "dgx-h100+nanotron"),
        ("dgx-a100-80", ["--target", "nanotron"], "dgx-a100-80+plain"),
        ("dgx-h100", ["--target", "automodel"], "none"),
        ("dgx-h200", ["--target", "megatron"], "none"),
        ("dgx-h100", [], "none"),
        ("dgx-h100,dgx-a100-80", ["--target", "megatron"], "none"),
        ("dgx-h100,dgx-b200", ["--target", "megatron"], "dgx-h100+nemo"),
    ],
)
def test_a_target_has_the_constants_fitted_to_it(hardware: str, options: list[str], overlay: str) -> None:
    """A bare name gets the stack of the launcher where there is one, for every kind of hardware that is compared;
    a full name and --no-stack are kept."""
    words = SolveWords(
        model="llama3-8b",
        hardware=hardware,
        gpus="16",
        global_batch="16",
        space="uniform",
        target=options[1] if options else None,
        stack="--no-stack" not in options,
    )
    problem = words.problem(hardware.split(",")[0])
    assert uncertainty_of(problem.hardware).overlay == overlay


@pytest.mark.long
def test_python_and_imports_have_the_constants_fitted_to_the_launcher(tmp_path: Path) -> None:
    """``restrict``, ``import`` and ``gap`` choose the stack that ``solve`` chooses, and say so; --no-stack keeps
    bare hardware; a user's description stays as it is."""
    job = Job(num_gpus=8, global_batch_size=16, sequence_length=8192)
    whole = Problem(model=load_model("llama3-8b"), hardware=load_hardware("dgx-h100"), job=job)
    bare, stack = load_hardware("dgx-h100"), load_hardware("dgx-h100+nemo")
    assert restrict(whole, "megatron").hardware.uncertainty == stack.uncertainty
    assert restrict(whole, "megatron", stack=False).hardware.uncertainty is None
    assert restrict(whole, "automodel").hardware.uncertainty is None
    changed = bare.model_copy(update={"software": bare.software.model_copy(update={"message_s": 1e-3})})
    assert fitted_hardware("megatron", changed) == changed
    runner, plan, folder = CliRunner(), tmp_path / "plan.json", tmp_path / "launch"
    solved = runner.invoke(app, [*SMALL, "--space", "uniform", "--target", "megatron", "--out", str(plan)])
    assert solved.exit_code == 0, solved.output
    assert runner.invoke(app, ["export", str(plan), "--to", "megatron", "--out", str(folder)]).exit_code == 0
    script = str(next(path for path in sorted(folder.iterdir()) if path.suffix == ".sh"))
    read = [script, "--from", "megatron", "--hardware", "dgx-h100"]
    for options, said in (((), "dgx-h100+nemo, fitted to"), (("--no-stack",), "dgx-h100+nemo is fitted")):
        for command in (["import"], ["gap", "--time-limit", "5", "--space", "uniform"]):
            done = runner.invoke(app, [command[0], *read, *command[1:], *options, "--json"])
            assert done.exit_code in (0, 4), done.output
            assert f"Constants: dgx-h100{'' if options else '+nemo'}" in done.stderr
            assert said in " ".join(done.stderr.split())


def test_the_constants_are_named_with_their_error() -> None:
    """The answer names the chosen stack with its number of runs and error, or says what bare hardware means."""
    runner = CliRunner()
    targeted = runner.invoke(app, [*SMALL, "--space", "uniform", "--target", "megatron", "--price-limit", "0"])
    assert targeted.exit_code == 0, targeted.output
    said = " ".join(targeted.output.split())
    assert "constants dgx-h100+nemo, fitted to 60 published runs, left-out error 4.1 %" in said
    bare = " ".join(runner.invoke(app, [*SMALL, "--space", "uniform", "--price-limit", "0"]).output.split())
    said = re.search(r"constants dgx-h100 alone: mean errors of 11 % to (\d+) % by framework", bare)
    assert said is not None
    assert f"mean error up to {said[1]} % (in the measured runs that" in bare
    assert re.search(
        r"by framework; 5 fitted stacks give [0-9.]+ s \(\+[a-z]+\) to [0-9.]+ s \(\+nanotron\)", bare
    )
    listed = " ".join(runner.invoke(app, ["list", "hardware"]).output.split())
    for name in stack_names():
        assert name in listed
    assert "60 published runs of" in listed


def test_every_stack_of_a_target_ships() -> None:
    """The table names launchers that exist, and stacks that lie on some hardware."""
    assert set(LAUNCHER_STACKS) <= set(TARGETS)
    shipped = {name.partition("+")[2] for name in stack_names()}
    assert {stack for stacks in LAUNCHER_STACKS.values() for stack in stacks} <= shipped


@pytest.mark.long
def test_the_margin_of_memory_is_an_option(tmp_path: Path) -> None:
    """A plan leaves the margin that is asked for; its price is printed, written and certified; a share that is
    none is refused."""
    runner, documents, file = CliRunner(), {}, tmp_path / "margin.json"
    command = [*SMALL, "--fix", "recompute=none", "--space", "uniform"]
    for share in ("0", "0.05", "0.3"):
        done = runner.invoke(app, [*command, "--memory-margin", share, "--out", str(file)])
        assert done.exit_code == 0, done.output
        document = documents[share] = json.loads(file.read_text())
        installed = document["problem"]["hardware"]["accelerator"]["memory_bytes"]
        spared = int(float(share) * installed)
        assert document["peak_memory_bytes"] <= document["usable_memory_bytes"] - spared
    default = json.loads(runner.invoke(app, [*command, "--json"]).stdout)
    assert default["peak_memory_bytes"] == documents["0.05"]["peak_memory_bytes"]
    said = " ".join(done.output.split())
    assert "margin 23.9 GiB (" in said
    price = documents["0.3"]["margin_price"]
    assert 0 < price["least_fraction"] <= price["most_fraction"]
    assert price["space"]["memory_margin_fraction"] == 0
    assert price["objective_bound"] <= price["objective"]
    certified = runner.invoke(app, ["certify", str(file)])
    assert certified.exit_code == 0, certified.output
    assert "price of the memory margin proved again" in " ".join(certified.output.split())
    assert documents["0"]["margin_price"] is None
    assert "slower than without)" in said
    assert "30.0 % of the memory free" in said
    for wrong in ("-0.1", "0.6", "nan"):
        refused = runner.invoke(app, [*command, f"--memory-margin={wrong}"])
        assert refused.exit_code == 2
        assert "share of the device's memory" in " ".join(refused.output.split())


@pytest.mark.parametrize(
    ("options", "advised"),
    [([], True), (["--fix", "micro_batch_size=2", "--alignment", "dpo"], False)],
)
def test_a_target_is_advised_where_it_has_plans(options: list[str], advised: bool, tmp_path: Path) -> None:
    """A plan that TRL cannot run is replaced by one that it can; a job that it cannot run is not."""
    plan, runner = tmp_path / "plan.json", CliRunner()
    assert runner.invoke(app, [*SMALL, "--space", "uniform", *options, "--out", str(plan)]).exit_code == 0
    done = runner.invoke(app, ["export", str(plan), "--to", "trl"])
    assert done.exit_code == 2, done.output
    assert ("solve with --target trl" in " ".join(done.stderr.split())) == advised


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--target", "megatrn"], "Did you mean megatron?"),
        (["--target-version", "core_v0.15.0"], "without --target"),
        (["--target", "megatron", "--target-version", "core_v9"], "core_v9"),
        (["--target", "accelerate", "--fix", "pp=2"], "no pipeline"),
        (["--target", "automodel", "--precision", "fp8"], "fp8"),
        (["--target", "megatron", "--inference"], "inference"),
    ],
)
def test_what_no_target_has_is_refused(options: list[str], words: str) -> None:
    """Unknown names and versions, and requests that leave a target nothing, end with what to do."""
    done = CliRunner().invoke(app, [*SMALL, *options])
    assert done.exit_code == 2
    assert words in done.output
