"""Random problems of several node types whose replicas may be of different make, and brute force over them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from milpplan import Layout
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem import Job, Mixing, NodeGroup, Problem, RankOrder, Space
from milpplan.simulation import ReplicaView, costs_of_replicas, joined_plan
from tests.optimize.brute_force import Best, Costed, brute_force, costed_plans, num_plans, weight
from tests.optimize.mixed_problems import with_memories
from tests.optimize.problems import FAMILIES, RECOMPUTE_SETS, random_hardware, random_model

MOST_PLANS, MOST_LAYOUTS = 6_000, 16
GPUS: dict[int, tuple[tuple[int, ...], ...]] = {
    2: ((1, 1), (2, 1), (2, 2), (3, 1), (4, 2), (2, 4), (4, 4), (6, 2)),
    3: ((1, 1, 1), (2, 1, 1), (2, 2, 2), (1, 2, 3), (4, 2, 2)),
    4: ((1, 1, 1, 1), (2, 1, 1, 1), (2, 2, 2, 2), (2, 4, 2, 2)),
}
"""Accelerators of each type of a cluster, by the number of types."""
SCHEDULE_SETS: tuple[Any, ...] = (
    ("1f1b",),
    ("gpipe", "1f1b"),
    ("1f1b", "interleaved"),
    ("zb-h1",),
    ("1f1b", "zb-v"),
)
ORDERS: tuple[tuple[RankOrder, ...], ...] = (("tp-cp-dp-pp",), ("tp-cp-pp-dp", "pp-tp-cp-dp"))
BOTH: tuple[Mixing, ...] = ("stages", "replicas")


def replica_problem(
    seed: int, kind: Any = "free", mixing: tuple[Mixing, ...] = ("replicas",), types: int = 2, **fields: Any
) -> Problem:
    """The problem of a seed with so many types that differ in everything: memory of each around the peaks of plans
    of one layout; ``fields`` of the space are given."""
    rng = random.Random(seed)
    model = random_model(rng, rng.choice(FAMILIES))
    for attempt in range(400):
        gpus = rng.choice(GPUS[types])
        first, *others = [random_hardware(rng) for _ in gpus]
        job = Job(
            num_gpus=sum(gpus),
            global_batch_size=rng.choice((3, 4, 6, 8, 10)),
            sequence_length=rng.choice((512, 1024, 4096)),
        )
        few = attempt > 60
        space = Space(
            kind=kind,
            mixing=mixing,
            recompute=rng.choice(RECOMPUTE_SETS),
            pp=rng.choice(((1, 2), (2,), (2, 4), (1, 2, 3))),
            vpp=(1,) if few else (1, 2),
            micro_batch_size=(1,) if few else rng.choice(((1,), (1, 2))),
            schedule=rng.choice(SCHEDULE_SETS),
            interleaved_layers=rng.choice(("even", "any")),
            zero_stage=(rng.randrange(2),) if few else (0, 1),
            sequence_parallel=(False,) if few else (False, True),
            overlap_grad_reduce=rng.choice(((False,), (True,))) if few else (False, True),
            rank_order=rng.choice(ORDERS),
        )
        space = space.model_copy(update=fields)
        groups = tuple(NodeGroup(hardware=own, num_gpus=n) for own, n in zip(others, gpus[1:], strict=True))
        problem = Problem(model=model, hardware=first, job=job, space=space, other_hardware=groups)
        columns = layout_space(problem).columns
        layouts = [columns.at(row) for row in range(min(len(columns), MOST_LAYOUTS + 1))]
        different = [layout for layout in layouts if layout.replica_micro_batches]
        if not different or len(layouts) > MOST_LAYOUTS or num_plans(problem, layouts) > MOST_PLANS:
            continue
        return with_tight_memories(rng, problem, rng.choice(different))
    raise AssertionError(f"seed {seed} gives no small problem")


def with_tight_memories(rng: random.Random, problem: Problem, layout: Layout) -> Problem:
    """Memory of every type around the peaks of plans of a layout."""
    sizes = []
    for view in costs_of_replicas(problem, layout).views:
        peaks = costed_plans(view.problem, view.layout, view.costs).peak_bytes
        sizes.append(
            int(rng.choice((0.8, 1.0, 1.3)) * rng.uniform(float(peaks.min()), 1.1 * float(peaks.max())) + 1)
        )
    return with_memories(problem, tuple(sizes))


def costed_views(problem: Problem, layout: Layout) -> list[tuple[ReplicaView, Costed]]:
    """Every plan of each view of a layout."""
    views = costs_of_replicas(problem, layout).views
    return [(view, costed_plans(view.problem, view.layout, view.costs)) for view in views]


def together(problem: Problem, views: list[tuple[ReplicaView, Costed]]) -> Iterator[tuple[tuple[int, ...], int]]:
    """(row of each view, step time) of all plans of a layout that fit: the same layers in all, any recomputation
    in each; in the uniform space the same."""
    by_split: list[dict[bytes, list[int]]] = []
    uniform = problem.space.kind == "uniform"
    for view, costed in views:
        rows: dict[bytes, list[int]] = {}
        usable = view.problem.hardware.usable_bytes
        for row in np.flatnonzero(costed.peak_bytes <= usable).tolist():
            key = costed.layers[row].tobytes()
            key += costed.full[row].tobytes() + costed.selective[row].tobytes() if uniform else b""
            rows.setdefault(key, []).append(row)
        by_split.append(rows)
    times = [costed.step_time_ns for _, costed in views]
    for key in by_split[0]:
        for rows_of_views in product(*(rows.get(key, ()) for rows in by_split)):
            own = zip(times, rows_of_views, strict=True)
            yield rows_of_views, max(int(steps[row]) for steps, row in own)


def best_of_replicas(problem: Problem, layouts: list[Layout]) -> Best | None:
    """The best plan of some layouts with replicas of different make; None where none fits."""
    best: Best | None = None
    for layout in layouts:
        views = costed_views(problem, layout)
        for rows, step in together(problem, views):
            value = step * weight(problem, layout)
            if best is None or value < best.value:
                plans = tuple(costed.plan(row) for (_, costed), row in zip(views, rows, strict=True))
                best = Best(value, joined_plan(layout, plans), step)
    return best


def brute_force_of_both(problem: Problem) -> Best | None:
    """The best plan of all layouts, with replicas alike and of different make."""
    columns = layout_space(problem).columns
    layouts = [columns.at(row) for row in range(len(columns))]
    alike = [layout for layout in layouts if not layout.replica_micro_batches]
    different = [layout for layout in layouts if layout.replica_micro_batches]
    found = [brute_force(problem, alike), best_of_replicas(problem, different)]
    return min((best for best in found if best is not None), key=lambda best: best.value, default=None)


def naive_replicas(problem: Problem) -> set[tuple[Any, ...]]:
    """Degrees, micro-batch size, shares and chunks of all layouts with replicas of different make that the space's
    lists admit, found by trying every combination."""
    space, found = problem.space, set()
    gpus, batch = sum(problem.node_gpus), max(problem.job.global_batch_values)
    for tp, cp, pp, micro in product(range(1, gpus + 1), range(1, gpus + 1), space.pp or (), range(1, batch + 1)):
        block = tp * cp * pp
        if any(count % block for count in problem.node_gpus) or micro not in (space.micro_batch_size or (micro,)):
            continue
        numbers = [count // block for count in problem.node_gpus]
        for shares in product(range(1, batch + 1), repeat=len(numbers)):
            if sum(number * share for number, share in zip(numbers, shares, strict=True)) * micro == batch:
                found.add((tp, cp, pp, sum(numbers), micro, shares))
    return found
