"""``milpplan compare``: ratios and differences are those of the plans; wrong numbers of files are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_cli import SOLVE, refused, run


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The best plan, one with tp=8, and one with twice the batch."""
    folder = tmp_path_factory.mktemp("compare")
    best, narrow, large = (folder / f"{name}.json" for name in ("best", "narrow", "large"))
    assert run(*SOLVE, "--out", str(best)).exit_code == 0
    assert run(*SOLVE, "--fix", "tp=8", "--out", str(narrow)).exit_code == 0
    words = ["64" if word == "32" else word for word in SOLVE]
    assert run(*words, "--out", str(large)).exit_code == 0
    return best, narrow, large


@pytest.mark.long
def test_the_numbers_are_those_of_the_files(files: tuple[Path, Path, Path]) -> None:
    """Ratios of accelerator seconds a token, gaps to the bound that a file proves, and what differs."""
    best, narrow, _ = (json.loads(path.read_text()) for path in files)
    result = run("compare", str(files[0]), str(files[1]), "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    first, second = document["plans"]
    assert document["same_problem"]
    assert (first["slower_fraction"], first["step_time_s"]) == (0.0, best["step_time_s"])
    assert second["slower_fraction"] == pytest.approx(narrow["step_time_s"] / best["step_time_s"] - 1)
    assert second["slower_fraction"] > 0.01
    bound = best["lower_bound_s"]
    assert second["gap_to_bound"] == pytest.approx(1 - bound / narrow["step_time_s"])
    assert document["differences"]["tp"] == [str(best["plan"]["layout"]["tp"]), "8"]
    assert "global_batch_size" not in document["differences"]
    assert sum(first["breakdown"].values()) == pytest.approx(first["step_time_s"])


def test_other_problems_are_compared_by_the_token(files: tuple[Path, Path, Path]) -> None:
    """Twice the batch is not twice as slow, and no bound of one problem is held against the plan of another."""
    result = run("compare", str(files[0]), str(files[2]), "--json")
    document = json.loads(result.stdout)
    first, large = document["plans"]
    assert not document["same_problem"]
    assert document["differences"]["global_batch_size"] == ["32", "64"]
    assert large["gap_to_bound"] is None
    expected = large["step_time_s"] / 2 / first["step_time_s"] - 1
    assert large["slower_fraction"] == pytest.approx(expected)
    assert abs(large["slower_fraction"]) < 0.2


def test_the_report_says_it_in_words(files: tuple[Path, Path, Path]) -> None:
    """The verdict names the plans and the part that differs most."""
    text = " ".join(run("compare", *map(str, files)).stdout.split())
    assert "narrow takes" in text
    assert "more GPU time a token than best; most of the difference is in" in text
    for words in ("What differs", "micro batch size", "GPU-hours a billion tokens", "peak memory", "tp exposed"):
        assert words in text
    same = run("compare", str(files[0]), str(files[0])).stdout
    assert "is as fast as" in same
    assert "are the same" in same


def test_wrong_files_are_refused(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """One file, seven, a broken one, and one that was changed after it was written."""
    assert "1 plan file to" in refused(run("compare", str(files[0])))
    assert "7 plan files" in refused(run("compare", *[str(files[0])] * 7))
    broken = tmp_path / "broken.json"
    broken.write_text("[1, 2")
    refused(run("compare", str(files[0]), str(broken)))
    data = json.loads(files[0].read_text())
    broken.write_text(json.dumps(data | {"lower_bound_s": 1.0}))
    assert "not as it was written" in refused(run("compare", str(files[0]), str(broken)))


def test_names_tell_files_apart(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Stems where they differ, else paths, else numbered paths."""
    (tmp_path / "x").mkdir()
    (other := tmp_path / "x" / "best.json").write_bytes(files[1].read_bytes())
    best = str(files[0])
    for second, names in (
        (files[1], ["best", "narrow"]),
        (other, [best, str(other)]),
        (files[0], [f"1: {best}", f"2: {best}"]),
    ):
        document = json.loads(run("compare", best, str(second), "--json").stdout)
        assert [plan["name"] for plan in document["plans"]] == names
