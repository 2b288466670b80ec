"""``min-gpus``, deadlines in days, prices, and several kinds of hardware in one ``solve``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from milpplan.cli.outcome import beyond_numbers
from milpplan.reports.answers import ChoiceDocument, FewestDocument
from tests.cli.test_cli import refused, run

JOB = ["--global-batch", "64", "--space", "uniform"]


@pytest.mark.long
def test_min_gpus_names_the_fewest_and_why_not_fewer(tmp_path: Path) -> None:
    """The number, its plan in a file that can be simulated, and what the next smaller one lacks."""
    path = tmp_path / "plan.json"
    done = run("min-gpus", "llama2-13b", "dgx-a100-80", *JOB, "--out", str(path))
    assert done.exit_code == 0, done.output
    assert "GPUs are the fewest that have a plan, of 1 to 8 and whole nodes of 8: proved" in done.stdout
    assert "No plan fits" in done.stdout
    assert run("simulate", str(path)).exit_code == 0


@pytest.mark.long
def test_min_gpus_meets_a_deadline() -> None:
    """More GPUs for an earlier end; the numbers to try can be given."""
    words = ["min-gpus", "llama3-8b", "dgx-h100", *JOB, "--gpus", "8:64:8", "--tokens", "1e11", "--json"]
    week, days = (json.loads(run(*words, "--deadline-days", days).stdout) for days in ("30", "3"))
    assert week["num_gpus"] < days["num_gpus"]
    layout = days["result"]["plan"]["layout"]
    assert days["num_gpus"] == layout["tp"] * layout["cp"] * layout["pp"] * layout["dp"]
    assert days["refused"] == list(range(8, days["num_gpus"], 8))
    assert not days["whole_nodes"]
    assert FewestDocument.model_validate(days).num_gpus == days["num_gpus"]
    seconds = 1e11 / days["result"]["tokens_per_s"]
    assert seconds <= 3 * 86400


def test_min_gpus_prints_the_fastest_plan_on_request() -> None:
    """Not the simplest within the tolerance, and then no other plan is named."""
    words = ["min-gpus", "llama3-8b", "dgx-h100", *JOB, "--gpus", "8:16:8", "--gap", "0.05", "--json"]
    simplest, fastest = (json.loads(run(*words, *more).stdout)["result"] for more in ((), ("--fastest",)))
    assert fastest["step_time_s"] < simplest["step_time_s"]
    assert simplest["fastest"]["plan"]["layout"] == fastest["plan"]["layout"]
    assert fastest["fastest"] is None


def test_a_price_says_what_the_run_costs() -> None:
    """In the report and in the document, with the proved least."""
    words = ["solve", "llama3-8b", "dgx-h100", "--gpus", "16", *JOB, "--tokens", "1e12"]
    told = run(*words, "--price-per-gpu-hour", "2.5")
    assert told.exit_code == 0, told.output
    assert "whole run" in told.stdout
    document = json.loads(run(*words, "--price-per-gpu-hour", "dgx-h100=2.5", "--json").stdout)["run"]
    assert document["cost"] == pytest.approx(2.5 * document["gpu_hours"])
    assert document["least_cost"] <= document["cost"]
    assert json.loads(run(*words, "--json").stdout)["run"]["cost"] is None


def test_several_kinds_of_hardware_are_set_in_order(tmp_path: Path) -> None:
    """The cheaper one wins by its price, with proof; its result is what is written."""
    path = tmp_path / "best.json"
    words = ["solve", "llama3-8b", "dgx-a100-80,dgx-h100", "--gpus", "16", *JOB, "--tokens", "1e12"]
    cheap = run(*words, "--price-per-gpu-hour", "dgx-a100-80=0.5,dgx-h100=5", "--out", str(path))
    assert cheap.exit_code == 0, cheap.output
    assert cheap.stdout.startswith("dgx-a100-80 is best")
    assert "dgx-a100-80" in json.loads(path.read_text())["problem"]["hardware"]["name"]
    document = json.loads(run(*words, "--json").stdout)
    assert (document["best"], document["measure"], document["proved"]) == ("dgx-h100", "s_per_token", True)
    assert document["ahead_fraction"] > 0.5
    assert ChoiceDocument.model_validate(document).best == "dgx-h100"
    narrow = json.loads(run(*words, "--forbid", "tp=2", "--json").stdout)
    certificates = [one["result"]["certificate"]["forbid"] for one in narrow["candidates"]]
    assert certificates == [[{"tp": 2}], [{"tp": 2}]]


PRICED = ["solve", "llama3-8b", "dgx-a100-80,dgx-h100", "--gpus", "16", *JOB, "--tokens", "1e12"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([*PRICED, "--price-per-gpu-hour", "dgx-a100-80=2"], "no price for dgx-h100"),
        ([*PRICED, "--price-per-gpu-hour", "dgx-a10=2,dgx-h100=2"], "Did you mean"),
        ([*PRICED, "--price-per-gpu-hour", "free"], "positive price"),
        ([*PRICED, "--price-per-gpu-hour", "-3"], "positive price"),
        ([*PRICED[:-2], "--price-per-gpu-hour", "3"], "without --tokens"),
        ([*PRICED, "--objective", "num_gpus"], "at least two"),
        ([*PRICED, "--deadline-days", "3", "--deadline-hours", "3"], "Expected one of them"),
        ([*PRICED, "--deadline-days", "nan"], "positive number of days"),
        (["solve", "llama3-8b", "dgx-h100,dgx-h100", "--gpus", "16", *JOB], "different ones"),
        (["solve", "llama3-8b", "dgx-h100,dgx-h10", "--gpus", "16", *JOB], "Did you mean"),
        (["min-gpus", "llama3-8b", "dgx-h100", *JOB, "--deadline-days", "3"], "--tokens is missing"),
        (["min-gpus", "llama3-8b", "dgx-h100"], "--global-batch"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], told: str) -> None:
    """Three parts each."""
    assert told in refused(run(*words))


@pytest.mark.parametrize(
    ("error", "said", "files"), [(MemoryError(), "Memory ran out", False), (OverflowError("9e999"), "9e999", True)]
)
def test_memory_that_runs_out_is_not_called_a_wrong_number(error: BaseException, said: str, files: bool) -> None:
    """An overflow blames the numbers given; memory that ran out says so, and to ask for less."""
    found = beyond_numbers(error)
    assert said in found.seen
    assert ("numbers given" in found.seen) is files
    assert ("less" in found.do) is not files
