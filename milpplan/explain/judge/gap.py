"""Gap of any plan to the proved best, with the changes that close most of it, and its cost.

**Single changes** of a plan: one field of the layout with the fields that must follow it, or the stages.

Changes that ``single_change`` solves for have a proof; each of the others is a whole plan that the simulator has
priced.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from milpplan.errors import InvalidInputError, SolverError
from milpplan.explain import Budget, Interval, Yardstick, saved_share
from milpplan.explain.hardware_choice import run_gpu_hours
from milpplan.explain.judge.records import Change, Effort, GapReport, NearPlan, SpaceGap, Spending
from milpplan.explain.records import SingleChange
from milpplan.optimize import DEFAULT_GAP, PlanResult, Progress, SolveOptions, with_job, with_space
from milpplan.optimize.bounds.cluster_bounds import cluster_compute_bounds
from milpplan.optimize.context import undisturbed
from milpplan.optimize.solve import solve
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.optimize.space.plan_space import even_splits, in_space
from milpplan.problem import Job, Layout, Plan, Problem, Recompute, Space, VirtualStage
from milpplan.problem.plan import layout_words
from milpplan.simulation import (
    LayoutColumns,
    RankCosts,
    StepReport,
    cluster_costs,
    costs_of,
    durations,
    plan_stages,
    rank_capacities,
    rank_memory,
    rank_types,
    simulate,
    step_times_ns,
)
from milpplan.simulation.mixed_costs import ReplicaCosts
from milpplan.units import NS_PER_S

FOLLOWERS: Final = {
    "tp": ("dp", "sequence_parallel", "etp", "ulysses"),
    "cp": ("dp", "ulysses"),
    "pp": ("dp", "vpp", "schedule", "keep_weights"),
    "vpp": ("schedule",),
    "schedule": ("vpp",),
    "etp": ("ep", "expert_dispatch"),
    "ep": ("expert_dispatch",),
    "zero_stage": ("overlap_grad_reduce", "overlap_param_gather", "keep_weights"),
    "keep_weights": ("zero_stage", "overlap_grad_reduce", "overlap_param_gather"),
    "overlap_param_gather": ("overlap_grad_reduce",),
}
"""Fields that a change of another field may require to change: the product of the degrees is the number of GPUs,
and rules tie switches to degrees."""
LEADS: Final = tuple(name for name in Space.model_fields if name in Layout.model_fields and name != "dp")
"""Fields that a single change may be about; dp follows from the others."""


def candidates(plan: Plan, best: Plan) -> Iterator[tuple[str, ...]]:
    """Iterate over sets of fields to free: the empty set (only stages and recomputation change), then each field
    in which the best plan differs, with the fields that follow it."""
    yield ()
    seen: set[frozenset[str]] = set()
    for name in LEADS:
        fields = (name, *FOLLOWERS.get(name, ()))
        if getattr(plan.layout, name) != getattr(best.layout, name) and frozenset(fields) not in seen:
            seen.add(frozenset(fields))
            yield fields


def loosened(problem: Problem, plan: Plan, fields: tuple[str, ...]) -> Problem:
    """Fix every field of the layout as in the plan, except the given fields, which keep their values in the
    space."""
    layout = plan.layout
    values = {
        name: (getattr(layout, name),)
        for name in Space.model_fields
        if name in Layout.model_fields and name not in fields
    }
    return with_space(problem, **values)


def single_change(
    yardstick: Yardstick,
    problem: Problem,
    plan: Plan,
    value: float,
    fields: tuple[str, ...],
    limit_s: float | None,
) -> SingleChange | None:
    """Solve for the best plan with the given fields free, against the plan's own ``value``; None where nothing
    fits."""
    optimum = yardstick.optimum(loosened(problem, plan, fields), limit_s, plan)
    if optimum.infeasible or optimum.plan is None:
        return None
    words = fields[0] if fields else "stages and recomputation only"
    return SingleChange(fields, words, optimum, saved_share(Interval(value, value), optimum.bounds))


HOLDS: Final = frozenset({"tp", "cp", "ep", "etp", "pp", "dp", "vpp", "zero_stage", "rank_order", "node_order"})
"""Fields that decide which rank holds which parameters and states: changing them requires a converted
checkpoint."""
MAX_STEPS: Final = 6
"""Maximum number of changes of a chain."""
WORTH_A_STEP: Final = 1e-4
"""Minimum share of the step that a change must save for a chain to continue."""


@dataclass(frozen=True, slots=True)
class Priced:
    """Plan with the simulated values by which changes are compared."""

    plan: Plan
    step_time_s: float
    fits: bool
    peak_memory_bytes: int
    over_bytes: int

    @staticmethod
    def of(problem: Problem, plan: Plan, costs: RankCosts | ReplicaCosts | None = None) -> Priced:
        """Simulate a plan, with given constants of its layout if they are known."""
        layout = plan.layout
        if layout.replica_micro_batches or isinstance(costs, ReplicaCosts):
            report = simulate(problem, plan)
            over = max(stage.memory.peak_bytes - stage.capacity_bytes for stage in report.stages)
            fits = report.fits_with_margin
            return Priced(plan, report.step_time_s, fits, report.peak_memory_bytes, max(0, over))
        costs = costs or costs_of(problem, layout)
        stages = plan_stages(costs, problem.model.layer_kinds, plan)
        memory = rank_memory(layout, costs, stages)
        hosts = [problem.node_types[node_type].host_bytes for node_type in rank_types(problem, layout)]
        over = max(
            max(rank.peak_bytes - capacity, rank.host_bytes - host)
            for rank, capacity, host in zip(memory, rank_capacities(problem, layout), hosts, strict=True)
        )
        step_ns = int(step_times_ns(layout, costs, durations(stages)))
        peak = max(rank.peak_bytes for rank in memory)
        return Priced(plan, step_ns / NS_PER_S, over <= 0, peak, max(0, over))

    @property
    def order(self) -> tuple[bool, float]:
        """Sort key: plans that fit first, by step time; then those that do not fit, by size."""
        return not self.fits, self.step_time_s if self.fits else float(self.over_bytes)


def variants(problem: Problem, plan: Plan) -> Iterator[tuple[str, str, Plan]]:
    """Iterate over single changes as (lead, words, plan).

    First come all recomputations and an even split with the given layout, then every other value of every field,
    with the minimum of other fields changed that the rules require.
    """
    yield from _other_stages(problem, plan)
    for lead in LEADS:
        fields = (lead, *FOLLOWERS.get(lead, ()))
        columns = layout_space(loosened(problem, plan, fields)).columns
        own = LayoutColumns.of([plan.layout])
        new = getattr(columns, lead) != getattr(own, lead)[0]
        columns = columns.take(np.flatnonzero(new))
        changed = sum(
            (getattr(columns, name) != getattr(own, name)[0]).astype(np.int64) for name in Layout.model_fields
        )
        values = getattr(columns, lead)
        for value in np.unique(values):
            rows = np.flatnonzero(values == value)
            fewest = rows[changed[rows] == changed[rows].min()]
            for row in fewest.tolist():
                layout = columns.at(row)
                yield lead, layout_words(plan.layout, layout, lead), carried_over(problem, plan, layout)


def _other_stages(problem: Problem, plan: Plan) -> Iterator[tuple[str, str, Plan]]:
    """Iterate over plans of the same layout with each recomputation of all layers, and with layers spread
    evenly."""
    sizes = [stage.num_layers for stage in plan.virtual_stages]
    for mode in problem.recompute_modes:
        full, selective = float(mode == "full"), float(mode == "selective")
        other = _with_stages(plan.layout, sizes, full, selective)
        if other != plan:
            yield "recompute", f"recompute={mode}", other
    spread = carried_over(problem, plan, plan.layout, keep=False)
    if [stage.num_layers for stage in spread.virtual_stages] != sizes:
        yield "stages", "layers spread evenly", spread


def carried_over(problem: Problem, plan: Plan, layout: Layout, keep: bool = True) -> Plan:
    """Carry the plan's stages and recomputation over to another layout.

    Stages stay unchanged if the number of virtual stages does (``keep``). Otherwise the layers are spread evenly,
    with the remainder on the first stages, and each stage recomputes the same shares of its layers, rounded up.
    """
    if keep and layout.num_virtual_stages == plan.layout.num_virtual_stages:
        return Plan(layout=layout, virtual_stages=plan.virtual_stages)
    layers, stages = problem.model.num_layers, layout.num_virtual_stages
    each, remainder = divmod(layers, stages)
    sizes = [each + (stage < remainder) for stage in range(stages)]
    counts = [
        sum(getattr(stage.recompute, mode) for stage in plan.virtual_stages) for mode in ("full", "selective")
    ]
    return _with_stages(layout, sizes, counts[0] / layers, counts[1] / layers)


def _with_stages(layout: Layout, sizes: list[int], full: float, selective: float) -> Plan:
    """Build a plan from stage sizes and recomputed shares of their layers, rounded up."""
    held, first = [], 0
    for size in sizes:
        whole = math.ceil(size * full - 1e-9)
        some = min(size - whole, math.ceil(size * selective - 1e-9))
        recompute = Recompute(full=whole, selective=some)
        held.append(VirtualStage(layers=(first, first + size), recompute=recompute))
        first += size
    return Plan(layout=layout, virtual_stages=tuple(held))


def best_changes(problem: Problem, before: Priced, budget: Budget) -> dict[str, tuple[str, Priced]]:
    """Find the best improving change of every kind, by lead: (words, priced plan).

    Changes that the time does not allow to price are left out.
    """
    changes: dict[str, tuple[str, Priced]] = {}
    tried = _distinct(problem, before.plan)
    if not tried:
        return changes
    columns = LayoutColumns.of([plan.layout for _, _, plan in tried])
    least_ns = cluster_compute_bounds(problem, columns)
    costs = cluster_costs(problem, columns)
    for number in np.argsort(least_ns, kind="stable").tolist():
        lead, words, plan = tried[number]
        if budget.is_spent:
            break
        if before.fits and least_ns[number] / NS_PER_S >= before.step_time_s:
            # Changes are in order of their bounds, so no later change is faster.
            break
        priced = Priced.of(problem, plan, costs.at(number))
        best_order = changes[lead][1].order if lead in changes else before.order
        if priced.order < best_order:
            changes[lead] = (words, priced)
    return changes


def _distinct(problem: Problem, plan: Plan) -> list[tuple[str, str, Plan]]:
    """List every variant once, without stages outside the space unless the plan has such stages itself."""
    strict = in_space(problem, plan)
    once: dict[Plan, tuple[str, str, Plan]] = {}
    for variant in variants(problem, plan):
        if not strict or in_space(problem, variant[2]):
            once.setdefault(variant[2], variant)
    return list(once.values())


def change_of(
    lead: str, words: str, start: Plan, before: Priced, after: Priced, way_s: tuple[float, float]
) -> Change:
    """Make the record of a change from ``before`` to ``after``.

    ``way_s`` are the steps of the judged plan and of the fastest known plan, ``start`` is the plan before the
    change.
    """
    fields = tuple(
        name for name in Layout.model_fields if getattr(start.layout, name) != getattr(after.plan.layout, name)
    )
    if [s.layers for s in start.virtual_stages] != [s.layers for s in after.plan.virtual_stages]:
        fields += ("stages",)
    if [s.recompute for s in start.virtual_stages] != [s.recompute for s in after.plan.virtual_stages]:
        fields += ("recompute",)
    effort: Effort = "reshard" if (HOLDS | {"stages"}) & set(fields) else "flag"
    whole = way_s[0] - way_s[1]
    return Change(
        lead=lead,
        words=words,
        fields=fields,
        effort=effort,
        plan=after.plan,
        step_time_s=after.step_time_s,
        peak_memory_bytes=after.peak_memory_bytes,
        saved=1.0 - after.step_time_s / before.step_time_s,
        closed=(way_s[0] - after.step_time_s) / whole if whole > 0 and after.fits else None,
    )


def greedy_chain(
    problem: Problem, first: Priced, changes: dict[str, tuple[str, Priced]], best_s: float, budget: Budget
) -> list[Change]:
    """Chain changes greedily: the best single change, then the best change of its plan, while a change helps.

    Args:
        problem: the problem.
        first: the judged plan.
        changes: its best changes, already priced.
        best_s: step of the fastest known plan.
        budget: time limit.
    """
    chain: list[Change] = []
    before = first
    while changes and len(chain) < MAX_STEPS:
        lead = min(changes, key=lambda name: changes[name][1].order)
        words, after = changes[lead]
        if before.fits and before.step_time_s - after.step_time_s < WORTH_A_STEP * before.step_time_s:
            break
        chain.append(change_of(lead, words, before.plan, before, after, (first.step_time_s, best_s)))
        before = after
        changes = {} if budget.is_spent else best_changes(problem, before, budget)
    return chain


WHOLE: Final = "the whole space"
TIME_LIMIT_S: Final = 60.0
TOKENS: Final = 1e12
"""Tokens of the run whose cost is computed, by default."""
SHOWN_CHANGES: Final = 6
ROUNDING: Final = 1e-9
LAUNCHER, SPACE, STAGES, CHANGES = 3.0, 5.0, 0.5, 2.0
"""Weights of the questions in the distribution of the time."""


@dataclass(slots=True)
class Solves:
    """Cache of solves by problem, for several plans of one job."""

    gap: float = DEFAULT_GAP
    callback: Callable[[Progress], None] | None = None
    found: dict[tuple[Problem, bool], PlanResult] = field(default_factory=dict)

    def best(self, problem: Problem, start: Plan | None, any_chunks: bool, limit_s: float | None) -> PlanResult:
        """Return the proved best of a problem, solved at most once."""
        key = (problem, any_chunks)
        result = self.found.get(key)
        if result is None:
            result = solve(
                problem,
                gap=self.gap,
                time_limit_s=limit_s,
                warm_start=start,
                any_chunks=any_chunks,
                simplest=False,
                callback=self.callback,
            )
            self.found[key] = result
        return result


def judged(problem: Problem, plan: Plan) -> Problem:
    """Return the problem that judges a plan: that of its own job, with the plan's own switches in the space."""
    same = own_job(problem, plan)
    return with_own_margin(same.model_copy(update={"space": widened(problem.space, plan.layout)}), plan)


def with_own_margin(problem: Problem, plan: Plan) -> Problem:
    """Reduce the space's margin of memory to what a plan leaves, so that a plan that fits is in the space."""
    report = simulate(problem, plan)
    if not report.fits or report.fits_with_margin:
        return problem
    installed = {hardware.name: hardware.accelerator.memory_bytes for hardware in problem.node_types}
    left = min(
        (stage.usable_memory_bytes - stage.memory.peak_bytes) / installed[stage.node_type]
        for stage in report.stages
    )
    return with_space(problem, memory_margin_fraction=left)


def own_job(problem: Problem, plan: Plan) -> Problem:
    """Restrict the problem to the plan's own number of GPUs and batch, and to the shortest step."""
    layout = plan.layout
    job = {"objective": "step_time_per_token", "deadline_s": None, "training_tokens": None}
    return with_job(problem, num_gpus=layout.num_gpus, global_batch_size=layout.global_batch_size, **job)


def widened(space: Space, layout: Layout) -> Space:
    """Add the values of a layout to those that the space's fields offer."""
    added: dict[str, object] = {}
    for name in Space.model_fields:
        offered, own = getattr(space, name), getattr(layout, name, None)
        if name in Layout.model_fields and offered is not None and own not in offered:
            added[name] = (*offered, own)
    if layout.zero_stage > 1 and layout.pp > 1:
        added["zero_pipeline"] = True
    return space.model_copy(update=added)


def gap(
    problem: Problem,
    plan: Plan,
    *,
    runnable: tuple[str, Problem] | None = None,
    time_limit_s: float | None = TIME_LIMIT_S,
    tolerance: float = DEFAULT_GAP,
    tokens: float | None = None,
    price_per_gpu_hour: float | None = None,
    changes: bool = True,
    solves: Solves | None = None,
    callback: Callable[[Progress], None] | None = None,
) -> GapReport:
    """Judge a plan: its simulated step and memory, the proved best of the spaces, and the changes that close the
    gap.

    Args:
        problem: model, hardware, job and space of the plan; of ranges in the job the plan's own values count.
        plan: any plan that can be simulated; it need not fit, nor lie in the space.
        runnable: name and problem of a narrower space to judge it by as well: the plans that its launcher can run.
        time_limit_s: of everything together; None: until everything is proved to ``tolerance``.
        tolerance: relative gap of every proof.
        tokens: of the whole run (None: ``TOKENS``), for GPU-hours.
        price_per_gpu_hour: in any currency; None: no amounts of money.
        changes: search for changes, too.
        solves: solves to share with other plans of the same job.
        callback: called with the progress of each solve.

    Returns:
        The gap to every bound, as intervals that provably contain the cost model's value.

    Raises:
        IllegalPlanError: the plan is not legal for the problem.
        InvalidInputError: a limit, a price or a number of tokens is invalid.
    """
    started = time.monotonic()
    _check(time_limit_s, tokens, price_per_gpu_hour)
    weights = SPACE + (LAUNCHER if runnable else 0.0) + (STAGES + CHANGES if changes else 0.0)
    budget = Budget(None if time_limit_s is None else started + time_limit_s, weights)
    same = judged(problem, plan)
    talk = _Judge(same, plan, simulate(same, plan), budget, solves or Solves(tolerance, callback))
    if runnable is not None:
        talk.ask(runnable[0], with_own_margin(own_job(runnable[1], plan), plan), LAUNCHER)
    talk.ask(WHOLE, same, SPACE)
    report = _told(talk, changes, tokens or TOKENS, price_per_gpu_hour)
    return replace(report, wall_time_s=time.monotonic() - started)


def _told(talk: _Judge, changes: bool, tokens: float, price: float | None) -> GapReport:
    """Make the record of the answers, with the changes."""
    spaces = _consistent(talk)
    # The space of its launcher, if that is known: changes that the launcher cannot make do not count.
    single, chain = talk.changes(spaces[0]) if changes else ((), ())
    with undisturbed():
        return _record(talk, spaces, single, chain, changes, tokens, price)


def _record(
    talk: _Judge,
    spaces: tuple[SpaceGap, ...],
    changes_made: tuple[Change, ...],
    chain: tuple[Change, ...],
    changes: bool,
    tokens: float,
    price: float | None,
) -> GapReport:
    return GapReport(
        problem=talk.problem,
        plan=talk.plan,
        report=talk.report,
        spaces=spaces,
        changes=changes_made,
        chain=chain,
        near=_near(spaces[-1]) if changes else (),
        spending=spending(talk.problem.job, talk.report, talk.plan, spaces[-1].saved, tokens, price),
        unanswered=tuple(talk.unanswered),
        interrupted=talk.interrupted,
        wall_time_s=0.0,
    )


def _check(time_limit_s: float | None, tokens: float | None, price_per_gpu_hour: float | None) -> None:
    numbers = {"time_limit_s": time_limit_s, "tokens": tokens, "price_per_gpu_hour": price_per_gpu_hour}
    for name, value in numbers.items():
        if value is not None and not 0 < value < math.inf:
            raise InvalidInputError(f"{name}={value}.", "Expected a positive number.", f"Correct {name}.")


@dataclass(slots=True)
class _Judge:
    """Questions about a plan, and the answers so far."""

    problem: Problem
    plan: Plan
    report: StepReport
    budget: Budget
    solves: Solves
    spaces: list[SpaceGap] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    interrupted: bool = False

    def ask(self, name: str, problem: Problem, weight: float) -> None:
        """Solve for the proved best of a space."""
        limit_s = self.budget.share_s(weight)
        start = self.plan
        previous = self.spaces[-1] if self.spaces else None
        if (
            previous is not None
            and previous.best is not None
            and previous.best_s is not None
            and previous.best_s < self.step_s
        ):
            start = previous.best
        splits = even_splits(problem, self.plan.layout) if problem.space.kind == "free" else None
        sizes = tuple(stage.num_layers for stage in self.plan.virtual_stages)
        uneven = splits is not None and sizes not in splits
        result = self.solves.best(problem, start, uneven, 0.01 if self.interrupted else limit_s)
        self.interrupted = self.interrupted or bool(result.message)
        self.spaces.append(self._space_gap(name, problem, result, uneven))

    def _space_gap(self, name: str, problem: Problem, result: PlanResult, uneven: bool) -> SpaceGap:
        """Compare the plan with the result of a solve; inside the space the plan itself is a known plan."""
        bound_s, best_s, best = result.lower_bound_s, result.step_time_s, result.plan
        if uneven and result.any_chunks_bound is not None:
            # The plan has uneven chunks: the bound over chunks of any size applies, and the space that has them.
            tokens = self.plan.layout.global_batch_size * problem.job.sequence_length
            bound_s = result.any_chunks_bound * tokens
            problem = with_space(problem, interleaved_layers="any")
        outside = not belongs(problem, self.plan)
        if not outside and self.step_s < (math.inf if best_s is None else best_s):
            best_s, best = self.step_s, self.plan
        if not outside and bound_s is not None and bound_s > self.step_s * (1.0 + ROUNDING):
            raise SolverError(
                f"The bound of {name} is {bound_s!r} s, and the simulated plan takes {self.step_s!r} s.",
                "A bound may not be above a plan of its space.",
                "This is a bug: please report the plan file.",
            )
        unknown = Interval(-math.inf, math.inf)
        return SpaceGap(name, problem, result, bound_s, best_s, best, unknown, outside, proved=False)

    @property
    def step_s(self) -> float:
        """Step time of the plan; infinite where it does not fit."""
        return self.report.step_time_s if self.report.fits else math.inf

    def changes(self, within: SpaceGap) -> tuple[tuple[Change, ...], tuple[Change, ...]]:
        """Find the best single changes inside a space, fastest first, and the greedy chain."""
        best_s = math.inf if within.best_s is None else within.best_s
        problem, first = within.problem, Priced.of(within.problem, self.plan)
        if self.interrupted:
            self.unanswered.append("single changes")
            return (), ()
        try:
            balanced = self._balanced(problem, first)
            self.budget.weight_left = CHANGES
            changes = best_changes(problem, first, _half(self.budget))
            others = [priced.plan for _, priced in changes.values()]
            start = changes["stages"][1] if "stages" in changes else first
            if balanced is not None and balanced.order < start.order and balanced.plan not in others:
                changes["stages"] = ("the best stages and recomputation", balanced)
            chain = greedy_chain(problem, first, changes, best_s, self.budget)
        except KeyboardInterrupt:
            self.interrupted = True
            self.unanswered.append("single changes")
            return (), ()
        if self.budget.is_spent:
            self.unanswered.append("some single changes, or the end of their chain")
        best_s = min([best_s, *(change.step_time_s for change in chain if change.closed is not None)])
        way = (first.step_time_s, best_s)
        singles = [
            change_of(lead, words, self.plan, first, after, way)
            for lead, (words, after) in sorted(changes.items(), key=lambda item: item[1][1].order)
        ]
        return tuple(singles[:SHOWN_CHANGES]), tuple(chain)

    def _balanced(self, problem: Problem, first: Priced) -> Priced | None:
        """Find the best stages and recomputation of the plan's own layout, as far as the time allows."""
        problem = loosened(problem, self.plan, ())
        if problem.space.kind != "free":
            return None
        limit_s = self.budget.share_s(STAGES)
        options = SolveOptions(
            gap=self.solves.gap, time_limit_s=limit_s, warm_start=self.plan, any_chunks=False, simplest=False
        )
        result = solve(problem, options)
        if result.message:
            raise KeyboardInterrupt
        return None if result.plan is None or result.plan == first.plan else Priced.of(problem, result.plan)


def _half(budget: Budget) -> Budget:
    """Return a budget of half the remaining time."""
    if budget.until is None:
        return budget
    now = time.monotonic()
    return Budget(now + max(0.0, budget.until - now) * 0.5)


def belongs(problem: Problem, plan: Plan) -> bool:
    """Test whether a plan is in the declared space: its values, the rules, and its stages. Memory does not
    count."""
    layout, space = plan.layout, problem.space
    lists = {name: getattr(space, name) for name in Space.model_fields if name in Layout.model_fields}
    offered = all(values is None or getattr(layout, name) in values for name, values in lists.items())
    return offered and in_space(problem, plan) and len(layout_space(loosened(problem, plan, ()))) > 0


def _consistent(talk: _Judge) -> tuple[SpaceGap, ...]:
    """Make the gaps of the narrower and the whole space consistent.

    A bound of the whole space holds for the narrower one, and a plan of the narrower space is a plan of the whole
    one. Shares are computed afterwards.
    """
    spaces = list(talk.spaces)
    narrow, whole = spaces[0], spaces[-1]
    if whole.bound_s is not None:
        narrow = replace(narrow, bound_s=max(narrow.bound_s or 0.0, whole.bound_s))
    if narrow.best_s is not None and (whole.best_s is None or narrow.best_s < whole.best_s):
        whole = replace(whole, best_s=narrow.best_s, best=narrow.best)
    step_s = talk.report.step_time_s
    ends = [narrow, whole] if len(spaces) > 1 else [whole]
    return tuple(
        replace(
            space,
            saved=_saved(step_s, space.best_s, space.bound_s),
            proved=_proved(space, talk.solves.gap),
        )
        for space in ends
    )


def _proved(space: SpaceGap, tolerance: float) -> bool:
    """Test whether bound and best known plan meet within the tolerance, or nothing fits."""
    if space.bound_s is None or space.best_s is None:
        return space.result.status == "infeasible"
    return space.best_s - space.bound_s <= tolerance * (1.0 + ROUNDING) * space.best_s


def _saved(step_s: float, best_s: float | None, bound_s: float | None) -> Interval:
    """Compute the shares of the step that the best known plan saves, and that any plan saves at most."""
    low = -math.inf if best_s is None else 1.0 - best_s / step_s
    high = math.inf if bound_s is None else 1.0 - bound_s / step_s
    return Interval(low, max(low, high))


def _near(space: SpaceGap) -> tuple[NearPlan, ...]:
    """List the plans that a search kept, simulated, fastest first."""
    kept = [plan for plan in (space.result.plan, *space.result.runners_up) if plan is not None]
    reports = [(plan, simulate(space.result.problem, plan)) for plan in kept]
    plans = [NearPlan(plan, report.step_time_s, report.peak_memory_bytes) for plan, report in reports]
    return tuple(sorted(plans, key=lambda near: near.step_time_s))


def spending(
    job: Job, report: StepReport, plan: Plan, saved: Interval, tokens: float, price: float | None
) -> Spending:
    """Compute the cost of a run with the plan, and the possible saving."""
    hours = run_gpu_hours(job, plan, report, tokens)
    # Nobody saves the wait for rollouts on other accelerators.
    most = max(0.0, 1.0 - job.paced_s(0.0) / report.step_time_s)
    less = Interval(min(saved.low, most) * hours, min(saved.high, most) * hours)
    money = None if price is None else hours * price
    saved_money = None if price is None else Interval(less.low * price, less.high * price)
    return Spending(tokens, hours, less, price, money, saved_money)
