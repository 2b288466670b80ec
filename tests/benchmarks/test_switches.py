"""The table of switches: published numbers are met as it says, and the tests that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.switches import all_parts

ROOT = Path(__file__).parents[2]


def test_published_numbers_are_met() -> None:
    """Every published number is met within the error that its row had, and every range."""
    figures = [figure for part in all_parts() for figure in part.figures]
    assert len(figures) > 10
    for figure in figures:
        if figure.most is not None:
            assert figure.measured <= figure.ours() <= figure.most, figure.what
        else:
            assert figure.ours() == pytest.approx(figure.measured, rel=figure.error), figure.what


def test_named_tests_exist() -> None:
    """Every switch names a test function of this repository, and a reason where it has no published number."""
    for part in all_parts():
        path, name = part.test.split("::")
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
        assert part.figures or part.none
