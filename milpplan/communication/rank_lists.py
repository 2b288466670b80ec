"""Lists of the ranks of every group of a layout."""

from __future__ import annotations

import numpy as np

from milpplan.problem.hardware import HardwareSpec
from milpplan.problem.plan import Layout
from milpplan.simulation.layout_columns import IntArray


def _grid(sizes: dict[str, int], order: list[str], wanted: tuple[str, ...]) -> IntArray:
    """Number the ranks on a grid with axes ``wanted``; the first name of ``order`` changes fastest."""
    names = order[::-1]
    numbers = np.arange(int(np.prod([sizes[name] for name in names]))).reshape([sizes[name] for name in names])
    return numbers.transpose([names.index(name) for name in wanted])


def rank_lists(layout: Layout, shards: int, expert_shards: int) -> dict[str, IntArray]:
    """List the groups of a layout. Source: see ``placement``.

    Args:
        layout: layout.
        shards, expert_shards: number of neighbouring replicas that shard the states of dense weights and of
        experts.

    Returns:
        Groups [pp, groups of a stage, ranks] by their names in ``messages.Groups``, ranks in ascending order.
    """
    order = layout.rank_order.split("-")
    expert_axes = {"tp": ["etp"], "cp": [], "dp": ["ep", "edp"], "pp": ["pp"]}
    sizes = {name: getattr(layout, name) for name in ("tp", "cp", "dp", "pp", "ep", "etp")}
    sizes["edp"] = layout.expert_dp
    dense = _grid(sizes, order, ("pp", "dp", "cp", "tp"))
    experts = _grid(sizes, [name for axis in order for name in expert_axes[axis]], ("pp", "edp", "ep", "etp"))
    lists = {
        "tensor": dense.reshape(layout.pp, -1, layout.tp),
        "context": dense.transpose(0, 1, 3, 2).reshape(layout.pp, -1, layout.cp),
        "replicas": dense.transpose(0, 3, 1, 2).reshape(layout.pp, layout.tp, -1),
        "expert_tensor": experts.reshape(layout.pp, -1, layout.etp),
        "expert": experts.transpose(0, 1, 3, 2).reshape(layout.pp, -1, layout.ep),
        "expert_replicas": experts.transpose(0, 2, 3, 1).reshape(layout.pp, -1, layout.expert_dp),
    }
    lists = {name: np.sort(groups, axis=-1) for name, groups in lists.items()}
    for name, shared, count in (("replica", "replicas", shards), ("expert", "expert_replicas", expert_shards)):
        rows = lists[shared].reshape(layout.pp, lists[shared].shape[1], -1, count)
        lists[f"{name}_shards"] = rows.reshape(layout.pp, -1, count)
        lists[f"{name}_copies"] = rows.swapaxes(-1, -2).reshape(layout.pp, -1, rows.shape[2])
    lists["stage"] = np.sort(dense.reshape(layout.pp, 1, -1), axis=-1)
    return lists


def gpus_per_domain(hardware: HardwareSpec, num_gpus: int) -> int:
    """Return the number of consecutive ranks in a domain.

    If a scheduler places segments, it is the largest segment that divides the job, else the largest segment.
    """
    segments = hardware.scale_up.segments or (hardware.scale_up.num_gpus,)
    return max((size for size in segments if num_gpus % size == 0), default=max(segments))
