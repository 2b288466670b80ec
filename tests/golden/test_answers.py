"""Answers stay what they were, bit for bit, whatever is moved, merged or renamed.

A change of an answer is made on purpose: `python -m tests.golden.cases`, in a commit that says why.
"""

from __future__ import annotations

import json

import pytest

from tests.amounts import long_but
from tests.golden.cases import ANSWERS, LOOSE, NAMES, Net

EXPECTED = json.loads(ANSWERS.read_text(encoding="utf-8"))
SLOW = (
    *(
        "unlike replicas",
        "uneven experts",
        "latent attention",
        "any",
        "every switch",
        "every schedule",
        "both ends",
    ),
    *("mixed cluster", "warm start", "unfused", "forbidden", "long context", "placement", "graph", "validate"),
    *("uniform", "fp8", "simulate mixed", "experts", "traffic of experts", "lengths side by side"),
    *("automodel: solve", "automodel: export, import", "accelerate: solve", "accelerate: export, import"),
    *("nanotron: solve", "nanotron: export, import"),
)
"""The slowest: other cases ask the same command, and smaller tests check what they ask it for."""


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Net:
    """Make the directory of the commands."""
    return Net(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize("name", long_but({*NAMES} - {*SLOW}, NAMES))
def test_the_answer_is_the_same(name: str, net: Net) -> None:
    """Exit code, step, bound, plan and every other number of the answer are those of ``answers.json``."""
    answer, expected = net.answer(name), EXPECTED[name]
    if name in LOOSE:
        assert answer["exit_code"] == expected["exit_code"]
        assert answer["step_time_s"] == pytest.approx(expected["step_time_s"], rel=LOOSE[name])
    else:
        assert answer == expected


def test_every_answer_has_a_case() -> None:
    """A case that was renamed leaves no answer behind."""
    assert list(EXPECTED) == list(NAMES)
