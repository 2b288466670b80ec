"""The small languages of Megatron-LM's arguments: stages and patterns of layers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milpplan.errors import InvalidInputError
from milpplan.launchers.megatron.flags import pattern_flags, pattern_text
from milpplan.launchers.megatron.rules import stage_layers, stage_string


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=40))
def test_stages_come_back(sizes: list[int]) -> None:
    """Any number of layers in any number of virtual stages, empty ones too."""
    assert stage_layers(stage_string(tuple(sizes))) == tuple(sizes)


def test_published_strings() -> None:
    """Strings that Megatron-LM's own parser admitted, and their layers counted by hand."""
    assert stage_layers("Et*19|t*21|t*21|t*19L") == (19, 21, 21, 19)
    assert stage_layers("E,(t*7|)*4,(t*6|)*2,(t*7|)*5,tttttL") == (*[7] * 4, *[6] * 2, *[7] * 5, 5)
    assert stage_layers("Et*4|(t*4|)*14,tL") == (*[4] * 15, 1)
    assert stage_layers("Et*40|t*40||L") == (40, 40, 0, 0)
    assert stage_string((4, *[5] * 6, 3)) == "Et*4|(t*5|)*6t*3L"


@pytest.mark.parametrize(
    "text",
    ["", "t|L", "Et|t", "EtL|L", "EtmL", "Ex|L", "Et*999999999|L", "E(((t*999)*999)*999|)*9L", "|EtL", "EtL|"],
)
def test_other_strings_are_refused(text: str) -> None:
    """Without both ends, with layers that a plan does not have, or larger than memory."""
    with pytest.raises(InvalidInputError, match="layout"):
        stage_layers(text)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_patterns_come_back(flags: list[bool]) -> None:
    """Any pattern, in an expression that Python itself reads in the same way."""
    text = pattern_text(flags)
    assert pattern_flags(text, "--x") == flags
    assert eval(text) == [int(flag) for flag in flags]


def test_patterns_of_real_models() -> None:
    """DeepSeek-V3's first three layers are dense; gpt-oss slides a window in every other layer."""
    assert pattern_text([False] * 3 + [True] * 58) == "([0]*3+[1]*58)"
    assert pattern_text([True, False] * 18) == "([1]+[0])*18"
    assert pattern_flags("2", "--x") == 2
    assert pattern_flags("([1]*3+[0]*1)*2", "--x") == [True, True, True, False] * 2


@pytest.mark.parametrize(
    "text",
    [
        "+".join(["[0]*100000"] * 300),
        "[0]" + "+[0]*100000" * 2,
        "[0]*100000" + "*1" * 20_000,
        "[" * 500,
        "[0]*9" * 300,
    ],
)
def test_patterns_are_bounded(text: str) -> None:
    """Sums and products make no more layers than a model has, and no more copies than a short text asks for."""
    with pytest.raises(InvalidInputError, match="lists of 0 and 1"):
        pattern_flags(text, "--x")


@pytest.mark.parametrize(
    "text", ["", "[2]", "[1]*999999999", "x", "[1]+2", "__import__('os')", "[[1]]", "-1", "1.5"]
)
def test_other_patterns_are_refused(text: str) -> None:
    """No other Python is read."""
    with pytest.raises(InvalidInputError, match="--x"):
        pattern_flags(text, "--x")


@pytest.mark.parametrize(
    "text", ["(" * 99_000, "t*99999" * 14_000, "(t*99|)*999" * 9_000, "t" * 100_001, f"t*{'9' * 5_000}"]
)
def test_strings_of_stages_are_bounded(text: str) -> None:
    """Parentheses without end and many repetitions are refused before they take time or memory."""
    with pytest.raises(InvalidInputError, match="pipeline-model-parallel-layout"):
        stage_layers(f"E{text}L")
