"""Which sets of strategies may hold a step shorter than a target: all sets at once, by a bound without switches.

The bound of a set Q is that of ``groups.search`` called *sum*, with switches free and the home the cheapest of
all: sum_k n_k min over s in Q of share_sk + sum over s in Q of (constant_s + reduction_s) + least finish. A switch
takes no less than nothing, so a set whose bound reaches the target holds no shorter step, and neither does any
larger cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milpplan.costs.columns import FloatArray, IntArray
from milpplan.errors import InvalidInputError
from milpplan.groups.cuts import KindCuts
from milpplan.groups.problem import GroupedProblem
from milpplan.groups.search import sequence_shares

# Rows of sets whose bounds are found together, and sets of all sizes that are tried.
_MAX_SETS = 20_000_000
# What rounding of sums of floats may add.
_SAFETY = 1.0 - 1e-9


@dataclass(frozen=True, slots=True)
class Screened:
    """Sets (of at least two strategies) that are left, as rows of strategies, and the least bound of the others in
    ns (infinite where none was dropped)."""

    left: tuple[tuple[int, ...], ...]
    dropped_ns: float

    @property
    def strategies(self) -> tuple[int, ...]:
        """Every strategy of some set."""
        return tuple(sorted({one for used in self.left for one in used}))


def screened(problem: GroupedProblem, target_ns: float) -> Screened:
    """The sets of two and more strategies with a bound below ``target_ns``.

    Raises:
        InvalidInputError: there are too many sets to try.
    """
    shares, constants = sequence_shares(problem, {kind: KindCuts(kind) for kind in problem.kinds})
    number = len(problem.strategies)
    once = constants + np.array([one.reduce_ns for one in problem.strategies])
    finish_ns = min(problem.finish_of(home) for home in problem.home_choices)
    work = shares * problem.counts
    left: list[tuple[int, ...]] = []
    dropped, tried = np.inf, 0
    # Sets as their least shares, grown by one strategy of a higher number at a time.
    rows: list[tuple[tuple[int, ...], FloatArray]] = [((one,), work[one]) for one in range(number)]
    for _ in range(2, min(problem.max_strategies, number) + 1):
        tried += sum(number - 1 - used[-1] for used, _ in rows)
        if tried > _MAX_SETS:
            raise InvalidInputError(
                f"{number} strategies make more than {_MAX_SETS:,} sets of at most {problem.max_strategies}.",
                "Expected fewer.",
                "Lower --max-strategies, or fix fields of the layout.",
            )
        grown = []
        for used, least in rows:
            later = np.arange(used[-1] + 1, number)
            bounds = _bounds(least, work[later], float(once[list(used)].sum()) + finish_ns, once[later])
            left += [(*used, one) for one in later[bounds < target_ns].tolist()]
            reached = bounds[bounds >= target_ns]
            dropped = min(dropped, float(reached.min(initial=np.inf)))
            if len(used) + 1 < problem.max_strategies:
                grown += [((*used, int(one)), np.minimum(least, work[one])) for one in later]
        rows = grown
    return Screened(tuple(left), dropped)


def _bounds(least: FloatArray, added: FloatArray, once_ns: float, each_ns: IntArray) -> FloatArray:
    """Bounds of one set with each of some strategies added, [n], ns; infinite where a length is left over."""
    return np.asarray(np.minimum(least, added).sum(axis=1) * _SAFETY + once_ns + each_ns)
