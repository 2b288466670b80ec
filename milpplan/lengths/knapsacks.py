"""What sequences in exactly so many grains are worth at most, by the longest of them.

For values of the sequences (one row for every way to count them) the most that sequences up to length k, with at
least one of k and at most as many of each as there are, are worth in exactly G grains is a dynamic program over
the lengths, ascending, so that k is the longest:

    E_k[G] = value_k + max of F_{k-1}[G - g_k] and with up to n_k - 1 more of k,     F_k = max(F_{k-1}, E_k)

with parts 1, 2, 4, ... of the others. *Loose* ones are of one grain each, of any number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from milpplan.costs.columns import BoolArray, FloatArray, IntArray

NOTHING = -1e30
"""What nothing is worth."""


@dataclass(frozen=True, eq=False)
class Items:
    """Sequences of ascending ``sizes`` in grains, so many ``counts`` of each, of which some may be held; [n]. The
    first ``loose`` of them are of one grain, and of any number."""

    sizes: IntArray
    counts: IntArray
    fits: BoolArray
    loose: int = 0

    def passes(self, room: int) -> int:
        """How often the tables of so many grains are gone through."""
        most = np.minimum(self.counts, room // self.sizes)[self.fits]
        most[: self.loose] = 1
        return int((2 + np.ceil(np.log2(np.maximum(1, most)))).sum())


@dataclass(eq=False)
class Knapsacks:
    """The dynamic program for ``values`` [R, n] in up to ``room`` grains, with what leads to its entries."""

    items: Items
    values: FloatArray
    room: int
    # By length: F of the shorter ones, the parts of more of it with E before each, and E.
    steps: dict[int, tuple[FloatArray, list[tuple[int, FloatArray]], FloatArray]] = field(default_factory=dict)

    def rows(self) -> Iterator[tuple[int, FloatArray]]:
        """(k, E_k of 1 to ``room`` grains [R, room]), the shortest first."""
        room = self.room
        best = np.full((len(self.values), room + 1), NOTHING)
        best[:, 0] = 0.0
        for k in np.flatnonzero(self.items.fits).tolist():
            held, parts = self._filled(best, k) if k < self.items.loose else self._added(best, k)
            self.steps[k] = best, parts, held
            yield k, held[:, 1:]
            best = np.maximum(best, held)

    def _added(self, best: FloatArray, k: int) -> tuple[FloatArray, list[tuple[int, FloatArray]]]:
        """E_k of F_{k-1}, with the parts of more of it and E before each."""
        room, size, value = self.room, int(self.items.sizes[k]), self.values[:, k, None]
        held = np.full_like(best, NOTHING)
        held[:, size:] = best[:, : room + 1 - size] + value
        parts = []
        for part in _parts(min(int(self.items.counts[k]), room // size) - 1):
            parts.append((part, held))
            more = held.copy()
            shift = part * size
            np.maximum(more[:, shift:], held[:, : room + 1 - shift] + part * value, out=more[:, shift:])
            held = more
        return held, parts

    def _filled(self, best: FloatArray, k: int) -> tuple[FloatArray, list[tuple[int, FloatArray]]]:
        """The same of loose ones."""
        worth = self.values[:, k, None] * np.arange(self.room + 1)
        held = np.full_like(best, NOTHING)
        held[:, 1:] = np.maximum.accumulate(best - worth, axis=1)[:, :-1] + worth[:, 1:]
        return held, []

    def content(self, k: int, grains: int, row: int) -> IntArray:
        """Sequences [n] of an entry: so many grains, k the longest, values of ``row``."""
        found = np.zeros_like(self.items.counts)
        while True:
            before, parts, held = self.steps[k]
            if k < self.items.loose:
                left = int((before[row, :grains] - self.values[row, k] * np.arange(grains)).argmax())
                found[k] += grains - left - 1
                grains = left + 1
            size, now = int(self.items.sizes[k]), held
            for part, earlier in reversed(parts):
                if now[row, grains] != earlier[row, grains]:
                    found[k] += part
                    grains -= part * size
                now = earlier
            found[k] += 1
            grains -= size
            if grains == 0:
                return found
            worth = before[row, grains]
            k = next(one for one in reversed(self.steps) if one < k and self.steps[one][2][row, grains] == worth)


def _parts(number: int) -> list[int]:
    """1, 2, 4, ... and a rest, whose sums are all numbers up to ``number``."""
    found, part = [], 1
    while number > 0:
        found.append(min(part, number))
        number -= part
        part *= 2
    return found
