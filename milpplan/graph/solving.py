"""How a strategy graph is solved: reduce, eliminate, bound, search, and leave the rest to a backend.

1. Strategies that cannot be better go (``reduction``); nodes with at most two neighbours and no load go
   (``elimination``), exactly. Where nothing is limited and tables stay small, that is all.
2. Messages and prices (``sweeps``) give a lower bound, and choices that are repaired and improved
   (``incumbent``). Strategies whose own bound is above the best choice go; back to 1 while that helps.
3. The rest goes to two backends (``integer_program``): what both prove is a bound. A limit that an answer breaks
   in the caller's own numbers becomes a row, and they are asked again; so they are in finer units, until the gap
   is closed.

The bound is kept in integers throughout. What is left always holds a choice that is no dearer than the best known
one: only what is dearer is left out. So a bound above that one, or nothing that is left, is a contradiction, and
a ``SolverError``.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from milpplan.errors import SolverError
from milpplan.graph.elimination import Step, cheap_order, complete_order, eliminate, solve_exactly, undo
from milpplan.graph.incumbent import LocalSearch
from milpplan.graph.instance import FORBIDDEN, Instance, rounded_down, state
from milpplan.graph.integer_program import GraphProgram, size_of
from milpplan.graph.neighbourhoods import improved_parts
from milpplan.graph.pricing import Prices
from milpplan.graph.reduction import prune
from milpplan.graph.relaxed import MAX_RELAXED, relaxed_duals
from milpplan.graph.report import infeasibility, memory_rows
from milpplan.graph.result import GraphProgress, GraphSolution
from milpplan.graph.search import BoundRefutedError, Search
from milpplan.graph.statement import StrategyGraph
from milpplan.graph.sweeps import Sweeps
from milpplan.optimize.milp.backends import AUTO
from milpplan.optimize.milp.backends import backend as named_backend
from milpplan.optimize.milp.program import Program
from milpplan.optimize.milp.solution import Solution

MAX_ROUNDS: Final = 4
MAX_SWEEPS: Final = 60
MAX_VARIABLES: Final = 500_000
# Programs that backends are asked: digits of costs, and answers that broke a limit.
MAX_PROGRAMS: Final = 250
# Passes after the relaxation's duals, which are as good as any; exact solutions for prices of one limit.
NUM_LAST_SWEEPS: Final = 3
MAX_PRICED: Final = 12
# The gap from which on parts of the graph pay.
WIDE_GAP: Final = 2e-3
AUTO_ORDER: Final = ("highs", "cbc", "cpsat")
WITNESSES: Final = ("cpsat", "cbc", "highs")
"""Who confirms a bound, in turn, but for the solver that gave it: first the one that counts in integers."""
EFFORTS: Final[tuple[Mapping[str, float], ...]] = ({"cbc": 1e3, "cpsat": 1.0}, {"cbc": 1e6, "cpsat": 500.0})
"""Effort of a witness, in its own unit of work (nodes of CBC, CP-SAT's deterministic seconds; HiGHS has none):
all are asked with the first before any with the second, since which solver is fast differs from graph to graph."""
# How a backend that is of no use here says so.
FAILURES: Final = (SolverError, ImportError, OSError)


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
    deadline = start + (1e9 if time_limit_s is None else min(time_limit_s, 1e9))
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
    """Nothing is allowed: whatever was left out was dearer than a known choice, and there is none."""
    if search.choice is not None:
        search.prove(FORBIDDEN)
    search.infeasible = True


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
    """Better choices from parts of the graph solved exactly."""
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
    before, search.parts_tried = search.upper, True
    improved_parts(left, at, named_backend(name), search.limits(), search.deadline, offer)
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
    """Drop strategies that make every choice dearer than the best one."""
    if search.choice is None:
        return 0
    # Some strategy of every node is taken.
    search.prove(max(int(bounds.min()) for bounds in sweeps.marginals.values()))
    masks = {i: bounds <= search.upper for i, bounds in sweeps.marginals.items()}
    masks = {i: mask for i, mask in masks.items() if not mask.all()}
    for node, mask in masks.items():
        left.keep(node, mask)
    left.keep_in_edges(masks)
    if not prune(left):
        return None
    return sum(int((~mask).sum()) for mask in masks.values())


def _ask_backend(search: Search, left: Instance, steps: list[Step]) -> None:
    """Solve the rest as integer programs: again for every answer that breaks a real limit, and in finer units."""
    if size_of(left) > MAX_VARIABLES:
        search.method.append(f"stopped: {size_of(left)} variables are left")
        return
    search.method.append("integer program")
    program = GraphProgram(left, search.stated.loads_exact)

    def offer(solution: Solution) -> dict[int, int] | None:
        """The positions of an answer if it is legal; else the program is told what it broke."""
        at = program.positions(solution)
        if search.offer(undo(steps, {i: int(left.kept[i][s]) for i, s in at.items()})):
            return at
        program.refuse(at)
        return None

    for _ in range(MAX_PROGRAMS):
        if search.left_s() <= 0 or not _one_program(search, program, offer):
            return


def _one_program(
    search: Search, program: GraphProgram, offer: Callable[[Solution], dict[int, int] | None]
) -> bool:
    """Let the first backend that can solve a program, and others confirm it; says whether to go on."""
    names = AUTO_ORDER if search.backend == AUTO else (search.backend,)
    failure: Exception = BoundRefutedError(f"What {', '.join(sorted(search.refuted))} proved is not true.")
    # What a backend simplifies first has misled it before: it gets a second try without that.
    for name, presolve in itertools.product(names, (True, False)):
        if name in search.refuted:
            continue
        try:
            return _proved_by(search, program, offer, name, presolve)
        except BoundRefutedError as error:
            failure = error
            search.method.append(f"{name} refuted")
            if not presolve:
                search.refuted.add(name)
        except FAILURES as error:
            failure = error
    # Finer units try the tolerances of solvers: where they fail there, what coarser ones have proved stays.
    if search.choice is None or (isinstance(failure, BoundRefutedError) and len(program.levels) == 1):
        raise failure
    search.method.append(f"backend failed: {failure}")
    return False


def _proved_by(
    search: Search,
    program: GraphProgram,
    offer: Callable[[Solution], dict[int, int] | None],
    name: str,
    presolve: bool,
) -> bool:
    """Solve one program with one backend, and take over what others confirm; says whether to go on."""
    current = program.state(None if search.choice is None else search.upper)
    first = named_backend(name).solve(current, replace(search.limits(), presolve=presolve))
    search.used_backend = name
    if first.values is not None:
        at = offer(first)
        if at is None or program.add_total(at):
            return True
    claim = program.claim(first)
    if first.limit_reached or (claim is None and first.status != "infeasible"):
        return False
    if search.choice is not None:
        most = program.most(search.upper)
        # As between two backends: a floating-point solver may be off by a unit.
        if claim is None or claim > most + 1:
            raise refuted(first, claim, f"a choice of {most} at most is legal")
        claim = min(claim, most)
    confirmed, witness = _confirmed(search, program, current, first, claim, offer)
    if witness is None:
        search.method.append(f"not confirmed: {name}")
        return False
    search.witness = witness
    if "cpsat" not in (name, witness):
        # Said before the bound is: whoever is told of it may stop the solve.
        search.proof = "tolerance"
    if claim is None or confirmed is None:
        search.infeasible = True
        return False
    program.prove(confirmed)
    search.prove(program.bound)
    if search.finished() or confirmed < claim:
        return False
    if program.refine():
        return True
    if first.objective is not None:
        search.coarse = program.tolerance(first.objective - confirmed)
    return False


def _confirmed(
    search: Search,
    program: GraphProgram,
    current: Program,
    first: Solution,
    claim: int | None,
    offer: Callable[[Solution], dict[int, int] | None],
) -> tuple[int | None, str | None]:
    """The part of a claim (None: that nothing is allowed) that a second backend proves too, and which; None if
    there is none.

    Raises:
        BoundRefutedError: a second backend has an answer that the claim says cannot be.
    """
    most: int | None = None
    witness = None
    names = sorted(WITNESSES, key=lambda name: name != search.witness)
    asked = [(name, efforts.get(name)) for efforts in EFFORTS for name in names]
    for name, effort in dict.fromkeys(asked):
        if name in search.refuted or name == first.backend or search.left_s() <= 0:
            continue
        try:
            second = named_backend(name).solve(current, replace(search.limits(), deterministic_limit=effort))
        except FAILURES:
            continue
        proved = program.claim(second)
        # A floating-point solver may be off by a unit; then the lower of two claims counts.
        if second.objective is not None and (claim is None or second.objective < claim - 1):
            offer(second)
            raise refuted(first, claim, f"{name} has an answer of {second.objective}")
        if claim is None:
            if second.status == "infeasible":
                return None, name
        elif second.status == "infeasible" or (proved or 0) > (first.objective or 0) + 1:
            # The first backend's answer, which has been checked, disproves it.
            search.refuted.add(name)
        elif proved is not None and (most is None or proved > most):
            most, witness = min(proved, claim), name
            if most == claim:
                break
    return most, witness


def refuted(solution: Solution, claim: int | None, but: str) -> BoundRefutedError:
    """Say that what a backend claims to have proved (None: that nothing is allowed) is not true."""
    said = "that nothing is allowed" if claim is None else f"the bound {claim}"
    return BoundRefutedError(
        f"{solution.backend} says {solution.raw_status} and proves {said}, but {but}.",
        "Two solvers must prove the same bound.",
        "Use another backend, run `milpplan doctor`, and report this graph.",
    )


def _answer(search: Search, seconds: float) -> GraphSolution:
    stated, graph = search.stated, search.graph
    choice = None if search.choice is None else stated.choice(search.choice)
    objective = None if choice is None else graph.objective_of(choice)
    lower = None if search.lower is None else rounded_down(search.lower, stated.unit, exact=not stated.error_units)
    if lower is not None and objective is not None and lower > objective:
        raise BoundRefutedError(f"The bound {lower!r} is above the cost {objective!r} of the choice.")
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
