"""Virtual stages of uniform plans: which layers each holds, and which of them cost the same."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from milpplan.problem.plan import Layout, Plan, Recompute, VirtualStage
from milpplan.problem.problem import Problem
from milpplan.simulation.layout_columns import IntArray

Member = tuple[tuple[int, ...], bool, bool]
"""(kinds of the layers held, whether the first virtual stage, whether the last)."""


def even_chunks(num_layers: int, num_stages: int) -> list[tuple[int, int]]:
    """First layer and end of every virtual stage of a uniform plan: ceil(L / J) layers in each, the last ones hold
    what is left."""
    each = -(-num_layers // num_stages)
    return [(min(j * each, num_layers), min((j + 1) * each, num_layers)) for j in range(num_stages)]


def uniform_plan(problem: Problem, layout: Layout, mode: str) -> Plan:
    """The plan of ``even_chunks`` with one recompute mode for all layers."""
    held = _even_stages(problem.model.num_layers, layout.num_virtual_stages, mode)
    other = tuple(stage.recompute for stage in held) * max(0, len(layout.replica_micro_batches) - 1)
    return Plan(layout=layout, virtual_stages=held, other_recompute=other)


@lru_cache(maxsize=512)
def _even_stages(num_layers: int, num_stages: int, mode: str) -> tuple[VirtualStage, ...]:
    """The virtual stages of a uniform plan: few kinds of plans share them."""
    held = []
    for first, last in even_chunks(num_layers, num_stages):
        recompute = Recompute(**({mode: last - first} if mode != "none" else {}))
        held.append(VirtualStage(layers=(first, last), recompute=recompute))
    return tuple(held)


@dataclass(frozen=True, slots=True)
class StageClasses:
    """The distinct virtual stages of a uniform plan, and which one each is, ``class_of`` [J]."""

    members: tuple[Member, ...]
    class_of: IntArray


@lru_cache(maxsize=512)
def stage_classes(layer_kinds: tuple[int, ...], num_stages: int) -> StageClasses:
    """Classes of the virtual stages of uniform plans of J stages."""
    known: dict[Member, int] = {}
    class_of = np.zeros(num_stages, dtype=np.int64)
    for stage, (first, last) in enumerate(even_chunks(len(layer_kinds), num_stages)):
        member = (layer_kinds[first:last], stage == 0, stage == num_stages - 1)
        class_of[stage] = known.setdefault(member, len(known))
    class_of.flags.writeable = False
    return StageClasses(tuple(known), class_of)
