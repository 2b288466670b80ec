"""What a batch takes at least on a pipeline, in milliseconds: mixtures of paths learned before.

``groups.unequal`` and ``longest`` solve programs for a workload. A mixture of paths that one of them found bounds
any pipeline and any sequences, so ``PipelineBound`` keeps the mixtures of a few loads, in numbers of full
micro-batches, and of a few lengths of the longest sequence, and evaluates them for the batch at hand: its own
lines (``tables.stage_loads``), its own heaviest sequences, its own longest one. No program is solved for a batch.

 - *Ranges* cover all numbers of micro-batches of a replica, each with its mixture; a load has the bound of the one
   that gives least (``unequal.LoadBound``).
 - *Boxes* cover all numbers ahead of the longest sequence's micro-batch and behind it, each with its window's
   mixture; D replicas with it on one of them take at least ``longest.group_ns``.

What is learned at the nearest loads is evaluated, and the best of it counts: each holds by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np

from milpplan.groups.bounds.last_stage import MAX_MICRO_BATCHES, LoadBound, MicroBatchCountRange, best_mixture
from milpplan.groups.bounds.linear_bounds import PathBound
from milpplan.groups.bounds.long_sequence import LongSequenceBound, group_ns
from milpplan.groups.bounds.micro_batch_ranges import Window
from milpplan.groups.bounds.path_mixtures import Mixture, StageLoads
from milpplan.lengths.bounds.stage_lines import MOST_STAGES, stage_loads
from milpplan.lengths.bounds.work_bounds import ramp, latencies
from milpplan.lengths.candidates import SizedCandidate
from milpplan.lengths.cost_tables import Load, Tables
from milpplan.simulation.layout_columns import IntArray

# Loads that ranges and boxes are learned for, in full micro-batches of a replica; the longest sequence as a share
# of a full one.
_LOADS = (1.0, 1.7, 3.0, 5.0, 8.0, 12.0, 18.0, 27.0, 40.0)
_BOX_LOADS, _SHARES = (1.5, 5.0, 16.0), (0.3, 0.65, 1.0)
# Lines are highest for micro-batches of this share of a full one.
_AT = 0.25
# Ranges of numbers that get programs, for a load.
_EFFORT = 16
# Where ranges begin; beyond, the last stage's work is the bound.
_FIRSTS = (1, 2, 3, 4, 6, 8, 11, 16, 22, 32, 45, 64, 91, MAX_MICRO_BATCHES)
# Where the numbers ahead of the longest and behind it are cut; the last side is open.
_EDGES = (0, 1, 2, 4, 7, 12)
# What is learned at so many of the nearest loads is evaluated.
_NEAREST = 2


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """From ``first`` to ``last`` micro-batches, and a mixture that holds for all of these, if there is one."""

    first: int
    last: int
    mixture: Mixture | None = None

    @property
    def is_solved(self) -> bool:
        """Whether the mixture is for these numbers, not for more."""
        return self.mixture is not None and self.mixture.window == Window.of(self.first, self.last)

    def bound(self, stages: StageLoads, ramp_ns: float, load: float) -> PathBound:
        """What is proved of stages, highest for a load."""
        work = _work(stages, ramp_ns, self.first)
        if self.mixture is None:
            return work
        return max(work, self.mixture.bound(stages, load), key=lambda one: one.at(load))


@dataclass(frozen=True, slots=True, eq=False)
class _Ranges:
    """Numbers of micro-batches that follow on each other, from 1 on."""

    parts: tuple[_Part, ...]

    @staticmethod
    def of(stages: StageLoads, num_stages: int, load: float) -> _Ranges:
        """What gives least for a load gets a program, or is halved."""
        parts = [_Part(first, end - 1) for first, end in pairwise(_FIRSTS)]
        for _ in range(_EFFORT):
            worst = min(parts, key=lambda one: one.bound(stages, 0.0, load).at(load))
            if worst.is_solved and worst.first < worst.last:
                parts.remove(worst)
                middle = (worst.first + worst.last) // 2
                parts += [replace(worst, last=middle), replace(worst, first=middle + 1)]
                worst = min(parts[-2:], key=lambda one: one.bound(stages, 0.0, load).at(load))
            if worst.is_solved:
                break
            parts.remove(worst)
            window = Window.of(worst.first, worst.last)
            parts.append(replace(worst, mixture=best_mixture(stages, num_stages, window, load)))
        return _Ranges(tuple(sorted(parts, key=lambda one: one.first)))

    def at(self, stages: StageLoads, ramp_ns: float, load: float) -> LoadBound:
        """What they prove of stages, highest for a load."""
        found = [MicroBatchCountRange(one.first, one.last, one.bound(stages, ramp_ns, load)) for one in self.parts]
        return LoadBound((*found, MicroBatchCountRange(_FIRSTS[-1], None, _work(stages, ramp_ns, _FIRSTS[-1]))))


def _work(stages: StageLoads, ramp_ns: float, number: int) -> PathBound:
    """The last stage's work with so many micro-batches or more."""
    return PathBound(stages.last_ns * number + ramp_ns, 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class _Boxes:
    """Mixtures of windows that cover all numbers on both sides of the longest sequence's micro-batch."""

    mixtures: tuple[Mixture, ...]

    @staticmethod
    def of(stages: StageLoads, num_stages: int, load: float, least: float) -> _Boxes:
        """Those that are highest for a load of which the longest sequence is ``least``."""
        ends = [(first, last - 1, False) for first, last in pairwise(_EDGES)]
        sides = [*ends, (_EDGES[-1], _EDGES[-1], True)]
        windows = [Window(one[:2], other[:2], (one[2], other[2])) for one, other in product(sides, sides)]
        simple = stages.with_kinds(1)
        return _Boxes(tuple(best_mixture(simple, num_stages, one, load, least) for one in windows))

    def at(self, stages: StageLoads, plain: LoadBound, load: float, least: float) -> LongSequenceBound:
        """What they prove of stages, highest for a load; no less than ``plain`` for the numbers of a box."""
        bounds: list[PathBound] = []
        for mixture in self.mixtures:
            window = mixture.window
            held = [one for one in plain.ranges if (one.last or np.inf) >= window.fewest]
            if not any(window.open):
                held = [one for one in held if one.first <= window.number]
            found = mixture.bound(stages, load, least)
            enough = found.at(load) > min(one.bound.at(load) for one in held)
            bounds += [found] if enough else [one.bound for one in held]
        return LongSequenceBound(least, tuple(dict.fromkeys(bounds)))


@dataclass(frozen=True, eq=False)
class PipelineBound:
    """Least times of batches under ``one`` strategy of pipelines, with ``tables`` of all lengths that may come,
    in micro-batches of up to ``most_grains``."""

    tables: Tables
    strategy: SizedCandidate
    max_quanta: int
    ranges: tuple[_Ranges, ...]
    boxes: tuple[tuple[_Boxes, ...], ...]

    @staticmethod
    def of(tables: Tables, one: SizedCandidate, max_quanta: int) -> PipelineBound:
        """Learned from the workload of ``tables``, whose sequences are typical."""
        layout, load = one.candidate.layout, tables.load
        num_stages = min(layout.pp, MOST_STAGES)
        typical = _held(tables, np.flatnonzero(load.counts), load.counts[load.counts > 0])
        stages = stage_loads(typical, layout.pp, max_quanta, max(1.0, _AT * max_quanta))
        full = float(typical.load.counts @ stages.last) * max_quanta / typical.load.num_quanta
        even = replace(stages, most=np.full(len(stages.most), full))
        ranges = [_Ranges.of(even, num_stages, number * full) for number in _LOADS]
        boxes = [
            tuple(_Boxes.of(even, num_stages, number * full, share * full) for share in _SHARES)
            for number in _BOX_LOADS
        ]
        return PipelineBound(tables, one, max_quanta, tuple(ranges), tuple(boxes))

    def group_ns(self, lengths: IntArray, counts: IntArray) -> float:
        """What ``counts`` [k] sequences of ascending ``lengths`` [k] (tokens, of those in the tables) take at
        least, however they are packed, without reduction and finish; nothing is said of those that do not fit."""
        layout = self.strategy.candidate.layout
        tables = _held(self.tables, np.searchsorted(self.tables.load.lengths, lengths), counts)
        stages = stage_loads(tables, layout.pp, self.max_quanta, max(1.0, _AT * self.max_quanta))
        ramp_ns = ramp(tables, layout.pp, self.max_quanta)
        load = float(counts @ stages.last) / layout.dp
        least = float(stages.last[-1])
        unit = float(counts @ stages.last) * self.max_quanta / tables.load.num_quanta
        known = [self.ranges[one].at(stages, ramp_ns, load) for one in _nearest(_LOADS, load / unit)[:_NEAREST]]
        plain = max(known, key=lambda one: one.at(load))
        found = [plain.at(load), float(latencies(tables, self.strategy, self.max_quanta)[-1])]
        for index in _nearest(_BOX_LOADS, load / unit)[:_NEAREST]:
            boxes = self.boxes[index][_nearest(_SHARES, least / unit)[0]]
            long = boxes.at(stages, plain, max(load, least), least)
            found.append(float(group_ns(long, plain, layout.dp, np.array([load]))[0]))
        return max(found)


def _held(tables: Tables, places: IntArray, counts: IntArray) -> Tables:
    """The tables of ``counts`` [k] sequences of the lengths at ``places`` [k] alone."""
    load = Load(tables.load.lengths[places], counts, tables.load.token_quantum, tables.load.rules)
    return replace(tables, load=load, cores=tables.cores[..., places])


def _nearest(known: Sequence[float], value: float) -> list[int]:
    """Indices, those of the nearest ratios first."""
    return sorted(range(len(known)), key=lambda one: abs(np.log(known[one] / value)))
