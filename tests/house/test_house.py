"""The house does not grow: what a newcomer has to read stays within limits (``benchmarks.house`` measures all)."""

from __future__ import annotations

from benchmarks.house import static_measures

LIMITS = {
    "modules": 362,
    "lines": 104_575,
    "files in the largest folder": 13,
    "import circles": 0,
    "docstrings that open with What, Whether, The same, More or How": 2,
    "words of README.md": 1_000,
    "words of docs": 32_000,
    "words of CHANGELOG.md": 600,
    "internal modules that tests import": 115,
}
"""Lower a limit when the measure falls; raise it only in a commit that says why."""


def test_the_house_stays_small() -> None:
    """Every measure is within its limit, and none is left without one."""
    measures = static_measures()
    assert measures.keys() == LIMITS.keys()
    assert {name: value for name, value in measures.items() if value > LIMITS[name]} == {}
