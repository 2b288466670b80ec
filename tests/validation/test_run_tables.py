"""Every run is told: what was measured, predicted and assumed, and why others were not simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from milpplan.validation import accuracy_tables, compare, report, summarise
from milpplan.validation.accuracy_tables import document
from milpplan.validation.runs import read_runs
from tests.validation.cases import exact_record, record, written


def printed(tmp_path: Path, records: list[dict[str, Any]], each: bool = False) -> str:
    """What ``validate`` prints about these records, on a wide page."""
    validation = compare(read_runs(written(tmp_path / "runs.json", records)))
    console = Console(width=200)
    with console.capture() as captured:
        console.print(report(validation, summarise(validation), each))
    return captured.get()


def row(text: str, word: str) -> list[str]:
    """The cells of the line that starts with a word."""
    (line,) = (line for line in text.splitlines() if line.strip().startswith(word))
    return line.split()


def test_every_run_has_a_line_with_its_assumptions(tmp_path: Path) -> None:
    """Measured, how, predicted, errors, fit, and numbers of assumptions that the next table spells out."""
    printing = exact_record(id="case-2")
    printing["parallel"]["zero"] = None
    text = printed(tmp_path, [record(), printing])
    assert row(text, "case-1")[:4] == ["case-1", "1", "s", "time"]
    exact = row(text, "case-2")
    assert "0.0" in exact
    assert exact.count("yes") == 1
    number = row(text, exact[-1].split("-")[-1])  # the last assumption that the run names
    assert " ".join(number[1:-1]) == "ZeRO 1 (not printed)"
    assert number[-1] == "1"


def test_what_fits_is_told_beside_what_happened(tmp_path: Path) -> None:
    """A run that ran out of memory, and one that ran although it should not."""
    huge = {"model__hidden": 32768, "model__layers": 96}
    records = [
        record(id="oom-1", measured={"status": "oom"}, **huge),
        record(id="oom-2", measured={"status": "oom"}),
        record(id="ran-1", **huge),
    ]
    text = printed(tmp_path, records)
    for name, words in (("oom-1", "no (oom)"), ("oom-2", "yes (oom)"), ("ran-1", "no (ran)")):
        assert words in " ".join(row(text, name))


def test_of_many_runs_the_furthest_off_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each source, unless every run is asked for; how many are left is said."""
    monkeypatch.setattr(accuracy_tables, "MAX_RUNS_SHOWN", 2)
    records = [
        record(id=f"case-{number}", sweep_id=f"{number}", measured__step_time_s=float(number))
        for number in (1, 2, 900)
    ]
    text = printed(tmp_path, records)
    assert row(text, "case-900")
    assert "case-1" not in text
    assert "2 more with --each" in text
    assert all(row(printed(tmp_path, records, each=True), f"case-{number}") for number in (1, 2, 900))


def test_runs_not_simulated_are_named(tmp_path: Path) -> None:
    """Reason and run."""
    text = printed(tmp_path, [record(), record(id="case-2", parallel__schedule="ZB-2p")])
    assert "schedule ZB-2p is not modelled" in text
    assert row(text, "simumax-b200  schedule")[-1] == "case-2"


def test_measured_rates_are_those_of_the_measured_step(tmp_path: Path) -> None:
    """The document has tokens/s, FLOP/s and utilisation of both, counted alike: they differ as the steps do."""
    validation = compare(
        read_runs(written(tmp_path / "runs.json", [record(), record(id="b", measured={"status": "oom"})]))
    )
    timed, oom = document(validation, summarise(validation))["runs"]
    ratio = timed["predicted"]["step_time_s"]
    names = ("tokens_per_s_per_gpu", "model_flops_per_s_per_gpu", "hardware_flops_per_s_per_gpu", "mfu")
    for name in names:
        assert timed["measured"][name] == pytest.approx(timed["predicted"][name] * ratio)
        assert oom["measured"][name] is None
    assert timed["measured"]["tokens_per_s_per_gpu"] == 64 * 2048 / 16
