"""Switches of the execution from the command line: what is opened, what is fixed, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from milpplan.cli.app import app
from milpplan.problem import load_hardware

POOR = ("solve", "llama2-7b", "rtx4090", "--gpus", "2", "--global-batch", "8", "--seq-len", "2048")


def run(*words: str) -> Result:
    """The command line in this process."""
    return CliRunner().invoke(app, list(words))


@pytest.mark.long
def test_poor_gpus_train_with_their_host(tmp_path: Path) -> None:
    """Two RTX 4090 have 48 of the 121 GB that the states of Llama-2 7B take: with offloading there is a proved
    plan, and simulating its file says the same, hidden and exposed transfers and host memory included."""
    out = tmp_path / "plan.json"
    done = run(*POOR, "--space", "uniform", "--allow", "offload", "--json", "--out", str(out))
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["status"] == "optimal"
    assert found["plan"]["layout"]["offload_optimizer"] is True
    assert found["breakdown"]["offload_exposed"] > 0
    assert found["hidden"]["offload_hidden"] > 0
    held = [stage["memory"]["host_bytes"] for stage in found["plan"]["stages"]]
    assert max(held) == found["host_memory_bytes"] <= found["host_capacity_bytes"]
    # 12 bytes of optimizer states for each of the 6.74e9 parameters are on the host.
    assert sum(held) * found["plan"]["layout"]["tp"] > 12 * 6.7e9
    again = run("simulate", str(out), "--json")
    assert again.exit_code == 0
    simulated = json.loads(again.stdout)
    for name in ("step_time_s", "breakdown", "hidden", "host_memory_bytes", "peak_memory_bytes"):
        assert simulated[name] == found[name]


@pytest.mark.long
def test_report_says_what_is_on_the_host() -> None:
    """The first screen names the switches; --verbose shows host memory and exposed transfers as well."""
    offloads = "--fix", "offload_optimizer=true", "--fix", "offload_activations=on"
    words = (*POOR, "--space", "uniform", *offloads, "--memory-margin", "0")
    switches = "on the host: activations, optimizer"
    for options, shown in (((), (switches,)), (("--verbose",), (switches, "host, usable", "offload exposed"))):
        done = run(*words, *options)
        assert done.exit_code == 0
        for part in shown:
            assert part in done.stdout


@pytest.mark.parametrize(
    ("fix", "shown"),
    [
        (("tp_overlap=ring", "sequence_parallel=true"), "tensor-parallel overlap: ring"),
        pytest.param(("gather_again=false",), "inputs stay gathered", marks=pytest.mark.long),
        pytest.param(("pp_scatter_gather=true",), "stages scatter and gather", marks=pytest.mark.long),
    ],
)
def test_fixed_switches_are_shown(fix: tuple[str, ...], shown: str) -> None:
    """Every switch can be fixed, and the report says that it is on."""
    words = ["solve", "llama2-7b", "dgx-a100-80", "--gpus", "16", "--global-batch", "16", "--space", "uniform"]
    done = run(
        *words,
        *(word for one in (*fix, "tp=2", "pp=2", "micro_batch_size=1", "zero_stage=1") for word in ("--fix", one)),
    )
    assert done.exit_code == 0
    assert shown in done.stdout


def test_allow_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    """A misspelt switch, a wrong word, and offloading without a memory for it are refused with what to do."""
    done = run(*POOR, "--allow", "ofload")
    assert done.exit_code == 2
    assert "offload" in done.stderr
    done = run(*POOR, "--fix", "tp_overlap=fast")
    assert done.exit_code == 2
    assert "none, ring, pipelined" in done.stderr
    bare = tmp_path / "bare.json"
    bare.write_text(load_hardware("rtx4090").model_copy(update={"host_memory": None}).model_dump_json())
    done = run("solve", "llama2-7b", str(bare), *POOR[3:], "--allow", "offload")
    assert done.exit_code == 2
    assert "[host_memory]" in done.stderr
