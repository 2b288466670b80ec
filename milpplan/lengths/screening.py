"""Which sets of strategies may hold a step shorter than a target: all sets at once, by two bounds.

*sum*, as in ``groups.search``: sum_k n_k min over s in Q of share_sk + sum over s in Q of (constant_s +
reduction_s) + the least finish, with switches free. *longest*: some j in Q runs the longest sequence, which passes
all its stages on one replica in ``serial_j`` or more; so the group of j takes Z_j >= max(serial_j, sum_k x_k
share_jk) for what it runs, x, and the others at least their least shares of the rest. The best x is a knapsack:
first all sequences that are cheapest under j; then, while Z_j is still serial_j, those that save most for the time
they take. The bound is the least over j.

A set whose bound reaches the target holds no shorter step, whatever its switches take.
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
class OpenSet:
    """Strategies and the bound of their steps in ns, switches apart."""

    bound_ns: float
    used: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Screened:
    """Sets of at least two strategies that are left, the least bound first, and the least bound of the others in
    ns (infinite where none was dropped)."""

    left: tuple[OpenSet, ...]
    dropped_ns: float
    finish_ns: int
    """The least finish, which all bounds count."""

    @property
    def strategies(self) -> tuple[int, ...]:
        """Every strategy of some set."""
        return tuple(sorted({one for held in self.left for one in held.used}))


def screened(problem: GroupedProblem, serial_ns: FloatArray, target_ns: float) -> Screened:
    """The sets of two and more strategies with a bound below ``target_ns``; ``serial_ns`` [strategies]: least time
    of the longest sequence by itself.

    Raises:
        InvalidInputError: there are too many sets to try.
    """
    shares, constants = sequence_shares(problem, {kind: KindCuts(kind) for kind in problem.kinds})
    number = len(problem.strategies)
    once = constants + np.array([one.reduce_ns for one in problem.strategies])
    finish_ns = min(problem.finish_of(home) for home in problem.home_choices)
    work = shares * problem.counts
    left: list[OpenSet] = []
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
            dropped = min(dropped, float(bounds[bounds >= target_ns].min(initial=np.inf)))
            for place in np.flatnonzero(bounds < target_ns).tolist():
                one = (*used, int(later[place]))
                beyond = float(once[list(one)].sum()) + finish_ns
                # The strategy with the longest sequence has its constant in its serial time.
                longest = longest_ns(work, serial_ns, one) + beyond - int(constants[list(one)].max())
                bound = max(float(bounds[place]), longest)
                if bound < target_ns:
                    left.append(OpenSet(bound, one))
                else:
                    dropped = min(dropped, bound)
            if len(used) + 1 < problem.max_strategies:
                grown += [((*used, int(one)), np.minimum(least, work[one])) for one in later]
        rows = grown
    return Screened(tuple(sorted(left, key=lambda one: (one.bound_ns, one.used))), dropped, finish_ns)


def longest_ns(work: FloatArray, serial_ns: FloatArray, used: tuple[int, ...]) -> float:
    """*longest* without what is paid once; ``work`` [strategies, n]: share of all sequences of a length."""
    best = np.inf
    for one in used:
        own = work[one]
        if not np.isfinite(own[-1]):
            continue
        others = work[[other for other in used if other != one]].min(axis=0)
        mine = own <= others
        spent = float(own[mine].sum())
        rest = np.flatnonzero(~mine)
        # Free while the longest sequence runs: what saves most for the time it takes.
        rest = rest[np.argsort(-others[rest] / own[rest], kind="stable")]
        free = max(0.0, float(serial_ns[one]) - spent)
        before = np.concatenate([[0.0], np.cumsum(own[rest])[:-1]]) if len(rest) else np.zeros(0)
        taken = np.clip((free - before) / own[rest], 0.0, 1.0)
        left = float((others[rest] * (1.0 - taken)).sum())
        best = min(best, max(spent, float(serial_ns[one])) + left)
    return best * _SAFETY


def _bounds(least: FloatArray, added: FloatArray, once_ns: float, each_ns: IntArray) -> FloatArray:
    """Bounds of one set with each of some strategies added, [n], ns; infinite where a length is left over."""
    return np.asarray(np.minimum(least, added).sum(axis=1) * _SAFETY + once_ns + each_ns)
