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

from milpplan.simulation.layout_columns import BoolArray, FloatArray, IntArray

NOTHING = -1e30
"""What nothing is worth."""


@dataclass(frozen=True, eq=False)
class Items:
    """Sequences of ascending ``sizes`` in grains, so many ``counts`` of each, of which some may be held; [n]. The
    first ``loose`` of them are of one grain, and of any number."""

    sizes: IntArray
    counts: IntArray
    fits: BoolArray
    num_loose: int = 0

    def num_passes(self, room: int) -> int:
        """How often the tables of so many grains are gone through."""
        most = np.minimum(self.counts, room // self.sizes)[self.fits]
        most[: self.num_loose] = 1
        return int((2 + np.ceil(np.log2(np.maximum(1, most)))).sum())


@dataclass(eq=False)
class KnapsackDP:
    """The dynamic program for ``values`` [R, n] in up to ``room`` grains, with what leads to its entries."""

    items: Items
    values: FloatArray
    capacity: int
    # By length: F of the shorter ones, and E.
    steps: dict[int, tuple[FloatArray, FloatArray]] = field(default_factory=dict)

    def rows(self) -> Iterator[tuple[int, FloatArray]]:
        """(k, E_k of 1 to ``room`` grains [R, room]), the shortest first."""
        room, fitting = self.capacity, np.flatnonzero(self.items.fits).tolist()
        shape = (len(self.values), room + 1)
        best, spare = np.full(shape, NOTHING), np.empty(shape)
        best[:, 0] = 0.0
        for k in fitting:
            held = np.empty(shape)
            if k < self.items.num_loose:
                self._fill(best, k, held)
            else:
                self._add(best, k, held, spare)
            self.steps[k] = best, held
            yield k, held[:, 1:]
            best = np.maximum(best, held)

    def _add(self, best: FloatArray, k: int, held: FloatArray, spare: FloatArray) -> None:
        """``held``: E_k of F_{k-1}. Nothing here makes new arrays: they are what most of the time would go to."""
        room, size, value = self.capacity, int(self.items.sizes[k]), self.values[:, k, None]
        held[:, :size] = NOTHING
        np.add(best[:, : room + 1 - size], value, out=held[:, size:])
        for part in _parts(min(int(self.items.counts[k]), room // size) - 1):
            shift = part * size
            more = spare[:, shift:]
            np.add(held[:, : room + 1 - shift], part * value, out=more)
            np.maximum(held[:, shift:], more, out=held[:, shift:])

    def _fill(self, best: FloatArray, k: int, held: FloatArray) -> None:
        """The same of loose ones."""
        worth = self.values[:, k, None] * np.arange(self.capacity + 1)
        held[:, 0] = NOTHING
        np.add(np.maximum.accumulate(best - worth, axis=1)[:, :-1], worth[:, 1:], out=held[:, 1:])

    def content(self, k: int, grains: int, row: int) -> IntArray:
        """Sequences [n] of an entry: so many grains, k the longest, values of ``row``."""
        found = np.zeros_like(self.items.counts)
        while True:
            before, size, value = self.steps[k][0][row], int(self.items.sizes[k]), self.values[row, k]
            most = grains // size if k < self.items.num_loose else min(grains // size, int(self.items.counts[k]))
            number = np.arange(1, most + 1)
            found[k] = 1 + int((before[grains - number * size] + number * value).argmax())
            grains -= int(found[k]) * size
            if grains == 0:
                return found
            worth = before[grains]
            k = next(one for one in reversed(self.steps) if one < k and self.steps[one][1][row, grains] == worth)


def _parts(number: int) -> list[int]:
    """1, 2, 4, ... and a rest, whose sums are all numbers up to ``number``."""
    found, part = [], 1
    while number > 0:
        found.append(min(part, number))
        number -= part
        part *= 2
    return found
