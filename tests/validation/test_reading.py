"""Files of measured runs: what is read, what is rejected and how it is told."""

from __future__ import annotations

import gzip
import json
from math import nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import strategies as st

from milpplan.errors import InvalidInputError, MilpplanError
from milpplan.validation import compare
from milpplan.validation.runs import read_runs
from milpplan.validation.runs import reader as reading
from tests.amounts import few_or_many
from tests.validation.cases import record, shipped_runs, written


def test_the_shipped_runs_are_all_readable() -> None:
    """No record of the published runs is rejected or has fields that are not known, and ids are unique."""
    file = read_runs(None)
    assert len(file.runs) > 3000
    assert file.rejected == ()
    assert file.told == {}


def test_the_shipped_runs_name_their_source() -> None:
    """Every published run says where it comes from."""
    assert all(run.source and run.url for run in shipped_runs().runs)


def test_plain_and_gzipped_are_the_same(tmp_path: Path) -> None:
    """A gzipped file gives the same runs, whatever its name."""
    plain = written(tmp_path / "runs.json", [record()])
    packed = tmp_path / "packed.bin"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_runs(plain).runs == read_runs(packed).runs


def test_a_wrong_record_is_named_and_the_others_stay(tmp_path: Path) -> None:
    """The message names file, record, id, field and value."""
    path = written(tmp_path / "runs.json", [record(id="bad", parallel__tp="8"), record(id="good")])
    file = read_runs(path)
    assert [run.id for run in file.runs] == ["good"]
    (error,) = file.rejected
    for word in ("runs.json", "record 0", "'bad'", "parallel.tp", "'8'"):
        assert word in error.seen
    assert error.expected
    assert error.do


@pytest.mark.parametrize(
    "wrong",
    [
        {"grade": "D"},
        {"measured": {"status": "fine"}},
        {"measured": {"status": "ok", "step_time_s": -1.0}},
        {"measured": {"status": "ok", "step_time_s": True}},
        {"hardware": []},
        {"model": {"name": "x", "layers": 1.5}},
        {"parallel": {"zero": 4}},
        {"parallel": {"recompute": "some"}},
        {"id": ""},
        {"flags": "old_pp_engine"},
    ],
)
def test_wrong_values_are_rejected(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """Types and ranges are strict."""
    file = read_runs(written(tmp_path / "runs.json", [record() | wrong]))
    assert file.runs == ()
    assert len(file.rejected) == 1


def test_fields_of_the_source_pass_and_are_told(tmp_path: Path) -> None:
    """An unknown field is kept out and named in the run's assumptions."""
    path = written(tmp_path / "runs.json", [record(parallel__zp=3, weather="fine")])
    file = read_runs(path)
    assert file.told == {
        "case-1": tuple(
            f"field {name} of the record is not known and was ignored" for name in ("weather", "parallel.zp")
        )
    }
    assert any("parallel.zp" in text for text in compare(file).comparisons[0].statement.assumptions)


def test_an_id_counts_once(tmp_path: Path) -> None:
    """The second record of an id is rejected."""
    file = read_runs(written(tmp_path / "runs.json", [record(), record()]))
    assert len(file.runs) == 1
    assert "second time" in file.rejected[0].seen


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"[1, 2",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        gzip.compress(b"[]", mtime=0)[:-4],
        gzip.compress(b"[]", mtime=0) + b"rubbish after the end",
        b"\x1f\x8bnot gzip at all",
        b'{"runs": []}',
    ],
)
def test_files_that_are_no_lists_of_records_are_refused(tmp_path: Path, data: bytes) -> None:
    """Anything but a list of one record or more is a three-part error, never a traceback."""
    path = tmp_path / "runs.json"
    path.write_bytes(data)
    with pytest.raises(InvalidInputError) as caught:
        read_runs(path)
    assert "runs.json" in caught.value.seen
    assert caught.value.expected
    assert caught.value.do


def test_every_wrong_field_is_named(tmp_path: Path) -> None:
    """However many fields are wrong: a NaN does not hide behind the first ones."""
    wrong = record(
        model__layers="x", model__hidden="y", parallel__tp=-1, parallel__pp=0, parallel__dp=0, measured__mfu=nan
    )
    (error,) = read_runs(written(tmp_path / "runs.json", [wrong])).rejected
    for field in ("model.layers", "model.hidden", "parallel.tp", "parallel.pp", "parallel.dp", "measured.mfu"):
        assert field in error.seen


@pytest.mark.parametrize("before", ["[", '{"runs": [', '\n{ "runs" :\n['])
def test_whole_records_before_a_fault_are_read(tmp_path: Path, before: str) -> None:
    """A list that breaks off in its third record has two that count, and a message that names the place."""
    path = tmp_path / "runs.json"
    whole = ",\n".join(json.dumps(record(id=f"case-{number}")) for number in (1, 2))
    path.write_text(f'{before}{whole},\n{{"id": "case-3", ')
    file = read_runs(path)
    assert [run.id for run in file.runs] == ["case-1", "case-2"]
    assert "after record 1" in file.rejected[0].seen
    assert "line" in file.rejected[0].seen


def test_a_number_of_thousands_of_digits_costs_its_record_alone(tmp_path: Path) -> None:
    """It is refused with its field, and the other records are read."""
    path = tmp_path / "runs.json"
    wrong = json.dumps(record(id="case-2", model__hidden=77777)).replace("77777", "7" * 5000)
    path.write_text(f"[{wrong}, {json.dumps(record())}]")
    file = read_runs(path)
    assert [run.id for run in file.runs] == ["case-1"]
    assert "model.hidden" in file.rejected[0].seen


def test_half_a_character_is_named(tmp_path: Path) -> None:
    """A lone surrogate is no text; the field is named."""
    file = read_runs(written(tmp_path / "runs.json", [record(model__name="\ud800"), record(id="case-2")]))
    assert [run.id for run in file.runs] == ["case-2"]
    assert "model.name: half a character" in file.rejected[0].seen


def test_a_rate_that_is_none_is_listed(tmp_path: Path) -> None:
    """Tokens a second that would mean a step without end are told, and give valid JSON."""
    wrong = record(measured={"status": "ok", "tokens_per_s_per_gpu": 1e-310})
    (told,) = compare(read_runs(written(tmp_path / "runs.json", [wrong]))).unstated
    assert "inf s (tokens/s)" in told.reason


def test_a_file_that_unpacks_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a gzipped file unpacks to is bounded."""
    monkeypatch.setattr(reading, "MAX_TEXT_BYTES", 10_000)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b"[" + b" " * 100_000 + b"]", mtime=0))
    with pytest.raises(InvalidInputError, match="more than 10,000 bytes"):
        read_runs(path)


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    """Neither is a file."""
    for path, seen in ((tmp_path / "none.json", "does not exist"), (tmp_path, "is a directory")):
        with pytest.raises(InvalidInputError, match=seen):
            read_runs(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [("", key) for key in record()] + [
    (section, key) for section in ("model", "hardware", "parallel", "measured") for key in record()[section]
]


@few_or_many(
    15,
    150,
    st.lists(
        st.tuples(st.sampled_from(FIELDS), JSON | st.integers(1, 4096) | st.sampled_from([0, -1, 10**15])),
        max_size=4,
    ),
)
def test_hostile_records_never_break_anything(changes: list[tuple[tuple[str, str], Any]]) -> None:
    """Any value in any field: the record is compared, listed as not simulated, or rejected with a message."""
    data = record()
    for (section, key), value in changes:
        part = data[section] if section else data
        if isinstance(part, dict):
            part[key] = value
    with TemporaryDirectory() as folder:
        path = Path(folder) / "runs.json"
        path.write_text(json.dumps([data, record(id="sound")]), encoding="utf-8")
        try:
            file = read_runs(path)
        except MilpplanError as error:
            pytest.fail(f"the whole file was refused: {error}")
    validation = compare(file)
    told = len(validation.comparisons) + len(validation.unstated) + len(validation.rejected)
    assert told == 2
    assert "sound" in {one.run.id for one in validation.comparisons} or data.get("id") == "sound"
