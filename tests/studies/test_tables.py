"""The table of a study, its figures and its plans."""

from __future__ import annotations

import csv
import io
import json
import sys
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milpplan import simulate
from milpplan.reports.documents import read_plan
from milpplan.studies import (
    Row,
    column_types,
    csv_text,
    effects,
    front,
    page,
    parquet_bytes,
    rows,
    scaling_lines,
    write_results,
)
from milpplan.studies.grid import Grid, Study, WhatIf
from milpplan.units import gpu_hours
from tests.cli.test_cli import run
from tests.studies.cases import study
from tests.studies.test_running import reference


def test_gpu_hours_of_a_published_run() -> None:
    """LLaMA-65B: 380 tokens a second and GPU on 2,048 A100, 1.4T tokens: 1,022,362 GPU-hours, about 21 days
    (Touvron et al. 2023, section 2.4 and table 15)."""
    hours = gpu_hours(2048, 1.4e12, 380 * 2048)
    assert hours == pytest.approx(1_022_362, rel=2e-3)
    assert round(hours / 2048 / 24) == 21


def test_rows_are_the_outcomes_and_what_follows_from_them() -> None:
    """Every cell has its row; throughput, GPU-hours and cost agree with the step time; columns are as declared."""
    table = rows(reference())
    assert [row["cell"] for row in table] == list(range(1, 13))
    for row in table:
        assert list(row) == list(column_types(study()))
        if row["status"] != "optimal":
            assert row["step_time_s"] is None
            continue
        tokens = int(row["global_batch_size"] or 0) * int(row["sequence_length"] or 0)
        step = float(row["step_time_s"] or 0)
        assert row["tokens_per_s"] == pytest.approx(tokens / step)
        hours = int(row["num_gpus"] or 0) * step / tokens * 1e12 / 3600
        assert row["gpu_hours_per_trillion_tokens"] == pytest.approx(hours)
        assert row["cost_per_trillion_tokens"] == pytest.approx(3.0 * hours)
        assert float(row["lower_bound_s"] or 0) <= step
        assert (row["layout.tp"], row["layout.zero_stage"]) == (1, 1)


def test_csv_and_parquet_hold_the_same_table() -> None:
    """Both give back the rows, with types."""
    types, table = column_types(study()), rows(reference())
    read = list(csv.DictReader(io.StringIO(csv_text(table, types))))
    assert [float(row["step_time_s"] or 0) for row in read] == [row["step_time_s"] or 0 for row in table]
    from pyarrow import parquet

    content = parquet_bytes(table, types)
    assert parquet.read_table(io.BytesIO(content)).to_pylist() == table
    assert parquet_bytes(table, types) == content


def test_plans_are_files_that_simulate_reads(tmp_path: Path) -> None:
    """Each cell with a plan has a plan file: simulated, it gives the row's step time; its hardware says what was
    changed. Plans of another study go."""
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "cell-99.json").write_text("{}")
    write_results(reference(), tmp_path, rows(reference()))
    written = {path.name: path for path in (tmp_path / "plans").iterdir()}
    with_plan = [row for row in rows(reference()) if row["step_time_s"] is not None]
    assert set(written) == {f"cell-{row['cell']:02}.json" for row in with_plan}
    for row in with_plan[::3]:
        problem, plan = read_plan(written[f"cell-{row['cell']:02}.json"])
        assert simulate(problem, plan).step_time_s == row["step_time_s"]
        changed = "" if row["what_if.memory"] == "x1" else f" (memory: {row['what_if.memory']})"
        assert problem.hardware.name == f"dgx-h100{changed}"


def test_without_extras_there_is_still_the_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pyarrow and plotly: the CSV and the plans, no stale file beside them, and how to get the others."""
    (tmp_path / "report.html").write_text("of an older run")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "plotly", None)
    written, missing = write_results(reference(), tmp_path, rows(reference()))
    assert [path.name for path in written] == ["results.csv", "plans"]
    assert [".[study]" in missing[0].do, ".[report]" in missing[1].do] == [True, True]
    assert not (tmp_path / "report.html").exists()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12))
def test_the_front_is_what_no_point_beats(points: list[tuple[int, int, int]]) -> None:
    """Against the definition, point by point."""

    def beats(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
        return one != other and all(a <= b for a, b in zip(one, other, strict=True))

    assert front(points) == [i for i, own in enumerate(points) if not any(beats(other, own) for other in points)]


def hand_made() -> list[Row]:
    """Eight cells by hand: tokens a second are 100 a GPU, 10 % more with more memory, half of it on 16 GPUs with
    the small batch; without more memory the large batch has no plan on 8 GPUs."""
    base: Row = dict.fromkeys(column_types(study()))
    table = []
    for memory, gpus, batch in product(("x1", "x0.5"), (8, 16), (32, 64)):
        rate = 100.0 * gpus * (1.1 if memory == "x0.5" else 1.0) * (0.5 if (gpus, batch) == (16, 32) else 1.0)
        lost = (memory, gpus, batch) == ("x1", 8, 64)
        table.append(
            base
            | {"what_if.memory": memory, "num_gpus": gpus, "global_batch_size": batch, "hardware": "dgx-h100"}
            | {"tokens_per_s": None if lost else rate}
        )
    return table


def test_effects_compare_cells_that_differ_in_one_thing() -> None:
    """Of the hand-made table: more memory is worth 10 % in three pairs and a plan in the fourth; 16 GPUs halve the
    rate a GPU with the small batch and leave it with the large one."""
    found = {(one.axis, one.value): one for one in effects(hand_made())}
    memory = found["what_if.memory", "x0.5"]
    assert (memory.compared, memory.lost, memory.gained) == (3, 0, 1)
    assert (memory.least, memory.middle, memory.most) == pytest.approx((0.1, 0.1, 0.1))
    gpus = found["num_gpus", "16"]
    assert (gpus.compared, gpus.gained) == (3, 1)
    assert (gpus.least, gpus.middle, gpus.most) == pytest.approx((-0.5, -0.5, 0.0))
    assert set(found) == {("what_if.memory", "x0.5"), ("num_gpus", "16"), ("global_batch_size", "64")}


def test_lines_are_jobs_on_one_hardware() -> None:
    """One line for each batch and case, by ascending GPUs; the efficiency starts at one."""
    lines = {(line.menu, line.name): line for line in scaling_lines(study(), hand_made())}
    assert set(lines) == {
        (f"{batch} sequences a step", name) for batch in (32, 64) for name in ("dgx-h100", "memory: x0.5")
    }
    assert lines["32 sequences a step", "dgx-h100"].efficiency == pytest.approx((1.0, 0.5))
    assert lines["64 sequences a step", "dgx-h100"].efficiency == (1.0,)


def test_the_page_is_complete_in_itself(tmp_path: Path) -> None:
    """Three figures, no address outside; the same table gives the same page; text is escaped; without any plan it
    says so."""
    odd = study(name="<script>")
    text = page(odd, rows(reference()))
    assert all(f'<div id="{name}"' in text for name in ("scaling", "pareto", "sensitivity"))
    assert 'src="http' not in text
    assert "<title>&lt;script&gt;" in text
    assert page(odd, rows(reference())) == text
    nothing = [row | {"tokens_per_s": None} for row in rows(reference())]
    assert "nothing to draw" in page(odd, nothing)


def test_the_schema_describes_every_field() -> None:
    """`milpplan schema study` has the fields of a study, of the grid and of what-ifs."""
    schema = json.loads(run("schema", "study").stdout)
    assert set(Study.model_fields) == set(schema["properties"])
    for name, kind in (("Grid", Grid), ("WhatIf", WhatIf)):
        assert set(kind.model_fields) == set(schema["$defs"][name]["properties"])
