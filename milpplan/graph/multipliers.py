"""Lagrange multipliers of memory limits, which raise the bound of ``message_passing``."""

from __future__ import annotations

import numpy as np

from milpplan.graph.instance import HALF, Instance
from milpplan.optimize.milp.program import FloatArray, IntArray


class Multipliers:
    """Multipliers of an instance's memory limits, moved after every pass.

    With one limit, the next multiplier is where the lines of two choices cross: one that breaks the limit and one
    that meets it (exact on forests, in finitely many steps). With several limits, Polyak's subgradient steps.

    Source: G. Handler and I. Zang, Networks 10 (1980); B. Polyak, USSR Comput. Math. 9 (1969).
    """

    def __init__(self, num_rows: int) -> None:
        self.values: FloatArray = np.zeros(num_rows)
        self._above: tuple[int, int] | None = None
        self._below: tuple[int, int] | None = None
        self._shrink = 1.0
        self._best: int | None = None

    def update(self, instance: Instance, picked: dict[int, int], exact: bool, upper: int, bound: int) -> bool:
        """Move the multipliers after a pass.

        Args:
            instance: the instance whose limits are priced.
            picked: position of every node's strategy in the choice that the pass met.
            exact: ``picked`` is the cheapest choice at the present multipliers.
            upper: cost of the incumbent, ``HALF`` where there is none.
            bound: lower bound at the present multipliers.

        Returns:
            False where the multipliers stay as they are.
        """
        if self.values.size == 0:
            return False
        load = np.zeros(self.values.size, np.int64)
        for i, loads in instance.loads.items():
            load[instance.rows[i]] += loads[:, picked[i]]
        if self.values.size == 1:
            return self._crossing(instance, picked, int(load[0]), exact)
        return self._step(load, instance.limits, upper, bound)

    def _crossing(self, instance: Instance, picked: dict[int, int], load: int, exact: bool) -> bool:
        """Move the multiplier of one limit to where the lines of two choices cross."""
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
            smallest_load = sum(int(loads[0].min()) for loads in instance.loads.values())
            # No choice that fits is known yet: raise the multiplier by the range of costs over the excess.
            spread = sum(int(c.max() - c.min()) for c in instance.costs.values()) + 1
            step = spread / max(1, load - smallest_load)
            self.values = np.array([max(4.0 * self.values[0], step)])
            return bool(self.values[0] < 1e30)
        (high, heavy), (low, light) = self._above, self._below
        multiplier = max(0.0, (low - high) / max(1, heavy - light))
        unchanged = bool(np.isclose(multiplier, self.values[0], rtol=1e-12, atol=0.0))
        self.values = np.array([multiplier])
        return not unchanged or not exact

    def _step(self, load: IntArray, limits: IntArray, upper: int, bound: int) -> bool:
        """Take a subgradient step of Polyak's length."""
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
