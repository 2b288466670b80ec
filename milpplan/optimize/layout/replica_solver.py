"""Decide a layout with replicas of different make: its views one by one, then all together.

A view's step bounds the step from below, so what proves that a view has no plan at or below the cutoff decides the
layout: counting, the ranks' recomputation in every even split, and the compact relaxation of each view. What is
left is decided by one integer program over all views (``replica_program``), solved and confirmed like any other,
split by split where there are few.
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
    most_within,
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
    """All views of a layout against one cutoff; ``whole`` holds what is proved and found of the layout."""

    layout: Layout
    whole: LayoutState
    views: list[ViewState] = field(default_factory=list)

    def offer(self, origin: ViewState, plan: Plan) -> None:
        """Simulate the layers of a view's plan in all views, with the recomputation that each of them needs."""
        layers = np.array([stage.num_layers for stage in plan.virtual_stages], dtype=np.int64)
        plans, longest = [], 0
        for view in self.views:
            own = plan if view is origin else fitted_plan(view.context, layers)
            if own is None:
                return
            stages = plan_stages(view.context.costs, view.context.problem.model.layer_kinds, own)
            paths, steps = view.paths_at(durations(stages)[None])
            if view is not origin:
                view.pool.append(paths[0])
            plans.append(own)
            longest = max(longest, steps[0])
        self.whole.keep(longest, joined_plan(self.layout, tuple(plans)))

    def take_choice(self, program: JointProgram, choice: Choice) -> None:
        """Simulate a choice of items: the critical paths join the views' programs, the plan counts if it fits."""
        plans, longest, fits = [], 0, True
        for view, own, part in zip(self.views, program.views, program.choices(choice), strict=True):
            point = own.durations(part)
            paths, steps = view.paths_at(np.stack([point, *view.slower_ranks(point)]))
            for path in paths:
                own.add_path(path)
            plans.append(own.plan(part))
            longest, fits = max(longest, steps[0]), fits and own.overfull_rank(part) is None
        if fits:
            self.whole.keep(longest, joined_plan(self.layout, tuple(plans)))


@dataclass(slots=True)
class ViewState(LayoutState):
    """An attempt at one view: its plans are plans of the layout only together with those of the others."""

    joint: Joint | None = None

    def keep(self, step: int, plan: Plan) -> None:
        """A plan that fits the view: tried in all of them where it meets the cutoff, which may fall."""
        assert self.joint is not None
        if step <= self.cutoff_ns:
            self.joint.offer(self, plan)
            self.cutoff_ns = self.joint.whole.cutoff_ns

    @staticmethod
    def of(state: LayoutState, joint: Joint) -> ViewState:
        """An attempt as one at a view."""
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
    """``LayoutSolver.resolve`` of a layout with replicas of different make, from the settings of its views."""
    joint = Joint(layout, solver.new_state(contexts[0], cutoff_ns, bound_ns))
    joint.views += [ViewState.of(solver.new_state(own, cutoff_ns, bound_ns), joint) for own in contexts]
    return LayoutOutcome.of(joint.whole, _decide(solver, joint, effort))


def _decide(solver: LayoutSolver, joint: Joint, effort: int) -> Fate:
    """Splits by what each view's ranks must recompute, each view by itself, and with effort all views together."""
    splits = even_splits(joint.views[0].context.problem, joint.views[0].context.layout)
    known = None if splits is None or len(splits) > MAX_SPLITS else _known_splits(joint, splits)
    if known is not None and not known:
        return "bounded"
    menus = _rounds(joint, FULL_ROUNDS if effort else QUICK_ROUNDS)
    if menus is None:
        return "relaxed"
    if known is not None:
        # Now with the critical paths that the rounds have found.
        known = _known_splits(joint, tuple(known))
        if not known:
            return "relaxed"
    if not effort or solver.out_of_time():
        return "open"
    return _together(solver, joint, menus) if known is None else _split_by_split(solver, joint, known)


def _rounds(joint: Joint, rounds: int) -> list[list[Menu]] | None:
    """Rounds on the compact relaxation of each view; None when one has no plan at or below the cutoff, else the
    menus of all."""
    menus: list[list[Menu]] = []
    for view in joint.views:
        view.cutoff_ns = joint.whole.cutoff_ns
        most = most_within(view.context, view.cutoff_ns)
        left = None if most is None else compact_rounds(view, most, rounds)
        if left is None or _closed(joint, view):
            return None
        menus.append(left)
    return menus


def _known_splits(joint: Joint, splits: tuple[Split, ...]) -> dict[Split, tuple[tuple[int, ...], ...]]:
    """The splits that the paths known of no view exclude, the most promising first, with the least backwards of
    each view's ranks; the layout's bound is the least of theirs."""
    bounds = [SplitBounds(view.context, view.graph, tuple(view.pool)) for view in joint.views]
    cutoff = joint.whole.cutoff_ns
    known = [(max(own.bound_ns(split, cutoff) for own in bounds), split) for split in splits]
    least = min((bound for bound, _ in known), default=cutoff + 1)
    joint.whole.bound_ns = max(joint.whole.bound_ns, min(least, cutoff + 1))
    left = sorted((bound, split) for bound, split in known if bound <= cutoff)
    return {split: tuple(own.least_backward_ns(split) for own in bounds) for _, split in left}


def _split_by_split(solver: LayoutSolver, joint: Joint, splits: dict[Split, tuple[tuple[int, ...], ...]]) -> Fate:
    """Decide every split of the layers by itself; the layout's bound is the least of those left open."""
    whole, programs = joint.whole, solver.counters.integer_programs
    least, fate = whole.cutoff_ns + 1, "relaxed"
    for split, backwards in splits.items():
        part = Joint(joint.layout, replace(whole, best=None))
        for view, backward in zip(joint.views, backwards, strict=True):
            context = view.context.with_split(split, backward)
            part.views.append(replace(view, context=context, cutoff_ns=whole.cutoff_ns, joint=part))
        menus = _rounds(part, FULL_ROUNDS)
        own: Fate = "relaxed" if menus is None else _together(solver, part, menus)
        whole.take_best(part.whole)
        if own == "open" and not part.whole.closed:
            least, fate = min(least, part.whole.bound_ns), "open"
    whole.bound_ns = max(whole.bound_ns, min(least, whole.cutoff_ns + 1))
    if fate == "open" and not whole.closed:
        return "open"
    return "solved" if solver.counters.integer_programs > programs else "relaxed"


def _together(solver: LayoutSolver, joint: Joint, menus: list[list[Menu]]) -> Fate:
    """The menus' relaxation of each view, then one program over all of them."""
    programs: list[LayoutProgram] = []
    for view, left in zip(joint.views, menus, strict=True):
        view.cutoff_ns = joint.whole.cutoff_ns
        program = start_program(view, left)
        if program is None:
            return "relaxed"
        menu_rounds(view, program, MENU_ROUNDS)
        if _closed(joint, view):
            return "relaxed"
        programs.append(program)
    if solver.out_of_time():
        return "open"
    together = JointProgram(programs, joint.whole.cutoff_ns)
    return solver.programs(joint.whole, together, lambda choice: joint.take_choice(together, choice))


def _closed(joint: Joint, view: ViewState) -> bool:
    """Take over what is proved of a view; whether no plan at or below the cutoff is left."""
    joint.whole.bound_ns = max(joint.whole.bound_ns, view.bound_ns)
    return joint.whole.closed
