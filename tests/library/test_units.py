"""Numbers are written with their nouns, and no command's answer has one of several things."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from milpplan.cli.app import app
from milpplan.units import counted, lower_bound_text, lower_money_text
from tests.amounts import first

ONE_OF_SEVERAL = re.compile(
    r"(?<![\d.,/x=-])1 (?:\w+ )?(?:replicas|micro-batches|sequences|stages|GPUs|nodes|layers|plans|runs|layouts|"
    r"cells|ranks|sources|strategies|tokens|pieces|groups)\b"
)
"""``1 replicas``, but not the end of ``0.1 GPUs`` or of ``tp=1 replicas``."""


def test_numbers_and_nouns_agree() -> None:
    """One has the singular, also where the number is a text; everything else the plural."""
    assert [counted(number, "replica") for number in (0, 1, 2)] == ["0 replicas", "1 replica", "2 replicas"]
    assert counted(1024, "GPU") == "1,024 GPUs"
    assert counted("1", "micro-batch", "micro-batches") == "1 micro-batch"
    assert counted("3 or 4", "micro-batch", "micro-batches") == "3 or 4 micro-batches"


@pytest.mark.parametrize(
    "words",
    first(
        2,
        [
            ["--gpus", "1", "--global-batch", "1", "--seq-len", "128"],
            ["--gpus", "8", "--global-batch", "1", "--fix", "tp=8", "--space", "uniform"],
            ["--gpus", "8", "--global-batch", "8", "--fix", "dp=1", "--space", "uniform"],
            ["--gpus", "1", "--global-batch", "8", "--space", "uniform"],
        ],
    ),
)
def test_answers_have_no_one_of_several(words: list[str]) -> None:
    """A solve on one GPU, with one replica, one micro-batch or one sequence is told in the singular."""
    result = CliRunner().invoke(app, ["solve", "llama3-8b", "dgx-h100", *words])
    assert result.exit_code in (0, 3)
    assert not ONE_OF_SEVERAL.findall(result.output)


@pytest.mark.parametrize("seconds", [6.453638876, 12345.678, 0.0077849, 3.0499e-5, 2.0, 999.96])
def test_a_printed_lower_bound_is_not_above_the_proved_one(seconds: float) -> None:
    """It is rounded down, and by less than one in its last digit."""
    number, unit = lower_bound_text(seconds).replace(",", "").split()
    printed = float(number) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]
    assert printed <= seconds * (1 + 1e-12)
    assert printed >= seconds * (1 - 0.01)


@pytest.mark.parametrize(("amount", "text"), [(411.9, "411"), (3_142_999.0, "3.142M"), (1.9999e9, "1.999B")])
def test_a_printed_lower_bound_of_a_price_is_not_above_the_proved_one(amount: float, text: str) -> None:
    """It is rounded down, too."""
    assert lower_money_text(amount) == text
