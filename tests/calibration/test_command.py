"""``milpplan calibrate``, and overlays on the command line."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from milpplan import load_hardware
from milpplan.calibration import write_overlay
from milpplan.cli import interrupts
from milpplan.cli.commands import calibrate
from milpplan.problem import PRIORS, Constants, Factor
from milpplan.reports.documents import ResultDocument, SimulationDocument
from tests.calibration.cases import Theta, measured_under, steps, varied
from tests.calibration.test_gemm_table import products
from tests.calibration.test_nccl import log
from tests.calibration.test_overlays import overlay
from tests.calibration.test_training_logs import MEGATRON
from tests.cli.test_cli import refused, run

SMALL = ["--gpus", "16", "--global-batch", "32", "--space", "uniform"]


@pytest.fixture
def runs_path(tmp_path: Path) -> Path:
    """Eight runs made with slower products, and one that says too little."""
    records = varied()[:8]
    made = measured_under(steps(records), Theta(gemm_efficiency=0.7), noise=0.005, outliers=0.0)
    for record, one in zip(records, made, strict=True):
        record["measured"]["step_time_s"] = one.step_time_s
    records.append({"id": "broken"})
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(records))
    return path


@pytest.mark.long
def test_runs_become_an_overlay(runs_path: Path, tmp_path: Path) -> None:
    """The table, the file, one JSON document; what was left out is told."""
    out = tmp_path / "mine.toml"
    words = ["calibrate", str(runs_path), "--hardware", "dgx-h100", "--out", str(out)]
    result = run(*words, "--constant", "gemm_efficiency", "--constant", "scale_out_efficiency", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    fitted = {one["name"]: one for one in document["fit"]["constants"]}
    assert fitted["gemm_efficiency"]["value"] == pytest.approx(0.7, abs=0.03)
    assert any("broken" in text for text in document["told"])
    hardware = load_hardware(out)
    assert hardware.uncertainty is not None
    assert hardware.software.name == "dgx-h100-runs"
    shown = run(*words, "--constant", "gemm_efficiency", "--name", "named")
    assert "runs left out" in " ".join(shown.stdout.split())
    assert load_hardware(out).software.name == "named"


def test_logs_and_products(tmp_path: Path) -> None:
    """Overlays of an nccl log and of products, one on the other, then a solve with an error bar."""
    (tmp_path / "nccl.txt").write_text(log())
    (tmp_path / "products.csv").write_text(products(0.8))
    first, second = tmp_path / "network.toml", tmp_path / "gemm.toml"
    done = run("calibrate", str(tmp_path / "nccl.txt"), "--hardware", "dgx-h100", "--out", str(first))
    assert done.exit_code == 0, done.output
    assert "all_reduce" in done.stdout
    done = run("calibrate", str(tmp_path / "products.csv"), "--hardware", str(first), "--out", str(second))
    assert done.exit_code == 0, done.output
    assert 'base = "network.toml"' in second.read_text()
    assert load_hardware(second).scale_up.all_reduce == load_hardware(first).scale_up.all_reduce
    assert "gemm" in run("show", str(second)).stdout


@pytest.mark.long
def test_error_bars_on_the_command_line(tmp_path: Path) -> None:
    """solve and simulate print the bar and have it in their documents; without an overlay it is of the priors."""
    path, plan = tmp_path / "mine.toml", tmp_path / "plan.json"
    write_overlay(path, overlay(constants=Constants(gemm_efficiency=Factor(value=0.9, one_sigma=0.05))))
    shown = run("solve", "llama3-8b", str(path), *SMALL, "--check-ends", "--out", str(plan))
    assert shown.exit_code == 0, shown.output
    text = " ".join(shown.stdout.split())
    assert "error bar" in text
    assert "at both ends among all plans of the space" in text
    document = ResultDocument.model_validate_json(plan.read_text(), strict=True)
    assert document.error_bar is not None
    assert document.error_bar.above_s > 0
    assert document.robustness is not None
    assert document.robustness.solved_again
    simulated = run("simulate", str(plan), "--json")
    again = SimulationDocument.model_validate_json(simulated.stdout, strict=True)
    assert again.error_bar == document.error_bar
    assert "error bar" in run("simulate", str(plan)).stdout
    plain = run("solve", "llama3-8b", "dgx-h100", *SMALL, "--json")
    known = json.loads(plain.stdout)["error_bar"]
    assert known["overlay"] == PRIORS.overlay
    assert known["above_s"] > document.error_bar.above_s


@pytest.mark.parametrize(
    "text", ["", "hello", "[]", "{}", "[1, 2]", "m,n,k,time_s\nx,1,1,1\n", "#  size count\n", "\x00"]
)
def test_hostile_sources_are_refused(tmp_path: Path, text: str) -> None:
    """Three parts, exit code 2, no file."""
    path, out = tmp_path / "source.txt", tmp_path / "out.toml"
    path.write_text(text)
    refused(run("calibrate", str(path), "--hardware", "dgx-h100", "--out", str(out)))
    assert not out.exists()


def test_other_mistakes(tmp_path: Path, runs_path: Path) -> None:
    """Files that do not exist, a hardware that does not, an unknown constant, writing over the source."""
    out = str(tmp_path / "out.toml")
    refused(run("calibrate", str(tmp_path / "none.json"), "--hardware", "dgx-h100", "--out", out))
    refused(run("calibrate", str(runs_path), "--hardware", "dgx-h999", "--out", out))
    refused(run("calibrate", str(runs_path), "--hardware", "dgx-h100", "--out", str(runs_path)))
    refused(run("calibrate", str(runs_path), "--hardware", "dgx-h100", "--out", out, "--constant", "speed"))
    refused(run("calibrate", str(runs_path), "--hardware", "dgx-h100", "--out", str(tmp_path / "no" / "x.toml")))
    name = ["--name", "dgx-h100"]
    refused(
        run(
            "calibrate",
            str(runs_path),
            "--hardware",
            "dgx-h100",
            "--out",
            out,
            "--constant",
            "gemm_efficiency",
            *name,
        )
    )


def test_a_training_log_alone_is_named_and_refused(tmp_path: Path) -> None:
    """A log alone says how long a step takes and not of what: the message names the program and the way on."""
    source, out = tmp_path / "meg.log", tmp_path / "out.toml"
    source.write_text(MEGATRON.format(number=10, ms=8512.3, batch=128))
    told = refused(run("calibrate", str(source), "--hardware", "dgx-h100", "--out", str(out)))
    for word in ("training log of Megatron-LM", "milpplan calibrate SCRIPT meg.log"):
        assert word in told


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """A source or a hardware file that is a pipe is refused at once: nobody may ever write to it."""
    pipe, out = tmp_path / "pipe", str(tmp_path / "out.toml")
    os.mkfifo(pipe)
    refused(run("calibrate", str(pipe), "--hardware", "dgx-h100", "--out", out))
    refused(run("calibrate", str(tmp_path), "--hardware", str(pipe), "--out", out))


def test_the_time_limit_ends_a_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit that would never end is left at the limit with the code of a command without an answer; no overlay."""
    out = tmp_path / "out.toml"
    monkeypatch.setattr(interrupts, "LATE_S", 0.0)
    monkeypatch.setattr(calibrate, "calibrated", lambda *_: signal.pause())
    words = ["calibrate", str(tmp_path), "--hardware", "dgx-h100", "--out", str(out)]
    assert run(*words, "--time-limit", "0.1").exit_code == 5
    assert not out.exists()
    refused(run(*words, "--time-limit", "-1"))
