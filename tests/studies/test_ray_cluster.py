"""Ray gives the table that processes give."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from milpplan.cli.app import app
from tests.studies.test_running import PROGRAM, expected_table, quick_file, table_of


@pytest.mark.long
def test_ray_gives_the_same_table(tmp_path: Path) -> None:
    """The quick study on a cluster of this machine, killed once and continued: the table of one process.
    Needs the extra ``ray``, which `.ci/run` installs before the long tests."""
    path, out = quick_file(tmp_path), tmp_path / "out"
    command = [*PROGRAM, "sweep", str(path), "--ray", "--workers", "2", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while len(list(out.glob("cells/*.json"))) < 3:
            assert process.poll() is None
        process.kill()
    before = len(list(out.glob("cells/*.json")))
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, before < 12) == (0, True), ended.stderr
    assert table_of(out) == expected_table()


def test_without_ray_the_message_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--ray where it is not installed: nothing is solved, and the exit code is that of bad input."""
    monkeypatch.setitem(sys.modules, "ray", None)
    ended = CliRunner().invoke(app, ["sweep", str(quick_file(tmp_path)), "--ray"])
    assert ended.exit_code == 2
    assert "pip install -e '.[ray]'" in ended.stderr
    assert not list(tmp_path.glob("*/cells/*.json"))
