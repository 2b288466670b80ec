"""``solve``: find the best plan of a problem and prove its bound.

A space may have billions of layouts, and bounding them may take minutes. So ``first_plan`` comes first: it looks
for any plan in small parts of the space, before the whole space is listed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Final

import numpy as np
from pydantic import ValidationError

from milpplan.errors import InvalidInputError
from milpplan.optimize.context import (
    Deadline,
    SolveContext,
    objective_weights,
    printed_unit,
    progress_unit,
    undisturbed,
)
from milpplan.optimize.fewest import FewestSearch
from milpplan.optimize.layout import LayoutContext, fitted_plan
from milpplan.optimize.milp.backends import backend as backend_named
from milpplan.optimize.milp.backends import witnesses
from milpplan.optimize.records import (
    DEFAULT_GAP,
    PlanResult,
    Progress,
    SolveOptions,
    TargetPrice,
    searched_result,
    unsearched_result,
    untested_terms,
)
from milpplan.optimize.search.best_first import Search
from milpplan.optimize.search.closed_layouts import PruneRecord
from milpplan.optimize.search.simplest import searched_gap, simplest
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.optimize.space.layout_space import check_forbidden
from milpplan.optimize.space.plan_space import in_space
from milpplan.optimize.space.rules import asked_switches, switch_values
from milpplan.problem import ANY_SPLIT_LAYERS, NO_MODULES, RANK_ORDERS, Layout, Plan, Problem, Space
from milpplan.problem.problem import NOT_LISTS
from milpplan.problem.reading import plain_reason
from milpplan.simulation import (
    LayoutColumns,
    StepReport,
    capacities_bytes,
    costs_of,
    simulate,
    usable_memory_bytes,
)
from milpplan.simulation.layout_columns import DEFAULTS, OFFLOADS
from milpplan.simulation.pipeline.step_graph import CriticalPath
from milpplan.simulation.scenario_costs import Scenarios

LOGGER = logging.getLogger("milpplan.search")
KnownPaths = Mapping[tuple[object, ...], Sequence[CriticalPath]]
START_GAP = 1e-3
"""Relative gap of the even plan from which the search over uneven interleaved splits starts."""
NO_MEMORY = "Memory ran out: the best plan so far. Free some, or fix or forbid some choices."
MARGIN_PRICE_GAP = 5e-3
"""Minimum relative gap of the solve that prices the margin of memory: a comment may not cost more than the
answer."""
START_SHARE = 0.25
"""Share of the time left in which a good plan with plain switches is searched for."""
MOVED_PLANS = 6
"""Number of even plans, best first, whose layers a local search moves."""


def solve(problem: Problem, options: SolveOptions | None = None, **changes: Any) -> PlanResult:
    """Find the plan with the minimum objective, and prove a lower bound on it.

    Args:
        problem: model, hardware, job and space.
        options: how to solve; ``changes`` replace single fields, e.g. ``time_limit_s=60``.

    Returns:
        The simplest plan found within the tolerance, or with ``simplest=False`` the best, with a proved bound.
        ``status`` is ``optimal`` only where bound and simulated time are within ``options.gap``; a time limit or
        Ctrl-C gives ``feasible`` with the gap reached.

    Raises:
        InvalidInputError: options that make no sense.
        SolverError: two solvers contradict each other, or an answer fails its exact re-check.
    """
    chosen = replace(options or SolveOptions(), **changes)
    check_options(chosen)
    if LOGGER.isEnabledFor(logging.DEBUG):
        chosen = replace(chosen, callback=_logged(chosen.callback))
    if problem.job.objective == "num_gpus":
        return fewest(problem, chosen, problem.job.num_gpus_values)
    if problem.space.kind == "free" and problem.interleaved_layers == "any":
        # With few layers a first search over even splits saves no time.
        start = solve_from if problem.model.num_layers <= ANY_SPLIT_LAYERS else _from_even
        return start(problem, chosen)
    result = solve_from(problem, chosen)
    return _with_any_chunks(result, chosen) if chosen.any_chunks else result


def fewest(problem: Problem, options: SolveOptions, counts: Iterable[int]) -> PlanResult:
    """Find the smallest number of accelerators that has a plan, and the best plan on it.

    Args:
        problem: the problem.
        options: how to solve it.
        counts: numbers of accelerators to try, in ascending order.

    Returns:
        The result on that number. Its ``details`` hold ``refused``, the numbers proved to have no plan, and
        ``open_counts``, the smaller numbers that are neither proved nor refuted.
    """
    return FewestSearch(problem, options, solve_from).run(counts)


def target_price(
    result: PlanResult, whole: Problem, options: SolveOptions, limit_s: float | None
) -> TargetPrice | None:
    """Return the cost of a restriction as the interval that both proofs leave; None without a plan or a bound.

    Args:
        result: result in the restricted space.
        whole: the problem without the restriction.
        options: options of its solve, which starts from the restricted plan.
        limit_s: time limit of its solve; an open gap widens the interval.
    """
    if result.plan is None or result.objective is None or result.objective_bound is None:
        return None
    asked = replace(options, time_limit_s=limit_s, warm_start=result.plan, any_chunks=False, simplest=False)
    # The launcher's program keeps bytes of its own, which are no part of the price.
    whole = whole.model_copy(update={"hardware": result.problem.hardware})
    if whole.space.kind == "free" and without_margin(result.problem) == whole:
        # The layouts and their step graphs are those of the result: its plan and its critical paths are a start.
        starts = _moved(whole, [result.plan], Deadline.after(limit_s).until, refits=True)
        best = solve_from(whole, asked, starts, None if result.layouts is None else result.layouts.known_paths)
    else:
        best = solve(whole, asked)
    if best.plan is None or best.objective is None or best.objective_bound is None:
        return None
    # The restricted plan is in the whole space, even where the search stopped before it evaluated the plan.
    value, plan = min((best.objective, best.plan), (result.objective, result.plan), key=lambda entry: entry[0])
    whole_space = whole.space, plan, value, best.objective_bound
    return TargetPrice.between(
        result.objective, result.objective_bound, whole_space, options.gap, best.wall_time_s
    )


def without_margin(problem: Problem) -> Problem | None:
    """Return a problem whose plans need leave no memory, to price the margin; None where nothing would change, or
    where the objective is the number of accelerators."""
    whole = problem.model_copy(update={"space": problem.space.model_copy(update={"memory_margin_fraction": 0.0})})
    same = capacities_bytes(whole) == capacities_bytes(problem)
    return None if same or problem.job.objective == "num_gpus" else whole


def _logged(callback: Callable[[Progress], None] | None) -> Callable[[Progress], None]:
    """Return a callback that writes each progress to the log and then calls ``callback``."""

    def report(progress: Progress) -> None:
        LOGGER.debug("%s", progress)
        if callback is not None:
            callback(progress)

    return report


def fixed(problem: Problem, values: Mapping[str, object]) -> Problem:
    """Fix fields of the layout, or the recompute mode of all layers, e.g. ``{"tp": 8, "recompute": "full"}``.

    Values that leave only ZeRO 2 or 3 with a pipeline open that combination (``Space.zero_pipeline``).

    Returns:
        The problem with the narrower space.

    Raises:
        InvalidInputError: a name or value that no layout has.
    """
    names = set(Space.model_fields) - NOT_LISTS
    for name in values:
        if name not in names:
            raise InvalidInputError(
                f"Cannot fix {name!r}.", f"Expected one of {', '.join(sorted(names))}.", "Check the spelling."
            )
    changed = problem.space.model_dump() | {name: (value,) for name, value in _with_mixing(values).items()}
    try:
        space = Space.model_validate(changed)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InvalidInputError(
            f"Cannot fix {first['loc'][0]} to {first['input']!r}: {plain_reason(first)}.",
            "",
            "See `milpplan schema`.",
        ) from error
    if space.pp is not None and min(space.pp) > 1 and min(space.zero_stage) > 1:
        space = space.model_copy(update={"zero_pipeline": True})
    changed_problem = problem.model_copy(update={"space": space})
    try:
        changed_problem.check_node_types()
    except ValueError as error:
        raise InvalidInputError(
            f"Cannot fix the node types: {error}.",
            "Expected an order of the cluster's node types (0 is the first one named), or a share of each.",
            "Leave it out, or correct it.",
        ) from error
    return changed_problem


def _with_mixing(values: Mapping[str, object]) -> Mapping[str, object]:
    """Add the ``mixing`` that fixed shares of the replicas imply.

    Node types differ between replicas if the shares are given, and between the stages of equal replicas if the
    shares are empty.

    Raises:
        InvalidInputError: ``mixing`` is fixed to the other value.
    """
    if "replica_micro_batches" not in values:
        return values
    shares = values["replica_micro_batches"]
    mixing = "replicas" if shares else "stages"
    if values.get("mixing", mixing) != mixing:
        raise InvalidInputError(
            f"Cannot fix mixing to {values['mixing']!r} and replica_micro_batches to {shares!r}.",
            "Expected shares of the two node types where the replicas differ, and none where they are alike.",
            "Leave one of the two out, or correct it.",
        )
    rest = {name: value for name, value in values.items() if shares or name != "replica_micro_batches"}
    return rest | {"mixing": mixing}


def check_options(options: SolveOptions) -> None:
    """Raise ``InvalidInputError`` where an option makes no sense."""
    if not 0 <= options.gap < 1:
        raise InvalidInputError(
            f"gap={options.gap}.", "Expected 0 <= gap < 1.", f"The default is {DEFAULT_GAP:g}."
        )
    if options.time_limit_s is not None and not options.time_limit_s > 0:
        raise InvalidInputError(
            f"time_limit_s={options.time_limit_s}.", "Expected a positive number of seconds.", ""
        )
    if options.workers is not None and options.workers < 1:
        raise InvalidInputError(
            f"workers={options.workers}.", "Expected at least 1, which is this process.", "Leave it out."
        )
    check_forbidden(options.forbid)


def solve_from(
    problem: Problem,
    options: SolveOptions,
    initial_plans: Sequence[Plan] = (),
    known_paths: KnownPaths | None = None,
) -> PlanResult:
    """Run one search that starts from the caller's plan, ``initial_plans``, or else a quick first plan, and from
    critical paths that are known (``SolveContext.known_paths``)."""
    started = time.monotonic()
    deadline = None if options.time_limit_s is None else started + options.time_limit_s
    chooses = options.simplest and options.gap > 0
    searched = replace(options, gap=searched_gap(options.gap)) if chooses else options
    context = SolveContext(
        searched, backend_named(options.backend), witnesses(options), deadline, tolerance=options.gap
    )
    context.known_paths.update({key: list(paths) for key, paths in (known_paths or {}).items()})
    starts = [*([] if options.warm_start is None else [options.warm_start]), *initial_plans]
    search, chosen, message = None, None, ""
    try:
        first = None if initial_plans else first_plan(problem, context)
        starts += [] if first is None else [first]
        if first is not None:
            _tell_incumbent(problem, context, [first], started)
        if not initial_plans and problem.space.kind == "free":
            starts += uniform_plans(problem, context, starts)
            _tell_incumbent(problem, context, _generated(starts, options), started)
            if with_plain_switches(problem) is not None:
                starts += plain_plans(problem, context, starts)
                _tell_incumbent(problem, context, _generated(starts, options), started)
        space = layout_space(problem, options.forbid, stop=context.out_of_time)
        search = Search(problem, space, context, started, tuple(starts))
        if problem.space.kind == "uniform" or search.explored.closed.are_few:
            search.bound()
            decide_layouts(search)
        else:
            bound_and_decide(search)
        if chooses:
            chosen = simplest(search, options.gap, untested_terms(problem))
    except KeyboardInterrupt:
        message = "" if deadline is not None and time.monotonic() >= deadline else "Interrupted."
    except MemoryError:
        if not starts and (search is None or search.best is None):
            raise
        message = NO_MEMORY
    with undisturbed() as signals:
        if search is None:
            best = _best_start(problem, _generated(starts, options))
            result = unsearched_result(problem, context, best, started)
        else:
            if message:
                # The last line of the log must agree with the result.
                search.note(force=True, tell=False)
            result = searched_result(problem, options, search, started, chosen)
    return replace(result, message=message or ("Interrupted." if signals else ""))


def uniform_plans(
    problem: Problem, context: SolveContext, starts: Sequence[Plan], scenarios: Scenarios | None = None
) -> list[Plan]:
    """Return the best plan of the uniform space, and the plan that moving its layers leads to, where the problem's
    space contains them.

    The uniform space is decided in a fraction of the time of the free space, and its best plan is often within a
    per cent of the best plan of all.

    Args:
        problem: a problem with a free space.
        context: context of the solve; the work is counted there.
        starts: plans known so far.
        scenarios: scenarios whose scaled steps are compared, if any.
    """
    plain = with_plain_switches(problem) or problem
    uniform = plain.model_copy(update={"space": plain.space.model_copy(update={"kind": "uniform"})})
    search = _quiet_search(uniform, context, starts, scenarios)
    search.bound()
    decide_layouts(search)
    if search.best is None:
        return []
    plan = search.best[1]
    plans = [plan, *_moved(problem, [plan], context.deadline)]
    return [plan for plan in plans if in_space(problem, plan)]


def with_plain_switches(problem: Problem) -> Problem | None:
    """Return the problem with the switches beside the degrees, and the order of ranks, at their defaults where the
    space has those; None where none of them is open.

    They multiply the space, and hardly change which degrees are best, unless they recompute.
    """
    names = [name for name in asked_switches(problem) if name != "recompute_vision"]
    values = {name: switch_values(problem, name) for name in names} | {"rank_order": problem.space.rank_order}
    plain = {name: (DEFAULTS[name],) for name, own in values.items() if DEFAULTS[name] in own and len(own) > 1}
    return problem.model_copy(update={"space": problem.space.model_copy(update=plain)}) if plain else None


def plain_plans(problem: Problem, context: SolveContext, starts: Sequence[Plan]) -> list[Plan]:
    """Return the best plan with plain switches, then the best with any switches at its degrees, where they are
    found in a quarter of the time left.

    Args:
        problem: a problem with a free space and open switches.
        context: context of the solve; the work is counted there.
        starts: plans known so far.
    """
    plain, plans = with_plain_switches(problem), list[Plan]()
    left = Deadline(context.deadline).left_s()
    until = None if left is None else time.monotonic() + START_SHARE * left
    coarse = replace(context, options=replace(context.options, gap=max(context.options.gap, START_GAP)))
    while plain is not None and not Deadline(until).passed:
        space = plain.space.model_copy(update={"interleaved_layers": "even"})
        even = plain.model_copy(update={"space": space})
        search = _quiet_search(even, coarse, [*starts, *plans], until=until)
        search.bound()
        decide_layouts(search)
        best, plain = search.best, None
        if best is not None:
            plain = None if plans else _at_degrees(problem, best[1].layout)
            plans.append(best[1])
    return [plan for plan in plans if in_space(problem, plan)]


def _at_degrees(problem: Problem, layout: Layout) -> Problem:
    """Return the problem at the degrees, micro-batch and pipeline schedule of a layout."""
    names = ("tp", "cp", "ep", "etp", "pp", "dp", "micro_batch_size", "vpp", "schedule")
    space = problem.space.model_copy(update={name: (getattr(layout, name),) for name in names})
    sizes = {"num_gpus": layout.num_gpus, "global_batch_size": layout.global_batch_size}
    return problem.model_copy(update={"space": space, "job": problem.job.model_copy(update=sizes)})


def _quiet_search(
    problem: Problem,
    context: SolveContext,
    starts: Sequence[Plan],
    scenarios: Scenarios | None = None,
    until: float | None = None,
) -> Search:
    """Return a search of a part of a problem's space, which tells nobody of its progress and ends at ``until``, a
    moment of ``time.monotonic``."""
    options = replace(context.options, callback=None, on_program=None)
    deadline = context.deadline if until is None else until
    space = layout_space(problem, context.options.forbid, stop=context.out_of_time)
    quiet = replace(context, options=options, deadline=deadline, known_paths={})
    return Search(problem, space, quiet, time.monotonic(), tuple(starts), scenarios=scenarios)


def _with_any_chunks(result: PlanResult, options: SolveOptions) -> PlanResult:
    """Add a bound over interleaved chunks of any size, where the problem's space has even chunks only."""
    problem, layouts, plan = result.problem, result.layouts, result.plan
    declared = problem.space.kind == "free" and problem.interleaved_layers == "even"
    if not declared or layouts is None or plan is None or result.message:
        return result
    started = time.monotonic()
    limit = options.time_limit_s
    deadline = Deadline.after(None if limit is None else limit - result.wall_time_s)
    if deadline.passed:
        return result
    plan = plan if result.fastest is None else result.fastest.plan
    try:
        if not layouts.space.is_interleaved:
            return replace(result, any_chunks_bound=result.objective_bound)
        bound = _bound_of_any_chunks(problem, layouts, plan, options, deadline.until)
    except (KeyboardInterrupt, MemoryError):
        return result
    scale, _ = printed_unit(problem)
    spent = time.monotonic() - started
    return replace(result, any_chunks_bound=bound * scale, wall_time_s=result.wall_time_s + spent)


def _bound_of_any_chunks(
    problem: Problem, even: PruneRecord, best: Plan, options: SolveOptions, deadline: float | None
) -> float:
    """Return a proved lower bound of the objective over interleaved chunks of any size, in the unit of
    ``even.bounds``.

    The search for uneven chunks (``--space any``) takes minutes; closed-form bounds of all layouts are quick. They
    prove the largest possible gain, so an answer over even chunks always says how much its space may miss.

    Args:
        problem: the problem with even chunks.
        even: bounds proved over even chunks. Layouts without interleaving keep them; the others get closed-form
            bounds.
        best: best plan found with even chunks.
        options: options of the solve.
        deadline: of ``time.monotonic``. After it the remaining layouts are bounded by their compute time only.
    """
    space = problem.space.model_copy(update={"interleaved_layers": "any"})
    # No callback: the solve has its result, and this is no progress of it.
    context = SolveContext(replace(options, callback=None), backend_named(options.backend), [], deadline)
    search = Search(problem.model_copy(update={"space": space}), even.space, context, time.monotonic(), (best,))
    # Bounds by compute do not depend on chunks, so they stay valid.
    search.explored.closed = even.closed.closed_again()
    search.bound()
    return min(search.prune_record().least(interleaved=True), even.least(interleaved=False), search.best_value)


def _from_even(problem: Problem, options: SolveOptions) -> PlanResult:
    """Search splits of any kind, starting from a good even split.

    A good even plan is found much sooner. Its search gets at most half of the time limit, and its bound may be
    loose because it says nothing about the other splits.
    """
    even = problem.model_copy(update={"space": problem.space.model_copy(update={"interleaved_layers": "even"})})
    limit = options.time_limit_s
    half = None if limit is None else 0.5 * limit
    first = solve_from(even, replace(options, time_limit_s=half, gap=max(options.gap, START_GAP), simplest=False))
    started = time.monotonic()
    starts: list[Plan] = []
    try:
        if not first.message:
            starts = _locally_improved(problem, first, None if limit is None else started + 0.1 * limit)
    except KeyboardInterrupt:
        first = replace(first, message="Interrupted.")
    starts = starts or [plan for plan in (first.plan,) if plan is not None]
    spent = first.wall_time_s + time.monotonic() - started
    left = None if limit is None else max(0.01, limit - spent)
    # The record of ten million even layouts takes as much memory as the next search.
    first = replace(first, layouts=None)
    result = solve_from(problem, replace(options, time_limit_s=0.01 if first.message else left), starts)
    return replace(result, wall_time_s=spent + result.wall_time_s, message=first.message or result.message)


def _locally_improved(problem: Problem, first: PlanResult, deadline: float | None) -> list[Plan]:
    """Return the best even plan, then each good interleaved plan after a local search moved its layers."""
    best = [plan for plan in (first.plan, *first.runners_up) if plan is not None]
    return [*best[:1], *_moved(problem, [plan for plan in best[:MOVED_PLANS] if plan.layout.vpp > 1], deadline)]


def _moved(problem: Problem, plans: Sequence[Plan], deadline: float | None, refits: bool = False) -> list[Plan]:
    """Return the plans that local searches from some plans, which move their layers, lead to; ``refits``: from
    plans that recompute as little as fits."""
    from milpplan.optimize.layout.layer_branching import local_search_if_promising

    moved = []
    for plan in plans:
        if not plan.layout.replica_micro_batches:
            costs = costs_of(problem, plan.layout)
            context = LayoutContext.of(problem, plan.layout, costs, usable_memory_bytes(problem))
            layers = np.array([stage.num_layers for stage in plan.virtual_stages])
            start = fitted_plan(context, layers) if refits else None
            moved.append(local_search_if_promising(context, start or plan, np.inf, deadline))
    return moved


def _generated(starts: Sequence[Plan], options: SolveOptions) -> list[Plan]:
    """Return the start plans without the caller's, which may lie outside the space."""
    return [plan for plan in starts if plan is not options.warm_start]


def _best_start(problem: Problem, starts: Sequence[Plan]) -> tuple[float, Plan, StepReport] | None:
    """Return objective, plan and simulated step of the best start plan that is feasible; None without one."""
    best: tuple[float, Plan, StepReport] | None = None
    for plan in starts:
        report = simulate(problem, plan)
        weight, limit_ns = (
            float(values[0]) for values in objective_weights(problem, LayoutColumns.of([plan.layout]))
        )
        value = report.step_time_ns * weight
        if report.fits_with_margin and report.step_time_ns <= limit_ns and (best is None or value < best[0]):
            best = value, plan, report
    return best


def _tell_incumbent(problem: Problem, context: SolveContext, starts: Sequence[Plan], started: float) -> None:
    """Call the callback with the best start plan; the space has no bound yet, and its layouts are not counted."""
    callback = context.options.callback
    best = None if callback is None else _best_start(problem, starts)
    if callback is not None and best is not None:
        callback(Progress(time.monotonic() - started, best[0] * progress_unit(problem), None, None))


def decide_layouts(search: Search) -> None:
    """Decide the layouts that their bounds leave open, until the time limit or until no further plan is wanted.

    The uniform space is decided by simulating its plans in the order of their bounds; every other space by
    relaxations, then branching on the layouts that remain.

    Args:
        search: the search, after ``Search.bound``; its incumbent, bounds and log are the result.
    """
    if search.problem.space.kind == "uniform":
        search.simulate_uniform_plans(search.explored.uniform_ns.size)
    else:
        # The modules of the second phase take half of all import time.
        from milpplan.optimize.search.branch_phase import BranchPhase

        with closing(BranchPhase.of(search)) as phase:
            phase.relax()
            if not search.first_only:
                phase.run()
    search.note(force=True)


def bound_and_decide(search: Search) -> None:
    """Bound all layouts of a large space and decide those that their bounds leave open.

    Layouts that are below all that is yet to be bounded are relaxed on the way: otherwise they alone would hold
    the bound down until all others are bounded.
    """
    from milpplan.optimize.search.branch_phase import BranchPhase

    with closing(BranchPhase.of(search)) as phase:
        search.bound(phase.relax)
        phase.relax()
        phase.run()
    search.note(force=True)


PLAIN: Final[dict[str, tuple[Any, ...]]] = {
    "cp": (1,),
    "etp": (1,),
    "vpp": (1,),
    "micro_batch_size": (1,),
    "schedule": ("1f1b", "gpipe", "zb-h1"),
    **dict.fromkeys(OFFLOADS, (False,)),
    "offload_modules": (NO_MODULES,),
    "dp_replicate": (1,),
}
"""Values tried first for fields of the space; other fields keep all their values. Offloading is turned on last."""
MEMORY_FIELDS: Final = ("cp", "etp", "micro_batch_size")
"""Fields opened next, to save memory: more ranks share an activation, or experts."""
CHUNK_FIELDS: Final = ("vpp", "schedule")
"""Fields opened after those: chunks put the ends of the model where there is memory."""


def first_plan(problem: Problem, context: SolveContext) -> Plan | None:
    """Find a plan of the problem's space that fits, quickly.

    Args:
        problem: the problem.
        context: context of the solve; the work is counted there.

    Returns:
        The plan; None where no part of the space has one, or none was found in time.
    """
    quiet = replace(context, options=replace(context.options, callback=None, on_program=None), known_paths={})
    for part in _parts(problem):
        if context.out_of_time():
            return None
        space = layout_space(part, context.options.forbid, stop=context.out_of_time)
        if not len(space):
            continue
        search = Search(part, space, quiet, time.monotonic(), first_only=True)
        search.bound()
        decide_layouts(search)
        if search.best is not None:
            return search.best[1]
    return None


def _parts(problem: Problem) -> Iterator[Problem]:
    """Yield parts of the problem's space, each with one number of GPUs and one batch; largest numbers first,
    because most plans fit on them."""
    job = problem.job
    sizes = dict.fromkeys((job.num_gpus_values[-1], job.num_gpus_values[len(job.num_gpus_values) // 2]))
    first_values = PLAIN | {"micro_batch_size": (job.sequences_together,)}
    plain = _narrowed(problem, first_values)
    memory_saving, chunked = (
        _narrowed(problem, {name: values for name, values in first_values.items() if name not in opened})
        for opened in (MEMORY_FIELDS, CHUNK_FIELDS)
    )
    offloaded = _narrowed(problem, {**first_values, **dict.fromkeys(OFFLOADS, (True,))})
    for part in dict.fromkeys((plain, memory_saving, chunked, offloaded)):
        for gpus in sizes:
            # The batch that has the largest power of two in common with the number of GPUs.
            _, batch = max((min(value & -value, gpus & -gpus), value) for value in job.global_batch_values)
            fixed = job.model_copy(update={"num_gpus": gpus, "global_batch_size": batch})
            yield part.model_copy(update={"job": fixed})


def _narrowed(problem: Problem, wanted: dict[str, tuple[Any, ...]]) -> Problem:
    """Return the problem with only the wanted values of fields, where the space has some of them."""
    space, changed = problem.space, dict[str, Any]()
    for name, values in wanted.items():
        declared = getattr(space, name)
        kept = values if declared is None else tuple(value for value in values if value in declared)
        # One schedule is enough; where the space has interleaved schedules only, its chunks stay.
        changed[name] = (kept[:1] if name == "schedule" else kept) or declared
    if not set(PLAIN["schedule"]) & set(space.schedule):
        changed["vpp"] = space.vpp
    # The first order: rules keep it among orders that place ranks alike.
    changed["rank_order"] = (min(space.rank_order, key=RANK_ORDERS.index),)
    return problem.model_copy(update={"space": space.model_copy(update=changed)})
