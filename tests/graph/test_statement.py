"""What a strategy graph refuses, and in which words."""

from __future__ import annotations

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
