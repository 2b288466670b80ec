"""Random problems of clusters with two or three node types, small enough to enumerate every plan."""

from __future__ import annotations

import random
from typing import Any

from milpplan import HardwareSpec, ModelSpec
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem import HostMemory, Job, NodeGroup, Problem, SizeCurve, Space
from milpplan.simulation import costs_of
from tests.optimize.brute_force import num_plans, time_and_peak
from tests.optimize.problems import FAMILIES, RECOMPUTE_SETS, random_hardware, random_model, random_plan

MOST_PLANS, MOST_LAYOUTS = 6_000, 12
GPUS = ((2, (1,)), (4, (2,)), (4, (1, 1)), (3, (1,)), (8, (4,)), (6, (2,)), (8, (2, 4)), (4, (1,)))
"""Accelerators of a cluster, and of its types beside the first."""
SCHEDULE_SETS: tuple[Any, ...] = (
    ("1f1b",),
    ("gpipe", "1f1b"),
    ("1f1b", "interleaved"),
    ("interleaved",),
    ("zb-h1",),
    ("1f1b", "zb-v"),
)

SWITCHES = ("offload_optimizer", "offload_weights", "offload_activations", "pp_scatter_gather", "gather_again")
ORDERS: tuple[Any, ...] = (
    ("tp-cp-dp-pp",),
    ("tp-cp-dp-pp", "dp-tp-cp-pp", "pp-tp-cp-dp"),
    ("tp-pp-cp-dp", "cp-tp-dp-pp"),
)


def mixed_problem(seed: int, kind: Any = "free") -> Problem:
    """The problem of a seed: types that differ in everything, memory of each between the peaks of random plans."""
    rng = random.Random(seed)
    model = random_model(rng, rng.choice(FAMILIES))
    for attempt in range(400):
        gpus, others = rng.choice(GPUS)
        job = Job(
            num_gpus=gpus,
            global_batch_size=rng.choice((2, 4, 6, 8, 12)),
            sequence_length=rng.choice((512, 1024, 4096)),
        )
        groups = tuple(NodeGroup(hardware=random_hardware(rng), num_gpus=count) for count in others)
        space = _space(rng, kind, attempt)
        problem = Problem(model=model, hardware=random_hardware(rng), job=job, space=space, other_hardware=groups)
        columns = layout_space(problem).columns
        layouts = [columns.at(row) for row in range(min(len(columns), MOST_LAYOUTS + 1))]
        if 1 <= len(layouts) <= MOST_LAYOUTS and num_plans(problem, layouts) <= MOST_PLANS:
            return with_tight_memories(rng, problem)
    raise AssertionError(f"seed {seed} gives no small problem")


def switched_problem(seed: int, kind: Any = "free", inference: bool = False) -> Problem:
    """One layout's degrees of such a problem, some of its execution switches and orders of ranks to decide, and
    hosts of any speed and size for every type; ``inference``: of forwards alone."""
    rng = random.Random(seed)
    problem = mixed_problem(seed, kind)
    doubled = problem.job.model_copy(update={"num_gpus": 2 * max(problem.job.num_gpus_values)})
    groups = tuple(group.model_copy(update={"num_gpus": 2 * group.num_gpus}) for group in problem.other_hardware)
    two = problem.space.model_copy(update={"tp": (2,), "cp": (1,)})
    wider = problem.model_copy(update={"job": doubled, "other_hardware": groups, "space": two})
    if len(layout_space(wider)) and rng.random() < 0.7:
        problem = wider
    columns = layout_space(problem).columns
    layout = columns.at(rng.randrange(len(columns)))
    names = {name: (getattr(layout, name),) for name in ("tp", "cp", "pp", "dp", "vpp", "zero_stage")}
    opened = dict.fromkeys((SWITCHES[inference], rng.choice(SWITCHES[1:])), (False, True))
    opened |= {
        "sequence_parallel": (False, True),
        "tp_overlap": rng.choice((("none",), ("none", "ring", "pipelined"))),
    }
    values: dict[str, Any] = names | opened | {"rank_order": rng.choice(ORDERS)}
    if inference:
        values |= {"zero_stage": (0,), "vpp": (1,), "recompute": ("none",)}
        job = problem.job.model_copy(update={"kind": "inference"})
        problem = problem.model_copy(update={"job": job})
    problem = problem.model_copy(update={"space": problem.space.model_copy(update=values)})
    others = tuple(
        group.model_copy(update={"hardware": _with_host(rng, group.hardware)}) for group in problem.other_hardware
    )
    return problem.model_copy(update={"hardware": _with_host(rng, problem.hardware), "other_hardware": others})


def _with_host(rng: random.Random, hardware: HardwareSpec) -> HardwareSpec:
    """The hardware with less memory, and a host of any speed and size."""
    device = hardware.accelerator.memory_bytes
    host = HostMemory(
        capacity_bytes=max(1, int(device * rng.choice((0.05, 2.0, 10.0, 10.0)))),
        bandwidth_bytes_per_s=rng.choice((1e9, 1e10, 1e12)),
        efficiency=SizeCurve(size=(1e4, 1e6), value=(0.3, 0.9)),
    )
    smaller = hardware.accelerator.model_copy(update={"memory_bytes": int(device * rng.choice((0.3, 0.6, 1.0)))})
    return hardware.model_copy(update={"host_memory": host, "accelerator": smaller})


def _space(rng: random.Random, kind: Any, attempt: int) -> Space:
    few = attempt > 100
    return Space(
        kind=kind,
        recompute=rng.choice(RECOMPUTE_SETS),
        pp=(2, 3, 4),
        vpp=(1,) if few else (1, 2),
        micro_batch_size=(1,),
        schedule=rng.choice(SCHEDULE_SETS),
        interleaved_layers=rng.choice(("even", "any")),
        zero_stage=(rng.randrange(4),) if few else (0, 1),
        sequence_parallel=(False,),
        overlap_grad_reduce=rng.choice(((False,), (True,))) if few else (False, True),
    )


def with_memories(problem: Problem, usable_bytes: tuple[int, ...]) -> Problem:
    """The problem on devices where plans may fill exactly so much of each type."""

    def sized(hardware: HardwareSpec, size: int) -> HardwareSpec:
        accelerator = hardware.accelerator.model_copy(update={"memory_bytes": size})
        changes = {"accelerator": accelerator, "reserved_bytes": 0, "fragmentation_fraction": 0.0}
        changes["memory_margin_fraction"] = 0.0
        return hardware.model_copy(update=changes)

    others = tuple(
        NodeGroup(hardware=sized(group.hardware, size), num_gpus=group.num_gpus)
        for group, size in zip(problem.other_hardware, usable_bytes[1:], strict=True)
    )
    first = sized(problem.hardware, usable_bytes[0])
    return problem.model_copy(update={"hardware": first, "other_hardware": others})


def with_tight_memories(rng: random.Random, problem: Problem) -> Problem:
    """Memory of every type around the peaks of a random plan without and with full recomputation."""
    layout = layout_space(problem).at(0)
    costs = costs_of(problem, layout)
    plans = [random_plan(rng, problem, layout, recompute=share) for share in (0.0, 1.0)]
    peaks = [time_and_peak(problem, costs, plan)[1] for plan in plans]
    sizes = [
        int(rng.choice((0.7, 1.0, 1.0, 1.3)) * rng.uniform(min(peaks), 1.2 * max(peaks)) + 1)
        for _ in problem.node_types
    ]
    return with_memories(problem, tuple(sizes))


def two_types(model: ModelSpec, first: HardwareSpec, second: HardwareSpec, gpus: int, **space: Any) -> Problem:
    """Half of the accelerators of each of two types."""
    job = Job(num_gpus=gpus, global_batch_size=32, sequence_length=2048)
    groups = (NodeGroup(hardware=second, num_gpus=gpus // 2),)
    return Problem(model=model, hardware=first, job=job, space=Space(**space), other_hardware=groups)
