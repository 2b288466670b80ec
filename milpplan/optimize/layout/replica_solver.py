"""Solver of layouts with heterogeneous replicas: first each view (node type) alone, then all views together.

A view's step bounds the step from below, so a proof that a view has no plan at or below the cutoff decides the
layout. Such proofs come from counting, from the ranks' recomputation in every even split, and from the compact
relaxation of each view. The rest is decided by one integer program over all views (``replica_program``), solved
and confirmed like any other, split by split where there are few splits.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import numpy as np

from milpplan.optimize.bounds.split_bounds import SplitBounds
from milpplan.optimize.layout.cutting_planes import LayoutState, compact_rounds, menu_rounds
from milpplan.optimize.layout.layout_outcome import LayoutOutcome
from milpplan.optimize.layout.layout_program import LayoutProgram
from milpplan.optimize.layout.layout_solver import (
    FULL_ROUNDS,
    MAX_SPLITS,
    MENU_ROUNDS,
    QUICK_ROUNDS,
    LayoutSolver,
    max_layers_within,
    start_program,
)
from milpplan.optimize.layout.replica_program import JointProgram
from milpplan.optimize.layout.rounding import fitted_plan
from milpplan.optimize.layout.stage_options import LayoutContext, Menu
from milpplan.optimize.layout.warm_start import Choice
from milpplan.optimize.search.prune_reasons import Fate
from milpplan.optimize.space.layer_splits import even_splits
from milpplan.problem.plan import Layout, Plan
from milpplan.simulation.replica_costs import joined_plan
from milpplan.simulation.stages import durations, plan_stages

Split = tuple[int, ...]


@dataclass(slots=True)
class Joint:
    """All views of a layout against one cutoff; ``whole`` holds the bound and the best plan of the layout."""

    layout: Layout
    whole: LayoutState
    views: list[ViewState] = field(default_factory=list)

    def offer(self, origin: ViewState, plan: Plan) -> None:
        """Simulate the layers of a view's plan in all views, each with the recomputation that it needs."""
        layers = np.array([stage.num_layers for stage in plan.virtual_stages], dtype=np.int64)
        plans, step_ns = [], 0
        for view in self.views:
            view_plan = plan if view is origin else fitted_plan(view.context, layers)
            if view_plan is None:
                return
            stages = plan_stages(view.context.costs, view.context.problem.model.layer_kinds, view_plan)
            paths, steps = view.paths_at(durations(stages)[None])
            if view is not origin:
                view.pool.append(paths[0])
            plans.append(view_plan)
            step_ns = max(step_ns, steps[0])
        self.whole.keep(step_ns, joined_plan(self.layout, tuple(plans)))

    def take_choice(self, program: JointProgram, choice: Choice) -> None:
        """Simulate a choice of items: critical paths join the views' programs; the plan counts if it fits."""
        plans, step_ns, fits = [], 0, True
        for view, view_program, view_choice in zip(
            self.views, program.views, program.choices(choice), strict=True
        ):
            point = view_program.durations(view_choice)
            paths, steps = view.paths_at(np.stack([point, *view.slower_ranks(point)]))
            for path in paths:
                view_program.add_path(path)
            plans.append(view_program.plan(view_choice))
            step_ns, fits = max(step_ns, steps[0]), fits and view_program.overfull_rank(view_choice) is None
        if fits:
            self.whole.keep(step_ns, joined_plan(self.layout, tuple(plans)))


@dataclass(slots=True)
class ViewState(LayoutState):
    """State of one view, whose plans become plans of the layout only together with plans of the other views."""

    joint: Joint | None = None

    def keep(self, step: int, plan: Plan) -> None:
        """Try a plan that fits the view in all views if it meets the cutoff, which may fall."""
        assert self.joint is not None
        if step <= self.cutoff_ns:
            self.joint.offer(self, plan)
            self.cutoff_ns = self.joint.whole.cutoff_ns

    @staticmethod
    def of(state: LayoutState, joint: Joint) -> ViewState:
        """Make a view's state from a layout's state."""
        values = {part.name: getattr(state, part.name) for part in fields(LayoutState)}
        return ViewState(**values, joint=joint)


def resolve_replicas(
    solver: LayoutSolver,
    layout: Layout,
    contexts: tuple[LayoutContext, ...],
    cutoff_ns: int,
    bound_ns: int,
    effort: int,
) -> LayoutOutcome:
    """Resolve a layout with heterogeneous replicas from its views' contexts; see ``LayoutSolver.resolve``."""
    joint = Joint(layout, solver.new_state(contexts[0], cutoff_ns, bound_ns))
    joint.views += [ViewState.of(solver.new_state(context, cutoff_ns, bound_ns), joint) for context in contexts]
    return LayoutOutcome.of(joint.whole, _decide(solver, joint, effort))


def _decide(solver: LayoutSolver, joint: Joint, effort: int) -> Fate:
    """Prune splits by the recomputation of each view's ranks, solve each view alone and, with effort, all views
    together."""
    splits = even_splits(joint.views[0].context.problem, joint.views[0].context.layout)
    left_splits = None if splits is None or len(splits) > MAX_SPLITS else _splits_left(joint, splits)
    if left_splits is not None and not left_splits:
        return "bounded"
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
    """Run rounds on the compact relaxation of each view. Returns the menus of all views; None when a view has no
    plan at or below the cutoff."""
    menus: list[list[Menu]] = []
    for view in joint.views:
        view.cutoff_ns = joint.whole.cutoff_ns
        max_layers = max_layers_within(view.context, view.cutoff_ns)
        view_menus = None if max_layers is None else compact_rounds(view, max_layers, rounds)
        if view_menus is None or _closed(joint, view):
            return None
        menus.append(view_menus)
    return menus


def _splits_left(joint: Joint, splits: tuple[Split, ...]) -> dict[Split, tuple[tuple[int, ...], ...]]:
    """Return the splits that no view's known paths exclude, most promising first, with the minimum backwards of
    each view's ranks.

    The layout's bound is raised to the minimum of the splits' bounds.
    """
    bounds = [SplitBounds(view.context, view.graph, tuple(view.pool)) for view in joint.views]
    cutoff = joint.whole.cutoff_ns
    bounded = [(max(view_bounds.bound_ns(split, cutoff) for view_bounds in bounds), split) for split in splits]
    min_bound = min((bound for bound, _ in bounded), default=cutoff + 1)
    joint.whole.bound_ns = max(joint.whole.bound_ns, min(min_bound, cutoff + 1))
    open_splits = sorted((bound, split) for bound, split in bounded if bound <= cutoff)
    return {split: tuple(view_bounds.min_backward_ns(split) for view_bounds in bounds) for _, split in open_splits}


def _split_by_split(solver: LayoutSolver, joint: Joint, splits: dict[Split, tuple[tuple[int, ...], ...]]) -> Fate:
    """Decide every split of the layers separately. The layout's bound is the minimum over the open splits."""
    whole, programs = joint.whole, solver.counters.integer_programs
    min_bound, fate = whole.cutoff_ns + 1, "relaxed"
    for split, backwards in splits.items():
        part = Joint(joint.layout, replace(whole, best=None))
        for view, backward in zip(joint.views, backwards, strict=True):
            context = view.context.with_split(split, backward)
            part.views.append(replace(view, context=context, cutoff_ns=whole.cutoff_ns, joint=part))
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
    """Solve the menus' relaxation of each view, then one program over all views."""
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


def _closed(joint: Joint, view: ViewState) -> bool:
    """Take over a view's bound. Returns True if no plan at or below the cutoff is left."""
    joint.whole.bound_ns = max(joint.whole.bound_ns, view.bound_ns)
    return joint.whole.closed
