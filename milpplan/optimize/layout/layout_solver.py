"""Solver of one layout against a cutoff: counting, two relaxations with critical-path cuts, the integer program.

Each step either proves that no plan of the layout is at or below the cutoff, or finds a plan and lowers the
cutoff. If no option is left for some stage, no plan can exist: this proves without a solver. The relaxations
prove by their duals, checked in exact integers. The integer program proves by a backend, confirmed by a second
backend (``SolveOptions.witness``).

A layout whose virtual stages share one recompute setting is solved in parts (``stage_options``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

import numpy as np

from milpplan.errors import SolverError, UnavailableError
from milpplan.optimize import SolveContext
from milpplan.optimize.bounds.closed_form import max_layers_on_ranks, path_coefficients
from milpplan.optimize.bounds.split_bounds import SplitBounds
from milpplan.optimize.layout.cutting_planes import LayoutState, compact_rounds, menu_rounds, trim_pool, try_choice
from milpplan.optimize.layout.layer_branching import BranchingTree
from milpplan.optimize.layout.layout_program import (
    MEMORY_UNITS,
    SLACK_UNITS,
    ChoiceProgram,
    LayoutProgram,
    nearby_choice,
)
from milpplan.optimize.layout.rounding import Choice, analytic_paths, fitted_plan
from milpplan.optimize.layout.stage_options import LayoutContext, Menu, PartKey, part_key, part_settings
from milpplan.optimize.milp.backends import backend
from milpplan.optimize.milp.cpsat import MAX_ROW_MAGNITUDE
from milpplan.optimize.milp.program import Program
from milpplan.optimize.milp.solution import Backend, Limits, Solution
from milpplan.optimize.search.closed_layouts import Fate
from milpplan.optimize.space.plan_space import even_splits
from milpplan.problem import SCHEDULES, V_SCHEDULES, Layout, Plan
from milpplan.simulation import IntArray
from milpplan.simulation.layers import Phase
from milpplan.simulation.stages import StageMemo

AIMED_GAP_SHARE = 0.9
"""Proofs aim at this share of the gap: a second solver may confirm a slightly smaller bound, which must still be
within the gap."""
QUICK_ROUNDS = 30
FULL_ROUNDS = 150
MENU_ROUNDS = 60
MAX_PROGRAMS = 60
MAX_SPLITS = 200
MAX_SIMULATED_SPLITS = 40
"""Maximum number of splits of a layout that are simulated before any relaxation."""
MIXTURE_ROUNDS = 30
"""Maximum number of paths whose mean length bounds a split."""
NODES = 4
"""Number of nodes by which free splits of one layout are branched at a time."""
WITNESS_LIMITS = ((1.0, 1.0), (20.0, 5.0), (300.0, 50.0))
"""Time limits of a confirming solver: (seconds, multiple of the first solver's time), of which the longer counts.
All solvers are asked with a short limit before any with a longer limit, because which solver is fast differs from
program to program. The longest is for overloaded machines, where the proof would be lost otherwise. The solver
that proved last is asked first."""
COARSE_GAP = 0.02
"""Relative gap (of the part above the program's base) of integer programs that only look for critical paths."""
MAX_NEARBY = 50
"""Maximum number of choices near an integer answer that are simulated."""
PartBounds = dict[tuple[Layout, PartKey], int]
"""Proved bounds of the parts of layouts, in nanoseconds."""


@dataclass(frozen=True, slots=True)
class LayoutOutcome:
    """Outcome of one layout: proved lower bound (ns), pruning reason, and the best plan at or below the cutoff
    with its exact step time, if one was found."""

    bound_ns: int
    fate: Fate
    plan: Plan | None = None
    step_time_ns: int | None = None

    @staticmethod
    def of(state: LayoutState, fate: Fate) -> LayoutOutcome:
        """Make the outcome of a state. A layout that is not open has no plan left at or below its cutoff."""
        if fate != "open":
            state.bound_ns = max(state.bound_ns, state.cutoff_ns + 1)
        if state.best is None:
            return LayoutOutcome(state.bound_ns, fate)
        step, plan = state.best
        return LayoutOutcome(min(state.bound_ns, step), "open" if fate == "open" else "solved", plan, step)


@dataclass(slots=True)
class LayoutSolver(SolveContext):
    """Solver that resolves layouts one after another; holds what they share."""

    trees: dict[tuple[Layout, PartKey], BranchingTree] = field(default_factory=dict)
    """Branching trees of undecided layouts with free interleaved splits, and of their recompute parts."""

    def unfinished(self, layout: Layout) -> bool:
        """Return True if branching on the layout has begun and can go on."""
        return any(tree_layout == layout for tree_layout, _ in self.trees)

    @property
    def program_slack(self) -> float:
        """Share of a cutoff by which integer programs lower it, because they prove the tolerance and no more."""
        gap = self.options.gap
        return 1.0 - (1.0 - AIMED_GAP_SHARE * max(gap, self.tolerance)) / (1.0 - AIMED_GAP_SHARE * gap)

    def resolve(
        self, context: LayoutContext, cutoff_ns: int, bound_ns: int, effort: int = 1, slack: float = 0.0
    ) -> LayoutOutcome:
        """Prove that the layout has no plan at or below ``cutoff_ns``, or find its best plan within the gap.

        Args:
            context: the layout.
            cutoff_ns: longest step that counts.
            bound_ns: bound proved so far.
            slack: share by which the cutoff is lowered before integer programs (``program_slack``); branching on
                layers does without.
            effort: 0 stops after the bounds of the splits or, where there are too many splits, after a few rounds
                on the compact relaxation, with the bound and perhaps a plan. Otherwise the layout is decided, but
                free interleaved splits are branched only for a few nodes and go on there at the next call.
        """
        state = self.new_state(context, cutoff_ns, bound_ns)
        return LayoutOutcome.of(state, self._run(state, effort, slack))

    def new_state(self, context: LayoutContext, cutoff_ns: int, bound_ns: int, scenario: int = 0) -> LayoutState:
        """Return the initial state of a layout, with the paths known for its graph in a scenario."""
        layout = context.layout
        key = (*graph_key(layout), scenario)
        return LayoutState(
            context,
            self.known_paths.setdefault(key, analytic_paths(layout)),
            cutoff_ns,
            bound_ns,
            AIMED_GAP_SHARE * self.options.gap,
            self.deadline,
            self.counters,
        )

    def _run(self, state: LayoutState, effort: int, slack: float) -> Fate:
        """Decide the layout by splits, relaxations and programs, as far as ``effort`` and time allow."""
        every_split = even_splits(state.context.problem, state.context.layout)
        splits = None if every_split is None or len(every_split) > MAX_SPLITS else every_split
        bounds = SplitBounds(state.context, tuple(state.pool))
        if splits is not None:
            splits = bounded_splits(state, splits, bounds)
            if not state.closed:
                # Critical paths of the splits that are left exclude nearly all of them without a relaxation.
                splits, bounds = simulated_splits(state, splits, bounds)
            if state.closed:
                return "bounded"
            if not effort:
                return "open"
        # Splits that are listed are bounded sooner than counted.
        max_layers = max_layers_within(state.context, state.cutoff_ns)
        if max_layers is None:
            return "bounded"
        if every_split is None and state.context.layout.vpp > 1:
            return self._branch_on_layers(state)
        menus = compact_rounds(state, max_layers, FULL_ROUNDS if effort else QUICK_ROUNDS)
        if menus is None or state.closed:
            return "relaxed"
        if splits is not None:
            # Now with the critical paths that the rounds have found.
            bounds = bounds.with_paths(tuple(state.pool))
            splits = bounded_splits(state, splits, bounds)
            if state.closed:
                return "relaxed"
        if not effort or self.out_of_time():
            return "open"
        if splits is not None:
            return self._decide_splits(state, splits, bounds, slack)
        return self._decide_whole(state, menus, slack)

    def _branch_on_layers(self, state: LayoutState) -> Fate:
        """Branch and bound over the layers of the virtual stages, for ``NODES`` nodes."""
        part, programs = (state.context.layout, part_key(state.context)), self.counters.integer_programs
        if part not in self.trees:
            self.trees[part] = BranchingTree(state, self._decide_split)
        self.trees[part].run(state, NODES)
        if self.trees[part].finished:
            del self.trees[part]
        if not state.closed:
            return "open"
        self.trees.pop(part, None)
        return "solved" if self.counters.integer_programs > programs else "relaxed"

    def _decide_split(self, part: LayoutState, split: tuple[int, ...]) -> None:
        """Decide one split of the layers: raise the bound or find the best plan."""
        bounds = SplitBounds(part.context, tuple(part.pool))
        part.bound_ns = max(part.bound_ns, *bounds.bounds_ns([split], part.cutoff_ns))
        if part.closed:
            return
        part.context = part.context.with_split(split, bounds.min_backward_ns(split))
        max_layers = max_layers_within(part.context, part.cutoff_ns)
        menus = None if max_layers is None else compact_rounds(part, max_layers, FULL_ROUNDS)
        if menus is None or part.closed or self._decide_whole(part, menus) != "open":
            part.bound_ns = max(part.bound_ns, part.cutoff_ns + 1)

    def _decide_whole(self, state: LayoutState, menus: list[Menu], slack: float = 0.0) -> Fate:
        """Solve the menus' relaxation and, where it does not decide, integer programs."""
        program = start_program(state, menus)
        if program is None:
            return "relaxed"
        menu_rounds(state, program, MENU_ROUNDS)
        state.widen(slack)
        if state.closed:
            return "relaxed"
        trying = partial(try_choice, state, program)
        return "open" if self.out_of_time() else self.programs(state, program, trying)

    def _decide_splits(
        self, state: LayoutState, splits: tuple[tuple[int, ...], ...], bounds: SplitBounds, slack: float
    ) -> Fate:
        """Decide every split of the layers, most promising first. The layout's bound is the minimum of the splits'
        bounds."""
        parts: list[tuple[int, int, LayoutState]] = []
        for index, split in enumerate(splits):
            context = state.context.with_split(split, bounds.min_backward_ns(split))
            part = replace(state, context=context, best=None)
            max_layers = max_layers_within(part.context, part.cutoff_ns)
            if (
                max_layers is not None
                and compact_rounds(part, max_layers, FULL_ROUNDS) is not None
                and not part.closed
            ):
                parts.append((part.bound_ns, index, part))
            state.take_best(part)
        bound_ns, fate, programs = state.cutoff_ns + 1, "relaxed", self.counters.integer_programs
        for _, _, part in sorted(parts, key=lambda entry: entry[:2]):
            part.cutoff_ns = min(part.cutoff_ns, state.cutoff_ns)
            if not part.closed:
                max_layers = max_layers_within(part.context, part.cutoff_ns)
                menus = None if max_layers is None else compact_rounds(part, max_layers, QUICK_ROUNDS)
                if menus is not None and not part.closed and self._decide_whole(part, menus, slack) == "open":
                    bound_ns, fate = min(bound_ns, part.bound_ns), "open"
                state.take_best(part)
        state.bound_ns = max(state.bound_ns, min(bound_ns, state.cutoff_ns + 1))
        if fate == "open" and not state.closed:
            return "open"
        return "solved" if self.counters.integer_programs > programs else "relaxed"

    def seconds_left(self) -> float | None:
        """Return the seconds until the time limit."""
        return None if self.deadline is None else max(0.01, self.deadline - time.monotonic())

    def _limits(self, seconds: float | None) -> Limits:
        return Limits(time_limit_s=seconds, seed=self.options.seed, cancelled=self.options.cancelled)

    def programs(self, state: LayoutState, program: ChoiceProgram, trying: Callable[[Choice], None]) -> Fate:
        """Solve integer programs until bound and simulated step meet up to rounding; ``trying`` simulates their
        answers.

        If rounding leaves more than the gap, the programs are solved once more in finer units. Finer units strain
        the tolerances of solvers: where solvers then fail or contradict each other, the proof in coarser units
        stays.
        """
        fate = self._programs_in(state, program, trying, 0)
        if fate == "open" and state.rounded and state.gap > 0 and not self.out_of_time():
            with suppress(SolverError):
                return self._programs_in(state, program, trying, state.bound_ns)
        return fate

    def _programs_in(
        self, state: LayoutState, program: ChoiceProgram, trying: Callable[[Choice], None], proved_ns: int
    ) -> Fate:
        """Solve integer programs above a base of ``proved_ns`` until bound and simulated step meet, or the limit
        is reached.

        A bound of an integer program counts only once a second solver has proved it.
        """
        solver, gap = self.backend, COARSE_GAP
        for _ in range(MAX_PROGRAMS):
            program.cutoff_ns = state.cutoff_ns
            base, unit = program.scaling(proved_ns)
            if state.closed or base > state.cutoff_ns:
                return "solved"
            current, unit = _scaled(program, base, unit, solver.name == "cpsat")
            limits = replace(self._limits(self.seconds_left()), relative_gap=gap)
            answer = self._answer(solver, current, limits)
            if answer is None:
                return "open"
            solution = answer
            self.counters.solved()
            if solution.status == "infeasible":
                above = int(current.upper[-1]) + 1
                return self._settle(state, current, solution, above, base, unit)
            if solution.bound is None or solution.values is None or solution.limit_reached:
                return "open"
            proved = int(np.ceil(solution.bound - 1e-6))
            num_rows = program.num_rows_found
            choice = _choice_of(program, np.asarray(solution.values))
            _try_nearby(state, program, trying, choice, base, unit)
            if base + unit * proved > state.cutoff_ns:
                # A second solver takes much longer for the whole bound than for the part that decides.
                deciding = (state.cutoff_ns - base) // unit + 1
                return self._settle(state, current, solution, min(proved, deciding), base, unit)
            if program.num_rows_found != num_rows:
                continue
            if gap > 0:
                gap = 0.0
            elif solver.name == "cpsat":
                # The units that CP-SAT can handle may be too coarse for the gap: HiGHS handles finer units.
                solver, program.memory_units = backend("highs"), MEMORY_UNITS
            else:
                # Bound and simulator have met up to the rounding of the program.
                state.rounded = True
                return self._settle(state, current, solution, proved, base, unit)
        return "open"

    def _answer(self, solver: Backend, program: Program, limits: Limits) -> Solution | None:
        """Return the answer of the solver or, where it cannot run, of another solver; None where none can run."""
        for index, candidate in enumerate((solver, *map(backend, ("highs", "cbc", "cpsat")))):
            if index and (candidate.name == solver.name or self.out_of_time()):
                continue
            try:
                return candidate.solve(program, limits)
            except UnavailableError as error:
                self.note_unavailable(error)
            except SolverError:
                # Only a failure of the solver that was asked for is an error.
                if not index:
                    raise
        return None

    def _settle(
        self, state: LayoutState, program: Program, solution: Solution, proved: int, base: int, unit: int
    ) -> Fate:
        """Raise the state's bound as far as it is confirmed."""
        confirmed = self._confirmed(program, solution, proved)
        if confirmed is not None:
            state.bound_ns = max(state.bound_ns, base + unit * confirmed)
            if self.options.on_program is not None:
                self.options.on_program(_below(program, confirmed))
        return "solved" if state.closed else "open"

    def _confirmed(self, program: Program, solution: Solution, proved: int) -> int | None:
        """Return the part of a bound on z that a second solver proves too: all of it, or all but ``SLACK_UNITS``.

        The second solver is asked for a solution below the bound. An answer that breaks a row by its tolerance
        decides nothing: then a slightly smaller bound is tried. A valid solution is a contradiction and raises an
        error.
        """
        if not self.witnesses or proved <= 0:
            self.counters.unwitnessed += not self.witnesses
            return proved
        for bound in (proved, proved - SLACK_UNITS):
            if bound <= 0:
                break
            if self._nothing_below(_below(program, bound), solution, bound):
                self.counters.witnessed += 1
                return bound
        self.counters.unwitnessed += 1
        return None

    def _nothing_below(self, below: Program, solution: Solution, bound: int) -> bool:
        """Return True if a confirming solver proves the program infeasible."""
        others = [witness for witness in self.witnesses if witness.name != solution.backend]
        for (seconds, factor), witness in product(WITNESS_LIMITS, others):
            seconds_left, longest_s = self.seconds_left(), max(seconds, factor * solution.wall_time_s)
            limits = self._limits(longest_s if seconds_left is None else min(seconds_left, longest_s))
            try:
                second = witness.solve(below, limits)
            except UnavailableError as error:
                self.note_unavailable(error)
                continue
            except SolverError:
                continue
            if second.status == "infeasible":
                self.witnesses.remove(witness)
                self.witnesses.insert(0, witness)
                return True
            if second.values is not None:
                raise SolverError(
                    f"{solution.backend} says {solution.raw_status} (bound {bound}), but {witness.name} finds a "
                    f"solution of {second.objective}.",
                    "Two solvers must prove the same bound.",
                    "Run `milpplan doctor`, and report this problem.",
                )
        return False


def graph_key(layout: Layout) -> tuple[object, ...]:
    """Return the fields of a layout that its step graph depends on."""
    shape = (layout.schedule, layout.pp, layout.num_micro_batches, layout.vpp)
    return (*shape, layout.overlap_grad_reduce, layout.overlap_param_gather)


def _try_nearby(
    state: LayoutState,
    program: ChoiceProgram,
    trying: Callable[[Choice], None],
    choice: Choice,
    base: int,
    unit: int,
) -> None:
    """Simulate a choice, and then choices near it while they teach the program rows."""
    nearby: Choice | None = choice
    for _ in range(MAX_NEARBY):
        if nearby is None:
            break
        choice, num_rows = nearby, program.num_rows_found
        trying(choice)
        rank = program.overfull_rank(choice)
        if rank is not None:
            program.forbid_rank_items(choice, rank)
        if program.num_rows_found == num_rows:
            break
        program.cutoff_ns = state.cutoff_ns
        nearby = nearby_choice(program, base, unit, choice)


def _below(program: Program, bound: int) -> Program:
    """Return the program with its objective, the last variable, limited to values below a bound."""
    return program.with_upper_bound(program.num_variables - 1, bound - 1)


def bounded_splits(
    state: LayoutState, splits: tuple[tuple[int, ...], ...], bounds: SplitBounds
) -> tuple[tuple[int, ...], ...]:
    """Return the splits that known paths do not exclude, and raise the layout's bound to the minimum of the
    splits' bounds."""
    bounds_ns = bounds.bounds_ns(splits, state.cutoff_ns)
    state.bound_ns = max(state.bound_ns, min(bounds_ns, default=state.cutoff_ns + 1))
    return tuple(split for split, bound_ns in zip(splits, bounds_ns, strict=True) if bound_ns <= state.cutoff_ns)


def simulated_splits(
    state: LayoutState, splits: tuple[tuple[int, ...], ...], bounds: SplitBounds
) -> tuple[tuple[tuple[int, ...], ...], SplitBounds]:
    """Simulate the splits that are left, with little recomputation, and bound them again with the critical paths.

    Returns:
        The splits that this does not exclude, and the bounds with the new paths.
    """
    memo = StageMemo(state.context.layout, state.context.costs)
    for split in splits[:MAX_SIMULATED_SPLITS]:
        if state.out_of_time():
            return splits, bounds
        path = state.try_plan(fitted_plan(state.context, np.array(split), memo))
        if path is not None:
            state.pool.append(path)
    bounds = bounds.with_paths(tuple(state.pool))
    splits = bounded_splits(state, splits, bounds)
    if not state.closed:
        values = dict(zip(splits, map(partial(mixture_bound, state, bounds), splits), strict=True))
        state.bound_ns = max(state.bound_ns, min(values.values()))
        splits = tuple(split for split, value in values.items() if value <= state.cutoff_ns)
    trim_pool(state)
    return splits, bounds


def mixture_bound(state: LayoutState, bounds: SplitBounds, split: tuple[int, ...]) -> int:
    """Bound the step of a split from below by the mean length of several paths.

    The step is at least the mean length of any paths. Every round adds the critical path of the recompute choice
    that is shortest on the mean so far (fictitious play, Robinson 1951). The rounds end where the bound passes the
    cutoff, or at a choice within the cutoff, which no mean can exclude.

    Returns:
        The bound in nanoseconds; above the cutoff where nothing fits.
    """
    graph = state.graph
    paths = start = [path for path in state.pool[: state.context.layout.pp] if (path.counts >= 0).all()]
    best = 0
    for _ in range(MIXTURE_ROUNDS if start else 0):
        if state.out_of_time():
            break
        counts = np.sum([path.counts for path in paths], axis=0)
        choice = bounds.shortest(split, counts)
        if choice is None:
            return state.cutoff_ns + 1
        length = sum(path.length_ns(choice, graph.transfer_ns, graph.barrier_ns) for path in paths)
        best = max(best, -(-int(length) // len(paths)))
        (path,), (step,) = state.paths_at(choice[None])
        if best > state.cutoff_ns or step <= state.cutoff_ns or (path.counts < 0).any():
            break
        # The paths before the first choice only lead to it.
        paths = [path] if paths is start else [*paths, path]
        state.pool.append(path)
    return best


def max_stage_layers(context: LayoutContext, cutoff_ns: int) -> IntArray:
    """Return the maximum number of layers of each virtual stage, [J], such that its rank's path stays below the
    cutoff."""
    layout = context.layout
    P, v, m = layout.pp, layout.vpp, layout.num_micro_batches
    ranks = [context.costs.of_rank(rank) for rank in range(P)]
    counts = np.bincount(np.array(context.problem.model.layer_kinds))
    if v > 1:
        min_layers = np.array(context.layer_bounds, dtype=np.int64)[context.stage_grid, 0]
        on_rank = max_layers_on_ranks(context, cutoff_ns)
        if (np.maximum(on_rank, 0).sum(axis=1) < counts).any():
            return np.full(context.num_stages, -1)
        max_on_stage = on_rank.max(axis=0) - (min_layers.sum(axis=0, keepdims=True) - min_layers)
        return context.by_stage(np.maximum(max_on_stage, -1))
    schedule = np.array([SCHEDULES.index(layout.schedule)])
    on_pass, on_forward, on_backward, on_weight, _ = path_coefficients(np.array([float(m)]), schedule, P)
    # A whole pass counts with the time of the fastest node type.
    pass_ns = np.min([costs.least_ns.sum(axis=0) for costs in ranks], axis=0)
    work = int(pass_ns @ counts) + int(ranks[0].embedding_ns[:2].sum() + ranks[-1].head_ns[:2].sum())
    forward, backward = np.array([costs.least_ns.min(axis=1) for costs in ranks]).T
    weight = np.array([costs.duration_ns[:, Phase.WEIGHT].min() for costs in ranks])
    per_layer = on_forward[:, 0] * forward + on_backward[:, 0] * backward + on_weight[:, 0] * weight
    per_layer = np.maximum(per_layer, 1.0)
    slack = (cutoff_ns - on_pass[:, 0] * work) / per_layer
    return np.asarray(np.maximum(np.floor(slack + 1e-6), -1), dtype=np.int64)


def _scaled(program: ChoiceProgram, base: int, unit: int, limited: bool) -> tuple[Program, int]:
    """Return the program and its unit; ``limited``: in units coarse enough for CP-SAT."""
    current = program.program(base, unit)
    while limited and current.max_row_magnitude() >= MAX_ROW_MAGNITUDE:
        unit *= 4
        program.memory_units = max(1, program.memory_units // 4)
        current = program.program(base, unit)
    return current, unit


def max_layers_within(context: LayoutContext, cutoff_ns: int) -> IntArray | None:
    """Return the maximum layers of every stage; None when counting, or the memory of the model's ends, leaves no
    plan."""
    min_layers, space_max = np.array(context.layer_bounds, dtype=np.int64).T
    max_layers = np.minimum(max_stage_layers(context, cutoff_ns), space_max)
    if (max_layers < min_layers).any() or max_layers.sum() < context.problem.model.num_layers:
        return None
    # Where all ranks are alike and hold at most one end, the layout's memory bound covers the ends.
    alike = context.layout.schedule not in V_SCHEDULES and not context.capacities and not context.costs.offloads
    return max_layers if alike or context.ends_fit() else None


def start_program(state: LayoutState, menus: list[Menu]) -> LayoutProgram | None:
    """Return the program with all known paths; None when counting leaves no plan."""
    program = LayoutProgram(state.context, menus, state.cutoff_ns)
    for path in state.pool:
        program.add_path(path)
    if not program.drop_hopeless_items() or not can_hold_all_layers(program.menus, state.context):
        return None
    return program


def can_hold_all_layers(menus: Sequence[Menu], context: LayoutContext) -> bool:
    """Return True if the menus can place all layers."""
    total = context.problem.model.num_layers
    max_layers = sum(int(menu.layers.max()) for menu in menus)
    min_layers = sum(int(menu.layers.min()) for menu in menus)
    return min_layers <= total <= max_layers


def _choice_of(program: ChoiceProgram, values: IntArray) -> Choice:
    """Return the item chosen for each stage in an integer answer."""
    items = values[: int(program.offsets[-1])].astype(np.float64)
    return [int(np.argmax(part)) for part in program.by_menu(items)]


def resolve_in_parts(
    resolve: Callable[[Sequence[LayoutContext], int, int, int], LayoutOutcome],
    gap: float,
    part_bounds: PartBounds,
    contexts: Sequence[LayoutContext],
    cutoff_ns: int,
    bound_ns: int,
    effort: int,
) -> LayoutOutcome:
    """Resolve a layout of a space in parts; see ``LayoutSolver.resolve``.

    Without effort the relaxation over all counts is enough: its bound holds for every part, and its rounded plans
    are in the space.

    Args:
        resolve: resolves a part from its contexts, a cutoff, a bound and the effort.
        gap: relative gap of the proof.
        part_bounds: proved bounds of parts.
        contexts: the layout, in every scenario.
        cutoff_ns: longest step that counts.
        bound_ns: bound proved so far.
        effort: as for ``LayoutSolver.resolve``.
    """
    context = contexts[0]
    if not effort:
        if even_splits(context.problem, context.layout) is None and context.layout.vpp > 1:
            return LayoutOutcome(bound_ns, "open")
        return resolve(contexts, cutoff_ns, bound_ns, 0)
    best: LayoutOutcome | None = None
    fates: set[Fate] = set()
    most_layers, min_bound = context.problem.model.num_layers, 2**62
    if len(contexts) == 1:
        # Other plans are above the cutoff, so longer blocks are no parts of their own.
        max_layers = max_layers_within(context, cutoff_ns)
        most_layers, min_bound = 0 if max_layers is None else int(max_layers.max()), cutoff_ns + 1
    for part in zip(*(part_settings(view, most_layers) for view in contexts), strict=True):
        key = (context.layout, part_key(part[0]))
        proved = max(part_bounds.get(key, 0), bound_ns)
        if proved > cutoff_ns:
            min_bound = min(min_bound, proved)
            fates.add("relaxed")
            continue
        outcome = resolve(part, cutoff_ns, proved, effort)
        part_bounds[key] = max(proved, outcome.bound_ns)
        min_bound = min(min_bound, part_bounds[key])
        fates.add(outcome.fate)
        if outcome.step_time_ns is not None:
            best = outcome
            step = outcome.step_time_ns
            cutoff_ns = min(cutoff_ns, int(step * (1.0 - AIMED_GAP_SHARE * gap)), step - 1)
    fate: Fate = next((name for name in ("open", "solved", "relaxed") if name in fates), "bounded")
    if best is None:
        return LayoutOutcome(min_bound, fate)
    assert best.step_time_ns is not None
    return LayoutOutcome(min(min_bound, best.step_time_ns), fate, best.plan, best.step_time_ns)
