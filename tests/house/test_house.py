"""The house does not grow: what a newcomer has to read stays within limits (``benchmarks.house`` measures all)."""

from __future__ import annotations

import pytest

from benchmarks.house import static_measures, traced_measures

LIMITS = {
    "modules": 363,
    "lines": 106_100,
    "files in the largest folder": 13,
    "import circles": 0,
    "docstrings that open with What, Whether, The same, More or How": 2,
    "words of README.md": 1_000,
    "words of docs": 31_757,
    "words of CHANGELOG.md": 600,
    "internal modules that tests import": 115,
}
"""Lower a limit when the measure falls; raise it only in a commit that says why."""

TRACED = {
    "files of a default solve": 72,
    "functions of a default solve": 1_257,
    "depth of a default solve": 21,
    "modules loaded by it": 135,
}
"""Limits of a traced solve, as above."""


def test_the_house_stays_small() -> None:
    """Every measure is within its limit, and none is left without one."""
    measures = static_measures()
    assert measures.keys() == LIMITS.keys()
    assert {name: value for name, value in measures.items() if value > LIMITS[name]} == {}


@pytest.mark.long
def test_a_solve_stays_short_to_read() -> None:
    """A default solve enters no more files, functions and levels; Python 3.12 inlines most comprehensions."""
    measures = traced_measures()
    assert {name: measures[name] for name in TRACED if measures[name] > TRACED[name]} == {}
