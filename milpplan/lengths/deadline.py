"""The clock of a solve: counted work, and the limit of time that ends it.

Searches divide their time by *counted seconds*. Whatever takes long (linear programs, rounds of local search,
tables of pricing problems, calls of the cost model) reports its size by ``spend``, as the seconds that it takes on
one idle core of a current server, to a factor of two; the numbers at calls of ``spend`` were measured. So a search
does as much on a busy machine as on an idle one, and equal problems get equal answers, unless the limit of time
ends a solve. Integer programs count as the seconds that they take (``spend_measured``).

No other module of ``lengths`` reads a clock. A deadline is made where the work begins and handed down; a part of a
search gets a part of what is left (``share``, ``within``). Counted seconds belong to their thread.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Final, TypeVar

from milpplan.units import NS_PER_S

_Result = TypeVar("_Result")


class _Counter(threading.local):
    """Counted work of one thread in whole ns, so that sums do not depend on what came before."""

    def __init__(self) -> None:
        self.ns = 0
        # Cached results that the current solve has counted.
        self.counted: set[Hashable] = set()


_COUNTER: Final = _Counter()


def spend(seconds: float) -> None:
    """Count work of so many seconds."""
    _COUNTER.ns += round(seconds * NS_PER_S)


@contextmanager
def spend_measured() -> Iterator[None]:
    """Count work as the seconds that it takes."""
    started = time.perf_counter()
    try:
        yield
    finally:
        spend(time.perf_counter() - started)


def counted_cache(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Return the function with a cache of its results, of which every solve counts each once, as when it was
    computed."""

    @lru_cache(maxsize=4096)
    def computed(*arguments: Hashable) -> tuple[_Result, int]:
        before = _COUNTER.ns
        result = function(*arguments)
        return result, _COUNTER.ns - before

    @wraps(function)
    def cached(*arguments: Hashable) -> _Result:
        before, key = _COUNTER.ns, (function, arguments)
        result, spent_ns = computed(*arguments)
        _COUNTER.ns = before + (0 if key in _COUNTER.counted else spent_ns)
        _COUNTER.counted.add(key)
        return result

    return cached


@dataclass(frozen=True, slots=True)
class Deadline:
    """End of a part of a search."""

    end_ns: float
    """Counted work at which it ends; infinite without a limit."""
    limit_s: float
    """Moment of ``time.perf_counter`` at which the whole solve ends; infinite without a limit."""

    @staticmethod
    def after(seconds: float) -> Deadline:
        """Return the deadline of a solve that begins now: after so many counted seconds, and as many seconds of
        time."""
        _COUNTER.counted = set()
        return Deadline(_COUNTER.ns + _ns(seconds), time.perf_counter() + seconds)

    @property
    def passed(self) -> bool:
        """True once the deadline has passed."""
        return self.left_s <= 0.0

    @property
    def left_s(self) -> float:
        """Counted seconds that are left, at least 0, and none after the limit of time."""
        if self.limit_s < math.inf and time.perf_counter() >= self.limit_s:
            return 0.0
        return max(0.0, (self.end_ns - _COUNTER.ns) / NS_PER_S)

    def within(self, seconds: float) -> Deadline:
        """Return the deadline of a part of at most so many counted ``seconds``."""
        return Deadline(min(self.end_ns, _COUNTER.ns + _ns(seconds)), self.limit_s)

    def share(self, fraction: float) -> Deadline:
        """Return the deadline of a part with a share of the counted seconds that are left."""
        return self.within(fraction * self.left_s)


def _ns(seconds: float) -> float:
    return round(seconds * NS_PER_S) if math.isfinite(seconds) else seconds


NEVER: Final = Deadline(math.inf, math.inf)
"""No limit."""
PASSED: Final = Deadline(-math.inf, -math.inf)
"""No time at all: the work that an answer needs, and no more."""
