"""Strategy graphs against trying every choice, on every way through the solver and with every backend."""

from __future__ import annotations

import itertools
import math
import pickle

import numpy as np
import pytest
from scipy.optimize import linprog

from milpplan.graph import GraphProgress, GraphSolution, Peak, StrategyGraph, incumbent, solve_graph
from milpplan.graph.incumbent import part_of
from milpplan.graph.instance import HALF, state
from milpplan.graph.integer_program import GraphProgram
from tests.amounts import long_but
from tests.graph.cases import KINDS, best_of_all, random_graph

BACKENDS = ("cpsat", "cbc", "highs", "scip")


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


@pytest.mark.parametrize("count", long_but((6,), (6, 14)))
@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_optimum_is_that_of_all_choices(count: int, kind: str, memory: bool) -> None:
    """Chains, trees and dense graphs, with and without limits, followers, tables and forbidden pairs."""
    rng = np.random.default_rng(len(kind) + memory)
    for turn in range(count):
        graph = random_graph(rng, kind, memory, whole=turn % 2 == 0, nodes=4)
        assert_proved(graph, best_of_all(graph), graph.solve())


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_alone_finds_it(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With elimination and sweeps switched off, all is left to the backend."""
    monkeypatch.setattr(solve_graph, "cheap_order", lambda _: [])
    monkeypatch.setattr(solve_graph, "complete_order", lambda _: None)
    monkeypatch.setattr(solve_graph, "MAX_SWEEPS", 0)
    monkeypatch.setattr(solve_graph._Passes, "tighten", lambda *_: None)
    rng = np.random.default_rng(7)
    for turn in range(8):
        graph = random_graph(rng, KINDS[turn % 3], turn % 2 == 1, whole=turn % 4 < 2, nodes=4)
        assert_proved(graph, best_of_all(graph), graph.solve(backend))


def test_sweeps_alone_give_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages and prices never rise above the optimum, and reach it on most graphs."""
    monkeypatch.setattr(solve_graph, "cheap_order", lambda _: [])
    monkeypatch.setattr(solve_graph, "complete_order", lambda _: None)
    monkeypatch.setattr(solve_graph, "_ask_backend", lambda *_: None)
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


@pytest.mark.parametrize("rings", [False, True])
def test_overlapping_limits_are_priced_as_by_the_relaxation(rings: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain (with rings) whose memory is limited in every window of five nodes: without a backend the bound is
    that of the linear relaxation or better, in integers, and parts solved exactly give a better choice than single
    changes; the backend's proved optimum lies between."""
    graph = windowed(rings)
    monkeypatch.setattr(incumbent, "PART", 6)
    with monkeypatch.context() as alone:
        alone.setattr(solve_graph, "_ask_backend", lambda *_: None)
        found = graph.solve()
        alone.setattr(solve_graph._Passes, "tighten", lambda *_: None)
        alone.setattr(solve_graph, "_improve_parts", lambda *_: None)
        plain = graph.solve()
    assert found.proof == "exact"
    assert found.lower_bound is not None
    assert found.objective is not None
    assert plain.lower_bound is not None
    assert plain.objective is not None
    assert found.lower_bound >= plain.lower_bound
    assert found.objective <= plain.objective
    assert found.lower_bound > plain.lower_bound or found.objective < plain.objective
    best = graph.solve(relative_gap=1e-6)
    assert best.status == "optimal"
    assert best.objective is not None
    assert found.lower_bound <= best.objective <= found.objective
    assert found.lower_bound >= relaxed_optimum(graph) * (1 - 1e-5)


def windowed(rings: bool) -> StrategyGraph:
    """Sixteen nodes of four strategies in a chain; every five of them in a row are in memory together."""
    rng = np.random.default_rng(5)
    costs = [rng.random(4) * 10 for _ in range(16)]
    memory = [(11 - c) * rng.random(4) for c in costs]
    pairs = [(i, i + 1) for i in range(15)] + ([(i, i + 3) for i in range(0, 13, 4)] if rings else [])
    windows = [tuple(range(i, i + 5)) for i in range(12)]
    least = max(sum(memory[i].min() for i in one) for one in windows)
    free = max(sum(memory[i][costs[i].argmin()] for i in one) for one in windows)
    edges = {pair: rng.random((4, 4)) * 4 for pair in pairs}
    return StrategyGraph(costs, edges, memory, least + 0.25 * (free - least), alive=windows)


def relaxed_optimum(graph: StrategyGraph) -> float:
    """The linear relaxation of the whole graph, stated here once more in the caller's numbers."""
    sizes = [graph.num_strategies(i) for i in range(graph.num_nodes)]
    first = np.cumsum([0, *sizes])
    costs = [float(c) for array in graph.node_costs for c in np.asarray(array)]
    equal: list[dict[int, float]] = [
        dict.fromkeys(range(a, b), 1.0) for a, b in itertools.pairwise(first.tolist())
    ]
    sides = [1.0] * graph.num_nodes
    for (i, j), matrix in graph.edge_costs.items():
        place = len(costs) + np.arange(sizes[i] * sizes[j]).reshape(sizes[i], sizes[j])
        costs += [float(c) for c in np.asarray(matrix).ravel()]
        for node, lines in ((i, place), (j, place.T)):
            for s, line in enumerate(lines):
                equal.append(dict.fromkeys(line.tolist(), 1.0) | {int(first[node]) + s: -1.0})
                sides.append(0.0)
    limits, most = [], []
    for one in graph.alive_sets():
        limits.append(
            {int(first[i]) + s: float(m) for i in one for s, m in enumerate(graph.memory_vector(i)[:, 0])}
        )
        most.append(float(graph.limits()[0]))

    def table(rows: list[dict[int, float]]) -> np.ndarray:
        filled = np.zeros((len(rows), len(costs)))
        for row, entries in zip(filled, rows, strict=True):
            row[list(entries)] = list(entries.values())
        return filled

    done = linprog(costs, table(limits), most, table(equal), sides, (0, 1), method="highs")
    assert done.status == 0
    return float(done.fun)


def test_rings_with_one_limit_are_solved_for_every_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a backend a band of rings with a limit ends at a smaller gap, in integers, than by passes alone,
    which stop short of the relaxation there."""
    rng = np.random.default_rng(11)
    costs = [rng.random(3) * 2 for _ in range(24)]
    memory = [(3 - c) * rng.random(3) for c in costs]
    pairs = [(i, i + d) for d in (1, 2, 3) for i in range(24 - d)]
    limit = (sum(m.min() for m in memory) + sum(m[c.argmin()] for m, c in zip(memory, costs, strict=True))) / 2
    graph = StrategyGraph(costs, {pair: rng.random((3, 3)) * 10 for pair in pairs}, memory, limit)
    monkeypatch.setattr(solve_graph, "_ask_backend", lambda *_: None)
    monkeypatch.setattr(solve_graph, "_improve_parts", lambda *_: None)
    found = graph.solve()
    monkeypatch.setattr(solve_graph._Passes, "solve_priced", lambda *_: None)
    plain = graph.solve()
    assert found.proof == "exact"
    assert found.gap is not None
    assert plain.gap is not None
    assert found.gap < 0.5 * plain.gap


def test_a_part_costs_what_it_adds() -> None:
    """A part of a graph, all else as it is: its costs differ between two choices as the whole's do, and its limits
    hold for the same choices."""
    rng = np.random.default_rng(12)
    for _ in range(6):
        graph = random_graph(rng, "dense", True, whole=True)
        stated = state(graph).instance
        nodes = sorted(stated.costs)
        one = {i: int(rng.integers(stated.costs[i].size)) for i in nodes}
        part = nodes[::2]
        other = one | {i: int(rng.integers(stated.costs[i].size)) for i in part}
        small = part_of(stated, one, part)
        whole = [stated.cost(choice) for choice in (one, other)]
        parts = [small.cost({i: choice[i] for i in part}) for choice in (one, other)]
        if max(whole) < HALF:
            assert whole[1] - whole[0] == parts[1] - parts[0]
        else:
            assert [w >= HALF for w in whole] == [p >= HALF for p in parts] or whole[0] >= HALF


def test_a_callback_sees_bounds_and_can_stop() -> None:
    """Bounds rise and costs fall as they are told; stopped at the first choice, that choice is the answer, with a
    bound that holds. The log has the same lines."""
    graph = windowed(rings=True)
    told: list[GraphProgress] = []
    done = graph.solve(callback=told.append)
    bounds = [one.lower_bound for one in told if one.lower_bound is not None]
    costs = [one.objective for one in told if one.objective is not None]
    assert bounds == sorted(bounds)
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == pytest.approx(done.objective)

    def impatient(progress: GraphProgress) -> None:
        if progress.objective is not None:
            raise KeyboardInterrupt

    stopped = graph.solve(callback=impatient)
    assert stopped.status == "feasible"
    assert "interrupted" in stopped.method
    assert stopped.objective is not None
    assert done.objective is not None
    assert stopped.objective >= done.objective
    assert stopped.lower_bound is None or stopped.lower_bound <= done.objective


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
    monkeypatch.setattr(solve_graph, "cheap_order", lambda _: [])
    monkeypatch.setattr(solve_graph, "complete_order", lambda _: None)
    monkeypatch.setattr(solve_graph, "MAX_SWEEPS", 0)
    monkeypatch.setattr(solve_graph._Passes, "tighten", lambda *_: None)
    refused = []
    plain = GraphProgram.refuse
    monkeypatch.setattr(GraphProgram, "refuse", lambda self, at: (refused.append(at), plain(self, at)))
    rng = np.random.default_rng(13)
    fine = [rng.integers(0, 6, 4) + 0.0 for _ in range(3)]
    memory = [f + 2.0**38 * np.array([0, 0, 1, 1]) for f in fine]
    limit = 2.0**39 + sum(f.min() for f in fine) + 3.0
    costs = [10.0 - f - np.array([0.0, 0.0, 4.0, 4.0]) + rng.random(4) for f in fine]
    edges = {(i, i + 1): rng.random((4, 4)) for i in range(2)}
    graph = StrategyGraph(costs, edges, memory, limit)
    assert_proved(graph, best_of_all(graph), graph.solve("cpsat"))
    assert refused


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
