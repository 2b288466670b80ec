"""Lower bounds of a batch on a pipeline in milliseconds, from mixtures of paths learned before.

``groups.bounds.last_stage`` and ``long_sequence`` solve programs for a workload. A mixture of paths from such a
program bounds any pipeline and any sequences. So ``PipelineBound`` keeps the mixtures for a few loads, in numbers
of full micro-batches, and for a few lengths of the longest sequence, and evaluates them for the batch at hand: its
lines (``stage_lines.stage_loads``), its heaviest sequences, its longest one. No program is solved for a batch.

 - *Ranges* cover all numbers of micro-batches of a replica, each with its mixture; a load has the bound of the
   range with the lowest value (``last_stage.LoadBound``).
 - *Boxes* cover all numbers ahead of the longest sequence's micro-batch and behind it, each with its window's
   mixture; D replicas with it on one of them take at least ``long_sequence.group_ns``.

The mixtures of the nearest loads are evaluated, and the best one counts: each holds by itself.
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
from milpplan.lengths.bounds.work_bounds import latencies, ramp
from milpplan.lengths.candidates import SizedCandidate
from milpplan.lengths.cost_tables import Load, Tables
from milpplan.simulation.layout_columns import IntArray

# Loads for ranges and boxes, in full micro-batches of a replica; lengths of the longest sequence as shares of a
# full one.
_LOADS = (1.0, 1.7, 3.0, 5.0, 8.0, 12.0, 18.0, 27.0, 40.0)
_BOX_LOADS, _SHARES = (1.5, 5.0, 16.0), (0.3, 0.65, 1.0)
# Share of a full micro-batch at which lines are highest.
_AT = 0.25
# Number of programs for the ranges of a load.
_EFFORT = 16
# First numbers of the ranges; beyond the last one the last stage's work is the bound.
_FIRSTS = (1, 2, 3, 4, 6, 8, 11, 16, 22, 32, 45, 64, 91, MAX_MICRO_BATCHES)
# Ends of the numbers ahead of the longest and behind it; the last side is open.
_EDGES = (0, 1, 2, 4, 7, 12)
# Number of nearest loads whose mixtures are evaluated.
_NEAREST = 2


@dataclass(frozen=True, slots=True, eq=False)
class _Range:
    """Numbers ``first`` to ``last`` of micro-batches, with a mixture that holds for them, if there is one."""

    first: int
    last: int
    mixture: Mixture | None = None

    @property
    def is_solved(self) -> bool:
        """True if the mixture was found for exactly these numbers."""
        return self.mixture is not None and self.mixture.window == Window.of(self.first, self.last)

    def bound(self, stages: StageLoads, ramp_ns: float, load: float) -> PathBound:
        """Return the tightest bound of stages at a load."""
        work = _work(stages, ramp_ns, self.first)
        if self.mixture is None:
            return work
        return max(work, self.mixture.bound(stages, load), key=lambda bound: bound.at(load))


@dataclass(frozen=True, slots=True, eq=False)
class _Ranges:
    """Consecutive ranges of the number of micro-batches, from 1 on."""

    parts: tuple[_Range, ...]

    @staticmethod
    def of(stages: StageLoads, num_stages: int, load: float) -> _Ranges:
        """Solve a program for, or halve, the range of the lowest bound at a load, some times."""
        ranges = [_Range(first, end - 1) for first, end in pairwise(_FIRSTS)]
        for _ in range(_EFFORT):
            lowest = min(ranges, key=lambda part: part.bound(stages, 0.0, load).at(load))
            if lowest.is_solved and lowest.first < lowest.last:
                ranges.remove(lowest)
                middle = (lowest.first + lowest.last) // 2
                ranges += [replace(lowest, last=middle), replace(lowest, first=middle + 1)]
                lowest = min(ranges[-2:], key=lambda part: part.bound(stages, 0.0, load).at(load))
            if lowest.is_solved:
                break
            ranges.remove(lowest)
            window = Window.of(lowest.first, lowest.last)
            ranges.append(replace(lowest, mixture=best_mixture(stages, num_stages, window, load)))
        return _Ranges(tuple(sorted(ranges, key=lambda part: part.first)))

    def at(self, stages: StageLoads, ramp_ns: float, load: float) -> LoadBound:
        """Return the tightest bound of stages at a load."""
        ranges = [
            MicroBatchCountRange(part.first, part.last, part.bound(stages, ramp_ns, load)) for part in self.parts
        ]
        return LoadBound((*ranges, MicroBatchCountRange(_FIRSTS[-1], None, _work(stages, ramp_ns, _FIRSTS[-1]))))


def _work(stages: StageLoads, ramp_ns: float, number: int) -> PathBound:
    """Return the bound by the last stage's work with ``number`` or more micro-batches."""
    return PathBound(stages.last_ns * number + ramp_ns, 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class _Boxes:
    """Mixtures of windows that cover all numbers on both sides of the longest sequence's micro-batch."""

    mixtures: tuple[Mixture, ...]

    @staticmethod
    def of(stages: StageLoads, num_stages: int, load: float, longest_load: float) -> _Boxes:
        """Find the mixtures that are tight at a load whose longest sequence is ``longest_load``."""
        ends = [(first, last - 1, False) for first, last in pairwise(_EDGES)]
        sides = [*ends, (_EDGES[-1], _EDGES[-1], True)]
        windows = [Window(ahead[:2], behind[:2], (ahead[2], behind[2])) for ahead, behind in product(sides, sides)]
        simple = stages.with_kinds(1)
        return _Boxes(tuple(best_mixture(simple, num_stages, ahead, load, longest_load) for ahead in windows))

    def at(self, stages: StageLoads, plain: LoadBound, load: float, longest_load: float) -> LongSequenceBound:
        """Return the tightest bound of stages at a load, no less than ``plain`` for the numbers of a box."""
        bounds: list[PathBound] = []
        for mixture in self.mixtures:
            window = mixture.window
            ranges = [count_range for count_range in plain.ranges if (count_range.last or np.inf) >= window.fewest]
            if not any(window.open):
                ranges = [count_range for count_range in ranges if count_range.first <= window.number]
            bound = mixture.bound(stages, load, longest_load)
            is_better = bound.at(load) > min(count_range.bound.at(load) for count_range in ranges)
            bounds += [bound] if is_better else [count_range.bound for count_range in ranges]
        return LongSequenceBound(longest_load, tuple(dict.fromkeys(bounds)))


@dataclass(frozen=True, eq=False)
class PipelineBound:
    """Lower bounds of batches under one pipelined strategy."""

    tables: Tables
    """Cost tables of all lengths that may occur."""
    strategy: SizedCandidate
    max_quanta: int
    """Capacity of a micro-batch."""
    ranges: tuple[_Ranges, ...]
    boxes: tuple[tuple[_Boxes, ...], ...]

    @staticmethod
    def of(tables: Tables, strategy: SizedCandidate, max_quanta: int) -> PipelineBound:
        """Learn mixtures from the workload of ``tables``, whose sequences are typical."""
        layout, load = strategy.candidate.layout, tables.load
        num_stages = min(layout.pp, MOST_STAGES)
        typical = _held(tables, np.flatnonzero(load.counts), load.counts[load.counts > 0])
        stages = stage_loads(typical, layout.pp, max_quanta, max(1.0, _AT * max_quanta))
        full_load = float(typical.load.counts @ stages.last) * max_quanta / typical.load.num_quanta
        even_stages = replace(stages, most=np.full(len(stages.most), full_load))
        ranges = [_Ranges.of(even_stages, num_stages, num_full * full_load) for num_full in _LOADS]
        boxes = [
            tuple(_Boxes.of(even_stages, num_stages, num_full * full_load, share * full_load) for share in _SHARES)
            for num_full in _BOX_LOADS
        ]
        return PipelineBound(tables, strategy, max_quanta, tuple(ranges), tuple(boxes))

    def group_ns(self, lengths: IntArray, counts: IntArray) -> float:
        """Return the minimum time of ``counts`` [k] sequences of ascending ``lengths`` [k], without reduction and
        finish.

        The lengths in tokens are among those of the tables. Lengths that do not fit are not checked.
        """
        layout = self.strategy.candidate.layout
        tables = _held(self.tables, np.searchsorted(self.tables.load.lengths, lengths), counts)
        stages = stage_loads(tables, layout.pp, self.max_quanta, max(1.0, _AT * self.max_quanta))
        ramp_ns = ramp(tables, layout.pp, self.max_quanta)
        load = float(counts @ stages.last) / layout.dp
        longest_load = float(stages.last[-1])
        unit = float(counts @ stages.last) * self.max_quanta / tables.load.num_quanta
        bounds = [
            self.ranges[index].at(stages, ramp_ns, load) for index in _nearest(_LOADS, load / unit)[:_NEAREST]
        ]
        plain = max(bounds, key=lambda index: index.at(load))
        bounds_ns = [plain.at(load), float(latencies(tables, self.strategy, self.max_quanta)[-1])]
        for index in _nearest(_BOX_LOADS, load / unit)[:_NEAREST]:
            boxes = self.boxes[index][_nearest(_SHARES, longest_load / unit)[0]]
            long_bound = boxes.at(stages, plain, max(load, longest_load), longest_load)
            bounds_ns.append(float(group_ns(long_bound, plain, layout.dp, np.array([load]))[0]))
        return max(bounds_ns)


def _held(tables: Tables, indices: IntArray, counts: IntArray) -> Tables:
    """Return the tables restricted to ``counts`` [k] sequences of the lengths with indices ``indices`` [k]."""
    load = Load(tables.load.lengths[indices], counts, tables.load.token_quantum, tables.load.rules)
    return replace(tables, load=load, cores=tables.cores[..., indices])


def _nearest(ratios: Sequence[float], value: float) -> list[int]:
    """Return the indices of the ratios, the nearest first."""
    return sorted(range(len(ratios)), key=lambda index: abs(np.log(ratios[index] / value)))
