"""Studies that are stopped, killed and continued: nothing lost, nothing solved twice, the same table."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from milpplan.cli.app import app
from milpplan.errors import InvalidInputError
from milpplan.studies import Row, column_types, csv_text, outcomes, rows
from milpplan.studies.outcomes import Outcome, Task, failed, solved
from milpplan.studies.store import StudyProgress, Sweep, complete, opened, resume
from tests.studies.cases import QUICK, reproducible, solved_here, study, sweep

PROGRAM = [sys.executable, "-c", "from milpplan.cli import main; main()"]


@cache
def reference() -> Sweep:
    """The quick study, solved once in this process without anything in between."""
    return solved_here(study())


def quick_file(directory: Path) -> Path:
    """The quick study as a file."""
    path = directory / "quick.toml"
    path.write_text(QUICK, encoding="utf-8")
    return path


def table_of(directory: Path) -> list[dict[str, str]]:
    """The CSV of a sweep's directory without what differs from run to run."""
    with (directory / "results.csv").open(encoding="utf-8", newline="") as file:
        return [
            {name: word for name, word in row.items() if name != "wall_time_s"} for row in csv.DictReader(file)
        ]


def expected_table() -> list[dict[str, str]]:
    """What the CSV must hold."""
    text = csv_text(
        reproducible(rows(reference())), [name for name in column_types(study()) if name != "wall_time_s"]
    )
    return list(csv.DictReader(text.splitlines()))


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_stopped_sweep_continues_and_loses_nothing(how: signal.Signals, tmp_path: Path) -> None:
    """Stopped after some cells, by a kill or by Ctrl-C: no worker survives, what was done is not touched again,
    and the table is that of a study solved in one go. Ctrl-C also leaves the table of what is done."""
    path, out = quick_file(tmp_path), tmp_path / "quick-results"
    command = [*PROGRAM, "sweep", str(path), "--workers", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while len(done := list(out.glob("cells/*.json"))) < 3:
            assert process.poll() is None
            time.sleep(0.01)
        workers = children(process.pid)
        process.send_signal(how)
        _, talk = process.communicate(timeout=300)
    assert all(gone(worker) for worker in workers)
    before = {file: file.stat().st_mtime_ns for file in out.glob("cells/*.json")}
    assert 3 <= len(done) <= len(before) < 12
    if how == signal.SIGINT:
        assert process.returncode == 4
        assert f"Stopped with {len(before)} of 12 cells done. The same command continues from there." in talk
        assert [row["cell"] for row in table_of(out)] == [str(number + 1) for number in range(len(before))]
    rest = sweep(study())
    with opened(out) as store:
        resume(rest, store, retry_failed=False)
        assert len(rest.open_tasks) == 12 - len(before)
        complete(rest, store, one_after_another, quiet)
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert reproducible(rows(rest)) == reproducible(rows(reference()))


@pytest.mark.long
def test_a_sweep_prints_one_document_or_a_summary(tmp_path: Path) -> None:
    """--json: statuses, files and rows; without: the cheapest cell of every variant. Exit code 0, for infeasible
    cells are proved too; 6 where a cell has failed."""
    path, out = quick_file(tmp_path), tmp_path / "elsewhere"
    with opened(out) as store:
        for outcome in reference().outcomes.values():
            store.write(outcome)
    words = ["sweep", str(path), "--out", str(out)]
    ended = CliRunner().invoke(app, [*words, "--json"])
    assert ended.exit_code == 0
    document = json.loads(ended.stdout)
    # Without sharded weights 42 GB hold no 7B model on 4 GPUs, and 17 GB none on 8.
    assert document["statuses"] == {"optimal": 6, "infeasible": 6}
    assert document["rows"] == rows(reference())
    assert {"results.csv", "plans"} <= set(document["files"])
    assert table_of(out) == expected_table()
    summary = CliRunner().invoke(app, words)
    assert "12 cells, 6 optimal, 6 infeasible" in summary.stdout
    assert "memory: x0.5" in summary.stdout
    with opened(out) as store:
        store.write(failed(next(iter(reference().outcomes)), "a solver gave up"))
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 6
    assert "cell 1 failed: a solver gave up" in ended.stdout


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def gone(pid: int) -> bool:
    """Whether a process ends within some seconds."""
    for _ in range(500):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def one_after_another(tasks: Any) -> Iterator[Outcome]:
    """The runner of tests: in this process."""
    yield from map(solved, tasks)


def quiet(progress: StudyProgress) -> None:
    """Nobody listens."""


def test_progress_counts_cells_and_results_do_not_depend_on_workers(tmp_path: Path) -> None:
    """Two workers finish in any order: progress counts to the end, and the table is the same."""
    wanted, heard = sweep(study()), list[StudyProgress]()
    with opened(tmp_path) as store:
        complete(wanted, store, lambda tasks: outcomes.run(tasks, 2), heard.append)
    assert [one.done for one in heard] == list(range(13))
    assert heard[-1].seconds_left == 0
    assert reproducible(rows(wanted)) == reproducible(rows(reference()))


def test_cells_of_equal_problems_are_solved_once(tmp_path: Path) -> None:
    """A case that changes nothing shares the task of the hardware as it is."""
    named = [
        {
            "name": "a",
            "cases": [{"name": "one"}, {"name": "two"}, {"name": "x1", "multiply": {"reserved_bytes": 1}}],
        }
    ]
    wanted = sweep(study(what_if=named))
    assert (len(wanted.cells), len(wanted.open_tasks)) == (12, 4)
    with opened(tmp_path) as store:
        complete(wanted, store, one_after_another, quiet)
    assert wanted.counts() == {"optimal": 12}
    assert len(list(tmp_path.glob("cells/*.json"))) == 4


def test_failed_cells_are_kept_and_tried_again_on_request(tmp_path: Path) -> None:
    """A failed cell keeps its message; it is solved again only if that is asked for."""
    broken = reference().open_tasks or tuple(reference().tasks.values())

    def one_fails(tasks: Any) -> Iterator[Outcome]:
        for task in tasks:
            yield (
                failed(task.key, "a solver gave up")
                if task.key == broken[0].key
                else reference().outcomes[task.key]
            )

    def solve_none(tasks: Any) -> Iterator[Outcome]:
        assert not tasks
        yield from ()

    first, again, retried = sweep(study()), sweep(study()), sweep(study())
    with opened(tmp_path) as store:
        complete(first, store, one_fails, quiet)
        assert first.counts()["failed"] == 1
        resume(again, store, retry_failed=False)
        complete(again, store, solve_none, quiet)
        assert [row["message"] for row in rows(again) if row["status"] == "failed"] == ["a solver gave up"]
        resume(retried, store, retry_failed=True)
        assert [task.key for task in retried.open_tasks] == [broken[0].key]
        complete(retried, store, one_after_another, quiet)
    assert reproducible(rows(retried)) == reproducible(rows(reference()))


def test_what_goes_wrong_in_a_solve_is_an_outcome() -> None:
    """An option that the solver refuses, and numbers out of range, fail the cell with their message."""
    task = next(iter(reference().tasks.values()))
    refused = solved(Task(task.key, task.problem, task.settings.model_copy(update={"gap": 2.0})))
    assert (refused.status, refused.message[:6]) == ("failed", "gap=2.")
    job = task.problem.job.model_copy(update={"num_gpus": "many"})
    odd = solved(Task(task.key, task.problem.model_copy(update={"job": job}), task.settings))
    assert odd.status == "failed"
    assert "Error" in odd.message


def test_a_worker_with_other_code_solves_nothing() -> None:
    """What it found would be filed as the result of the code that started the sweep."""
    task = next(iter(reference().tasks.values()))
    other = solved(Task(task.key, task.problem, task.settings, code="of another version"))
    assert (other.status, other.key, other.step_time_s) == ("failed", task.key, None)
    assert "another milpplan" in other.message
    assert solved(task).status != "failed"


def test_infeasible_cells_have_the_least_peak(tmp_path: Path) -> None:
    """Without enough memory: the bound is above what is usable; without a legal layout: no bound, and a reason."""
    table: list[Row] = [row for row in rows(reference()) if row["status"] == "infeasible"]
    assert len(table) == 6
    for row in table:
        assert isinstance(row["least_memory_bytes"], float)
        assert isinstance(row["usable_memory_bytes"], int)
        assert row["least_memory_bytes"] > row["usable_memory_bytes"]
        assert "the least peak is" in str(row["message"])
    none = solved_here(
        study(grid__fixed=[{"dp": 3}], grid__num_gpus=[4], grid__global_batch_size=[32], what_if=[])
    )
    (row,) = rows(none)
    assert (row["status"], row["least_memory_bytes"]) == ("infeasible", None)
    assert "No layout is legal" in str(row["message"])


def test_a_damaged_cell_is_solved_again_and_leftovers_are_removed(tmp_path: Path) -> None:
    """Half a file counts as none; what a killed writer left goes; a second sweep at the same time
    is refused."""
    task = next(iter(reference().tasks.values()))
    with opened(tmp_path) as store:
        store.write(reference().outcomes[task.key])
        assert store.read(task.key) == reference().outcomes[task.key]
        path = store.path(task.key)
        path.write_bytes(path.read_bytes()[:-20])
        (tmp_path / "cells" / ".milpplan-1.tmp").write_text("half")
        assert store.read(task.key) is None
        with pytest.raises(InvalidInputError, match="Another sweep is at work"), opened(tmp_path):
            pass
    with opened(tmp_path):
        assert not list(tmp_path.glob("cells/.milpplan-*"))


def test_the_directory_must_be_one(tmp_path: Path) -> None:
    """A file in the place of the directory is a message."""
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInputError, match="cannot be made"), opened(tmp_path / "file"):
        pass
    assert os.listdir(tmp_path) == ["file"]
