"""Decide one layout against a cutoff: counting, two relaxations with critical-path cuts, the integer program.

Each step either proves that no plan of the layout is at or below the cutoff, or finds one and lowers the cutoff.
Menus that run empty prove by counting; the relaxations prove by their duals, checked in exact integers; the
integer program proves by a backend, confirmed by a second one (``SolveOptions.witness``).
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
from milpplan.optimize.bounds.closed_form import path_coefficients
from milpplan.optimize.bounds.layer_counting import most_on_ranks
from milpplan.optimize.bounds.split_bounds import SplitBounds
from milpplan.optimize.context import SolveContext
from milpplan.optimize.layout.cutting_planes import LayoutState, compact_rounds, menu_rounds, try_choice
from milpplan.optimize.layout.layout_outcome import LayoutOutcome
from milpplan.optimize.layout.layout_program import MEMORY_UNITS, SLACK_UNITS, ChoiceProgram, LayoutProgram
from milpplan.optimize.layout.stage_options import LayoutContext, Menu
from milpplan.optimize.layout.warm_start import Choice, analytic_paths
from milpplan.optimize.milp.backends import backend
from milpplan.optimize.milp.cpsat import MAX_ROW_MAGNITUDE
from milpplan.optimize.milp.program import Program
from milpplan.optimize.milp.solution import Backend, Limits, Solution
from milpplan.optimize.search.prune_reasons import Fate
from milpplan.optimize.space.layer_splits import even_splits
from milpplan.optimize.space.recompute_parts import PartKey, part_key
from milpplan.optimize.uneven.layer_branching import BranchingTree
from milpplan.problem.plan import SCHEDULES, V_SCHEDULES, Layout
from milpplan.simulation.layers.layer_time import Phase
from milpplan.simulation.layout_columns import IntArray
from milpplan.simulation.pipeline.critical_path import CriticalPath
from milpplan.simulation.pipeline.step_graph import StepGraph

AIM = 0.9
"""Share of the gap that proofs aim at: what a witness does not confirm must not leave the bound just short."""
QUICK_ROUNDS = 30
FULL_ROUNDS = 150
MENU_ROUNDS = 60
MAX_PROGRAMS = 60
MAX_SPLITS = 200
NODES = 4
"""Nodes of the branch and bound over free splits of one layout at a time."""
WITNESS_LIMITS = ((1.0, 1.0), (20.0, 5.0))
"""(seconds, times what the first solver took): a witness gets the longer. All are asked with the short limit
before any with the long one, because which solver is fast differs from program to program; the one that proved
last is asked first."""
COARSE_GAP = 0.02
"""Relative gap (of the part above the program's base) of integer programs that only look for critical paths."""


@dataclass(slots=True)
class LayoutSolver(SolveContext):
    """Resolves layouts one after another; holds what they share."""

    known_paths: dict[tuple[object, ...], list[CriticalPath]] = field(default_factory=dict)
    """Paths by graph: they hold for every layout with the same graph."""
    trees: dict[tuple[Layout, PartKey], BranchingTree] = field(default_factory=dict)
    """Layouts, and their parts, with free interleaved splits that are not decided yet."""

    def unfinished(self, layout: Layout) -> bool:
        """Whether more effort on a layout goes on where the last one ended."""
        return any(place == layout for place, _ in self.trees)

    def resolve(self, context: LayoutContext, cutoff_ns: int, bound_ns: int, effort: int = 1) -> LayoutOutcome:
        """Prove that the layout has no plan at or below ``cutoff_ns``, or find its best one within the gap.

        No ``effort``: stop after a few rounds on the compact relaxation, with the bound and a rounded plan if
        that helps. Free interleaved splits are branched for a few nodes and go on there at the next call.
        """
        most = most_within(context, cutoff_ns)
        if most is None:
            return LayoutOutcome(max(bound_ns, cutoff_ns + 1), "bounded")
        state = self.new_state(context, cutoff_ns, bound_ns)
        return LayoutOutcome.of(state, self._run(state, most, effort))

    def new_state(self, context: LayoutContext, cutoff_ns: int, bound_ns: int) -> LayoutState:
        """An attempt at a layout, with the paths known of its graph."""
        layout = context.layout
        shape = (layout.schedule, layout.pp, layout.num_micro_batches, layout.vpp)
        key = (*shape, layout.overlap_grad_reduce, layout.overlap_param_gather)
        return LayoutState(
            context,
            StepGraph.of(layout, context.costs.transfer_ns, context.costs.barrier_ns),
            self.known_paths.setdefault(key, analytic_paths(layout)),
            cutoff_ns,
            bound_ns,
            AIM * self.options.gap,
            self.deadline,
            self.counters,
        )

    def _run(self, state: LayoutState, most: IntArray, effort: int) -> Fate:
        splits = even_splits(state.context.problem, state.context.layout)
        if splits is None and state.context.layout.vpp > 1:
            return self._tree(state, NODES)
        if splits is not None and len(splits) > MAX_SPLITS:
            splits = None
        bounds = SplitBounds(state.context, state.graph, tuple(state.pool))
        if splits is not None:
            splits = _bounded_splits(state, splits, bounds)
            if state.closed:
                return "bounded"
        menus = compact_rounds(state, most, FULL_ROUNDS if effort else QUICK_ROUNDS)
        if menus is None or state.closed:
            return "relaxed"
        if splits is not None:
            # Now with the critical paths that the rounds have found.
            bounds = bounds.with_paths(tuple(state.pool))
            splits = _bounded_splits(state, splits, bounds)
            if state.closed:
                return "relaxed"
        if not effort or self.out_of_time():
            return "open"
        if splits is not None:
            return self._splits(state, splits, bounds)
        return self._whole(state, menus)

    def _tree(self, state: LayoutState, nodes: int) -> Fate:
        """Branch and bound over the layers of the virtual stages."""
        part, programs = (state.context.layout, part_key(state.context)), self.counters.integer_programs
        if part not in self.trees:
            self.trees[part] = BranchingTree(state, self._split)
        self.trees[part].run(state, nodes)
        if self.trees[part].finished:
            del self.trees[part]
        if not state.closed:
            return "open"
        self.trees.pop(part, None)
        return "solved" if self.counters.integer_programs > programs else "relaxed"

    def _split(self, part: LayoutState, split: tuple[int, ...]) -> None:
        """One split of the layers: raises the bound, or finds the best plan."""
        bounds = SplitBounds(part.context, part.graph, tuple(part.pool))
        part.bound_ns = max(part.bound_ns, bounds.bound_ns(split, part.cutoff_ns))
        if part.closed:
            return
        part.context = part.context.with_split(split, bounds.least_backward_ns(split))
        most = _most(part.context, part.cutoff_ns)
        menus = None if most is None else compact_rounds(part, most, FULL_ROUNDS)
        if menus is None or part.closed or self._whole(part, menus) != "open":
            part.bound_ns = max(part.bound_ns, part.cutoff_ns + 1)

    def _whole(self, state: LayoutState, menus: list[Menu]) -> Fate:
        """The menus' relaxation and, where it does not decide, integer programs."""
        program = start_program(state, menus)
        if program is None:
            return "relaxed"
        menu_rounds(state, program, MENU_ROUNDS)
        if state.closed:
            return "relaxed"
        trying = partial(try_choice, state, program)
        return "open" if self.out_of_time() else self.programs(state, program, trying)

    def _splits(self, state: LayoutState, splits: tuple[tuple[int, ...], ...], bounds: SplitBounds) -> Fate:
        """Decide every split of the layers by itself, most promising first; the layout's bound is the least."""
        parts: list[tuple[int, int, LayoutState]] = []
        for number, split in enumerate(splits):
            context = state.context.with_split(split, bounds.least_backward_ns(split))
            part = replace(state, context=context, best=None)
            most = _most(part.context, part.cutoff_ns)
            if most is not None and compact_rounds(part, most, FULL_ROUNDS) is not None and not part.closed:
                parts.append((part.bound_ns, number, part))
            state.take_best(part)
        least, fate, programs = state.cutoff_ns + 1, "relaxed", self.counters.integer_programs
        for _, _, part in sorted(parts, key=lambda entry: entry[:2]):
            part.cutoff_ns = min(part.cutoff_ns, state.cutoff_ns)
            if not part.closed:
                most = _most(part.context, part.cutoff_ns)
                menus = None if most is None else compact_rounds(part, most, QUICK_ROUNDS)
                if menus is not None and not part.closed and self._whole(part, menus) == "open":
                    least, fate = min(least, part.bound_ns), "open"
                state.take_best(part)
        state.bound_ns = max(state.bound_ns, min(least, state.cutoff_ns + 1))
        if fate == "open" and not state.closed:
            return "open"
        return "solved" if self.counters.integer_programs > programs else "relaxed"

    def seconds_left(self) -> float | None:
        """Until the time limit."""
        return None if self.deadline is None else max(0.01, self.deadline - time.monotonic())

    def _limits(self, seconds: float | None) -> Limits:
        return Limits(time_limit_s=seconds, seed=self.options.seed, cancelled=self.options.cancelled)

    def programs(self, state: LayoutState, program: ChoiceProgram, trying: Callable[[Choice], None]) -> Fate:
        """Integer programs, whose answers ``trying`` simulates, until bound and simulator meet up to their
        rounding; once more in finer units where that leaves more than the gap. Finer units try the tolerances of
        solvers: where they then fail or contradict each other, what the coarser ones proved stays."""
        fate = self._programs_in(state, program, trying, 0)
        if fate == "open" and state.rounded and state.gap > 0 and not self.out_of_time():
            with suppress(SolverError):
                return self._programs_in(state, program, trying, state.bound_ns)
        return fate

    def _programs_in(
        self, state: LayoutState, program: ChoiceProgram, trying: Callable[[Choice], None], proved_ns: int
    ) -> Fate:
        """Integer programs above a base of ``proved_ns`` until bound and simulator meet, or the limit.

        A bound of an integer program counts only when the second solver has proved it too.
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
            known = program.num_rows_found
            choice = _choice_of(program, np.asarray(solution.values))
            trying(choice)
            if base + unit * proved > state.cutoff_ns:
                return self._settle(state, current, solution, proved, base, unit)
            rank = program.overfull_rank(choice)
            if rank is not None:
                program.forbid_rank_items(choice, rank)
            if program.num_rows_found != known:
                continue
            if gap > 0:
                gap = 0.0
            elif solver.name == "cpsat":
                # The units that CP-SAT is trusted with may be too coarse for the gap: HiGHS takes finer ones.
                solver, program.memory_units = backend("highs"), MEMORY_UNITS
            else:
                # Bound and simulator have met up to the rounding of the program.
                state.rounded = True
                return self._settle(state, current, solution, proved, base, unit)
        return "open"

    def _answer(self, solver: Backend, program: Program, limits: Limits) -> Solution | None:
        """Return what a solver says, or, where it cannot run, one of the others; None where none can."""
        for number, asked in enumerate((solver, *map(backend, ("highs", "cbc", "cpsat")))):
            if number and (asked.name == solver.name or self.out_of_time()):
                continue
            try:
                return asked.solve(program, limits)
            except UnavailableError as error:
                self.without(error)
            except SolverError:
                # A stand-in's failure says nothing of the solver that was asked for.
                if not number:
                    raise
        return None

    def _settle(
        self, state: LayoutState, program: Program, solution: Solution, proved: int, base: int, unit: int
    ) -> Fate:
        """Take over as much of a bound as is confirmed."""
        confirmed = self._confirmed(program, solution, proved)
        if confirmed is not None:
            state.bound_ns = max(state.bound_ns, base + unit * confirmed)
            if self.options.on_program is not None:
                self.options.on_program(_below(program, confirmed))
        return "solved" if state.closed else "open"

    def _confirmed(self, program: Program, solution: Solution, proved: int) -> int | None:
        """The part of a bound on z that a second solver proves too: all of it, or all but ``SLACK_UNITS``.

        It is asked whether anything lies below the bound. An answer that breaks a row by its tolerance decides
        nothing: then a little less is asked for. A solution that holds is a contradiction, which is an error.
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
        """Whether one of the witnesses proves a program infeasible."""
        others = [witness for witness in self.witnesses if witness.name != solution.backend]
        for (seconds, factor), witness in product(WITNESS_LIMITS, others):
            left, longest = self.seconds_left(), max(seconds, factor * solution.wall_time_s)
            limits = self._limits(longest if left is None else min(left, longest))
            try:
                second = witness.solve(below, limits)
            except UnavailableError as error:
                self.without(error)
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


def _below(program: Program, bound: int) -> Program:
    """The program with its objective, the last variable, below a bound."""
    return program.with_upper_bound(program.num_variables - 1, bound - 1)


def _bounded_splits(
    state: LayoutState, splits: tuple[tuple[int, ...], ...], bounds: SplitBounds
) -> tuple[tuple[int, ...], ...]:
    """The splits that the paths known so far do not exclude; the layout's bound is the least of theirs."""
    known = [bounds.bound_ns(split, state.cutoff_ns) for split in splits]
    state.bound_ns = max(state.bound_ns, min(known, default=state.cutoff_ns + 1))
    return tuple(split for split, bound in zip(splits, known, strict=True) if bound <= state.cutoff_ns)


def most_layers(context: LayoutContext, cutoff_ns: int) -> IntArray:
    """Most layers each virtual stage can hold without its rank's path passing the cutoff, [J]."""
    layout = context.layout
    P, v, m = layout.pp, layout.vpp, layout.num_micro_batches
    ranks = [context.costs.of_rank(rank) for rank in range(P)]
    counts = np.bincount(np.array(context.problem.model.layer_kinds))
    if v > 1:
        least = np.array([context.min_layers(j) for j in range(context.num_stages)])[context.places]
        on_rank = most_on_ranks(context, cutoff_ns)
        if (np.maximum(on_rank, 0).sum(axis=1) < counts).any():
            return np.full(context.num_stages, -1)
        most = on_rank.max(axis=0) - (least.sum(axis=0, keepdims=True) - least)
        return context.by_stage(np.maximum(most, -1))
    schedule = np.array([SCHEDULES.index(layout.schedule)])
    whole, on_forward, on_backward, on_weight, _ = path_coefficients(np.array([float(m)]), schedule, P)
    # Of a whole pass only what it takes on the fastest node type counts.
    once = np.min([costs.least_ns.sum(axis=0) for costs in ranks], axis=0)
    work = int(once @ counts) + int(ranks[0].embedding_ns[:2].sum() + ranks[-1].head_ns[:2].sum())
    forward, backward = np.array([costs.least_ns.min(axis=1) for costs in ranks]).T
    weight = np.array([costs.duration_ns[:, Phase.WEIGHT].min() for costs in ranks])
    per_layer = on_forward[:, 0] * forward + on_backward[:, 0] * backward + on_weight[:, 0] * weight
    per_layer = np.maximum(per_layer, 1.0)
    room = (cutoff_ns - whole[:, 0] * work) / per_layer
    return np.asarray(np.maximum(np.floor(room + 1e-6), -1), dtype=np.int64)


def _scaled(program: ChoiceProgram, base: int, unit: int, limited: bool) -> tuple[Program, int]:
    """The program and its unit; ``limited``: in units coarse enough for CP-SAT."""
    current = program.program(base, unit)
    while limited and current.max_row_magnitude() >= MAX_ROW_MAGNITUDE:
        unit *= 4
        program.memory_units = max(1, program.memory_units // 4)
        current = program.program(base, unit)
    return current, unit


def most_within(context: LayoutContext, cutoff_ns: int) -> IntArray | None:
    """Most layers of every stage, or None when counting, or the memory of the ends, shows that nothing is left."""
    # Where all ranks are alike and hold one end at most, the layout's memory bound has looked at the ends.
    alike = context.layout.schedule not in V_SCHEDULES and not context.capacities and not context.costs.offloads
    most = _most(context, cutoff_ns)
    return most if most is not None and (alike or context.ends_fit()) else None


def _most(context: LayoutContext, cutoff_ns: int) -> IntArray | None:
    """Most layers of every stage, or None when counting shows that nothing is left."""
    layers = context.problem.model.num_layers
    least = np.array([context.min_layers(j) for j in range(context.num_stages)])
    held = np.array([context.max_layers(j) for j in range(context.num_stages)])
    most = np.minimum(most_layers(context, cutoff_ns), held)
    return None if (most < least).any() or most.sum() < layers else most


def start_program(state: LayoutState, menus: list[Menu]) -> LayoutProgram | None:
    """The program with all known paths, or None when counting shows that nothing is left."""
    program = LayoutProgram(state.context, menus, state.cutoff_ns)
    for path in state.pool:
        program.add_path(path)
    if not program.drop_hopeless_items() or not _enough(program.menus, state.context):
        return None
    return program


def _enough(menus: Sequence[Menu], context: LayoutContext) -> bool:
    """Whether the menus can hold all layers."""
    total = context.problem.model.num_layers
    most = sum(int(menu.layers.max()) for menu in menus)
    least = sum(int(menu.layers.min()) for menu in menus)
    return least <= total <= most


def _choice_of(program: ChoiceProgram, values: IntArray) -> Choice:
    """Item taken by each stage in an integer answer."""
    return [int(np.argmax(part)) for part in program.split(values[: int(program.offsets[-1])].astype(np.float64))]
