"""What became of each test, for whoever stops the run; the order of the long tests; no test has a deadline."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings

# A machine that is busy with something else is no failure.
settings.register_profile("milpplan", deadline=None)
settings.load_profile("milpplan")

# Each worker has one core: threads of the linear algebra would wait for each other and take two to three times the
# processor time. To be said before numpy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell that starts the suite in the background has Ctrl-C ignored in it. Tests send it to themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Rewriting the assertions of all files takes each worker longer than importing everything: once is enough, even
# where PYTHONDONTWRITEBYTECODE would have every run do it anew. What is kept is in __pycache__, which git ignores.
sys.dont_write_bytecode = False

MAX_KEPT_LAYOUTS, MAX_KEPT_TABLES = 2_000, 2_000
"""Constants of more layouts, or more tables of them, are not kept."""
RUNNING = SimpleNamespace(patches=False)
"""The running test: whether it may patch functions."""
OUTCOMES = "MILPPLAN_TEST_OUTCOMES"
"""The variable that names a file: ``passed ID`` or ``failed ID`` is added to it as soon as a test has ended."""


class Outcomes:
    """Writes a line for each test that has ended: a run that is killed has said what it knew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """What fails in its setup, its call or its teardown is named once; it has passed after all three."""
        if report.failed and report.nodeid not in self.failed:
            self.failed.add(report.nodeid)
            self._add("failed", report.nodeid)
        elif report.passed and report.when == "teardown" and report.nodeid not in self.failed:
            self._add("passed", report.nodeid)

    def _add(self, outcome: str, nodeid: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{outcome} {nodeid}\n")


def pytest_configure(config: pytest.Config) -> None:
    """The process that hears of all tests writes; the workers of xdist send it what they find."""
    path = os.environ.get(OUTCOMES)
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(Path(path)))


@pytest.fixture(scope="session", autouse=True)
def commands_built_once() -> None:
    """A test that calls the command line in its process builds all commands anew, with their options: that takes
    longer than most commands do, and they are the same every time."""
    testing = sys.modules.get("typer.testing")
    build = getattr(testing, "_get_command", None)
    if build is not None:
        testing._get_command = functools.cache(build)  # type: ignore[union-attr]


@pytest.fixture(scope="session", autouse=True)
def error_bars_simulated_once() -> None:
    """Every answer of the command line simulates its plan dozens of times for the error bar, which is most of a
    small solve, and tests ask for the same plans again and again: no step is simulated twice for it."""
    error_bars = sys.modules.get("milpplan.calibration.error_bars")
    if error_bars is not None:
        cached = functools.cache(error_bars.step_times_s)  # type: ignore[attr-defined]
        error_bars.step_times_s = lambda problem, plans: cached(problem, tuple(plans))  # type: ignore[attr-defined]


@pytest.fixture(scope="session", autouse=True)
def costs_computed_once() -> None:
    """Tests solve the same small problems with other options, solvers and interrupts, and a third of that is the
    constants of the same layouts: they are computed once. A test that patches something computes its own."""
    layout_costs = sys.modules.get("milpplan.simulation.layout_costs")
    if layout_costs is None:
        return
    compute, known = layout_costs._constants, {}

    def constants(problem: Any, columns: Any) -> Any:
        if RUNNING.patches or len(columns) > MAX_KEPT_LAYOUTS:
            return compute(problem, columns)
        key = problem, *(getattr(columns, field.name).tobytes() for field in fields(columns))
        if key not in known:
            if len(known) == MAX_KEPT_TABLES:
                known.clear()
            known[key] = compute(problem, columns)
        return known[key]

    layout_costs._constants = constants  # type: ignore[attr-defined]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note whether the test may patch what others call."""
    RUNNING.patches = "monkeypatch" in getattr(item, "fixturenames", ())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests alone: one of every file, then another of each, so that a run that is stopped has tried something
    of everything."""
    if config.option.markexpr == "long":
        seen: Counter[Path] = Counter()
        turns: dict[str, int] = {}
        for item in items:
            turns[item.nodeid] = seen[item.path]
            seen[item.path] += 1
        items.sort(key=lambda item: turns[item.nodeid])
