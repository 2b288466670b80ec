"""Strategy graphs against trying every choice, on every way through the solver and with every backend."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

from milpplan.graph import GraphSolution, Peak, StrategyGraph, solving
from tests.graph.cases import KINDS, best_of_all, random_graph

BACKENDS = ("cpsat", "cbc", "highs")


def assert_proved(graph: StrategyGraph, best: float, solution: GraphSolution) -> None:
    """The answer is the optimum, to what flooring can have taken, and its bound is one."""
    if best == math.inf:
        assert solution.status == "infeasible"
        assert solution.explanation
        return
    assert solution.status == "optimal"
    assert solution.choice is not None
    assert solution.objective == graph.objective_of(solution.choice)
    assert not graph.num_devices or graph.fits(solution.choice)
    assert solution.lower_bound is not None
    assert solution.lower_bound <= best <= solution.objective
    assert solution.objective - solution.lower_bound <= solution.rounding_error + 1e-12 * abs(best)
    assert solution.rounding_error <= 1e-6 * max(1.0, abs(best))


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_optimum_is_that_of_all_choices(kind: str, memory: bool) -> None:
    """Chains, trees and dense graphs, with and without limits, followers, tables and forbidden pairs."""
    rng = np.random.default_rng(len(kind) + memory)
    for turn in range(14):
        graph = random_graph(rng, kind, memory, whole=turn % 2 == 0, nodes=4)
        assert_proved(graph, best_of_all(graph), graph.solve())


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_alone_finds_it(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With elimination and sweeps switched off, all is left to the backend."""
    monkeypatch.setattr(solving, "cheap_order", lambda _: [])
    monkeypatch.setattr(solving, "complete_order", lambda _: None)
    monkeypatch.setattr(solving, "MAX_SWEEPS", 0)
    rng = np.random.default_rng(7)
    for turn in range(8):
        graph = random_graph(rng, KINDS[turn % 3], turn % 2 == 1, whole=turn % 4 < 2, nodes=4)
        assert_proved(graph, best_of_all(graph), graph.solve(backend))


def test_sweeps_alone_give_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages and prices never rise above the optimum, and reach it on most graphs."""
    monkeypatch.setattr(solving, "cheap_order", lambda _: [])
    monkeypatch.setattr(solving, "complete_order", lambda _: None)
    monkeypatch.setattr(solving, "_ask_backend", lambda *_: None)
    rng = np.random.default_rng(11)
    closed = 0
    for turn in range(18):
        graph = random_graph(rng, KINDS[turn % 3], turn % 2 == 1, whole=True, nodes=4)
        best, solution = best_of_all(graph), graph.solve()
        if solution.lower_bound is not None:
            assert solution.lower_bound <= best
        if solution.objective is not None:
            assert solution.objective >= best
        closed += solution.status in ("optimal", "infeasible")
    assert closed >= 12


def test_a_hint_changes_nothing_but_the_way() -> None:
    """Good, bad and impossible hints lead to the same optimum."""
    graph = random_graph(np.random.default_rng(4), "dense", True, whole=True)
    plain = graph.solve()
    assert plain.status == "optimal"
    worst = [graph.num_strategies(i) - 1 for i in range(graph.num_nodes)]
    for hint in (plain.choice, worst, [0] * graph.num_nodes):
        assert graph.solve(hint=hint).objective == plain.objective


def test_peaks_and_equal_nodes() -> None:
    """The largest of several sums, over equal nodes that fold into counts, equals trying every choice."""
    rng = np.random.default_rng(2)
    for turn in range(6):
        first, second, memory = rng.random((3, 3)) * 4
        terms = [Peak(0.5, dict.fromkeys(range(5), first)), Peak(-0.25, dict.fromkeys(range(5), second))]
        late = [Peak(0.0, {}), Peak(-3.0, dict.fromkeys(range(5), second - first))]
        graph = StrategyGraph(
            [rng.random(3)] * 5, {}, [memory] * 5, 5 * float(memory.mean()), peaks=[terms, late][: 1 + turn % 2]
        )
        best = best_of_all(graph)
        for backend in BACKENDS:
            solution = graph.solve(backend)
            assert solution.objective is not None
            assert solution.lower_bound is not None
            assert solution.lower_bound <= best + 1e-9
            assert solution.objective == pytest.approx(best, rel=1e-6)


def test_costs_and_memory_of_any_size() -> None:
    """Shifted by large constants, scaled, negative: the optimum scales with them."""
    rng = np.random.default_rng(4)
    base = [rng.random(4) for _ in range(4)]
    edges = {(i, i + 1): rng.random((4, 4)) for i in range(3)}
    memory = [rng.random(4) for _ in range(4)]
    for scale in (1e-12, 1.0, 1e15):
        shifted = [scale * (c - 5.0) for c in base]
        moved = {pair: scale * m for pair, m in edges.items()}
        graph = StrategyGraph(shifted, moved, [scale * m for m in memory], scale * 1.7)
        assert_proved(graph, best_of_all(graph), graph.solve())


def test_least_memory_is_said_where_nothing_fits() -> None:
    """The limit, the least that any choice takes, and where; forbidden pairs by themselves are told apart."""
    memory = [np.array([4.0, 6.0]), np.array([5.0, 9.0])]
    pairs = {(0, 1): np.array([[np.inf, 0.0], [0.0, 0.0]])}
    solution = StrategyGraph([[0, 0], [0, 0]], pairs, memory, 10.0).solve()
    assert solution.status == "infeasible"
    assert "11" in solution.explanation
    assert "10" in solution.explanation
    assert [row.least for row in solution.memory] == [9.0]
    banned = StrategyGraph([[0, 0], [0, 0]], allowed={(0, 1): np.zeros((2, 2), bool)}).solve()
    assert "even without memory limits" in banned.explanation


def test_two_limits_that_only_together_leave_nothing() -> None:
    """Each limit alone can be met, both cannot: a backend proves it."""
    memory = [np.array([[1.0, 3.0], [3.0, 1.0]])] * 2
    solution = StrategyGraph([[0, 0]] * 2, {(0, 1): np.zeros((2, 2))}, memory, [3.0, 3.0]).solve("cpsat")
    assert solution.status == "infeasible"
    assert "each limit alone" in solution.explanation


def test_large_graph_with_a_limit_is_bounded() -> None:
    """A few hundred nodes in a chain with skips, limited: a bound close below a choice that is re-evaluated."""
    rng = np.random.default_rng(1)
    n, k = 300, 6
    costs = [rng.random(k) * 10 for _ in range(n)]
    pairs = [(i, i + 1) for i in range(n - 1)] + [(i, i + 5) for i in range(0, n - 5, 10)]
    memory = [(11 - c) * rng.random(k) for c in costs]
    least, free = sum(m.min() for m in memory), sum(m[c.argmin()] for m, c in zip(memory, costs, strict=True))
    edges = {pair: rng.random((k, k)) * 4 for pair in pairs}
    graph = StrategyGraph(costs, edges, memory, (least + free) / 2)
    solution = graph.solve(relative_gap=1e-3)
    assert solution.choice is not None
    assert graph.fits(solution.choice)
    assert solution.gap is not None
    assert 0 <= solution.gap <= 1e-3
    assert solution.objective == graph.objective_of(solution.choice)


def test_no_time_still_answers_honestly() -> None:
    """Without time there is a status, and no bound above the optimum."""
    graph = random_graph(np.random.default_rng(8), "dense", True, whole=True)
    solution = graph.solve(time_limit_s=0.0)
    assert solution.status in ("optimal", "feasible", "no_solution_found", "infeasible")
    if solution.lower_bound is not None:
        assert solution.lower_bound <= best_of_all(graph)


def test_graphs_and_answers_can_be_pickled() -> None:
    """Both cross process borders; the copy has the same optimum."""
    graph = random_graph(np.random.default_rng(9), "tree", False, whole=True)
    copy = pickle.loads(pickle.dumps(graph))
    assert pickle.loads(pickle.dumps(copy.solve())).objective == graph.solve().objective


def test_limits_finer_than_a_backends_unit_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads of 1e12 that differ by a few: what a coarse row lets through becomes a row of its own."""
    monkeypatch.setattr(solving, "cheap_order", lambda _: [])
    monkeypatch.setattr(solving, "complete_order", lambda _: None)
    monkeypatch.setattr(solving, "MAX_SWEEPS", 0)
    cuts = []
    plain = solving.state_program
    monkeypatch.setattr(solving, "state_program", lambda *a: (cuts.append(len(a[2])), plain(*a))[1])
    rng = np.random.default_rng(13)
    fine = [rng.integers(0, 6, 4) + 0.0 for _ in range(3)]
    memory = [f + 2.0**38 * np.array([0, 0, 1, 1]) for f in fine]
    limit = 2.0**39 + sum(f.min() for f in fine) + 3.0
    costs = [10.0 - f - np.array([0.0, 0.0, 4.0, 4.0]) + rng.random(4) for f in fine]
    edges = {(i, i + 1): rng.random((4, 4)) for i in range(2)}
    graph = StrategyGraph(costs, edges, memory, limit)
    assert_proved(graph, best_of_all(graph), graph.solve("cpsat"))
    assert max(cuts) > 0


def test_a_difference_below_the_unit_of_memory_counts() -> None:
    """Two strategies whose memory is equal once floored: the lighter one is needed, though it costs more."""
    heavy, light = 1.0 + 2.0**-50, 1.0
    graph = StrategyGraph([[0.0, 1.0], [0.0, 1.0]], {}, [[heavy, light]] * 2, 2.0)
    followed = StrategyGraph([[0.0, 1.0]] * 2, {}, [[heavy, light]] * 2, 2.0, follow={1: 0})
    for one in (graph, followed):
        solution = one.solve()
        assert best_of_all(one) == 2.0
        assert (solution.status, solution.objective) == ("optimal", 2.0)


@pytest.mark.long
@pytest.mark.parametrize("limited", [False, True])
def test_ten_thousand_nodes(limited: bool) -> None:
    """Twenty strategies each, in a chain: proved without a limit, within a thousandth with one."""
    rng = np.random.default_rng(3)
    n, k = 10_000, 20
    costs = [rng.random(k) * 10 for _ in range(n)]
    memory = [(11 - c) * rng.random(k) for c in costs]
    least, free = sum(m.min() for m in memory), sum(m[c.argmin()] for m, c in zip(memory, costs, strict=True))
    edges = {(i, i + 1): rng.random((k, k)) * 4 for i in range(n - 1)}
    graph = StrategyGraph(costs, edges, *((memory, (least + free) / 2) if limited else ()))
    solution = graph.solve(relative_gap=1e-3)
    assert solution.status == "optimal"
    assert solution.gap is not None
    assert solution.gap <= (1e-3 if limited else 1e-8)
