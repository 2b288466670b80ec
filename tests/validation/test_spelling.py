"""Other people's words for the format's fields: read as those, told, and never for a value of a wrong type."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milpplan.validation import compare
from milpplan.validation.runs import read_runs
from milpplan.validation.runs.reader import respelled
from tests.validation.cases import record, written

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def measured(**values: Any) -> dict[str, Any]:
    """A record (16 GPUs, 64 sequences of 2,048 tokens) with these measurements only."""
    return record() | {"measured": {"status": "ok"} | values}


@pytest.mark.parametrize(
    ("values", "field", "value"),
    [
        ({"step_time_ms": 812.0}, "step_time_s", 0.812),
        ({"iterations_per_s": 2.0}, "step_time_s", 0.5),
        ({"samples_per_s": 32.0}, "step_time_s", 2.0),
        ({"tokens_per_s": 160_000.0}, "tokens_per_s_per_gpu", 10_000.0),
        ({"tflops_total": 3200.0}, "tflops_per_gpu", 200.0),
        ({"pflops_total": 3.2}, "tflops_per_gpu", 200.0),
        ({"peak_mem_GB": 40.0}, "peak_mem_GiB", 40e9 / 2**30),
        ({"mfu": 40.0}, "mfu", 0.4),
        ({"hfu": 55}, "hfu", 0.55),
    ],
)
def test_rates_in_other_units(values: dict[str, Any], field: str, value: float) -> None:
    """Become the format's own, worked out by hand, and are told."""
    data, told = respelled(measured(**values))
    assert isinstance(data, dict)
    assert data["measured"][field] == pytest.approx(value)
    assert len(told) == 1
    (name,) = values
    assert name in told[0]


@pytest.mark.parametrize(
    "values",
    [
        {"mfu": 0.4},
        {"mfu": 400.0},
        {"mfu": "40%"},
        {"step_time_s": 1.0, "step_time_ms": 900.0},
        {"step_time_ms": -1.0},
        {"step_time_ms": True},
        {"step_time_ms": float("nan")},
        {"tflops_total": 10**400},
    ],
)
def test_what_has_no_one_meaning_stays(values: dict[str, Any]) -> None:
    """A share of the peak, nonsense, text, and what the format's own field says already."""
    given_record = measured(**values)
    data, told = respelled(given_record)
    assert data == given_record or values != values  # NaN
    assert told == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"measured": {"status": "OK", "step_time_s": 1.0}}, "status 'OK' read as ok"),
        ({"measured": {"step_time_s": 1.0}}, "status ok (not given"),
        ({"parallel__recompute": True}, "recompute True read as full"),
        ({"parallel__recompute": "Selective"}, "read as selective"),
        ({"parallel__precision": "bfloat16"}, "read as bf16"),
        ({"kind": "pretraining"}, "read as pretrain"),
        ({"hardware__gpus_total": None}, "16 GPUs = dp x tp x pp x cp"),
        ({"parallel__tp": None}, "tp=2 from the number of GPUs and dp"),
        ({"parallel__global_batch": None, "parallel__global_batch_tokens": 131_072}, "read as 64 sequences"),
        ({"model": {"name": "meta-llama/Meta-Llama-3-8B", "seq_len": 2048}}, "shipped llama3-8b (not printed)"),
    ],
)
def test_a_partly_filled_record_is_compared(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    """With what was assumed among its assumptions."""
    file = read_runs(written(tmp_path / "runs.json", [record(**changes)]))
    assert file.rejected == ()
    (one,) = compare(file).comparisons
    assert any(words in text for text in one.statement.assumptions)


def test_a_record_without_a_grade_counts_in_no_score(tmp_path: Path) -> None:
    """It is of grade C, and of a source without a name."""
    data = record()
    del data["grade"], data["group"]
    (one,) = compare(read_runs(written(tmp_path / "runs.json", [data]))).comparisons
    assert (one.run.grade, one.run.group, one.scored) == ("C", "unnamed", False)


@pytest.mark.parametrize("packed", [False, True])
def test_one_record_a_line(tmp_path: Path, packed: bool) -> None:
    """Also compressed; a line that is no JSON is rejected by its number, and the others stay."""
    lines = [json.dumps(record(id="a")), "", '{"id": "b", broken', json.dumps(record(id="c"))]
    data = "\n".join(lines).encode()
    path = tmp_path / "runs.jsonl"
    path.write_bytes(gzip.compress(data) if packed else data)
    file = read_runs(path)
    assert [run.id for run in file.runs] == ["a", "c"]
    assert len(file.rejected) == 1
    assert "line 3" in file.rejected[0].seen


def test_a_single_record_and_a_list_under_runs(tmp_path: Path) -> None:
    """Are the same as a list of it."""
    path = tmp_path / "runs.json"
    for data in (record(), {"runs": [record()]}):
        path.write_text(json.dumps(data))
        assert [run.id for run in read_runs(path).runs] == ["case-1"]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["measured", "parallel", "model", "hardware", "grade", "kind"]), ANY_JSON)
def test_anything_goes_through(section: str, value: object) -> None:
    """No value of any part makes it fail, and the record given stays as it is."""
    data = record() | {section: value}
    before = repr(data)
    respelled(data)
    assert repr(data) == before
