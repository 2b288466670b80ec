"""How much of a test runs by default, and how much in the long tests alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy


def long_but(often: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Parameters of which only those in ``often`` are tried without the long tests."""
    return [value if value in often else pytest.param(value, marks=pytest.mark.long) for value in values]


def first(few: int, values: Iterable[Any]) -> list[Any]:
    """Parameters of which only the first ``few`` are tried without the long tests. A tuple is one value to each of
    several names."""
    found = list(values)
    rest = [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.long)
        for value in found[few:]
    ]
    return [*found[:few], *rest]


def few_or_many(few: int, many: int, *strategies: SearchStrategy[Any]) -> Callable[[Callable[..., None]], Any]:
    """``given`` with ``few`` examples, and in the long tests with ``many``. For tests without fixtures."""

    def decorated(test: Callable[..., None]) -> Any:
        def run(num_examples: int) -> None:
            amount = settings(
                max_examples=num_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
            )
            amount(given(*strategies)(test))()

        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        return pytest.mark.parametrize("num_examples", long_but((few,), (few, many)))(run)

    return decorated
