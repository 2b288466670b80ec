"""First plan of a problem, before its space is listed or bounded, from a search in a small part of the space.

A space may have billions of layouts, and bounding them may take minutes. A practitioner tries few: one number of
GPUs, one chunk a stage, plain 1F1B, nothing offloaded. Such parts of the declared space, each wider than the one
before, are searched until a plan fits. In each part the uniform plans of the layouts come first; where none fits,
balanced plans follow (``layout.compact_relaxation``), of fast layouts and of layouts with small memory in turn.
The plan is a plan of the whole space, and no proof rests on the part in which it was found.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from milpplan.optimize.context import SolveContext
from milpplan.optimize.search.best_first import Search
from milpplan.optimize.search.decide import decide_layouts
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.problem.plan import RANK_ORDERS, Plan
from milpplan.problem.problem import Job, Problem

PLAIN: Final[dict[str, tuple[Any, ...]]] = {
    "cp": (1,),
    "etp": (1,),
    "vpp": (1,),
    "micro_batch_size": (1,),
    "schedule": ("1f1b", "gpipe", "zb-h1"),
    "offload_weights": (False,),
    "offload_activations": (False,),
    "offload_optimizer": (False,),
}
"""Values tried first for fields of the space; other fields keep all their values."""
ROOMIER: Final = ("cp", "etp", "micro_batch_size")
"""Fields opened next: more ranks share an activation, or experts."""
CHUNKED: Final = ("vpp", "schedule")
"""Fields opened after those: chunks put the ends of the model where there is memory."""
OFFLOADS: Final = ("offload_weights", "offload_activations", "offload_optimizer")
"""Fields turned on last."""


def first_plan(problem: Problem, context: SolveContext) -> Plan | None:
    """Find a plan of the problem's space that fits, quickly.

    Args:
        problem: the problem.
        context: context of the solve; the work is counted there.

    Returns:
        The plan; None where no part of the space has one, or none was found in time.
    """
    quiet = replace(context, options=replace(context.options, callback=None, on_program=None))
    for part in _parts(problem):
        if context.out_of_time():
            return None
        space = layout_space(part, context.options.forbid)
        if not len(space):
            continue
        search = Search(part, space, quiet, time.monotonic(), first_only=True)
        decide_layouts(search)
        if search.best is not None:
            return search.best[1]
    return None


def _parts(problem: Problem) -> Iterator[Problem]:
    """Yield parts of the problem's space, each with one number of GPUs and one batch; largest numbers first,
    because most plans fit on them."""
    job = problem.job
    sizes = dict.fromkeys((job.num_gpus_values[-1], job.num_gpus_values[len(job.num_gpus_values) // 2]))
    plain = _narrowed(problem, PLAIN)
    roomier, chunked = (
        _narrowed(problem, {name: values for name, values in PLAIN.items() if name not in opened})
        for opened in (ROOMIER, CHUNKED)
    )
    offloaded = _narrowed(problem, {**PLAIN, **dict.fromkeys(OFFLOADS, (True,))})
    for part in dict.fromkeys((plain, roomier, chunked, offloaded)):
        for gpus in sizes:
            yield part.model_copy(update={"job": _job(problem, gpus)})


def _job(problem: Problem, gpus: int) -> Job:
    """Return the job on ``gpus`` GPUs, with the batch that has the largest power of two in common with it."""
    batches = problem.job.global_batch_values
    batch = max(batches, key=lambda value: (_common(value, gpus), value))
    fixed: dict[str, Any] = {"num_gpus": gpus, "global_batch_size": batch}
    return problem.job.model_copy(update=fixed)


def _common(value: int, gpus: int) -> int:
    """Return the largest power of two that divides both numbers."""
    return min(value & -value, gpus & -gpus)


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
