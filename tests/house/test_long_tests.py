"""What a stopped run of the long tests has said: ``tests/conftest.py`` and ``.ci/long_tests``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import OUTCOMES

ROOT = Path(__file__).parents[2]
CASES = """
import pytest

pytestmark = pytest.mark.long

def test_passes(): pass

def test_fails(): assert False

@pytest.fixture
def broken():
    yield
    raise ValueError

def test_fails_afterwards(broken): pass

def test_fails_twice(broken): assert False
"""
MORE_CASES = """
import pytest

def test_is_short(): pass

@pytest.fixture
def missing(): raise ValueError

@pytest.mark.long
def test_fails_before(missing): pass

@pytest.mark.long
def test_passes(): pass
"""


@pytest.mark.long
def test_each_test_is_told_once_and_files_take_turns(tmp_path: Path) -> None:
    """With workers too: what fails in its setup, its call, its teardown or in two of them has failed once. Long
    tests take one of every file, then another of each."""
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = long\n")
    (tmp_path / "test_a.py").write_text(CASES)
    (tmp_path / "test_b.py").write_text(MORE_CASES)
    command = [sys.executable, "-m", "pytest", "-n", "1", "-m", "long", "-p", "no:cacheprovider"]
    environment = os.environ | {OUTCOMES: str(tmp_path / "outcomes")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (tmp_path / "outcomes").read_text().splitlines() == [
        "passed test_a.py::test_passes",
        "failed test_b.py::test_fails_before",
        "failed test_a.py::test_fails",
        "passed test_b.py::test_passes",
        "failed test_a.py::test_fails_afterwards",
        "failed test_a.py::test_fails_twice",
    ], done.stdout


@pytest.mark.parametrize(
    ("outcomes", "status", "code", "words"),
    [
        ("passed a", 124, 0, "The time was over: 1 long tests passed before, and none had failed."),
        ("passed a\nfailed b[x y]\npassed c", 124, 1, "b[x y]"),
        ("passed a\nfailed b", 1, 1, "  b"),
        ("passed a\npassed b", 0, 0, "All 2 long tests passed."),
        ("", 5, 0, "There are no long tests."),
        ("", 137, 0, "The time was over: 0 long tests"),
        ("passed a", 4, 4, ""),
    ],
)
def test_a_failure_counts_also_when_time_is_over(
    tmp_path: Path, outcomes: str, status: int, code: int, words: str
) -> None:
    """`.ci/long_tests` fails and names the tests that failed, whatever pytest ended with."""
    script = tmp_path / ".ci" / "long_tests"
    pytest_there = tmp_path / ".venv" / "bin" / "pytest"
    for path in (script, pytest_there):
        path.parent.mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "long_tests", script)
    lines = "".join(f"echo '{line}' >>\"${OUTCOMES}\"\n" for line in outcomes.splitlines())
    pytest_there.write_text(f"#!/bin/sh\n{lines}exit {status}\n")
    pytest_there.chmod(0o755)
    done = subprocess.run([script, "30"], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr
