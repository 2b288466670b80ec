"""All that Calculon's search decides, as a space of milpplan's, and what of Calculon's space is not in it.

What Calculon's search has and the space has not, each counted exactly and named:

    batch          degrees of data parallelism that do not divide the batch; Calculon takes a smaller batch. These
                   are problems of their own here, solved with their batch (``smaller_batches``)
    interleaving   micro-batches that are no multiple of the stages: Megatron-LM refuses them, and so does milpplan
    tiles          tensor-parallel overlap without sequence parallelism: Megatron-LM refuses it. milpplan prices
                   it, so that the fastest such plan can be said (``fastest_outside``)

Twins that milpplan leaves out because another plan of the space is proved no slower (no overlap of data-parallel
communication, a pipelined collective beside a ring, the slower of two transfers) count as being in it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from benchmarks import calculon_space
from benchmarks.calculon_side import Checkout, Tree, files_of, search_problem
from benchmarks.calculon_space import Task
from milpplan import Layout, Problem, Space, simulate_many, solve
from milpplan.optimize.bounds.uniform_plans import uniform_bounds
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem.calculon.translation import SWITCHES, calculon_run
from milpplan.problem.plan import TP_OVERLAPS
from milpplan.simulation.layout_columns import IntArray, LayoutColumns
from milpplan.simulation.layout_costs import layout_costs
from milpplan.units import NS_PER_S

CASES = {
    "22b-64": ("megatron-22B", 64, 512),
    "175b-1024": ("gpt3-175B", 1024, 1536),
    "175b-4096": ("gpt3-175B", 4096, 4096),
    "530b-2240": ("turing-530B", 2240, 2240),
    "530b-2240-2520": ("turing-530B", 2240, 2520),
    "530b-2520": ("turing-530B", 2520, 2520),
    "1t-3072": ("megatron-1T", 3072, 3072),
}
"""The problems of Isaev et al. 2023's artifacts that this repository compares on, each with its batch."""
SHARED: dict[str, Any] = {"kind": "uniform", "cp": (1,), "zero_stage": (0, 1)}
"""The part of the uniform space that Calculon has too."""
ORDERS = ("tp-cp-dp-pp", "tp-cp-pp-dp", "dp-tp-cp-pp", "dp-pp-tp-cp", "pp-tp-cp-dp", "pp-dp-tp-cp")
"""Which parallelisms are neighbours, and so which are inside network 0: all orders of the three that there are."""
KEYS = ("tp", "pp", "dp", "vpp", "micro_batch_size", "sequence_parallel", "gather_again", "tp_overlap")
KEYS += ("offload_weights", "offload_activations", "offload_optimizer")
PIPELINED, RING = TP_OVERLAPS.index("pipelined"), TP_OVERLAPS.index("ring")
TILES_RULE = "tp_overlap_needs_sequence_parallel"
CHUNK = 4096


def opened() -> dict[str, Any]:
    """Every switch of Calculon that a layout has here, with all its values."""
    switches: dict[str, Any] = {
        switch.ours: tuple(switch.values.values())
        for switch in SWITCHES
        if switch.record is Layout and switch.ours != "sequence_parallel"
    }
    switches["pp_scatter_gather"] = (False, True)
    return switches | {"gather_again": (False, True)}


def whole_space() -> Space:
    """The space with everything that Calculon's search decides."""
    return Space(**SHARED | opened() | {"rank_order": ORDERS})


@dataclass(frozen=True, slots=True)
class Outside:
    """Executions of Calculon's that it estimates, by whether the space has them: [inside, batch, interleaving,
    tiles]. ``checked``: random ones of the first sort, all of which were found in the space. ``tiles_step_s``: the
    fastest plan with tiles but without sequence parallelism; ``batch_step_s``: the fastest with a smaller batch,
    at its rate; None where there is none. Both are proved, in ``wall_s`` and ``cpu_s`` together."""

    inside: int
    batch: int
    interleaving: int
    tiles: int
    checked: int
    tiles_step_s: float | None
    batch_step_s: float | None
    wall_s: float
    cpu_s: float


def outside_of(checkout: Checkout, model: Tree, system: Tree, procs: int, batch: int, sample: int) -> Outside:
    """What the whole space lacks of Calculon's."""
    problem = search_problem(model, system, procs, batch, whole_space())
    tasks = calculon_space.tasks(checkout, model, procs, batch)
    counts = np.sum([_sorts(task, system, batch) for task in tasks], axis=0).tolist()
    checked = _checked(problem, tasks, system, procs, batch, sample, model)
    cpu, wall = time.process_time(), time.monotonic()
    steps = fastest_outside(problem), smaller_batches(model, system, procs, batch, tasks)
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    return Outside(*counts, checked, *steps, wall, cpu)


def _sorts(task: Task, system: Tree, batch: int) -> list[int]:
    """Executions of a task that Calculon estimates: inside, batch, interleaving, tiles."""
    whole = task.others(system) * len(task.networks(system, taken=True))
    if task.batch != batch:
        return [0, whole, 0, 0]
    micro = np.array(task.micro_batches, dtype=np.int64)
    breaks = (task.vpp > 1) & (batch // (task.dp * micro) % task.pp != 0)
    uneven = whole // len(micro) * int(breaks.sum())
    tiles = 0 if task.communication == "rs_ag" or task.tp == 1 else (whole - uneven) * 2 // 3
    return [whole - uneven - tiles, 0, uneven, tiles]


def sort_of(execution: Tree, batch: int) -> int:
    """The place in the counts of ``_sorts`` of one execution."""
    micro_batches = execution["batch_size"] // execution["data_par"] // execution["microbatch_size"]
    tiles = execution["tensor_par_overlap"] != "none" and execution["tensor_par_comm_type"] != "rs_ag"
    if execution["batch_size"] != batch:
        return 1
    if execution["pipeline_interleaving"] > 1 and micro_batches % execution["pipeline_par"]:
        return 2
    return 3 if tiles else 0


def _checked(
    problem: Problem, tasks: list[Task], system: Tree, procs: int, batch: int, sample: int, model: Tree
) -> int:
    """Random executions that should be inside are."""
    known = {row.tobytes() for row in _keys(layout_space(problem).families)}
    draws = calculon_space.random_executions(tasks, system, procs, np.random.default_rng(2))
    inside = (one for one in islice(draws, 20 * sample) if sort_of(one, batch) == 0)
    checked = 0
    for execution in islice(inside, sample):
        plan = calculon_run(files_of(model, execution, system))[1]
        if _keys(LayoutColumns.of([plan.layout]))[0].tobytes() not in known:
            raise SystemExit(f"An execution of Calculon's is not in the space: {execution}")
        checked += 1
    return checked


def _keys(columns: LayoutColumns) -> IntArray:
    """What tells layouts apart, [n, keys]: a pipelined collective stands for its twin with a ring; sharding, its
    overlaps and orders are crossed with every layout, and of the two transfers one is there."""
    table = np.stack([np.asarray(getattr(columns, name), dtype=np.int64) for name in KEYS], axis=1)
    tiles = table[:, KEYS.index("tp_overlap")]
    tiles[tiles == PIPELINED] = RING
    return np.ascontiguousarray(table)


def fastest_outside(problem: Problem) -> float | None:
    """Step of the fastest plan with tiles but without sequence parallelism: those whose bound is below the fastest
    of the others are simulated. None where none fits."""
    space = layout_space(problem, without={TILES_RULE})
    columns = space.columns
    columns = columns.take(np.flatnonzero((columns.tp_overlap > 0) & ~columns.sequence_parallel))
    bounds = [_bounds(problem, columns.take(rows)) for rows in _parts(len(columns))]
    least = np.concatenate(bounds) if bounds else np.zeros(0)
    best = np.inf
    for rows in np.array_split(np.argsort(least, kind="stable"), max(1, len(least) // CHUNK)):
        if not len(rows) or least[rows[0]] >= best or not np.isfinite(least[rows[0]]):
            break
        rows = rows[np.isfinite(least[rows])]
        found = simulate_many(problem, columns.take(rows))
        best = min(best, float(np.where(found.fits, found.step_time_ns, np.inf).min()))
    return best / NS_PER_S if np.isfinite(best) else None


def _parts(number: int) -> list[IntArray]:
    return [np.arange(start, min(start + 2**16, number)) for start in range(0, number, 2**16)]


def _bounds(problem: Problem, columns: LayoutColumns) -> Any:
    """Least step of each layout over the recompute modes, ns; infinite where none fits."""
    found = uniform_bounds(problem, columns, layout_costs(problem, columns))
    fits = found.memory_bytes <= problem.hardware.usable_bytes
    return np.where(fits, found.step_time_ns, np.inf).min(axis=1)


def smaller_batches(model: Tree, system: Tree, procs: int, batch: int, tasks: Sequence[Task]) -> float | None:
    """Least step for ``batch`` sequences, at the rate of plans whose data parallelism does not divide it: proved
    for each smaller batch that Calculon takes."""
    degrees: dict[int, set[int]] = {}
    for task in tasks:
        if task.batch != batch:
            degrees.setdefault(task.batch, set()).add(task.dp)
    steps = []
    for smaller, dp in sorted(degrees.items()):
        space = whole_space().model_copy(update={"dp": tuple(sorted(dp))})
        result = solve(search_problem(model, system, procs, smaller, space), gap=1e-4)
        if result.step_time_s is not None:
            steps.append(result.step_time_s * batch / smaller)
    return min(steps, default=None)
