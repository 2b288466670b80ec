"""Problems near an infeasible problem, and bounds on them without a search."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from milpplan.optimize.bounds.cluster_bounds import cluster_bounds, cluster_uniform_bounds
from milpplan.optimize.result import PlanResult
from milpplan.optimize.solve import solve
from milpplan.optimize.space.enumerate_layouts import divisors, layout_space
from milpplan.optimize.space.layout_space import LayoutSpace
from milpplan.problem.plan import Layout
from milpplan.problem.problem import NOT_LISTS, Problem, Space
from milpplan.simulation.bulk.cache_keys import OFFLOADS
from milpplan.simulation.layout_costs import usable_memory_bytes
from milpplan.simulation.mixed_costs import cluster_costs
from milpplan.units import NS_PER_S

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
        result = solve(asked, forbid=forbidden, gap=gap, time_limit_s=left_s, witness=False, any_chunks=False)
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
    host = dict.fromkeys(OFFLOADS, (False, True))
    tiers = all(hardware.host_memory is not None for hardware in problem.node_types)
    if tiers and any(getattr(space, name) == (False,) for name in host):
        yield "offloading to the host (--allow offload)", with_space(problem, **host)
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
