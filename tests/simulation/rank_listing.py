"""Process groups by writing down every rank: coordinates counted like the digits of a number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import product

from milpplan.problem import Layout

Ranks = tuple[int, ...]


def _numbered(sizes: dict[str, int], order: list[str]) -> Iterator[tuple[int, dict[str, int]]]:
    """(rank, coordinates), the first name of the order changing fastest."""
    outside_first = order[::-1]
    for rank, digits in enumerate(product(*(range(sizes[name]) for name in outside_first))):
        yield rank, dict(zip(outside_first, digits, strict=True))


def _groups(sizes: dict[str, int], order: list[str], along: tuple[str, ...]) -> tuple[Ranks, ...]:
    """Ranks that differ in the coordinates ``along`` only, in ascending order."""
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, place in _numbered(sizes, order):
        found[tuple(place[name] for name in order if name not in along)].append(rank)
    return tuple(sorted(tuple(ranks) for ranks in found.values()))


@cache
def listed(layout: Layout) -> dict[str, tuple[Ranks, ...]]:
    """Every group of a layout, by its name in ``milpplan.simulation.network.placement``; ``stages`` and
    ``expert_stages`` are the ranks of each pipeline stage in either grid, in the order of the stages."""
    order = layout.rank_order.split("-")
    dense = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": layout.pp}
    names = {"tp": ["etp"], "cp": [], "dp": ["ep", "edp"], "pp": ["pp"]}
    expert_order = [name for axis in order for name in names[axis]]
    replicas = layout.tp * layout.cp * layout.dp // (layout.ep * layout.etp)
    experts = {"etp": layout.etp, "ep": layout.ep, "edp": replicas, "pp": layout.pp}
    contexts, u = _groups(dense, order, ("cp",)), layout.ulysses
    return {
        "tensor": _groups(dense, order, ("tp",)),
        "context": contexts,
        "head_exchange": tuple(sorted(r[i : i + u] for r in contexts for i in range(0, layout.cp, u))),
        "context_ring": tuple(sorted(r[i::u] for r in contexts for i in range(u))),
        "pipeline": _groups(dense, order, ("pp",)),
        "replicas": _groups(dense, order, ("cp", "dp")),
        "expert_tensor": _groups(experts, expert_order, ("etp",)),
        "expert": _groups(experts, expert_order, ("ep",)),
        "expert_replicas": _groups(experts, expert_order, ("edp",)),
        "stages": tuple(_stage(dense, order, stage) for stage in range(layout.pp)),
        "expert_stages": tuple(_stage(experts, expert_order, stage) for stage in range(layout.pp)),
    }


def _stage(sizes: dict[str, int], order: list[str], stage: int) -> Ranks:
    return tuple(rank for rank, place in _numbered(sizes, order) if place["pp"] == stage)
