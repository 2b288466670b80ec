"""Solve a strategy graph: reduce, eliminate, bound, improve, and leave the rest to backends.

1. Strategies that cannot be better go (``reduction``); nodes with at most two neighbours and no load are
   eliminated exactly (``elimination``). Without limits, and while tables stay small, that solves the graph.
2. Messages and multipliers (``message_passing``) give a lower bound, and choices that are repaired and improved
   (``incumbent``). Strategies whose own bound is above the incumbent go; back to 1 while that helps.
3. Two backends solve the rest (``integer_program``); a bound counts when both prove it. A limit that an answer
   breaks in the caller's own numbers becomes a row, and the backends are called again; so they are in finer units,
   until the gap is closed.

The bound is kept in integers throughout. A reduced graph always holds a choice that costs no more than the
incumbent, because only dearer choices are left out. So a bound above the incumbent, or an empty graph, is a
contradiction, and a ``SolverError``.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from milpplan.errors import SolverError
from milpplan.graph.elimination import Step, cheap_order, complete_order, eliminate, solve_exactly, undo
from milpplan.graph.incumbent import LocalSearch, improved_parts
from milpplan.graph.instance import FORBIDDEN, HALF, Instance, Stated, prune, rounded_down, state
from milpplan.graph.integer_program import MAX_RELAXED, GraphProgram, relaxed_duals, size_of
from milpplan.graph.message_passing import MessagePassing, Multipliers
from milpplan.graph.result import GraphProgress, GraphSolution, MemoryRow, Proof
from milpplan.optimize.milp.backends import AUTO
from milpplan.optimize.milp.backends import backend as named_backend
from milpplan.optimize.milp.program import FloatArray, Program
from milpplan.optimize.milp.solution import Limits, Solution, end_if

if TYPE_CHECKING:
    from milpplan.graph.strategy_graph import StrategyGraph


class BoundRefutedError(SolverError):
    """A bound that a solver claimed to have proved is false: a legal choice costs less."""


LOGGER: Final = logging.getLogger("milpplan.graph")


@dataclass(slots=True, eq=False)
class Search:
    """State of one solve: the incumbent (``choice``, original strategies, of cost ``upper``) and the bound
    ``lower``.

    ``coarse`` is the maximum loss of the bound through backends' tolerances. ``refuted`` are backends whose claims
    were disproved. ``witness`` is the backend that confirmed a bound last, and is asked first.
    """

    graph: StrategyGraph
    stated: Stated
    root: Instance
    deadline: float
    backend: str
    relative_gap: float
    seed: int
    choice: dict[int, int] | None = None
    upper: int = HALF
    lower: int | None = None
    infeasible: bool = False
    coarse: int = 0
    proof: Proof = "exact"
    method: list[str] = field(default_factory=list)
    used_backend: str | None = None
    parts_tried: bool = False
    callback: Callable[[GraphProgress], None] | None = None
    cancelled: Callable[[], bool] | None = None
    refuted: set[str] = field(default_factory=set)
    witness: str | None = None
    started: float = field(default_factory=time.perf_counter)

    def offer(self, choice: dict[int, int]) -> bool:
        """Take a choice that is cheaper and meets the caller's limits. Returns True if it meets them."""
        cost = self.root.cost(choice)
        if cost >= HALF or not self.graph.fits(self.stated.choice(choice)):
            return False
        if cost < self.upper:
            self.choice, self.upper = choice, cost
            self._require_agreement()
            self.note()
        return True

    def prove(self, bound: int) -> None:
        """Raise the lower bound."""
        if self.lower is None or bound > self.lower:
            self.lower = bound
            self._require_agreement()
            self.note()

    def _require_agreement(self) -> None:
        """Refuse a bound above the cost of the incumbent."""
        if self.lower is not None and self.lower > self.upper:
            unit = self.stated.unit
            raise BoundRefutedError(
                f"The bound {self.lower * unit!r} is above the cost {self.upper * unit!r} of a choice that meets "
                f"all limits (by {', '.join(dict.fromkeys(self.method)) or 'reduction'}).",
                "A bound must not exceed the cost of any choice.",
                "Run `milpplan doctor`, and report this graph.",
            )

    def note(self) -> None:
        """Report progress to the log and to the caller, whose callback may raise ``KeyboardInterrupt`` to stop."""
        unit = self.stated.unit
        progress = GraphProgress(
            wall_time_s=time.perf_counter() - self.started,
            objective=None if self.choice is None else self.upper * unit,
            lower_bound=None if self.lower is None else self.lower * unit,
        )
        LOGGER.debug("%s", progress)
        if self.callback is not None:
            self.callback(progress)

    def finished(self) -> bool:
        """Tell whether the requested gap is reached."""
        if self.choice is None or self.lower is None:
            return False
        return self.upper - self.lower <= max(self.relative_gap * abs(self.upper), self.coarse)

    def left_s(self) -> float:
        """Return the seconds until the deadline; end the solve if it was cancelled."""
        end_if(self.cancelled)
        return self.deadline - time.perf_counter()

    def limits(self) -> Limits:
        """Return the limits for a backend: the time that is left, the seed, and the cancellation."""
        seconds = self.left_s()
        return Limits(time_limit_s=seconds if seconds < 1e8 else None, seed=self.seed, cancelled=self.cancelled)


MAX_ROUNDS: Final = 4
MAX_SWEEPS: Final = 60
MAX_VARIABLES: Final = 500_000
# Maximum number of programs given to backends, for digits of costs and for answers that broke a limit.
MAX_PROGRAMS: Final = 250
# Passes after the relaxation's duals, and exact solutions while the multiplier of one limit moves.
NUM_LAST_SWEEPS: Final = 3
MAX_PRICED: Final = 12
# Relative gap above which parts of the graph are solved exactly.
WIDE_GAP: Final = 2e-3
AUTO_ORDER: Final = ("highs", "cbc", "cpsat")
WITNESSES: Final = ("cpsat", "cbc", "highs")
"""Backends that confirm another's bound, in order: first the one that computes in integers."""
EFFORTS: Final[tuple[Mapping[str, float], ...]] = ({"cbc": 1e3, "cpsat": 1.0}, {"cbc": 1e6, "cpsat": 500.0})
"""Effort of a witness, in its own unit of work (nodes of CBC, CP-SAT's deterministic seconds; HiGHS has none): all
witnesses get the first effort before any gets the second, since which solver is fast differs from graph to
graph."""
# Errors of a backend that cannot solve a program.
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
    """Solve a checked graph; arguments and answer as of ``StrategyGraph.solve``."""
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
    """Solve the graph: reduce it, then bound and improve, or ask backends for graphs with peaks."""
    if hint is not None:
        search.offer({i: hint[i] for i in search.root.costs})
    reduced = search.root.copy()
    if not prune(reduced):
        search.infeasible = True
    elif reduced.peaks:
        search.prove(_separate_minima(reduced))
        _ask_backend(search, reduced, [])
    else:
        _narrow(search, reduced, hint)


def _separate_minima(reduced: Instance) -> int:
    """Bound every choice by minimising each node, edge and alternative of a peak by itself."""
    total = reduced.offset + sum(int(c.min()) for c in reduced.costs.values())
    total += sum(int(matrix.min()) for matrix in reduced.edges.values())
    for group in reduced.peaks:
        total += max(base + sum(int(t[reduced.kept[i]].min()) for i, t in terms.items()) for base, terms in group)
    return total


def _narrow(search: Search, reduced: Instance, hint: list[int] | None) -> None:
    """Reduce and bound until the gap is closed, no strategy can be left out, or time is over."""
    steps: list[Step] = []
    for round_number in range(MAX_ROUNDS):
        order = cheap_order(reduced)
        eliminated = eliminate(reduced, order)
        if eliminated is None:
            return _found_empty(search)
        reduced, new_steps = eliminated
        steps += new_steps
        if not prune(reduced):
            return _found_empty(search)
        if _closed_by_elimination(search, reduced, steps) or search.finished():
            return None
        messages, multipliers = MessagePassing(reduced), Multipliers(reduced.limits.size)
        passes = _Passes(search, reduced, steps, LocalSearch(reduced), messages, multipliers)
        removed = passes.bound_and_leave_out(hint if round_number == 0 else None)
        if search.finished() or search.left_s() <= 0:
            return None
        if removed is None:
            return _found_empty(search)
        if removed == 0:
            break
    _ask_backend(search, reduced, steps)
    return None


def _found_empty(search: Search) -> None:
    """Record that the reduced graph allows no choice: the incumbent is optimal, or none is legal."""
    if search.choice is not None:
        search.prove(FORBIDDEN)
    search.infeasible = True


def _closed_by_elimination(search: Search, reduced: Instance, steps: list[Step]) -> bool:
    """Solve without limits. Returns True if that settles the graph: its choice meets the limits."""
    order = complete_order(reduced)
    if order is None:
        return False
    optimum = solve_exactly(reduced, order)
    if optimum is None:
        _found_empty(search)
        return True
    bound, choice = optimum
    search.method.append("elimination")
    fits = search.offer(undo(steps, choice))
    search.prove(bound)
    return fits


@dataclass(slots=True)
class _Passes:
    """Passes of messages over a reduced graph, with multipliers of its limits and a local search of choices."""

    search: Search
    reduced: Instance
    steps: list[Step]
    local: LocalSearch
    messages: MessagePassing
    multipliers: Multipliers

    def bound_and_leave_out(self, hint: list[int] | None) -> int | None:
        """Run passes, and leave out strategies whose bound is above the incumbent.

        Returns:
            The number of strategies left out; None if a node lost all.
        """
        search, reduced = self.search, self.reduced
        search.method.append("sweeps")
        if hint is not None and (places := reduced.positions({i: hint[i] for i in reduced.costs})) is not None:
            self.offer_improved(places)
        self.run()
        if not search.finished() and search.left_s() > 0:
            self.tighten()
        if not search.finished() and size_of(reduced) <= MAX_VARIABLES:
            _improve_parts(search, reduced, self.steps)
        if search.finished() or search.left_s() <= 0:
            return 0
        return _leave_out(search, reduced, self.messages)

    def run(self) -> None:
        """Run passes and move the multipliers until neither gains."""
        search, messages, multipliers = self.search, self.messages, self.multipliers
        best, stalled = None, 0
        for _ in range(MAX_SWEEPS):
            bound, picked = messages.run()
            search.prove(bound)
            improved = best is None or bound > best + max(1, abs(best) >> 20)
            best = bound if best is None else max(best, bound)
            stalled = 0 if improved else stalled + 1
            old_upper = search.upper
            self.offer_improved(picked)
            if search.finished() or search.left_s() <= 0:
                return
            if not multipliers.update(self.reduced, picked, messages.exact, search.upper, bound) and stalled:
                return
            if stalled >= (3 if search.upper == old_upper else 6):
                return
            messages.set_prices(multipliers.values)

    def tighten(self) -> None:
        """Improve the bound where passes stop short of the relaxation (several limits, rings).

        Take the relaxation's duals, or, if no ring needs a large table, solve every multiplier's graph exactly.
        """
        search, reduced, messages = self.search, self.reduced, self.messages
        order = None if messages.exact or not reduced.limits.size else complete_order(reduced)
        relaxed = reduced.limits.size > 1 or (order is None and not messages.exact)
        if relaxed and size_of(reduced) <= MAX_RELAXED:
            duals = relaxed_duals(reduced, search.deadline, search.cancelled)
            if duals is not None:
                search.method.append("relaxation")
                messages.set_prices(duals.prices)
                messages.set_messages(duals.messages)
                self.offer_improved(duals.picked)
                for _ in range(NUM_LAST_SWEEPS):
                    bound, picked = messages.run()
                    search.prove(bound)
                    self.offer_improved(picked)
        if order is not None:
            self.solve_priced(order)

    def solve_priced(self, order: list[int]) -> None:
        """Eliminate all nodes at the present multipliers; with one limit, move its multiplier until it stays."""
        search, reduced, messages, multipliers = self.search, self.reduced, self.messages, self.multipliers
        search.method.append("priced elimination")
        for _ in range(MAX_PRICED):
            if search.finished() or search.left_s() <= 0:
                return
            priced, paid = messages.priced()
            optimum = solve_exactly(priced, order)
            assert optimum is not None
            bound, choice = optimum[0] - paid, reduced.positions(optimum[1])
            search.prove(bound)
            assert choice is not None
            self.offer_improved(choice)
            if reduced.limits.size > 1 or not multipliers.update(reduced, choice, True, search.upper, bound):
                return
            messages.set_prices(multipliers.values)

    def offer_improved(self, positions: dict[int, int]) -> None:
        """Improve a choice by local search and offer it."""
        better = self.local.improve(positions, self.search.deadline)
        if better is not None:
            kept = self.reduced.kept
            self.search.offer(undo(self.steps, {i: int(kept[i][s]) for i, s in better.items()}))


def _improve_parts(search: Search, reduced: Instance, steps: list[Step]) -> None:
    """Improve the incumbent by solving parts of the graph exactly."""
    positions = None if search.choice is None else reduced.positions({i: search.choice[i] for i in reduced.costs})
    if positions is None or not reduced.limits.size or search.lower is None or search.parts_tried:
        return
    if search.upper - search.lower <= WIDE_GAP * abs(search.upper):
        return

    def offer(better: dict[int, int]) -> bool:
        old_upper = search.upper
        search.offer(undo(steps, {i: int(reduced.kept[i][s]) for i, s in better.items()}))
        return search.upper < old_upper

    name = "highs" if search.backend == AUTO else search.backend
    old_upper, search.parts_tried = search.upper, True
    improved_parts(reduced, positions, named_backend(name), search.limits(), search.deadline, offer)
    if search.upper < old_upper:
        search.method.append("parts")


def _leave_out(search: Search, reduced: Instance, messages: MessagePassing) -> int | None:
    """Drop strategies that only occur in choices dearer than the incumbent."""
    if search.choice is None:
        return 0
    # Every choice takes some strategy of each node.
    search.prove(max(int(bounds.min()) for bounds in messages.marginals.values()))
    masks = {i: bounds <= search.upper for i, bounds in messages.marginals.items()}
    masks = {i: mask for i, mask in masks.items() if not mask.all()}
    for node, mask in masks.items():
        reduced.keep(node, mask)
    reduced.keep_in_edges(masks)
    if not prune(reduced):
        return None
    return sum(int((~mask).sum()) for mask in masks.values())


def _ask_backend(search: Search, reduced: Instance, steps: list[Step]) -> None:
    """Solve the rest as integer programs: again for every answer that breaks a limit, and in finer units."""
    if size_of(reduced) > MAX_VARIABLES:
        search.method.append(f"stopped: {size_of(reduced)} variables are left")
        return
    search.method.append("integer program")
    program = GraphProgram(reduced, search.stated.loads_exact)

    def offer(solution: Solution) -> dict[int, int] | None:
        """Return the positions of an answer if it is legal; else tell the program what it broke."""
        positions = program.positions(solution)
        if search.offer(undo(steps, {i: int(reduced.kept[i][s]) for i, s in positions.items()})):
            return positions
        program.refuse(positions)
        return None

    for _ in range(MAX_PROGRAMS):
        if search.left_s() <= 0 or not _one_program(search, program, offer):
            return


def _one_program(
    search: Search, program: GraphProgram, offer: Callable[[Solution], dict[int, int] | None]
) -> bool:
    """Solve the program with the first backend that can, confirmed by others.

    Returns:
        True if another program should follow.
    """
    names = AUTO_ORDER if search.backend == AUTO else (search.backend,)
    failure: Exception = BoundRefutedError(f"What {', '.join(sorted(search.refuted))} proved is not true.")
    # Presolve has misled backends before: each gets a second try without it.
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
    # Finer units strain the tolerances of solvers; where they fail, bounds from coarser units stay.
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
    """Solve one program with one backend, and adopt what other backends confirm.

    Returns:
        True if another program should follow.
    """
    current = program.state(None if search.choice is None else search.upper)
    first = named_backend(name).solve(current, replace(search.limits(), presolve=presolve))
    search.used_backend = name
    if first.values is not None:
        positions = offer(first)
        if positions is None or program.add_total(positions):
            return True
    claim = program.claim(first)
    if first.limit_reached or (claim is None and first.status != "infeasible"):
        return False
    if search.choice is not None:
        highest = program.highest_objective(search.upper)
        # As for witnesses: a floating-point solver may be off by one unit.
        if claim is None or claim > highest + 1:
            raise refuted(first, claim, f"a choice of {highest} at most is legal")
        claim = min(claim, highest)
    confirmed, witness = _confirmed(search, program, current, first, claim, offer)
    if witness is None:
        search.method.append(f"not confirmed: {name}")
        return False
    search.witness = witness
    if "cpsat" not in (name, witness):
        # Set before the bound, since the callback of the bound may stop the solve.
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
    """Find how much of a claim a second backend proves.

    ``claim`` is a bound, or None: no choice is allowed.

    Returns:
        The confirmed part of the claim, and the backend that confirmed it (None: no backend did).

    Raises:
        BoundRefutedError: a second backend has an answer that contradicts the claim.
    """
    highest: int | None = None
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
            # The first backend's checked answer disproves the second's claim.
            search.refuted.add(name)
        elif proved is not None and (highest is None or proved > highest):
            highest, witness = min(proved, claim), name
            if highest == claim:
                break
    return highest, witness


def refuted(solution: Solution, claim: int | None, but: str) -> BoundRefutedError:
    """Build the error for a claim (None: that no choice is allowed) that a backend proved and that is false."""
    said = "that nothing is allowed" if claim is None else f"the bound {claim}"
    return BoundRefutedError(
        f"{solution.backend} says {solution.raw_status} and proves {said}, but {but}.",
        "Two solvers must prove the same bound.",
        "Use another backend, run `milpplan doctor`, and report this graph.",
    )


def _answer(search: Search, seconds: float) -> GraphSolution:
    """Turn the state of the search into the answer in the caller's numbers."""
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


def memory_rows(graph: StrategyGraph, choice: npt.NDArray[np.int64] | None) -> tuple[MemoryRow, ...]:
    """List every memory limit with the use of the choice and the smallest possible use."""
    used = None if choice is None else graph.memory_of(choice)
    limits = graph.limits()
    if not limits.size:
        return ()
    smallest = graph.summed_memory(np.stack([_smallest_memory(graph, i) for i in range(graph.num_nodes)]))
    return tuple(
        MemoryRow(s, d, float(limits[d]), None if used is None else float(used[s, d]), float(smallest[s, d]))
        for s, d in np.ndindex(smallest.shape)
    )


def _smallest_memory(graph: StrategyGraph, node: int) -> FloatArray:
    """Return the smallest memory of the node's allowed strategies, per device."""
    allowed = np.isfinite(np.asarray(graph.node_costs[node]))
    memory = graph.memory_vector(node)
    smallest: FloatArray = memory[allowed].min(axis=0) if allowed.any() else np.full(memory.shape[1], np.inf)
    return smallest


def infeasibility(graph: StrategyGraph, stated: Stated) -> str:
    """Explain why no choice exists: forbidden pairs alone, one limit alone, or several together."""
    bare = stated.instance.copy()
    bare.rows, bare.loads, bare.peaks = {}, {}, []
    if not prune(bare, dominance=False):
        return "No choice is allowed even without memory limits: the forbidden strategies and pairs leave none."
    order = complete_order(bare)
    if order is not None and solve_exactly(bare, order) is None:
        return "No choice is allowed even without memory limits: the forbidden strategies and pairs leave none."
    worst, exact = _least_of_rows(stated, bare)
    if worst is None:
        alone = "; each limit alone can be met" if exact and stated.loads_exact else ""
        return f"Forbidden pairs and memory limits together leave no choice{alone}."
    row, smallest = worst
    index, device = stated.row_of[row]
    limit = float(graph.limits()[device])
    needed = smallest * stated.load_units[device]
    return (
        f"The least memory that any allowed choice takes of alive set {index} on device {device} is "
        f"{needed:.6g}; the limit is {limit:.6g}. Raise the limit to at least that, or allow cheaper strategies."
    )


def _least_of_rows(stated: Stated, bare: Instance) -> tuple[tuple[int, int] | None, bool]:
    """Find the row that no choice meets even alone, with the largest relative excess.

    Returns:
        The row's number and its smallest load (None: every row can be met alone), and whether all smallest loads
        are exact or only lower bounds.
    """
    worst: tuple[float, int, int] | None = None
    all_exact = True
    for row, limit in enumerate(stated.instance.limits.tolist()):
        smallest, exact = _least_load(stated, bare, row)
        all_exact &= exact
        excess = (smallest - limit) / max(limit, 1)
        if smallest > limit and (worst is None or excess > worst[0]):
            worst = (excess, row, smallest)
    return None if worst is None else (worst[1], worst[2]), all_exact


def _least_load(stated: Stated, bare: Instance, row: int) -> tuple[int, bool]:
    """Minimise the load of one row over the allowed pairs.

    Returns:
        The smallest load, and whether it is exact (elimination worked) or a lower bound (node by node).
    """
    loads = {}
    for i, kept in bare.kept.items():
        rows = stated.instance.rows.get(i, np.zeros(0, np.int64))
        positions = np.flatnonzero(rows == row)
        loads[i] = (
            stated.instance.loads[i][positions[0]][kept] if positions.size else np.zeros(kept.size, np.int64)
        )
    row_instance = bare.copy()
    row_instance.costs = loads
    row_instance.edges = {pair: np.where(m >= 2**57, m, 0) for pair, m in bare.edges.items()}
    row_instance.edges = {pair: m for pair, m in row_instance.edges.items() if m.any()}
    row_instance.offset = 0
    order = complete_order(row_instance)
    solved = solve_exactly(row_instance, order) if order is not None else None
    return (sum(int(c.min()) for c in loads.values()), False) if solved is None else (solved[0], True)
