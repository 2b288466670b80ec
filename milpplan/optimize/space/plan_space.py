"""Plans of a space beyond their layouts: splits of the layers among virtual stages, and membership.

The model's layers are runs of equal layers, which a split cuts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np

from milpplan.problem import NO_MODULES, Layout, Plan, Problem, Recompute
from milpplan.simulation import BoolArray, IntArray
from milpplan.simulation.bulk import has_uniform_plan, uniform_plan


def layer_bounds(problem: Problem, layout: Layout) -> tuple[tuple[int, int], ...]:
    """Return (minimum, maximum) layers of every virtual stage in the free space: see ``Space``."""
    layers, stages = problem.model.num_layers, layout.num_virtual_stages
    inner = fewest_inner_layers(problem, layout.vpp, stages)
    even = layout.vpp > 1 and problem.interleaved_layers == "even"
    ceiling = max(1, -(-layers // stages)) if even else layers
    free = layers - inner * max(0, stages - 2)
    end = 0, min(ceiling, free)
    if stages == 1:
        return (end,)
    return (end, *((inner, min(ceiling, free + inner)),) * (stages - 2), end)


def even_splits(problem: Problem, layout: Layout) -> tuple[tuple[int, ...], ...] | None:
    """Return every split of a layout that even interleaving allows, [splits][J]; None where splits are free."""
    return splits_into(problem, layout.vpp, layout.num_virtual_stages)


def splits_into(problem: Problem, vpp: int, num_stages: int) -> tuple[tuple[int, ...], ...] | None:
    """Return every even split by the numbers of virtual stages of a rank and of a pipeline, J; None where splits
    are free.

    The ends hold 0 to ceil(L / J) layers each. Of the inner stages the first hold ceil, the others floor (at least
    one), as many of each as the total demands. None starts with a layer that takes the keys of the layer before.
    """
    if vpp == 1 or problem.interleaved_layers != "even":
        return None
    layers, inner = problem.model.num_layers, num_stages - 2
    small, large = max(1, layers // num_stages), max(1, -(-layers // num_stages))
    splits = []
    for first in range(large + 1):
        for last in range(large + 1):
            larger = layers - first - last - small * inner
            if 0 <= larger <= inner * (large - small):
                splits.append((first, *(large,) * larger, *(small,) * (inner - larger), last))
    taking = problem.model.taking_layers
    return tuple(split for split in splits if taking.isdisjoint(accumulate(split))) if taking else tuple(splits)


def splits_exist(problem: Problem, c: Mapping[str, IntArray]) -> BoolArray:
    """Keep layouts that some split of the layers suits.

    Uniform space: ceil(L / J) layers in all virtual stages but the last, which gets the rest. Selections do not
    cross stages: no virtual stage starts with a layer that takes the keys of the layer before. Source:
    Megatron-LM@d98e8a64 core/models/gpt/experimental_attention_variant_module_specs.py
    (``_validate_dsa_index_share_pipeline_split``).
    """
    layers, stages, taking = problem.model.num_layers, c["pp"] * c["vpp"], problem.model.taking_layers
    if problem.space.kind == "uniform":
        kept = np.asarray(layers - -(-layers // stages) * (stages - 1) >= 1)
    else:
        kept = stages <= layers + 2 - len(taking)
    if taking:
        pairs = list(zip(c["vpp"].tolist(), stages.tolist(), strict=True))
        split = {pair: splits_into(problem, *pair) != () for pair in set(pairs)}
        if problem.space.kind == "uniform":
            split = {pair: has_uniform_plan(problem.model, pair[1]) for pair in set(pairs)}
        kept &= np.array([split[pair] for pair in pairs], dtype=np.bool_)
    return kept


def fewest_inner_layers(problem: Problem, vpp: int, num_stages: int) -> int:
    """Return the minimum layers of an inner virtual stage: one, or with even interleaving floor(L / J)."""
    if vpp > 1 and problem.interleaved_layers == "even":
        return max(1, problem.model.num_layers // num_stages)
    return 1


def model_runs(problem: Problem) -> tuple[tuple[int, int], ...]:
    """Return the runs of equal layers in the model: (kind, count)."""
    runs: list[tuple[int, int]] = []
    for kind in problem.model.layer_kinds:
        if runs and runs[-1][0] == kind:
            runs[-1] = (kind, runs[-1][1] + 1)
        else:
            runs.append((kind, 1))
    return tuple(runs)


def layers_up_to(bounds: Sequence[tuple[int, int]], total: int) -> tuple[IntArray, IntArray]:
    """Return the minimum layers of the virtual stages up to each stage together, and from each stage on, [J].

    ``bounds``: minimum and maximum layers of every virtual stage. ``total``: layers of the model.
    """
    low, high = np.array(bounds, dtype=np.int64).T
    first = np.maximum(low.cumsum(), total - (high[::-1].cumsum()[::-1] - high))
    last = np.maximum(low[::-1].cumsum()[::-1], total - (high.cumsum() - high))
    return np.clip(first, 0, total), np.clip(last, 0, total)


def place_bounds(runs: tuple[tuple[int, int], ...], counts: IntArray) -> tuple[IntArray, IntArray]:
    """Return minimum and maximum layers before a stretch of the model with ``counts`` layers of each run, [...,
    R]."""
    lengths = np.array([length for _, length in runs], dtype=np.int64)
    used, total = counts > 0, int(lengths.sum())
    first = used.argmax(axis=-1)
    head = np.take_along_axis(counts, first[..., None], axis=-1)[..., 0]
    latest = lengths.cumsum()[first] - head
    earliest = np.where(used.sum(axis=-1) > 1, latest, latest - lengths[first] + head)
    empty = ~used.any(axis=-1)
    return np.where(empty, 0, earliest), np.where(empty, total, latest)


@lru_cache(maxsize=64)
def run_counts(runs: tuple[tuple[int, int], ...]) -> IntArray:
    """Return the layers of each run in every stretch of consecutive layers, up to its position in a run, [N, R].

    The first stretch is empty.
    """
    edges = np.cumsum([0, *(length for _, length in runs)])
    start, end = np.triu_indices(int(edges[-1]) + 1, 1)
    first, last = np.searchsorted(edges, start, "right") - 1, np.searchsorted(edges, end, "left") - 1
    # Of the places within one run the first stands for all.
    rows = np.flatnonzero((first < last) | (start == edges[first]))
    rows = rows[np.lexsort((end[rows], -start[rows], last[rows], first[rows]))]
    held = np.minimum(end[rows, None], edges[1:]) - np.maximum(start[rows, None], edges[:-1])
    counts = np.concatenate([np.zeros((1, len(runs)), dtype=np.int64), np.maximum(held, 0)])
    counts.setflags(write=False)
    return counts


def in_space(problem: Problem, plan: Plan) -> bool:
    """Return True if a plan's stages are in the space; its layout is not checked."""
    if plan.virtual_stages[-1].layers[1] != problem.model.num_layers:
        return False
    modes = problem.recompute_modes
    if problem.space.kind == "uniform":
        return any(plan == uniform_plan(problem, plan.layout, mode) for mode in modes)
    bounds, other = layer_bounds(problem, plan.layout), plan.other_recompute
    if any((part.full and "full" not in modes) or (part.selective and "selective" not in modes) for part in other):
        return False
    if "none" not in modes and any(
        part.full + part.selective < stage.num_layers
        for part, stage in zip(other, plan.virtual_stages, strict=False)
    ):
        return False
    sizes = [stage.num_layers for stage in plan.virtual_stages]
    splits = even_splits(problem, plan.layout)
    if splits is not None and tuple(sizes) not in splits:
        return False
    if not problem.model.taking_layers.isdisjoint(accumulate(sizes)):
        return False
    low, high = np.array(bounds).T
    within_bounds = bool(((low <= sizes) & (sizes <= high)).all())
    return within_bounds and recomputes_as_declared(problem, plan)


def with_used_modules(problem: Problem, plan: Plan) -> Plan:
    """Return a plan without modules of selective recomputation that no layer uses, if the space has such layouts.

    Step and memory are the same: a layout's modules count for selectively recomputed layers alone.
    """
    named = plan.layout.recompute_modules
    settings = (*(stage.recompute for stage in plan.virtual_stages), *plan.other_recompute)
    if named == NO_MODULES or NO_MODULES not in problem.module_sets or any(part.selective for part in settings):
        return plan
    return plan.model_copy(update={"layout": plan.layout.model_copy(update={"recompute_modules": NO_MODULES})})


def in_parts(problem: Problem) -> bool:
    """Return True if the recompute settings of a space are searched one by one."""
    return (
        problem.space.kind == "free"
        and problem.space.recompute_counts != "any"
        and len(problem.recompute_modes) > 1
    )


def recomputes_as_declared(problem: Problem, plan: Plan) -> bool:
    """Return True if the space allows the recompute counts of a plan."""
    counts, modes = problem.space.recompute_counts, problem.recompute_modes
    recompute = [stage.recompute for stage in plan.virtual_stages]
    sizes = [stage.num_layers for stage in plan.virtual_stages]
    plain = [size - part.full - part.selective for size, part in zip(sizes, recompute, strict=True)]
    used = {
        "none": sum(plain),
        "selective": sum(r.selective for r in recompute),
        "full": sum(r.full for r in recompute),
    }
    if any(number and mode not in modes for mode, number in used.items()):
        return False
    if counts == "any" or sum(number > 0 for number in used.values()) <= 1:
        return True
    block = max(part.full for part in recompute)
    return counts == "block" and recompute == [Recompute(full=min(block, size)) for size in sizes]
