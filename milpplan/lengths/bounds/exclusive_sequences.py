"""What a group of one stage takes at least where the longest sequences are in it for sure, each of them whole.

What fits under no other strategy of a set runs under the one that holds it. Linear bounds (``work``) share such
sequences out as if they could be cut: evenly over the replicas, with the last tiles of a micro-batch that is full,
while a real one with few long sequences is far from that. Here the m longest sequences H are put on the D replicas
in every way, H_r on replica r, and the others may be shared out as they like.

**One replica** that holds H and other sequences y. Per phase and way of ``work`` (the ring hidden, or exposed) its
micro-batches take B(T_i) + slope (S_i + O_i) with B the base, S the attention and O the last tiles of the longest,
and B(T) >= c + a T up to the capacity (``tables.line_of``). As many micro-batches as are there, together they take
at least

    f(T_H) + slope (S_H + O_H) + a T_y + slope S_y,    f(T) = a T + min(min over T' >= T of (B(T') - a T'), n c)

with n = max(2, T_H / capacity rounded up): either one micro-batch holds all, or n and more do. O_H: of the longest
sequence, and of every one with which those so far need one micro-batch more, as some micro-batch has none longer
than it. Of what a replica takes, this is affine in y; without y, the highest of all lines is g(H).

**All replicas.** D Z is at least the sum of the first, and Z at least the largest g, so with any theta in [0, 1]

    Z >= min over ways of (theta max_r g(H_r) + (1 - theta) / D sum_r (f + slope (S + O))(H_r))
         + (1 - theta) / D sum over y of (a T_y + slope S_y),

a linear bound of the group, as those of ``work``. A little theta keeps all long ones from one replica, which
would have fewer last tiles in all. Ways are told apart but for the replicas' names; of more than can be listed the
longest ones are whole, and the others are y.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from milpplan.lengths.bounds.work_bounds import LinearBounds
from milpplan.lengths.candidates import SizedCandidate
from milpplan.lengths.cost_tables import Tables, hull_below, line_of
from milpplan.simulation.layout_columns import FloatArray, IntArray

# Most ways to put sequences on replicas, and most sequences.
_MAX_WAYS, MAX_WHOLE = 35_000, 24
MOST_IN_ONE_PIPELINE, MOST_IN_PIPELINES = 7, 6
# Shares of the capacity at which lines are highest; weights of the replica that takes longest.
_LOADS = (1.0, 0.25)
_THETAS = (1.0, 0.1)
# Parts of the others for which a bound is kept if it is the highest.
_PARTS = (0.0, 0.02, 0.1, 0.3, 1.0)
# What sums of floats may add.
_SAFETY = 1.0 - 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class _Ways:
    """Ways [w] to put sequences on replicas: each replica's ``grains`` [w, D], ``attention`` and last tiles
    ``once`` [2, w, D] ns by phase; replicas in use ``used`` [w]."""

    grains: IntArray
    attention: FloatArray
    once: FloatArray
    used: IntArray

    @staticmethod
    def none(num_replicas: int) -> _Ways:
        """Nothing anywhere."""
        return _Ways(
            np.zeros((1, num_replicas), np.int64),
            np.zeros((2, 1, num_replicas)),
            np.zeros((2, 1, num_replicas)),
            np.zeros(1, np.int64),
        )

    def with_one(self, grains: int, attention: FloatArray, once: FloatArray, max_quanta: int) -> _Ways:
        """With one more sequence, no longer than those so far, on every replica in use or the first that is not;
        ``attention`` and ``once`` [2] are its own."""
        size = self.grains.shape[1]
        rows, places = np.nonzero(np.arange(size) <= self.used[:, None])
        ways = np.arange(len(rows))
        total, cores, tiles = self.grains[rows], self.attention[:, rows], self.once[:, rows]
        before = -(-total[ways, places] // max_quanta)
        total[ways, places] += grains
        more = -(-total[ways, places] // max_quanta) - before
        cores[:, ways, places] += attention[:, None]
        tiles[:, ways, places] += once[:, None] * more
        return _Ways(total, cores, tiles, np.maximum(self.used[rows], places + 1))


@dataclass(frozen=True, slots=True, eq=False)
class AffinePhase:
    """One phase in one way: a micro-batch of T grains takes at least ``constant`` + ``slope`` T and ``factor`` of
    its attention; ``above`` [G + 1] is the least of what those of at least T grains take beyond ``slope`` T."""

    factor: float
    constant: float
    slope: float
    above: FloatArray

    def at(self, grains: IntArray) -> FloatArray:
        """f of the module, [...] ns; nothing where there is nothing."""
        # Many ways hold as much.
        some = np.arange(int(grains.max(initial=0)) + 1)
        most = len(self.above) - 1
        number = np.maximum(2, -(-some // most))
        one = np.where(some <= most, self.above[np.minimum(some, most)], np.inf)
        found = self.slope * some + np.minimum(one, number * self.constant)
        found[0] = 0.0
        return np.asarray(found[grains])


def lines(tables: Tables, stage: int, phase: int, max_quanta: int) -> tuple[list[AffinePhase], list[FloatArray]]:
    """Lines of a phase on a stage; and for each what micro-batches of at least so many grains take, [G + 1]."""
    found, least = [], []
    for factor, base in zip(tables.slopes, tables.values([stage], phase, max_quanta), strict=True):
        hull = hull_below(base)
        rising = np.minimum.accumulate(base[::-1])[::-1]
        number = np.arange(1, max_quanta + 1)
        for constant, slope in dict.fromkeys(line_of(hull, max(1.0, at * max_quanta)) for at in _LOADS):
            above = np.minimum.accumulate((base - slope * number)[::-1])[::-1]
            found.append(AffinePhase(factor, constant, slope, np.append(above[:1], above)))
            least.append(np.append(rising[:1], rising))
    return found, least


def highest(lines: list[AffinePhase], least: list[FloatArray], grains: IntArray, cores: FloatArray) -> FloatArray:
    """g of the module in one phase, [...] ns: ``cores`` is the attention with last tiles."""
    found = np.zeros(grains.shape)
    some = np.arange(int(grains.max(initial=0)) + 1)
    for factor in {line.factor for line in lines}:
        mine = [place for place, line in enumerate(lines) if line.factor == factor]
        most = len(least[mine[0]]) - 1
        number = np.maximum(2, -(-some // most))
        parts = np.max([lines[one].constant * number + lines[one].slope * some for one in mine], axis=0)
        one = np.where(some <= most, least[mine[0]][np.minimum(some, most)], np.inf)
        table = np.minimum(one, parts)
        table[0] = 0.0
        found = np.maximum(found, table[grains] + factor * cores)
    return found


def max_exclusive(one: SizedCandidate) -> int:
    """How many sequences can be put on a strategy's replicas, or in the places of a pipeline, in no more ways than
    are listed."""
    layout = one.candidate.layout
    if layout.pp > 1:
        return MOST_IN_ONE_PIPELINE if layout.dp == 1 else MOST_IN_PIPELINES
    # Ways by the replicas in use.
    used, number = np.eye(1, layout.dp)[0], 1
    while number < MAX_WHOLE:
        used = used * np.arange(1, layout.dp + 1) + np.append(0.0, used[:-1])
        if used.sum() > _MAX_WAYS:
            break
        number += 1
    return number


def exclusive_bounds(tables: Tables, one: SizedCandidate, max_quanta: int, number: int) -> LinearBounds:
    """Bounds of groups that hold the ``number`` longest sequences of the workload, at most ``most_whole``; of a
    strategy of one stage whose micro-batches hold up to ``most_grains``, and the longest sequence."""
    load, size = tables.load, one.candidate.layout.dp
    each = load.lengths // load.token_quantum
    kernels = np.stack([tables.kernels([0], phase) for phase in (0, 1)])
    phases = [lines(tables, 0, phase, max_quanta) for phase in (0, 1)]
    ways, held = _Ways.none(size), np.zeros(len(each))
    for place in longest(tables, number):
        ways = ways.with_one(int(each[place]), kernels[:, 0, place], kernels[:, 1, place], max_quanta)
        held[place] += 1.0
    shares, constants = _rows(ways, phases, kernels[:, 0], each, held)
    return kept_bounds(shares, constants, held, tables, max_quanta)


def longest(tables: Tables, number: int) -> list[int]:
    """Which lengths the ``number`` longest sequences of the workload have, the longest first."""
    counts = tables.load.counts
    found: list[int] = np.repeat(np.arange(len(counts)), counts)[::-1][:number].tolist()
    return found


def kept_bounds(
    shares: FloatArray, constants: FloatArray, held: FloatArray, tables: Tables, max_quanta: int
) -> LinearBounds:
    """The first bound, and those that are highest for ``held`` [n] sequences with some part of the others."""
    load = tables.load
    totals = np.array([shares @ (held + part * (load.counts - held)) + constants for part in _PARTS])
    kept = sorted({0, *totals.argmax(axis=1).tolist()})
    table = shares[kept] * _SAFETY
    table[:, load.lengths > max_quanta * load.token_quantum] = np.inf
    return LinearBounds(table, constants[kept] * _SAFETY)


def _rows(
    ways: _Ways,
    phases: list[tuple[list[AffinePhase], list[FloatArray]]],
    attention: FloatArray,
    each: IntArray,
    held: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Shares [t, n] and constants [t] of groups that hold ``held`` [n] in one of the ways, the first without
    shares; ``attention`` [2, n] ns."""
    size = ways.grains.shape[1]
    cores = ways.attention + ways.once
    replicas = [highest(*phases[phase], ways.grains, cores[phase]) for phase in (0, 1)]
    most = (replicas[0] + replicas[1]).max(axis=1)
    sums = [
        [(line.at(ways.grains) + line.factor * cores[phase]).sum(axis=1) for line in phases[phase][0]]
        for phase in (0, 1)
    ]
    rows = []
    for theta in _THETAS:
        pairs = product(range(len(sums[0])), range(len(sums[1]))) if theta < 1.0 else [(0, 0)]
        for ahead, back in pairs:
            part = (1.0 - theta) / size
            chosen = phases[0][0][ahead], phases[1][0][back]
            least = float((theta * most + part * (sums[0][ahead] + sums[1][back])).min())
            shares = part * sum(
                line.slope * each + line.factor * attention[phase] for phase, line in enumerate(chosen)
            )
            rows.append((np.asarray(shares), least - float(shares @ held)))
    return np.array([share for share, _ in rows]), np.array([constant for _, constant in rows])
