"""Explanation of infeasible problems: the reason why there is no plan, and changes that would allow one.

The changes are sought among nearby problems, by bounds without a search.

Every statement is proved. A number of GPUs is called too small only where the memory bound over all its layouts
excludes it. An alternative is named only where it has a legal layout that the bound admits. "A plan exists" means
that one was found and simulated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from milpplan.errors import InfeasibleError
from milpplan.optimize.bounds.cluster_bounds import cluster_bounds, cluster_uniform_bounds
from milpplan.optimize.records import PlanResult, SolveOptions
from milpplan.optimize.solve import solve
from milpplan.optimize.space.enumerate_layouts import SHARDING_RULES, divisors, layout_space
from milpplan.optimize.space.layout_space import LayoutSpace
from milpplan.optimize.space.rules import (
    HYBRID_SHARDING_RULES,
    KEPT_SHARDING_RULES,
    PIPELINE_SHARDING_RULES,
    REPLICA_SHARDING_RULES,
)
from milpplan.problem import Job, Layout, Problem, Range, Space
from milpplan.problem.problem import NOT_LISTS
from milpplan.simulation import capacities_bytes, cluster_costs, usable_memory_bytes
from milpplan.simulation.layout_columns import OFFLOADS
from milpplan.units import NS_PER_S, counted, gib_text, seconds_text

Forbidden = tuple[Mapping[str, object], ...]

LAYOUTS = 10_000_000
"""Total number of layouts listed while remedies are sought: about ten seconds of one core."""
MOST_TIMES_GPUS = 64
"""Maximum multiple of the requested GPUs that is tried."""
_CHUNK = 100_000
_MAX_CANDIDATES = 60
_HALVINGS = 3


@dataclass(slots=True)
class Effort:
    """Budget of the search for remedies.

    It counts layouts, not seconds, so that a problem gets the same advice on every machine; the ``deadline`` (of
    ``time.monotonic``) is the caller's.
    """

    layouts: int = LAYOUTS
    deadline: float | None = None

    def spent(self) -> bool:
        """Return True once nothing more may be tried."""
        return self.layouts <= 0 or (self.deadline is not None and time.monotonic() > self.deadline)

    def list(self, problem: Problem, forbidden: Forbidden) -> LayoutSpace:
        """List the layouts of a problem, and charge them to the budget."""
        space = layout_space(problem, forbidden)
        self.layouts -= len(space) + sum(space.rejected.values())
        return space

    def admits(self, problem: Problem, forbidden: Forbidden) -> bool:
        """Return True if some layout is legal and the memory bound does not exclude it."""
        bounds = floor(problem, self.list(problem, forbidden))
        return bounds is not None and bounds.memory_bytes <= usable_memory_bytes(problem)

    def quick_plan(
        self, problem: Problem, forbidden: Forbidden, *, kind: str = "uniform", gap: float = 0.5
    ) -> PlanResult | None:
        """Find some plan of the problem, within ``gap`` of the best plan of the space of this ``kind``.

        Returns:
            The result; None if there is no plan, or no effort is left.
        """
        if self.spent():
            return None
        left_s = None if self.deadline is None else max(self.deadline - time.monotonic(), 1e-3)
        asked = with_space(problem, kind=kind)
        options = SolveOptions(
            forbid=forbidden, gap=gap, time_limit_s=left_s, witness=False, any_chunks=False, simplest=False
        )
        result = solve(asked, options)
        if result.layouts is not None:
            space = result.layouts.space
            self.layouts -= len(space) + sum(space.rejected.values())
        return result if result.plan is not None else None


@dataclass(frozen=True, slots=True)
class LeastMemory:
    """Proved lower bounds over all layouts: the minimum peak in bytes with its layout, and, over the layouts that
    the memory bound admits, the minimum step per sequence in seconds (infinite without any)."""

    memory_bytes: float
    layout: Layout
    seconds_per_sequence: float


def floor(problem: Problem, space: LayoutSpace) -> LeastMemory | None:
    """Return the bounds of a problem's space, None if it is empty."""
    if not len(space):
        return None
    memory = np.zeros(len(space))
    fastest = np.inf
    for start in range(0, len(space), _CHUNK):
        rows = np.arange(start, min(start + _CHUNK, len(space)))
        part = space.take(rows)
        costs = cluster_costs(problem, part)
        if problem.space.kind == "uniform":
            uniform = cluster_uniform_bounds(problem, part, costs)
            fits = uniform.memory_bytes <= usable_memory_bytes(problem)
            memory[rows] = uniform.memory_bytes.min(axis=1)
            time_ns = np.where(fits, uniform.step_time_ns, np.inf).min(axis=1)
        else:
            bounds = cluster_bounds(problem, part, costs)
            memory[rows] = bounds.memory_bytes
            fits = bounds.memory_bytes <= usable_memory_bytes(problem)
            time_ns = np.where(fits, bounds.step_time_ns, np.inf)
        fastest = min(fastest, float((time_ns / part.global_batch_size).min()))
    smallest = int(memory.argmin())
    return LeastMemory(float(memory[smallest]), space.at(smallest), fastest / NS_PER_S)


def with_job(problem: Problem, **changes: object) -> Problem:
    """Return the problem with fields of the job changed."""
    return problem.model_copy(update={"job": problem.job.model_copy(update=changes)})


def with_space(problem: Problem, **changes: object) -> Problem:
    """Return the problem with fields of the space changed."""
    return problem.model_copy(update={"space": problem.space.model_copy(update=changes)})


@dataclass(frozen=True, slots=True)
class MoreGpus:
    """Outcome of ``more_gpus``.

    ``count``: the first number of GPUs tried that the memory bound admits. ``excluded``: first and last of the
    smaller multiples of the node, all proved too small (None if there are none).
    """

    count: int | None
    excluded: tuple[int, int] | None
    step: int


def more_gpus(problem: Problem, forbidden: Forbidden, effort: Effort) -> MoreGpus:
    """Find the smallest multiple of the node, above the requested number, that the memory bound admits."""
    node = problem.hardware.gpus_per_node
    max_gpus = max(problem.job.num_gpus_values)
    first = (max_gpus // node + 1) * node
    last_excluded = None
    for count in range(first, MOST_TIMES_GPUS * max(max_gpus, node) + 1, node):
        if effort.spent():
            break
        if effort.admits(with_job(problem, num_gpus=count), forbidden):
            excluded = None if last_excluded is None else (first, last_excluded)
            return MoreGpus(count, excluded, node)
        last_excluded = count
    return MoreGpus(None, None if last_excluded is None else (first, last_excluded), node)


def doublings(problem: Problem, start: int) -> Iterator[Problem]:
    """Yield the problem with ``start``, twice, four times, ... as many GPUs."""
    max_gpus = MOST_TIMES_GPUS * max(max(problem.job.num_gpus_values), problem.hardware.gpus_per_node)
    while start <= max_gpus:
        yield with_job(problem, num_gpus=start)
        start *= 2


def relaxations(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Yield changes other than more GPUs that may reduce memory: in words, and as problems."""
    job, space = problem.job, problem.space
    if space.kind == "uniform":
        yield "the free space (uneven stages)", with_space(problem, kind="free")
    yield from unrestricted(problem)
    yield from zero_pipeline(problem)
    host = dict.fromkeys(OFFLOADS, (False, True))
    types = problem.node_types
    tiers = all(hardware.host_memory is not None for hardware in types)
    if tiers and any(getattr(space, name) == (False,) for name in host):
        yield "offloading to the host (--allow offload)", with_space(problem, **host)
    if any(hardware.capacity_bytes(space.memory_margin_fraction) < hardware.usable_bytes for hardware in types):
        yield "no margin (--memory-margin 0)", with_space(problem, memory_margin_fraction=0.0)
    if set(space.recompute) != set(Space().recompute):
        yield "every recompute mode", with_space(problem, recompute=Space().recompute)
    if job.attention_kernel == "unfused":
        yield "flash attention", with_job(problem, attention_kernel="flash")
    if job.grad_dtype == "fp32" and not problem.inference:
        yield "gradients in bf16", with_job(problem, grad_dtype="bf16")


def shorter_sequences(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Yield the problem with half, a quarter, an eighth of the sequence length."""
    length = problem.job.sequence_length
    for _ in range(_HALVINGS):
        length //= 2
        if length:
            yield f"sequences of {length:,} tokens", with_job(problem, sequence_length=length)


def unrestricted(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Yield the problem without one of the space's restrictions of degrees and switches."""
    for name in Space.model_fields:
        if name in NOT_LISTS or name == "recompute":
            continue
        values, default = getattr(problem.space, name), getattr(Space(), name)
        if values is not None and values != default:
            listed = "|".join(str(value).lower() for value in values)
            yield f"a free {name} (instead of {name}={listed})", with_space(problem, **{name: default})


def zero_pipeline(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Yield the problem with ZeRO 2 and 3 in pipelines, where its space refuses them."""
    if not problem.space.zero_pipeline and max(problem.space.zero_stage) > 1:
        allowed = with_space(problem, zero_pipeline=True)
        yield "ZeRO 2 and 3 with a pipeline (--allow zero-pipeline)", allowed


def nearest_batches(problem: Problem) -> Iterator[Problem]:
    """Yield problems with batches that some number of replicas divides, nearest first."""
    asked = max(problem.job.global_batch_values)
    gpus = max(problem.job.num_gpus_values)
    sizes = problem.space.micro_batch_size or (1,)
    candidates: set[int] = set()
    for unit in {int(d) * size for d in divisors(gpus) for size in sizes}:
        candidates |= {asked // unit * unit, -(-asked // unit) * unit}
    candidates -= {0, asked}
    for batch in sorted(candidates, key=lambda batch: (abs(batch - asked), batch))[:_MAX_CANDIDATES]:
        yield with_job(problem, global_batch_size=batch)


def nearest_gpus(problem: Problem) -> Iterator[Problem]:
    """Yield problems with whole nodes, powers of two, and multiples of the fixed degrees; nearest first."""
    asked, node = max(problem.job.num_gpus_values), problem.hardware.gpus_per_node
    fixed = 1
    for name in ("tp", "cp", "pp", "dp"):
        values = getattr(problem.space, name)
        fixed *= values[0] if values and len(values) == 1 else 1
    units = {1, node, fixed, int(np.lcm(node, fixed)) if fixed < asked else fixed}
    candidates = {asked // unit * unit + k * unit for unit in units for k in range(-4, 6)}
    candidates |= {1 << (asked.bit_length() - 1), 1 << asked.bit_length()}
    others = sum(group.num_gpus for group in problem.other_hardware)
    wanted = [count for count in candidates if count > others and count != asked]
    whole = sorted(wanted, key=lambda count: (count % node != 0, abs(count - asked), count))
    for count in whole[:_MAX_CANDIDATES]:
        yield with_job(problem, num_gpus=count)


SECONDS_PER_HOUR = 3600.0
NO_PLAN_KNOWN = ", where no plan is known yet"
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
    bounds = floor(problem, space)
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
    timeless = with_job(problem, deadline_s=None, training_tokens=None, objective="step_time_per_token")
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

    batches = ((_batch_words(p.job), p) for p in nearest_batches(problem))
    gpus = ((f"{_counted(p.job.num_gpus)} GPUs", p) for p in nearest_gpus(problem))
    remedies = _first(effort, zero_pipeline(problem), legal) + _first(effort, unrestricted(problem), legal)
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
    of_sharding = PIPELINE_SHARDING_RULES | REPLICA_SHARDING_RULES | HYBRID_SHARDING_RULES
    of_sharding |= KEPT_SHARDING_RULES | SHARDING_RULES
    sharding = [name for name in of_sharding if name in names]
    others = sorted((name for name in names if name not in sharding), key=lambda n: -rejected[n])
    return [*sharding, *others] if fixed else others


def _batch_words(job: Job) -> str:
    return f"a global batch of {_counted(job.global_batch_size)}"


def _too_large(
    problem: Problem, space: LayoutSpace, bounds: LeastMemory, forbidden: Forbidden, effort: Effort
) -> InfeasibleError:
    usable = usable_memory_bytes(problem)
    hardware = problem.node_types[capacities_bytes(problem).index(usable)]
    margin = hardware.usable_bytes - usable
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
    needed = more_gpus(problem, forbidden, apart)
    remedies = [_more_gpus_text(problem, forbidden, needed, apart)] if needed.count else []
    roomiest = " of the node type that has most" if problem.other_hardware else ""
    expected = f"Expected at most {gib_text(usable)} on every GPU{roomiest}."
    if needed.excluded:
        low, high = needed.excluded
        counts = f"{low:,}" if low == high else f"{low:,} to {counted(high, 'GPU')} in steps of {needed.step}"
        expected += f" The same bound excludes {counts}{' GPUs' if low == high else ''}."

    def fits(option: Problem) -> bool:
        return effort.admits(option, forbidden)

    if bounds.memory_bytes > usable:
        admitted = [each for each in _until_spent(effort, relaxations(problem)) if fits(each[1])]
        known = [words for words, option in admitted if effort.quick_plan(option, forbidden) is not None]
        remedies += known or [f"{words}{NO_PLAN_KNOWN}" for words, _ in admitted]
        remedies += [] if known else _first(effort, shorter_sequences(problem), fits)
    otherwise = "Use more GPUs, GPUs with more memory, or a smaller model."
    if problem.job.rollout is not None and (held := problem.job.rollout.held_bytes) >= usable:
        otherwise = f"Let the rollout's engine hold less: its {gib_text(held)} are too much by themselves."
    return InfeasibleError(
        f"{seen}; {hardware.accelerator.name} has {gib_text(usable)} usable of "
        f"{gib_text(hardware.accelerator.memory_bytes)}"
        f"{f' with a margin of {gib_text(margin)}' if margin else ''}.",
        expected,
        f"Use {', or '.join(remedies)}." if remedies else otherwise,
    )


def _more_gpus_text(problem: Problem, forbidden: Forbidden, needed: MoreGpus, effort: Effort) -> str:
    """State the minimum number of GPUs (proved), and a number on which a plan was found."""
    assert needed.count is not None
    text = f"at least {counted(needed.count, 'GPU')}"
    if problem.other_hardware:
        text += f" in all, the added ones {problem.hardware.name}"
    for option in doublings(problem, needed.count):
        result = effort.quick_plan(option, forbidden)
        if result is not None and result.step_time_s is not None:
            count = _counted(option.job.num_gpus)
            return f"{text} (with {count} a plan exists)"
    return f"{text}{NO_PLAN_KNOWN}"


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
    remedies = [f"Allow {_hours_up(per_sequence_s * sequences)} (a plan exists: {_layout_text(layout)})"]
    # Speed-up is at most proportional to the number of GPUs, so smaller numbers are not tried.
    times = 2
    while times * needed_s < per_sequence_s and times <= MOST_TIMES_GPUS:
        times *= 2
    for option in doublings(problem, times * max(job.num_gpus_values)):
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


def _hours_up(seconds: float) -> str:
    """Write hours with three digits, rounded up, so that as many are enough."""
    hours = seconds / SECONDS_PER_HOUR
    unit = min(1.0, 10.0 ** (math.floor(math.log10(hours)) - 2))
    return f"{math.ceil(hours / unit) * unit:,.12g} h"


def _hours(seconds: float) -> str:
    hours = seconds / SECONDS_PER_HOUR
    return f"{hours:,.0f} h" if hours >= 100 else f"{hours:.3g} h"
