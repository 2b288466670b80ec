"""What a strategy graph refuses, and in which words."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import pytest

from milpplan.errors import InvalidInputError, MilpplanError, UnknownNameError
from milpplan.graph import Peak, StrategyGraph

TWO = [[1.0, 2.0], [3.0, 4.0, 5.0]]
WRONG: dict[str, Callable[[], object]] = {
    "node_costs is empty": lambda: StrategyGraph([]),
    "node_costs[1] holds NaN": lambda: StrategyGraph([[1.0], [np.nan]]),
    "node_costs[0] holds -inf": lambda: StrategyGraph([[-np.inf]]),
    "node_costs[0] has shape (0,)": lambda: StrategyGraph([[]]),
    "node_costs[0] holds what is no number": lambda: StrategyGraph([["a"]]),
    "edge_costs[0, 1] has shape (3, 2)": lambda: StrategyGraph(TWO, {(0, 1): np.zeros((3, 2))}),
    "edge_costs names node 2": lambda: StrategyGraph(TWO, {(0, 2): np.zeros((2, 3))}),
    "edge_costs has the pair (1, 1)": lambda: StrategyGraph(TWO, {(1, 1): np.zeros((3, 3))}),
    "follows node 0": lambda: StrategyGraph(TWO, follow={1: 0}),
    "Only node_memory is given": lambda: StrategyGraph(TWO, node_memory=TWO),
    "node_memory has 1 entries": lambda: StrategyGraph(TWO, {}, [[1.0, 2.0]], 3.0),
    "node_memory[0] holds -1.0": lambda: StrategyGraph(TWO, {}, [[-1.0, 2.0], [1, 2, 3]], 3.0),
    "node_memory[0] has shape (2, 1)": lambda: StrategyGraph(TWO, {}, TWO, [1.0, 2.0]),
    "memory_limit is -1.0": lambda: StrategyGraph(TWO, {}, TWO, -1.0),
    "alive names node 9": lambda: StrategyGraph(TWO, {}, TWO, 3.0, alive=[[9]]),
    "peaks[0] is empty": lambda: StrategyGraph(TWO, peaks=[[]]),
    "peaks[0] holds inf": lambda: StrategyGraph(TWO, peaks=[[Peak(0.0, {0: [1.0, np.inf]})]]),
    "takes strategy 3 of node 1": lambda: StrategyGraph(TWO).solve(hint=[0, 3]),
    "has shape (1,)": lambda: StrategyGraph(TWO).objective_of([0]),
}


@pytest.mark.parametrize("words", WRONG)
def test_bad_input_is_refused_in_words(words: str) -> None:
    """The message says what was seen, and what was expected."""
    with pytest.raises(InvalidInputError) as caught:
        WRONG[words]()
    assert words in str(caught.value)
    assert isinstance(caught.value, MilpplanError)
    assert caught.value.expected


def test_unknown_backend() -> None:
    """A backend that does not exist is named, with those that do."""
    with pytest.raises(UnknownNameError, match="cpsat"):
        StrategyGraph(TWO).solve("cp-sat")


ODD = (
    5,
    "a",
    b"x",
    [[1, 2], [3]],
    {0: None},
    {(0, 0, 0): 1},
    [5],
    [[5]],
    object(),
    [1j],
    [10**400],
    {"a": 1},
    set(),
)
FIELDS = ("node_costs", "edge_costs", "node_memory", "memory_limit", "alive", "follow", "allowed", "peaks")


@pytest.mark.parametrize("field", FIELDS)
def test_no_value_of_a_field_is_a_traceback(field: str) -> None:
    """Whatever a field is given, the graph is solved or refused in words."""
    good = {"node_costs": TWO, "node_memory": TWO, "memory_limit": 9.0}
    for value in ODD:
        with contextlib.suppress(InvalidInputError):
            solution = StrategyGraph(**{**good, field: value}).solve()  # type: ignore[arg-type]
            assert solution.status in ("optimal", "infeasible")


@pytest.mark.parametrize("option", ["backend", "time_limit_s", "hint", "relative_gap", "seed"])
def test_no_value_of_an_option_is_a_traceback(option: str) -> None:
    """Wrong types, negative numbers and NaN are refused in words."""
    for value in (*ODD[1:], -1, float("nan"), -0.5, [0]):
        with pytest.raises(MilpplanError):
            StrategyGraph(TWO).solve(**{option: value})  # type: ignore[arg-type]
