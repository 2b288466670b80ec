"""Choice of the simplest plan among the plans that the tolerance does not tell apart.

A cost model errs by several per cent, so a plan that is faster by less than the tolerance is no better in
practice. All plans whose objective is at most bound / (1 - gap) are proved within the gap; of these the choice is
the first in the order of ``Simplicity``.

The plans compared are those of the solution pool, and candidates of explored layouts that their bounds do not
exclude: in the uniform space the uniform plans, in the free space a plan per layout that moving its layers leads
to. ``CONSIDERED`` and ``SIMULATED`` limit their number. Layouts that the search never explored one by one are not
compared, so a simpler plan may exist; only the objective is proved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

import numpy as np

from milpplan.optimize.search.best_first import Search
from milpplan.optimize.space.plan_space import in_space, with_used_modules
from milpplan.problem import Layout, Plan, VirtualStage
from milpplan.simulation import usable_memory_bytes
from milpplan.simulation.bulk import has_uniform_plan, uniform_plan
from milpplan.simulation.mixed_costs import ReplicaCosts
from milpplan.simulation.scenario_costs import ScenarioCosts

PROOF_SHARE: Final = 0.5
"""Share of the gap that bounds and relaxations aim at, which leaves the rest to the choice. Integer programs
aim at the whole gap (``SolveContext.tolerance``)."""
MIN_SHARED_GAP: Final = 5e-4
"""Gap below which the search aims at the whole gap: a tighter proof would take longer than the choice is worth."""
CONSIDERED: Final = 256
"""Maximum number of further candidates whose simplicity is compared, those with the smallest bounds."""
SIMULATED: Final = 16
"""Maximum number of further candidates that are simulated."""
NEAR: Final = 1.05
"""Layers are moved where the bound of a layout's uniform plans is at most this multiple of the largest objective
within the gap: moves and mixed recomputation rarely save more."""
FULL, SELECTIVE = 2, 1
"""Weight of a fully and of a selectively recomputed layer."""
SWITCHES: Final = (
    "sequence_parallel",
    "schedule",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "tp_overlap",
    "pp_scatter_gather",
    "gather_again",
    "recompute_vision",
    "vision_data_parallel",
    "recompute_modules",
    "ulysses",
    "offload_weights",
    "offload_activations",
    "offload_modules",
    "offload_optimizer",
    "dp_replicate",
    "keep_weights",
    "expert_dispatch",
    "rank_order",
    "replica_micro_batches",
)
"""Fields of a layout that are switches: the fewer differ from their defaults, the simpler is the plan."""

Simplicity = tuple[int, int, int, int, int]
"""(terms of the cost model that no measured run exercises, ZeRO stage, recomputed layers, vpp, switches away from
their defaults); smaller is simpler."""
UntestedTerms = Callable[[Plan], int]
"""Number of terms of a plan that no measured run exercises."""


def searched_gap(gap: float) -> float:
    """Return the gap that the search aims at so that the printed plan can be chosen within ``gap``."""
    return PROOF_SHARE * gap if gap >= MIN_SHARED_GAP else gap


def simplicity(plan: Plan, untested: UntestedTerms) -> Simplicity:
    """Return the order of a plan among plans of equal objective; recomputed layers count by their weights."""
    layout = plan.layout
    settings = (*(stage.recompute for stage in plan.virtual_stages), *plan.other_recompute)
    recomputed = sum(FULL * setting.full + SELECTIVE * setting.selective for setting in settings)
    switched = sum(getattr(layout, name) != Layout.model_fields[name].default for name in SWITCHES)
    return untested(plan), layout.zero_stage, recomputed, layout.vpp, switched


def simplest(search: Search, gap: float, untested: UntestedTerms) -> tuple[float, Plan] | None:
    """Choose the simplest plan that is proved within the gap, after a search.

    The search's incumbent improves where a candidate is faster.

    Args:
        search: the search; its solution pool and proved bounds are used.
        gap: relative gap to the search's bound that the plan must keep.
        untested: counts the terms of a plan that no measured run exercises.

    Returns:
        Objective and plan; None where no plan is within the gap.
    """
    bound = min(search.global_bound(), search.best_value)
    if search.best is None or bound <= 0 or search.best_value - bound > gap * search.best_value:
        return None
    # The quotient may be rounded to below the incumbent.
    choice = _Choice(search, max(search.best_value, bound / (1.0 - gap)), untested)
    for value, plan in search.offered:
        choice.offer(value, plan)
    if search.problem.space.kind == "uniform":
        choice.compare_uniform_plans()
    else:
        choice.compare_moved_plans()
    assert choice.best is not None
    return choice.best[1:]


@dataclass(slots=True)
class _Choice:
    """Simplest plan so far. ``limit``: largest objective within the gap."""

    search: Search
    limit: float
    untested: UntestedTerms
    best: tuple[Simplicity, float, Plan] | None = None
    num_simulated: int = 0

    def offer(self, value: float, plan: Plan) -> None:
        """Take a plan if it is within the gap and simpler than the best, or as simple and faster."""
        if value <= self.limit:
            if not self.search.context.options.forbid:
                plan = with_used_modules(self.search.problem, plan)
            entry = simplicity(plan, self.untested), value, plan
            if self.best is None or entry[:2] < self.best[:2]:
                self.best = entry

    def compare_uniform_plans(self) -> None:
        """Simulate uniform plans whose bounds are within the gap, simplest first, until none is simpler."""
        explored, problem = self.search.explored, self.search.problem
        values = explored.uniform_ns * explored.weights[:, None]
        values[explored.uniform_ns > explored.limits_ns[:, None]] = np.inf
        rows, modes = np.nonzero(values <= self.limit)
        considered = np.argsort(values[rows, modes], kind="stable")[:CONSIDERED]
        candidates = list[tuple[Simplicity, float, int, int, Plan]]()
        for row, mode in zip(rows[considered].tolist(), modes[considered].tolist(), strict=True):
            layout = explored.space.at(row)
            if has_uniform_plan(problem.model, layout.num_virtual_stages):
                plan = uniform_plan(problem, layout, problem.recompute_modes[mode])
                candidates.append((simplicity(plan, self.untested), float(values[row, mode]), row, mode, plan))
        for order, value, row, mode, plan in sorted(candidates, key=itemgetter(0, 1)):
            if self._is_done(order, value):
                return
            if not explored.simulated[row, mode]:
                step = self._evaluated(row, plan)
                value = np.inf if step is None else step * float(explored.weights[row])
            self.offer(value, plan)

    def compare_moved_plans(self) -> None:
        """Move the layers of layouts whose bounds are within the gap, simplest layout first, until none is
        simpler."""
        explored = self.search.explored
        values = explored.values()
        uniform = explored.uniform_ns.min(axis=1, initial=np.inf) * explored.weights
        rows = np.flatnonzero((values <= self.limit) & (uniform <= NEAR * self.limit))
        rows = rows[np.argsort(values[rows], kind="stable")][:CONSIDERED]
        pooled = {plan.layout for _, plan in self.search.offered}
        layers, candidates = self.search.problem.model.num_layers, []
        for row in rows.tolist():
            layout = explored.space.at(row)
            if layout not in pooled and not layout.replica_micro_batches:
                # Layouts are compared by plans that recompute nothing.
                rest = (VirtualStage(layers=(layers, layers)),) * (layout.num_virtual_stages - 1)
                plan = Plan(layout=layout, virtual_stages=(VirtualStage(layers=(0, layers)), *rest))
                candidates.append((simplicity(plan, self.untested), row))
        for order, row in sorted(candidates):
            if self._is_done(order):
                return
            for plan in self._moved(row):
                step = self._evaluated(row, plan)
                if step is not None:
                    self.offer(step * float(explored.weights[row]), plan)

    def _is_done(self, order: Simplicity, bound: float = np.inf) -> bool:
        """Return True if no candidate from this order and bound on can be simpler, or as simple and faster, or if
        the effort is spent."""
        assert self.best is not None
        spent = self.num_simulated >= SIMULATED or self.search.context.out_of_time()
        return spent or (order, bound) >= self.best[:2]

    def _evaluated(self, row: int, plan: Plan) -> int | None:
        """Simulate and offer a plan to the search. Returns its step in nanoseconds; None where it does not fit or
        takes longer than the deadline allows."""
        self.num_simulated += 1
        if not in_space(self.search.problem, plan):
            return None
        step = self.search.evaluate(row, plan)
        return None if step is None or step > self.search.explored.limits_ns[row] else step

    def _moved(self, row: int) -> Iterator[Plan]:
        """Yield the plan of a layout that moving the layers of the even split leads to."""
        from milpplan.optimize.layout import LayoutContext, fitted_plan
        from milpplan.optimize.layout.layer_branching import local_search_if_promising
        from milpplan.optimize.layout.rounding import rounded_layers

        search = self.search
        layout = search.explored.space.at(row)
        costs = search.cost_cache.at(search.explored.space, row, search.queue)
        if isinstance(costs, ScenarioCosts):
            # Layers are moved by the times of the first scenario; the plan counts with its scaled step.
            costs = costs.views[0].costs
        assert not isinstance(costs, ReplicaCosts)
        context = LayoutContext.of(search.problem, layout, costs, usable_memory_bytes(search.problem))
        stages, layers = layout.num_virtual_stages, search.problem.model.num_layers
        start = fitted_plan(context, rounded_layers(context, np.full(stages, layers / stages)))
        if start is not None:
            limit_ns = self.limit / float(search.explored.weights[row])
            yield local_search_if_promising(context, start, limit_ns, search.context.deadline)
