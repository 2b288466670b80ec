"""Every answer to a small random graph against all its legal choices, in exact arithmetic, with every backend."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from milpplan.errors import InvalidInputError, SolverError
from milpplan.graph import Peak, StrategyGraph, solve_graph
from milpplan.graph.solve_graph import BoundRefutedError
from milpplan.optimize.milp import Limits, Program, Solution
from milpplan.optimize.milp.backends import backend as named_backend
from tests.amounts import first, long_but
from tests.graph.cases import COSTS, bytes_graph, check_against_all, exact_costs, sum_of_largest

BACKENDS = ("auto", "cbc", "cpsat", "highs", "scip")
MIB, GIB = 2.0**20, 2.0**30


def bytes_and_peaks() -> StrategyGraph:
    """Two nodes whose memory is between 128 bytes and 3 GiB, with a peak: one choice fits that costs 4240."""
    first, second = np.array([53.0, 15.0, 42.0]), np.array([97.0, 71.0, 66.0])
    return StrategyGraph(
        [first, second],
        {(0, 1): [[0, 5, 6], [7, 0, 1], [4, 3, 0]]},
        [[3 * GIB, 4 * MIB, 1024.0], [128.0, 4096.0, 4 * MIB]],
        3 * GIB + 4 * MIB,
        peaks=[[Peak(0.0, {0: 63 * first}), Peak(0.0, {1: 63 * second})]],
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_in_bytes_with_peaks(backend: str) -> None:
    """The optimum is found and proved where rows once had coefficients near 2^38 and 4266 was called optimal."""
    solution = bytes_and_peaks().solve(backend)
    assert solution.status == "optimal"
    assert solution.objective == solution.lower_bound == 4240.0
    assert solution.choice is not None
    assert solution.choice.tolist() == [1, 2]


def hint_of(rng: np.random.Generator, graph: StrategyGraph, legal: Any) -> list[int] | None:
    """A hint: none, any choice, or a legal one."""
    kind = rng.integers(0, 4)
    if kind < 2:
        return None
    if kind == 2 or not legal:
        return [int(rng.integers(0, graph.num_strategies(i))) for i in range(graph.num_nodes)]
    return list(list(legal)[int(rng.integers(0, len(legal)))])


@pytest.mark.parametrize("count", long_but((16,), (16, 1000)))
@pytest.mark.parametrize("alone", first(1, (False, True)))
@pytest.mark.parametrize("backend", BACKENDS)
def test_answers_are_those_of_all_choices(
    backend: str, alone: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optimum, bound, cost and limits hold exactly, whatever the sizes of costs and memory and whatever the hint;
    ``alone``: with all left to the backend."""
    if alone:
        monkeypatch.setattr(solve_graph, "cheap_order", lambda _: [])
        monkeypatch.setattr(solve_graph, "complete_order", lambda _: None)
        monkeypatch.setattr(solve_graph, "MAX_SWEEPS", 0)
        monkeypatch.setattr(solve_graph._Passes, "tighten", lambda *_: None)
    for turn in range(count):
        rng = np.random.default_rng([39, turn])
        graph = bytes_graph(rng, COSTS[turn % len(COSTS)], peaks=turn // len(COSTS) % 2 == 0)
        legal = exact_costs(graph)
        check_against_all(graph, graph.solve(backend, hint=hint_of(rng, graph, legal)), legal)


class Liar:
    """A backend that says of some programs what is not true."""

    def __init__(self, name: str, lie: str) -> None:
        self.name, self.lie = name, lie
        self.honest = named_backend(name)

    def version(self) -> str:
        """Name it."""
        return f"liar {self.name}"

    def solve(self, program: Program, limits: Limits) -> Solution:
        """Answer with a lie: that nothing is allowed, or that its bound is above the optimum."""
        answer = self.honest.solve(program, limits)
        if self.lie == "infeasible":
            return replace(answer, status="infeasible", values=None, objective=None, bound=None)
        objective = (answer.objective or 0) + 1000
        return replace(answer, objective=objective, bound=float(objective), status="optimal")


def with_liars(monkeypatch: pytest.MonkeyPatch, lie: str, *names: str) -> None:
    """Let some backends lie."""

    def chosen(name: str) -> Any:
        return Liar(name, lie) if name in names else named_backend(name)

    monkeypatch.setattr(solve_graph, "named_backend", chosen)


@pytest.mark.parametrize("lie", ["infeasible", "bound"])
@pytest.mark.parametrize("hint", [None, [1, 2], [2, 2]])
@pytest.mark.parametrize("name", ["highs", "cbc", "cpsat"])
def test_a_false_bound_is_an_error(
    name: str, hint: list[int] | None, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend that says what a legal choice disproves, be it a hint or what a second backend finds, is not
    believed: an error, never a bound; with ``auto`` the others answer."""
    with_liars(monkeypatch, lie, name)
    with pytest.raises(SolverError, match=name):
        bytes_and_peaks().solve(name, hint=hint)
    solution = bytes_and_peaks().solve(hint=hint)
    assert solution.status == "optimal"
    assert solution.objective == solution.lower_bound == 4240.0


@pytest.mark.parametrize("lie", ["infeasible", "bound"])
def test_liars_that_agree_do_not_get_past_a_hint(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All backends say the same false thing, and a choice that is known disproves it."""
    with_liars(monkeypatch, lie, "highs", "cbc", "cpsat")
    with pytest.raises(SolverError, match="legal"):
        bytes_and_peaks().solve(hint=[1, 2])


def test_a_bound_needs_a_second_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no other backend works, what one proves is not taken over: a choice, and no optimum."""

    def only(name: str) -> Any:
        if name != "highs":
            raise SolverError(f"There is no {name} here.")
        return named_backend(name)

    monkeypatch.setattr(solve_graph, "named_backend", only)
    solution = bytes_and_peaks().solve("highs")
    assert solution.status == "feasible"
    assert solution.objective == 4240.0
    assert solution.lower_bound is not None
    assert solution.lower_bound < 4240.0
    assert "not confirmed" in solution.method


def test_a_bound_above_a_known_choice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that promise too much contradict a legal hint, and the bound is not lowered to hide that."""
    graph = StrategyGraph(
        [[1.0, 3.0]] * 3, {(0, 1): np.ones((2, 2)), (1, 2): np.ones((2, 2))}, [[2.0, 1.0]] * 3, 4.0
    )
    plain = solve_graph.MessagePassing.run
    monkeypatch.setattr(solve_graph.MessagePassing, "run", lambda self: (2**54, plain(self)[1]))
    with pytest.raises(BoundRefutedError, match="above the cost"):
        graph.solve(hint=[1, 1, 0])


@pytest.mark.parametrize("leaves", [7, 56, 64, 80, 130])
def test_what_many_neighbours_forbid_stays_forbidden(leaves: int) -> None:
    """A node's cheap strategy forbids that of every neighbour: sums of what is forbidden once wrapped round in 64
    bits, and with 60 or 80 neighbours the dear strategy of each was proved the best."""
    edges = {(0, i): np.array([[0.0, 0.0], [0.0, np.inf]]) for i in range(1, leaves + 1)}
    costs = [[10.0, 0.0], *[[5.0, 0.0]] * leaves]
    memory = [[1.0, 2.0], *[[0.0, 0.0]] * leaves]
    for graph in (StrategyGraph(costs, edges), StrategyGraph(costs, edges, memory, 2.0)):
        solution = graph.solve()
        assert (solution.status, solution.objective, solution.lower_bound) == ("optimal", 10.0, 10.0)


def test_limits_hold_without_rounding() -> None:
    """0.1 + 0.2 is above 0.3, and 1e16 + 1 above 1e16, though the rounded sums are not; so is what fits."""
    for memory, limit in (([0.1, 0.2], 0.3), ([1e16, 1.0], 1e16)):
        graph = StrategyGraph([[0.0, 1.0], [0.0]], {}, [[memory[0], 0.0], [memory[1]]], limit)
        assert not graph.fits([0, 0])
        assert graph.fits([1, 0])
        solution = graph.solve()
        assert (solution.status, solution.objective) == ("optimal", 1.0)


def test_costs_are_summed_once_and_rounded_once() -> None:
    """The largest alternative is added without being rounded by itself."""
    graph = StrategyGraph([[1.0]], peaks=[[Peak(2.0**-53, {0: [2.0**-53]}), Peak(0.0, {0: [0.0]})]])
    assert graph.objective_of([0]) == 1.0 + 2.0**-52
    cancelling = StrategyGraph([[1e16], [1.0]], peaks=[[Peak(1.0, {0: [-1e16]})]])
    assert cancelling.objective_of([0, 0]) == 2.0


def test_sums_beyond_doubles_are_refused() -> None:
    """Numbers whose sums are infinite are an error in words; the largest and smallest that are not are solved."""
    with pytest.raises(InvalidInputError, match="Costs add up"):
        StrategyGraph([[1e308]] * 2)
    with pytest.raises(InvalidInputError, match="Memory add"):
        StrategyGraph([[0.0]] * 2, {}, [[1e308]] * 2, 1.0)
    for size in (5e-324, 1e-300, 1e299):
        graph = StrategyGraph([[3 * size, 2 * size]] * 2, {(0, 1): [[0.0, 0.0], [0.0, 3 * size]]})
        solution = graph.solve()
        assert (solution.status, solution.objective) == ("optimal", 3 * size + 2 * size)
        assert solution.rounding_error <= 2.0**-40 * sum_of_largest(graph)


@pytest.mark.long
def test_the_clock_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine where a second passes between any two looks at the clock the answer and the way to it are the
    same; a limit only ends a solve."""
    rng = np.random.default_rng(5)
    costs = [rng.random(4) * 10 for _ in range(14)]
    memory = [(11 - c) * rng.random(4) for c in costs]
    edges = {(i, i + 1): rng.random((4, 4)) * 4 for i in range(13)}
    windows = [tuple(range(i, i + 5)) for i in range(10)]
    graph = StrategyGraph(costs, edges, memory, 14.0, alive=windows)
    plain = followed(graph, None)
    ticks = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    assert followed(graph, None) == plain
    passed = next(ticks)
    assert followed(graph, 1.5 * passed) == plain


def followed(graph: StrategyGraph, time_limit_s: float | None) -> list[tuple[float | None, float | None]]:
    """Every cost and bound on the way to the optimum."""
    told: list[tuple[float | None, float | None]] = []
    done = graph.solve(
        time_limit_s=time_limit_s, callback=lambda seen: told.append((seen.objective, seen.lower_bound))
    )
    assert done.status == "optimal"
    return [*told, (done.objective, done.lower_bound)]
