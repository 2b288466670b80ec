"""Adapters against the peers' own formulations, data and results."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.alpa_formulation import solve as solve_as_alpa
from benchmarks.strategy_graphs import alpa_arguments, graph_of
from examples.adapters import alpa, autoparallel, galvatron
from tests.amounts import long_but
from tests.graph.autoparallel_formulation import solve as solve_as_autoparallel

ADAPTERS = Path(alpa.__file__).parent
PUBLISHED_S = {"G1": 24.0413, "G5": 1.08595, "G3": 4.18076, "G4": 5.05695}


def random_arguments(rng: np.random.Generator, nodes: int = 6) -> tuple[object, ...]:
    """A random problem in Alpa's arrays, with a follower, an alias and liveness."""
    s_len = rng.integers(1, 4, nodes)
    s_len[5] = s_len[2]
    follow = np.array([-1, -1, -1, -1, -1, 2])
    pairs = [(0, 1), (1, 2), (2, 3), (1, 4), (5, 4)]
    total = int(s_len.sum())
    moves = np.concatenate([rng.random(s_len[i] * s_len[j]) * 3 for i, j in pairs])
    apart = (rng.random(s_len[0] * s_len[3]) < 0.3).astype(float)
    alive = [sorted(set(rng.integers(0, nodes, 4).tolist())) for _ in range(nodes)]
    liveness = np.array([len(a) for a in alive] + [i for a in alive for i in a])
    compute, communication, memory = rng.random((3, total)) * 4
    pair_array = np.array(pairs).ravel()
    costs = (compute, communication, memory, moves, apart)
    return (nodes, 9.0, s_len, follow, pair_array, np.array([0, 3]), liveness, *costs)


def test_alpas_arguments_give_alpas_optimum() -> None:
    """The same optimum as Alpa's formulation solved by CBC; choices, pairs and objective agree."""
    rng = np.random.default_rng(12)
    solved = 0
    for _ in range(6):
        arguments = random_arguments(rng)
        best, _ = solve_as_alpa(arguments, 10.0)
        if best is None:
            with pytest.raises(RuntimeError, match=r"memory|choice"):
                alpa.call_solver_serialized_args(*arguments)
            continue
        chosen, pairs, objective, solution = alpa.call_solver_serialized_args(*arguments)
        assert objective == pytest.approx(best, abs=1e-6)
        assert solution.status == "optimal"
        assert chosen[5] == chosen[2]
        assert pairs[0] == chosen[0] * arguments[2][1] + chosen[1]  # type: ignore[index]
        solved += 1
    assert solved >= 3


def test_alpas_fixed_strategies_and_hints() -> None:
    """A fixed entry of s_init is kept, a free one is a hint only."""
    arguments = alpa.example()
    free = alpa.call_solver_serialized_args(*arguments, np.array([[2, 0, 0]]))
    fixed = alpa.call_solver_serialized_args(*arguments, np.array([[2, 0, 1]]))
    assert free[2] == alpa.call_solver_serialized_args(*arguments)[2] <= fixed[2]
    assert fixed[0][2] == 0


def test_the_benchmarks_graph_is_alpas_problem() -> None:
    """Both sides of the benchmark have one optimum."""
    arguments = alpa_arguments(12, 3, True, 1)
    best, _ = solve_as_alpa(arguments, 20.0)
    assert graph_of(arguments).solve().objective == pytest.approx(best, rel=1e-6)


def test_autoparallel_by_hand() -> None:
    """Costs by argument add up along the graph; an infinite one is never taken."""
    costs, producers = autoparallel.example()
    solution = autoparallel.graph_of(costs, producers).solve()
    # Shard the input and replicate the weight (1), five arguments at 1.5, one gather (2) into the product.
    assert solution.objective == 1.0 + 5 * 1.5 + 2.0
    taken = autoparallel.decisions(solution, producers)
    assert sum(costs[i, a, o, j] for (i, a), (o, j) in taken.items()) + 1.0 == solution.objective
    linked = autoparallel.graph_of(costs, producers, links={1: 0}).solve()
    assert linked.objective is not None
    assert linked.objective > solution.objective
    memory = {0: [1.0, 2.0], 1: [1.0, 2.0]}
    assert autoparallel.graph_of(costs, producers, memory, 2.0).solve().objective >= solution.objective


def random_decisions(rng: np.random.Generator, nodes: int = 7) -> tuple[Any, ...]:
    """Random costs of AutoParallel's kind: operations of none to three arguments, some from one producer, some
    pairs impossible; memory of the first ones limited; two operations of one shape linked."""
    sizes = rng.integers(2, 4, nodes)
    sizes[4] = sizes[2]
    producers: dict[tuple[int, int], int] = {}
    costs: dict[autoparallel.Key, float] = {}
    for i in range(nodes):
        for a in range(int(rng.integers(0, 4)) if i > 1 else 0):
            producers[i, a] = int(rng.integers(0, i))
        for a in range(max(1, sum(op == i for op, _ in producers))):
            width = sizes[producers[i, a]] if (i, a) in producers else 1
            for o, j in np.ndindex(int(sizes[i]), int(width)):
                possible = rng.random() > 0.1 or o == j == 0
                costs[i, a, o, j] = float(rng.random() * 10) if possible else math.inf
    memory = {i: rng.random(sizes[i]) * 4 for i in range(4)}
    least, most = (sum(float(pick(m)) for m in memory.values()) for pick in (np.min, np.max))
    return costs, producers, memory, least + (most - least) * rng.random() * 0.6, {4: 2}


def test_autoparallels_costs_give_its_programs_optimum() -> None:
    """The same optimum as AutoParallel's integer program in CBC, with memory, links and shared producers."""
    rng = np.random.default_rng(3)
    solved = 0
    for _ in range(8):
        costs, producers, memory, limit, links = random_decisions(rng)
        best = solve_as_autoparallel(costs, producers, memory, limit, links)
        found = autoparallel.graph_of(costs, producers, memory, limit, links).solve()
        assert (found.status == "infeasible") == (best is None)
        if best is not None:
            assert found.objective == pytest.approx(best, abs=1e-6)
            assert found.lower_bound == pytest.approx(best, abs=1e-6)
            solved += 1
    assert solved >= 5


@pytest.mark.long
@pytest.mark.parametrize("backend", long_but(("auto",), ("auto", "cbc", "cpsat")))
@pytest.mark.parametrize("name", ["G1", pytest.param("G5", marks=pytest.mark.long)])
def test_galvatron_is_proved_at_or_below_its_own(name: str, backend: str) -> None:
    """On its own cost, space and memory: at most the known optimum, proved, in few programs; the same with each
    backend, confirmed by another."""
    case = next(c for key, c in galvatron.cases().items() if key.startswith(name))
    answer = galvatron.search(case["inputs"], backend)
    assert answer.time_s <= PUBLISHED_S[name] * (1 + 1e-5)
    assert answer.time_s <= case["galvatron"]["time_s"]
    assert answer.bound_s <= answer.time_s
    assert answer.bound_s >= answer.time_s * (1 - 1e-9)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["auto", "cbc", "cpsat"])
@pytest.mark.parametrize("name", ["G3", "G4"])
def test_galvatrons_larger_cases(name: str, backend: str) -> None:
    """As above, with 527 graphs to look at."""
    test_galvatron_is_proved_at_or_below_its_own(name, backend)


def test_galvatrons_own_plans_cost_what_it_says() -> None:
    """Its plans, priced by the adapter, give its times to all digits: the costs are the same."""
    for case in galvatron.cases().values():
        theirs, inputs = case["galvatron"], case["inputs"]
        tasks = [t for t in galvatron.tasks(inputs) if t.pp == theirs["pp_size"] and t.chunks == theirs["chunks"]]
        share = theirs["vtp"]
        fits = [
            t
            for t in tasks
            if t.embedding.sharing == share
            and t.embedding.zero3 == bool(theirs["embed_sdp"])
            and (t.embedding.sp > 1) == bool(theirs["vsp"])
        ]
        graph, choices = galvatron.graph_of(
            inputs, max(fits, key=lambda t: (t.max_degree, t.mode))
        ) or pytest.fail("no room")
        named = {_name(s): k for k, s in enumerate(choices)}
        value = graph.objective_of([named[text] for text in theirs["layer_strategies"]])
        assert value == pytest.approx(theirs["time_s"], rel=1e-9)


def _name(s: galvatron.Strategy) -> str:
    star = "*" if s.sharing > 1 else ""
    text = f"{s.pp}-{s.sharing}{star}-{s.dp}{'f' if s.zero3 else ''}{'-c' if s.checkpoint else ''}"
    return f"{text}-sp" if s.sp > 1 else text


@pytest.mark.parametrize("name", ["alpa", "autoparallel"])
def test_examples_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each example prints a cost and its bound."""
    runpy.run_path(str(ADAPTERS / f"{name}.py"), run_name="__main__")
    assert "bound" in capsys.readouterr().out
