"""Every plan of a small grouped step, priced by a simulator of its own: nothing here is shared with the solver."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache

import numpy as np

from milpplan.lengths.tabled import (
    GroupedProblem,
    Pipeline,
    Strategy,
    SwitchTimes,
)

Lengths = tuple[int, ...]


def event_time_ns(pipeline: Pipeline, micro_batches: tuple[Lengths, ...]) -> int:
    """1F1B as an event simulation: every stage works down its list as soon as its next input is there."""
    loads = [
        sum(int(pipeline.units(np.array([length]))[0]) for length in one) + pipeline.micro_batch_units
        for one in micro_batches
    ]
    stages, number, lag = pipeline.num_stages, len(loads), pipeline.transfer_ns
    todo = []
    for stage in range(stages):
        warm = min(stages - stage - 1, number)
        work = [("F", m) for m in range(warm)]
        for m in range(number):
            if warm + m < number:
                work.append(("F", warm + m))
            work.append(("B", m))
        todo.append(work)
    ends: dict[tuple[str, int, int], int] = {}
    clock = [0] * stages
    while any(todo):
        for stage in range(stages):
            if not todo[stage]:
                continue
            kind, m = todo[stage][0]
            neighbour = stage - 1 if kind == "F" else stage + 1
            ready = 0
            if 0 <= neighbour < stages:
                if (kind, m, neighbour) not in ends:
                    continue
                ready = ends[kind, m, neighbour] + lag
            parts = pipeline.forward_parts if kind == "F" else pipeline.backward_parts
            clock[stage] = ends[kind, m, stage] = max(clock[stage], ready) + loads[m] * parts
            todo[stage].pop(0)
    return max(clock, default=0)


def ordered_partitions(items: Lengths) -> Iterator[tuple[Lengths, ...]]:
    """All ways to put items into micro-batches in a row, up to the order inside one."""
    if not items:
        yield ()
        return
    seen = set()
    for size in range(1, len(items) + 1):
        for chosen in itertools.combinations(range(len(items)), size):
            first = tuple(items[i] for i in chosen)
            rest = tuple(items[i] for i in range(len(items)) if i not in chosen)
            if (first, rest) not in seen:
                seen.add((first, rest))
                yield from ((first, *others) for others in ordered_partitions(rest))


@cache
def replica_time_ns(pipeline: Pipeline, items: Lengths) -> float:
    """Least time of one replica over all packings and orders; infinite where memory holds none."""
    best = float("inf")
    for packed in ordered_partitions(items):
        tokens = [sum(one) for one in packed]
        if max(tokens, default=0) > pipeline.micro_batch_tokens:
            continue
        if pipeline.max_micro_batches is not None and len(packed) > pipeline.max_micro_batches:
            continue
        limit, width = pipeline.in_flight_tokens, pipeline.num_stages
        if limit is not None and any(sum(tokens[i : i + width]) > limit for i in range(len(tokens))):
            continue
        best = min(best, event_time_ns(pipeline, packed))
    return best


@cache
def replicas_time_ns(pipelines: tuple[Pipeline, ...], items: Lengths) -> float:
    """Least time of the slowest replica over all ways to spread the items."""
    if len(pipelines) == 1:
        return replica_time_ns(pipelines[0], items)
    best = float("inf")
    for mask in set(itertools.product((True, False), repeat=len(items))):
        mine = tuple(item for item, taken in zip(items, mask, strict=True) if taken)
        rest = tuple(item for item, taken in zip(items, mask, strict=True) if not taken)
        best = min(best, max(replica_time_ns(pipelines[0], mine), replicas_time_ns(pipelines[1:], rest)))
    return best


def step_times_ns(problem: GroupedProblem, times: dict[int, float]) -> Iterator[float]:
    """Times of all homes and orders of groups."""
    parameters, gradients = problem.switches.parameters_ns, problem.switches.gradients_ns
    for home in problem.home_choices:
        for order in itertools.permutations(times):
            total, at = float(problem.finish_of(home)), home
            for i, one in enumerate(order):
                total += 0 if at == one else int(parameters[at, one])
                total += max(times[one], 0 if i == 0 else int(gradients[at, one]))
                total += problem.strategies[one].reduce_ns
                at = one
            yield total + (0 if at == home else int(gradients[at, home]))


def least_time_ns(problem: GroupedProblem, used: tuple[int, ...] | None = None) -> float:
    """The least time of a step over all plans (that use exactly ``used``); infinite if there is none."""
    items = np.repeat(problem.lengths, problem.counts).tolist()
    best = float("inf")
    for where in itertools.product(range(len(problem.strategies)), repeat=len(items)):
        if len(set(where)) > problem.max_strategies or (used is not None and set(where) != set(used)):
            continue
        times = {
            s: replicas_time_ns(
                problem.strategies[s].replicas,
                tuple(item for item, at in zip(items, where, strict=True) if at == s),
            )
            for s in sorted(set(where))
        }
        if max(times.values()) < best:
            best = min(best, *step_times_ns(problem, times))
    return best


def random_problem(seed: int) -> GroupedProblem:
    """A step of 3 to 4 sequences and 2 to 3 strategies, some of them of different pipelines side by side."""
    random = np.random.default_rng(seed)
    lengths = np.sort(random.choice(np.arange(1, 9), size=int(random.integers(1, 4)), replace=False))
    counts = np.ones(lengths.size, np.int64)
    for _ in range(int(random.integers(3, 5)) - lengths.size):
        counts[random.integers(lengths.size)] += 1
    number = int(random.integers(2, 4))
    strategies = []
    for index in range(number):
        kinds = []
        for kind in range(int(random.integers(1, 3)) if random.random() < 0.4 else 1):
            stages = int(random.integers(1, 4))
            room = int(random.integers(4, 17)) if index else int(random.integers(8, 17))
            pipeline = Pipeline(
                f"p{index}.{kind}",
                stages,
                float(random.integers(0, 3)),
                float(random.integers(1, 12)),
                float(random.integers(0, 12)),
                room,
                in_flight_tokens=2 * room if random.random() < 0.3 else None,
                max_micro_batches=1 if random.random() < 0.15 and index else None,
                transfer_ns=int(random.integers(0, 4)),
                backward_parts=int(random.integers(1, 4)),
            )
            kinds.append((pipeline, 1 if kind else int(random.integers(1, 3))))
        strategies.append(Strategy(f"s{index}", tuple(kinds), int(random.integers(0, 20))))
    size = (number, number)
    switches = SwitchTimes(random.integers(0, 60, size), random.integers(0, 60, size))
    finish = tuple(int(one) for one in random.integers(0, 15, number)) if random.random() < 0.5 else ()
    return GroupedProblem(
        lengths.astype(np.int64), counts, tuple(strategies), switches, int(random.integers(1, 4)), (), finish
    )
