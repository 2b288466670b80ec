"""A small model on four GPUs, and sequences of several lengths for it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from milpplan.lengths import Load, StrategyTables, Workload, quantum_problem, workload_of
from milpplan.lengths.bounds import StageLoads, Window, best_mixture
from milpplan.lengths.turns import TurnSearch
from milpplan.lengths.turns.lagrangian_mixtures import Bounded, even_weights, subgradient_bound_ns
from milpplan.problem import Problem
from tests.small import small_model, small_problem

GRAIN = 128


@cache
def workload(*, long: int = 2, short: int = 16, longest: int = 24_576) -> Workload:
    """Many short sequences and some long ones, from a fixed seed."""
    random = np.random.default_rng(5)
    lengths = np.concatenate([random.integers(100, 3000, short), random.integers(longest // 2, longest, long)])
    return workload_of(lengths.astype(np.int64), GRAIN)


@cache
def pool() -> StrategyTables:
    """All strategies of the small problem for the workload, made once."""
    return pool_of(small_problem(memory_gib=40), workload())


@cache
def deep_pool() -> StrategyTables:
    """Of twice as many short sequences and more layers, so that pipelines have up to four stages."""
    problem = small_problem(num_gpus=8, memory_gib=40).model_copy(update={"model": small_model(num_layers=8)})
    return pool_of(problem, workload(short=32))


def pool_of(problem: Problem, steps: Workload) -> StrategyTables:
    """All strategies of a problem for a workload."""
    return StrategyTables.of(quantum_problem(problem, GRAIN), Load(steps.lengths, steps.counts, GRAIN))


def restrict(search: TurnSearch, members: Sequence[int]) -> None:
    """Let a search know no other strategies of the pool than these."""
    search.members = list(members)
    search.bounds = type(search.bounds)(search.pool, search.members)


def random_micro_batches(
    found: StrategyTables, max_quanta: int, random: np.random.Generator, number: int
) -> np.ndarray:
    """Micro-batches [number, n] that fit, from nearly empty to full."""
    lengths = found.load.lengths
    rows = np.zeros((number, len(lengths)), dtype=np.int64)
    for row in rows:
        room = int(random.integers(1, max_quanta + 1)) * GRAIN
        for k in random.permutation(np.repeat(np.arange(len(lengths)), found.load.counts)):
            if lengths[k] <= room:
                row[k] += 1
                room -= int(lengths[k])
    return rows[rows.any(axis=1)]


def random_packings(
    found: StrategyTables, member: int, held: np.ndarray, random: np.random.Generator
) -> list[np.ndarray]:
    """``held`` [n] sequences on random replicas in random micro-batches that fit, full ones or not, in any order,
    falling, or rising and then falling."""
    one, lengths = found.members[member], found.load.lengths
    room, size = one.shared_memory_quanta * found.load.token_quantum, one.candidate.layout.dp
    rows: list[list[np.ndarray]] = [[] for _ in range(size)]
    share = float(random.uniform(0.0, 1.0))
    for k in random.permutation(np.repeat(np.arange(len(lengths)), held)).tolist():
        mine = rows[int(random.integers(size))]
        fitting = [row for row in mine if row @ lengths + lengths[k] <= room]
        if not fitting or random.random() < share:
            fitting = [np.zeros(len(lengths), dtype=np.int64)]
            mine.append(fitting[0])
        fitting[int(random.integers(len(fitting)))][k] += 1
    replicas = []
    for mine in rows:
        packed = np.array(mine, dtype=np.int64).reshape(-1, len(lengths))
        kind = random.integers(3)
        if kind:
            packed = packed[np.argsort(-(packed @ lengths))]
        replicas.append(np.concatenate([packed[1::2][::-1], packed[::2]]) if kind == 2 else packed)
    return replicas


def mixed_ns(problem: Bounded, used: tuple[int, ...]) -> float:
    """The *mixed* bound of a set, begun with equal weights, ns."""
    weights = even_weights(problem)[np.eye(len(used), dtype=np.int64)][None]
    return float(subgradient_bound_ns(problem, np.array([used]), np.inf, weights)[0][0])


def path_bound(stages: StageLoads, num_stages: int, number: int, load: float, first: int | None = None) -> Any:
    """Return the bound of ``number`` (or ``first`` to ``number``) micro-batches, highest at ``load``."""
    window = Window.of(number if first is None else first, number)
    return best_mixture(stages, num_stages, window, load).bound(stages, load)
