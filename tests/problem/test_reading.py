"""Input files: whatever lies at their path, they are read at once or refused with a message."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
from typer.testing import CliRunner

from milpplan.cli.app import app
from milpplan.errors import InvalidInputError
from milpplan.problem import read_bytes, read_text
from tests.refusals import in_three_parts

CLUSTER = ["llama2-7b", "dgx-h100", "--gpus", "8"]
READERS = {
    "show": ["show", "FILE"],
    "lengths": ["solve", *CLUSTER, "--lengths", "FILE"],
    "job": ["solve", "--job", "FILE"],
    "model": ["solve", "FILE", "dgx-h100", "--gpus", "8", "--global-batch", "8"],
    "hardware": ["solve", "llama2-7b", "FILE", "--gpus", "8", "--global-batch", "8"],
    "warm start": ["solve", *CLUSTER, "--global-batch", "8", "--warm-start", "FILE"],
    "simulate": ["simulate", "FILE"],
    "certify": ["certify", "FILE"],
    "compare": ["compare", "FILE", "FILE"],
    "explain": ["explain", "FILE"],
    "traffic": ["traffic", "FILE"],
    "switch": ["switch", "FILE", "FILE"],
    "sweep": ["sweep", "FILE"],
    "report": ["report", "FILE", "-o", "page.html"],
    "export": ["export", "FILE", "--to", "megatron"],
    "import": ["import", "FILE", "--from", "megatron", "--hardware", "dgx-h100"],
    "gap": ["gap", "FILE"],
    "gap of a script": ["gap", "FILE", "--from", "megatron", "--hardware", "dgx-h100"],
    "validate": ["validate", "--runs", "FILE"],
    "calibrate": ["calibrate", "FILE", "--hardware", "dgx-h100", "--out", "overlay.toml"],
}
"""Every command with a file that it reads."""


def odd_places(directory: Path) -> dict[str, Path]:
    """Paths with what is no readable text."""
    places = {name: directory / name for name in ("pipe", "directory", "loop", "bytes", "missing")}
    os.mkfifo(places["pipe"])
    places["directory"].mkdir()
    places["loop"].symlink_to(places["loop"])
    places["bytes"].write_bytes(b"\xff\xfe\x00\x80")
    return {**places, "device": Path("/dev/zero"), "memory": Path("/proc/self/mem")}


@pytest.mark.parametrize("command", READERS)
def test_no_command_waits_for_what_is_no_file(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe nobody writes to, a device that never ends, a directory, a loop of links, bytes: exit code 2."""
    monkeypatch.chdir(tmp_path)
    for name, path in odd_places(tmp_path).items():
        words = [str(path) if word == "FILE" else word for word in READERS[command]]
        result = CliRunner().invoke(app, words)
        assert (name, result.exit_code, result.stdout) == (name, 2, "")
        assert result.stderr.startswith(("error: ", "Usage: "))


def test_what_became_a_pipe_since_it_was_looked_at_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was opened is judged, not what the name was a moment ago."""
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(Path, "is_file", lambda self: self.name == "pipe")
    assert read_bytes(tmp_path / "pipe") == b""


def test_only_so_much_is_read(tmp_path: Path) -> None:
    """A file that is too large, sparse or growing, is refused for its size without being read whole."""
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(2**40)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidInputError, match="1,099,511,627,776 bytes") as refused:
        read_text(path)
    in_three_parts(refused.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 2**17
    path.write_text("x" * 11)
    assert read_text(path, max_bytes=11) == "x" * 11
    with pytest.raises(InvalidInputError, match="11 bytes"):
        read_text(path, max_bytes=10)
