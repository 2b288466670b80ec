"""Knapsack DP: the maximum value of sequences in exactly so many quanta, by the longest of them.

For values of the sequences (one row for every vector of values) the maximum value of sequences up to length k,
with at least one of k and at most as many of each as there are, in exactly G quanta is a dynamic program over the
lengths, ascending, so that k is the longest:

    E_k[G] = value_k + max of F_{k-1}[G - g_k] and with up to n_k - 1 more of k,     F_k = max(F_{k-1}, E_k)

with parts 1, 2, 4, ... of the further ones. *Loose* items have one quantum each, in any number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from milpplan.simulation.layout_columns import BoolArray, FloatArray, IntArray

NOTHING = -1e30
"""Value of impossible contents."""


@dataclass(frozen=True, eq=False)
class Items:
    """Sequences of ascending ``sizes`` in quanta, ``counts`` of each, and whether each ``fits``; [n]."""

    sizes: IntArray
    counts: IntArray
    fits: BoolArray
    num_loose: int = 0
    """Number of loose items, which come first."""

    def num_passes(self, capacity: int) -> int:
        """Return the number of passes over tables of so many quanta."""
        max_counts = np.minimum(self.counts, capacity // self.sizes)[self.fits]
        max_counts[: self.num_loose] = 1
        return int((2 + np.ceil(np.log2(np.maximum(1, max_counts)))).sum())


@dataclass(eq=False)
class KnapsackDP:
    """The dynamic program for ``values`` [R, n] in up to ``capacity`` quanta, with its trace."""

    items: Items
    values: FloatArray
    capacity: int
    # By length: F of the shorter ones, and E.
    steps: dict[int, tuple[FloatArray, FloatArray]] = field(default_factory=dict)

    def rows(self) -> Iterator[tuple[int, FloatArray]]:
        """Yield (k, E_k of 1 to ``capacity`` quanta [R, capacity]), the shortest first."""
        capacity, fitting = self.capacity, np.flatnonzero(self.items.fits).tolist()
        shape = (len(self.values), capacity + 1)
        best, spare = np.full(shape, NOTHING), np.empty(shape)
        best[:, 0] = 0.0
        for k in fitting:
            with_k = np.empty(shape)
            if k < self.items.num_loose:
                self._fill(best, k, with_k)
            else:
                self._add(best, k, with_k, spare)
            self.steps[k] = best, with_k
            yield k, with_k[:, 1:]
            best = np.maximum(best, with_k)

    def _add(self, best: FloatArray, k: int, with_k: FloatArray, spare: FloatArray) -> None:
        """Compute E_k from F_{k-1} into ``with_k``, without new arrays, which would dominate the time."""
        capacity, size, value = self.capacity, int(self.items.sizes[k]), self.values[:, k, None]
        with_k[:, :size] = NOTHING
        np.add(best[:, : capacity + 1 - size], value, out=with_k[:, size:])
        for part in _parts(min(int(self.items.counts[k]), capacity // size) - 1):
            shift = part * size
            shifted = spare[:, shift:]
            np.add(with_k[:, : capacity + 1 - shift], part * value, out=shifted)
            np.maximum(with_k[:, shift:], shifted, out=with_k[:, shift:])

    def _fill(self, best: FloatArray, k: int, with_k: FloatArray) -> None:
        """Compute E_k of a loose item."""
        values = self.values[:, k, None] * np.arange(self.capacity + 1)
        with_k[:, 0] = NOTHING
        np.add(np.maximum.accumulate(best - values, axis=1)[:, :-1], values[:, 1:], out=with_k[:, 1:])

    def content(self, k: int, quanta: int, row: int) -> IntArray:
        """Return the sequences [n] of an entry: so many quanta, k the longest, values of ``row``."""
        content = np.zeros_like(self.items.counts)
        while True:
            shorter, size, value = self.steps[k][0][row], int(self.items.sizes[k]), self.values[row, k]
            max_number = (
                quanta // size if k < self.items.num_loose else min(quanta // size, int(self.items.counts[k]))
            )
            number = np.arange(1, max_number + 1)
            content[k] = 1 + int((shorter[quanta - number * size] + number * value).argmax())
            quanta -= int(content[k]) * size
            if quanta == 0:
                return content
            entry = shorter[quanta]
            k = next(
                length
                for length in reversed(self.steps)
                if length < k and self.steps[length][1][row, quanta] == entry
            )


def _parts(number: int) -> list[int]:
    """Return 1, 2, 4, ... and a rest, whose sums are all numbers up to ``number``."""
    parts, part = [], 1
    while number > 0:
        parts.append(min(part, number))
        number -= part
        part *= 2
    return parts
