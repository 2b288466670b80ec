"""Capacity of the replicas of one kind within a time, reduced by the idle time around their longest sequence.

A pipeline waits around a micro-batch that is longer than the others. ``long_sequence.long_bound`` bounds the time
of a replica for a load if one of its micro-batches holds a sequence of some length, whatever their numbers: by one
of several lines in the load. So within a time Z it does at most F_k(Z), the largest load that one of these lines
allows, if it holds length k or a longer one, and at most H(Z), that of the cuts (``pipeline_bounds``) or 0,
anyway; D replicas, one of them with such a sequence, do at most F_k(Z) + (D - 1) H(Z).

**For times from lo to hi** the assignment program needs one row for all times. With A the slope of the chord of H,
every line W <= (Z - constant) / slope is at most A Z + b on the interval for b = the larger of its excesses over
A Z at both ends. H takes the best of its cuts in each slot and the worst slot, F_k its worst line. So for every
group with a time between lo and hi that holds length k, W <= D A Z + b_k + (D - 1) b_0, with b_0 that of H and b_k
that of F_k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from milpplan.lengths.bounds.long_sequence import (
    MAX_MICRO_BATCHES,
    LoadBound,
    LongSequenceBound,
    MicroBatchCountRange,
    long_bound,
)
from milpplan.lengths.bounds.pipeline_bounds import SCALE_BITS, CountCuts, PathBound, PipelineCuts, StageLoads
from milpplan.lengths.tabled import (
    FloatArray,
    Int64Array,
    Kind,
)

# Number of programs of a long sequence: first at the load of the other replicas, then at the load that it allows.
_EFFORTS = (24, 100)
# Programs stop where the bound exceeds the interval of times by this factor.
_ENOUGH = 1.05
# Relative error that sums of floats may add.
_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class CapacityRow:
    """Row ``W <= slope * Z + capacity`` for the work W (ns of a stage, all replicas) of a kind.

    ``capacities`` are pairs (index of a length, capacity), ascending, for replicas that hold the length or a
    longer one; ``capacity_of_any`` is the capacity whatever they hold.
    """

    slope: float
    capacity_of_any: float
    capacities: tuple[tuple[int, float], ...]

    def after(self, time_ns: int, counts: Int64Array, kind: Kind) -> CapacityRow:
        """Shift the row to replicas as slow as a packing of the sequences ``counts`` [K] that takes ``time_ns``.

        The result is no bound, but nearer to the times of packings.
        """
        longest = int(np.flatnonzero(counts).max(initial=-1))
        if longest < 0:
            return self
        capacity = min(
            [
                self.capacity_of_any,
                *(own_capacity for length, own_capacity in self.capacities if length <= longest),
            ]
        )
        work = float(counts @ kind.units) * kind.pipeline.parts
        excess = self.slope * time_ns - (work - capacity)
        return CapacityRow(
            self.slope,
            self.capacity_of_any - excess,
            tuple((length, own_capacity - excess) for length, own_capacity in self.capacities),
        )


class IdleTimeBound:
    """Bounds of one kind of pipeline: its slots, and idle time around sequences of the learned lengths."""

    def __init__(self, kind: Kind, cuts: PipelineCuts) -> None:
        self._kind = kind
        self._cuts = cuts
        self._stages = stage_loads(kind)
        self._slots = cuts.slots
        self._long: dict[int, LongSequenceBound] = {}

    def learn(self, length: int, low_ns: float, high_ns: float) -> bool:
        """Solve programs around the length of this index for times in the interval.

        Returns:
            False if the length was learned before.
        """
        if length in self._long:
            return False
        kind, middle = self._kind, (low_ns + high_ns) / 2
        if not self._long and kind.num_replicas > 1:
            # Beside a replica with a long sequence, the other replicas' cuts count, at the load that they have.
            self._slots = self._cuts.near(_largest_load(self._slots, high_ns, kind.total_units))
        longest_ns = float(kind.units[length] * kind.pipeline.parts)
        load = _largest_load(self._slots, middle, kind.total_units) * kind.pipeline.parts
        for effort in _EFFORTS:
            load = max(load, longest_ns, 1.0)
            plain = _plain(kind, self._slots, load)
            cutoff_ns = _ENOUGH * high_ns
            long = long_bound(self._stages, kind.pipeline.num_stages, plain, longest_ns, load, cutoff_ns, effort)
            whole = float(kind.total_units * kind.pipeline.parts)
            load = min(whole, float(_lines_of(long, np.array([middle]), whole).max()))
        self._long[length] = long
        return True

    def capacity_row(self, low_ns: float, high_ns: float) -> CapacityRow:
        """Return the module's row for times in the interval."""
        kind, ends = self._kind, np.array([low_ns, high_ns])
        whole = float(kind.total_units * kind.pipeline.parts)
        slots = [_loads_of(slot, ends, kind.total_units) * kind.pipeline.parts for slot in self._slots]
        largest_loads = np.max([lines.min(axis=0) for lines in slots], axis=0)
        # Any slope gives a valid row, the chord's the best; with few sequences the chord may be degenerate.
        slope = float(largest_loads[1] - largest_loads[0]) / max(1.0, high_ns - low_ns)
        slope = slope if 0.1 < slope < 10.0 else 1.0
        # A replica may also stay empty, and does no work then.
        capacity_of_any = max(
            -slope * low_ns, *(float((lines - slope * ends).max(axis=1).min()) for lines in slots)
        )
        capacities, last = [], capacity_of_any
        for length, long in sorted(self._long.items()):
            lines = _lines_of(long, ends, whole)
            # A longer sequence leaves at most the capacity that a shorter one leaves.
            last = min(last, float((lines - slope * ends).max()))
            capacities.append((length, last + (kind.num_replicas - 1) * capacity_of_any))
        return CapacityRow(kind.num_replicas * slope, kind.num_replicas * capacity_of_any, tuple(capacities))


def stage_loads(kind: Kind) -> StageLoads:
    """Return the kind's equal stages as ``StageLoads``; loads in ns of a stage."""
    pipeline = kind.pipeline
    empty = float(pipeline.micro_batch_units)
    unit_increments = np.diff([0.0, *(float(kind.most_units(number)) for number in range(1, MAX_MICRO_BATCHES))])
    return StageLoads(
        np.asarray(kind.units * float(pipeline.parts), np.float64),
        empty * pipeline.parts,
        (pipeline.forward_parts / pipeline.parts, pipeline.backward_parts / pipeline.parts),
        (empty * pipeline.forward_parts, empty * pipeline.backward_parts),
        pipeline.transfer_ns,
        np.maximum.accumulate(unit_increments[::-1])[::-1] * pipeline.parts,
    )


def _loads_of(slot: CountCuts, times: FloatArray, whole: float) -> FloatArray:
    """Return the loads, at most ``whole`` units, that every cut of a slot allows at ``times`` [n], [cuts, n]."""
    lines = [(cut.constant / 2.0**SCALE_BITS, cut.slope / 2.0**SCALE_BITS) for cut in slot.cuts]
    return _allowed(lines, times, whole)


def _lines_of(long: LongSequenceBound, times: FloatArray, whole: float) -> FloatArray:
    """Return the loads in ns, at most ``whole``, that every line allows at ``times`` [n], [lines, n]."""
    return _allowed([(bound.constant, bound.slope) for bound in long.bounds], times, whole)


def _allowed(lines: Sequence[tuple[float, float]], times: FloatArray, whole: float) -> FloatArray:
    """Return the loads for which lines (constant, slope) stay within ``times`` [n], [lines, n].

    A line without a slope allows ``whole`` at all times if at any, else a negative load.
    """
    constants, slopes = np.array(lines).T[..., None]
    slack = times / (1.0 - _SLACK) - constants
    flat = np.where(slack.max(axis=1, keepdims=True) >= 0.0, whole, -whole)
    return np.where(slopes > 0.0, slack / np.where(slopes > 0.0, slopes, 1.0), flat)


def _largest_load(slots: tuple[CountCuts, ...], time_ns: float, whole: float) -> float:
    """Return the largest load of a replica within a time, units."""
    return max(0.0, *(float(_loads_of(slot, np.array([time_ns]), whole).min()) for slot in slots))


def _plain(kind: Kind, slots: tuple[CountCuts, ...], load: float) -> LoadBound:
    """Return the slots' highest cuts at a load (ns), as lines in it."""
    parts, ranges = kind.pipeline.parts, []
    for slot in slots:
        cut = max(slot.cuts, key=lambda slot_cut: slot_cut.at(load / parts))
        bound = PathBound(cut.constant / 2.0**SCALE_BITS, cut.slope / 2.0**SCALE_BITS / parts)
        number = slot.num_micro_batches
        ranges.append(MicroBatchCountRange(number, None if slot.open_ended else number, bound, True))
    if not slots[-1].open_ended:
        # No replica has more micro-batches, but windows of more still need a bound.
        ranges.append(MicroBatchCountRange(number + 1, None, bound, True))
    return LoadBound(tuple(ranges))
