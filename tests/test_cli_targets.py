"""``solve --target``: only plans of one launcher, and what that costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from milpplan.cli.app import app

SMALL = ["solve", "llama3-8b", "dgx-h100", "--gpus", "8", "--global-batch", "16", "--gap", "1e-3"]


@pytest.mark.parametrize("target", ["megatron", "accelerate"])
def test_solve_export_import(target: str, tmp_path: Path) -> None:
    """The plan of a target is written, exported without a word of refusal, and imported with the same step."""
    out, launch = tmp_path / "plan.json", tmp_path / "launch"
    runner = CliRunner()
    solved = runner.invoke(app, [*SMALL, "--target", target, "--out", str(out)])
    assert solved.exit_code == 0, solved.output
    assert f"what {target}" in solved.output
    assert f"--target {target})" in " ".join(solved.output.split())
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
    assert json.loads(found.stdout)["plan"]["layout"] == document["plan"]["layout"]


def test_the_price_is_asked_only_where_there_is_one() -> None:
    """Without seconds for it there is no price, without --target no target; both are said by null."""
    runner = CliRunner()
    unpriced = runner.invoke(app, [*SMALL, "--target", "accelerate", "--price-limit", "0", "--json"])
    assert json.loads(unpriced.stdout)["target"] == {"name": "accelerate", "version": "1.15.0", "price": None}
    assert json.loads(runner.invoke(app, [*SMALL, "--space", "uniform", "--json"]).stdout)["target"] is None


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
