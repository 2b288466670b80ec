"""Solver of layouts with several views: heterogeneous replicas, or scenarios.

A view is the layout with its own cost constants: those of a node type, or those of a scenario. First each view
alone, then all views together. A view's step bounds the step from below, so a proof that a view has no plan at or
below the cutoff decides the layout. Such proofs come from counting, from the ranks' recomputation in every even
split, and from the compact relaxation of each view. The rest is decided by one integer program over all views,
solved and confirmed like any other, split by split where there are few splits.

Heterogeneous replicas (``JointProgram``). Sets and variables: those of ``layout_program`` once for each view v
(node type), with items x_vji; one z for all.

    minimise z
    all rows of each view's program, in equal units: z >= path_p(x_v) for the paths of v's own graph
    same_layers             sum_i runs_vjir x_vji = sum_i runs_0jir x_0ji        every view v > 0, stage j, run r

Replicas of all types hold the same layers, and each recomputes what its own memory requires. The step is the
longest of the views' steps, so z is at most the step of every plan: a relaxation, as tight as those of the views.
An item that a view's menu drops in favour of an item with equal layers is not needed by other views.

Scenarios (``SharedProgram``). One plan for all views: sets and variables of ``layout_program`` once, x_ji; items
carry the durations of every scenario s, and an item is dropped only where another is no slower in any scenario.

    minimise z
    all rows of the first scenario's program
    scenario_path           z >= a_s path_p(x; s)        every further scenario s and every path p found in it

where a_s is the scale of the scenario (``simulation.scenario_costs``), so that z is at most the scaled step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise

import numpy as np

from milpplan.optimize.bounds.split_bounds import SplitBounds
from milpplan.optimize.layout.cutting_planes import LayoutState, compact_prices, compact_rounds, menu_rounds
from milpplan.optimize.layout.layout_program import MEMORY_UNITS, LayoutProgram
from milpplan.optimize.layout.layout_solver import (
    FULL_ROUNDS,
    MAX_SPLITS,
    MENU_ROUNDS,
    QUICK_ROUNDS,
    LayoutOutcome,
    LayoutSolver,
    bounded_splits,
    can_hold_all_layers,
    max_layers_within,
    simulated_splits,
    start_program,
)
from milpplan.optimize.layout.rounding import Choice, fitted_plan
from milpplan.optimize.layout.stage_options import LayoutContext, Menu, UnitCosts, shared_menus
from milpplan.optimize.milp.program import Program, Rows
from milpplan.optimize.search.closed_layouts import Fate
from milpplan.optimize.space.plan_space import even_splits
from milpplan.problem import Layout, Plan
from milpplan.simulation import FloatArray, IntArray, durations, joined_plan, plan_stages
from milpplan.simulation.scenario_costs import SAME, TimeScale

Split = tuple[int, ...]


@dataclass(slots=True)
class _Views:
    """Programs of all views, with one cutoff and one unit of memory."""

    views: list[LayoutProgram]
    cutoff_ns: int
    memory_units: int = field(default=MEMORY_UNITS)

    @property
    def num_rows_found(self) -> int:
        """Number of paths and forbidden combinations so far."""
        return sum(view.num_rows_found for view in self.views)

    def scaling(self, proved_ns: int = 0) -> tuple[int, int]:
        """Return (base_ns, unit_ns) of z: the highest base of the views, and the coarsest unit above it."""
        self._share_settings()
        base = max(view.scaling(proved_ns)[0] for view in self.views)
        return base, max(view.scaling(base)[1] for view in self.views)

    def _share_settings(self) -> None:
        """Give the views' programs one cutoff and one unit of memory."""
        for view in self.views:
            view.cutoff_ns, view.memory_units = self.cutoff_ns, self.memory_units


@dataclass(slots=True)
class JointProgram(_Views):
    """Programs of all views with one z. A choice lists the first view's stages, then the second view's."""

    @property
    def offsets(self) -> IntArray:
        """First column of each stage's items, view by view, and the end; [views * J + 1]."""
        widths = np.concatenate([np.diff(view.offsets) for view in self.views])
        return np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)

    def by_menu(self, row: FloatArray) -> list[FloatArray]:
        """Cut a row over all items into one part per menu, view by view."""
        return [row[start:end] for start, end in pairwise(self.offsets)]

    def choices(self, choice: Sequence[int]) -> list[Choice]:
        """Split a choice into one choice per view."""
        J = len(self.views[0].menus)
        return [list(choice[J * number : J * (number + 1)]) for number in range(len(self.views))]

    def program(self, base: int, unit: int) -> Program:
        """Return the views' programs side by side, with one z."""
        self._share_settings()
        parts = [view.program(base, unit) for view in self.views]
        widths = [part.num_variables - 1 for part in parts]
        starts = np.cumsum([0, *widths])
        z = int(starts[-1])
        rows = [
            _moved(part.rows, int(start), width, z, view)
            for view, (part, start, width) in enumerate(zip(parts, starts[:-1], widths, strict=True))
        ]
        items = [slice(0, width) for width in widths]
        last = parts[0]
        objective = np.zeros(z + 1, dtype=np.int64)
        objective[z] = 1
        names = [
            f"{name}@{view}"
            for view, (part, columns) in enumerate(zip(parts, items, strict=True))
            for name in part.variable_names[columns]
        ]
        return Program(
            last.name,
            (*names, "z"),
            np.concatenate(
                [*(part.lower[columns] for part, columns in zip(parts, items, strict=True)), last.lower[-1:]]
            ),
            np.concatenate(
                [*(part.upper[columns] for part, columns in zip(parts, items, strict=True)), last.upper[-1:]]
            ),
            np.ones(z + 1, dtype=np.bool_),
            Rows.concatenate([*rows, self._same_layers()]),
            objective,
        )

    def _same_layers(self) -> Rows:
        """same_layers: every stage holds equal layers of every run in all views."""
        first, width = self.views[0], int(self.offsets[-1])
        starts = np.cumsum([0, *(int(view.offsets[-1]) for view in self.views)])
        names, matrix = [], []
        for index, view in enumerate(self.views[1:], start=1):
            for j, (first_menu, menu) in enumerate(zip(first.menus, view.menus, strict=True)):
                for run in range(first_menu.runs.shape[1]):
                    row = np.zeros(width, dtype=np.int64)
                    row[first.offsets[j] : first.offsets[j + 1]] = -first_menu.runs[:, run]
                    view_offsets = starts[index] + view.offsets
                    row[view_offsets[j] : view_offsets[j + 1]] = menu.runs[:, run]
                    names.append(f"same_layers[{index},{j},{run}]")
                    matrix.append(row)
        return Rows.dense(names, np.array(matrix, dtype=np.int64).reshape(-1, width), 0, 0)

    def overfull_rank(self, choice: Sequence[int]) -> int | None:
        """Return a rank of a view whose exact peak exceeds the capacity, if any.

        Ranks of the second view are numbered after those of the first.
        """
        for index, (view, view_choice) in enumerate(zip(self.views, self.choices(choice), strict=True)):
            rank = view.overfull_rank(view_choice)
            if rank is not None:
                return index * view.context.layout.pp + rank
        return None

    def forbid_rank_items(self, choice: Sequence[int], rank: int) -> None:
        """Exclude the combination of items that a rank cannot hold together."""
        index, own_rank = divmod(rank, self.views[0].context.layout.pp)
        self.views[index].forbid_rank_items(self.choices(choice)[index], own_rank)


@dataclass(slots=True)
class SharedProgram(_Views):
    """Program of one plan in all scenarios, whose programs have the same items. The cutoff is scaled, like z."""

    @property
    def offsets(self) -> IntArray:
        """First column of each stage's items, and the end; [J + 1]."""
        return self.views[0].offsets

    def by_menu(self, row: FloatArray) -> list[FloatArray]:
        """Split a row over all items into one part per stage."""
        return self.views[0].by_menu(row)

    def program(self, base: int, unit: int) -> Program:
        """Return the first scenario's program with the paths of all scenarios."""
        self._share_settings()
        program = self.views[0].program(base, unit)
        for index, view in enumerate(self.views[1:], start=1):
            rows = view.path_rows(0, base, unit)
            names = tuple(f"{name}@{index}" for name in rows.names)
            program = program.with_rows(replace(rows, names=names))
        return program

    def drop_hopeless_items(self) -> bool:
        """Remove items that alone push a path of any scenario beyond the cutoff. Returns False when a menu runs
        empty."""
        self._share_settings()
        keep = np.logical_and.reduce([view.hopeful_items() for view in self.views])
        kept = [view.keep_items(keep) for view in self.views]
        return all(kept)

    def overfull_rank(self, choice: Sequence[int]) -> int | None:
        """Return a rank whose exact peak exceeds the capacity, if any."""
        return self.views[0].overfull_rank(choice)

    def forbid_rank_items(self, choice: Sequence[int], rank: int) -> None:
        """Exclude the combination of items that a rank cannot hold together."""
        self.views[0].forbid_rank_items(choice, rank)


def _moved(rows: Rows, start: int, width: int, z: int, view: int) -> Rows:
    """Return a view's rows with its items moved to column ``start`` and its z (column ``width``) to ``z``."""
    columns = np.where(rows.columns == width, z, rows.columns + start)
    names = tuple(f"{name}@{view}" for name in rows.names)
    return Rows(names, rows.starts, columns, rows.coefficients, rows.lower, rows.upper)


@dataclass(slots=True)
class Joint:
    """All views of a layout against one cutoff; ``whole`` holds the bound and the best plan of the layout.

    ``shares_plan``: the views are scenarios of one plan. Otherwise they are node types, whose plans have the same
    layers.
    """

    layout: Layout
    whole: LayoutState
    shares_plan: bool = False
    views: list[ViewState] = field(default_factory=list)

    def offer(self, origin: ViewState, plan: Plan) -> None:
        """Simulate a view's plan in all views; the replicas of each type have the recomputation that they need."""
        layers = np.array([stage.num_layers for stage in plan.virtual_stages], dtype=np.int64)
        plans, step_ns = [], 0
        for view in self.views:
            own = view is origin or self.shares_plan
            view_plan = plan if own else fitted_plan(view.context, layers)
            if view_plan is None:
                return
            stages = plan_stages(view.context.costs, view.context.problem.model.layer_kinds, view_plan)
            paths, steps = view.paths_at(durations(stages)[None])
            if view is not origin:
                view.pool.append(paths[0])
            plans.append(view_plan)
            step_ns = max(step_ns, view.scale.up(steps[0]))
            if self.shares_plan and step_ns > self.whole.cutoff_ns:
                return
        self.whole.keep(step_ns, plan if self.shares_plan else joined_plan(self.layout, tuple(plans)))

    def take_choice(self, program: JointProgram, choice: Choice) -> None:
        """Simulate a choice of items: critical paths join the views' programs; the plan counts if it fits."""
        plans, step_ns, fits = [], 0, True
        for view, view_program, view_choice in zip(
            self.views, program.views, program.choices(choice), strict=True
        ):
            step_ns = max(step_ns, view.take_paths(view_program, view_choice))
            plans.append(view_program.plan(view_choice))
            fits = fits and view_program.overfull_rank(view_choice) is None
        if fits:
            self.whole.keep(step_ns, joined_plan(self.layout, tuple(plans)))

    def take_shared_choice(self, program: SharedProgram, choice: Choice) -> None:
        """Simulate a choice of items in all scenarios, as ``take_choice`` does."""
        pairs = zip(self.views, program.views, strict=True)
        step_ns = max(view.take_paths(view_program, choice) for view, view_program in pairs)
        if program.overfull_rank(choice) is None:
            self.whole.keep(step_ns, program.views[0].plan(choice))


@dataclass(slots=True)
class ViewState(LayoutState):
    """State of one view, whose plans become plans of the layout only together with the other views."""

    joint: Joint | None = None
    scale: TimeScale = SAME
    """From the view's step to the layout's."""

    def keep(self, step: int, plan: Plan) -> None:
        """Try a plan that fits the view in all views if it meets the cutoff, which may fall."""
        assert self.joint is not None
        if step <= self.cutoff_ns:
            self.joint.offer(self, plan)
            self.take_cutoff()

    def take_cutoff(self) -> None:
        """Take over the cutoff of the layout."""
        assert self.joint is not None
        self.cutoff_ns = self.scale.longest_ns(self.joint.whole.cutoff_ns)

    def take_paths(self, program: LayoutProgram, choice: Choice) -> int:
        """Add the critical paths of a choice and its neighbours to the view's program. Returns the choice's step,
        scaled."""
        point = program.durations(choice)
        paths, steps = self.paths_at(np.stack([point, *self.slower_ranks(point)]))
        for path in paths:
            program.add_path(path)
        return self.scale.up(steps[0])

    @staticmethod
    def of(state: LayoutState, joint: Joint, scale: TimeScale) -> ViewState:
        """Make a view's state from a layout's state."""
        values = {part.name: getattr(state, part.name) for part in fields(LayoutState)}
        view = ViewState(**values, joint=joint, scale=scale)
        view.take_cutoff()
        return view


def resolve_views(
    solver: LayoutSolver,
    layout: Layout,
    contexts: Sequence[LayoutContext],
    scales: Sequence[TimeScale],
    cutoff_ns: int,
    bound_ns: int,
    effort: int,
) -> LayoutOutcome:
    """Resolve a layout from the contexts of its views; see ``LayoutSolver.resolve``.

    Args:
        solver: what all layouts share.
        layout: the layout.
        contexts: of the views.
        scales: of the scenarios; empty where the views are node types.
        cutoff_ns: longest step that counts; with scenarios, scaled, like all steps of the outcome.
        bound_ns: bound proved so far.
        effort: as for ``LayoutSolver.resolve``.
    """
    joint = Joint(layout, solver.new_state(contexts[0], cutoff_ns, bound_ns), shares_plan=bool(scales))
    for index, context in enumerate(contexts):
        # Each scenario has its own paths.
        state = solver.new_state(context, cutoff_ns, bound_ns, index if scales else 0)
        scale = scales[index] if scales else SAME
        if scales:
            state.bound_ns = 0
        joint.views.append(ViewState.of(state, joint, scale))
    return LayoutOutcome.of(joint.whole, _decide(solver, joint, effort))


def _decide(solver: LayoutSolver, joint: Joint, effort: int) -> Fate:
    """Prune splits by the recomputation of each view's ranks, solve each view alone and, with effort, all views
    together."""
    splits = even_splits(joint.views[0].context.problem, joint.views[0].context.layout)
    splits_left = _scenario_splits_left if joint.shares_plan else _splits_left
    left_splits = None if splits is None or len(splits) > MAX_SPLITS else splits_left(joint, splits)
    if left_splits is not None and not left_splits:
        return "bounded"
    if left_splits and joint.shares_plan and not effort:
        return "open"
    menus = _rounds(joint, FULL_ROUNDS if effort else QUICK_ROUNDS)
    if menus is None:
        return "relaxed"
    if left_splits is not None:
        # Bound again, with the critical paths that the rounds have found.
        left_splits = _splits_left(joint, tuple(left_splits))
        if not left_splits:
            return "relaxed"
    if not effort or solver.out_of_time():
        return "open"
    return _together(solver, joint, menus) if left_splits is None else _split_by_split(solver, joint, left_splits)


def _rounds(joint: Joint, rounds: int) -> list[list[Menu]] | None:
    """Run rounds on the compact relaxation of each view. Returns the menus of all views; None when no plan at or
    below the cutoff is left."""
    if joint.shares_plan:
        return _shared_rounds(joint, rounds)
    menus: list[list[Menu]] = []
    for view in joint.views:
        view.take_cutoff()
        max_layers = max_layers_within(view.context, view.cutoff_ns)
        view_menus = None if max_layers is None else compact_rounds(view, max_layers, rounds)
        if view_menus is None or _closed(joint, view):
            return None
        menus.append(view_menus)
    return menus


def _shared_rounds(joint: Joint, rounds: int) -> list[list[Menu]] | None:
    """Run rounds on the compact relaxation of each scenario, the one with the largest bound first, as ``_rounds``
    does; the menus have the same items."""
    prices: dict[int, list[UnitCosts | None]] = {}
    limits: list[IntArray] = []
    for index in sorted(range(len(joint.views)), key=lambda number: -_scaled_bound(joint.views[number])):
        view = joint.views[index]
        view.take_cutoff()
        max_layers = max_layers_within(view.context, view.cutoff_ns)
        view_prices = None if max_layers is None else compact_prices(view, rounds)
        if max_layers is None or view_prices is None or _closed(joint, view):
            return None
        prices[index] = view_prices
        limits.append(max_layers)
    return _shared_menus(joint, np.minimum.reduce(limits), [prices[index] for index in range(len(prices))])


def _scaled_bound(view: ViewState) -> int:
    return view.scale.up(view.bound_ns)


def _shared_menus(
    joint: Joint, max_layers: IntArray, prices: Sequence[Sequence[UnitCosts | None]]
) -> list[list[Menu]] | None:
    """Return the menus of all scenarios, with the same items; None if a menu is empty."""
    contexts, menus = [view.context for view in joint.views], []
    for j in range(contexts[0].num_stages):
        of_stage = shared_menus(contexts, j, int(max_layers[j]), [own[j] for own in prices])
        if not len(of_stage[0]):
            return None
        menus.append(of_stage)
    return [list(of_view) for of_view in zip(*menus, strict=True)]


def _splits_left(joint: Joint, splits: tuple[Split, ...]) -> dict[Split, tuple[tuple[int, ...], ...]]:
    """Return the splits that no view's known paths exclude, most promising first, with the minimum backwards of
    each view's ranks.

    The layout's bound is raised to the minimum of the splits' bounds.
    """
    bounds = [SplitBounds(view.context, tuple(view.pool)) for view in joint.views]
    cutoff = joint.whole.cutoff_ns
    by_view = [
        list(map(view.scale.up, own.bounds_ns(splits, view.scale.longest_ns(cutoff))))
        for view, own in zip(joint.views, bounds, strict=True)
    ]
    bounded = list(zip(map(max, zip(*by_view, strict=True)), splits, strict=True))
    min_bound = min((bound for bound, _ in bounded), default=cutoff + 1)
    joint.whole.bound_ns = max(joint.whole.bound_ns, min(min_bound, cutoff + 1))
    open_splits = sorted((bound, split) for bound, split in bounded if bound <= cutoff)
    return {split: tuple(view_bounds.min_backward_ns(split) for view_bounds in bounds) for _, split in open_splits}


def _scenario_splits_left(joint: Joint, splits: tuple[Split, ...]) -> dict[Split, tuple[tuple[int, ...], ...]]:
    """Return the splits that no scenario excludes, as ``_splits_left`` does, after simulating those that known
    paths leave.

    A view's bound says that no plan at or below the cutoff has a shorter step there.
    """
    if not splits:
        return {}
    bounds: dict[int, SplitBounds] = {}
    # One scenario closes most layouts, so the others wait for it.
    for index in _slowest_first(joint, splits[0]):
        view = joint.views[index]
        view.take_cutoff()
        bounds[index] = SplitBounds(view.context, tuple(view.pool))
        splits = bounded_splits(view, splits, bounds[index])
        if not _closed(joint, view):
            splits, bounds[index] = simulated_splits(view, splits, bounds[index])
        if _closed(joint, view):
            return {}
    return {split: tuple(bounds[index].min_backward_ns(split) for index in range(len(bounds))) for split in splits}


def _slowest_first(joint: Joint, split: Split) -> list[int]:
    """Return the indices of the scenarios, those first in which a plan of a split has the longest scaled step. The
    plan counts, and its critical paths join the scenarios' paths."""
    plan = fitted_plan(joint.views[0].context, np.array(split))
    if plan is None:
        return list(range(len(joint.views)))
    steps_ns = []
    for view in joint.views:
        stages = plan_stages(view.context.costs, view.context.problem.model.layer_kinds, plan)
        paths, steps = view.paths_at(durations(stages)[None])
        view.pool.append(paths[0])
        steps_ns.append(view.scale.up(steps[0]))
    joint.whole.keep(max(steps_ns), plan)
    return sorted(range(len(steps_ns)), key=lambda index: -steps_ns[index])


def _split_by_split(solver: LayoutSolver, joint: Joint, splits: dict[Split, tuple[tuple[int, ...], ...]]) -> Fate:
    """Decide every split of the layers separately. The layout's bound is the minimum over the open splits."""
    whole, programs = joint.whole, solver.counters.integer_programs
    min_bound, fate = whole.cutoff_ns + 1, "relaxed"
    for split, backwards in splits.items():
        part = Joint(joint.layout, replace(whole, best=None), joint.shares_plan)
        for view, backward in zip(joint.views, backwards, strict=True):
            context = view.context.with_split(split, backward)
            part.views.append(replace(view, context=context, joint=part))
        menus = _rounds(part, FULL_ROUNDS)
        part_fate: Fate = "relaxed" if menus is None else _together(solver, part, menus)
        whole.take_best(part.whole)
        if part_fate == "open" and not part.whole.closed:
            min_bound, fate = min(min_bound, part.whole.bound_ns), "open"
    whole.bound_ns = max(whole.bound_ns, min(min_bound, whole.cutoff_ns + 1))
    if fate == "open" and not whole.closed:
        return "open"
    return "solved" if solver.counters.integer_programs > programs else "relaxed"


def _together(solver: LayoutSolver, joint: Joint, menus: list[list[Menu]]) -> Fate:
    """Solve one program over all views; for node types the menus' relaxation of each view before."""
    if joint.shares_plan:
        return _in_all_scenarios(solver, joint, menus)
    programs: list[LayoutProgram] = []
    for view, view_menus in zip(joint.views, menus, strict=True):
        view.cutoff_ns = joint.whole.cutoff_ns
        program = start_program(view, view_menus)
        if program is None:
            return "relaxed"
        menu_rounds(view, program, MENU_ROUNDS)
        if _closed(joint, view):
            return "relaxed"
        programs.append(program)
    if solver.out_of_time():
        return "open"
    joint_program = JointProgram(programs, joint.whole.cutoff_ns)
    return solver.programs(joint.whole, joint_program, lambda choice: joint.take_choice(joint_program, choice))


def _in_all_scenarios(solver: LayoutSolver, joint: Joint, menus: list[list[Menu]]) -> Fate:
    """Solve the program of one plan in all scenarios."""
    views: list[LayoutProgram] = []
    for view, view_menus in zip(joint.views, menus, strict=True):
        program = LayoutProgram(view.context, view_menus, joint.whole.cutoff_ns, scale=view.scale)
        for path in view.pool:
            program.add_path(path)
        views.append(program)
    shared = SharedProgram(views, joint.whole.cutoff_ns)
    if not shared.drop_hopeless_items() or not can_hold_all_layers(views[0].menus, views[0].context):
        return "relaxed"
    if solver.out_of_time():
        return "open"
    return solver.programs(joint.whole, shared, lambda choice: joint.take_shared_choice(shared, choice))


def _closed(joint: Joint, view: ViewState) -> bool:
    """Take over a view's bound. Returns True if no plan at or below the cutoff is left."""
    bound_ns = _scaled_bound(view)
    if joint.shares_plan:
        # The view's bound holds for plans at or below the cutoff.
        bound_ns = min(bound_ns, joint.whole.cutoff_ns + 1)
    joint.whole.bound_ns = max(joint.whole.bound_ns, bound_ns)
    return joint.whole.closed
