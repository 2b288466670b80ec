"""How a strategy graph is solved: reduce, eliminate, bound, search, and leave the rest to a backend.

1. Strategies that cannot be better go (``reduction``); nodes with at most two neighbours and no load go
   (``elimination``), exactly. Where nothing is limited and tables stay small, that is all.
2. Messages and prices (``sweeps``) give a lower bound, and choices that are repaired and improved
   (``incumbent``). Strategies whose own bound is at or above the best choice go; back to 1 while that helps.
3. The rest goes to a backend (``integer_program``). A limit that its answer breaks in the caller's own numbers
   becomes a row, and it is asked again.

The bound is kept in integers throughout; a cost removed for being no better than a known choice stays represented
by that choice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np

from milpplan.errors import SolverError
from milpplan.graph.elimination import Step, cheap_order, complete_order, eliminate, solve_exactly, undo
from milpplan.graph.incumbent import LocalSearch
from milpplan.graph.instance import Instance, Stated, state
from milpplan.graph.integer_program import size_of, state_program
from milpplan.graph.neighbourhoods import improved_parts
from milpplan.graph.pricing import Prices
from milpplan.graph.reduction import prune
from milpplan.graph.relaxed import MAX_RELAXED, relaxed_duals
from milpplan.graph.report import infeasibility, memory_rows
from milpplan.graph.result import GraphProgress, GraphSolution
from milpplan.graph.search import Search
from milpplan.graph.statement import StrategyGraph
from milpplan.graph.sweeps import Sweeps
from milpplan.optimize.backends import AUTO
from milpplan.optimize.backends import backend as named_backend
from milpplan.optimize.solution import Solution

MAX_ROUNDS: Final = 4
MAX_SWEEPS: Final = 60
MAX_VARIABLES: Final = 500_000
MAX_CUTS: Final = 200
# Passes after the relaxation's duals, which are as good as any; exact solutions for prices of one limit.
NUM_LAST_SWEEPS: Final = 3
MAX_PRICED: Final = 12
# Share of the time left that parts of the graph get, and the gap from which on they pay.
SHARE_OF_PARTS: Final = 1 / 3
WIDE_GAP: Final = 2e-3


def solve_graph(
    graph: StrategyGraph,
    backend: str,
    time_limit_s: float | None,
    hint: list[int] | None,
    relative_gap: float,
    seed: int,
    callback: Callable[[GraphProgress], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> GraphSolution:
    """See ``StrategyGraph.solve``."""
    start = time.perf_counter()
    named_backend(backend)
    stated = state(graph)
    deadline = start + (1e9 if time_limit_s is None else time_limit_s)
    search = Search(graph, stated, stated.instance, deadline, backend, relative_gap, seed)
    search.callback, search.cancelled = callback, cancelled
    try:
        _solve(search, hint)
    except KeyboardInterrupt:
        search.method.append("interrupted")
    return _answer(search, time.perf_counter() - start)


def _solve(search: Search, hint: list[int] | None) -> None:
    if hint is not None:
        search.offer({i: hint[i] for i in search.root.costs})
    left = search.root.copy()
    if not prune(left):
        search.infeasible = True
    elif left.peaks:
        search.prove(_least_of_all(left))
        _ask_backend(search, left, [])
    else:
        _narrow(search, left, hint)


def _least_of_all(left: Instance) -> int:
    """A bound without solving: every node, edge and alternative of a peak by itself."""
    total = left.offset + sum(int(c.min()) for c in left.costs.values())
    total += sum(int(matrix.min()) for matrix in left.edges.values())
    for group in left.peaks:
        total += max(base + sum(int(t[left.kept[i]].min()) for i, t in terms.items()) for base, terms in group)
    return total


def _narrow(search: Search, left: Instance, hint: list[int] | None) -> None:
    """Reduce and bound until the gap is closed, nothing more can be left out, or time is over."""
    steps: list[Step] = []
    for round_number in range(MAX_ROUNDS):
        order = cheap_order(left)
        done = eliminate(left, order)
        if done is None:
            return _nothing_left(search)
        left, more = done
        steps += more
        if not prune(left):
            return _nothing_left(search)
        if _closed_by_elimination(search, left, steps) or search.finished():
            return None
        removed = _bounded(search, left, steps, hint if round_number == 0 else None)
        if search.finished() or search.left_s() <= 0:
            return None
        if removed is None:
            return _nothing_left(search)
        if removed == 0:
            break
    _ask_backend(search, left, steps)
    return None


def _nothing_left(search: Search) -> None:
    """All that was left out was no better than the best choice; without one, nothing is allowed."""
    if search.choice is None:
        search.infeasible = True
    else:
        search.prove(search.upper)


def _closed_by_elimination(search: Search, left: Instance, steps: list[Step]) -> bool:
    """Solve without limits, exactly; that settles it where there are none or its choice meets them."""
    order = complete_order(left)
    if order is None:
        return False
    done = solve_exactly(left, order)
    if done is None:
        _nothing_left(search)
        return True
    bound, choice = done
    search.method.append("elimination")
    fits = search.offer(undo(steps, choice))
    search.prove(bound)
    return fits


def _bounded(search: Search, left: Instance, steps: list[Step], hint: list[int] | None) -> int | None:
    """Sweep; leave out what is proved no better. Returns how many strategies went, None if a node lost all."""
    search.method.append("sweeps")
    sweeps, prices = Sweeps(left), Prices(left.limits.size)
    local = LocalSearch(left)
    if hint is not None and (at := left.positions({i: hint[i] for i in left.costs})) is not None:
        _try(search, left, steps, local, at)
    _settle(search, left, steps, local, sweeps, prices)
    if not search.finished() and search.left_s() > 0:
        _tighten(search, left, steps, local, sweeps, prices)
    if not search.finished() and size_of(left) <= MAX_VARIABLES:
        _improve_parts(search, left, steps)
    if search.finished() or search.left_s() <= 0:
        return 0
    return _leave_out(search, left, sweeps)


def _improve_parts(search: Search, left: Instance, steps: list[Step]) -> None:
    """Better choices from parts of the graph solved exactly, for a third of the time that is left."""
    at = None if search.choice is None else left.positions({i: search.choice[i] for i in left.costs})
    if at is None or not left.limits.size or search.lower is None or search.parts_tried:
        return
    if search.upper - search.lower <= WIDE_GAP * abs(search.upper):
        return

    def offer(better: dict[int, int]) -> bool:
        before = search.upper
        search.offer(undo(steps, {i: int(left.kept[i][s]) for i, s in better.items()}))
        return search.upper < before

    name = "highs" if search.backend == AUTO else search.backend
    now = time.perf_counter()
    deadline = now + (search.deadline - now) * SHARE_OF_PARTS
    before, search.parts_tried = search.upper, True
    improved_parts(left, at, named_backend(name), search.limits(), deadline, offer)
    if search.upper < before:
        search.method.append("parts")


def _settle(
    search: Search, left: Instance, steps: list[Step], local: LocalSearch, sweeps: Sweeps, prices: Prices
) -> None:
    """Passes and prices until neither gains."""
    best, stalled = None, 0
    for _ in range(MAX_SWEEPS):
        bound, picked = sweeps.run()
        search.prove(bound)
        improved = best is None or bound > best + max(1, abs(best) >> 20)
        best = bound if best is None else max(best, bound)
        stalled = 0 if improved else stalled + 1
        before = search.upper
        _try(search, left, steps, local, picked)
        if search.finished() or search.left_s() <= 0:
            return
        if not prices.update(left, picked, sweeps.exact, search.upper, bound) and stalled:
            return
        if stalled >= (3 if search.upper == before else 6):
            return
        sweeps.set_prices(prices.values)


def _tighten(
    search: Search, left: Instance, steps: list[Step], local: LocalSearch, sweeps: Sweeps, prices: Prices
) -> None:
    """Where passes stop short of the relaxation (several limits, rings): its own duals, or, if no ring needs a
    large table, every price solved exactly."""
    order = None if sweeps.exact or not left.limits.size else complete_order(left)
    relaxed = left.limits.size > 1 or (order is None and not sweeps.exact)
    if relaxed and size_of(left) <= MAX_RELAXED:
        duals = relaxed_duals(left, search.deadline, search.cancelled)
        if duals is not None:
            search.method.append("relaxation")
            sweeps.set_prices(duals.prices)
            sweeps.set_messages(duals.messages)
            _try(search, left, steps, local, duals.picked)
            for _ in range(NUM_LAST_SWEEPS):
                bound, picked = sweeps.run()
                search.prove(bound)
                _try(search, left, steps, local, picked)
    if order is not None:
        _solve_priced(search, left, steps, local, sweeps, prices, order)


def _solve_priced(
    search: Search,
    left: Instance,
    steps: list[Step],
    local: LocalSearch,
    sweeps: Sweeps,
    prices: Prices,
    order: list[int],
) -> None:
    """Eliminate all nodes at the present prices; with one limit, move its price until it stays."""
    search.method.append("priced elimination")
    for _ in range(MAX_PRICED):
        if search.finished() or search.left_s() <= 0:
            return
        priced, paid = sweeps.priced()
        done = solve_exactly(priced, order)
        assert done is not None
        bound, choice = done[0] - paid, left.positions(done[1])
        search.prove(bound)
        assert choice is not None
        _try(search, left, steps, local, choice)
        if left.limits.size > 1 or not prices.update(left, choice, True, search.upper, bound):
            return
        sweeps.set_prices(prices.values)


def _try(search: Search, left: Instance, steps: list[Step], local: LocalSearch, at: dict[int, int]) -> None:
    better = local.improve(at, search.deadline)
    if better is not None:
        search.offer(undo(steps, {i: int(left.kept[i][s]) for i, s in better.items()}))


def _leave_out(search: Search, left: Instance, sweeps: Sweeps) -> int | None:
    """Drop strategies that cannot beat the best choice."""
    if search.choice is None:
        return 0
    masks = {i: bounds < search.upper for i, bounds in sweeps.marginals.items()}
    masks = {i: mask for i, mask in masks.items() if not mask.all()}
    for node, mask in masks.items():
        left.keep(node, mask)
    if any(not left.costs[node].size for node in masks):
        return None
    left.keep_in_edges(masks)
    if not prune(left):
        return None
    return sum(int((~mask).sum()) for mask in masks.values())


def _ask_backend(search: Search, left: Instance, steps: list[Step]) -> None:
    """Solve the rest as an integer program, again with a row for every answer that breaks a real limit."""
    cuts: list[dict[int, int]] = []
    if size_of(left) > MAX_VARIABLES:
        search.method.append(f"stopped: {size_of(left)} variables are left")
        return
    search.method.append("integer program")
    while len(cuts) <= MAX_CUTS and search.left_s() > 0:
        try:
            solution, bound, at = _one_program(search, left, cuts)
        except SolverError as error:
            if search.choice is None:
                raise
            search.method.append(f"backend failed: {error}")
            return
        search.used_backend = solution.backend
        proves = search.upper if solution.status == "infeasible" else bound
        news = proves is not None and (search.lower is None or min(proves, search.upper) > search.lower)
        if solution.backend != "cpsat" and (news or (solution.status == "infeasible" and search.choice is None)):
            # Said before the bound is: whoever is told of it may stop the solve.
            search.proof = "tolerance"
        if solution.status == "infeasible":
            _nothing_left(search)
        elif bound is not None:
            search.prove(bound)
        if solution.status == "infeasible":
            return
        if at is None:
            return
        fits = search.offer(undo(steps, {i: int(left.kept[i][s]) for i, s in at.items()}))
        if fits or search.finished() or solution.status != "optimal":
            return
        cuts.append(at)
    return


def _one_program(
    search: Search, left: Instance, cuts: list[dict[int, int]]
) -> tuple[Solution, int | None, dict[int, int] | None]:
    """The backend's answer, the bound in the instance's units, and the choice (positions)."""
    names = ("highs", "cbc", "cpsat") if search.backend == "auto" else (search.backend,)
    limits = search.limits()
    failure: SolverError | None = None
    for name in names:
        stating = state_program(left, name == "cpsat", cuts, search.stated.loads_exact)
        try:
            solution = named_backend(name).solve(stating.program, limits)
        except SolverError as error:
            failure = error
            continue
        bound = None
        search.coarse = stating.error
        if solution.status == "optimal":
            assert solution.objective is not None
            bound = stating.bound(solution.objective)
        elif solution.bound is not None:
            bound = stating.bound(int(np.floor(solution.bound - 1e-9 * abs(solution.bound))))
        at = stating.positions(solution) if solution.values is not None else None
        return solution, bound, at
    assert failure is not None
    raise failure


def _answer(search: Search, seconds: float) -> GraphSolution:
    stated, graph = search.stated, search.graph
    choice = None if search.choice is None else stated.choice(search.choice)
    objective = None if choice is None else graph.objective_of(choice)
    lower = None if search.lower is None else _down(search.lower, stated)
    if lower is not None and objective is not None:
        lower = min(lower, objective)
    error = (stated.error_units + search.coarse) * stated.unit
    explanation = infeasibility(graph, stated) if search.infeasible else ""
    if search.infeasible:
        status, proof = "infeasible", search.proof
    elif choice is None:
        status, proof = "no_solution_found", search.proof if lower is not None else "none"
    else:
        status = "optimal" if search.finished() else "feasible"
        proof = search.proof if lower is not None else "none"
    return GraphSolution(
        status=status,  # type: ignore[arg-type]
        choice=choice,
        objective=objective,
        lower_bound=None if search.infeasible else lower,
        rounding_error=error,
        proof=proof,
        method=", ".join(dict.fromkeys(search.method)) or "reduction",
        backend=search.used_backend,
        memory=memory_rows(graph, choice),
        explanation=explanation,
        wall_time_s=seconds,
    )


def _down(units: int, stated: Stated) -> float:
    """The bound in the caller's unit, rounded down."""
    value = units * stated.unit
    return value if stated.error_units == 0 and abs(units) < 2**53 else float(np.nextafter(value, -np.inf))
