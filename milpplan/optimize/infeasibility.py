"""Explanation of infeasible problems: the reason why there is no plan, and changes that would allow one.

Every statement is proved. A number of GPUs is called too small only where the memory bound over all its layouts
excludes it. An alternative is named only where it has a legal layout that the bound admits. "A plan exists" means
that one was found and simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from milpplan.errors import InfeasibleError
from milpplan.optimize import nearby_problems
from milpplan.optimize.nearby_problems import Effort, Forbidden, LeastMemory
from milpplan.optimize.result import PlanResult
from milpplan.optimize.space.enumerate_layouts import SHARDING_RULES, layout_space
from milpplan.optimize.space.layout_space import LayoutSpace
from milpplan.optimize.space.node_type_rules import REPLICA_SHARDING_RULES
from milpplan.problem.plan import Layout
from milpplan.problem.problem import Job, Problem, Range, Space
from milpplan.simulation.layout_costs import usable_memory_bytes
from milpplan.units import counted, gib_text, seconds_text

SECONDS_PER_HOUR = 3600.0
_SHOWN_RULES = 5


def explain(problem: Problem, forbidden: Forbidden = (), effort: Effort | None = None) -> InfeasibleError:
    """Explain why a problem that ``solve`` has proved infeasible has no plan.

    Args:
        problem: the infeasible problem.
        forbidden: the partial layouts that were forbidden.
        effort: budget of the search for remedies; when it is spent, the findings so far are reported.

    Returns:
        The error that names the reason and the remedies.
    """
    effort = effort or Effort()
    space = effort.list(problem, forbidden)
    bounds = nearby_problems.floor(problem, space)
    if bounds is None:
        return _no_layout(problem, space, forbidden, effort)
    if bounds.memory_bytes <= usable_memory_bytes(problem) and problem.job.deadline_s is not None:
        result = _without_deadline(problem, forbidden, effort)
        if result is not None and result.plan is not None and result.step_time_s is not None:
            per_sequence = result.step_time_s / result.plan.layout.global_batch_size
            return _too_slow(problem, bounds, forbidden, per_sequence, result.plan.layout, effort)
    return _too_large(problem, space, bounds, forbidden, effort)


def _without_deadline(problem: Problem, forbidden: Forbidden, effort: Effort) -> PlanResult | None:
    """Find a fast plan of the problem without its deadline: the best with equal stages, or any plan."""
    timeless = nearby_problems.with_job(
        problem, deadline_s=None, training_tokens=None, objective="step_time_per_token"
    )
    result = effort.quick_plan(timeless, forbidden, gap=1e-3)
    if result is None and problem.space.kind != "uniform":
        result = effort.quick_plan(timeless, forbidden, kind=problem.space.kind)
    return result


def _until_spent(effort: Effort, options: Iterable[tuple[str, Problem]]) -> Iterator[tuple[str, Problem]]:
    """Yield options while there is effort left."""
    for option in options:
        if effort.spent():
            return
        yield option


def _first(effort: Effort, options: Iterable[tuple[str, Problem]], works: Callable[[Problem], bool]) -> list[str]:
    """Return the words of the first option that works, if there is one."""
    return next(([words] for words, option in _until_spent(effort, options) if works(option)), [])


def _counted(gpus: int | Range) -> str:
    return f"{gpus:,}" if isinstance(gpus, int) else f"{gpus.minimum:,} to {gpus.maximum:,}"


def _layout_text(layout: Layout) -> str:
    names = [name for name in ("tp", "cp", "ep", "etp", "pp", "dp", "vpp") if getattr(layout, name) > 1]
    degrees = [f"{name}={getattr(layout, name)}" for name in names]
    return ", ".join([*degrees, f"micro_batch_size={layout.micro_batch_size}", f"ZeRO {layout.zero_stage}"])


def _no_layout(problem: Problem, space: LayoutSpace, forbidden: Forbidden, effort: Effort) -> InfeasibleError:
    job = problem.job
    refused = refusing_rules(problem, space.rejected)
    if refused:
        rules = ", ".join(f"{name} ({space.rejected[name]:,})" for name in refused[:_SHOWN_RULES])
        reason = f"every (partial) layout breaks a rule: {rules}"
    else:
        reason = "no product tp x cp x pp x dp of the values allowed is that number of GPUs"

    def legal(option: Problem) -> bool:
        return len(effort.list(option, forbidden)) > 0

    batches = ((_batch_words(p.job), p) for p in nearby_problems.nearest_batches(problem))
    gpus = ((f"{_counted(p.job.num_gpus)} GPUs", p) for p in nearby_problems.nearest_gpus(problem))
    remedies = _first(effort, nearby_problems.unrestricted(problem), legal)
    remedies += _first(effort, batches, legal) + _first(effort, gpus, legal)
    if forbidden and len(layout_space(problem)):
        remedies.append("forbidding less")
    return InfeasibleError(
        f"There is no legal layout of {problem.model.name} for {_counted(job.num_gpus)} GPUs and "
        f"{_batch_words(job)}: {reason}.",
        f"Expected at least one layout that keeps every rule of the {problem.space.kind} space.",
        f"What has legal layouts: {', or '.join(remedies)}."
        if remedies
        else "Fix fewer degrees, or change the batch.",
    )


def refusing_rules(problem: Problem, rejected: Mapping[str, int]) -> list[str]:
    """Return the rules that may have emptied the space, likeliest first, from the counts of rejections.

    Rules of sharding always leave a choice unless the switches that they concern are fixed.
    """
    default = Space()
    switches = ("zero_stage", "overlap_grad_reduce", "overlap_param_gather")
    fixed = any(getattr(problem.space, name) != getattr(default, name) for name in switches)
    names = [name for name, count in rejected.items() if count]
    # Rules of heterogeneous replicas' sharding come last, for layouts that keep every other rule.
    sharding = [name for rules in (REPLICA_SHARDING_RULES, SHARDING_RULES) for name in rules if name in names]
    others = sorted((name for name in names if name not in sharding), key=lambda n: -rejected[n])
    return [*sharding, *others] if fixed else others


def _batch_words(job: Job) -> str:
    return f"a global batch of {_counted(job.global_batch_size)}"


def _too_large(
    problem: Problem, space: LayoutSpace, bounds: LeastMemory, forbidden: Forbidden, effort: Effort
) -> InfeasibleError:
    usable, hardware = (
        usable_memory_bytes(problem),
        max(problem.node_types, key=lambda hardware: hardware.usable_bytes),
    )
    layouts = f"over {counted(len(space), 'layout')}"
    if bounds.memory_bytes > usable:
        peak = f"the smallest peak {layouts} is at least {gib_text(bounds.memory_bytes)}"
        seen = f"No plan fits: {peak} ({_layout_text(bounds.layout)})"
    else:
        seen = (
            f"No plan fits: the memory bound {layouts} is {gib_text(bounds.memory_bytes)}, but every layout "
            f"that it admits was proved too large{' or too slow' if problem.job.deadline_s else ''} one by one"
        )
    # The other remedies get the other half of the effort.
    apart = Effort(effort.layouts // 2, effort.deadline)
    effort.layouts -= apart.layouts
    more_gpus = nearby_problems.more_gpus(problem, forbidden, apart)
    remedies = [_more_gpus_text(problem, forbidden, more_gpus, apart)] if more_gpus.count else []
    roomiest = " of the node type that has most" if problem.other_hardware else ""
    expected = f"Expected at most {gib_text(usable)} on every GPU{roomiest}."
    if more_gpus.excluded:
        low, high = more_gpus.excluded
        counts = f"{low:,}" if low == high else f"{low:,} to {counted(high, 'GPU')} in steps of {more_gpus.step}"
        expected += f" The same bound excludes {counts}{' GPUs' if low == high else ''}."

    def fits(option: Problem) -> bool:
        return effort.admits(option, forbidden)

    if bounds.memory_bytes > usable:
        relaxed = [
            words for words, option in _until_spent(effort, nearby_problems.relaxations(problem)) if fits(option)
        ]
        remedies += relaxed or _first(effort, nearby_problems.shorter_sequences(problem), fits)
    return InfeasibleError(
        f"{seen}; {hardware.accelerator.name} has {gib_text(usable)} usable of "
        f"{gib_text(hardware.accelerator.memory_bytes)}.",
        expected,
        f"Use {', or '.join(remedies)}."
        if remedies
        else "Use more GPUs, GPUs with more memory, or a smaller model.",
    )


def _more_gpus_text(
    problem: Problem, forbidden: Forbidden, more_gpus: nearby_problems.MoreGpus, effort: Effort
) -> str:
    """State the minimum number of GPUs (proved), and a number on which a plan was found."""
    assert more_gpus.count is not None
    text = f"at least {counted(more_gpus.count, 'GPU')}"
    if problem.other_hardware:
        text += f" in all, the added ones {problem.hardware.name}"
    for option in nearby_problems.doublings(problem, more_gpus.count):
        result = effort.quick_plan(option, forbidden)
        if result is not None and result.step_time_s is not None:
            count = _counted(option.job.num_gpus)
            return f"{text} (with {count} a plan exists)"
    return text


def _too_slow(
    problem: Problem,
    bounds: LeastMemory,
    forbidden: Forbidden,
    per_sequence_s: float,
    layout: Layout,
    effort: Effort,
) -> InfeasibleError:
    job = problem.job
    assert job.deadline_s is not None
    assert job.training_tokens is not None
    sequences = job.training_tokens / job.sequence_length
    needed_s = job.deadline_s / sequences
    if bounds.seconds_per_sequence > needed_s:
        proof = f"every run takes at least {_hours(bounds.seconds_per_sequence * sequences)}"
    else:
        proof = "every layout was proved slower, one by one"
    step = layout.global_batch_size
    remedies = [f"Allow {_hours(per_sequence_s * sequences)} (a plan exists: {_layout_text(layout)})"]
    # Speed-up is at most proportional to the number of GPUs, so smaller numbers are not tried.
    times = 2
    while times * needed_s < per_sequence_s and times <= nearby_problems.MOST_TIMES_GPUS:
        times *= 2
    for option in nearby_problems.doublings(problem, times * max(job.num_gpus_values)):
        result = effort.quick_plan(option, forbidden)
        if result is not None:
            remedies.append(f"use {_counted(option.job.num_gpus)} GPUs (a plan exists)")
            break
    return InfeasibleError(
        f"No plan meets the deadline of {_hours(job.deadline_s)}: with {_counted(job.num_gpus)} GPUs "
        f"{proof}; the fastest found takes {_hours(per_sequence_s * sequences)}.",
        f"Expected a step of at most {seconds_text(needed_s * step)} for a batch of {step:,}; that of the "
        f"fastest found is {seconds_text(per_sequence_s * step)}.",
        f"{', or '.join(remedies)}.",
    )


def _hours(seconds: float) -> str:
    hours = seconds / SECONDS_PER_HOUR
    return f"{hours:,.0f} h" if hours >= 100 else f"{hours:.3g} h"
