"""How much work replicas of one kind do at most within a time, the less the longer the longest sequence they hold.

A pipeline waits around a micro-batch that is longer than the others. ``longest.long_bound`` says what a replica
takes at least for a load if one of its micro-batches holds a sequence of some length, whatever their numbers: one
of several lines in the load. So within a time Z it does at most F_k(Z), the largest load that one of these lines
allows, if it holds length k or a longer one, and at most H(Z), that of the slots' cuts (``cuts``) or 0, anyway; D
replicas, one of them with such a sequence, do at most F_k(Z) + (D - 1) H(Z).

**For times from lo to hi** the master needs one row of them all. With A the slope of the chord of H, every line
W <= (Z - constant) / slope is at most A Z + b on the interval for b = the larger of its excesses over A Z at both
ends. H takes the best of its cuts in each slot and the worst slot, F_k its worst line. So for every group with a
time between lo and hi that holds length k, W <= D A Z + b_k + (D - 1) b_0, with b_0 that of H and b_k that of F_k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.groups.bounds.last_stage import MAX_MICRO_BATCHES, LoadBound, MicroBatchCountRange
from milpplan.groups.bounds.linear_bounds import PathBound
from milpplan.groups.bounds.long_sequence import LongSequenceBound, long_bound
from milpplan.groups.bounds.path_duals import SCALE_BITS
from milpplan.groups.bounds.path_mixtures import StageLoads
from milpplan.groups.bounds.pipeline_bounds import CountCuts, PipelineCuts
from milpplan.groups.problem import Kind
from milpplan.groups.strategies import FloatArray, Int64Array

# Programs of a long sequence: some at the load of the others, more at that which it leaves.
_EFFORTS = (24, 100)
# Programs stop where the bound is this far above the times that count.
_ENOUGH = 1.05
# What floats may add.
_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class CapacityRow:
    """``W <= slope * Z + room`` for the work W (ns of a stage, all replicas) of a kind that holds a length or a
    longer one, for pairs (index of the length, room), ascending; with ``plain`` whatever it holds."""

    slope: float
    plain: float
    rooms: tuple[tuple[int, float], ...]

    def after(self, time_ns: int, held: Int64Array, kind: Kind) -> CapacityRow:
        """For replicas that take so much longer than this as a packing of the sequences ``held`` [K] that takes
        ``time_ns``: no bound, but nearer to what packings take."""
        longest = int(np.flatnonzero(held).max(initial=-1))
        if longest < 0:
            return self
        left = min([self.plain, *(room for length, room in self.rooms if length <= longest)])
        work = float(held @ kind.units) * kind.pipeline.parts
        less = self.slope * time_ns - (work - left)
        return CapacityRow(
            self.slope, self.plain - less, tuple((length, room - less) for length, room in self.rooms)
        )


class IdleTimeBound:
    """What is known of one kind of pipeline: its slots, and what it takes around sequences of lengths learned."""

    def __init__(self, kind: Kind, cuts: PipelineCuts) -> None:
        self._kind = kind
        self._cuts = cuts
        self._stages = stage_loads(kind)
        self._slots = cuts.slots
        self._long: dict[int, LongSequenceBound] = {}

    def learn(self, length: int, low_ns: float, high_ns: float) -> bool:
        """Solve programs around the length of this index for times in the interval; whether that is new."""
        if length in self._long:
            return False
        kind, middle = self._kind, (low_ns + high_ns) / 2
        if not self._long and kind.num_replicas > 1:
            # Beside a replica with a long sequence the others' bound counts, at the load that they have.
            self._slots = self._cuts.near(_most_within(self._slots, high_ns, kind.total_units))
        least = float(kind.units[length] * kind.pipeline.parts)
        load = _most_within(self._slots, middle, kind.total_units) * kind.pipeline.parts
        for effort in _EFFORTS:
            load = max(load, least, 1.0)
            plain = _plain(kind, self._slots, load)
            enough = _ENOUGH * high_ns
            found = long_bound(self._stages, kind.pipeline.num_stages, plain, least, load, enough, effort)
            whole = float(kind.total_units * kind.pipeline.parts)
            load = min(whole, float(_lines_of(found, np.array([middle]), whole).max()))
        self._long[length] = found
        return True

    def room(self, low_ns: float, high_ns: float) -> CapacityRow:
        """The module's row for times in the interval."""
        kind, ends = self._kind, np.array([low_ns, high_ns])
        whole = float(kind.total_units * kind.pipeline.parts)
        slots = [_loads_of(slot, ends, kind.total_units) * kind.pipeline.parts for slot in self._slots]
        most = np.max([lines.min(axis=0) for lines in slots], axis=0)
        # Any slope will do, the chord's is the best; it may be anything where few sequences are left.
        slope = float(most[1] - most[0]) / max(1.0, high_ns - low_ns)
        slope = slope if 0.1 < slope < 10.0 else 1.0
        # A replica may stay empty, too, and does nothing then.
        plain = max(-slope * low_ns, *(float((lines - slope * ends).max(axis=1).min()) for lines in slots))
        rooms, last = [], plain
        for length, long in sorted(self._long.items()):
            lines = _lines_of(long, ends, whole)
            # A longer sequence leaves no more room than a shorter one.
            last = min(last, float((lines - slope * ends).max()))
            rooms.append((length, last + (kind.num_replicas - 1) * plain))
        return CapacityRow(kind.num_replicas * slope, kind.num_replicas * plain, tuple(rooms))


def stage_loads(kind: Kind) -> StageLoads:
    """The kind's equal stages as ``unequal`` has them; loads in ns of a stage."""
    pipeline = kind.pipeline
    empty = float(pipeline.micro_batch_units)
    most = np.diff([0.0, *(float(kind.most_units(number)) for number in range(1, MAX_MICRO_BATCHES))])
    return StageLoads(
        np.asarray(kind.units * float(pipeline.parts), np.float64),
        empty * pipeline.parts,
        (pipeline.forward_parts / pipeline.parts, pipeline.backward_parts / pipeline.parts),
        (empty * pipeline.forward_parts, empty * pipeline.backward_parts),
        pipeline.transfer_ns,
        np.maximum.accumulate(most[::-1])[::-1] * pipeline.parts,
    )


def _loads_of(slot: CountCuts, times: FloatArray, whole: float) -> FloatArray:
    """Loads in units, ``whole`` at most of all, that every cut of a slot allows at ``times`` [n], [cuts, n]."""
    lines = [(one.constant / 2.0**SCALE_BITS, one.slope / 2.0**SCALE_BITS) for one in slot.cuts]
    return _allowed(lines, times, whole)


def _lines_of(long: LongSequenceBound, times: FloatArray, whole: float) -> FloatArray:
    """Loads in ns, ``whole`` at most of all, that every line allows at ``times`` [n], [lines, n]."""
    return _allowed([(one.constant, one.slope) for one in long.bounds], times, whole)


def _allowed(lines: Sequence[tuple[float, float]], times: FloatArray, whole: float) -> FloatArray:
    """Loads for which (constant, slope) are within ``times`` [n], [lines, n]; where one does not rise, all there
    is at all times, if at any, or less than nothing."""
    constants, slopes = np.array(lines).T[..., None]
    left = times / (1.0 - _SLACK) - constants
    flat = np.where(left.max(axis=1, keepdims=True) >= 0.0, whole, -whole)
    return np.where(slopes > 0.0, left / np.where(slopes > 0.0, slopes, 1.0), flat)


def _most_within(slots: tuple[CountCuts, ...], time_ns: float, whole: float) -> float:
    """The largest load of a replica within a time, units."""
    return max(0.0, *(float(_loads_of(slot, np.array([time_ns]), whole).min()) for slot in slots))


def _plain(kind: Kind, slots: tuple[CountCuts, ...], load: float) -> LoadBound:
    """The slots' cuts that are highest at a load (ns), as lines in it."""
    parts, ranges = kind.pipeline.parts, []
    for slot in slots:
        cut = max(slot.cuts, key=lambda one: one.at(load / parts))
        bound = PathBound(cut.constant / 2.0**SCALE_BITS, cut.slope / 2.0**SCALE_BITS / parts)
        number = slot.num_micro_batches
        ranges.append(MicroBatchCountRange(number, None if slot.open_ended else number, bound, True))
    if not slots[-1].open_ended:
        # No replica has more micro-batches; windows of more still need some bound.
        ranges.append(MicroBatchCountRange(number + 1, None, bound, True))
    return LoadBound(tuple(ranges))
