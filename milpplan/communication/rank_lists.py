"""The ranks of every group of one layout, written out."""

from __future__ import annotations

import numpy as np

from milpplan.problem.hardware import HardwareSpec
from milpplan.problem.plan import Layout
from milpplan.simulation.layout_columns import IntArray


def _grid(sizes: dict[str, int], order: list[str], wanted: tuple[str, ...]) -> IntArray:
    """Rank numbers [wanted...], the first name of the order changing fastest."""
    names = order[::-1]
    numbers = np.arange(int(np.prod([sizes[name] for name in names]))).reshape([sizes[name] for name in names])
    return numbers.transpose([names.index(name) for name in wanted])


def rank_lists(layout: Layout, shards: int, expert_shards: int) -> dict[str, IntArray]:
    """Groups [pp, groups of a stage, ranks] by their names in ``messages.Groups``, ranks in ascending order.

    ``shards`` and ``expert_shards``: how many neighbouring replicas share the states of dense weights and experts.
    Source: as ``placement``.
    """
    order = layout.rank_order.split("-")
    places = {"tp": ["etp"], "cp": [], "dp": ["ep", "edp"], "pp": ["pp"]}
    sizes = {name: getattr(layout, name) for name in ("tp", "cp", "dp", "pp", "ep", "etp")}
    sizes["edp"] = layout.expert_dp
    dense = _grid(sizes, order, ("pp", "dp", "cp", "tp"))
    experts = _grid(sizes, [name for axis in order for name in places[axis]], ("pp", "edp", "ep", "etp"))
    found = {
        "tensor": dense.reshape(layout.pp, -1, layout.tp),
        "context": dense.transpose(0, 1, 3, 2).reshape(layout.pp, -1, layout.cp),
        "replicas": dense.transpose(0, 3, 1, 2).reshape(layout.pp, layout.tp, -1),
        "expert_tensor": experts.reshape(layout.pp, -1, layout.etp),
        "expert": experts.transpose(0, 1, 3, 2).reshape(layout.pp, -1, layout.ep),
        "expert_replicas": experts.transpose(0, 2, 3, 1).reshape(layout.pp, -1, layout.expert_dp),
    }
    found = {name: np.sort(groups, axis=-1) for name, groups in found.items()}
    for name, shared, count in (("replica", "replicas", shards), ("expert", "expert_replicas", expert_shards)):
        rows = found[shared].reshape(layout.pp, found[shared].shape[1], -1, count)
        found[f"{name}_shards"] = rows.reshape(layout.pp, -1, count)
        found[f"{name}_copies"] = rows.swapaxes(-1, -2).reshape(layout.pp, -1, rows.shape[2])
    found["stage"] = np.sort(dense.reshape(layout.pp, 1, -1), axis=-1)
    return found


def gpus_per_domain(hardware: HardwareSpec, num_gpus: int) -> int:
    """Consecutive ranks in one domain: where a scheduler places segments, the largest that divides the job, or the
    largest that there is."""
    segments = hardware.scale_up.segments or (hardware.scale_up.num_gpus,)
    return max((size for size in segments if num_gpus % size == 0), default=max(segments))
