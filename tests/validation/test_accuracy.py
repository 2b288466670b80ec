"""Errors, ranking and lines on runs whose truth is known."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from milpplan.cli.app import app
from milpplan.problem import MEMORY_MARGIN
from milpplan.validation import (
    Errors,
    GroupedErrors,
    Sweep,
    compare,
    fitted,
    kendall_tau,
    memory_margin,
    summarise,
)
from milpplan.validation.runs import read_runs
from tests.validation.cases import exact_record, record, written

LAYOUTS = ((1, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2), (4, 1, 1), (8, 1, 2))


def sweep_records() -> list[dict[str, object]]:
    """Six layouts of one job, measured exactly as simulated."""
    records = []
    for index, (tp, pp, micro) in enumerate(LAYOUTS):
        degrees = {"parallel__tp": tp, "parallel__pp": pp, "parallel__dp": 16 // (tp * pp)}
        records.append(exact_record(id=f"case-{index}", parallel__micro_batch=micro, **degrees))
    return records


def test_a_file_that_milpplan_measured_has_no_error(tmp_path: Path) -> None:
    """Zero error of time and memory, tau 1, regret 0."""
    summary = summarise(compare(read_runs(written(tmp_path / "runs.json", sweep_records()))))
    assert summary.dense is not None
    assert summary.dense.max_abs_error < 1e-12
    allocated = summary.memory["allocated"]
    assert allocated is not None
    assert allocated.max_abs_error < 1e-12
    (sweep,) = summary.sweeps
    assert sweep.kendall_tau == pytest.approx(1)
    assert (sweep.regret, sweep.pick_regret, sweep.failed_trials) == (0, 0, 0)
    assert sweep.num_ok == len(LAYOUTS)
    assert summary.fit is not None
    assert summary.fit.accuracy == 1


def outcome(group: str, margin: float, status: str, fits: bool = True) -> Any:
    """A run that leaves a share of 100 bytes, and how it ended."""
    return SimpleNamespace(
        decides_fit=True,
        run=SimpleNamespace(group=group, measured=SimpleNamespace(status=status)),
        report=SimpleNamespace(fits=fits, memory_margin_bytes=100 * margin),
        statement=SimpleNamespace(
            problem=SimpleNamespace(hardware=SimpleNamespace(accelerator=SimpleNamespace(memory_bytes=100)))
        ),
    )


def test_the_margin_is_what_outcomes_ask_for() -> None:
    """The margin is the least whole per cent with which, in every large source, fewer than 2 % ran out."""
    fine = [outcome("large", 0.5, "ok") for _ in range(200)]
    assert memory_margin(fine) == 0
    assert memory_margin([*fine, *(outcome("large", 0.031, "oom") for _ in range(4))]) == 0
    assert memory_margin([*fine, *(outcome("large", 0.031, "oom") for _ in range(5))]) == 0.04
    assert memory_margin([*fine, *(outcome("large", 0.031, "oom", fits=False) for _ in range(5))]) == 0
    assert memory_margin([*fine, *(outcome("small", 0.031, "oom") for _ in range(50))]) == 0
    assert memory_margin([*fine, *(outcome("large too", 0.07, "oom") for _ in range(150))]) == 0.08


@pytest.mark.long
def test_the_default_margin_is_that_of_the_published_runs() -> None:
    """The shipped runs ask for the margin that hardware has by default, and few of the safe ones ran out."""
    comparisons = compare(read_runs(None)).comparisons
    assert memory_margin(comparisons) == MEMORY_MARGIN
    deciding = [comparison for comparison in comparisons if comparison.decides_fit]
    safe = [comparison for comparison in deciding if comparison.report.memory_verdict == "safe"]
    assert len(safe) > 1000
    assert sum(comparison.run.measured.status == "oom" for comparison in safe) < 0.02 * len(safe)


def test_wrong_predictions_cost_regret(tmp_path: Path) -> None:
    """With the times turned round tau is -1 and the first choice is the worst: slowest over best, minus 1."""
    records = sweep_records()
    times = [float(one["measured"]["step_time_s"]) for one in records]  # type: ignore[index]
    for one, time in zip(records, times, strict=True):
        one["measured"]["step_time_s"] = 1 / time  # type: ignore[index]
    (sweep,) = summarise(compare(read_runs(written(tmp_path / "runs.json", records)))).sweeps
    assert sweep.kendall_tau == pytest.approx(-1)
    assert sweep.regret == pytest.approx(max(times) / min(times) - 1)


def test_layouts_that_ran_out_of_memory_count_as_failed_trials(tmp_path: Path) -> None:
    """The pick goes on to the next layout; the regret of the time does not look at them."""
    records = sweep_records()
    best = min(records, key=lambda one: one["measured"]["step_time_s"])  # type: ignore[index]
    best["measured"] = {"status": "oom"}
    summary = summarise(compare(read_runs(written(tmp_path / "runs.json", records))))
    (sweep,) = summary.sweeps
    assert (sweep.failed_trials, sweep.pick_regret, sweep.num_oom) == (1, 0, 1)
    assert summary.fit is not None
    assert summary.fit.accuracy == pytest.approx((len(LAYOUTS) - 1) / len(LAYOUTS))
    assert summary.fit.recall == 0


def test_runs_of_other_jobs_do_not_compete(tmp_path: Path) -> None:
    """Another batch, another model or another number of GPUs is another sweep."""
    records = [
        exact_record(id="a"),
        exact_record(id="b", parallel__global_batch=128),
        exact_record(id="c", model__layers=16),
        exact_record(id="d", hardware__gpus_total=32),
        exact_record(id="e", flags=["old_pp_engine"], parallel__pp=1),
    ]
    assert summarise(compare(read_runs(written(tmp_path / "runs.json", records)))).sweeps == ()


def test_runs_of_other_releases_and_frameworks_compete_apart(tmp_path: Path) -> None:
    """Layouts of two releases are no sweep; they are a job of several releases, and so are two frameworks."""
    records = sweep_records()[:2]
    assert [len(one) for one in _sweeps_of(tmp_path, records)] == [1, 0]
    for number, one in enumerate(records):
        one["source"] = f"performance summary, release 25.{number}"
    assert [len(one) for one in _sweeps_of(tmp_path, records)] == [0, 1]
    for number, one in enumerate(records):
        one["source"], one["framework"] = "performance summary", ("NeMo", "Megatron-LM")[number]
    assert [len(one) for one in _sweeps_of(tmp_path, records)] == [0, 1]


def _sweeps_of(tmp_path: Path, records: list[dict[str, object]]) -> tuple[tuple[Sweep, ...], tuple[Sweep, ...]]:
    summary = summarise(compare(read_runs(written(tmp_path / "runs.json", records))))
    return summary.sweeps, summary.sweeps_across


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([{"measured__tokens_per_s_per_gpu": 4.0}], "as printed"),
        ([{"parallel__dp": 8}], "dp=8 is printed"),
        ([{"parallel__ep": 3}], "ep=3 is printed"),
        ([{"parallel__grad_accum": 4}], "accumulation is 16"),
        ([{}, {"id": "case-2", "measured__step_time_s": 1.2}], "20.0 % apart"),
        ([{}, {"id": "case-2", "measured__step_time_s": 1.05}], ""),
        ([{}, {"id": "case-2", "measured__step_time_s": 1.2, "source": "release 2.1"}], ""),
        ([{"measured__tokens_per_s_per_gpu": 8192.0}], ""),
    ],
)
def test_records_that_contradict_themselves_or_each_other_are_named(
    changes: list[dict[str, object]], words: str, tmp_path: Path
) -> None:
    """One step in two ways, degrees and batches that do not multiply, and reruns that are far apart."""
    records = [record(**one) for one in changes]
    found = summarise(compare(read_runs(written(tmp_path / "runs.json", records)))).contradictions
    assert [one.ids for one in found] == ([tuple(one["id"] for one in records)] if words else [])
    assert all(words in one.reason for one in found)


def test_only_complete_sound_runs_are_scored(tmp_path: Path) -> None:
    """Grade, status and flags decide."""
    records = [
        record(id="scored"),
        record(id="grade", grade="B"),
        record(id="flag", flags=["conflicting_reruns"]),
        record(id="oom", measured={"status": "oom"}),
    ]
    validation = compare(read_runs(written(tmp_path / "runs.json", records)))
    assert [one.run.id for one in validation.comparisons if one.scored] == ["scored"]


def test_micro_batches_lie_on_a_line(tmp_path: Path) -> None:
    """Measured = 2 x predicted + 3 s: the slope is half, the intercept shifted by 3 s; over 48 micro-batches the
    slope lacks half of what the measured one adds."""
    records = []
    for batch in (64, 128, 256):
        one = exact_record(id=f"m-{batch}", parallel__global_batch=batch)
        one["measured"]["step_time_s"] = 2 * one["measured"]["step_time_s"] + 3
        records.append(one)
    summary = summarise(compare(read_runs(written(tmp_path / "runs.json", records))))
    (family,) = [one for one in summary.families if one.varies == "micro_batches"]
    assert family.values == (16.0, 32.0, 64.0)
    assert family.slope_error_fraction == pytest.approx(-0.5)
    assert family.measured.intercept_s == pytest.approx(2 * family.predicted.intercept_s + 3)
    start, mean = family.measured.intercept_s, family.mean_step_s
    assert family.intercept_error_fraction == pytest.approx((start - 3) / 2 / start - 1)
    assert family.intercept_error_of_step == pytest.approx(-(start + 3) / 2 / mean)
    assert family.slope_error_of_step == pytest.approx(-family.measured.slope_s / 2 * 48 / mean)
    (errors,) = [one for one in summary.family_errors if one.varies == "micro_batches"]
    assert (errors.num_families, errors.num_runs, errors.slope_error) == (1, 3, pytest.approx(0.5))
    assert errors.intercept_of_step == pytest.approx(abs(family.intercept_error_of_step))


def test_a_line_that_falls_has_no_relative_slope(tmp_path: Path) -> None:
    """Where more replicas were measured to be faster, the slope's error is told as a share of the step only, and
    the command prints it."""
    records = []
    for gpus, time in ((16, 3.0), (32, 2.0), (64, 1.0)):
        degrees = {"hardware__gpus_total": gpus, "parallel__dp": gpus // 4, "parallel__global_batch": 4 * gpus}
        one = record(id=f"g-{gpus}", **degrees)
        one["measured"]["step_time_s"] = time
        records.append(one)
    path = written(tmp_path / "runs.json", records)
    summary = summarise(compare(read_runs(path)))
    (family,) = summary.families
    assert family.varies == "gpus"
    assert family.slope_error_fraction is None
    assert family.slope_error_of_step == pytest.approx((family.predicted.slope_s - family.measured.slope_s) * 24)
    result = CliRunner().invoke(app, ["validate", "--runs", str(path)])
    assert re.search(r"simumax-b200\s+GPUs 16 to 64\s+3\s", result.stdout)
    assert re.search(r"simumax-b200\s+GPUs\s+1\s+3\s+-\s", result.stdout)
    document = json.loads(CliRunner().invoke(app, ["validate", "--runs", str(path), "--json"]).stdout)
    (told,) = document["summary"]["families"]
    assert told["slope_error_fraction"] is None
    assert told["intercept_error_fraction"] == pytest.approx(family.intercept_error_fraction)
    assert document["summary"]["family_errors"][0]["slope_error"] is None


def test_validate_says_how_many_runs_are_within_one_sigma(tmp_path: Path) -> None:
    """One of two runs is as predicted, the other takes ten times as long: half are within the priors' sigma."""
    exact, slow = exact_record(id="exact", group="new"), exact_record(id="slow", group="new")
    slow["measured"]["step_time_s"] *= 10
    path = written(tmp_path / "runs.json", [exact, slow])
    text = CliRunner().invoke(app, ["validate", "--runs", str(path)]).stdout
    assert "error bars: 50 % of a sample of scored runs are within one sigma" in text
    document = json.loads(CliRunner().invoke(app, ["validate", "--runs", str(path), "--json"]).stdout)
    assert document["summary"]["within_one_sigma_by_source"] == {"new": 0.5}


def test_a_line_is_found_exactly() -> None:
    """Points of 3 x + 2."""
    line = fitted([1, 2, 5], [5, 8, 17])
    assert (line.slope_s, line.intercept_s) == (pytest.approx(3), pytest.approx(2))


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 2, 3], [1, 3, 2], 1 / 3),
        ([1, 1, 2], [1, 2, 3], 2 / math.sqrt(2 * 3)),
        ([1, 1, 1], [1, 2, 3], None),
    ],
)
def test_kendall_tau(first: list[float], second: list[float], expected: float | None) -> None:
    """Concordant minus discordant pairs over the geometric mean of the pairs not tied, worked out by hand."""
    tau = kendall_tau(first, second)
    assert tau == (None if expected is None else pytest.approx(expected))


def test_sources_weigh_the_same() -> None:
    """A source with a hundred runs counts like one with a single run."""
    many, one = Errors.of([(f"{i}", 0.1) for i in range(100)]), Errors.of([("x", -0.3)])
    assert many is not None
    assert one is not None
    both = GroupedErrors.of([many, one])
    assert both is not None
    assert both.mean_abs_error == pytest.approx(0.2)
    assert both.mean_error == pytest.approx(-0.1)
    assert (both.max_abs_error, both.worst_id) == (pytest.approx(0.3), "x")


def test_the_command_prints_one_document(tmp_path: Path) -> None:
    """--json is JSON with the figures promised, and a run that cannot be stated is in it with its reason."""
    records = [*sweep_records(), record(id="tpu", hardware__gpu="TPUv4")]
    path = written(tmp_path / "runs.json", records)
    result = CliRunner().invoke(app, ["validate", "--runs", str(path), "--json"])
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    by_id = {one["id"]: one for one in document["runs"]}
    assert by_id["case-0"]["error_fraction"] == pytest.approx(0, abs=1e-12)
    assert by_id["case-0"]["assumptions"]
    assert "TPUv4" in by_id["tpu"]["not_simulated"]
    summary = document["summary"]
    for key in ("by_source", "by_generation", "mean_abs_error", "median_abs_error", "max_abs_error"):
        assert key in summary
    assert summary["oom_accuracy"] == 1
    assert summary["sweeps"][0]["regret"] == 0


def test_the_command_draws_figures(tmp_path: Path) -> None:
    """--plot writes well-formed SVG with a point a run; hostile names are escaped."""
    records = [exact_record(id="<script>&\x1b[31m"), exact_record(id="b", parallel__pp=1)]
    path = written(tmp_path / "runs.json", records)
    result = CliRunner().invoke(app, ["validate", "--runs", str(path), "--plot", str(tmp_path / "figures")])
    assert result.exit_code == 0
    names = {file.name for file in (tmp_path / "figures").iterdir()}
    assert names == {"step_time_hopper.svg", "sweeps.svg", "memory.svg"}
    assert "b: measured 1 ×, predicted 1 ×" in (tmp_path / "figures" / "sweeps.svg").read_text(encoding="utf-8")
    text = (tmp_path / "figures" / "step_time_hopper.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    titles = [node for node in root.iter() if node.tag.endswith("title")]
    assert len(titles) == 2
    assert "\x1b" not in text


def test_the_command_reports_the_rest_of_a_bad_file(tmp_path: Path) -> None:
    """Exit code 2, a message on stderr, and the sound runs on stdout."""
    path = written(tmp_path / "runs.json", [record(id="bad", grade=7), exact_record(id="good")])
    result = CliRunner().invoke(app, ["validate", "--runs", str(path)])
    assert result.exit_code == 2
    assert "'bad'" in result.stderr
    assert "1 runs simulated" in result.stdout
    assert re.search(r"simumax-b200\s+1\s+1\s+1", result.stdout)
