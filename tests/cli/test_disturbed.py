"""Long commands that are ended or hindered: signals, killed workers, a full disk. The plan so far stays."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.amounts import first
from tests.studies.cases import QUICK

# Like a script that a shell starts with `&`: SIGINT is ignored there, and that is inherited.
PROGRAM = [sys.executable, "-c", "from milpplan.cli import main; main()"]
ANYWHERE = ("--space", "any", "--workers", "2", "--gap", "0")
LONG = ("llama3-70b", "dgx-h100", "--gpus", "32", "--global-batch", "64", "--gap", "0", "--time-limit", "60")
COMMANDS = {
    "free": ("solve", *LONG, "--space", "free", "--out", "plan.json"),
    "any": ("solve", *LONG[:-4], *ANYWHERE, "--time-limit", "60", "--out", "plan.json"),
    "sweep": ("sweep", "study.toml", "--out", "results", "--workers", "2"),
}
CLUSTER = ("llama3-70b", "dgx-h100", "--global-batch", "64")
OTHERS = {
    "certify": ("certify", "given.json", "--time-limit", "60", "--json"),
    "explain": ("explain", "given.json", "--time-limit", "60", "--json"),
    "gap": ("gap", "given.json", "--time-limit", "60", "--gap", "0", "--json"),
    "report": ("report", "given.json", "-o", "page.html", "--time-limit", "60"),
    "min-gpus": ("min-gpus", *CLUSTER, "--time-limit", "60", "--json"),
    "lengths": ("solve", *CLUSTER, "--gpus", "32", "--lengths", "lengths.txt", "--time-limit", "60", "--json"),
    "candidates": (
        *("solve", "llama3-70b", "dgx-h100,dgx-a100-80", "--gpus", "32", "--global-batch", "64", "--gap", "0"),
        *("--time-limit", "60", "--json"),
    ),
}
"""Long commands whose answer is printed."""


@dataclass(frozen=True)
class Ended:
    """How a program ended."""

    code: int
    stdout: str
    stderr: str


def disturbed(
    words: tuple[str, ...],
    directory: Path,
    disturb: Callable[[subprocess.Popen[str]], None],
    background: bool = False,
    room: int | None = None,
) -> Ended:
    """Run a command and disturb it while it is at work; ``room``: most bytes of a file that it may write."""

    def before() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN if background else signal.SIG_DFL)
        if room is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    with subprocess.Popen(
        [*PROGRAM, *words],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,
        start_new_session=True,
    ) as process:
        timer = threading.Thread(target=disturb, args=(process,))
        timer.start()
        stdout, stderr = process.communicate()
        timer.join()
    return Ended(process.returncode, stdout, stderr)


def cpu_s(process: int) -> float:
    """Processor time that a process and those that it has started have used; none where it is gone."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return own + sum(map(cpu_s, children(process)))


def hears(process: int) -> bool:
    """Whether a process does something about SIGTERM; before Python has started our code, nobody can."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:")), 0)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def after(
    seconds: float, then: Callable[[subprocess.Popen[str]], None]
) -> Callable[[subprocess.Popen[str]], None]:
    """Do something when the program hears signals and has used so much processor time: that is the same moment on
    a busy machine."""

    def disturb(process: subprocess.Popen[str]) -> None:
        while process.poll() is None and not (hears(process.pid) and cpu_s(process.pid) >= seconds):
            threading.Event().wait(0.02)
        if process.poll() is None:
            then(process)

    return disturb


def children(process: int) -> list[int]:
    """Processes that a process has started."""
    try:
        return [int(one) for one in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def kill_workers(process: subprocess.Popen[str]) -> None:
    """End all workers at once, as the system does when memory is short."""
    for _ in range(200):
        if children(process.pid) or process.poll() is not None:
            break
        threading.Event().wait(0.05)
    for one in children(process.pid):
        os.kill(one, signal.SIGKILL)


def prepared(directory: Path) -> Path:
    """A directory with a study, and what an earlier run has written."""
    (directory / "study.toml").write_text(QUICK)
    (directory / "plan.json").write_text("old")
    return directory


def check(ended: Ended, directory: Path, name: str) -> None:
    """It ended with a code that is promised, and what it had found is there."""
    assert ended.code in (0, 3, 4, 5), ended.stderr
    assert "Traceback" not in ended.stderr
    assert not [path for path in directory.rglob(".milpplan-*") if path.is_file()]
    if name == "sweep":
        for cell in (directory / "results" / "cells").glob("*.json"):
            assert json.loads(cell.read_text())["key"] == cell.stem
    elif ended.code in (0, 4):
        assert json.loads((directory / "plan.json").read_text())["plan"] is not None
    else:
        assert ended.code == 5
        assert (directory / "plan.json").read_text() == "old"


@pytest.mark.long
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", COMMANDS)
def test_sigterm_at_a_random_moment(name: str, seed: int, background: bool, tmp_path: Path) -> None:
    """In the foreground and with ``&``: the plan so far is written; without one the program says so."""
    seconds = random.Random(f"{name}{seed}").uniform(0.0, 2 if name == "sweep" else 8)
    disturb = after(seconds, lambda process: process.send_signal(signal.SIGTERM))
    ended = disturbed(COMMANDS[name], prepared(tmp_path), disturb, background)
    check(ended, tmp_path, name)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a result and lengths."""
    directory = tmp_path_factory.mktemp("given")
    solve = ("solve", *LONG, "--space", "uniform", "--fix", "tp=8", "--out", "given.json")
    assert disturbed(solve, directory, lambda _: None).code in (0, 4)
    draw = random.Random(1)
    lengths = "\n".join(str(draw.randint(100, 9_000)) for _ in range(2_000))
    (directory / "lengths.txt").write_text(lengths)
    return directory


@pytest.mark.long
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", OTHERS)
def test_sigterm_of_commands_that_answer(
    name: str, seed: int, background: bool, given: Path, tmp_path: Path
) -> None:
    """One document, or a message that there is none; never half of one."""
    for file in given.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    seconds = random.Random(f"{name}{seed}").uniform(0.0, 8)
    disturb = after(seconds, lambda process: process.send_signal(signal.SIGTERM))
    ended = disturbed(OTHERS[name], tmp_path, disturb, background)
    assert ended.code in (0, 3, 4, 5), ended.stderr
    assert "Traceback" not in ended.stderr
    if "--json" in OTHERS[name] and ended.code != 5:
        assert isinstance(json.loads(ended.stdout), dict)
    assert bool(ended.stdout or ended.stderr)
    assert not [path for path in tmp_path.rglob(".milpplan-*") if path.is_file()]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["any", "sweep"])
def test_workers_that_are_killed_at_a_random_moment(name: str, seed: int, tmp_path: Path) -> None:
    """The program goes on without them, or stops with the best plan so far. In a sweep each costs its cell, which
    is named as failed (exit code 6); the others are solved."""
    seconds = random.Random(seed).uniform(*((0.7, 1.8) if name == "sweep" else (2, 8)))
    ended = disturbed(COMMANDS[name], prepared(tmp_path), after(seconds, kill_workers))
    if name == "sweep" and ended.code == 6:
        assert "cells 12/12  done" in ended.stderr
        assert " failed" in ended.stderr
        assert "Internal error" not in ended.stderr
        ended = Ended(0, ended.stdout, ended.stderr)
    check(ended, tmp_path, name)


@pytest.mark.parametrize("room", first(1, [0, 200, 4_096, 10**7]))
@pytest.mark.parametrize("background", first(1, (False, True)))
def test_a_disk_without_room(room: int, background: bool, tmp_path: Path) -> None:
    """The result cannot be kept: the plan is printed all the same, the program says what is wrong, and what lay at
    the file's place stays."""
    (tmp_path / "plan.json").write_text("old")
    words = ("solve", "llama3-8b", "dgx-h100", "--gpus", "8", "--global-batch", "8", "--space", "uniform")
    words += ("--out", "plan.json", "--json")
    ended = disturbed(words, tmp_path, lambda _: None, background, room)
    whole = room == 10**7
    assert ended.code in ((0,) if whole else (2,)), ended.stderr
    assert "Traceback" not in ended.stderr
    assert json.loads(ended.stdout)["plan"] is not None
    assert whole or "cannot be written" in ended.stderr
    assert ((tmp_path / "plan.json").read_text() == "old") != whole
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.long
@pytest.mark.parametrize("room", [0, 100, 1_000, 3_000])
def test_a_sweep_without_room(room: int, tmp_path: Path) -> None:
    """It stops with an error, and the cells that are there are whole."""
    ended = disturbed(COMMANDS["sweep"], prepared(tmp_path), lambda _: None, room=room)
    assert ended.code == 2, ended.stderr
    assert "cannot be written" in ended.stderr
    check(Ended(0, ended.stdout, ended.stderr), tmp_path, "sweep")
