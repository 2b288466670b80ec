"""Comparison of two rank orders by the placement of their groups."""

from __future__ import annotations

from milpplan.problem.plan import Layout, RankOrder


def placed_alike(layout: Layout, order: RankOrder, num_replicas: int) -> bool:
    """Test whether another rank order gives every group of the layout the same ranks.

    Degrees of one may stand anywhere in the order.

    Args:
        layout: degrees, and their order.
        order: the other order.
        num_replicas: replicas of the experts' weights, tp * cp * dp / (ep * etp); 1 without experts.
    """
    return _orders(layout, layout.rank_order, num_replicas) == _orders(layout, order, num_replicas)


def _orders(layout: Layout, order: RankOrder, num_replicas: int) -> tuple[list[str], list[str]]:
    """List the degrees above one, innermost first, of dense layers and of experts."""
    sizes = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": layout.pp}
    experts = {"tp": [("etp", layout.etp)], "cp": [], "pp": [("pp", layout.pp)]}
    experts["dp"] = [("ep", layout.ep), ("edp", num_replicas)]
    names = order.split("-")
    dense = [name for name in names if sizes[name] > 1]
    return dense, [part for name in names for part, size in experts[name] if size > 1]
