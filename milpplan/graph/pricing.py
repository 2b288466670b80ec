"""Prices of memory limits that raise the bound of ``sweeps``."""

from __future__ import annotations

import numpy as np

from milpplan.graph.instance import HALF, Instance
from milpplan.optimize.milp.program import FloatArray, IntArray


class Prices:
    """One limit: the price at which the lines of a choice that breaks it and one that meets it cross (exact on
    forests, in finitely many steps). Several: subgradient steps of Polyak's length.

    Source: G. Handler and I. Zang, Networks 10 (1980); B. Polyak, USSR Comput. Math. 9 (1969).
    """

    def __init__(self, num_rows: int) -> None:
        self.values: FloatArray = np.zeros(num_rows)
        self._above: tuple[int, int] | None = None
        self._below: tuple[int, int] | None = None
        self._shrink = 1.0
        self._best: int | None = None

    def update(self, instance: Instance, picked: dict[int, int], exact: bool, upper: int, bound: int) -> bool:
        """New prices after a pass that met the choice ``picked`` (``exact``: the cheapest for the present ones);
        False where they stay."""
        if self.values.size == 0:
            return False
        load = np.zeros(self.values.size, np.int64)
        for i, loads in instance.loads.items():
            load[instance.rows[i]] += loads[:, picked[i]]
        if self.values.size == 1:
            return self._crossing(instance, picked, int(load[0]), exact)
        return self._step(load, instance.limits, upper, bound)

    def _crossing(self, instance: Instance, picked: dict[int, int], load: int, exact: bool) -> bool:
        cost = instance.cost({i: int(instance.kept[i][s]) for i, s in picked.items()})
        if cost >= HALF:
            return False
        if load > int(instance.limits[0]):
            self._above = (cost, load)
        else:
            self._below = (cost, load)
        if self._above is None:
            return False
        if self._below is None:
            least = sum(int(loads[0].min()) for loads in instance.loads.values())
            # Nothing that fits is known: a price at which the whole range of costs buys a hundredth of the excess.
            spread = sum(int(c.max() - c.min()) for c in instance.costs.values()) + 1
            step = spread / max(1, load - least)
            self.values = np.array([max(4.0 * self.values[0], step)])
            return bool(self.values[0] < 1e30)
        (high, heavy), (low, light) = self._above, self._below
        price = max(0.0, (low - high) / max(1, heavy - light))
        same = bool(np.isclose(price, self.values[0], rtol=1e-12, atol=0.0))
        self.values = np.array([price])
        return not same or not exact

    def _step(self, load: IntArray, limits: IntArray, upper: int, bound: int) -> bool:
        excess = (load - limits).astype(np.float64)
        excess = np.where((excess < 0) & (self.values <= 0), 0.0, excess)
        scale = np.maximum(limits.astype(np.float64), 1.0)
        relative = excess / scale
        length = float(relative @ relative)
        if length == 0.0:
            return False
        if self._best is not None and bound <= self._best:
            self._shrink = max(self._shrink * 0.9, 0.05)
        self._best = bound if self._best is None else max(self._best, bound)
        aim = float(upper - bound) if upper < HALF else 0.05 * abs(float(bound)) + 1.0
        step = self._shrink * max(aim, 1.0) / length
        self.values = np.maximum(0.0, self.values + step * relative / scale)
        return True
